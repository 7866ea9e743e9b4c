"""Levels one to three of two models: identity, hyperparameters, tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aprfmt.causes import CAUSES
from aprfmt.compare import diff_models
from aprfmt.compare.records import EQUAL, DiffReport, FieldDiff, TensorDiff
from aprfmt.diagnosis.config import HYPER_CAUSES, said, shown_tensors, tensors_say
from aprfmt.diagnosis.mixing import Part
from aprfmt.diagnosis.records import Evidence, Finding
from aprfmt.dtypes import encoding as encoding_row
from aprfmt.model import Model

_SIZES = ("n_heads", "n_kv_heads", "head_dim")
_FOLLOW = ("value_head_dim", "attn_scale", "rope_dim")  # from head_dim, where no key says them


@dataclass
class Levels:
    """What the first three levels found. `parts` stand beside `findings`, one each."""

    findings: list[Finding] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    reason: str = ""
    runs: bool = True  # both have all tensors a pass needs

    def add(self, finding: Finding, part: Part) -> None:
        """Note a finding and what it speaks of."""
        self.findings.append(finding)
        self.parts.append(part)


def compare_models(a: Model, b: Model) -> Levels:
    """Walk identity, hyperparameters and tensors of two open models."""
    found = Levels()
    if a.path.resolve() == b.path.resolve():
        found.evidence.append(Evidence("identity", f"A and B are the same file, {a.path.name}"))
        found.checked.append("identity: the same file")
        found.checked += ["hyperparameters: of the same file", "tensors: of the same file"]
        return found
    report = diff_models(a, b)
    _identity(a, b, report, found)
    if found.reason:
        return found
    tensors = {row.key: row for row in report.tensors}
    explained = _hyperparameters(a, b, report, tensors, found)
    if not found.reason:
        _tensors(report, explained, found)
    return found


# --- identity ------------------------------------------------------------------------------------


def _identity(a: Model, b: Model, report: DiffReport, found: Levels) -> None:
    for label, model in (("A", a), ("B", b)):
        size = sum(tensor.nbytes for tensor in model.values())
        found.evidence.append(
            Evidence(
                "identity",
                f"{label}: {model.path.name}, {model.format}, {model.spec.name}, {len(model)} "
                f"tensors, {size} bytes{_origin(model)}",
            )
        )
    found.checked.append("identity: architecture, tensor count, tokenizer, chat template")
    equal = sum(row.verdict in EQUAL for row in report.tensors)
    matched = sum(row.verdict not in ("ONLY_IN_A", "ONLY_IN_B") for row in report.tensors)
    for row in report.tokenizer:
        found.evidence.append(
            Evidence("identity", f"tokenizer: {row.name} is {row.a} in A, {row.b} in B",
                     (f"tokenizer.{row.name}",))
        )  # fmt: skip
    if not a.hyper or not b.hyper:
        return
    other = [
        name
        for name in ("hidden_size", "n_layers", "vocab_size", "n_experts")
        if a.hyper[name] != b.hyper[name]
    ]
    if other:
        sizes = ", ".join(f"{name} {a.hyper[name]} and {b.hyper[name]}" for name in other)
        found.reason = f"these are models of other sizes: {sizes}"
    elif a.spec.block != b.spec.block and not equal:
        found.reason = f"A is {a.spec.name}, B {b.spec.name}: other blocks, and no tensor in common"
    elif matched and not equal and _unrelated(report):
        found.reason = (
            f"none of {matched} tensors is equal or explained: these are two checkpoints, not two "
            "copies of one"
        )


def _origin(model: Model) -> str:
    """Return what a file says it was made from, "" where it does not say."""
    name, digest = (model.metadata.get(f"aprfmt.source.{key}") for key in ("file", "sha256"))
    if not isinstance(name, str):
        return ""
    return f", made from {name}" + (
        f" (SHA-256 {digest[:12]}...)" if isinstance(digest, str) else ""
    )


def _unrelated(report: DiffReport) -> bool:
    """Say whether nearly all tensors differ as those of two trainings do."""
    both = [row for row in report.tensors if row.verdict not in ("ONLY_IN_A", "ONLY_IN_B")]
    strange = [
        row
        for row in both
        if row.verdict in ("DIFFERENT", "SHAPE_DIFFERS")
        and (row.explanation is None or not row.explanation.confirmed)
        and (row.stats is None or row.stats.rel_l2 > 0.05)
    ]
    return len(strange) > 0.8 * len(both) and len(both) > 2


# --- hyperparameters -----------------------------------------------------------------------------


def _hyperparameters(
    a: Model,
    b: Model,
    report: DiffReport,
    tensors: Mapping[str, TensorDiff],
    found: Levels,
) -> set[str]:
    """Note differing hyperparameters; return the keys of tensors they explain."""
    found.checked.append("hyperparameters: every one that changes the forward pass, with origin")
    for label, model in (("A", a), ("B", b)):
        for text in tensors_say(model, label):
            found.evidence.append(Evidence("config", text))
    rows = {row.name: row for row in report.hyperparameters}
    if rows.pop("architecture", None) is not None:
        found.evidence.append(
            Evidence("config", f"A is read as {a.spec.name}, B as {b.spec.name}", ("architecture",))
        )
    if not any(HYPER_CAUSES.get(name) == "rope_scaling" and name != "context_length"
               for name in rows) and not _by_length(a, b):  # fmt: skip
        rows.pop("context_length", None)
    explained: set[str] = set()
    for cause, names in _grouped(rows).items():
        chosen = [rows[name] for name in names]
        keys = tuple(key for name in names for key in shown_tensors(name, tensors))
        if cause == "tied_embedding" and _same_head(tensors):
            for row in chosen:
                text = said(row) + "; the stored head is a copy of the embedding"
                found.evidence.append(Evidence("config", text, (row.name,)))
            continue
        if cause == "tied_embedding" and "output.weight" in tensors:
            keys = (*keys, "output.weight")
        explained |= set(keys)
        for row in chosen:
            found.evidence.append(Evidence("config", said(row), (row.name, *keys[:6])))
        if not cause:
            found.reason = "other sizes or kinds of block: " + "; ".join(map(said, chosen))
            return explained
        found.add(
            Finding(
                cause,
                "; ".join(map(said, chosen)),
                "config",
                CAUSES[cause].verdict,
                (*names, *keys),
                False,
                values={row.name: {"a": row.a, "b": row.b} for row in chosen},
                side=_doubtful(chosen),
            ),
            Part(tuple(names), tuple(dict.fromkeys(keys))),
        )
    return explained


def _by_length(a: Model, b: Model) -> bool:
    scalings = [model.hyper["rope_scaling"] for model in (a, b)]
    return any(row is not None and row["type"] == "dynamic" for row in scalings)


def _same_head(tensors: Mapping[str, TensorDiff]) -> bool:
    head = tensors.get("output.weight")
    return head is not None and head.verdict in (*EQUAL, "WITHIN")


def _doubtful(rows: Sequence[FieldDiff]) -> str:
    """Return the side whose value is only a default where the other's was stated."""
    sides = {
        "B" if row.origin_b.startswith("default") else "A"
        for row in rows
        if row.origin_a.startswith("default") != row.origin_b.startswith("default")
    }
    return sides.pop() if len(sides) == 1 else ""


