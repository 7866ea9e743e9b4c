"""Two LoRA adapters, compared by what they add to a weight: scale * B @ A.

A *module* is a weight that an adapter changes, and a *pair* its two factors, of which B @ A is the
product. In all other sentences A and B are the two adapters; a *side* is one of them.

The factors of one change are not unique: A may be multiplied by what B is divided by, both may turn
their sign, ranks of zeros may be added, and the scale (alpha / r, with rsLoRA alpha / sqrt(r)) may
be folded into a factor. So factors count only where the changes differ.
"""

import json
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.errors import AprfmtError
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.proofs import Proof, unfitted_proof
from aprfmt.measure.records import EQUAL, FieldDiff, TensorDiff
from aprfmt.measure.verdicts import Verdict
from aprfmt.model.adapter_parts import (
    adapter_scale,
    diffusion_component,
    diffusion_names,
    exchanges_halves,
    value_by_pattern,
)
from aprfmt.model.adapter_reading import Adapter, StoredPair, adapter_of_model, read_factors
from aprfmt.model.diffusion_modules import joined_modules
from aprfmt.model.sidecar_files import ADAPTER_CONFIG

if TYPE_CHECKING:
    from aprfmt.measure.records import TensorVerdict
    from aprfmt.model import Model

    Array = np.ndarray[Any, np.dtype[np.float64]]

CAUSE_ROWS = (
    Cause(
        "delta_scale", "tensor", "bug",
        "Two adapters change every weight in the same direction, one by a constant factor more: "
        "alpha, the rank it is divided by, rsLoRA's root of the rank, or a factor of the pair.",
        "scale * B @ A of each pair is that of the other side times one number, equal in all "
        "modules.",
        "The number measured in one half of the modules gives the changes of the other half; a key "
        "of adapter_config.json is named where the changes are equal with that key changed alone.",
    ),
    Cause(
        "delta_change", "tensor", "bug",
        "Two adapters whose scales differ change a few modules otherwise than all the others: "
        "factors that were multiplied by other numbers are not compared one by one. Where all "
        "modules change otherwise, one was trained further (`derived`) or is another adapter.",
        "scale * B @ A of the pair is not what the other modules' relation makes of A's.",
        "Nothing is made again: what changed these modules is not known.",
        most="located",
    ),
)  # fmt: skip

ALPHA = "adapter.lora.alpha"  # of a GGUF
SCALE_KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_SAME_CHANGE = "other factors of the same scale * B @ A"
_SAME_SCALE = "alpha: the scale is the same"
_OTHER_HALVES = "diffusers has the halves in the other order"
_BITS = 8  # of a value of a factor that judge, at least
_FLOAT = 2.0**-45  # of two products in float64, relative to the operands
RELATED = 0.5  # cosine of two changes, one of which was made of the other
MOST = 0.8  # of the modules that one relation holds for, where it is that of the adapter
_LEAST = 3  # modules that hold such a relation against others
_COARSEST = UNIT["BF16"]  # of the types that factors are stored in


@dataclass(frozen=True)
class DeltaRow:
    """What both adapters add to one module: ||b - times * a|| and the norms, Frobenius.

    `noise` is the relative error that rounding each factor to its type may leave, `floor` what
    float64 may, absolute. `rescaled`: the two scales (alpha / r) differ. `keys` are the stored
    names of the factors and their alpha, without DoRA's lengths, `values` how many values a factor
    has.
    """

    module: str
    keys: tuple[str, ...]
    size_a: float
    size_b: float
    dot: float
    apart: float
    noise: float
    floor: float
    rescaled: bool
    values: int

    @property
    def rel_l2(self) -> float:
        """||b - a|| / max(||a||, ||b||) of what A and B add to a module; 0 if both are zero."""
        top = max(self.size_a, self.size_b)
        return self.apart / top if top else 0.0

    @property
    def verdict(self) -> "TensorVerdict":
        """The verdict on what both adapters add to a module: SAME_VALUES, WITHIN or DIFFERENT.

        WITHIN is within the rounding of the factors' types.
        """
        if self.apart <= self.floor:
            return "SAME_VALUES"
        return "WITHIN" if self.rel_l2 <= self.noise else "DIFFERENT"

    @property
    def times(self) -> float:
        """The factor by which a, what adapter A adds to a module, is nearest to b.

        NaN for a of 0.
        """
        return self.dot / self.size_a**2 if self.size_a else math.nan

    @property
    def related(self) -> float:
        """The absolute cosine between what adapters A and B add to a module; 0 if one adds zero."""
        sizes = self.size_a * self.size_b
        return abs(self.dot) / sizes if sizes else 0.0

    def is_multiple(self, times: float) -> bool:
        """Return whether what adapter B adds to a module is `times` what A adds, within rounding.

        The rounding is that of the adapters' factors.
        """
        left = self.size_b**2 - 2 * times * self.dot + (times * self.size_a) ** 2
        bound = max(self.noise, 2.0**-20) * max(self.size_b, abs(times) * self.size_a)
        return bool(self.size_a and left <= bound**2)


