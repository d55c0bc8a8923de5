"""Pipeline stages of a model by its own forward pass, for models that are more than layers one after another."""
