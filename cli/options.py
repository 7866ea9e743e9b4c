"""Options that several commands share, each once."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from aprfmt.base.budget import Budget
from aprfmt.base.registry import LazyFunction
from aprfmt.base.text_escape import shorten
from aprfmt.cli import output_format, render
from aprfmt.errors import OutputError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from aprfmt.model.renames import Rename

F = TypeVar("F", bound=Callable[..., Any])
_COMPLETE_TENSORS = LazyFunction("aprfmt.cli.shell_completion:complete_tensors")

_RUNS = ("payload", "engine", "dry_run", "loaded", "arrays")
# command -> {option: options of which it needs one}
NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "convert": {"fma": ("quantize", "encoding", "tensor_encodings")},
    "diff": {"seed": ("sample",)},
    "hash": {"blocks": ("write",), "ranks": ("roles",)},
    "hex": {"length": ("offset",)},
    "run": {name: ("temperature",) for name in ("top_k", "top_p", "seed")},
    "step": {"device": ("batch",), "dtype": ("batch",), "trained_in": ("batch", "grads")},
    "trace": {
        name: _RUNS
        for name in (
            "prompt",
            "ids",
            "chat",
            "positions",
            "behind",
            "threads",
            "memory",
            "deterministic",
        )
    },
}
# command -> {option: options and arguments in whose presence it has no effect}
UNUSED_WITH: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hex": {"limit": ("name", "named", "offset"), "block": ("offset",), "blocks": ("offset",)}
}


def _refuse_unused_options(context: click.Context) -> None:
    """Raise UsageError for the first option of a command that would have no effect."""
    names = {each.name: _label(each) for each in context.command.params if each.name}
    given = [
        name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    name = context.info_name or ""
    for option in given:
        needed = NEEDED.get(name, {}).get(option, ())
        if needed and not set(needed) & set(given):
            wanted = " or ".join(names[each] for each in needed)
            raise UsageError(f"{names[option]}: needs {wanted}; alone it has no effect")
        others = [each for each in UNUSED_WITH.get(name, {}).get(option, ()) if each in given]
        if others:
            raise UsageError(f"{names[option]}: has no effect with {names[others[0]]}")


def run_as_command(function: F) -> F:
    """Return a command's function that refuses unused options, and runs with a status line."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        """Run the command's function; raise UsageError for the first option without effect."""
        context = click.get_current_context()
        _refuse_unused_options(context)
        with render.status_line(context):
            return function(*args, **kwargs)

    return cast(F, command)


def _label(parameter: click.Parameter) -> str:
    """Return what a user calls a parameter: the long option, or the argument's name."""
    if isinstance(parameter, click.Argument):
        return parameter.make_metavar(click.get_current_context()).strip("[]")
    return max(parameter.opts, key=len)


UNSET = "is empty; is a variable of the shell not set?"
LARGEST = 2**63 - 1  # the largest offset or count that files can have
YEAR = 366 * 86400.0  # seconds


class WholeNumber(click.IntRange):
    """A click type: a whole number of a range, at most LARGEST by default."""

    def __init__(self, least: int, most: int = LARGEST) -> None:
        """Set the range, both ends included."""
        super().__init__(least, most)

    def _describe_range(self) -> str:
        """Return the range for the help, without the default upper limit."""
        return f"x>={self.min}" if self.max == LARGEST else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; click's UsageError for another value, which is shown shortened."""
        assert self.min is not None and self.max is not None
        try:
            found = int(value)
        except ValueError:  # no number, or of more digits than Python reads
            found = None
        if found is None or not self.min <= found <= self.max:
            shown = shorten(str(value), 40)
            self.fail(f"{shown!r} is no whole number from {self.min} to {self.max}", param, ctx)
        return found


class RealNumber(click.FloatRange):
    """A click type: a number of a range; NaN is outside of every range."""

    def __init__(self, least: float, most: float, *, min_open: bool = False) -> None:
        """Set the range, both ends included; with `min_open` the least is excluded."""
        super().__init__(least, most, min_open=min_open)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; click's UsageError for another value, which is shown shortened."""
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        assert self.min is not None and self.max is not None
        above = found > self.min if self.min_open else found >= self.min
        if not (above and found <= self.max):  # nothing is true of NaN
            low = "above" if self.min_open else "from"
            shown = shorten(str(value), 40)
            self.fail(f"{shown!r} is no number {low} {self.min:g} to {self.max:g}", param, ctx)
        return found


