"""Keys of a configuration that its model's tensors contradict, or that it cannot be read with.

A good configuration of the same model shows which key was lost or changed: with that key alone the
model is read.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from aprfmt.arch.other_keys import MASK_KEYS
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.arch.value_checks import same_value
from aprfmt.causes import CAUSES
from aprfmt.causes.hyperparameters import hyper_causes, is_read_as_flag
from aprfmt.errors import ArchError
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import FieldDiff
from aprfmt.model import Model
from aprfmt.model.config_paths import GONE, Key, differing_keys, read_with_changes, value_at_path
from aprfmt.model.own_keys import MisleadingKey, is_of_own_keys, misleading_keys

_MOST = 64  # differing keys that are tried


@dataclass(frozen=True)
class RestoredKey:
    """A key of `good`'s config.json with which `bad` is read.

    `model` is `bad` with the key at `path`, `label` its letter ("A" or "B"), `error` what is wrong
    without the key.
    """

    good: Model
    bad: Model
    label: str
    model: Model
    path: Key
    cause: str
    error: str

    @property
    def same(self) -> bool:
        """Whether all hyperparameters become equal to the other model's by restoring the key."""
        read = self.model.hyper
        return all(
            name in read and same_value(self.good.hyper[name], read[name])
            for name in self.good.hyper
        )

    def finding(self) -> Finding:
        """Return the finding that this key of the configuration is wrong.

        It is confirmed where restoring the key makes all hyperparameters equal.
        """
        key = ".".join(self.path)
        label, other = self.label, "A" if self.label == "B" else "B"
        value, given = (
            value_at_path(values, self.path) for values in (self.good.config, self.bad.config)
        )
        stated = "not given" if value is None else repr(value)
        own = "not given" if given is None else repr(given)
        misfit = "asks for attention that is not causal" * (self.path[-1] in MASK_KEYS)
        return Finding(
            self.cause,
            f"{label}'s configuration {misfit or 'does not fit its tensors'}: {key} is {stated} in "
            f"{other} and {own} in {label}; with {other}'s value it is read"
            + ", and says the same"
            * self.same,
            "config",
            "bug",
            (key,),
            self.same,
            values={key: {other.lower(): value, label.lower(): given}},
            next=_key_command(self.bad, key, value),
            proof=unfitted_proof() if self.same else None,
        )


def find_restored_key(good: Model, bad: Model, label: str) -> RestoredKey | None:
    """Return the one key of `good`'s config.json that makes `bad` a model of its own tensors.

    Without it `bad` is not readable, or asks for layers of other kinds than its tensors are of.
    None where `bad` is right as it is, `good` is not, or no single key is enough. `label` is the
    letter of `bad`, "A" or "B".
    """
    return _find_key_to_read(good, bad, label) or _find_key_of_layer_kinds(good, bad, label)


def _find_key_to_read(good: Model, bad: Model, label: str) -> RestoredKey | None:
    """Return the one key of `good`'s config.json that makes `bad` readable.

    None where `bad` is readable as it is, `good` is not, or no single key is enough. `label` is the
    letter of `bad`, "A" or "B".
    """
    error = refusal_reason(bad) or misfit_reason(bad) or absent_layers_reason(bad)
    if (
        not error
        or refusal_reason(good)
        or misfit_reason(good)
        or good.config is None
        or bad.folder is None
    ):
        return None
    if bad.folder.config is None:
        return None
    apart = differing_keys(good.config, bad.folder.config)
    tried = [one for one in apart if one[1] is not GONE or one[0][-1] in MASK_KEYS]
    for path, made in _readable_with_keys(bad, tried):
        cause = _cause_of_key(good, path)
        if cause and not (misfit_reason(made) or absent_layers_reason(made)):
            return RestoredKey(good, bad, label, made, path, cause, error)
    return None


def _readable_with_keys(
    bad: Model, tried: Iterable[tuple[Key, Any]]
) -> Iterator[tuple[Key, Model]]:
    """Yield (path of a key, `bad` read with the key's value) of those that are not refused.

    `tried` are (path, value); at most _MOST of them are read.
    """
    for path, value in islice(tried, _MOST):
        made = read_with_changes(bad, {path: value})
        if not refusal_reason(made):
            yield path, made


def _find_key_of_layer_kinds(good: Model, bad: Model, label: str) -> RestoredKey | None:
    """Return the one key of `good`'s config.json with which `bad` asks for the tensors it stores.

    `bad` is readable, but its configuration gives layers of other kinds than their tensors are of,
    as without a list of layers' kinds or a count of experts. None if `bad` asks for the tensors
    that are there, `good` misses a tensor, or no single key is enough. Hyperparameters that differ
    have to be those of `good` with it. `label` is the letter of `bad`.
    """
    if refusal_reason(good) or refusal_reason(bad) or good.config is None or bad.folder is None:
        return None
    if bad.folder.config is None or not good.resolution.coverage.is_whole:
        return None
    kinds = [
        name
        for name in good.hyper
        if name in bad.hyper
        and not hyper_causes().get(name)
        and not same_value(good.hyper[name], bad.hyper[name])
    ]
    error = _other_tensors_reason(good, bad) if kinds else ""
    if not error:
        return None
    for path, made in _readable_with_keys(bad, differing_keys(good.config, bad.folder.config)):
        if _other_tensors_reason(good, made):
            continue
        if all(same_value(good.hyper[name], made.hyper[name]) for name in kinds):
            return RestoredKey(good, bad, label, made, path, "config_sizes", error)
    return None


