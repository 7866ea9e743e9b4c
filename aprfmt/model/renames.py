"""Renames of tensors: the rule OLD=NEW, and the search for rules that make names fit.

A rule is a prefix (`OLD` ends with a dot, or is empty) or neighbouring components anywhere in a
name. `{N}` stands for a number in both, `{N+1}` and `{N-1}` for its neighbours in NEW.
"""

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, cast

from aprfmt.arch.name_templates import NameIndex, strip_prefix
from aprfmt.errors import UsageError
from aprfmt.tensors.companions import MODULE_LISTS, SECTIONS

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec
    from aprfmt.base.protocols import Damage, LazyTensor, Source, Value

_NUMBER = re.compile(r"\{N(?:([+-])(\d{1,6}))?\}")
_DEPTH = 8  # components before a name's own part that are tried
_SETS = 8  # sets of the same names, under a prefix each, that are told apart
_MOST = 8  # components that one relation may rename (q, k, v, o and the three of an MLP)
# Modules that wrap a model when it is saved -> what puts them there. Sources: torch's
# OptimizedModule and DistributedDataParallel, FSDP, PEFT's PeftModel, Lightning's state_dict.
WRAPPERS: Mapping[str, str] = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "base_model": "PEFT",
}


ASIDE = "others."  # before the names of a second set of the same names, which is not read
# What training programs call the running average of the weights, in a separate key.
_AVERAGES = frozenset({"ema", "swa", "avg", "average", "averaged", "shadow"})


