"""The account of a conversion: everything in the source is copied, transformed or dropped.

Seen red: a copy that is judged only when it stands there.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.base.protocols import TypedValue
from aprfmt.checks import validate
from aprfmt.conversion import plan as plans
from aprfmt.conversion.accounting import account_for_source, recorded_omissions
from aprfmt.errors import ConversionError, UsageError
from aprfmt.model.sidecar_files import ROWS as FILE_ROWS
from tests.cli.run import aprfmt as command
from tests.conversion.dialect_folders import of_inputs, write_folder
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.formats.gguf_writing import read, write

TEXTS = {
    "generation_config.json": "{}", "preprocessor_config.json": '{"size": 3}',
    "LICENSE": "free for all\n", "chat_template.jinja": "{{ messages }}",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama_folder(tmp_path / "m", "BF16")
    for name, text in TEXTS.items():
        (tmp_path / "m" / name).write_text(text)
    (tmp_path / "m" / "README.md").write_text("of the page, not of the model")
    return tmp_path / "m"


def fates(done: dict[str, object]) -> dict[str, tuple[str, str]]:
    """Return fate and kind of every entry of a report by name."""
    said = done["accounted"]
    assert isinstance(said, dict)
    counts = [said[fate] for fate in ("copied", "transformed", "dropped", "lost")]
    assert sum(counts) == said["items"] == len(said["entries"])
    return {entry["name"]: (entry["fate"], entry["kind"]) for entry in said["entries"]}


@pytest.mark.parametrize("target", ["m.gguf", "m.apr", "copy.safetensors"])
def test_every_tensor_and_file_is_in_the_account(folder: Path, target: str) -> None:
    out = folder.parent / "out"
    out.mkdir()
    found = fates(command("convert", folder, out / target, "--json").json)
    stored = tensors_of(folder)
    assert {name for name in found if name in stored} == set(stored)
    assert {found[name][0] for name in stored} <= {"copied", "transformed"}
    kinds = {"generation_config.json": "generation config", "LICENSE": "licence",
             "preprocessor_config.json": "preprocessor",
             "chat_template.jinja": "template"}  # fmt: skip
    for name, kind in kinds.items():
        assert found[name] == ("copied", kind)
    assert found["config.json"] == ("copied", "configuration") and "README.md" not in found


def test_files_come_back_as_they_were(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert(folder, tmp_path / "m.gguf")
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "back", to="safetensors")
    for name, text in TEXTS.items():
        assert (tmp_path / "back" / name).read_text() == text
    assert validate(tmp_path / "back", against=folder).outcome == "PASS"


def test_a_tensor_lost_by_the_code_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that forgets one tensor does not pass, whatever it is."""
    made = plans._map_roles

    def forgets(*args: object) -> list[plans.Output]:
        outputs = made(*args)  # type: ignore[arg-type]
        return [output for output in outputs if output.info.name != "blk.1.attn_norm.weight"]

    monkeypatch.setattr(plans, "_map_roles", forgets)
    with pytest.raises(ConversionError, match="neither copied") as stop:
        aprfmt.convert(folder, tmp_path / "m.gguf")
    assert "model.layers.1.input_layernorm.weight (tensor)" in str(stop.value)
    assert not (tmp_path / "m.gguf").exists()  # it is said before anything is written
    with pytest.raises(ConversionError, match="neither copied"):
        aprfmt.convert(folder, tmp_path / "m.gguf", dry_run=True)


def test_a_file_that_no_output_holds_needs_a_flag(folder: Path, tmp_path: Path) -> None:
    (folder / "mmproj-f16.gguf").write_bytes(b"GGUF")
    said = command("convert", folder, tmp_path / "m.gguf")
    assert said.code == 2 and "mmproj-f16.gguf (tower) would not be in the copy" in said.err
    assert "--drop mmproj-f16.gguf" in said.err and not (tmp_path / "m.gguf").exists()
    done = command("convert", folder, tmp_path / "m.gguf", "--drop", "mmproj-f16.gguf", "--json")
    assert fates(done.json)["mmproj-f16.gguf"] == ("dropped", "tower")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert json.loads(model.metadata["aprfmt.dropped"]) == {"mmproj-f16.gguf": "--drop"}
    with pytest.raises(UsageError, match="no tensor matches"):
        aprfmt.convert(folder, tmp_path / "n.gguf", drop=["mmproj-f32.gguf"])


