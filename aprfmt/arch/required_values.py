"""Checks of config.json keys that may have one value only, since no rule describes another."""

from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as short_repr

from aprfmt.arch import hyper_rules
from aprfmt.arch.spec import Facts, HyperRule, Params
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError


def require_values(facts: Facts, usual: Mapping[str, Value]) -> None:
    """Raise ArchError if a key of config.json has another value than in `usual` ({key: value}).

    null counts as absent. Nothing is checked in other styles.
    """
    if facts.style != "hf":
        return
    for key, value in usual.items():
        found = facts.first(key)
        if found is not None and found[0] != value:
            raise ArchError(
                f"{key}: is {short_repr(found[0])}; expected {value!r}: no other is known"
            )


def _check_head_dim(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError if config.json gives another head dim than width over heads."""
    found = facts.first("head_dim") if facts.style == "hf" else None
    if found is not None and found[0] != value:
        raise ArchError(
            f"{found[1]}: is {short_repr(found[0])}; expected {value}, the width over the heads: "
            "the weights of this architecture have no other"
        )
    return ""


def divided_head_dim_rule() -> HyperRule:
    """Return the rule for the elements of a head that are the width divided by the heads."""
    return replace(hyper_rules.head_dim(hf=""), check=_check_head_dim)