@dataclass(frozen=True, slots=True)
class Rename:
    """A rule OLD=NEW for tensor names. Calling it returns a name as the rule changes it."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old}={self.new}"

    @property
    def text(self) -> str:
        """The rule in words, such as "the prefix model. is missing"."""
        if not self.old:
            return f"the prefix {self.new} is missing"
        if not self.new:
            return f"{'the prefix ' if self.old.endswith('.') else ''}{self.old} has to go"
        return f"{self.old} stands for {self.new}"

    @property
    def sets_aside(self) -> bool:
        """Whether the rule only takes a second set of the same names out of the way."""
        return bool(self.old) and self.new == ASIDE + self.old

    @property
    def origin(self) -> str:
        """What wrapper or program adds these components to names, such as "FSDP"; "" if unknown."""
        return ", ".join(WRAPPERS[part] for part in self.old.split(".") if part in WRAPPERS)

    @property
    def function(self) -> Callable[[str], str]:
        """A function (name) -> renamed name, with the pattern compiled once for many names."""
        numbers = iter(f"n{i}" for i in range(_DEPTH))
        body = "".join(
            f"(?P<{next(numbers)}>[0-9]{{1,6}})" if part == "{N}" else re.escape(part)
            for part in re.split(r"(\{N\})", self.old)
        )
        prefix = not self.old or self.old.endswith(".")
        pattern = re.compile(f"^{body}" if prefix else rf"(?:^|(?<=\.)){body}(?=\.|$)")
        return lambda name: self._apply(pattern, name)

    def _apply(self, pattern: re.Pattern[str], name: str) -> str:
        """Return a name with the rule applied, or as it is where the pattern does not occur."""
        found = pattern.search(name)
        if found is None:
            return name
        groups = iter(found.groups())

        def number(mark: re.Match[str]) -> str:
            """Return the number that a mark {N} or {N+1} of the rule stands for, as text.

            It is the next number matched in the old name, plus the mark's offset.
            """
            step = int(f"{mark[1]}{mark[2]}") if mark[1] else 0
            return str(int(next(groups, "0")) + step)

        made = name[: found.start()] + _NUMBER.sub(number, self.new) + name[found.end() :]
        return re.sub(r"\.{2,}", ".", made).strip(".")

    def __call__(self, name: str) -> str:
        """Return a name with the rule applied."""
        return self.function(name)


def parse_rename(text: str) -> Rename:
    """Return the rule in the text `OLD=NEW`. UsageError where it is not one."""
    old, sign, new = text.partition("=")
    marks = [len(re.findall(r"\{[^}]*\}", part)) for part in (old, new)]
    wrong = not sign or (not old and not new) or old == new
    if wrong or marks[0] != old.count("{N}") or marks[1] not in (0, marks[0]):
        raise UsageError(
            f"--rename {text!r}: expected OLD=NEW, for example '_orig_mod.=' (a prefix ends with a "
            "dot), 'attention=self_attn' (whole components) or 'layers.{N}.=layers.{N-1}.'"
        )
    if (not old or old.endswith(".")) and new and not new.endswith("."):
        new = f"{new}."
    return Rename(old, new)


def rename_names(
    names: Iterable[str], rules: Sequence[Rename], where: object, *, strict: bool = True
) -> dict[str, str]:
    """Return {renamed name: stored name}, in order, after applying all rules.

    Raises UsageError where two names become one or a name becomes empty; with `strict` also for a
    rule that changes none.
    """
    every = list(names)
    made = list(every)
    for rule in rules:
        apply = rule.function
        now = [apply(name) for name in made]
        if strict and now == made:
            from aprfmt.model.patterns import similar_names

            raise UsageError(
                f"{where}: --rename {str(rule)!r} changes no name; near names: "
                f"{', '.join(similar_names(rule.old, made)) or 'none'}"
            )
        made = now
    found: dict[str, str] = {}
    for name, stored in zip(made, every, strict=True):
        if not name:
            raise UsageError(f"{where}: --rename leaves nothing of the name {stored!r}")
        if name in found:
            raise UsageError(
                f"{where}: --rename makes {found[name]!r} and {stored!r} the same name {name!r}"
            )
        found[name] = stored
    return found


class RenamedSource:
    """A Source whose tensors have other names; everything else is the wrapped file's."""

    def __init__(self, source: "Source", rules: Sequence[Rename]) -> None:
        """Rename the tensors of `source` by the rules; nothing is read."""
        self._source = source
        names = rename_names(source.tensors, rules, source.path, strict=False)
        self.tensors: Mapping[str, LazyTensor] = {
            name: _with_name(source.tensors[stored], name) for name, stored in names.items()
        }
        self.metadata, self.types = source.metadata, source.types
        self.format, self.path, self.files = source.format, source.path, source.files
        self.version, self.notes = source.version, source.notes

    @property
    def wrapped_source(self) -> "Source":
        """The Source whose tensors are renamed."""
        return self._source

    @property
    def damage(self) -> "Sequence[Damage]":
        """The damage of the wrapped file."""
        return self._source.damage

    def close(self) -> None:
        """Close the wrapped file."""
        self._source.close()

    def __enter__(self) -> "RenamedSource":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _with_name(tensor: "LazyTensor", name: str) -> "LazyTensor":
    """Return the same stored tensor under another name."""
    if tensor.info.name == name:
        return tensor
    found = copy(tensor)
    cast("Any", found).info = replace(tensor.info, name=name)
    return found


def rename_modules(config: "Mapping[str, Value]", rules: Sequence[Rename]) -> "dict[str, Value]":
    """Return config.json with the modules named in its quantization section renamed like tensors.

    Modules are keys with a dot whose value is an object or a flag, and entries of the lists of
    unquantized modules. Patterns (`re:...`) are not changed.
    """
    apply = [rule.function for rule in rules]

    def module(name: str) -> str:
        """Return a module's new name: the rules are applied to the name of its weight."""
        made = f"{name}.weight"
        for each in apply:
            made = each(made)
        return made.removesuffix(".weight")

    def section(value: "Value") -> "Value":
        """Return a quantization section of config.json with its module names changed."""
        if not isinstance(value, Mapping):
            return value
        made: dict[str, Value] = {}
        for key, one in value.items():
            if key in MODULE_LISTS and isinstance(one, list):
                one = [module(n) if isinstance(n, str) and "re:" not in n else n for n in one]
            named = "." in key and isinstance(one, (Mapping, bool)) and ":" not in key
            made[module(key) if named else key] = one
        return made

    return {key: section(value) if key in SECTIONS else value for key, value in config.items()}


