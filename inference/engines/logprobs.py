"""Log-probabilities as servers answer them: a few numbers a token, which are no trace.

vLLM's `prompt_logprobs`, SGLang's `input_token_logprobs` and the `logprobs` of OpenAI-compatible
servers hold the chosen token and some likely ones. A point is compared by whole rows.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from aprfmt.errors import FormatError
from aprfmt.inference.trace import Trace
from aprfmt.model import Model

_HEAD = 64 << 10  # bytes in which the first token's entry stands, long prompts before it included
# Key of the JSON -> whose it is, the first that is there.
WRITERS: Mapping[str, str] = {
    "prompt_logprobs": "vLLM's prompt_logprobs",
    "input_token_logprobs": "SGLang's input_token_logprobs",
    "output_token_logprobs": "SGLang's output_token_logprobs",
    "token_logprobs": "an OpenAI-compatible server's completion",
    "top_logprobs": "an OpenAI-compatible server's chat",
    "logprob": "a server's list of tokens",
}


def writer_of(path: Path) -> str | None:
    """Return whose log-probabilities a JSON file holds; None for any other file."""
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return None
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    found = {match.decode() for match in re.findall(rb'"([a-z_]{7,21})"\s{0,8}:', head)}
    return next((says for key, says in WRITERS.items() if key in found), None)


def is_logprobs(path: Path) -> bool:
    """Say whether a path is a server's answer with log-probabilities."""
    return writer_of(path) is not None


def refuse_logprobs(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> AbstractContextManager[Trace]:
    """Raise FormatError: what such a file holds, and what to save in its place."""
    raise FormatError(
        f"{path}: holds log-probabilities of single tokens ({writer_of(path)}), no rows of logits; "
        "save what stands before the softmax, logits [tokens, vocabulary], as logits.npy beside "
        "input_ids.npy, then `aprfmt trace MODEL --map FOLDER -o run.safetensors` and diagnose that"
    )
