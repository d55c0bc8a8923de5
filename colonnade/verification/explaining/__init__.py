"""What a config makes of every class of parameters, in words; no process is started."""
