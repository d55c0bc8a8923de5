"""Placements of parameters on modes, the reductions that they require, flat buffers, collectives, and splitting a model into
stages."""
