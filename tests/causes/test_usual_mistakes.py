"""The table of usual mistakes, over every architecture: it can be made, and each row does a thing.

A row that changes nothing costs a pass and can be no answer; two rows with one result cannot be
told apart. Seen red: a rule of one activation asked of another (deepseek_v4), a patch that returns
nothing or overrides an operation under another name, a value that is the model's own.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.causes import CAUSES
from aprfmt.causes.forward.rope import scaling_change, scaling_value_changes
from aprfmt.causes.forward.rotations import rope_frequencies, rope_kinds
from aprfmt.causes.forward.usual_blocks import UsualMistake
from aprfmt.causes.forward.usual_mistakes import added_window_mistake, usual_mistakes
from aprfmt.diagnosis.search import Search
from aprfmt.errors import AprfmtError
from aprfmt.inference.capture import parse_key
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import record_points
from aprfmt.inference.rope import compute_frequencies
from aprfmt.model import open_model
from tests.approved import check
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS, MAKERS

SHORT = IDS[:12]
ANSWERS = Path(__file__).parent / "answers"
# Models that together have most kinds of blocks.
BLOCKS = (
    "gpt2",
    "bloom",
    "gpt_oss",
    "gemma3n",
    "minimax_m3_vl",
    "deepseek_v4",
    "qwen3_next",
    "minimax",
    "falcon_h1",
)
EACH = 2  # of a kind: rows that one function makes of the same part


@contextmanager
def patched_model(base: str) -> Iterator[PatchedModel]:
    """Give the unpatched pass of a tiny model."""
    with open_model(tiny_folder(base)) as model:
        patched = PatchedModel.unpatched(model, SHORT, "float32", None)
        try:
            yield patched
        finally:
            patched.weights.close()


@pytest.mark.parametrize("base", MAKERS)
def test_usual_mistakes_can_be_listed_and_made(base: str) -> None:
    with patched_model(base) as patched:
        found = usual_mistakes(patched)
        made = [usual.change.make(patched, usual.layers) for usual in found]
    assert len(found) > 60 and all(isinstance(each, PatchedModel) for each in made)
    assert not any(usual.change.drop or usual.change.general for usual in found)
    parts = {part for usual in found for part in usual.change.where}  # names, no sentences
    assert parts and not any(" " in part for part in parts)
    shards = "in the sum of {} over devices shard 1 of 2 is left out"
    if base in ("llama", "gpt2", "mixtral"):
        said = {usual.change.says for usual in found}
        assert {shards.format(each) for each in ("attention", "the MLP")} <= said


@pytest.mark.parametrize(
    ("base", "name", "tried"),
    [
        ("gemma3", "sliding_window", lambda n: {None, n - 1, n + 1, n // 2, 2 * n}),
        ("gemma2", "attn_softcap", lambda n: {None, 30.0, 50.0}),
        ("gemma2", "final_softcap", lambda n: {None, 30.0, 50.0}),
        ("deepseek_v32", "index_topk", lambda n: {n - 1, n + 1, n // 2, 2 * n}),
        ("minimax_m3_vl", "index_topk", lambda n: {n - 1, n + 1, n // 2, 2 * n}),
        ("minimax_m3_vl", "index_block", lambda n: {n - 1, n + 1, n // 2, 2 * n}),
        ("minimax_m3_vl", "index_local_blocks", lambda n: {0, n - 1, n + 1}),
        ("mixtral", "n_experts_used", lambda n: {1, n - 1, n + 1, 2 * n}),  # of four
        ("gemma3", "window_layers", None),
        ("cohere2", "rope_layers", lambda own: {(True,) * len(own)}),
    ],
)
def test_the_numbers_that_are_tried_are_neighbours_of_the_models(
    base: str, name: str, tried: Any
) -> None:
    """Its half and its double, the next and the one before, and none that the model has."""
    with patched_model(base) as patched:
        own = patched.hp[name]
        found = [
            usual.change.values[name]
            for usual in usual_mistakes(patched)
            if list(usual.change.values) == [name]
        ]
    if tried is None:  # all layers, the others, and those of a count that begins one off
        flipped = tuple(not one for one in own)
        moved = {own[1:] + own[:1], own[-1:] + own[:-1]}
        expected = {(True,) * len(own), flipped, *moved} - {own}
    else:
        expected = {each for each in tried(own) if each != own and (each is None or each != 0
                    or name == "index_local_blocks")}  # fmt: skip
    assert len(found) == len(set(found)) and set(found) == expected


# A scaling -> its numbers of which another usual value turns nothing otherwise, by the paper.
SCALED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "linear": ({"factor": 4.0}, set()),
    # Of sequences no longer than the context the base stays: its factor is of no effect.
    "dynamic": ({"factor": 4.0}, {"factor"}),
    "yarn": ({"factor": 4.0, "original_context_length": 64, "beta_fast": 32.0, "beta_slow": 1.0,
              "attention_factor": 1.2, "truncate": True}, {"beta_fast"}),  # of a head of few pairs
    "llama3": ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_context_length": 64}, set()),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_another_number_of_a_scaling_is_tried_where_it_turns_otherwise(kind: str) -> None:
    """None that turns every pair as the model's own, and none without frequencies."""
    numbers, idle = SCALED[kind]
    # Where a number makes two others equal, something is divided by zero.
    with patched_model("llama") as plain, np.errstate(all="ignore"):
        scaling = {"type": kind, **numbers}
        patched = replace(plain, hp=plain.hp.with_values(rope_scaling=scaling))
        (own,) = rope_kinds(patched)
        at = rope_frequencies(patched, own)
        tried = list(scaling_value_changes(patched, own))
        for change in tried:
            made: Any = change.values["rope_scaling"]
            hp = patched.hp.with_values(rope_scaling=made)
            other = compute_frequencies(hp, own, len(SHORT))
            assert np.isfinite(other.inv_freq).all() and not other.equals(at), change.says
        for key, value in numbers.items():
            assert scaling_change(patched, own, key, value, "its own") is None, key
        assert scaling_change(patched, own, "factor", float("nan"), "no number") is None
    named = {change.where[0].partition(".")[2] for change in tried}
    assert {*numbers} - named == idle


