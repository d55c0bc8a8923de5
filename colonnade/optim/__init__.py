"""Optimizer steps and gradient clipping: gradient norms by placement, clip methods, steps over flat buffers, and ZeRO."""
