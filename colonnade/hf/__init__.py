"""Hugging Face models, and TP plans for any model. transformers is imported only inside functions."""
