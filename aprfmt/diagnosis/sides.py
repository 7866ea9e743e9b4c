"""The sides A and B: models, runs or saved traces; an ExitStack closes them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aprfmt.inference.device import Choice, choose, parse_run
from aprfmt.inference.engines.opening import model_and_run, open_run, open_trace, trace_kind
from aprfmt.inference.trace import Trace
from aprfmt.model import Model, open_model
from aprfmt.model.completeness import ANY

Kind = Literal["model", "run", "trace"]


@dataclass
class Side:
    """A or B. `model` has the weights it ran on, if known."""

    label: str
    text: str
    kind: Kind
    path: Path
    model: Model | None = None
    choice: Choice | None = None


def open_side(label: str, text: str, stack: ExitStack, arch: str | None) -> Side:
    """Open a model or the model of a run; a saved trace is recognised, but not read yet.

    Raises UsageError for a missing file or an unknown run, FormatError for a damaged file.
    """
    path = Path(text)
    if path.exists() and trace_kind(path) is not None:
        return Side(label, text, "trace", path)
    name, run = model_and_run(text)
    model = stack.enter_context(open_model(name, arch=arch, allow_missing=ANY))
    if run is None:
        return Side(label, text, "model", Path(name), model, choose())
    return Side(label, text, "run", Path(name), model, parse_run(run))


def trace_of(
    side: Side,
    ids: Sequence[int] | None,
    stack: ExitStack,
    reference: Model | None,
    wanted: Sequence[str] | None = None,
    memory: int | None = None,
) -> Trace:
    """Return a side's trace: read from the file, or made by running the model on `ids`."""
    if side.kind == "trace":
        return stack.enter_context(open_trace(side.path, ids, reference))
    assert side.model is not None
    return stack.enter_context(
        open_run(side.path, ids, model=side.model, choice=side.choice, wanted=wanted, memory=memory)
    )


def trace_ids(trace: Trace) -> tuple[int, ...] | None:
    """Return the token ids of a trace; None if it does not state them."""
    found = trace.run.get("ids")
    return None if found is None else tuple(int(i) for i in found)
