"""Draft heads through a conversion: into GGUF as llama.cpp's converter lays them out, and back."""

import json
import shutil
from pathlib import Path

import gguf
import pytest

import aprfmt
from aprfmt.arch import ARCHS
from aprfmt.checks import validate
from aprfmt.errors import ArchError
from aprfmt.model import open_model
from aprfmt.model.draft import contradicted_draft
from tests.cli.run import ROOT
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed
from tests.formats.gguf_writing import read, write

SOUND = ROOT / "fixtures" / "draft"
OWN = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head_head", "shared_head_norm")
# The GGUF layer that a head is, of the fixture: it has two others.
BLOCK = "blk.2."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "m.gguf"
    aprfmt.convert(SOUND, path)
    return path


def test_the_names_are_those_of_the_library() -> None:
    """The converter gives Qwen's `mtp.*` these names too, by its `_Qwen35MtpMixin`."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 4)
    for spec in (ARCHS[name] for name in ARCHS if ARCHS[name].draft and "mimo" not in name):
        names = {role: name for name, role in spec.draft["gguf"].tensors.items()}
        assert {name.split(".")[-2] for name in names.values()} == {*OWN}
        assert spec.draft["gguf"].counts[0] == gguf.Keys.LLM.NEXTN_PREDICT_LAYERS
        for name, role in spec.draft["hf"].tensors.items():
            if "{N}" in name:
                wanted = table.get_name(name.replace("{N}", "3"), (".weight",))
                assert names[role].replace("{N}", "3") == wanted


def test_it_is_counted_among_the_blocks(made: Path) -> None:
    meta, _, tensors = read(made)
    arch = meta["general.architecture"]
    assert (meta[f"{arch}.block_count"], meta[f"{arch}.nextn_predict_layers"]) == (3, 1)
    own = {name.removeprefix(BLOCK) for name in tensors if name.startswith(f"{BLOCK}nextn.")}
    assert own == {f"nextn.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head_norm")}
    with open_model(made) as model:
        assert model.hyper["n_layers"] == 2 and not model.resolution.report.conflicts
        assert len(model.resolution.draft) == 15 and not model.resolution.unbound


def test_it_comes_back_bit_for_bit_from_every_format(made: Path, tmp_path: Path) -> None:
    aprfmt.convert(made, tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == tensors_of(SOUND)
    done = command("diff", SOUND, made, "--json")
    keys = [row["key"] for row in done.json["tensors"]]
    assert done.code == 0 and "L2.nextn.eh_proj.weight" in keys and "L2.ffn_down.weight" in keys
    assert validate(made, against=SOUND).outcome == "PASS"


def test_a_changed_head_differs(made: Path, tmp_path: Path) -> None:
    rows = tensors_of(SOUND)
    kind, shape, data = rows["mtp.fc.weight"]
    write_mixed(
        tmp_path / "model.safetensors",
        {**rows, "mtp.fc.weight": (kind, shape, bytes(2) + data[2:])},
    )
    shutil.copy(SOUND / "config.json", tmp_path)
    done = command("diff", tmp_path, made, "--json")
    different = [row["key"] for row in done.json["tensors"] if row["verdict"] == "DIFFERENT"]
    assert done.code == 1 and different == ["L2.nextn.eh_proj.weight"]


def test_every_tensor_of_it_is_in_the_account(made: Path) -> None:
    report = aprfmt.convert(SOUND, made.with_name("counted.gguf"))
    assert report.accounted is not None
    kinds = {entry.name: (entry.kind, entry.fate) for entry in report.accounted.entries}
    mine = [name for name in tensors_of(SOUND) if name.startswith("mtp.")]
    assert {kinds[name][0] for name in mine} == {"draft head"}
    assert {kinds[name][1] for name in mine} == {"copied", "transformed"}
    assert report.accounted.counts["dropped"] == report.accounted.counts["lost"] == 0
    back = aprfmt.convert(made, made.with_name("m.apr")).accounted
    assert back is not None
    kinds_back = {entry.kind for entry in back.entries if entry.name.startswith(BLOCK)}
    assert kinds_back == {"draft head"}


def test_a_dropped_head_is_not_counted(made: Path, tmp_path: Path) -> None:
    for source, pattern in ((SOUND, "mtp.*"), (made, f"{BLOCK}*")):
        done = aprfmt.convert(source, tmp_path / "m.apr", drop=[pattern], force=True)
        assert done.accounted is not None and done.accounted.counts["dropped"] == 15
        aprfmt.convert(tmp_path / "m.apr", tmp_path / "m.gguf", force=True)
        meta, _, tensors = read(tmp_path / "m.gguf")
        assert meta["qwen35.block_count"] == 2 and "qwen35.nextn_predict_layers" not in meta
        assert not [name for name in tensors if name.startswith(BLOCK)]


def test_what_the_other_style_has_no_name_for_is_dropped_by_a_flag_only(
    made: Path, tmp_path: Path
) -> None:
    """A GGUF may hold the head's own output matrix, Qwen's checkpoints name none."""
    meta, _, tensors = read(made)
    head = f"{BLOCK}nextn.shared_head_head.weight"
    tensors[head] = tensors["token_embd.weight"]
    plain = {k: v for k, v in meta.items() if not k.startswith("aprfmt.")}
    write(tmp_path / "m.gguf", plain, tensors)
    with pytest.raises(ArchError, match=r"have no name for .*shared_head_head\.weight"):
        aprfmt.convert(tmp_path / "m.gguf", tmp_path / "back", to="safetensors")
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "back", to="safetensors", drop=[head])
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1


def test_quantized_it_keeps_its_place(tmp_path: Path) -> None:
    aprfmt.convert(SOUND, tmp_path / "m.gguf", quantize="Q8_0")
    _, _, tensors = read(tmp_path / "m.gguf")
    assert tensors[f"{BLOCK}ffn_down.weight"][0] == "Q8_0"
    assert tensors[f"{BLOCK}nextn.enorm.weight"][0] == "F32"


def _without_head(folder: Path, stated: int | None, *, keep: bool = False) -> Path:
    """Write a copy whose key states so many draft layers; the head is left out or kept."""
    shutil.copytree(SOUND, folder)
    rows = {name: row for name, row in tensors_of(SOUND).items() if keep or "mtp." not in name}
    write_mixed(folder / "model.safetensors", rows)
    config = json.loads((SOUND / "config.json").read_text())
    config["mtp_num_hidden_layers"] = stated
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("stated", "keep", "right"),
    [
        (1, False, 0),
        (0, True, 1),
        (2, True, 1),
        (1, True, None),
        (0, False, None),
        (None, False, None),
        (None, True, None),
    ],
)
def test_a_stated_head_is_held_against_the_tensors(
    stated: int | None, keep: bool, right: int | None, tmp_path: Path
) -> None:
    report = validate(_without_head(tmp_path / "m", stated, keep=keep))
    found = [row for row in report.warnings if "draft layer" in row.finding.found]
    assert len(found) == (right is not None) and report.outcome == "PASS"
    if right is not None:
        assert found[0].check == "hyperparameters"
        assert f"config.json:mtp_num_hidden_layers={right}" in found[0].finding.todo


def test_a_lost_head_that_the_key_still_states_is_a_wrong_key(tmp_path: Path) -> None:
    bad, good = _without_head(tmp_path / "bad", 1), _without_head(tmp_path / "good", 0)
    done = command("diagnose", SOUND, bad, "--json")
    (cause,) = [one for one in done.json["causes"] if one["cause"] == "config_sizes"]
    assert (done.code, cause["level"]) == (1, "confirmed")
    assert "mtp_num_hidden_layers=0" in cause["remedy"]["command"]
    assert command("diagnose", SOUND, good, "--json").code == 0


def test_a_gguf_that_lost_its_head_is_told_both_keys(made: Path, tmp_path: Path) -> None:
    meta, _, tensors = read(made)
    kept = {name: row for name, row in tensors.items() if not name.startswith(BLOCK)}
    plain = {key: value for key, value in meta.items() if not key.startswith("aprfmt.")}
    write(tmp_path / "m.gguf", plain, kept)
    with open_model(tmp_path / "m.gguf") as model:
        claim = contradicted_draft(model)
    assert claim is not None and (claim.stated, claim.stored) == (1, 0)
    assert claim.setting == ("qwen35.nextn_predict_layers=0", "qwen35.block_count=2")
