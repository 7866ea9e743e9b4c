"""`aprfmt diff`: which tensors of two files differ, by how much, and why.

An *item* is one thing that a model is made of: a tensor, a key, a text.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.base.budget import Budget
from aprfmt.cli import options, output_format, render
from aprfmt.cli.captured_activations import refuse_captures
from aprfmt.compare import DiffReport, diff
from aprfmt.compare.diffs import SECTIONS
from aprfmt.compare.short_answer import Line, short_answer
from aprfmt.errors import UsageError
from aprfmt.measure.records import EQUAL, FLOATS, FieldDiff, TensorDiff, ulp_type
from aprfmt.model import open_model
from aprfmt.model.verdict import Pronounced

if TYPE_CHECKING:
    from aprfmt.adapters import AdapterAnswer, MergeCommand
    from aprfmt.adapters.merge_answers import ChangedWeight
    from aprfmt.cli.ci_reports import ReportCase
    from aprfmt.measure.findings import Finding
    from aprfmt.measure.sampling import SampleReport


_LINES = 10
_ALIKE = 3  # weights of one kind that have a line each
_LOST = 0.01  # share of the change lost by rounding that is reported


def compare_adapter(
    a: Path, b: Path, adapter: Path, arch: str | None, accept: Sequence[str] = ()
) -> int:
    """Report whether B is A with the adapter merged, and return the exit code.

    0 where the adapter is in every weight once and nothing else differs, 1 where not, 2 where that
    is not known. A is the file `a`, B the file `b`. `accept` are patterns of what may stay
    uncompared.
    """
    from aprfmt.adapters import answer_merge, has_packed_weight, merge_command

    again = None
    with open_model(a, arch=arch) as base, open_model(b, arch=arch) as copy:
        found, report = answer_merge(base, copy, adapter)
        packed = has_packed_weight(base, [one.key for one in found.weights])
        if found.differs:
            again = merge_command(a, adapter, copy.format, arch, packed=packed)
    verdict = found.pronounced(accept)
    body = {**report.to_json(), "adapter": found.to_json(), **verdict.to_json()}
    return render.emit(body, verdict.exit, lambda: show_adapter(found, verdict, a, b, again))


def show_adapter(
    found: "AdapterAnswer", verdict: "Pronounced", a: Path, b: Path, again: "MergeCommand | None"
) -> None:
    """Print the answer, the weights that are not merged once, other differences, what to do.

    `again` is the command that merges the adapter anew, None where nothing differs. `found` is the
    answer; `a` is the base, `b` the model with the adapter merged.
    """
    from aprfmt.adapters.merge_faults import NOTHING

    style = {0: "good", 1: "bad", 2: "warn"}[verdict.exit]
    names = [render.escape(str(each)) for each in (found.adapter, b, a)]
    is_merged = "is to be merged into" if found.undecided else "is merged into"
    render.line(
        f"{names[0]} {is_merged} {names[1]}, of the base {names[2]}: {render.escape(found.text)}",
        style=style,
    )
    if verdict.not_compared or verdict.exit != int(found.differs):
        render.say(f"  {verdict.says}", style=style)
    # Weights with one mistake are shown together; the rest is counted.
    odd = [each for each in found.weights if each.found != "once" or each.says]
    if found.found == NOTHING:
        odd = []  # one sentence says it of all
    for says, group in _group_by_finding(odd).items():
        shown = group if len(group) <= _ALIKE + 1 else group[:_ALIKE]
        for each in shown:
            where = f" in {render.escape(each.file)}" if each.file else ""
            render.line(f"  {render.escape(each.key)}{where}: {render.escape(_weight_text(each))}")
        if len(group) > len(shown):
            render.line(f"  {len(group) - len(shown)} more weights: {render.escape(says)}")
    lost = [each for each in found.weights if each.lost >= _LOST]
    if lost:
        most = max(lost, key=lambda each: each.lost)
        what = (
            f"takes {most.lost:.0%} of the change"
            if most.lost <= 1
            else f"moves the values {most.lost:.3g} times as far as the change"
        )
        render.line(
            f"  rounding {what} in {render.escape(most.key)}, and takes at least {_LOST:.0%} in "
            f"{len(lost)} of {len(found.weights)} weights"
        )
    for says in found.says:
        render.line(f"  {render.escape(says)}")
    if found.others:
        others = ", ".join(render.escape(key) for key in found.others[:_LINES])
        render.line(f"  {len(found.others)} tensors differ that it does not change: {others}")
    if again is not None and again.command:
        render.line(f"next: {render.escape(again.command)}")
    elif again is not None:
        render.line(f"no command merges it anew here: {render.escape(again.why)}")


def _weight_text(weight: "ChangedWeight") -> str:
    """Return the words for a weight that an adapter was merged into.

    That is the mistake of the merge, or how many times the adapter's change was added.
    """
    if weight.says:
        return f"{weight.found}: {weight.says}"
    return (
        f"{weight.found} (the change {weight.times:.3f} times, {weight.rest:.3g} of it unexplained)"
    )


def _group_by_finding(weights: "Sequence[ChangedWeight]") -> "dict[str, list[ChangedWeight]]":
    """Return {what was found: weights}, so that weights with one mistake are printed together."""
    found: dict[str, list[ChangedWeight]] = {}
    for each in weights:
        found.setdefault(f"{each.found}{': ' * bool(each.says)}{each.says}", []).append(each)
    return found


IMAGES = 6  # difference images a page holds
LONGEST = 300  # characters of a field's value in the tables


def _report_cases(
    report: DiffReport, body: Mapping[str, Any], accept: Sequence[str], code: int
) -> "Sequence[ReportCase]":
    """Return the cases of a CI report, the verdict last."""
    from aprfmt.cli.ci_reports import append_verdict_case, cases_of_diff

    differing = {*report.differing_tensors(accept)}
    cases = cases_of_diff(body, report.count_differing_fields(accept), differing)
    return append_verdict_case(cases, code, report.b)


def render_page(report: DiffReport, body: Mapping[str, object], code: int) -> str:
    """Return the HTML page of a report; `body` is what `--json` prints, `code` the exit code."""
    from aprfmt.cli import html_page

    fields = ("hyperparameters", "tokenizer", "metadata")
    found = {**body} | {name: _field_rows(getattr(report, name)) for name in fields}
    data = {
        "code": code,
        "command": shlex.join(["aprfmt", "diagnose", report.a, report.b]) if code == 1 else None,
        "found": found,
        "worst": [tensor.key for tensor in report.worst()],
        "images": [asdict(image) for image in report.images],
    }
    facts = {"A": report.a, "B": report.b}
    return html_page.render_html(
        "Comparison of two models", facts, data, (*html_page.REPORT, "diff.js")
    )


def _field_rows(rows: Sequence[FieldDiff]) -> list[dict[str, object]]:
    """Return differing fields as rows of the page's table, with their values cut to `LONGEST`.

    `whole` has both values uncut where the field decides the verdict, else "".
    """
    return [
        {
            **asdict(row),
            "a": _shorten(str(row.a)),
            "b": _shorten(str(row.b)),
            "whole": f"{row.name}: {row.a} | {row.b}" if row.decisive else "",
        }
        for row in rows
    ]


def _shorten(text: str) -> str:
    """Return a text of at most `LONGEST` characters; a longer one ends with "..."."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def compare_samples(
    a: Path, b: Path, nbytes: int, seed: int | None, patterns: tuple[str, ...], arch: str | None
) -> int:
    """Compare random byte ranges of two files, report what they show, and return the exit code.

    `nbytes` are the bytes read of each file. `patterns` choose tensors by name. `seed` chooses the
    ranges, None draws one.
    """
    from aprfmt.measure.sampling import sample_files

    report = sample_files(a, b, nbytes, seed=seed, tensors=patterns, arch=arch)
    command = _whole_command(report, a, b, patterns, arch)
    return render.emit(report.to_json(), report.exit_code, lambda: show_samples(report, command))