@dataclass(frozen=True)
class DeltaComparison:
    """Two adapters compared by what they add to each module, and the findings on that.

    `other` says by what they are two adapters, where the changes of most modules have nothing in
    common; "" else. `settled` are stored tensors that agree although their bytes do not, and why.
    `unexchanged` are factors of equal bytes whose halves had to be exchanged, and were not.
    """

    rows: tuple[DeltaRow, ...]
    findings: tuple[Finding, ...]
    complete: bool  # every pair of both sides was compared
    fields: tuple[FieldDiff, ...]  # the keys of the scale in which the two differ
    other: str = ""
    settled: Mapping[str, str] = field(default_factory=dict)
    unexchanged: Collection[str] = ()

    def judge(self, rows: Sequence[TensorDiff]) -> list[TensorDiff]:
        """Return the rows of stored tensors, with LoRA factors judged by products scale * B @ A.

        Factors of equal products are SAME_VALUES, whatever their shapes; those of products within
        their types' rounding are WITHIN. Factors of differing products keep their verdict.
        """
        modules = {key: row for row in self.rows for key in row.keys}
        rows = [
            replace(row, verdict="SAME_VALUES", cause=self.settled[row.key])
            if row.key in self.settled and row.verdict not in EQUAL
            else replace(row, verdict="DIFFERENT")
            if row.key in self.unexchanged
            else row
            for row in rows
        ]
        return [
            replace(row, verdict=found.verdict, cause=_SAME_CHANGE)
            if (found := modules.get(row.key)) is not None
            and row.verdict not in EQUAL
            and found.verdict != "DIFFERENT"
            else row
            for row in rows
        ]

    def findings_of(self, rows: Sequence[TensorDiff]) -> tuple[Finding, ...]:
        """Return the findings, each limited to the factors that differ; to all if none does.

        `rows` are those of the stored tensors.
        """
        apart = {row.key for row in rows if row.verdict not in EQUAL}
        made = []
        for one in self.findings:
            keys = tuple(key for key in one.keys if key in apart) or one.keys
            made.append(replace(one, keys=keys, where=keys))
        return tuple(made)

    @property
    def named(self) -> Set[str]:
        """The stored names of factors that a finding is about, or that are not to be compared."""
        return {key for one in self.findings for key in one.keys}

    def covers(self, item: str) -> bool:
        """Return whether an item of the ledger is a key of an adapter's scale.

        The scale is compared as part of the products.
        """
        name = item.removeprefix(f"{ADAPTER_CONFIG}: ")
        return self.complete and (name in SCALE_KEYS or item == ALPHA)

    def differing_fields(self) -> tuple[FieldDiff, ...]:
        """Return the keys of the scale that differ; () where the products are equal anyway."""
        return () if self.settles_keys or not self.complete else self.fields

    @property
    def settles_keys(self) -> bool:
        """Whether all products are equal, so that differing keys of the scale change nothing."""
        known = self.complete and bool(self.rows)
        return known and all(row.verdict != "DIFFERENT" for row in self.rows)


