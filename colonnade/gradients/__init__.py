"""Gradients after backward: buckets, who owns which range of them, and how they are summed over ranks."""