def _other_tensors_reason(good: Model, bad: Model) -> str:
    """Return a sentence if `bad`'s configuration asks for other tensors than are there, else "".

    It asks for one that is missing, or does not ask for one that is there and that `good`, a model
    of the same tensors, asks for.
    """
    asked = bad.resolution.coverage
    if asked.missing:
        return f"{bad.path}: the configuration asks for {asked.missing[0]}, which is not there"
    required = set(asked.required)
    for key in good.resolution.coverage.required:
        if key in bad.resolution.roles and key not in required:
            return f"{bad.path}: has {key}, which its configuration does not ask for"
    return ""


def misfitting_key_findings(a: Model, b: Model, rows: Sequence[FieldDiff]) -> tuple[Finding, ...]:
    """Return the findings of configuration keys that do not fit the tensors of their own model.

    `rows` are the differing hyperparameters. Where restoring one key makes a model readable, its
    finding is the only one.
    """
    for good, bad, label in ((a, b, "B"), (b, a, "A")):
        found = find_restored_key(good, bad, label)
        if found is not None:
            return (found.finding(),)
    return tuple(misleading_findings(a, b, [row for row in rows if is_of_own_keys(row)]))


def architecture_name(model: Model) -> str | None:
    """Return the name of a model's architecture; None where it cannot be determined."""
    try:
        return model.spec.name
    except ArchError:
        return None


def refusal_reason(model: Model) -> str:
    """Return why a model's configuration cannot be read; "" if it can."""
    try:
        model.resolution  # noqa: B018  (it is made here, or raises)
    except ArchError as error:
        return str(error)
    return ""


def misfit_reason(model: Model) -> str:
    """Return a sentence if two or more tensors do not have the configured shapes, else ""."""
    try:
        wrong = model.resolution.coverage.misshapen
    except ArchError:
        return ""
    if len(wrong) < 2:
        return ""
    key, has, wanted = wrong[0]
    return (
        f"{model.path}: {len(wrong)} tensors have other shapes than the configuration gives, such "
        f"as {key}: {list(has)} for {list(wanted)}"
    )


def absent_layers_reason(model: Model) -> str:
    """Return a sentence if the configuration counts layers that have no tensors, else "".

    Only if these are the last layers and nothing else is missing. The file alone cannot say whether
    they were lost or never there.
    """
    try:
        found = model.resolution
    except ArchError:
        return ""
    there = {layer for key in found.roles if (layer := split_key(key)[0]) is not None}
    count, lacks = int(found.hyper["n_layers"]), found.coverage
    missing = (*lacks.missing, *lacks.accepted)
    if not missing or there != {*range(len(there))} or len(there) >= count:
        return ""
    if any((split_key(key)[0] or 0) < len(there) for key in missing):
        return ""
    key = found.hyper.of("n_layers").key
    return f"{model.path}: {key} is {count}, and {len(there)} layers have tensors"


def _key_command(bad: Model, key: str, value: object) -> str:
    """Return the `aprfmt set` command that writes a key to the folder's config.json.

    With `value` None it is the command that removes the key.
    """
    assert bad.folder is not None
    name = f"config.json:{key}"
    word = f"{name}={json.dumps(value)}"
    return set_command(
        bad.folder.path, [shlex.quote(word) if value is not None else f"--remove {name}"]
    )


def _cause_of_key(model: Model, path: Key) -> str:
    """Return the name of the cause for a configuration key, by its path; "" if there is none."""
    if path[-1] in MASK_KEYS:
        return "mask"
    read = model.resolution.report.read
    for end in range(len(path), 0, -1):
        name = read.get(".".join(path[:end]))
        if name is not None:
            return "config_sizes" if name == "n_layers" else hyper_causes().get(name, "")
    nested = next((key for key in read if key.startswith(f"{path[0]}.") and len(path) > 1), "")
    return hyper_causes().get(read.get(nested, ""), "")


def _misleading_by_key(model: Model) -> dict[str, MisleadingKey]:
    """Return {key as the model's file spells it: its MisleadingKey}.

    Where two have one key, the first is kept.
    """
    found: dict[str, MisleadingKey] = {}
    for one in misleading_keys(model).values():
        found.setdefault(one.key, one)
    return found


def misleading_findings(a: Model, b: Model, rows: Sequence[FieldDiff]) -> Iterator[Finding]:
    """Yield a finding for each configuration key by which other programs misread a model.

    `rows` are the differing hyperparameters; each is looked up in both models. Flags of config.json
    that change the forward pass are left out: `contradicted_flags` measures their effect.
    """
    if not rows:
        return
    sides = [(label, model, _misleading_by_key(model)) for label, model in (("A", a), ("B", b))]
    for row, (label, model, known) in product(rows, sides):
        one = known.get(row.name)
        if one is None or is_read_as_flag(one.style, one.name, one.says):
            continue
        cause = hyper_causes().get(one.name) if isinstance(one.says, bool) else ""
        cause = cause or "config_sizes"
        yield Finding(
            cause,
            f"{label}: {one.text}",
            "config",
            CAUSES[cause].verdict,
            (one.key,),
            True,
            side=label,
            values={one.key: {"a": row.a, "b": row.b}},
            next=set_command(model.path, [shlex.quote(f"{one.key}={json.dumps(one.read)}")]),
            proof=unfitted_proof(),
        )
