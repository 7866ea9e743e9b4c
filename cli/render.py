"""Prints results to a terminal, a pipe or as JSON; all text from files is escaped here."""

import json
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aprfmt.base.protocols import Note
from aprfmt.base.text_escape import LONGEST, guard_text, shorten, shorten_names
from aprfmt.base.text_escape import escape as escape_text
from aprfmt.cli import output_format
from aprfmt.cli.commands import COMMANDS

if TYPE_CHECKING:
    from aprfmt.base.inner_keys import InnerKey
    from aprfmt.cli.ci_reports import ReportCase
    from aprfmt.compare.short_answer import Line

LONGEST_LINE = 1000  # characters of a line; of a longer one the middle is left out
WIDEST = 60  # characters of a field's value in a line for people
MOST_INNER = 4  # inner keys of a field that are shown in a line for people
EXIT_STYLES = {0: "good", 1: "bad", 2: "warn"}  # style of a verdict by its exit code

T = TypeVar("T")


def envelope(command: str, exit_code: int, body: Mapping[str, object]) -> dict[str, object]:
    """Return the object that every `--json` prints: schema, command, ok, exit, then `body`."""
    from aprfmt.schemas import schema_number

    return {
        "schema": f"aprfmt.{command}/{schema_number(command)}",
        "command": command,
        "ok": exit_code == 0,
        "exit": exit_code,
        **body,
        **traffic_record(),
    }


def traffic_record() -> dict[str, object]:
    """Return {"remote": what was fetched over the network}; {} if nothing was."""
    loaded = sys.modules.get("aprfmt.remote.traffic")  # nothing is imported for a local file
    if loaded is None or not (loaded.TRAFFIC.requests or loaded.TRAFFIC.cached):
        return {}
    return {"remote": loaded.TRAFFIC.facts()}


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on a line; NaN and infinities become strings, all else is ASCII."""
    sys.stdout.write(json.dumps(to_plain_json(value), ensure_ascii=True) + "\n")


def to_plain_json(value: object) -> object:
    """Return a value as plain JSON data; NaN and infinities become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): to_plain_json(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Iterable):
        return [to_plain_json(item) for item in value]
    return str(value)


def is_flag_set(flag: str) -> bool:
    """Return whether the running command was given a flag of `options.common`, such as quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(f"{__name__}.{flag}"))


def note_flag(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Store a flag of `options.common` for `is_flag_set`; click calls it with the value."""
    context.meta[f"{__name__}.{option.name}"] = value


def this_command(*more: str) -> str:
    """Return the running command as it was given, with the words `more` after it, for a shell."""
    context = click.get_current_context(silent=True)
    given = () if context is None else context.find_root().obj or ()
    return shlex.join(["aprfmt", *given, *more])


_NEXT = "next: "
_COMMANDS_SAID: set[str] = set()  # lines with the next commands that were printed


def emit(
    body: Mapping[str, object],
    exit_code: int = 0,
    show: Callable[[], None] | None = None,
    written: bool = False,
    cases: "Callable[[], Sequence[ReportCase]] | None" = None,
    answer: "Callable[[], Sequence[Line]] | None" = None,
) -> int:
    """Print a command's result in the form asked for, and return `exit_code`.

    `body` is the JSON, and `show` prints it for people. `cases` are what `--format sarif` and
    `junit` print, for a command that has them. `answer` returns the lines of the form for agents,
    where `show` prints more than these; next commands are added to both forms where the answer is
    no. `written` marks a result that only reports what was written, which --quiet leaves out.
    Raises RemoteError where a file changed while it was read.
    """
    STATUS.end()
    if (fetched := sys.modules.get("aprfmt.remote.remote_file")) is not None:
        fetched.refuse_changed()
    form = output_format.answer_format()
    if cases is not None and form in ("sarif", "junit"):
        context = click.get_current_context()
        every = cases()
        print_cases(form, context.info_name or "", every, exit_code)
        if exit_code and not is_flag_set("quiet"):
            say_first_failure(every)
    elif form == "json":
        command = click.get_current_context().info_name or ""
        print_json(envelope(command, exit_code, body))
    elif written and is_flag_set("quiet"):
        pass
    elif form == "agent" and answer is not None:
        say_lines(shorten_answer(answer()))
    elif show is not None:
        _COMMANDS_SAID.clear()
        show()
        for text, style in answer() if answer is not None and exit_code else ():
            if text.startswith(_NEXT) and text not in _COMMANDS_SAID:
                say(text, style=style)
    if not is_flag_set("quiet"):
        for text in remote_notices():
            click.echo(escape(text), err=True)
    return exit_code


