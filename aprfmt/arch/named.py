"""Architectures known by their names: tables without a description of a block."""

from collections.abc import Mapping
from typing import Any

from aprfmt.arch.called import CALLED
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, HyperRule, TensorRule

Made = tuple[tuple[TensorRule, ...], Mapping[str, tuple[Binding, ...]]]  # of rows.tables


def named(
    name: str,
    made: Made,
    hyper: tuple[HyperRule, ...],
    called: Mapping[str, tuple[str, ...]] | None = None,
    **more: Any,
) -> ArchSpec:
    """Return a spec of level "names"; `called` may be left out of one of ours (arch/called.py).

    Keys of config.json that no rule reads stay unknown: what they mean matters to a forward pass.
    """
    tensors, bindings = made
    called = called or CALLED[name]
    return ArchSpec(
        name=name, called=called, hyper=hyper, tensors=tensors,
        bindings={style: found for style, found in bindings.items() if style in called},
        block=BlockSpec(), level="names", **more,
    )  # fmt: skip
