"""`aprfmt tokenize`: text to token ids, or ids back to text."""

from pathlib import Path
from typing import TypedDict

import click

from aprfmt.cli import options, render, run_options


class TokenizeResult(TypedDict):
    """What `aprfmt tokenize` says; `tokens` in the vocabulary's spelling, `pieces` as text."""

    model: str
    tokenizer: str
    text: str
    count: int
    ids: list[int]
    tokens: list[str]
    pieces: list[str]


@click.command("tokenize")
@options.model()
@click.argument("text")
@click.option("--decode", is_flag=True, help="TEXT is ids (1,2,3 or 1 2 3); print their text.")
@click.option("--no-special", is_flag=True, help="Put no bos or eos around the text.")
@click.option(
    "--no-parse-special",
    is_flag=True,
    help="Take special tokens spelled out in TEXT for plain text.",
)
@options.common
def command(model: Path, text: str, decode: bool, no_special: bool, no_parse_special: bool) -> int:
    """Turn text into token ids, as the model's Hugging Face tokenizer does; TEXT - is stdin."""
    from aprfmt.model import open_model

    text = options.read_text_option(text, "TEXT")
    with open_model(model) as opened:
        tokenizer = opened.tokenizer
        if decode:
            ids = run_options.parse_numbers(text.replace(",", " ").split(), "--decode")
            text = tokenizer.decode(ids)
            none = [i for i in ids if tokenizer.token(i) == f"[PAD{i}]"]
            if none:
                render.warn(
                    f"no token has id {none[0]} ({len(none)} of {len(ids)}): left out",
                    "unknown_ids",
                )
        else:
            ids = tokenizer.encode(
                text, add_special=not no_special, parse_special=not no_parse_special
            )
        body: TokenizeResult = {
            "model": str(opened.path), "tokenizer": tokenizer.origin, "text": text,
            "count": len(ids), "ids": ids, "tokens": [tokenizer.token(i) for i in ids],
            "pieces": [tokenizer.piece(i) for i in ids],
        }  # fmt: skip
        run_options.warn_of_bos(tokenizer, ids)
    return render.emit(body, 0, lambda: show(body, decode))


def show(body: TokenizeResult, decode: bool) -> None:
    """Print the ids and then a token a line; with `decode` only the text.

    `body` is the JSON of `tokenize`.
    """
    if decode:
        render.say(body["text"])
        return
    render.line(" ".join(map(str, body["ids"])))
    for i, piece in zip(body["ids"], body["pieces"], strict=True):
        render.line(f"{i:>8}  {render.quote_token(piece)}", style="dim")
