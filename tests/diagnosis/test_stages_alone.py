"""Stages that blends of two models differ in, usual ranges, and ids around a text: alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import shifted_series
from aprfmt.causes.tokenizer import recorded_ids
from aprfmt.checks import bounds
from aprfmt.diagnosis import blended_model, progress
from aprfmt.errors import FormatError
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.capture import key_name
from aprfmt.inference.weights import Holder, Weight

# --- stages ---------------------------------------------------------------------------------------


def test_a_weight_is_read_in_its_layers_stage() -> None:
    """Stage 0 is the embedding's, stage i that of layer i - 1, the last one the head's."""
    for key, tied, stages in (
        ("L0.attn_q.weight", False, {1}),
        ("L3.ffn_up.weight", True, {4}),
        ("token_embd.weight", False, {0}),
        ("token_embd.weight", True, {0, 5}),
        ("output.weight", False, {5}),
        ("output_norm.weight", True, {5}),
        ("position_embd.weight", True, {0}),
    ):
        assert blended_model._stages_reading(key, 5, tied=tied) == stages, (key, tied)


def test_a_number_changes_the_stages_that_read_it() -> None:
    for name, mine, other, stages in (
        ("final_softcap", None, 30.0, {4}),
        ("logit_scale", 1.0, 2.0, {4}),
        ("embedding_scale", 1.0, 2.0, {0, 1, 2, 3, 4}),
        ("rope_theta", 1.0, 2.0, {1, 2, 3, 4}),
        ("window_layers", (True, False, True), (True, True, True), {2}),
        ("window_layers", [1, 2, 3], (1, 2, 3), set()),
        ("window_layers", (True, False), (True, True), {1, 2, 3, 4}),  # of no layer each
        ("window_layers", (1, 2, 3), None, {1, 2, 3, 4}),
    ):
        assert blended_model._stages_changed_by(name, mine, other, 4) == stages, (name, mine, other)


def differing(a: Any, b: Any, *, of_a: Any = (), **more: Any) -> list[int]:
    """Return the stages in which (roles, numbers) of a blend differ from those of A."""

    def spec(**given: Any) -> Any:
        return SimpleNamespace(block=given.get("block", 1), forward=given.get("forward"))

    own: Any = SimpleNamespace(
        roles=dict.fromkeys(a[0]), hyper={"n_layers": 2, **a[1]}, spec=spec(forward=more.get("all"))
    )
    made: Any = SimpleNamespace(
        weights=dict.fromkeys(b[0]),
        of_a=frozenset(of_a),
        hp={"n_layers": 2, **b[1]},
        spec=spec(forward=more.get("all"), block=more.get("block", 1)),
    )
    return blended_model._differing_stages(own, made)


def test_a_blend_differs_in_the_stages_of_its_own_weights_and_numbers() -> None:
    q, embd, head = "L0.attn_q.weight", "token_embd.weight", "output.weight"
    every = [0, 1, 2, 3]
    assert differing(((q, embd, head), {}), ((q, embd, head), {}), of_a=(q, embd, head)) == []
    assert differing(((q, embd, head), {}), ((q, embd, head), {}), of_a=(embd, head)) == [1]
    assert differing(((q, embd), {}), ((q, embd), {}), of_a=(q,)) == [0, 3]  # a tied head
    assert differing(((q, embd, head), {}), ((q, embd, head), {}), of_a=(q, head)) == [0]
    assert differing(((q, embd, head), {}), ((embd, head), {}), of_a=(embd, head)) == [1]  # lacks q
    assert differing(((), {"rope_theta": 1.0}), ((), {"rope_theta": 2.0})) == [1, 2, 3]
    assert differing(((), {"final_softcap": 1.0}), ((), {})) == [3]
    assert differing(((), {}), ((), {}), block=2) == every
    assert differing(((q,), {}), ((q,), {}), all="own") == [0]
    assert differing(((q,), {}), ((q,), {}), of_a=(q,), all="own") == []


def test_the_work_of_a_token_is_that_of_its_layers_and_chosen_experts() -> None:
    def view(*shape: int) -> Any:
        return SimpleNamespace(shape=shape)

    roles = {
        "token_embd.weight": view(9, 4),
        "L0.attn_q.weight": view(4, 4),
        "L1.ffn_up_exps.weight": view(8, 6, 4),
    }
    for hyper, total in (
        ({"n_experts": 8, "n_experts_used": 2}, 16 + 48),
        ({"n_experts": 0, "n_experts_used": 0}, 16 + 192),
    ):
        model: Any = SimpleNamespace(hyper=hyper, roles=roles, values=roles.values)
        assert progress.multiplications_per_token(model) == total
        assert progress.count_values(model) == 36 + 16 + 192
    plain, own = (
        SimpleNamespace(spec=SimpleNamespace(forward=way), hyper={"n_layers": 3})
        for way in (None, "own")
    )
    models: list[Any] = [plain, own]
    assert blended_model.count_stages(*models[:1]) == 5 and blended_model.count_stages(*models) == 1


def test_weights_of_both_sides_are_held_apart() -> None:
    made: Any = SimpleNamespace(of_a={"L0.q", "L1.q"})
    for key, label in (
        ("L0.q", "A L0.q"),
        ("L0.q[3]", "A L0.q[3]"),
        ("L1.q@F16", "A L1.q@F16"),
        ("L2.q", "B L2.q"),
        ("L0.qk", "B L0.qk"),
    ):
        assert blended_model.Blend._label(made, key) == label
    base = Holder(5)
    first, second = (blended_model.PairHolder(base, f"{side} {{}}".format) for side in "AB")
    first.hold("k", "o", "of A", 3)
    second.hold("k", "o", "of B", 1)
    assert first.budget == second.budget == 5 and base.used == 4
    assert (first.find("k", "o"), second.find("k", "o")) == ("of A", "of B")
    assert first.has_room(1) and second.has_room(1) and not second.has_room(2)  # of both together
    first.replace("k", "o", "moved")
    assert (base.find("A k", "o"), base.find("B k", "o")) == ("moved", "of B")
    assert first.is_placed_by("k", "o") and not first.is_placed_by("k", "p")
    assert second.is_placed("k") and not second.is_placed("A k")


class Rows:
    """Numbers in memory that count how often they are decoded."""

    encoding, shape = "F32", (2, 2)

    def __init__(self, *, by_rows: bool) -> None:
        self.by_rows, self.decoded, self.dropped = by_rows, 0, 0

    def numpy(self) -> Any:
        self.decoded += 1
        return np.ones(self.shape, np.float32)

    def encoded(self, start: int, stop: int) -> None:
        return None

    def coded(self) -> None:
        return None

    def drop(self) -> None:
        self.dropped += 1


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_weight_is_placed_once_where_the_budget_has_room(by_rows: bool) -> None:
    """Seen red: a weight beyond the budget that was held, and one that was placed twice."""
    backend: Any = NumpyBackend("cpu", "float32")
    for budget in (16, 15):
        rows: Any = Rows(by_rows=by_rows)
        holder = Holder(budget)
        weight = Weight("k", rows, holder)
        for number in range(1, 3):
            placed = weight.placed_on(backend)
            fits = budget == 16
            assert (placed is None) == (not fits and by_rows)
            assert rows.decoded == rows.dropped == (1 if fits else 0 if by_rows else number)
        assert holder.used == (16 if fits else 0)
        before = rows.decoded
        assert weight.array(backend).shape == (2, 2) and rows.decoded == before + (not fits)


# --- usual ranges ---------------------------------------------------------------------------------


def test_a_usual_range_has_its_ends_and_is_chosen_by_role_and_size() -> None:
    one = bounds.UsualRange(-1, 2, "x", "y")
    for value, held in ((-1, True), (2, True), (0, True), (-1.01, False), (2.01, False)):
        assert one.holds(value) is held
    assert not one.holds(float("nan")) and str(one) == "-1 to 2"
    for arch, role, kind in (
        ("llama", "attn_q.bias", bounds.BIAS),
        ("llama", "attn_norm.weight", bounds.NORM),
        ("llama", "attn_q.weight", bounds.LINEAR),
        ("llama", "token_embd.weight", bounds.EMBEDDING),
        ("llama", "attn_norm.bias", bounds.BIAS),
        ("gemma3", "attn_norm.weight", bounds._GEMMA_NORM),
        ("gemma3", "token_embd.weight", bounds.EMBEDDING),
        ("t5", "token_embd.weight", bounds._T5_EMBEDDING),
        ("mamba", "ssm_a.weight", bounds.BIAS),
    ):
        assert bounds.role_bounds(arch, role) is kind, (arch, role)
    for shape, kind in (
        ((16, 16), bounds.LINEAR),
        ((15, 17), bounds.BIAS),
        ((1, 4096), bounds.BIAS),
        ((4096,), bounds.BIAS),
        ((2, 128), bounds.LINEAR),
        ((1, 16, 16), bounds.LINEAR),
    ):
        assert bounds.tensor_bounds("llama", "ffn_up.weight", shape) is kind, shape
    assert bounds.tensor_bounds("llama", "attn_norm.weight", (8,)) is bounds.NORM
    stats: Any = SimpleNamespace(mean=-0.4, std=0.3, absmax=2.0, zeros=3, count=12)
    found = bounds.bounded_numbers(stats, 0.0)
    assert found == {
        "mean": -0.4,
        "std": 0.3,
        "rms": pytest.approx(0.5),
        "absmax": 2.0,
        "zeros": 0.25,
    }
    moved = bounds.bounded_numbers(stats, 0.8)
    assert (moved["mean"], moved["rms"], moved["zeros"]) == pytest.approx((0.4, 0.5, 0.0))
    for name in ("mean", "std", "absmax"):
        odd: Any = SimpleNamespace(**(vars(stats) | {name: None}))
        assert all(np.isnan(value) for value in bounds.bounded_numbers(odd, 0.0).values())


# --- ids around a text ----------------------------------------------------------------------------


def tokenizer(
    before: tuple[int, ...] = (1,), *, pad: int | None = 0, bos: int | None = 1, **more: Any
) -> Any:
    """A tokenizer whose ids from 10 on are letters: text and ids are each other's."""

    def chat(messages: Any) -> Any:
        if more.get("chat") is None:
            raise FormatError("no template")
        return "", more["chat"]

    return SimpleNamespace(
        prefix_ids=before,
        pad_id=pad,
        bos_id=bos,
        eos_id=2,
        stop_ids=(3,),
        ids={"bos": 1, "eos": 2, "cls": 4},
        chat=chat,
        engine=SimpleNamespace(is_control=lambda i: i < 10),
        decode=lambda ids: "".join(map(chr, ids)),
        encode=lambda text, add_special: [10 if c == chr(99) else ord(c) for c in text],
        token=lambda i: f"<{i}>",
    )


