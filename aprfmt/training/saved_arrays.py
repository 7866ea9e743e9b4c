"""Arrays that a trainer saved: gradients, and the state of its optimizer, by parameter.

A *group* is a parameter group of the optimizer. A *state* is what the optimizer saved of all
parameters; a *moment* is an array of it.

Files are safetensors, npz or torch.save's, read without unpickling. Names are those of the model's
own file, of Hugging Face, or of PEFT; what wrappers put around them (`module.`, `_orig_mod.`,
`.default` of an adapter, `.grad`) is taken off. Gradients are put into the layout of the role, as
weights are; a step that changes values in place does not touch them.

Source of the names of states: torch.optim's state_dict (`state`, `param_groups`), bitsandbytes'
`state1` and `state2`, optax's `mu` and `nu`, transformers' Adafactor.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.binding import bind_names
from aprfmt.arch.layout_steps import ChangesValues
from aprfmt.arch.spec import LayoutStep
from aprfmt.base.protocols import Value
from aprfmt.base.shapes import matrix_shape
from aprfmt.causes.contradicted_flags import HEAD, TABLE, holds_head_twice
from aprfmt.errors import AprfmtError, ArchError, FormatError, UsageError
from aprfmt.formats import open_source
from aprfmt.formats.foreign_formats import refuse_trainer_shards
from aprfmt.formats.pytorch.layout import recognise
from aprfmt.inference.engines.captures import ARRAYS, Captures, open_captures
from aprfmt.inference.gradients.given_points import point_names
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.model import Model
from aprfmt.model.patterns import similar_names
from aprfmt.model.renames import Rename, prefix_rule_onto
from aprfmt.training.numbered_states import Candidate, Numbered, recognize_numbers, sample_of
from aprfmt.training.parameters import Parameter
from aprfmt.training.update_check import RowReader

F64 = NDArray[np.float64]
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ADAPTER_NAME = re.compile(
    r"(\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B))\.(?!weight$)[^.#]+(\.weight)?$"
)
# DoRA's magnitudes are a module's weight in PEFT, and are saved without it.
_MAGNITUDE_NAME = re.compile(r"(\.lora_magnitude_vector)(?:\.(?!weight$)[^.#]+)?(?:\.weight)?$")
_WRAPPERS = ("grad.", "grads.", "gradients.", "model.grad.")
_LOOKED = 1 << 14  # numbers that show in how many bits they were made
_KEPT = 2  # groups of arrays that are held: joined projections are asked for one after the other


@dataclass(frozen=True)
class Placed:
    """The arrays of one parameter: names in the files, and layout steps to the parameter's layout.

    `part` is the parameter's index if the arrays hold several parameters, as those of stacked
    experts do.
    """

    names: tuple[str, ...]
    steps: tuple[LayoutStep, ...] = ()
    part: int = 0


@dataclass
class SavedArrays:
    """Arrays of one kind (gradients, first moments) of all parameters, read when asked for.

    `unplaced` are the names of arrays that belong to no parameter, and `points` those of capture
    points: {name without what trainers add: name}.
    """

    held: Mapping[str, Captures]  # name -> the file that has it
    own: Mapping[str, str]  # name -> its name in that file
    placed: Mapping[str, Placed]
    hyper: Mapping[str, Value]
    unplaced: tuple[str, ...] = ()
    points: Mapping[str, str] = field(default_factory=dict)
    _kept: "OrderedDict[tuple[str, ...], list[NDArray[Any]]]" = field(default_factory=OrderedDict)

    def reader(self, parameter: Parameter) -> RowReader | None:
        """Return a reader of a parameter's array by rows; None if there is no array.

        Its `noise` is the relative precision of the type in which the numbers were made.
        """
        place = self.placed.get(parameter.key)
        if place is None:
            return None
        kinds = [_DTYPES.get(self.held[name].dtypes[self.own[name]], "F32") for name in place.names]
        noise = max(UNIT[kind] for kind in kinds)
        if noise <= UNIT["F32"]:
            noise = max(noise, precision_of(self.values(parameter, place)))
        return RowReader(partial(self._rows, parameter, place), noise)

    def point(self, name: str) -> NDArray[Any]:
        """Return the array of a capture point by its name in `points`."""
        stored = self.points[name]
        return self.held[stored].read(self.own[stored])

    @property
    def point_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """{name in `points`: shape} of the arrays of capture points."""
        return {
            name: tuple(self.held[stored].shapes[self.own[stored]])
            for name, stored in self.points.items()
        }

    def second_table(self, parameters: Sequence[Parameter]) -> tuple[str, float] | None:
        """Return (name of the head's array, its distance) for a tied table that was saved twice.

        The distance is that from the table's own, relative L2, 0.0 where both are equal within
        the precision that they are stored in. None where it was not saved twice.
        """
        table = next((row for row in parameters if row.key == TABLE), None)
        if table is None or any(row.key == HEAD for row in parameters) or HEAD not in self.placed:
            return None
        name = self.placed[HEAD].names[0]
        own, head = (
            self.values(table, self.placed[key]).astype(np.float64) for key in (TABLE, HEAD)
        )
        noise = max(
            UNIT[_DTYPES.get(self.held[each].dtypes[self.own[each]], "F32")]
            for each in (name, self.placed[TABLE].names[0])
        )
        apart = float(np.linalg.norm(own - head))
        size = float(np.linalg.norm(own)) or 1.0
        near = np.allclose(own, head, rtol=2 * noise, atol=0.0, equal_nan=True)
        return name, 0.0 if near else apart / size

    def _rows(self, parameter: Parameter, place: Placed, start: int, stop: int) -> F64:
        """Return rows [start, stop) of a parameter's array seen as [rows, last axis], float64."""
        values = self.values(parameter, place)
        return values.reshape(matrix_shape(parameter.before.shape))[start:stop].astype(np.float64)

    def values(self, parameter: Parameter, place: Placed) -> NDArray[Any]:
        """Return the whole array of a parameter, in the shape and layout of its role.

        Raises UsageError for an array of another size.
        """
        if place.names not in self._kept:
            arrays = [self.held[name].read(self.own[name]) for name in place.names]
            self._kept[place.names] = arrays
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        made = self._kept[place.names]
        for step in place.steps:
            if not isinstance(step, ChangesValues):
                made = step.undo(made, self.hyper)
        found = made[place.part]
        if found.size != int(np.prod(parameter.before.shape, dtype=np.int64)):
            where = self.held[place.names[0]].path
            raise UsageError(
                f"{where}: {place.names[0]} is {list(found.shape)}; expected "
                f"{list(parameter.before.shape)}, as {parameter.names[0]} is"
            )
        return found.reshape(parameter.before.shape)


def precision_of(values: NDArray[Any]) -> float:
    """Return the unit roundoff of BF16 or F16 if the values have no more bits; else 0.0.

    Numbers of 16 bits are often saved as float32. The first _LOOKED values are read.
    """
    bits = np.ascontiguousarray(values.reshape(-1)[:_LOOKED], np.float32).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return UNIT["BF16"]
    return UNIT["F16"] if not (bits & 0x1FFF).any() else 0.0


# What torch's wrappers of modules (compiled, sharded, checkpointed) put into names.
_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a parameter's name without what trainers add, such as `_orig_mod.` or `.grad`."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    name = name.removesuffix(".grad")
    for inside in _INSIDE:
        name = name.replace(inside, "")
    return _MAGNITUDE_NAME.sub(r"\1", _ADAPTER_NAME.sub(r"\1\2", name))


def place_names(
    names: Collection[str],
    parameters: Sequence[Parameter],
    model: Model,
    rules: Sequence[Rename] = (),
) -> tuple[dict[str, Placed], tuple[str, ...]]:
    """Return ({parameter key: its arrays}, names that belong to no parameter).

    `model` is the one before the step, or the adapter. `rules` are the user's renames. Names match
    the file's own, with another prefix, or Hugging Face's of the architecture. A tied output head
    has its own entry, HEAD, where head and embedding are both named. Raises UsageError for two
    names of one parameter.
    """
    plain: dict[str, str] = {}
    for name in names:
        # Next to its weight the name of a module is of what the module gives.
        changed = name if f"{name}.weight" in names else plain_name(name)
        for rule in rules:
            changed = rule(changed)
        if changed in plain:
            raise UsageError(
                f"{plain[changed]} and {name} are both of {changed}; give each array once"
            )
        plain[changed] = name
    there = {name for row in parameters for name in row.names}
    if not (there | {*map(plain_name, there)}) & plain.keys():
        prefix = prefix_rule_onto(list(plain), there)
        if prefix is not None:
            plain = {prefix(changed): name for changed, name in plain.items()}
    found: dict[str, Placed] = {}
    used: set[str] = set()
    for row in parameters:
        own = [name if name in plain else plain_name(name) for name in row.names]
        if all(name in plain for name in own):
            stored = tuple(plain[name] for name in own)
            view = row.before
            part = 0 if view.role is None else view.roles.index(view.role)
            found[row.key] = Placed(stored, view.layout, part)
            used.update(stored)
    left = [changed for changed, name in plain.items() if name not in used]
    if left and len(found) < len(parameters):
        more = dict(_by_role(left, model))
        for row in parameters:
            if row.key not in found and row.key in more:
                bound = more[row.key]
                stored = tuple(plain[name] for name in bound.names)
                found[row.key] = Placed(stored, bound.steps, bound.part)
                used.update(stored)
    keys = {row.key for row in parameters}
    if left and TABLE in keys and HEAD not in keys and _ties_head(model):
        head = dict(_by_role(left, model)).get(HEAD)
        if head is not None:
            stored = tuple(plain[name] for name in head.names)
            found[HEAD if TABLE in found else TABLE] = Placed(stored, head.steps, head.part)
            used.update(stored)
    return found, tuple(name for name in names if name not in used)


def _ties_head(model: Model) -> bool:
    """Return whether the output head is the embedding; False for an adapter."""
    try:
        return bool(model.hyper.get("tied_embeddings")) or holds_head_twice(model.resolution)
    except AprfmtError:
        return False


def _by_role(names: Sequence[str], model: Model) -> Iterator[tuple[str, Placed]]:
    """Yield (role key, its arrays) for Hugging Face's parameter names.

    Nothing is yielded for an unknown architecture.
    """
    try:
        groups = bind_names(model.spec, "hf", names).groups
    except (ArchError, AprfmtError):
        return
    for group in groups:
        for part, key in enumerate(group.roles):
            yield key, Placed(group.stored, group.binding.steps, part)


def hyper_of(model: Model) -> Mapping[str, Value]:
    """Return a model's hyperparameters; {} where they are not known, as for an adapter."""
    try:
        return model.hyper
    except AprfmtError:
        return {}


def open_arrays(paths: Sequence[Path], stack: ExitStack) -> dict[str, tuple[Captures, str]]:
    """Return {name: (reader of its file, name in it)} of the arrays in some files.

    A folder stands for all files of safetensors in it, as shards of one model; without any it is
    one of dumped arrays. Files are closed with `stack`. Raises UsageError for a name that is in two
    files, and UnsupportedError for a trainer's shards that are not joined here.
    """
    for given in paths:
        refuse_trainer_shards(given, weights=False)
    found: dict[str, tuple[Captures, str]] = {}
    for path in (each for given in paths for each in sorted(given.glob(SHARDS)) or (given,)):
        captures = stack.enter_context(open_captures(path))
        for name in captures.shapes:
            if name in found:
                raise UsageError(
                    f"{path}: {name} is in {found[name][0].path} too; give each array once"
                )
            found[name] = captures, name
    return found


SHARDS = "*.safetensors"  # of a folder


def unread_files(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return the array files of folders that are not read because safetensors are next to them."""
    return tuple(
        str(each)
        for given in paths
        if next(given.glob(SHARDS), None) is not None
        for each in sorted(given.iterdir())
        if each.suffix in ARRAYS
    )


WHOLE = ("i", "u", "bool")  # how the names of types of whole numbers begin


def open_gradients(
    paths: Sequence[Path],
    parameters: Sequence[Parameter],
    model: Model,
    stack: ExitStack,
    rules: Sequence[Rename] = (),
    base: Model | None = None,
) -> SavedArrays:
    """Return the gradients that a trainer saved; UsageError where none is of this model.

    Raises FormatError for whole numbers, and for two arrays of one parameter. `model` is the one
    before the step, or the adapter. Gradients may also be of capture points of `base`. `rules` are
    the user's renames; files are closed with `stack`.
    """
    arrays = open_arrays(paths, stack)
    placed, left = place_names(tuple(arrays), parameters, model, rules)
    points = {}
    if left and base is not None:
        plain = {plain_name(name): name for name in left}
        points = {each: plain[each] for each in point_names(plain, base)}
        left = tuple(name for name in left if name not in points.values())
    if not placed and not points:
        known = [row.names[0] for row in parameters]
        if not arrays:
            raise FormatError(f"{paths[0]}: holds no array; expected gradients by parameter")
        first = next(iter(arrays))
        raise UsageError(
            f"{paths[0]}: holds no gradient of {model.path}: {first!r} is no parameter of it; near "
            f"names: {', '.join(similar_names(first, known)) or known[0]}; --rename OLD=NEW "
            f"maps names"
        )
    for place in placed.values():
        for name in place.names:
            held, own = arrays[name]
            if held.dtypes[own].lower().startswith(WHOLE):
                raise FormatError(
                    f"{held.path}: {name} is of {held.dtypes[own]}; expected gradients in floating "
                    "point"
                )
    return SavedArrays(
        {name: held for name, (held, _) in arrays.items()},
        {name: own for name, (_, own) in arrays.items()},
        placed,
        hyper_of(model),
        left,
        points=points,
    )


# --- the optimizer's state ----------------------------------------------------------------------

FIRST = ("exp_avg", "momentum_buffer", "state1", "mu", "m")
SECOND = ("exp_avg_sq", "state2", "nu", "v", "variance")
# Of Adafactor's matrices, by torch's names and transformers'.
ROWS, COLUMNS = ("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col")
LARGEST = ("max_exp_avg_sq",)  # of amsgrad, which divides by it in place of the second moment
CODES = ("uint8", "int8")  # of states of 8 bits: places in a table, times the largest of a block
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # elements of a block in bitsandbytes
_AROUND = (
    "state", "optimizer", "optimizer_state", "optimizer_state_dict", "opt_state", "optim",
    "__bnb_optimizer_quant_state__",
)  # fmt: skip
_RATES = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")
_GROUP = re.compile(r"(?:^|\.)param_groups\.(\d+)\.(\w+)$")


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer: moments by parameter, the steps made, the settings of its groups.

    `steps` is the largest step count of a parameter, None where the file does not say. `groups` are
    the settings of each group by torch's names, `params` in them. `indexed` says that parameters
    are numbers there, not names; `recognized`, that some were recognised by their values; `names`
    are the parameter names of the known numbers. `coded` are the 8-bit entries whose codes were not
    read.
    """

    path: Path
    first: SavedArrays
    second: SavedArrays
    steps: int | None
    groups: tuple[Mapping[str, Any], ...]
    indexed: bool
    recognized: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    coded: tuple[str, ...] = ()
    left: tuple[str, ...] = ()  # entries that belong to no parameter, or to none that is known
    factored: str = ""  # the name of the second moments by row, of Adafactor
    # {stored name: name of an array of its size that no rule here uses}, as Kahan summation's rest.
    unused: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # names of arrays that nothing here reads
    # {parameter's key: its own count of steps}, of those that made fewer than `steps`.
    fewer: Mapping[str, int] = field(default_factory=dict)

    @property
    def scheduled(self) -> bool:
        """Whether a schedule sets the learning rates: the groups' may be the next step's."""
        return any("initial_lr" in group for group in self.groups)

    def group_of(self, name: str) -> Mapping[str, Any]:
        """Return the settings of the parameter group that has the parameter `name`.

        {} where the file does not say.
        """
        if len(self.groups) == 1:
            return self.groups[0]
        numbers = {number for number, own in self.names.items() if own == name}
        for group in self.groups:
            names = group.get("param_names")
            if isinstance(names, list) and name in map(plain_name, map(str, names)):
                return group
            if numbers & set(map(str, group.get("params") or ())):
                return group
        return {}

    @property
    def kind(self) -> str:
        """The optimizer's name, guessed from the state: adamw, adam, adafactor, lion or sgd."""
        if self.factored:
            return "adafactor"
        settings = {name: value for group in self.groups for name, value in group.items()}
        if self.second.placed or "amsgrad" in settings or "decoupled_weight_decay" in settings:
            return "adam" if settings.get("decoupled_weight_decay") is False else "adamw"
        return "lion" if "betas" in settings and "eps" not in settings else "sgd"


def open_state(
    path: Path,
    parameters: Sequence[Parameter],
    model: Model,
    stack: ExitStack,
    rules: Sequence[Rename] = (),
    after: Model | None = None,
) -> OptimizerState:
    """Return the state that a trainer saved of its optimizer, its arrays matched to parameters.

    `model` is the one before the step, or the adapter. `after` is the one after it, whose changes
    tell which parameters numbered entries are. `rules` are the user's renames. Raises FormatError
    for a file that is no such state, UsageError for that of another model.
    """
    arrays = open_arrays([path], stack)
    values = dict(_single_values(path))
    for name in [name for name in arrays if _GROUP.search(name)]:  # torch's rates may be tensors
        held, own = arrays.pop(name)
        if int(np.prod(held.shapes[own], dtype=np.int64)) == 1:
            values[name] = np.asarray(held.read(own)).reshape(-1)[0].item()
    # Sort the arrays by kind: {kind: {parameter: array}}, and collect the step counts.
    kinds = ("first", "second", "largest", "rows", "columns")
    parts: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    counts: dict[str, int] = {}  # by parameter, or by the name that groups have it under
    coded: list[str] = []
    others: list[str] = []
    for name in tuple(arrays):
        owner, kind = _split_state(name)
        if kind == "step":
            counts[owner] = _whole_step(path, name, arrays[name][0].read(arrays[name][1]))
        elif kind and arrays[name][0].dtypes[arrays[name][1]] in CODES:
            coded.append(owner)
            decoded = _coded_state(name, arrays)
            if decoded is not None:
                arrays[name] = decoded, arrays[name][1]
                parts[kind][owner] = name
        elif kind:
            parts[kind][owner] = name
        else:
            others.append(name)
    parts["second"] |= parts.pop("largest")
    rows, columns = parts.pop("rows"), parts.pop("columns")
    factored = next((name.rpartition(".")[2] for name in rows.values()), "")
    for owner in rows.keys() & columns.keys():
        name = f"{owner}.factored"
        arrays[name] = _factored_moment(name, arrays[rows[owner]], arrays[columns[owner]]), name
        parts["second"][owner] = name
    for name, value in values.items():
        if name.rpartition(".")[2] in ("step", "count") and isinstance(value, int | float):
            counts[_split_state(name)[0]] = _whole_step(path, name, value)
    # Refuse what is no state, or one that cannot be used.
    groups = _groups(values)
    _check_groups(path, groups)
    if not parts["first"] and not parts["second"] and not coded and (arrays or not groups):
        raise FormatError(
            f"{path}: holds no optimizer's state: no array is named exp_avg, exp_avg_sq or "
            "momentum_buffer; save optimizer.state_dict()"
        )
    owners = list(dict.fromkeys((*parts["first"], *parts["second"])))
    if not owners and not coded:
        counts = {"": 0}  # saved before the first step: settings alone
    # Find the parameter of each entry, by name or, where it has a number alone, by its values.
    indexed = bool(owners) and all(owner.isdecimal() for owner in owners)
    recognized = False
    if indexed:
        order, recognized = _order_of_indices(
            owners, groups, arrays, parts, parameters, path, model, after
        )
    else:
        order = {owner: owner for owner in owners}
    made = []
    for kind in ("first", "second"):
        named = {order[owner]: name for owner, name in parts[kind].items() if owner in order}
        placed, left = place_names(tuple(named), parameters, model, rules)
        made.append(
            SavedArrays(
                {owner: arrays[name][0] for owner, name in named.items()},
                {owner: arrays[name][1] for owner, name in named.items()},
                placed,
                hyper_of(model),
                left,
            )
        )
    twice = [each.second_table(parameters) for each in made]
    if owners and not made[0].placed and not made[1].placed:
        raise UsageError(
            f"{path}: holds the state of another model: {owners[0]!r} is no parameter of "
            f"{model.path}"
        )
    unknown = [owner for owner in owners if owner not in order]
    steps = max(counts.values(), default=None)
    counts = _count_by_group(counts, groups) | counts
    entries = {name: owner for owner, name in order.items()}
    fewer = {
        key: counts[entries[name]]
        for key, place in {**made[1].placed, **made[0].placed}.items()
        for name in place.names
        if counts.get(entries[name], steps) != steps
    }
    # Two moments of one weight: of a trainer that holds a tied table and its head apart.
    other = [name for each in twice if each is not None for name, apart in [each] if apart]
    unplaced = dict.fromkeys((*unknown, *made[0].unplaced, *made[1].unplaced, *other))
    return OptimizerState(
        path,
        made[0],
        made[1],
        steps,
        groups,
        indexed,
        recognized,
        order if indexed else {},
        tuple(dict.fromkeys(coded)),
        tuple(unplaced),
        factored,
        _unread_state_arrays(arrays, parts["first"] | parts["second"], order),
        tuple(name for name in others if not _goes_with(name, arrays)),
        fewer,
    )


def _count_by_group(
    counts: Mapping[str, int], groups: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Return {entry or parameter name: steps} for groups that count steps for all their entries."""
    found: dict[str, int] = {}
    for number, group in enumerate(groups):
        count = counts.get(f"param_groups.{number}")
        if count is not None:
            names = (*(group.get("params") or ()), *(group.get("param_names") or ()))
            found.update(dict.fromkeys(map(str, names), count))
    return found


def _goes_with(name: str, names: Collection[str]) -> bool:
    """Return whether an array is read with a moment among `names`, and not by itself.

    It is the table or the scales of an 8-bit moment, or transformers' Adafactor's RMS, which is
    made anew in each step before it is used.
    """
    head, _, own = name.rpartition(".")
    if own in ("qmap1", "qmap2", "absmax1", "absmax2"):
        return f"{head}.state{own[-1]}" in names
    return own == "RMS" and any(f"{head}.{each}" in names for each in (*ROWS, "exp_avg_sq"))


def _unread_state_arrays(
    arrays: Mapping[str, tuple[Captures, str]], moments: Mapping[str, str], order: Mapping[str, str]
) -> dict[str, str]:
    """Return {parameter name: end of an array's name} for arrays of the state that no rule reads.

    Only arrays of the size of a moment, with more than one element, count; of several the last one.
    `moments` are {entry: array of a moment}, `order` {entry: parameter name}.
    """

    def size(name: str) -> int:
        """Return the number of elements of the saved array `name`."""
        held, own = arrays[name]
        return int(np.prod(held.shapes[own], dtype=np.int64))

    found = {}
    for name in arrays:
        parts = [part for part in name.split(".") if part not in _AROUND]
        owner = ".".join(parts[:-1])
        if _split_state(name)[1] or owner not in moments or owner not in order:
            continue
        if name == moments[owner]:
            continue
        if size(name) == size(moments[owner]) > 1:
            found[order[owner]] = parts[-1]
    return found


def _factored_moment(
    name: str, rows: tuple[Captures, str], columns: tuple[Captures, str]
) -> Captures:
    """Return the second moment made of its means over rows and columns, as the array `name`.

    Source: Shazeer and Stern 2018, algorithm 4: rows [n] times columns [m] over the rows' mean.
    """
    sizes = [int(np.prod(held.shapes[own], dtype=np.int64)) for held, own in (rows, columns)]

    def read(_: str) -> NDArray[Any]:
        """Return the second moment, float64 [n, m], from its means over rows and columns."""
        one, other = (
            held.read(own).reshape(-1).astype(np.float64) for held, own in (rows, columns)
        )
        made: NDArray[Any] = np.outer(one / max(float(one.mean()), 1e-300), other)
        return made

    return Captures(rows[0].path, {name: (sizes[0], sizes[1])}, {name: "float32"}, read)


def _coded_state(name: str, arrays: Mapping[str, tuple[Captures, str]]) -> Captures | None:
    """Return the 8-bit state `name` as an array that is decoded when it is read.

    None where its table or its block scales are missing, or have an unknown size. Source of the
    layout: bitsandbytes' Optimizer2State, `state1` with `qmap1` [256] and `absmax1` [blocks]: a
    number is qmap[code] * absmax of its block.
    """
    number = name[-1] if name[-1:] in ("1", "2") else ""
    head = name.removesuffix(f"state{number}")
    table, largest = arrays.get(f"{head}qmap{number}"), arrays.get(f"{head}absmax{number}")
    if head == name or not number or table is None or largest is None:
        return None
    codes, own = arrays[name]
    shape = tuple(codes.shapes[own])
    elements = int(np.prod(shape, dtype=np.int64))
    count = int(np.prod(largest[0].shapes[largest[1]], dtype=np.int64))
    block = next((size for size in _BLOCKS if -(-elements // size) == count), None)
    if block is None or tuple(table[0].shapes[table[1]]) != (256,):
        return None

    def read(_: str) -> NDArray[Any]:
        """Return the optimizer's 8-bit state decoded, float32 in the shape of the parameter."""
        places, values, sizes = (
            captures.read(each) for captures, each in ((codes, own), table, largest)
        )
        every = np.repeat(sizes.reshape(-1), block)[: places.size]
        made: NDArray[Any] = values.reshape(-1)[places.reshape(-1)] * every
        return made.astype(np.float32).reshape(shape)

    return Captures(codes.path, {own: shape}, {own: "float32"}, read)


def _split_state(name: str) -> tuple[str, str]:
    """Return (parameter, kind) of an array in a state, by its name.

    The kind is first, second, largest (amsgrad's second moment), rows or columns (Adafactor's),
    step, or "" for any other.
    """
    parts = [part for part in name.split(".") if part not in _AROUND]
    for kinds, kind in (
        (FIRST, "first"),
        (SECOND, "second"),
        (LARGEST, "largest"),
        (ROWS, "rows"),
        (COLUMNS, "columns"),
        (("step", "count"), "step"),
    ):
        for at, part in enumerate(parts):
            if part in kinds and at in (0, len(parts) - 1):
                return ".".join(parts[:at] + parts[at + 1 :]), kind
    return name, ""


def _single_values(path: Path) -> Mapping[str, Any]:
    """Return {path: value} of the single values in a file of torch.save or safetensors' metadata.

    {} for a folder, and for a file that has none or cannot be read as either.
    """
    if path.is_dir():
        return {}
    with path.open("rb") as file:
        head = file.read(512)
    if head[:2] == b"PK" and not recognise(head, path.stat().st_size):
        return {}
    try:
        with open_source(path) as source:
            return dict(source.metadata)
    except AprfmtError:
        return {}


def _groups(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the settings of each parameter group under torch's names, in order; () if none."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        match = _GROUP.search(name)
        if match is not None:
            found.setdefault(int(match[1]), {})[match[2]] = value
    return tuple(found[number] for number in sorted(found))


def _whole_step(path: Path, name: str, value: Any) -> int:
    """Return a step count as int; FormatError if it is no whole number of at least 0."""
    numbers = np.asarray(value, np.float64).reshape(-1)
    found = float(numbers[0]) if numbers.size else math.nan
    if not math.isfinite(found) or found < 0 or found != int(found):
        raise FormatError(f"{path}: {name} is {found:g}; expected a whole number of at least 0")
    return int(found)


def _check_groups(path: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise FormatError for a rate that is negative or not finite, or betas that are not two."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            numbers = value if key == "betas" and isinstance(value, list) else [value]
            if key == "betas" and len(numbers) != 2:
                raise FormatError(
                    f"{path}: betas of parameter group {number} are {numbers}; expected two numbers"
                )
            if key not in _RATES or value is None or (key == "eps" and isinstance(value, list)):
                continue  # Adafactor has two of epsilon, and may make its rate itself
            for each in numbers:
                plain = isinstance(each, int | float) and not isinstance(each, bool)
                if not (plain and math.isfinite(each) and each >= 0):
                    raise FormatError(
                        f"{path}: {key} of parameter group {number} is {each!r}; expected a finite "
                        "number of at least 0"
                    )


def _order_of_indices(
    owners: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, tuple[Captures, str]],
    parts: Mapping[str, Mapping[str, str]],
    parameters: Sequence[Parameter],
    path: Path,
    before: Model,
    after: Model | None,
) -> tuple[dict[str, str], bool]:
    """Return ({number in the state: parameter name}, whether values told some of them).

    `owners` are the numbers, `parts` {first or second: {number: array's name}}. torch stores the
    names of parameters in `param_names` of its groups if it was given them. Else a number is the
    parameter whose change is the step that its moments make. Raises FormatError where neither tells
    any of them.
    """
    named: dict[str, str] = {}
    for group in groups:
        numbers, names = group.get("params"), group.get("param_names")
        if isinstance(numbers, list) and isinstance(names, list) and len(numbers) == len(names):
            named.update({str(n): str(name) for n, name in zip(numbers, names, strict=True)})
    if named:
        return named, False

    def step_of(owner: str) -> NDArray[Any]:
        """Return a sample of the step that the moments of one numbered parameter make.

        The sample is the step up to a factor.
        """
        first, second = (parts[kind].get(owner) for kind in ("first", "second"))
        values = arrays[first or second or ""][0].read(first or second or "").astype(np.float64)
        if first is not None and second is not None:
            values = values / (np.sqrt(np.maximum(arrays[second][0].read(second), 0)) + 1e-30)
        return sample_of(values)

    def change_of(name: str) -> NDArray[Any]:
        """Return a sample of the change of the parameter `name` between `before` and `after`."""
        assert after is not None
        return sample_of(after[name].numpy().astype(np.float64) - before[name].numpy())

    numbered = []
    for owner in owners:
        name = parts["first"].get(owner) or parts["second"][owner]
        shape = tuple(arrays[name][0].shapes[name])
        numbered.append(Numbered(owner, shape, partial(step_of, owner)))
    candidates, seen = [], set()
    for row in parameters:
        name = row.names[0]
        if len(row.names) > 1 or name in seen or after is None or name not in after:
            continue
        seen.add(name)
        shape = tuple(before[name].shape)
        candidates.append(Candidate(name, row.key, shape, partial(change_of, name)))
    order = [list(map(str, group["params"])) for group in groups if group.get("params")]
    order = order or [sorted(owners, key=int)]
    found, looked = recognize_numbers(numbered, candidates, order)
    if not found:
        raise FormatError(
            f"{path}: names its parameters by numbers, of which nothing says what they are; build "
            "the optimizer from model.named_parameters(), or save the state by name"
        )
    return found, looked