WORKERS = WholeNumber(1, 4096)  # threads, or workers: more are a misspelt number


def invalid_name_reason(value: object) -> str:
    """Return why a text can name no file on any file system; "" for one that can."""
    if value == "":
        return UNSET
    if not isinstance(value, str):
        return ""
    try:
        return "holds a null byte" if b"\0" in os.fsencode(value) else ""
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of one (a surrogate)"


class NamedPath(click.Path):
    """A click path that refuses an empty text, which is a shell variable that is not set."""

    def __init__(self, **rules: Any) -> None:
        """Set the rules of click.Path; values are converted to pathlib.Path."""
        super().__init__(path_type=Path, **rules)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; click's UsageError for a text that can name no file."""
        wrong = invalid_name_reason(value)
        if wrong:
            self.fail(wrong, param, ctx)
        return super().convert(value, param, ctx)


FILE = NamedPath(dir_okay=False)


class ModelRunType(click.types.StringParamType):
    """A click type for MODEL[@RUN] or a trace: any text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text; click's UsageError for an empty one or one that can name no file."""
        wrong = invalid_name_reason(value)
        if wrong:
            self.fail(wrong, param, ctx)
        return str(super().convert(value, param, ctx))


MODEL_RUN = ModelRunType()


def gather_options(**kinds: "type[DataclassInstance]") -> Callable[[F], F]:
    """Return a decorator that gives a command some of its options as dataclasses.

    It is put directly below @click.command. `where=Where` makes the argument `where` of all options
    that are fields of Where.
    """
    names: Mapping[str, list[str]] = {
        name: [field.name for field in fields(kind)] for name, kind in kinds.items()
    }

    def add(function: F) -> F:
        """Return `function` as a command that takes single options and passes on dataclasses."""

        @wraps(function)
        def command(**given: object) -> object:
            """Run the command's function with the dataclasses built from the options given."""
            parts = {
                name: kind(**{each: given[each] for each in names[name]})
                for name, kind in kinds.items()
            }
            used = {each for each in given if any(each in group for group in names.values())}
            return function(**{name: given[name] for name in given if name not in used}, **parts)

        return cast(F, command)

    return add


