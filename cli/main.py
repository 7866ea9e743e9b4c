"""The command line: imports the one command that is asked for, turns errors into exit codes."""

import os
import re
import sys
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from aprfmt.base.registry import installed_entry_points
from aprfmt.base.streams import fill_closed_streams, spell_missing
from aprfmt.base.text_escape import escape
from aprfmt.cli.commands import COMMANDS, GROUPS
from aprfmt.errors import AprfmtError, BackendUnavailableError, FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.base.protocols import Note

SIGNALLED = (129, 143)  # SIGHUP, SIGTERM: what `install_signal_handlers` exits with
INTERRUPTED = (
    "aprfmt: interrupted: unfinished output was removed; files that were there are as they were"
)
STOPPED = "aprfmt: interrupted: what is written stays; the same command goes on with it"
# click's words for a number that is none.
_PLAINER = {
    "is not a valid integer range": "is no whole number",
    "is not a valid integer": "is no whole number",
    "is not a valid float range": "is no number",
    "is not a valid float": "is no number",
}  # fmt: skip
_PATH = re.compile(r"[./\\]")


class LazyGroup(click.Group):
    """A click group whose commands are modules, each imported when it is asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments left to parse; without any, print the help and exit with 2.

        `help [COMMAND]` and `version` are read as the options --help and --version.
        """
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit(2)
        if args and args[0] == "help":
            args = [*args[1:2], "--help"]
        elif args and args[0] == "version":
            args = ["--version"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in the order of the table of commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command, imported; aprfmt's or another package's; None if there is none.

        Installs the signal handlers and the listeners of notices first.
        """
        offered = None if cmd_name in COMMANDS else plugin_command(cmd_name)
        if cmd_name not in COMMANDS and offered is None:
            return None
        from aprfmt.formats.cleanup import install_signal_handlers
        from aprfmt.formats.notices import set_listener
        from aprfmt.formats.truncation import exit_on_truncation

        set_listener(_print_notice)
        install_signal_handlers()  # SIGTERM must leave no half-written file
        args = ctx.find_root().obj
        if args is not None:  # not while a shell asks for completions
            exit_on_truncation(lambda text: _print_error(args, "format", text, FormatError(text)))
        if offered is not None:
            return offered
        row = COMMANDS[cmd_name]
        command: click.Command = import_module(f"aprfmt.cli.{row.module}").command
        if row.example not in (command.epilog or ""):
            command.epilog = f"{command.epilog or ''}\n\b\nExample:\n  {row.example}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (name, command, its arguments); a path or URL in place of a command is inspected.

        Raises click's UsageError with near names for any other word.
        """
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            if is_implied_inspect(args):
                return super().resolve_command(ctx, ["inspect", *args])
            if plugin_command(args[0]) is not None:
                return super().resolve_command(ctx, args)
            known = [*COMMANDS, *(point.name for point in installed_entry_points("commands"))]
            near = get_close_matches(args[0], known, 3)
            names = f"near names: {', '.join(near)}" if near else "aprfmt --help lists them"
            raise click.UsageError(f"no command {args[0]!r}; {names}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of commands to the help without importing any command."""
        for title, rows in GROUPS.items():
            with formatter.section(title):
                width = max(map(len, COMMANDS))
                formatter.write_dl([(f"{name:{width}}", row.summary) for name, row in rows.items()])


def plugin_command(name: str) -> click.Command | None:
    """Return the command that another package offers as `name`; None if no package does.

    Packages offer commands in the entry-point group `aprfmt.commands`. They are searched only where
    `name` is none of aprfmt's. Raises BackendUnavailableError where the package cannot be imported,
    UsageError where what it offers is no command of click.
    """
    point = next((each for each in installed_entry_points("commands") if each.name == name), None)
    if point is None:
        return None
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"command {name!r} ({point.value}): cannot be imported: {error}; install the package "
            "that offers it again"
        ) from None
    if not isinstance(found, click.Command):
        raise UsageError(
            f"command {name!r} ({point.value}): is {type(found).__name__}; expected a click.Command"
        )
    return found


def _print_notice(note: "Note") -> None:
    """Print a notice of the library as a warning."""
    from aprfmt.cli.render import warn_note

    warn_note(note)


def is_implied_inspect(args: list[str]) -> bool:
    """Return whether the arguments begin with a path or URL in place of a command.

    Such a path is inspected. A word with a dot or a slash is a path though no file is there:
    `inspect` then names near files.
    """
    if not args or args[0] in COMMANDS or args[0].startswith("-"):
        return False
    return not args[0] or bool(_PATH.search(args[0])) or os.path.exists(args[0])


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the version line and exit with 0, if --version was given."""
    if not value or ctx.resilient_parsing:
        return
    from aprfmt.cli.doctor import version_line

    click.echo(version_line())
    ctx.exit(0)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version, extras and kernels.",
)
def group() -> None:
    """Work on model files that are wrong: APR v2, GGUF, safetensors.

    Exit codes: 0 done, equal, passed; 1 the answer is no; 2 it could not be done.

    `aprfmt COMMAND --help` ends with an example; `aprfmt FILE` inspects a file.
    `aprfmt demo --into FOLDER` writes a small model to try them on.
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line with `argv` (default: sys.argv) and exit with the command's code.

    It always ends by SystemExit. Every error ends here as one line on stderr and an exit code: 2,
    130 when interrupted, 141 for a closed pipe.
    """
    args = sys.argv[1:] if argv is None else argv
    unheard = fill_closed_streams()
    spell_missing(sys.stdout, sys.stderr)
    try:
        if unheard:
            raise UsageError("standard output is closed; send it somewhere: > FILE, > /dev/null")
        code = group.main(args=args, prog_name="aprfmt", standalone_mode=False, obj=args)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as stop:
        # Outside standalone mode click, like rich, exits by itself for one reason only: a closed
        # pipe; and then with 1, which here means "the answer is no". Our signal handlers exit too.
        code = 141
        if isinstance(stop, SystemExit) and stop.code in SIGNALLED:
            raise
        _drop_stdout()
    except (KeyboardInterrupt, click.Abort):
        code = 130
        click.echo(STOPPED if "--resume" in args else INTERRUPTED, err=True)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        code = _print_error(args, "usage", _usage_line(error), error)
    except Exception as error:
        code = _report_error(args, error)
    raise SystemExit(code or 0)


MOST = 4  # commands that one error names


def _usage_line(error: click.ClickException) -> str:
    """Return click's message on wrong usage as one line, with plainer words and hints.

    It may name the command's --help, the commands that have the option, or a file called like one.
    """
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {ctx.command_path} --help)" if ctx is not None else ""
    text = error.format_message().rstrip(".")
    for theirs, ours in _PLAINER.items():
        text = text.replace(theirs, ours)
    options = [] if ctx is None else [name for p in ctx.command.params for name in p.opts]
    if text.startswith("Got unexpected extra argument") and "--prompt" in options:
        text += "; text for the model goes after --prompt"
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        given = ctx.find_root().obj or ()
        name = next((arg for arg in given if arg[:1] == "-" and os.path.exists(arg)), "")
        if name.startswith(error.option_name):
            return f"{name}: begins as an option does; the file of that name is ./{name}"
        others = _commands_with_option(error.option_name, ctx)
        if others:  # an option that exists says more than one of a similar name
            more = f" and {len(others) - MOST} more" if len(others) > MOST else ""
            has = "has" if len(others) == 1 else "have"
            text = (
                f"No such option {error.option_name!r}; {', '.join(others[:MOST])}{more} {has} it"
            )
    return text + hint


def _commands_with_option(name: str, ctx: click.Context) -> list[str]:
    """Return the commands, as "aprfmt NAME", that have an option; all of them are imported.

    `ctx` is the context of a command of the group.
    """
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    found = []
    for word in sorted(COMMANDS):
        command = root.command.get_command(root, word)
        if command is not None and any(name in each.opts for each in command.params):
            found.append(f"{root.info_name} {word}")
    return found


def _report_error(args: list[str], error: Exception) -> int:
    """Print an exception as one line and return exit code 2.

    An exception that is no AprfmtError, MemoryError or OSError is reported as a bug.
    """
    if isinstance(error, AprfmtError):
        return _print_error(args, error.kind, str(error), error)
    if isinstance(error, MemoryError):
        return _print_error(args, "memory", "not enough memory for this; see --memory", error)
    if isinstance(error, OSError):
        if not error.filename and _came_of_printing(error):
            from aprfmt.formats.temporary_files import output_error

            _drop_stdout()
            said = str(output_error("standard output", "cannot be written", error))
            return _print_error(args, "os", said, error)
        where = f"{error.filename}: " if error.filename else ""
        return _print_error(args, "os", f"{where}{error.strerror or error}", error)
    text = f"bug: {type(error).__name__}: {error}; please report it with the --debug output"
    return _print_error(args, "bug", text, error)


def _came_of_printing(error: OSError) -> bool:
    """Return whether an error was raised by writing to stdout, where results are printed.

    Files of results are written by other modules, which name them.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in ("click", "rich") or module.startswith("aprfmt.cli.")


def _drop_stdout() -> None:
    """Discard what stdout still buffers, which Python would try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place_in_message(message: str) -> str:
    """Return the file, key or option that a message begins with; "" where it begins with none."""
    where, found, _ = message.partition(": ")
    return where if found and ";" not in where else ""


def requested_format(args: list[str]) -> str:
    """Return the form asked for by --json or --format, "human" by default.

    The raw arguments are read: an error may come before click has parsed any.
    """
    if "--json" in args:
        return "json"
    apart = [value for option, value in pairwise(args) if option == "--format"]
    joined = [one.partition("=")[2] for one in args if one.startswith("--format=")]
    return next(iter([*apart, *joined]), "human")


def _print_error(args: list[str], kind: str, message: str, error: Exception) -> int:
    """Print an error on stderr, in JSON or a CI report on stdout if asked; return the exit code.

    `kind` is the key of the error in JSON. The code is 2, or 141 for a closed pipe. With --debug
    the traceback is printed too.
    """
    from aprfmt.cli.render import fit_names

    if "--debug" in args:
        import traceback

        for piece in traceback.format_exception(error):  # a frame, or an exception's whole message
            ours = piece.startswith(("  File ", "Traceback ", "\n"))
            for line in piece.rstrip("\n").split("\n") if ours else [piece.rstrip("\n")]:
                click.echo(escape(line), err=True)
    click.echo(f"aprfmt: {escape(fit_names(message))}", err=True)
    try:
        _print_error_report(args, kind, message)
    except BrokenPipeError:
        return 141
    except OSError:  # the line on stderr has to do
        _drop_stdout()
    return 2


def _print_error_report(args: list[str], kind: str, message: str) -> None:
    """Print an error on stdout as JSON or a CI report if asked for; nothing for people.

    `kind` is the key of the error in JSON.
    """
    form = requested_format(args)
    said = next((arg for arg in args if arg in COMMANDS), "aprfmt")
    if form in ("sarif", "junit"):
        from aprfmt.cli.ci_reports import ReportCase
        from aprfmt.cli.render import print_cases

        case = ReportCase("error", _place_in_message(message), "error", message)
        print_cases(form, said, [case], 2)
    if form == "json":
        from aprfmt.cli.render import envelope, print_json

        command = "inspect" if is_implied_inspect(args) else said
        where = "" if kind == "bug" else _place_in_message(message)
        body: dict[str, Any] = {"error": {"kind": kind, "message": message, "where": where}}
        print_json(envelope(command, 2, body))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
