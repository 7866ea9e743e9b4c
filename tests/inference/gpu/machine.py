"""Where kernels run in these tests: a GPU, or a C++ compiler's emulation of one on this machine.

`Machine` gives the same few verbs over both: put numpy data there, get it back, launch. The
emulated one replaces the loader's `function`, so the package's own calls run unchanged.
"""

import ctypes
import hashlib
import importlib
import os
import pkgutil
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from aprfmt.inference.fast.cuda import loader
from aprfmt.inference.fast.cuda.arrays import Flat
from aprfmt.inference.fast.graphs import NotRecordable

HEADER = Path(__file__).resolve().parent / "emulated.h"
_FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fvisibility=hidden", "-Wno-unknown-pragmas", "-w",
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
# Kept from run to run: a compilation takes as long as the tests of its kernels.
_FOLDER = Path(tempfile.gettempdir()) / f"aprfmt-emulated-{os.getuid()}"
PROCESSORS = 3  # few, so that every block has several tiles


def on(name: str, emulated: Iterable[Any], gpu: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize (machine, name): these emulated, and those on a GPU."""
    return pytest.mark.parametrize(
        ("machine", name),
        [("emulated", each) for each in emulated]
        + [pytest.param("gpu", each, marks=pytest.mark.gpu) for each in gpu],
        indirect=["machine"],
    )


def compiler() -> str | None:
    """Return a C++ compiler for this machine's processor, None where there is none."""
    import platform

    return shutil.which("g++") if platform.machine() in ("x86_64", "AMD64") else None


def gpu() -> bool:
    """Say whether cupy is there and finds a GPU."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # no cupy, no driver, no device: each with errors of its own
        return False


@cache
def _library(names: tuple[str, ...], defines: tuple[str, ...]) -> ctypes.CDLL:
    text = "".join(f"#define {define}\n" for define in defines) + loader.read_sources(*names)
    target = _FOLDER / f"{_digest(HEADER.read_text(), text)}.so"
    if not target.is_file():
        _compile(text, target, "-shared", "-include", str(_header()))
    return ctypes.CDLL(str(target))


@cache
def _header() -> Path:
    """Return what kernels begin with, with its compiled form beside it: most of a compilation."""
    text = HEADER.read_text()
    target = _FOLDER / f"{_digest(text)}.h"
    compiled = target.with_suffix(".h.gch")
    if not compiled.is_file():
        _compile(text, compiled, "-x", "c++-header")
    target.write_text(text)  # looked for, if not read
    return target


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([*texts, *_FLAGS]).encode()).hexdigest()


def _compile(text: str, target: Path, *how: str) -> None:
    """Compile a text; what another process made meanwhile is the same."""
    found = compiler()
    assert found is not None
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        source, made = Path(folder) / "kernels.cpp", Path(folder) / "made"
        source.write_text(text)
        command = [found, *_FLAGS, *how, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        made.replace(target)


def emulated(
    names: tuple[str, ...], name: str, defines: tuple[str, ...] = (), *, shared: int = 0
) -> Callable[..., None]:
    """Return a kernel that runs here, called as cupy's."""
    library = _library(names, defines)
    kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)

    def launch(
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        assert shared_mem <= 227 << 10 and 0 < block[0] <= 1024 and min(grid) > 0
        assert block[0] % 32 == 0  # whole warps: what they do together asks all of their threads
        assert max(grid[1:], default=1) < 65536
        integers = [int(a) for a in args if not isinstance(a, float)]
        reals = [a for a in args if isinstance(a, float)]
        assert len(integers) <= 14 and len(reals) <= 4
        library.emulate(
            kernel,
            (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]),
            ctypes.c_uint(block[0]),
            (ctypes.c_longlong * 14)(*integers),
            (ctypes.c_double * 4)(*reals),
        )

    return launch


class Emulated:
    """Numpy memory as the device's."""

    name = "emulated"

    def put(self, x: np.ndarray) -> Any:
        return np.array(x)

    def get(self, x: Any) -> np.ndarray:
        return np.array(x)

    def flat(
        self, x: Any, dtype: str | None = None, offset: int = 0, count: int | None = None
    ) -> Flat:
        size = x.size - offset if count is None else count
        return Flat(x.ctypes.data + offset * x.itemsize, size, dtype or x.dtype.name)


class Gpu:
    """Cupy's memory."""

    name = "gpu"

    def put(self, x: np.ndarray) -> Any:
        import cupy

        return cupy.asarray(x)

    def get(self, x: Any) -> np.ndarray:
        values: np.ndarray = x.get()
        return values

    def flat(
        self, x: Any, dtype: str | None = None, offset: int = 0, count: int | None = None
    ) -> Flat:
        size = x.size - offset if count is None else count
        return Flat(x.data.ptr + offset * x.itemsize, size, dtype or x.dtype.name)


def _view(address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return memory as an array, strides in elements."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    raw = (ctypes.c_char * (last * kind.itemsize)).from_address(address)
    flat: np.ndarray = np.frombuffer(memoryview(raw), kind)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * kind.itemsize for step in strides])


