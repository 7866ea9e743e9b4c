"""Stored tensors of packed weights that the configuration promises and the file does not have.

A *part* is one of these tensors. A weight decodes without them, to other values than those that
were packed, or a layer runs with a scale of activations that nobody measured. A missing part
without which nothing decodes, such as zero points, is an error where the weight is read.

Sources: compressed-tensors 0.20 (`actorder`, `input_activations`), AutoGPTQ (`desc_act`),
transformers' fp8 (`activation_scheme`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import LazyTensor, Note
from aprfmt.base.sequences import join_first
from aprfmt.codecs.compressed_scope import weight_groups
from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.model import Model

REORDERED = ("group", "dynamic", True)  # values of `actorder` by which inputs have any group
_SHOWN = 2
_ORDER = "which inputs share a scale is lost: weights decode as if they were in order"
_INPUTS = "engines take a scale of inputs that nobody measured"


@dataclass(frozen=True, slots=True)
class PromisedPart:
    """A part that the configuration of a packed weight promises.

    `name` is the last component of its name, `promise` the words of the configuration, and `effect`
    what comes of its absence.
    """

    name: str
    promise: str
    effect: str


@dataclass(frozen=True, slots=True)
class MissingParts:
    """A promised part and the packed weights `lacking` it, of `count` weights of the model."""

    part: PromisedPart
    lacking: tuple[str, ...]
    count: int

    @property
    def says(self) -> str:
        """The configuration's promise, how many weights lack the part, and what comes of it."""
        shown = join_first(self.lacking, _SHOWN)
        return (
            f"config.json says {self.part.promise}, and {len(self.lacking)} of {self.count} packed "
            f"weights have no {self.part.name}: {shown}; {self.part.effect}"
        )


def missing_parts(model: "Model") -> list[MissingParts]:
    """Return the parts that the configuration promises and packed weights do not have.

    A scale of inputs that only some weights lack is no such part: experts that no calibration
    reached have none, which is another note.
    """
    lacking: dict[PromisedPart, list[str]] = {}
    held: set[PromisedPart] = set()
    count = 0
    for name, view in model.items():
        for stored in view.stored:
            if stored.packed is None:
                continue
            count += 1
            for part in _promised_companions(stored):
                there = any(each.lstrip("._").endswith(part.name) for each in stored.parts)
                if there:
                    held.add(part)
                else:
                    lacking.setdefault(part, []).append(name)
    return [
        MissingParts(part, tuple(names), count)
        for part, names in lacking.items()
        if part.effect != _INPUTS or part not in held
    ]


def missing_part_notes(model: "Model") -> list[Note]:
    """Return a warning for each kind of promised part that packed weights do not have."""
    where = str(model.path)
    return [Note("warning", where, one.says, "promised_parts") for one in missing_parts(model)]


def _promised_companions(stored: LazyTensor) -> Iterator[PromisedPart]:
    """Yield the parts that the configuration of a packed weight promises in addition to codes."""
    assert stored.packed is not None
    try:
        config = stored.packed().config
        groups = list(weight_groups(config).values())
    except AprfmtError:
        return  # the check of packed weights says it
    method = config.get("quant_method")
    if method == "gptq" and config.get("desc_act") is True and _has_groups(stored, ".scales", 0):
        yield PromisedPart("g_idx", "desc_act", _ORDER)
    if config.get("activation_scheme") == "static":
        yield PromisedPart("input_scale", "activation_scheme 'static'", _INPUTS)
    if len(groups) == 1:
        yield from _promised_by_group(stored, groups[0])


def _promised_by_group(stored: LazyTensor, group: Mapping[str, Any]) -> Iterator[PromisedPart]:
    """Yield the parts that a group of compressed-tensors promises for a weight, `stored`."""
    weights, inputs = group["weights"], group.get("input_activations")
    order = weights.get("actorder")
    if order in REORDERED and _has_groups(stored, ".weight_scale", 1):
        yield PromisedPart("weight_g_idx", f"actorder {order!r}", _ORDER)
    if isinstance(inputs, Mapping):
        dynamic = inputs.get("dynamic", False)
        if dynamic == "local":
            yield PromisedPart("input_global_scale", "input_activations dynamic 'local'", _INPUTS)
        elif dynamic is False:
            yield PromisedPart("input_scale", "input_activations that are not dynamic", _INPUTS)


def _has_groups(stored: LazyTensor, suffix: str, axis: int) -> bool:
    """Return whether a weight has scales of more than one group; `axis` of them counts groups."""
    part = stored.parts.get(suffix)
    return part is not None and len(part.info.shape) > axis and part.info.shape[axis] > 1