def _whole_command(
    report: "SampleReport", a: Path, b: Path, patterns: Sequence[str], arch: str | None
) -> str:
    """Return the command that compares all that a sample did not.

    If a range differs, it compares the first differing tensor alone. If digests prove all tensors
    equal, it compares keys and texts.
    """
    if report.all_settled and not patterns:
        sections = [word for name in SECTIONS if name != "tensors" for word in ("--only", name)]
        given = ("--arch", arch) if arch else ()
        return shlex.join(["aprfmt", "diff", str(a), str(b), *sections, *given])
    differ = [one.tensor for one in report.differing] + [one.tensor for one in report.unlike]
    named = differ[:1] or patterns
    words = [str(a), str(b), *(word for name in named for word in ("--tensor", name))]
    return shlex.join(["aprfmt", "diff", *words, *(("--arch", arch) if arch else ())])


def show_samples(report: "SampleReport", command: str) -> None:
    """Print the result of sampling random ranges, what it cannot show, and the next command."""
    if report.all_settled:
        render.say_verdict(report.pronounced.says, "warn")
        render.line(f"next: {render.escape(command)}", style="head")
        return
    looked, whole = render.size_text(report.bytes), render.size_text(report.of_bytes)
    render.line(
        f"{report.ranges} of {report.of_ranges} ranges, {looked} of {whole} a side "
        f"(--seed {report.seed})",
        style="head",
    )
    if report.settled:
        render.line(f"  {report.settled} tensors are equal by the digests of their files")
    # What differs, then what could not be compared, then what equality of ranges means.
    for found in report.differing[:FINDINGS]:
        render.say(f"  {found.tensor}: byte {found.byte} differs", style="bad")
    for one in report.unlike[:FINDINGS]:
        render.say(f"  {one.tensor}: {one.why}", style="bad")
    left = max(0, len(report.differing) - FINDINGS) + max(0, len(report.unlike) - FINDINGS)
    if left:
        render.line(f"  ... {left} more (--json)", style="dim")
    if report.unsampled:
        count, first = len(report.unsampled), report.unsampled[0]
        render.say(
            f"  {count} tensors have no bytes to compare ({first.tensor}: {first.why})",
            style="warn",
        )
    if report.different:
        render.say_verdict(report.pronounced.says, "bad")
        render.line(f"next: {render.escape(command)}", style="head")
        return
    if report.share is not None:
        render.line(
            f"no range differs: with 95 % confidence fewer than {report.share:.2%} of the ranges do"
        )
    render.say_verdict(report.pronounced.says, "warn")
    render.line(
        "one changed tensor, or one bit, is easily missed; diff without --sample reads everything",
        style="warn",
    )
    render.line(f"next: {render.escape(command)}", style="head")


