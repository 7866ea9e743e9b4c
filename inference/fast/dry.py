"""Opens, for a backend of BACKENDS, one that counts what its run allocates without running it."""

from typing import Any

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.dry.backend import DryBackend
from aprfmt.inference.fast.dry_host import DryNative, DryNativeTorch, DryTorch
from aprfmt.inference.fast.encoded import kernels_apply

NUMPY = ("float32", "float64")


def open_numpy(device: str, dtype: str, **options: Any) -> DryBackend:
    """Return a backend that counts the memory of a numpy run, with C kernels if they apply.

    Raises BackendUnavailableError for a device or dtype that numpy does not compute.
    """
    if device != "cpu" or dtype not in NUMPY:
        raise BackendUnavailableError(
            f"backend numpy: found {device}:{dtype}; it computes on cpu in {' or '.join(NUMPY)}"
        )
    kind = DryNative if kernels_apply(dtype, bool(options.get("deterministic"))) else DryBackend
    return kind(device, dtype, **options)


def open_torch(device: str, dtype: str, **options: Any) -> DryBackend:
    """Return a backend that counts the memory of a torch run on the CPU or a GPU."""
    if device != "cpu":
        from aprfmt.inference.fast.dry_cuda import DryCuda

        return DryCuda(device, dtype, **options)
    kind = DryNativeTorch if kernels_apply(dtype, bool(options.get("deterministic"))) else DryTorch
    return kind(device, dtype, **options)
