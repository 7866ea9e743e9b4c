"""Rules for the hyperparameters of latent attention (MLA) and of deepseek's experts.

In GGUF the head counts and lengths describe attention on the compressed vectors; the lengths of
the heads are in `..._mla` keys (older files have only these, under the plain keys). Source:
docs/reference/architectures.md; the converter's deepseek.py; llama.cpp's deepseek2.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, moe
from aprfmt.arch.layer_kinds import read_layer_kinds
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults, yarn_mscale
from aprfmt.arch.spec import MISSING, Facts, Found, HyperRule, Loss, Params, Read
from aprfmt.arch.value_checks import MAX_ROTATED, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

NOPE, ROPE = 128, 64  # transformers' defaults, v2 and v3


def _size_or_default(facts: Facts, key: str, default: int) -> int:
    """Return the size that `key` has, or the default."""
    found = facts.first(key)
    size: int = default if found is None else whole_number(*found, 1)
    return size


def mla_length_rules(nope: int = NOPE, value: int = 128) -> tuple[HyperRule, HyperRule]:
    """Return (the rule for the elements of a key head, the rule for those of a value head).

    `nope` is a key's elements without rope, `value` those of a value, where config.json has no key.
    """

    def read_head_dim(facts: Facts, hp: Params) -> Found:
        """Return (elements of a key head, key) of config.json: those without rope, plus those with.

        An absent key has its default, so None is never returned.
        """
        rope = _size_or_default(facts, "qk_rope_head_dim", ROPE)
        return _size_or_default(facts, "qk_nope_head_dim", nope) + rope, "qk_nope_head_dim"

    return (
        HyperRule(
            "head_dim",
            {"gguf": ("{arch}.attention.key_length_mla", "{arch}.attention.key_length")},
            "size",
            read={"hf": read_head_dim},
            write={"hf": lambda value, hp: {}, "gguf": _write_lengths},
        ),
        HyperRule(
            "value_head_dim",
            {
                "hf": ("v_head_dim",),
                "gguf": ("{arch}.attention.value_length_mla", "{arch}.attention.value_length"),
            },
            "size",
            MISSING,
            {"hf": value},
            write={"gguf": lambda value, hp: {}},
        ),
    )


def q_lora_rank_rule(hf_default: int = 1536) -> HyperRule:
    """Return the rule for the rank of the compressed query; null: it is not compressed."""
    return hyper_rules.size(
        "q_lora_rank",
        "q_lora_rank",
        "attention.q_lora_rank",
        default=None,
        hf_default=hf_default,
        null_in=("hf",),
    )


def _write_lengths(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: length} of the compressed vectors, and of the heads in `..._mla` keys."""
    rank = hp["kv_lora_rank"]
    return {
        "{arch}.attention.key_length": rank + hp["qk_rope_head_dim"],
        "{arch}.attention.value_length": rank,
        "{arch}.attention.key_length_mla": value,
        "{arch}.attention.value_length_mla": hp["value_head_dim"],
    }


def _shared_expert_count(value: Value, hp: Params) -> int:
    """Return how many experts the shared experts' joint width `value` makes; 0 without experts."""
    size: int = value // hp["moe_ffn_size"] if hp["moe_ffn_size"] else 0
    return size


def shared_experts_rule(key: str, hf_default: int = 0) -> HyperRule:
    """Return the rule for the shared experts' joint width; a file gives their number.

    `key` is config.json's (of several, separated by spaces, the first is written), `hf_default`
    transformers' number without it.
    """
    keys = key.split()

    def read_with(*keys: str) -> Read:
        """Return a read function for the shared experts' joint width.

        The file has their number under one of `keys`.
        """

        def read_shared_width(facts: Facts, hp: Params) -> Found:
            """Return (joint width of the shared experts, key): their number times one's width.

            The number is under one of `keys`; None without it.
            """
            found = facts.first(*keys)
            return None if found is None else (whole_number(*found) * hp["moe_ffn_size"], found[1])

        return read_shared_width

    gguf = "{arch}.expert_shared_count"
    return HyperRule(
        "shared_ffn_size",
        read={"hf": read_with(*keys), "gguf": read_with(gguf)},
        write={
            "hf": lambda value, hp: {keys[0]: _shared_expert_count(value, hp)},
            "gguf": lambda value, hp: {gguf: _shared_expert_count(value, hp)},
        },
        default=0,
        default_in={"hf": lambda hp: hf_default * hp["moe_ffn_size"]},
    )


def dense_first_rule(hf_default: int, hf: str = "first_k_dense_replace") -> HyperRule:
    """Return the rule for moe_layers: all layers except the first few, counted by key `hf`.

    `hf_default` is how many are dense without the key.
    """

    def read_with(*keys: str) -> Read:
        """Return a read function for which layers have experts, all after the dense first ones.

        The file has the number of dense layers under one of `keys`.
        """

        def read_moe_layers(facts: Facts, hp: Params) -> Found:
            """Return (one boolean per layer: it has experts, key); None without one of `keys`.

            The key has how many first layers are dense.
            """
            found = facts.first(*keys)
            if found is None:
                return None
            first = whole_number(*found)
            return tuple(i >= first for i in range(hp["n_layers"])), found[1]

        return read_moe_layers

    gguf = "{arch}.leading_dense_block_count"
    return HyperRule(
        "moe_layers",
        read={"hf": read_with(hf), "gguf": read_with(gguf)},
        write={
            "hf": lambda value, hp: {hf: (*value, True).index(True)},
            "gguf": lambda value, hp: {gguf: (*value, True).index(True)},
        },
        default=lambda hp: tuple(i >= hf_default for i in range(hp["n_layers"])),
        default_in={"gguf": MISSING},
    )


