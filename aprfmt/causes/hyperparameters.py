"""Level two: hyperparameters that change the forward pass, and the cause that each one means."""

from collections.abc import Mapping
from functools import cache

from aprfmt.arch.rope_gguf import stored_scaling_name
from aprfmt.causes import CAUSES
from aprfmt.causes.row import Cause
from aprfmt.measure.records import FieldDiff, TensorDiff
from aprfmt.model import Model
from aprfmt.model.relations import Relation

CAUSE_ROWS = (
    Cause(
        "config_sizes", "config", "bug",
        "A key of the configuration says another size than the tensors have.",
        "Many tensors have other shapes than the configuration gives, or none can be read by it.",
        "With the one value that is solved from the tensors every shape is right.",
    ),
    Cause(
        "architecture_key", "config", "bug",
        "The file's own key names another architecture than its configuration, or none.",
        "`general.architecture` of a GGUF is no name of the architecture that its carried "
        "config.json and its tensors have: other programs read that key alone.",
        "The key and the names of the architecture are compared; nothing is fitted.",
    ),
    Cause(
        "equal_quantities", "config", "same",
        "Hyperparameters are written otherwise, and every layer computes with the same numbers: a "
        "window no smaller than the context, a scaling by 1, factors for a named rule.",
        "Keys differ; inverse frequencies, masks, functions and factors do not.",
        "The quantities of every layer are equal up to the context length.",
    ),
    Cause(
        "pooling", "config", "bug",
        "An embedding is made of other rows of the last layer: of all, the first or the last one.",
        "Every point before `pooled` is equal; 1_Pooling/config.json or pooling_type says another.",
        "With the other side's pooling the embedding agrees.",
        keys=("pooling",),
    ),
)  # fmt: skip

# Hyperparameters that mean no cause: models of different sizes are different models.
SIZES = (
    "hidden_size", "embedding_width", "n_layers", "ffn_size", "vocab_size", "qk_norm",
    "token_types", "position_buckets", "delta_layers", "delta_key_dim", "delta_value_dim",
    "conv_layers", "conv_taps", "rope_sections", "deepstack_layers", "n_experts", "moe_ffn_size",
    "shared_ffn_size", "moe_layers", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "attn_norm_layers", "attention_layers",
    "ssm_layers", "mlp_layers", "ssm_size", "ssm_state", "ssm_rank", "ssm_group_size",
    "ssm_inner_norms", "latent_size", "expert_width", "wide_stream",
    "per_layer_size", "per_layer_vocab", "altup_streams", "altup_extra", "laurel_rank",
    "wide_layers", "sandwich_norms", "head_gate", "index_heads", "index_head_dim",
    "lightning_layers", "hash_layers", "output_groups", "output_rank", "output_group_size",
    "hc_streams",
)  # fmt: skip


# Widths of a head: tensors of another width than a key gives are sizes, and map no heads.
_WIDTHS = ("head_dim", "value_head_dim", "global_head_dim")
# A relation's kind -> the cause that it is; all others are tensor_names.
_CAUSE_OF_RELATION = {
    "axes": "transpose",
    "kernels": "stored_shape",
    "keys": "config_sizes",
    "modules": "packing_claim",
    "claims": "packing_claim",
}


def relation_cause(relation: Relation, model: Model) -> str:
    """Return the name of the cause that explains a Relation, such as renamed keys or tensors.

    `model` is the one whose names the relation maps. For renamed keys it is the cause of the first
    hyperparameter that one of the keys states, if any.
    """
    cause = _CAUSE_OF_RELATION.get(relation.kind, "tensor_names")
    if relation.kind != "keys":
        return cause
    # A GGUF's key may be read together with a configuration inside it: the table knows both.
    spelled = {f"{{arch}}.{key.partition('.')[2]}" for key in relation.where}
    spelled |= {*relation.where}
    named = (
        hyper_causes().get(rule.name)
        for rule in model.spec.hyper
        if rule.name not in _WIDTHS
        and any(not spelled.isdisjoint(keys) for keys in rule.keys.values())
    )
    return next(filter(None, named), cause)


