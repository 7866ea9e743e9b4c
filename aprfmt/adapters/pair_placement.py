"""Finds the base's stored weight for each pair of an adapter, and its order of rows.

A *pair* is the factors A and B of one module with their scale; to *place* it is to find the base's
stored weight that it changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.adapters.parameters import PEFT_ORDER, ExpertOrder, parameter_changes, stacked_changes
from aprfmt.adapters.vocabulary import vocabulary_tensors
from aprfmt.arch.element_moves import to_logical, to_stored
from aprfmt.arch.joining_steps import Stacked
from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.errors import ArchError, ConversionError
from aprfmt.model import Model
from aprfmt.model.adapter_parts import HEADS, TRANSPOSED_DORA, is_saved_base, plain_module
from aprfmt.model.adapter_reading import Adapter, StoredPair, read_factors
from aprfmt.model.patterns import similar_names
from aprfmt.model.relations import SHOWN, Relation, opening_path
from aprfmt.model.renames import Rename, command_line, component_rules, prefix_rule_onto
from aprfmt.model.towers import has_towers

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundGroup

Array = np.ndarray[Any, Any]
_PREFIXES = 6  # components of a prefix that is looked for
_NESTED = "language_model"  # the module of the text model in multimodal ones
_UNTIE = (
    "untie the base first (tie_word_embeddings false, and lm_head.weight a copy of the table), and "
    "merge into that"
)


@dataclass(frozen=True)
class LowRank:
    """The change of one stored weight [out, in]: scale * (b @ a), both float64.

    With `magnitude` [out] (DoRA, float64) the changed weight's rows are scaled to these lengths.
    Where experts are stacked in one weight, both factors have a first axis for them.
    """

    a: Array
    b: Array
    scale: float
    magnitude: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    @property
    def rank(self) -> int:
        """Rank of the pair; of one expert's where there are several."""
        return int(self.a.shape[-2])

    @property
    def has_change(self) -> bool:
        """Whether the pair can change a weight: no factor is zero, or DoRA scales its rows."""
        product = bool(self.scale) and bool(self.a.any()) and bool(self.b.any())
        return product or self.magnitude is not None

    def product_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) of b @ a, float64.

        The rows of stacked experts are numbered one expert after the other.
        """
        if self.a.ndim == 2:
            found: Array = self.b[start:stop] @ self.a
            return found
        size = self.b.shape[1]
        each = range(start // size, -(-stop // size))
        return np.concatenate(
            [self.b[e][max(start - e * size, 0) : stop - e * size] @ self.a[e] for e in each]
        )


def place_pairs(
    adapter: Adapter, base: Model, order: ExpertOrder = PEFT_ORDER, *, untie: bool = False
) -> dict[str, LowRank]:
    """Return {stored name of the base: the change of that weight} for all pairs of an adapter.

    `order` is how pairs for stacked experts order their ranks. `untie` allows a whole output head
    where the base stores head and embedding as one tensor, and whole tensors that the base does not
    have. Raises ConversionError if a pair fits no weight, or two pairs fit one.
    """
    found: dict[str, LowRank] = {}
    whole = whole_tensors(adapter, base, untie=untie)

    def add_change(module: str, name: str, change: LowRank) -> None:
        """Put the low-rank change of the base's weight `name` into the dict `found`, after checks.

        `module` is the name of the adapter's pair, for messages. Raises ConversionError where the
        base has no such weight or one of another shape, and for a second change of the same
        weight.
        """
        if name not in whole and name not in base:
            tied = name.endswith(HEADS) and base.hyper["tied_embeddings"]
            raise ConversionError(
                f"{adapter.path}: {module} is changed by a pair, and {base.path} has "
                + (
                    f"one tensor for head and table: {_UNTIE}"
                    if tied
                    else f"no {name}{_same_end_text(name, base)}"
                )
            )
        shape = whole[name].shape if name in whole else base[name].shape
        if shape != change.shape:
            raise ConversionError(
                f"{adapter.path}: {module} changes {list(change.shape)}; "
                f"{name} of {base.path} is {list(shape)}: it belongs to another base"
            )
        if name in found:
            raise ConversionError(f"{adapter.path}: two pairs for {name} of {base.path}")
        found[name] = change

    # Pairs of whole modules, by name or by role.
    stacked, single = _names_of_stacked(adapter, base), dict[str, StoredPair]()
    for module, pair in adapter.pairs.items():
        if pair.parameters:
            continue
        name = weight_name(adapter, module, base)
        if name in stacked:
            single[name] = pair
            continue
        if name in base:
            made = _pair_as_low_rank(adapter, pair)
        else:
            name, made = _place_by_role(adapter, pair, name, base)
        add_change(module, name, made)
    for name, change in stacked_changes(adapter, base, single):
        add_change(name, name, LowRank(change.right, change.left, change.scale))
    # Pairs of single parameters: stacked experts.
    for name, pair, change in parameter_changes(adapter, base, order):
        add_change(pair.module, name, LowRank(change.right, change.left, change.scale))
    return found


def misfit_text(adapter: Adapter, base: Model) -> str | None:
    """Return why an adapter does not fit a base model, by its first pair that does not; else None.

    A pair is LoRA's A and B of one module. It fits if the base has that module, stored by itself,
    packed, or joined with others; a different prefix is allowed if all modules have the same. If
    the base stores the weight by itself, the pair's shape must be the weight's. Pairs of embeddings
    and of single parameters are only looked up by name. None for an adapter in kohya's spelling.
    """
    if adapter.spelling == "kohya":
        return None
    astray = [module for module in adapter.pairs if not _has_place(adapter, module, base)]
    rules = _prefix_rules(astray, base) if astray else ()
    rule = next(
        (one for one in rules if all(_has_place(adapter, one(name), base) for name in astray)), None
    )
    for module, pair in adapter.pairs.items():
        own = rule(module) if rule is not None and module in astray else module
        if rule is None and module in astray:
            return f"{module} is changed by a pair, and {base.path} has no such module"
        name = f"{plain_module(own)}.weight"
        if pair.embedding or pair.parameters or pair.turned or name not in base:
            continue
        shape, there = _pair_shape(pair), base[name].shape
        if len(there) == 2 and shape not in (there, there[::-1]):
            return f"{module} changes {list(shape)}, and {name} of {base.path} is {list(there)}"
    return None


def _same_end_text(name: str, base: Model) -> str:
    """Return a clause naming the base's only tensor whose name ends like `name`; "" if none.

    The tensors of a wrapper have another prefix. An end is compared if it has a layer's number, or
    is the whole name.
    """
    parts = name.split(".")
    for at in range(len(parts) - 2):
        end = parts[at:]
        if at and not any(part.isdigit() for part in end):
            break
        near = [other for other in base if f".{other}".endswith(f".{'.'.join(end)}")]
        if near:
            return f"; {near[0]} is there" if len(near) == 1 else ""
    return ""


def _names_of_stacked(adapter: Adapter, base: Model) -> frozenset[str]:
    """Return the names of the adapter's weights that are single experts, and that the base stacks.

    Such a weight is one matrix of a tensor of the base. Empty unless the adapter is PEFT's.
    """
    from aprfmt.arch.binding import bind_names

    if adapter.spelling != "peft":
        return frozenset()
    names = [f"{module}.weight" for module, one in adapter.pairs.items() if not one.parameters]
    try:
        groups = bind_names(base.spec, "hf", [name for name in names if name not in base]).groups
    except ArchError:
        return frozenset()
    return frozenset(
        name
        for group in groups
        if any(isinstance(step, Stacked) for step in group.binding.steps)
        for name in group.stored
    )


def with_base_names(adapter: Adapter, base: Model) -> "tuple[Adapter, Relation | None]":
    """Return (adapter with its modules renamed to the base's, the Relation that says so).

    (adapter, None) where the names fit, or where neither a change of prefix nor renamed components
    make all of them fit. Loaders leave out pairs for modules that they do not find, most of them
    without a warning.
    """
    if adapter.spelling == "kohya":
        return adapter, None
    # Names that the base does not have, and one prefix that makes all of them fit.
    every = [*adapter.pairs, *adapter.replacements]
    stacked = _names_of_stacked(adapter, base)
    astray = [
        name
        for name in every
        if f"{name}.weight" not in stacked and not _has_place(adapter, name, base)
    ]
    # Names of another wrapper have a place by their role only: readers go by the name.
    foreign = [] if astray else _named_by_role_only(adapter, every, base)
    if not astray and not foreign:
        return adapter, None
    fits = _is_name_of if foreign else _has_place
    astray = astray or foreign
    rule = next(
        (
            rule
            for rule in _prefix_rules(astray, base)
            if all(fits(adapter, rule(name), base) for name in astray)
        ),
        None,
    )
    if rule is None and foreign:
        return adapter, None
    rules = (rule,) if rule is not None else _component_renames(adapter, astray, base)
    left = [name for name in astray if name in adapter.pairs]
    if not rules and left and len(left) < len(astray):  # tensors of no base may be among them
        known = {name: view for name, view in adapter.replacements.items() if name not in astray}
        found, relation = with_base_names(replace(adapter, replacements=known), base)
        others = {name: view for name, view in adapter.replacements.items() if name in astray}
        return replace(found, replacements={**found.replacements, **others}), relation
    if not rules:
        return adapter, None
    # The relation says so, and the adapter is returned under the new names.
    apply = {name: _rename_module(name, rules) for name in astray}
    pairs = tuple((name, apply[name]) for name in astray)
    says = (
        f"{len(astray)} of {len(every)} modules of the adapter have names that {base.path} has "
        f"not, so that loaders leave them out: {' and '.join(one.text for one in rules)}"
    )
    remedy = command_line(
        "convert", opening_path(adapter.path), "OUT", "--base", opening_path(base.path)
    )
    relation = Relation("names", says, tuple(astray), pairs[:SHOWN], remedy, tuple(rules))
    return replace(
        adapter,
        pairs={
            apply.get(name, name): replace(pair, module=apply.get(name, name))
            for name, pair in adapter.pairs.items()
        },
        replacements={apply.get(name, name): view for name, view in adapter.replacements.items()},
    ), relation


def _named_by_role_only(adapter: Adapter, every: Sequence[str], base: Model) -> list[str]:
    """Return the names of a PEFT adapter's modules that the base does not have under these names.

    `every` are the names of all its modules, each of which has a weight in the base by its role. []
    for a base in another format than PEFT's, and for a multimodal base, whose modules are named
    otherwise in memory than in older files.
    """
    if adapter.spelling != "peft" or base.style != "hf" or has_towers(base.config):
        return []
    stacked = _names_of_stacked(adapter, base)
    return [
        name
        for name in every
        if f"{name}.weight" not in stacked and not _is_name_of(adapter, name, base)
    ]


def _rename_module(name: str, rules: Sequence[Rename]) -> str:
    """Return a module's name after applying every rename rule, in order."""
    for rule in rules:
        name = rule(name)
    return name


def _component_renames(adapter: Adapter, astray: Sequence[str], base: Model) -> list[Rename]:
    """Return rename rules of components that give each pair a weight of its shape; [] if none.

    `astray` are the modules that the base does not have. Where another component of the base would
    fit as well, nothing is chosen: a change of the wrong weight is worse than none.
    """
    if adapter.spelling != "peft" or not set(astray) <= {*adapter.pairs}:
        return []
    shapes = {name: _pair_shape(adapter.pairs[name]) for name in astray}
    left = {f"{name}.weight": tuple(shape) for name, shape in shapes.items()}
    every = component_rules("hf", left, {name: tuple(base[name].shape) for name in base})

    def fits(tried: Sequence[Rename]) -> bool:
        """Return whether the rename rules `tried` lead each module in `astray` to a weight.

        `astray` are the modules that the base does not have. Each has to get a weight of the base
        of its pair's shape, and no two the same one.
        """
        made = [f"{_rename_module(name, tried)}.weight" for name in astray]
        taken = {f"{name}.weight" for name in adapter.pairs if name not in shapes}
        return len({*made} - taken) == len(astray) and all(
            name in base and base[name].shape == shape
            for name, shape in zip(made, shapes.values(), strict=True)
        )

    parts = {part for name in base for part in name.split(".") if not part.isdigit()}
    sets = [*(every[:k] for k in range(1, len(every) + 1)), *([rule] for rule in every[1:])]
    rules = next((tried for tried in sets if fits(tried)), [])
    for i, rule in enumerate(rules):
        others = parts - {rule.new, rule.old}
        if any(fits([*rules[:i], Rename(rule.old, one), *rules[i + 1 :]]) for one in others):
            return []
    return rules


def _pair_shape(pair: StoredPair) -> tuple[int, ...]:
    """Return the shape [out, in] of the weight that a pair changes."""
    a, b = read_factors(pair)
    return int(b.shape[0]), int(a.shape[-1])


def _prefix_rules(astray: Sequence[str], base: Model) -> Iterator[Rename]:
    """Yield rules that rename the prefix of modules to the base's, the likeliest first.

    `astray` are the modules of an adapter that the base does not have under these names. A rule
    keeps layer numbers: pairs of a layer that the base lacks fit no other layer.
    """
    there = {name for stored in base for name in (stored, stored.rpartition(".")[0])}
    found = prefix_rule_onto(astray, there)
    if found is not None and _numbers_in(found.old) == _numbers_in(found.new):
        yield found
    first = astray[0].split(".")
    for depth in range(1, min(len(first), _PREFIXES)):
        old = ".".join(first[:depth]) + "."
        if all(name.startswith(old) for name in astray):
            yield Rename(old, "")
            yield Rename(old, "model.")
    yield Rename("", "model.")


def _numbers_in(name: str) -> list[str]:
    """Return the components of a dotted name that are numbers, such as that of a layer."""
    return [part for part in name.split(".") if part.isdigit()]


def _has_place(adapter: Adapter, module: str, base: Model) -> bool:
    """Return whether the base has a weight, or a whole tensor, for a module of the adapter.

    The module's name may be in another style than the base's.
    """
    from aprfmt.arch.binding import bind_names

    if _is_name_of(adapter, module, base):
        return True
    plain = plain_module(module)
    names = (plain, f"{plain}.weight")
    style = "gguf" if adapter.spelling == "gguf" else "hf"
    try:
        groups = [bind_names(base.spec, style, [name]).groups for name in names]
    except (ArchError, KeyError):
        return False
    return any(found and found[0].roles[0] in base.roles for found in groups)


def _is_name_of(adapter: Adapter, module: str, base: Model) -> bool:
    """Return whether the base has a tensor under exactly a module's name, or that name's `.weight`.

    True too for modules whose parameters have the pairs, and for an output head, which may be tied.
    """
    plain = plain_module(module)
    pair = adapter.pairs.get(module)
    if plain in base or f"{plain}.weight" in base or (pair is not None and pair.parameters):
        return True
    # A module whose parameters have pairs of their own; a tied head.
    return any(name.startswith(f"{plain}.") for name in base) or plain.endswith(HEADS)


def weight_name(adapter: Adapter, module: str, base: Model) -> str:
    """Return the name that the weight of a pair has in the adapter's own naming.

    For kohya, whose names are flat, it is the base's name. Raises ConversionError for a kohya
    module that the base does not have.
    """
    if adapter.spelling == "gguf":
        return module
    if adapter.spelling in ("peft", "mlx"):
        return f"{module}.weight"
    flat = {name.removesuffix(".weight").replace(".", "_"): name for name in base}
    ends = [name for key, name in flat.items() if module == key or module.endswith("_" + key)]
    if not ends:
        raise ConversionError(
            f"{adapter.path}: {module} is no module of {base.path}; near names: "
            f"{', '.join(similar_names(module, flat))}"
        )
    return max(ends, key=len)


def _pair_as_low_rank(adapter: Adapter, pair: StoredPair) -> LowRank:
    """Return a stored pair as the change [out, in] of its weight.

    The factors are exchanged for PEFT's fan_in_fan_out. Raises ConversionError for DoRA with
    fan_in_fan_out.
    """
    a, b = read_factors(pair)
    magnitude = pair.parts.get("magnitude")
    if adapter.turned and not pair.embedding:
        if magnitude is not None:
            raise ConversionError(f"{adapter.path}: {TRANSPOSED_DORA}")
        a, b = b.T, a.T
    lengths = None if magnitude is None else magnitude.numpy().astype(np.float64).reshape(-1)
    return LowRank(a, b, pair.scale, lengths)


def _place_by_role(
    adapter: Adapter, pair: StoredPair, name: str, base: Model
) -> tuple[str, LowRank]:
    """Return (the base's name of the weight, the change with rows in the base's order).

    `name` is the weight's name in the adapter. Raises ConversionError if the base lacks it, or if
    the architecture does.
    """
    from aprfmt.arch.binding import bind_names, groups_for

    style = "gguf" if adapter.spelling == "gguf" else "hf"
    try:
        bound = bind_names(base.spec, style, [name])
        group = next(iter(bound.groups), None)
        if group is None:
            raise ArchError(f"{name} is no weight of {base.spec.name}")
        there = groups_for(base.spec, base.style or "", group.roles, base.hyper)[0]
    except ArchError as error:
        raise ConversionError(
            f"{adapter.path}: {pair.module} has no place in {base.path}: {error}"
        ) from error
    # Files of multimodal models have the text model's weights below a separate module, and so
    # has the model in memory, whose names PEFT writes.
    view = base.roles.get(group.roles[0])
    nested = _NESTED in name.split(".") and has_towers(base.config)
    own = view.names if nested and view is not None else ()
    stored = own[0] if len(own) == 1 else there.stored[0]
    return stored, reorder_rows(_pair_as_low_rank(adapter, pair), group, there, base, adapter)


def reorder_rows(
    pair: LowRank, group: "BoundGroup", target_group: "BoundGroup", base: Model, adapter: Adapter
) -> LowRank:
    """Return a LoRA pair with its rows in the order in which another style stores them.

    `group` is the weight's group in the pair's style, `target_group` in the other one. The rows of
    `b` and the magnitudes are permuted; `base` gives the hyperparameters, `adapter` the path for
    messages. Raises ConversionError for any other difference in layout.
    """
    steps = (*group.binding.steps, *target_group.binding.steps)
    simple = all(isinstance(step, RowsPermuted) for step in steps)
    if not simple or len(target_group.stored) != 1 or len(group.stored) != 1:
        raise ConversionError(
            f"{adapter.path}: {group.stored[0]} is {', '.join(target_group.stored)} in "
            f"{base.path}, laid out otherwise: merge the adapter into a base in its own format"
        )

    def permute_rows(rows: Array) -> Array:
        """Return the rows of a LoRA pair's B matrix, or its magnitudes, in the other style's order.

        `rows` are in the order of the style (Hugging Face or GGUF) that the adapter is stored in.
        """
        logical = to_logical(group.binding.steps, [rows], base.hyper)
        return np.ascontiguousarray(to_stored(target_group.binding.steps, logical, base.hyper)[0])

    lengths = None if pair.magnitude is None else permute_rows(pair.magnitude)
    return LowRank(pair.a, permute_rows(pair.b), pair.scale, lengths)


def whole_tensors(adapter: Adapter, base: Model, *, untie: bool = False) -> Mapping[str, Any]:
    """Return {the base's name: View} of the adapter's whole tensors, which replace the base's.

    Tensors with a row for each token may have another number of rows. A head that equals the token
    embedding is left out where the base has one tensor for both. With `untie` a different head is
    kept as an additional tensor, and tensors that the base does not have are left out; without it
    both raise ConversionError, as does a tensor of another shape.
    """
    found = {}
    # Each whole tensor: the saved embedding, one of the base, or a tied head.
    for name, view in adapter.replacements.items():
        plain = name.replace(".base_layer.", ".")
        if (
            is_saved_base(name, adapter.config) and plain in base
        ):  # PEFT saves the table of tokens whose pair it has
            mine, other = view.numpy(), base[plain].numpy()
            common = min(len(mine), len(other))
            if len(mine) != len(other) and plain in vocabulary_tensors(base):
                found[plain] = view
            if not np.array_equal(mine[:common], other[:common]):
                raise ConversionError(
                    f"{adapter.path}: its own {plain} is another than that of {base.path}: it "
                    "belongs to another base"
                )
            continue
        if plain in base:
            found[plain] = view
        elif _is_tied_head(adapter, name, base, untie=untie):
            continue
        elif untie and name.endswith(HEADS) and base.hyper["tied_embeddings"]:
            found[name] = view
        elif not untie:
            raise ConversionError(
                f"{adapter.path}: {name} is a whole tensor (modules_to_save) that {base.path} "
                "does not have under this name; merge it into a base in the adapter's own format"
            )
    table = _embedding_name(base)
    if table in found and _trains_table_alone(adapter, table, base):
        if not untie:
            raise ConversionError(
                f"{adapter.path}: its {table} was trained alone (modules_to_save without "
                f"ensure_weight_tying): the head stayed as it was, and {base.path} has one tensor "
                f"for both; {_UNTIE}"
            )
        found[HEADS[0]] = base[table]
    # Shapes must be the base's, but for the number of tokens.
    rows = vocabulary_tensors(base)
    for name, view in found.items():
        here = base[name if name in base else _embedding_name(base)].shape
        if view.shape != here and not (
            (name in rows or name not in base) and view.shape[1:] == here[1:]
        ):
            raise ConversionError(
                f"{adapter.path}: {name} is {list(view.shape)}; that of {base.path} is "
                f"{list(here)}: it belongs to another base"
            )
    return found


def _trains_table_alone(adapter: Adapter, table: str, base: Model) -> bool:
    """Return whether an adapter trained the token embedding, and not the head that is tied to it.

    PEFT then wraps the embedding, and the head goes on with the base's tensor; a merge by PEFT has
    two. An embedding that was resized and saved without such a wrapper stays tied.
    """
    if not base.hyper["tied_embeddings"] or any(n.endswith(HEADS) for n in adapter.replacements):
        return False
    listed = adapter.config.get("modules_to_save")
    modules = [m for m in listed if isinstance(m, str)] if isinstance(listed, list) else []
    module = f".{table.removesuffix('.weight')}"
    wrapped = any(module.endswith(f".{one}") for one in modules)
    return wrapped and not adapter.config.get("ensure_weight_tying")


def _embedding_name(base: Model) -> str:
    """Return the stored name of the base's token embedding; "" if it has none or is unreadable."""
    try:
        view = base.roles.get("token_embd.weight")
    except ArchError:
        return ""
    return "" if view is None else view.names[0]


def _is_tied_head(adapter: Adapter, name: str, base: Model, *, untie: bool = False) -> bool:
    """Return whether `name` is an adapter's own output head, equal to the tied token embedding.

    `name` is a tensor that the adapter replaces whole. False if it is no head, or the base has two
    tensors for head and embedding. A head that differs from a tied embedding is False with `untie`
    and raises ConversionError without.
    """
    table = _embedding_name(base)
    if not table or not base.hyper["tied_embeddings"] or not name.endswith(HEADS):
        return False
    own = adapter.replacements.get(table, base[table])
    equal = np.array_equal(own.numpy(), adapter.replacements[name].numpy())
    if not equal and not untie:
        raise ConversionError(
            f"{adapter.path}: {name} is another than its {table}, and {base.path} has one tensor "
            f"for both; {_UNTIE}"
        )
    return equal
