"""What models with gated delta nets share: rows, hyperparameters, layouts, gated attention.

A delta net layer projects to q, k, v (convolved over the last few positions), an output gate z, a
decay a and a strength b. GGUF calls these attn_qkv, attn_gate, ssm_alpha and ssm_beta.
Sources: transformers' modeling_qwen3_next and modeling_qwen3_5; llama.cpp's converter
(conversion/qwen.py) and graphs (qwen3next.cpp, qwen35.cpp).
"""

from aprfmt.arch import hyper_rules, rope_sections
from aprfmt.arch.gemma import PLUS_ONE, gemma_norm_rows
from aprfmt.arch.grouped_rows import ByGroup
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layer_kinds import write_kinds
from aprfmt.arch.nope_layers import all_but_every
from aprfmt.arch.recurrent_steps import Depthwise, NegativeExp
from aprfmt.arch.spec import Binding, BlockSpec, Facts, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import KV, LAYER, Q, RoleRow, Steps, linear, norm
from aprfmt.arch.value_checks import listed_kinds, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

KINDS = {"linear_attention": True, "full_attention": False}  # config.json's `layer_types`
INTERVAL = 4  # every so many-th layer has attention, where a file does not say

KEYS = "delta_key_heads*delta_key_dim"
VALUES = "delta_value_heads*delta_value_dim"
CHANNELS = f"2*{KEYS}+{VALUES}"
IN_LAYERS, ELSEWHERE = "delta_layers", "!delta_layers"

BLOCK = BlockSpec(
    norm_offset=1, norm_cast="after_weight", qk_norm="head",
    attention_gate="sigmoid", recurrence="gated_delta",
)  # fmt: skip

# Rows of q and gate, head by head, in one projection.
_QUERIES = ByGroup("n_heads", (Q, Q), ((0,), (1,)))


def _gated_binding(name: str, suffix: str) -> Binding:
    """Return the binding of a stored tensor that has the rows of q and its gate, head by head."""
    return Binding(
        (f"{name}.{suffix}",), (f"attn_q.{suffix}", f"attn_q_gate.{suffix}"), (_QUERIES,)
    )


GATED_HF = tuple(
    _gated_binding(f"{LAYER}self_attn.q_proj", suffix) for suffix in ("weight", "bias")
)
GATED_GGUF = tuple(_gated_binding("blk.{L}.attn_q", suffix) for suffix in ("weight", "bias"))

# Gate and up of all experts in one tensor, gate first: read, not written.
GATE_UP_GGUF = Binding(
    ("blk.{L}.ffn_gate_up_exps.weight",),
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    (Split(("moe_ffn_size", "moe_ffn_size"), axis=1),),
)


def gated_attention_rows() -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of layers with attention whose query has a gate.

    They are q with its gate, k, v, the output projection and the norms of q and k.
    """
    own = tuple(
        RoleRow(f"{role}.{suffix}", "", shape, needs, gguf="")
        for role in ("attn_q", "attn_q_gate")
        for suffix, shape, needs in (
            ("weight", (Q, "hidden_size"), ELSEWHERE),
            ("bias", (Q,), f"{ELSEWHERE} & attention_bias"),
        )
    )
    bias, out = "attention_bias", "attention_out_bias"
    return (
        *own,
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", ELSEWHERE, bias=bias),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", ELSEWHERE, bias=bias),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q, ELSEWHERE, bias=out),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",), ELSEWHERE, gguf_steps=PLUS_ONE),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), ELSEWHERE, gguf_steps=PLUS_ONE),
    )


def norm_rows() -> tuple[tuple[RoleRow, ...], tuple[RoleRow, ...]]:
    """Return (rows of the norm before mixing, rows of the norm before the MLP).

    GGUF names the second one differently from other families.
    """
    after = RoleRow(
        "ffn_norm.weight", "post_attention_layernorm.weight", ("hidden_size",),
        gguf_steps=PLUS_ONE, gguf="post_attention_norm.weight",
    )  # fmt: skip
    return gemma_norm_rows("attn_norm", "input_layernorm"), (after,)


def delta_net_rows(
    *,
    rates: Steps = (),
    kernel: Steps = (),
    output: Steps = (),
    projections: tuple[tuple[str, str, Steps], ...] = (),
) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of a delta net's tensors.

    `rates` are GGUF's layout steps of ssm_dt and ssm_a, `kernel` those of the convolution and
    `output` those of the output projection, besides the steps that all files need. `projections`
    are (Hugging Face name, role, GGUF steps) of the input projections that have a stored tensor
    each. Other input projections are parts of a fused tensor.
    """
    named = {role: (hf, steps) for hf, role, steps in projections}

    def input_row(role: str, rows: str) -> RoleRow:
        """Return the tensor-table row for the weight `role` that projects the residual stream.

        `rows` is the size expression of its output. Where the architecture's `projections` do not
        name the role, it is part of a fused tensor and the row has no stored name.
        """
        hf, steps = named.get(role, ("", ()))
        name = f"linear_attn.{hf}.weight" if hf else ""
        return RoleRow(
            f"{role}.weight", name, (rows, "hidden_size"), IN_LAYERS, (), steps, None if hf else ""
        )

    heads = ("delta_value_heads",)
    return (
        input_row("attn_qkv", CHANNELS),
        input_row("attn_gate", VALUES),
        input_row("ssm_beta", heads[0]),
        input_row("ssm_alpha", heads[0]),
        RoleRow("ssm_conv1d.weight", "linear_attn.conv1d.weight", (CHANNELS, "conv_taps"),
            IN_LAYERS, (Depthwise(CHANNELS, "conv_taps"),), kernel),
        RoleRow("ssm_dt.bias", "linear_attn.dt_bias", heads, IN_LAYERS, (), rates),
        RoleRow("ssm_a.weight", "linear_attn.A_log", heads, IN_LAYERS, (),
            (*rates, NegativeExp()), "ssm_a"),
        *norm("ssm_norm", "linear_attn.norm", ("delta_value_dim",), IN_LAYERS),
        RoleRow("ssm_out.weight", "linear_attn.out_proj.weight", ("hidden_size", VALUES),
            IN_LAYERS, (), output),
    )  # fmt: skip