@cache
def hyper_causes() -> Mapping[str, str]:
    """Return {hyperparameter: name of the cause that a difference in it means}, "" for sizes.

    A cause's row says which hyperparameters are its `keys`.
    """
    named = {key: name for name in CAUSES.own for key in CAUSES[name].keys}
    return dict.fromkeys(SIZES, "") | named


# Hyperparameters read from the presence of tensors -> the roles that show them.
SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    "tied_embeddings": ("output.weight",),
}


_DENIED = "transformers and vLLM drop the stored tensors, llama.cpp and aprfmt use them"
_MISSING = "transformers fills them with zeros, which change nothing; llama.cpp and aprfmt add none"
BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
# Flags that a model's own tensors contradict: (hyperparameter, what the flag says) -> what loaders
# do.
FLAG_LOADERS: Mapping[tuple[str, bool], str] = {
    **{(name, False): _DENIED for name in BIASES},
    **{(name, True): _MISSING for name in BIASES},
    ("tied_embeddings", True): (
        "transformers 5 keeps the stored head and warns, older ones and vLLM use the embedding, "
        "llama.cpp and aprfmt the stored head"
    ),
    ("tied_embeddings", False): (
        "no head is stored: transformers draws one at random and warns, llama.cpp and aprfmt use "
        "the embedding"
    ),
    ("parallel_residual", True): (
        "transformers drops the second norm and adds attention and MLP to one stream, llama.cpp "
        "and aprfmt follow the tensors"
    ),
}


def is_read_as_flag(style: str, name: str, says: object) -> bool:
    """Return whether `contradicted_flags` judges a configuration key that the tensors contradict.

    `style` is the naming that the key is of ("hf" for config.json), `name` the hyperparameter,
    `says` the key's value.
    """
    return style == "hf" and isinstance(says, bool) and (name, says) in FLAG_LOADERS


def shows_hyper(key: str, name: str) -> bool:
    """Return whether a tensor exists only for some values of hyperparameter `name`.

    `key` is the tensor's role, with or without its layer.
    """
    roles = SHOWN_BY.get(name, ())
    return key in roles or key.partition(".")[2] in roles


def lacks_tensors_of(model: Model, name: str) -> bool:
    """Return whether a model lacks a required tensor that exists by hyperparameter `name`."""
    coverage = model.resolution.coverage
    return any(shows_hyper(key, name) for key in (*coverage.missing, *coverage.accepted))


# Parts of a scaling in normal form -> keys of config.json, where they are spelled otherwise.
_SPELLED: Mapping[str, str] = {
    "original_context_length": "original_max_position_embeddings",
    "type": "rope_type",
}


def difference_sentence(row: FieldDiff, a: Model | None = None, b: Model | None = None) -> str:
    """Return a sentence about one differing hyperparameter: both values, and where they are from.

    For a dictionary (rope scaling) it names only the sub-keys that differ, and says which of them
    B's configuration lacks. `a` and `b` are the models, read for missing keys only.
    """
    if isinstance(row.a, Mapping) and isinstance(row.b, Mapping):
        parts = [
            f"{key}: A has {_hyper_text(row.a.get(name))}, B {_hyper_text(row.b.get(name))}"
            + f" ({_stored_key(b, row.name, key)} is missing from B; a default stands in)"
            * (
                _lacks_scaling_key(b, row.origin_b, name)
                and (_needs_keys(b) or not _lacks_scaling_key(a, row.origin_a, name))
            )
            for name, key in _differing_scaling_keys(row)
        ]
        return f"{row.name}: {', '.join(parts)}"
    lost = lost_tensors(row.name, a, b)
    return (
        f"{row.name}: A has {_hyper_text(row.a)} ({_origin_text(row.name, row.origin_a, a)}), "
        f"B {_hyper_text(row.b)} ({_origin_text(row.name, row.origin_b, b)})"
        + f"; B lacks {' and '.join(lost)}, which would have it"
        * bool(lost)
    )


def _origin_text(name: str, origin: str, model: Model | None) -> str:
    """Return in words where a hyperparameter's value was read.

    Where the tensors overrule a key of the configuration, the key and its value are said too.
    """
    said = None if model is None else model.resolution.report.overruled.get(name)
    if said is None or not origin.startswith("shape"):
        return origin or "not there"
    return f"by its tensors, though {said.key} says {_hyper_text(said.value)}"


