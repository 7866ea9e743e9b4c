"""What every command that runs a model shares: what to run, on what, and the token ids."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from aprfmt.cli import options
from aprfmt.inference.backends import BACKENDS

F = TypeVar("F", bound=Callable[..., Any])
NONFINITE = 12  # points with NaN or infinities that are shown


def named(names: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def where(function: F) -> F:
    """Add --device, --backend, --dtype, --threads, --memory, --deterministic, --allow-missing."""
    for option in (
        options.allow_missing,
        click.option("--deterministic", is_flag=True,
                     help="Fixed row blocks, and one thread unless --threads says otherwise: "
                     "prefixes, batches and steps are equal to the bit."),
        click.option("--memory", callback=options.size, metavar="SIZE",
                     help="Budget for weights in memory, on a GPU its own (2G); the rest streams."),
        click.option("--threads", type=click.IntRange(min=1), help="Threads of the arithmetic."),
        click.option("--dtype", help="Arithmetic: float32 (default), float64, bfloat16, float16."),
        click.option("--backend", metavar="NAME", help=f"{named(BACKENDS.own)}."),
        click.option("--device", help="cpu, cuda, cuda:N, cuda:all or auto; only auto falls back."),
    ):  # fmt: skip
        function = option(function)
    return function


def what(function: F) -> F:
    """Add --prompt, --ids, --chat: exactly one names the tokens."""
    for option in (
        click.option("--chat", metavar="TEXT", help="A user's message in the chat template."),
        click.option("--ids", metavar="IDS", help="Token ids: 1,2,3 or a .npy file."),
        click.option("--prompt", metavar="TEXT", help="Text, tokenized as the model does it."),
    ):
        function = option(function)
    return function


def choose(device: str | None, backend: str | None, dtype: str | None, run: str | None) -> Any:
    """Return the Choice of the options, or of the RUN behind MODEL@; both is a UsageError."""
    from aprfmt.errors import UsageError
    from aprfmt.inference.device import choose as by_options
    from aprfmt.inference.device import parse_run

    if run is None:
        return by_options(device, backend, dtype)
    if device or backend or dtype:
        raise UsageError(f"@{run} names the run already; leave --device, --backend, --dtype out")
    return parse_run(run)


@contextmanager
def session(
    text: str,
    *,
    arch: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    deterministic: bool = False,
    allow_missing: tuple[str, ...] = (),
) -> Iterator[tuple[Any, Any, Any]]:
    """Open MODEL[@RUN]; yields (model, session, choice)."""
    from aprfmt.cli import render
    from aprfmt.inference.cuda_driver import full_memory_is_named
    from aprfmt.inference.engines.opening import model_and_run
    from aprfmt.inference.session import Session
    from aprfmt.model import open_model

    path, run = model_and_run(text)
    choice = choose(device, backend, dtype, run)
    arithmetic = choice.open(deterministic=deterministic, threads=threads)
    if choice.why.startswith("auto"):
        render.warn(choice.why)
    with open_model(path, arch=arch, allow_missing=allow_missing) as model:
        warn_of(model)
        with (
            full_memory_is_named(choice.device),
            Session.of(model, arithmetic, memory=memory) as opened,
        ):
            yield model, opened, choice


def warn_of(model: Any) -> None:
    """Say what the file leaves out or contradicts, and what the pass does about it."""
    from aprfmt.cli import render
    from aprfmt.model.completeness import accepted_text

    report = model.resolution.report
    for note in (*model.notes, *model.resolution.notes):
        if note.level == "warning":
            render.warn(f"{note.where}: {note.text}")
    for text in (*report.conflicts, *report.warnings):
        render.warn(f"{model.path}: {text}")
    accepted = accepted_text(model.resolution)
    if accepted:
        render.warn(f"{model.path}: {accepted}")


def token_ids(
    model: Any, prompt: str | None, ids: str | None, chat: str | None
) -> tuple[list[int], str | None]:
    """Return (ids, the text they stand for); UsageError unless exactly one source is given."""
    from aprfmt.cli import render
    from aprfmt.errors import UsageError

    given = [name for name, value in (("--prompt", prompt), ("--ids", ids), ("--chat", chat))
             if value is not None]  # fmt: skip
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise UsageError(f"give one of --prompt, --ids and --chat; found {found}")
    if ids is not None:
        return check_ids(model, parse_ids(ids)), None
    if chat is not None:
        message = [{"role": "user", "content": chat}]
        text = model.tokenizer.apply_chat_template(message, add_generation_prompt=True)
        return check_ids(model, model.tokenizer.encode(text, add_special=False)), text
    tokens = model.tokenizer.encode(prompt)
    if tokens[:2] == [model.tokenizer.bos_id] * 2:
        name = model.tokenizer.token(tokens[0])
        render.warn(f"--prompt begins with {name} twice: once in the text, once put there")
    return check_ids(model, tokens), prompt


def parse_ids(text: str) -> list[int]:
    """Return ids of `1,2,3`, or of a .npy file of integers."""
    from aprfmt.errors import UsageError

    if text.endswith(".npy"):
        return _npy_ids(Path(text))
    words = re.split(r"\s*,\s*|\s+", text.strip())
    bad = [word for word in words if not (word.isascii() and word.isdigit() and len(word) < 10)]
    if bad:
        raise UsageError(f"--ids: {bad[0]!r} is no token id; expected for example 1,2,3")
    return [int(word) for word in words]


def _npy_ids(path: Path) -> list[int]:
    from aprfmt.formats.mapped import MappedFile

    file = MappedFile(path)
    try:
        return parse_npy(file.view, path)
    finally:
        file.close()


def parse_npy(view: memoryview, path: Path) -> list[int]:
    """Return the integers of a .npy file's bytes; its header is not believed about their number.

    Raises FormatError for what is no sequence of integers.
    """
    import io

    import numpy as np

    from aprfmt.errors import FormatError
    from aprfmt.inference.engines.npz import MAX_HEADER, read_header

    head = io.BytesIO(bytes(view[: MAX_HEADER + 64]))
    (shape, dtype), _ = read_header(head, f"{path}: no .npy file of token ids", len(view))
    if dtype.kind not in "iu":
        raise FormatError(f"{path}: holds {dtype.name}; expected integers")
    if sum(size != 1 for size in shape) > 1:
        raise FormatError(f"{path}: shape {list(shape)}; expected one sequence of ids")
    found = np.frombuffer(view[head.tell() :], dtype)
    values: list[int] = found.tolist()
    return values


def warn_of_length(model: Any, ids: list[int]) -> None:
    """Say where a prompt is longer than what the model was made for: it runs all the same."""
    from aprfmt.cli import render

    context = int(model.hyper["context_length"])
    if len(ids) > context:
        render.warn(f"{model.path}: {len(ids)} tokens; the model was made for {context}")


def check_ids(model: Any, ids: list[int]) -> list[int]:
    """Return the ids; UsageError where there is none or one is outside the embedding."""
    from aprfmt.errors import UsageError

    vocab = int(model.hyper["vocab_size"])
    if not ids:
        raise UsageError(f"{model.path}: no tokens; the text is empty and the model adds none")
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        raise UsageError(f"{model.path}: token id {wrong[0]}; the embedding has {vocab} rows")
    return ids


def run_facts(model: Any, choice: Any, opened: Any) -> dict[str, Any]:
    """Return what JSON says of where it ran: requested, ran, why, backend facts, peak memory."""
    from aprfmt.inference.session import peak_rss

    return {
        "model": str(model.path),
        "format": model.format,
        "architecture": model.spec.name,
        "requested": choice.requested,
        "ran": str(choice),
        "why": choice.why,
        "allowed_missing": list(model.resolution.coverage.accepted),
        "backend": dict(opened.backend.facts()),
        "peak_rss_bytes": peak_rss(),
    }


def headline(run: dict[str, Any]) -> str:
    """Return what ran where, and the memory it took, of what `run_facts` says."""
    from aprfmt.cli import render

    peak = run.get("peak_rss_bytes")
    took = f", peak memory {render.size_text(peak)}" if peak else ""
    return render.escape(f"{run['model']} on {run['ran']}{took}")


def tokenizer_of(model: Any) -> Any | None:
    """Return the model's tokenizer, None where it has none that can be read."""
    from aprfmt.errors import AprfmtError

    try:
        return model.tokenizer
    except AprfmtError:
        return None


