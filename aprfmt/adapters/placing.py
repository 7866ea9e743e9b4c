"""Which stored weight of a base a pair of an adapter belongs to, and in which order of rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.adapters.reading import Adapter, Stored, factors
from aprfmt.arch.moves import to_logical, to_stored
from aprfmt.arch.steps import RowsPermuted
from aprfmt.errors import ArchError, ConversionError
from aprfmt.model import Model
from aprfmt.model.patterns import near

if TYPE_CHECKING:
    from aprfmt.arch.bind import Group

Array = np.ndarray[Any, Any]
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")  # whole names, or ends of them


@dataclass(frozen=True)
class LowRank:
    """The change of one stored weight [out, in]: scale * (b @ a), both float64.

    With `magnitude` [out] (DoRA, float64) the changed weight's rows are given these lengths.
    """

    a: Array
    b: Array
    scale: float
    magnitude: Array | None = None


def placed(adapter: Adapter, base: Model) -> dict[str, LowRank]:
    """Return the pairs by the base's stored names; ConversionError if one fits none."""
    found: dict[str, LowRank] = {}
    for module, pair in adapter.pairs.items():
        name = _stored_name(adapter, module, base)
        if name in base:
            made = _as_stored(adapter, pair)
        else:
            name, made = _by_role(adapter, pair, name, base)
        shape = base[name].shape
        if shape != (made.b.shape[0], made.a.shape[1]):
            raise ConversionError(
                f"{adapter.path}: {module} changes [{made.b.shape[0]}, {made.a.shape[1]}]; "
                f"{name} of {base.path} is {list(shape)}: it belongs to another base"
            )
        if name in found:
            raise ConversionError(f"{adapter.path}: two pairs for {name} of {base.path}")
        found[name] = made
    return found


def _stored_name(adapter: Adapter, module: str, base: Model) -> str:
    """Return the name of a pair's weight in the adapter's own spelling."""
    if adapter.spelling == "gguf":
        return module
    if adapter.spelling == "peft":
        return f"{module}.weight"
    flat = {name.removesuffix(".weight").replace(".", "_"): name for name in base}
    ends = [name for key, name in flat.items() if module == key or module.endswith("_" + key)]
    if not ends:
        raise ConversionError(
            f"{adapter.path}: {module} is no module of {base.path}; near names: "
            f"{', '.join(near(module, flat))}"
        )
    return max(ends, key=len)


def _as_stored(adapter: Adapter, pair: Stored) -> LowRank:
    a, b = factors(pair)
    magnitude = pair.parts.get("magnitude")
    if adapter.turned and not pair.embedding:
        if magnitude is not None:
            raise ConversionError(f"{adapter.path}: {pair.module}: DoRA with fan_in_fan_out")
        a, b = b.T, a.T
    lengths = None if magnitude is None else magnitude.numpy().astype(np.float64).reshape(-1)
    return LowRank(a, b, pair.scale, lengths)


def _by_role(adapter: Adapter, pair: Stored, name: str, base: Model) -> tuple[str, LowRank]:
    """Return the base's name of a weight that it spells otherwise, and the pair in its rows."""
    from aprfmt.arch.bind import bind, groups_for

    style = "gguf" if adapter.spelling == "gguf" else "hf"
    try:
        bound = bind(base.spec, style, [name])
        group = next(iter(bound.groups), None)
        if group is None:
            raise ArchError(f"{name} is no weight of {base.spec.name}")
        there = groups_for(base.spec, base.style or "", group.roles, base.hyper)[0]
    except ArchError as error:
        raise ConversionError(
            f"{adapter.path}: {pair.module} has no place in {base.path}: {error}"
        ) from error
    return there.stored[0], moved(_as_stored(adapter, pair), group, there, base, adapter)


def moved(pair: LowRank, here: "Group", there: "Group", base: Model, adapter: Adapter) -> LowRank:
    """Return a pair with its rows in the order of another style; ConversionError where it cannot.

    Rows may be permuted: then those of `b` are, and the lengths.
    """
    steps = (*here.binding.steps, *there.binding.steps)
    simple = all(isinstance(step, RowsPermuted) for step in steps)
    if not simple or len(there.stored) != 1 or len(here.stored) != 1:
        raise ConversionError(
            f"{adapter.path}: {here.stored[0]} is {', '.join(there.stored)} in {base.path}, laid "
            "out otherwise: merge the adapter into a base in its own format"
        )

    def turned(rows: Array) -> Array:
        logical = to_logical(here.binding.steps, [rows], base.hyper)
        return np.ascontiguousarray(to_stored(there.binding.steps, logical, base.hyper)[0])

    lengths = None if pair.magnitude is None else turned(pair.magnitude)
    return LowRank(pair.a, turned(pair.b), pair.scale, lengths)


def whole_tensors(adapter: Adapter, base: Model) -> Mapping[str, Any]:
    """Return tensors that replace the base's, by its names; ConversionError for one it has not.

    A head that equals the table of tokens is left out where the base has one for both.
    """
    found = {}
    for name, view in adapter.whole.items():
        plain = name.replace(".base_layer.", ".")
        if plain != name and plain in base:  # PEFT saves the table of tokens whose pair it has
            if not np.array_equal(view.numpy(), base[plain].numpy()):
                raise ConversionError(
                    f"{adapter.path}: its own {plain} is another than that of {base.path}: it "
                    "belongs to another base"
                )
            continue
        if name in base:
            found[name] = view
        elif not _is_tied_head(adapter, name, base):
            raise ConversionError(
                f"{adapter.path}: {name} is a whole tensor (modules_to_save) that {base.path} "
                "does not have under this name; merge it into a base in the adapter's own format"
            )
    for name, view in found.items():
        if view.shape != base[name].shape:
            raise ConversionError(f"{adapter.path}: {_other_shape(name, view.shape, base)}")
    return found


def _table_of(base: Model) -> str:
    """Return the base's name of its table of tokens; "" without one."""
    try:
        view = base.roles.get("token_embd.weight")
    except ArchError:
        return ""
    return "" if view is None else view.names[0]


def _is_tied_head(adapter: Adapter, name: str, base: Model) -> bool:
    """Return whether a whole tensor is a head that is the table of tokens.

    Raises ConversionError where the base has one tensor for both, and the adapter two.
    """
    table = _table_of(base)
    if not table or not base.hyper["tied_embeddings"] or not name.endswith(_HEADS):
        return False
    own = adapter.whole.get(table, base[table])
    if not np.array_equal(own.numpy(), adapter.whole[name].numpy()):
        raise ConversionError(
            f"{adapter.path}: {name} is another than its {table}, and {base.path} has one tensor "
            "for both; untie the base first (tie_word_embeddings false, and lm_head.weight a copy "
            "of the table), and merge into that"
        )
    return True


def _other_shape(name: str, shape: tuple[int, ...], base: Model) -> str:
    """Return why a whole tensor does not fit, and what to do where only the vocabulary grew."""
    here = base[name].shape
    said = f"{name} is [{', '.join(map(str, shape))}]; that of {base.path} is {list(here)}"
    if len(shape) != 2 or len(here) != 2 or shape[1] != here[1]:
        return said
    if name != _table_of(base) and not name.endswith(_HEADS):
        return said
    more = shape[0] - here[0]
    change = f"{more} tokens were added to" if more > 0 else f"{-more} tokens were cut from"
    return (
        f"{said}: {change} its vocabulary; give the base a vocabulary of {shape[0]} first "
        f"(transformers: model.resize_token_embeddings({shape[0]}), save_pretrained, with the "
        "adapter's tokenizer), and merge into that"
    )
