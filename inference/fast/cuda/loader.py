"""Compiles kernel sources once per GPU model, caches them on disk, and returns launch functions.

NVRTC compiles to machine code, which is stored in `cache_folder()` under a name made of source,
options, compiler version and architecture; later processes load it from there. CuPy's own
compilation is not used because it flushes subnormal numbers to zero. A launch that the driver
refuses raises at once; a fault inside a kernel raises at the next transfer.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from aprfmt.base.installation import install_command
from aprfmt.errors import BackendUnavailableError

Function = Callable[..., None]  # (grid, block, args, shared_mem=0, stream=None)
_FLAGS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def load_cupy() -> Any:
    """Return the cupy module; BackendUnavailableError says what to install if it is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise BackendUnavailableError(
            f"cupy cannot be imported ({error}); {install_command('cuda13')}, or the extra cuda12 "
            "for a driver of CUDA 12"
        ) from error
    return module


@cache
def read_sources(*names: str) -> str:
    """Return the text of kernel files of this folder, joined in order, with #line marks."""
    folder = files("aprfmt.inference.fast.cuda")
    return "\n".join(
        f'#line 1 "{name}"\n' + (folder / name).read_text(encoding="utf-8") for name in names
    )


def cache_folder() -> Path:
    """Return the folder of compiled kernels: $APRFMT_KERNEL_CACHE or ~/.cache/aprfmt/kernels."""
    chosen = os.environ.get("APRFMT_KERNEL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(home) / "aprfmt" / "kernels"


@cache
def _compile_module(names: tuple[str, ...], defines: tuple[str, ...], arch: str) -> bytes:
    """Return the machine code of kernel files for sm_`arch`, from the cache if it is there.

    `names` are the files, `defines` texts for `#define`. Raises BackendUnavailableError if they do
    not compile.
    """
    nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    text = "".join(f"#define {define}\n" for define in defines) + read_sources(*names)
    flags = (*_FLAGS, f"--gpu-architecture=sm_{arch}")
    key = "\0".join([text, *flags, str(nvrtc.getVersion())])
    path = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    program = nvrtc.createProgram(text, names[-1], (), ())
    try:
        nvrtc.compileProgram(program, flags)
        code = bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise BackendUnavailableError(
            f"the kernels of {names[-1]} do not compile for sm_{arch}: {error}; "
            f"{nvrtc.getProgramLog(program).strip()[:400]}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    _write_atomically(path, code)
    return code


def _write_atomically(path: Path, code: bytes) -> None:
    """Write `code` to `path` atomically, and return nothing.

    If the folder cannot be written the error is ignored: the next process compiles again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass


@cache
def _load_module(device: int, names: tuple[str, ...], defines: tuple[str, ...]) -> Any:
    """Return CuPy's module of the kernel files `names`, compiled and loaded on device `device`.

    It is loaded on the current device, which must be this one. `defines` are texts for `#define`.
    """
    arch = str(load_cupy().cuda.Device(device).compute_capability)
    loaded = load_cupy().cuda.function.Module()
    loaded.load(_compile_module(names, defines, arch))
    return loaded


@cache
def _load_function(
    device: int, names: tuple[str, ...], name: str, defines: tuple[str, ...], shared: int
) -> Function:
    """Return the kernel `name` of kernel files `names`, loaded on a device; loaded once.

    `shared` is the largest dynamic shared memory of a launch in bytes; 0 leaves CUDA's 48 KiB.
    """
    found = _load_module(device, names, defines).get_function(name)
    if shared:
        limit = min(shared, int(device_attributes(device)["MaxSharedMemoryPerBlockOptin"]))
        load_cupy().cuda.driver.funcSetAttribute(found.ptr, _MAX_DYNAMIC_SHARED, limit)
    kernel: Function = found
    return kernel


def load_function(
    names: tuple[str, ...], name: str, defines: tuple[str, ...] = (), *, shared: int = 0
) -> Function:
    """Return a kernel on the current device, to be called as kernel(grid, block, args).

    Integers are passed as int64, floats as double. `names` are the kernel files, `defines` texts
    for `#define`. `shared` is the largest dynamic shared memory of a launch in bytes, needed if
    above 48 KiB.
    """
    return _load_function(load_cupy().cuda.runtime.getDevice(), names, name, defines, shared)


@cache
def device_attributes(device: int) -> Mapping[str, int]:
    """Return {attribute name: number} of a device, by CUDA's names (MultiProcessorCount ...)."""
    found: Mapping[str, int] = load_cupy().cuda.Device(device).attributes
    return found


def processor_count() -> int:
    """Return the number of multiprocessors of the current device."""
    return int(device_attributes(load_cupy().cuda.runtime.getDevice())["MultiProcessorCount"])
