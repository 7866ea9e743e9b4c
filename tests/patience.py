"""How long a test waits for an immediate event: it only ends a hang and never decides a result."""

PATIENCE = 600  # seconds, of the clock or of a processor; a busy machine needs a few
