"""Gradient reduction: buckets, the slices of buckets that each rank owns (ZeRO), gradient handlers, and the transports that
sum over ranks."""
