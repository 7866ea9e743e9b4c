"""Hypotheses of `diff`: every seeded fault is named in every format, and clean pairs are not.

Seen red: every row of the table taken out (as a test), a wrong head count, a guess that is not
applied to the whole tensor, misread values used twice.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.causes import CAUSES
from aprfmt.causes.tensor import table
from aprfmt.causes.tensor.explanation import PairContext, explain_pair
from aprfmt.causes.tensor.packed_faults import explain_packed_faults
from aprfmt.compare import TensorDiff, diff
from aprfmt.conversion.options import ConvertOptions
from aprfmt.formats import FORMATS, writable_formats
from aprfmt.measure.findings import Finding
from tests.causes import faults
from tests.causes.faults import ROLES, Fault
from tests.causes.hypotheses import load_function
from tests.causes.tensor_faults import FAULTS
from tests.compare.damage import patched
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder

NAMES = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(
        tmp_path_factory.mktemp("explain") / "source", "BF16", hidden=faults.HIDDEN,
        layers=faults.LAYERS, vocab=faults.VOCAB, heads=faults.HEADS, kv_heads=faults.KV,
    )  # fmt: skip


def found(a: Path, b: Path, key: str) -> TensorDiff:
    """Return the record of the one tensor, having compared all."""
    report = diff(a, b)
    (row,) = [row for row in report.tensors if row.key == key]
    assert row.verdict == "DIFFERENT", row
    return row


def said(row: TensorDiff) -> str:
    assert row.explanation is not None
    return " / ".join(row.explanation.evidence)


def check(row: TensorDiff, fault: Fault) -> None:
    explanation = row.explanation
    assert isinstance(explanation, Finding), row
    assert explanation.cause == fault.cause, explanation
    assert explanation.confirmed == fault.confirmed, explanation
    assert explanation.where[0] == row.key
    assert row.cause == (fault.cause if fault.confirmed else "")
    if fault.confirmed and explanation.residual_after is not None:
        assert explanation.residual_before is not None
        assert explanation.residual_after < 0.2 * explanation.residual_before


@pytest.mark.parametrize("target", writable_formats())
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_named_in_every_format(
    name: str, target: str, source: Path, tmp_path: Path
) -> None:
    fault = NAMES[name]
    broken = edited(source, tmp_path / "broken", fault.change)
    there = tmp_path / f"there{FORMATS[target].extensions[0]}"
    aprfmt.convert(broken, there, to=target)
    row = found(source, there, ROLES[fault.tensor])
    check(row, fault)
    assert fault.says in said(row)


@pytest.mark.parametrize("name", [name for name, fault in NAMES.items() if fault.quantized])
def test_a_fault_is_named_through_a_quantized_copy(name: str, source: Path, tmp_path: Path) -> None:
    fault = NAMES[name]
    broken = edited(source, tmp_path / "broken", fault.change)
    aprfmt.convert(broken, tmp_path / "q.gguf", encoding="Q8_0")
    row = found(source, tmp_path / "q.gguf", ROLES[fault.tensor])
    check(row, fault)


@pytest.mark.parametrize("name", NAMES)
def test_without_its_row_a_fault_is_not_explained(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row does work that no other does."""
    fault = NAMES[name]
    broken = edited(source, tmp_path / "broken", fault.change)
    full = found(source, broken, ROLES[fault.tensor]).explanation
    assert full is not None
    rows = tuple(row for row in table.TABLE if load_function(row.find) is not fault.find)
    assert len(rows) == len(table.TABLE) - 1
    monkeypatch.setattr(table, "TABLE", rows)
    left = found(source, broken, ROLES[fault.tensor]).explanation
    assert left is None or left.evidence != full.evidence


def test_the_table_names_known_causes_and_every_one_is_seeded() -> None:
    told = {cause for row in table.TABLE for cause in row.causes}
    assert told <= set(CAUSES)
    # Packed encodings are seeded in tests/diagnosis/faults_packed, delta nets in faults_files
    # there, the others in tests of their own.
    others = {"expert_order", "missing_bias", "value_heads", "tap_order", "quant_signs"}
    others |= {
        "flat_shard",
        "block_fields",
        "code_type",
        "fused_order",
        "stored_shape",
        "mlx_layout",
        "resized_positions",
        "repacked_rows",
    }  # test_joined_heads has mlx_layout, test_resized_grids and test_repacked_rows the last two
    (packed,) = [row for row in table.TABLE if load_function(row.find) is explain_packed_faults]
    others |= set(packed.causes)
    assert told - {fault.cause for fault in FAULTS} == others
    assert {load_function(row.find) for row in table.TABLE} >= {fault.find for fault in FAULTS}