TOP = 10  # worst tensors shown with -v
FINDINGS = 12  # causes shown
LINES = 60  # of a chat template's diff
LEFT = 8  # items shown that were not compared


def show(report: DiffReport, found: Pronounced, verbose: bool, top: int | None) -> None:
    """Print the answer in a few lines, or everything if `verbose` or `top` is given.

    `top` is the number of worst tensors to print. `found` is the verdict.
    """
    if verbose or top is not None:
        _print_everything(report, TOP if top is None else top, found)
        return
    headline = found.says, render.EXIT_STYLES[found.exit]
    lines = short_answer(
        headline,
        report.causes,
        first_said=False,
        others=list(_other_difference_lines(report)),
        commands=report.next if found.exit else (),
        source=report.a,
        names=output_format.shown_names(),
    )
    render.say_lines(lines)


def _has_float_types(row: TensorDiff) -> bool:
    """Return whether a tensor's encoding is floating-point in both files."""
    from aprfmt.measure.encoding_noise import UNIT

    return {row.encoding_a, row.encoding_b} <= UNIT.keys()


def _first_of(rows: Sequence[TensorDiff]) -> str:
    """Return the first tensor's name with its role, and how many more there are, in words."""
    name = rows[0].name_b or rows[0].name_a
    role = f" ({rows[0].key})" if name != rows[0].key else ""
    more = f", and {len(rows) - 1} more (-v)" if len(rows) > 1 else ""
    return f"{name}{role}{more}"


