"""The errors if there is no usable GPU: the cause, and what to do; another device is never used.

Seen red: the driver's version read as 1300 instead of 13.0, the cause of a too old driver given
for a hidden GPU, `cuda:x` taken for cuda, auto's message saying that nothing was run, torch
imported (or a model opened) before a missing driver is found.
"""

import ctypes
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from aprfmt.base.installation import install_command
from aprfmt.cli import doctor
from aprfmt.errors import BackendUnavailableError, UsageError
from aprfmt.inference import cuda_driver
from aprfmt.inference.backends.torch_device import torch_devices
from aprfmt.inference.cuda_driver import (
    Driver,
    Gpu,
    ask_driver,
    cupy_problem,
    driver_version,
    gpu_problem,
    installed_torch,
    torch_problem,
)
from aprfmt.inference.device import choose_device, parse_run
from tests.cli.run import ROOT, aprfmt

CHILD = {"PYTHONPATH": str(ROOT)}
NO_GPU = not torch.cuda.is_available()
H200 = Gpu(0, "NVIDIA H200", 150_000_000_000, "9.0")
NEW, OLD = Driver((13, 0), (H200,), ""), Driver((12, 4), (H200,), "")
NONE = Driver(None, (), "no NVIDIA driver is installed (libcuda.so.1 is not found)")


class Library:
    """A driver with given answers."""

    def __init__(self, version: int = 13000, init: int = 0, count: int = 1) -> None:
        self._answers: Mapping[str, int] = {"version": version, "count": count}
        self._init = init

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = self._answers["version"]
        return 0

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, number: Any) -> int:
        number._obj.value = self._answers["count"]
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = 40 + index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:
        name.value = f"GPU {handle.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, handle: Any) -> int:
        memory._obj.value = 10 * handle.value
        return 0

    def cuDeviceGetAttribute(self, number: Any, which: int, handle: Any) -> int:
        number._obj.value = {75: 9, 76: 1}[which]
        return 0

    def nvmlInit_v2(self) -> int:
        return self._init

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.159.04"
        return 0


def absent(name: str) -> Any:
    raise OSError(name)


def test_a_driver_is_asked() -> None:
    found = ask_driver(lambda name: Library(count=2))
    assert found.cuda == (13, 0) and found.why == "" and found.extra == "cuda13"
    assert found.gpus == (Gpu(0, "GPU 40", 400, "9.1"), Gpu(1, "GPU 41", 410, "9.1"))
    assert ask_driver(lambda name: Library(version=12040)).cuda == (12, 4)
    assert driver_version(lambda name: Library()) == "580.159.04"
    assert driver_version(absent) is None and driver_version(lambda name: Library(init=9)) is None


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (absent, "no NVIDIA driver is installed"),
        (lambda name: Library(init=100), "sees no NVIDIA GPU"),
        (lambda name: Library(count=0), "sees no NVIDIA GPU"),
        (lambda name: Library(init=803), "of different versions; reboot"),
        (lambda name: Library(init=77), "fails with code 77"),
    ],
)
def test_what_a_driver_lacks(load: Any, why: str) -> None:
    found = ask_driver(load)
    assert why in found.why and found.gpus == ()


def test_the_real_driver_answers_or_is_named() -> None:
    found = ask_driver()
    assert bool(found.gpus) != bool(found.why)
    assert isinstance(ctypes.sizeof(ctypes.c_size_t), int)


