"""Returns the torch devices for a name, or raises with the reason they are missing."""

import torch

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.cuda_driver import NOT_ELSEWHERE, torch_problem


def torch_devices(name: str) -> tuple[torch.device, ...]:
    """Return the devices of `cpu`, `cuda`, `cuda:N` or `cuda:all`.

    Raises BackendUnavailableError, saying what is missing and what to do.
    """
    kind, colon, number = name.partition(":")
    if name == "cpu":
        return (torch.device("cpu"),)
    if kind != "cuda" or (colon and number != "all" and not number.isdecimal()):
        raise BackendUnavailableError(f"device {name!r}; expected cpu, cuda, cuda:N or cuda:all")
    if not torch.cuda.is_available():
        why = torch_problem(torch.__version__, torch.version.cuda)
        raise BackendUnavailableError(f"device {name!r}: {why}{NOT_ELSEWHERE}")
    count = torch.cuda.device_count()
    chosen = range(count) if number == "all" else [int(number or 0)]
    if chosen[-1] >= count:
        raise BackendUnavailableError(
            f"device {name!r}: torch sees {count} GPUs; expected cuda:0 to cuda:{count - 1}"
        )
    return tuple(torch.device("cuda", index) for index in chosen)
