"""Who writes and who reads what: where each tensor lies in its whole, and what of it one rank saves or loads."""
