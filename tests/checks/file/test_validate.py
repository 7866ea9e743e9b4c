"""What `validate` finds, costs and says beyond the single checks."""

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aprfmt as package
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import TensorInfo
from aprfmt.checks import table, validate
from aprfmt.checks.file import scales
from aprfmt.checks.file.faulty_writers import FAULTS, WriterFault
from aprfmt.checks.file.stated_facts import check_file_type, file_types
from aprfmt.checks.file.value_pass import WINDOW, block_windows
from aprfmt.checks.records import NotRun
from aprfmt.codecs import CODECS
from aprfmt.codecs.base import BlockCodec
from aprfmt.errors import AprfmtError, FormatError, UnsupportedError, UsageError
from aprfmt.formats.mapped_file import MemoryTensor
from tests.checks.file import bases
from tests.cli.run import ROOT, aprfmt
from tests.conftest import not_run
from tests.conversion.folders import llama_folder, tensors_of, write_mixed, write_safetensors
from tests.formats.apr_files import AprFile, Tensor
from tests.formats.gguf_files import DATA, File, plain
from tests.models import save_tiny

BLOCKS = [name for name in CODECS.own if isinstance(CODECS[name], BlockCodec)]
ENCODED = [n for n in BLOCKS if "encode_blocks" in vars(type(CODECS[n]))]