def _grouped(rows: Mapping[str, FieldDiff]) -> dict[str, list[str]]:
    """Return hyperparameters by cause; what follows from the number of heads goes with it."""
    found: dict[str, list[str]] = {}
    heads = any(name in rows for name in _SIZES)
    for name, row in rows.items():
        cause = HYPER_CAUSES.get(name, "")
        if heads and name in _FOLLOW and "default" in (row.origin_a + row.origin_b):
            cause = "gqa_mapping"
        found.setdefault(cause, []).append(name)
    return found


# --- tensors -------------------------------------------------------------------------------------


def _tensors(report: DiffReport, explained: set[str], found: Levels) -> None:
    counts = {name: count for name, count in report.counts.items() if count}
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    found.evidence.append(Evidence("tensor", f"{len(report.tensors)} tensors: {listed}"))
    found.checked.append(f"tensors: bytes, then values of all {len(report.tensors)}")
    unreadable = [row.key for row in report.tensors if row.verdict == "UNREADABLE"]
    if unreadable:
        found.reason = f"{len(unreadable)} tensors cannot be read: {', '.join(unreadable[:3])}"
        return
    rows = [row for row in report.tensors if row.key not in explained]
    missing = [row for row in rows if row.verdict in ("ONLY_IN_A", "ONLY_IN_B")]
    _missing(missing, found)
    done: set[str] = set()
    for finding, part in _findings(report, explained):
        found.add(finding, part)
        done |= set(part.keys)
    for finding, part in _copies(rows):
        found.add(finding, part)
    left = [
        row for row in rows if row.verdict in ("DIFFERENT", "SHAPE_DIFFERS") and row.key not in done
    ]
    if left:
        found.add(*_strange(left))


