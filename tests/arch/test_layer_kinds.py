"""Which layers of a hybrid convolve: by config.json's keys, old ones too, or refused by name.

Seen red: a kind that no such model has taken for a convolution; the factor on the MLP's width read
before two thirds were taken; a file without the newer keys read as attention everywhere.
"""

import re
from typing import Any

import pytest

from aprfmt.arch import ARCHS, deepseek_v4, draft_head, mimo
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.layer_kinds import (
    read_layer_numbers,
    read_layer_period,
    write_indices,
    write_period,
)
from aprfmt.arch.spec import Facts, HyperParams
from aprfmt.errors import ArchError

SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 41,
    "vocab_size": 56, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = {
    "lfm2": ("conv", "full_attention"), "lfm2_moe": ("conv", "full_attention"),
    "granite_hybrid": ("mamba", "attention"), "granite_hybrid_moe": ("mamba", "attention"),
}  # fmt: skip
OTHERS = ("sliding_attention", "chunked_attention", "conv", "mamba", "mlp", "moe", "", 3, None)


def hyper(arch: str, shapes: Any = (), **config: Any) -> HyperParams:
    return read_hyper(ARCHS[arch], Facts("hf", SIZES | config, dict(shapes), names="hf"), "m")[0]


@pytest.mark.parametrize("other", OTHERS, ids=repr)
@pytest.mark.parametrize("arch", KINDS)
def test_a_kind_that_no_published_model_has_is_refused_by_name(arch: str, other: Any) -> None:
    first, second = KINDS[arch]
    if other == first:
        return
    with pytest.raises(ArchError, match=rf"layer_types: layer 2 is {other!r}; .* one of: "):
        hyper(arch, layer_types=[first, second, other, first])


NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 5,
}  # fmt: skip
HEADS: dict[str, Any] = {"num_heads": 6, "head_dim": 8, "n_groups": 2}
FALCON: dict[str, Any] = {"mamba_d_ssm": 48, "mamba_n_heads": 6}


@pytest.mark.parametrize("arch", ["nemotron_h", "nemotron_h_moe"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers_block_type", ["linear_attention", "moe", "full_attention", "mlp"]),
        ("hybrid_override_pattern", "ME*-"),
    ],
)
def test_dense_mlps_beside_experts_are_refused_by_name(arch: str, key: str, value: Any) -> None:
    """transformers makes such a model where no key says the layers; none is published."""
    with pytest.raises(ArchError, match=rf"{key}: has dense MLPs \(layer 3\) and experts .*1\)"):
        hyper(arch, **NEMOTRON, **{key: value})


