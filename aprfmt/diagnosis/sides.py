"""What A and B are: models, runs or saved traces, opened for as long as a stack is."""

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
    """A or B. `model` is the weights it ran on, where these are known."""

    label: str
    text: str
    kind: Kind
    path: Path
    model: Model | None = None
    choice: Choice | None = None


def open_side(label: str, text: str, stack: ExitStack, arch: str | None) -> Side:
    """Open a model or the model of a run; a trace is only recognised.

    Raises UsageError for what is no file or no known run, FormatError for what is damaged.
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
    """Return a side's trace: a saved one is read, a model or run is run on `ids`."""
    if side.kind == "trace":
        return stack.enter_context(open_trace(side.path, ids, reference))
    assert side.model is not None
    return stack.enter_context(
        open_run(side.path, ids, model=side.model, choice=side.choice, wanted=wanted, memory=memory)
    )


def trace_ids(trace: Trace) -> tuple[int, ...] | None:
    """Return the ids a trace was made of, None where it does not say."""
    found = trace.run.get("ids")
    return None if found is None else tuple(int(i) for i in found)
