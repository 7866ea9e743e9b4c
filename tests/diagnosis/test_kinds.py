"""Kinds of faults that people met: values that never came, orders of biases, keys that miscount.

Seen red: codes of a packed weight not looked at; a placeholder called other values; an expert's
bias read as a matrix; a generation config made from config.json called a difference; a lost head
mended by the key that hides it.
"""

import json
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from tests.conversion import dialect_folders
from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder

GENERATION = "generation_config.json"


def halves(x: Any) -> Any:
    """Put the outputs of interleaved [gate up] into halves."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], -1)


@pytest.mark.parametrize("moved", ["gate_up_proj_bias", "gate_up_proj", "both"])
def test_an_order_of_gate_and_up_is_named_with_the_biases_of_experts(moved: str) -> None:
    good = tiny_folder("gpt_oss")

    def change(rows: files.Rows) -> None:
        for name in list(rows):
            last = name.rpartition(".")[2]
            if last == moved or (moved == "both" and last.startswith("gate_up_proj")):
                files.edit(name, halves)(rows)

    answer = diagnose(str(good), str(files.copy(good, f"halves-{moved}", tensors=change)))
    (finding,) = answer.findings
    assert finding.cause == "fused_order" and finding.certainty != "located", answer.sentence
    assert "became all gate, then all up" in finding.says


@pytest.mark.parametrize("shape", [(0,), (1,)])
def test_a_placeholder_is_called_one(shape: tuple[int, ...]) -> None:
    good = tiny_folder("llama")

    def change(rows: files.Rows) -> None:
        for name in [name for name in rows if "mlp" in name]:
            rows[name] = ("F32", shape, bytes(4 * shape[0]))

    bad = files.copy(good, f"placeholder-{shape[0]}", tensors=change)
    for pair in ((good, bad), (bad, good)):
        answer = diagnose(*map(str, pair))
        assert answer.findings[0].cause == "stale_tensor"
        assert "a placeholder" in answer.findings[0].says, answer.sentence
        assert len(answer.findings) == 1


@pytest.mark.parametrize(("arch", "share"), [("llama", 0.4), ("mixtral", 0.75)])
def test_a_file_that_is_zero_to_its_end_is_one_fault(arch: str, share: float) -> None:
    good = tiny_folder(arch)
    bad = files.copy(good, f"tail-{arch}-{share}")
    path = bad / "model.safetensors"
    raw = bytearray(path.read_bytes())
    start = int(len(raw) * share)
    raw[start:] = bytes(len(raw) - start)
    path.write_bytes(raw)
    answer = diagnose(str(good), str(bad))
    (finding,) = answer.findings
    assert finding.cause == "stale_tensor" and "to its end" in finding.says, answer.sentence
    assert finding.certainty == "confirmed"


def test_two_faults_before_a_row_of_zeros_are_two() -> None:
    good = files.copy(
        tiny_folder("llama"), "zero-end",
        tensors=lambda rows: files.edit(max(rows), lambda x: x * 0)(rows),
    )  # fmt: skip

    def change(rows: files.Rows) -> None:
        for name, factor in (("layers.0.mlp.up_proj", 2), ("layers.1.mlp.down_proj", 3)):
            files.edit_all(f"{name}.weight", lambda x, f=factor: x * f)(rows)  # type: ignore[misc]

    answer = diagnose(str(good), str(files.copy(good, "zero-end-bad", tensors=change)))
    assert {finding.cause for finding in answer.findings} == {"scale"}, answer.sentence


@pytest.mark.parametrize("dialect", ["gptq", "awq", "fp8_block", "compressed"])
def test_codes_that_were_never_written_are_no_codes(dialect: str) -> None:
    dialect = next(name for name in dialect_folders.FOLDERS if dialect.split("_")[0] in name)
    good = place(f"codes-{dialect}")
    dialect_folders.write_folder(good, dialect)
    codes = ("qweight", "weight_packed", "proj.weight")

    def change(rows: files.Rows) -> None:
        for name in [n for n in rows if "mlp" in n and n.endswith(codes)]:
            files.raw(name, lambda raw: bytes(len(raw)))(rows)

    bad = files.copy(good, f"codes-{dialect}-bad", tensors=change)
    checks = {row.name: row for row in aprfmt.validate(bad).checks}
    assert checks["filled"].outcome == "FAIL", checks["filled"]
    assert {row.name: row for row in aprfmt.validate(good).checks}["filled"].outcome == "PASS"
    says = " ".join(finding.says for finding in diagnose(str(good), str(bad)).findings)
    assert "never filled" in says, says


@pytest.mark.parametrize("index", ["zeros", "one", "shuffled"])
def test_an_index_of_groups_gives_each_as_many_inputs(index: str) -> None:
    good = place("g_idx")
    dialect_folders.write_folder(good, "gptq")
    order = np.random.default_rng(0).permutation

    def change(raw: bytes) -> bytes:
        groups = np.frombuffer(raw, "<i4").copy()
        if index == "one":
            groups[0] = groups[-1]
        return (order(groups) if index == "shuffled" else groups * (index == "one")).tobytes()

    def tensors(rows: files.Rows) -> None:
        for name in [n for n in rows if n.endswith("g_idx")]:
            files.raw(name, change)(rows)

    section = dialect_folders.FOLDERS["gptq"][2]
    config = {"quantization_config": {**section, "desc_act": True}}
    bad = files.copy(good, f"g_idx-{index}", tensors=tensors, config=config)
    checks = {row.name: row for row in aprfmt.validate(bad).checks}
    assert checks["packed"].outcome == ("PASS" if index == "shuffled" else "FAIL")


@pytest.mark.parametrize("dialect", ["compressed_plain", "gptq", "awq"])
def test_scales_in_another_order_than_their_codes_are_named(dialect: str) -> None:
    good = place(f"scales-{dialect}")
    dialect_folders.write_folder(good, dialect)

    def shuffled(raw: bytes) -> bytes:
        size = 4 if dialect == "compressed_plain" else 2
        values = np.frombuffer(raw, f"V{size}")
        return np.random.default_rng(1).permutation(values).tobytes()

    def change(rows: files.Rows) -> None:
        for name in [n for n in rows if "mlp" in n and n.endswith(("scale", "scales"))]:
            files.raw(name, shuffled)(rows)

    bad = files.copy(good, f"scales-{dialect}-bad", tensors=change)
    found = diagnose(str(good), str(bad)).findings
    assert {one.cause for one in found} == {"quant_scale"}, found
    assert all("in another order, and the codes are not" in one.says for one in found)


def test_an_initialisation_is_called_one_in_16_bits_too() -> None:
    good = tiny_folder("llama", "bfloat16", hidden_size=64, intermediate_size=128)

    def change(rows: files.Rows) -> None:
        for name in [n for n in rows if "mlp" in n]:
            drawn = np.random.default_rng(1).standard_normal(rows[name][1]) * 1e-3
            bits = drawn.astype("<f4").view("<u4") >> 16
            rows[name] = ("BF16", rows[name][1], bits.astype("<u2").tobytes())

    (finding,) = diagnose(str(good), str(files.copy(good, "drawn", tensors=change))).findings
    assert "initialisation" in finding.says, finding.says


@pytest.mark.parametrize("made", [True, False])
def test_a_generation_config_that_repeats_config_json_is_no_difference(made: bool) -> None:
    good = files.copy(tiny_folder("llama"), f"generation-{made}", config={"eos_token_id": 5})
    bad = files.copy(good, f"generation-{made}-without")
    settings: dict[str, Any] = {"eos_token_id": 5, "transformers_version": "5"}
    settings |= {"_from_model_config": True, "use_cache": True} if made else {}
    (good / GENERATION).write_text(json.dumps(settings))
    (bad / GENERATION).unlink(missing_ok=True)
    assert diagnose(str(good), str(bad)).verdict == "same"
    (good / GENERATION).write_text(json.dumps(settings | {"eos_token_id": 6}))
    assert diagnose(str(good), str(bad)).verdict != "same"


def test_layers_that_are_counted_and_not_there_are_one_wrong_key() -> None:
    good = tiny_folder("llama")
    count = json.loads((good / "config.json").read_text())["num_hidden_layers"]
    bad = files.copy(good, "counted", config={"num_hidden_layers": count + 2})
    answer = diagnose(str(good), str(bad))
    assert [finding.cause for finding in answer.findings] == ["config_sizes"], answer.sentence
    lost = files.copy(good, "lost", tensors=files.drop(f"layers.{count - 1}.mlp.up_proj.weight"))
    assert "config_sizes" not in [one.cause for one in diagnose(str(good), str(lost)).findings]


def test_a_lost_head_is_taken_from_the_other_side() -> None:
    good = tiny_folder("llama")
    bad = files.copy(good, "headless", tensors=files.drop("lm_head.weight"))
    answer = diagnose(str(good), str(bad))
    assert answer.findings[0].cause == "missing_tensors"  # config.json demands one
    assert answer.findings[0].next.startswith("aprfmt convert"), answer.findings[0].next


def test_tensors_that_are_zero_to_the_end_of_their_file_are_counted() -> None:
    """The end of one is its own; two are a file that was not written to its end."""
    good = tiny_folder("llama")
    with aprfmt.open(good) as model:
        held = sorted(
            (view.stored[0].info for view in model.values()), key=lambda info: info.offset
        )
    for count in (1, 2, 3):
        bad = files.copy(good, f"last-{count}")
        path = bad / "model.safetensors"
        raw = bytearray(path.read_bytes())
        start = held[-count].offset + held[-count].nbytes // 2
        raw[start:] = bytes(len(raw) - start)
        path.write_bytes(raw)
        says = [one.says for one in diagnose(str(good), str(bad)).findings]
        told = [text for text in says if "to its end" in text]
        assert len(told) == (count > 1), says
        assert all(f"; {count} tensors" in text and f"byte {start}" in text for text in told)