@pytest.mark.parametrize("target", ["m.gguf", "m.apr", "copy.safetensors"])
def test_a_file_that_is_dropped_is_not_in_the_copy(folder: Path, target: str) -> None:
    """Before, the flag was taken and recorded, and the licence copied all the same."""
    (folder.parent / "out").mkdir()
    out = folder.parent / "out" / target
    flags = ["--drop", "LICENSE", "--drop", "generation_config.json"]
    found = fates(command("convert", folder, out, *flags, "--json").json)
    for name in ("LICENSE", "generation_config.json"):
        assert found[name][0] == "dropped"
    assert found["preprocessor_config.json"][0] == "copied"
    with aprfmt.open(out) as model:
        texts = model.carried.embedded_texts if model.folder is None else model.folder.texts
        assert {"LICENSE", "generation_config.json"} & {*texts} == set()
        assert "preprocessor_config.json" in texts
    row = next(row for row in validate(out, against=folder).checks if row.name == "accounted")
    assert row.outcome == "PASS" and "2 dropped" in row.found


def test_what_a_copy_is_read_by_is_not_dropped(folder: Path, tmp_path: Path) -> None:
    done = command("convert", folder, tmp_path / "m.gguf", "--drop", "*config.json")
    assert done.code == 2 and "--drop names config.json" in done.err
    found = fates(command("convert", folder, tmp_path / "m.gguf", "--drop",
                          "chat_template.jinja", "--json").json)  # fmt: skip
    with aprfmt.open(tmp_path / "m.gguf") as model:
        kept = model.metadata.get("tokenizer.chat_template")
    assert found["chat_template.jinja"][0] == ("dropped" if kept is None else "transformed")