# --- damage to the stored bytes of a file of each format -----------------------------------------

STORED: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "one bit": (faults.flipped(1000, 4), "bit_rot", "one bit differs"),
    "a lost page": (lambda raw: raw[:2048] + bytes(1024) + raw[3072:], "bit_rot", "are zero in B"),
    "shifted": (lambda raw: raw[7:] + bytes(7), "byte_offset", "7 bytes too late"),
    "byte order": (
        lambda raw: np.frombuffer(raw, np.uint16).byteswap().tobytes(),
        "endianness",
        "other byte order",
    ),
}


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("target", writable_formats())
@pytest.mark.parametrize("role", ["L1.attn_q.weight", "L1.ffn_up.weight"])
def test_damage_on_disk_is_named_with_its_place(
    what: str, target: str, role: str, source: Path, tmp_path: Path
) -> None:
    edit, cause, words = STORED[what]
    clean = tmp_path / f"clean{FORMATS[target].extensions[0]}"
    aprfmt.convert(source, clean, to=target)
    with aprfmt.open(clean) as model:
        name = model.roles[role].stored[0].info.name

    def change(data: dict[str, bytes]) -> None:
        data[name] = edit(data[name])

    there = tmp_path / f"broken{clean.suffix}"
    if target == "safetensors":
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "config.json").write_text((tmp_path / "config.json").read_text())
        there = tmp_path / "b" / clean.name
    row = found(source, patched(clean, there, change), role)
    assert row.explanation is not None and row.explanation.confirmed
    assert row.explanation.cause == cause and words in said(row)
    if what == "one bit":
        raw, old = there.read_bytes(), clean.read_bytes()
        (at,) = [i for i, (x, y) in enumerate(zip(raw, old, strict=True)) if x != y]
        assert f"(byte {at} of the file, in {name})" in said(row)


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_one_bit_of_a_block_is_found(encoding: str, source: Path, tmp_path: Path) -> None:
    """Same encoding: the very bit; against the float source: the bit that brings it back."""
    clean = tmp_path / "q.gguf"
    aprfmt.convert(source, clean, encoding=encoding)

    def change(data: dict[str, bytes]) -> None:
        data["blk.1.ffn_up.weight"] = faults.flipped(1, 6)(data["blk.1.ffn_up.weight"])

    broken = patched(clean, tmp_path / "b.gguf", change)
    row = found(clean, broken, "L1.ffn_up.weight")
    assert row.explanation is not None and row.explanation.confirmed
    assert f"bit 6 of byte 1 of the {encoding} block at [0, 0]" in said(row)
    row = found(source, broken, "L1.ffn_up.weight")
    assert row.explanation is not None and row.explanation.cause == "bit_rot"
    with aprfmt.open(clean) as model:
        at = model["blk.1.ffn_up.weight"].offset + 1
    where = f"the {encoding} block at [0, 0] (byte {at} of the file, in blk.1.ffn_up.weight)"
    assert f"flipping bit 6 of byte 1 of {where} of B brings its block back" in said(row)


# --- shapes, experts, a base, two faults ------------------------------------------------------


def test_a_transposed_shape_is_told_from_a_transposed_matrix(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "a", "BF16", ffn=96)
    from tests.conversion.folders import tensors_of, write_mixed

    rows = tensors_of(source)
    name = faults.UP
    _, shape, raw = rows[name]
    turned = np.frombuffer(raw, np.uint16).reshape(shape).T
    for label, new in (("data", turned.tobytes()), ("shape", raw)):
        broken = tmp_path / label
        broken.mkdir()
        (broken / "config.json").write_text((source / "config.json").read_text())
        write_mixed(broken / "model.safetensors", rows | {name: ("BF16", shape[::-1], new)})
        (row,) = [r for r in diff(source, broken).tensors if r.key == "L1.ffn_up.weight"]
        assert row.verdict == "SHAPE_DIFFERS" and row.cause == "transpose"
        assert ("only the shape" in said(row)) == (label == "shape")


