"""Communication below the training step: small messages, process groups, waits, and torch's private names."""
