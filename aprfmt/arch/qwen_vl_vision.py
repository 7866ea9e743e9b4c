"""The towers and mergers of qwen2_vl, qwen2_5_vl and qwen3_vl, each a file of its own in GGUF.

A patch is two frames deep: GGUF has its convolution as two. qwen2_5_vl has windows in all but
every n-th layer. qwen3_vl has a table of positions, and mergers after some layers, which
GGUF numbers by the layer and the folder one after the other; qwen3_5's tower is one without
these. The folder is that of the whole model, whose config.json is read in `vision_config` alone:
the first ones have the text's keys in the same object. Sources: transformers' modeling_qwen2_vl,
modeling_qwen2_5_vl and modeling_qwen3_vl; the gguf package's name map; the converter's qwenvl.py
and qwen3vl.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from aprfmt.arch import hyper_rules
from aprfmt.arch.joining_steps import Split, Stacked
from aprfmt.arch.pixtral_vision import DEVIATION, MEAN
from aprfmt.arch.role_vocabulary import PROJECTORS
from aprfmt.arch.spec import MISSING, ArchSpec, Binding, Facts, HyperRule, Loss, Params, Read
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, Rows, linear, make_tables, norm, single_row
from aprfmt.arch.value_checks import sequence, whole_number
from aprfmt.arch.vision_towers import UNUSED, activation_rule, evidence_of_projector, tower_rules
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_SECTION = "vision_config"
_TOWER = "visual."
_LAYER = _TOWER + "blocks.{L}."
_WIDE, _JOINED = "hidden_size", "patch_merge*patch_merge*hidden_size"
_QKV = Split((Q, KV, KV))
# The text's keys, which are with the tower's in the first configurations; and the tower's own
# that change no weight.
_NEUTRAL_KEYS = frozenset(
    """text_config hidden_act hidden_size intermediate_size max_position_embeddings
    max_window_layers num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps
    rope_scaling rope_parameters rope_theta sliding_window use_sliding_window tie_word_embeddings
    vocab_size layer_types video_token_id vision_start_token_id vision_end_token_id
    vision_token_id tokens_per_second spatial_patch_size in_chans
    vision.feed_forward_length""".split()
)


def _read_tower_key(key: str) -> Read:
    """Return a read function for a key of `vision_config`, if there is one, never outside it."""

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (value under `key`, key) of config.json's `vision_config`; None without the key.

        The config of a tower alone has no such object: the key is then read at its top.
        """
        inner = facts.values.get(_SECTION)
        values = inner if isinstance(inner, Mapping) else facts.values
        found = values.get(key)
        return None if found is None else (found, key)

    return read


def _size_rule(name: str, key: str, default: int, gguf: str = "") -> HyperRule:
    """Return the rule of a size whose config key is read from the tower's object alone.

    `gguf` is its key below `{arch}.vision.`; without a default there, a GGUF must have it.
    """
    return HyperRule(
        name,
        {"gguf": (f"{{arch}}.vision.{gguf}",) if gguf else ()},
        "size",
        MISSING if gguf else default,
        {"hf": default},
        read={"hf": _read_tower_key(key)},
        write={"hf": lambda value, hp: {key: value}},
    )


