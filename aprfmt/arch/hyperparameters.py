"""Hyperparameters read from any key style by the rule tables, and written back.

The report lists every key of the file as read, ignored or unknown, and every value records its
origin. `write_hyper` reads back what it wrote. A value that comes back different is also written
as `aprfmt.hyper.NAME` (a JSON text).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aprfmt.arch.other_keys import CAUSAL_KEY, IGNORED, KNOWN
from aprfmt.arch.spec import (
    CARRIED,
    CARRYING,
    HYPER_NAMES,
    MISSING,
    SPECIAL_NAMES,
    ArchSpec,
    Facts,
    HyperParam,
    HyperParams,
    HyperRule,
    Loss,
    Origin,
)
from aprfmt.arch.value_checks import (
    boolean,
    finite_number,
    inverse,
    nearest_float32,
    positive_number,
    same_derived_values,
    same_value,
    shortest_decimal,
    text,
    whole_number,
)
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

# Of a multimodal model the outer object says it: transformers ties the whole model's head.
_OUTER_FIRST = frozenset({"tie_word_embeddings"})


class AccessedKeys(Mapping[str, Value]):
    """A file's values, a mapping that records which keys were read, nested objects included.

    Listing the keys reads no value: in a GGUF that would decode the whole vocabulary.
    Keys of `inner` (a section of multimodal configs) are found before the outer ones, except
    those of `_OUTER_FIRST`.
    """

    def __init__(self, values: Mapping[str, Value], label: str = "", inner: str = "") -> None:
        """Wrap `values`, and the object under their key `inner` as if its keys were among them.

        `label` is the path of `values` in the file, with a dot at its end. `inner` is "" for none,
        and is ignored if no object is stored under it.
        """
        self._values = values
        self._label = label
        nested = values.get(inner) if inner else None
        self._inner = nested if isinstance(nested, Mapping) else {}
        self._inner_key = inner if isinstance(nested, Mapping) else None
        self._inner_label = f"{label}{inner}."
        self._nested: dict[str, AccessedKeys] = {}
        self.seen: dict[str, None] = {}

    def __getitem__(self, key: str) -> Value:
        """Return the value of a key and record the key as read; an object as AccessedKeys."""
        if key in self._inner and key in self._values and key in _OUTER_FIRST:
            self.seen[self._inner_label + key] = None
            value, label = self._values[key], self._label
        elif key in self._inner:
            value, label = self._inner[key], self._inner_label
        else:
            value, label = self._values[key], self._label
        if isinstance(value, Mapping):
            if key not in self._nested:
                self._nested[key] = AccessedKeys(value, f"{label}{key}.")
            return self._nested[key]
        self.seen[label + key] = None
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._inner or key in self._values

    def __iter__(self) -> Iterator[str]:
        """Yield the keys, those of the inner section first, each once."""
        return iter(dict.fromkeys((*self._inner, *self._values)))

    def __len__(self) -> int:
        return len(dict.fromkeys((*self._inner, *self._values)))

    def accessed_keys(self) -> dict[str, None]:
        """Return {full key: None} of the keys read so far, in order."""
        every = dict(self.seen)
        for nested in self._nested.values():
            every.update(nested.accessed_keys())
        return every

    def unread_keys(self) -> Iterator[str]:
        """Yield the full keys never read; a nested object never opened counts as one key."""
        seen = self.accessed_keys()
        for values, label in ((self._inner, self._inner_label), (self._values, self._label)):
            for key in values:
                if values is self._values and key == self._inner_key:
                    continue
                if key in self._nested and isinstance(values[key], Mapping):
                    yield from self._nested[key].unread_keys()
                elif label + key not in seen:
                    yield label + key


class NotSettledError(ArchError):
    """A rule asks for a hyperparameter that has no value yet."""


class PartialHyperParams(HyperParams):
    """The hyperparameters read so far; asking for any other raises NotSettledError."""

    def __init__(self, rows: dict[str, HyperParam]) -> None:
        """Share `rows` with the reader, which adds to them."""
        self._rows = rows  # those that a reading adds to

    def of(self, name: str) -> HyperParam:
        """Return the HyperParam (value, origin, key) of `name`; NotSettledError if not read yet."""
        if name not in self._rows:
            raise NotSettledError(f"{name} is not known here, and this depends on it")
        return self._rows[name]


_FLOAT32 = ("gguf", "apr")  # the key styles whose numbers have been through float32
_ORIGINS: Mapping[str, Origin] = {"hf": "config", "gguf": "metadata", "apr": "metadata"}


@dataclass(frozen=True, slots=True)
class Conflict:
    """Where a file contradicts itself or is read otherwise than it says: `text`, a sentence.

    `name` is the hyperparameter whose key the tensors contradict; "" for a remark on a value.
    """

    text: str
    name: str = ""

    def __str__(self) -> str:
        """Return the sentence."""
        return self.text


@dataclass(frozen=True)
class KeyReport:
    """How a file's keys were used.

    `read`: key -> the hyperparameter it gave. `defaulted`: hyperparameters that this style has a
    key for, but the file does not use it. `ignored`: keys known not to change the forward pass.
    `unknown`: all other keys. `assumed` are sentences, which say which values a file of another
    program leaves to the defaults of the programs that read it. `demanded`: for optional weights
    whose presence tensors show (biases, norms), whether keys or table defaults require them;
    whether they are present is in the hyperparameters. `contradicted`: key -> what the tensors say.
    `overruled`: hyperparameter -> what its key says where the tensors are believed.
    """

    read: Mapping[str, str]
    defaulted: tuple[str, ...]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    conflicts: tuple[Conflict, ...] = ()
    assumed: tuple[str, ...] = ()
    demanded: Mapping[str, HyperParam] = field(default_factory=dict)
    contradicted: Mapping[str, str] = field(default_factory=dict)
    overruled: Mapping[str, HyperParam] = field(default_factory=dict)


def convert_value(rule: HyperRule, value: Value, key: str) -> Value:
    """Return `value` converted to the rule's kind; ArchError if it is not of that kind."""
    if value is not None and rule.kind in ("size", "int"):
        return whole_number(value, key, 1 if rule.kind == "size" else 0, rule.high)
    check = _KINDS.get(rule.kind)
    return value if check is None or value is None else check(value, key)