def delta_layers_rule() -> HyperRule:
    """Return the rule that reads and writes which layers have a delta net.

    config.json lists them, or has the interval of the layers with attention.
    """
    key = "{arch}.full_attention_interval"

    def read_interval(facts: Facts, name: str, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer: it has a delta net, key) from the key `name`.

        None without it. The key has the distance of the layers with attention.
        """
        found = facts.first(name)
        return None if found is None else (all_but_every(hp, whole_number(*found, 1)), found[1])

    # config.json may list the kinds, or give the period as a GGUF does.
    def read_hf(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer: it has a delta net, key) of config.json.

        The key is `layer_types`, else the distance of the layers with attention. None without
        either. Raises ArchError for an unknown kind of layer.
        """
        by_interval = read_interval(facts, "full_attention_interval", hp)
        found = facts.first("layer_types")
        if found is None:
            return by_interval
        listed = listed_kinds(*found, hp["n_layers"], KINDS)
        return tuple(KINDS[kind] for kind in listed), found[1]

    def write_hf(value: Value, hp: Params) -> Params:
        """Return config.json's {"layer_types": kind of each layer}.

        `value`: True for a delta net.
        """
        names = {on: name for name, on in KINDS.items()}
        return {"layer_types": [names[on] for on in value]}

    def write_gguf(value: Value, hp: Params) -> Params:
        """Return {GGUF key: n}, where every n-th layer has attention.

        `value`: True for a delta net.
        """
        return {key: (*value, False).index(False) + 1}

    return HyperRule(
        "delta_layers",
        {"gguf": (key,)},
        read={"hf": read_hf, "gguf": lambda facts, hp: read_interval(facts, key, hp)},
        write={"hf": write_kinds(KINDS), "gguf": write_gguf},
        default=lambda hp: all_but_every(hp, INTERVAL),
    )


def rotated_layers_rule() -> HyperRule:
    """Return the rule for which layers have rope: those with attention, whatever the keys."""
    return HyperRule("rope_layers", default=lambda hp: tuple(not on for on in hp["delta_layers"]))


def size_rules() -> tuple[HyperRule, ...]:
    """Return the rules that read and write a delta net's heads, their sizes and its kernel.

    Defaults are those of transformers.
    """

    def read_value_dim(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (elements of a delta net's value head, key) of a GGUF: inner size / value heads.

        None without the key. Raises ArchError for a size that is no multiple of the heads.
        """
        found = facts.first("{arch}.ssm.inner_size")
        if found is None:
            return None
        heads, inner = hp["delta_value_heads"], whole_number(*found, 1)
        if inner % heads:
            raise ArchError(f"{found[1]}: is {inner}; expected a multiple of {heads} value heads")
        return inner // heads, found[1]

    def write_inner(value: Value, hp: Params) -> Params:
        """Return {GGUF key: a delta net's inner size}.

        `value` is the elements of one value head.
        """
        return {"{arch}.ssm.inner_size": value * hp["delta_value_heads"]}

    def size_rule(name: str, hf: str, gguf: str, default: int) -> HyperRule:
        """Return the rule of one size of a delta net, hyperparameter `name`.

        `default` is transformers'. `hf` is config.json's key without the prefix "linear_", `gguf`
        the GGUF's without "ssm.".
        """
        return hyper_rules.size(name, f"linear_{hf}", f"ssm.{gguf}", hf_default=default)

    values = HyperRule(
        "delta_value_dim",
        {"hf": ("linear_value_head_dim",), "gguf": ("{arch}.ssm.inner_size",)},
        "size",
        default_in={"hf": 128},
        read={"gguf": read_value_dim},
        write={"gguf": write_inner},
    )
    return (
        size_rule("delta_key_heads", "num_key_heads", "group_count", 16),
        size_rule("delta_value_heads", "num_value_heads", "time_step_rank", 32),
        size_rule("delta_key_dim", "key_head_dim", "state_size", 128),
        values,
        size_rule("conv_taps", "conv_kernel_dim", "conv_kernel", 4),
        delta_layers_rule(),
        rotated_layers_rule(),
        hyper_rules.fixed("delta_strength", 1.0),
        HyperRule("delta_norm_eps", default=lambda hp: hp["norm_eps"]),
    )


LOST = (
    Loss(
        "gguf",
        "delta_layers",
        lambda hp: (
            hp["delta_layers"] != all_but_every(hp, (*hp["delta_layers"], False).index(False) + 1)
        ),
        "GGUF has an interval only: llama.cpp gives every so many-th layer attention",
    ),
    Loss(
        "gguf",
        "delta_value_dim",
        lambda hp: hp["delta_key_dim"] != hp["delta_value_dim"],
        "llama.cpp runs delta nets only whose key and value heads are of one size",
    ),
)

# Keys of config.json that do not change the pass of a text.
IGNORED = frozenset(
    """mtp_num_hidden_layers mtp_use_dedicated_embeddings attn_output_gate mamba_ssm_dtype
    language_model_only use_sliding_window sliding_window max_window_layers image_token_id
    video_token_id vision_start_token_id vision_end_token_id""".split()
).union(rope_sections.IGNORED)
