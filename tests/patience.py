"""How long a test waits for what should come at once: it stops a hang and decides nothing else."""

PATIENCE = 600  # seconds, of the clock or of a processor; a busy machine needs a few