@pytest.mark.parametrize(
    ("built_for", "found", "says"),
    [
        (None, NEW, "built without CUDA; " + install_command("cuda13")),
        (None, OLD, install_command("cuda12")),
        (None, NONE, "libcuda.so.1 is not found"),
        ("13.0", NONE, "install the driver, or run on cpu"),
        ("13.0", OLD, "for CUDA 13.0, the driver runs CUDA up to 12.4; update the driver"),
        ("12.4", NEW, "cannot use the GPU the driver has"),
    ],
)
def test_why_torch_sees_no_gpu(
    built_for: str | None, found: Driver, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert says in torch_problem("2.9.0", built_for, found)


def test_a_hidden_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''; unset it" in torch_problem("2.9.0", "13.0", NEW)


@pytest.mark.parametrize(
    ("installed", "found", "says"),
    [
        ((), NEW, "cupy is not installed; " + install_command("cuda13")),
        ((), OLD, install_command("cuda12")),
        (("cupy-cuda13x",), OLD, "is for CUDA 13, the driver runs CUDA up to 12.4"),
        (("cupy-cuda13x",), NONE, "no NVIDIA driver"),
        (("cupy-cuda12x",), NEW, ""),
        (("cupy",), OLD, ""),
    ],
)
def test_why_cupy_cannot_run(
    installed: tuple[str, ...], found: Driver, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in installed:
            return "14.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cuda_driver, "version", version)
    problem = cupy_problem(found)
    assert says in problem and bool(says) == bool(problem)


@pytest.mark.parametrize(
    ("device", "backend", "runs"),
    [
        ("cuda:all", None, "torch:cuda:all:float32"),
        ("cuda:3", None, "torch:cuda:3:float32"),
        ("cuda", "torch", "torch:cuda:float32"),
    ],
)
def test_devices_are_read(device: str, backend: str | None, runs: str) -> None:
    assert str(choose_device(device, backend)) == runs
    assert str(parse_run(f"torch:{device}")) == runs


@pytest.mark.parametrize("device", ["cuda:x", "cuda:", "cuda:-1", "gpu", "cpu:0", "cuda:all:1"])
def test_words_that_are_no_device_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected cpu, cuda, cuda:N, cuda:all or auto"):
        choose_device(device)
    with pytest.raises((UsageError, BackendUnavailableError), match="expected"):
        parse_run(f"cuda:{device}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailableError, match="expected cpu, cuda, cuda:N or cuda:all"):
        torch_devices(device)


@pytest.mark.skipif(not NO_GPU, reason="NOT-RUN: this machine has a GPU")
@pytest.mark.parametrize("command", ["logits", "trace", "run", "eval"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cuda:all"])
def test_a_command_without_its_gpu_is_exit_2(command: str, device: str, demo_model: Any) -> None:
    options = ["--payload"] if command == "trace" else []
    text = ["--text", "a b c"] if command == "eval" else ["--ids", "1,2,3"]
    done = aprfmt(command, demo_model, *text, "--device", device, "--json", *options)
    assert done.code == 2
    error = done.json["error"]
    assert error["kind"] == "backendunavailable"
    assert f"device {device!r}: " in error["message"] and "pip install" in error["message"]
    assert error["message"].endswith("nothing was run on the CPU instead")


@pytest.mark.skipif(not NO_GPU, reason="NOT-RUN: this machine has a GPU")
def test_only_auto_falls_back_and_says_so(demo_model: Any) -> None:
    done = aprfmt("logits", demo_model, "--ids", "1,2,3", "--device", "auto", "--json")
    run = done.json["run"]
    assert done.code == 0 and run["requested"] == "auto" and run["ran"] == "numpy:cpu:float32"
    assert run["why"].startswith("auto chose the CPU: ") and "nothing was run" not in run["why"]
    assert "auto chose the CPU" in done.err


LOADED = """
import sys
from aprfmt.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 2, end.code
print("imported:", *(name for name in ("torch", "cupy", "aprfmt.model") if name in sys.modules))
"""


@pytest.mark.skipif(not NO_GPU, reason="NOT-RUN: this machine has a GPU")
@pytest.mark.parametrize("run", ["cuda", "cuda:1", "torch:cuda:all", "cupy"])
@pytest.mark.parametrize(
    "words",
    [
        ("parity", "MODEL", "--ids", "1,2,3", "--between", "cpu", "RUN"),
        ("trace", "MODEL@RUN", "--payload", "--ids", "1,2,3"),
        ("run", "MODEL@RUN", "--ids", "1,2,3"),
        ("eval", "MODEL@RUN", "--ids", "1,2,3"),
        ("qa", "MODEL@RUN"),
        ("qa", "MODEL", "--also", "RUN"),
    ],
    ids=lambda words: f"{words[0]}{len(words)}",
)
def test_a_missing_gpu_is_found_before_anything_is_imported_or_opened(
    words: Sequence[str], run: str, demo_model: Any
) -> None:
    said = [word.replace("MODEL", str(demo_model)).replace("RUN", run) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *said], capture_output=True, text=True, env=CHILD
    )
    found = done.stdout.removeprefix("imported:").split()
    assert done.stdout.startswith("imported:") and not {"torch", "cupy"} & set(found), done.stderr
    assert words[0] != "parity" or found == []
    assert done.stderr.startswith("aprfmt: device 'cuda") and "pip install" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_installed_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installed_torch()
    assert found is not None
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)
    monkeypatch.setattr(cuda_driver, "ask_driver", lambda: NONE)
    assert torch_problem(torch.__version__, torch.version.cuda, NONE) == gpu_problem("torch")
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(
        "__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n"
    )
    spec = type("Spec", (), {"origin": str(folder / "__init__.py")})
    monkeypatch.setattr(cuda_driver, "find_spec", lambda name: spec)
    assert gpu_problem("torch") == ""  # AMD's GPUs need no NVIDIA driver
    (folder / "version.py").unlink()
    assert gpu_problem("torch") == ""  # torch itself says what is wrong
    monkeypatch.setattr(cuda_driver, "find_spec", lambda name: None)
    assert gpu_problem("torch") == ""
    monkeypatch.setattr(cuda_driver, "ask_driver", lambda: NEW)
    assert gpu_problem("cupy") == "" and gpu_problem("torch") == ""


def test_doctor_shows_devices() -> None:
    found = aprfmt("doctor", "--json").json["devices"]
    assert set(found) == {"driver", "cuda", "gpus", "why", "torch", "cupy"}
    assert bool(found["gpus"]) != bool(found["why"])
    if NO_GPU:
        assert "pip install" in found["torch"]
    assert "devices" in aprfmt("doctor").out


def test_full_memory_is_an_error_that_says_what_to_do() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    with pytest.raises(
        BackendUnavailableError, match=r"'cuda:0': its memory is full \(2 GiB.*SIZE"
    ):
        with cuda_driver.name_memory_errors("cuda:0"):
            raise OutOfMemoryError("2 GiB\nmore")
    with pytest.raises(ValueError, match="other"):
        with cuda_driver.name_memory_errors("cuda:0"):
            raise ValueError("other")


def test_doctor_says_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "ask_driver", lambda: NEW)
    found = doctor.gpu_devices()
    assert (found["cuda"], found["why"]) == ("13.0", "")
    assert found["gpus"] == [
        {"index": 0, "name": "NVIDIA H200", "memory": 150_000_000_000, "compute": "9.0"}
    ]