TEXT = tuple(range(20, 28))


def test_padding_stands_before_a_text() -> None:
    def count(ids: Any, **more: Any) -> int:
        return recorded_ids.leading_padding(tokenizer(**more), ids)

    assert count((0, 0, *TEXT)) == 2 and count(TEXT) == 0 and count((0, 0)) == 0
    assert count((0, 0, *TEXT), pad=None) == 0
    assert count((0, *TEXT), before=()) == 1 and count((0, 1, *TEXT)) == 1
    for pad in (1, 2, 3):  # which may begin a text
        assert count((pad, *TEXT), before=(), pad=pad) == 0
        assert count((pad, pad, *TEXT), before=(), pad=pad) == 2
    assert count((0, *TEXT), before=(), chat=[0, 5]) == 0
    assert count((0, *TEXT), before=(), chat=[5, 0]) == 1
    assert count((1, 1, *TEXT), pad=1) == 0  # what the tokenizer puts there
    words = recorded_ids.padding_sentence
    assert words(tokenizer(), (0,), 1) == "the recorded ids begin with an id of padding, 0 (<0>)"
    assert words(tokenizer(), (0,), 3) == "the recorded ids begin with 3 ids of padding, 0 (<0>)"


def test_what_stands_around_a_text_is_held_to_the_tokenizers_frame() -> None:
    def wrong(ids: Any, **more: Any) -> Any:
        return recorded_ids.wrong_frame(tokenizer(**more), ids)

    assert wrong((1, *TEXT)) is None and wrong((1, 2, *TEXT)) is None
    for many, words in ((2, "twice"), (3, "3 times")):
        found = wrong((1,) * many + TEXT)
        assert (found.cause, found.right, found.missing) == ("add_bos", (1, *TEXT), False)
        assert found.says == (
            f"the recorded ids begin with 1 (<1>) {words}; the tokenizer puts it once"
        )
    assert wrong((1, 4, 1, 4, 9), before=(1, 4)).right == (1, 4, 9)
    found = wrong((1, 1, 9), before=())
    assert found.says.endswith("no text begins so: the chat template and the engine put it")
    assert wrong((1, 1, 9), before=(), bos=None) is wrong((1, 1, 9), before=(), pad=1) is None
    found = wrong((5, 5, 9), chat=[5, 9])  # what the chat template begins with
    assert found.right == (5, 9) and found.says.endswith("template and the engine put it")
    assert wrong((5, 5, 9), chat=[5, 5, 9]) is wrong((5, 5, 9), chat=[9]) is None
    assert wrong((11, 11, 9), before=(), chat=[11, 9]) is None  # no control token
    assert wrong((0, 0, 9), before=(), chat=[0, 9]) is None  # padding
    found = wrong(TEXT)
    assert (found.cause, found.right, found.missing) == ("add_bos", (1, *TEXT), True)
    assert wrong((*TEXT, 2)).right == (1, *TEXT, 2)  # an end is the run's own
    assert wrong(TEXT[:7]) is None and wrong((*TEXT[:7], 2)) is None  # too few
    assert wrong((*TEXT[:7], 99)) is None  # that text has other ids
    assert wrong(TEXT, before=()) is None
    found = wrong((4, *TEXT))
    assert (found.cause, found.right, found.missing) == ("frame", (1, *TEXT), True)
    assert found.says == ("the recorded ids begin with 4 (<4>) where the tokenizer puts 1 (<1>)")
    assert wrong((5, *TEXT)) is None  # no special id of the tokenizer
    assert wrong((4, *TEXT), chat=[4]) is None  # a chat
    assert wrong((4, *TEXT[:7])) is None


