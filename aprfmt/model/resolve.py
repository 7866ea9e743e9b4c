"""Resolves an open file to its architecture, hyperparameters and roles.

A *role* is what a tensor is for, by one name in all formats. A *group* is roles that the file
stores together, as one tensor or several.

The order: name the architecture (user, config, metadata), bind stored names to roles, read the
hyperparameters from every key style the file has, and reconcile them. What a file's own format says
wins over a carried config.json; where both say the same up to float32 rounding, the config's exact
value is kept.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aprfmt.arch import ARCHS, find_arch
from aprfmt.arch.name_templates import detect_style
from aprfmt.base.protocols import Note, Value, has_aprfmt_keys, shape_is_known
from aprfmt.errors import ArchError
from aprfmt.model.hf_folder import pooling_file
from aprfmt.model.relations import is_as_published
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundNames
    from aprfmt.arch.draft_head import Head
    from aprfmt.arch.hyperparameters import KeyReport
    from aprfmt.arch.required_roles import Coverage
    from aprfmt.arch.spec import ArchSpec, Facts, HyperParam, HyperParams
    from aprfmt.model import Model
    from aprfmt.model.relations import Relation
    from aprfmt.model.unsupported_packing import UndecodedPacking


@dataclass(frozen=True)
class Resolution:
    """A file's architecture, hyperparameters, roles and completeness.

    All names in it are the file's own, also where `relations` rename tensors for reading.
    """

    spec: "ArchSpec"
    hyper: "HyperParams"
    roles: Mapping[str, View]
    report: "KeyReport"
    unbound: tuple[str, ...]  # stored tensors no role of the architecture's pass claims
    coverage: "Coverage"  # required roles, and which of them are missing or have a wrong shape
    notes: tuple[Note, ...] = ()
    unread: "UndecodedPacking | None" = None  # packed weights that are not decoded
    unread_roles: frozenset[str] = frozenset()  # the missing roles that those are
    buffers: tuple[str, ...] = ()  # stored tensors that loaders compute themselves
    draft: tuple[str, ...] = ()  # the stored tensors of draft heads
    style: str = ""  # the naming style by which the roles were found
    towers: tuple[str, ...] = ()  # stored tensors of towers that the configuration describes
    relations: "tuple[Relation, ...]" = ()  # changes under which alone the file is read
    native: "KeyReport | None" = None  # of the container's own keys, where config.json is carried
    again: tuple[View, ...] = ()  # roles as tensors of `unbound` store them in a second layout
    asked: bool = False  # the user named the architecture (--arch)

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Stored tensors that belong to no role, no draft head and no declared tower."""
        others = {*self.draft, *self.towers}
        return tuple(name for name in self.unbound if name not in others)

    @property
    def stored_again(self) -> Mapping[str, str]:
        """{stored name: role key} of tensors that store a role a second time, in another layout."""
        return {name: view.name for view in self.again for name in view.names}

    @property
    def missing(self) -> tuple[str, ...]:
        """Required role keys that are missing and whose absence was not accepted."""
        return self.coverage.missing


# Where each format keeps the architecture's name, first present wins; style of ARCHS.called.
ARCH_KEYS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gguf": (("gguf", "general.architecture"),),
    "apr": (("hf", "hf_model_type"), ("apr", "architecture"), ("hf", "hf_architecture")),
}

# Styles that other programs read by their own keys and tensors alone, and no config.json in them.
KEYS_ALONE = ("gguf",)

# What a config.json has no key for, so that its silence contradicts nothing.
OUTSIDE = ("pooling",)


def architecture_names(model: "Model") -> list[tuple[str, str]]:
    """Return (style, name) of each name that the file gives its architecture, best first.

    The style says where the name is from: "hf" for config.json, else the container's keys.
    """
    found: list[tuple[str, str]] = []
    config = model.config
    if config is not None:
        config_names = [config.get("model_type")]
        classes = config.get("architectures")
        config_names += classes if isinstance(classes, list) else []
        found += [("hf", name) for name in config_names if isinstance(name, str) and name]
    for style, key in ARCH_KEYS.get(model.key_style, ()):
        name = model.metadata.get(key)
        if isinstance(name, str) and name:
            found.append((style, name))
    return found