def compare_deltas(a: "Model", b: "Model") -> DeltaComparison | None:
    """Return the comparison of what two LoRA adapters add to weights; None for other models.

    Modules whose product needs the base (single parameters of stacked experts), or that one adapter
    lacks, have no row. A module with DoRA's lengths is compared by scale * B @ A; its lengths are
    separate tensors.
    """
    kinds = [None if side.kind is None else side.kind.name for side in (a, b)]
    if kinds != ["adapter", "adapter"]:
        return None
    try:
        first, second = adapter_of_model(a, compare=True), adapter_of_model(b, compare=True)
        if diffusion_names(a) and diffusion_names(b):
            first, second = _with_modules_alike(first), _with_modules_alike(second)
            first, second = _with_parts_joined(first, second), _with_parts_joined(second, first)
        elif first.spelling != second.spelling:
            return None
        elif _one_lacks_its_scale(first, second):  # the changes of the other are not known
            return DeltaComparison((), (), True, tuple(_differing_keys(first, second)))
        rows = tuple(_delta_rows(first, second))
    except AprfmtError:
        return None
    complete = len(rows) == len(first.pairs) == len(second.pairs)
    other = _other_adapter_text(rows)
    found = () if other else tuple(_findings(first, second, rows, (a.path, b.path)))
    fields, settled = tuple(_differing_keys(first, second)), dict(_settled_tensors(first, second))
    unexchanged = _unexchanged_factors(first, second)
    if unexchanged:
        apart = [row for row in rows if unexchanged.intersection(row.keys)]
        found = (*found, _unexchanged_finding(apart, unexchanged))
    return DeltaComparison(rows, found, complete, fields, other, settled, unexchanged)


def _unexchanged_factors(a: Adapter, b: Adapter) -> frozenset[str]:
    """Return the stored names of B factors whose output halves a conversion should have exchanged.

    diffusers has the two halves of such a module (shift, scale) in the other order than the
    original model. A module is found if both adapters hold the halves in the same order, although
    one adapter has the original's module name and the other adapter that of diffusers.
    """
    found: set[str] = set()
    for module, mine in a.pairs.items():
        theirs = b.pairs.get(module)
        if theirs is None or mine.halves == theirs.halves or theirs.joined or mine.joined:
            continue
        left, right = (read_factors(replace(pair, halves=False))[1] for pair in (mine, theirs))
        half = len(left) // 2
        if np.array_equal(left, right) and not np.array_equal(left[:half], left[half:]):
            found |= {pair.parts["b"].names[0] for pair in (mine, theirs)}
    return frozenset(found)


def _unexchanged_finding(rows: Sequence[DeltaRow], names: Collection[str]) -> Finding:
    """Return the finding that a conversion did not exchange the output halves of these factors.

    `rows` are the compared modules of the factors, `names` the factors' stored names.
    """
    keys = tuple(sorted(names))
    says = (
        "the halves of the outputs stand alike on both sides: the original has (shift, scale) "
        "there and diffusers (scale, shift), so that a conversion has to exchange them"
    )
    return Finding(
        "row_offset", says, "tensor", "bug", keys, True, keys=keys,
        residual_before=max((row.rel_l2 for row in rows), default=None), residual_after=0.0,
        of="scale * B @ A of each module", proof=unfitted_proof(len(keys)),
    )  # fmt: skip


def _settled_tensors(a: Adapter, b: Adapter) -> Iterator[tuple[str, str]]:
    """Yield (stored name, why) of tensors that need no counterpart, as both adapters mean the same.

    They are alphas of pairs whose scales are equal, although one side writes its scale into the
    factors, and factors that differ only in the order of halves that diffusers exchanges.
    """
    for module, mine in a.pairs.items():
        theirs = b.pairs.get(module)
        if theirs is None or mine.joined or theirs.joined:
            continue
        if math.isclose(mine.scale, theirs.scale, rel_tol=1e-12):
            alphas = (pair.parts["alpha"] for pair in (mine, theirs) if "alpha" in pair.parts)
            yield from ((view.names[0], _SAME_SCALE) for view in alphas)
        if mine.halves == theirs.halves or not {"b"} <= mine.parts.keys() & theirs.parts.keys():
            continue
        if np.array_equal(read_factors(mine)[1], read_factors(theirs)[1]):
            for pair in (mine, theirs):
                yield pair.parts["b"].names[0], _OTHER_HALVES


def _with_modules_alike(adapter: Adapter) -> Adapter:
    """Return a diffusion adapter with its modules named independently of the trainer's spelling."""
    pairs = {
        ".".join(diffusion_component(module)): replace(pair, halves=exchanges_halves(module))
        for module, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs)


