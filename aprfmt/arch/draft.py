"""Draft heads (multi-token prediction, MTP): one more layer, which guesses the token after next.

Behind token i, with the model's hidden state h of it (after the last norm) and the embedding e of
token i + 1, a head computes

    x = nextn.eh_proj(concat(norm(e) by nextn.enorm, norm(h) by nextn.hnorm))
    logits of token i + 2 = head(norm(layer(x)))

with a decoder layer of the model's own kind, that with attention and experts where it has them.
Embedding and head are the model's unless the file stores others. The roles are llama.cpp's names.
Sources: DeepSeek-V3's report (arXiv 2412.19437), section 2.2; vLLM's deepseek_mtp.py and
qwen3_next_mtp.py, whose models hand over the state behind the last norm; llama.cpp's qwen35.cpp
and its converter, which gives Qwen's `mtp.*` the same names as DeepSeek's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from aprfmt.arch import rules
from aprfmt.arch.names import core
from aprfmt.arch.rows import LAYER
from aprfmt.arch.spec import ArchSpec, Binding, DraftNames, Facts, HyperParams, HyperRule
from aprfmt.arch.spec import TensorRule as Rule
from aprfmt.arch.values import MAX_LAYERS
from aprfmt.arch.values import whole as whole_number
from aprfmt.base.protocols import Value

EMBED_NORM, HIDDEN_NORM, JOIN = "nextn.enorm", "nextn.hnorm", "nextn.eh_proj"
_NORM, _HEAD, _EMBED = "output_norm.weight", "output.weight", "token_embd.weight"
_RULES = (
    Rule(f"{EMBED_NORM}.weight", ("hidden_size",), layered=False),
    Rule(f"{HIDDEN_NORM}.weight", ("hidden_size",), layered=False),
    Rule(f"{JOIN}.weight", ("hidden_size", "2*hidden_size"), layered=False),
)
NORMS = (_RULES[0].role, _RULES[1].role)
_GGUF = DraftNames(
    "blk.{N}.",
    {
        "blk.{N}.nextn.enorm.weight": NORMS[0],
        "blk.{N}.nextn.hnorm.weight": NORMS[1],
        "blk.{N}.nextn.eh_proj.weight": _RULES[2].role,
        "blk.{N}.nextn.shared_head_norm.weight": _NORM,
        "blk.{N}.nextn.shared_head_head.weight": _HEAD,
        "blk.{N}.nextn.embed_tokens.weight": _EMBED,
    },
    ("{arch}.nextn_predict_layers",),
)
# DeepSeek-V3 and GLM-4.5: the layer after the last one, with the head's own tensors inside.
NEXTN: Mapping[str, DraftNames] = {
    "gguf": _GGUF,
    "hf": DraftNames(
        "model.layers.{N}.",
        {
            "model.layers.{N}.enorm.weight": NORMS[0],
            "model.layers.{N}.hnorm.weight": NORMS[1],
            "model.layers.{N}.eh_proj.weight": _RULES[2].role,
            "model.layers.{N}.shared_head.norm.weight": _NORM,
            "model.layers.{N}.shared_head.head.weight": _HEAD,
            "model.layers.{N}.embed_tokens.weight": _EMBED,
        },
        ("num_nextn_predict_layers",),
    ),
}
# Qwen3-Next and Qwen3.5: a module of its own.
MTP: Mapping[str, DraftNames] = {
    "gguf": _GGUF,
    "hf": DraftNames(
        "mtp.layers.0.",
        {
            "mtp.pre_fc_norm_embedding.weight": NORMS[0],
            "mtp.pre_fc_norm_hidden.weight": NORMS[1],
            "mtp.fc.weight": _RULES[2].role,
            "mtp.norm.weight": _NORM,
            "mtp.embed_tokens.weight": _EMBED,
        },
        ("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    ),
}
_FIRST = {"hf": LAYER.replace("{L}", "0"), "gguf": "blk.0."}


def main_layers() -> HyperRule:
    """Return the rule for the blocks; a GGUF counts those of a draft head among them."""

    def gguf(facts: Facts, hp: Mapping[str, Value]) -> tuple[Value, str] | None:
        found, draft = facts.first("{arch}.block_count"), facts.first("{arch}.nextn_predict_layers")
        if found is None:
            return None
        blocks = whole_number(*found, 1, MAX_LAYERS)
        return blocks - (0 if draft is None else whole_number(*draft, 0, blocks - 1)), found[1]

    return replace(rules.n_layers(), read={"gguf": gguf})


def head_spec(spec: ArchSpec) -> ArchSpec:
    """Return the tables of a draft head: a model of one layer with three tensors before it.

    Its norms are stored as the model's last norm is.
    """
    bindings = {}
    for style, rows in spec.bindings.items():
        steps = next((row.steps for row in rows if row.roles == (_NORM,)), ())
        own = (Binding((rule.role,), (rule.role,), steps if rule.role in NORMS else ())
               for rule in _RULES)  # fmt: skip
        bindings[style] = (*own, *rows)
    return replace(spec, tensors=(*_RULES, *spec.tensors), bindings=bindings)


def head_hyper(hp: HyperParams) -> HyperParams:
    """Return the hyperparameters of the head's one layer: those of the last one with attention."""
    recurrent = hp["delta_layers"]
    like = next((i for i in reversed(range(len(recurrent))) if not recurrent[i]), -1)
    layers = {
        name: (value[like],)
        for name, value in hp.items()
        if name.endswith("_layers") and isinstance(value, tuple)
    }
    return hp.replaced(**{**layers, "n_layers": 1})


def in_head(
    spec: ArchSpec, style: str, hp: Mapping[str, Value], names: Iterable[str]
) -> tuple[str, ...]:
    """Return those of some stored names that are a draft head's."""
    if style not in spec.draft:
        return ()
    renamed = Renamed(head_spec(spec), style, int(hp["n_layers"]))
    return tuple(name for name in names if renamed.find(name) is not None)


class Renamed:
    """The names of a draft head's tensors in a file, as those of a model of one layer, and back."""

    def __init__(self, spec: ArchSpec, style: str, n_layers: int) -> None:
        self._style = style
        names = spec.draft[style]
        self._layer = names.layer.replace("{N}", str(n_layers))
        self._own, self._roles = {}, {}
        for template, role in names.own.items():
            target = next(row.stored[0] for row in spec.bindings[style] if row.roles == (role,))
            name = template.replace("{N}", str(n_layers))
            self._own[name], self._roles[name] = target, role

    @property
    def own(self) -> tuple[str, ...]:
        """What a file calls the head's own tensors, those that every head has."""
        return tuple(name for name, role in self._roles.items() if role not in (_HEAD, _EMBED))

    def find(self, name: str) -> str | None:
        """Return what a stored tensor is in a model of one layer; None for one of the model."""
        inner = core(name, self._style)
        for stored, target in self._own.items():
            if inner == core(stored, self._style):
                return target
        layer = core(self._layer, self._style)
        return _FIRST[self._style] + inner.removeprefix(layer) if inner.startswith(layer) else None

    def stored(self, name: str) -> str:
        """Return what a file calls a tensor of the model of one layer."""
        for stored, target in self._own.items():
            if name == target:
                return stored
        return self._layer + name.removeprefix(_FIRST[self._style])
