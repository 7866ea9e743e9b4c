"""Where a capture point is: which layers of which models have it, and where it equals another."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from aprfmt.arch.draft_head import JOIN
from aprfmt.arch.role_vocabulary import role_key
from aprfmt.arch.spec import BlockSpec
from aprfmt.base.protocols import Value
from aprfmt.inference.layer_heads import values_are_keys

_JOIN = f"{JOIN}.weight"
WHOLE = -1  # the layer of whole-model points


@dataclass(frozen=True)
class LayerFacts:
    """A layer of one model: the facts that decide which points it has."""

    block: BlockSpec
    hp: Mapping[str, Value]
    roles: Collection[str]
    layer: int

    def has(self, role: str) -> bool:
        """Say whether the layer has a tensor (`attn_q.bias`)."""
        return role_key(None if self.layer == WHOLE else self.layer, role) in self.roles

    @property
    def mla(self) -> bool:
        """Multi-head latent attention."""
        return self.block.attention == "mla"

    @property
    def moe(self) -> bool:
        """The layer has experts."""
        return bool(self.hp["moe_layers"][self.layer])

    @property
    def dense(self) -> bool:
        """The layer has a dense MLP."""
        return self.feeds and (not self.moe or self.block.experts == "parallel")

    @property
    def parallel_experts(self) -> bool:
        """The layer has experts besides a dense MLP."""
        return self.moe and self.block.experts == "parallel"

    @property
    def own_kv(self) -> bool:
        """The layer computes keys and values, and does not take an earlier layer's."""
        return bool(self.hp["own_kv_layers"][self.layer])

    @property
    def per_layer(self) -> bool:
        """Every layer has a part of an embedding of its own."""
        return bool(self.hp["per_layer_size"])

    @property
    def copied(self) -> bool:
        """The stream has several copies."""
        return self.block.streams == "altup"

    @property
    def mixes(self) -> bool:
        """The layer mixes tokens: it is not an MLP alone."""
        return has_mixer(self.block, self.hp, self.layer)

    @property
    def feeds(self) -> bool:
        """The layer has an MLP or experts: it is not a mixer alone."""
        return has_mlp(self.block, self.hp, self.layer)

    @property
    def recurrent(self) -> bool:
        """The layer has no attention: a recurrence or a convolution mixes its tokens, or none."""
        instead = self.block.recurrence_place == "instead"
        return not self.mixes or (
            instead and mixer_of_layer(self.block, self.hp, self.layer) != "none"
        )

    @property
    def beside(self) -> bool:
        """A recurrence mixes the layer's tokens at the side of attention."""
        aside = self.block.recurrence_place == "beside"
        return aside and mixer_of_layer(self.block, self.hp, self.layer) != "none"

    @property
    def gated(self) -> bool:
        """What attention gives is multiplied by a gate."""
        if self.block.attention_gate == "sigmoid_head" and not self.has("attn_gate.weight"):
            return False
        return self.block.attention_gate != "none" and not self.recurrent

    @property
    def rotates(self) -> bool:
        """The layer rotates q and k."""
        return self.block.position == "rope" and bool(self.hp["rope_layers"][self.layer])

    @property
    def normed_late(self) -> bool:
        """The layer's q/k-norms follow rope."""
        place = self.block.qk_norm_place
        return bool(self.hp["qk_norm"]) and (
            place == "after_rope" or (place == "rotated" and self.rotates)
        )

    @property
    def tempered(self) -> bool:
        """The layer's queries get a factor that grows with the position."""
        some = self.block.temperature == "unrotated" and self.rotates
        return (
            self.block.temperature != "none"
            and self.hp["temperature_scale"] is not None
            and not some
        )

    @property
    def parallel(self) -> bool:
        """Attention and MLP read the same norm."""
        return bool(self.hp["parallel_residual"])

    @property
    def normed(self) -> bool:
        """Attention reads a norm of the stream."""
        before = has_input_norms(self.block, self.hp, self.layer)
        return before and bool(self.hp["attn_norm_layers"][self.layer])

    @property
    def summed(self) -> bool:
        """The sums with the stream are normalised."""
        return self.block.placement == "after"

    @property
    def unscaled(self) -> bool:
        """A block's output is added to the stream without a factor."""
        return adds_unscaled(self.block, self.hp, self.layer)


# What mixes tokens in place of attention -> the hyperparameter that says in which layers.
RECURRENCES: Mapping[str, str] = {
    "gated_delta": "delta_layers", "short_conv": "conv_layers",
    "mamba": "ssm_layers", "mamba2": "ssm_layers", "lightning": "lightning_layers",
}  # fmt: skip