_KINDS: Mapping[str, Callable[[Value, str], Value]] = {
    "float": finite_number,
    "positive": positive_number,
    "bool": boolean,
    "str": text,
}


def read_hyper(
    spec: ArchSpec, facts: Facts, subject: str, *, complete: bool = True
) -> tuple[HyperParams, KeyReport]:
    """Return (hyperparameters, key report) of a file, read by an architecture's rules.

    `subject` (a path) begins every message. A value of a wrong kind raises ArchError, as does a
    hyperparameter without a value and without a default; `complete=False` leaves hyperparameters
    without a value out.
    """
    require_causal_mask(spec, facts, subject)
    reader = _Reader(spec, facts)
    for rule in spec.hyper:
        try:
            row = reader.read_rule(rule)
        except ArchError as error:
            raise ArchError(f"{subject}: {error}") from error
        if row is not None:
            reader.rows[rule.name] = row
        elif complete:
            raise ArchError(f"{subject}: {_missing_value_text(rule, facts)}")
    return HyperParams(reader.rows, subject), reader.report()


def require_causal_mask(spec: ArchSpec, facts: Facts, subject: str) -> None:
    """Raise ArchError where config.json of a causal architecture asks for bidirectional attention.

    That is `is_causal` false, by which transformers lets a position attend to later ones too.
    `subject` begins the message.
    """
    if facts.style != "hf" or spec.block.attends != "causal":
        return
    inner = facts.values.get(spec.section) if spec.section else None
    for prefix, values in ((f"{spec.section}.", inner), ("", facts.values)):
        if isinstance(values, Mapping) and values.get(CAUSAL_KEY) is not None:
            if not values[CAUSAL_KEY]:
                raise ArchError(
                    f"{subject}: {prefix}{CAUSAL_KEY}: attention is bidirectional; expected a "
                    "causal model"
                )
            return


