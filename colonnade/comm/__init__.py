"""Communication other than that of gradients and activations: small messages, process groups, detection of hangs; and all uses
of torch's private names."""
