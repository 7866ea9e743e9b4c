"""Builders of ArchSpec from tables: architectures with names only, or with a forward pass.

The *level* of an architecture says how much of it is known: names only, or all.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, HyperRule, TensorRule

Made = tuple[tuple[TensorRule, ...], Mapping[str, tuple[Binding, ...]]]  # of rows.tables


def names_only_spec(name: str, tables: Made, hyper: tuple[HyperRule, ...], **more: Any) -> ArchSpec:
    """Return an architecture of level "names": converted and compared, without a forward pass.

    `tables` are its tensor table and bindings, `hyper` the rules for its hyperparameters, `more`
    other fields of ArchSpec. Keys of config.json that no rule reads stay unknown: what they mean
    matters to a forward pass.
    """
    tensors, bindings = tables
    return own_styles_only(
        ArchSpec(
            name=name,
            hyper=hyper,
            tensors=tensors,
            bindings=bindings,
            block=BlockSpec(),
            level="names",
            **more,
        )
    )


def full_spec(
    name: str, tables: Made, hyper: tuple[HyperRule, ...], block: BlockSpec, **more: Any
) -> ArchSpec:
    """Return an architecture of level "full": one with a forward pass, described by `block`.

    `tables` are its tensor table and bindings, `hyper` the rules for its hyperparameters, `more`
    other fields of ArchSpec.
    """
    return replace(names_only_spec(name, tables, hyper, **more), level="full", block=block)


def own_styles_only(spec: ArchSpec) -> ArchSpec:
    """Return a spec without the bindings of styles in which it has no name."""
    kept = {style: found for style, found in spec.bindings.items() if style in spec.called}
    return replace(spec, bindings=kept)