def option_group(*added: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator that adds several options, in the order in which --help lists them."""

    def add(function: F) -> F:
        """Return a command's function with all options of the group added."""
        for option in reversed(added):
            function = option(function)
        return function

    return add


def _allow_http(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Allow http:// addresses for this process if --allow-http was given."""
    if value:
        from aprfmt.remote.address_policy import POLICY

        POLICY.plain_http = True


def _common_options(names: tuple[str, ...], says: str) -> Callable[[F], F]:
    """Return a decorator that adds the options of every command.

    `names` are the values of --format, `says` is its help.
    """
    return option_group(
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=output_format.set_json_format,
            help="One JSON object on stdout.",
        ),
        click.option(
            "--format",
            "form",
            type=click.Choice(names),
            expose_value=False,
            callback=output_format.set_format,
            help=says,
        ),
        click.option(
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=render.note_flag,
            help="No progress, and no report of what was written; warnings stay.",
        ),
        click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks."),
        click.option(
            "--allow-http",
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_allow_http,
            help="Read from http:// addresses of other machines too.",
        ),
        run_as_command,
    )


_FORM = "What stdout gets; agent is at most 12 lines, and what a coding agent gets unasked"
# What every command has; `output_format.answer_format` and `render.is_flag_set` say what was given.
common = _common_options(output_format.FORMS, f"{_FORM}.")
common_ci = _common_options(output_format.CI_FORMS, f"{_FORM}; sarif and junit are for CI servers.")


class PathOrAddress(NamedPath):
    """A click type: a local path, or an address such as hf:// as a RemotePath."""

    def coerce_path_result(self, value: object) -> Path:
        """Return the path or RemotePath that a text names."""
        from aprfmt.remote.paths import parse_location

        return parse_location(value)


def model(name: str = "model") -> Callable[[F], F]:
    """Return a decorator that adds the MODEL argument, whose value is a path.

    It may be a file, a folder, org/name in the hub cache, or an address. `name` is the argument's.
    """
    return click.argument(name, type=PathOrAddress())


arch = click.option("--arch", help="Architecture by name, overriding what the file says.")
force = click.option("--force", is_flag=True, help="Overwrite an existing output.")
to = click.option("--to", help="Target format, where DST's extension does not say it.")


def negate_flag(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Return the value of the option that a --no-... flag negates: False if the flag was given."""
    return not value


no_verify = click.option(
    "--no-verify",
    "verify",
    is_flag=True,
    callback=negate_flag,
    help="Do not re-open and compare the output.",
)
resume = click.option(
    "--resume",
    is_flag=True,
    help="Continue a stopped run; if this run is stopped, keep what it wrote.",
)
no_hash = click.option(
    "--no-source-hash",
    "source_hash",
    is_flag=True,
    callback=negate_flag,
    help="Do not record the source's SHA-256 in the output.",
)
patterns = click.argument(
    "patterns", nargs=-1, metavar="[PATTERN]...", shell_complete=_COMPLETE_TENSORS
)
no_carry = click.option(
    "--no-carry",
    "carry",
    is_flag=True,
    callback=negate_flag,
    help="Leave the verbatim tokenizer.json out.",
)
tensor = click.option(
    "--tensor",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    shell_complete=_COMPLETE_TENSORS,
    help="Only these tensors: whole dot-components, a glob, or re:...; any spelling.",
)
encoding = click.option(
    "--encoding", metavar="E", help="Store weights as E (a lossy step is reported)."
)
allow_overflow = click.option(
    "--allow-overflow", is_flag=True, help="Accept finite values that become infinite."
)
allow_inexact = click.option(
    "--allow-inexact",
    is_flag=True,
    help="Accept packed weights whose values change when repacked; how many is counted.",
)
drop = click.option(
    "--drop",
    multiple=True,
    metavar="PATTERN",
    shell_complete=_COMPLETE_TENSORS,
    help="Leave these tensors out of the output.",
)


def parse_renames(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> "tuple[Rename, ...]":
    """Return the rename rules of OLD=NEW texts; click calls it."""
    if not values:
        return ()
    from aprfmt.model.renames import parse_rename

    return tuple(map(parse_rename, values))


rename = click.option(
    "--rename",
    multiple=True,
    callback=parse_renames,
    metavar="OLD=NEW",
    help="Rename tensors: '_orig_mod.=' (a prefix), 'attention=self_attn' (components), "
    "'layers.{N}.=layers.{N-1}.' (numbers).",
)
allow_missing = click.option(
    "--allow-missing",
    multiple=True,
    metavar="ROLE",
    help="Accept that these required tensors are not there: attn_q.bias, blk.3.attn_q.bias; "
    "what is written records it.",
)


def read_text_option(value: str, name: str) -> str:
    """Return the text of an option or argument; for `-` it is stdin without its last newline.

    `name` is the option's name, for the error.
    """
    return value if value != "-" else read_stdin(name).removesuffix("\n")


def read_stdin(name: str) -> str:
    """Return all of stdin as text; UsageError where it is not UTF-8.

    `name` is the option or argument that asked for it.
    """
    import sys

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} -: stdin is not UTF-8 at byte {error.start}") from None


def check_new(force: bool, *paths: Path | None) -> None:
    """Raise OutputError if an output's folder is missing, or it exists and `force` is not set.

    This is called before work that would be lost. A path that is None is not checked.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
        if path is not None and path.is_file() and not force:
            raise OutputError(f"{path}: exists; use --force to replace it")


SMALLEST = 1000  # bytes of a size that is meant: fewer are a number whose unit is missing


def parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of `500M`, `2G`, `5GB` or a plain number; None for no value.

    Units are powers of 1000, as shard sizes are given. Raises BadParameter for a text that is no
    size, and for fewer than SMALLEST bytes, where a unit is missing.
    """
    if value is None:
        return None
    text = value.strip().upper().removesuffix("B")
    factors = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    factor = factors.get(text[-1:], 1)
    digits = text[:-1] if text[-1:] in factors else text
    try:
        result = int(float(digits) * factor)
    except (ValueError, OverflowError):
        result = 0
    if not 0 < result < 1 << 63:
        raise click.BadParameter(f"{value!r} is no size; expected for example 500M or 2G")
    if result < SMALLEST:
        raise click.BadParameter(
            f"{value!r} is {result} bytes; give the unit: {value.strip()}G, {value.strip()}M"
            if text.isdecimal() and not value.strip().upper().endswith("B")
            else f"{value!r} is {result} bytes; expected for example 500M or 2G"
        )
    return result


def parse_assignments(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return (pattern, encoding) of each PATTERN=ENCODING, split at the last equals sign.

    Raises click.BadParameter for a value without sign, pattern or encoding.
    """
    pairs = []
    for value in values:
        left, sign, right = value.rpartition("=")
        if not sign or not left or not right:
            raise click.BadParameter(f"{value!r}: expected PATTERN=ENCODING")
        pairs.append((left, right))
    return tuple(pairs)


def parse_key_values(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return (key, value) of each KEY=VALUE, split at the first equals sign.

    A value may hold equals signs, or be empty. Raises click.BadParameter for one without sign or
    key.
    """
    pairs = []
    for value in values:
        left, sign, right = value.partition("=")
        if not sign or not left:
            raise click.BadParameter(f"{value!r}: expected KEY=VALUE")
        pairs.append((left, right))
    return tuple(pairs)


def _accept_checker(words: tuple[str, ...]) -> Callable[..., tuple[str, ...]]:
    """Return click's callback that refuses a --accept not in `words` nor unread:PATTERN."""

    def check(
        ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the values of --accept; BadParameter for one not in `words` nor unread:PATTERN."""
        for value in values:
            if value not in words and not value.startswith("unread:"):
                known = " or ".join((*words, "unread:PATTERN"))
                raise click.BadParameter(f"{value!r}: expected {known}")
        return values

    return check


def accept(*, within: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds --accept: which differences count as equal.

    With `within` rounding to the coarser encoding is one of them.
    """
    rounding = "within: rounding of the coarser encoding; " if within else ""
    return click.option(
        "--accept",
        multiple=True,
        metavar="WHAT",
        callback=_accept_checker(("within",) if within else ()),
        help=f"Count as equal: {rounding}unread:PATTERN: items that were not compared, by name.",
    )


def parse_budget(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> Budget | None:
    """Return the Budget of --budget values; None for no values.

    `90`, `90s`, `10min` and `1h` limit the seconds, sizes such as `2G` the bytes that are read.
    Raises BadParameter for a text that is neither.
    """
    seconds, nbytes = None, None
    for value in values:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)?", value.strip())
        if found is not None:
            seconds = float(found[1]) * {"min": 60.0, "h": 3600.0}.get(found[2], 1.0)
        elif not value.strip()[:1].isdigit() or value.strip()[-1:].isdigit():
            raise click.BadParameter(f"{value!r} is no limit; expected for example 90s or 2G")
        else:
            nbytes = parse_size(ctx, param, value)
    return Budget(seconds, nbytes) if values else None


def budget(function: F) -> F:
    """Add the option --budget to a command that compares."""
    return click.option(
        "--budget",
        multiple=True,
        metavar="LIMIT",
        callback=parse_budget,
        help="Seconds, or bytes read (90s, 10min, 2G); what is left is named, and the exit is 2.",
    )(function)


def verbose(help: str) -> Callable[[F], F]:
    """Return a decorator that adds the option -v, --verbose with the given help."""
    return click.option("-v", "--verbose", is_flag=True, help=help)


max_shard_size = click.option(
    "--max-shard-size",
    callback=parse_size,
    metavar="SIZE",
    help="Split into shards of this size (2G).",
)
tensor_encodings = click.option(
    "--tensor",
    "tensor_encodings",
    multiple=True,
    callback=parse_assignments,
    metavar="PATTERN=E",
    help="Store these tensors as E.",
)


def html(help: str) -> Callable[[F], F]:
    """Return a decorator that adds the option --html FILE with the given help."""
    return click.option("--html", type=FILE, metavar="FILE", help=help)


quantization = option_group(
    click.option("--pure", is_flag=True, help="One type for all weights, no mixture."),
    click.option(
        "--imatrix",
        type=NamedPath(),
        metavar="FILE",
        help="llama.cpp's importance matrix, GGUF or legacy.",
    ),
    click.option(
        "--fma",
        type=click.Choice(["fused", "strict"]),
        default="fused",
        show_default=True,
        help="Rounding of multiply-adds in the searches.",
    ),
    click.option(
        "--allow-requantize",
        is_flag=True,
        help="Quantize again what is quantized already (adds its own error).",
    ),
)
# The last options of every conversion command, down to --json.
writing = option_group(arch, force, resume, no_verify, no_carry, no_hash, common)
jobs = click.option(
    "--jobs",
    type=WORKERS,
    default=1,
    show_default=True,
    help="Workers that make and write pieces of tensors; the bytes are the same.",
)
leaving = option_group(allow_overflow, allow_inexact, drop, allow_missing, max_shard_size, jobs)
