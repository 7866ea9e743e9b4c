"""Refuses captured activations where a model is asked for, and names the commands for them."""

import shlex
from pathlib import Path

from aprfmt.errors import UsageError

# Files that may hold either; GGUF and APR files hold models alone.
_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth")
_LONGEST = 1 << 23  # bytes of a header that lists captures: one array a module, some 80,000 of them


def refuse_captures(*texts: Path | str, arch: str | None = None) -> None:
    """Raise UsageError if a path is a file of captured activations, with the commands for it.

    `texts` are the models that a command was given, in order. Nothing is refused where the user
    named an architecture.
    """
    held = [str(text) for text in texts if arch is None and _may_hold_captures(Path(text))]
    if not held:
        return
    from aprfmt.inference.engines.opening import is_trace

    for text in held:
        if is_trace(Path(text)):
            raise UsageError(_captures_text(text, [str(each) for each in texts], len(held)))


def _may_hold_captures(path: Path) -> bool:
    """Return whether a file may hold captured activations, by its name and first bytes.

    False for an archive that is cut, and for a safetensors file with names of parameters.
    """
    if path.suffix not in _SUFFIXES or not path.is_file():
        return False
    if path.suffix != ".safetensors":
        from aprfmt.formats.pytorch.zip_archive import is_cut_archive

        return not is_cut_archive(path)  # which holds nothing that can be read
    from aprfmt.model.missing_path import names_parameters

    with path.open("rb") as file:
        head = file.read(8)
    return int.from_bytes(head, "little") <= _LONGEST and not names_parameters(path)


def _captures_text(text: str, texts: list[str], held: int) -> str:
    """Return the sentence that a file holds captures, and the commands that show and compare it.

    `text` is the file, `texts` are all paths that the command was given; `held` is how many of them
    may be captures.
    """
    pair = texts if len(texts) > 1 else [text, "OTHER"]
    model = " --model MODEL" if len(texts) == 1 or held > 1 else ""
    return (
        f"{text}: holds captured activations, what a run gave at points or modules, no weights; "
        f"{shlex.join(['aprfmt', 'trace', '--load', text])} shows them, "
        f"{shlex.join(['aprfmt', 'diagnose', *pair])}{model} compares them"
    )
