"""Communication outside training: small messages, process groups, and torch's private names."""
