"""Files of metadata without a tensor: said as such by every command."""

import struct
from pathlib import Path

import pytest

from tests.cli.run import aprfmt


def tower(path: Path) -> Path:
    """Return a GGUF of a tower of pictures that has two keys and no tensor."""
    keys = (("general.architecture", b"clip"), ("clip.projector_type", b"mlp"))
    rows = b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(value)) + value
        for key, value in keys
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + rows)
    return path


def empty_folder(path: Path) -> Path:
    """Return a folder with the configuration of a model and weights without a tensor."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"{}      ")
    return path


@pytest.mark.parametrize("make", [tower, empty_folder])
def test_a_file_without_a_tensor_is_said_to_have_none(make: object, tmp_path: Path) -> None:
    path = make(tmp_path / "mmproj.gguf") if make is tower else empty_folder(tmp_path / "model")
    done = aprfmt("inspect", path)
    assert done.code == 0 and done.out.count("it holds no tensor") == 1
    checked = aprfmt("validate", path)
    assert checked.code == 1 and "holds no tensor" in checked.out
    for said in (done.out + done.err, checked.out + checked.err):
        assert "naming style" not in said and "cannot be read;" not in said
    assert aprfmt("diff", path, path).code == 2
