"""How parameters lie on the modes: placements, what they demand, flat buffers, splitting a model."""