def _missing_value_text(rule: HyperRule, facts: Facts) -> str:
    """Return the error message of a hyperparameter without a value: its name, expected keys."""
    keys = [key.replace("{arch}", facts.arch_key) for key in rule.keys.get(facts.style, ())]
    return (
        f"nothing says {rule.name} ({(HYPER_NAMES | SPECIAL_NAMES)[rule.name]}); expected "
        f"{' or '.join(keys) if keys else 'a config.json'}"
    )


@dataclass
class _Reader:
    """State of reading one file's hyperparameters: `rows` by name, and how keys were used."""

    spec: ArchSpec
    facts: Facts
    rows: dict[str, HyperParam] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    conflicts: list[Conflict] = field(default_factory=list)
    demanded: dict[str, HyperParam] = field(default_factory=dict)
    contradicted: dict[str, str] = field(default_factory=dict)
    overruled: dict[str, HyperParam] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Wrap the file's values so that the keys that rules access are recorded."""
        inner = (
            self.spec.section
            if self.facts.style in KNOWN and KNOWN[self.facts.style].nested
            else ""
        )
        self.watched = AccessedKeys(self.facts.values, inner=inner)
        arch_key = self.facts.arch_key or (self.spec.called.get("gguf") or ("",))[0]
        self.facts = replace(self.facts, values=self.watched, arch_key=arch_key)
        self.live = PartialHyperParams(self.rows)

    def read_rule(self, rule: HyperRule) -> HyperParam | None:
        """Return a rule's value with its origin; None if it has neither a key nor a default.

        Adds the check's remark, and the keys that the rule accessed, to the report.
        """
        kept, stated = self._read_aprfmt_key(rule), self._read_style_keys(rule)
        if kept is not None:
            kept = self._without_contradiction(rule, kept)
        if rule.present or rule.absent:
            self._record_stated_presence(rule, kept or stated)
        found = self._reconcile_with_tensors(rule, kept or stated)
        if found is None:
            found = self._default_value(rule)
        if found is not None and rule.check is not None:
            remark = rule.check(found.value, self.facts, self.live)
            if remark:
                self.conflicts.append(Conflict(remark))
        for key in self.watched.accessed_keys():
            self.read.setdefault(key, rule.name)
        return found

    def _record_stated_presence(self, rule: HyperRule, value: HyperParam | None) -> None:
        """Store in `demanded` whether the file's keys say that the model has an optional weight.

        Such are biases, whose presence tensors show; the tensors are compared with this later.
        `value` is what the keys say; without one the rule's default is stored, except in styles
        where only the tensors say it.
        """
        if value is None and self.facts.style not in rule.shown_in:
            value = self._default_value(rule)
        if value is not None:
            self.demanded[rule.name] = value

    def _without_contradiction(self, rule: HyperRule, kept: HyperParam) -> HyperParam | None:
        """Return `kept`, the value of `aprfmt.hyper.NAME`; None if a tensor contradicts it.

        Some hyperparameters are stored as a tensor too (rope's divisors). A tensor that has other
        values, or is missing, contradicts the key. Other programs use the tensor, so the key is
        not believed, and the contradiction is added to the report.
        """
        values = {name: row.value for name, row in self.rows.items()} | {rule.name: kept.value}
        for derived in self.spec.derived:
            name = derived.name(self.facts.style)
            if derived.of != rule.name or not name or not self.facts.tensors:
                continue
            wanted, stored = derived.make(values), self.facts.vector(name)
            if same_derived_values(wanted, stored):
                continue
            if stored is None:
                shown = f"there is no {name}, by which other programs go"
            else:
                shown = f"{name} says otherwise, by which other programs go; it is believed"
            self.conflicts.append(Conflict(f"{kept.key} says {rule.name}, {shown}", rule.name))
            self.contradicted[kept.key] = shown
            return None
        return kept

    def _read_aprfmt_key(self, rule: HyperRule) -> HyperParam | None:
        """Return the value of `aprfmt.hyper.NAME`, or None.

        Our writer adds that key if the style has none for the hyperparameter.
        """
        usual = self._default_value(rule)
        if self.facts.style not in CARRYING or CARRIED + rule.name not in self.facts.values:
            return None
        from aprfmt.arch.carried_hyperparameters import read_aprfmt_key

        found = read_aprfmt_key(self.facts, rule.name, usual.value if usual else MISSING, self.live)
        if found is None:
            return None
        value = convert_value(rule, found[0], found[1])
        return HyperParam(_freeze(value), _ORIGINS[self.facts.style], found[1])

    def _read_style_keys(self, rule: HyperRule) -> HyperParam | None:
        """Return the value that the keys of this style give, or None."""
        style = self.facts.style
        if style in rule.read:
            found = rule.read[style](self.facts, self.live)
        else:
            found = self.facts.first(*rule.keys.get(style, ()), null=style in rule.null_in)
        if found is None:
            return None
        # Undo what the style did to the number: its inverse, or float32 rounding.
        value, key = found
        value = convert_value(rule, value, key)
        if isinstance(value, float) and style in rule.inverse_in:
            value = inverse(value, key)
        elif isinstance(value, float) and style in _FLOAT32:
            value = self._undo_rounding(rule, value)
        origin = "tensor" if key in self.facts.tensors else _ORIGINS[style]
        return HyperParam(_freeze(value), origin, key)

    def _undo_rounding(self, rule: HyperRule, value: float) -> float:
        """Return the decimal number a float32 was rounded from: the default, or the shortest."""
        default = self._default_value(rule)
        if default is not None and isinstance(default.value, float):
            if nearest_float32(default.value) == value:
                return default.value
        return shortest_decimal(value)

    def _reconcile_with_tensors(
        self, rule: HyperRule, found: HyperParam | None
    ) -> HyperParam | None:
        """Return a hyperparameter's value by the tensors and by `found`, the value by the keys.

        The tensors' value is returned where no key gives one, or where the rule lets them win;
        else `found`. A key that contradicts the tensors is added to the report.
        """
        if not self.facts.shapes:
            return found
        # What the tensors show: the presence of a part, or a size.
        actual: Value = None
        if rule.present and self._lacks_biased_layers(rule.present):
            return found
        if rule.present or rule.absent:
            here = self.facts.roles.intersection(rule.present or rule.absent)
            actual = bool(here) is bool(rule.present)
        elif rule.shape is not None:
            actual = rule.shape(self.facts.shapes)
        if actual is None or (found is not None and found.value == actual):
            return found
        # They contradict the key: presence always wins, a size only with `shape_wins`.
        wins = bool(rule.present or rule.absent or rule.shape_wins)
        if found is not None:
            believed = "the tensors are" if wins else "the key is"
            shown = f"the tensors say {actual!r}; {believed} believed"
            text = f"{found.key} says {rule.name} = {found.value!r}, {shown}"
            self.conflicts.append(Conflict(text, rule.name))
            if found.key:
                self.contradicted[found.key] = shown
                if wins:
                    self.overruled[rule.name] = found
        if found is None or wins:
            return HyperParam(actual, "shape", found.key if found else "")
        return found

    def _lacks_biased_layers(self, biases: Sequence[str]) -> bool:
        """Return whether the file stores neither these biases nor the weights that they belong to.

        Then it does not show whether the model has such biases: it may have no layer of that kind.
        False if one of the roles is no bias.
        """
        stems = {role.removesuffix(".bias") for role in biases if role.endswith(".bias")}
        stems = {_WEIGHT_OF_BIAS.get(stem, stem) for stem in stems}
        if len(stems) != len(biases):
            return False
        return self.facts.roles.isdisjoint({*biases, *(f"{stem}.weight" for stem in stems)})

    def _default_value(self, rule: HyperRule) -> HyperParam | None:
        """Return the default of a rule; None without one, or if it needs a value not yet read."""
        default = rule.default_in.get(self.facts.style, rule.default)
        if default is MISSING:
            return None
        if callable(default):
            try:
                default = default(self.live)
            except NotSettledError:
                return None
        return HyperParam(convert_value(rule, default, f"{rule.name} (computed)"), "default")

    def report(self) -> KeyReport:
        """Return the key report: the keys no rule accessed are sorted into ignored and unknown."""
        style, arch_key = self.facts.style, self.facts.arch_key
        keys = KNOWN.get(style)
        left = [
            key for key in self.watched.unread_keys() if keys is None or keys.counts(key, arch_key)
        ]
        known = self.spec.ignored | IGNORED.get(style, frozenset())
        bare = {key: _bare_key(key, arch_key, self.spec.section) for key in left}
        ignored = tuple(
            key for key in left if bare[key] in known or bare[key].partition(".")[0] in known
        )
        defaulted = tuple(
            rule.name
            for rule in self.spec.hyper
            if rule.name in self.rows
            and self.rows[rule.name].origin == "default"
            and (rule.keys.get(style) or style in rule.read)
        )
        return KeyReport(
            self.read,
            defaulted,
            ignored,
            tuple(key for key in left if key not in ignored),
            tuple(self.conflicts),
            tuple(self._assumptions()),
            self.demanded,
            self.contradicted,
            self.overruled,
        )

    def _assumptions(self) -> Iterator[str]:
        """Yield a sentence for each default that other programs may replace by another value.

        It says which value was taken here, as no key of the file states one.
        """
        for loss in self.spec.lost:
            row = self.rows.get(loss.name)
            if loss.assumed and loss.style == self.facts.style and row and row.origin == "default":
                yield f"no key says {loss.name}, {_with_verb(row.value)} taken: {loss.consequence}"


