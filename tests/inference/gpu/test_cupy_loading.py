"""What needs no GPU of the GPU side (imports, errors, sources), and the kernel cache."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.fast.cuda import DECODED, MATVEC, loader
from aprfmt.inference.fast.cuda.decode import launch_settings
from tests.inference.gpu import machine


def test_importing_the_kernels_imports_neither_cupy_nor_torch() -> None:
    code = (
        "import sys, aprfmt.inference.fast.cuda, aprfmt.inference.fast.cupy_backend; "
        "sys.exit(bool({'cupy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_backend_without_cupy_or_a_gpu_says_what_to_do() -> None:
    if machine.gpu():
        pytest.skip("NOT-RUN: this machine has a GPU")
    with pytest.raises(BackendUnavailableError, match=r"\[cuda13\]|nothing was run on the"):
        BACKENDS["cupy"]("cuda", "float32")


def test_every_source_is_in_the_package_and_names_its_encodings() -> None:
    folder = files("aprfmt.inference.fast.cuda")
    names = {path.name for path in folder.iterdir() if path.name.endswith((".cu", ".cuh"))}
    on_disk = Path(loader.__file__).parent
    assert names == {path.name for path in (*on_disk.glob("*.cu"), *on_disk.glob("*.cuh"))}
    blocks = loader.read_sources("blocks.cuh")
    for encoding in DECODED:
        assert f"struct {encoding} :" in blocks
        for size in (2, 4, 8):
            launch = launch_settings(encoding, size)
            assert 4096 % launch.tile == 0 and launch.tile % 256 == 0
            # what is read where it stands must end with its block
            assert not launch.direct or encoding not in ("F32", "F16", "BF16")
    assert set(MATVEC) <= set(DECODED)


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
def test_a_kernel_is_compiled_once_and_kept(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APRFMT_KERNEL_CACHE", str(tmp_path / "kernels"))
    names, defines = ("prelude.cuh", "reduce.cu"), ("ONLY_FOR_THIS_TEST 1",)
    arch = str(loader.load_cupy().cuda.Device().compute_capability)
    code = loader._compile_module.__wrapped__(names, defines, arch)
    kept = list((tmp_path / "kernels").iterdir())
    assert len(kept) == 1 and kept[0].read_bytes() == code
    kept[0].write_bytes(b"from disk")
    assert loader._compile_module.__wrapped__(names, defines, arch) == b"from disk"
    with pytest.raises(BackendUnavailableError, match="do not compile"):
        loader._compile_module.__wrapped__(
            ("prelude.cuh", "ops.cu"), ("ELEMENT no_such_type",), arch
        )


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
def test_a_refused_launch_raises(machine: Any) -> None:
    kernel = loader.load_function(
        ("prelude.cuh", "ops.cu", "attention.cu"), "add", ("ELEMENT float",)
    )
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (4096,), (0, 0, 0, 0, 1))
