"""gemma3n (text): several copies of the stream (altup), short cuts (laurel), embeddings by layer.

The last layers look at the keys and values of earlier ones; files may hold unused ones for them.
The first layers' MLPs keep only the highest values of their gate. Norms are stored unchanged, in
GGUF too. Sources: transformers' modeling_gemma3n; the gguf package's name map; the converter's
gemma.py; llama.cpp's gemma3n.cpp.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from reprlib import repr as short_repr
from statistics import NormalDist

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.gemma import NO_BIASES, embedding_scale_rule
from aprfmt.arch.gemma2 import pattern_loss, softcap_rule
from aprfmt.arch.joining_steps import Stacked
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import Window, require_causal, window_period, window_rules
from aprfmt.arch.spec import (
    MISSING,
    ArchSpec,
    BlockSpec,
    Facts,
    Found,
    HyperRule,
    Loss,
    Params,
    PerLayer,
)
from aprfmt.arch.tensor_rows import (
    KV,
    Q,
    RoleRow,
    Rows,
    gated_mlp,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import finite_number, nearest_float32, sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

OWN, PER = "own_kv_layers", "per_layer_size"
BIAS, OUT_BIAS = "attention_bias", "attention_out_bias"
_LAST = {"hf": "num_kv_shared_layers", "gguf": "{arch}.attention.shared_kv_layers"}


def whole_model_row(role: str, hf: str, *shape: str, needs: str = "") -> RoleRow:
    """Return the row of a weight outside the layers; `role` and `hf` come without ".weight"."""
    return RoleRow(f"{role}.weight", f"{hf}.weight", shape, needs, layered=False)


def per_layer_embeddings(needs: str = "") -> Rows:
    """Return the tensor-table rows of a second embedding table, its projection and norm.

    That table has an embedding of each token for every layer.
    """
    wide = f"n_layers*{PER}"
    return (
        whole_model_row(
            "per_layer_token_embd",
            "model.embed_tokens_per_layer",
            "per_layer_vocab",
            wide,
            needs=needs,
        ),
        whole_model_row(
            "per_layer_model_proj",
            "model.per_layer_model_projection",
            wide,
            "hidden_size",
            needs=needs,
        ),
        whole_model_row("per_layer_proj_norm", "model.per_layer_projection_norm", PER, needs=needs),
    )


def per_layer_inputs(needs: str = "") -> Rows:
    """Return the table rows of the weights that add a layer's own embedding to the stream."""
    return (
        *linear("inp_gate", "per_layer_input_gate", PER, "hidden_size", needs),
        *linear("proj", "per_layer_projection", "hidden_size", PER, needs),
        *norm("post_norm", "post_per_layer_input_norm", needs=needs),
    )


def four_norms() -> tuple[Rows, Rows, Rows, Rows]:
    """Return the rows of four norms: (before attention, after it, before the MLP, after it)."""
    return (
        norm("attn_norm", "input_layernorm"),
        norm("post_attention_norm", "post_attention_layernorm"),
        norm("ffn_norm", "pre_feedforward_layernorm"),
        norm("post_ffw_norm", "post_feedforward_layernorm"),
    )


