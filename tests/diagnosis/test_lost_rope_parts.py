"""Tensors and keys of a rope scaling that a GGUF lost are named as the file would name them.

Files are written by llama.cpp's own writer (gguf). Seen red: the tensors not looked for, the keys
of a scaling called as config.json calls them.
"""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.models import save_tiny

LONG, SHORT, FREQS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
KEY = "phi3.rope.scaling."


def lost(folder: Path, base: str, *names: str) -> tuple[Path, Path]:
    """Return (a model's folder, its GGUF without keys of aprfmt and without `names`)."""
    save_tiny(base, folder / "hf", "float32")
    assert aprfmt("convert", folder / "hf", folder / "whole.gguf").code == 0
    reader = gguf.GGUFReader(folder / "whole.gguf")
    writer = gguf.GGUFWriter(folder / "b.gguf", reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "aprfmt.")) or key in ("general.architecture", *names):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, inner)
    for tensor in reader.tensors:
        if tensor.name not in names:
            writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "hf", folder / "b.gguf"


# base, what is lost, the stored names that are said, whether `set` mends it
LOST: tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool], ...] = (
    ("phi3-long", (LONG, SHORT), (LONG, SHORT), False),
    ("phi3-long", (LONG,), (LONG,), False),
    ("phi3-long", (SHORT,), (SHORT,), False),
    ("phi3-long", (LONG, SHORT, f"{KEY}type", f"{KEY}attn_factor"), (LONG, SHORT), False),
    ("phi3-long", (f"{KEY}attn_factor",), (f"{KEY}attn_factor",), True),
    ("phi3-long", (f"{KEY}original_context_length",), (f"{KEY}original_context_length",), True),
    ("llama-llama3", (FREQS,), (FREQS,), False),
)  # fmt: skip


@pytest.mark.parametrize(("base", "names", "said", "mends"), LOST)
def test_what_a_gguf_lost_is_named(
    base: str, names: tuple[str, ...], said: tuple[str, ...], mends: bool, tmp_path: Path
) -> None:
    a, b = lost(tmp_path, base, *names)
    done = aprfmt("diagnose", a, b, "--json")
    (one,) = done.json["causes"]
    assert (done.code, one["cause"], one["level"]) == (1, "rope_scaling", "confirmed")
    assert set(said) <= set(one["where"]), one["where"]
    assert all(name in one["says"] for name in said), one["says"]
    if mends:
        assert said[0] in one["remedy"]["command"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((LONG, SHORT), f"{KEY}type is longrope, and there is no {LONG} and no {SHORT}"),
        ((SHORT, f"{KEY}type"), f"{KEY}attn_factor is 1.22474.*, and there is no {SHORT}"),
        ((SHORT, f"{KEY}type", f"{KEY}attn_factor"), f"there is a {LONG}, and there is no {SHORT}"),
    ],
)
def test_validate_names_what_longrope_lacks(
    names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    _, b = lost(tmp_path, "phi3-long", *names)
    report = aprfmt("validate", b, "--json").json
    found = [row["found"] for row in report["findings"]]
    assert any(re.search(said, text) for text in found), found
    assert not any("rope.scaling" in text and "in no table" in text for text in found), found


@pytest.mark.parametrize("base", ["phi3-long", "phi3-plain", "llama-llama3", "llama-yarn"])
def test_a_whole_gguf_lacks_nothing(base: str, tmp_path: Path) -> None:
    a, b = lost(tmp_path, base)
    assert aprfmt("diagnose", a, b).code == 0
    found = [row["found"] for row in aprfmt("validate", b, "--json").json["findings"]]
    assert not any("longrope" in text for text in found), found
