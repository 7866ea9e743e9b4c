"""What a later pass reads of an earlier one: a cache, a window or a state that is wrong from there.

The first tokens are right, and all from one token on are not.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.drafted_rows import drafted_row_changes
from aprfmt.causes.forward.mismatch import Mismatch
from aprfmt.causes.forward.single_pass import changes_of_one_pass, tokens_of_one_pass
from aprfmt.causes.forward.table import TABLE
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.attention_rows import solve_masks
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import record_points, run_shadow_pass
from aprfmt.inference.session import Session
from aprfmt.inference.trace import Trace
from aprfmt.model import open_model
from tests.causes.test_planted_mistakes import INNER
from tests.diagnosis.engines import LONG, NUMPY, tiny_folder, trace

Plant = Callable[[PatchedModel], PatchedModel]
IDS, LATER = LONG[:24], 15  # tokens, and the first one of the later pass


def slots(change: Callable[[Any], Any], reads: str = "kv") -> Plant:
    """Plant rows of the cache that only the later pass reads as `change` makes them."""

    def scores(op: Any, at: Any, q: Any, k: Any, heads: Any) -> Any:
        made = np.array(op(q, k, heads))
        if "k" in reads:
            made[:, LATER:] = np.asarray(op(q, change(np.array(k)), heads))[:, LATER:]
        return made

    def mix(op: Any, at: Any, probs: Any, v: Any) -> Any:
        made = np.array(op(probs, v))
        made[LATER:] = np.asarray(op(probs, change(np.array(v))))[LATER:]
        return made

    return lambda patched: patched.with_op("scores", scores, None).with_op("mix", mix, None)


def unseen(start: int, stop: int) -> Plant:
    """Plant keys that the later pass does not see, in layers with a window alone if some have."""

    def probs(op: Any, at: Any, scores: Any, heads: Any) -> Any:
        mask = np.array(heads.mask)
        mask[LATER:, start:stop] = False
        return op(scores, replace(heads, mask=mask, causal=None))

    def make(patched: PatchedModel) -> PatchedModel:
        windows = frozenset(np.flatnonzero(patched.hp["window_layers"]).tolist())
        return patched.with_op("probs", probs, windows or None)

    return make


def anew(op: str) -> Plant:
    """Plant an operation that begins without the tokens before in the later pass."""

    def override(beneath: Any, at: Any, *given: Any) -> Any:
        if op == "convolve":
            window, kernel, *bias = given
            cut = np.array(window)
            cut[: LATER + kernel.shape[1] - 1] = 0
            made = np.array(beneath(window, kernel, *bias))
            made[LATER:] = beneath(cut, kernel, *bias)[LATER:]
            return made
        n = len(given[0])
        later = [x[LATER:] if getattr(x, "shape", ())[:1] == (n,) else x for x in given[:-1]]
        made = np.array(beneath(*given)[0])
        made[LATER:] = beneath(*later, None)[0]
        return made, None

    return lambda patched: patched.with_op(op, override, None)


def drafted(rows: dict[int, int], beside: bool = False) -> Plant:
    """Plant cached rows {position: id} of other tokens, in place of the own or beside them."""

    def make(patched: PatchedModel) -> PatchedModel:
        ids = [rows.get(at, token) for at, token in enumerate(patched.ids)]
        theirs, at = record_points(replace(patched, ids=tuple(ids))), list(rows)

        def read(what: str, layer: int, own: Any) -> Any:
            other = theirs[f"L{layer}.{'k_rope' if what == 'k' else 'v'}"]
            if beside:
                return np.concatenate([own, other[at]])
            made = np.array(own)
            made[at] = other[at]
            return made

        def scores(op: Any, here: Any, q: Any, k: Any, heads: Any) -> Any:
            return op(q, read("k", here.layer, k), heads)

        def probs(op: Any, here: Any, scores: Any, heads: Any) -> Any:
            late = np.arange(len(scores[0]))[:, None] >= LATER
            mask = np.concatenate([heads.mask, late.repeat(len(at), 1)], 1)
            return op(scores, replace(heads, mask=mask, causal=None))

        def mix(op: Any, here: Any, probs: Any, v: Any) -> Any:
            return op(probs, read("v", here.layer, v))

        if not beside:
            return patched.with_keys_and_values(read, None, LATER)
        made = patched.with_op("scores", scores, None).with_op("probs", probs, None)
        return made.with_op("mix", mix, None)

    return make


def copied(to: int, source: int) -> Callable[[Any], Any]:
    """Return a function that copies one row over another."""

    def change(x: Any) -> Any:
        x[to] = x[source]
        return x

    return change


def zeroed(x: Any) -> Any:
    x[LATER - 1] = 0
    return x


def moved(x: Any) -> Any:
    x[:LATER] = x[1 : LATER + 1]
    return x


FAULTS = {
    "a stale slot": ("llama", slots(copied(LATER - 1, LATER - 2)), "kv_cache"),
    "a slot never written": ("mixtral", slots(zeroed), "kv_cache"),
    "values of a stale slot": ("qwen3", slots(copied(LATER - 2, LATER - 3), "v"), "kv_cache"),
    "slots one off": ("gemma2", slots(moved), "kv_cache"),
    "nothing before": ("gemma2", unseen(0, LATER), "mask"),
    "the last one unseen": ("llama", unseen(LATER - 1, LATER), "mask"),
    "a convolution anew": ("mamba2", anew("convolve"), "conv_state"),
    "a short convolution anew": ("lfm2", anew("convolve"), "conv_state"),
    "a scan anew": ("mamba2", anew("scan"), "ssm_state"),
    "a delta rule anew": ("qwen3_next", anew("delta"), "ssm_state"),
}


# What is hidden: values inside a mixer, which engines rarely record.
HIDDEN = {*INNER, "attn", "ssm_scan", "delta", "conv", "ssm_conv"}
DRAFTED = {
    "one": ("llama", {LATER - 1: 5}, False),
    "padding": ("qwen3", {LATER - 2: 0}, False),
    "several": ("gpt_oss", {LATER - 3: 7, LATER - 2: 90, LATER - 1: 41}, False),
    "one of many axes": ("deepseek_v3", {LATER - 1: 5}, False),
    "left behind": ("gemma2", {LATER: 5, LATER + 1: 33}, True),
}
CASES: dict[str, tuple[str, Plant, str]] = FAULTS | {
    f"drafts: {name}": (base, drafted(rows, beside), "kv_cache")
    for name, (base, rows, beside) in DRAFTED.items()
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_later_pass_reads_is_told(name: str) -> None:
    base, plant, cause = CASES[name]
    with open_model(tiny_folder(base)) as model:
        with Session.open(model, NUMPY("cpu", "float32")) as session:
            whole = session.trace(IDS, tuple(session.points), positions="all")
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        plain, made = record_points(patched), record_points(plant(patched))
        records = {k: r for k, r in whole.records.items() if k.rpartition(".")[2] not in HIDDEN}
        shapes = {key: value.shape for key, value in plain.items()}
        recorded = RecordedTrace(Trace(whole.run, records, whole.aliases, made.get), IDS, shapes)
        found = run_shadow_pass(patched, recorded)
        case = Mismatch(patched, recorded, next(iter(found.flagged)), found, plain, fitting=False)
        late = np.flatnonzero(case.distances_by_row(case.view) > 2 * case.view.tolerance)
        rows = [row for row in TABLE if row.cause in (cause, "recurrence")]
        changes = [change for row in rows for change in row.propose(case)]
        changes += [*solve_masks(late, case.tokens), *drafted_row_changes(case)]
        right = [c for c in changes if case.trial(c) <= case.view.tolerance]
        patched.weights.close()
    assert {change.cause for change in right} == {cause}
    assert any(re.search(rf"tokens? (from )?{LATER}\b", change.says) for change in right)
    if name.startswith("drafts: "):
        tokens = DRAFTED[name.removeprefix("drafts: ")][1]
        told = {str(at): token for at, token in tokens.items()}
        assert told in [change.values.get("tokens") for change in right]


STEP = 18  # the one token of a pass that runs otherwise, with others before and after it


def in_one_step(first: int, last: int, op: str, change: Callable[..., Any]) -> Plant:
    """Plant a change of an operation's result for queries of some tokens alone."""

    def override(beneath: Any, at: Any, *given: Any) -> Any:
        made = np.array(beneath(*given))
        made[:, first : last + 1] = change(beneath, *given)[:, first : last + 1]
        return made

    return lambda patched: patched.with_op(op, override, None)


