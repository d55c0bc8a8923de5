"""Jobs over two hosts, which are namespaces of this machine."""