def command_line(*parts: object) -> str:
    """Return an `aprfmt` command line, quoted for a shell."""
    return " ".join(["aprfmt", *(shlex.quote(str(part)) for part in parts)])


# --- the search ----------------------------------------------------------------------------------


def prefix_rules(spec: "ArchSpec", style: str, names: Iterable[str], nested: bool) -> list[Rename]:
    """Return rules that remove or add a prefix so that names fit, the most frequent first.

    `names` are those that the architecture's tables do not have. `nested` says that the
    configuration describes several modules, so that the language model has a prefix such as
    `model.language_model.`.
    """
    index = _template_index(spec, style)
    votes: Counter[Rename] = Counter()
    for name in names:
        rule = _prefix_rule_for_name(index, style, name, nested)
        if rule is not None:
            votes[rule] += 1
    return [rule for rule, _ in votes.most_common()]


def _template_index(spec: "ArchSpec", style: str) -> NameIndex[str]:
    """Return an index that finds the name template (`model.layers.{L}...`) of a stored name."""
    rows = {name: name for row in spec.bindings.get(style, ()) for name in row.stored}
    return NameIndex(style, list(rows.items()))


def _prefix_rule_for_name(
    index: NameIndex[str], style: str, name: str, nested: bool
) -> Rename | None:
    """Return the prefix rule under which a name fits a template; None where none does.

    None too where the name fits as it is. `nested` says that the configuration describes several
    modules, so that the language model has a prefix such as `model.language_model.`.
    """
    if not index.can_end(name):
        return None
    parts = name.split(".")
    for k in range(min(len(parts), _DEPTH)):
        tail = ".".join(parts[k:])
        found = index.find(tail)
        if found is None:
            continue
        bare, template = strip_prefix(tail, style), found.value
        official = template[: len(template) - len(strip_prefix(template, style))]
        allowed = (official,) if not nested else ("model.language_model.", "language_model.model.")
        if not official:
            allowed = ("", "language_model.") if nested else ("",)
        prefix = tail[: len(tail) - len(bare)]
        head = name[: len(name) - len(bare)]
        return _shortest_prefix_rule(head, prefix if prefix in allowed else allowed[0])
    return None


def wrapper_rules(spec: "ArchSpec", style: str, names: Iterable[str]) -> list[Rename]:
    """Return rules that remove modules in the middle of names which no template of `spec` has.

    FSDP, activation checkpointing and PEFT wrap modules inside a model, so one name may have such a
    component several times; there is a rule for each time. A name counts if its end is then one
    that a template gives. Its last component stays.
    """
    index = _template_index(spec, style)
    stored = (name for row in spec.bindings.get(style, ()) for name in row.stored)
    known = {part for name in stored for part in name.split(".")}
    most: Counter[str] = Counter()
    for name in names:
        *parts, last = name.split(".")
        extra = Counter(part for part in parts if part not in known and not part.isdigit())
        kept = [*(part for part in parts if part not in extra), last]
        tails = (".".join(kept[k:]) for k in range(min(len(kept), _DEPTH)))
        if extra and any(index.find(tail) is not None for tail in tails):
            most |= extra
    return [Rename(part, "") for part, times in most.items() for _ in range(times)]


def _shortest_prefix_rule(old: str, new: str) -> Rename | None:
    """Return the rule from prefix `old` to `new`, less the components that both end in.

    None if they are equal.
    """
    before, after = old.split(".")[:-1], new.split(".")[:-1]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    if before == after:
        return None
    return Rename("".join(f"{part}." for part in before), "".join(f"{part}." for part in after))