def shorten_answer(
    lines: "Sequence[Line]", rest: str = "--format human, --json", kept: int = 0
) -> "Sequence[Line]":
    """Return at most 12 lines: the first ones, a count of those left out, the last command.

    `rest` names the options that print the lines left out. `kept` lines at the end always stay.
    """
    if len(lines) <= output_format.LINES:
        return lines
    end = [row for row in lines[-2:] if row[0].startswith("next: ")]
    end = list(lines[-kept:]) if kept > len(end) else end
    most = output_format.LINES - 1 - len(end)
    left = len(lines) - most - len(end)
    return [*lines[:most], (f"... {left} more lines ({rest})", "dim"), *end]


def print_cases(form: str, command: str, cases: "Sequence[ReportCase]", exit_code: int) -> None:
    """Print report cases as SARIF (one JSON object) or as JUnit XML; `form` says which."""
    from aprfmt.cli.ci_reports import junit_xml, sarif_log

    if form == "sarif":
        print_json(sarif_log(command, cases, exit_code))
    else:
        click.echo(junit_xml(command, cases))


def say_first_failure(cases: "Sequence[ReportCase]") -> None:
    """Print on stderr the first case that failed, and how many more did; nothing without one.

    A CI job's log shows stderr, while the report on stdout often goes to a file.
    """
    from aprfmt.cli.ci_reports import DAMAGED

    found = [case for case in cases if case.level in ("fail", "error")]
    if not found or found[0].check == DAMAGED:  # which `report_damage` has said
        return
    first, *rest = [case for case in found if case.check != "verdict"] or found
    more = f" (and {len(rest)} more)" if rest else ""
    parts = (first.file, first.check, first.place, first.text)
    click.echo(f"aprfmt: {escape(': '.join(filter(None, parts)))}{more}", err=True)


def remote_notices() -> Iterable[str]:
    """Yield lines about remote files: copies read instead, sites that prove no version, traffic."""
    loaded = sys.modules.get("aprfmt.remote.traffic")
    yield from loaded.TRAFFIC.told if loaded is not None else ()
    if (fetched := sys.modules.get("aprfmt.remote.remote_file")) is not None:
        yield from fetched.unproven_sites()
    if loaded is not None and traffic_record():
        remote = loaded.TRAFFIC.facts()
        kept = remote["cached_bytes"]
        cached = f", {size_text(kept)} from the cache" if kept else ""
        count = f"{remote['requests']} request{'s' * (remote['requests'] != 1)}"
        yield f"remote: {count}, {size_text(remote['bytes'])}, {remote['seconds']:.1f} s{cached}"


def line(text: str = "", *, style: str = "") -> None:
    """Print a line whose file texts are already escaped; it has a style on a terminal only.

    Characters that could control a terminal are replaced once more.
    """
    text = guard_text(text)
    STATUS.clear()
    click.echo(click.style(text, **STYLES[style]) if style and colours() else text)


def say(text: str, *, style: str = "") -> None:
    """Print a line that may hold text of files; all of it is escaped, and long names shortened."""
    if text.startswith(_NEXT):
        _COMMANDS_SAID.add(text)
    line(escape(text), style=style)


