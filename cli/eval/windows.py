"""Reads, tokenizes and cuts the texts of `aprfmt eval` into windows."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from aprfmt.cli import options, render, run_options
from aprfmt.errors import FormatError

if TYPE_CHECKING:
    from aprfmt.inference.evaluation import Planned, Sample
    from aprfmt.model import Model

MAX_LINE = 64 << 20  # bytes of a line of --samples
MAX_TEXT = 1 << 30  # bytes of a --text; a tokenizer takes a hundred times as much


def read_samples(
    model: "Model", texts: tuple[Path, ...], samples: Path | None, ids: str | None
) -> "Iterator[Sample]":
    """Yield the texts, samples and ids to be scored, each tokenized by the model's tokenizer."""
    for path in texts:
        text = read_text(path)
        yield whole_text_sample(
            model, str(path), check_token_ids(model, model.tokenizer.encode(text))
        )
    if samples is not None:
        yield from read_jsonl_samples(model, samples)
    if ids is not None:
        yield whole_text_sample(
            model, "--ids", run_options.check_ids(model, run_options.parse_ids(ids))
        )


def whole_text_sample(model: "Model", name: str, ids: list[int]) -> "Sample":
    """Return a text's token ids as one sample, with the number of tokens that begin every window.

    Those are the tokens that the model puts before a text, such as BOS. A text without them is
    warned of. `name` is the name of the sample.
    """
    from aprfmt.inference.evaluation import Sample
    from aprfmt.inference.loss import count_leading
    from aprfmt.tokenizer.loading import try_load_tokenizer

    tokenizer = try_load_tokenizer(model)
    if tokenizer is None:
        return Sample(name, ids)
    leading = tokenizer.prefix_ids
    prefix = count_leading(ids, leading)
    if leading and ids and not prefix:
        shown = " ".join(tokenizer.token(i) for i in leading)
        render.warn(
            f"{name}: does not begin with {shown}, which the model puts before a text; "
            "no window does",
            "no_bos",
        )
    return Sample(name, ids, prefix=prefix)


def check_token_ids(model: "Model", ids: list[int]) -> list[int]:
    """Return the ids after checking that all are inside the embedding; an empty list passes.

    A sample without ids is skipped later, with a warning.
    """
    return run_options.check_ids(model, ids) if ids else ids


def read_text(path: Path, option: str = "--text") -> str:
    """Return the UTF-8 text of a regular file, or of stdin for `-`.

    `option` names the option that gave the path. Raises FormatError for another kind of file, a
    larger one than MAX_TEXT, or one that is not UTF-8.
    """
    from aprfmt.formats.mapped_file import MappedFile

    if path == Path("-"):
        return options.read_stdin(option)
    file = MappedFile(path)  # refuses pipes and devices
    try:
        if file.size > MAX_TEXT:
            raise FormatError(f"{path}: {file.size} bytes; a text of at most {MAX_TEXT} is read")
        return str(file.view, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: byte {error.object[error.start]:#04x} at {error.start} is no UTF-8; "
            "expected a UTF-8 text"
        ) from None
    finally:
        file.close()


def read_jsonl_samples(model: "Model", path: Path) -> "Iterator[Sample]":
    """Yield the samples of a .jsonl file, a line each; empty lines are skipped.

    Of a prompt with its response only the response is scored. Raises FormatError at the first line
    that is no sample.
    """
    from aprfmt.formats.bounded_json import loads
    from aprfmt.inference.evaluation import Sample

    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        row = loads(line, where, max_bytes=MAX_LINE)
        known = ({"text"}, {"prompt", "response"})
        if not isinstance(row, dict) or not any(keys <= row.keys() for keys in known):
            raise FormatError(f'{where}: has no "text", and no "prompt" with "response"')
        parts = [row["text"]] if "text" in row else [row["prompt"], row["response"]]
        if not all(isinstance(part, str) for part in parts):
            raise FormatError(f"{where}: a value is no string")
        tokenizer = model.tokenizer
        ids = tokenizer.encode(parts[0])
        if len(parts) == 1:
            yield whole_text_sample(model, where, check_token_ids(model, ids))
            continue
        response = tokenizer.encode(parts[1], add_special=False)
        yield Sample(where, check_token_ids(model, [*ids, *response]), prompt=len(ids), cut=True)


def window_tokens(model: "Model", size: int | None, convention: str) -> int:
    """Return how many tokens a window holds: `size`, else the default of the convention.

    More than the model's context is warned of.
    """
    from aprfmt.inference.loss import window_size

    context = int(model.hyper["context_length"])
    if size is not None and size > context:
        render.warn(
            f"{model.path}: windows of {size} tokens; the model was made for {context}",
            "context_length",
        )
    return size if size is not None else window_size(context, convention)


class LeadingTokens(TypedDict):
    """The tokens put before windows: ids, spellings, and the number of windows that have them."""

    ids: list[int]
    tokens: list[str]
    windows: int


class WindowFacts(TypedDict):
    """How texts were cut into windows; sizes in tokens."""

    convention: str
    max_seq_len: int
    overlap: int
    windows: int
    bos: LeadingTokens


def windows_to_json(
    model: "Model", planned: "Planned", capacity: int, overlap: int, convention: str
) -> WindowFacts:
    """Return how the texts were cut into windows, and the tokens put before windows, as JSON.

    `planned` are the samples with their windows. `capacity` is the tokens of a window, `overlap`
    how many of them two windows share, `convention` the name of the rule that cut them.
    """
    prefixed = [(sample, windows) for sample, windows in planned if sample.prefix]
    ids = list(prefixed[0][0].ids[: prefixed[0][0].prefix]) if prefixed else []
    return {
        "convention": convention,
        "max_seq_len": capacity,
        "overlap": overlap,
        "windows": sum(len(windows) for _, windows in planned),
        "bos": {
            "ids": ids,
            "tokens": [model.tokenizer.token(i) for i in ids],
            "windows": sum(len(windows) for _, windows in prefixed),
        },
    }


def window_rows(body: WindowFacts) -> list[tuple[str, str]]:
    """Return (label, text) rows that say how texts were cut, and which tokens begin windows.

    `body` is what `windows_to_json` returns.
    """
    from aprfmt.inference.loss import CONVENTIONS

    bos, count, convention = body["bos"], body["windows"], body["convention"]
    spelled = " ".join(f"{token} ({i})" for i, token in zip(bos["ids"], bos["tokens"], strict=True))
    before = f"{render.escape(spelled)} before {bos['windows']} of {count} windows"
    return [
        (
            "windows",
            f"{count} of at most {body['max_seq_len']} tokens, overlap {body['overlap']}, "
            f"{convention}: {CONVENTIONS[convention].says}",
        ),
        ("BOS", before if spelled else "none"),
    ]