ARCHITECTURE = "architecture"  # the name of what stated_architecture returns


def stated_architecture(model: "Model") -> str:
    """Return the architecture that other programs take a resolved file for; "" if it states none.

    It is the one by which the file is read here, unless that comes from an embedded config.json:
    other programs only read the file's own key, which may have another name. Raises ArchError.
    """
    spec, style = model.spec, model.key_style
    names = spec.called.get(style, ())
    if style not in KEYS_ALONE or model.forced or not names:
        return spec.name
    own = next((model.metadata.get(key) for _, key in ARCH_KEYS[style]), None)
    return spec.name if own in names else str(own or "")


def _no_names_text(model: "Model") -> str:
    """Return why a file gives no name of an architecture, and what to do, as a clause."""
    config = model.config or {}
    of_diffusers = config.get("_class_name")
    if isinstance(of_diffusers, str):
        return (
            f": its config.json is of diffusers ({of_diffusers}), whose models have none here; "
            "diff and convert --generic take its tensors by their names"
        )
    why = "no model_type in config.json" if config else "no config.json"
    return f" ({why}, no metadata key); name it with --arch"


def find_spec(
    model: "Model", forced: str | None, tensors: "Collection[str] | None" = None
) -> "ArchSpec":
    """Return the ArchSpec of the file's architecture; ArchError if it names no known one.

    `forced` is the user's --arch. `tensors` are the names to read it under, where those are not
    the file's own.
    """
    kind = model.kind
    if forced is not None and (kind is None or not kind.foreign):
        return ARCHS[forced]
    if kind is not None:
        part = "" if kind.foreign else ", no whole model"
        raise ArchError(f"{model.path}: is {kind.says(model)}{part}; {kind.todo(model)}")
    names = architecture_names(model)
    if not names:
        raise ArchError(f"{model.path}: says no architecture{_no_names_text(model)}")
    error: ArchError | None = None
    held = tuple(model) if tensors is None else tuple(tensors)
    for style, name in names:
        try:
            return find_arch(style, name, roles=held, values=model.config or model.metadata)
        except ArchError as problem:
            error = error or problem
    assert error is not None
    raise ArchError(f"{model.path}: {error}") from error


def resolve(model: "Model", forced: str | None) -> Resolution:
    """Return the model's Resolution; raises ArchError.

    Where tensors are missing and others have no role, renames and corrected keys are tried.
    """
    found: Resolution | None = None
    error: ArchError | None = None
    try:
        found = resolve_with_names(model, forced, None)
    except ArchError as problem:
        error = problem
    if found is not None and is_as_published(model, found):
        return found
    from aprfmt.model.relation_search import resolve_related

    return resolve_related(
        model,
        found,
        error,
        lambda names, style: resolve_with_names(model, forced, names, style),
        lambda: find_spec(model, forced),
        lambda made: resolve_with_names(made, forced, None),
    )


