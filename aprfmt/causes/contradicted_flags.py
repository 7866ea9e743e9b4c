"""Flags of config.json that a model's own tensors contradict, and what each loader makes of them.

aprfmt and llama.cpp believe the tensors; other readers believe the flag: they drop what it denies
and fill in what is missing. Measured with transformers 5: a missing bias becomes zeros; a head that
differs from the embedding is kept although the flag ties them; a head that is missing is drawn at
random; a denied bias is dropped; a parallel residual drops the second norm.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.causes.hyperparameters import BIASES, FLAG_LOADERS, hyper_causes, shows_hyper
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.records import EQUAL
from aprfmt.model import Model
from aprfmt.model.own_keys import contradicted_parts
from aprfmt.tensors.view import View, is_zero

if TYPE_CHECKING:
    from aprfmt.arch.hyperparameters import Conflict
    from aprfmt.model.resolve import Resolution

HEAD, TABLE = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class Contradiction:
    """A flag of config.json that the tensors contradict.

    `name` is the hyperparameter, `said` the flag's value, `key` its key in config.json, `keys` the
    role keys of the stored tensors that contradict it.
    """

    name: str
    said: bool
    keys: tuple[str, ...]
    key: str

    @property
    def says(self) -> str:
        """A sentence on the flag of config.json, the tensors that contradict it and the loaders.

        Its `{side}` is to be filled in.
        """
        stated = f"{self.key} of {{side}}'s configuration is {self.said}"
        return f"{stated}, its tensors say {not self.said}: {FLAG_LOADERS[self.name, self.said]}"


def contradictions(model: Model) -> Iterator[Contradiction]:
    """Yield a Contradiction for each flag of a model's config.json that its tensors contradict.

    Yields nothing for GGUF and APR, whose readers go by the tensors. A missing head counts only
    where the architecture needs one.
    """
    if model.config is None or model.key_style in ("gguf", "apr"):
        return
    coverage = model.resolution.coverage
    for name, row in contradicted_parts(model):
        said = bool(row.value)
        if (name, said) not in FLAG_LOADERS:
            continue
        if (name, said) == ("tied_embeddings", False):
            if HEAD not in (*coverage.missing, *coverage.accepted):
                continue
        keys = tuple(key for key in model.roles if shows_hyper(key, name))
        yield Contradiction(name, said, keys, row.key or _config_key(model, name))


def unshared_contradictions(model: Model, other: Model) -> Iterator[Contradiction]:
    """Yield the contradictions of a model that `other`, another copy of the model, does not have.

    A missing head is left out where the other copy stores a head: then a tensor was lost, and the
    flag is right.
    """
    same = {(row.name, row.said) for row in contradictions(other)}
    for row in contradictions(model):
        lost = (row.name, row.said) == ("tied_embeddings", False)
        if (row.name, row.said) not in same and not (lost and has_own_head(other)):
            yield row


def changes_readings(model: Model, row: Contradiction) -> bool:
    """Return whether a loader that follows the flag computes other numbers than the tensors give.

    False where a head that the flag denies equals the embedding, where biases that the flag
    denies are all zeros, and where biases that the flag demands are missing: a loader fills these
    with zeros.
    """
    if row.name == "tied_embeddings":
        return not row.said or has_own_head(model)
    if row.name in BIASES:
        return not row.said and not all(is_zero(model.roles[key]) for key in row.keys)
    return True


def judged_contradictions(
    model: Model, other: Model
) -> tuple[list[Contradiction], list[Contradiction]]:
    """Return (contradictions that change what a reader computes, those that do not) of a model.

    Those that the model `other` has too are left out.
    """
    changing: list[Contradiction] = []
    harmless: list[Contradiction] = []
    for row in unshared_contradictions(model, other):
        (changing if changes_readings(model, row) else harmless).append(row)
    return changing, harmless


def contradiction_findings(
    changing: Sequence[Contradiction], model: Model, side: str
) -> Iterator[Finding]:
    """Yield a finding for each flag of a model among those that change what a reader computes.

    `changing` are from `judged_contradictions`, `side` is the model's ("A" or "B"). The findings
    are not confirmed, since no pass is run here. Their `next` is the command that sets the flag.
    """
    named: dict[str, list[Contradiction]] = {}
    for row in changing:
        named.setdefault(row.key, []).append(row)
    mine, there = side.lower(), "b" if side == "A" else "a"
    for key, rows in named.items():
        first = rows[0]
        stored = tuple(dict.fromkeys(role for row in rows for role in row.keys))
        yield Finding(
            hyper_causes()[first.name],
            first.says.format(side=side),
            "config",
            "bug",
            (key, *stored),
            False,
            side=side,
            values={row.name: {mine: row.said, there: not row.said} for row in rows},
            next=set_command(model.path, [shlex.quote(f"{key}={json.dumps(not first.said)}")]),
            keys=stored,
        )


def _config_key(model: Model, name: str) -> str:
    """Return the key of config.json that gives a hyperparameter, though it may not be there."""
    read = model.resolution.report.read
    found = next((key for key, given in read.items() if given == name), "")
    rules = (rule for rule in model.spec.hyper if rule.name == name)
    return found or next(((rule.keys.get("hf") or (name,))[0] for rule in rules), name)


def has_own_head(model: Model) -> bool:
    """Return whether a model stores a head whose values are not those of its embedding.

    For a copy of the embedding False: by either tensor every reader computes the same.
    """
    return _stores_own_head(model.roles)


def holds_head_twice(resolution: "Resolution") -> bool:
    """Return whether a model's configuration ties head and embedding, yet it stores the head too.

    True only where the stored head is a copy of the embedding: both are one parameter. Raises
    AprfmtError where one of them cannot be read.
    """
    overruled = resolution.report.overruled.get("tied_embeddings")
    stated = overruled is not None and bool(overruled.value)
    return stated and not _stores_own_head(resolution.roles)


def held_conflicts(resolution: "Resolution") -> "list[Conflict]":
    """Return what a model's file states twice and differently, without harmless tied heads.

    A key that ties head and embedding is no conflict where the stored head is a copy of the
    embedding: both are read and compared. Raises AprfmtError where one of them cannot be read.
    """
    copied = holds_head_twice(resolution)
    conflicts = resolution.report.conflicts
    return [one for one in conflicts if not copied or one.name != "tied_embeddings"]


def _stores_own_head(roles: Mapping[str, View]) -> bool:
    """Return whether a model stores an output head with other values than the token embedding.

    `roles` is {role key: tensor}. True for a head without an embedding.
    """
    head, table = roles.get(HEAD), roles.get(TABLE)
    if head is None or table is None:
        return head is not None

    from aprfmt.measure.alignment import TensorPair
    from aprfmt.measure.pair_comparison import compare_pair

    return compare_pair(TensorPair(HEAD, head, table)).verdict not in EQUAL