def first_of_each_kind(found: list[UsualMistake]) -> list[UsualMistake]:
    """Return the first rows that one function makes of one part of the model."""
    kinds: Counter[Any] = Counter()
    chosen = []
    for usual in found:
        code = getattr(usual.change.make, "__code__", usual.change.make)
        kind = usual.change.cause, code, usual.change.where
        kinds[kind] += 1
        if kinds[kind] <= EACH:
            chosen.append(usual)
    return chosen


DECAY = (
    "results of the decay are rounded to bfloat16",
    "results of the decay are rounded to float16",
)
ROPE = ("results of rope are rounded to bfloat16", "results of rope are rounded to float16")
EARLIER = (
    "attention reads keys and values of the layer before",
    "attention reads keys and values of the first layer",
)
TAKEN = "ffn_gate and ffn_up are taken from their joined rows"
JOINED = (
    f"{TAKEN} in halves where they alternate row by row",
    f"{TAKEN} row by row where they stand in halves",
)
STREAM = (
    "what attention computed replaces the stream instead of being added",
    "what attention computed is not added to the stream",
)
AFTER_NORM = "the norm's result instead of its input is added to what a sublayer computed"
BEFORE_ATTENTION = f"before attention {AFTER_NORM}"
UNPLACED = ("every token has position 0", "positions are counted from 1 instead of 0")
# Models that together have most kinds of blocks -> rows that change nothing there, or cannot run.
IDLE: dict[str, tuple[str, ...]] = {
    "mixtral": (*DECAY,),
    "gemma3": (*DECAY, *STREAM),
    "gpt2": (*DECAY, *ROPE, *JOINED),
    "olmo2": (
        *DECAY,
        *STREAM,
        "the norm before attention is left out",
        "the norm before the MLP is left out",
    ),
    "deepseek_v32": (*DECAY,),
    "qwen3_next": (*EARLIER, "layers rotate that should not"),
    "kimi_linear": (*ROPE, *EARLIER, *UNPLACED, "the norm of the latent queries is left out"),
    "falcon_h1": (*DECAY,),
    "lfm2_moe": (*DECAY, *EARLIER, "layers rotate that should not"),
    "bloom": (*DECAY, *ROPE, *JOINED, *UNPLACED),
    "llama4": (
        *DECAY,
        "q and k are not normalised",
        "q and k are normalised after rope instead of before",
        "q and k are normalised over all heads together",
        "q is not normalised",
    ),
    "minimax": (
        *DECAY,
        *EARLIER,
        *STREAM,
        "the kernels are reversed: the first tap is the token's own",
        AFTER_NORM,
        "the taps are one position early: none is the token's own",
        BEFORE_ATTENTION,
        "no state is carried: every token sees itself only",
        "the state is read newest first: the taps of earlier tokens are reversed",
    ),
    "minimax_m3_vl": (
        *DECAY,
        "the activation is silu; the model says swiglu_oai",
        "16 elements of each head are rotated; the model says 8",
        "attention reads keys and values of the layer before",
        "the activation is quick_gelu; the model says swiglu_oai",
        "the activation is gelu; the model says swiglu_oai",
        "the activation is relu2; the model says swiglu_oai",
        "an indexer chooses 5 blocks; the model says 4",
        "the activation's input is clamped at -0.5 and 0.5",
        "the activation's input is clamped at -1 and 1",
        "attention reads every key, not those that an indexer chooses",
        "results of the activation are rounded to bfloat16",
        "0 blocks next to a query are always read; the model says 2",
        "results of the activation are rounded to float16",
        "1 blocks next to a query are always read; the model says 2",
        "every group of heads reads the blocks that the first one's indexer chooses",
        "1 is added to up",
        "1 is taken from up",
    ),
    "gemma3n": (
        *DECAY,
        *STREAM,
        "the norm before the head is left out",
        "the norm after attention and the MLP is applied to the sum with the stream",
        "the norm after attention is applied to the sum with the stream",
    ),
}
# Rows with one result: no trace tells them apart.
ALIKE = {
    frozenset(
        {
            "an indexer's blocks have 4 keys; the model says 3",
            "an indexer's queries and keys are not rotated",
        }
    ),
    frozenset({BEFORE_ATTENTION, AFTER_NORM}),
    frozenset({"rope is not applied, or every token has position 0", "nothing is rotated"}),
    frozenset({"no bias is added", "no dt_bias is added before the decay's softplus"}),
    frozenset({"no bias is added", "the correction added for the choice of experts is left out"}),
}


