"""The hooks of .pre-commit-hooks.yaml: one command of aprfmt for each model file of a commit.

    python -m aprfmt.cli.pre_commit validate [OPTION]... FILE...
    python -m aprfmt.cli.pre_commit diff [--base REF] [OPTION]... FILE...

Every FILE is asked, whatever the others gave; the exit code is the worst.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from aprfmt.cli.main import main as run_command
from aprfmt.errors import UsageError

USAGE = "pre_commit: validate or diff, then options, then files"


def run_hook(argv: list[str]) -> int:
    """Return the worst exit code of `validate` or `diff`, run once for each file.

    `argv` is the hook's name, options, then files. A word that is no file is an option. UsageError
    for another name than these two.
    """
    if argv[:1] not in (["validate"], ["diff"]):
        raise UsageError(f"{USAGE}; found {argv[:1]}")
    command, rest, base = argv[0], argv[1:], "HEAD"
    if command == "diff" and "--base" in rest:
        at = rest.index("--base")
        base = "".join(rest[at + 1 : at + 2])
        del rest[at : at + 2]
    files = [text for text in rest if Path(text).is_file()]
    options = [text for text in rest if text not in files]
    codes = [0]
    for file in files:
        if command == "validate":
            codes.append(run_in_process([command, *options, "--", file]))
        else:
            codes.append(compare_with(base, file, options))
    return max(codes)


def compare_with(base: str, file: str, options: list[str]) -> int:
    """Return the exit code of `diff` between a file in commit `base` and the file as it is now.

    It is 0 for a file that the commit has not, and 2 where there is no such commit. The file passes
    git's filters, so that one in Git LFS is compared by its content. `options` are passed to
    `diff`.
    """
    commit = ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
    if subprocess.run(commit, stdout=subprocess.DEVNULL, check=False).returncode:
        print(f"aprfmt: {base}: no such commit", file=sys.stderr)
        return 2
    named = f"{base}:./{Path(file).as_posix()}"
    if subprocess.run(
        ["git", "cat-file", "-e", named], stderr=subprocess.DEVNULL, check=False
    ).returncode:
        print(f"{file}: not in {base}: nothing to compare")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder, Path(file).name)
        with old.open("wb") as out:
            subprocess.run(["git", "cat-file", "--filters", named], stdout=out, check=True)
        return run_in_process(["diff", *options, "--", str(old), file])


def run_in_process(argv: list[str]) -> int:
    """Run one command of aprfmt in this process and return its exit code."""
    print(f"$ aprfmt {' '.join(argv)}", flush=True)
    try:
        run_command(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_hook(sys.argv[1:]))