def test_the_function_and_the_command_agree(tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    report = package.validate(path)
    done = aprfmt("validate", path, "-v")
    assert (report.outcome, done.code) == ("PASS", 0)
    for row in table.file_checks():
        assert f"  {row.name}" in done.out
    assert done.out.splitlines()[-1].startswith("PASS: ")


def test_every_flipped_bit_of_an_apr_file_is_found(tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    whole = path.read_bytes()
    rng = random.Random(2569)
    positions = rng.sample(range(8 * len(whole)), 1000)
    missed = []
    for bit in positions:
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        try:
            if validate(path).outcome != "FAIL":
                missed.append(bit)
        except AprfmtError:
            pass  # refused on opening: found as well
    assert missed == []
    path.write_bytes(whole)
    assert validate(path).outcome == "PASS"


@pytest.mark.parametrize("base", ["gguf", "hf"])
def test_every_flipped_bit_beside_a_manifest_is_found(base: str, tmp_path: Path) -> None:
    """GGUF and safetensors have no checksum; header, metadata, tokenizer and padding count too."""
    if base == "gguf":
        path = tmp_path / "m.gguf"
        file = File(data=DATA[:128]).key("general.name", 8, "flip").tensor("a", [8, 2])
        path.write_bytes(file.tensor("b", [5], offset=64).build() + bytes(12))
        damaged = path
    else:
        path = tmp_path / "model"
        path.mkdir()
        damaged = path / "model.safetensors"
        write_safetensors(damaged, {"w": (9,)}, {"w": bytes(range(36))}, "F32")
    assert aprfmt("hash", path, "--write").code == 0
    manifest = next(tmp_path.rglob("*.aprfmt-hash.json"))
    assert aprfmt("hash", path, "--check", manifest).code == 0
    whole = damaged.read_bytes()
    for bit in random.Random(7).sample(range(8 * len(whole)), 250):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(raw)
        done = aprfmt("hash", path, "--check", manifest)
        assert done.code in (1, 2), bit
        if done.code == 1:
            assert "FAIL" in done.out


def test_a_manifest_finds_a_changed_config(tmp_path: Path) -> None:
    folder = bases.hf(tmp_path)
    assert aprfmt("hash", folder, "--write", "--raw-only").code == 0
    manifest = folder / "model.safetensors.aprfmt-hash.json"
    bases.text(folder, "config.json", lambda value: value.update(rope_theta=1.0))
    (folder / "generation_config.json").unlink()
    done = aprfmt("hash", folder, "--check", manifest, "--raw-only", "--json")
    assert done.code == 1
    assert done.json["failures"] == [
        {"key": "config.json", "what": "its text differs"},
        {"key": "generation_config.json", "what": "missing next to the model"},
    ]


def test_a_manifest_of_another_format_is_compared_by_values(tmp_path: Path) -> None:
    folder = bases.hf(tmp_path)
    assert aprfmt("hash", folder, "--write").code == 0
    package.convert(folder, tmp_path / "m.gguf")
    manifest = folder / "model.safetensors.aprfmt-hash.json"
    assert aprfmt("hash", tmp_path / "m.gguf", "--check", manifest).code == 0


@pytest.mark.parametrize(
    "body",
    ["[]", "{}", '{"schema":"aprfmt.hash-manifest/1","tensors":[{}],"files":[]}',
     '{"schema":"aprfmt.hash-manifest/1","tensors":[],"files":[1]}', "x", ""],
)  # fmt: skip
def test_a_damaged_manifest_is_one_line(body: str, tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    manifest = tmp_path / "m.json"
    manifest.write_text(body)
    done = aprfmt("hash", path, "--check", manifest)
    assert done.code == 2 and done.err.count("\n") == 1
    assert str(manifest) in done.err and "bug" not in done.err


def test_patterns_check_those_tensors_only(tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    assert aprfmt("hash", path, "--write").code == 0
    manifest = Path(f"{path}.aprfmt-hash.json")
    bases.element(path, "a", 0, b"\x01", 4)
    assert aprfmt("hash", path, "--check", manifest, "--tensor", "b").code == 0
    assert aprfmt("hash", path, "--check", manifest, "--tensor", "a").code == 1
    assert aprfmt("hash", path, "--write", "--tensor", "a").code == 2


def test_an_unknown_architecture_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    file = File(data=DATA[:128]).key("general.architecture", 8, "brandnew")
    path.write_bytes(file.tensor("a", [8, 4], "I8").build())
    report = validate(path)
    outcomes = {check.name: check for check in report.checks}
    assert (report.outcome, report.exit_code) == ("NOT_RUN", 2)  # seen red: PASS
    assert outcomes["architecture"].outcome == "NOT_RUN"
    assert "brandnew" in outcomes["architecture"].found
    assert outcomes["values"].outcome == "PASS"
    assert aprfmt("validate", path, "--arch", "bogus").code == 2


def test_a_tensor_nobody_can_decode_is_no_pass(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(File(data=DATA[:64]).tensor("a", [8], 142).tensor("b", [8], 0, 32).build())
    report = validate(path)
    check = next(check for check in report.checks if check.name == "values")
    assert (check.outcome, report.exit_code) == ("NOT_RUN", 2)  # seen red: PASS, exit 0
    assert "; could not be compared: tensor a (type#142" in report.pronounced.says
    assert validate(path, accept=["unread:a"]).exit_code == 0
    assert aprfmt("scan", path, "-o", tmp_path / "rows.jsonl", "--jobs", 1).code == 2
    assert check.found.startswith("1 of 2 tensors could be decoded; a: type#142")


def test_nothing_run_is_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bases.small_apr(tmp_path)
    rows = tuple(row for row in table.file_checks() if row.name in ("packed", "completeness"))
    monkeypatch.setattr(table, "CHECKS", rows)
    done = aprfmt("validate", path, "-v")
    assert done.code == 2
    verdict, next_line = done.out.splitlines()[-2:]
    assert verdict.startswith("NOT-RUN: 0 passed") and next_line.startswith("next: aprfmt inspect")


def test_an_apr_without_footer_is_not_run_and_strictly_fails(tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    outcomes = {check.name: check.outcome for check in validate(path).checks}
    assert outcomes["checksum"] == "NOT_RUN"
    assert aprfmt("validate", path).code == 0
    assert aprfmt("validate", path, "--strict").code == 1


def test_what_is_no_model_raises(tmp_path: Path) -> None:
    (tmp_path / "x.apr").write_bytes(b"ARP\0" + bytes(10))
    with pytest.raises(FormatError, match="expected apr"):
        validate(tmp_path / "x.apr")
    with pytest.raises(UsageError, match="no such file"):
        validate(tmp_path / "y.apr")
    (tmp_path / "x.apr").write_bytes(AprFile(version=(3, 0)).build())
    with pytest.raises(UnsupportedError, match=r"version 3\.0"):
        validate(tmp_path / "x.apr")


def test_a_file_of_which_nothing_can_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.apr").write_bytes(b"APR\0" + bytes(10))
    report = validate(tmp_path / "x.apr")
    assert (report.outcome, report.exit_code, report.format) == ("FAIL", 1, "apr")
    first, *others = report.checks
    assert (first.name, first.outcome) == ("layout", "FAIL")
    assert "an APR header has 64" in first.found and first.where == str(tmp_path / "x.apr")
    assert {check.outcome for check in others} == {"NOT_RUN"}
    assert len(report.checks) == len(table.file_checks())


# --- scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODED)
def test_scales_of_our_encoders_are_good(encoding: str) -> None:
    from aprfmt.codecs import encode

    row = ENCODINGS[encoding]
    rng = np.random.default_rng(1)
    values = rng.standard_normal((4, row.block_size)).astype(np.float32)
    values[0] = 0
    raw = encode(encoding, values)[""]
    assert scales.first_bad_block(encoding, memoryview(raw)) is None


def _float_places() -> list[tuple[str, int, int]]:
    found = []
    for name in BLOCKS:
        layout = CODECS[name].layout
        assert layout is not None and layout.names and layout.fields
        for field in layout.names:
            kind, offset = layout.fields[field][:2]
            if kind.base.kind == "f":
                found.append((name, offset, kind.itemsize))
    return found


@pytest.mark.parametrize(("encoding", "offset", "size"), _float_places())
def test_a_nan_or_infinite_scale_is_found(encoding: str, offset: int, size: int) -> None:
    blocks = 5
    raw = np.zeros((blocks, ENCODINGS[encoding].type_size), np.uint8)
    assert scales.first_bad_block(encoding, memoryview(raw.tobytes())) is None
    for value in (np.nan, np.inf, -np.inf):
        raw[3, offset : offset + size] = np.frombuffer(
            np.array([value], f"<f{size}").tobytes(), np.uint8
        )
        found = scales.first_bad_block(encoding, memoryview(raw.tobytes()))
        assert found is not None and found[0] == 3 and found[2] == 1
        twice = np.concatenate([raw, raw])
        assert (scales.first_bad_block(encoding, memoryview(twice.tobytes())) or ())[2:] == (2,)


SPOILED = (  # encoding, bytes to set in one block of zeros
    ("MXFP4", {0: 0xFF}),
    ("NVFP4", {2: 0x7F}),
    ("NVFP4", {1: 0x80}),  # a sign alone, before a scale of zero
    ("NVFP4", {3: 0xB8}),  # -1.0 where it were signed
    ("IQ1_M", {55: 0x70, 53: 0xC0}),
    ("Q8_1", {0: 0x00, 1: 0x3C, 9: 1}),
    ("Q8_K", {100: 1}),
    ("TQ1_0", {7: 1}),
)


def test_every_rule_has_a_block_that_breaks_it() -> None:
    assert {encoding for encoding, _ in SPOILED} == set(scales.RULES)


@pytest.mark.parametrize(("encoding", "spoiled"), SPOILED)
def test_an_impossible_block_is_found(encoding: str, spoiled: dict[int, int]) -> None:
    raw = np.zeros((2, ENCODINGS[encoding].type_size), np.uint8)
    assert scales.first_bad_block(encoding, memoryview(raw.tobytes())) is None
    for at, value in spoiled.items():
        raw[1, at] = value
    found = scales.first_bad_block(encoding, memoryview(raw.tobytes()))
    assert found is not None and found[0] == 1 and found[2] == 1


def test_a_scale_in_front_of_a_flat_tensor(tmp_path: Path) -> None:
    for scale, outcome in ((0.5, "PASS"), (float("inf"), "FAIL")):
        data = struct.pack("<f", scale) + bytes(range(40))
        tensor = Tensor(b"q", (40,), code=129, data=data)
        (tmp_path / "x.apr").write_bytes(AprFile(tensors=(tensor,)).build())
        checks = {check.name: check.outcome for check in validate(tmp_path / "x.apr").checks}
        assert checks["block_scales"] == outcome
        assert checks["values"] == "PASS"  # named once


# --- the pass -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "shape", "row_bytes"),
    [("F32", (7, 11), 44), ("Q8_0", (9, 64), 68), ("APR_Q8", (1000,), None), ("F32", (), 4),
     ("APR_Q4", (77,), None), ("Q4_K", (5, 300), 288), ("F32", (0, 4), 16)],
)  # fmt: skip
def test_windows_cover_every_byte_once(
    encoding: str, shape: tuple[int, ...], row_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.tensors.stats import Accumulator, tensor_stats

    monkeypatch.setattr("aprfmt.checks.file.value_pass.WINDOW", 150)
    row = ENCODINGS[encoding]
    count = int(np.prod(shape))
    size = shape[0] * 288 if encoding == "Q4_K" else row.nbytes(shape)
    raw = np.random.default_rng(3).integers(0, 60, size).astype(np.uint8).tobytes()
    tensor = MemoryTensor(TensorInfo("t", shape, encoding, 0, size, row_bytes), raw)
    total, covered = Accumulator(), 0
    for _, window in block_windows(tensor):
        covered += window.info.nbytes - row.header
        total.add_stats(tensor_stats(window))
    assert covered == max(size - row.header, 0)
    assert total.result().count == count


@pytest.mark.parametrize("at", [0, WINDOW // 4 - 1, WINDOW // 4, -1])
def test_a_nan_in_any_window_is_found(at: int, tmp_path: Path) -> None:
    """The pass takes 16 MiB at a time; the last value of a larger tensor counts as the first."""
    values = np.zeros((2, WINDOW // 4 + 8), np.float32)
    values.reshape(-1)[at] = np.nan
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"w": values.shape}, {"w": values.tobytes()}, "F32")
    (noted,) = [noted for noted in validate(path).findings if noted.check == "values"]
    found = f"1 NaN and 0 infinite of {values.size} F32 values"
    assert (noted.finding.where, noted.finding.found) == ("w", found)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A file much larger than what may be held: 768 MiB of zeros that take no room on the disk."""
    if not Path("/proc/self/status").is_file():
        not_run("a process's own peak is told by Linux alone")
    path = tmp_path / "big.safetensors"
    count = (768 << 20) // 4
    header = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (count, 4 * count)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * count)
    code = (
        "import sys; from aprfmt.checks import validate;"
        "assert validate(sys.argv[1]).outcome == 'PASS';"
        # Not ru_maxrss: that counts the parent's memory before the program was started.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert int(done.stdout) * 1024 < 160 << 20


# --- tables ---------------------------------------------------------------------------------


def test_file_types_are_llama_cpps() -> None:
    import gguf

    ours = file_types()
    for kind in gguf.LlamaFileType:
        name = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
        if kind.value in ours and name in ENCODINGS:
            assert ours[kind.value] == name, kind
    missing = {k.name for k in gguf.LlamaFileType if k.value not in ours and k.value != 1024}
    assert missing <= {"MOSTLY_Q4_1_SOME_F16"}


def test_faults_say_why_and_whence() -> None:
    for fault in FAULTS:
        assert fault.reason and fault.source and fault.todo and fault.formats
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


def _fault(id: str) -> File | AprFile:
    """Return a file of each faulty writer, with nothing else wrong."""
    if id == "gguf-no-pre":
        file = plain().key("tokenizer.ggml.model", 8, "gpt2")
        return file.raw_key("tokenizer.ggml.tokens", 9, file.array(8, ["a"]))
    if id == "apr-checkpoint":
        return AprFile(metadata={"format": "entrenar-checkpoint"})
    if id == "apr-codes":
        return AprFile(tensors=(Tensor(b"a", (3,), code=9, data=bytes(7)),))
    assert id == "apr-gguf-order"
    tensors = (Tensor(b"blk.0.attn_q.weight", (2, 2)),)
    return AprFile(tensors=tensors, flags=0x0020, footer=b"", metadata={"num_hidden_layers": 1})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_every_faulty_writer_is_known_by_its_files(fault: WriterFault, tmp_path: Path) -> None:
    path = tmp_path / f"x.{fault.formats[0]}"
    path.write_bytes(_fault(fault.id).build())
    report = validate(path)
    (noted,) = [noted for noted in report.findings if noted.check == "writer"]
    assert fault.writer in noted.finding.found and noted.finding.level == fault.level


@pytest.mark.parametrize("layers", [1, 3])
def test_a_check_of_matrices_counts_them(layers: int, tmp_path: Path) -> None:
    """Seven matrices a layer, the table of tokens and the head."""
    report = package.validate(llama_folder(tmp_path / "m", "F32", layers=layers))
    (found,) = [check.found for check in report.checks if check.name == "filled"]
    assert found.startswith(f"{7 * layers + 2} matrices")


# llama-quant.cpp, tensor_type_fallback: what a row gets whose length is no multiple of 256.
FALLBACKS = {
    "IQ2_XXS": "IQ4_NL", "IQ2_XS": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ3_S": "IQ4_NL",
    "IQ2_S": "IQ4_NL", "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip


@pytest.mark.parametrize("claimed", FALLBACKS)
def test_a_file_whose_rows_all_fell_back_is_of_its_type(claimed: str) -> None:
    stored: Any = [SimpleNamespace(shape=(4, 32), encoding=FALLBACKS[claimed])]
    number = next(key for key, name in file_types().items() if name == claimed)
    model: Any = SimpleNamespace(
        format="gguf", values=lambda: stored, path=Path("m.gguf"),
        metadata={"general.file_type": number, "general.quantization_version": 2},
    )  # fmt: skip
    context: Any = SimpleNamespace(model=model, where="m.gguf")
    assert not check_file_type(context).findings
    stored[0].encoding = "Q8_1"
    (found,) = check_file_type(context).findings
    assert f"no tensor is {claimed}" in found.found


@pytest.mark.parametrize(
    ("filled", "found"),
    [
        ((), []),
        (("self_attn.q_proj",), ["L1.attn_q.weight"]),
        (("block_sparse_moe.gate",), ["L1.ffn_gate_inp.weight"]),
        (("experts.0.w1",), []),  # one of several that are stored apart is not the weight
        (("experts.0.w1", "self_attn.k_proj"), ["L1.attn_k.weight"]),
    ],
)
def test_a_weight_of_one_value_is_named_and_a_part_of_one_is_not(
    filled: tuple[str, ...], found: list[str], tmp_path: Path
) -> None:
    save_tiny("mixtral", tmp_path)
    rows = tensors_of(tmp_path)
    for end in filled:
        (name,) = (name for name in rows if ".layers.1." in name and name.endswith(f"{end}.weight"))
        dtype, shape, data = rows[name]
        rows[name] = (dtype, shape, bytes(len(data)))
    for old in tmp_path.glob("*.safetensors*"):
        old.unlink()
    write_mixed(tmp_path / "model.safetensors", rows)
    said = [one.finding for one in validate(tmp_path).findings if one.check == "filled"]
    assert [finding.where.partition(" (")[0] for finding in said] == found
    assert all(finding.level == "fail" and finding.found == "every value is 0" for finding in said)


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("tokenizer.ggml.model", "gpt2", None),
        ("tokenizer.ggml.pre", "qwen2", None),
        ("tokenizer.ggml.model", "gtp2", "gpt2"),
        ("tokenizer.ggml.model", "BPE", "gpt2"),  # read here, and by no llama.cpp
        ("tokenizer.ggml.pre", "qwen-2", "qwen2"),
    ],
)
def test_a_name_that_llama_cpp_does_not_know_is_said_though_a_tokenizer_json_is_carried(
    key: str, name: str, near: str | None, demo_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    package.convert(demo_model, path)
    done = aprfmt("set", path, f"{key}={name}", "--in-place")
    assert done.code == 0
    said = [one.finding for one in validate(path).findings if one.check == "tokenizer"]
    assert [finding.where for finding in said] == [f"{path}: {key}"] * (near is not None)
    assert all((f.level, f.found) == ("warning", f"is {name!r}") for f in said)
    assert all(near is not None and near in finding.expected for finding in said)
    assert (f"{key}: is {name!r}" in done.err) == (near is not None)  # the change is warned of


@pytest.mark.parametrize(
    ("metadata", "encoding", "said"),
    [
        ({}, "F32", "the file states no general.file_type"),
        ({"general.file_type": 1024}, "F32", "general.file_type is 1024, which claims no type"),
        ({"general.file_type": 0}, None, "the file holds no matrices"),
    ],
)
def test_a_file_that_claims_no_type_is_not_judged(
    metadata: dict[str, Any], encoding: str | None, said: str
) -> None:
    """llama.cpp's loader writes 1024 (guessed) plus the type that it took the tensors for."""
    stored: Any = [SimpleNamespace(shape=(4, 32) if encoding else (4,), encoding=encoding or "F32")]
    model: Any = SimpleNamespace(values=lambda: stored, metadata=metadata)
    context: Any = SimpleNamespace(model=model, where="m.gguf")
    with pytest.raises(NotRun, match=re.escape(said)):
        check_file_type(context)
    metadata["general.file_type"], stored[0].shape = 1024 + 1, (4, 32)
    (found,) = check_file_type(context).findings
    assert found.found.startswith("1025 (F16), but 100.0% of the weights are F32")
    for unknown in (99, "Q4"):
        metadata["general.file_type"] = unknown
        (found,) = check_file_type(context).findings
        assert (found.level, found.found) == (
            "warning", f"{unknown}, which is no type; most weights are F32",
        )  # fmt: skip
