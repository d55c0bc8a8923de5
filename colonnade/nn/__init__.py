"""Building blocks of training that are not tied to one parallelism."""