def test_repeated_key_heads_are_named(tmp_path: Path) -> None:
    from tests.conversion.folders import tensors_of, write_mixed

    source = llama_folder(tmp_path / "a", "BF16")
    rows = tensors_of(source)
    _, shape, raw = rows[faults.K]
    heads = np.frombuffer(raw, np.uint16).reshape(2, 16, 64)
    for label, more in (
        ("in a row", heads.repeat(2, axis=0)),
        ("in turn", np.tile(heads, (2, 1, 1))),
    ):
        broken = tmp_path / label
        broken.mkdir()
        (broken / "config.json").write_text((source / "config.json").read_text())
        new = ("BF16", (2 * shape[0], shape[1]), more.tobytes())
        write_mixed(broken / "model.safetensors", rows | {faults.K: new})
        (row,) = [r for r in diff(source, broken).tensors if r.key == "L1.attn_k.weight"]
        assert (row.verdict, row.cause) == ("SHAPE_DIFFERS", "gqa_mapping")
        assert label in said(row)


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_experts_in_another_order_are_named(arch: str, tmp_path: Path) -> None:
    from tests.models import save_tiny

    save_tiny(arch, tmp_path / "a")
    aprfmt.convert(tmp_path / "a", tmp_path / "a.gguf")

    def change(data: dict[str, bytes]) -> None:
        name = "blk.1.ffn_up_exps.weight"
        stack = np.frombuffer(data[name], np.uint8).reshape(6, -1)
        data[name] = stack[[0, 4, 2, 3, 1, 5]].tobytes()

    broken = patched(tmp_path / "a.gguf", tmp_path / "b.gguf", change)
    row = found(tmp_path / "a", broken, "L1.ffn_up_exps.weight")
    assert row.explanation is not None and row.explanation.confirmed
    assert row.cause == "expert_order" and "0, 4, 2, 3, 1, 5" in said(row)


def test_a_base_tells_which_tensor_is_stale(source: Path, tmp_path: Path) -> None:
    old = llama_folder(
        tmp_path / "old", "BF16", hidden=faults.HIDDEN, layers=faults.LAYERS, vocab=faults.VOCAB,
        heads=faults.HEADS, kv_heads=faults.KV, seed=5,
    )  # fmt: skip
    from tests.conversion.folders import tensors_of

    stale = tensors_of(old)[faults.UP][2]
    broken = edited(source, tmp_path / "b", faults.raw(faults.UP, lambda raw: stale))
    without = found(source, broken, "L1.ffn_up.weight").explanation
    assert without is not None and not without.confirmed
    (row,) = [r for r in diff(source, broken, base=old).tensors if r.verdict == "DIFFERENT"]
    assert row.explanation is not None and row.explanation.confirmed
    assert row.explanation.cause == "stale_tensor" and "B's tensor is the base's" in said(row)


def test_two_faults_in_one_tensor_are_both_named(source: Path, tmp_path: Path) -> None:
    def change(data: dict[str, bytes]) -> None:
        NAMES["adjacent pairs"].change(data)
        data[faults.Q] = faults.flipped(1777, 5)(data[faults.Q])

    row = found(source, edited(source, tmp_path / "b", change), "L1.attn_q.weight")
    assert row.cause == "rope_pairing"
    assert "then bit_rot" in said(row)

    def swapped(data: dict[str, bytes]) -> None:
        NAMES["transposed"].change(data)
        NAMES["bytes of values exchanged"].change(data)

    row = found(source, edited(source, tmp_path / "c", swapped), "L1.ffn_up.weight")
    assert row.cause == "endianness" and "then transpose" in said(row)


@pytest.mark.parametrize(
    ("encoding", "size", "halves"),  # bytes of a block, and where ggml's structs have a ggml_half
    [("Q4_1", 20, (0, 2)), ("Q2_K", 84, (80, 82)), ("Q4_K", 144, (0, 2)), ("Q6_K", 210, (208,)),
     ("IQ4_XS", 136, (0,)), ("TQ2_0", 66, (64,))],
)  # fmt: skip
def test_scales_of_blocks_in_the_other_byte_order_are_named(
    encoding: str, size: int, halves: tuple[int, ...], demo_model: Path, tmp_path: Path
) -> None:
    clean = tmp_path / "q.gguf"
    aprfmt.convert(demo_model, clean, tensor_encodings=[("L1.ffn_up", encoding)])

    def change(data: dict[str, bytes]) -> None:
        blocks = bytearray(data["blk.1.ffn_up.weight"])
        for at in halves:
            blocks[at::size], blocks[at + 1 :: size] = blocks[at + 1 :: size], blocks[at::size]
        data["blk.1.ffn_up.weight"] = bytes(blocks)

    row = found(clean, patched(clean, tmp_path / "b.gguf", change), "L1.ffn_up.weight")
    assert row.cause == "endianness"
    assert f"{encoding} block's 16-bit scales in the other byte order" in said(row)


def test_a_whole_layer_is_one_finding(source: Path, tmp_path: Path) -> None:
    report = diff(source, edited(source, tmp_path / "b", NAMES["layers exchanged"].change))
    (finding,) = report.findings
    assert finding.cause == "layer_order" and finding.confirmed and len(finding.keys) == 18
    assert finding.says == "layers 1 and 2 are exchanged (9 tensors each)"
    report = diff(source, edited(source, tmp_path / "c", NAMES["gate and up exchanged"].change))
    (finding,) = report.findings
    assert "ffn_gate.weight and ffn_up.weight are exchanged" in finding.says