def mixer_of_layer(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> str:
    """Return what mixes a layer's tokens, but attention; "none": attention alone, or nothing."""
    layers = RECURRENCES.get(block.recurrence)
    return block.recurrence if layers is not None and hp[layers][layer] else "none"


def has_mlp(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Say whether a layer has an MLP or experts."""
    return block.halves == "both" or bool(hp["mlp_layers"][layer] or hp["moe_layers"][layer])


def has_mixer(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Say whether a layer mixes tokens, by attention or anything else."""
    return block.halves == "both" or not has_mlp(block, hp, layer)


def placement(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> str:
    """Return where a layer's norms stand: pre, post, sandwich or after."""
    if block.placement != "by_mixer":
        return block.placement
    return "post" if mixer_of_layer(block, hp, layer) == "none" else "pre"


def adds_unscaled(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Say whether a block's output is added to the stream without a factor."""
    plain = block.multipliers == "none" and float(hp["residual_scale"]) == 1
    plain = plain and block.residual == "stream"
    return placement(block, hp, layer) in ("pre", "after") and plain


def has_input_norms(block: BlockSpec, hp: Mapping[str, Value], layer: int) -> bool:
    """Say whether attention and the MLP read a norm of the stream."""
    return placement(block, hp, layer) in ("pre", "sandwich")


def norm_role(block: BlockSpec, norm: str) -> str:
    """Return the role of a norm behind attention or the MLP.

    Of `by_mixer` the norm between a layer's halves is one role, wherever it stands.
    """
    between = block.placement == "by_mixer" and norm == "post_attention_norm"
    return "ffn_norm" if between else norm


def has_last_norm(block: BlockSpec, roles: Collection[str]) -> bool:
    """Say whether a norm follows the last layer: with a head always, unless sums are normalised."""
    return "output_norm.weight" in roles or (block.head == "logits" and block.placement != "after")


# HERE: computed and captured. ABSENT: the architecture has no such tensor. Any other string is
# the name of the point it equals (of the same layer, or a whole-model one; "out-" is the layer
# before).
HERE, ABSENT, BEFORE = "", "-", "out-"
PlaceOf = Callable[[LayerFacts], str]


def here_if(condition: Callable[[LayerFacts], bool], otherwise: str = ABSENT) -> PlaceOf:
    """Return HERE where a condition holds, else another placing."""
    return lambda place: HERE if condition(place) else otherwise


def place_product(part: str) -> PlaceOf:
    """Return the placing of q_mm, k_mm or v_mm: it differs from q, k or v only by the bias."""

    def where(place: LayerFacts) -> str:
        if not place.has(f"attn_{part}.weight"):
            return ABSENT
        return HERE if place.has(f"attn_{part}.bias") else part

    return where


def is_normed(place: LayerFacts) -> bool:
    """Say whether q and k are normed before rope."""
    before = place.block.qk_norm_place == "before_rope"
    return bool(place.hp["qk_norm"]) and before and not place.mla


def place_rotated(part: str) -> PlaceOf:
    """Return the placing of q_rope or k_rope; without rotation it equals the point before it."""

    def where(place: LayerFacts) -> str:
        if place.rotates or place.mla:
            return HERE
        return f"{part}_norm" if is_normed(place) else part

    return where


def place_contribution(otherwise: Callable[[LayerFacts], str]) -> PlaceOf:
    """Return the placing of what a half of a block adds to the stream."""
    return lambda place: HERE if not place.unscaled else otherwise(place)


def is_scaled(place: LayerFacts) -> bool:
    """Say whether the embedding is scaled, or has positions or token types added."""
    learned = place.block.position == "learned" or "token_types.weight" in place.roles
    return learned or float(place.hp["embedding_scale"]) != 1


def place_embedded(place: LayerFacts) -> str:
    """Return the point that is the input of layer 0."""
    if "token_embd_norm.weight" in place.roles:
        return "embd_norm"
    return "embd_scaled" if is_scaled(place) else "embd"


def place_entering(place: LayerFacts) -> str:
    """Return what the stream that enters a layer equals."""
    if place.layer > 0:
        return BEFORE
    if place.copied:
        return "altup_embd"
    return "draft_in" if _JOIN in place.roles else place_embedded(place)


def place_multiplied(place: LayerFacts) -> str:
    """Return the placing of the product of gate and up."""
    if not place.dense:
        return ABSENT
    return HERE if place.block.mlp == "gated" else "ffn_act"


def place_mlp_out(place: LayerFacts) -> str:
    """Return the placing of an MLP's output; of experts in its place it is their sum."""
    if not place.feeds:
        return ABSENT
    return HERE if place.dense else "moe_out"


def place_between_halves(place: LayerFacts) -> str:
    """Return the placing of the stream between a layer's two halves."""
    return ABSENT if place.parallel or place.block.halves == "one" else HERE


def place_ffn_norm(place: LayerFacts) -> str:
    """Return the placing of the norm before the MLP."""
    if place.block.halves == "one":
        return "attn_norm" if place.feeds else ABSENT
    if place.parallel and place.block.parallel_norm == "one":
        return "attn_norm" if has_input_norms(place.block, place.hp, place.layer) else "in"
    return HERE if has_input_norms(place.block, place.hp, place.layer) else "mid"


def place_raw_logits(place: LayerFacts) -> str:
    """Return the placing of logits before their factor and softcap."""
    if place.block.head == "none":
        return ABSENT
    scaled = float(place.hp["logit_scale"]) != 1 or place.hp["final_softcap"] is not None
    return HERE if scaled else "logits"


DRAFT = here_if(lambda place: _JOIN in place.roles)
GATED = here_if(lambda place: place.dense and place.block.mlp == "gated")
DENSE = here_if(lambda place: place.dense)
PARALLEL = here_if(lambda place: place.parallel_experts)
PER_LAYER = here_if(lambda place: place.per_layer)
COPIED = here_if(lambda place: place.copied)
SPARSE = here_if(lambda place: place.dense and place.hp["ffn_sparsity"][place.layer] > 0)
MOE = here_if(lambda place: place.moe)
LATENT_Q = here_if(lambda place: place.mla and place.hp["q_lora_rank"] is not None)
MLA = here_if(lambda place: place.mla)
INDEXED = here_if(
    lambda place: place.block.indexer != "none" and bool(place.hp["index_layers"][place.layer])
)
LATENT = here_if(lambda place: place.moe and place.has("ffn_latent_down.weight"))


def only_attention(where: PlaceOf) -> PlaceOf:
    """Return the placing of a point that layers with a recurrence do not have."""
    return lambda place: ABSENT if place.recurrent else where(place)


def only_own_keys(where: PlaceOf) -> PlaceOf:
    """Return the placing of a point that layers with an earlier layer's keys do not have."""
    return lambda place: where(place) if place.own_kv else ABSENT


def place_values(place: LayerFacts) -> str:
    """Return the placing of the values: a model may take its keys for them."""
    return "k" if values_are_keys(place.hp, place.layer) else HERE


def only_mixers(*kinds: str) -> PlaceOf:
    """Return the placing of a point of the layers that these mix, in place of attention."""
    return here_if(lambda place: mixer_of_layer(place.block, place.hp, place.layer) in kinds)


def place_attention_result(place: LayerFacts) -> str:
    """Return the placing of attention's result: elsewhere it is what the mixer gives."""
    if not place.mixes:
        return ABSENT
    if not place.recurrent:
        return HERE
    results = {
        "gated_delta": "delta_norm", "short_conv": "conv_gated",
        "mamba": "ssm_gated", "mamba2": "ssm_gated", "lightning": "lightning_gated",
    }  # fmt: skip
    return results[mixer_of_layer(place.block, place.hp, place.layer)]


def only_mixing_layers(where: PlaceOf) -> PlaceOf:
    """Return the placing of a point that layers with nothing but an MLP do not have."""
    return lambda place: where(place) if place.mixes else ABSENT


def only_mlp_layers(where: PlaceOf) -> PlaceOf:
    """Return the placing of a point that layers without an MLP do not have."""
    return lambda place: where(place) if place.feeds else ABSENT


def place_mixer_sum(place: LayerFacts) -> str:
    """Return the placing of what a mixer, or attention and one beside it, adds to the stream."""
    return HERE if place.beside or not place.unscaled else "attn_out"


DELTA = only_mixers("gated_delta")
LIGHTNING = only_mixers("lightning")
SHORT_CONV = only_mixers("short_conv")
CONV = only_mixers("gated_delta", "short_conv", "mamba", "mamba2")
SSM = only_mixers("mamba", "mamba2")
MAMBA = only_mixers("mamba")
GATE = here_if(lambda place: place.gated)
