"""Plans: tensor parallelism for a model that was not written for it, from the names of its layers."""
