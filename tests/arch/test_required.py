"""Required tensors: the tables against transformers' own models, and models with a tensor removed.

Every boolean of every model type's configuration is flipped: the parameters transformers then
creates are those that the tables require for its config.json, without looking at tensors. Then each
required tensor is removed, in one layer and in all, and every check of completeness names it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import ARCHS, arch_names, find_arch
from aprfmt.arch.binding import bind_names
from aprfmt.arch.hyperparameters import read_hyper, write_hyper
from aprfmt.arch.required_roles import compare_roles, expected_roles
from aprfmt.arch.spec import ArchSpec, Facts, split_key
from aprfmt.base.protocols import LazyTensor
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.architecture_checks import check_completeness
from aprfmt.conversion import convert
from aprfmt.conversion.options import Options
from aprfmt.conversion.plan import build_plan
from aprfmt.errors import ArchError, ConversionError
from aprfmt.formats import FORMATS
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.session import Session
from aprfmt.model import Model, open_model
from tests.arch.tiny import TINY, Tiny, make, parameter_shapes, read, ready
from tests.berts import BERTS

TYPES = tuple({tiny.model_type: tiny for tiny in reversed(TINY)}.values())
every = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
every_type = pytest.mark.parametrize("tiny", TYPES, ids=lambda tiny: tiny.model_type)

# Keys that no supported decoder has: an encoder's; attention to later tokens (refused).
# Keys without which transformers makes no model.
NEEDED = {
    "kimi_linear": ("layer_types",),
    "dots1": ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    **dict.fromkeys(BERTS, ("is_decoder",)),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("layer_types",)),
    "gemma3n": ("layer_types", "num_kv_shared_layers"),
    "mamba2": ("num_heads", "n_groups", "head_dim"),
    "bamba": ("mamba_n_heads", "attn_layer_indices"),
    "granite_hybrid": ("mamba_n_heads", "layer_types", "num_local_experts"),
    "granite_hybrid_moe": ("mamba_n_heads", "layer_types"),
    "nemotron_h": ("layers_block_type",),
    "nemotron_h_moe": ("layers_block_type",),
}
NOT_OURS = {
    "gpt2": {"add_cross_attention"},
    "gemma3": {"use_bidirectional_attention"},
    "gpt_bigcode": {"add_cross_attention"},
    "bloom": {"apply_residual_connection_post_layernorm"},
    "opt": {"do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"},
    # Other kinds of layers, which models of ours have.
    "gemma4": {"enable_moe_block", "attention_k_eq_v"},
    "gemma4_unified": {"attention_k_eq_v"},
    # Falcon's other blocks are other architectures, or refused.
    "falcon": {"alibi", "new_decoder_architecture"},
    # Those that do not look back only are encoders; attention to an encoder is refused.
    **{key: {"is_decoder", "add_cross_attention"} for key in BERTS},
}

# Flags that transformers takes together only.
TOGETHER = {"internlm3": {"attention_bias", "mlp_bias"}}


def demanded(spec: ArchSpec, config: Mapping[str, Any]) -> set[str]:
    """Return the roles that are required by a config.json alone."""
    hp, report = read_hyper(spec, Facts("hf", config, {}), "config.json")
    values = {name: row.value for name, row in report.demanded.items()}
    return set(expected_roles(spec, hp, values))


def made(tiny: Tiny, **changes: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the config.json transformers writes, and the roles of the model it makes."""
    import json

    import torch
    import transformers

    auto: Any = transformers
    ready()
    config = auto.AutoConfig.for_model(tiny.model_type, **{**tiny.sizes, **tiny.config, **changes})
    with torch.device("meta"):
        model = auto.AutoModelForCausalLM.from_config(config)
    shapes = parameter_shapes(model)
    bound = bind_names(
        find_arch("hf", tiny.model_type, list(shapes), config.to_dict()), "hf", shapes
    )
    assert bound.unbound == ()
    roles = {key for group in bound.groups for key in group.roles}
    return json.loads(model.config.to_json_string(use_diff=True)), roles