def _with_parts_joined(adapter: Adapter, other: Adapter) -> Adapter:
    """Return `adapter` with its separate modules joined where `other` has them as one module.

    q, k and v of diffusers are one projection in the original model, for example. The modules'
    names in both adapters are already those that are compared, in no trainer's spelling.
    """
    pairs = dict(adapter.pairs)
    for module in other.pairs:
        component, _, rest = module.partition(".")
        names = [f"{component}.{name}" for name in joined_modules(rest)]
        if not names or module in pairs or not all(name in pairs for name in names):
            continue
        several = tuple(pairs.pop(name) for name in names)
        parts = {
            f"{part}.{number}": view
            for number, pair in enumerate(several)
            for part, view in pair.parts.items()
        }
        rank = sum(pair.rank for pair in several)
        pairs[module] = StoredPair(module, parts, rank, 1.0, joined=several)
    return replace(adapter, pairs=pairs)


def _one_lacks_its_scale(a: Adapter, b: Adapter) -> bool:
    """Return whether one of two adapters of PEFT's names has the configuration with its scale."""
    return a.spelling == "peft" and bool(a.config) != bool(b.config)


def _other_adapter_text(rows: Sequence[DeltaRow]) -> str:
    """Return why two adapters are unrelated, as a sentence; "" where their products are related.

    Further training keeps most of a product's direction. Damage in some modules leaves the products
    of all others related.
    """
    strange = [row for row in rows if row.size_a and row.size_b and row.related < RELATED]
    if len(strange) < _LEAST or len(strange) <= (1 - MOST) * len(rows):
        return ""
    return (
        f"scale * B @ A of {len(strange)} of {len(rows)} modules has nothing of the other side's "
        f"(cosine at most {max(row.related for row in strange):.2g}): these are two adapters, or "
        "the factors of one were exchanged in all of these modules; the two do not say which"
    )


def _differing_keys(a: Adapter, b: Adapter) -> Iterator[FieldDiff]:
    """Yield the keys of the scale in which the configurations of two adapters differ."""
    if a.spelling == "gguf" and a.alpha != b.alpha:
        yield FieldDiff(ALPHA, a.alpha, b.alpha, decisive=True)
    keys = ("lora_parameters",) if a.spelling == "mlx" else SCALE_KEYS
    for key in keys:
        mine, theirs = a.config.get(key), b.config.get(key)
        if mine != theirs and (mine or theirs):
            name = f"{ADAPTER_CONFIG}: {key}"
            yield FieldDiff(name, mine, theirs, decisive=True, item=f"config key {name}")


def _delta_rows(
    a: Adapter, b: Adapter, scales: Mapping[str, float] | None = None
) -> Iterator[DeltaRow]:
    """Yield the row of each module that both sides have; `scales` {module: scale} replace B's."""
    for module, pair in a.pairs.items():
        other = b.pairs.get(module)
        if other is None or pair.parameters or other.parameters:
            continue
        if scales is not None:
            other = replace(other, scale=scales[module])
        row = _compare_pair(pair, other)
        if row is not None:
            yield row


def _compare_pair(a: StoredPair, b: StoredPair) -> DeltaRow | None:
    """Return the comparison of two modules' products scale * B @ A; None if their shapes differ."""
    (a_right, a_left), (b_right, b_left) = read_factors(a), read_factors(b)
    if (a_left.shape[0], a_right.shape[1]) != (b_left.shape[0], b_right.shape[1]):
        return None
    # The products are never made: with orthonormal bases their norms are those of small matrices.
    left = _triangle(np.concatenate([a_left, b_left], axis=1))
    right = _triangle(np.concatenate([a_right, b_right], axis=0).T)
    rank = a_left.shape[1]
    first = a.scale * (left[:, :rank] @ right[:, :rank].T)
    second = b.scale * (left[:, rank:] @ right[:, rank:].T)
    kinds = [
        min(UNIT.get(view.encoding, _COARSEST), _COARSEST)
        for pair in (a, b)
        for part, view in pair.parts.items()
        if part.partition(".")[0] not in ("alpha", "magnitude")
    ]
    keys = tuple(
        dict.fromkeys(
            view.names[0]
            for pair in (a, b)
            for part, view in pair.parts.items()
            if not part.startswith("magnitude")
        )
    )
    return DeltaRow(
        a.module,
        keys,
        float(np.linalg.norm(first)),
        float(np.linalg.norm(second)),
        float(np.sum(first * second)),
        float(np.linalg.norm(second - first)),
        2 * sum(sorted(kinds)[-2:]),
        _FLOAT
        * sum(
            abs(pair.scale) * float(np.linalg.norm(one) * np.linalg.norm(other))
            for pair, one, other in ((a, a_left, a_right), (b, b_left, b_right))
        ),
        not math.isclose(a.scale, b.scale, rel_tol=1e-12),
        min(a_left.size, a_right.size),
    )


