"""The types of the tables that describe an architecture; their rows are in one file per family.

Three independent tables make an `ArchSpec`:

- `tensors`: the roles with their logical shapes, independent of any file's names;
- `bindings`: per naming style ("hf", "gguf"), which stored names have which roles, and the
  layout steps between the stored and the logical tensor;
- `hyper`: per hyperparameter, the keys each style uses, and the default that applies where a
  style leaves it out (defaults exist nowhere else; the value keeps the origin "default").

`block` says which operations the forward pass performs, each field out of a
fixed set.

A *logical* tensor is the weight as Hugging Face's modules use it: [out, in] matrices, split
q/k/v and gate/up, split-half rope order (unless the source itself is interleaved), experts
stacked as [n_experts, out, in], gemma norms without the +1.

Role = ggml base name plus `.weight` or `.bias` (`attn_q.weight`); per-layer instances are keyed
`L3.attn_q.weight`, whole-model ones `token_embd.weight`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args, get_type_hints

from aprfmt.arch.aliases import CALLED
from aprfmt.arch.role_vocabulary import F32_ROLES as F32_ROLES
from aprfmt.arch.role_vocabulary import HYPER_NAMES as HYPER_NAMES
from aprfmt.arch.role_vocabulary import SPECIAL_NAMES as SPECIAL_NAMES
from aprfmt.arch.role_vocabulary import role_key as role_key
from aprfmt.arch.role_vocabulary import split_key as split_key
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Which operations a decoder block performs: the comment above each field says what it means.

    In parentheses stand architectures that have the value. `check` checks the values.
    """

    # Kind of the norms on the residual stream.
    norm: Literal["rms", "layer"] = "rms"
    # Added to every weight of these norms: 1 in gemma, whose files hold the weight less 1.
    norm_offset: Literal[0, 1] = 0
    # Where a norm is rounded to the activations' dtype: before its weight (llama, mistral, mixtral,
    # qwen, phi3, granite, smollm3, deepseek) or after it (olmo2, gpt-oss, cohere, gemma).
    norm_cast: Literal["before_weight", "after_weight"] = "before_weight"
    # pre: a norm before attention and before the MLP (llama). post: after each, none before
    # (olmo2). sandwich: both (gemma2, gemma3). after: of each sum, and the stream continues from it
    # (bert). by_mixer: pre in layers that a recurrence mixes, post in those with attention
    # (olmo_hybrid).
    placement: Literal["pre", "post", "sandwich", "after", "by_mixer"] = "pre"
    # Norm of queries and keys. head: RMS over head_dim, one weight for all heads. width: RMS over
    # the whole projection, before it is split. head_layer: LayerNorm over head_dim (cohere and
    # stablelm: a weight row for each head and no bias; phi2: one weight and bias). plain: RMS over
    # head_dim without a weight (llama4).
    qk_norm: Literal["none", "head", "width", "head_layer", "plain"] = "none"
    # Where attention and MLP run in parallel: both read one norm, or one each (falcon-40b).
    parallel_norm: Literal["one", "two"] = "one"
    # Before rope, after it (hunyuan), or after it in the layers that rotate only (rotated: llama4).
    qk_norm_place: Literal["before_rope", "after_rope", "rotated"] = "before_rope"
    # gqa: grouped queries. mla: latent keys and values. compressed: one head of keys that are the
    # values, and keys that stand for windows of tokens (deepseek_v4).
    attention: Literal["gqa", "mla", "compressed"] = "gqa"
    # Attention reads the `index_topk` keys that score best by heads of the indexer's own. Their
    # rotated elements are paired by halves (half: deepseek v3.2) or as neighbours (interleaved:
    # glm-5). blocks: it chooses blocks of keys for each key head (minimax-m3).
    indexer: Literal["none", "half", "interleaved", "blocks"] = "none"
    # A learned logit of each head takes part in the softmax and is dropped after it (gpt-oss).
    sinks: bool = False
    # rope, learned rows that are added to the embedding, or none.
    position: Literal["rope", "learned", "none"] = "rope"
    # counted: a padding token has a position like any other. skipped: it has the row before the
    # first position's, and later tokens do not count it (roberta, mpnet).
    padding: Literal["counted", "skipped"] = "counted"
    # Added to the attention scores. alibi: a slope of each head times the distance. alibi_keys: the
    # slope times the key's position, both in bfloat16, before the scores are scaled (falcon-rw).
    # relative: a row of a table by the distance (mpnet).
    score_bias: Literal["none", "alibi", "alibi_keys", "relative"] = "none"
    # To earlier positions and itself, or to all positions.
    attends: Literal["causal", "all"] = "causal"
    # Layers of `window_layers` reach back a number of positions (sliding), or to the last multiple
    # of it (chunk: llama4).
    window: Literal["sliding", "chunk"] = "sliding"
    # logits: a matrix. dense: a matrix, the activation and the last norm before it (causal bert).
    # none: an encoder.
    head: Literal["logits", "dense", "none"] = "logits"
    # A factor on queries, by position: in all layers (ministral3), or in those without rope, the
    # position counted from 1 (unrotated: llama4).
    temperature: Literal["none", "all", "unrotated"] = "none"
    # Gated or plain; experts replace it in layers of `moe_layers`.
    mlp: Literal["gated", "plain"] = "gated"
    # An expert's weight multiplies its output, or its input (llama4).
    expert_weights: Literal["output", "input"] = "output"
    # The one that the hyperparameters name, or xielu, whose numbers are in every layer (apertus).
    activation: Literal["named", "xielu"] = "named"
    # An expert that every token uses: added (plain), or times its own gate's sigmoid (gated).
    shared_expert: Literal["none", "plain", "gated"] = "none"
    # The output of attention times a projection's sigmoid: element by element, or one number for
    # each head (sigmoid_head: lfm3).
    attention_gate: Literal["none", "sigmoid", "sigmoid_head"] = "none"
    # plain: RMS over each head of the values, without a weight (gemma3n, gemma4).
    value_norm: Literal["none", "plain"] = "none"
    # instead: in the MLP's place. parallel: they read the stream through a norm and router of their
    # own, and are added to the MLP (gemma4).
    experts: Literal["instead", "parallel"] = "instead"
    # one: the residual stream. altup: `altup_streams` copies, of which the first goes through the
    # layer, with a short cut of low rank (gemma3n). hyper: `hc_streams` streams that are collapsed
    # to one before attention and before the MLP, and mixed after it (deepseek_v4).
    streams: Literal["one", "altup", "hyper"] = "one"
    # A number multiplies the stream after every layer (gemma4).
    layer_scale: bool = False
    # The output of attention and MLP is added to the stream, or, both times a factor, to the normed
    # stream (norm: minimax).
    residual: Literal["stream", "norm"] = "stream"
    # What mixes tokens where attention does not. In `delta_layers`: gated_delta, or kimi_delta,
    # whose state decays by channel (kimi_linear). In `conv_layers`: short_conv (lfm2). In
    # `ssm_layers`: mamba, with a rate for each number of the state, or mamba2, with one for each
    # head. In `lightning_layers`: lightning, linear attention that decays by head (minimax).
    recurrence: Literal[
        "none", "gated_delta", "short_conv", "mamba", "mamba2", "lightning", "kimi_delta"
    ] = "none"
    # Instead of attention, or in parallel, and the outputs are added (parallel: falcon_h1).
    recurrence_place: Literal["instead", "parallel"] = "instead"
    # both: a layer is a mixer and an MLP, each after a norm. one: it is one of the two, after its
    # only norm (mamba, nemotron_h).
    halves: Literal["both", "one"] = "both"
    # Norms on a mamba's time step, B and C: RMS without a weight (plain: falcon_mamba) or with one
    # (weighted: jamba).
    ssm_norms: Literal["none", "plain", "weighted"] = "none"
    # projections: inputs and outputs of the projections have factors (falcon_h1).
    multipliers: Literal["none", "projections"] = "none"

    # What follows is rounding, which shows in BF16 and F16 only.
    # float32: the scores are cast to float32, the probabilities back (most). input: the maximum is
    # subtracted in the scores' dtype before that cast (gpt-oss). none: no cast, torch's softmax of
    # 16-bit scores adds a row in float32 too, but in another order (bert).
    softmax_cast: Literal["float32", "input", "none"] = "float32"
    # table: cos and sin are rounded, and every product (most). table_and_result: cos and sin, then
    # the float32 result (cohere). result: the float32 result only (olmo2, olmo3, ernie, deepseek
    # v2).
    rope_cast: Literal["table", "table_and_result", "result"] = "table"
    # weights: the logits and the experts' weights are rounded (qwen2-moe, qwen3-moe, gpt-oss).
    # logits: the logits only (mixtral). none: nothing, the product is float32 too (deepseek,
    # hunyuan). product: the weights, of a float32 product (ernie).
    router_cast: Literal["weights", "logits", "none", "product"] = "weights"
    # Rounded is the result of gelu_tanh, or each step inside it (steps: gpt2, phi2).
    activation_cast: Literal["result", "steps"] = "result"

    def check(self) -> None:
        """Raise ArchError if a field has a value that its type does not list."""
        kinds = get_type_hints(BlockSpec)
        for name, values in (
            (each.name, get_args(kinds[each.name]) or (False, True)) for each in fields(self)
        ):
            if getattr(self, name) not in values:
                raise ArchError(
                    f"block field {name} is {getattr(self, name)!r}; expected one of {values}"
                )


