"""The texts of `aprfmt eval`: read, tokenized, and cut into windows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.cli import render, running

if TYPE_CHECKING:
    from aprfmt.inference.loss import Window

MAX_LINE = 64 << 20  # bytes of a line of --samples
MAX_TEXT = 1 << 30  # bytes of a --text; a tokenizer takes a hundred times as much


@dataclass(frozen=True)
class Sample:
    """Token ids of one text; labels are scored from `prompt` on. `cut`: not continued when long.

    `prefix` tokens at its start, those the model puts before a text, stand before every window.
    """

    name: str
    ids: list[int]
    prompt: int = 0
    cut: bool = False
    prefix: int = 0


def read_samples(
    model: Any, texts: tuple[Path, ...], samples: Path | None, ids: str | None
) -> Iterator[Sample]:
    """Yield what is to be scored, tokenized as the model does it."""
    for path in texts:
        text = read_text(path)
        yield whole(model, str(path), check(model, model.tokenizer.encode(text)))
    if samples is not None:
        yield from read_lines(model, samples)
    if ids is not None:
        yield whole(model, "--ids", running.check_ids(model, running.parse_ids(ids)))


def whole(model: Any, name: str, ids: list[int]) -> Sample:
    """Return the sample of a text: what the model puts before one is put before every window."""
    from aprfmt.inference.loss import repeated

    tokenizer = running.tokenizer_of(model)
    if tokenizer is None:
        return Sample(name, ids)
    leading = tokenizer.leading
    prefix = repeated(ids, leading)
    if tokenizer is not None and leading and ids and not prefix:
        shown = " ".join(tokenizer.token(i) for i in leading)
        render.warn(f"{name}: does not begin with {shown}, which the model puts before a text; "
                    "no window does")  # fmt: skip
    return Sample(name, ids, prefix=prefix)


def check(model: Any, ids: list[int]) -> list[int]:
    """Return the ids, all inside the embedding; an empty sample is skipped later, loudly."""
    return running.check_ids(model, ids) if ids else ids


def read_text(path: Path) -> str:
    """Return a regular file's UTF-8 text as it is; FormatError where it is none."""
    from aprfmt.errors import FormatError
    from aprfmt.formats.mapped import MappedFile

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


def read_lines(model: Any, path: Path) -> Iterator[Sample]:
    """Yield the samples of a .jsonl file; FormatError names the line that is none."""
    from aprfmt.errors import FormatError
    from aprfmt.formats.jsonio import loads

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
            yield whole(model, where, check(model, ids))
            continue
        response = tokenizer.encode(parts[1], add_special=False)
        yield Sample(where, check(model, [*ids, *response]), prompt=len(ids), cut=True)


def window_tokens(model: Any, asked: int | None, convention: str) -> int:
    """Return how many tokens a window holds; asking for more than the context is warned of."""
    from aprfmt.inference.loss import window_size

    context = int(model.hyper["context_length"])
    if asked is not None and asked > context:
        render.warn(f"{model.path}: windows of {asked} tokens; the model was made for {context}")
    return asked if asked is not None else window_size(context, convention)


def plan(
    samples: list[Sample], capacity: int, overlap: int, convention: str
) -> "tuple[list[tuple[Sample, list[Window]]], list[str]]":
    """Return every sample with its windows, and what is said of those without a loss token.

    Raises UsageError for what a convention has no word for.
    """
    from aprfmt.errors import UsageError
    from aprfmt.inference.loss import sample_window, windows

    if convention != "disjoint" and (overlap or any(sample.cut for sample in samples)):
        found = "--overlap" if overlap else "a prompt with its response"
        raise UsageError(
            f"--convention {convention} knows no {found.removeprefix('a ')}; expected whole texts "
            "in windows that share no token; leave it out"
        )
    planned, skipped = [], []
    for sample in samples:
        count = len(sample.ids)
        if sample.cut:
            one = sample_window(sample.prompt, count - sample.prompt, capacity)
            cut = [] if one is None else [one]
        else:
            cut = windows(
                count, capacity, overlap=overlap, prefix=sample.prefix, convention=convention
            )
        if cut:
            planned.append((sample, cut))
        else:
            skipped.append(f"{sample.name}: skipped, {without_label(sample, capacity, convention)}")
    return planned, skipped


def without_label(sample: Sample, capacity: int, convention: str) -> str:
    """Return why a sample has no loss token, and what would give it one."""
    count = len(sample.ids)
    if count < 2 or count == sample.prompt:
        todo = "a response" if sample.cut and count == sample.prompt else "a longer text"
        return f"{count} tokens leave no loss token; give {todo}"
    if not sample.cut:
        return (f"{count} tokens fill no window of {capacity}, and {convention} scores no other; "
                "give a longer text or a smaller --max-seq-len")  # fmt: skip
    return (f"its prompt of {sample.prompt} tokens fills the window of {capacity}; raise "
            f"--max-seq-len above {sample.prompt}")  # fmt: skip


def windows_to_json(
    model: Any,
    planned: "list[tuple[Sample, list[Window]]]",
    capacity: int,
    overlap: int,
    convention: str,
) -> dict[str, Any]:
    """Return how the texts were cut: sizes in tokens, what stands before windows, and how many."""
    behind = [(sample, windows) for sample, windows in planned if sample.prefix]
    ids = behind[0][0].ids[: behind[0][0].prefix] if behind else []
    return {
        "convention": convention,
        "max_seq_len": capacity,
        "overlap": overlap,
        "windows": sum(len(windows) for _, windows in planned),
        "bos": {
            "ids": ids,
            "tokens": [model.tokenizer.token(i) for i in ids],
            "windows": sum(len(windows) for _, windows in behind),
        },
    }


def window_rows(body: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is printed of the windows, and of what stands before them."""
    from aprfmt.inference.loss import CONVENTIONS

    bos, count, convention = body["bos"], body["windows"], body["convention"]
    spelled = " ".join(f"{token} ({i})" for i, token in zip(bos["ids"], bos["tokens"], strict=True))
    before = f"{render.escape(spelled)} before {bos['windows']} of {count} windows"
    return [
        ("windows", f"{count} of at most {body['max_seq_len']} tokens, overlap {body['overlap']}, "
         f"{convention}: {CONVENTIONS[convention].says}"),
        ("BOS", before if spelled else "none"),
    ]  # fmt: skip