def test_layers_moved_in_a_circle_are_listed(source: Path, tmp_path: Path) -> None:
    def change(data: dict[str, bytes]) -> None:
        old = dict(data)
        for name in data:
            for layer in range(3):
                if f"layers.{layer}." in name:
                    data[name] = old[name.replace(f"layers.{layer}.", f"layers.{(layer + 1) % 3}.")]

    (finding,) = diff(source, edited(source, tmp_path / "b", change)).findings
    assert finding.cause == "layer_order" and len(finding.keys) == 27
    assert (
        finding.says.endswith("is layer 1 of the other, 1 is 2, 2 is 0")
        and "exchanged" not in finding.says
    )


# --- no false explanation ---------------------------------------------------------------------


@pytest.mark.parametrize("target", writable_formats())
@pytest.mark.parametrize("encoding", ["", "F16", "F32"])
def test_a_clean_copy_has_nothing_to_explain(
    target: str, encoding: str, source: Path, tmp_path: Path
) -> None:
    there = tmp_path / f"there{FORMATS[target].extensions[0]}"
    options: ConvertOptions = {"encoding": encoding} if encoding else {}
    aprfmt.convert(source, there, to=target, **options)
    report = diff(source, there)
    assert not report.findings
    assert not [row for row in report.tensors if row.explanation is not None]


def test_noise_and_unrelated_values_confirm_nothing(source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)

    def noise(data: dict[str, bytes]) -> None:
        for name in (faults.UP, faults.Q, faults.NORM, faults.EMBEDDING):
            x = faults.values(data, name)
            data[name] = faults.rounded(
                (x + 0.05 * rng.standard_normal(x.shape)).astype(np.float32)
            )

    for broken in (
        edited(source, tmp_path / "noise", noise),
        llama_folder(
            tmp_path / "other",
            "BF16",
            hidden=faults.HIDDEN,
            layers=faults.LAYERS,
            vocab=faults.VOCAB,
            heads=faults.HEADS,
            kv_heads=faults.KV,
            seed=99,
        ),
    ):
        report = diff(source, broken)
        assert report.counts["DIFFERENT"] >= 4
        assert not [row for row in report.tensors if row.explanation and row.explanation.confirmed]
        assert all(row.cause == "" for row in report.tensors)


def test_a_large_row_does_not_speak_for_the_others(source: Path, tmp_path: Path) -> None:
    """All rows have a factor, one of them a huge one, except one row outside the sample."""
    rng = np.random.default_rng(4)

    def change(data: dict[str, bytes]) -> None:
        x = faults.values(data, faults.UP) * np.linspace(1, 2, 64, dtype=np.float32)[:, None]
        x[0] *= 10000
        x[1] = rng.standard_normal(64)
        data[faults.UP] = faults.rounded(np.ascontiguousarray(x, np.float32))

    row = found(source, edited(source, tmp_path / "b", change), "L1.ffn_up.weight")
    assert row.explanation is None or not row.explanation.confirmed


def test_constant_tensors_are_not_taken_for_each_other(tmp_path: Path) -> None:
    ones = {
        f"model.layers.{layer}.{name}.weight": faults.float_row(np.ones(64))
        for layer in range(2)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    source = llama_folder(tmp_path / "a", "BF16", replaced=ones)
    broken = edited(
        source,
        tmp_path / "b",
        lambda data: data.update({faults.NORM: faults.float_row(np.full(64, 0.25))}),
    )
    row = found(source, broken, "L1.attn_norm.weight")
    # A quarter of it, 0.75 less, its square ...: one number fits any function, and none is named.
    assert not row.cause and row.explanation is not None and not row.explanation.confirmed
    assert "holds 0.25 everywhere" in row.explanation.evidence[0]


def test_equal_tensors_have_no_explanation_and_a_refusal_is_possible(
    source: Path, tmp_path: Path
) -> None:
    broken = edited(source, tmp_path / "b", NAMES["transposed"].change)
    assert all(row.explanation is None for row in diff(source, broken, explain=False).tensors)
    with aprfmt.open(source) as a, aprfmt.open(broken) as b:
        context = PairContext(a, b)
        key = "L1.attn_q.weight"
        assert explain_pair(a.roles[key], b.roles[key], context) is None
        key = "L1.ffn_up.weight"
        one = explain_pair(a.roles[key], b.roles[key], context)
        assert one is not None and one.cause == "transpose" and one.where == (key,)