def resolve_with_names(
    model: "Model", forced: str | None, names: Mapping[str, str] | None, style: str | None = None
) -> Resolution:
    """Return the Resolution of a model (its tensors' roles), with its tensors under other names.

    `names` are {name: stored name}, None for the file's own. `style` is the naming style, None for
    that of most names. `forced` is the user's --arch. Raises ArchError.
    """
    from aprfmt.arch.binding import bind_names, bind_packed, known_shapes, without_partial
    from aprfmt.arch.required_roles import accept_nothing, compare_roles
    from aprfmt.arch.spec import split_key

    tensors: Mapping[str, View] = model
    if names is not None:
        tensors = {name: model[stored] for name, stored in names.items()}
    spec = find_spec(model, forced, tensors)
    style = style or detect_style(tensors)
    if not tensors:
        raise ArchError(f"{model.path}: holds no tensor; expected those of {spec.name}")
    if style is None:
        raise ArchError(
            f"{model.path}: tensor names fit neither naming style of {spec.name}; "
            f"the first is {next(iter(model))!r}"
        )
    packed = {name for name, tensor in tensors.items() if tensor.parts}
    unread = model.unread
    codes = {tensor.name for tensor in unread.tensors} if unread else set()
    named = bind_names(spec, style, tuple(name for name in tensors if name not in codes))
    loose = {*named.unbound, *codes}
    named = replace(named, unbound=tuple(name for name in tensors if name in loose))
    bound = bind_packed(named, packed)
    partial = {name for lost in model.lost_parts.values() for name in lost.stored}
    said = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if shape_is_known(tensor.stored[0]) and tensor.stored[0].info.name not in partial
    }
    if any(len(shape) == 3 and shape[2] == 1 for shape in said.values()):  # as MLX's kernels are
        from aprfmt.arch.mlx_layout import with_mlx_norms

        bound = with_mlx_norms(spec, style, bound, said)
    shapes = known_shapes(bound, said)
    has_draft = style in spec.draft
    first = _first_draft_layer(spec, style, tensors) if has_draft else None
    if first is not None:  # its block is no layer of the model
        shapes = {key: each for key, each in shapes.items() if (split_key(key)[0] or 0) < first}
    hyper, reports, notes, demanded = read_hyperparameters(model, spec, shapes, tensors, style)
    report, native = reports
    drafts: Sequence[Head] = ()
    if has_draft:
        from aprfmt.arch.draft_head import find_heads

        plain = [name for name in tensors if name not in codes]
        drafts = find_heads(spec, style, hyper, plain, packed)
    end = int(hyper["n_layers"]) if has_draft else None
    bound, draft = _separate_drafts(without_partial(bound, hyper), drafts, tuple(tensors), end)
    axes: tuple[Relation, ...] = ()
    # APR and GGUF writers turn shapes by hand: values may stand.
    if model.format == "safetensors" and not _all_shapes_fit(spec, bound, said, hyper):
        from aprfmt.model.convolution_kernels import reshape_kernels
        from aprfmt.model.exchanged_axes import exchange_axes

        mlx = model.metadata.get("format") == "mlx"
        bound, kernels = reshape_kernels(spec, bound, said, hyper, model.path, mlx)
        bound, axes = exchange_axes(spec, bound, said, hyper, model.path)
        axes = (*kernels, *axes)
    roles = _logical_tensors(tensors, model, bound, hyper)
    logical = {key: role.shape for key, role in roles.items()}
    for head in drafts:
        roles |= _logical_tensors(tensors, model, head.bound, head.hyper)
    accept: Callable[[str], bool] = accept_nothing
    if model.allow_missing or has_aprfmt_keys(model.metadata):
        from aprfmt.model.completeness import absence_predicate

        accept = absence_predicate(model, spec)
    found = compare_roles(spec, hyper, logical, demanded, accept)
    left = unread.roles_among(spec, style, hyper, found.missing) if unread else frozenset()
    of_towers: tuple[str, ...] = ()
    if bound.unbound:
        from aprfmt.model.towers import names_in_towers

        of_towers = names_in_towers(model, bound.unbound)
    unbound, buffers, draft, towers = (
        tuple(name if names is None else names[name] for name in each)
        for each in (bound.unbound, bound.buffers, draft, of_towers)
    )
    return Resolution(
        spec,
        hyper,
        roles,
        report,
        unbound,
        found,
        tuple(notes),
        unread,
        left,
        buffers,
        draft,
        style,
        towers,
        axes,
        native,
        _second_views(tensors, model, bound, roles, hyper),
        asked=forced is not None,
    )


def _all_shapes_fit(
    spec: "ArchSpec",
    bound: "BoundNames",
    shapes: Mapping[str, tuple[int, ...]],
    hyper: "HyperParams",
) -> bool:
    """Return whether every bound tensor has the shape that the config asks for.

    `shapes` are the stored shapes by name.
    """
    from aprfmt.arch.required_roles import shapes_fit

    return all(
        shapes_fit(spec, group, [shapes.get(name, ()) for name in group.stored], hyper)
        for group in bound.groups
    )


def _first_draft_layer(spec: "ArchSpec", style: str, tensors: Collection[str]) -> int | None:
    """Return the block number of the first draft head; None if no tensor of one is stored."""
    from aprfmt.arch.draft_head import first_head

    return first_head(spec, style, tensors)


