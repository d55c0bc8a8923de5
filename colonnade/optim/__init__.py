"""Optimizers and clipping: norms by placement, clip methods, and a step over flat buffers."""
