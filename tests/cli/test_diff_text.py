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


def test_what_differs_stands_below_the_name_of_its_section(
    demo_model: Path, tmp_path: Path
) -> None:
    """Every difference of --json has its line, and every section that has one its heading."""
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert aprfmt("convert", demo_model, a).code == 0
    changes = ("rope_theta=5", "tokenizer.ggml.add_bos_token=true", "general.author=x")
    assert aprfmt("set", a, *changes, "--force", "-o", b).code == 0
    found = aprfmt("diff", a, b, "--json").json
    lines = aprfmt("diff", a, b, "-v").out.splitlines()
    sections = ("hyperparameters", "tokenizer", "metadata")
    at = [lines.index(f"{section} that differ") for section in sections if found[section]]
    assert at == sorted(at) and len(at) >= 2
    for section in sections:
        heading = f"{section} that differ"
        assert (heading in lines) == bool(found[section])
        for row in found[section]:
            behind = lines[lines.index(heading) :]
            assert any(line.startswith(f"  {row['name']}: ") for line in behind), row