def _activation_rule(default: str) -> HyperRule:
    """Return the rule for the activation, read from the tower's own `hidden_act` alone."""
    rule, own = activation_rule(default), _read_tower_key("hidden_act")

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (activation of the tower's MLPs, key) of `vision_config` alone.

        None without the key.
        """
        found = own(facts, hp)
        values = {} if found is None else {"hidden_act": found[0]}
        return rule.read["hf"](replace(facts, values=values), hp)

    return replace(rule, read={"hf": read})


def _layer_list_rule(name: str, key: str, usual: tuple[int, ...], inside: bool) -> HyperRule:
    """Return the rule of one boolean a layer that config.json writes as a list of layers.

    `inside` is the boolean of the layers in the list, `usual` the default list.
    """
    own = _read_tower_key(key)

    def layers_to_flags(layers: tuple[int, ...], hp: Params) -> tuple[bool, ...]:
        """Return one boolean per layer: `inside` if `layers` has its number, else the opposite."""
        return tuple((layer in layers) is inside for layer in range(hp["n_layers"]))

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer, key) of the tower's list of layer numbers.

        None without the key. Listed layers are `inside`, the others its opposite.
        """
        found = own(facts, hp)
        if found is None:
            return None
        return layers_to_flags(
            tuple(whole_number(layer, key) for layer in sequence(*found)), hp
        ), key

    def write(value: Value, hp: Params) -> Params:
        """Return {config.json's `key`: numbers of the layers whose boolean is `inside`}.

        `value` has one boolean per layer.
        """
        return {key: [layer for layer, on in enumerate(value) if on is inside]}

    return HyperRule(
        name, default=lambda hp: layers_to_flags(usual, hp), read={"hf": read}, write={"hf": write}
    )


def _patch_frames_rule() -> HyperRule:
    """Return the rule for the frames of a patch, which must be 2: GGUF has names for two."""
    rule = _size_rule("patch_frames", "temporal_patch_size", 2)

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Raise ArchError for a number of frames in a patch, `value`, other than two.

        Else return "", which says that there is no warning.
        """
        if value != 2:
            raise ArchError(f"temporal_patch_size: is {value}; expected 2: no other is known")
        return ""

    return replace(rule, check=check)


def _projection_rule(kind: str, key: str) -> HyperRule:
    """Return the rule that reads and writes the text model's width, which the merger projects to.

    `kind` is GGUF's projector type, `key` the config key. Writing it to a GGUF also writes the
    keys that say that the file is a projector, and how images are normalised.
    """

    def write(value: Value, hp: Params) -> Params:
        """Return GGUF's {key: value} for the merger's output width (`value`) and a projector.

        The others are the file's type, the projector's type and the mean and deviation of image
        channels.
        """
        return {
            "general.type": "mmproj",
            "{arch}.projector_type": kind,
            "{arch}.vision.projection_dim": value,
            "{arch}.vision.image_mean": MEAN,
            "{arch}.vision.image_std": DEVIATION,
        }

    rule = _size_rule("projection_size", key, 3584, "projection_dim")
    return replace(
        rule, write={**rule.write, "gguf": write}, shape=hyper_rules.axis("mm.2.weight", 0)
    )


def _tower_rules(
    kind: str, layers: int, act: str, patch: int, out: str, *own: HyperRule
) -> tuple[HyperRule, ...]:
    """Return the rules by which all hyperparameters of a Qwen-VL vision tower are read.

    `kind` is GGUF's projector type. `layers`, `act` and `patch` are defaults. `out` is the config
    key of the text model's width. `own` are rules that replace or add to the shared ones.
    """
    return hyper_rules.hyper_table(
        *tower_rules(1e-6, act, class_token=False, rotates=True),
        _size_rule("n_layers", "depth", layers, "block_count"),
        _size_rule("n_heads", "num_heads", 16, "attention.head_count"),
        HyperRule(
            "norm_eps", {"gguf": ("{arch}.vision.attention.layer_norm_epsilon",)}, "positive", 1e-6
        ),
        _activation_rule(act),
        _size_rule("image_size", "image_size", 560, "image_size"),
        _size_rule("patch_size", "patch_size", patch, "patch_size"),
        _size_rule("image_channels", "in_channels", 3),
        _patch_frames_rule(),
        replace(
            _size_rule("patch_merge", "spatial_merge_size", 2, "spatial_merge_size"), default=2
        ),
        _projection_rule(kind, out),
        *own,
    )


def _tower_row(role: str, hf: str, *shape: str) -> RoleRow:
    """Return the table row of a tensor outside the layers; `hf` is its name below `visual.`."""
    return single_row(role, f"{_TOWER}{hf}", *shape)


def _weight_and_bias(role: str, hf: str, out: str, into: str) -> Rows:
    """Return the tensor-table rows of a matrix and its bias outside the layers."""
    matrix = _tower_row(f"{role}.weight", f"{hf}.weight", out, into)
    return matrix, _tower_row(f"{role}.bias", f"{hf}.bias", out)


def _layer_rows(mlp: Mapping[str, str], bias: bool) -> Rows:
    """Return the tensor-table rows of a layer's tensors.

    `mlp` has the names of the MLP's matrices in Hugging Face by role. `bias`: norms have a bias.
    """
    sizes = {"ffn_down": (_WIDE, "ffn_size")}
    rows = (
        *norm("ln1", _LAYER + "norm1", bias=bias),
        *linear("attn_q", "-", Q, _WIDE, bias=""),
        *linear("attn_k", "-", KV, _WIDE, bias=""),
        *linear("attn_v", "-", KV, _WIDE, bias=""),
        *linear("attn_out", _LAYER + "attn.proj", _WIDE, Q, bias=""),
        *norm("ln2", _LAYER + "norm2", bias=bias),
        *(row for role, hf in mlp.items() for row in
          linear(role, f"{_LAYER}mlp.{hf}", *sizes.get(role, ("ffn_size", _WIDE)), bias="")),
    )  # fmt: skip
    joined = {f"attn_{x}" for x in "qkv"}
    return tuple(
        replace(
            row,
            hf="" if row.role.partition(".")[0] in joined else row.hf,
            gguf=f"v.blk.{{L}}.{row.role}",
        )
        for row in rows
    )


def _qkv_bindings(stored: str) -> tuple[Binding, ...]:
    """Return the bindings for weight and bias of q, k and v stored as one tensor, `stored`."""
    return tuple(
        Binding((f"{stored}.{part}",), tuple(f"attn_{x}.{part}" for x in "qkv"), (_QKV,))
        for part in ("weight", "bias")
    )


_PATCH = replace(
    _tower_row(
        "v.patch_embd.weight",
        "patch_embed.proj.weight",
        _WIDE,
        "image_channels",
        "patch_frames",
        "patch_size",
        "patch_size",
    ),
    gguf="",
)
_FRAMES = Binding(
    ("v.patch_embd.weight", "v.patch_embd.weight.1"),
    ("v.patch_embd.weight",),
    (Stacked("patch_frames", axis=2),),
)


def _merger_rows(name: str, first: str, second: str, bias: bool) -> Rows:
    """Return the table rows of the merger: a norm, then two matrices that read joined patches.

    `name` (the norm), `first` and `second` (the matrices) are their names below `merger.`.
    """
    parts = ("weight", "bias") if bias else ("weight",)
    return (
        *(_tower_row(f"v.post_ln.{part}", f"merger.{name}.{part}", _WIDE) for part in parts),
        *_weight_and_bias("mm.0", f"merger.{first}", _JOINED, _JOINED),
        *_weight_and_bias("mm.2", f"merger.{second}", "projection_size", _JOINED),
    )


def _tower(
    name: str,
    rows: Rows,
    hyper: tuple[HyperRule, ...],
    hf: tuple[Binding, ...] = (),
    gguf: tuple[Binding, ...] = (),
    **more: Any,
) -> ArchSpec:
    """Return the architecture of a tower; `hf` and `gguf` are bindings tried first."""
    fused = _qkv_bindings(_LAYER + "attn.qkv")
    return names_only_spec(
        name,
        make_tables((_PATCH, *rows), hf_first=(*fused, *hf), gguf_first=(_FRAMES, *gguf)),
        hyper,
        evidence=evidence_of_projector(PROJECTORS[name]),
        section=_SECTION,
        ignored=UNUSED | _NEUTRAL_KEYS,
        **more,
    )


def _ffn_size_rule() -> HyperRule:
    """Return qwen2_vl's rule for the MLP width, which config.json gives as `mlp_ratio`.

    The key that the converter writes has the text model's width, so a GGUF's tensors decide.
    """
    own = _read_tower_key("mlp_ratio")

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (MLP width of the tower, key) of config.json: `mlp_ratio` times the hidden size.

        None without the key.
        """
        found = own(facts, hp)
        return None if found is None else (hp["hidden_size"] * whole_number(*found, 1), found[1])

    return HyperRule(
        "ffn_size",
        kind="size",
        default=lambda hp: 4 * hp["hidden_size"],
        read={"hf": read},
        write={
            "hf": lambda value, hp: {"mlp_ratio": value // hp["hidden_size"]},
            "gguf": lambda value, hp: {"{arch}.vision.feed_forward_length": value},
        },
        shape=hyper_rules.axis("ffn_up.weight", 0),
    )


QWEN2_VL_VISION = _tower(
    "qwen2_vl_vision",
    (*_layer_rows({"ffn_up": "fc1", "ffn_down": "fc2"}, bias=True),
     *_merger_rows("ln_q", "mlp.0", "mlp.2", bias=True)),
    _tower_rules(PROJECTORS["qwen2_vl_vision"], 32, "gelu_quick", 14, "hidden_size",
           _size_rule("hidden_size", "embed_dim", 1280, "embedding_length"), _ffn_size_rule()),
)  # fmt: skip

_EVERY = "{arch}.vision.n_wa_pattern"


def _full_layer_period(layers: tuple[bool, ...]) -> int:
    """Return n if exactly every n-th layer has no window; 0 for any other pattern."""
    first = (*layers, False).index(False) + 1
    same = layers == tuple((layer + 1) % first != 0 for layer in range(len(layers)))
    return first if same else 0


def _window_rule() -> HyperRule:
    """Return the rule for the layers with windows: a list in config.json, a period in GGUF."""
    rule = _layer_list_rule("window_layers", "fullatt_block_indexes", (7, 15, 23, 31), inside=False)

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer: its attention has windows, key) of a GGUF.

        None without the key. The key has the distance of the layers without windows.
        """
        found = facts.first(_EVERY)
        if found is None:
            return None
        every = whole_number(*found, 1)
        return tuple((layer + 1) % every != 0 for layer in range(hp["n_layers"])), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return {GGUF key: distance of the layers without windows}.

        {} if they are at no equal distance. `value` has one boolean per layer: its attention has
        windows.
        """
        every = _full_layer_period(value)
        return {_EVERY: every} if every else {}

    return replace(rule, read={**rule.read, "gguf": read}, write={**rule.write, "gguf": write})


QWEN2_5_VL_VISION = _tower(
    "qwen2_5_vl_vision",
    (
        *_layer_rows(
            {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}, bias=False
        ),
        *_merger_rows("ln_q", "mlp.0", "mlp.2", bias=False),
    ),
    _tower_rules(
        PROJECTORS["qwen2_5_vl_vision"],
        32,
        "silu",
        14,
        "out_hidden_size",
        _size_rule("hidden_size", "hidden_size", 3584, "embedding_length"),
        _size_rule("ffn_size", "intermediate_size", 3420, "feed_forward_length"),
        _window_rule(),
        _size_rule("image_window", "window_size", 112),
    ),
    lost=(
        Loss(
            "gguf",
            "window_layers",
            lambda hp: not _full_layer_period(hp["window_layers"]),
            "GGUF has a pattern only: llama.cpp takes every so many-th layer",
        ),
    ),
)


def _position_rules() -> tuple[HyperRule, ...]:
    """Return the rules for image size and position table; GGUF has only the image's side."""
    own, patches = _read_tower_key("num_position_embeddings"), _read_tower_key("patch_size")

    def read_image_size(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (image side in pixels, key) of config.json: root of positions times patch side.

        Absent keys have the defaults of 2304 positions and 16 pixels, so None is never returned.
        """
        rows, size = own(facts, hp), patches(facts, hp)
        count = 2304 if rows is None else whole_number(*rows, 1)
        key = "num_position_embeddings"
        return isqrt(count) * (16 if size is None else whole_number(*size, 1)), key

    image = _size_rule("image_size", "image_size", 768, "image_size")
    return (
        replace(image, read={"hf": read_image_size}, write={"hf": lambda value, hp: {}}),
        HyperRule(
            "image_positions",
            kind="size",
            default=lambda hp: (hp["image_size"] // hp["patch_size"]) ** 2,
            read={"hf": own},
            write={"hf": lambda value, hp: {"num_position_embeddings": value}},
            shape=hyper_rules.axis("v.position_embd.weight", 0),
        ),
    )


def _merger_rules() -> tuple[HyperRule, ...]:
    """Return the rules for which layers have a merger that reads their output, and how many."""
    key = "{arch}.vision.is_deepstack_layers"
    rule = _layer_list_rule("merger_layers", "deepstack_visual_indexes", (8, 16, 24), inside=True)

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer: a merger reads its output, key) of a GGUF.

        None without the key.
        """
        found = facts.first(key)
        if found is None:
            return None
        listed = sequence(*found, hp["n_layers"])[: hp["n_layers"]]
        return tuple(bool(on) for on in listed), found[1]

    return (
        replace(
            rule,
            read={**rule.read, "gguf": read},
            write={**rule.write, "gguf": lambda value, hp: {key: list(value)}},
        ),
        HyperRule("merger_count", default=lambda hp: sum(hp["merger_layers"])),
    )


# GGUF's name below a layer's number -> the folder's, and the shape of each.
_DEEP = {
    "norm.weight": ("norm.weight", (_JOINED,)),
    "norm.bias": ("norm.bias", (_JOINED,)),
    "fc1.weight": ("linear_fc1.weight", (_JOINED, _JOINED)),
    "fc1.bias": ("linear_fc1.bias", (_JOINED,)),
    "fc2.weight": ("linear_fc2.weight", ("projection_size", _JOINED)),
    "fc2.bias": ("linear_fc2.bias", ("projection_size",)),
}
_STACK = (Stacked("merger_count"),)

QWEN3_VL_VISION = _tower(
    "qwen3_vl_vision",
    (
        _tower_row("v.patch_embd.bias", "patch_embed.proj.bias", _WIDE),
        _tower_row("v.position_embd.weight", "pos_embed.weight", "image_positions", _WIDE),
        *_layer_rows({"ffn_up": "linear_fc1", "ffn_down": "linear_fc2"}, bias=True),
        *_merger_rows("norm", "linear_fc1", "linear_fc2", bias=True),
        *(RoleRow(f"v.deepstack_{role}", "", ("merger_count", *shape), "merger_count", gguf="",
                  layered=False) for role, (_, shape) in _DEEP.items()),
    ),
    _tower_rules(PROJECTORS["qwen3_vl_vision"], 27, "gelu_tanh", 16, "out_hidden_size",
           _size_rule("hidden_size", "hidden_size", 1152, "embedding_length"),
           _size_rule("ffn_size", "intermediate_size", 4304, "feed_forward_length"),
           *_position_rules(), *_merger_rules()),
    hf=tuple(Binding((f"{_TOWER}deepstack_merger_list.{{E}}.{hf}",), (f"v.deepstack_{role}",),
                     _STACK) for role, (hf, _) in _DEEP.items()),
    gguf=(*_qkv_bindings("v.blk.{L}.attn_qkv"),
          *(Binding((f"v.deepstack.{{E}}.{role}",), (f"v.deepstack_{role}",), _STACK,
                    "merger_layers") for role in _DEEP)),
)  # fmt: skip
