"""Rows of every architecture have their arguments in the right places: a role is no stored name.

Seen red: role and name exchanged in a row of a tensor, name and keys in a rule of a hyperparameter.
"""

import re

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.moe import norm_topk_rule
from aprfmt.arch.spec import HyperRule

NAME = re.compile(r"[a-z][a-z0-9_]*")
ROLE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")


@pytest.mark.parametrize("name", sorted(ARCHS))
def test_roles_and_hyperparameters_have_names_of_ours(name: str) -> None:
    spec = ARCHS[name]
    for rule in spec.hyper:
        assert isinstance(rule.name, str) and NAME.fullmatch(rule.name), rule
        for keys in rule.keys.values():
            assert all(isinstance(key, str) for key in keys), rule
    assert len(spec.tensors) > 1
    for row in spec.tensors:
        assert ROLE.fullmatch(row.role), row
        assert not row.role.startswith(("model.", "layers.", "transformer.")), row


@pytest.mark.parametrize("gguf", [None, True, False])
@pytest.mark.parametrize("default", [True, False])
def test_the_rule_of_renormalised_weights(default: bool, gguf: bool | None) -> None:
    rule = norm_topk_rule(default, gguf)
    assert isinstance(rule, HyperRule) and rule.name == "norm_topk"
    assert rule.keys["hf"] == ("norm_topk_prob",)
    assert ("gguf" in rule.keys) == (gguf is None)
