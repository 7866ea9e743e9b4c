"""Captures of fused projections whose columns of q, k and v come group by group.

The values are transformers' own. Seen red, each alone: the order of the columns is not looked for;
a run that went on with the wrong columns was called the same.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
Array = Any
NAME = "model.layers.{}.self_attn.qkv_proj"
HEADS: dict[str, dict[str, int]] = {
    "two": {},
    "four": {"num_attention_heads": 4, "num_key_value_heads": 4},
}


@cache
def projections(heads: str) -> tuple[list[list[Array]], Array]:
    """Return (q, k and v [tokens, width] of every layer, logits) of transformers' run."""
    from transformers import AutoModelForCausalLM

    folder = tiny_folder("llama", **HEADS[heads])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made: list[list[Array]] = []
    for layer in model.model.layers:
        made.append([])
        for part in "qkv":
            getattr(layer.self_attn, f"{part}_proj").register_forward_hook(
                lambda _m, _i, out, held=made[-1]: held.append(out.detach()[0].numpy())
            )
    with torch.no_grad():
        logits = model(torch.tensor([list(IDS)])).logits[0].numpy()
    return made, logits


def by_group(parts: Sequence[Array], groups: int) -> Array:
    """Return q, k and v joined [tokens, all widths], group by group."""
    rows = [one.reshape(len(one), groups, -1) for one in parts]
    return np.concatenate(rows, axis=2).reshape(len(parts[0]), -1)


def saved(path: Path, layers: Sequence[Array], **beside: Array) -> Path:
    """Write joined results of all layers as a capture with its token ids."""
    named = {NAME.format(i): one for i, one in enumerate(layers)}
    np.savez(path, input_ids=np.array([IDS]), **named, **beside)
    return path


@pytest.mark.parametrize("with_logits", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [("two", 2), ("four", 2), ("four", 4)])
def test_columns_by_group_are_an_order_and_no_fault(
    heads: str, groups: int, with_logits: bool, tmp_path: Path
) -> None:
    made, logits = projections(heads)
    beside = {"logits": logits} if with_logits else {}
    path = saved(tmp_path / "a.npz", [by_group(one, groups) for one in made], **beside)
    found = diagnose(str(tiny_folder("llama", **HEADS[heads])), str(path))
    assert (found.cause, found.verdict, found.exit_code) == ("capture_point", "same", 0), (
        found.sentence
    )
    assert found.lead is not None and found.lead.certainty == "confirmed"
    assert len(found.lead.where) == 3 * len(made)
    assert f"as [q | k | v] of what is {groups} groups of [q | k | v]" in found.lead.says


@pytest.mark.parametrize("heads", HEADS)
def test_columns_in_their_own_order_are_not_spoken_of(heads: str, tmp_path: Path) -> None:
    made, logits = projections(heads)
    path = saved(tmp_path / "a.npz", [by_group(one, 1) for one in made], logits=logits)
    found = diagnose(str(tiny_folder("llama", **HEADS[heads])), str(path))
    assert found.exit_code == 0 and "joined" not in found.sentence


@pytest.mark.parametrize("wrong", ["noise", "one column", "a sign"])
def test_other_values_are_no_order_of_columns(wrong: str, tmp_path: Path) -> None:
    """Groups in which some values are others are not called the same."""
    made, logits = projections("two")
    layers = [by_group(one, 2) for one in made]
    if wrong == "noise":
        layers = [np.random.default_rng(1).normal(size=one.shape) for one in layers]
    for one in layers:
        one[:, 3] *= {"noise": 1, "one column": 1.5, "a sign": -1}[wrong]
    path = saved(tmp_path / "a.npz", [one.astype(np.float32) for one in layers], logits=logits)
    found = diagnose(str(tiny_folder("llama")), str(path))
    assert found.exit_code != 0, found.sentence
    lead = found.lead
    assert lead is not None and not (lead.certainty == "confirmed" and "L0.q" in lead.where)


@pytest.mark.parametrize("beside", ["logits", "o_proj"])
def test_a_run_that_went_on_with_the_wrong_columns_is_no_capture_point(
    beside: str, tmp_path: Path
) -> None:
    """The fused weight's rows were cut in another order: what follows is wrong, too."""
    from transformers import AutoModelForCausalLM

    folder = tiny_folder("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    joined: list[list[Array]] = []
    outputs: dict[str, Array] = {}
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        modules = [getattr(attention, f"{part}_proj") for part in "qkv"]
        ends = np.cumsum([0, *(len(one.weight) for one in modules)])
        places = [np.arange(a, b)[None] for a, b in pairwise(ends)]
        rows = torch.cat([one.weight for one in modules]).detach()[by_group(places, 2)[0]]
        joined.append([])
        for one, weight in zip(modules, rows.split(np.diff(ends).tolist()), strict=True):
            one.weight.data = weight
            one.register_forward_hook(
                lambda _m, _i, out, held=joined[-1]: held.append(out.detach()[0].numpy())
            )
        attention.o_proj.register_forward_hook(
            lambda _m, _i, out, at=i: outputs.update(
                {f"model.layers.{at}.self_attn.o_proj": out.detach()[0].numpy()}
            )
        )
    with torch.no_grad():
        logits = model(torch.tensor([list(IDS)])).logits[0].numpy()
    more = {"logits": logits} | (outputs if beside == "o_proj" else {})
    path = saved(tmp_path / "a.npz", [by_group(one, 1) for one in joined], **more)
    found = diagnose(str(folder), str(path))
    assert found.exit_code != 0 and found.verdict != "same", found.sentence
    assert "capture_point" not in {one.cause for one in found.findings}, found.sentence
