"""Missing and misshapen tensors: how absences are accepted, and the error messages.

`Resolution.coverage` lists them. This module holds the errors that every command raises, and the
metadata record with which a file says that tensors are missing on purpose.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from aprfmt.arch.name_templates import expand_template
from aprfmt.arch.required_roles import collapse_roles
from aprfmt.arch.spec import split_key
from aprfmt.base.protocols import Value
from aprfmt.base.sequences import join_first
from aprfmt.errors import AprfmtError, ArchError, FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec
    from aprfmt.model import Model
    from aprfmt.model.resolve import Resolution

RECORD = "aprfmt.allowed_missing"  # JSON list of roles (every layer) and role keys (one layer)
ANY = ("*",)  # accepts every absence, for commands that report missing tensors themselves
OPTION = "--allow-missing"
_MAX_BYTES = 1 << 20
_SHOWN = 5


def absence_predicate(model: "Model", spec: "ArchSpec") -> Callable[[str], bool]:
    """Return a function of a role key: whether user or file accepts that it is missing.

    Raises UsageError if a pattern matches no role, FormatError if the record is not a list.
    """
    recorded = set(recorded_missing(model.metadata, str(model.path)))
    matchers = [
        _pattern_predicate(spec, pattern, str(model.path)) for pattern in model.allow_missing
    ]

    def accept(key: str) -> bool:
        """Return whether a missing role is accepted: by the file's record or by --allow-missing."""
        if key in recorded or split_key(key)[1] in recorded:
            return True
        return bool(matchers) and any(match(s) for s in _spellings(spec, key) for match in matchers)

    return accept


def _spellings(spec: "ArchSpec", key: str) -> list[str]:
    """Return the names that a pattern may match for a role key: key, role, and stored names."""
    layer, role = split_key(key)
    names = [
        expand_template(stored, layer, 0)
        for bindings in spec.bindings.values()
        for binding in bindings
        if role in binding.roles
        for stored in binding.stored
    ]
    return [key, role, *names]


def _pattern_predicate(spec: "ArchSpec", pattern: str, where: str) -> Callable[[str], bool]:
    """Return a function that says whether a name matches a pattern of --allow-missing.

    Raises UsageError if the pattern matches no role of the architecture. `where` begins its
    message.
    """
    from aprfmt.model.patterns import similar_names, spelling_predicate

    layer = _layer_in_pattern(pattern)
    keys = [f"L{layer}.{rule.role}" if rule.layered else rule.role for rule in spec.tensors]
    every = [spelling for key in keys for spelling in _spellings(spec, key)]
    match = spelling_predicate(pattern, every)
    if not any(map(match, every)):
        raise UsageError(
            f"{where}: {OPTION} {pattern!r} names no tensor of {spec.name}; near names: "
            f"{', '.join(similar_names(pattern, every))}"
        )
    return match


def _layer_in_pattern(pattern: str) -> int:
    """Return the layer number that a pattern names, 0 if it names none."""
    for part in pattern.split("."):
        number = part.removeprefix("L")
        if number.isascii() and number.isdecimal() and len(number) < 7:
            return int(number)
    return 0


def recorded_missing(metadata: Mapping[str, Value], where: str) -> tuple[str, ...]:
    """Return the roles and role keys that the file's metadata records as missing on purpose.

    Raises FormatError if the record is not a list of strings. `where` begins its message. ()
    without such a record.
    """
    text = metadata.get(RECORD)
    if text is None:
        return ()
    from aprfmt.formats.bounded_json import loads

    found = loads(text, f"{where}: {RECORD}", max_bytes=_MAX_BYTES) if type(text) is str else text
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise FormatError(f"{where}: {RECORD}: holds no JSON list of role names")
    return tuple(found)


def missing_record(keys: Sequence[str], required: Sequence[str]) -> str:
    """Return the JSON text that records these role keys as missing on purpose."""
    return json.dumps(collapse_roles(keys, required), separators=(",", ":"))


def list_keys(keys: Sequence[str]) -> str:
    """Return the first five keys joined with commas, with ", ..." if there are more."""
    return join_first(keys, _SHOWN)


def roles_without_place(model: "Model", other: "Model") -> frozenset[str]:
    """Return the roles of `model` that no file of the other's format can hold, and no pass reads.

    Such are an encoder's pooling layer and heads beside a GGUF, whose writers leave them out. Empty
    where the architecture of either is not known.
    """
    from aprfmt.arch.draft_head import stored_groups

    try:
        mine, theirs = model.resolution, other.resolution
    except ArchError:
        return frozenset()
    optional = {rule.role for rule in mine.spec.tensors if rule.needs == "optional"}
    found = set()
    for key in mine.roles:
        if split_key(key)[1] not in optional:
            continue
        try:
            stored_groups(mine.spec, theirs.style, [key], mine.hyper)
        except ArchError:  # the style has no name for it
            found.add(key)
    return frozenset(found)