def lost_tensors(name: str, a: Model | None, b: Model | None) -> tuple[str, ...]:
    """Return the tensors in which B's format would store a hyperparameter of A, and that B lacks.

    Only `rope_scaling` is stored so: GGUF has a tensor of rope's frequency divisors. () for other
    hyperparameters or without both models.
    """
    if a is None or b is None or name != "rope_scaling":
        return ()
    stored = ((one.name(b.key_style or ""), one) for one in a.spec.derived)
    return tuple(
        each for each, one in stored if each and each not in b and one.make(a.hyper) is not None
    )


def _needs_keys(model: Model | None) -> bool:
    """Return whether a model is a GGUF, whose format states values that other formats compute.

    False for None.
    """
    return model is not None and model.key_style == "gguf"


def _stored_key(model: Model | None, name: str, key: str) -> str:
    """Return the GGUF key or tensor name of a hyperparameter's sub-key, as of `rope_scaling`.

    `key` itself is returned for other formats, for None, and where GGUF cannot state it.
    """
    if model is None or not _needs_keys(model):
        return key
    return stored_sub_key(model, f"{name}.{key}") or key


def stored_sub_key(model: Model, place: str) -> str:
    """Return what a model's file calls a sub-key of a scaling; "" if its format has no key for it.

    `place` is `NAME.KEY`: the hyperparameter, such as `rope_scaling`, and its sub-key. The result
    is a nested key of config.json, or a GGUF's key or tensor.
    """
    name, _, key = place.partition(".")
    if name not in model.hyper or not key or not isinstance(model.hyper[name], Mapping):
        return ""
    own = next((each for each, spelled in _SPELLED.items() if spelled == key), key)
    if _needs_keys(model):
        kind = str(model.hyper[name]["type"])
        return stored_scaling_name(kind, own, str(model.metadata.get("general.architecture")))
    found = model.hyper.of(name).key or ""
    head, dot, _ = found.rpartition(".")
    return f"{head}{dot}{key}" if head else ""


def differing_sub_keys(row: FieldDiff) -> tuple[str, ...]:
    """Return `NAME.KEY` of each sub-key of a scaling that differs; () for any other value."""
    if not isinstance(row.a, Mapping) or not isinstance(row.b, Mapping):
        return ()
    return tuple(f"{row.name}.{key}" for _, key in _differing_scaling_keys(row))


def _differing_scaling_keys(row: FieldDiff) -> list[tuple[str, str]]:
    """Return (name used here, key of config.json) for each sub-key in which two scalings differ."""
    assert isinstance(row.a, Mapping) and isinstance(row.b, Mapping)
    names = dict.fromkeys((*row.a, *row.b))
    return [(n, _SPELLED.get(n, n)) for n in names if row.a.get(n) != row.b.get(n)]


def _lacks_scaling_key(model: Model | None, origin: str, name: str) -> bool:
    """Return whether a model's configuration has the scaling but no key for the sub-key `name`.

    `origin` is where the scaling was read, such as "config.json rope_scaling". False without a
    model or without a scaling in its configuration.
    """
    if model is None:
        return False
    if _needs_keys(model):
        stored = _stored_key(model, "rope_scaling", name)
        return stored not in model.metadata and stored not in model
    found: object = model.config or {}
    for key in origin.rpartition(" ")[2].split(".")[:-1]:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        return False
    return not {name, _SPELLED.get(name, name)} & {*found, *(model.config or {})}


def _hyper_text(value: object) -> str:
    """Return a hyperparameter's value as text of at most 80 characters."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def tensors_of_hyperparameter(name: str, tensors: Mapping[str, TensorDiff]) -> tuple[str, ...]:
    """Return the keys of one-sided tensors that exist by the value of hyperparameter `name`.

    `tensors` is {key: comparison} of the two models.
    """
    return tuple(
        key
        for key, row in tensors.items()
        if row.verdict in ("ONLY_IN_A", "ONLY_IN_B") and shows_hyper(key, name)
    )
