"""Limits of the processes that run what files bring; the parent sends them with the request."""

CPU_SECONDS = 5
WALL_SECONDS = 20.0  # needed only where CPU time cannot be limited: a template cannot sleep
MEMORY = 256 << 20  # bytes of address space
OUTPUT = 4 << 20  # bytes of UTF-8
REASON = 500  # characters of a template's own error message that are shown

# Of the process that runs a tokenizer; bytes of address space, the second a byte of tokenizer.json.
ENGINE_MEMORY, ENGINE_MEMORY_EACH = 1 << 30, 32
ENGINE_OUTPUT = 64 << 20  # bytes of one answer