def require_complete(
    resolution: "Resolution", where: object, error: type[AprfmtError] = ArchError
) -> None:
    """Raise `error` if required tensors are missing that neither user nor file accepts.

    `where` begins the message.
    """
    found = resolution.coverage
    if not found.missing:
        return
    if resolution.unread is not None and resolution.unread_roles & {*found.missing}:
        raise error(f"{where}: {resolution.unread.refusal}")
    spare = [key for key in found.missing if key not in found.vital]
    todo = _get_again(resolution)
    if spare:
        wishes = collapse_roles(spare, found.required)
        todo += f", or accept it: {' '.join(f'{OPTION} {role}' for role in wishes[:_SHOWN])}"
        todo += " ..." if len(wishes) > _SHOWN else ""
    raise error(
        f"{where}: {len(found.missing)} of {found.expected} tensors are missing that "
        f"{resolution.spec.name} needs: {list_keys(found.missing)}; expected what the "
        f"configuration "
        f"demands; {todo}"
    )


def require_shapes(
    resolution: "Resolution", where: object, error: type[AprfmtError] = ArchError
) -> None:
    """Raise `error` if stored tensors have other shapes than the configuration gives them.

    `where` begins the message, which names the first such tensor, its shape and the expected one.
    """
    found = resolution.coverage.misshapen
    if not found:
        return
    key, has, wanted = found[0]
    kind, todo = "", "correct the configuration, or get the file again"
    if len(has) == 1 < len(wanted):
        kind, todo = f" ({vector_text(has[0], wanted)})", vector_todo(has[0], wanted)
    raise error(
        f"{where}: {len(found)} of {len(resolution.roles)} tensors have shapes that "
        f"{resolution.spec.name} with these hyperparameters cannot have: {key} is {list(has)}{kind}"
        f"; expected {list(wanted)}; {todo}; `convert --arch none` copies tensors as they are"
    )


def vector_text(count: int, wanted: Sequence[int]) -> str:
    """Return in words what `count` values may be that are stored where `wanted` is the shape.

    That is a joined weight, a placeholder of ZeRO, or one rank's range of flattened parameters.
    """
    if count == math.prod(wanted):
        return "a vector of as many values as are due: the axes were joined"
    if count <= 1:
        return "a placeholder without values, as ZeRO stage 3 leaves where nothing is gathered"
    return "a run of values, one rank's part of flat parameters (FSDP)"


def vector_todo(count: int, wanted: Sequence[int]) -> str:
    """Return what to do with a vector of `count` values where the shape `wanted` is due."""
    if count == math.prod(wanted):
        return f"store it in the shape {list(wanted)}"
    return "save it again with the parts of all ranks gathered"


def check_runnable(resolution: "Resolution", where: object) -> None:
    """Raise ArchError if the model cannot run a forward pass; `where` begins the message.

    It cannot if only names and shapes of its architecture are known, if required tensors are
    missing, or if it combines features that no published model of the architecture has. Tensors
    that --allow-missing accepts may be missing, unless a forward pass must have them.
    """
    if resolution.spec.level != "full":
        raise ArchError(
            f"{where}: {resolution.spec.name} is known by its names and shapes only; expected an "
            "architecture with a forward pass (inspect says `level: full`); convert, diff, hash, "
            "validate and quantize work on this one"
        )
    mixed = resolution.spec.mixed
    if mixed is not None and (both := mixed(resolution.hyper)):
        raise ArchError(
            f"{where}: the model has {both}; no published {resolution.spec.name} has both, so that "
            "nothing says how they go together: expected one of them"
        )
    require_complete(resolution, where)
    vital = resolution.coverage.vital
    if vital:
        raise ArchError(
            f"{where}: {len(vital)} tensors are missing that no forward pass of "
            f"{resolution.spec.name} can do without: {list_keys(vital)}; {OPTION} helps with "
            f"biases, "
            "with q/k-norms that are all gone and with a head the embedding can replace; "
            f"{_get_again(resolution)}"
        )


def _get_again(resolution: "Resolution") -> str:
    """Return what to do about missing tensors, as a clause: the file or --arch may be wrong."""
    if not resolution.asked:
        return "get the file again"
    name = resolution.spec.name
    return f"--arch {name} does not fit this file if it is whole; name another, or get it again"


def check_predicts(spec: "ArchSpec", where: object) -> None:
    """Raise UsageError for an encoder, which has no head and predicts no tokens."""
    if spec.block.head == "none":
        raise UsageError(
            f"{where}: is an encoder ({spec.name}): it predicts no tokens; expected a model with a "
            "head; its embedding of a text is `aprfmt trace MODEL --payload --points pooled "
            "--prompt TEXT`"
        )


def accepted_absences_text(resolution: "Resolution") -> str:
    """Return one sentence about missing tensors that were accepted; "" if there are none."""
    found = resolution.coverage
    if not found.accepted:
        return ""
    roles = collapse_roles(found.accepted, found.required)
    return (
        f"{len(found.accepted)} of {found.expected} required tensors are missing and accepted as "
        f"such ({OPTION}, or {RECORD} in the file): {list_keys(roles)}"
    )