# --- a series under other names -------------------------------------------------------------------


def series_case(point: str, layer: int, plain: tuple[str, ...], layers: int = 2) -> Any:
    """Return a mismatch that is first seen at a point, in a pass with the points `plain`."""
    return SimpleNamespace(
        view=SimpleNamespace(point=point, key=key_name(point, layer)),
        layer=layer,
        plain=plain,
        patched=SimpleNamespace(n_layers=layers),
        recorded=SimpleNamespace(has_record=lambda key: True),
    )


def test_a_series_begins_where_a_stream_enters_and_without_one_there_is_none() -> None:
    """Seen red: a pass without a point of the embedding ended in an IndexError."""
    late = {"L0.out": "embd", "L1.out": "L0.out"}
    assert [*shifted_series._shifted_keys(series_case("out", 0, ("embd", "L0.attn")))] == [late]
    early = {"embd": "L0.out", "L0.out": "L1.out", "L1.out": "final_norm"}
    for plain in ((), ("embd",)):
        assert [*shifted_series._shifted_keys(series_case("embd", -1, plain))] == [early]
    for case in (
        series_case("out", 0, ("L0.attn",)),
        series_case("out", 1, ("embd",)),
        series_case("attn", 0, ("embd",)),
        series_case("embd", -1, (), layers=0),
    ):
        assert not [*shifted_series._shifted_keys(case)]


@pytest.mark.parametrize(("agree", "most"), [(3, "confirmed"), (2, "explained"), (0, "located")])
def test_a_series_is_as_sure_as_its_entries_agree(agree: int, most: str) -> None:
    case, moved = series_case("out", 0, ("embd",)), {"L0.out": "embd", "L1.out": "L0.out"}
    change = shifted_series._shift_change(case, moved, agree, 3)
    assert change.most == most
    assert (f"{agree} of 3 entries" in change.says) == (agree < 3)