def stated_ends(model: Any) -> frozenset[int]:
    """Return the stop tokens of a model without tokenizer, none where they cannot be read."""
    from aprfmt.errors import AprfmtError
    from aprfmt.tokenizer import stated_ends as stated

    try:
        return stated(model)
    except AprfmtError:
        return frozenset()


def top_tokens(row: Any, model: Any | None, count: int = 5) -> list[dict[str, Any]]:
    """Return the highest logits of a row [vocab]: id, logit, and the token where it is known.

    NaN is last. Equal logits come in order of their ids. `model` None leaves the tokens out.
    """
    import numpy as np

    wide = np.asarray(row, np.float64)
    best = np.argsort(-wide, kind="stable")[:count]
    tokenizer = None if model is None else tokenizer_of(model)
    found: list[dict[str, Any]] = [{"id": int(i), "logit": float(wide[i])} for i in best]
    if tokenizer is not None:
        for entry in found:
            entry["token"] = tokenizer.token(entry["id"])
    return found


def show_top(top: list[dict[str, Any]], title: str) -> None:
    """Print the highest logits, one a line."""
    from aprfmt.cli import render

    render.line(title, style="head")
    for row in top:
        token = render.escape(row.get("token", ""))
        render.line(f"  {row['id']:>8}  {row['logit']:>12.6f}  {token}")


def show_nonfinite(points: Any, name: str) -> None:
    """Say where points hold NaN or infinities: on one side alone first, then on both alike."""
    from aprfmt.cli import render

    odd = [point for point in points if point.nonfinite is not None
           and (point.nonfinite.alone or not point.key.endswith("router_margin"))]  # fmt: skip
    for point in sorted(odd, key=lambda point: not point.nonfinite.alone)[:NONFINITE]:
        text = point.nonfinite.says(name, "the reference")
        style = "bad" if point.nonfinite.alone else "warn"
        render.line(render.escape(f"{point.key}: {text}"), style=style)
    if len(odd) > NONFINITE:
        render.line(f"... {len(odd) - NONFINITE} more points (--json)", style="dim")


def show_checks(checks: Any) -> None:
    """Print a line for each check: outcome, name, what was found and what was expected."""
    from aprfmt.cli import render

    styles = {"PASS": "good", "FAIL": "bad", "NOT_RUN": "warn"}
    for check in checks:
        todo = f"; {check.todo}" if check.todo else ""
        text = f"{check.outcome:7} {check.name}: {check.found}; expected {check.expected}{todo}"
        render.line(render.escape(text), style=styles[check.outcome])
