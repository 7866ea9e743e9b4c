"""Set limits of a child process before it works on content of a file."""


def limit_resources(cpu_seconds: int, memory: int, *, total: bool = True) -> None:
    """Limit CPU time and address space of this process, if the system can.

    `cpu_seconds` counts from the start of the process; without `total` CPU time is not limited.
    `memory` is in bytes. No file can be written afterwards.
    """
    try:
        import resource
    except ImportError:  # Windows has no such module; the parent's timer still applies
        return
    for what, bound in (
        *([(resource.RLIMIT_CPU, cpu_seconds)] if total else []),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        try:
            resource.setrlimit(what, (bound, bound))
        except (ValueError, OSError):
            continue  # macOS cannot limit it; a lower hard limit stays