def _separate_drafts(
    bound: "BoundNames", drafts: "Sequence[Head]", names: Sequence[str], end: int | None
) -> "tuple[BoundNames, tuple[str, ...]]":
    """Return (bound names without draft heads, stored names of the draft heads).

    `drafts` are the draft heads, `names` all names. Layers from number `end` on that belong to no
    draft head are left without a role.
    """
    mine = {name for head in drafts for group in head.bound.groups for name in group.stored}
    left = {name for head in drafts for name in head.bound.unbound}
    buffers = {name for head in drafts for name in head.bound.buffers}
    every = mine | left | buffers
    kept, loose = [], ({*bound.unbound} - every) | left
    for group in bound.groups:
        if end is not None and (group.layer or 0) >= end:
            loose |= {*group.stored} - mine - buffers
        elif every.isdisjoint(group.stored):
            kept.append(group)
    return replace(
        bound,
        groups=tuple(kept),
        unbound=tuple(name for name in names if name in loose),
        buffers=tuple(name for name in names if name in ({*bound.buffers} - every) | buffers),
    ), tuple(name for name in names if name in every)


def _logical_tensors(
    tensors: Mapping[str, View], model: "Model", bound: "BoundNames", hyper: Mapping[str, Value]
) -> dict[str, View]:
    """Return {role key: View} of the bound groups of a model, or of a draft head.

    `tensors` are the stored tensors under the names that are bound.
    """
    records = model.records
    roles: dict[str, View] = {}
    for group in bound.groups:
        stored = [tensors[name].stored[0] for name in group.stored]
        for key in group.roles:
            record = None
            if records is not None and key in records.encodings:
                record = (records.encodings[key], records.patches.get(key))
            roles[key] = View(*stored, role=key, group=group, hp=hyper, record=record)
    return roles


def _second_views(
    tensors: Mapping[str, View],
    model: "Model",
    bound: "BoundNames",
    roles: Mapping[str, View],
    hyper: "HyperParams",
) -> tuple[View, ...]:
    """Return the Views of roles that are stored a second time, in another layout.

    `tensors` are the stored tensors under the names that are bound, `roles` are the roles as they
    are read. A group that does not fit its layout, or has a tensor in use, is left out. Of one that
    lacks experts the Views have those that are there (`group.experts`).
    """
    from aprfmt.arch.joining_steps import Stacked

    loose, found = set(bound.unbound), []
    for group in bound.again:
        if not loose.issuperset(group.stored) or not set(roles).issuperset(group.roles):
            continue
        sizes: Mapping[str, Value] = hyper
        if group.experts:
            count = next(step.count for step in group.binding.steps if isinstance(step, Stacked))
            sizes = {**hyper, count: len(group.experts)}
        try:
            made = _logical_tensors(tensors, model, replace(bound, groups=(group,)), sizes)
        except ArchError:
            continue
        found += [view for key, one in made.items() if (view := _second_view(one, roles[key]))]
    return tuple(found)


def _second_view(second: View, first: View) -> View | None:
    """Return the View of a role in a second layout, with the experts that it has; None if unfit.

    `first` is the role as it is read. A stack of fewer experts has the first ones.
    """
    group = second.group
    if second.shape == first.shape or group is None:
        return second if second.shape == first.shape else None
    if second.shape[1:] != first.shape[1:] or second.shape[0] > first.shape[0]:
        return None
    if not group.experts:
        group = replace(group, experts=tuple(range(second.shape[0])))
    return second.in_group(group)


def spellings_by_role(model: "Model") -> dict[str, tuple[str, ...]]:
    """Return {role key: every spelling}: the key, the file's names, and both styles' names.

    Empty where the architecture is unknown.
    """
    from aprfmt.arch.draft_head import stored_groups

    try:
        resolution = model.resolution
    except ArchError:
        return {}
    found: dict[str, dict[str, None]] = {
        key: dict.fromkeys((key, *tensor.names)) for key, tensor in resolution.roles.items()
    }
    for style in resolution.spec.bindings:
        for key in resolution.roles:
            try:
                groups = stored_groups(resolution.spec, style, [key], resolution.hyper)
            except ArchError:
                continue  # this style has no name for it
            for group in groups:
                found[key].update(dict.fromkeys(group.stored))
    return {key: tuple(names) for key, names in found.items()}


