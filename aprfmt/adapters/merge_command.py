"""The command that merges an adapter into its base, printed only where it would not be refused."""

import shlex
from pathlib import Path
from typing import NamedTuple

from aprfmt.adapters.merging import convert_merged, merge_adapter
from aprfmt.conversion import convert
from aprfmt.errors import AprfmtError
from aprfmt.formats import FORMATS
from aprfmt.model import open_model

OUTPUT = "OUT"  # stands for the file or folder that the reader chooses
FOLDER = "safetensors"  # a container that every base can be written in


class MergeCommand(NamedTuple):
    """The command that merges an adapter anew, "" where every one is refused; and `why` it is."""

    command: str
    why: str = ""


def merge_command(
    base: Path, adapter: Path, container: str, arch: str | None = None, *, packed: bool = False
) -> MergeCommand:
    """Return the command that merges the adapter of `adapter` into the model of `base`.

    The output has the format `container`, or safetensors where that is refused. A base with
    `packed` weights is decoded first. Whether a command is refused is what `convert` itself says,
    in a dry run. `arch` is the stated architecture.
    """
    first = ""
    for name in dict.fromkeys((container, FOLDER)):
        why = _decoded_refusal(base, adapter, arch) if packed else ""
        target = _output_placeholder(name)
        try:
            if not packed:
                convert_merged(
                    base, Path(target), adapter, to=name, arch=arch, dry_run=True, force=True
                )
        except AprfmtError as error:
            why = str(error)
        if not why:
            return MergeCommand(_command_text(base, adapter, name, arch, packed))
        first = first or why
    return MergeCommand("", first)


def _decoded_refusal(base: Path, adapter: Path, arch: str | None) -> str:
    """Return why the base cannot be decoded, or the adapter not merged into it then; "" if none."""
    try:
        convert(base, Path(OUTPUT), to=FOLDER, encoding="F32", arch=arch, dry_run=True, force=True)
        with open_model(base, arch=arch) as model:
            _, opened, _ = merge_adapter(model, adapter, decoded=True)
            opened.close()
    except AprfmtError as error:
        return str(error)
    return ""


def _output_placeholder(container: str) -> str:
    """Return OUTPUT for a format of folders, with its extension (OUT.gguf) for one of files."""
    row = FORMATS[container]
    return OUTPUT if row.weights_name is not None else f"{OUTPUT}{row.extensions[0]}"


def _command_text(base: Path, adapter: Path, container: str, arch: str | None, packed: bool) -> str:
    """Return the command line; with `packed` that of decoding the base comes first."""
    given = ["--arch", arch] if arch else []
    words: list[list[str]] = []
    if packed:
        stem = base.stem if base.is_file() else base.name
        decoded = str(base.with_name(f"{stem}-decoded"))
        words.append(
            ["aprfmt", "convert", str(base), decoded, "--encoding", "F32", "--to", FOLDER, *given]
        )
        base = Path(decoded)
    merge = [
        "aprfmt",
        "convert",
        str(base),
        _output_placeholder(container),
        "--adapter",
        str(adapter),
    ]
    to = ["--to", container] if FORMATS[container].weights_name is not None else []
    words.append([*merge, *to, *given])
    return " && ".join(map(shlex.join, words))
