"""MiMo's draft heads, under their two kinds of published names: converted, compared, accounted for.

Without the architecture's rows its heads were named in the account and had no roles.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.checks import validate
from aprfmt.errors import ArchError
from aprfmt.model import open_model
from tests.arch.listed import save
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed
from tests.formats.gguf_writing import read

H, FFN = 24, 40
SHARED = {
    "input_layernorm.weight": (H,), "final_layernorm.weight": (H,),
    "self_attn.q_proj.weight": (36, H), "self_attn.k_proj.weight": (12, H),
    "self_attn.v_proj.weight": (8, H), "self_attn.o_proj.weight": (H, 24),
    "mlp.gate_proj.weight": (FFN, H), "mlp.up_proj.weight": (FFN, H),
    "mlp.down_proj.weight": (H, FFN),
}  # fmt: skip
# label -> (layer, its tensors, heads); the shapes of V2 are those of a layer with a window.
HEADS = {
    "mimo": ("model.mtp_layers.{}.", {
        **SHARED, "token_layernorm.weight": (H,), "hidden_layernorm.weight": (H,),
        "input_proj.weight": (H, 2 * H), "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (H, H), "self_attn.o_proj.weight": (H, H),
        "self_attn.k_proj.weight": (8, H), "self_attn.q_proj.bias": (H,),
        "self_attn.k_proj.bias": (8,), "self_attn.v_proj.bias": (8,),
    }, 1),
    "mimo_v2": ("model.mtp.layers.{}.", {
        **SHARED, "enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H),
        "pre_mlp_layernorm.weight": (H,), "self_attn.q_proj.weight": (36, H),
        "self_attn.attention_sink_bias": (6,),
    }, 3),
}  # fmt: skip
LAYERS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    base, rng = tmp_path_factory.mktemp("mimo"), np.random.default_rng(5)
    for label, (layer, shapes, count) in HEADS.items():
        save(label, base / label)
        rows = tensors_of(base / label)
        for head in range(count):
            for name, shape in shapes.items():
                data = rng.standard_normal(shape).astype(np.float32).tobytes()
                rows[layer.format(head) + name] = ("F32", shape, data)
        write_mixed(base / label / "model.safetensors", rows)
    yield {label: base / label for label in HEADS}


@pytest.mark.parametrize("label", HEADS)
def test_they_are_blocks_behind_the_model(label: str, folders: dict[str, Path]) -> None:
    _, shapes, count = HEADS[label]
    with open_model(folders[label]) as model:
        found = model.resolution
        assert found.unbound == () and found.missing == () and found.coverage.misshapen == ()
        assert len(found.draft) == count * len(shapes)
        for head in range(LAYERS, LAYERS + count):
            for role in ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "ffn_norm"):
                assert model.roles[f"L{head}.{role}.weight"].shape == (H,)
            assert model.roles[f"L{head}.nextn.eh_proj.weight"].shape == (H, 2 * H)


def test_the_hidden_state_of_the_first_kind_stands_first(folders: dict[str, Path]) -> None:
    """vLLM's mimo_mtp.py joins [hidden, embedding]; every other head [embedding, hidden]."""
    for label, name in (("mimo", "input_proj"), ("mimo_v2", "eh_proj")):
        layer = HEADS[label][0]
        with open_model(folders[label]) as model:
            stored = model[f"{layer.format(0)}{name}.weight"].numpy()
            logical = model.roles[f"L{LAYERS}.nextn.eh_proj.weight"].numpy()
        wanted = np.hstack([stored[:, H:], stored[:, :H]]) if label == "mimo" else stored
        np.testing.assert_array_equal(logical, wanted)


@pytest.mark.parametrize(
    ("label", "to"), [("mimo", "apr"), ("mimo_v2", "apr"), ("mimo_v2", "gguf")]
)
def test_they_come_back_bit_for_bit(
    label: str, to: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / f"m.{to}"
    report = aprfmt.convert(folders[label], copy)
    assert report.accounted is not None and not report.accounted.lost
    kinds = {entry.kind for entry in report.accounted.entries if ".mtp" in entry.name}
    assert kinds == {"draft head"} and report.accounted.counts["dropped"] == 0
    aprfmt.convert(copy, tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == tensors_of(folders[label])
    assert command("diff", folders[label], copy).code == 0
    assert validate(copy, against=folders[label]).outcome == "PASS"


def test_a_gguf_has_the_converters_names_and_lists(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    aprfmt.convert(folders["mimo_v2"], tmp_path / "m.gguf")
    meta, _, tensors = read(tmp_path / "m.gguf")
    assert (meta["mimo2.block_count"], meta["mimo2.nextn_predict_layers"]) == (6, 3)
    assert [*meta["mimo2.attention.head_count_kv"]] == [1, 2, 2, 2, 2, 2]
    assert [*meta["mimo2.attention.sliding_window_pattern"]] == [False] + [True] * 5
    own = {name.removeprefix("blk.5.") for name in tensors if name.startswith("blk.5.")}
    assert own >= {"nextn.eh_proj.weight", "layer_output_norm.weight", "attn_sinks.weight"}
    assert not [name for name in tensors if "shared_head" in name]


def test_gguf_has_none_of_the_first_kind(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ArchError, match=r"L3\..*leave it out with --drop"):
        aprfmt.convert(folders["mimo"], tmp_path / "m.gguf")
    report = aprfmt.convert(folders["mimo"], tmp_path / "m.gguf", drop=["model.mtp_layers.*"])
    assert report.accounted is not None
    assert report.accounted.counts["dropped"] == len(HEADS["mimo"][1])
    meta, _, _ = read(tmp_path / "m.gguf")
    assert meta["general.architecture"] == "qwen2"


def test_a_changed_head_differs_and_a_lost_one_is_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    rows, name = tensors_of(folders["mimo_v2"]), "model.mtp.layers.2.eh_proj.weight"
    kind, shape, data = rows[name]
    write_mixed(tmp_path / "model.safetensors", {**rows, name: (kind, shape, bytes(4) + data[4:])})
    shutil.copy(folders["mimo_v2"] / "config.json", tmp_path)
    done = command("diff", folders["mimo_v2"], tmp_path, "--json")
    bad = [row["key"] for row in done.json["tensors"] if row["verdict"] == "DIFFERENT"]
    assert done.code == 1 and bad == ["L5.nextn.eh_proj.weight"]
    write_mixed(tmp_path / "model.safetensors", {n: row for n, row in rows.items() if n != name})
    found = validate(tmp_path, against=folders["mimo_v2"])
    assert found.outcome == "FAIL"
    assert any(name in str(check) for check in found.checks if check.name == "accounted")
