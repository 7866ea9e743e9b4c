"""Where a capture point is: which layers of which models have it, and where it equals another."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from aprfmt.arch.draft_head import JOIN
from aprfmt.arch.role_vocabulary import role_key
from aprfmt.arch.spec import BlockSpec
from aprfmt.base.protocols import Value
from aprfmt.inference.layer_heads import compress_rate, values_are_keys

_JOIN = f"{JOIN}.weight"
WHOLE = -1  # the layer of whole-model points


@dataclass(frozen=True)
class LayerFacts:
    """A layer of one model: the facts that decide which points it has."""

    block: BlockSpec
    hp: Mapping[str, Value]
    roles: Collection[str]
    layer: int

    def has_role(self, role: str) -> bool:
        """Return whether the layer has a tensor of a role (`attn_q.bias`)."""
        return role_key(None if self.layer == WHOLE else self.layer, role) in self.roles

    @property
    def mla(self) -> bool:
        """Whether the layer has multi-head latent attention."""
        return self.block.attention == "mla"

    @property
    def compressed(self) -> bool:
        """Whether the layer's attention has one head of keys, which are its values too."""
        return self.block.attention == "compressed"

    @property
    def moe(self) -> bool:
        """Whether the layer has experts."""
        return bool(self.hp["moe_layers"][self.layer])

    @property
    def has_dense_mlp(self) -> bool:
        """Whether the layer has a dense MLP."""
        return self.has_mlp and (not self.moe or self.block.experts == "parallel")

    @property
    def parallel_experts(self) -> bool:
        """Whether the layer has both experts and a dense MLP."""
        return self.moe and self.block.experts == "parallel"

    @property
    def own_kv(self) -> bool:
        """Whether the layer computes keys and values, and does not use an earlier layer's."""
        return bool(self.hp["own_kv_layers"][self.layer])

    @property
    def has_layer_inputs(self) -> bool:
        """Whether each layer gets a slice of a second embedding (gemma3n's per-layer inputs)."""
        return bool(self.hp["per_layer_size"])

    @property
    def has_stream_copies(self) -> bool:
        """Whether the residual stream has several copies (AltUp of gemma3n)."""
        return self.block.streams == "altup"

    @property
    def has_hyper_connections(self) -> bool:
        """Whether hyper-connections mix several residual streams (deepseek_v4)."""
        return self.block.streams == "hyper"

    @property
    def has_mixer(self) -> bool:
        """Whether the layer mixes tokens, by attention or a recurrence: it is not an MLP alone."""
        return has_mixer(self.block, self.hp, self.layer)

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP or experts: it is not a mixer alone."""
        return has_mlp(self.block, self.hp, self.layer)

    @property
    def lacks_attention(self) -> bool:
        """Whether the layer has no attention.

        A recurrence or a convolution mixes its tokens, or nothing does.
        """
        instead = self.block.recurrence_place == "instead"
        return not self.has_mixer or (
            instead and mixer_of_layer(self.block, self.hp, self.layer) != "none"
        )

    @property
    def has_parallel_recurrence(self) -> bool:
        """Whether a recurrence runs parallel to the layer's attention."""
        aside = self.block.recurrence_place == "parallel"
        return aside and mixer_of_layer(self.block, self.hp, self.layer) != "none"

    @property
    def has_attention_gate(self) -> bool:
        """Whether attention's result is multiplied by a gate."""
        if self.block.attention_gate == "sigmoid_head" and not self.has_role("attn_gate.weight"):
            return False
        return self.block.attention_gate != "none" and not self.lacks_attention

    @property
    def rotates(self) -> bool:
        """Whether the layer rotates q and k by rope."""
        return self.block.position == "rope" and bool(self.hp["rope_layers"][self.layer])

    @property
    def norms_after_rope(self) -> bool:
        """Whether the layer norms q and k after rope."""
        place = self.block.qk_norm_place
        return bool(self.hp["qk_norm"]) and (
            place == "after_rope" or (place == "rotated" and self.rotates)
        )

    @property
    def has_query_factors(self) -> bool:
        """Whether the layer's queries get a factor that grows with the position."""
        some = self.block.temperature == "unrotated" and self.rotates
        return (
            self.block.temperature != "none"
            and self.hp["temperature_scale"] is not None
            and not some
        )

    @property
    def has_parallel_residual(self) -> bool:
        """Whether attention and MLP read the same norm and are added to the stream together."""
        return bool(self.hp["parallel_residual"])

    @property
    def has_attention_norm(self) -> bool:
        """Whether attention reads a norm of the residual stream."""
        before = has_input_norms(self.block, self.hp, self.layer)
        return before and bool(self.hp["attn_norm_layers"][self.layer])

    @property
    def norms_after_sum(self) -> bool:
        """Whether the norms come after the sums with the residual stream."""
        return self.block.placement == "after"

    @property
    def adds_unscaled(self) -> bool:
        """Whether a branch's output is added to the stream without norm or factor."""
        return adds_unscaled(self.block, self.hp, self.layer)


