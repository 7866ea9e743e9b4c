"""Damaged copies of a model's folder: bytes, labels, names and config keys changed by code."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis.engines import place

Rows = dict[str, tuple[str, tuple[int, ...], bytes]]
F32 = np.dtype("<f4")


def copy(
    source: Path,
    name: str,
    *,
    tensors: Callable[[Rows], None] | None = None,
    config: Mapping[str, Any] | Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Copy a folder, its tensors (parsed and written by hand) and config changed."""
    folder = place(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = tensors_of(source)
    if tensors is not None:
        tensors(rows)
    write_mixed(folder / "model.safetensors", rows)
    values = json.loads((source / "config.json").read_text())
    if callable(config):
        config(values)
    elif config is not None:
        values.update(config)
    (folder / "config.json").write_text(json.dumps(values))
    for other in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        if (source / other).exists():
            shutil.copy(source / other, folder / other)
    return folder


def values(rows: Rows, name: str) -> Any:
    """Return a float32 tensor's values, writable."""
    dtype, shape, raw = rows[name]
    assert dtype == "F32", dtype
    return np.frombuffer(raw, F32).reshape(shape).copy()


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Rows], None]:
    """Return an editor of one float32 tensor; its shape may change."""

    def run(rows: Rows) -> None:
        new = np.ascontiguousarray(change(values(rows, name)), F32)
        rows[name] = ("F32", tuple(new.shape), new.tobytes())

    return run


def edit_all(ending: str, change: Callable[[Any], Any]) -> Callable[[Rows], None]:
    """Return an editor of every float32 tensor whose name ends so."""

    def run(rows: Rows) -> None:
        chosen = [name for name in rows if name.endswith(ending)]
        assert chosen
        for name in chosen:
            edit(name, change)(rows)

    return run


def raw(name: str, change: Callable[[bytes], bytes]) -> Callable[[Rows], None]:
    """Return an editor of one tensor's bytes."""

    def run(rows: Rows) -> None:
        dtype, shape, data = rows[name]
        new = change(data)
        assert len(new) == len(data)
        rows[name] = (dtype, shape, new)

    return run


def relabel(dtype: str, *names: str) -> Callable[[Rows], None]:
    """Return an editor that changes 16-bit labels and no byte."""

    def run(rows: Rows) -> None:
        for name in names or tuple(rows):
            _, shape, data = rows[name]
            rows[name] = (dtype, shape, data)

    return run


def swap(first: str, second: str) -> Callable[[Rows], None]:
    """Return an editor that exchanges tensors, or all those below two prefixes."""

    def run(rows: Rows) -> None:
        before = dict(rows)
        for name, row in before.items():
            if name.startswith(first):
                rows[second + name.removeprefix(first)] = row
            elif name.startswith(second):
                rows[first + name.removeprefix(second)] = row

    return run


def drop(*endings: str) -> Callable[[Rows], None]:
    """Return an editor that leaves tensors out."""

    def run(rows: Rows) -> None:
        for name in [name for name in rows if name.endswith(endings)]:
            del rows[name]

    return run


def converted(source: Path, name: str, **options: Any) -> Path:
    """Return a copy in another container or encoding, made once."""
    import aprfmt

    path = place(name)
    if not path.exists():
        aprfmt.convert(source, path, **options)
    return path


def quantized(source: Path, name: str, scheme: str) -> Path:
    """Return a quantized copy, made once."""
    import aprfmt

    path = place(name)
    if not path.exists():
        aprfmt.convert(source, path, quantize=scheme)
    return path
