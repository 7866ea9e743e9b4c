"""The search for a change (renames, a corrected key) under which all tensors are found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.binding import groups_for
from aprfmt.base.protocols import Note, TensorInfo
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.model.name_relations import rename_relation
from aprfmt.model.relations import NESTED, STYLE_OF, Relation, has_uncounted_layers, opening_path
from aprfmt.model.renames import (
    Rename,
    command_line,
    component_rules,
    numbering_rule,
    prefix_rules,
    rename_names,
    rules_of_sets,
    wrapper_rules,
)
from aprfmt.model.towers import has_towers, tower_name, tower_rule
from aprfmt.tensors.companions import is_coded

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec
    from aprfmt.model import Model
    from aprfmt.model.resolve import Resolution

Read = Callable[[Mapping[str, str] | None, str | None], "Resolution"]
_TABLE, _HEAD = "token_embd.weight", "output.weight"
_ROUNDS = 3  # kinds of rules that one relation may have, one after the other
CALLED = {"gguf": "llama.cpp", "hf": "Hugging Face"}  # whose names are of a style


def resolve_related(
    model: "Model",
    found: "Resolution | None",
    error: ArchError | None,
    read: Read,
    find_spec: "Callable[[], ArchSpec]",
    again: "Callable[[Model], Resolution]",
) -> "Resolution":
    """Return a model's Resolution (its tensors' roles), under changed names or keys if needed.

    `found` is the resolution of the unchanged file, or None and `error` why there is none.
    `read(names, style)` resolves it under other names, `find_spec()` gives its architecture's
    tables, `again(model)` resolves a model with another value of a key. Raises `error` if no change
    makes the model complete.
    """
    better = _resolve_renamed(model, read, find_spec, found)
    if better is None and found is not None:
        better = _resolve_shared_table(model, read, found)
    if better is None and (error is not None or (found is not None and _contradicts_config(found))):
        from aprfmt.model.wrong_size import solve_key

        better = solve_key(model, found, error, again)
    if better is None:
        if found is None:
            assert error is not None
            raise error
        better = _resolve_towers(model, read, found)
    return _note_container_names(model, _note_nested_names(model, better))


def _resolve_renamed(
    model: "Model", read: Read, find_spec: "Callable[[], ArchSpec]", found: "Resolution | None"
) -> "Resolution | None":
    """Return the resolution under renames that bring missing tensors back; None if none do.

    `found` is the resolution without renames, None if that fails. Renames are only tried if tensors
    are missing while others have no role, or if there are layers that the configuration does not
    count.
    """
    if found is not None and not (
        _missing_roles(found) and (found.unclaimed or has_uncounted_layers(found))
    ):
        return None
    try:
        spec = find_spec() if found is None else found.spec
    except ArchError:
        return None
    styles = tuple(spec.bindings) if found is None else (found.style, *spec.bindings)
    for style in dict.fromkeys(styles):
        best, rules = found, list[Rename]()
        for _ in range(_ROUNDS):
            step = _add_rules(model, spec, style, read, best, rules)
            if step is None:
                break
            best, rules = step
            if not _missing_roles(best):
                break
        if rules and best is not None:
            names = rename_names(model, rules, model.path, strict=False)
            pairs = [(stored, name) for name, stored in names.items()]
            relation = rename_relation(model.path, rules, pairs, len(model))
            return replace(best, relations=(relation, *best.relations))
    return None


def _resolve_shared_table(model: "Model", read: Read, found: "Resolution") -> "Resolution | None":
    """Return the resolution with the head's tensor read as the missing embedding, or None.

    It is tried only where a key says that both are one tensor: the writer kept one of two names,
    the head's. transformers 5 reads that, older loaders begin with a random embedding. None where
    it does not make the model complete.
    """
    said = found.report.overruled.get("tied_embeddings")
    head = found.roles.get(_HEAD)
    if _missing_roles(found) != (_TABLE,) or head is None or said is None or not said.value:
        return None
    norm = found.roles.get("output_norm.weight")
    usual, table = (
        [name for group in groups_for(found.spec, found.style, [key], found.hyper)
         for name in group.stored]
        for key in ("output_norm.weight", _TABLE)
    )  # fmt: skip
    before = norm.names[0].removesuffix(usual[0]) if norm is not None and usual else ""
    for name in table:
        rule = Rename(head.names[0], f"{before}{name}")
        try:
            names = rename_names(model, [rule], model.path, strict=False)
            made = read(names, found.style)
        except AprfmtError:
            continue
        if not _missing_roles(made) and not made.coverage.misshapen:
            pairs = [(stored, renamed) for renamed, stored in names.items()]
            relation = rename_relation(model.path, [rule], pairs, len(model))
            return replace(made, relations=(relation, *made.relations))
    return None


def _contradicts_config(found: "Resolution") -> bool:
    """Return whether tensors contradict the configuration.

    They do if two or more have other shapes, or if there are layers beyond `n_layers`. Such layers
    do not count where they are a draft head's or come with tensors of no role.
    """
    more = has_uncounted_layers(found) and not found.unclaimed and not found.draft
    return len(found.coverage.misshapen) > 1 or more


def _missing_roles(found: "Resolution") -> tuple[str, ...]:
    """Return the required roles that are not found, whether or not their absence is accepted.

    Roles of packed weights that no codec decodes count as found.
    """
    every = (*found.coverage.missing, *found.coverage.accepted)
    return tuple(key for key in every if key not in found.unread_roles)


def _add_rules(
    model: "Model",
    spec: "ArchSpec",
    style: str,
    read: Read,
    best: "Resolution | None",
    rules: Sequence[Rename],
) -> "tuple[Resolution, list[Rename]] | None":
    """Return (resolution, all rules) with more rename rules added; None if none improves it.

    `best` is the resolution so far, None if there is none, `rules` are those that led to it.
    """
    names = rename_names(model, rules, model.path, strict=False)
    for more in _propose_rules(model, spec, style, names, best):
        every = [*rules, *more]
        try:
            under = rename_names(model, every, model.path, strict=False)
            made = read(under, style)
        except AprfmtError:
            continue
        if _is_better_reading(made, best):
            return made, every
    return None


def _is_better_reading(made: "Resolution", best: "Resolution | None") -> bool:
    """Return whether `made` finds half of the missing roles and adds no wrong shape.

    `best` is the resolution before, None if there is none: then all roles are missing.
    """
    before = len(made.coverage.required) if best is None else len(_missing_roles(best))
    wrong = 0 if best is None else len(best.coverage.misshapen)
    gained = before - len(_missing_roles(made))
    return gained >= max(1, before / 2) and len(made.coverage.misshapen) <= wrong


def _propose_rules(
    model: "Model",
    spec: "ArchSpec",
    style: str,
    names: Mapping[str, str],
    best: "Resolution | None",
) -> Iterator[list[Rename]]:
    """Yield lists of rename rules to try, the simplest first.

    `names` are {name after the rules so far: stored name}, `best` the resolution under these.
    """
    config = model.config or {}
    held = has_towers(config)
    as_read = {stored: name for name, stored in names.items()}
    unbound = list(as_read) if best is None else best.unclaimed
    left = [as_read[stored] for stored in unbound]
    # Codes are no weights under another name, also where their parts do not fit each other.
    codes = {tensor.name for tensor in model.unread.tensors} if model.unread else set()
    stored_as = model.source.tensors
    codes |= {one for one in unbound if one in stored_as and _is_packed(stored_as[one].info)}
    left = [name for name in left if names[name] not in codes and not (held and tower_name(name))]
    nested = style == "hf" and isinstance(config.get(spec.section), Mapping)
    prefixes = prefix_rules(spec, style, left, nested)
    yield from rules_of_sets(prefixes, left)
    for k in range(1, min(3, len(prefixes)) + 1):
        yield prefixes[:k]
    wrapped = wrapper_rules(spec, style, left)
    if wrapped:
        yield wrapped
        inside = rename_names(left, wrapped, model.path, strict=False)
        yield [*wrapped, *prefix_rules(spec, style, inside, nested)[:1]]
    if best is None:
        return
    rule = numbering_rule(spec, style, names, int(best.hyper["n_layers"]))
    if rule is not None:
        yield [rule]
    sizes = {name: tuple(model[names[name]].shape) for name in left}
    parts = component_rules(style, sizes, _missing_names(best, spec, style))
    for k in range(1, len(parts) + 1):
        yield parts[:k]
    if len(parts) > 1:
        yield from ([part] for part in parts[1:])


def _is_packed(info: TensorInfo) -> bool:
    """Return whether a stored tensor is the codes of a packed weight, by its encoding and name."""
    if not is_coded(info):
        return False
    from aprfmt.codecs.dialects import is_packed_part

    return is_packed_part(info.name)


def _missing_names(
    found: "Resolution", spec: "ArchSpec", style: str
) -> dict[str, tuple[int, ...] | None]:
    """Return {stored name: shape} of missing roles; a shape is None where it is not known."""
    from aprfmt.arch.draft_head import stored_groups
    from aprfmt.arch.required_roles import logical_shape

    names: dict[str, tuple[int, ...] | None] = {}
    for key in _missing_roles(found):
        try:
            groups = stored_groups(spec, style, [key], found.hyper)
            shape = tuple(logical_shape(spec, key, found.hyper))
        except ArchError:
            continue
        for group in groups:
            alone = len(group.stored) == len(group.roles) == 1
            names.update(dict.fromkeys(group.stored, shape if alone else None))
    return names


def _resolve_towers(model: "Model", read: Read, found: "Resolution") -> "Resolution":
    """Return the resolution with a tower's tensors renamed to the names that loaders look for.

    Returns `found` unchanged if that is not needed or does not help.
    """
    if not has_towers(model.config) or not found.unclaimed:
        return found
    rule = tower_rule(model, found.unclaimed)
    if rule is None:
        return found
    try:
        names = rename_names(model, [rule], model.path, strict=False)
        made = read(names, found.style)
    except AprfmtError:
        return found
    if len(made.unclaimed) >= len(found.unclaimed):
        return found
    pairs = [(stored, name) for name, stored in names.items()]
    relation = rename_relation(model.path, [rule], pairs, len(model))
    return replace(made, relations=(relation, *made.relations))


# transformers/conversion_mapping.py: the text class takes `model.language_model.` off by itself.
_TAKESNESTED = ("qwen3_5", "qwen3_5_moe")


def _note_nested_names(model: "Model", found: "Resolution") -> "Resolution":
    """Return the resolution, with a Relation added if names have a multimodal model's prefix.

    An example is `model.language_model.` in a file whose config.json is of a text model:
    transformers and vLLM then find none of the tensors. mlx-lm removes the prefix. Where
    transformers removes it too, a note is added instead, as a warning about the other readers.
    """
    config = model.config or {}
    nested = has_towers(config) or isinstance(config.get(found.spec.section), Mapping)
    if found.style != "hf" or not config or nested or found.relations:
        return found
    if model.metadata.get("format") == "mlx":
        return found
    stored = [name for view in found.roles.values() for name in view.names]
    for old, new in NESTED:
        below = sum(name.startswith(old) for name in stored)
        if 2 * below <= len(stored):
            continue
        rule = Rename(old, new)
        names = rename_names(model, [rule], model.path, strict=False)
        pairs = [(first, name) for name, first in names.items()]
        relation = rename_relation(model.path, [rule], pairs, len(model))
        if old == NESTED[0][0] and found.spec.name in _TAKESNESTED:
            classes = config.get("architectures")
            own = str(classes[0]) if isinstance(classes, list) and classes else found.spec.name
            says = (
                f"{below} of {len(stored)} names begin with {old!r}, which {own}, the class that "
                "config.json names, does not have: transformers takes it off, and loaders that go "
                f"by the class's own names find none; {relation.remedy}"
            )
            note = Note("warning", str(model.path), says, "nested_names")
            return replace(found, notes=(*found.notes, note))
        return replace(found, relations=(*found.relations, relation))
    return found


def _note_container_names(model: "Model", found: "Resolution") -> "Resolution":
    """Return the resolution, with a Relation added if its names are of another container.

    An example are llama.cpp's tensor names in a safetensors file.
    """
    wanted = STYLE_OF.get(model.format)
    if wanted is None or found.style == wanted or not found.roles:
        return found
    theirs = CALLED.get(found.style, found.style)
    names = {name for view in found.roles.values() for name in view.names}
    says = (
        f"{len(names)} of {len(model)} tensors have the names of {theirs} in a {model.format} "
        f"file, where no loader looks for them (it looks for those of {CALLED[wanted]})"
    )
    examples = tuple((view.names[0], key) for key, view in found.roles.items())[:2]
    out = "OUT.gguf" if model.format == "gguf" else "OUT"
    relation = Relation(
        "container",
        says,
        tuple(sorted(names)),
        examples,
        command_line("convert", opening_path(model.path), out),
    )
    return replace(found, relations=(*found.relations, relation))
