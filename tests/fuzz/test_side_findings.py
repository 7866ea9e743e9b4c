"""What fuzzing found in files that are taken beside a model: reproductions, goldens, texts."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.gates import baseline_file, golden
from aprfmt.cli.run_options import parse_npy
from aprfmt.errors import FormatError
from aprfmt.inference.engines import llama_text
from aprfmt.inference.engines.llama_text import is_eval_text, load_eval_text
from aprfmt.inference.parity.bundle import HEADER, SCHEMA, replay_bundle
from tests.cli.run import aprfmt
from tests.fuzz import side_seeds
from tests.fuzz.contract import judge
from tests.fuzz.targets import TARGETS
from tests.robustness.hostile import small_llama

PATH = Path("x.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 1 << 40), ("smallest_lead", 10**300),
     ("output_ids", [-1]), ("contains", 3)],
)  # fmt: skip
def test_golden_files_ask_for_what_is_possible(key: str, value: Any) -> None:
    row = {"name": "a", "prompt": "b", "output_ids": [1], key: value}
    with pytest.raises(FormatError, match=f"x.json: a: {key}"):
        golden.parse_golden({"greedy": [row]}, PATH)


@pytest.mark.parametrize(
    "changed", [{"value": 10**390}, {"value": True}, {"tolerance": -1}, {"unit": 3}]
)
def test_baselines_hold_numbers(changed: dict[str, Any]) -> None:
    whole = json.loads(side_seeds.baseline()[0])
    assert baseline_file.parse_baseline(whole, PATH)
    whole["gates"]["loss"]["measures"]["bpb"].update(changed)
    with pytest.raises(FormatError, match="no objects with outcome and measures"):
        baseline_file.parse_baseline(whole, PATH)


def test_baselines_without_a_value_are_none() -> None:
    """The absent value was a KeyError once it was compared."""
    whole = json.loads(side_seeds.baseline()[0])
    del whole["gates"]["loss"]["measures"]["bpb"]["value"]
    with pytest.raises(FormatError):
        baseline_file.parse_baseline(whole, PATH)
    assert not judge(TARGETS["baseline"], json.dumps(whole).encode())


@pytest.mark.parametrize(
    "header",
    [b"{'descr': '<i4', 'fortran_order': False, 'shape': (3,", b"{'descr': (((", b"\x00" * 118,
     b"{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }"],
)  # fmt: skip
def test_npy_headers_that_numpy_itself_falls_over(header: bytes) -> None:
    """numpy's own reader raised tokenize.TokenError for some of these."""
    data = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
    with pytest.raises(FormatError, match=r"x.npy: no .npy file of token ids"):
        parse_npy(memoryview(data), Path("x.npy"))


@pytest.mark.parametrize("dtype", ["<i4", ">u2", "i1"])
def test_npy_ids_are_read(dtype: str) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([[3, 1, 4]], dtype))
    assert parse_npy(memoryview(buffer.getvalue()), Path("x.npy")) == [3, 1, 4]


def head(shape: str, name: str = "embd", op: str = "GET_ROWS") -> str:
    sources = "token_embd.weight{4, 3, 1, 1}, inp_tokens{2, 1, 1, 1}"
    return f"common_debug_cb_eval: {name} = (f32) {op}({sources}}}) = {{{shape}}}\n"


@pytest.mark.parametrize(
    ("shape", "says"),
    [("0, 0, 0, 999999999999", "for each of 999999999999"), ("1, 1, 1, 268435456", "expected 1"),
     ("1, 999999999999999999, 1, 1", "expected 6")],
)  # fmt: skip
def test_printed_sizes_are_not_believed(shape: str, says: str) -> None:
    """Loops and arrays were made of the sizes before the rows were counted."""
    text = head(shape) + "[ 1.0 ],\n sum = 1\n"
    with pytest.raises(FormatError, match=says) as caught:
        with load_eval_text(PATH, file=io.StringIO(text)):
            raise AssertionError
    assert "is the text cut" in str(caught.value)


