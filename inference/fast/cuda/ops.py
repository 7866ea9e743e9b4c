"""Launches of the kernels of a forward pass for one dtype."""

from typing import Any

from aprfmt.inference.fast.cuda.loader import Function, load_function

FILES = ("prelude.cuh", "ops.cu", "attention.cu", "recurrent.cu", "experts.cu")
GROUP = 256  # threads per block, ops.cu
SHARED_LIMIT = 227 * 1024  # largest dynamic shared memory of a block on sm_90
_MOST_BLOCKS = 1 << 16  # of kernels that loop over the rest
_C_NAMES = {"float32": "float", "float64": "double", "bfloat16": "bf16", "float16": "f16"}


class Ops:
    """The kernels of a forward pass for one dtype; integers go as int64, floats as double."""

    def __init__(self, dtype: str) -> None:
        """Start with no kernel loaded; `dtype` is the type of the activations."""
        self._defines = (f"ELEMENT {_C_NAMES[dtype]}",)
        self._kernels: dict[tuple[str, int], Function] = {}  # for the backend's only device

    def launch(self, name: str, grid: tuple[int, ...], *args: Any, shared: int = 0) -> None:
        """Launch the kernel `name` on `grid` blocks of GROUP threads.

        `shared` is the dynamic shared memory in bytes. The kernel is compiled at the first call.
        """
        large = SHARED_LIMIT if shared > 48 * 1024 else 0
        kernel = self._kernels.get((name, large))
        if kernel is None:
            kernel = load_function(FILES, name, self._defines, shared=large)
            self._kernels[name, large] = kernel
        kernel(grid, (GROUP,), args, shared_mem=shared)

    def launch_over(self, name: str, count: int, *args: Any) -> None:
        """Launch the kernel `name` with a thread for each of `count` elements; none if count is 0.

        `args` contain the count again if the kernel needs it. Kernels loop past _MOST_BLOCKS
        blocks.
        """
        if count:
            self.launch(name, (min(-(-count // GROUP), _MOST_BLOCKS),), *args)
