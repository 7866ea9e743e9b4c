"""Tensor tables in short form: one row per tensor gives role, shape and names in both styles.

Most GGUF names equal the role, so a row usually gives only the Hugging Face name and the shape.
`make_tables` turns rows into the two independent tables of an ArchSpec.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

from aprfmt.arch.joining_steps import Split, Stacked
from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.arch.spec import Binding, LayoutStep, TensorRule

LAYER = "model.layers.{L}."
Q, KV = "n_heads*head_dim", "n_kv_heads*head_dim"
Steps = tuple[LayoutStep, ...]


@dataclass(frozen=True, slots=True)
class RoleRow:
    """One role with its names in both styles, which are templates.

    `hf` is below LAYER unless it contains {L} or is whole-model. `gguf=None`: the name equals the
    role; "" (either style): the style has no such tensor. `shape` names the size of each axis,
    `needs` what a model must have to have this role ("": nothing). `hf_steps` and `gguf_steps` lead
    from the stored layout to this one. `layered`: each layer has one.
    """

    role: str
    hf: str
    shape: tuple[str, ...]
    needs: str = ""
    hf_steps: Steps = ()
    gguf_steps: Steps = ()
    gguf: str | None = None
    layered: bool = True


Rows = tuple[RoleRow, ...]


def linear(
    role: str,
    hf: str,
    out: str,
    into: str,
    needs: str = "",
    *,
    bias: str | None = None,
    hf_steps: Steps = (),
    gguf_steps: Steps = (),
) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of a matrix [out, into], and of its bias if it has one.

    `role` and `hf` are its role and its name in Hugging Face files, without ".weight". `needs` is
    the condition for a layer to have it, `bias` that for its bias, None: no bias. `gguf_steps`
    apply to the bias too, `hf_steps` to the matrix alone.
    """
    rows = [RoleRow(f"{role}.weight", f"{hf}.weight", (out, into), needs, hf_steps, gguf_steps)]
    if bias is not None:
        both = " & ".join(filter(None, (needs, bias)))
        rows.append(RoleRow(f"{role}.bias", f"{hf}.bias", (out,), both, (), gguf_steps))
    return tuple(rows)


def norm(
    role: str,
    hf: str,
    size: tuple[str, ...] = ("hidden_size",),
    needs: str = "",
    *,
    bias: bool = False,
    gguf_steps: Steps = (),
    layered: bool = True,
) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of a norm: its weight, and its bias with `bias`.

    `role` and `hf` are its role and its name in Hugging Face files, without ".weight". `size` is
    its shape in hyperparameters, `needs` the condition for a layer to have it, `gguf_steps` what a
    GGUF does to the values. Not `layered`: it stands outside the layers.
    """
    parts = ("weight", "bias") if bias else ("weight",)
    return tuple(
        RoleRow(f"{role}.{p}", f"{hf}.{p}", size, needs, (), gguf_steps, layered=layered)
        for p in parts
    )


def single_row(role: str, hf: str, *shape: str, needs: str = "", gguf_steps: Steps = ()) -> RoleRow:
    """Return the tensor-table row of a tensor outside the layers, with the sizes `shape`.

    `role` and `hf` are its role and its whole name in Hugging Face files, `needs` the condition for
    it, `gguf_steps` what a GGUF does to its elements.
    """
    return RoleRow(role, hf, shape, needs, gguf_steps=gguf_steps, layered=False)


def model_rows(
    *,
    embed: str = "model.embed_tokens",
    final: str = "model.norm",
    head: str = "lm_head",
    norm_bias: bool = False,
    head_bias: bool = False,
    head_gguf: str | None = None,
    norm_steps: Steps = (),
) -> tuple[tuple[RoleRow, ...], tuple[RoleRow, ...]]:
    """Return (row of the embedding, rows of the final norm and the head).

    The first go before those of the layers, the others after. `embed`, `final` and `head` are
    Hugging Face names. `head_gguf=""`: GGUF has no tensor for the head; the embedding is always
    used.
    """
    table = ("vocab_size", "hidden_size")
    before = (RoleRow("token_embd.weight", f"{embed}.weight", table, layered=False),)
    after = norm("output_norm", final, bias=norm_bias, gguf_steps=norm_steps, layered=False)
    after += (
        RoleRow(
            "output.weight",
            f"{head}.weight",
            table,
            "!tied_embeddings",
            gguf=head_gguf,
            layered=False,
        ),
    )
    if head_bias:
        after += (RoleRow("output.bias", f"{head}.bias", ("vocab_size",), layered=False),)
    return before, after


class WholeNames(TypedDict, total=False):
    """The keyword arguments of `model_rows`, for annotations."""

    embed: str
    final: str
    head: str
    norm_bias: bool
    head_bias: bool
    head_gguf: str | None
    norm_steps: Steps


def with_model_rows(*rows: RoleRow, **named: Unpack[WholeNames]) -> tuple[RoleRow, ...]:
    """Return `rows` between the rows of embedding and of final norm and head.

    `named` are the arguments of `model_rows`.
    """
    before, after = model_rows(**named)
    return (*before, *rows, *after)


def attention(
    *,
    bias: str | None = "attention_bias",
    out_bias: str | None = "attention_out_bias",
    permuted: bool = False,
    out: str = "o_proj",
) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of q, k, v and output projection; `out` is the output's name.

    `bias` and `out_bias` are the conditions for biases, None: no bias. `permuted`: GGUF stores the
    rows of q and k in pair order.
    """
    q = (RowsPermuted("n_heads"),) if permuted else ()
    k = (RowsPermuted("n_kv_heads"),) if permuted else ()
    return (
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", bias=bias, gguf_steps=q),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", bias=bias, gguf_steps=k),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", bias=bias),
        *linear("attn_output", f"self_attn.{out}", "hidden_size", Q, bias=out_bias),
    )


