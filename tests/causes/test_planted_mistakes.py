"""A mistake that is planted in a pass is proposed again by the hypotheses, and removes itself.

A usual mistake is made in the pass of a tiny model whose points are then taken for a run's: the
hypotheses see arrays and nothing else. The mistakes are the first of each kind (what differs first,
and why) in models that together have most blocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from aprfmt.causes import CAUSES
from aprfmt.causes.forward.mismatch import Change, Mismatch
from aprfmt.causes.forward.table import TABLE
from aprfmt.causes.forward.usual_blocks import UsualMistake
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import record_points, run_shadow_pass
from aprfmt.inference.session import Session
from aprfmt.inference.trace import Trace
from aprfmt.model import open_model
from tests.causes.test_usual_mistakes import SHORT
from tests.diagnosis.engines import NUMPY, tiny_folder

SO, ALONE = "in its own words", "by the search alone: no hypothesis is about it"
# Model -> what is planted, by how its sentence begins -> what is proposed for it.
PLANTED: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "rope's base is 10000; the model says 5000": SO,
        "positions are divided by 2, which the model does not say": SO,
        "rope pairs elements 2i with 2i + 1;": SO,
        "the activation is gelu; the model says silu": SO,
        "scores are multiplied by 1; the model says 0.288675135": SO,
        "the norms add eps 1e-05 where the model says 0.0003": SO,
        "embedding_scale is 6.92820323; the model says 1": ALONE,
        "the head is the embedding; the model has a head of its own": SO,
        "attention and MLP read one input and are added together": SO,
        "the norms multiply by their weight plus 1": SO,
        "the chosen experts' weights are not renormalised to sum 1": SO,
        "attention is not causal:": SO,
        "query heads read key and value heads 0, 1, 0, 1; they should read 0, 0, 1, 1": SO,
        "6 elements of each head are rotated; the model says 12": SO,
        "nothing is rotated": "layer 0 does not rotate; it should",
        "the softmax sums over the first tile of 8 keys only": SO,
        "every token has position 0": SO,
        "keys and values are not the tokens' own:": SO,
        "the stream is added to itself instead of what attention computed": ALONE,
        "keys are not rotated": "layer 0 does not rotate; it should",
        "the stream is added to itself instead of what the MLP computed": ALONE,
        "a token takes 1 experts; the model says 2": SO,
        "values are rotated as the keys": ALONE,
        "attention and MLP read one stream, each by its own norm, and are added together": SO,
    },
    "gemma3": {
        "the activation is silu; the model says gelu_tanh": SO,
        "attention reaches all earlier tokens; the model says 8 tokens": (
            "attention reaches all earlier tokens; the model says 8"
        ),
        "q and k are not normalised": ALONE,
        "embedding_scale is 6.9375; the model says 6.92820323": SO,
        "every layer has the window; the model says only some": ALONE,
        "the norm behind attention and the MLP is applied to the sum with the stream": ALONE,
        "1 is added to up": SO,
    },
    "deepseek_v32": {
        "rope's base is 10000; the model says 5000": SO,
        "positions are divided by 2, which the model does not say": SO,
        "rope pairs element i with i + d/2;": SO,
        "no bias is added": ALONE,
        "attention and MLP read one input and are added together": SO,
        "4 elements of each head are rotated; the model says 8": SO,
        "nothing is rotated": "layer 0 does not rotate; it should",
        "every token has position 0": SO,
        "keys are not rotated": "layer 0 does not rotate; it should",
        "an indexer chooses 4 keys; the model says 5": SO,
        "rope turns backwards: the sine has the other sign": SO,
        "the router is softmax; the model says sigmoid_bias": SO,
        "an indexer's heads all weigh one": SO,
        "an indexer's queries and keys are not rotated": SO,
    },
    "lfm2_moe": {
        "no bias is added": ALONE,
        "the kernels are reversed: the first tap is the token's own": SO,
        "no state is carried: every token sees itself only": SO,
        "the gate before the convolution is left out": SO,
        "the gate after the convolution is left out": SO,
    },
    "falcon_h1": {
        "the activation is gelu; the model says silu": SO,
        "no bias is added": ALONE,
        "the head is the embedding; the model has a head of its own": SO,
        "attention and MLP read one input and are added together": SO,
        "no dt_bias is added before the time step's softplus": SO,
        "A is not negated: states grow where they should decay": SO,
        "logit_scale is 1; the model says 0.6": SO,
        "B and C are exchanged": SO,
        "all time steps are 1": SO,
        "the norm stands on the other side of the gate": SO,
        "no state is carried: every token sees itself only": SO,
    },
    "qwen3_next": {
        "no bias is added": "no dt_bias is added before the decay's softplus",
        "in the delta net dt_bias is subtracted": SO,
        "values are rotated as the keys": ALONE,
        "in the delta net keys are not normalised": SO,
        "in the delta net beta has no sigmoid": SO,
        "in the delta net the output gate is left out": SO,
        "in the delta net the activation behind the convolution is left out": SO,
    },
}


def planted(base: str) -> Iterator[tuple[str, UsualMistake, Mismatch]]:
    """Give each mistake of the table with the first point in which a run that has it differs."""
    with open_model(tiny_folder(base)) as model:
        with Session.open(model, NUMPY("cpu", "float32")) as session:
            whole = session.trace(SHORT, tuple(session.points), positions="all")
        patched = PatchedModel.unpatched(model, SHORT, "float32", None)
        plain = record_points(patched)
        shapes = {key: value.shape for key, value in plain.items()}
        every = usual_mistakes(patched)
        for begin in PLANTED[base]:
            exact = [usual for usual in every if usual.change.says == begin]
            usual = (exact or [each for each in every if each.change.says.startswith(begin)])[0]
            made = record_points(usual.change.make(patched, usual.layers))
            same = {
                k: r for k, r in whole.records.items() if k in made and made[k].shape == shapes[k]
            }
            trace = Trace(whole.run, same, whole.aliases, made.get)
            recorded = RecordedTrace(trace, SHORT, dict(shapes))
            found = run_shadow_pass(patched, recorded)
            view = next(iter(found.flagged))
            yield begin, usual, Mismatch(patched, recorded, view, found, plain, fitting=False)
        patched.weights.close()


def check_words(change: Change, hp: Mapping[str, Any]) -> None:
    """Hold that a change names a cause, says a sentence, and is none of what the model says."""
    assert change.cause in CAUSES and " " in change.says and change.says not in CAUSES
    assert change.where and not any(" " in part for part in change.where), change.where
    if len(change.values) == 1:
        ((name, value),) = change.values.items()
        if name in hp and name not in ("sliding_window", "rope_style"):
            assert value != hp[name], change.says


@pytest.mark.parametrize("base", PLANTED)
def test_a_planted_mistake_is_proposed_and_removes_itself(base: str) -> None:
    told = {}
    for begin, usual, case in planted(base):
        changes = [change for row in TABLE for change in row.propose(case)]
        for change in changes:
            check_words(change, case.patched.hp)
        own = [change for change in changes if change.cause == usual.change.cause]
        own.sort(key=lambda change: change.says != usual.change.says)
        right = [change for change in own if case.trial(change) <= case.view.tolerance]
        says = usual.change.says
        told[begin] = ALONE if not right else SO if right[0].says == says else right[0].says
    assert told == PLANTED[base]
