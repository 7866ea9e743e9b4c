"""Options shared by commands that run a model: what to run, where, and the token ids."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import click

from aprfmt.cli import options, render
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.inference.backends import BACKENDS

if TYPE_CHECKING:
    from aprfmt.inference.running import Run, RunRequest
    from aprfmt.inference.session import Numbers
    from aprfmt.inference.trace import Trace
    from aprfmt.measure.traces import PointDiff
    from aprfmt.model import Model
    from aprfmt.tokenizer.base import Tokenizer

NONFINITE = 12  # points with NaN or infinities that are shown


def join_names(names: Sequence[str]) -> str:
    """Return names as `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


# What a run may use of the machine, and what may be missing of the model; see `WithinOptions`.
within = options.option_group(
    click.option("--threads", type=options.WORKERS, help="Threads of the arithmetic."),
    click.option(
        "--memory",
        callback=options.parse_size,
        metavar="SIZE",
        help="Budget for weights in memory, on a GPU its own (2G); the rest streams.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        help="Fixed row blocks, and one thread unless --threads says otherwise: "
        "prefixes, batches and steps are equal to the bit.",
    ),
    options.allow_missing,
)
# Where a model runs; the fields of `WhereOptions`, but for --arch.
where = options.option_group(
    click.option("--device", help="cpu, cuda, cuda:N, cuda:all or auto; only auto falls back."),
    click.option("--backend", metavar="NAME", help=f"{join_names(BACKENDS.own)}."),
    click.option("--dtype", help="Arithmetic: float32 (default), float64, bfloat16, float16."),
    within,
)
# What is run: exactly one names the tokens; the fields of `TokenOptions`.
what = options.option_group(
    click.option(
        "--prompt", metavar="TEXT", help="Text, tokenized as the model does it; - is stdin."
    ),
    click.option("--ids", metavar="IDS", help="Token ids: 1,2,3, a .npy or .pt file; - is stdin."),
    click.option(
        "--chat", metavar="TEXT", help="A user's message in the chat template; - is stdin."
    ),
)


@dataclass(frozen=True)
class WithinOptions:
    """The limits of a run on this machine, and what of the model may be missing.

    They are the options of `within`, and --arch.
    """

    threads: int | None
    memory: int | None
    deterministic: bool
    allow_missing: tuple[str, ...]
    arch: str | None


@dataclass(frozen=True)
class WhereOptions(WithinOptions):
    """Where a model runs, and what of it may be missing: the options of `where` and --arch."""

    device: str | None
    backend: str | None
    dtype: str | None

    def request(self, text: str) -> "RunRequest":
        """Return the request to run MODEL[@RUN], made with these options.

        Raises UsageError where an option and RUN name the same thing.
        """
        from aprfmt.inference.running import make_request

        return make_request(
            text,
            self.device,
            self.backend,
            self.dtype,
            **{field.name: getattr(self, field.name) for field in fields(WithinOptions)},
        )

    def for_other_model(self, run: bool = True) -> "WhereOptions":
        """Return these options for another model, without --arch, which is for the first one.

        With `run` backend, device and dtype are left out too: the other MODEL@RUN names these
        itself.
        """
        if not run:
            return replace(self, arch=None)
        return replace(self, arch=None, device=None, backend=None, dtype=None)


@dataclass(frozen=True)
class TokenOptions:
    """The token source of a run: exactly one of --prompt, --ids and --chat is given."""

    prompt: str | None
    ids: str | None
    chat: str | None

    @property
    def given(self) -> list[str]:
        """The names of the options that were given, such as `--ids`."""
        return [f"--{name}" for name, value in vars(self).items() if value is not None]


@contextmanager
def open_session(
    text: str, where: WhereOptions, engines: bool = False, draft: bool = False
) -> "Iterator[Run]":
    """Yield the run of MODEL[@RUN], opened, with warnings of what is odd in the model.

    `draft` opens the model's draft head. Raises UsageError for an engine unless `engines`. `text`
    is MODEL[@RUN], `where` has the options of the run.
    """
    from aprfmt.inference.running import open_run

    request = replace(where.request(text), draft=draft)
    if request.choice.is_engine and not engines:
        request.open_backend()  # raises: it says what takes an engine
    request.choice.refuse_missing_gpu()  # before torch is imported, which takes seconds
    if request.choice.why.startswith("auto"):
        render.warn(request.choice.why, "fallback")
    with open_run(request, tell=warn_of_model) as run:
        render.STATUS.doing(f"running {run.model.path} on {run.choice}")
        yield run


def warn_of_model(model: "Model") -> None:
    """Print the warnings of an open model: notes, contradicted flags, accepted missing tensors."""
    from aprfmt.model.completeness import accepted_absences_text

    for note in (*model.notes, *model.resolution.notes):
        if note.level == "warning":
            render.warn_note(note)
    if model.resolution.report.conflicts:
        from aprfmt.causes.contradicted_flags import held_conflicts

        for conflict in held_conflicts(model.resolution):
            render.warn(f"{model.path}: {conflict}", "contradiction")
    accepted = accepted_absences_text(model.resolution)
    if accepted:
        render.warn(f"{model.path}: {accepted}", "accepted_missing")


def token_ids(model: "Model", tokens: TokenOptions) -> tuple[list[int], str | None]:
    """Return (token ids, their text or None for --ids), by the one source that was given.

    Raises UsageError unless exactly one is given, and for ids outside the embedding.
    """
    if len(tokens.given) != 1:
        found = " and ".join(tokens.given) or "none of them"
        raise UsageError(f"give one of --prompt, --ids and --chat; found {found}")
    if tokens.ids is not None:
        return check_ids(model, parse_ids(tokens.ids)), None
    if tokens.chat is not None:
        message = [{"role": "user", "content": options.read_text_option(tokens.chat, "--chat")}]
        text, ids = model.tokenizer.chat(message)
        return check_ids(model, ids), text
    assert tokens.prompt is not None
    prompt = options.read_text_option(tokens.prompt, "--prompt")
    ids = model.tokenizer.encode(prompt)
    warn_of_bos(model.tokenizer, ids, "--prompt ")
    return check_ids(model, ids), prompt


def warn_of_bos(tokenizer: "Tokenizer", ids: list[int], what: str = "") -> None:
    """Warn if the ids begin with two BOS tokens: one of the text, one added by the tokenizer.

    `what` begins the warning.
    """
    if ids[:2] == [tokenizer.bos_id] * 2:
        name = tokenizer.token(ids[0])
        render.warn(
            f"{what}begins with {name} twice: once in the text, once put there", "double_bos"
        )


def parse_ids(text: str) -> list[int]:
    """Return the token ids of `1,2,3`, of a .npy or .pt file of integers, or of stdin for `-`."""
    text = options.read_text_option(text, "--ids")
    if text.endswith(".npy"):
        return _read_npy_ids(Path(text))
    if text.endswith((".pt", ".pth")):
        return _read_torch_ids(Path(text))
    return parse_numbers(re.split(r"\s*,\s*|\s+", text.strip()), "--ids")


def parse_numbers(words: Sequence[str], option: str) -> list[int]:
    """Return words as token ids; UsageError, naming the option, for other words."""
    bad = [word for word in words if not (word.isascii() and word.isdigit() and len(word) < 10)]
    if bad:
        raise UsageError(f"{option}: {bad[0]!r} is no token id; expected for example 1,2,3")
    return [int(word) for word in words]


def _read_torch_ids(path: Path) -> list[int]:
    """Return the integers of a file of torch.save: its only tensor, or the one called input_ids.

    Raises FormatError where there is no such tensor, or it is no one sequence of integers.
    """
    from aprfmt.inference.engines.captures import IDS, read_array_file

    with ExitStack() as stack:
        held = read_array_file(path, stack)
        names = [IDS] if IDS in held.shapes else list(held.shapes)
        if len(names) != 1:
            raise FormatError(
                f"{path}: holds {len(names)} tensors; expected one of token ids, or {IDS}"
            )
        _check_sequence(path, held.shapes[names[0]], held.dtypes[names[0]])
        values: list[int] = held.read(names[0]).reshape(-1).tolist()
        return values


def _check_sequence(path: Path, shape: Sequence[int], dtype: str) -> None:
    """Raise FormatError for an array of a file that is not one sequence of integers."""
    if not dtype.startswith(("int", "uint")):
        raise FormatError(f"{path}: holds {dtype}; expected integers")
    if sum(size != 1 for size in shape) > 1:
        raise FormatError(f"{path}: shape {list(shape)}; expected one sequence of ids")


def _read_npy_ids(path: Path) -> list[int]:
    """Return the integers of a .npy file."""
    from aprfmt.formats.mapped_file import MappedFile

    with closing(MappedFile(path)) as file:
        return parse_npy(file.view, path)


def parse_npy(view: memoryview, path: Path) -> list[int]:
    """Return the integers in the bytes of a .npy file; `path` is for the error.

    Their number is checked against the size of the file, whatever its header says. Raises
    FormatError if it does not hold one sequence of integers.
    """
    import io

    import numpy as np

    from aprfmt.inference.engines.npz import MAX_HEADER, read_header

    head = io.BytesIO(bytes(view[: MAX_HEADER + 64]))
    (shape, dtype), _ = read_header(head, f"{path}: no .npy file of token ids", len(view))
    _check_sequence(path, shape, dtype.name)
    found = np.frombuffer(view[head.tell() :], dtype)
    values: list[int] = found.tolist()
    return values


def warn_of_length(model: "Model", ids: list[int]) -> None:
    """Warn of a prompt longer than the model's context; it runs all the same."""
    context = int(model.hyper["context_length"])
    if len(ids) > context:
        render.warn(
            f"{model.path}: {len(ids)} tokens; the model was made for {context}", "context_length"
        )


def check_ids(model: "Model", ids: list[int]) -> list[int]:
    """Return the ids; UsageError where there are none, or one is outside the embedding."""
    vocab = int(model.hyper["vocab_size"])
    if not ids:
        raise UsageError(f"{model.path}: no tokens; the text is empty and the model adds none")
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        raise UsageError(f"{model.path}: token id {wrong[0]}; the embedding has {vocab} rows")
    return ids


class RunLocation(TypedDict):
    """Where a model ran; `backend` the backend's own facts, `via` how an engine was reached."""

    model: str
    format: str
    architecture: str
    requested: str
    ran: str
    why: str
    allowed_missing: list[str]
    backend: NotRequired[dict[str, object]]
    via: NotRequired[object]
    peak_rss_bytes: NotRequired[int | None]


def run_facts(run: "Run", trace: "Trace | None" = None) -> RunLocation:
    """Return where a model ran, as JSON: requested, ran, why, backend facts, peak memory.

    An engine's facts are those of its trace.
    """
    from aprfmt.inference.session import peak_rss

    model, choice = run.model, run.choice
    facts: RunLocation = {
        "model": str(model.path),
        "format": model.format,
        "architecture": model.spec.name,
        "requested": choice.requested,
        "ran": str(choice),
        "why": choice.why,
        "allowed_missing": list(model.resolution.coverage.accepted),
    }
    if run.own is not None:
        facts["backend"] = dict(run.own.backend.facts())
    elif trace is not None:
        facts["backend"] = dict(trace.run["backend"])
        facts["via"] = trace.run.get("via")
    facts["peak_rss_bytes"] = peak_rss()
    return facts


def run_headline(run: RunLocation) -> str:
    """Return a line of model, run and peak memory, made of what `run_facts` returns; escaped."""
    peak = run.get("peak_rss_bytes")
    took = f", peak memory {render.size_text(peak)}" if peak else ""
    return render.escape(f"{run['model']} on {run['ran']}{took}")


def stop_token_ids(model: "Model") -> frozenset[int]:
    """Return the ids that end generation by the model's configuration; none if unreadable.

    For models whose tokenizer cannot be loaded.
    """
    from aprfmt.tokenizer.loading import metadata_stop_ids as stated

    try:
        return stated(model)
    except AprfmtError:
        return frozenset()


class TopToken(TypedDict):
    """One of the likeliest tokens; its own spelling and its text where a tokenizer is known."""

    id: int
    logit: float
    token: NotRequired[str]
    piece: NotRequired[str]


def top_tokens(row: "Numbers", model: "Model | None") -> list[TopToken]:
    """Return the five highest logits of a row [vocab], the highest first.

    NaN is last. Equal logits come in order of their ids. `model` None leaves the tokens out.
    """
    import numpy as np

    wide = np.asarray(row, np.float64)
    best = np.argsort(-wide, kind="stable")[:5]
    found = [TopToken(id=int(i), logit=float(wide[i])) for i in best]
    if model is not None:
        name_tokens(found, model)
    return found


def name_tokens(top: list[TopToken], model: "Model") -> None:
    """Set each row's `token` (spelling) and `piece` (text), where the model has a tokenizer."""
    from aprfmt.tokenizer.loading import try_load_tokenizer

    tokenizer = try_load_tokenizer(model)
    if tokenizer is not None:
        for row in top:
            row["token"], row["piece"] = tokenizer.token(row["id"]), tokenizer.piece(row["id"])


def show_top(top: list[TopToken], title: str) -> None:
    """Print the highest logits under a title, one a line."""
    render.line(title, style="head")
    for row in top:
        token = render.quote_token(row["piece"]) if "piece" in row else ""
        render.line(f"  {row['id']:>8}  {row['logit']:>12.6f}  {token}")


def show_nonfinite(points: "Iterable[PointDiff]", name: str) -> None:
    """Print which points hold NaN or infinities, those of one run alone first.

    `name` is what the first run is called. A router_margin that holds them in both is left out.
    """
    odd = [
        (point.key, found)
        for point in points
        if (found := point.nonfinite) is not None
        and (found.alone or not point.key.endswith("router_margin"))
    ]
    odd.sort(key=lambda row: not row[1].alone)
    for key, found in render.first_rows(odd, NONFINITE, what="more points"):
        text = found.text(name, "the reference")
        render.say(f"{key}: {text}", style="bad" if found.alone else "warn")
