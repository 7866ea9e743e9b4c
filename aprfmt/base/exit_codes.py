"""The exit codes of the program: what each means; `aprfmt explain exit-codes` and docs print it.

`aprfmt.model.verdict.pronounce` chooses the code of a comparison, and
`aprfmt.base.outcome.exit_code` that of a check. Errors and signals have theirs in `cli`.
"""

EXIT_CODES: dict[int, str] = {
    0: "done, equal, passed",
    1: "the answer is no: files differ, a check failed, a divergence was found",
    2: "it could not be done: usage, unreadable, malformed or unsupported input, "
    "missing extra or device, no space, every check NOT-RUN",
    130: "interrupted (SIGINT)",
    141: "the reader of our output closed the pipe",
    143: "terminated (SIGTERM)",
}
