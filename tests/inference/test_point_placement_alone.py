"""Where capture points are in layers of blocks made by hand, one fact changed at a time."""

from dataclasses import replace
from typing import Any

import pytest

from aprfmt.arch.spec import BlockSpec
from aprfmt.inference import point_placement
from aprfmt.inference.point_placement import ABSENT, BEFORE, HERE, WHOLE, LayerFacts
from aprfmt.inference.points import POINTS

HP: dict[str, Any] = {
    "moe_layers": (0, 1), "mlp_layers": (1, 0), "own_kv_layers": (1, 0), "rope_layers": (1, 0),
    "attn_norm_layers": (1, 0), "delta_layers": (0, 1), "conv_layers": (0, 1),
    "ssm_layers": (0, 1), "lightning_layers": (0, 1), "window_layers": (1, 0),
    "index_layers": (1, 0), "heavy_layers": (0, 1), "ffn_sparsity": (0.5, 0.0),
    "per_layer_size": 0, "qk_norm": True, "temperature_scale": None, "parallel_residual": False,
    "residual_scale": 1.0, "embedding_scale": 1.0, "logit_scale": 1.0, "final_softcap": None,
    "swiglu_limit": None, "q_lora_rank": None, "value_is_key": False, "sparse_rate": 4,
    "heavy_rate": 0,
}  # fmt: skip
PLAIN = BlockSpec()


def layer(number: int = 0, block: BlockSpec = PLAIN, *roles: str, **hp: Any) -> LayerFacts:
    """Return a layer of a block with these roles, its hyperparameters HP but for `hp`."""
    return LayerFacts(block, HP | hp, roles, number)


def block(**fields: Any) -> BlockSpec:
    return replace(PLAIN, **fields)


def at(point: str, facts: LayerFacts) -> str:
    return POINTS[point].where(facts)


MIXERS = {
    "gated_delta": "delta_norm", "kimi_delta": "delta_norm", "short_conv": "conv_gated",
    "mamba": "ssm_gated", "mamba2": "ssm_gated", "lightning": "lightning_gated",
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXERS)
def test_a_mixer_stands_for_attention_in_its_layers(kind: str) -> None:
    made = block(recurrence=kind)
    attention, other = layer(0, made), layer(1, made)
    assert not attention.lacks_attention and other.lacks_attention
    assert point_placement.place_attention_result(attention) == HERE
    assert point_placement.place_attention_result(other) == MIXERS[kind]
    own = point_placement.only_mixers(kind)
    assert own(other) == HERE and own(attention) == ABSENT
    assert point_placement.only_mixers()(other) == ABSENT
    beside = layer(1, block(recurrence=kind, recurrence_place="parallel"))
    assert beside.has_parallel_recurrence and not beside.lacks_attention
    assert not layer(0, beside.block).has_parallel_recurrence
    assert not other.has_parallel_recurrence


def test_the_mixers_points_are_in_layers_of_their_kind() -> None:
    kinds = {
        "delta": ("gated_delta", "kimi_delta"), "delta_qkv": ("gated_delta",),
        "forget": ("kimi_delta",), "lightning_qkv": ("lightning",), "conv_x": ("short_conv",),
        "conv": ("gated_delta", "kimi_delta", "short_conv", "mamba", "mamba2"),
        "ssm_scan": ("mamba", "mamba2"), "ssm_x": ("mamba",),
    }  # fmt: skip
    for point, has in kinds.items():
        for kind in MIXERS:
            found = at(point, layer(1, block(recurrence=kind)))
            assert found == (HERE if kind in has else ABSENT), (point, kind)


def test_a_layer_of_one_half_is_a_mixer_or_an_mlp() -> None:
    one = block(halves="one")
    mlp, mixer = layer(0, one), layer(1, one, moe_layers=(0, 0))
    assert mlp.has_mlp and not mlp.has_mixer and mlp.lacks_attention
    assert mixer.has_mixer and not mixer.has_mlp and not mixer.lacks_attention
    experts = layer(1, one)
    assert experts.has_mlp and not experts.has_dense_mlp and not experts.has_mixer
    assert point_placement.place_attention_result(mlp) == ABSENT
    assert point_placement.place_attention_result(mixer) == HERE
    assert (
        point_placement.place_ffn_norm(mlp) == "attn_norm"
        and point_placement.place_ffn_norm(mixer) == ABSENT
    )
    assert point_placement.place_between_halves(mlp) == ABSENT
    assert (
        point_placement.place_mlp_out(mixer) == ABSENT
        and point_placement.place_mlp_out(mlp) == HERE
    )
    assert point_placement.place_mlp_out(experts) == "moe_out"
    assert layer(0).has_mixer and layer(0).has_mlp
    assert point_placement.only_mixing_layers(lambda place: "x")(mlp) == ABSENT
    assert point_placement.only_mixing_layers(lambda place: "x")(mixer) == "x"
    assert point_placement.only_mlp_layers(lambda place: "x")(mlp) == "x"
    assert point_placement.only_mlp_layers(lambda place: "x")(mixer) == ABSENT
    assert point_placement.only_attention(lambda place: "x")(mixer) == "x"
    assert point_placement.only_attention(lambda place: "x")(mlp) == ABSENT