def product(
    dtype: str,
    a: int,
    b: int,
    c: int,
    *,
    rows: int,
    columns: int,
    depth: int,
    turned: bool,
    strides: tuple[int, int, int],
    batch: int = 1,
    steps: tuple[int, int, int] = (0, 0, 0),
    tf32: bool = False,
) -> None:
    """Do what gemm.product does, by numpy."""
    left = _view(a, dtype, (batch, rows, depth), (steps[0], strides[0], 1))
    shape = (batch, columns, depth) if turned else (batch, depth, columns)
    right = _view(b, dtype, shape, (steps[1], strides[1], 1))
    result = _view(c, dtype, (batch, rows, columns), (steps[2], strides[2], 1))
    wide = right.swapaxes(1, 2) if turned else right
    result[:] = (left.astype(np.float64) @ wide.astype(np.float64)).astype(result.dtype)


def products(
    dtype: str,
    a: int,
    b: int,
    c: int,
    *,
    count: int,
    rows: int,
    columns: int,
    depth: int,
    tf32: bool = False,
) -> None:
    """Do what gemm.products does, by numpy."""
    places = [(ctypes.c_int64 * count).from_address(at) for at in (a, b, c)]
    for left, right, result in zip(*places, strict=True):
        product(
            dtype,
            left,
            right,
            result,
            rows=rows,
            columns=columns,
            depth=depth,
            turned=True,
            strides=(depth, depth, columns),
        )


class Placed(np.ndarray):
    """An array that stands for one of the device: what is made of it is one too."""


def on_device(x: Any) -> Any:
    return np.asarray(x).view(Placed)


class _Arrays:
    """numpy's functions, whose arrays stand for the device's."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: on_device(getattr(np, name)(*args, **options))


def _not_replayed(size: int) -> Any:
    raise NotRecordable("statistics are not replayed here")


class _Memory:
    """What memory.py gives, over numpy's."""

    array_module = staticmethod(_Arrays)
    copy_to_gpu = staticmethod(lambda x: on_device(np.array(x)))
    copy_to_host = staticmethod(lambda x: np.array(x))
    allocate_for_later = staticmethod(_not_replayed)
    wait = staticmethod(lambda: None)
    pointer = staticmethod(lambda x: int(x.ctypes.data))
    is_on_gpu = staticmethod(lambda x: isinstance(x, Placed))
    use_device = staticmethod(lambda name: 0)
    device_facts = staticmethod(lambda index: {"versions": {"numpy": np.__version__}})
    free_bytes = staticmethod(lambda: 1 << 34)


class _Numbers:
    """Numbers on both sides: copied when asked for, never by themselves."""

    def __init__(self, count: int) -> None:
        self.device, self.host = on_device(np.zeros(count, np.int64)), np.zeros(count, np.int64)

    def copy_to_device(self) -> None:
        self.device[:] = self.host

    def copy_from_device(self, x: Any) -> None:
        self.host[:] = x


class _Maker:
    """Replays a pass by running it again as it was recorded: with the host's numbers of that time.

    What is right then depends on nothing but the device's numbers, as on a GPU.
    """

    errors = (RuntimeError,)
    allocate_numbers = staticmethod(_Numbers)
    wait = staticmethod(lambda: None)

    def record(self, first: Any, then: Any) -> Callable[[], None]:
        first()
        then()
        recorded = then.__self__

        def replay() -> None:
            backend, cache = recorded.backend, recorded.cache
            length = 0 if cache is None else cache.length
            if cache is not None:
                cache.length = recorded.cached
            backend.recording = recorded.inputs
            recorded.inputs.masks.clear()  # made anew, as by a recorded kernel
            then()
            backend.recording = None
            if cache is not None:
                cache.length = length

        return replay


@contextmanager
def on_this_machine() -> Iterator[Emulated]:
    """Have the package's launches, products and memory here."""
    from aprfmt.inference.fast import cuda
    from aprfmt.inference.fast.cuda import gemm, graph_maker, memory

    names = [info.name for info in pkgutil.iter_modules(cuda.__path__, f"{cuda.__name__}.")]
    modules = [importlib.import_module(name) for name in names]  # attributes are functions too
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "load_function"):
                stack.enter_context(mock.patch.object(module, "load_function", emulated))
            if hasattr(module, "processor_count"):
                stack.enter_context(
                    mock.patch.object(module, "processor_count", lambda: PROCESSORS)
                )
        stack.enter_context(mock.patch.object(gemm, "multiply_strided", product))
        stack.enter_context(mock.patch.object(gemm, "multiply_addressed", products))
        stack.enter_context(mock.patch.object(graph_maker, "CupyGraphMaker", _Maker))
        for name in vars(_Memory):
            if not name.startswith("_"):  # a name that memory.py lacks is an error
                stack.enter_context(mock.patch.object(memory, name, getattr(_Memory, name)))
        yield Emulated()
