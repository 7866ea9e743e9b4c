"""transformers' conversion mapping: the names before and after it hold the same logical tensors.

Published checkpoints have the names before, a model in memory those after: experts joined, modules
renamed. Both are found in files: save_pretrained writes the first, `torch.save` of a state dict the
second.

Seen red: gamma and beta not known, nemotron_h's joined experts not known, gate and up exchanged in
the joined experts of mixtral and jamba.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import find_arch
from aprfmt.arch.binding import bind_names, known_shapes
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.spec import Facts
from tests.arch.listed import CUT, LISTED, REMOTE, built
from tests.arch.tiny import TINY, ready

Arrays = Mapping[str, np.ndarray]
_PLAIN = {tiny.arch: tiny for tiny in reversed(TINY)}
# label -> (architecture, model type, loader, configuration)
CASES: Mapping[str, tuple[str, str, str, Mapping[str, Any]]] = {
    **{arch: (arch, tiny.model_type, "AutoModelForCausalLM", {**tiny.sizes, **tiny.config})
       for arch, tiny in _PLAIN.items()},
    **{label: case for label, case in LISTED.items() if label not in REMOTE and label not in CUT},
}  # fmt: skip
every = pytest.mark.parametrize("label", CASES)


@cache
def stored(label: str) -> tuple[dict[str, Any], Arrays, Arrays]:
    """Return a tiny model's configuration, and its tensors by the names before and after."""
    from transformers import core_model_loading

    ready()
    _, kind, loader, values = CASES[label]
    model = built(kind, loader, values)
    after = dict(model.state_dict())
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        after.pop("lm_head.weight", None)
    before = core_model_loading.revert_weight_conversion(model, dict(after))
    config = json.loads(model.config.to_json_string(use_diff=False))
    before, after = ({k: v.numpy() for k, v in each.items()} for each in (before, after))
    return config, before, after


def logical(label: str, arrays: Arrays) -> Arrays:
    """Return the tensors by role, through our tables."""
    arch, kind, *_ = CASES[label]
    config = stored(label)[0]
    shapes = {name: array.shape for name, array in arrays.items()}
    spec = find_arch("hf", kind, list(arrays), config)
    assert spec.name == arch
    bound = bind_names(spec, "hf", shapes)
    assert bound.unbound == () and not bound.incomplete
    facts = Facts("hf", config, known_shapes(bound, shapes), names="hf")
    hp, _ = read_hyper(spec, facts, label)
    found: dict[str, np.ndarray] = {}
    for group in bound.groups:
        parts = [arrays[name] for name in group.stored]
        for step in group.binding.steps:
            parts = step.undo(parts, hp)
        found.update(zip(group.roles, parts, strict=True))
    return found


@every
def test_both_names_hold_the_same_tensors(label: str) -> None:
    _, before, after = stored(label)
    theirs, ours = logical(label, before), logical(label, after)
    assert theirs.keys() == ours.keys()
    for role, array in theirs.items():
        np.testing.assert_array_equal(ours[role], array, err_msg=role)


def test_the_mapping_renames_or_joins_in_many_of_them() -> None:
    changed = {label for label in CASES if stored(label)[1].keys() != stored(label)[2].keys()}
    assert len(changed) >= 20, sorted(changed)


# Names that transformers renames in the checkpoints of every model.
LEGACY = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet")


@pytest.mark.parametrize("label", LEGACY)
def test_norms_by_their_oldest_names(label: str) -> None:
    """bert-base-uncased, as published, calls a norm's weight gamma and its bias beta."""
    _, before, _ = stored(label)
    new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, array in before.items():
        for now, then in new.items():
            name = name.replace(now, then)
        old[name] = array
    assert old.keys() != before.keys()
    theirs, ours = logical(label, before), logical(label, old)
    assert theirs.keys() == ours.keys()
    for role, array in theirs.items():
        np.testing.assert_array_equal(ours[role], array, err_msg=role)
