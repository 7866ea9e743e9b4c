"""Header entries of safetensors without dtype and bytes, which a writer left for tied tensors.

Seen red: the head was said to be stored, its shape wrong, and the key that ties it untrue.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors

import aprfmt as api
from aprfmt.errors import FormatError
from tests.cli.run import aprfmt

ENTRIES: dict[str, dict[str, Any]] = {
    "no-dtype": {"dtype": "", "shape": [], "data_offsets": [0, 0]},
    "null": {"dtype": None, "shape": [0], "data_offsets": [0, 0]},
    "at-the-end": {"dtype": "", "shape": [], "data_offsets": [-1, -1]},
}


def with_entry(file: Path, name: str, entry: dict[str, Any]) -> None:
    """Put an entry into the header of a safetensors file; offsets of -1 are the end."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    end = len(raw) - 8 - size
    header[name] = entry | {"data_offsets": [end if at < 0 else at for at in entry["data_offsets"]]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def opened(folder: Path) -> list[str]:
    """Return the names that the format's own library reads."""
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        return list(file.keys())


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_without_a_tensor_is_no_tensor(case: str, tmp_path: Path) -> None:
    assert aprfmt("demo", "--into", tmp_path / "demo", "--quiet").code == 0
    a = next((tmp_path / "demo").rglob("config.json")).parent
    b = tmp_path / "b"
    shutil.copytree(a, b)
    with_entry(b / "model.safetensors", "lm_head.weight", ENTRIES[case])
    with pytest.raises(safetensors.SafetensorError):
        opened(b)
    said = aprfmt("validate", b)
    assert said.code == 1
    assert "has neither dtype nor bytes" in said.out and "tie_word_embeddings" not in said.out
    told = aprfmt("diff", a, b, "--json").json
    assert told["exit"] == 1 and not told["causes"]
    with pytest.raises(FormatError, match="neither dtype nor bytes"):
        api.open(b)
    done = aprfmt("repair", b / "model.safetensors", "--partial", "-o", tmp_path / "m.safetensors")
    assert done.code == 0, done.err
    shutil.copy(tmp_path / "m.safetensors", b / "model.safetensors")
    opened(b)
    assert aprfmt("diff", a, b).code == 0


def test_an_unknown_dtype_with_bytes_is_damage(tmp_path: Path) -> None:
    assert aprfmt("demo", "--into", tmp_path, "--quiet").code == 0
    file = next(tmp_path.rglob("model.safetensors"))
    raw = file.read_bytes().replace(b'"BF16"', b'""    ', 1)
    file.write_bytes(raw)
    said = aprfmt("validate", file.parent).out
    assert "dtype '' is not one of" in said and "neither dtype nor bytes" not in said