def _missing(rows: Sequence[TensorDiff], found: Levels) -> None:
    """Name tensors one side lacks: biases and the head are causes, others stop the walk."""
    for label in ("ONLY_IN_A", "ONLY_IN_B"):
        side = "B" if label == "ONLY_IN_A" else "A"
        keys = [row.key for row in rows if row.verdict == label]
        biases = tuple(key for key in keys if key.endswith(".bias"))
        if biases:
            found.add(
                Finding(
                    "missing_bias",
                    f"{side} lacks {len(biases)} biases of the other's: {', '.join(biases[:4])}",
                    "tensor", "bug", biases, False, side=side,
                ),
                Part((), biases),
            )  # fmt: skip
        others = [key for key in keys if key not in biases]
        if others:
            found.evidence.append(
                Evidence("tensor", f"{side} lacks {len(others)} tensors", tuple(others[:12]))
            )
            found.runs = False
            found.reason = f"{side} lacks {len(others)} of the tensors: {', '.join(others[:4])}"


def _findings(report: DiffReport, explained: set[str]) -> Iterator[tuple[Finding, Part]]:
    """Yield one finding for each explanation of compare.explain, with all its tensors."""
    by_key = {row.key: row for row in report.tensors}
    for group in report.findings:
        keys = tuple(key for key in group.keys if key not in explained)
        rows = [by_key[key].explanation for key in keys]
        made = [row for row in rows if row is not None]
        if not made or group.cause not in CAUSES:
            continue
        before = [row.residual_before for row in made if row.residual_before is not None]
        after = [row.residual_after for row in made if row.residual_after is not None]
        where = tuple(dict.fromkeys(key for row in made for key in row.where))
        yield (
            Finding(
                group.cause,
                group.text,
                "tensor",
                CAUSES[group.cause].verdict,
                where,
                group.confirmed,
                residual_before=max(before, default=None),
                residual_after=max(after, default=None),
                of="stored values",
                values={"evidence": [list(row.evidence) for row in made[:8]]},
            ),
            Part((), keys),
        )


def _copies(rows: Sequence[TensorDiff]) -> Iterator[tuple[Finding, Part]]:
    """Yield the tensors that are within the rounding of a coarser encoding, by cause."""
    groups: dict[tuple[str, str], list[TensorDiff]] = {}
    for row in rows:
        if row.verdict == "WITHIN":
            coarser = min((row.encoding_a, row.encoding_b), key=_bits)
            cause = "quantisation" if _is_blocked(coarser) else "rounding"
            groups.setdefault((cause, coarser), []).append(row)
    for (cause, coarser), chosen in groups.items():
        keys = tuple(row.key for row in chosen)
        worst = max((row.stats.rel_l2 for row in chosen if row.stats is not None), default=None)
        off = max((row.steps_off for row in chosen if row.steps_off is not None), default=None)
        steps = "" if off is None else f", at most {off:.3g} steps apart"
        yield (
            Finding(
                cause,
                f"{len(chosen)} tensors are {coarser} on one side, within its rounding{steps}",
                "tensor", "precision", keys, True,
                residual_before=worst, residual_after=0.0, of="stored values beyond one step",
                values={"encoding": coarser, "steps": off},
            ),
            Part((), keys),
        )  # fmt: skip


def _bits(name: str) -> float:
    return encoding_row(name.split("+")[0]).bits_per_weight


def _is_blocked(name: str) -> bool:
    return encoding_row(name.split("+")[0]).block_size > 1


def _strange(rows: Sequence[TensorDiff]) -> tuple[Finding, Part]:
    keys = tuple(row.key for row in rows)
    worst = max((row.stats.rel_l2 for row in rows if row.stats is not None), default=None)
    return (
        Finding(
            "stale_tensor",
            f"{len(rows)} tensors have other values, which nothing relates to the other side's: "
            f"{', '.join(keys[:3])}",
            "tensor", "bug", keys, False, residual_before=worst, of="stored values",
        ),
        Part((), keys),
    )  # fmt: skip


def settled(finding: Finding, before: float, after: float, first: str, bound: float) -> Finding:
    """Return a finding with what taking it away does to the pass."""
    shows = before > bound
    gone = after <= bound
    own = finding.residual_before is not None and finding.of == "stored values"
    confirmed = (shows and gone) or (finding.confirmed and (gone or own))
    if finding.level == "config" and not shows:
        confirmed = False
    if own and finding.residual_after is not None and finding.confirmed:
        return replace(finding, confirmed=confirmed, first=first if shows else "")
    return replace(
        finding,
        confirmed=confirmed,
        first=first if shows else "",
        residual_before=before,
        residual_after=after,
        of="logits",
    )