def _with_verb(value: Value) -> str:
    """Return a value and its verb for a sentence, such as `4096 is` or `8 of 32 layers are`."""
    if isinstance(value, tuple) and all(isinstance(item, bool) for item in value):
        return f"{sum(value)} of {len(value)} layers are"
    return f"{value!r} is"


def _bare_key(key: str, arch_key: str, section: str) -> str:
    """Return a key without the architecture's prefix and without the section it is nested in."""
    return key.removeprefix(f"{arch_key}.").removeprefix(f"{section}.")


def _freeze(value: Value) -> Value:
    """Return a value with lists as tuples, in mappings too, so that equal values compare equal."""
    if isinstance(value, Mapping):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(_freeze(item) for item in value)
    return value


# The weight that a bias belongs to, where its role has another name.
_WEIGHT_OF_BIAS: Mapping[str, str] = {"exp_probs_b": "ffn_gate_inp"}


# --- writing ----------------------------------------------------------------------------------


def write_hyper(
    spec: ArchSpec, hp: HyperParams, style: str, *, complete: bool = True
) -> dict[str, Value]:
    """Return {key: value} that express the hyperparameters in a key style.

    "gguf": full keys; whole numbers are meant as uint32, floats as float32, lists of booleans as
    such. "hf": the content of a config.json that transformers 4 and 5 load, `model_type` and
    `architectures` included. "apr": the canonical typed keys. With `complete`, GGUF and APR also
    get `aprfmt.hyper.NAME` for whatever does not survive reading the keys back.
    """
    arch_key = (spec.called.get("gguf") or ("",))[0]
    out: dict[str, Value] = {}
    for rule in spec.hyper:
        if rule.name not in hp:
            continue
        for key, value in written_pairs(rule, hp[rule.name], style, hp):
            out[key.replace("{arch}", arch_key)] = _thaw(value)
    heads = KNOWN[style].heads(spec, hp) if style in KNOWN else {}
    out = {**heads, **out}
    if complete and style in CARRYING:
        for name in inexpressible_names(spec, hp, style, out):
            out[CARRIED + name] = json.dumps(_thaw(hp[name]), separators=(",", ":"))
    return out


