"""The two sides of a comparison: each a model, a run of a model, or a saved trace.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aprfmt.errors import CodecError, FormatError
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.engines.opening import open_trace, trace_kind
from aprfmt.inference.replay.served_adapter import ServedAdapter
from aprfmt.inference.running import RunRequest, make_request, run_and_trace
from aprfmt.model import Model, open_damaged, open_model
from aprfmt.model.completeness import ANY

if TYPE_CHECKING:
    from aprfmt.inference.trace import Trace

SideKind = Literal["model", "run", "trace"]


@dataclass
class Side:
    """Side A or B: `text` as the user gave it, `model` the weights it ran on, if known.

    `adapter` is what was merged into the weights.
    """

    label: str
    text: str
    kind: SideKind
    path: Path
    model: Model | None = None
    request: RunRequest | None = None
    adapter: ServedAdapter | None = None

    @property
    def device_choice(self) -> DeviceChoice | None:
        """The device that the side's model runs on; None for a saved trace."""
        return None if self.request is None else self.request.choice


def open_side(label: str, text: str, stack: ExitStack, arch: str | None) -> Side:
    """Return a side with its model opened; a saved trace is recognised but not read yet.

    `label` is "A" or "B", `text` what the user gave for it; `stack` closes the model. Raises
    UsageError for a missing file or an unknown run, FormatError for a damaged file.
    """
    path = Path(text)
    if path.exists() and trace_kind(path) is not None:
        return Side(label, text, "trace", path)
    request = make_request(text, arch=arch, allow_missing=ANY)
    model = stack.enter_context(open_tolerating_damage(request.model, arch))
    model.cache_remote_reads()
    kind: SideKind = "model" if str(request.model) == text else "run"
    return Side(label, text, kind, Path(request.model), model, request)


def open_tolerating_damage(path: Path | str, arch: str | None = None) -> Model:
    """Return the opened model, also one whose index is wrong or whose files are damaged."""
    try:
        return open_model(path, arch=arch, allow_missing=ANY)
    except CodecError:
        raise  # packed weights that do not decode: what is wrong with them is asked apart
    except FormatError:
        return open_damaged(path, arch=arch, allow_missing=ANY)


def open_side_trace(
    side: Side,
    ids: Sequence[int] | None,
    stack: ExitStack,
    reference: Model | None,
    wanted: Sequence[str] | None = None,
    memory: int | None = None,
) -> "Trace":
    """Return a side's trace: read from its file, or made by running its model on `ids`.

    `stack` closes it. `reference` is the model that the trace ran on, `wanted` the points to record
    (None: the default ones), `memory` the bytes for decoded weights.
    """
    if side.kind == "trace":
        return stack.enter_context(open_trace(side.path, ids, reference))
    assert side.request is not None
    asked = replace(
        side.request, ids=None if ids is None else tuple(ids), wanted=wanted, memory=memory
    )
    return stack.enter_context(run_and_trace(asked, side.model))


def trace_ids(trace: "Trace") -> tuple[int, ...] | None:
    """Return the token ids of a trace; None if it does not record them."""
    found = trace.run.get("ids")
    return None if found is None else tuple(int(i) for i in found)
