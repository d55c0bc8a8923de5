"""Hugging Face models, and TP plans for any model. transformers is imported inside functions only, never with this package."""
