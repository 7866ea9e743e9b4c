"""The capture table: what is captured is what the table says, aliases are equal, all points count.

Seen red: a tap removed, a tap added where the point equals another, a returned value ignored.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import UsageError
from aprfmt.inference.backends.base import Array
from aprfmt.inference.capture import (
    POINTS,
    SLOTS,
    STAGES,
    key_name,
    parse_key,
    point_instances,
    resolve_alias,
    select_keys,
    select_points,
)
from aprfmt.inference.context import PassFacts
from aprfmt.inference.forward import forward
from aprfmt.inference.session import Session
from aprfmt.inference.weights import model_weights
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel, run, traced, traced64
from tests.models import EVERY, IDS, MAKERS

CACHE_ONLY = {"k_cache", "v_cache"}
# Not part of the computation: facts about a router's or an indexer's choice.
INFORMATIVE = {"router_margin", "index_margin"}


class Altering:
    """A recorder that changes one point and says whether it came by."""

    def __init__(self, key: str, change: Callable[[Any], Any]) -> None:
        self.key, self.change, self.seen = key, change, 0

    def begin(self, facts: PassFacts) -> None:
        self.seen = 0

    def wants(self, point: str, layer: int) -> bool:
        return key_name(point, layer) == self.key

    def capture(self, point: str, layer: int, x: Array) -> Array:
        self.seen += 1
        return self.change(x)


class Collecting:
    """A recorder that wants every point and stores the calls."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def begin(self, facts: PassFacts) -> None:
        self.keys = []

    def wants(self, point: str, layer: int) -> bool:
        return True

    def capture(self, point: str, layer: int, x: Array) -> Array:
        self.keys.append(key_name(point, layer))
        return x


@pytest.mark.parametrize("name", EVERY)
def test_exactly_the_tables_points_come_by_in_its_order(name: str) -> None:
    recorder = Collecting()
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            session.logits(IDS, recorder)
            known = session.points
    expected = [
        key
        for key, point in known.items()
        if not point.absent and not point.alias_of and point.point.name not in CACHE_ONLY
    ]
    assert recorder.keys == expected
    trace = traced64(name)[1]
    assert list(trace.records) == expected
    for key, alias in trace.aliases.items():
        assert known[key].alias_of or known[key].point.name in CACHE_ONLY
        assert alias in trace.records


def test_a_pass_behind_a_cache_shows_the_cache_too() -> None:
    recorder = Collecting()
    with open_model(judged("llama").folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            session.prefill(IDS[:5])
            session.extend(IDS[5:7], recorder)
    at = recorder.keys.index("L1.k_cache")
    assert recorder.keys[at - 1 : at + 3] == ["L1.k_rope", "L1.k_cache", "L1.v_cache", "L1.scores"]


@pytest.mark.parametrize("name", [*MAKERS, "stablelm-parallel", "deepseek_v2-lite"])
def test_what_a_recorder_returns_is_what_the_pass_goes_on_with(name: str) -> None:
    """Every point of the last layer, changed, changes the logits; so does every whole-model one."""
    b = backend("numpy:float64")
    plain = run(name, b)
    with open_model(judged(name).folder) as model, Session.open(model, b) as session:
        last = int(model.hyper["n_layers"]) - 1
        for key, instance in session.points.items():
            point = instance.point.name
            if instance.absent or instance.alias_of or point in CACHE_ONLY | INFORMATIVE:
                continue
            if instance.layer not in (-1, last):
                continue
            recorder = Altering(key, _everything if point == "index_keys" else _changed)
            changed = session.logits(IDS, recorder)
            assert recorder.seen == 1, key
            assert rel(changed, plain) > 1e-9, f"{key} changed nothing"


def _changed(x: Any) -> Any:
    if x.dtype.kind == "i":
        return np.roll(x, 1, axis=0)
    return x * np.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype) + x.dtype.type(0.01)


def _everything(x: Any) -> Any:
    return np.ones_like(x)


@pytest.mark.parametrize("run_", ["numpy:float64", "torch:float64"])
@pytest.mark.parametrize("name", MAKERS)
def test_fused_and_stepped_forms_agree(name: str, run_: str) -> None:
    b = backend(run_)
    fused = run(name, b)
    stepped, trace = traced(name, b)
    forms = {key.partition(".")[0]: record.form for key, record in trace.records.items()}
    attending = {key.partition(".")[0] for key in trace.records if key.endswith(".probs")}
    whole = {key for key in forms if key[0] != "L" or not key[1:].isdigit()}
    assert {key for key, form in forms.items() if form is None} == whole
    assert {key for key, form in forms.items() if form == "stepped"} == attending
    assert rel(stepped, fused) < 1e-12


