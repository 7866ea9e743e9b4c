"""Statistics of a whole pass: collected, computed by a few launches, read in one transfer.

A *job* is one array to be reduced. A *piece* is the consecutive elements of an array that one block
of GPU threads sums up.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aprfmt.inference.fast.cuda import memory, reduce
from aprfmt.inference.fast.cuda.arrays import ITEM, Flat
from aprfmt.inference.fast.cuda.host_uploads import HostUploads
from aprfmt.tensors.stats import Stats, compute_stats

_ROWS = 512  # results allocated at a time
JOBS = reduce.THREADS  # arrays per launch; one thread reads each
PIECES = 1 << 15  # per launch, so that its buffer stays at 4 MiB
KEPT = 1 << 29  # largest sum of bytes of arrays waiting for their launch

PieceJob = tuple[int, int, int, int, int]  # place, count, size of a piece, result, first piece


class Workspace:
    """Memory shared by reductions; one per backend, used by one stream."""

    def __init__(self, uploads: HostUploads) -> None:
        """Allocate the buffer for the statistics of one array; those for many come when needed.

        `uploads` copies the tables of jobs to the device.
        """
        self._uploads = uploads
        self._room = memory.array_module().zeros(reduce.WORKSPACE, "float64")
        self._place = memory.pointer(self._room)
        self._kernels: dict[str, Any] = {}
        self._many: tuple[Any, Any] | None = None  # counters, pieces

    def _kernel(self, name: str, dtype: str) -> Any:
        """Return the compiled kernel `name` (stats or stats_many) of a dtype, loaded once."""
        key = f"{name} {dtype}"
        if key not in self._kernels:
            self._kernels[key] = reduce.load_kernel(name, dtype)
        return self._kernels[key]

    def launch_stats(self, dtype: str, jobs: list[PieceJob], pieces: int) -> None:
        """Launch a kernel that writes the statistics of arrays of one dtype to their results.

        A job is (address, elements, elements of a piece, address of the result, first piece);
        `pieces` is how many pieces all jobs have. A single job uses the kernel `stats`, several
        `stats_many`.
        """
        if len(jobs) == 1:
            place, count, size, result, _ = jobs[0]
            alone = (place, count, size, self._place, result)
            self._kernel("stats", dtype)((pieces,), (reduce.THREADS,), alone)
            return
        if self._many is None:
            arrays = memory.array_module()
            rooms = arrays.zeros(JOBS, "uint64"), arrays.empty(PIECES * reduce.COLUMNS, "float64")
            self._many = rooms
        places = (memory.pointer(x) for x in self._many)
        table = self._uploads.number_table(np.array(jobs, np.int64))
        args = (memory.pointer(table), len(jobs), *places)
        self._kernel("stats_many", dtype)((pieces,), (reduce.THREADS,), args)


class _NotEnqueued:
    """Arrays of one dtype whose statistics are not enqueued yet."""

    def __init__(self) -> None:
        """Start with no jobs; `held` keeps arrays alive, `pieces` and `size` (bytes) are sums."""
        self.jobs: list[PieceJob] = []
        self.held: list[Any] = []
        self.pieces = self.size = 0


class CupyPending:
    """The statistics of one trace's values, in the order they were added.

    A value must not be changed before `join` or `read`. `flat(x)` returns (array, its memory): x
    itself, or a copy if x is not contiguous.
    """

    def __init__(self, workspace: Workspace, flat: Callable[[Any], tuple[Any, Flat]]) -> None:
        """Start without arrays; results are allocated in chunks of _ROWS rows on the device.

        `flat` returns (contiguous array, its address, size and dtype). `_rows` counts the results
        in use, `_next` is the address of the next one, and `_waiting` holds by dtype the arrays
        that are not enqueued yet.
        """
        self._workspace = workspace
        self._flat = flat
        self._found: list[int | Stats] = []  # an int: size of a pending value
        self._chunks: list[Any] = []
        self._rows = self._next = 0
        self._waiting: dict[str, _NotEnqueued] = {}

    def add(self, x: Any) -> None:
        """Add an array whose statistics `read` returns.

        Those of a numpy array are computed at once, those of a GPU array in groups.
        """
        if not memory.is_on_gpu(x):
            self._found.append(compute_stats(x))
            return
        if self._rows == _ROWS * len(self._chunks):
            self._chunks.append(memory.array_module().empty((_ROWS, reduce.RESULT), "float64"))
            self._next = memory.pointer(self._chunks[-1])
        whole, data = self._flat(x)
        count, dtype = data.count, data.dtype
        pieces, size = reduce.split_pieces(count)
        waiting = self._waiting.get(dtype)
        if waiting is None:
            waiting = self._waiting[dtype] = _NotEnqueued()
        if waiting.jobs and waiting.pieces + pieces > PIECES:
            self._launch(dtype)
            waiting = self._waiting[dtype]
        waiting.jobs.append((data.ptr, count, size, self._next, waiting.pieces))
        waiting.held.append(whole)
        waiting.pieces += pieces
        waiting.size += count * ITEM[dtype]
        self._next += 8 * reduce.RESULT
        self._found.append(count)
        self._rows += 1
        if len(waiting.jobs) == JOBS or waiting.size > KEPT:
            self._launch(dtype)

    def _launch(self, dtype: str) -> None:
        """Launch the statistics of a dtype's waiting arrays, and start with none waiting."""
        waiting, self._waiting[dtype] = self._waiting[dtype], _NotEnqueued()
        self._workspace.launch_stats(dtype, waiting.jobs, waiting.pieces)

    def join(self) -> None:
        """Launch the kernels for all arrays added so far, on the current stream."""
        for dtype in [name for name, waiting in self._waiting.items() if waiting.jobs]:
            self._launch(dtype)

    def read(self) -> list[Stats]:
        """Return the statistics of every value added, in order; waits for the device."""
        self.join()
        counts = [found for found in self._found if isinstance(found, int)]
        made: Iterator[Stats] = iter(())
        if counts:
            rows = np.concatenate([memory.copy_to_host(chunk) for chunk in self._chunks])
            made = iter(reduce.to_stats_of(counts, rows))
        return [next(made) if isinstance(found, int) else found for found in self._found]
