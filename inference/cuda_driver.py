"""What the NVIDIA driver says of this machine's GPUs, without torch or cupy, and what is missing.

Codes and attribute numbers are those of the CUDA driver API's cuda.h, names of NVML's nvml.h.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aprfmt.base.installation import install_command
from aprfmt.errors import BackendUnavailableError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MANAGEMENT = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_ERRORS = {
    100: "the driver sees no NVIDIA GPU",
    101: "the driver refuses the GPU that CUDA_VISIBLE_DEVICES names",
    803: "the driver's library and its kernel module are of different versions; reboot",
    804: "the driver is older than this GPU needs",
}
# CUDA major -> our extra, and the cupy package it installs.
EXTRAS = {12: "cuda12", 13: "cuda13"}
CUPY = {f"cupy-cuda{major}x": major for major in EXTRAS}

# The end of the message for an unusable device.
NOT_ELSEWHERE = "; nothing was run on the CPU instead"

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Gpu:
    """One GPU; `memory` is its total memory in bytes, `compute` its capability (`9.0`)."""

    index: int
    name: str
    memory: int
    compute: str


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says: the newest CUDA it can run (13, 0), and its GPUs.

    `cuda` is None without a driver. `why` says why there is no usable GPU, "" if there is one.
    """

    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    why: str

    @property
    def extra(self) -> str:
        """The name of aprfmt's extra (cuda12, cuda13) whose packages this driver can run.

        Without a driver it is the newest; for a driver older than all of them the oldest.
        """
        fits = [major for major in EXTRAS if self.cuda is None or major <= self.cuda[0]]
        return EXTRAS[max(fits, default=min(EXTRAS))]


def ask_driver(load: Load = ctypes.CDLL) -> Driver:
    """Return what the NVIDIA driver says of the GPUs here; no driver is not an error.

    `load` opens a shared library and raises OSError if it does not exist.
    """
    try:
        library = load(_LIBRARY)
    except OSError:
        return Driver(None, (), f"no NVIDIA driver is installed ({_LIBRARY} is not found)")
    number = ctypes.c_int(0)
    cuda = None
    if library.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
        cuda = number.value // 1000, number.value % 1000 // 10
    code = library.cuInit(0)
    if code:
        return Driver(cuda, (), _ERRORS.get(code, f"the NVIDIA driver fails with code {code}"))
    library.cuDeviceGetCount(ctypes.byref(number))
    gpus = tuple(_gpu_facts(library, index) for index in range(number.value))
    return Driver(cuda, gpus, "" if gpus else _ERRORS[100])


def _gpu_facts(library: Any, index: int) -> Gpu:
    """Return the name, memory and capability of GPU number `index`."""
    handle, memory = ctypes.c_int(0), ctypes.c_size_t(0)
    name = ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, len(name), handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    library.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_MAJOR, handle)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_MINOR, handle)
    text = name.value.decode("utf-8", "replace")
    return Gpu(index, text, memory.value, f"{major.value}.{minor.value}")


def driver_version(load: Load = ctypes.CDLL) -> str | None:
    """Return the driver's version (`580.159.04`); None if it cannot be read."""
    try:
        library = load(_MANAGEMENT)
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2():
        return None
    code = library.nvmlSystemGetDriverVersion(text, len(text))
    library.nvmlShutdown()
    return None if code else text.value.decode("ascii", "replace")


@contextmanager
def name_memory_errors(device: str) -> Iterator[None]:
    """Inside the `with`, turn torch's and cupy's OutOfMemoryError into BackendUnavailableError.

    Its message names the device and what to do.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        found = " ".join(str(error).split())[:200]
        raise BackendUnavailableError(
            f"device {device!r}: its memory is full ({found}); give --memory SIZE for the weights, "
            "or a shorter text"
        ) from error


def torch_problem(torch_version: str, built_for: str | None, found: Driver | None = None) -> str:
    """Return why torch sees no GPU, and what to do.

    `built_for` is torch.version.cuda: `13.0`, or None for a build without CUDA. `found` is the
    driver; None: it is asked now.
    """
    found = ask_driver() if found is None else found
    if built_for is None:
        why = f"torch {torch_version} was built without CUDA"
        todo = f"{install_command(found.extra)}, or torch from its CUDA index"
        return f"{why}; {todo}" + (f"; also, {found.why}" if found.why else "")
    if found.why:
        return f"{found.why}; install the driver, or run on cpu"
    major = int(built_for.partition(".")[0])
    if found.cuda is not None and major > found.cuda[0]:
        newest = ".".join(map(str, found.cuda))
        return (
            f"torch {torch_version} was built for CUDA {built_for}, the driver runs CUDA up to "
            f"{newest}; update the driver, or {install_command(found.extra)}"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"torch sees no GPU with CUDA_VISIBLE_DEVICES={hidden!r}; unset it"
    return f"torch {torch_version} for CUDA {built_for} cannot use the GPU the driver has"


@dataclass(frozen=True)
class TorchBuild:
    """What torch/version.py says: `cuda` and `hip` are versions, None for a build without them."""

    version: str
    cuda: str | None
    hip: str | None


def installed_torch() -> TorchBuild | None:
    """Return what the installed torch was built for, without importing it; None if not known."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return None
    rows = re.findall(
        r"^(__version__|cuda|hip)\b[^=\n]*= *(?:'([^']*)'|None) *$", text, re.MULTILINE
    )
    found = {name: value or None for name, value in rows}
    if not {"__version__", "cuda", "hip"} <= found.keys():
        return None
    return TorchBuild(str(found["__version__"]), found["cuda"], found["hip"])


def gpu_problem(library: str) -> str:
    """Return why `torch` or `cupy` cannot use a GPU here, and what to do; "" if nothing hinders it.

    Neither is imported: that takes seconds. A torch for AMD's GPUs needs no NVIDIA driver.
    """
    found = ask_driver()
    if not found.why:
        return ""
    if library == "cupy":
        return cupy_problem(found)
    build = installed_torch()
    if build is None or build.hip is not None:
        return ""
    return torch_problem(build.version, build.cuda, found)


def installed_cupy() -> tuple[str, int | None] | None:
    """Return (name of the installed cupy package, CUDA major it is for); None without one.

    The major is None for a package `cupy`, built from source.
    """
    for name, major in CUPY.items():
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name, major
    try:
        version("cupy")
    except PackageNotFoundError:
        return None
    return "cupy", None


def cupy_problem(found: Driver | None = None) -> str:
    """Return why cupy cannot run on this machine's GPU, and what to do; "" if nothing hinders it.

    The installed package is compared with the driver `found` (None: it is asked now); neither cupy
    nor a GPU is needed.
    """
    found = ask_driver() if found is None else found
    package = installed_cupy()
    if package is None:
        return f"cupy is not installed; {install_command(found.extra)}"
    if found.why:
        return f"{found.why}; install the driver, or run on cpu"
    name, major = package
    if major is not None and found.cuda is not None and major > found.cuda[0]:
        newest = ".".join(map(str, found.cuda))
        return (
            f"{name} is for CUDA {major}, the driver runs CUDA up to {newest}; pip uninstall "
            f"{name}, then {install_command(found.extra)}"
        )
    return ""
