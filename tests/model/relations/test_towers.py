"""Towers beside a language model: two official layouts, and places where no loader looks.

Seen red: the two layouts called different, a tower of a healthy folder called tensors of no role,
a misplaced tower paired with nothing.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import aprfmt
from aprfmt.model import open_model
from aprfmt.model.towers import names_outside_tower, tower_architecture, tower_name, tower_root
from tests.cli.run import aprfmt as command
from tests.model.relations.edits import remedied, same, substituted, with_names


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 that sees, as transformers saves it."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "sliding_window": 64, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=300,
        eoi_token_index=301, image_token_index=302,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gemma3") / "orig"
    model = Gemma3ForConditionalGeneration(config).bfloat16()
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()  # zeros, when new
    model.save_pretrained(folder)
    return folder


def below_model(name: str) -> str:
    """Return a name of the older layout as transformers since 4.52 has it."""
    name = name.replace("language_model.model.", "model.language_model.", 1)
    return f"model.{name}" if name.startswith(("vision_tower", "multi_modal")) else name


def test_both_official_layouts_are_the_same(gemma3: Path, tmp_path: Path) -> None:
    other = with_names(gemma3, tmp_path / "new", below_model)
    assert sorted(open_model(other)) != sorted(open_model(gemma3))
    for folder in (gemma3, other):
        with open_model(folder) as model:
            assert not model.relations and not model.resolution.unclaimed
            assert len(model.resolution.towers) == 39
        assert "unusual: nothing" in command("inspect", folder).out
        checked = command("validate", folder, "--json").json
        assert all(row["outcome"] != "FAIL" for row in checked["checks"])
    assert aprfmt.diff(gemma3, other).equal
    same(gemma3, other)


WRONG = {
    "below the language model": (
        r"^(model[.])?vision_tower[.]", "model.language_model.vision_tower."
    ),
    "wrapped": (r"^(model[.])?vision_tower[.]", "base.vision_tower."),
    "all below another module": ("^", "wrapper."),
    "repeated": (r"^((model[.])?vision_tower[.])", r"\1vision_tower."),
    "projector alone": (r"^(model[.])?multi_modal_projector[.]", "model.mm.multi_modal_projector."),
}  # fmt: skip


@pytest.mark.parametrize("label", WRONG)
def test_a_tower_that_no_loader_finds_is_one_cause(
    label: str, gemma3: Path, tmp_path: Path
) -> None:
    bad = with_names(gemma3, tmp_path / "bad", substituted(*WRONG[label]))
    with open_model(bad) as model:
        (relation,) = model.relations
        assert relation.kind == "names" and not model.resolution.unclaimed
    report = aprfmt.diff(gemma3, bad)
    assert report.counts["SAME_BYTES"] == len(report.tensors) and report.exit_code() == 1
    found = command("diagnose", gemma3, bad, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["tensor_names"]
    same(gemma3, remedied(relation.remedy, tmp_path / "mended"))


@pytest.mark.parametrize("below", ["", "model."])
def test_a_tower_is_moved_to_where_the_rest_of_its_file_has_its_layout(
    below: str, gemma3: Path, tmp_path: Path
) -> None:
    def misplaced(name: str) -> str:
        name = below_model(name) if below else name
        return re.sub(r"^(model[.])?vision_tower[.]", "base.vision_tower.", name)

    with open_model(with_names(gemma3, tmp_path / "bad", misplaced)) as model:
        (relation,) = model.relations
    assert relation.remedy.endswith(f" --rename base.vision_tower.={below}vision_tower.")


def test_a_text_gguf_says_how_the_tower_is_left_out(gemma3: Path, tmp_path: Path) -> None:
    done = command("convert", gemma3, tmp_path / "text.gguf")
    assert done.code == 2 and "39 tensors belong to a tower" in done.err
    with open_model(gemma3) as model:
        roots = dict.fromkeys(map(tower_root, model.resolution.towers))
    drops = [part for root in roots for part in ("--drop", root)]
    assert all(root in done.err for root in roots)
    assert command("convert", gemma3, tmp_path / "text.gguf", *drops, "--quiet").code == 0


@pytest.mark.parametrize(("wrong", "verdict"), [("fc1.weight", "bug"), ("", "same")])
def test_a_tower_alone_is_compared_without_a_pass(
    wrong: str, verdict: str, gemma3: Path, tmp_path: Path
) -> None:
    bad = with_names(gemma3, tmp_path / "bad", str)
    arrays = load_file(bad / "model.safetensors")
    for name in arrays:
        if wrong and "vision" in name and name.endswith(wrong):
            arrays[name] = -arrays[name]
    save_file(arrays, bad / "model.safetensors", {"format": "pt"})
    found = command("diagnose", gemma3, bad, "--arch", "gemma3_vision", "--json").json
    assert found["verdict"] == verdict and len(found["causes"]) == bool(wrong)


LANGUAGE = ("--drop", "language_model.*")


def mmproj(gemma3: Path, path: Path, *, transposed: bool = False) -> Path:
    """Return a GGUF of Gemma 3's tower alone, one square matrix transposed if asked."""
    done = command("convert", gemma3, path, "--arch", "gemma3_vision", *LANGUAGE, "--quiet")
    assert done.code == 0, done.err
    if transposed:
        import gguf

        for tensor in gguf.GGUFReader(path, "r+").tensors:
            if tensor.name == "v.blk.0.attn_q.weight":
                codes = tensor.data.view(np.uint16)  # of 16-bit floats
                codes[...] = codes.T.copy()
    return path