def numbering_rule(spec: "ArchSpec", style: str, names: Iterable[str], count: int) -> Rename | None:
    """Return the rule that renumbers layers so that the first is 0; None if not needed.

    None too where they are not `count` consecutive layers.
    """
    index = _template_index(spec, style)
    layers: dict[str, set[int]] = {}
    for name in names:
        found = index.find(name)
        if found is None or found.layer is None or "{L}" not in found.value:
            continue
        before = strip_prefix(found.value, style).partition("{L}")[0]
        bare = strip_prefix(name, style)
        prefix = name[: len(name) - len(bare)] + before
        layers.setdefault(prefix, set()).add(found.layer)
    if len(layers) != 1:
        return None
    prefix, numbers = next(iter(layers.items()))
    first = min(numbers)
    if not first or len(numbers) != count or max(numbers) - first != count - 1:
        return None
    return Rename(f"{prefix}{{N}}.", f"{prefix}{{N-{first}}}.")


Shape = tuple[int, ...]
# What the names of an MLP's products in Meta's releases (and in Mixtral's experts) stand for.
_METAS = frozenset({("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")})


def component_rules(
    style: str, unmatched: Mapping[str, Shape], missing: Mapping[str, Shape | None]
) -> list[Rename]:
    """Return rules that rename a component of names without a role to give missing names.

    `unmatched` and `missing` have the names' shapes, None if unknown (of a missing one). `style` is
    the file's naming. Only one component, or a run of two, may differ, and the numbers of elements
    must be equal. If several rules are possible, one is chosen by how many names of equal shape it
    explains, then by how many names, then by Meta's original names, then by similarity of words.
    """
    wanted: dict[tuple[str, ...], list[tuple[list[str], Shape | None]]] = {}
    for name, asked in missing.items():
        parts = strip_prefix(name, style).split(".")
        wanted.setdefault(_numbers_in(parts), []).append((parts, asked))
    votes: dict[str, Counter[str]] = {}
    alike: Counter[tuple[str, str]] = Counter()  # names of equal shape
    for name, shape in unmatched.items():
        parts = strip_prefix(name, style).split(".")
        for other, there in wanted.get(_numbers_in(parts), ()):
            pair = differing_run(parts, other)
            if pair is not None and (there is None or math.prod(shape) == math.prod(there)):
                votes.setdefault(pair[0], Counter())[pair[1]] += 1
                alike[pair] += shape == there
    return _choose_by_votes(votes, alike)


def _choose_by_votes(
    votes: Mapping[str, Counter[str]], alike: Mapping[tuple[str, str], int]
) -> list[Rename]:
    """Return one rule for each old component, most votes first; each new one is used once.

    `votes` are {old component: number of names for each new one}; `alike` counts those of a pair
    (old, new) whose shapes are equal.
    """
    ranked = sorted(
        (
            (alike[old, new], count, (old, new) in _METAS, word_similarity(old, new), old, new)
            for old, found in votes.items()
            for new, count in found.items()
        ),
        key=lambda row: (*(-number for number in row[:4]), row[4]),
    )
    rules: dict[str, str] = {}
    for *_, old, new in ranked:
        if old not in rules and new not in rules.values() and len(rules) < _MOST:
            rules[old] = new
    return [Rename(old, new) for old, new in rules.items()]


def word_similarity(old: str, new: str) -> float:
    """Return how similar two words are, from 0 to 1."""
    return SequenceMatcher(None, old, new).ratio()


