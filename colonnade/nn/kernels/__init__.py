"""Triton kernels; a module of this package may be imported only where Triton is installed."""
