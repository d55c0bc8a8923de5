"""See a job before it runs: its groups, memory, collectives and step time, from the code that runs it."""
