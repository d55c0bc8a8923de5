"""What ranks say to each other outside training: small messages, process groups, and torch's private names."""