def _triangle(columns: "Array") -> "Array":
    """Return R of the QR decomposition of a matrix: its columns in an orthonormal basis."""
    found: Array = np.asarray(np.linalg.qr(columns, mode="r"))
    return found


def _findings(
    a: Adapter, b: Adapter, rows: Sequence[DeltaRow], paths: tuple[Path, Path]
) -> Iterator[Finding]:
    """Yield the findings on why the products differ: one factor for most, else differing scales.

    `paths` are those of A's and B's weights.
    """
    close = [row for row in rows if row.verdict == "WITHIN"]
    if close:
        says = f"scale * B @ A of {len(close)} modules is equal within the rounding of the factors"
        yield _factor_finding(
            "rounding", says, "precision", close, True, residual_after=0.0,
            proof=unfitted_proof(len(close)),
        )  # fmt: skip
    apart = [row for row in rows if row.verdict == "DIFFERENT"]
    times = _common_factor(apart)
    if times is not None:
        scaled = [row for row in apart if row.is_multiple(times)]
        others = [row for row in apart if row not in scaled]
        yield _scale_finding(a, b, scaled, [r for r in rows if r not in others], times, paths)
        left = [row for row in others if row.rescaled]
        relation = f"{times:.6g} times A's"
    else:
        rescaled = [row for row in apart if row.rescaled]
        trained = [row for row in rescaled if row.related >= RELATED]
        if len(trained) < MOST * len(rows):
            trained = []
        if trained:
            nearest = min(row.related for row in trained)
            says = (
                f"scale * B @ A differs in {len(trained)} of {len(rows)} modules and belongs to "
                f"that of the other side (cosine at least {nearest:.4g}): trained further, or by "
                "other settings; the scales differ, so that the factors are not compared"
            )
            yield _factor_finding("derived", says, "not_comparable", trained, False)
        left = [row for row in rescaled if row not in trained]
        relation = "what the other modules have" if trained else "a multiple of A's"
    if left:
        says = (
            f"scale * B @ A differs in {len(left)} of {len(rows)} modules, by "
            f"{max(row.rel_l2 for row in left):.3g} at most, and is not {relation}; the scales of "
            "the two differ, so that the factors are not compared one by one"
        )
        yield _factor_finding("delta_change", says, "bug", left, False)


def _factor_finding(
    cause: str, says: str, verdict: Verdict, rows: Sequence[DeltaRow], confirmed: bool, **more: Any
) -> Finding:
    """Return a finding about the factors of the modules in `rows`; `more` are fields of Finding."""
    keys = tuple(key for row in rows for key in row.keys)
    return Finding(
        cause, says, "tensor", verdict, keys, confirmed, keys=keys,
        residual_before=max(row.rel_l2 for row in rows), of="scale * B @ A of each module", **more,
    )  # fmt: skip


def _scale_finding(
    a: Adapter,
    b: Adapter,
    rows: Sequence[DeltaRow],
    sound: Sequence[DeltaRow],
    times: float,
    paths: tuple[Path, Path],
) -> Finding:
    """Return the finding that B's products are A's times a number, `times`, in `rows`.

    `sound` are the rows of all modules but the unexplained ones: a key has to make them all
    equal. The command sets a key of B; the sentence names also the one that sets a key of A.
    """
    modules = {row.module for row in sound}
    own, other = _single_keys(a, b, times, modules), _single_keys(b, a, 1 / times, modules)
    says = f"scale * B @ A of B is {times:.6g} times A's in {len(rows)} of {len(a.pairs)} modules"
    says += f"; {_keys_text(b, own)}"
    commands = [
        set_command(
            str(path),
            [shlex.quote(f"{ADAPTER_CONFIG}:{k}={_config_text(v)}") for k, v in keys[:1]],
            in_place=True,
        ) if keys else ""
        for path, keys in zip(paths, (other, own), strict=True)
    ]  # fmt: skip
    if commands[0] and commands[1]:
        says += f"; if it is B, mend A: {commands[0]}"
    return _factor_finding(
        "delta_scale", says, "bug", rows, True, residual_after=0.0, values={"times": times},
        next=commands[1],
        # One number is fitted, and every value of the changes judges it.
        proof=Proof(sum(row.values for row in rows), 1.0, 0 if own else 1, _BITS),
    )  # fmt: skip