def _other_difference_lines(report: DiffReport) -> Iterator[Line]:
    """Yield a (text, style) line for each kind of difference that no named cause explains.

    The line names the first difference of its kind, and counts the others.
    """
    if report.other_model:
        yield f"  {report.other_model}", "bad"
    known = {role for cause in report.causes for role in cause.roles}
    known |= set(report.outside_tower)
    apart = [row for row in report.worst() if row.verdict not in (*EQUAL, "WITHIN")]
    left = [row for row in apart if row.key not in known]
    if left:
        yield f"  {left[0].verdict}: {_first_of(left)}", "bad"
    rounded = [
        row
        for row in report.worst()
        if row.verdict == "WITHIN" and _has_float_types(row) and row.key not in known
    ]
    if rounded:
        types = f"{rounded[0].encoding_a} | {rounded[0].encoding_b}"
        yield f"  WITHIN ({rounded[0].cause}, {types}): {_first_of(rounded)}", "warn"
    for title, rows in (
        ("hyperparameters", report.hyperparameters),
        ("tokenizer", report.tokenizer),
        ("metadata", report.metadata),
    ):
        counted = [
            row for row in rows if row.decisive or (title in report.asked and row.counts_if_asked)
        ]
        if counted:
            one = counted[0]
            more = f"; {len(counted) - 1} more (-v)" if len(counted) > 1 else ""
            sides = render.sides_text(one.name, one.a, one.b)
            yield f"  {title} that differ: {one.name}: {sides}{more}", "bad"
    if report.beside is not None and report.beside.text:
        yield f"  {report.beside.text}", "bad"
    for tensor in report.tensors:  # equal sides that both hold NaN or infinities
        if tensor not in apart and tensor.stats is not None and tensor.stats.nonfinite is not None:
            yield f"  {tensor.verdict}  {tensor.key}: {tensor.stats.nonfinite.text()}", "warn"
    for text in (*_derivation_lines(report.tensors), *_layout_lines(report.tensors)):
        yield text, ""


def _print_everything(report: DiffReport, top: int, found: Pronounced) -> None:
    """Print the verdict, its findings and fields, and then the `top` worst tensors.

    `found` is the verdict.
    """
    render.say_verdict(found.says, render.EXIT_STYLES[found.exit])
    _print_not_compared(found)
    for one in report.relations:
        render.say(f"  {one.side.upper()}: {one.relation.text}", style="bad")
    _print_findings((*report.contradicted, *report.findings))
    for text in (*_derivation_lines(report.tensors), *_layout_lines(report.tensors)):
        render.say(text)
    _print_fields("hyperparameters", report.hyperparameters)
    if report.beside is not None and report.beside.text:
        render.line(report.beside.text, style="bad")
    _print_fields("tokenizer", report.tokenizer)
    _print_text_differences(report)
    _print_fields("metadata", report.metadata)
    shown = [t for t in report.worst() if t.verdict not in ("SAME_BYTES", "SAME_VALUES")][:top]
    if shown:
        render.line("worst tensors", style="head")
    for tensor in shown:
        _print_tensor(tensor)
    for tensor in report.tensors:  # equal sides that both hold NaN or infinities
        if tensor not in shown and tensor.stats is not None and tensor.stats.nonfinite is not None:
            said = f"  {tensor.verdict}  {tensor.key}: {tensor.stats.nonfinite.text()}"
            render.say(said, style="warn")
    left = sum(t.verdict not in ("SAME_BYTES", "SAME_VALUES") for t in report.tensors) - len(shown)
    if left > 0:
        render.line(f"... {left} more (--top, --json)", style="dim")
    commands = report.next if found.exit else ()
    if commands:
        from aprfmt.measure.named_causes import written_again_text

        again = written_again_text(commands, report.a)
        if again:
            render.say(again, style="warn")
    for command in commands:
        if command.endswith(" -v"):
            continue  # this is what it would print
        render.say(f"next: {command}", style="head")


def _print_not_compared(found: Pronounced) -> None:
    """Print the items that could not be compared by meaning and are not equal byte for byte.

    Prints nothing for fewer than two: the verdict names a single one. `found` is the verdict.
    """
    rows = [row for row in found.not_compared if row.state != "equal"]
    if len(rows) < 2:
        return
    render.line("not compared", style="head")
    for row in render.first_rows(rows, LEFT, "  ", "more (--json)"):
        render.say(f"  {row.text}", style="warn")


def _print_findings(findings: "Sequence[Finding]") -> None:
    """Print one line for each cause that explains differing tensors."""
    for found in render.first_rows(findings, FINDINGS, "  ", "more findings"):
        sure = "" if found.certainty == "confirmed" else f" ({found.certainty})"
        many = f"{len(found.keys)} tensor{'s' if len(found.keys) > 1 else ''}"
        render.say(
            f"  {found.cause}{sure}, {many}: {found.says}",
            style="bad" if found.confirmed else "warn",
        )


