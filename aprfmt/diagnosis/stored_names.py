"""Compares two models by stored tensor names, and gives the stored names of a finding's places.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from aprfmt.base.protocols import SURPLUS
from aprfmt.base.sequences import join_first
from aprfmt.causes import CAUSES
from aprfmt.causes.hyperparameters import stored_sub_key
from aprfmt.causes.restored_keys import refusal_reason
from aprfmt.causes.tensor.shared_ranges import overlap_findings
from aprfmt.compare import diff_models
from aprfmt.compare.diffs import DiffReport
from aprfmt.diagnosis.model_comparison import relation_findings
from aprfmt.diagnosis.records import Diagnosis, Evidence
from aprfmt.diagnosis.tensors import coarser_copies, explained_findings
from aprfmt.diagnosis.tokenizer_findings import list_token_findings
from aprfmt.errors import AprfmtError
from aprfmt.measure.differing_units import differing_names
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import EQUAL
from aprfmt.model import Model, missing_shards
from aprfmt.model.ledger import DIFFERING

_SHOWN = 12


def compare_by_name(
    texts: tuple[str, str], a: Model, b: Model, only: Collection[str] | None = None
) -> Diagnosis:
    """Return the diagnosis of two models by their stored tensors and tokenizers alone, no pass.

    It says what could not be compared, and how to enable that. The verdict is "same" if all items
    are equal, also those that nothing reads. If nothing differs but a file is damaged or unread,
    `reason` says what was equal, and the verdict is "not_comparable" (exit 2). `texts` are A and B
    as the user gave them, `only` the sections to compare, None for all.
    """
    part = _part_sentence(a, b)
    if part:
        return Diagnosis(
            *texts, (), (), (), ("everything: one side is no whole model",), reason=part
        )
    # The causes that `diff` names, each with its remedy.
    report = diff_models(a, b, only=only)
    findings = [*report.lost_after_relations, *report.contradicted]
    names = list(relation_findings(report))
    findings += [one for one, of in zip(names, report.relations, strict=True) if not of.between]
    mends = {one.cause: one.remedy.command for one in report.causes if one.remedy is not None}
    findings += [
        replace(finding, next=finding.next or mends.get(finding.cause, ""))
        for finding, _ in explained_findings(report, set())
    ]
    # Other names of which neither side need be wrong come after the faults of values.
    at = max((i + 1 for i, one in enumerate(findings) if one.verdict == "bug"), default=0)
    findings[at:at] = [one for one, of in zip(names, report.relations, strict=True) if of.between]
    findings[:0] = [*_undecoded_findings(a, "A"), *_undecoded_findings(b, "B")]
    told = {key for finding in findings for key in finding.where}
    rows = [row for row in report.tensors if row.key not in told]
    findings += [finding for finding, _ in coarser_copies(rows)]
    # Shared bytes of a file are what made their tensors differ.
    if a.damage or b.damage:
        seen = f"aprfmt validate {shlex.quote(str(b.path))}"
        shared = list(overlap_findings(report.tensors, a, b, report.rewriting_command or seen))
        overlapped = {key for one in shared for key in one.keys}
        findings = [*shared, *(one for one in findings if not overlapped.issuperset(one.where))]
    # Differing tensors that no cause covers.
    named = {key for finding in findings for key in finding.where}
    apart = tuple(row.key for row in report.tensors if row.verdict not in EQUAL)
    broken = {"A": damage_texts(a), "B": damage_texts(b)}
    lost = {"UNREADABLE"} if any(broken.values()) else set()
    lost |= {f"ONLY_IN_{other}" for side, other in ("AB", "BA") if broken[side]}
    # Codes that no codec decodes say nothing of their values.
    coded = [one.unread.why_not_compared for one in (a, b) if one.unread is not None]
    unread = [
        row.key
        for row in report.tensors
        if row.verdict in lost or (row.verdict == "UNREADABLE" and row.cause in coded)
    ]
    left = tuple(key for key in apart if key not in named and key not in unread)
    if left and not report.other_model:
        shown = join_first(left, 4) + _shapes_text(report, left)
        findings.append(
            Finding("", f"{len(left)} tensors differ: {shown}", "tensor", "bug", left, False)
        )
    findings += _known_differences(report, a, b)
    # Evidence, and why roles and hyperparameters were not compared.
    counts = Counter(row.verdict for row in report.tensors)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    evidence = [Evidence("tensor", f"{len(report.tensors)} tensors: {said}", apart[:_SHOWN])]
    evidence += [
        Evidence("config", f"tokenizer, {row.name}: A {row.a}, B {row.b}")
        for row in report.tokenizer
        if row.decisive
    ]
    why = [
        f"{label}: {text}"
        for label, model in (("A", a), ("B", b))
        for text in (*damage_texts(model), refusal_reason(model))
        if text
    ]
    lets = "they need the architecture of both; name it with --arch, or correct what its line says"
    if any(broken.values()):
        lets = "they need every file of both whole"
    reason = report.other_model
    if (
        not reason
        and not findings
        and not any(row.state in DIFFERING for row in report.not_compared)
    ):
        reason = _damage_sentence(report, broken, unread)
        reason = reason or _undecoded_sentence(report, coded, unread)
        if not reason and report.exit_code():
            reason = _comparison_limits_text(report)
    return Diagnosis(
        *texts,
        tuple(findings),
        tuple(evidence),
        tuple(_compared_sections(report)),
        (*why, f"hyperparameters and forward pass: {lets}"),
        reason,
        left=report.pronounced().not_compared,
        ledgers=report.ledgers,
        item_arguments=report.item_arguments,
        way_on=_command_after_diff(report),
        other_model=bool(report.other_model),
    )


def _shapes_text(report: DiffReport, keys: Sequence[str]) -> str:
    """Return a clause with both shapes of the first of `keys` whose shapes differ; "" for none."""
    apart = [row for row in report.tensors if row.key in keys and row.verdict == "SHAPE_DIFFERS"]
    if not apart:
        return ""
    first = apart[0]
    of = "" if len(keys) == 1 else f" of {first.key}"
    more = f", and {len(apart) - 1} more of two shapes" if len(apart) > 1 else ""
    return (
        f"; shape{of} {list(first.shape_a or ())} in A and {list(first.shape_b or ())} in B{more}"
    )


def _command_after_diff(report: DiffReport) -> str:
    """Return the first next command of `diff` that is not `diagnose`, else a `validate` of B."""
    others = (one for one in report.next if not one.startswith("aprfmt diagnose "))
    return next(others, f"aprfmt validate {shlex.quote(report.b)}")


def _undecoded_findings(model: Model, side: str) -> Iterator[Finding]:
    """Yield a finding for each kind of fault for which packed weights of a model do not decode.

    `side` is the model, "A" or "B". A finding is about the weights and the tensors of their
    modules that have no role. None for lost parts, which have their own finding.
    """
    faults: dict[str, list[tuple[str, str]]] = {}
    for one in model.undecoded:
        weight, _, says = one.text.partition(": ")
        if weight in model.source.tensors:
            of_scale = "scale" in says and "shape" in says
            cause = "scales_shape" if of_scale else ""
            if weight not in model.lost_parts:
                faults.setdefault(cause, []).append((weight, one.text))
    for cause, rows in faults.items():
        keys: dict[str, None] = {}
        for weight, _ in rows:
            keys.update(dict.fromkeys(model.roles_of.get(weight, (weight,))))
        modules = {weight.rpartition(".")[0] for weight, _ in rows}
        of_modules = [
            name
            for name in model.source.tensors
            if name not in model.roles_of and not modules.isdisjoint(_modules_above(name))
        ]
        more = f", and so {len(rows) - 1} more" * (len(rows) > 1)
        says = f"packed weights of {side} cannot be decoded: {rows[0][1]}{more}"
        seen = f"aprfmt validate {shlex.quote(str(model.path))}"
        where = (*keys, *(name for name in of_modules if name not in keys))
        yield Finding(cause, says, "tensor", "bug", where, False, side=side, next=seen)


def _modules_above(name: str) -> Iterator[str]:
    """Yield the dotted names of the modules that hold a stored tensor, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _known_differences(report: DiffReport, a: Model, b: Model) -> Iterator[Finding]:
    """Yield a finding for each decisive difference of the tokenizers, with a text that shows it.

    Where all tensors are equal, the command writes A again, with its tokenizer.
    """
    rows = [row for row in report.tokenizer if row.decisive]
    told = list_token_findings(a, b) if rows else ()
    names = {name for one in told for name in one.values}
    equal = bool(report.tensors) and all(row.verdict in EQUAL for row in report.tensors)
    for one in told:
        mends = equal and one.certainty != "located" and not one.next
        yield replace(one, next=report.rewriting_command) if mends else one
    for row in rows:
        if row.name not in names:
            cause = row.name if row.name in CAUSES else ""
            says = f"{row.name}: A {row.a}, B {row.b}"
            yield Finding(cause, says, "identity", "bug", (row.name,), False)