@every
def test_a_configuration_demands_what_transformers_makes(tiny: Tiny) -> None:
    found = read(tiny)
    assert demanded(found.spec, make(tiny).config) == set(found.shapes)


@every_type
def test_every_flag_of_a_configuration_on_and_off(tiny: Tiny) -> None:
    import transformers

    auto: Any = transformers
    spec = find_arch("hf", tiny.model_type, values=tiny.config)
    plain = Tiny(tiny.arch, tiny.model_type, sizes=tiny.sizes)
    needs = {"pad_token_id": 0, **({} if "head_dim" not in tiny.config else {"head_dim": 10})}
    needs |= {key: tiny.config[key] for key in NEEDED.get(tiny.arch, ())}
    flags = {
        key: value
        for key, value in auto.AutoConfig.for_model(tiny.model_type).to_dict().items()
        if isinstance(value, bool) and key not in NOT_OURS.get(tiny.arch, ())
    }
    flags.setdefault("tie_word_embeddings", False)  # of a text alone transformers states none
    saved, usual = made(plain, **needs)
    shown = set()
    for key, default in flags.items():
        joined = TOGETHER.get(tiny.arch, set())
        keys = joined if key in joined else {key}
        for value in (False, True):
            config, roles = made(plain, **needs, **dict.fromkeys(keys, value))
            assert demanded(spec, config) == roles, (key, value)
            if roles != usual:
                shown.add(key)
        without = {name: value for name, value in saved.items() if name not in keys}
        assert demanded(spec, without) == usual, (key, default)
    rules = [rule for rule in spec.hyper if rule.present or rule.absent]
    assert shown == {key for rule in rules for key in rule.keys.get("hf", ())[:1]}


def test_a_multimodal_configuration_demands_the_text_models_tensors() -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "head_dim": 10}
    spec = ARCHS["gemma3"]
    for flag in ({}, {"attention_bias": True}, {"tie_word_embeddings": False}):
        config = {"model_type": "gemma3", "text_config": {**text, **flag}}
        assert demanded(spec, config) == demanded(spec, {**text, **flag})
    assert "output.weight" not in demanded(spec, {"text_config": text})


# --- a tensor left out --------------------------------------------------------------------------