def without_own_token(op: Any, scores: Any, heads: Any) -> Any:
    mask = np.array(heads.mask) & ~np.eye(len(heads.mask), dtype=bool)
    return op(scores, replace(heads, mask=mask, causal=None))


def without_sinks(op: Any, scores: Any, heads: Any) -> Any:
    return op(scores, replace(heads, sinks=None))


ONE_PASS = {
    "own token": ("llama", STEP, STEP, without_own_token, "mask"),
    "sinks": ("gpt_oss", STEP, STEP, without_sinks, "softmax_reduction"),
    "the last chunk": ("qwen3", STEP, len(IDS) - 1, without_own_token, "mask"),
}


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_fault_of_one_pass_is_told_with_its_tokens(name: str) -> None:
    """Seen red: a step that ran otherwise was located, and none of the usual mistakes fitted."""
    base, first, last, change, cause = ONE_PASS[name]
    with open_model(tiny_folder(base)) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        plain = record_points(patched)
        wrong = record_points(in_one_step(first, last, "probs", change)(patched))
        usual = [(one.change, one.layers) for one in usual_mistakes(patched)]
        late = np.flatnonzero(np.abs(wrong["L0.attn"] - plain["L0.attn"]).max(1))
        tokens = tokens_of_one_pass(late)
        assert tokens == (first, last)
        told = {
            (made.cause, *made.values["tokens"])
            for made, layers in changes_of_one_pass(usual, patched, *tokens)
            if made.cause == cause
            and np.array_equal(record_points(made.make(patched, layers))["logits"], wrong["logits"])
        }
        patched.weights.close()
    assert told == {(cause, first, last)}