def test_experts_replace_the_dense_mlp_or_stand_beside_it() -> None:
    instead, beside = layer(1), layer(1, block(experts="parallel"))
    assert instead.moe and not instead.has_dense_mlp and not instead.parallel_experts
    assert beside.has_dense_mlp and beside.parallel_experts
    dense = layer(0, block(experts="parallel"))
    assert dense.has_dense_mlp and not dense.parallel_experts
    assert (
        point_placement.place_mlp_out(instead) == "moe_out"
        and point_placement.place_mlp_out(beside) == HERE
    )
    assert point_placement.place_multiplied(instead) == ABSENT
    assert point_placement.place_multiplied(beside) == HERE
    assert point_placement.place_multiplied(layer(0, block(mlp="plain"))) == "ffn_act"
    assert point_placement.GATED(layer(0)) == HERE and point_placement.GATED(layer(1)) == ABSENT
    assert point_placement.GATED(layer(0, block(mlp="plain"))) == ABSENT
    assert point_placement.ACTIVATED(layer(0)) == HERE
    assert (
        point_placement.ACTIVATED(layer(0, swiglu_limit=7.0))
        == point_placement.ACTIVATED(layer(1))
        == ABSENT
    )
    assert point_placement.SPARSE(layer(0)) == HERE
    assert (
        point_placement.SPARSE(layer(0, ffn_sparsity=(0.0, 0.5)))
        == point_placement.SPARSE(layer(1))
        == ABSENT
    )
    latent = "L1.ffn_latent_down.weight"
    assert point_placement.LATENT(layer(1, PLAIN, latent)) == HERE
    assert (
        point_placement.LATENT(layer(1))
        == point_placement.LATENT(layer(0, PLAIN, latent))
        == ABSENT
    )


def test_roles_are_those_of_the_layer_or_the_whole_model() -> None:
    facts = layer(1, PLAIN, "L1.attn_q.weight", "output.weight")
    assert facts.has_role("attn_q.weight") and not facts.has_role("output.weight")
    assert not replace(facts, layer=0).has_role("attn_q.weight")
    assert replace(facts, layer=WHOLE).has_role("output.weight")


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_product_is_the_point_where_no_bias_is_added(part: str) -> None:
    weight, bias = f"L0.attn_{part}.weight", f"L0.attn_{part}.bias"
    where = point_placement.place_product(part)
    assert where(layer(0)) == where(layer(0, PLAIN, bias)) == ABSENT
    assert where(layer(0, PLAIN, weight)) == part
    assert where(layer(0, PLAIN, weight, bias)) == HERE


def test_queries_are_normed_before_or_after_they_are_rotated() -> None:
    before, after = layer(0), layer(0, block(qk_norm_place="after_rope"))
    assert point_placement.has_norms_before_rope(before) and not before.norms_after_rope
    assert not point_placement.has_norms_before_rope(after) and after.norms_after_rope
    rotated = block(qk_norm_place="rotated")
    assert layer(0, rotated).norms_after_rope and not layer(1, rotated).norms_after_rope
    for none in (layer(0, qk_norm=False), layer(0, after.block, qk_norm=False)):
        assert not point_placement.has_norms_before_rope(none) and not none.norms_after_rope
    assert not point_placement.has_norms_before_rope(layer(0, block(attention="mla")))
    assert point_placement.has_norms_before_rope(
        layer(0, block(attention="compressed"), qk_norm=False)
    )
    where = point_placement.place_rotated("k")
    assert where(layer(0)) == HERE and where(layer(1)) == "k_norm"
    assert where(layer(1, qk_norm=False)) == "k"
    assert where(layer(1, block(attention="mla"))) == HERE
    assert where(layer(0, block(position="learned"))) == "k_norm"