def gated_mlp(bias: str | None = None, needs: str = "", module: str = "mlp") -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of an MLP's gate, up and down matrices.

    `bias` is the condition for biases (None: no biases), `needs` that for a layer to have the MLP,
    `module` its name in Hugging Face files.
    """
    return (
        *linear("ffn_gate", f"{module}.gate_proj", "ffn_size", "hidden_size", needs, bias=bias),
        *linear("ffn_up", f"{module}.up_proj", "ffn_size", "hidden_size", needs, bias=bias),
        *linear("ffn_down", f"{module}.down_proj", "hidden_size", "ffn_size", needs, bias=bias),
    )


def plain_mlp(up: str, down: str, bias: str | None = "") -> tuple[RoleRow, ...]:
    """Return the table rows of an MLP without a gate: `up` and `down` are its matrices' names.

    They are names in a layer of a Hugging Face file, or with {L} in the whole file. `bias` is the
    condition for biases: "" for always, None for no biases.
    """
    return (
        *linear("ffn_up", up, "ffn_size", "hidden_size", bias=bias),
        *linear("ffn_down", down, "hidden_size", "ffn_size", bias=bias),
    )


def fused_qkv(suffix: str) -> Binding:
    """Return the binding of one stored matrix or bias with the rows of q, then k, then v.

    `suffix` is "weight" or "bias".
    """
    roles = tuple(f"attn_{x}.{suffix}" for x in "qkv")
    return Binding((f"{LAYER}self_attn.qkv_proj.{suffix}",), roles, (Split((Q, KV, KV)),))


def fused_gate_up(suffix: str) -> Binding:
    """Return the binding of one stored matrix or bias with the rows of an MLP's gate, then of up.

    `suffix` is "weight" or "bias".
    """
    roles, halves = tuple(f"ffn_{x}.{suffix}" for x in ("gate", "up")), ("ffn_size", "ffn_size")
    return Binding((f"{LAYER}mlp.gate_up_proj.{suffix}",), roles, (Split(halves),))


# Some writers (early APR files, parameters of vLLM and SGLang) fuse q, k and v, or gate and up:
# read for architectures with separate ones, too.
FUSED_QKV = (fused_qkv("weight"), fused_qkv("bias"))
FUSED = (*FUSED_QKV, fused_gate_up("weight"), fused_gate_up("bias"))


def experts(
    module: str = "mlp.experts",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> tuple[tuple[RoleRow, ...], tuple[Binding, ...]]:
    """Return (rows of stacked experts, bindings that Hugging Face files need).

    `gate`, `up` and `down` are the names of an expert's matrices below `module` and its number.
    They are written as one tensor per expert. transformers 5 has one tensor for gate and up of all
    experts, often below another module; it is read too.
    """
    into = ("n_experts", "moe_ffn_size", "hidden_size")
    down_shape = ("n_experts", "hidden_size", "moe_ffn_size")
    rows = tuple(
        RoleRow(f"ffn_{name}_exps.weight", "", shape, "moe_layers")
        for name, shape in (("gate", into), ("up", into), ("down", down_shape))
    )
    each = tuple(
        Binding(
            (f"{LAYER}{module}.{{E}}.{hf}.weight",),
            (f"ffn_{name}_exps.weight",),
            (Stacked("n_experts"),),
        )
        for name, hf in (("gate", gate), ("up", up), ("down", down))
    )
    roles = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
    halves = Split(("moe_ffn_size", "moe_ffn_size"), axis=1)
    together = tuple(
        binding
        for below in dict.fromkeys(("mlp.experts", module))
        for suffix in ("", ".weight")
        for binding in (
            Binding((f"{LAYER}{below}.gate_up_proj{suffix}",), roles, (halves,)),
            Binding((f"{LAYER}{below}.down_proj{suffix}",), ("ffn_down_exps.weight",)),
        )
    )
    return rows, each + together


def make_tables(
    rows: Iterable[RoleRow],
    *,
    hf_first: Iterable[Binding] = (),
    hf_more: Iterable[Binding] = (),
    gguf_first: Iterable[Binding] = (),
    gguf_more: Iterable[Binding] = (),
) -> tuple[tuple[TensorRule, ...], Mapping[str, tuple[Binding, ...]]]:
    """Return (the tensor table, {style: bindings}) of the rows of an architecture.

    Bindings in `..._first` are tried before those of the rows, and are the ones written. Those in
    `..._more` are only read.
    """
    every = tuple(rows)
    rules = tuple(TensorRule(row.role, row.shape, row.needs, row.layered) for row in every)
    hf = tuple(Binding((_hf_name(row),), (row.role,), row.hf_steps) for row in every if row.hf)
    gguf = tuple(
        Binding((_gguf_name(row),), (row.role,), row.gguf_steps) for row in every if row.gguf != ""
    )
    return rules, {"hf": (*hf_first, *hf, *hf_more), "gguf": (*gguf_first, *gguf, *gguf_more)}


def _hf_name(row: RoleRow) -> str:
    """Return the Hugging Face name template of a row, with the layer's prefix if it is in one."""
    return LAYER + row.hf if row.layered and "{L}" not in row.hf else row.hf


def _gguf_name(row: RoleRow) -> str:
    """Return the GGUF name template of a row, with the block's prefix if it is in one."""
    name = row.gguf or row.role
    return f"blk.{{L}}.{name}" if row.layered and "{L}" not in name else name
