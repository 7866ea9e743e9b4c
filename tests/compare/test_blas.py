"""A comparison leaves the threads of BLAS asleep: woken, they spin longer than the sums take.

Linux counts how often each thread was given a processor. The threads that numpy's import starts
are those of its BLAS; nothing but a call of BLAS gives them work.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aprfmt.tensors.norms import exact_dot, exact_norm
from tests.conftest import not_run
from tests.conversion.folders import write_safetensors

CHILD = """
import json, os, sys, time
from pathlib import Path

TASKS = Path("/proc/self/task")
before = {task.name for task in TASKS.iterdir()}
import numpy as np

threads = sorted({task.name for task in TASKS.iterdir()} - before)

def switches():
    found = {}
    for task in threads:
        lines = (TASKS / task / "status").read_text().splitlines()
        found[task] = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found

def settle():
    seen = None
    while seen != (now := switches()):  # they spin for a while before they sleep
        seen = now
        time.sleep(0.2)
    return now

from aprfmt.compare import diff
from aprfmt.tensors.norms import exact_dot, exact_norm

large = np.ones(1 << 18)
begin = settle()
if sys.argv[1] == "blas":
    large.dot(large)
elif sys.argv[1] == "sums":
    exact_dot(large, large), exact_norm(large), exact_norm(large.astype(np.complex64))
else:
    report = diff(*sys.argv[2:], explain=False)
    assert report.counts[sys.argv[1]] == 1, report.counts
print(json.dumps([threads, begin, settle()]))
"""


def woken(*arguments: str) -> bool:
    """Say whether a thread of BLAS ran in a process that does this; NOT-RUN without threads."""
    if not Path("/proc/self/task").is_dir():
        not_run("threads are counted on Linux alone")
    env = {"OPENBLAS_NUM_THREADS": "2", "PATH": ""}
    command = [sys.executable, "-c", CHILD, *arguments]
    child = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not child.returncode, child.stderr
    threads, begin, end = json.loads(child.stdout)
    if not threads:
        not_run("numpy's BLAS has no threads of its own")
    return bool(begin != end)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of one matrix: float32, the same in bfloat16 exactly, and values a little apart."""
    folder = tmp_path_factory.mktemp("blas")
    bits = np.random.default_rng(0).standard_normal(1 << 18, np.float32).view(np.uint32)
    values = (bits & 0xFFFF0000).view(np.float32)
    data = {
        "float": ("F32", values.tobytes()),
        "half": ("BF16", (values.view(np.uint32) >> 16).astype("<u2").tobytes()),
        "apart": ("F32", (values * np.float32(1.0009)).tobytes()),
    }
    paths = {name: folder / f"{name}.safetensors" for name in data}
    for name, (encoding, raw) in data.items():
        write_safetensors(paths[name], {"w": (256, 1024)}, {"w": raw}, encoding)
    return paths


def test_a_call_of_blas_is_seen() -> None:
    assert woken("blas")


def test_sums_wake_no_thread_of_blas() -> None:
    assert not woken("sums")


@pytest.mark.parametrize(("verdict", "other"), [("SAME_VALUES", "half"), ("DIFFERENT", "apart")])
def test_diff_wakes_no_thread_of_blas(files: dict[str, Path], verdict: str, other: str) -> None:
    assert not woken(verdict, str(files["float"]), str(files[other]))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 40000), (2, 3, 4)])
def test_sums_are_those_of_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.asarray(np.random.default_rng(1).normal(0, 9, shape)).astype(dtype)
    wide = values.astype(np.complex128 if dtype[0] == "c" else np.float64)
    assert exact_norm(values) == pytest.approx(float(np.linalg.norm(wide)), rel=1e-13)
    assert exact_norm(values.T) == pytest.approx(exact_norm(values), rel=1e-13)
    if dtype[0] != "c":
        expected = float(np.sum(wide.real * (wide.real + 1)))
        assert exact_dot(wide, wide + 1) == pytest.approx(expected, rel=1e-9, abs=1e-9)