def test_factors_of_queries_and_gates_of_attention() -> None:
    for kind, by_layer in (("none", (0, 0)), ("all", (1, 1)), ("unrotated", (0, 1))):
        for number, has in enumerate(by_layer):
            made = block(temperature=kind)
            assert layer(number, made, temperature_scale=0.1).has_query_factors == bool(has)
            assert not layer(number, made).has_query_factors
    sigmoid, head = block(attention_gate="sigmoid"), block(attention_gate="sigmoid_head")
    assert layer(0, sigmoid).has_attention_gate and not layer(0).has_attention_gate
    assert not layer(0, head).has_attention_gate
    assert layer(0, head, "L0.attn_gate.weight").has_attention_gate
    mixed = replace(sigmoid, recurrence="mamba")
    assert not layer(1, mixed).has_attention_gate and layer(0, mixed).has_attention_gate


@pytest.mark.parametrize(
    ("placement", "reads", "adds", "last"),
    [
        ("pre", True, True, True), ("post", False, False, True),
        ("sandwich", True, False, True), ("after", False, True, False),
    ],
)  # fmt: skip
def test_norms_before_and_after_a_branch(
    placement: str, reads: bool, adds: bool, last: bool
) -> None:
    made = block(placement=placement)
    facts = layer(0, made)
    assert point_placement.has_input_norms(made, HP, 0) == reads and facts.adds_unscaled == adds
    assert facts.has_attention_norm == reads and not layer(1, made).has_attention_norm
    assert facts.norms_after_sum == (placement == "after")
    assert point_placement.has_last_norm(made, ()) == last
    assert point_placement.has_last_norm(made, ("output_norm.weight",))
    assert not point_placement.has_last_norm(replace(made, head="none"), ())
    assert point_placement.place_ffn_norm(facts) == (HERE if reads else "mid")
    parallel = layer(0, made, parallel_residual=True)
    assert point_placement.place_ffn_norm(parallel) == ("attn_norm" if reads else "in")
    two = layer(0, replace(made, parallel_norm="two"), parallel_residual=True)
    assert point_placement.place_ffn_norm(two) == (HERE if reads else "mid")
    assert point_placement.place_between_halves(parallel) == ABSENT
    assert point_placement.place_between_halves(facts) == HERE
    assert point_placement.place_contribution(lambda place: "x")(facts) == ("x" if adds else HERE)
    assert point_placement.place_mixer_sum(facts) == ("attn_out" if adds else HERE)
    assert point_placement.norm_role(made, "post_attention_norm") == "post_attention_norm"


def test_norms_by_mixer_and_factors_of_a_branch() -> None:
    by_mixer = block(placement="by_mixer", recurrence="gated_delta")
    assert [point_placement.norm_placement(by_mixer, HP, n) for n in (0, 1)] == ["post", "pre"]
    assert point_placement.norm_role(by_mixer, "post_attention_norm") == "ffn_norm"
    assert point_placement.norm_role(by_mixer, "post_ffw_norm") == "post_ffw_norm"
    assert not layer(0, residual_scale=0.5).adds_unscaled
    assert not layer(0, block(multipliers="projections")).adds_unscaled
    assert not layer(0, block(residual="norm")).adds_unscaled
    beside = block(recurrence="mamba2", recurrence_place="parallel")
    assert point_placement.place_mixer_sum(layer(1, beside)) == HERE
    assert point_placement.place_mixer_sum(layer(0, beside)) == "attn_out"


def test_what_enters_a_layer() -> None:
    assert point_placement.place_entering(layer(1)) == BEFORE == "out-"
    assert point_placement.place_entering(layer(0)) == "embd"
    assert point_placement.place_entering(layer(0, block(streams="altup"))) == "altup_embd"
    assert point_placement.place_entering(layer(0, block(streams="hyper"))) == "hc_embd"
    join = point_placement._JOIN
    assert point_placement.place_entering(layer(0, PLAIN, join)) == "draft_in"
    assert (
        point_placement.DRAFT(layer(0, PLAIN, join)) == HERE
        and point_placement.DRAFT(layer(0)) == ABSENT
    )
    assert point_placement.place_entering(layer(0, embedding_scale=2.0)) == "embd_scaled"
    assert point_placement.place_entering(layer(0, block(position="learned"))) == "embd_scaled"
    assert point_placement.place_entering(layer(0, PLAIN, "token_types.weight")) == "embd_scaled"
    normed = layer(0, PLAIN, "token_embd_norm.weight", embedding_scale=2.0)
    assert (
        point_placement.place_entering(normed)
        == "embd_norm"
        == point_placement.place_embedded(normed)
    )
    assert at("embd_scaled", layer(WHOLE)) == "embd" and at("embd_scaled", normed) == HERE