@pytest.mark.parametrize(
    ("arch", "config", "said"),
    [
        ("mamba2", {"num_heads": 6, "head_dim": 8, "n_groups": 4}, "6 heads in 4 groups"),
        ("falcon_h1", {"mamba_d_ssm": 50, "mamba_n_heads": 6}, "6 heads in 1 groups, and 50 chan"),
        ("nemotron_h", NEMOTRON | {"n_groups": 4}, "6 heads in 4 groups"),
        ("falcon_h1", FALCON | {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers: has 4 entries"),
        ("falcon_h1", FALCON | {"mlp_multipliers": [1.0] * 3}, "mlp_multipliers: has 3 entries"),
        ("mamba2", HEADS | {"time_step_limit": [0.5, 0.1]}, r"time_step_limit: is \[0.5, 0.1\]"),
        ("mamba2", HEADS | {"time_step_limit": [0.5]}, "time_step_limit: has 1 entries"),
    ],
)  # fmt: skip
def test_mixers_that_cannot_be_are_refused_by_name(
    arch: str, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArchError, match=said):
        hyper(arch, **{"layers_block_type": ["linear_attention"] * 4, **config}
              if arch == "nemotron_h" else config)  # fmt: skip


@pytest.mark.parametrize("endless", [float("inf"), "Infinity", {"__float__": "Infinity"}])
def test_an_endless_limit_is_spelled_as_transformers_spells_it(endless: Any) -> None:
    found = hyper("mamba2", time_step_limit=[0.01, endless], **HEADS)
    assert (found["ssm_step_low"], found["ssm_step_high"]) == (0.01, None)


def test_layers_are_listed_numbered_or_seen() -> None:
    wanted = (True, False, True, True)
    listed = ["conv", "full_attention", "conv", "conv"]
    assert hyper("lfm2", layer_types=listed)["conv_layers"] == wanted
    assert hyper("lfm2", full_attn_idxs=[1])["conv_layers"] == wanted
    assert hyper("lfm2", layer_types=listed, full_attn_idxs=[2])["conv_layers"] == wanted
    seen = {f"L{i}.shortconv.conv.weight": (24, 3) for i in (0, 2, 3)}
    assert hyper("lfm2", seen)["conv_layers"] == wanted
    found = hyper("lfm2")
    assert not any(found["conv_layers"])  # as in transformers
    assert found["rope_layers"] == found["attention_layers"] == (True,) * 4


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
        {"block_ff_dim": 67, "block_multiple_of": 5},
        {"tie_embedding": False, "block_multiple_of": 1},
    ],
    ids=str,
)
def test_widths_and_the_head_are_transformers(keys: dict[str, Any]) -> None:
    import transformers

    given = {**SIZES, **keys, "layer_types": ["conv"] * 4, "num_key_value_heads": 2}
    config = transformers.Lfm2Config(**given)
    model = transformers.Lfm2ForCausalLM(config)
    found = hyper("lfm2", **given)
    assert found["ffn_size"] == model.model.layers[0].feed_forward.w1.out_features
    assert found["tied_embeddings"] == config.tie_word_embeddings


@pytest.mark.parametrize("layers", [1, 4, 8])
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_period_that_is_written_is_read_as_the_same_layers(
    step: int, start: int, layers: int
) -> None:
    on = tuple(i % step == start for i in range(layers))
    written = write_period("period", "offset")(on, {})
    assert set(written) == {"period", "offset"}
    facts = Facts("hf", written, {}, names="hf")
    found = read_layer_period("period", "offset", (99, 98))(facts, {"n_layers": layers})
    assert found == (on, "period")


