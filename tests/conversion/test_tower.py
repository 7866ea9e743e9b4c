"""A model of two halves is written as two GGUF files: the text, and what sees (mmproj).

The judge is the gguf package's reader. Seen red: the whole model's config.json carried along, by
which the tower was taken for the text; the projector's norm without the one that llama.cpp expects;
a Qwen tower's frames exchanged, its mergers numbered 0 and 1, the text's activation taken for it.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from aprfmt.model import open_model
from tests.arch.listed import LISTED, built, save
from tests.cli.run import aprfmt as run

TOWER = ("--drop", "vision_tower*", "--drop", "multi_modal_projector*")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of both halves, as transformers writes it."""
    import torch
    import transformers

    auto: Any = transformers
    _, kind, loader, values = LISTED["gemma3_vision"]
    config = auto.AutoConfig.for_model(kind, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(auto, loader).from_config(config)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(torch.randn(tensor.shape))
    folder = tmp_path_factory.mktemp("whole") / "model"
    model.save_pretrained(folder)
    return folder


def test_the_tower_and_its_projector_become_an_mmproj(whole: Path, tmp_path: Path) -> None:
    target, how = tmp_path / "mmproj.gguf", ("--arch", "gemma3_vision")
    refused = run("convert", whole, target, *how)
    assert refused.code == 2 and "has no place in architecture 'gemma3_vision'" in refused.err
    assert run("convert", whole, target, *how, "--drop", "language_model*").code == 0
    theirs = gguf.GGUFReader(target)
    said = {
        name: theirs.get_field(name).contents()  # type: ignore[union-attr]
        for name in (
            "general.architecture",
            "general.type",
            "clip.projector_type",
            "clip.has_vision_encoder",
            "clip.use_gelu",
            "clip.vision.projection_dim",
            "clip.vision.projector.scale_factor",
        )
    }
    assert list(said.values()) == ["clip", "mmproj", "gemma3", True, True, 24, 2]
    tensors = {tensor.name: tensor.data for tensor in theirs.tensors}
    source = load_file(whole / "model.safetensors")
    plain, norm = "mm_input_projection_weight", "mm_soft_emb_norm.weight"
    np.testing.assert_array_equal(
        tensors["mm.input_projection.weight"], source[f"multi_modal_projector.{plain}"]
    )
    np.testing.assert_array_equal(
        tensors["mm.soft_emb_norm.weight"], source[f"multi_modal_projector.{norm}"] + 1
    )
    assert run("inspect", target, "--json").json["level"] == "names"
    assert run("convert", target, tmp_path / "back", "--to", "safetensors").code == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert len(back) == sum(not name.startswith("language_model.") for name in source)
    for name, values in back.items():
        now = name.replace("vision_tower.vision_model.", "vision_tower.")
        np.testing.assert_array_equal(values.view(np.uint8), source[now].view(np.uint8))


def test_the_text_becomes_a_model_of_its_own(whole: Path, tmp_path: Path) -> None:
    assert run("convert", whole, tmp_path / "m.gguf", *TOWER).code == 0
    with open_model(tmp_path / "m.gguf") as model:
        assert model.spec.name == "gemma3" and model.resolution.unbound == ()
        assert model.config is not None and "vision_config" in model.config


@pytest.mark.parametrize(
    ("label", "kind", "text"),
    [("pixtral_vision", "pixtral", 28), ("qwen2_audio_tower", "qwen2a", 28),
     ("voxtral_tower", "voxtral", 28), ("qwen2_vl_vision", "qwen2vl_merger", 28),
     ("qwen2_5_vl_vision", "qwen2.5vl_merger", 28), ("qwen3_vl_vision", "qwen3vl_merger", 28)],
)  # fmt: skip
def test_other_towers_say_what_they_are(label: str, kind: str, text: int, tmp_path: Path) -> None:
    save(label, tmp_path / "model")
    target = tmp_path / "mmproj.gguf"
    assert run("convert", tmp_path / "model", target).code == 0
    theirs = gguf.GGUFReader(target)
    part = has = "vision" if label.endswith("_vision") else "audio"
    said = [
        theirs.get_field(name).contents()  # type: ignore[union-attr]
        for name in (
            "general.architecture",
            "general.type",
            "clip.projector_type",
            f"clip.has_{has}_encoder",
            f"clip.{part}.projection_dim",
            f"clip.{part}.block_count",
        )
    ]
    assert said == [
        "clip",
        "mmproj",
        kind,
        True,
        text,
        4 if "qwen" in kind and has == "vision" else 2,
    ]
    shown = run("inspect", target, "--json").json
    assert (shown["architecture"], shown["level"]) == (label, "names")


def test_a_pixtral_towers_heads_are_in_pairs_and_convolutions_have_columns(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: Q and K permuted, biases of convolutions [n, 1]."""
    for label in ("pixtral_vision", "qwen2_audio_tower"):
        save(label, tmp_path / label)
        assert run("convert", tmp_path / label, tmp_path / f"{label}.gguf").code == 0
    sees = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "pixtral_vision.gguf").tensors}
    source = load_file(tmp_path / "pixtral_vision" / "model.safetensors")
    query = source["vision_tower.transformer.layers.1.attention.q_proj.weight"]
    halves = query.reshape(6, 2, 2, 24).swapaxes(1, 2).reshape(24, 24)
    np.testing.assert_array_equal(sees["v.blk.1.attn_q.weight"], halves)
    hears = gguf.GGUFReader(tmp_path / "qwen2_audio_tower.gguf").tensors
    column = next(t for t in hears if t.name == "a.conv1d.1.bias")
    assert column.shape.tolist() == [1, 24]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_tower_of_a_whole_clip(kind: str, tmp_path: Path) -> None:
    """Its sizes are those of vision_config, not those of the text beside it."""
    import transformers

    auto: Any = transformers
    sees = {
        key: value for key, value in LISTED["clip_vision"][3].items() if key != "projection_dim"
    }
    text = {
        **sees,
        "hidden_size": 18,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 30,
        "vocab_size": 56,
        "max_position_embeddings": 20,
    }
    config = auto.AutoConfig.for_model(kind, vision_config=sees, text_config=text)
    auto.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    source = load_file(tmp_path / "model" / "model.safetensors")
    others = [name for name in source if not name.startswith("vision_model.") or ".head." in name]
    drops = [part for name in others for part in ("--drop", name)]
    target = tmp_path / "mmproj.gguf"
    how = ("--arch", f"{kind}_vision", *drops)
    done = run("convert", tmp_path / "model", target, *how)
    assert done.code == 0, done.err
    theirs = gguf.GGUFReader(target)
    field = theirs.get_field("clip.vision.block_count")
    assert field is not None and field.contents() == 2
    assert run("convert", target, tmp_path / "back", "--to", "safetensors").code == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert len(back) == len(source) - len(others)
    for name, values in back.items():
        np.testing.assert_array_equal(values, source[f"vision_model.{name}"])


def written(label: str, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Convert a tower; return a reader of its GGUF, and the tensors of both."""
    save(label, folder / "model")
    assert run("convert", folder / "model", folder / "mmproj.gguf").code == 0
    reader = gguf.GGUFReader(folder / "mmproj.gguf")
    ours = {tensor.name: tensor.data for tensor in reader.tensors}
    return reader, ours, load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("label", ["qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision"])
def test_a_qwen_tower_is_as_the_converter_writes_it(label: str, tmp_path: Path) -> None:
    """Two convolutions for two frames; q, k and v apart, or as they are; the merger's names."""
    _, ours, source = written(label, tmp_path)
    patch = source["visual.patch_embed.proj.weight"]
    for name, frame in (("v.patch_embd.weight", 0), ("v.patch_embd.weight.1", 1)):
        np.testing.assert_array_equal(ours[name], patch[:, :, frame])
    for part in ("weight", "bias"):
        fused = source[f"visual.blocks.2.attn.qkv.{part}"]
        if label == "qwen3_vl_vision":
            np.testing.assert_array_equal(ours[f"v.blk.2.attn_qkv.{part}"], fused)
            continue
        for at, name in enumerate("qkv"):
            third = fused[24 * at : 24 * (at + 1)]
            np.testing.assert_array_equal(ours[f"v.blk.2.attn_{name}.{part}"], third)
    first = "linear_fc1" if label == "qwen3_vl_vision" else "mlp.0"
    np.testing.assert_array_equal(ours["mm.0.weight"], source[f"visual.merger.{first}.weight"])


def test_mergers_are_numbered_by_their_layers(tmp_path: Path) -> None:
    """Layers 1 and 3 of the tower have one; the folder numbers them 0 and 1."""
    reader, ours, source = written("qwen3_vl_vision", tmp_path)
    assert reader.get_field("clip.vision.is_deepstack_layers").contents() == [False, True] * 2
    assert reader.get_field("clip.vision.image_size").contents() == 24
    names = {name for name in ours if name.startswith("v.deepstack.")}
    assert {name.split(".")[2] for name in names} == {"1", "3"} and len(names) == 12
    for layer, number in ((1, 0), (3, 1)):
        for part, theirs in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
            np.testing.assert_array_equal(
                ours[f"v.deepstack.{layer}.{part}.weight"],
                source[f"visual.deepstack_merger_list.{number}.{theirs}.weight"],
            )


def test_a_tower_without_mergers_has_none(tmp_path: Path) -> None:
    """As qwen3_5's."""
    reader, ours, _ = written("qwen3_vl_moe_vision", tmp_path)
    assert reader.get_field("clip.vision.is_deepstack_layers").contents() == [False] * 4
    assert not any("deepstack" in name for name in ours)


def test_windows_are_a_pattern_and_the_text_at_the_top_is_not_the_towers(tmp_path: Path) -> None:
    reader, _, _ = written("qwen2_5_vl_vision", tmp_path / "a")
    assert reader.get_field("clip.vision.n_wa_pattern").contents() == 2
    assert reader.get_field("clip.use_silu").contents() is True
    save("qwen2_vl_vision", tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    sees = {
        key: config["vision_config"][key]
        for key in ("depth", "embed_dim", "num_heads", "hidden_size", "mlp_ratio", "patch_size")
    }
    flat = {**text, **config, "vision_config": sees, "hidden_act": "silu", "hidden_size": 28}
    path.write_text(json.dumps(flat))
    assert run("convert", tmp_path / "b", tmp_path / "b.gguf").code == 0
    fields = gguf.GGUFReader(tmp_path / "b.gguf").fields
    assert "clip.use_silu" not in fields and "clip.use_gelu" not in fields  # quick, by its type
    said = [
        fields[f"clip.vision.{name}"].contents()
        for name in (
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "projection_dim",
        )
    ]
    assert said == [24, 72, 6, 28]


def test_windows_that_are_no_pattern_are_a_loss(tmp_path: Path) -> None:
    save("qwen2_5_vl_vision", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["fullatt_block_indexes"] = [0, 3]
    path.write_text(json.dumps(config))
    done = run("convert", tmp_path / "model", tmp_path / "m.gguf")
    assert "GGUF has a pattern only" in done.err + done.out, (done.out, done.err)


@pytest.mark.parametrize(
    ("label", "drops"),
    [
        ("qwen2_vl_vision", ("model.*", "lm_head.weight")),
        ("qwen2_5_vl_vision", ("model.*", "lm_head.weight")),
        ("qwen3_vl_vision", ("model.language_model*", "lm_head.weight")),
        ("qwen3_vl_moe_vision", ("model.language_model*", "lm_head.weight")),
    ],
)
def test_a_qwen_that_sees_is_cut_in_two(label: str, drops: tuple[str, ...], tmp_path: Path) -> None:
    """Of one whole folder, as transformers writes it: the mmproj, and the text."""
    arch, kind, loader, values = LISTED[label]
    built(kind, loader, values).save_pretrained(tmp_path / "model")
    source = load_file(tmp_path / "model" / "model.safetensors")
    left = [part for name in drops for part in ("--drop", name)]
    done = run("convert", tmp_path / "model", tmp_path / "mmproj.gguf", "--arch", arch, *left)
    assert done.code == 0, done.err
    assert (
        run("convert", tmp_path / "mmproj.gguf", tmp_path / "back", "--to", "safetensors").code == 0
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    sees = {name.removeprefix("model."): x for name, x in source.items() if "visual." in name}
    assert back.keys() == sees.keys()
    for name, array in sees.items():
        np.testing.assert_array_equal(back[name], array)
    text = run("convert", tmp_path / "model", tmp_path / "text.gguf", "--drop", "*visual.*")
    assert text.code == 0, text.err
    with open_model(tmp_path / "text.gguf") as model:
        assert model.resolution.unbound == () and model.resolution.missing == ()
        wanted = model.spec.called["gguf"][0]
        assert wanted == {"qwen2_5_vl": "qwen2vl"}.get(kind, kind.replace("_", ""))