def below(gemma3: Path, folder: Path) -> Path:
    """Return a copy of the folder whose names are those of the newer layout."""
    return with_names(gemma3, folder, below_model)


@pytest.mark.parametrize("layout", ["older", "newer"])
def test_a_towers_file_is_equal_to_the_tower_of_its_model(
    layout: str, gemma3: Path, tmp_path: Path
) -> None:
    """Seen red: the tower's blocks were paired with the language model's layers."""
    whole = gemma3 if layout == "older" else below(gemma3, tmp_path / "new")
    tower = mmproj(gemma3, tmp_path / "mmproj.gguf")
    for pair in ((whole, tower), (tower, whole)):
        told = command("diff", *pair)
        assert told.code == 0 and told.out.startswith("equal in what was compared: 39 of 67")
        assert "the other side is a tower alone" in told.out
        assert command("diagnose", *pair, "--json").json["verdict"] == "same"


def test_a_wrong_tensor_of_a_towers_file_is_named_and_mended(gemma3: Path, tmp_path: Path) -> None:
    tower = mmproj(gemma3, tmp_path / "mmproj.gguf", transposed=True)
    for verb in ("diff", "diagnose"):
        told = command(verb, gemma3, tower, "--json").json
        [cause] = told["causes"]
        assert (cause["cause"], cause["where"]) == ("transpose", ["v.blk.0.attn_q.weight"])
        options = "--arch gemma3_vision --drop 'language_model.*'"
        assert cause["remedy"]["command"].endswith(options)
        line = cause["remedy"]["command"].replace(f" {tower.stem}-fixed", f" OUT/{verb}")
        mended = remedied(line, tmp_path)
        assert command("diff", gemma3, mended).code == 0
    turned = command("diff", tower, gemma3, "--json").json
    assert turned["causes"][0]["remedy"] is None  # the tower's file has no language model


def test_a_model_beside_a_tower_of_another_kind_is_read_as_it_was(gemma3: Path) -> None:
    with open_model(gemma3) as whole:
        other: Any = SimpleNamespace(spec=SimpleNamespace(section="audio_config", name="whisper"))
        assert tower_architecture(whole, other) == ""
        assert tower_architecture(whole, whole) == "" and not names_outside_tower(whole, whole)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("vision_tower.vision_model.encoder.x", "vision_tower.encoder.x"),
        ("model.visual.blocks.0.x", "visual.blocks.0.x"),
        ("model.layers.0.x", ""),
        ("model.language_model.visual.x", ""),
        ("audio_tower.x", "audio_tower.x"),
        ("visual.visual.x", ""),
        ("model.visual.visual.x", ""),
    ],
)
def test_a_tower_has_one_name_in_both_layouts(name: str, read: str) -> None:
    assert tower_name(name) == read