@pytest.mark.parametrize("on", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_numbers_of_layers_that_are_written_are_read_as_the_same(on: tuple[int, ...]) -> None:
    layers = tuple(i in on for i in range(4))
    written = write_indices("layers")(layers, {})
    assert written == {"layers": list(on)}
    found = read_layer_numbers("layers")(Facts("hf", written, {}, names="hf"), {"n_layers": 4})
    assert found == (layers, "layers")


LFM3 = ("conv", "sliding_attention", "full_attention")


@pytest.mark.parametrize("other", [each for each in OTHERS if each not in LFM3], ids=repr)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_kind_that_lfm3_has_not_is_refused_by_name(layer: int, other: Any) -> None:
    kinds: list[Any] = [*LFM3, "conv"]
    kinds[layer] = other
    said = f"layer_types: layer {layer} is {other!r}; the layers of this architecture are one of: "
    with pytest.raises(ArchError, match=re.escape(said + ", ".join(LFM3))):
        hyper("lfm3", layer_types=kinds)


def test_each_layers_kind_is_listed_or_counted_or_by_turns() -> None:
    """A list may go on for draft heads behind the model's own layers."""
    windowed, indexed, compressed = (deepseek_v4._OF_RATIO[ratio] for ratio in (0, 4, 128))

    def read(**values: Any) -> tuple[tuple[str, ...], str]:
        return deepseek_v4._read_kinds(Facts("hf", values, {}), {"n_layers": 4})

    kinds = [windowed, indexed, compressed, indexed]
    ratios = [0, 4, 128, 4]
    for more in ((), (0,), (0, 0)):
        rest = [windowed] * len(more)
        assert read(layer_types=[*kinds, *rest]) == (tuple(kinds), "layer_types")
        assert read(compress_ratios=[*ratios, *more]) == (tuple(kinds), "compress_ratios")
    assert read() == ((compressed, compressed, compressed, indexed), "")
    assert read(layer_types=kinds, compress_ratios=[0] * 4)[1] == "layer_types"
    for values, said in (
        ({"layer_types": kinds[:3]}, "layer_types: has 3 entries; expected 4"),
        ({"compress_ratios": ratios[:3]}, "compress_ratios: has 3 entries; expected 4"),
        ({"layer_types": [*kinds[:3], "odd"]}, "layer_types: layer 3 is 'odd'; the layers of"),
        ({"compress_ratios": [0, 8, 0, 0]}, "of this architecture are one of: 0, 4, 128"),
    ):
        with pytest.raises(ArchError, match=re.escape(said)):
            read(**values)


@pytest.mark.parametrize("arch", ["qwen2", "ministral", "olmo3", "exaone4", "modernbert"])
@pytest.mark.parametrize("size", [None, 16])
def test_a_kind_is_read_with_and_without_a_window(arch: str, size: int | None) -> None:
    """Seen red: any word, of any number of layers, was read and equal where no window is on."""
    sizes: dict[str, Any] = {"sliding_window": size, "head_dim": 4, "v_head_dim": 4}
    for known in (["full_attention"] * 4, ["sliding_attention", "full_attention"] * 3):
        assert hyper(arch, **sizes, layer_types=known)["n_layers"] == 4
    for other in ("attention", "", 3, ["full_attention"]):
        said = re.escape(f"layer_types: layer 2 is {other!r}; ")
        with pytest.raises(ArchError, match=said):
            hyper(arch, **sizes, layer_types=["full_attention", "sliding_attention", other, "x"])
    with pytest.raises(ArchError, match="layer_types: has 3 entries; expected 4"):
        hyper(arch, **sizes, layer_types=["full_attention"] * 3)


def test_layers_of_draft_heads_are_none_of_the_models_own() -> None:
    rule = draft_head.main_layers_rule()

    def count(**values: Any) -> Any:
        stated = {f"x.{key}": value for key, value in values.items()}
        return rule.read["gguf"](Facts("gguf", stated, {}, "x"), {})

    key = "x.block_count"
    assert count() is None and count(nextn_predict_layers=1) is None
    for blocks, drafts in ((1, None), (1, 0), (4, None), (4, 0), (4, 1), (4, 3)):
        draft = {} if drafts is None else {"nextn_predict_layers": drafts}
        assert count(block_count=blocks, **draft) == (blocks - (drafts or 0), key)
    for blocks, drafts in ((0, 0), (-1, 0), (1, 1), (4, 4), (4, -1)):
        with pytest.raises(ArchError, match="expected a whole number"):
            count(block_count=blocks, nextn_predict_layers=drafts)


def test_key_heads_of_windowed_layers_are_those_of_the_first_such_layer() -> None:
    def heads(windowed: bool, counts: Any = None, pattern: Any = None) -> Any:
        stated = {
            "x.attention.head_count_kv": counts,
            "x.attention.sliding_window_pattern": pattern,
        }
        values = {key: value for key, value in stated.items() if value is not None}
        return mimo._read_kv_heads_gguf(windowed, Facts("gguf", values, {}, "x"))

    key = "x.attention.head_count_kv"
    assert heads(True) is None and heads(False, None, [True]) is None
    assert heads(True, 4) == heads(True, 4, [True, False]) == (4, key)
    assert heads(False, [2, 4, 8]) == ([2, 4, 8], key)
    for counts, pattern, windowed, alone in (
        ([2, 4, 8], [False, True, True], 4, 2),
        ([2, 4, 8], [True, False, True], 2, 4),
        ([2, 4, 8], [1, 1, 1], 2, 2),
        ([2, 4, 8], [0, 0, 0], 2, 2),
    ):
        assert heads(True, counts, pattern) == (windowed, key)
        assert heads(False, counts, pattern) == (alone, key)
