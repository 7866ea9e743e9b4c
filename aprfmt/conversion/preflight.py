"""Check a planned conversion for losses before a byte is written, by opening the plan as a model.

The account of the source is made on it first, so that what would be lost is refused while nothing
is there yet; afterwards it is made again on what was written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aprfmt.base.protocols import Damage, LazyTensor, Note, Source, TensorInfo, TypedValue, Value
from aprfmt.conversion.accounting import balanced_account
from aprfmt.conversion.outputs import Output, Plan
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.model.carried_files import json_object
from aprfmt.model.hf_folder import HFFolder
from aprfmt.tensors.runs import RunBytes

if TYPE_CHECKING:
    from aprfmt.conversion.metadata import CarriedMetadata


class PlannedTensor(LazyTensor):
    """A tensor that will be written; its bytes are the source's where they are copied."""

    __slots__ = ("_output", "info")

    info: TensorInfo

    def __init__(self, output: Output) -> None:
        """Wrap an output of the plan."""
        self._output, self.info = output, output.info

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes [start, stop) that will be copied.

        There are none where the tensor is made while it is written.
        """
        runs, stop = self._output.runs, self.info.nbytes if stop is None else stop
        if runs is None or not self._output.copies:
            return memoryview(b"")
        if len(runs) == 1:
            return runs[0].tensor.raw(runs[0].start + start, runs[0].start + stop)
        return memoryview(RunBytes(runs).window(start, stop))

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the memory pages of the source's tensors; `start` and `stop` are not used."""
        for tensor in self._output.sources:
            tensor.drop()


class PlannedSource:
    """The file that will be written, as an open source."""

    version = ""
    files: tuple[Path, ...] = ()
    types: Mapping[str, str] = {}
    notes: Sequence[Note] = ()
    damage: Sequence[Damage] = ()

    def __init__(
        self, path: Path, kind: str, metadata: Mapping[str, Value | TypedValue], plan: Plan
    ) -> None:
        """Set the format, the untyped metadata and the planned tensors by name."""
        self.path, self.format = path, kind
        self.metadata: Mapping[str, Value] = {
            key: value.value if isinstance(value, TypedValue) else value
            for key, value in metadata.items()
        }
        self.tensors: Mapping[str, LazyTensor] = {
            output.info.name: PlannedTensor(output) for output in plan.outputs
        }

    def close(self) -> None:
        """Do nothing: no file is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_planned_losses(
    model: Model, weights: Path, kind: str, plan: Plan, carried: "CarriedMetadata"
) -> None:
    """Raise ConversionError where the plan would lose something of the source.

    `weights` is the path of the output, `kind` its format. Nothing is checked where weights are
    packed while they are written: only the written codes and scales show what they hold.
    """
    if any(output.part is not None for output in plan.outputs):
        return
    source: Source = PlannedSource(weights, kind, carried.metadata, plan)
    folder = None
    if carried.texts:
        text = carried.texts.get("config.json")
        config = None if text is None else json_object(text, f"{weights.parent}/config.json")
        folder = HFFolder(weights.parent, config, carried.texts)
    try:
        planned = Model(source, folder)
    except AprfmtError:
        return  # what was written is judged: it says why it cannot be opened
    balanced_account(planned, model, plan.left_out, plan.edited)
