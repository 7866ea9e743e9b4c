"""What explaining a step takes, said from the headers of its files before anything is read."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

from aprfmt.model import open_model
from aprfmt.training.parameters import Parameter, pair_parameters
from aprfmt.training.saved_arrays import open_arrays
from aprfmt.training.update import CHUNK

# Bytes of the program itself with numpy, and float64 arrays of a piece that are held at once;
# measured with tests/benchmarks/step.py, rounded up.
PROGRAM, ARRAYS = 120 << 20, 16
KEPT = 2  # gradients that are held as they were read


@dataclass(frozen=True)
class StepMemory:
    """What explaining an update takes: bytes read, and the most memory at one time."""

    parameters: int
    read_bytes: int
    peak_bytes: int


def estimate_step(
    model: Path | str,
    after: Path | str | None = None,
    adapter: Path | str | None = None,
    arrays: Sequence[Path | str] = (),
    arch: str | None = None,
) -> StepMemory:
    """Return what `explain_step` takes for an update; `arrays` are gradients and state.

    What a backward pass of a batch takes is not in it. Raises as `explain_step` does for files
    that are not of one model.
    """
    with ExitStack() as stack:
        base = stack.enter_context(open_model(Path(model), arch=arch))
        before = base if adapter is None else stack.enter_context(open_model(Path(adapter)))
        own = arch if adapter is None else None
        later = None if after is None else stack.enter_context(open_model(Path(after), arch=own))
        rows = pair_parameters(before, later, None if adapter is None else base).rows
        held = open_arrays([Path(each) for each in arrays], stack)
        sizes = [prod(captures.shapes[name]) for captures, name in held.values()]
    piece = max((_elements(row) for row in rows), default=0)
    read = sum(side.nbytes for row in rows for side in (row.before, row.after) if side is not None)
    peak = PROGRAM + ARRAYS * 8 * piece
    if sizes:
        peak += (4 * KEPT + 8) * max(sizes)
    return StepMemory(len(rows), read + 4 * sum(sizes), peak)


def _elements(row: Parameter) -> int:
    """Return the elements of a parameter that are held at once."""
    size = prod(row.before.shape)
    sides = [side for side in (row.before, row.after) if side is not None]
    if all(side.stored_row_bytes is not None for side in sides):
        return min(size, CHUNK + (row.before.shape[-1] if row.before.shape else 1))
    return size