def _part_sentence(a: Model, b: Model) -> str:
    """Return a sentence on A or B if it is not a whole model, such as an adapter; else "".

    It says what to do. "" too where both are of one such kind, which are compared. A whole model in
    a layout that is not read has its rows in another order, so that equal names prove nothing.
    """
    names = [None if side.kind is None else side.kind.name for side in (a, b)]
    if names[0] == names[1]:
        return ""
    return "; ".join(
        f"{label} is {side.kind.says(side)}{'' if side.kind.foreign else ', no whole model'}; "
        f"{side.kind.todo(side)}"
        for label, side, name in zip("AB", (a, b), names, strict=True)
        if name is not None and side.kind is not None
    )


def damage_texts(model: Model) -> tuple[str, ...]:
    """Return sentences on a model's damaged files and missing shards; () if all are whole.

    Surplus bytes are left out: they are an item of the ledger.
    """
    faults = (*(one for one in model.damage if one.kind != SURPLUS), *missing_shards(model))
    return tuple(f"{one.where}: {one.text}" for one in faults)


def _damage_sentence(
    report: DiffReport, broken: Mapping[str, tuple[str, ...]], unread: Sequence[str]
) -> str:
    """Return what is wrong with damaged files and what was equal nevertheless; "" if none is.

    `broken` is {side: sentences on its damage}, `unread` the tensors not compared because of it.
    """
    if not any(broken.values()):
        return ""
    faults = "; ".join(
        f"{label}: {texts[0]}" + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")
        for label, texts in broken.items()
        if texts
    )
    compared = len(report.tensors) - len(unread)
    shown = join_first(unread, 4)
    cost = f"; not compared: {len(unread)} tensors ({shown})" if unread else ""
    held = f"equal in what was compared: {compared} tensors by their stored names"
    if not compared:
        held = "no tensor could be compared"
    return f"a file is not whole: {faults}; {held}{cost}; get the file again"


