"""The torch device a name stands for, or the reason it is not there."""

import torch

from aprfmt.errors import BackendUnavailableError


def torch_device(name: str) -> torch.device:
    """Return a device that is there; BackendUnavailableError names what is missing."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BackendUnavailableError(f"device {name!r}; expected cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise BackendUnavailableError(f"device {name!r}; expected cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        why = (
            "torch was built without CUDA"
            if torch.version.cuda is None
            else ("torch finds no CUDA device or driver")
        )
        raise BackendUnavailableError(f"device {name!r}: {why}; nothing was run on the CPU instead")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise BackendUnavailableError(f"device {name!r}: there are {count} CUDA devices")
    return torch.device("cuda", index)