CHUNKS = {
    "a chunk between others": ("llama", 16, 23, without_own_token, "mask", "tokens 16 to 23 alone"),
    "the second of three": ("qwen3", 11, 25, without_own_token, "mask", "tokens 11 to 25 alone"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_fault_of_one_chunk_is_told_from_logits_alone(name: str) -> None:
    """Seen red: located only, as the tokens behind the chunk read its rows in the next layer."""
    base, first, last, change, cause, says = CHUNKS[name]
    ids, folder = LONG[:40], tiny_folder(base)
    with open_model(folder) as model:
        patched = PatchedModel.unpatched(model, ids, "float32", None)
        wrong = record_points(in_one_step(first, last, "probs", change)(patched))
        patched.weights.close()
    run = trace(
        folder,
        f"chunk-{base}-{first}",
        ids=ids,
        points=frozenset({"logits"}),
        rename=lambda arrays: {key: wrong.get(key, own) for key, own in arrays.items()},
    )
    found = diagnose(str(folder), str(run))
    assert found.lead is not None and found.cause == cause, found.sentence
    assert found.lead.certainty == "confirmed" and says in found.lead.says


# Model -> the tokens whose positions are counted anew, from a number.
RESTARTS = {
    "llama": (16, 40, 0),
    "qwen3": (16, 40, 1),  # the number of the block
    "gpt_neox": (16, 28, 0),  # in one chunk alone
    "gpt2": (9, 40, 0),  # learned positions
    "falcon": (9, 40, 18),  # the prefix counted twice
}


@pytest.mark.parametrize("base", RESTARTS)
def test_positions_counted_anew_behind_a_prefix_are_told_from_logits_alone(base: str) -> None:
    """Seen red: located only, as single layers and masks took the passes of the search."""
    first, end, number = RESTARTS[base]
    positions = [number + at - first if first <= at < end else at for at in range(40)]
    folder, logits = tiny_folder(base), frozenset({"logits"})
    made = trace(folder, f"restart-{base}", ids=LONG[:40], points=logits, positions=positions)
    found = diagnose(str(folder), str(made))
    assert found.lead is not None and found.cause == "positions", found.sentence
    assert found.lead.certainty == "confirmed"
    told = ", ".join(str(number + at) for at in range(6))
    assert f"from token {first} on tokens have positions {told}" in found.lead.says


@pytest.mark.parametrize("rows", [[], [0, 1], [5, 7]])
def test_rows_that_no_single_pass_has_are_of_none(rows: list[int]) -> None:
    assert tokens_of_one_pass(np.array(rows, np.int64)) is None


@pytest.mark.parametrize(("base", "point"), [("llama", "attn_out"), ("mixtral", "moe_out")])
def test_a_wrong_point_of_a_dump_of_later_rows_alone_is_located(base: str, point: str) -> None:
    """Seen red: IndexError, where a rule took the rows of the dump for those of the pass."""

    def alter(name: str, layer: int, x: Any) -> Any:
        return x[:, ::-1] if (name, layer) == (point, 1) else x

    folder = tiny_folder(base)
    made = trace(folder, f"later-{base}", cached=20, cache=KVCache, alter=lambda: alter)
    found = [row for row in diagnose(str(folder), str(made)).findings if row.verdict == "bug"]
    assert found and found[0].first == f"L1.{point}"