# What mixes tokens in place of attention -> the hyperparameter that says in which layers.
RECURRENCES: Mapping[str, str] = {
    "gated_delta": "delta_layers", "kimi_delta": "delta_layers", "short_conv": "conv_layers",
    "mamba": "ssm_layers", "mamba2": "ssm_layers", "lightning": "lightning_layers",
}  # fmt: skip


def mixer_of_layer(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> str:
    """Return the key of RECURRENCES that mixes a layer's tokens.

    "none" if no recurrence does: the layer has attention alone, or no mixer.
    """
    layers = RECURRENCES.get(block.recurrence)
    return block.recurrence if layers is not None and hp[layers][layer] else "none"


def has_mlp(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Return whether a layer has an MLP or experts."""
    return block.halves == "both" or bool(hp["mlp_layers"][layer] or hp["moe_layers"][layer])


def has_mixer(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Return whether a layer mixes tokens, by attention or a recurrence."""
    return block.halves == "both" or not has_mlp(block, hp, layer)


def norm_placement(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> str:
    """Return where a layer's norms are: pre, post, sandwich or after.

    These are: before a branch, after its output, both, and after the sum with the stream.
    """
    if block.placement != "by_mixer":
        return block.placement
    return "post" if mixer_of_layer(block, hp, layer) == "none" else "pre"


def adds_unscaled(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Return whether a layer's branch outputs are added to the stream without norm or factor."""
    plain = block.multipliers == "none" and float(hp["residual_scale"]) == 1
    plain = plain and block.residual == "stream"
    return norm_placement(block, hp, layer) in ("pre", "after") and plain


def has_input_norms(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Return whether attention and the MLP read a norm of the stream."""
    return norm_placement(block, hp, layer) in ("pre", "sandwich")


def norm_role(block: BlockSpec, norm: str) -> str:
    """Return the role of the norm after attention or the MLP; `norm` is its usual role.

    With `by_mixer` placement the norm between attention and MLP has the role ffn_norm, whether it
    is before or after the sum.
    """
    between = block.placement == "by_mixer" and norm == "post_attention_norm"
    return "ffn_norm" if between else norm


def has_last_norm(block: BlockSpec, roles: Collection[str]) -> bool:
    """Return whether a norm follows the last layer.

    `roles` are the role keys that a file stores. Models with a head always have it, unless their
    sums are normalised.
    """
    return "output_norm.weight" in roles or (block.head == "logits" and block.placement != "after")


# HERE: computed and captured. ABSENT: the architecture has no such tensor. Any other string is
# the name of the point it equals (of the same layer, or a whole-model one; "out-" is the layer
# before).
HERE, ABSENT, BEFORE = "", "-", "out-"
PlaceOf = Callable[[LayerFacts], str]


def here_if(condition: Callable[[LayerFacts], bool], otherwise: str = ABSENT) -> PlaceOf:
    """Return a function of LayerFacts: HERE where the condition holds, else `otherwise`."""
    return lambda place: HERE if condition(place) else otherwise


def place_product(part: str) -> PlaceOf:
    """Return the function that says whether a layer has q_mm, k_mm or v_mm (`part`: q, k or v).

    The function returns HERE, ABSENT, or the point that the product equals: without a bias it
    equals q, k or v.
    """

    def where(place: LayerFacts) -> str:
        """Return HERE where the layer has the point, ABSENT, or q, k or v, which it equals.

        It equals that point (`part`) where no bias follows the product.
        """
        if not place.has_role(f"attn_{part}.weight"):
            return ABSENT
        return HERE if place.has_role(f"attn_{part}.bias") else part

    return where


def has_norms_before_rope(place: LayerFacts) -> bool:
    """Return whether q and k are normed before rope."""
    before = place.block.qk_norm_place == "before_rope"
    if place.compressed:
        return True
    return bool(place.hp["qk_norm"]) and before and not place.mla


def place_rotated(part: str) -> PlaceOf:
    """Return the function that says whether a layer has q_rope or k_rope (`part`: q or k).

    The function returns HERE, or without rotation the point before it, which it equals.
    """

    def where(place: LayerFacts) -> str:
        """Return HERE, or the name of the point that it equals where rope does not rotate."""
        if place.rotates or place.mla:
            return HERE
        return f"{part}_norm" if has_norms_before_rope(place) else part

    return where


def place_contribution(otherwise: Callable[[LayerFacts], str]) -> PlaceOf:
    """Return the function that says whether a layer has the point of what a branch adds.

    The branch is attention or the MLP, and the point what it adds to the residual stream. The
    function returns HERE if a norm or a factor is applied before, else what `otherwise` returns.
    """
    return lambda place: HERE if not place.adds_unscaled else otherwise(place)


def changes_embedding(place: LayerFacts) -> bool:
    """Return whether the embedding is scaled, or has positions or token types added."""
    learned = place.block.position == "learned" or "token_types.weight" in place.roles
    return learned or float(place.hp["embedding_scale"]) != 1


def place_embedded(place: LayerFacts) -> str:
    """Return the name of the point that is the input of layer 0."""
    if "token_embd_norm.weight" in place.roles:
        return "embd_norm"
    return "embd_scaled" if changes_embedding(place) else "embd"


def place_entering(place: LayerFacts) -> str:
    """Return the name of the point that the stream entering a layer equals.

    BEFORE is the output of the layer before.
    """
    if place.layer > 0:
        return BEFORE
    if place.has_stream_copies:
        return "altup_embd"
    if place.has_hyper_connections:
        return "hc_embd"
    return "draft_in" if _JOIN in place.roles else place_embedded(place)


def place_multiplied(place: LayerFacts) -> str:
    """Return where ffn_mul, the product of gate and up, is captured: HERE or as ffn_act.

    ABSENT in a layer without a dense MLP.
    """
    if not place.has_dense_mlp:
        return ABSENT
    return HERE if place.block.mlp == "gated" else "ffn_act"


def place_mlp_out(place: LayerFacts) -> str:
    """Return where an MLP's output is captured: HERE, or as moe_out where experts replace it.

    ABSENT in a layer without either.
    """
    if not place.has_mlp:
        return ABSENT
    return HERE if place.has_dense_mlp else "moe_out"


def place_between_halves(place: LayerFacts) -> str:
    """Return HERE if the stream between attention and MLP is captured in a layer, else ABSENT.

    ABSENT where both read the same stream, or the layer has only one of them.
    """
    return ABSENT if place.has_parallel_residual or place.block.halves == "one" else HERE


def place_ffn_norm(place: LayerFacts) -> str:
    """Return HERE for a norm before the MLP, else the name of the point that the MLP reads.

    ABSENT in a layer that has a mixer only.
    """
    if place.block.halves == "one":
        return "attn_norm" if place.has_mlp else ABSENT
    if place.has_parallel_residual and place.block.parallel_norm == "one":
        return "attn_norm" if has_input_norms(place.block, place.hp, place.layer) else "in"
    return HERE if has_input_norms(place.block, place.hp, place.layer) else "mid"


def place_raw_logits(place: LayerFacts) -> str:
    """Return HERE if logits get a factor or a softcap, else "logits"; ABSENT without a head."""
    if place.block.head == "none":
        return ABSENT
    scaled = float(place.hp["logit_scale"]) != 1 or place.hp["final_softcap"] is not None
    return HERE if scaled else "logits"


DRAFT = here_if(lambda place: _JOIN in place.roles)
GATED = here_if(lambda place: place.has_dense_mlp and place.block.mlp == "gated")
DENSE = here_if(lambda place: place.has_dense_mlp)
ACTIVATED = here_if(lambda place: place.has_dense_mlp and place.hp["swiglu_limit"] is None)
PARALLEL = here_if(lambda place: place.parallel_experts)
PER_LAYER = here_if(lambda place: place.has_layer_inputs)
COPIED = here_if(lambda place: place.has_stream_copies)
SPARSE = here_if(lambda place: place.has_dense_mlp and place.hp["ffn_sparsity"][place.layer] > 0)
MOE = here_if(lambda place: place.moe)
LATENT_Q = here_if(
    lambda place: (place.mla or place.compressed) and place.hp["q_lora_rank"] is not None
)
MLA = here_if(lambda place: place.mla)
INDEXED = here_if(
    lambda place: (
        (place.block.indexer != "none" or place.compressed)
        and bool(place.hp["index_layers"][place.layer])
    )
)
INDEX_KEYS = here_if(
    lambda place: place.block.indexer != "none" and bool(place.hp["index_layers"][place.layer])
)
TOKENS_SCORED = here_if(
    lambda place: (
        place.block.indexer != "blocks"
        and (place.block.indexer != "none" or place.compressed)
        and bool(place.hp["index_layers"][place.layer])
    )
)
BLOCKS_SCORED = here_if(
    lambda place: place.block.indexer == "blocks" and bool(place.hp["index_layers"][place.layer])
)
INDEX_WINDOWS = here_if(
    lambda place: place.compressed and bool(place.hp["index_layers"][place.layer])
)
WINDOW_KEYS = here_if(lambda place: place.compressed and compress_rate(place.hp, place.layer) > 0)
COMPRESSED = here_if(lambda place: place.compressed)
HYPER = here_if(lambda place: place.has_hyper_connections)
LATENT = here_if(lambda place: place.moe and place.has_role("ffn_latent_down.weight"))


def only_attention(where: PlaceOf) -> PlaceOf:
    """Return a function like `where`, which returns ABSENT for layers without attention."""
    return lambda place: ABSENT if place.lacks_attention else where(place)


def only_own_keys(where: PlaceOf) -> PlaceOf:
    """Return a function like `where`, which returns ABSENT for layers without keys.

    Such a layer uses the keys and values of an earlier layer.
    """
    return lambda place: where(place) if place.own_kv else ABSENT


def place_values(place: LayerFacts) -> str:
    """Return HERE for a layer's values, or the name of the keys that the model uses as values."""
    if place.compressed:
        return "k_rope"
    return "k" if values_are_keys(place.hp, place.layer) else HERE


def only_mixers(*kinds: str) -> PlaceOf:
    """Return the function that says that only layers with one of these mixers have a point.

    `kinds` are keys of RECURRENCES. The function returns HERE for these layers, ABSENT for others.
    """
    return here_if(lambda place: mixer_of_layer(place.block, place.hp, place.layer) in kinds)


def place_attention_result(place: LayerFacts) -> str:
    """Return where attention's result before the output product is captured: mostly HERE.

    It is ABSENT without a mixer. In layers with another mixer it is the name of that mixer's last
    point.
    """
    if not place.has_mixer:
        return ABSENT
    if not place.lacks_attention:
        return HERE
    results = {
        "gated_delta": "delta_norm", "kimi_delta": "delta_norm", "short_conv": "conv_gated",
        "mamba": "ssm_gated", "mamba2": "ssm_gated", "lightning": "lightning_gated",
    }  # fmt: skip
    return results[mixer_of_layer(place.block, place.hp, place.layer)]


def only_mixing_layers(where: PlaceOf) -> PlaceOf:
    """Return a function like `where`, which returns ABSENT for layers that are an MLP alone."""
    return lambda place: where(place) if place.has_mixer else ABSENT


def only_mlp_layers(where: PlaceOf) -> PlaceOf:
    """Return a function like `where`, which returns ABSENT for layers without an MLP."""
    return lambda place: where(place) if place.has_mlp else ABSENT


def place_mixer_sum(place: LayerFacts) -> str:
    """Return HERE if the sum that a layer's mixers add is a separate point, else attn_out.

    It equals attn_out where attention or a recurrence is added alone, without norm or factor.
    """
    return HERE if place.has_parallel_recurrence or not place.adds_unscaled else "attn_out"


DELTA = only_mixers("gated_delta", "kimi_delta")
GATED_DELTA = only_mixers("gated_delta")
KIMI_DELTA = only_mixers("kimi_delta")
LIGHTNING = only_mixers("lightning")
SHORT_CONV = only_mixers("short_conv")
CONV = only_mixers("gated_delta", "kimi_delta", "short_conv", "mamba", "mamba2")
SSM = only_mixers("mamba", "mamba2")
MAMBA = only_mixers("mamba")
GATE = here_if(lambda place: place.has_attention_gate)
MIXED = here_if(lambda place: place.has_attention_gate or place.compressed)
