"""The table of backends; importing this imports neither numpy nor torch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from aprfmt.base.installation import install_command
from aprfmt.base.registry import Registry
from aprfmt.errors import BackendUnavailableError

if TYPE_CHECKING:
    from aprfmt.inference.backends.base import Backend

# Called as `BACKENDS[name](device, dtype, deterministic=..., threads=..., tf32=...)`.
BACKENDS: "Registry[Callable[..., Backend]]" = Registry(
    "backends",
    {
        "numpy": "aprfmt.inference.fast.numpy_native:open_numpy",
        "torch": (
            "aprfmt.inference.fast.torch_native:open_torch",
            partial(install_command, "torch"),
        ),
        "cupy": (
            "aprfmt.inference.fast.cupy_backend:CupyBackend",
            partial(install_command, "cuda13"),
        ),
    },
    BackendUnavailableError,
)
# How each places its arrays, for estimates of memory; called as `place(device, dtype, exact)`.
PLACEMENTS: Mapping[str, str] = {
    "numpy": "aprfmt.inference.fast.placement:place_numpy",
    "torch": "aprfmt.inference.fast.placement:place_torch",
}
