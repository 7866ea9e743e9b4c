"""The parameters that a step may change, each as a weight before it and a weight after it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.adapters.pair_placement import misfit_text
from aprfmt.arch.binding import bind_names
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.contradicted_flags import HEAD, holds_head_twice
from aprfmt.errors import AprfmtError, ArchError, UsageError
from aprfmt.measure.alignment import align_models
from aprfmt.model import Model
from aprfmt.model.adapter_parts import adapter_parts, peft_config, unwrap_module
from aprfmt.model.adapter_reading import read_adapter
from aprfmt.model.ledger import OF_TENSORS, NotCompared, make_ledger
from aprfmt.tensors.view import View

# Parts of an adapter by what follows the role in a parameter's key.
FACTORS: Mapping[str, str] = {
    "a": "lora_a",
    "b": "lora_b",
    "embedding_a": "lora_a",
    "embedding_b": "lora_b",
    "magnitude": "lora_magnitude",
}


@dataclass(frozen=True)
class Parameter:
    """One weight that training may change, before a step and after it.

    `key` is its role, with `.lora_a` or `.lora_b` appended for a factor of an adapter; `names` are
    its names in the file. `after` is None where no checkpoint of after the step is given.
    """

    key: str
    names: tuple[str, ...]
    before: View
    after: View | None

    @property
    def layer(self) -> int | None:
        """The number of the parameter's layer, None for a parameter outside all layers."""
        return split_key(self.key)[0]

    @property
    def role(self) -> str:
        """The parameter's key without its layer, such as `attn_q.weight`."""
        return split_key(self.key)[1]

    @property
    def vector(self) -> bool:
        """Whether the parameter is a norm, a bias or another vector, which seldom decay."""
        return len(self.before.shape) < 2

    def drop(self) -> None:
        """Release the mapped pages of the weight before the step and of that after it."""
        for side in (self.before, self.after):
            if side is not None:
                side.drop()


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model or an adapter, and the tensors that are none.

    `left` are the tensors that only one of the two checkpoints has.
    """

    rows: tuple[Parameter, ...]
    left: tuple[NotCompared, ...]


def pair_parameters(before: Model, after: Model | None, base: Model | None = None) -> Parameters:
    """Return the parameters of a checkpoint, each with its weight before and after the step.

    If `after` is None, they have the weights before alone. `base` is the model below an adapter,
    which names the roles of its factors. What only one checkpoint has is in the result's `left`.
    Raises UsageError where `after` is of another model: another architecture or hyperparameter, no
    name in common, other layers, or a shape that differs.
    """
    if base is not None or _is_adapter(before):
        return _pair_adapter(before, after, base)
    if after is None:
        rows = [Parameter(key, view.names, view, None) for key, view in before.roles.items()]
        left_out = make_ledger(before, OF_TENSORS).not_compared
        return Parameters(tuple(_without_tied(rows, before)), left_out)
    if _is_adapter(after):
        raise UsageError(
            f"{after.path}: is an adapter, {before.path} is a whole model; give the adapter of "
            "before the step with --adapter"
        )
    rows, left = [], []
    alone: dict[int | None, str] = {}  # layer -> the side that has tensors of it alone
    for pair in align_models(before, after).pairs:
        if pair.a is None or pair.b is None:
            side = pair.b if pair.a is None else pair.a
            state = "only in B" if pair.a is None else "only in A"
            names = side.names if side is not None else (pair.key,)
            words = "after the step" if pair.a is None else "before the step"
            left += [NotCompared("tensor", name, state, "", words) for name in names]  # type: ignore[arg-type]
            alone.setdefault(split_key(pair.key)[0], words)
            continue
        rows.append(Parameter(pair.key, pair.a.names, pair.a, pair.b))
    checked = _check_shapes(rows, before.path, after.path)
    checked = tuple(_without_tied(checked, before, after))
    whole = alone.keys() - {split_key(row.key)[0] for row in rows}
    if rows and (layers := sorted(each for each in whole if each is not None)):
        raise UsageError(
            f"{after.path}: is a checkpoint of another model: layer {layers[0]} is only in the one "
            f"{alone[layers[0]]}"
        )
    _check_same_model(before, after)
    return Parameters(checked, tuple(left))


# What a trainer may write otherwise and compute the same.
_WRITTEN = ("context_length", "tied_embeddings")
# Settings of an adapter that say what its factors mean.
_SETTINGS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out",
    "fine_tune_type", "lora_parameters",
)  # fmt: skip


def _check_same_model(before: Model, after: Model) -> None:
    """Raise UsageError if two checkpoints have another architecture or hyperparameter.

    Nothing is compared where one of them does not say.
    """
    try:
        specs, hypers = (before.spec, after.spec), (before.hyper, after.hyper)
    except AprfmtError:
        return
    pairs: list[tuple[str, Any, Any]] = [("architecture", specs[0].name, specs[1].name)]
    pairs += [(name, hypers[0][name], hypers[1].get(name)) for name in hypers[0]]
    for name, first, second in pairs:
        if name not in _WRITTEN and first != second:
            raise UsageError(
                f"{after.path}: is a checkpoint of another model: {name} is {second}; expected "
                f"{first}, as in {before.path}"
            )


def _check_same_adapter(before: Model, after: Model) -> None:
    """Raise UsageError if two adapters have other settings, or factors of other modules."""
    first, second = peft_config(before), peft_config(after)
    if first and second:
        for name in _SETTINGS:
            if first.get(name) != second.get(name):
                raise UsageError(
                    f"{after.path}: is another adapter: {name} of its adapter_config.json is "
                    f"{second.get(name)}; expected {first.get(name)}, as of {before.path}"
                )
    alone = [name for name in (*before, *after) if name not in before or name not in after]
    if alone:
        side = "before" if alone[0] in before else "after"
        raise UsageError(
            f"{after.path}: is another adapter: {alone[0]} is only in the one {side} the step; "
            "expected the tensors of the same modules"
        )


def _check_base(rows: Sequence[Parameter], adapter: Model, base: Model) -> None:
    """Raise UsageError if an adapter is of another base: a module or a size does not fit `base`.

    `rows` are the adapter's factors. Modules that the base has joined with others fit.
    """
    try:
        roles = base.roles
        opened, read = read_adapter(adapter.path)
    except AprfmtError:
        return
    for row in rows:
        role, _, factor = row.key.rpartition(".")
        if role not in roles or factor not in ("lora_a", "lora_b") or "embd" in role:
            continue
        side = 1 if factor == "lora_a" else 0
        found, wanted = row.before.shape, roles[role].shape
        if len(found) == len(wanted) == 2 and found[side] != wanted[side]:
            raise UsageError(
                f"{adapter.path}: is an adapter of another base: {row.names[0]} is {list(found)}; "
                f"expected {wanted[side]} in place of {found[side]}, as {base.path} has"
            )
    with opened:
        misfit = misfit_text(read, base)
    if misfit is not None:
        raise UsageError(f"{adapter.path}: is an adapter of another base: {misfit}")


def _is_adapter(model: Model) -> bool:
    """Return whether a model file is an adapter."""
    return model.kind is not None and model.kind.name == "adapter"


def _pair_adapter(before: Model, after: Model | None, base: Model | None) -> Parameters:
    """Return the trained tensors of an adapter, each with its values before and after the step.

    Raises UsageError where one is no adapter, where they are two adapters (other modules, settings
    or shapes), and where `base` is not theirs.
    """
    for model in (before, after):
        if model is not None and not _is_adapter(model):
            raise UsageError(
                f"{model.path}: is no adapter; expected what save_pretrained of a PEFT model writes"
            )
    keys = adapter_keys(before, base)
    if after is not None:
        _check_same_adapter(before, after)
    rows = [
        Parameter(key, (name,), before[name], None if after is None else after[name])
        for name, key in keys.items()
    ]
    if base is not None:
        _check_base(rows, before, base)
    path = None if after is None else after.path
    return Parameters(tuple(_check_shapes(rows, before.path, path)), ())


def adapter_keys(adapter: Model, base: Model | None) -> Mapping[str, str]:
    """Return {stored name: key} of an adapter's trained tensors, by the roles of its base.

    A key is a role with the factor's name appended, `L0.attn_q.weight.lora_a`. Without a base, or
    where it has no such module, the module's own name is used in place of the role.
    """
    parts = adapter_parts(adapter)
    style = "gguf" if "gguf" in parts.spellings else "hf"
    found: dict[str, str] = {}
    for module, held in parts.factors.items():
        name = unwrap_module(module)[0]
        role = role_of(base, style, name if style == "gguf" else f"{name}.weight")
        for part, stored in held.items():
            if part in FACTORS:
                found[stored] = f"{role}.{FACTORS[part]}"
    for name, stored in parts.replacements.items():
        found[stored] = role_of(base, style, name)
    return found


def role_of(base: Model | None, style: str, name: str) -> str:
    """Return the role of the weight `name`, or the name itself if the base's tables have none.

    `style` is the naming, `hf` or `gguf`.
    """
    if base is None:
        return name
    try:
        groups = bind_names(base.spec, style, [name]).groups
    except (ArchError, KeyError):
        return name
    return groups[0].roles[0] if groups and len(groups[0].roles) == 1 else name


def _without_tied(rows: Sequence[Parameter], *models: Model) -> Iterator[Parameter]:
    """Yield the parameters, each weight once: an output head that is the embedding is left out.

    A head that is stored next to the embedding is left out too if it is a copy of it in all
    `models`.
    """
    keys = {row.key for row in rows}
    copied = HEAD in keys and all(holds_head_twice(each.resolution) for each in models)
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        tied = row.names in seen and not row.before.layout
        seen.add(row.names)
        if not tied and not (copied and row.key == HEAD):
            yield row


def _check_shapes(
    rows: Sequence[Parameter], before: Path, after: Path | None
) -> Sequence[Parameter]:
    """Return `rows` as they are; UsageError if there are none or shapes differ before and after.

    `before` and `after` are the files, for the message.
    """
    if not rows:
        raise UsageError(
            f"{after}: is a checkpoint of another model: it has no parameter of {before}; give one "
            "that training wrote from it"
        )
    for row in rows:
        if row.after is not None and row.before.shape != row.after.shape:
            raise UsageError(
                f"{after}: is a checkpoint of another model: {row.names[0]} is "
                f"{list(row.after.shape)}; expected {list(row.before.shape)}, as in {before}"
            )
    return rows