def _undecoded_sentence(report: DiffReport, reasons: Collection[str], unread: Sequence[str]) -> str:
    """Return what was equal beside codes that no codec decodes; "" where all codes were read.

    `reasons` say why they are not decoded, `unread` are the tensors not compared because of it.
    """
    if not unread or not reasons:
        return ""
    compared = len(report.tensors) - len(unread)
    held = f"equal in what was compared: {compared} tensors by their stored names"
    if not compared:
        held = "no tensor could be compared"
    shown = join_first(unread, 4)
    return f"{held}; not compared: {len(unread)} tensors ({shown}): {next(iter(reasons))}"


def _comparison_limits_text(report: DiffReport) -> str:
    """Return why a diagnosis of equal tensors does not say "same": what was not compared."""
    apart = [row.name for row in report.tokenizer if row.decisive]
    if apart:
        return (
            f"the tensors are equal, the tokenizers differ ({', '.join(apart)}); no pass was made"
        )
    compared = ", and ".join(_compared_sections(report).values())
    left = "hyperparameters and forward pass"
    if not compared:
        return f"neither side has a tensor or a tokenizer to compare; not compared: {left}"
    return f"equal in what was compared: {compared}; not compared: {left}"


def _compared_sections(report: DiffReport) -> Mapping[str, str]:
    """Return {report line on how a section was compared: what was compared} of a `diff` by names.

    The sections are tensors and tokenizers. {} if the files had neither tensors nor two tokenizers.
    """
    sections = {}
    if report.tensors:
        count = f"{len(report.tensors)} tensors by their stored names"
        sections["tensors: by their stored names"] = count
    if report.compared.get("tokenizers"):
        sections["tokenizer: as diff compares it"] = "the tokenizer"
    return sections


def stored_names_of_places(
    findings: Iterable[Finding], a: Model | None, b: Model | None
) -> Mapping[str, tuple[str, ...]]:
    """Return {place of a finding: stored names} for places that a file has a name for.

    They are B's names, and A's of what B lacks; for a finding that A is wrong the reverse. Of a
    tensor that a file stores in parts, one for each expert, only the parts that differ are named.
    """
    found: dict[str, tuple[str, ...]] = {}
    for finding in findings:
        sides = [side for side in ((a, b) if finding.side == "A" else (b, a)) if side is not None]
        for place in (*finding.where, *finding.keys):
            named = (_stored_names_of(place, *sides[at:]) for at in range(len(sides)))
            names = next(filter(None, named), ())
            if names and place not in found:
                found[place] = tuple(names)
    return found


def _stored_names_of(place: str, model: Model, other: Model | None = None) -> Sequence[str]:
    """Return a model's stored names of a role, or the key of a hyperparameter; () for none.

    Of a role that is stored in parts they are those that differ from the model `other`.
    """
    try:
        if place in model.roles:
            view, pair = model.roles[place], None if other is None else other.find(place)
            return view.names if pair is None else differing_names(view, pair)
        if place in model.hyper:
            key = model.hyper.of(place).key
            return (key,) if key else ()
        own = stored_sub_key(model, place)
        return (own,) if own else ()
    except AprfmtError:
        pass  # an architecture that is not read has stored names only
    return ()