def test_printed_nodes_beyond_the_limit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_text, "MAX_VALUES", 64)
    row = "[ 1.0, 1.0, 1.0, ..., 1.0, 1.0, 1.0 ],\n"
    small = head("8, 2, 1, 1") + row * 2 + " sum = 1\n"
    large = head("8, 9, 1, 1", "l_out-0", "ADD") + row * 6 + " sum = 1\n"
    with load_eval_text(PATH, file=io.StringIO(small + large)) as trace:
        assert list(trace.records) == ["embd"]
        assert "over 64 values" in str(trace.run["unknown"])
    monkeypatch.setattr(llama_text, "MAX_TOTAL", 15)
    with pytest.raises(FormatError, match="16 values so far"):
        with load_eval_text(PATH, file=io.StringIO(small)):
            raise AssertionError


def test_masks_of_printed_values_are_kept_as_bits() -> None:
    row = "[ 1.0, 1.0, 1.0, ..., 1.0, 1.0, 1.0 ],\n"
    text = head("9, 2, 1, 1") + row * 2 + " sum = 1\n"
    with load_eval_text(PATH, file=io.StringIO(text)) as trace:
        mask = trace.values_mask("embd")
        assert mask is not None and mask.shape == (2, 9) and mask.dtype == np.bool_
        assert mask.tolist() == [[True] * 3 + [False] * 3 + [True] * 3] * 2


@pytest.mark.parametrize("unit", ["eval", "eval: a = (f32) M(", "a", "eval: "])
def test_long_lines_are_looked_at_once(unit: str, tmp_path: Path) -> None:
    """A line of a megabyte took minutes: matching went back over it from every place."""
    long = unit * ((1 << 20) // len(unit))
    (tmp_path / "x.txt").write_text(long + "\n")
    assert not is_eval_text(tmp_path / "x.txt")
    assert llama_text._match_node_head(long) is None and llama_text._match_token_count(long) is None
    with pytest.raises(FormatError, match="line 1 is over"):
        with load_eval_text(tmp_path / "x.txt"):
            raise AssertionError


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("number", ["1.0", "1e39"])
def test_printed_sizes_need_not_be_the_model_s(
    width: int, number: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Values that do not split into the model's heads were a ValueError of numpy."""
    row = f"[ {', '.join([number] * width)} ],\n"
    text = head(f"{width}, 2, 1, 1") + row * 2 + " sum = 1\n"
    text += head(f"{width}, 2, 1, 1", "Qcur-0", "ROPE") + row * 2 + " sum = 1\n"
    judge(TARGETS["eval_text"], text.encode())
    assert not recwarn.list  # a number beyond float32 is infinite, and says nothing on stderr


def reproduction(path: Path, **changed: Any) -> Path:
    """Write the seed of a norm with keys of its header changed."""
    data = side_seeds.bundle()[0]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    held = json.loads(header["__metadata__"][HEADER])
    assert held["schema"] == SCHEMA
    for key, value in changed.items():
        if key in held["hyper"]:
            held["hyper"][key] = value
        else:
            held[key] = value
    header["__metadata__"][HEADER] = json.dumps(held)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return path


def test_a_reproduction_is_replayed(tmp_path: Path) -> None:
    assert not replay_bundle(reproduction(tmp_path / "x.safetensors")).reproduced


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rope_layers", [], "rope_layers is not of 1 layers"),
        ("n_layers", 1 << 30, "n_layers is 1073741824; expected 0 or 1"),
        ("head_dim", 1 << 30, "head_dim is 1.07374e.09; expected at most"),
        ("n_heads", 0, "n_heads: is 0; expected a whole number"),
        ("norm_eps", "x", "norm_eps: is 'x'; expected"),
        ("architecture", "nope", "nope"),
        ("layer", 10**300, "never came"),
        ("point", "nope", "never came to this point"),
        ("roles", {"L0.attn_norm.weight": [5]}, "x.safetensors: cell of L0.attn_norm: no"),
        ("ids", [], "x.safetensors: token ids have shape .0."),
    ],
)
def test_a_reproduction_of_what_does_not_fit_is_one_error(
    key: str, value: Any, says: str, tmp_path: Path
) -> None:
    from aprfmt.errors import AprfmtError

    with pytest.raises(AprfmtError, match=says) as caught:
        replay_bundle(reproduction(tmp_path / "x.safetensors", **{key: value}))
    assert len(str(caught.value)) < 600