def _layout_lines(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield a line for each change of layout that left values equal, with its count of tensors."""
    layouts = Counter(row.layout for row in tensors if row.layout and row.verdict in EQUAL)
    for layout, count in layouts.items():
        yield f"  same values in {count} tensors: {', '.join(layout)}"


def _derivation_lines(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield a line for each file and finding: how many tensors are requantized from the base.

    The findings are "requantized", with the kind of rounding, "do not derive" and "not known".
    """
    found: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        for one in tensor.derivations:
            text = "not known whether they derive from base"
            if one.derives is not None:
                made = f"requantized from base, {one.mode}"
                text = made if one.derives else "do not derive from base"
            found[one.side, text] = found.get((one.side, text), 0) + 1
    for (side, text), count in found.items():
        yield f"  {side.upper()}: {count} tensors {text}"


def _print_fields(title: str, rows: Sequence[FieldDiff]) -> None:
    """Print the differing fields of one section with both values; nothing where there are none."""
    if not rows:
        return
    render.line(f"{title} that differ", style="head")
    for row in rows:
        origins = f"  ({row.origin_a or '-'} | {row.origin_b or '-'})" if row.origin_a else ""
        sides = render.sides_text(row.name, row.a, row.b)
        render.say(f"  {row.name}: {sides}{origins}", style="bad" if row.decisive else "")


def _print_text_differences(report: DiffReport) -> None:
    """Print the chat templates as a unified diff, and the generation configs' differences."""
    if report.template:
        render.line("chat template", style="head")
    for text in report.template[:LINES]:
        style = {"+": "good", "-": "bad"}.get(text[:1], "")
        render.say(f"  {text}", style=style)
    if len(report.template) > LINES:
        render.line(f"  ... {len(report.template) - LINES} more lines (--json)", style="dim")
    if report.generation:
        render.line("generation config that differs", style="head")
    for row in report.generation:
        effect = f" ({row.effect})" if row.effect else ""
        sides = render.sides_text(row.name, row.a, row.b)
        render.say(f"  {row.name}: {sides}{effect}")


def _print_tensor(tensor: TensorDiff) -> None:
    """Print all that is known of one differing tensor: names, shapes, statistics, cause."""
    names = " | ".join(name or "-" for name in (tensor.name_a, tensor.name_b))
    encodings = f"{tensor.encoding_a or '-'} | {tensor.encoding_b or '-'}"
    cause = f" ({tensor.cause})" if tensor.cause else ""
    render.say(f"  {tensor.verdict}{cause}  {tensor.key}  {encodings}")
    render.say(f"      {names}", style="dim")
    # Where the sides differ in shape, layout or bytes.
    if tensor.shape_a != tensor.shape_b:
        shapes = f"{render.shape_text(tensor.shape_a)} | {render.shape_text(tensor.shape_b)}"
        render.line(f"      shape {shapes}")
    if tensor.layout:
        render.say(f"      {', '.join(tensor.layout)}")
    if tensor.first_byte is not None:
        render.line(f"      first differing byte {tensor.first_byte}")
    # By how much the values differ, and why.
    stats = tensor.stats
    if stats is not None:
        types = tensor.encoding_a, tensor.encoding_b
        at = list(stats.max_at) if stats.max_at is not None else "-"
        render.line(
            f"      {stats.changed} of {stats.count} values differ, relL2 {stats.rel_l2:.3g}, "
            f"max abs {stats.max_abs_diff:.6g} at {at}, cosine {stats.cosine:.9f}"
            + (f", {stats.ulp} ulp of {ulp_type(*types)}" if FLOATS.issuperset(types) else "")
        )
        if stats.nonfinite is not None:
            render.line(
                f"      NaN {stats.nan_a} | {stats.nan_b}, Inf {stats.inf_a} | {stats.inf_b}: "
                f"{stats.nonfinite.text()}",
                style="bad",
            )
    if tensor.explanation is not None:
        _print_explanation(tensor.explanation)
    if tensor.steps_off is not None:
        render.line(f"      at most {tensor.steps_off:.3g} steps of the coarser encoding apart")


def _print_explanation(found: "Finding") -> None:
    """Print the cause of a tensor's difference, how sure it is, and its evidence."""
    from aprfmt.measure.named_causes import share_text

    sure = found.certainty + share_text(found.share)
    after = ""
    if found.residual_after is not None:
        before = "-" if found.residual_before is None else f"{found.residual_before:.3g}"
        after = f", residual {before} to {found.residual_after:.3g}"
    render.say(f"      {sure} {found.cause}{after}")
    for sentence in found.evidence:
        render.say(f"        {sentence}")


@click.command("diff")
@options.model("a")
@options.model("b")
@options.tensor
@click.option(
    "--only",
    type=click.Choice(SECTIONS),
    multiple=True,
    help="Only these sections; every difference in them counts.",
)
@click.option("--top", type=options.WholeNumber(0), help="Show the worst N tensors (with -v: 10).")
@options.verbose("Every cause, differing field and text, the worst tensors with numbers.")
@options.accept(within=True)
@click.option(
    "--base",
    type=options.PathOrAddress(),
    metavar="SRC",
    help="The float source: say which quantized tensors derive from it byte for byte.",
)
@click.option(
    "--adapter",
    type=options.PathOrAddress(),
    metavar="DIR",
    help="Say whether B is A with this LoRA adapter merged: once, in every shard.",
)
@click.option(
    "--imatrix",
    type=options.NamedPath(),
    metavar="FILE",
    help="With --base: the importance matrix that was used.",
)
@click.option(
    "--explain/--no-explain",
    default=True,
    show_default=True,
    help="Test every differing tensor against the known causes.",
)
@click.option(
    "--sample",
    callback=options.parse_size,
    metavar="SIZE",
    help="Compare random ranges only, SIZE bytes a side; never exits 0.",
)
@click.option("--seed", type=options.WholeNumber(0), help="With --sample: the seed of another run.")
@options.budget
@options.html("Write a page: findings, map of all tensors, difference images.")
@options.arch
@options.force
@options.common_ci
def command(
    a: Path,
    b: Path,
    patterns: tuple[str, ...],
    only: tuple[str, ...],
    top: int | None,
    verbose: bool,
    accept: tuple[str, ...],
    base: Path | None,
    adapter: Path | None,
    imatrix: Path | None,
    explain: bool,
    sample: int | None,
    seed: int | None,
    budget: Budget | None,
    html: Path | None,
    arch: str | None,
    force: bool,
) -> int:
    """Compare two models in any formats, tensor by tensor, by role.

    Exit 0: equal (layout-only differences are named); 1: different, or something that can carry
    meaning is on one side only; 2: nothing differs, but something could not be compared. --sample
    exits 1 if a range differs, and 2 if none does: ranges cannot show equality.
    """
    if output_format.answer_format() in ("sarif", "junit") and (
        sample is not None or adapter is not None
    ):
        raise UsageError("--format sarif and junit list tensors: not with --sample or --adapter")
    refuse_captures(a, b, arch=arch)
    # --sample and --adapter are comparisons of their own.
    if sample is not None:
        if base or imatrix or html or only or accept or budget:
            raise UsageError("--sample compares bytes: it goes with --tensor, --seed and --arch")
        return compare_samples(a, b, sample, seed, patterns, arch)
    if adapter is not None:
        return compare_adapter(a, b, adapter, arch, accept)
    if not only and patterns:
        only = ("tensors",)
    render.STATUS.doing(f"comparing {a} and {b}")
    with render.ProgressLine("diff", then="explaining what differs") as progress:
        report = diff(
            a,
            b,
            tensors=patterns,
            only=only or None,
            budget=budget,
            arch=arch,
            base=base,
            imatrix=imatrix,
            explain=explain,
            images=0 if html is None else IMAGES,
            progress=progress,
        )
    found = report.pronounced(accept)
    code = found.exit
    for note in report.notes:
        render.warn(note, "comparison")
    body = report.to_json(accept)
    if html is not None:
        from aprfmt.cli.html_page import add_page

        add_page(body, html, force, lambda: render_page(report, body, code))
    if report.damage:
        from aprfmt.cli.damage_report import report_damage

        report_damage(report.damage)
    return render.emit(
        body,
        code,
        lambda: show(report, found, verbose, top),
        cases=lambda: _report_cases(report, body, accept, code),
    )
