"""Naming tensors: what a pattern matches is the same in every command, and `hex` takes a name."""

from pathlib import Path

import pytest

from aprfmt.errors import UsageError
from aprfmt.model.patterns import matching_indices
from tests.cli.run import aprfmt
from tests.models import save_tiny

NAMES = (
    "blk.0.ffn_gate.weight", "blk.1.ffn_gate.weight", "blk.1.ffn_gate_inp.weight",
    "blk.10.attn_q.weight", "blk.10.attn_q.bias", "output.weight",
)  # fmt: skip


def found(*patterns: str) -> list[str]:
    return [NAMES[i] for i in matching_indices([(name,) for name in NAMES], patterns, "x")]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("ffn_gate", [NAMES[0], NAMES[1]]),
        ("ffn_gate_inp", [NAMES[2]]),
        ("attn_q.weight", [NAMES[3]]),
        ("10.attn_q", [NAMES[3], NAMES[4]]),
        ("bias", [NAMES[4]]),
        ("blk.1", [NAMES[1], NAMES[2]]),  # from the left, where that matches, and nothing else
        ("output", [NAMES[5]]),
    ],
)
def test_a_bare_name_is_whole_components_anywhere(pattern: str, wanted: list[str]) -> None:
    assert found(pattern) == wanted


@pytest.mark.parametrize("pattern", ["fn_gate", "gate", "ffn_gat", "1.ffn", "weight.output", "x*"])
def test_a_part_of_a_component_matches_nothing(pattern: str) -> None:
    with pytest.raises(UsageError, match="near names"):
        found(pattern)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patterns")
    target = folder / "m.gguf"
    save_tiny("qwen2_moe", folder / "m")
    assert aprfmt("convert", folder / "m", target).code == 0
    return target


GATES = [f"blk.{layer}.ffn_gate_exps.weight" for layer in range(3)]


def test_every_command_takes_the_same_bare_name(gguf: Path, tmp_path: Path) -> None:
    """In the file's spelling, in Hugging Face's, and by role."""
    listed = aprfmt("tensors", gguf, "ffn_gate_exps", "--json").json
    assert [row["name"] for row in listed["tensors"]] == GATES
    assert aprfmt("tree", gguf, "ffn_gate_exps", "--json").json["tree"]["tensors"] == len(GATES)
    assert aprfmt("tensors", gguf, "q_proj.weight", "--json").json["count"] == 3
    done = aprfmt("diff", gguf, gguf, "--tensor", "ffn_gate_exps")
    assert done.code == 0 and done.out.startswith(f"equal, {len(GATES)} tensors: ")
    changed = tmp_path / "half.gguf"
    done = aprfmt("convert", gguf, changed, "--tensor", "ffn_gate_exps=F16", "--json")
    assert [t["name"] for t in done.json["tensors"] if t["encoding"] == "F16"] == GATES
    done = aprfmt("convert", gguf, tmp_path / "less.gguf", "--drop", "ffn_gate_exps", "--json")
    names = [t["name"] for t in done.json["tensors"]]
    assert not [name for name in names if "ffn_gate_exps" in name]
    assert "blk.0.ffn_gate_inp.weight" in names


def test_a_drop_that_matches_nothing_is_said(gguf: Path, tmp_path: Path) -> None:
    done = aprfmt("convert", gguf, tmp_path / "x.gguf", "--drop", "ffn_gat_exps")
    assert done.code == 2 and "near names: " in done.err and not list(tmp_path.iterdir())


def test_hex_takes_a_name_as_cat_does(gguf: Path) -> None:
    for name in ("blk.1.attn_q.weight", "L1.attn_q.weight", "blk.1.attn_q.bias", "output_norm"):
        positional = aprfmt("hex", gguf, name, "--json")
        assert positional.code == 0, positional.err
        assert positional.json == aprfmt("hex", gguf, "--tensor", name, "--json").json
        assert positional.json["shape"] == aprfmt("cat", gguf, name, "--json").json["shape"]
    for command in ("hex", "cat"):
        several = aprfmt(command, gguf, "attn_q")
        assert several.code == 2 and "'attn_q' matches 6 tensors" in several.err
        assert "near names: " in aprfmt(command, gguf, "attn_qq").err
    twice = aprfmt("hex", gguf, "output_norm", "--tensor", "output_norm")
    assert twice.code == 2 and "--tensor" in twice.err and twice.err.count("\n") == 1
    apart = aprfmt("hex", gguf, "output_norm", "--offset", "0")
    assert apart.code == 2 and "--offset" in apart.err