if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
else:
    Array = Any

Params = Mapping[str, Value]  # hyperparameters by name
Found = tuple[Value, str] | None  # a value, and the key it was read under
PerLayer = tuple[bool, ...]  # one for each layer

# "tensor": the values of a stored tensor (rope_freqs.weight); "shape": its presence or shape.
Origin = Literal["config", "metadata", "shape", "tensor", "default", "user"]


@dataclass(frozen=True, slots=True)
class HyperParam:
    """One hyperparameter: its value, where it comes from, and the key it was read under."""

    value: Value
    origin: Origin
    key: str = ""


class HyperParams(Mapping[str, Value]):
    """Hyperparameters by name; `hp["n_heads"]` is the value, `hp.of("n_heads")` the record.

    Asking for one without a value raises ArchError: only the architecture's table has defaults.
    """

    def __init__(self, rows: Mapping[str, HyperParam], subject: str = "") -> None:
        """Take the hyperparameters by name; `subject` (a path) begins error messages."""
        self._rows = dict(rows)
        self._subject = subject

    def __getitem__(self, name: str) -> Value:
        """Return the value of a hyperparameter; ArchError if it has none."""
        return self.of(name).value

    def of(self, name: str) -> HyperParam:
        """Return a hyperparameter with its origin and key; ArchError if it has no value."""
        if name not in self._rows:
            raise ArchError(
                f"{self._subject or 'model'}: hyperparameter {name!r} is not given by the file "
                "and its architecture has no default for it"
            )
        return self._rows[name]

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, self._subject, f"{len(self)} values")

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names of the hyperparameters, which IPython offers after `hp[`."""
        return list(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def with_values(self, **values: Value) -> "HyperParams":
        """Return a copy with some values replaced, their origin "user"."""
        rows = dict(self._rows)
        rows.update({name: HyperParam(value, "user") for name, value in values.items()})
        return HyperParams(rows, self._subject)


TEXT_SECTION = "text_config"  # the object of a multimodal config.json for its language model
CARRIED = "aprfmt.hyper."  # what the keys of our own for hyperparameters begin with
CARRYING = ("gguf", "apr")  # the key styles that may hold such keys


@dataclass(frozen=True)
class Facts:
    """What a file says of its hyperparameters, before the rules are applied.

    `style` is the key style of `values` ("hf": config.json, "gguf": metadata with the
    architecture's prefix, "apr": APR's typed keys). `shapes` are the LOGICAL shapes by role key
    (`binding.known_shapes`), so that rules can read what the tensors show (biases, norms, head).
    `arch_key` is the prefix of GGUF keys. `tensors` are stored tensors by name, with
    `.shape` and `.numpy()`: some styles keep hyperparameters there (rope_freqs.weight). `names`
    is the style of the tensor names ("hf", "gguf"), "" where it is not known.
    """

    style: str
    values: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    arch_key: str = ""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    names: str = ""

    def first(self, *keys: str, null: bool = False) -> Found:
        """Return (value, key) of the first of `keys` that the file has; `{arch}` is filled in.

        None if it has none of them. A null counts as absent; with `null=True` it counts as None.
        """
        for template in keys:
            key = template.replace("{arch}", self.arch_key)
            value = self.values.get(key)
            if value is not None or (null and key in self.values):
                return value, key
        return None

    def vector(self, name: str) -> tuple[float, ...] | None:
        """Return the values of a small stored tensor, exact float32; None if there is none.

        ArchError for more than 65536 values.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        count = math.prod(tensor.shape)
        if count > 1 << 16:
            raise ArchError(
                f"tensor {name!r}: shape {list(tensor.shape)}; expected a vector with one value "
                "for every pair of rotated elements"
            )
        return tuple(float(value) for value in tensor.numpy().reshape(-1).tolist())

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles of the stored tensors, without layer numbers."""
        return frozenset(split_key(key)[1] for key in self.shapes)


class _Missing:
    """The type of MISSING, which marks a rule without a default."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


