"""Draft heads: our pass against transformers' modules, on every backend; what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import aprfmt
from aprfmt.base.protocols import TypedValue
from aprfmt.errors import ArchError, ConversionError, UsageError
from aprfmt.inference.draft import DraftSession
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import open_model
from tests.formats.gguf_writing import Stored, read, write
from tests.inference.drafts import NAMED, drafted
from tests.inference.judge import backend, rel
from tests.models import IDS

# Points of a draft head alone; the others are those of its layer.
OWN = {"draft_embd_norm", "draft_hidden", "draft_hidden_norm", "draft_in"}


@pytest.mark.parametrize("run", ["numpy:float64", "torch:float64"])
@pytest.mark.parametrize("name", NAMED)
def test_every_point_is_transformers(name: str, run: str) -> None:
    judge = drafted(name)
    kept = KeptValues()
    with open_model(judge.folder) as model, Session.open(model, backend(run)) as session:
        draft = DraftSession(model, session)
        trace = draft.trace(
            IDS, tuple(draft.points), keep=kept.keep, fetch=kept.fetch, logits_rows="all"
        )
        both = list(draft.logits_of_both(IDS, range(len(IDS)), 5))
    compared = set()
    for key, wanted in judge.found.items():
        found = trace.recorded_values(key)
        if found is not None:
            assert rel(found.reshape(wanted.shape), wanted) < 1e-10, key
            compared.add(key)
    assert compared >= OWN | {"L0.attn_norm", "L0.attn_out", "L0.ffn_norm", "L0.out", "final_norm"}
    assert [(len(mine), len(its)) for mine, its in both] == [(5, 4), *[(5, 5)] * 4, (4, 4)]
    assert rel(np.concatenate([mine for mine, _ in both]), judge.logits) < 1e-10
    assert rel(np.concatenate([its for _, its in both]), judge.found["logits_raw"]) < 1e-10


@pytest.mark.parametrize("run", ["numpy:float32", "torch:float32", "torch:bfloat16"])
def test_lower_precision_stays_near(run: str) -> None:
    judge = drafted("qwen3_5")
    with open_model(judge.folder) as model, Session.open(model, backend(run)) as session:
        found = DraftSession(model, session).logits(IDS)
    assert rel(found, judge.found["logits_raw"]) < (3e-6 if "32" in run else 5e-2)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_a_tied_head_is_the_models_embedding(name: str) -> None:
    judge = drafted(name, tied=True)
    b = backend("numpy:float64")
    with open_model(judge.folder) as model, Session.open(model, b) as session:
        draft = DraftSession(model, session)
        assert rel(draft.logits(IDS), judge.found["logits_raw"]) < 1e-10
        assert draft.weights["token_embd.weight"] is session.weights["token_embd.weight"]


def test_its_own_embedding_and_head_are_used(tmp_path: Path) -> None:
    """A checkpoint with copies of both says the same; changed copies say something else."""
    judge = drafted("deepseek_v3")

    def logits(factor: float) -> np.ndarray:
        def own(state: dict[str, torch.Tensor]) -> None:
            for name, source in (
                ("embed_tokens", "model.embed_tokens"),
                ("shared_head.head", "lm_head"),
            ):
                state[f"model.layers.3.{name}.weight"] = factor * state[f"{source}.weight"]

        with (
            open_model(_edited(judge.folder, tmp_path / str(factor), own)) as model,
            Session.open(model, backend("numpy:float64")) as session,
        ):
            return DraftSession(model, session).logits(IDS)

    assert rel(logits(1.0), judge.found["logits_raw"]) < 1e-10
    assert rel(logits(-2.0), judge.found["logits_raw"]) > 0.1


def test_a_model_without_a_head_says_so(tmp_path: Path) -> None:
    folder = drafted("qwen3_5").folder
    none = _edited(folder, tmp_path / "none", _without("mtp."))
    with pytest.raises(
        ArchError, match=r"mtp_num_hidden_layers = 1 is said, but no tensor .*mtp\.fc"
    ):
        _session(none)
    config = json.loads((none / "config.json").read_text())
    del config["mtp_num_hidden_layers"]
    (none / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchError, match=r"has no draft head: no tensor such as mtp\.pre_fc_norm"):
        _session(none)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = drafted("glm4_moe").folder
    with pytest.raises(
        ArchError, match=r"lacks 2 of \d+ tensors: model\.layers\.3\.eh_proj\.weight"
    ):
        _session(_edited(folder, tmp_path / "some", _without(".eh_proj", ".shared_head.norm")))

    def short(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.3.enorm.weight"] = state["model.layers.3.enorm.weight"][:-1]

    with pytest.raises(
        ArchError, match=r"nextn\.enorm\.weight of the draft head has shape \[\d+\]"
    ):
        _session(_edited(folder, tmp_path / "short", short))


def test_what_it_cannot_run_is_refused(demo_model: Path) -> None:
    with pytest.raises(ArchError, match="no draft head of qwen2 is known"):
        _session(demo_model)
    with (
        open_model(drafted("qwen3_5").folder) as model,
        Session.open(model, backend("numpy:float64")) as session,
    ):
        draft = DraftSession(model, session)
        with pytest.raises(UsageError, match="1 tokens; a draft head needs two"):
            draft.logits([1])
        with pytest.raises(UsageError, match="expected no cache"):
            draft.prefill(IDS)


def _session(folder: Path) -> None:
    with open_model(folder) as model, Session.open(model, backend("numpy:float64")) as session:
        DraftSession(model, session)


def _without(*parts: str):  # type: ignore[no-untyped-def]
    def change(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if any(part in name for part in parts)]:
            del state[name]

    return change


def _edited(folder: Path, out: Path, change) -> Path:  # type: ignore[no-untyped-def]
    shutil.copytree(folder, out)
    state = load_file(out / "model.safetensors")
    change(state)
    save_file({name: value.clone() for name, value in state.items()}, out / "model.safetensors")
    return out


# Config values that make a model of one layer like the head's.
ALONE = {
    "qwen3_5": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3_5_moe": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "glm4_moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("name", ALONE)
def test_a_gguf_has_it_as_the_block_after_the_last(name: str, tmp_path: Path) -> None:
    """As llama.cpp's converter lays it out: counted among the blocks, norms with one added."""
    judge = drafted(name)
    path = _as_gguf(judge.folder, name, tmp_path)
    with open_model(path) as model, Session.open(model, backend("numpy:float64")) as session:
        assert rel(session.logits(IDS), judge.logits) < 1e-6
        assert rel(DraftSession(model, session).logits(IDS), judge.found["logits_raw"]) < 1e-6