def _common_factor(rows: Sequence[DeltaRow]) -> float | None:
    """Return the number n with which B's products are n times A's in most rows; None for none.

    It is measured in every second module, and judged in all.
    """
    measured = [row.times for row in rows[::2] if row.size_a]
    times = float(np.median(measured)) if measured else math.nan
    if not math.isfinite(times) or not times:
        return None
    fits = sum(row.is_multiple(times) for row in rows)
    return times if fits == len(rows) or (fits >= _LEAST and fits >= MOST * len(rows)) else None


def _single_keys(a: Adapter, b: Adapter, times: float, modules: Set[str]) -> list[tuple[str, Any]]:
    """Return (key, value) of each change of one of B's keys that makes the products equal.

    Only the products of `modules` count. Keys in which the two configurations differ come first,
    with A's value; then `use_rslora` toggled, then another alpha.
    """
    return [
        (key, value)
        for key, value in _other_values(a, b, times)
        if _makes_equal(a, b, key, value, modules)
    ]


# Where the scale of a pair stands, by the spelling of its adapter; PEFT's is in its configuration.
_SCALES_STAND = {
    "kohya": (
        "the scale of a pair is its alpha tensor divided by its rank, and 1 without the tensor"
    ),
    "gguf": "the scale of a pair is adapter.lora.alpha divided by its rank, and 1 without the key",
    "mlx": "the scale is that of lora_parameters in adapter_config.json",
}


def _keys_text(b: Adapter, held: Sequence[tuple[str, Any]]) -> str:
    """Return in words which keys of B's configuration would make the products equal.

    For adapters without alpha or r in a configuration it says where their scale is stored.
    """
    if b.spelling in _SCALES_STAND:
        return f"{_SCALES_STAND[b.spelling]}; which side is meant, the two do not say"
    if not b.config:
        return f"B states no scale: it has neither alpha tensors nor an {ADAPTER_CONFIG}"
    if not held:
        return f"no single key of B's {ADAPTER_CONFIG} makes all modules equal"
    own = " or ".join(f"{key} {_config_text(value)}" for key, value in held)
    stated = ", ".join(f"{key} {_config_text(b.config.get(key))}" for key, _ in held)
    return (
        f"all are equal with {own} in B's {ADAPTER_CONFIG} (B has {stated}); which side is meant, "
        "the two do not say"
    )


def _other_values(a: Adapter, b: Adapter, times: float) -> Iterator[tuple[str, Any]]:
    """Yield (key, value to try in B's configuration) that may make B's products equal to A's.

    B's products are `times` A's. First come A's values of keys that differ, then `use_rslora` the
    other way, then another alpha. Nothing for adapters that are not in PEFT's spelling.
    """
    if b.spelling != "peft":
        return
    for key in SCALE_KEYS[1:]:
        mine = a.config.get(key)
        if mine != b.config.get(key) and mine is not None:
            yield key, mine
    if bool(a.config.get("use_rslora")) == bool(b.config.get("use_rslora")):
        yield "use_rslora", not b.config.get("use_rslora")
    alpha = b.alpha / times
    if alpha > 0 and alpha != a.config.get("lora_alpha"):
        near = round(alpha)
        yield "lora_alpha", near if math.isclose(near, alpha, rel_tol=1e-6) else alpha


def _makes_equal(a: Adapter, b: Adapter, key: str, value: Any, modules: Set[str]) -> bool:
    """Return whether B's products of `modules` equal A's once a key of B has another value."""
    config = {**b.config, key: value}
    scales = {}
    for module, pair in b.pairs.items():
        alpha = value_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 0))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            return False
        scales[module] = adapter_scale(config, float(alpha), pair.rank)
    rows = _delta_rows(a, b, scales)
    return all(row.verdict != "DIFFERENT" for row in rows if row.module in modules)


def _config_text(value: Any) -> str:
    """Return a value as adapter_config.json shows it; None, an unset flag, as "false"."""
    return json.dumps(False if value is None else value)
