"""`python -m tests.long {fuzz,kills,memory}`: the runs that take too long for every change.

    python -m tests.long fuzz --runs 5000000 --jobs 2 --out /tmp/fuzz
    python -m tests.long kills
    python -m tests.long memory --gigabytes 8

Their figures stand in docs/benchmarks.md. Everything is printed as JSON lines.
"""

import argparse
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long")
    what = parser.add_subparsers(dest="what", required=True)
    fuzzing = what.add_parser("fuzz", help="every fuzz target, or those named")
    fuzzing.add_argument("targets", nargs="*")
    fuzzing.add_argument("--runs", type=int, default=5_000_000, help="executions of each")
    fuzzing.add_argument("--seconds", type=int, default=0, help="at most, of each; 0: no limit")
    fuzzing.add_argument("--jobs", type=int, default=2)
    fuzzing.add_argument("--out", type=Path, required=True, help="logs, corpora and findings")
    killing = what.add_parser("kills", help="every way of publishing and every writer")
    killing.add_argument("writers", nargs="*")
    measuring = what.add_parser("memory", help="peak memory on large files, of two sizes")
    measuring.add_argument("commands", nargs="*")
    measuring.add_argument("--gigabytes", type=float, default=8, help="the smaller size")
    arguments = parser.parse_args()
    if arguments.what == "memory":
        from tests.long import memory

        return memory.main(arguments.commands, arguments.gigabytes)
    if arguments.what == "kills":
        from tests.long import kills

        return kills.main(arguments.writers)
    from tests.long import fuzz

    limits = fuzz.Limits(arguments.runs, arguments.seconds)
    return fuzz.main(arguments.targets, limits, arguments.jobs, arguments.out)


if __name__ == "__main__":
    raise SystemExit(main())