def say_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Print (text, style) lines that may hold text of files, escaped, with long names shortened."""
    for text, style in lines:
        say(text, style=style)


# Commands whose answer is what a file holds: text, values, names.
_WHOLE = ("cat", "explain", "hash", "hex", "run", "template", "tensors", "tokenize")
_COMMAND = re.compile(rf"\baprfmt (?:{'|'.join(sorted(COMMANDS))}) ")


def fit_names(text: str) -> str:
    """Return a line with names of hundreds of characters shortened, not yet escaped.

    The line itself is at most LONGEST_LINE long: a name with blanks in it is not seen as one. A
    command in it stays whole, and so does everything with -v, and where the answer is what a file
    holds.
    """
    if len(text) <= LONGEST:
        return text
    context = click.get_current_context(silent=True)
    if context is not None and (context.params.get("verbose") or context.info_name in _WHOLE):
        return text
    found = _COMMAND.search(text)
    end = len(text) if found is None else found.start()
    return shorten(shorten_names(text[:end]), LONGEST_LINE) + text[end:]


def escape(text: str, limit: int | None = None) -> str:
    """Return text of files as a line shows it: names shortened, and whatever is unsafe escaped.

    With `limit`, at most that many characters.
    """
    return escape_text(fit_names(text), limit)


STYLES: dict[str, dict[str, Any]] = {
    "bad": {"fg": "red", "bold": True},
    "warn": {"fg": "yellow"},
    "good": {"fg": "green"},
    "dim": {"dim": True},
    "head": {"bold": True},
}


def colours() -> bool:
    """Return whether to print with styles: a terminal, no NO_COLOR, and not for an agent."""
    terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return terminal and output_format.answer_format() != "agent"


def progress_wanted() -> bool:
    """Return whether to show progress on stderr: a terminal, no --quiet, and not for an agent."""
    return (
        sys.stderr.isatty()
        and not is_flag_set("quiet")
        and output_format.answer_format() != "agent"
    )


def warn(text: str, key: str) -> None:
    """Print a warning on stderr, once a run; `key` is its name for `aprfmt explain`."""
    context = click.get_current_context(silent=True)
    said: set[str] = (
        set() if context is None else context.meta.setdefault(f"{__name__}.said", set())
    )
    if text not in said:
        said.add(text)
        STATUS.clear()
        click.echo(f"warning: {escape(text)} (aprfmt explain {key})", err=True)


def warn_note(note: Note) -> None:
    """Print a note of opening or converting a file as a warning, with the place it is about."""
    warn(f"{note.where}: {note.text}", note.key)


def number_text(value: float | None, form: str = ".3g") -> str:
    """Return a number as the text of a table cell, formatted by `form`; "-" for None."""
    return "-" if value is None else format(value, form)


def table(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str],
    alignments: str = "",
    styles: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Print aligned columns; `alignments` has an `r` for each right-aligned column (`l` else).

    `styles` is {row number: style}. A terminal gets rules and folded cells.
    """
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    alignment = alignments.ljust(len(headers), "l")
    if colours():
        from aprfmt.cli import terminal

        STATUS.clear()
        terminal.print_table(headers, cells, alignment, styles)
        return
    widths = [
        max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)
    ]

    def row_text(row: Sequence[str]) -> str:
        """Return a table row as one line of cells padded to the columns' widths."""
        parts = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, alignment, strict=True)
        ]
        return "  ".join(parts).rstrip()

    line(row_text(list(headers)), style="head")
    for number, row in enumerate(cells):
        line(row_text(row), style=styles.get(number, ""))


def say_verdict(text: str, style: str) -> None:
    """Print the sentence of a verdict; a terminal shows it in a frame."""
    if not colours():
        say(text, style=style)
        return
    from aprfmt.cli import terminal

    STATUS.clear()
    terminal.print_panel(escape(text), style)


def first_rows(rows: Sequence[T], count: int, indent: str = "", what: str = "more") -> Iterator[T]:
    """Yield the first `count` rows of a list, and then print a line with the number of the others.

    In the form for agents all rows are yielded: there a list is only shown if it was asked for. The
    line is `indent`, the number, and `what`.
    """
    if output_format.answer_format() == "agent":
        count = len(rows)
    yield from rows[:count]
    if len(rows) > count:
        line(f"{indent}... {len(rows) - count} {what} (--json)", style="dim")


def print_pairs(rows: Iterable[tuple[str, object]]) -> None:
    """Print an indented line `name  value` for each pair, with names padded to one width."""
    listed = [(escape(name), escape(str(value))) for name, value in rows]
    width = max((len(name) for name, _ in listed), default=0)
    STATUS.clear()
    for name, value in listed:
        click.echo(f"  {name.ljust(width)}  {value}")