def spellings_by_name(model: "Model") -> dict[str, tuple[str, ...]]:
    """Return {stored name: every spelling of that tensor}."""
    found: dict[str, dict[str, None]] = {name: {name: None} for name in model}
    every = spellings_by_role(model)
    for key, names in every.items():
        for name in model.roles[key].names:
            found[name].update(dict.fromkeys(names))
    return {name: tuple(names) for name, names in found.items()}


def names_matching(model: "Model", patterns: Iterable[str]) -> list[str]:
    """Return the stored names that any pattern matches, in the file's order.

    Raises UsageError for a pattern that matches none.
    """
    from aprfmt.model.patterns import matching_indices

    every = list(spellings_by_name(model).values())
    names = list(model)
    return [names[i] for i in matching_indices(every, patterns, str(model.path))]


def find_one_tensor(model: "Model", name: str) -> "tuple[str, View]":
    """Return (name, tensor) of a stored name, a role key, or a pattern of one tensor.

    Raises UsageError for a pattern that matches none, or several.
    """
    if name in model:
        return name, model[name]
    role = model.find(name)
    if role is not None:
        return name, role
    from aprfmt.model.patterns import one_matching_index

    names, every = list(model), list(spellings_by_name(model).values())
    found = names[one_matching_index(every, name, str(model.path))]
    return found, model[found]


def read_hyperparameters(
    model: "Model",
    spec: "ArchSpec",
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, View] | None = None,
    style: str | None = None,
) -> "tuple[HyperParams, tuple[KeyReport, KeyReport | None], list[Note], dict[str, Value]]":
    """Return (hyperparameters, key reports, notes, required weights) from all keys of the file.

    The container's keys win over config.json. `tensors` and `style` are the names under which it is
    read, None for the file's. The reports are (that of config.json, that of the container's keys),
    or (the only one, None). Required weights are {hyperparameter: value} for optional weights whose
    presence the tensors show (biases, say), with the value that the keys or tables demand. Raises
    ArchError where config.json is missing and the container states no hyperparameters.
    """
    from aprfmt.arch.hyperparameters import read_hyper
    from aprfmt.arch.spec import Facts, HyperParams

    subject = str(model.path)
    config = model.config
    tensors = model if tensors is None else tensors
    style = (model.style if style is None else style) or ""
    carried = None
    if config is not None:
        pooling = pooling_file(model.folder)
        facts = Facts("hf", {**config, **pooling}, shapes, names=style)
        carried = read_hyper(spec, facts, subject)
    if model.key_style not in ARCH_KEYS:
        if carried is None:
            raise ArchError(
                f"{subject}: no config.json next to the weights, so eps, theta and the head counts "
                "are not known; put the model's config.json there"
            )
        return carried[0], (carried[1], None), [], _required_values(carried[1])
    arch_key = model.metadata.get("general.architecture", "")
    facts = Facts(model.key_style, model.metadata, shapes, str(arch_key), tensors, style)
    native = read_hyper(spec, facts, subject, complete=carried is None)
    if carried is None:
        alone, notes = read_missing_as_default(spec, native[0], facts, subject)
        return HyperParams(alone, subject), (native[1], None), notes, _required_values(native[1])
    rows, notes = reconcile_hyperparameters(native[0], carried[0], subject)
    rows, more = read_missing_as_default(spec, HyperParams(rows, subject), facts, subject)
    notes += more
    demanded = _required_values(carried[1]) | _required_values(native[1], without_defaults=True)
    return HyperParams(rows, subject), (carried[1], native[1]), notes, demanded


def _required_values(report: "KeyReport", *, without_defaults: bool = False) -> dict[str, Value]:
    """Return {hyperparameter: value} of optional weights, such as biases, that keys require.

    With `without_defaults` without those that only a default requires.
    """
    return {
        name: row.value
        for name, row in report.demanded.items()
        if row.origin != "default" or not without_defaults
    }


