"""The table of backends; importing this imports neither numpy nor torch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aprfmt.base.registry import Registry
from aprfmt.errors import BackendUnavailableError

if TYPE_CHECKING:
    from aprfmt.inference.backends.base import Backend

# Called as `BACKENDS[name](device, dtype, deterministic=..., threads=..., tf32=...)`.
BACKENDS: "Registry[Callable[..., Backend]]" = Registry(
    "backends",
    {
        "numpy": "aprfmt.inference.fast.numpy_native:open_numpy",
        "torch": ("aprfmt.inference.fast.torch_native:open_torch", "pip install 'aprfmt[torch]'"),
        "cupy": ("aprfmt.inference.fast.cupy_backend:CupyBackend", "pip install 'aprfmt[cuda13]'"),
    },
    BackendUnavailableError,
)
# Opened like a row of BACKENDS: what such a run allocates, without running it (inference/dry).
DRY: Mapping[str, str] = {
    "numpy": "aprfmt.inference.fast.dry:open_numpy",
    "torch": "aprfmt.inference.fast.dry:open_torch",
}
