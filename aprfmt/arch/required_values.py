"""Keys of config.json that may say one thing only, since no rule describes another."""

from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as short_repr

from aprfmt.arch import hyper_rules
from aprfmt.arch.spec import Facts, HyperRule
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Params = Mapping[str, Value]


def must_be(facts: Facts, usual: Mapping[str, Value]) -> None:
    """Raise ArchError where a key is there with another value; null is as good as absent."""
    if facts.style != "hf":
        return
    for key, value in usual.items():
        found = facts.first(key)
        if found is not None and found[0] != value:
            raise ArchError(
                f"{key}: is {short_repr(found[0])}; expected {value!r}: no other is known"
            )


def _divided(value: Value, facts: Facts, hp: Params) -> str:
    found = facts.first("head_dim") if facts.style == "hf" else None
    if found is not None and found[0] != value:
        raise ArchError(
            f"{found[1]}: is {short_repr(found[0])}; expected {value}, the width over the heads: "
            "the weights of this architecture have no other"
        )
    return ""


def divided_heads() -> HyperRule:
    """Return the rule for the elements of a head that are the width divided by the heads."""
    return replace(hyper_rules.head_dim(hf=""), check=_divided)
