"""What `diff` prints of one tensor."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.cli.run import aprfmt


def test_shapes_are_printed_where_they_differ_and_only_there(tmp_path: Path) -> None:
    whole = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32)}
    cut = {"a": np.ones((2, 2), np.float32), "b": np.zeros((2, 3), np.float32)}
    save_file(whole, tmp_path / "x.safetensors")
    save_file(cut, tmp_path / "y.safetensors")
    done = aprfmt("diff", tmp_path / "x.safetensors", tmp_path / "y.safetensors", "-v")
    assert done.code == 1
    shapes = [line.strip() for line in done.out.splitlines() if line.strip().startswith("shape ")]
    assert shapes == ["shape [2, 3] | [2, 2]"]


def test_the_verdict_comes_first_and_numbers_have_names(demo_model: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    aprfmt("convert", demo_model, a)
    aprfmt("quantize", a, b, "--type", "Q4_K_M")
    assert aprfmt("diff", a, a).out.startswith("equal, 50 tensors: 50 SAME_BYTES\n")
    first, *more = aprfmt("diff", a, b, "-v").out.splitlines()
    assert first == "different, 50 tensors: 29 WITHIN, 21 SAME_BYTES"
    assert "  general.file_type: 32 = BF16 | 15 = Q4_K_M" in more
    assert "  general.quantization_version: - | 2" in more