def own_kv_rule(default: int) -> HyperRule:
    """Return the rule that reads and writes which layers have their own keys and values.

    These are all but the last few; `default` is how many of the last layers have none.
    """

    def own_layers(shared: int, hp: Params) -> tuple[bool, ...]:
        """Return one boolean per layer: it computes its own keys and values.

        The last `shared` do not.
        """
        return tuple(i < hp["n_layers"] - shared for i in range(hp["n_layers"]))

    def read(key: str, facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it computes its own keys and values, key).

        None without `key`. The key has how many last layers use those of an earlier layer.
        """
        found = facts.first(key)
        return None if found is None else (own_layers(whole_number(*found), hp), found[1])

    hf, gguf = _LAST["hf"], _LAST["gguf"]
    return HyperRule(
        OWN,
        default=lambda hp: own_layers(default, hp),
        read={
            "hf": lambda facts, hp: read(hf, facts, hp),
            "gguf": lambda facts, hp: read(gguf, facts, hp),
        },
        write={
            "hf": lambda value, hp: {hf: value.count(False)},
            "gguf": lambda value, hp: {gguf: value.count(False)},
        },
    )


def kv_sources(hp: Params) -> tuple[int | None, ...]:
    """Return for each layer the number of the layer whose keys and values it uses.

    That is itself, or the last earlier layer of its kind (with or without a window) that has its
    own. None where no earlier layer of its kind has any.
    """
    last: dict[bool, int] = {}
    found: list[int | None] = []
    for layer, (own, window) in enumerate(zip(hp[OWN], hp["window_layers"], strict=True)):
        if own:
            last[bool(window)] = layer
        found.append(last.get(bool(window)))
    return tuple(found)


def _check_kv_sources(value: Value, facts: Facts, hp: Params) -> str:
    """Return the remark of `require_causal` ("" for none), after a check of the windows.

    Raises ArchError for a layer that finds no keys to reuse.
    """
    remark = require_causal(value, facts, hp)
    sources = kv_sources({OWN: hp[OWN], "window_layers": value})
    if None in sources:
        layer = sources.index(None)
        kind = "a window" if value[layer] else "no window"
        raise ArchError(
            f"layer {layer} has {kind} and uses the keys and values of an earlier layer; expected "
            f"one of the first {sum(hp[OWN])} layers, which have their own, to have {kind} too"
        )
    return remark


def listed_windows(
    size: int, default_layers: Callable[[Facts | None, Params], PerLayer]
) -> tuple[HyperRule, HyperRule]:
    """Return (the rule for the window's size, the rule for the layers with a window).

    `size` is the window without a key, `default_layers` gives one boolean a layer without a list. A
    GGUF lists one boolean a layer.
    """
    positions, layers = window_rules(Window(size, MISSING, default_layers, stated=True))
    key = "{arch}.attention.sliding_window_pattern"
    write = {**layers.write, "gguf": lambda value, hp: {key: list(value)}}
    return positions, replace(layers, write=write, check=_check_kv_sources)


def fixed_rule(name: str, value: Value, *keys: str) -> HyperRule:
    """Return the rule for a hyperparameter that is the same in every published model.

    Its check raises ArchError if one of `keys` has another value.
    """

    def check(found: Value, facts: Facts, hp: Params) -> str:
        """Return "" (no warning); raise ArchError if one of `keys` in the file is not `value`."""
        for key in keys:
            stated = facts.first(key)
            if stated is not None and stated[0] != value:
                raise ArchError(
                    f"{stated[1]}: is {short_repr(stated[0])}; expected {value!r}, which every "
                    "published model of this architecture has"
                )
        return ""

    return HyperRule(name, default=value, check=check)


def per_layer_sizes(vocab: int, default: int) -> tuple[HyperRule, HyperRule]:
    """Return the rules that read and write the sizes of per-layer embeddings.

    They are (the width for one layer, the rows of the table). `vocab` is the default number of
    rows, `default` the default width.
    """
    key = "{arch}.embedding_length_per_layer_input"
    return (
        HyperRule(
            PER,
            {"hf": ("hidden_size_per_layer_input",), "gguf": (key,)},
            "int",
            default,
            {"gguf": 0},
        ),
        hyper_rules.size(
            "per_layer_vocab",
            "vocab_size_per_layer_input",
            default=vocab,
            shape=hyper_rules.axis("per_layer_token_embd.weight", 0),
            shape_wins=True,
        ),
    )


def _reuses_other_layers(hp: Params) -> bool:
    """Return whether llama.cpp would take keys and values of other layers than transformers."""
    own = sum(hp[OWN])
    wanted = (own - 2 if window else own - 1 for window in hp["window_layers"][own:])
    return kv_sources(hp)[own:] != tuple(wanted)


REUSED = Loss(
    "gguf",
    OWN,
    _reuses_other_layers,
    "llama.cpp takes those of the last layer but one that has its own, where there is a window, "
    "and of the last one elsewhere: the logits differ",
)
PADDED = Loss(
    "gguf",
    "per_layer_vocab",
    lambda hp: hp[PER] > 0 and hp["per_layer_vocab"] < hp["vocab_size"],
    "llama.cpp expects a row for every token in the embedding of the layers; the converter "
    "appends zeros",
)


def same_ffn_size(default: int) -> HyperRule:
    """Return the rule for the MLP width, which a list may give for every layer, all equal."""

    def read(key: str, facts: Facts, hp: Params) -> Found:
        """Return (MLP width, key) from a number or a list of the layers' widths.

        None without the key. Raises ArchError if layers have different widths.
        """
        found = facts.first(key)
        if found is None or isinstance(found[0], (int, float)):
            return found
        widths = {whole_number(width, found[1]) for width in sequence(found[0], found[1], 1)}
        if len(widths) > 1:
            raise ArchError(f"{found[1]}: has {len(widths)} widths; expected one for all layers")
        return widths.pop(), found[1]

    rule = hyper_rules.ffn_size(default)
    gguf = rule.keys["gguf"][0]
    return replace(
        rule,
        read={
            "hf": lambda facts, hp: read("intermediate_size", facts, hp),
            "gguf": lambda facts, hp: read(gguf, facts, hp),
        },
    )


_N, _ROWS = "altup_streams", four_norms()
_SPARSE = "ffn_sparsity"


def std_multiplier(share: float) -> float:
    """Return how many standard deviations from the mean the fraction `share` of normal values ends.

    That is the quantile of the standard normal distribution at `share`; -inf for 0.
    """
    return NormalDist().inv_cdf(share) if share > 0 else -math.inf


def _share_of_multiplier(multiplier: float) -> float:
    """Return the fraction whose `std_multiplier` is this float32, with the fewest digits."""
    if multiplier == -math.inf:
        return 0.0
    exact = NormalDist().cdf(multiplier)
    for digits in range(1, 10):
        share = float(f"{exact:.{digits}g}")
        if share < 1 and math.isclose(std_multiplier(share), multiplier, rel_tol=2.0**-22):
            return share
    return exact


def _sparsity_rule() -> HyperRule:
    """Return the rule that reads and writes which fraction of gate values an MLP zeroes.

    It has a number for each layer. config.json has fractions, a GGUF the threshold in standard
    deviations.
    """
    key = "{arch}.activation_sparsity_scale"

    def usual(hp: Params) -> tuple[float, ...]:
        """Return the default fraction of gate values that each layer's MLP zeroes, one per layer.

        It is 0.95 in the first ten layers and 0 in the others; 0 in a model of ten or fewer.
        """
        layers = int(hp["n_layers"])
        cut = 10 if layers > 10 else 0
        return (0.95,) * cut + (0.0,) * (layers - cut)

    def read_hf(facts: Facts, hp: Params) -> Found:
        """Return (fraction of gate values zeroed in each layer's MLP, key) of config.json.

        None without the key. Raises ArchError for a fraction outside 0 to 1, or a list that has
        not one for each layer.
        """
        found = facts.first("activation_sparsity_pattern")
        if found is None:
            return None
        listed = found[0] if isinstance(found[0], (list, tuple)) else [found[0]] * hp["n_layers"]
        shares = tuple(finite_number(share, found[1]) for share in sequence(listed, found[1]))
        if len(shares) != hp["n_layers"] or not all(0 <= share < 1 for share in shares):
            raise ArchError(
                f"{found[1]}: is {short_repr(found[0])}; expected {hp['n_layers']} numbers from 0 "
                "to less than 1"
            )
        return tuple(map(float, shares)), found[1]

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (fraction of gate values zeroed in each layer's MLP, key) of a GGUF.

        None without the key. A GGUF has thresholds in standard deviations in place of fractions;
        minus infinity is a fraction of 0. Raises ArchError for what is no number, NaN or
        infinity.
        """
        found = facts.first(key)
        if found is None:
            return None
        listed = sequence(found[0], found[1], hp["n_layers"])[: hp["n_layers"]]
        if not all(isinstance(one, (int, float)) and one < math.inf for one in listed):
            raise ArchError(f"{found[1]}: is {short_repr(found[0])}; expected numbers")
        return tuple(_share_of_multiplier(float(one)) for one in listed), found[1]

    # config.json has the shares, a GGUF the multipliers computed from them, as float32.
    return HyperRule(
        _SPARSE,
        default=usual,
        read={"hf": read_hf, "gguf": read_gguf},
        write={
            "hf": lambda value, hp: {"activation_sparsity_pattern": list(value)},
            "gguf": lambda value, hp: {
                key: [nearest_float32(std_multiplier(one)) for one in value]
            },
        },
    )


def _stream_copies_rule() -> HyperRule:
    """Return the rule for the number of copies of the stream; the layers run on the first."""
    first = fixed_rule("", 0, "altup_active_idx", "{arch}.altup.active_idx")

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Return "" (no warning) for a usable number of copies of the residual stream, `value`.

        Raises ArchError below two copies, or if the layers run on another copy than the first.
        """
        assert first.check is not None
        if value < 2:
            raise ArchError(f"altup_num_inputs: is {value}; expected two copies of the stream")
        return first.check(value, facts, hp)

    def write_hf(value: Value, hp: Params) -> Params:
        """Return config.json's {key: number}: copies of the residual stream, and the active one."""
        return {"altup_active_idx": 0, "altup_num_inputs": value}

    def write_gguf(value: Value, hp: Params) -> Params:
        """Return GGUF's {key: number} for the copies of the residual stream and the active one."""
        return {"{arch}.altup.active_idx": 0, "{arch}.altup.num_inputs": value}

    usual = hyper_rules.size(_N, "altup_num_inputs", "altup.num_inputs", default=4)
    return replace(usual, check=check, write={"hf": write_hf, "gguf": write_gguf})


def _is_other_sparsity(hp: Params) -> bool:
    """Return whether the sparsity of any layer is not the one that llama.cpp's code has."""
    return bool(hp[_SPARSE] != (0.95,) * min(10, hp["n_layers"]) + (0.0,) * (hp["n_layers"] - 10))


_FIXED = (
    Loss("gguf", _SPARSE, _is_other_sparsity,
         "llama.cpp cuts 95% in the first ten layers, whatever the file says, and divides the "
         "variance by one less than the values"),
    pattern_loss(5),
    Loss("gguf", "final_softcap", lambda hp: hp["final_softcap"] != 30,
         "llama.cpp caps the logits at 30, whatever the file says"),
    Loss("gguf", "altup_scaled", lambda hp: not hp["altup_scaled"],
         "llama.cpp multiplies the first copy by its scale, whatever config.json says"),
    Loss("gguf", OWN, lambda hp: sum(hp[OWN]) != min(20, hp["n_layers"]),
         "llama.cpp lets the first 20 layers have keys and values, whatever the file says"),
    Loss("gguf", _N, lambda hp: hp[_N] != 4 or hp["laurel_rank"] != 64 or hp[PER] != 256,
         "llama.cpp has 4 copies of the stream, short cuts of rank 64 and 256 values a layer, and "
         "refuses a file with others"),
)  # fmt: skip


def _altup_projection_row(role: str, hf: str) -> RoleRow:
    """Return the table row of the projections of the copies, one tensor each, stacked in GGUF."""
    return RoleRow(
        f"{role}.weight",
        f"model.{hf}.{{E}}.weight",
        ("altup_extra", "hidden_size", "hidden_size"),
        hf_steps=(Stacked("altup_extra"),),
        layered=False,
    )


_ALTUP = (
    RoleRow("altup_correct_coef.weight", "altup.correction_coefs.weight", (_N, _N)),
    RoleRow("altup_correct_scale.weight", "altup.correct_output_scale", ("hidden_size",)),
    RoleRow("altup_predict_coef.weight", "altup.prediction_coefs.weight", (f"{_N}*{_N}", _N)),
    *linear("altup_router", "altup.modality_router", _N, "hidden_size"),
    *norm("altup_router_norm", "altup.router_norm"),
    *linear("laurel_l", "laurel.linear_left", "laurel_rank", "hidden_size"),
    *linear("laurel_r", "laurel.linear_right", "hidden_size", "laurel_rank"),
    *norm("laurel_post_norm", "laurel.post_laurel_norm"),
)
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *per_layer_embeddings(),
        _altup_projection_row("altup_proj", "altup_projections"),
        _altup_projection_row("altup_unembd_proj", "altup_unembed_projections"),
        *_ROWS[0],
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", bias=BIAS),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", OWN, bias=BIAS),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", OWN, bias=BIAS),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q, bias=OUT_BIAS),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",)),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), OWN),
        *_ROWS[1],
        *_ALTUP,
        *_ROWS[2],
        *gated_mlp(),
        *_ROWS[3],
        *per_layer_inputs(),
    )
)
GEMMA3N = ArchSpec(
    name="gemma3n",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(2048),
        hyper_rules.n_layers(35),
        hyper_rules.n_heads(8),
        hyper_rules.n_kv_heads(2),
        hyper_rules.head_dim(256),
        same_ffn_size(16384),
        hyper_rules.vocab_size(262400),
        hyper_rules.context_length(32768),
        hyper_rules.activation("gelu_tanh", "hidden_activation"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        hyper_rules.fixed("attn_scale", 1.0),
        *rope_rules(
            RopeDefaults(
                theta=1e6, theta_local=10000.0, local_key="rope_local_base_freq", layers="full"
            )
        ),
        *listed_windows(512, window_period(5)),
        softcap_rule("final_softcap", "final_logit_softcapping", "final_logit_softcapping", 30.0),
        embedding_scale_rule(),
        own_kv_rule(15),
        *per_layer_sizes(262144, 256),
        _stream_copies_rule(),
        hyper_rules.flag("altup_scaled", True, "altup_correct_scale"),
        HyperRule("altup_extra", default=lambda hp: hp[_N] - 1),
        hyper_rules.size(
            "laurel_rank",
            "laurel_rank",
            default=64,
            shape=hyper_rules.axis("laurel_l.weight", 0),
            shape_wins=True,
        ),
        _sparsity_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(
        norm_cast="after_weight",
        placement="sandwich",
        qk_norm="head",
        value_norm="plain",
        streams="altup",
    ),
    lost=(
        *losses.common_losses("gelu_tanh"),
        losses.ONE_BIAS_KEY,
        NO_BIASES,
        PADDED,
        REUSED,
        *_FIXED,
    ),
    # Clamps of altup's coefficients while it is trained.
    ignored=frozenset({"altup_coef_clip", "hidden_act"}),
)
