"""Architectures known by their names: tables without a description of a block."""

from collections.abc import Mapping
from typing import Any

from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, HyperRule, TensorRule

Made = tuple[tuple[TensorRule, ...], Mapping[str, tuple[Binding, ...]]]  # of rows.tables


def named(
    name: str,
    hf: tuple[str, ...],
    gguf: str,
    made: Made,
    hyper: tuple[HyperRule, ...],
    **more: Any,
) -> ArchSpec:
    """Return a spec of level "names".

    `hf` are its model types and classes, `gguf` its name there, "" where GGUF has no form of it.
    Keys of config.json that no rule reads stay unknown: what they mean matters to a forward pass.
    """
    tensors, bindings = made
    called = {"hf": hf, "apr": (name,)} | ({"gguf": (gguf,)} if gguf else {})
    return ArchSpec(
        name=name, called=called, hyper=hyper, tensors=tensors,
        bindings={style: found for style, found in bindings.items() if style in called},
        block=BlockSpec(), level="names", **more,
    )  # fmt: skip