def size_text(count: int) -> str:
    """Return a byte count for people, such as `1.2 GB` (powers of 1000)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def field_text(name: str, value: object) -> str:
    """Return a field's value cut to one line, with the name of its number (a file type, say)."""
    from aprfmt.base.metadata_values import number_name

    if value is None:
        return "-"
    text, called = str(value), number_name(name, value)
    if len(text) > WIDEST and output_format.answer_format() != "agent":
        text = text[: WIDEST - 3] + "..."
    return text + (f" = {called}" if called else "")


def sides_text(name: str, a: object, b: object) -> str:
    """Return A's and B's values of a field in one line, "A | B"; of two objects only what differs.

    Of two objects the inner keys that differ are shown, the first MOST_INNER of them, and the
    others are counted.
    """
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or a == b:
        return f"{field_text(name, a)} | {field_text(name, b)}"

    from aprfmt.base.inner_keys import differing_inner_keys

    apart = list(differing_inner_keys(a, b))
    whole = len(apart) <= MOST_INNER or output_format.answer_format() == "agent"
    shown = apart if whole else apart[:MOST_INNER]
    more = "" if whole else f", {len(apart) - len(shown)} more (--json)"
    return ", ".join(map(_inner_key_text, shown)) + more


def _inner_key_text(one: "InnerKey") -> str:
    """Return one differing inner key with A's and B's values: "eos_token_id: [1535, 0] | 0"."""
    null = one.a is None and one.b is None  # one side states it, and the other has no such key
    sides = (
        "null" if null and stated else field_text(one.path, value)
        for value, stated in ((one.a, one.in_a), (one.b, one.in_b))
    )
    return f"{one.path}: {' | '.join(sides)}"


def quote_token(piece: str) -> str:
    """Return a token's text escaped and in quotes, so that its spaces are seen."""
    return escape(f'"{piece}"')