def _numbers_in(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the numeric components among the components of a name, as text."""
    return tuple(part for part in parts if part.isdigit())


def differing_run(parts: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Return (old, new), dotted: the neighbouring components in which two names differ, or None.

    `parts` and `other` are the names' components. None if they differ in more than one stretch. Up
    to two neighbouring components may differ, none of them a number.
    """
    shorter = min(len(parts), len(other))
    start = 0
    while start < shorter and parts[start] == other[start]:
        start += 1
    end = 0
    while end < shorter - start and parts[-1 - end] == other[-1 - end]:
        end += 1
    mine, theirs = parts[start : len(parts) - end], other[start : len(other) - end]
    if not mine or len(mine) > 2 or len(theirs) > 2 or any(map(str.isdigit, (*mine, *theirs))):
        return None
    return ".".join(mine), ".".join(theirs)


def rules_of_sets(rules: Sequence[Rename], names: Collection[str]) -> list[list[Rename]]:
    """Return, for each of several sets of the same names, the rules that leave only this set.

    Each rule takes a prefix away; rules that leave the same names stand for sets of the same
    tensors. [] for fewer than two sets. A set that is called an average of the weights comes last;
    else the one with most names comes first, or the one stored first.
    """
    made = {rule: {rule(n) for n in names if n.startswith(rule.old)} for rule in rules if rule.old}
    sets = [
        rule
        for rule, mine in made.items()
        if any(2 * len(mine & more) > len(mine) for other, more in made.items() if other != rule)
    ]
    order = list(names)
    first = {r: next(at for at, name in enumerate(order) if name.startswith(r.old)) for r in sets}
    averaged = {rule: not _AVERAGES.isdisjoint(re.split(r"[._]", rule.old)) for rule in sets}
    sets.sort(key=lambda rule: (averaged[rule], -len(made[rule]), first[rule]))
    return [
        [*(Rename(more.old, ASIDE + more.old) for more in sets if more != rule), rule]
        for rule in sets
    ]


def prefix_rules_between(
    theirs: Collection[str], ours: Collection[str], fewest: float
) -> dict[Rename, dict[str, str]]:
    """Return {prefix rule: {their name: ours}} for names that only one of two files has each.

    A rule maps nine of ten names of both files. If one file has more names, such as a second set of
    the same names or the state of an optimizer, it maps nine of ten names that have its prefix in
    one of the files, and at least `fewest`. Several rules stand for several sets of names; those
    with most names come first.
    """
    wanted = set(ours)
    ends: dict[str, list[str]] = {}
    for name in ours:
        for part in (name, *_name_tails(name)):
            held = ends.setdefault(part, [])
            if len(held) < _SETS:
                held.append(name)
    votes: Counter[Rename] = Counter()
    for name in theirs:
        tails = (name, *_name_tails(name))
        shared = next((each for each in tails if each in ends), None)
        if shared is None:
            continue
        targets = [shared] if shared in wanted else ends[shared]
        heads = (target[: len(target) - len(shared)] for target in targets)
        made = {_shortest_prefix_rule(name[: len(name) - len(shared)], head) for head in heads}
        votes.update(rule for rule in made if rule is not None)
    found = {}
    for rule, _ in votes.most_common(_SETS):
        apply = rule.function
        mapped = {name: to for name in theirs if (to := apply(name)) in wanted}
        groups = (
            sum(name.startswith(rule.old) for name in theirs),
            sum(name.startswith(rule.new) for name in ours),
        )
        if len(mapped) >= 0.9 * max(len(theirs), len(ours)) or (
            len(mapped) >= max(0.9 * min(groups), fewest)
        ):
            found[rule] = mapped
    return found


def prefix_rule_onto(names: Sequence[str], targets: Collection[str]) -> Rename | None:
    """Return the prefix rule that maps at least 90 % of `names` to `targets`; else None."""
    votes: Counter[Rename] = Counter()
    ends: dict[str, str] = {}
    for name in targets:
        for tail in (name, *_name_tails(name)):
            ends.setdefault(tail, name)
    for name in names:
        for tail in (name, *_name_tails(name)):
            if tail in ends and "." in tail:
                head = ends[tail][: len(ends[tail]) - len(tail)]
                rule = _shortest_prefix_rule(name[: len(name) - len(tail)], head)
                votes.update([rule] if rule is not None else [])
                break
    for rule, _ in votes.most_common(3):
        if sum(rule(name) in targets for name in names) >= 0.9 * len(names):
            return rule
    return None


def _name_tails(name: str) -> Iterable[str]:
    """Yield a name without its first component, without its first two, and so on."""
    parts = name.split(".")
    return (".".join(parts[k:]) for k in range(1, min(len(parts), _DEPTH + 1)))