def told(usual: UsualMistake, moved: str = "") -> str:
    """Return a line of what is changed and where, and how far it moves the logits."""
    change = usual.change
    where = dict.fromkeys(part.partition(".")[2] or part for part in change.where)
    of = "" if usual.layers is None else f" of layers {sorted(usual.layers)}"
    values = repr(change.values)
    shown = values if len(values) < 100 else f"{values[:60]}... of {len(values)} characters"
    return f"{change.cause}: {change.says} [{', '.join(where)}{of}] {shown}{moved}"


@pytest.mark.parametrize("base", IDLE)
def test_a_usual_mistake_changes_the_pass_and_no_other_one_does_the_same(base: str) -> None:
    """All of them are those of the approved text, in its order, and move the logits as far."""
    idle, results = [], dict[bytes, list[str]]()
    with patched_model(base) as patched:
        plain = record_points(patched)
        found = usual_mistakes(patched)
        lines = {id(usual): told(usual) for usual in found}
        for usual in first_of_each_kind(found):
            try:
                values = record_points(usual.change.make(patched, usual.layers))
            except (AprfmtError, ValueError, KeyError):  # as a search takes it
                values = plain
            if all(
                key in values and np.array_equal(value, values[key], equal_nan=True)
                for key, value in plain.items()
            ):
                idle.append(usual.change.says)
            else:
                results.setdefault(values["logits"].tobytes(), []).append(usual.change.says)
                off = np.linalg.norm(values["logits"] - plain["logits"])
                far = f": moves {off / np.linalg.norm(plain['logits']):.3g}"
                lines[id(usual)] = told(usual, far * (usual.change.cause != "rounding"))
    check(ANSWERS / f"usual_{base}.txt", "\n".join(lines.values()))
    alike = [frozenset(each) for each in results.values() if len(each) > 1]
    assert sorted(idle) == sorted(IDLE[base])
    assert [each for each in alike if each not in ALIKE] == []


def test_mistakes_of_models_of_other_blocks_are_those_that_were_approved() -> None:
    """A line for each that no model before has; the first of a kind says how far logits move."""
    lines: dict[str, str] = {}
    kinds: Counter[Any] = Counter()
    for base in BLOCKS:
        lines[base] = f"- {base}"
        with patched_model(base) as patched:
            plain = record_points(patched)["logits"]
            for usual in usual_mistakes(patched):
                line = told(usual)
                if line in lines:
                    continue
                code = getattr(usual.change.make, "__code__", usual.change.make)
                kind = usual.change.cause, code, line.partition(" [")[2].partition("]")[0]
                kinds[kind] += 1
                lines[line] = line
                if kinds[kind] == 1 and usual.change.cause != "rounding":
                    lines[line] += moved(patched, plain, usual)
    check(ANSWERS / "usual.txt", "\n".join(lines.values()))