def written_pairs(
    rule: HyperRule, value: Value, style: str, hp: HyperParams
) -> Iterator[tuple[str, Value]]:
    """Yield the (key, value) pairs that a rule writes for one value in a style; maybe none."""
    if style in rule.write:
        yield from rule.write[style](value, hp).items()
        return
    keys = rule.keys.get(style, ())
    if not keys or (value is None and style not in rule.null_in):
        return
    if value is not None and style in rule.inverse_in:
        value = inverse(value, rule.name)
    yield keys[0], value


def _thaw(value: Value) -> Value:
    """Return a value with tuples as lists, as JSON and the GGUF writer want them."""
    if isinstance(value, Mapping):
        return {key: _thaw(item) for key, item in value.items()}
    return [_thaw(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Float32Values:
    """The values of a tensor derived from hyperparameters, rounded to float32 as a file has them.

    It has the few methods of a tensor that read functions call, and needs no numpy.
    """

    def __init__(self, values: Sequence[float]) -> None:
        """Round the numbers to float32, as a file would store them."""
        self.shape = (len(values),)
        self._values = [nearest_float32(value) for value in values]

    def numpy(self) -> "_Float32Values":
        """Return the values; like LazyTensor.numpy."""
        return self

    def reshape(self, _: int) -> "_Float32Values":
        """Return the values, which have one axis already; stands for numpy's method."""
        return self

    def tolist(self) -> list[float]:
        """Return the values as a list of floats, each exactly a float32."""
        return self._values


def derived_tensors(
    spec: ArchSpec, hp: Mapping[str, Value], style: str
) -> dict[str, tuple[float, ...]]:
    """Return {tensor name: values} of the 1-D F32 tensors that hold hyperparameters in a style."""
    made = {row.name(style): row.make(hp) for row in spec.derived}
    return {name: tuple(values) for name, values in made.items() if name and values is not None}


def read_back_hyper(
    spec: ArchSpec,
    hp: HyperParams,
    style: str,
    written: Mapping[str, Value] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> HyperParams:
    """Return the hyperparameters that a reader gets from a style's own keys and tensors.

    Each has the key or tensor that it is read from. `written` are the keys that `write_hyper`
    gave, computed if None. `shapes` are the logical shapes of stored tensors by role key, for
    rules that look at them; without them only the keys count.
    """
    if written is None:
        written = write_hyper(spec, hp, style, complete=False)
    rounded = (
        {key: _round_floats(value) for key, value in written.items()}
        if style in _FLOAT32
        else written
    )
    tensors = {n: _Float32Values(v) for n, v in derived_tensors(spec, hp, style).items()}
    facts = Facts(style, rounded, shapes or {}, tensors=tensors)
    return read_hyper(spec, facts, f"{style} keys of {spec.name}", complete=False)[0]


def inexpressible_names(
    spec: ArchSpec, hp: HyperParams, style: str, written: Mapping[str, Value] | None = None
) -> tuple[str, ...]:
    """Return the names of hyperparameters that a style's own keys do not give back unchanged.

    `written` is what `write_hyper` gave, computed if None. Numbers count as equal up to float32
    rounding. Hyperparameters read from the presence of tensors are not compared.
    """
    reread = read_back_hyper(spec, hp, style, written)
    by_tensors = {rule.name for rule in spec.hyper if rule.present or rule.absent}
    return tuple(
        name
        for name in hp
        if name not in by_tensors and not (name in reread and same_value(hp[name], reread[name]))
    )


def _round_floats(value: Value) -> Value:
    """Return a value with its floats rounded to float32, in lists too."""
    if isinstance(value, float):
        return nearest_float32(value)
    return [_round_floats(item) for item in value] if isinstance(value, list) else value


def expected_losses(spec: ArchSpec, hp: Mapping[str, Value], style: str) -> list[Loss]:
    """Return what a file in this style cannot express of the model, as Loss records.

    Each says what other programs will get wrong about it.
    """
    return [loss for loss in spec.lost if loss.style == style and loss.applies(hp)]