def listed_experts_rule(dense: int, *, counted: bool) -> HyperRule:
    """Return the rule for moe_layers where config.json lists kinds; GGUF counts the dense ones.

    Without a list the first `dense` layers are dense. With `counted`, transformers also reads the
    key that counts them.
    """
    first, key = dense_first_rule(dense), "mlp_layer_types"
    listed = read_layer_kinds(("sparse",), ("dense",), key)

    # The list wins over the count, which not all models of the family read.
    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has experts, key) of config.json; None without a key.

        The list of kinds counts, else, with `counted`, the number of dense first layers.
        """
        found = listed(facts, hp)
        return first.read["hf"](facts, hp) if found is None and counted else found

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {key: value}: the number of dense first layers, the list of kinds.

        `value` has one boolean per layer: it has experts.
        """
        kinds = ["sparse" if on else "dense" for on in value]
        return {**first.write["hf"](value, hp), key: kinds}

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Return a warning if config.json counts other dense first layers than `value`, else "".

        `value` has one boolean per layer: it has experts.
        """
        found = facts.first("first_k_dense_replace")
        there = (*value, True).index(True)
        if facts.style != "hf" or found is None or whole_number(*found) == there:
            return ""
        return (
            f"{found[1]} is {found[0]}, but the layers are listed, or fixed: {there} are believed"
        )

    return replace(
        first, read={**first.read, "hf": read}, write={**first.write, "hf": write}, check=check
    )


LISTED_EXPERTS_LOSS = Loss(
    "gguf",
    "moe_layers",
    lambda hp: any(
        hp["moe_layers"][:i].count(True) for i, on in enumerate(hp["moe_layers"]) if not on
    ),
    "GGUF has the number of dense layers at the beginning only",
)


def _yarn_attn_scale(hp: Params) -> float:
    """Return 1/sqrt(head_dim) times yarn's mscale_all_dim term, squared."""
    scaling = hp["rope_scaling"] or {}
    every = scaling.get("mscale_all_dim")
    factor = yarn_mscale(scaling["factor"], every) if every else 1.0
    return hyper_rules.default_attn_scale(hp) * factor * factor


def expert_groups_rule(name: str, hf: str, gguf: str, default: int) -> HyperRule:
    """Return the rule `name` for a number of groups of experts; a GGUF without the key has 1.

    `hf` and `gguf` are its keys, `default` is the number where config.json has no key.
    """
    check = _check_enough_experts if name == "n_expert_groups_used" else None
    return hyper_rules.size(name, hf, gguf, default=1, hf_default=default, check=check)


def _check_enough_experts(value: Value, facts: Facts, hp: Params) -> str:
    """Return "" (no warning) for `value` groups kept; ArchError if they have too few experts.

    They need as many as a token uses.
    """
    groups, used = hp["n_expert_groups"], hp["n_experts_used"]
    there = value * (hp["n_experts"] // groups)
    if groups > 1 and there < used:
        raise ArchError(
            f"{value} of {groups} groups of experts are kept, which have {there} experts; expected "
            f"at least the {used} that a token takes"
        )
    return ""


def mla_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the rules that deepseek v2 and v3 share; `overrides` replace or add to them."""
    return hyper_rules.hyper_table(
        # Key heads are not shared in MLA: every head has its own part of kv_b.
        HyperRule(
            "n_kv_heads",
            {"apr": ("num_kv_heads",)},
            read={"apr": lambda facts, hp: None},
            default=lambda hp: hp["n_heads"],
            write={
                "hf": lambda value, hp: {"num_key_value_heads": value},
                "gguf": lambda value, hp: {"{arch}.attention.head_count_kv": 1},
            },
        ),
        *mla_length_rules(),
        HyperRule("lora_norm_eps", default=1e-6, default_in={"gguf": lambda hp: hp["norm_eps"]}),
        hyper_rules.flag(
            "attention_bias", False, "attention_bias", present=("attn_kv_a_mqa.bias",)
        ),
        hyper_rules.flag(
            "attention_out_bias",
            False,
            "attention_bias",
            present=("attn_output.bias",),
            written=False,
        ),
        *rope_rules(RopeDefaults()),
        HyperRule(
            "rope_dim",
            {"hf": ("qk_rope_head_dim",), "gguf": ("{arch}.rope.dimension_count",)},
            "size",
            MISSING,
            {"hf": ROPE},
            high=MAX_ROTATED,
        ),
        hyper_rules.attn_scale(_yarn_attn_scale),
        q_lora_rank_rule(),
        hyper_rules.size("kv_lora_rank", "kv_lora_rank", "attention.kv_lora_rank", hf_default=512),
        HyperRule(
            "qk_nope_head_dim",
            write={"hf": lambda value, hp: {"qk_nope_head_dim": value}},
            default=lambda hp: hp["head_dim"] - hp["rope_dim"],
        ),
        HyperRule("qk_rope_head_dim", default=lambda hp: hp["rope_dim"]),
        moe.expert_size_rule(),
        shared_experts_rule("n_shared_experts"),
        *overrides,
    )
