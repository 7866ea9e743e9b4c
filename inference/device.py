"""Which backend, device and dtype a run uses: `[BACKEND[:DEVICE][:DTYPE]]`, and `--device`.

Only `auto` may fall back, and reports its choice and the reason. Asking for a device that does not
exist is an error, never a run on another device.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.encoding_names import encoding_name
from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import BackendUnavailableError, UsageError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.cuda_driver import NOT_ELSEWHERE, gpu_problem
from aprfmt.inference.engines import ENGINES

if TYPE_CHECKING:
    from aprfmt.inference.backends.base import Backend

DTYPES = ("float32", "float64", "bfloat16", "float16")
_DEVICE = re.compile(r"cpu|auto|cuda(:\d{1,3}|:all)?")
# The default backend of each device.
_DEFAULT_BACKEND: Mapping[str, str] = {"cpu": "numpy", "cuda": "torch"}
# Default device of backends that cannot run on the CPU.
_HOME: Mapping[str, str] = {"cupy": "cuda"}
_GPU_LIBRARIES = ("torch", "cupy")  # backends of a library of that name
# Short forms of a run.
_SHORT: Mapping[str, tuple[str, str]] = {"cpu": ("numpy", "cpu"), "cuda": ("torch", "cuda")}


@dataclass(frozen=True)
class DeviceChoice:
    """The backend or engine, device and dtype of a run, with what was asked for and the reason."""

    requested: str
    backend: str
    device: str
    dtype: str
    why: str

    def __str__(self) -> str:
        """Return the run as `BACKEND:DEVICE:DTYPE`, which parse_run reads."""
        return f"{self.backend}:{self.device}:{self.dtype}"

    @property
    def is_engine(self) -> bool:
        """Whether another program runs the whole model, instead of one of our backends."""
        return self.backend in ENGINES

    def refuse_missing_gpu(self) -> None:
        """Raise BackendUnavailableError if the run needs a GPU and the machine has none.

        No library is imported. Does nothing for an engine, which reports itself what it needs.
        """
        if self.backend in _GPU_LIBRARIES and self.device.startswith("cuda"):
            why = gpu_problem(self.backend)
            if why:
                raise BackendUnavailableError(f"device {self.device!r}: {why}{NOT_ELSEWHERE}")

    def open(
        self, *, deterministic: bool = False, threads: int | None = None, tf32: bool = False
    ) -> "Backend":
        """Return the opened backend; BackendUnavailableError says what is missing.

        A deterministic backend has one thread by default, as the number of threads changes bits.
        Raises UsageError for an engine, which runs whole models and is not a backend.
        """
        if self.is_engine:
            raise UsageError(
                f"{self}: {self.backend} is an engine of its own; trace, parity and diagnose take "
                f"it, here expected one of {', '.join(BACKENDS)}"
            )
        if deterministic and threads is None:
            threads = 1
        make = BACKENDS[self.backend]
        return make(
            self.device, self.dtype, deterministic=deterministic, threads=threads, tf32=tf32
        )


def dtype_name(text: str) -> str:
    """Return the dtype of DTYPES that a spelling means (`fp16`, `bf16`, `torch.half`).

    Any other text is returned unchanged.
    """
    row = ENCODINGS.get(encoding_name(text))
    return row.numpy if row is not None and row.numpy in DTYPES else text


def choose_device(
    device: str | None = None, backend: str | None = None, dtype: str | None = None
) -> DeviceChoice:
    """Return the choice for the options given (None: not given); the default dtype is float32.

    Raises UsageError for an unknown name, BackendUnavailableError for a missing device.
    """
    asked = device or _HOME.get(backend or "", "cpu")
    kind = asked.partition(":")[0]
    if not _DEVICE.fullmatch(asked):
        raise UsageError(f"device {asked!r}; expected cpu, cuda, cuda:N, cuda:all or auto")
    number = dtype_name(dtype or "float32")
    if number not in DTYPES:
        raise UsageError(f"dtype {number!r}; expected one of {', '.join(DTYPES)}")
    if backend is not None and backend not in BACKENDS and backend not in ENGINES:
        known = ", ".join((*BACKENDS, *ENGINES))
        raise UsageError(f"backend {backend!r} is not known; known: {known}")
    requested = ":".join(part for part in (backend, device, dtype) if part) or "default"
    if kind == "auto":
        return _choose_automatically(requested, backend, number)
    name = backend or _DEFAULT_BACKEND[kind]
    return DeviceChoice(requested, name, asked, number, "as asked" if device else "the default")


def _choose_automatically(requested: str, backend: str | None, dtype: str) -> DeviceChoice:
    """Return the GPU if the backend can use it, else the CPU, with the reason."""
    wanted = backend or _DEFAULT_BACKEND["cuda"]
    try:
        DeviceChoice(requested, wanted, "cuda", dtype, "").refuse_missing_gpu()
        BACKENDS[wanted]("cuda", dtype)
    except BackendUnavailableError as error:
        name = backend or _DEFAULT_BACKEND["cpu"]
        why = str(error).removesuffix(NOT_ELSEWHERE)
        return DeviceChoice(requested, name, "cpu", dtype, f"auto chose the CPU: {why}")
    return DeviceChoice(requested, wanted, "cuda", dtype, "auto chose the GPU")


def parse_run(text: str) -> DeviceChoice:
    """Return the choice for `torch:cuda:0:bfloat16`, `numpy::float64`, `cpu` or `cuda`.

    Raises UsageError for an unknown backend, device or dtype.
    """
    name, _, rest = text.partition(":")
    parts = rest.split(":") if rest else []
    dtype = parts.pop() if parts and dtype_name(parts[-1]) in DTYPES else None
    device = ":".join(part for part in parts if part) or None
    if device is not None and (name in BACKENDS or name in ENGINES or name in _SHORT):
        whole = f"{_SHORT[name][1]}:{device}" if name in _SHORT else device
        if not _DEVICE.fullmatch(whole):
            raise UsageError(
                f"run {text!r}: {device!r} is no device (expected cpu, cuda, cuda:N, "
                f"cuda:all or auto) and ends in no dtype ({', '.join(DTYPES)})"
            )
    if name in _SHORT:
        backend, place = _SHORT[name]
        device = f"{place}:{device}" if device else place
        return choose_device(device, backend, dtype)
    if name not in BACKENDS and name not in ENGINES:
        from aprfmt.model.patterns import close_names

        known = (*BACKENDS, *ENGINES)
        near = ", ".join(close_names(name, (*known, *_SHORT)))
        raise UsageError(
            f"run {text!r}: backend {name!r} is not known; "
            + (f"near names: {near}; " if near else "")
            + f"expected BACKEND[:DEVICE][:DTYPE] with {', '.join(known)}, or {', '.join(_SHORT)}"
        )
    return choose_device(device, name, dtype)


def is_run(text: str) -> bool:
    """Return whether a text names a run: it begins with a backend, an engine, cpu or cuda."""
    name = text.partition(":")[0]
    return name in BACKENDS or name in ENGINES or name in _SHORT


def split_run(text: str) -> tuple[str, str | None]:
    """Return (model, run) of `MODEL@RUN`; run is None if the text names none.

    What follows the last @ counts only if it begins with a known name. An existing file or folder
    whose name has an @ is a model.
    """
    if Path(text).exists():
        return text, None
    model, at, run = text.rpartition("@")
    return (model, run) if at and is_run(run) else (text, None)