class _KeysWithout(Mapping[str, Value]):
    """A mapping without the keys that begin with a prefix; a value is read when it is asked for."""

    def __init__(self, values: Mapping[str, Value], prefix: str) -> None:
        self._values, self._prefix = values, prefix

    def __getitem__(self, key: str) -> Value:
        """Return the value of a key; raises KeyError for one with the prefix."""
        if key.startswith(self._prefix):
            raise KeyError(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys without the prefix."""
        return (key for key in self._values if not key.startswith(self._prefix))

    def __len__(self) -> int:
        """Return the number of keys without the prefix."""
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a key, without reading its value."""
        return isinstance(key, str) and not key.startswith(self._prefix) and key in self._values


def read_missing_as_default(
    spec: "ArchSpec", hyper: "HyperParams", facts: "Facts", subject: str
) -> "tuple[dict[str, HyperParam], list[Note]]":
    """Return (hyperparameters by name, notes), with defaults where the style's own key is missing.

    A GGUF may embed a config.json and aprfmt's keys, which other programs do not read. Where the
    style has a key or tensor for such a value and the file lacks it, these programs take their
    default, and so does the result, with a note. `hyper` is what all keys say, `facts` are the
    file's.
    """
    from aprfmt.arch.hyperparameters import read_back_hyper, read_hyper
    from aprfmt.arch.spec import CARRIED
    from aprfmt.arch.value_checks import same_value

    rows = {name: hyper.of(name) for name in hyper}
    ours = [
        name for name, row in rows.items() if row.origin == "config" or row.key.startswith(CARRIED)
    ]
    called = spec.called.get(facts.style) or ("",)
    if facts.style not in KEYS_ALONE or not ours:
        return rows, []
    if facts.arch_key and facts.arch_key not in called:
        return rows, []  # no other program opens a file of that name
    own = _KeysWithout(facts.values, CARRIED)
    alone, _ = read_hyper(spec, replace(facts, values=own), subject, complete=False)
    apart = [
        name
        for name in ours
        if name in alone
        and not same_value(alone[name], rows[name].value)
        and alone.of(name).origin == "default"
    ]
    if not apart:
        return rows, []
    notes, reread = [], read_back_hyper(spec, hyper, facts.style, shapes=facts.shapes)
    usual = called[0]
    for name in apart:
        if name not in reread or reread.of(name).origin == "default":
            continue  # the style cannot say it
        key = reread.of(name).key
        if facts.arch_key and key.startswith(f"{usual}."):
            key = facts.arch_key + key.removeprefix(usual)
        if not key or key in facts.values or key in facts.tensors:
            continue
        said = rows[name]
        notes.append(
            Note(
                "warning",
                f"{subject}: {key}",
                f"is not there, so other programs take {name} = {alone[name]!r}; "
                f"{said.key or 'config.json'} says {said.value!r}, and only aprfmt reads that here",
                "contradiction",
            )
        )
        rows[name] = alone.of(name)
    # Defaults that follow from a value that is not taken follow from what is taken for it.
    for name in alone if notes else ():
        if name in rows and rows[name].origin == alone.of(name).origin == "default":
            rows[name] = alone.of(name)
    return rows, notes


OWN_KEY_USED = "the file's own key is used"


def reconcile_hyperparameters(
    native: "HyperParams", carried: "HyperParams", subject: str
) -> "tuple[dict[str, HyperParam], list[Note]]":
    """Return (hyperparameters by name, notes) merged from metadata and the embedded config.json.

    `native`, from the container's keys and from tensors, wins over `carried`, from config.json. If
    both are equal up to float32 rounding, the value of config.json is taken. Each contradiction
    gets a note.
    """
    from aprfmt.arch.rope_gguf import have_equal_divisors
    from aprfmt.arch.value_checks import same_value

    rows: dict[str, HyperParam] = {name: carried.of(name) for name in carried}
    notes = []
    for name in native:
        mine = native.of(name)
        if mine.origin not in ("metadata", "tensor"):
            rows.setdefault(name, mine)
            continue
        other = rows.get(name)
        if other is not None and name in OUTSIDE and other.origin == "default":
            other, rows[name] = None, mine
        alike = name == "rope_scaling" and have_equal_divisors(native, carried)
        if other is None or alike or same_value(mine.value, other.value):
            rows.setdefault(name, mine)
            continue
        notes.append(
            Note(
                "warning",
                f"{subject}: {mine.key}",
                f"says {name} = {mine.value!r}, the carried config.json says {other.value!r} "
                f"({other.key or other.origin}); {OWN_KEY_USED}",
                "contradiction",
            )
        )
        rows[name] = mine
    return rows, notes
