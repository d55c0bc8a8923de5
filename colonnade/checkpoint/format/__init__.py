"""What lies on disk: the manifest, files of tensors, values as JSON, and boxes of elements inside a whole tensor."""
