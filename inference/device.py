"""Which backend, device and dtype a run uses: `[BACKEND[:DEVICE][:DTYPE]]`, and `--device`.

Only `auto` may fall back, and it says what it chose and why. Asking for a device that is not
there is an error, never a run somewhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.errors import BackendUnavailableError, UsageError
from aprfmt.inference.backends import BACKENDS

if TYPE_CHECKING:
    from aprfmt.inference.backends.base import Backend

DTYPES = ("float32", "float64", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "auto")
# The backend a device gets where none is named.
_DEFAULT_BACKEND: Mapping[str, str] = {"cpu": "numpy", "cuda": "torch"}
# Short forms of a run.
_SHORT: Mapping[str, tuple[str, str]] = {"cpu": ("numpy", "cpu"), "cuda": ("torch", "cuda")}


@dataclass(frozen=True)
class Choice:
    """What was asked for, what runs, and why."""

    requested: str
    backend: str
    device: str
    dtype: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend}:{self.device}:{self.dtype}"

    def open(
        self, *, deterministic: bool = False, threads: int | None = None, tf32: bool = False
    ) -> "Backend":
        """Return the backend; BackendUnavailableError says what is missing."""
        make = BACKENDS[self.backend]
        return make(
            self.device, self.dtype, deterministic=deterministic, threads=threads, tf32=tf32
        )


def choose(
    device: str | None = None, backend: str | None = None, dtype: str | None = None
) -> Choice:
    """Settle the three from what the user named (None: not named); arithmetic is float32 then.

    Raises UsageError for a word that is none, BackendUnavailableError for what is not there.
    """
    asked = device or "cpu"
    kind = asked.partition(":")[0]
    if kind not in DEVICES or (kind != "cuda" and kind != asked):
        raise UsageError(f"device {asked!r}; expected cpu, cuda, cuda:N or auto")
    number = dtype or "float32"
    if number not in DTYPES:
        raise UsageError(f"dtype {number!r}; expected one of {', '.join(DTYPES)}")
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is not known; known: {', '.join(BACKENDS)}")
    requested = ":".join(part for part in (backend, device, dtype) if part) or "default"
    if kind == "auto":
        return _auto(requested, backend, number)
    name = backend or _DEFAULT_BACKEND[kind]
    return Choice(requested, name, asked, number, "as asked" if device else "the default")


def _auto(requested: str, backend: str | None, dtype: str) -> Choice:
    """Take the GPU where the backend can use one, else the CPU with the reason."""
    wanted = backend or _DEFAULT_BACKEND["cuda"]
    try:
        BACKENDS[wanted]("cuda", dtype)
    except BackendUnavailableError as error:
        name = backend or _DEFAULT_BACKEND["cpu"]
        return Choice(requested, name, "cpu", dtype, f"auto chose the CPU: {error}")
    return Choice(requested, wanted, "cuda", dtype, "auto chose the GPU")


def parse_run(text: str) -> Choice:
    """Return what `torch:cuda:0:bfloat16`, `numpy::float64`, `cpu` or `cuda` stands for."""
    name, _, rest = text.partition(":")
    parts = rest.split(":") if rest else []
    dtype = parts.pop() if parts and parts[-1] in DTYPES else None
    device = ":".join(part for part in parts if part) or None
    if name in _SHORT:
        backend, place = _SHORT[name]
        device = f"{place}:{device}" if device and device.isdecimal() else place
        return choose(device, backend, dtype)
    if name not in BACKENDS:
        raise UsageError(
            f"run {text!r}: backend {name!r} is not known; expected BACKEND[:DEVICE][:DTYPE] with "
            f"{', '.join(BACKENDS)}, or {', '.join(_SHORT)}"
        )
    return choose(device, name, dtype)


def split_run(text: str) -> tuple[str, str | None]:
    """Split `MODEL@RUN`: what follows the last @ counts only if it begins with a known name."""
    model, at, run = text.rpartition("@")
    name = run.partition(":")[0]
    return (model, run) if at and (name in BACKENDS or name in _SHORT) else (text, None)