def moved(patched: PatchedModel, plain: Any, usual: UsualMistake) -> str:
    """Return in words how far a mistake moves the logits."""
    try:
        logits = record_points(usual.change.make(patched, usual.layers))["logits"]
    except (AprfmtError, ValueError, KeyError) as error:  # as a search takes it
        return f": {type(error).__name__}"
    if logits.shape != plain.shape:
        return f": logits {logits.shape}"
    return f": moves {np.linalg.norm(logits - plain) / np.linalg.norm(plain):.3g}"


# What no single layer reads, or what lists the layers itself.
OF_THE_PASS = {
    "embedding_scale",
    "logit_scale",
    "final_softcap",
    "positions",
    "output.weight",
    "token_embd.weight",
    "window_layers",
    "rope_layers",
    "output_norm.bias",
}


@pytest.mark.parametrize("base", ["gpt_neox", "mixtral", "falcon_h1"])
def test_a_mistake_can_be_made_in_the_last_layer_alone(base: str) -> None:
    """Earlier layers are as they were then, whatever is changed: a number, an operation, a weight.

    Seen red: hyperparameters that were changed in all layers at once.
    """
    with patched_model(base) as patched:
        plain, last = record_points(patched), patched.n_layers - 1
        ways: dict[Any, UsualMistake] = {}
        for usual in usual_mistakes(patched):
            make = getattr(usual.change.make, "__code__", usual.change.make)
            ways.setdefault((usual.change.cause, make, usual.change.scoped), usual)
        for usual in ways.values():
            if not usual.change.scoped:
                # Ranks hold the same shares in all layers.
                of_ranks = usual.change.cause == "shard_order"
                assert of_ranks or OF_THE_PASS & {*usual.change.where}, usual.change.says
            elif usual.layers is None:
                values = record_points(usual.change.make(patched, frozenset({last})))
                for key, value in plain.items():
                    layer = parse_key(key)[1]
                    if 0 <= layer < last or key.startswith("embd"):
                        assert np.array_equal(value, values[key]), (usual.change.says, key)


@pytest.mark.parametrize("base", ["llama", "gemma2"])
def test_a_window_is_tried_where_rows_begin_to_differ(base: str) -> None:
    """Of a model without any: from the first differing row on, and none where all rows differ."""
    with patched_model(base) as patched:
        own = usual_mistakes(patched)

        def added(late: int | None) -> list[UsualMistake]:
            apart = np.zeros(len(SHORT))
            if late is not None:
                apart[late:] = 1.0
            view = SimpleNamespace(tolerance=1e-3, point="out", residual=None)
            case = SimpleNamespace(patched=patched, view=view, distances_by_row=lambda view: apart)
            found = Search._usual_changes(cast(Any, SimpleNamespace(case=case)))
            assert [one.change.says for one in found[: len(own)]] == [
                one.change.says for one in own
            ]
            return found[len(own) :]

        assert not added(None) and not added(0)
        for late in (1, 5, len(SHORT) - 1):
            if any(patched.hp["window_layers"]):
                assert not added(late)
                continue
            (usual,) = added(late)
            assert usual.change.cause == "sliding_window" and str(late) in usual.change.says
            made = record_points(usual.change.make(patched, usual.layers))
            at = np.arange(len(SHORT))
            outside = at[:, None] - at >= late
            for layer in range(patched.n_layers):
                probs = made[f"L{layer}.probs"]
                assert not probs[..., outside].any() and (probs[..., at, at] > 0).all()
                inside = ~outside & (at[:, None] >= at)
                assert (probs[..., inside] > 0).all()


@pytest.mark.parametrize("base", ["llama", "gemma3", "mixtral", "deepseek_v32"])
def test_every_mistake_has_a_cause_of_the_table_and_a_sentence(base: str) -> None:
    with patched_model(base) as patched:
        found = [*usual_mistakes(patched), added_window_mistake(patched, 5)]
    assert {usual.change.cause for usual in found} <= CAUSES.keys()
    assert all(" " in usual.change.says for usual in found)
