"""Prints comparisons of runs, reproductions and calibrations for `aprfmt parity`."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aprfmt.cli import check_output, render, run_options

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.inference.parity.bundle import ReplayResult
    from aprfmt.inference.parity.calibrate import Calibration
    from aprfmt.inference.parity.parity_records import (
        Operation,
        Parity,
        RunDistance,
        RunFacts,
        RunPair,
    )
    from aprfmt.measure.traces import PointDiff

MOST_IDS = 64  # chosen ids printed; --json has all
_STYLES = {"same": "good", "precision": "good", "bug": "bad", "not_comparable": "warn"}


def chosen_text(ids: Sequence[int]) -> str:
    """Return the line with the token ids that were chosen, as --ids takes them."""
    said = ",".join(map(str, ids[:MOST_IDS]))
    rest = f" and {len(ids) - MOST_IDS} more (--json)" if len(ids) > MOST_IDS else ""
    return f"{len(ids)} token ids chosen: --ids {said}{rest}"


def answer(found: "Parity", chosen: bool, bundle: str | None) -> "list[Line]":
    """Return the short answer as (text, style) lines: each run's verdict, then the next command.

    `found` is the comparison of all runs. `chosen` says that aprfmt chose its token ids, which are
    then printed. `bundle` says what became of the reproduction that was asked for, or is None.
    """
    lines: list[Line] = []
    commands: list[str] = []
    if not found.pairs:
        lines.append((found.conclusion.says, "warn"))
    for pair in found.pairs:
        mine, reference = found.runs[pair.b], found.runs[pair.a]
        names = f"{run_label(mine)} against {run_label(reference)}"
        said = found.conclude_pairs(pair.verdict, [pair]).says
        lines.append((f"{said} ({names})", _STYLES[pair.verdict]))
        if pair.logits is not None:
            lines.append(
                (
                    f"  logits: relL2 {pair.logits.rel_l2:.3g}, argmax equal in "
                    f"{pair.logits.argmax:.1%} of {pair.logits.rows} rows, KL "
                    f"{pair.logits.kl_mean:.3g} nats",
                    "",
                )
            )
        lines += [
            (f"  FAIL {one.name}: {one.found}; expected {one.expected}", "bad")
            for one in pair.report.checks
            if one.outcome == "FAIL"
        ]
        lines += [(f"  {operation_text(one)}", "bad") for one in pair.operations if one.wrong]
        if pair.diff.first_token is not None:
            lines.append((f"  {pair.diff.first_token.text}", "bad"))
        # The next command traces both sides of the first run that is wrong.
        if pair.verdict == "bug":
            ids = ",".join(map(str, found.ids))
            run, other = (
                shlex.quote(f"{found.model}@{one.requested}") for one in (mine, reference)
            )
            commands.append(f"aprfmt trace {run} --payload --ids {ids} --reference {other}")
    if not commands and found.conclusion.exit == 2:
        commands.append(_undecided_command(found, chosen))
    lines += [(text, "") for text in distance_texts(found)]
    if bundle is not None:
        lines.append((bundle, ""))
    if chosen:
        lines.append((chosen_text(found.ids), ""))
    return [*lines, *((f"next: {text}", "head") for text in commands[:1])]


def _undecided_command(found: "Parity", chosen: bool) -> str:
    """Return the command to run next if no difference was found but something was not compared.

    If a budget left out runs, it is the same comparison without the budget; else it is
    `aprfmt inspect MODEL --account`. `chosen`: aprfmt chose the token ids, and will again.
    """
    from aprfmt.model.ledger import LATE

    model = shlex.quote(found.model)
    late = [row.name for row in found.left if row.state == LATE and row.kind == "run"]
    if not late:
        return f"aprfmt inspect {model} --account"
    made = [one.requested for one in found.runs]
    runs = " ".join(map(shlex.quote, made if found.pairs else [*made, *late]))
    ids = "" if chosen else f" --ids {','.join(map(str, found.ids))}"
    return f"aprfmt parity {model} --between {runs}{ids}"


def warn_of_unknown_points(found: "Parity") -> None:
    """Warn of what the runs recorded that is no point of this architecture."""
    for run in found.runs:
        for key, why in list((run.unknown or {}).items())[:4]:
            render.warn(f"{run.ran}: {key}: {why}", "unknown_point")


def show_answer(found: "Parity", chosen: bool, bundle: str | None) -> None:
    """Print the short answer, in at most 12 lines; the arguments are those of `answer`."""
    warn_of_unknown_points(found)
    *lines, last = answer(found, chosen, bundle)
    rest: Line = ("points, operations, losses and checks: -v", "dim")
    end = [last, rest] if not last[0].startswith("next: ") else [rest, last]
    render.say_lines(render.shorten_answer([*lines, *end], "-v, --json"))


def show(found: "Parity", show_all: bool) -> None:
    """Print the runs, a table for each pair, and the verdicts; `show_all` prints all points.

    `found` is the comparison of all runs.
    """
    weights = f", weights through {found.through} and back" if found.through else ""
    what = f"{found.architecture}, {found.weights_class} weights{weights}"
    render.say(f"{found.model} ({what}), {len(found.ids)} tokens", style="head")
    for index, run in enumerate(found.runs):
        via = f", {run.via}" if run.via else ""
        name = "reference" if index == 0 else f"run {index}"
        render.say(f"  {name}: {run_label(run)} ({run.points} points{via})")
    warn_of_unknown_points(found)
    for pair in found.pairs:
        show_pair(found, pair, show_all)
    if not found.pairs:
        render.say_verdict(found.conclusion.says, "warn")
    for text in distance_texts(found):
        render.say(text)


def run_label(run: "RunFacts") -> str:
    """Return the run as the user named it, with what ran in parentheses if that differs."""
    return str(run.ran) if run.requested == run.ran else f"{run.requested} ({run.ran})"


def show_pair(found: "Parity", pair: "RunPair", show_all: bool) -> None:
    """Print one run against the reference: points, operations run alone, checks, verdict.

    Without `show_all` only the worst of each kind of point are printed. `found` is the comparison
    of all runs.
    """
    names = f"{run_label(found.runs[pair.b])} against {run_label(found.runs[pair.a])}"
    from aprfmt.measure.tolerances import MAX_FACTOR, MAX_UNIT, UNIT

    render.line()
    render.say(names, style="head")
    # The table of points, with the reason for each tolerance.
    points = pair.diff.points if show_all else worst_points(pair.diff.points)
    rows = []
    for point in points:
        if point.why:
            rows.append((point.key, "-", "-", "-", "not comparable", point.why))
            continue
        verdict = "BEYOND" if point.beyond else "equal" if point.bits else "within"
        rows.append(
            (
                point.key,
                f"{point.rel_l2:.3g}",
                f"{point.max_over_rms:.3g}",
                f"{point.tolerance:.3g}",
                verdict,
                point.reason,
            )
        )
    render.table(
        rows, ("point", "relL2", "max/rms", "tolerance", "verdict", "why this tolerance"), "lrrrll"
    )
    render.line(
        f"tolerance: {UNIT}; max/rms ({MAX_UNIT}) may be {MAX_FACTOR:g} times that", style="dim"
    )
    if not show_all:
        render.line(
            "the worst of each kind of point, and all beyond; --all prints every one", style="dim"
        )
    # Then what the difference does: tokens, logits, losses, and the operation at fault.
    if pair.diff.first_token is not None:
        render.say(pair.diff.first_token.text, style="bad")
    run_options.show_nonfinite(pair.diff.points, "this run")
    show_outcomes(pair)
    for operation in pair.operations:
        render.say(operation_text(operation), style="bad" if operation.wrong else "")
    check_output.show_checks(pair.report.checks)
    render.say(found.conclude_pairs(pair.verdict, [pair]).says, style=_STYLES[pair.verdict])


def worst_points(points: "Sequence[PointDiff]") -> "list[PointDiff]":
    """Return the points with the largest relL2 of each kind, and those beyond their tolerance.

    They are in execution order, at most 20 beyond, and include all that cannot be compared.
    """
    largest: dict[str, tuple[float, str]] = {}
    for point in points:
        name = point.key.rpartition(".")[2]
        if point.rel_l2 is not None and point.rel_l2 > largest.get(name, (-1.0, ""))[0]:
            largest[name] = point.rel_l2, point.key
    keys = {key for _, key in largest.values()}
    beyond = [point.key for point in points if point.beyond][:20]
    return [p for p in points if p.key in keys or p.key in beyond or p.why]


def show_outcomes(pair: "RunPair") -> None:
    """Print the distances of logits, losses and chosen experts between two runs."""
    logits = pair.logits
    if logits is not None:
        render.line(
            f"logits: relL2 {logits.rel_l2:.3g}, max {logits.max_abs:.3g}, argmax equal "
            f"{logits.argmax:.1%} of {logits.rows} rows, top {logits.k} {logits.top_k:.1%}, "
            f"KL {logits.kl_mean:.3g} nats (largest {logits.kl_max:.3g})"
        )
        for flip in logits.flips[:5]:
            word = "within rounding" if flip.explained else "beyond rounding"
            render.line(
                f"  position {flip.position}: {flip.a} (by {flip.margin_a:.3g}) became {flip.b} "
                f"(by {flip.margin_b:.3g}); a logit moved {flip.largest:.3g} there, {word}"
            )
    # Losses of the reference, of this forward pass, and by this run's own arithmetic.
    losses = pair.losses
    if losses.reference is not None and losses.forward is not None:
        own = losses.why
        if losses.own is not None:
            own = f"{losses.own:.6f} (a label {losses.own_off:.3g} off, {losses.own_bound:.3g} may)"
        render.line(
            f"loss in nats: reference {losses.reference:.6f}, other forward {losses.forward:.6f} "
            f"({losses.forward - losses.reference:+.3g}), its own loss {own}"
        )
    for token in pair.experts[:8]:
        word = "within rounding" if token.explained else "beyond rounding"
        gap = "not known" if token.gap is None else f"{token.gap:.3g}"
        render.line(
            f"{token.key}, position {token.position}: experts {list(token.gone)} became "
            f"{list(token.came)}; margin {gap}, {word}"
        )


def operation_text(operation: "Operation") -> str:
    """Return the error, bound and verdict of an operation that ran alone in both runs, as text."""
    how = "the other run's inputs through the reference" if operation.shadow else "equal inputs"
    word = "wrong" if operation.wrong else "agrees"
    gain = "" if operation.gain is None else f"; output over input {operation.gain:.3g}"
    return (
        f"operation {operation.key} alone, {how} ({', '.join(operation.inputs)}): relL2 "
        f"{operation.residual:.3g}, rounding {operation.bound:.3g}: {word}{gain}"
    )


def distance_texts(found: "Parity") -> list[str]:
    """Return how far runs are from the float64 arbiter and from the weights before quantization."""
    texts = []
    if found.noise is not None:
        texts.append(distance_text(found.noise, "the reference"))
    return texts + [distance_text(one, run_label(found.runs[one.of])) for one in found.arbiter]


def distance_text(distance: "RunDistance", name: str) -> str:
    """Return how far a run is from the arbiter, or from the weights before quantization.

    `name` is what the run is called.
    """
    known = {key: value for key, value in distance.rel_l2.items() if value == value}
    at = "no point could be compared"
    if known:
        key = max(known, key=known.__getitem__)
        at = f"largest relL2 {known[key]:.3g} at {key}"
    loss = "" if distance.ce is None else f", loss {distance.ce:+.3g} nats"
    end = known.get("logits")
    return (
        f"{name} from {distance.what}: {at}" + ("" if end is None else f", logits {end:.3g}") + loss
    )


def show_replay(found: "ReplayResult") -> None:
    """Print whether two runs still differ in an operation that was computed again, and by how much.

    A run whose result is now another one than it recorded is named with that difference.
    """
    render.say(f"{found.key}: {found.runs[1]} against {found.runs[0]}", style="head")
    render.line(
        f"  apart now {found.distance:.3g}, recorded {found.recorded:.3g}, rounding "
        f"{found.bound:.3g}; largest {found.largest:.3g} at {list(found.at)}"
    )
    moved = [("reference", found.reference), ("other run", found.other)]
    for name, value in moved:
        if value:
            render.line(f"  the {name} gives another result than recorded: relL2 {value:.3g}")
    word = "reproduced: the operation is wrong" if found.reproduced else "not reproduced"
    render.line(word, style="bad" if found.reproduced else "good")


def show_calibration(found: "Calibration", written: str | None) -> None:
    """Print measured tolerances with the number of values compared; `written` is their file."""
    rows = [
        (
            "/".join(row.pair),
            row.weights,
            row.point,
            row.dtype,
            f"{row.rel_l2:.3g}",
            f"{row.max_over_rms:.3g}",
            f"{row.largest:.3g}",
            row.runs,
        )
        for row in found.rows
    ]
    render.table(
        rows,
        ("pair", "weights", "point", "dtype", "relL2", "max/rms", "largest seen", "compared"),
        "llllrrrr",
    )
    for text in found.beyond[:8]:
        render.say(f"beyond what a tolerance may excuse: {text}", style="bad")
    if written:
        render.say(f"wrote {written}")
