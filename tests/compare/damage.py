"""Damage to files of any format: the stored bytes of named tensors, changed in place."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from aprfmt.model import open_model

Change = Callable[[dict[str, bytes]], None]


def patched(source: Path, target: Path, change: Change) -> Path:
    """Copy a file (or folder) and write changed tensor bytes over the old ones, length for length.

    `change` gets {stored name: bytes} of every tensor and assigns new bytes of the same length.
    Checksums are not updated, as with damage on a disk.
    """
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__*"))
    else:
        shutil.copyfile(source, target)
    with open_model(source) as model:
        before = {name: bytes(tensor.raw()) for name, tensor in model.items()}
        places: Mapping[str, int] = {name: tensor.offset for name, tensor in model.items()}
        weights = model.path.name
    after = dict(before)
    change(after)
    path = target / weights if target.is_dir() else target
    with path.open("r+b") as file:
        for name, raw in after.items():
            assert len(raw) == len(before[name]), name
            if raw != before[name]:
                file.seek(places[name])
                file.write(raw)
    return target
