"""`plan`: estimate groups, memory, collectives and step time of a job, by running its code on fake tensors."""