@pytest.mark.parametrize("name", ALONE)
def test_convert_writes_that_block_and_takes_it_back(name: str, tmp_path: Path) -> None:
    judge = drafted(name)
    wanted, _, layout = read(_as_gguf(judge.folder, name, tmp_path))
    aprfmt.convert(judge.folder, tmp_path / "ours.gguf")
    meta, _, tensors = read(tmp_path / "ours.gguf")
    assert tensors == layout
    arch = meta["general.architecture"]
    for key in (f"{arch}.block_count", f"{arch}.nextn_predict_layers"):
        assert meta[key] == wanted[key]
    aprfmt.convert(tmp_path / "ours.gguf", tmp_path / "back", to="safetensors")
    assert aprfmt.diff(judge.folder, tmp_path / "back").equal


def test_a_layer_without_a_heads_own_tensors_is_one_of_the_model(tmp_path: Path) -> None:
    parts = (".enorm", ".hnorm", ".eh_proj", ".shared_head")
    folder = _edited(drafted("glm4_moe").folder, tmp_path / "m", _without(*parts))
    with open_model(folder) as model:
        assert not model.resolution.draft and "L3.attn_q.weight" not in model.roles
        assert "model.layers.3.self_attn.q_proj.weight" in model.resolution.unclaimed
        assert any("n_layers" in str(said) for said in model.resolution.report.conflicts)
    with pytest.raises(ConversionError, match=r"'model\.layers\.3\..* has no place"):
        aprfmt.convert(folder, tmp_path / "m.gguf")


def _as_gguf(folder: Path, name: str, tmp_path: Path) -> Path:
    names, state = NAMED[name], load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    parts = ("enorm", "hnorm", "fc", "norm")
    own = {part: names[part].replace("{N}", str(count)) for part in parts}
    layer = names["layer"].replace("{N}", str(count)) + "."
    main = {key: value for key, value in state.items() if not key.startswith((layer, "mtp."))}
    heads = tuple(f"{stem}." for stem in own.values())
    alone = {
        f"model.layers.0.{key.removeprefix(layer)}": value
        for key, value in state.items()
        if key.startswith(layer) and not key.startswith(heads)
    }
    alone["model.norm.weight"] = state[f"{own['norm']}.weight"]
    shared = ("model.embed_tokens.weight", "lm_head.weight")
    alone |= {key: main[key] for key in shared if key in main}
    meta, types, tensors = _converted(tmp_path / "main", main, config)
    _, _, layers = _converted(tmp_path / "alone", alone, config | ALONE[name])
    plus = np.float32(1 if names["layer"].startswith("mtp") else 0)
    for part, called in (("enorm", "enorm"), ("hnorm", "hnorm"), ("fc", "eh_proj")):
        values = state[f"{own[part]}.weight"].numpy() + (plus if part != "fc" else np.float32(0))
        tensors[f"blk.{count}.nextn.{called}.weight"] = ("F32", values.shape, values.tobytes())
    tensors[f"blk.{count}.nextn.shared_head_norm.weight"] = layers["output_norm.weight"]
    for key, stored in layers.items():
        if key.startswith("blk.0."):
            tensors[f"blk.{count}.{key.removeprefix('blk.0.')}"] = stored
    arch = meta["general.architecture"]
    meta[f"{arch}.block_count"] = count + 1
    typed = {
        key: TypedValue(value, types[key])
        for key, value in meta.items()
        if key.startswith("aprfmt.hyper.") or not key.startswith("aprfmt.")
    }
    typed[f"{arch}.nextn_predict_layers"] = TypedValue(1, "uint32")
    write(tmp_path / "model.gguf", typed, tensors)
    return tmp_path / "model.gguf"


def _converted(
    folder: Path, state: dict[str, torch.Tensor], config: dict[str, object]
) -> tuple[dict[str, Any], dict[str, str], dict[str, Stored]]:
    folder.mkdir()
    save_file({name: value.clone() for name, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    aprfmt.convert(folder, folder / "model.gguf")
    return read(folder / "model.gguf")
