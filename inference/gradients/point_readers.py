"""Which operations of a pass read each capture point: where a gradient of it comes from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aprfmt.inference.capture import key_name
from aprfmt.inference.replay.patched_model import (
    MOVES,
    CallRecorder,
    PatchedModel,
    arrays,
    may_share_memory,
)
from aprfmt.model import Model

# What the operations of a backend are called where they are said to be wrong.
WORDS: Mapping[str, str] = {
    "linear": "the product with a weight",
    "router": "the router's product",
    "add": "the sum with the stream",
    "add_wide": "the sum with the stream",
    "mul": "the product of two values",
    "scale": "a constant factor",
    "activate": "the activation",
    "sigmoid": "the sigmoid",
    "rms_norm": "the RMS norm",
    "layer_norm": "the layer norm",
    "rope": "rope",
    "scores": "the scores of queries and keys",
    "probs": "the softmax of the scores",
    "mix": "the sum of values by probabilities",
    "add_weighted": "the weighted sum of the experts",
    "delta": "the delta rule",
    "scan": "the scan of the state",
    "convolve": "the convolution",
    "embed": "the rows of the table",
}


@dataclass(frozen=True)
class PointReader:
    """A point that is computed from another one, and the operations that do it, as words."""

    key: str
    operations: tuple[str, ...]


class _Readers(CallRecorder):
    """A recorder that notes which later points are computed from each point, and how."""

    def __init__(self) -> None:
        """Begin without points; `readers` will have what reads each point, by its key."""
        super().__init__()
        self._values: dict[str, Any] = {}
        self.readers: dict[str, list[PointReader]] = {}

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Note the earlier points from which operations computed this one; return x unchanged."""
        self.set_location(point, layer)
        key = key_name(point, layer)
        calls = [call for call in self.take_calls(x) if call.op not in MOVES]
        inside = [call.result for call in calls]
        for other, value in self._values.items():
            reads = [
                call
                for call in calls
                if any(may_share_memory(arg, value) for arg in arrays(call.args))
                and not any(may_share_memory(value, one) for one in inside)
            ]
            if reads:
                first = next(i for i, call in enumerate(calls) if call is reads[0])
                operations = tuple(
                    dict.fromkeys(WORDS.get(call.op, call.op) for call in calls[first:])
                )
                self.readers.setdefault(other, []).append(PointReader(key, operations))
        self._values[key] = x
        return x


def point_readers(model: Model, ids: Sequence[int]) -> Mapping[str, Sequence[PointReader]]:
    """Return {key of a point: the points that are computed from it}, of one pass on numpy.

    `ids` are a few tokens; their number does not matter. Points that nothing reads are left out.
    """
    recorder = _Readers()
    PatchedModel.unpatched(model, ids, "float32").run(recorder)
    return recorder.readers


def suspects(
    readers: Mapping[str, Sequence[PointReader]], key: str, compared: Collection[str]
) -> list[PointReader]:
    """Return the points computed from the point `key`, in which its wrong gradient may begin.

    Each comes with the operations that compute it. Points are followed up to the first one of
    `compared` on each branch, which is returned too.
    """
    found: dict[str, PointReader] = {}
    front = [key]
    while front:
        for reader in readers.get(front.pop(), ()):
            if reader.key not in found:
                found[reader.key] = reader
                if reader.key not in compared:
                    front.append(reader.key)
    return list(found.values())
