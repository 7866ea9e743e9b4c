"""Convert a tensor's values to a torch tensor."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.base.installation import install_command
from aprfmt.errors import BackendUnavailableError

if TYPE_CHECKING:
    from aprfmt.tensors.view import View

# Encodings whose bits are those of a torch dtype that numpy has no counterpart of.
_TORCH_DTYPES: Mapping[str, str] = {
    "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def as_torch(view: "View") -> Any:
    """Return a tensor's decoded values as a new torch tensor on the CPU (see `View.torch`).

    Raises BackendUnavailableError without torch.
    """
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(
            f"{view.name}: torch is not installed; {install_command('torch')}"
        ) from error
    same = _TORCH_DTYPES.get(view.encoding)
    if same is None or view.data is None or view.restored:
        return torch.from_numpy(view.numpy())
    stored = torch.frombuffer(bytearray(view.raw()), dtype=torch.uint8)
    return stored.view(getattr(torch, same)).reshape(view.shape)