def count_text(count: int) -> str:
    """Return a number of parameters for people, such as `268.1 M`."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return str(count)


def shape_text(shape: Sequence[int] | None) -> str:
    """Return a shape as `[896, 4864]`, "-" for None."""
    return "-" if shape is None else f"[{', '.join(map(str, shape))}]"


def progress_text(done: int, total: int, seconds: float, unit: str) -> str:
    """Return ` 45 %, 1.3 GB of 3.0 GB, 250.0 MB/s, 7 s left`; sizes only if `unit` is "bytes".

    `done` and `total` are in `unit`.
    """
    parts = [f"{100 * done // total if total else 100:3d} %"]
    rate = done / seconds if seconds > 0 else 0.0
    if unit == "bytes":
        parts += [f"{size_text(done)} of {size_text(total)}", f"{size_text(int(rate))}/s"]
    if rate and done < total:
        parts.append(f"{duration_text((total - done) / rate)} left")
    return ", ".join(parts)


def duration_text(seconds: float) -> str:
    """Return a time for people, such as `7 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class StatusLine:
    """The line on a terminal's stderr that says what a command is doing.

    Its own thread writes it, so that it is shown whatever the command waits for. A caller that
    prints has to erase it first (`clear`), or end it for good (`end`). Nothing is written in a
    pipe.
    """

    DELAY = 0.3  # seconds before it is first written: a quick command shows nothing
    EVERY = 1.0  # seconds between two times

    def __init__(self) -> None:
        """Start without a line: nothing is shown until `begin`."""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._ended.set()
        self._what = self._text = ""
        self._shown = 0  # characters of the line on the terminal now
        self._counted = ""  # what was written of a part that is done, which says more
        self._wrote = 0.0  # when, in seconds of time.monotonic

    def begin(self, what: str, doing: str) -> None:
        """Show the line "WHAT: DOING" with the time taken, until `end` is called.

        It appears after DELAY seconds. WHAT is the command, DOING what it does.
        """
        if not progress_wanted():
            return
        self._what, self._text, self._counted = what, f"{what}: {doing}", ""
        self._ended = threading.Event()
        arguments = self._ended, time.monotonic()
        threading.Thread(
            target=self._write_periodically, args=arguments, name="status", daemon=True
        ).start()

    def doing(self, text: str) -> None:
        """Set the text on what the command is doing; no effect after `end`."""
        with self._lock:
            if not self._ended.is_set():
                self._text, self._counted = f"{self._what}: {text}", ""

    def counts(self, text: str, now: float) -> None:
        """Write a progress text over the line; it stays until `counted` or `doing`.

        If no other text follows for EVERY seconds, the thread adds the time. `now` is in seconds of
        time.monotonic.
        """
        with self._lock:
            self._counted, self._wrote = text, now
            self._write(text)

    def counted(self) -> None:
        """Show again what the command is doing, in place of the progress: all of it is done."""
        with self._lock:
            self._counted = ""

    def clear(self) -> None:
        """Erase the line; its thread may write it again."""
        with self._lock:
            if self._shown:
                sys.stderr.write("\r" + " " * self._shown + "\r")
                sys.stderr.flush()
                self._shown = 0

    def end(self) -> None:
        """Erase the line and stop writing it."""
        with self._lock:
            self._ended.set()
            self.clear()

    def _write_periodically(self, ended: threading.Event, began: float) -> None:
        """Write the line with the time taken, repeatedly, until `ended` is set.

        `began` is in seconds of time.monotonic. Nothing is written while progress is shown.
        """
        pause = self.DELAY
        while not ended.wait(pause):
            pause = self.EVERY
            with self._lock:
                now = time.monotonic()
                took = duration_text(now - began)
                if ended.is_set():
                    return
                if not self._counted:
                    after = f", {took}" if now - began >= 1 else ""
                    self._write(f"{escape(self._text)}{after}")
                elif now - self._wrote >= self.EVERY:
                    self._write(self._counted.replace(" ", f" {took} ", 1))  # before the bar

    def _write(self, text: str) -> None:
        """Write a text over the line, cut to the terminal's width."""
        width, room = len(click.unstyle(text)), max(20, shutil.get_terminal_size().columns - 1)
        if width > room:
            text = click.unstyle(text)[:room]
        width = min(width, room)
        sys.stderr.write(f"\r{text}{' ' * (self._shown - width)}")
        sys.stderr.flush()
        self._shown = width


STATUS = StatusLine()


@contextmanager
def status_line(context: click.Context) -> Iterator[None]:
    """Show a status line on a terminal while the `with` of a command runs."""
    given = [
        context.params.get(parameter.name or "")
        for parameter in context.command.params
        if isinstance(parameter, click.Argument)
    ]
    names = [str(value) for value in given if isinstance(value, (str, os.PathLike))]
    STATUS.begin(context.info_name or "", f"reading {', '.join(names)}" if names else "at work")
    try:
        yield
    finally:
        STATUS.end()


class ProgressLine:
    """Callback (done, total) that shows progress on stderr, on a terminal, after a second."""

    def __init__(self, what: str, unit: str = "", then: str = "") -> None:
        """Start the clock; `what` names the work, and with the unit "bytes" sizes are shown.

        `then` says what the command does after that.
        """
        self._what, self._unit, self._then = what, unit, then
        self._on = progress_wanted()
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Show the share that is done, the time left, and with the unit "bytes" sizes and rate.

        `doing` names what is done now. It writes at most ten times a second.
        """
        if not self._on:
            return
        now, last = time.monotonic(), done >= total
        if now - self._began >= 1 and (last or now - self._last >= 0.1):
            self._show(done, total, now, f", {doing}" if doing else "")
        if last:
            if self._then:
                STATUS.doing(self._then)
            STATUS.counted()

    def _show(self, done: int, total: int, now: float, after: str) -> None:
        """Write the line, then `after`; `now` is in seconds of time.monotonic."""
        self._last = now
        from aprfmt.cli import terminal

        said = progress_text(done, total, now - self._began, self._unit)
        drawn = terminal.draw_bar(
            done,
            total,
            colour=not os.environ.get("NO_COLOR"),
            encoding=getattr(sys.stderr, "encoding", None) or "utf-8",
        )
        STATUS.counts(f"{self._what} {drawn} {said}{after}", now)

    def say(self, text: str) -> None:
        """Print a line that stays, on a terminal only."""
        if self._on:
            self.close()
            sys.stderr.write(f"{self._what}: {text}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Erase the line of progress."""
        if self._on:
            STATUS.clear()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
