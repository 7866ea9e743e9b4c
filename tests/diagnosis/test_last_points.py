"""The last point of a dump tells an operation that is left out from a value read before it?

No: both give the same dump. So neither is confirmed, and what more to capture is said.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import broken_here, tiny_folder, trace

Arrays = dict[str, Any]
STREAM = frozenset({"out", "final_norm"})


@dataclass(frozen=True)
class Last:
    """A dump whose last point has the value of the point before its operation.

    `points` are captured, `last` has the value of `before`, and keys after it are dropped. `cause`
    is what an engine that leaves the operation out would be told, `decides` the point to capture.
    """

    arch: str
    points: frozenset[str]
    last: str
    before: str
    cause: str
    decides: str
    options: dict[str, Any] = field(default_factory=dict)


LAST = {
    "final norm": Last("llama", STREAM, "final_norm", "L2.out", "norm_skipped", "logits"),
    "layer norm": Last("llama", frozenset({"embd", "attn_norm"}), "L0.attn_norm", "embd",
                       "norm_skipped", "L0.attn"),
    "embedding": Last("gemma2", frozenset({"embd", "embd_scaled"}), "embd_scaled", "embd",
                      "multiplier", "L0.mid"),
    "logits": Last("gemma2", STREAM | {"logits", "logits_raw"}, "logits", "logits_raw",
                   "softcap", "the probabilities that it samples from"),
    "rope": Last("llama", frozenset({"out", "q", "q_rope"}), "L1.q_rope", "L1.q", "rope_layers",
                 "L1.attn"),
}  # fmt: skip


def cut(last: Last) -> Callable[[Arrays], Arrays]:
    """The recorded values up to the last point, which has those of the point before it."""

    def changed(values: Arrays) -> Arrays:
        keys = list(values)
        kept = keys[: keys.index(last.last) + 1]
        made = {key: values[key] for key in kept if key != last.before}
        return made | {last.last: values[last.before].reshape(values[last.last].shape)}

    return changed


@pytest.mark.parametrize("name", LAST)
def test_what_no_later_point_tells_apart_is_explained(name: str) -> None:
    """Seen red: "the norm before the head is left out" was confirmed where it was not."""
    last = LAST[name]
    folder = tiny_folder(last.arch, **last.options)
    made = trace(folder, f"last-{name.replace(' ', '-')}", points=last.points, rename=cut(last))
    found = diagnose(str(folder), str(made))
    lead = found.findings[0]
    assert (lead.certainty, lead.confidence) == ("explained", "ambiguous"), found.sentence
    assert {lead.cause, *lead.also} >= {last.cause, "capture_point"}, found.sentence
    assert f"{last.decides} of the same run would tell which" in found.sentence


def without_last_norm(here: Any, beneath: Any, x: Any, *given: Any, **named: Any) -> Any:
    """An engine's norm: the one behind the last layer returns its input."""
    return x if here.point == "out" and here.layer == 3 else beneath(x, *given, **named)


def read_before_the_norm(values: Arrays) -> Arrays:
    """A recorder that reads the stream before the final norm, under the norm's name."""
    kept = {key: value for key, value in values.items() if key != "L2.out"}
    return kept | {"final_norm": values["L2.out"]}


def hidden_states(values: Arrays) -> Arrays:
    """transformers' hidden_states, which have no output of the last layer."""
    return {key: value for key, value in values.items() if key != "L2.out"}


def test_the_point_that_was_asked_for_decides_for_the_engine() -> None:
    folder = tiny_folder("llama")
    made = trace(folder, "last-skipped", points=STREAM | {"logits"}, rename=hidden_states,
                 **broken_here(rms_norm=without_last_norm))  # fmt: skip
    found = diagnose(str(folder), str(made))
    lead = found.findings[0]
    assert (lead.cause, lead.certainty, lead.also) == ("norm_skipped", "confirmed", ())
    assert found.exit_code == 1 and "would tell which" not in found.sentence


def test_the_point_that_was_asked_for_decides_for_the_recorder() -> None:
    folder = tiny_folder("llama")
    made = trace(folder, "last-read-before", points=STREAM | {"logits"},
                 rename=read_before_the_norm)  # fmt: skip
    found = diagnose(str(folder), str(made))
    lead = found.findings[0]
    assert (lead.cause, lead.certainty, lead.also) == ("capture_point", "confirmed", ())
    assert found.exit_code == 0 and "would tell which" not in found.sentence
    assert "what is named final_norm is the model's L2.out" in found.sentence


def test_a_sound_dump_without_later_points_is_the_same() -> None:
    folder = tiny_folder("llama")
    made = trace(folder, "last-sound", points=STREAM, rename=hidden_states)
    found = diagnose(str(folder), str(made))
    assert found.verdict == "same" and not found.findings, found.sentence
