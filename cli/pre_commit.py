"""The hooks of .pre-commit-hooks.yaml: one command of aprfmt for each model of a commit.

    python -m aprfmt.cli.pre_commit validate [OPTION]... FILE...
    python -m aprfmt.cli.pre_commit diff [--base REF] [OPTION]... FILE...

A FILE stands for the model that it is part of: a shard, an index or a configuration for its folder.
Every model is asked once, whatever the others gave; the exit code is the worst.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from aprfmt.cli.main import main as run_command
from aprfmt.errors import UsageError

USAGE = "pre_commit: validate or diff, then options, then files"
_SUFFIXES = (".gguf", ".apr", ".safetensors")
_COPIES = "aprfmt"  # the folder in git's own that holds the files of the other commit


def run_hook(argv: list[str]) -> int:
    """Return the worst exit code of `validate` or `diff`, run once for each model.

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
    models = models_of_files(map(Path, files))
    if command == "validate":
        return max(
            (run_in_process([command, *options, "--", str(model)]) for model in models), default=0
        )
    return compare_with(base, models, options)


def models_of_files(files: Iterable[Path]) -> list[Path]:
    """Return the paths of the models that files are part of, each once.

    A model is a folder or a file, as every command takes it. A file of weights that is part of no
    other model is one; a text file next to no weights, such as another program's config.json, is
    part of none.
    """
    from aprfmt.fleet.model_search import model_files, models_in_folder

    found: dict[Path, None] = {}
    every: dict[Path, list[tuple[Path, set[str]]]] = {}
    for file in files:
        folder = file.parent
        if folder not in every:
            every[folder] = [
                (model, {part.name for part in model_files(model)})
                for model in models_in_folder(folder)
            ]
        owners = [model for model, names in every[folder] if file.name in names]
        if not owners and file.suffix in _SUFFIXES:
            owners = [file]
        found.update(dict.fromkeys(owners))
    return list(found)


def compare_with(base: str, models: Iterable[Path], options: list[str]) -> int:
    """Return the worst exit code of `diff` between models in commit `base` and as they are now.

    It is 0 for a model that the commit has not, and in a repository without a commit; 2 where there
    is no such commit. What differs from its copy keeps it, in git's folder, until the next run: the
    command that the answer names needs it. `options` are passed to `diff`.
    """
    if _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") is None:
        if base == "HEAD" and _git("rev-parse", "--git-dir") is not None:
            print("no commit yet: nothing to compare")
            return 0
        print(f"aprfmt: {base}: no such commit", file=sys.stderr)
        return 2
    top = Path((_git("rev-parse", "--git-path", _COPIES) or b"").decode().strip())
    shutil.rmtree(top, ignore_errors=True)
    codes = [0]
    for number, model in enumerate(models):
        old = copy_of_commit(base, model, top / str(number))
        if old is None:
            print(f"{model}: not in {base}: nothing to compare")
            continue
        codes.append(run_in_process(["diff", *options, "--", str(old), str(model)]))
        if codes[-1] == 0:
            shutil.rmtree(top / str(number), ignore_errors=True)
    return max(codes)


def copy_of_commit(base: str, model: Path, place: Path) -> Path | None:
    """Return the path of a model as commit `base` has it, written below `place`, or None.

    None is of a model that the commit has not. The files pass git's filters, so that those in Git
    LFS are compared by their content.
    """
    from aprfmt.fleet.model_search import model_files, shards_in_index
    from aprfmt.model.hf_folder import INDEX, TEXT_FILES, WEIGHTS

    whole = model.is_dir()
    folder = model if whole else model.parent
    listed = _git("ls-tree", "-z", "--name-only", base, "--", f"./{folder.as_posix()}/")
    names = {PurePosixPath(text).name for text in (listed or b"").decode().split("\0") if text}
    target = place / (folder.name if whole else "")
    wanted = {part.name for part in model_files(model)}
    if whole:
        wanted |= {INDEX, WEIGHTS, *TEXT_FILES}
    _write_files(base, folder, names & wanted, target)
    if whole and (target / INDEX).is_file():  # the shards of the commit may be others
        _write_files(base, folder, (names & shards_in_index(target)) - wanted, target)
    if not whole:
        return target / model.name if model.name in names else None
    return target if any(name.endswith(_SUFFIXES) for name in names) else None


def _write_files(base: str, folder: Path, names: Iterable[str], target: Path) -> None:
    """Write files of a folder into `target` as commit `base` has them."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(names):
        named = f"{base}:./{(folder / name).as_posix()}"
        with (target / name).open("wb") as out:
            subprocess.run(["git", "cat-file", "--filters", named], stdout=out, check=True)


def _git(*arguments: str) -> bytes | None:
    """Return what a command of git prints; None where it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, check=False)
    return None if done.returncode else done.stdout


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