class Without:
    """An open file that lacks some tensors."""

    def __init__(self, source: Any, *names: str) -> None:
        self._source = source
        self.tensors: dict[str, LazyTensor] = {
            name: tensor for name, tensor in source.tensors.items() if name not in names
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def lacking(model: Model, *names: str, allow: tuple[str, ...] = ()) -> Model:
    """Return an open model without some of its stored tensors."""
    source: Any = Without(model.source, *names)
    return Model(source, model.folder, allow_missing=allow)


def leavings(model: Model) -> Iterator[tuple[list[str], set[str]]]:
    """Yield stored names to remove, with the roles that are lost: for each binding the last tensor
    of the last layer, then all its tensors.
    """
    by_binding: dict[int, list[Any]] = {}
    for tensor in model.roles.values():
        assert tensor.group is not None
        groups = by_binding.setdefault(id(tensor.group.binding), [])
        if tensor.group not in groups:
            groups.append(tensor.group)
    for groups in by_binding.values():
        yield [groups[-1].stored[-1]], set(groups[-1].roles)
        yield (
            [name for group in groups for name in group.stored],
            {role for group in groups for role in group.roles},
        )


def refusals(model: Model) -> Iterator[str]:
    """Yield the errors of validate, a session and conversions to all formats."""
    checked = check_completeness(CheckContext(model))
    yield " ".join(f.where for f in checked.findings if f.level == "fail")
    with pytest.raises(ArchError) as refused:
        Session.open(model, BACKENDS["numpy"]("cpu", "float32"))
    yield str(refused.value)
    for name in ("gguf", "apr", "safetensors"):
        with pytest.raises(ConversionError) as kept:
            build_plan(model, FORMATS[name], Options())
        yield str(kept.value)


class Folders(dict[str, Path]):
    """A saved model of each tiny configuration that is asked for, by its id."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, id: str) -> Path:
        folder = self._root / id
        make(next(tiny for tiny in TINY if tiny.id == id)).model.save_pretrained(folder)
        self[id] = folder
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return Folders(tmp_path_factory.mktemp("tiny"))


def named(text: str, roles: set[str]) -> bool:
    """Say whether a refusal names a lost role; it lists the first few."""
    return any(role in text for role in roles)


@every
def test_every_tensor_left_out_is_named(tiny: Tiny, folders: Mapping[str, Path]) -> None:
    with open_model(folders[tiny.id]) as whole:
        assert not whole.resolution.missing and not whole.resolution.unbound
        for names, roles in leavings(whole):
            model = lacking(whole, *names)
            assert set(model.resolution.missing) == roles, names
            assert model.resolution.coverage.expected == len(whole.roles)
            for said in refusals(model):
                assert named(said, roles), (names, said)


@every
def test_what_the_pass_can_do_without_may_be_allowed(
    tiny: Tiny, folders: Mapping[str, Path]
) -> None:
    backend = BACKENDS["numpy"]("cpu", "float32")
    with open_model(folders[tiny.id]) as whole:
        for names, roles in leavings(whole):
            model = lacking(whole, *names, allow=("*",))
            found = model.resolution.coverage
            assert set(found.accepted) == roles and not found.missing
            plan = build_plan(model, FORMATS["apr"], Options())
            assert set(plan.absent) == roles
            if found.vital:
                with pytest.raises(ArchError, match="can do without: "):
                    Session.open(model, backend)
            else:
                with Session.open(model, backend) as session:
                    assert np.isfinite(session.logits([3, 1, 2])).all(), names


def test_which_losses_a_pass_survives(folders: Mapping[str, Path]) -> None:
    """Any number of biases; a head; q/k-norms and a second norm only if all of them are missing.

    So it is with gates of heads and norms of states, which their tensors show to be there.
    """
    spared = set()
    for tiny in TINY:
        with open_model(folders[tiny.id]) as whole:
            for names, _ in leavings(whole):
                found = lacking(whole, *names).resolution.coverage
                spared |= {split_key(key)[1] for key in set(found.missing) - set(found.vital)}
    shown = {"attn_gate.weight", "ssm_norm.weight"}
    assert {role for role in spared if not role.endswith(".bias")} == {"output.weight", *shown}
    theirs = {
        "cohere-qk_norm": ("q_norm.weight", "k_norm.weight"),
        "phi2-qk_norm": ("q_layernorm.weight", "k_layernorm.weight"),
        "stablelm-parallel": ("norms.",),
        "stablelm-plain": ("post_attention_layernorm.",),
    }
    for tiny_id, parts in theirs.items():
        with open_model(folders[tiny_id]) as whole:
            names = [name for name in whole if any(part in name for part in parts)]
            found = lacking(whole, *names).resolution.coverage
            assert found.missing and not found.vital, tiny_id


# --- files that carry no configuration ------------------------------------------------------------

# Roles that llama.cpp requires (`create_tensor` without TENSOR_NOT_REQUIRED in its load functions),
# or for biases the row's default, in a file without keys for them in which all are missing.
INSISTED = {
    "attn_q.bias": {
        "jais2",
        "qwen2", "qwen2_moe", "gpt_oss", "starcoder2", "phi2", "gpt2", "seed_oss", "glm", "glm4",
        "gpt_neox", "gpt_bigcode", "bloom", "opt", "opt_350m", "qwen2_vl", "qwen2_5_vl",
        "bert_causal", "roberta_causal",
    },
    "attn_output.bias": {
        "gpt_oss", "starcoder2", "phi2", "gpt2", "gpt_neox", "gpt_bigcode", "bloom", "opt",
        "opt_350m", "jais2", "bert_causal", "roberta_causal",
    },
    "ffn_up.bias": {
        "starcoder2", "phi2", "gpt2", "gpt_neox", "gpt_bigcode", "gptj", "bloom", "opt", "opt_350m",
        "jais2", "bert_causal", "roberta_causal",
    },
    "ffn_norm.weight": set(arch_names()) - {
        "phi2", "cohere", "olmo2", "olmo3", "exaone4", "cohere2", "gptj", "falcon", "falcon_rw",
        "opt_350m", "bert_causal", "roberta_causal", "mamba", "falcon_mamba", "mamba2",
        "nemotron_h", "nemotron_h_moe",
    },
    "attn_q_norm.weight": {
        "qwen3", "qwen3_moe", "gemma3", "olmo2", "olmo3", "exaone4", "exaone_moe", "hy_v3",
        "olmoe",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2", "minimax_m3_vl", "dots1",
        "qwen3_next", "qwen3_5",
        "qwen3_5_moe", "apertus", "qwen3_vl", "qwen3_vl_moe", "lfm2", "lfm2_moe",
        "lfm3", "gemma3n", "gemma4", "gemma4_unified", "olmo_hybrid",
    },
    "output.weight": {
        "phi2", "stablelm", "olmo2", "olmo3", "qwen2_moe", "gpt_oss", "nemotron", "olmoe",
        "minimax_m2", "gpt_neox", "gptj", "dots1",
    },
}  # fmt: skip


@pytest.mark.parametrize("style", ["gguf", "apr"])
@pytest.mark.parametrize("tiny", TYPES, ids=lambda tiny: tiny.arch)
def test_a_file_without_a_configuration_has_its_rows_demands(tiny: Tiny, style: str) -> None:
    """No key for biases, norms or head is written: the row decides, or llama.cpp's rule."""
    found = read(tiny)
    keys = {
        key: value
        for key, value in write_hyper(found.spec, found.hp, style).items()
        if key.rpartition(".")[2] != "use_parallel_residual"
    }
    optional = [role for rule in found.spec.hyper for role in (*rule.present, *rule.absent)]
    shapes = {
        key: shape
        for key, shape in found.shapes.items()
        if split_key(key)[1] not in {*optional, *INSISTED}
    }
    hp, report = read_hyper(found.spec, Facts(style, keys, shapes, names=style), tiny.id)
    lost = compare_roles(
        found.spec, hp, shapes, {n: row.value for n, row in report.demanded.items()}
    )
    missing = {split_key(key)[1] for key in lost.missing}
    for role, archs in INSISTED.items():
        assert (role in missing) is (tiny.arch in archs), role


def test_command_r_plus_has_its_norms_in_a_file_without_configuration() -> None:
    """llama.cpp requires q/k-norms from 64 layers on, and GGUF has no key for them."""
    found = read(next(tiny for tiny in TINY if tiny.id == "cohere-qk_norm"))
    for layers, insisted in ((63, False), (64, True)):
        deep = found.hp.with_values(n_layers=layers)
        written = write_hyper(found.spec, deep, "gguf", complete=False)
        hp, report = read_hyper(found.spec, Facts("gguf", written, {"x": ()}), "x.gguf")
        assert report.demanded["qk_norm"].value is insisted
        assert hp["qk_norm"] is False


@pytest.mark.parametrize("format_name", ["gguf", "apr", "safetensors"])
def test_every_tensor_left_out_of_every_container_is_named(
    format_name: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / f"whole.{format_name}"
    target = target.with_suffix("") if format_name == "safetensors" else target
    for tiny_id in ("qwen2-plain", "llama-biases", "deepseek_v3-plain", "gpt_oss-plain"):
        convert(folders[tiny_id], target, to=format_name, force=True)
        with open_model(target) as whole:
            for names, roles in leavings(whole):
                model = lacking(whole, *names)
                assert set(model.resolution.missing) == roles, (tiny_id, names)
                assert all(named(said, roles) for said in refusals(model)), (tiny_id, names)