Read = Callable[[Facts, Params], Found]
Write = Callable[[Value, Params], Mapping[str, Value]]


@dataclass(frozen=True)
class HyperRule:
    """How one hyperparameter is read and written.

    `keys[style]` lists keys, first one present (and not null) wins; `{arch}` is the GGUF prefix.
    `kind` is what a value must be: a size (positive integer), an integer from 0, a number, one
    above zero, a boolean, a name, or anything (the `read` function checks); `high` bounds
    integers. In the styles of `inverse_in` the stored number is 1/x. `default` is a value or a
    function of the hyperparameters read so far; MISSING makes absence an ArchError; `default_in`
    gives other defaults by style (what llama.cpp assumes for an absent GGUF key).
    `read[style]` replaces the key lookup: it returns (value, key), or None if absent.
    `write[style]` returns the key-value pairs to write; without it the first key of the style is
    written, unless the value is None. `shape` reads the value from tensor shapes: used if no key
    has it, and instead of the key with `shape_wins`. `present`: the value says whether the file
    has one of these roles (`absent`: has none), whatever the keys say; the forward pass goes by
    it. Whether the roles are required (required_roles.py) is said by the keys, or the default; in
    the styles of `shown_in`, without a key, by the tensors (a GGUF without output.weight is tied).
    `null_in`: styles in which null means None (elsewhere null counts as absent).
    `check` returns a sentence if something in the file contradicts the value, else "".
    """

    name: str
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kind: Literal["size", "int", "float", "positive", "bool", "str", "any"] = "any"
    default: Any = MISSING
    default_in: Mapping[str, Any] = field(default_factory=dict)
    inverse_in: tuple[str, ...] = ()
    read: Mapping[str, Read] = field(default_factory=dict)
    write: Mapping[str, Write] = field(default_factory=dict)
    shape: Callable[[Mapping[str, tuple[int, ...]]], Value | None] | None = None
    shape_wins: bool = False
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    shown_in: tuple[str, ...] = ()
    null_in: tuple[str, ...] = ()
    high: int = (1 << 31) - 1
    check: Callable[[Value, Facts, Params], str] | None = None


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A hyperparameter that a style stores as a tensor (GGUF's rope_freqs.weight).

    `names[style]` is its stored name; it has no role. `make` returns the values to write as a
    one-dimensional F32 tensor, or None if the model needs no such tensor. It is read with
    `Facts.vector`. `of` is the hyperparameter's name.
    """

    names: Mapping[str, str]
    make: Callable[[Params], Sequence[float] | None]
    of: str = "rope_scaling"

    def name(self, style: str) -> str:
        """Return the tensor's stored name in a style; "" if the style does not store it."""
        return self.names.get(style, "")


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One role of an architecture.

    `shape` entries are sums of products of hyperparameter names and integers ("n_heads*head_dim",
    "kv_lora_rank+qk_rope_head_dim"), nothing else. `needs`: "" always required; "optional"; or
    conditions joined by "&", each the name of a hyperparameter ("attention_bias", "moe_layers",
    "!moe_layers", "!tied_embeddings") that makes it required where true (or not zero; for per-layer
    ones, in the layers where it is). Roles with `layered=False` exist once.
    """

    role: str
    shape: tuple[str, ...]
    needs: str = ""
    layered: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """`count` elements of input `source`, from element `start` of its row-major order."""

    source: int
    start: int
    count: int


class LayoutStep(Protocol):
    """Turns m stored tensors into n logical ones and back; sizes come from hyperparameters.

    A step with `permutes` only moves elements: `undo` and `apply` then take arrays of any dtype,
    raw bit patterns included, and lose nothing. `str(step)` names it with its parameters.
    """

    permutes: ClassVar[bool]

    def shapes(self, stored: Sequence[tuple[int, ...]], hp: Params) -> list[tuple[int, ...]]:
        """Return the logical shapes; ArchError if the stored shapes do not fit."""
        ...

    def stored_shapes(
        self, logical: Sequence[tuple[int, ...]], hp: Params, count: int
    ) -> list[tuple[int, ...]]:
        """Return the shapes of the `count` stored tensors; ArchError if `logical` does not fit."""
        ...

    def moves(self, stored: Sequence[tuple[int, ...]], hp: Params) -> list[list[Move]] | None:
        """Return for each logical tensor the runs of stored elements that make it up, in order.

        None if the step cannot be expressed so: then the arrays have to be decoded.
        """
        ...

    def undo(self, stored: Sequence[Array], hp: Params) -> list[Array]:
        """Return the logical arrays of stored ones."""
        ...

    def apply(self, logical: Sequence[Array], hp: Params) -> list[Array]:
        """Return the stored arrays of logical ones; `undo(apply(x)) == x`."""
        ...


@dataclass(frozen=True, slots=True)
class Binding:
    """How one naming style stores some roles.

    `stored` are name templates ({L} layer, {E} expert: one template with {E} stands for all
    experts in order); together they hold `roles`. Steps run in order from stored to logical. All
    bindings of a role are read; the first one whose `needs` holds is used for writing (as a
    TensorRule's; "": in every layer). `elements` is the hyperparameter that says by layer which
    numbers {E} takes, where they are not 0, 1, 2 and so on.
    """

    stored: tuple[str, ...]
    roles: tuple[str, ...]
    steps: tuple[LayoutStep, ...] = ()
    elements: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """A hyperparameter that a style cannot express: when it matters, and what readers assume.

    `applies(hp)` says whether a model is affected, `consequence` is the sentence for the user.
    `assumed`: a file of this style from another program leaves the value to its readers' rule, and
    the same sentence is reported of it (KeyReport.assumed). `refused`: the style has no form of it,
    so that no file is written.
    """

    style: str
    name: str
    applies: Callable[[Params], bool]
    consequence: str
    assumed: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class DraftNames:
    """How one naming style stores the draft head after a model of {N} layers; {I} counts heads.

    `layer` is the prefix of its decoder layer, `tensors` its other tensors by template, with the
    role each has; the first of a role is written. `counts` are keys that say how many draft layers
    there are. `join` are the steps of the matrix that joins embedding and hidden state.
    """

    layer: str
    tensors: Mapping[str, str]
    counts: tuple[str, ...]
    join: tuple[LayoutStep, ...] = ()


@dataclass(frozen=True)
class ArchSpec:
    """The tables of one architecture.

    `called[style]` are its names in each style; if none are given, those of the table CALLED.
    hf: `model_type` values and class names (both; the first of each is written); gguf:
    `general.architecture` values; apr: `architecture` slugs. `evidence(tensor names, values)`
    decides between architectures that share a name: the one whose evidence is true, else the one
    without an evidence function. `ignored` are config keys known not to change the forward pass.
    `buffers[style]` are name templates of stored tensors that are computed, not learned (masks,
    inverse frequencies). `derived` are hyperparameters that some styles keep in tensors. `level`:
    "names" where there is no forward pass; `block` says nothing then. `draft[style]` are the names
    of its draft head (draft_head.py), none where it has none that is known; `draft_layer` gives by
    `..._layers` the kind of the head's layer, where it is not that of the model's last one.
    `section`: the object of a multimodal config.json that describes it. `mixed` returns, in words,
    which features a model's hyperparameters combine that no published model has, "" for none: such
    a model is not run.
    """

    name: str
    hyper: tuple[HyperRule, ...]
    tensors: tuple[TensorRule, ...]
    bindings: Mapping[str, tuple[Binding, ...]]
    block: BlockSpec
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lost: tuple[Loss, ...] = ()
    ignored: frozenset[str] = frozenset()
    buffers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: tuple[DerivedTensor, ...] = ()
    evidence: Callable[[Collection[str], Params], bool] | None = None
    level: Literal["full", "names"] = "full"
    forward: str = ""  # "module:function" of its own forward pass; "": the shared one
    draft: Mapping[str, DraftNames] = field(default_factory=dict)
    draft_layer: Mapping[str, bool] = field(default_factory=dict)
    section: str = TEXT_SECTION
    mixed: Callable[[Params], str] | None = None

    @property
    def is_tower(self) -> bool:
        """Whether it is a part of a multimodal model, such as its vision tower."""
        return self.section != TEXT_SECTION

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, self.name)

    def __post_init__(self) -> None:
        """Take the names of the table CALLED if none are given; ArchError if it has none either."""
        if not self.called:
            if self.name not in CALLED:
                raise ArchError(f"architecture {self.name!r}: no names are given; say called=")
            object.__setattr__(self, "called", CALLED[self.name])