def test_without_inner_points_the_form_is_fused() -> None:
    with open_model(judged("llama").folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            trace = session.trace(IDS, ["L1.attn", "L2.probs", "final_norm"])
    forms = {key: record.form for key, record in trace.records.items()}
    assert forms == {"L1.attn": "fused", "L2.probs": "stepped", "final_norm": None}


def test_aliases_and_absent_points_are_resolved() -> None:
    with open_model(judged("llama").folder) as model:
        known = point_instances(model.spec.block, model.hyper, model.roles)
    assert known["L0.in"].alias_of == "embd"
    assert known["L2.in"].alias_of == "L1.out"
    assert known["L1.attn_contrib"].alias_of == "L1.attn_out"
    assert known["L1.router"].absent
    found = resolve_alias("L2.ffn_contrib", known)
    assert found is not None and found.key == "L2.ffn_out"
    assert resolve_alias("L1.router", known) is None
    with pytest.raises(UsageError, match="no such layer"):
        resolve_alias("L9.attn", known)


def test_every_slot_and_stage_names_points_of_the_table() -> None:
    for points in (*SLOTS.values(), *STAGES.values()):
        assert set(points) <= set(POINTS)
    assert len(SLOTS) == 11 and "layer_output" not in STAGES
    assert set(STAGES) == {
        "embedding",
        "attn_norm",
        "qkv_matmul",
        "qkv_bias",
        "q_post_rope",
        "k_post_rope",
        "attn_scores",
        "attn_softmax",
        "attention",
        "attn_out",
        "post_attn_residual",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_silu",
        "ffn_swigl",
        "ffn_out",
        "post_ffn_residual",
        "moe_router",
        "moe_ffn_out",
        "final_norm",
        "lm_head",
    }


def test_names_are_selected_by_point_slot_stage_or_all() -> None:
    assert select_points(["qkv"]) == ("q", "k", "v")
    assert select_points(["layer_output", "attn_norm"]) == ("attn_norm", "out")
    assert select_points(["all"]) == tuple(POINTS)
    with pytest.raises(UsageError, match=r"near ones: .*ffn_gate"):
        select_points(["ffn_gat"])


def test_keys_are_selected_by_what_answers_print() -> None:
    points = {"embd": "embd", "L0.q": "q", "L0.k": "k", "L1.q": "q"}
    assert select_keys(["L1.q", "embd"], points) == ("embd", "L1.q")
    assert select_keys(["q", "L0.k"], points) == ("L0.q", "L0.k", "L1.q")
    for key, says in (("L7.q", "L7.q: there is no such"), ("L0.qq", "near ones")):
        with pytest.raises(UsageError, match=says):
            select_keys([key], points)


@pytest.mark.parametrize("key", ["L3.attn_outt", "L3.final_norm", "attn_out", "Lx.attn_out", ""])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="is not known"):
        parse_key(key)
    assert parse_key("L3.attn_out") == ("attn_out", 3)
    assert parse_key("logits") == ("logits", -1)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([3, 97], {}, "token 97 at position 1; the vocabulary has 97 rows"),
        ([], {}, "expected one sequence"),
        ([1, 2], {"positions": [0]}, "1 positions for 2 tokens"),
        ([1, 2], {"logits_rows": [2]}, r"logits of rows \[2\]"),
        ([1] * 65, {}, "the model has 64 learned positions"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    ids: list[int], options: dict[str, Any], message: str
) -> None:
    b = backend("numpy:float32")
    with open_model(judged("gpt2").folder) as model:
        with pytest.raises(UsageError, match=message):
            forward(b, model.spec, model.hyper, model_weights(model), ids, **options)


@pytest.mark.parametrize(
    "name", ["deepseek_v4", "llama", "deepseek_v3", "gemma3n", "glm_moe_dsa", "lfm2", "gpt_oss"]
)
def test_the_cache_is_shown_where_a_pass_continues_one_and_nowhere_else(name: str) -> None:
    """Not in the pass that fills it: what it holds then are the keys of the pass itself."""
    first, later = Collecting(), Collecting()
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            session.extend(IDS[:9], first)
            session.extend(IDS[9:11], later)
            known = session.points
    cached = [key for key, point in known.items() if point.point.name in CACHE_ONLY
              and not point.absent and not point.alias_of]  # fmt: skip
    assert not {key.rpartition(".")[2] for key in first.keys} & CACHE_ONLY
    assert [key for key in later.keys if key.rpartition(".")[2] in CACHE_ONLY] == cached


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("L9.attn", "L9.attn: the model has no such layer"),
        ("L1.atn_out", "capture point 'L1.atn_out' is not known; near ones: attn_out"),
        ("final_nrm", "capture point 'final_nrm' is not known; near ones: final_norm"),
        ("Lx.attn", "capture point 'Lx.attn' is not known"),
        ("", "capture point '' is not known"),
    ],
)
def test_a_key_that_is_none_is_told_from_a_layer_that_is_not_there(key: str, said: str) -> None:
    with open_model(judged("llama").folder) as model:
        known = point_instances(model.spec.block, model.hyper, model.roles)
    with pytest.raises(UsageError, match=re.escape(said)):
        resolve_alias(key, known)