CARRIED: dict[str, tuple[str, str]] = {
    "a config that is no JSON": ("aprfmt.files", '{"config.json": "not json"}'),
    "a config nested deep": ("aprfmt.files", json.dumps({"config.json": '{"a":' * 3000})),
    "files that are a number": ("aprfmt.files", "1"),
    "source metadata that are a number": ("aprfmt.source.metadata", "1"),
    "source metadata that are no texts": ("aprfmt.source.metadata", '{"a": [1]}'),
    "GGUF keys without a type": ("aprfmt.gguf.metadata", '{"a": 1}'),
    "GGUF keys of an unknown type": ("aprfmt.gguf.metadata", '{"a": ["zzz", 1]}'),
    "what a bare copy held as a list": ("aprfmt.metadata", "[1]"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_files_of_ours_carry_is_not_believed(name: str, tmp_path: Path) -> None:
    """Some of these ended a conversion with JSONDecodeError, RecursionError or TypeError."""
    key, text = CARRIED[name]
    source = small_llama(tmp_path / "source")
    for ending in ("apr", "gguf"):
        whole, bad = tmp_path / f"whole.{ending}", tmp_path / f"bad.{ending}"
        assert aprfmt("convert", source, whole).code == 0
        changed = aprfmt("set", whole, f"{key}={json.dumps(text)}", "-o", bad, "--no-verify")
        assert changed.code == 0, changed.err
        for line in (
            ["convert", bad, tmp_path / "folder", "--to", "safetensors"],
            ["quantize", bad, tmp_path / "packed", "--to", "safetensors", "--type", "NF4"],
            ["convert", bad, tmp_path / "other.gguf"],
            ["convert", bad, tmp_path / "bare.apr", "--arch", "none"],
        ):
            done = aprfmt(*line, "--force")
            assert done.code in (0, 2) and "bug" not in done.err, done.err
            errors = [one for one in done.err.splitlines() if not one.startswith("warning: ")]
            assert len(errors) == (done.code == 2), done.err


@pytest.mark.parametrize("text", ["[" * 20_000, '{"a":' * 20_000, "9" * 5000])
def test_values_to_set_are_bounded(text: str, tmp_path: Path) -> None:
    source = small_llama(tmp_path / "source")
    done = aprfmt("set", source, f"format={text}", "-o", tmp_path / "x.safetensors")
    assert "bug" not in done.err
    (tmp_path / "value").write_text(text)
    assert aprfmt("convert", source, tmp_path / "x.gguf").code == 0
    line = ["set", tmp_path / "x.gguf", f"llama.block_count=@{tmp_path / 'value'}"]
    done = aprfmt(*line, "-o", tmp_path / "y.gguf")
    assert done.code == 2 and done.err.count("\n") == 1 and "bug" not in done.err


def test_gaps_between_tensors_of_long_names_are_told_shortly() -> None:
    name = "n" * 3000
    text = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    assert not judge(TARGETS["safetensors"], data)  # which raises for over 2000 characters
    many = {"a": {"dtype": "F32", "shape": [1] * 900 + [2], "data_offsets": [0, 4]}}
    text = json.dumps(many).encode()
    assert not judge(TARGETS["safetensors"], len(text).to_bytes(8, "little") + text + bytes(4))


@pytest.mark.parametrize(
    "changed",
    [{"sha256": ""}, {"sha256": "a" * 3000}, {"shape": [-1] * 3000}, {"positions": "1" * 3000},
     {"dtype": "f" * 3000}, {"form": ["x" * 3000]}, {"device": [0] * 3000}],
    ids=lambda row: next(iter(row)),
)  # fmt: skip
def test_facts_beside_stages_are_held_against_them_and_quoted_shortly(
    changed: dict[str, Any],
) -> None:
    """Without a hash any file was believed to be the stage."""
    whole = json.loads(side_seeds.stages()[0])
    assert judge(TARGETS["stages"], json.dumps(whole).encode())
    whole["files"]["lm_head.bin"].update(changed)
    assert not judge(TARGETS["stages"], json.dumps(whole).encode())
    whole["files"] = {"n" * 3000: whole["files"]["lm_head.bin"]}
    assert not judge(TARGETS["stages"], json.dumps(whole).encode())