def test_validate_and_qa_hold_a_copy_against_its_source(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert(folder, tmp_path / "m.gguf", drop=["output.weight"], quantize="Q8_0")
    done = command("validate", tmp_path / "m.gguf", "--against", folder, "--json")
    row = next(row for row in done.json["checks"] if row["name"] == "accounted")
    assert row["outcome"] == "PASS" and "1 dropped" in row["found"]
    aprfmt.convert(folder, tmp_path / "other.gguf", generic=False, drop=["blk.1.ffn_up.weight"])
    aprfmt.convert(tmp_path / "other.gguf", tmp_path / "less.gguf", remove=["aprfmt.dropped"],
                   allow_missing=["*"])  # fmt: skip
    report = validate(tmp_path / "less.gguf", against=folder)
    lost = [noted.finding for noted in report.findings if noted.check == "accounted"]
    assert [one.where.partition(": ")[2] for one in lost] == [
        "model.layers.1.mlp.up_proj.weight"
    ] and report.outcome == "FAIL"
    assert "accounted" not in {row.name for row in validate(tmp_path / "m.gguf").checks}


@pytest.mark.parametrize("dialect", ["modelopt", "fp8_block", "mlx"])
def test_scales_are_accounted_one_by_one(dialect: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", dialect)
    stored = tensors_of(tmp_path / "m")
    decoded: Any = {"encoding": "F32", "drop": of_inputs(tmp_path / "m")}
    if decoded["drop"]:
        with pytest.raises(ConversionError, match=r"activations, .*leave.*--drop '\*input_scale'"):
            aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", encoding="F32")
    for target, wishes in (("m.apr", {}), ("m.gguf", decoded), ("r.gguf", {})):
        if target == "r.gguf" and dialect == "fp8_block":
            continue
        report = aprfmt.convert(tmp_path / "m", tmp_path / target, **wishes)
        assert report.accounted is not None
        found = {entry.name: entry for entry in report.accounted.entries}
        assert set(stored) <= set(found) and not report.accounted.lost
        scales = [entry for entry in found.values() if entry.kind == "scale"]
        assert len(scales) == len(stored) - 21
        fate = {"m.apr": {"copied"}, "m.gguf": {"transformed", "dropped"},
                "r.gguf": {"transformed", "copied"}}[target]  # fmt: skip
        assert {entry.fate for entry in scales} <= fate
        for entry in scales:
            if entry.fate == "dropped":
                assert entry.name.endswith("input_scale") and entry.how == "--drop"


def test_what_modelopts_own_file_says_is_in_the_blocks_of_a_repack(tmp_path: Path) -> None:
    """A folder as it is exported: beside config.json, and with scales of activations."""
    write_folder(tmp_path / "m", "modelopt")
    own = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(own))
    rows = dict(tensors_of(tmp_path / "m"))
    one = ("F32", (), np.float32(0.5).tobytes())
    mine = [name for name in rows if name.endswith("weight_scale_2")]
    rows |= {name.replace("weight_scale_2", "input_scale"): one for name in mine}
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    there = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    back = aprfmt.convert(
        tmp_path / "m.gguf", tmp_path / "back", to="safetensors", quantize="MODELOPT-NVFP4"
    )
    for found in (there.accounted, back.accounted):
        assert found is not None and not found.lost
        fates = {entry.name: entry.fate for entry in found.entries}
        assert fates.get("hf_quant_config.json", "transformed") == "transformed"
        assert {fates[name] for name in fates if name.endswith("input_scale")} == {"copied"}
    assert tensors_of(tmp_path / "back") == rows
    rows.pop("model.layers.1.mlp.up_proj.input_scale")
    write_mixed(tmp_path / "back" / "model.safetensors", rows)
    (judged,) = (each for each in validate(tmp_path / "back", against=tmp_path / "m").checks
              if each.name == "accounted")  # fmt: skip
    assert judged.outcome == "FAIL" and "layers.1.mlp.up_proj.input_scale" in str(judged)
    left = aprfmt.convert(
        tmp_path / "m", tmp_path / "less", to="safetensors", drop=["*up_proj.input_scale"]
    ).accounted
    assert left is not None and (left.counts["dropped"], left.counts["lost"]) == (2, 0)


def test_a_scale_that_is_lost_fails(tmp_path: Path) -> None:
    """The packed weight is there; one part of it is not what makes it the same weight."""
    write_folder(tmp_path / "m", "modelopt")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    shutil.copytree(tmp_path / "m", tmp_path / "less")
    rows = tensors_of(tmp_path / "less")
    left = {n: row for n, row in rows.items() if not n.startswith("model.layers.0.mlp.up_proj")}
    write_mixed(tmp_path / "less" / "model.safetensors", left)
    with aprfmt.open(tmp_path / "less") as copy, aprfmt.open(tmp_path / "m") as source:
        lost = account_for_source(copy, source, recorded_omissions(copy)).lost
    assert {entry.name for entry in lost} == set(rows) - set(left)
    assert {entry.kind for entry in lost} == {"tensor", "scale"}


def test_every_kind_of_file_is_one_of_the_table() -> None:
    assert {row.companion for row in FILE_ROWS} >= {
        "tokenizer", "template", "generation config", "preprocessor", "licence", "adapter",
        "imatrix", "tower", "draft head", "configuration",
    }  # fmt: skip


def test_qa_asks_it_of_the_copy_it_is_given(demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model, tmp_path / "demo")
    (tmp_path / "demo" / "LICENSE").write_text("free for all\n")
    done = command(
        "qa", demo_model, "--against", tmp_path / "demo", "--only", "format-parity", "--json"
    )
    gate = next(row for row in done.json["gates"] if row["name"] == "format-parity")
    check = next(one for one in gate["checks"] if one["name"] == "against-accounted")
    assert check["outcome"] == "FAIL" and "LICENSE" in check["found"]
    again = command(
        "qa", tmp_path / "demo", "--against", demo_model, "--only", "format-parity", "--json"
    )
    gate = next(row for row in again.json["gates"] if row["name"] == "format-parity")
    check = next(one for one in gate["checks"] if one["name"] == "against-accounted")
    assert check["outcome"] == "PASS"


def test_a_copy_of_its_own_format_is_all_copied(folder: Path, tmp_path: Path) -> None:
    """Rows of q and k lie in the order of GGUF on both sides."""
    aprfmt.convert(folder, tmp_path / "m.gguf")
    report = aprfmt.convert(tmp_path / "m.gguf", tmp_path / "again.gguf")
    assert report.accounted is not None
    counts = report.accounted.counts
    assert counts["copied"] == len(report.accounted.entries) and counts["lost"] == 0


def test_draft_heads_and_towers_are_named_and_dropped_by_a_flag_only(
    folder: Path, tmp_path: Path
) -> None:
    rows = tensors_of(folder)
    more = {
        "mtp.fc.weight": "draft head",
        "model.mtp_layers.0.input_proj.weight": "draft head",
        "model.visual.patch_embed.proj.weight": "tower",
    }
    rows |= {name: ("F32", (2, 2), bytes(16)) for name in more}
    write_mixed(folder / "model.safetensors", rows)
    copy = fates(
        command("convert", folder, tmp_path / "copy", "--to", "safetensors", "--json").json
    )
    assert {name: copy[name] for name in more} == {n: ("copied", k) for n, k in more.items()}
    with pytest.raises(ConversionError, match="has no place"):
        aprfmt.convert(folder, tmp_path / "m.gguf")
    drops = [each for name in more for each in ("--drop", name)]
    done = fates(command("convert", folder, tmp_path / "m.gguf", *drops, "--json").json)
    assert {name: done[name] for name in more} == {n: ("dropped", k) for n, k in more.items()}


def test_a_buffer_that_loaders_compute_is_dropped(tmp_path: Path) -> None:
    """Old llamas store their inverse frequencies."""
    folder = llama_folder(tmp_path / "hf", "BF16")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rows = tensors_of(folder)
    write_mixed(folder / "model.safetensors", rows | {name: ("F32", (4,), bytes(16))})
    report = aprfmt.convert(folder, tmp_path / "m.gguf")
    assert report.accounted is not None
    [entry] = [entry for entry in report.accounted.entries if entry.name == name]
    assert (entry.fate, entry.how) == ("dropped", "a buffer, which loaders compute")
    assert report.accounted.counts["dropped"] == 1


@pytest.fixture
def foreign(demo_model: Path, tmp_path: Path) -> Path:
    """Return a GGUF without a key of ours: vocabulary, template and licence stand in its own."""
    aprfmt.convert(demo_model, tmp_path / "ours.gguf")
    meta, types, tensors = read(tmp_path / "ours.gguf")
    plain = {k: TypedValue(v, types[k]) for k, v in meta.items() if not k.startswith("aprfmt.")}
    write(tmp_path / "foreign.gguf", {**plain, "general.license": "mit"}, tensors)
    return tmp_path / "foreign.gguf"


KEPT = {"vocabulary": "tokenizer", "chat template": "template", "general.license": "licence"}


@pytest.mark.parametrize("target", ["back", "m.apr", "again.gguf"])
def test_what_a_file_keeps_in_its_keys_is_accounted(foreign: Path, target: str) -> None:
    out = foreign.with_name(target)
    done = aprfmt.convert(foreign, out, to=None if out.suffix else "safetensors")
    assert done.accounted is not None
    found = {entry.name: entry for entry in done.accounted.entries}
    assert {name: found[name].kind for name in KEPT} == KEPT
    own = "copied" if target == "again.gguf" else "transformed"
    assert [found[name].fate for name in KEPT] == [own, "copied", "copied"]
    more = aprfmt.convert(out, foreign.with_name("more.gguf")).accounted
    assert more is not None and not more.lost
    assert target == "back" or set(KEPT) <= {entry.name for entry in more.entries}
    assert validate(foreign.with_name("more.gguf"), against=foreign).outcome == "PASS"


@pytest.mark.parametrize("name", KEPT)
def test_what_is_lost_of_its_keys_fails(name: str, foreign: Path) -> None:
    meta, types, tensors = read(foreign)
    gone = {"vocabulary": "tokenizer.", "chat template": "tokenizer.chat_template"}.get(name, name)
    less = {k: TypedValue(v, types[k]) for k, v in meta.items() if not k.startswith(gone)}
    write(foreign.with_name("less.gguf"), less, tensors)
    with aprfmt.open(foreign.with_name("less.gguf")) as copy, aprfmt.open(foreign) as source:
        lost = account_for_source(copy, source, recorded_omissions(copy)).lost
    assert name in {entry.name for entry in lost} <= set(KEPT)


def test_a_key_removed_by_its_name_is_dropped(foreign: Path) -> None:
    aprfmt.convert(foreign, foreign.with_name("less.gguf"), remove=["tokenizer.chat_template"])
    report = validate(foreign.with_name("less.gguf"), against=foreign)
    row = next(row for row in report.checks if row.name == "accounted")
    assert row.outcome == "PASS" and "1 dropped" in row.found


def test_a_key_whose_record_cannot_be_read_leaves_the_verdict_open(foreign: Path) -> None:
    """Seen red: it counted as copied, whatever the copy says of it."""
    meta, types, tensors = read(foreign)
    plain = {key: TypedValue(value, types[key]) for key, value in meta.items()}
    plain = {key: value for key, value in plain.items() if key != "general.license"}
    planted = foreign.with_name("planted.gguf")
    write(planted, {**plain, "planted.key": 3}, tensors)
    aprfmt.convert(planted, foreign.with_name("copy.apr"))
    with aprfmt.open(foreign.with_name("copy.apr")) as copy, aprfmt.open(planted) as source:
        key = next(name for name in copy.metadata if name.endswith("gguf.metadata"))
        copy.source.metadata = {**copy.source.metadata, key: "{"}
        found = account_for_source(copy, source, lambda name: "")
    (row,) = (one for one in found.left if one.name == "planted.key")
    assert (row.kind, row.state) == ("metadata key", "unreadable")


def test_a_drop_stays_said_in_a_copy_of_the_copy(folder: Path, tmp_path: Path) -> None:
    (folder / "mmproj-f16.gguf").write_bytes(b"GGUF")
    aprfmt.convert(folder, tmp_path / "m.gguf", drop=["mmproj-f16.gguf"])
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "back", to="safetensors")
    assert validate(tmp_path / "back", against=folder).outcome == "PASS"


def test_a_shard_is_no_file_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    """A draft head may be a shard of its own, `mtp.safetensors`, which the index lists."""
    rows = tensors_of(folder)
    parts: dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]] = {
        "mtp.safetensors": {},
        "model-00001-of-00001.safetensors": {},
    }
    for name, row in rows.items():
        parts[list(parts)["norm" not in name]][name] = row
    (folder / "model.safetensors").unlink()
    for name, part in parts.items():
        write_mixed(folder / name, part)
    names = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    found = fates(command("convert", folder, tmp_path / "m.gguf", "--json").json)
    assert "mtp.safetensors" not in found and set(rows) <= set(found)
