"""How each backend places its arrays, for estimates of a run's memory.

Backends with kernels hold weights encoded; the estimate asks here which.
"""

from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import native_kernels
from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.fast.encoded import ENCODED_ROWS, MOVE_AT, kernels_apply
from aprfmt.inference.fast.gpu_encodings import MEMORY_SHARE, SCRATCH, stays_encoded
from aprfmt.inference.memory_estimate import Placement
from aprfmt.inference.rows import FREE

WORKSPACE = 32 << 20  # bytes that cuBLAS takes for each stream on a Hopper GPU
PINNED = 64 << 20  # bytes of host memory that uploads go through


def place_numpy(device: str, dtype: str, deterministic: bool) -> Placement:
    """Return the placement of a numpy run; BackendUnavailableError for what numpy lacks."""
    if device != "cpu" or dtype not in FREE:
        raise BackendUnavailableError(
            f"backend numpy: found {device}:{dtype}; it computes on cpu in {' or '.join(FREE)}"
        )
    return _place_on_cpu(dtype, deterministic, torch=False)


def place_torch(device: str, dtype: str, deterministic: bool) -> Placement:
    """Return the placement of a torch run on the CPU or on GPUs.

    Raises BackendUnavailableError for a device that is none of these.
    """
    if device == "cpu":
        return _place_on_cpu(dtype, deterministic, torch=True)
    gpus, kernels = find_gpus(device)
    return Placement(
        dtype,
        True,
        deterministic,
        gpus,
        fused=kernels and not deterministic,
        native=False,
        keeps_encoded=lambda encoding: kernels and stays_encoded(encoding, dtype),
        multiplies_stored=lambda encoding: False,
        few_rows=0,
        copied_at=0,
        workspace=WORKSPACE,
        pinned=PINNED,
        panel=SCRATCH,
        share=MEMORY_SHARE,
    )


def _place_on_cpu(dtype: str, deterministic: bool, *, torch: bool) -> Placement:
    """Return the placement of a run on the CPU, with C kernels where they apply."""
    kernels = native_kernels() if kernels_apply(dtype, deterministic) else None

    def multiplies_stored(encoding: str) -> bool:
        """Return whether a C kernel multiplies with an encoding's stored bytes.

        False for encodings that are decoded for free.
        """
        known = kernels is not None and encoding in kernels.KERNELS
        return known and find_encoding(encoding).numpy not in FREE

    return Placement(
        dtype,
        torch,
        deterministic,
        (),
        fused=False,
        native=kernels is not None,
        keeps_encoded=lambda encoding: False,
        multiplies_stored=multiplies_stored,
        few_rows=ENCODED_ROWS,
        copied_at=MOVE_AT,
    )


def find_gpus(device: str) -> tuple[tuple[tuple[str, int | None], ...], bool]:
    """Return (((name, free bytes) of each GPU), whether our kernels run on them).

    `device` is `cuda`, `cuda:N` or `cuda:all`. Without a GPU here, one is assumed on which
    kernels run, its free bytes None. Raises BackendUnavailableError for another name, or for
    `cuda:all` without a GPU.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        raise BackendUnavailableError(f"device {device!r}; expected cuda, cuda:N or cuda:all")
    try:
        import torch

        here = torch.cuda.is_available()
    except ImportError:
        here = False
    if not here:
        if number == "all":
            raise BackendUnavailableError(
                f"device {device!r}: no GPU is here to be counted; expected cuda or cuda:N"
            )
        return ((f"cuda:{int(number or 0)}", None),), True
    from aprfmt.inference.backends.torch_device import torch_devices
    from aprfmt.inference.fast.torch_cuda import kernels_problem

    devices = torch_devices(device)
    free = (int(torch.cuda.mem_get_info(one)[0]) for one in devices)
    return tuple(zip(map(str, devices), free, strict=True)), not kernels_problem()
