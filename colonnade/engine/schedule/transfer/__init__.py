"""Transfers: which value goes from stage to stage when, and how it travels between ranks."""
