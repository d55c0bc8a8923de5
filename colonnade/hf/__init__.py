"""Models of Hugging Face's transformers. It is imported inside functions only, never with this package."""
