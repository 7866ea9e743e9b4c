"""What explaining a step takes, said from the headers of its files before anything is read."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

from aprfmt.inference.backends.base import ITEM_SIZES
from aprfmt.inference.gradients.given_points import point_names
from aprfmt.model import Model, open_model
from aprfmt.training.parameters import Parameter, pair_parameters
from aprfmt.training.reference_gradients import explaining_missing_torch
from aprfmt.training.saved_arrays import open_arrays, plain_name
from aprfmt.training.step_batch import read_step_batch
from aprfmt.training.update import CHUNK

# Bytes of the program itself with numpy, and float64 arrays of a piece that are held at once;
# measured with tests/benchmarks/step.py, rounded up.
PROGRAM, ARRAYS = 120 << 20, 16
KEPT = 2  # gradients that are held as they were read
# Bytes of torch itself, and float64 copies of all gradients: the exact ones, those in the trainer's
# arithmetic, and those with a mistake that is tried.
TORCH, COPIES = 400 << 20, 3
POINT_COPIES = 5  # of each point's gradient: the given one, and value and gradient of two passes


@dataclass(frozen=True)
class StepMemory:
    """What explaining a step takes: bytes to read, and the most memory at one time.

    `backward_bytes` is the memory for the gradients of a batch by autograd, holding either all
    activations or those of one layer, whichever is less; `forward_bytes` is the memory for
    differences of the loss without torch. Each is None where it was not asked for. On a GPU
    `backward_bytes` is what the host takes, and `device_bytes` what the GPU takes.
    """

    parameters: int
    read_bytes: int
    peak_bytes: int
    backward_bytes: int | None = None
    forward_bytes: int | None = None
    device_bytes: int | None = None


def estimate_step(
    model: Path | str,
    after: Path | str | None = None,
    adapter: Path | str | None = None,
    arrays: Sequence[Path | str] = (),
    arch: str | None = None,
    batch: Path | str | None = None,
    dtype: str = "float64",
    differences: bool = False,
    device: str = "cpu",
) -> StepMemory:
    """Return what `explain_step` with these files would read and take of memory.

    `arrays` are the files of gradients and of the optimizer's state. With `batch` the result has
    the memory for its gradients in `dtype` on `device`, or with `differences` for differences of
    its loss. Raises UsageError for files that are not of one model.
    """
    with ExitStack() as stack:
        base = stack.enter_context(open_model(Path(model), arch=arch))
        before = base if adapter is None else stack.enter_context(open_model(Path(adapter)))
        own = arch if adapter is None else None
        later = None if after is None else stack.enter_context(open_model(Path(after), arch=own))
        rows = pair_parameters(before, later, None if adapter is None else base).rows
        held = open_arrays([Path(each) for each in arrays], stack)
        sizes = [prod(captures.shapes[name]) for captures, name in held.values()]
        points = set(point_names([plain_name(name) for name in held], base))
        recorded = sum(
            prod(captures.shapes[own])
            for name, (captures, own) in held.items()
            if plain_name(name) in points
        )
        backward = forward = on_device = None
        if batch is not None and differences:
            forward = _forward_bytes(base, Path(batch), adapter)
        elif batch is not None:
            backward, on_device = _backward_bytes(base, Path(batch), adapter, dtype, device)
            backward += POINT_COPIES * 8 * recorded
    piece = max((_elements_in_memory(row) for row in rows), default=0)
    read = sum(side.nbytes for row in rows for side in (row.before, row.after) if side is not None)
    peak = PROGRAM + ARRAYS * 8 * piece
    if sizes:
        peak += (4 * KEPT + 8) * max(sizes)
    return StepMemory(len(rows), read + 4 * sum(sizes), peak, backward, forward, on_device)


def _backward_bytes(
    base: Model, batch: Path, adapter: Path | str | None, dtype: str, device: str
) -> tuple[int, int | None]:
    """Return (bytes of host memory for the gradients of a batch, bytes of GPU memory).

    One layer's activations are held at a time. The copies of gradients to compare are in the first.
    The second is None on the CPU. Raises BackendUnavailableError without torch.
    """
    with explaining_missing_torch():
        from aprfmt.inference.gradients.memory import gradient_memory
    from aprfmt.adapters.trained_pairs import open_trained_pairs

    loaded = read_step_batch(batch, base)
    with ExitStack() as stack:
        pairs = open_trained_pairs(None if adapter is None else Path(adapter), base, stack)
        found = gradient_memory(
            base, loaded, dtype=dtype, pairs=pairs, activations="layer", device=device
        )
        host = TORCH + COPIES * 8 * found.gradients // ITEM_SIZES[dtype]
        return (host + found.peak, None) if device == "cpu" else (host, found.peak)


def _forward_bytes(base: Model, batch: Path, adapter: Path | str | None) -> int:
    """Return the bytes that differences of a batch's loss take, in float64.

    They are all weights, the input of every layer for all tokens, and two arrays of logits.
    """
    from aprfmt.adapters.trained_pairs import open_trained_pairs

    loaded = read_step_batch(batch, base)
    table = base.roles["token_embd.weight"].shape
    layers, width = int(base.hyper["n_layers"]) + 1, int(table[-1])
    sizes = [prod(view.shape) for view in base.roles.values()]
    with ExitStack() as stack:
        pairs = open_trained_pairs(None if adapter is None else Path(adapter), base, stack)
        merged = [prod(base.roles[role].shape) for pair in pairs for role in pair.rows]
    entering = layers * width * int(loaded.mask.sum())
    logits = int(loaded.mask.sum(1).max()) * int(base.hyper["vocab_size"])
    return PROGRAM + 8 * (
        sum(sizes) + sum(merged) + 3 * max(sizes, default=0) + entering + 2 * logits
    )


def _elements_in_memory(row: Parameter) -> int:
    """Return how many elements of a parameter are in memory at once: some rows, or all elements.

    All if the checkpoint before or after the step does not store the rows one by one.
    """
    size = prod(row.before.shape)
    sides = [side for side in (row.before, row.after) if side is not None]
    if all(side.stored_row_bytes is not None for side in sides):
        return min(size, CHUNK + (row.before.shape[-1] if row.before.shape else 1))
    return size