def test_logits_before_a_factor_or_a_softcap() -> None:
    assert point_placement.place_raw_logits(layer(WHOLE)) == "logits"
    assert point_placement.place_raw_logits(layer(WHOLE, logit_scale=0.5)) == HERE
    assert point_placement.place_raw_logits(layer(WHOLE, final_softcap=30.0)) == HERE
    assert (
        point_placement.place_raw_logits(layer(WHOLE, block(head="none"), logit_scale=2.0))
        == ABSENT
    )


def test_keys_of_an_earlier_layer_and_values_that_are_keys() -> None:
    where = point_placement.only_own_keys(lambda place: "x")
    assert where(layer(0)) == "x" and where(layer(1)) == ABSENT
    assert point_placement.place_values(layer(1)) == HERE
    assert point_placement.place_values(layer(1, value_is_key=True)) == "k"
    assert (
        point_placement.place_values(layer(0, value_is_key=True)) == HERE
    )  # a window of its own keys
    assert point_placement.place_values(layer(0, block(attention="compressed"))) == "k_rope"


def test_an_indexer_scores_tokens_or_blocks_in_its_layers() -> None:
    """Rows: tokens scored, blocks scored, keys of its own, windows; in layer 0 alone."""
    wanted = {
        ("none", "gqa"): "....", ("half", "mla"): "T.K.", ("interleaved", "mla"): "T.K.",
        ("blocks", "gqa"): ".BK.", ("none", "compressed"): "T..W",
    }  # fmt: skip
    rows = (
        point_placement.TOKENS_SCORED, point_placement.BLOCKS_SCORED,
        point_placement.INDEX_KEYS, point_placement.INDEX_WINDOWS
    )  # fmt: skip
    for (indexer, attention), letters in wanted.items():
        made = block(indexer=indexer, attention=attention)
        found = "".join(
            letter if row(layer(0, made)) == HERE else "."
            for row, letter in zip(rows, "TBKW", strict=True)
        )
        assert found == letters, (indexer, attention)
        assert (point_placement.INDEXED(layer(0, made)) == HERE) == any(c in "TB" for c in letters)
        assert all(row(layer(1, made)) == ABSENT for row in (*rows, point_placement.INDEXED))


def test_points_of_latent_and_compressed_attention() -> None:
    mla, compressed = block(attention="mla"), block(attention="compressed")
    assert point_placement.MLA(layer(0, mla)) == HERE
    assert point_placement.MLA(layer(0)) == point_placement.MLA(layer(0, compressed)) == ABSENT
    assert point_placement.COMPRESSED(layer(0, compressed)) == HERE
    assert point_placement.COMPRESSED(layer(0, mla)) == ABSENT
    for made, has in ((mla, True), (compressed, True), (PLAIN, False)):
        assert point_placement.LATENT_Q(layer(0, made, q_lora_rank=8)) == (HERE if has else ABSENT)
        assert point_placement.LATENT_Q(layer(0, made)) == ABSENT
    assert (
        point_placement.MIXED(layer(0, compressed)) == HERE
        and point_placement.MIXED(layer(0)) == ABSENT
    )
    assert point_placement.MIXED(layer(0, block(attention_gate="sigmoid"))) == HERE
    assert point_placement.WINDOW_KEYS(layer(0, compressed)) == HERE
    assert point_placement.WINDOW_KEYS(layer(0, mla)) == ABSENT
    assert point_placement.WINDOW_KEYS(layer(1, compressed)) == ABSENT
    assert point_placement.WINDOW_KEYS(layer(1, compressed, heavy_rate=1)) == HERE


def test_second_embeddings_and_copies_of_the_stream() -> None:
    assert point_placement.PER_LAYER(layer(0, per_layer_size=8)) == HERE
    assert point_placement.PER_LAYER(layer(0)) == ABSENT
    for kind, copied, hyper in (("one", 0, 0), ("altup", 1, 0), ("hyper", 0, 1)):
        facts = layer(0, block(streams=kind))
        assert (point_placement.COPIED(facts) == HERE) == copied
        assert (point_placement.HYPER(facts) == HERE) == hyper
