"""A flag that a model's tensors contradict is said by `diff` and `diagnose`, with what mends it.

Readers go by the flag or by the tensors, so that equal bytes give other logits. Each row is a copy
of one model with another flag or other tensors; the command that is said makes it equal to A. Which
reading transformers takes is asked of transformers. Seen red: flags compared by the tensors alone.
"""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import aprfmt as command
from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder

Edit = Callable[[files.Rows], None]
TIED, HEAD, TABLE = "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"


def head_copied(rows: files.Rows) -> None:
    rows[HEAD] = rows[TABLE]


def zero_biases(rows: files.Rows) -> None:
    for name, (dtype, shape, data) in rows.items():
        if name.endswith("bias"):
            rows[name] = (dtype, shape, bytes(len(data)))


# name -> (tiny model, edit of both, flags of A, edit of B, flags of B, cause or "" if innocent)
ROWS: Mapping[str, tuple[str, Edit | None, Mapping[str, Any], Edit | None, Mapping[str, Any], str]]
ROWS = {
    # https://github.com/huggingface/transformers/issues/45127
    "tied, with a head of its own": ("llama", None, {}, None, {TIED: True}, "tied_embedding"),
    # https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89
    "not tied, without a head": ("llama", files.drop(HEAD), {TIED: True}, None, {TIED: False},
                                 "tied_embedding"),
    "biases denied": ("llama-bias", None, {}, None, {"attention_bias": False}, "missing_bias"),
    # innocents: both readings compute the same
    "tied, with a copy": ("llama", head_copied, {TIED: False}, None, {TIED: True}, ""),
    # https://github.com/turboderp-org/exllamav2/issues/408
    "a copy on one side": ("llama", head_copied, {TIED: True}, files.drop(HEAD), {TIED: True}, ""),
    "a copy, told apart": ("llama", head_copied, {TIED: False}, files.drop(HEAD), {TIED: True}, ""),
    "biases demanded": ("llama", None, {}, None, {"attention_bias": True}, ""),
    "zero biases denied": ("llama-bias", zero_biases, {}, None, {"attention_bias": False}, ""),
    "contradicted by both": ("llama", None, {TIED: True}, None, {TIED: True}, ""),
}  # fmt: skip


def made(name: str) -> tuple[Path, Path]:
    arch, both, of_a, edit, of_b, _ = ROWS[name]
    stem = name.replace(" ", "-").replace(",", "")
    a = files.copy(tiny_folder(arch), f"flags-{stem}-a", tensors=both, config=of_a)
    return a, files.copy(a, f"flags-{stem}-b", tensors=edit, config=of_b)


@pytest.mark.parametrize("swapped", (False, True), ids=("in B", "in A"))
@pytest.mark.parametrize("question", ("diff", "diagnose"))
@pytest.mark.parametrize("name", ROWS)
def test_what_the_flag_changes_is_said(name: str, question: str, swapped: bool) -> None:
    cause, (a, b) = ROWS[name][-1], made(name)
    pair = (b, a) if swapped else (a, b)
    done = command(question, *pair, "--json")
    causes = [row["cause"] for row in done.json["causes"]]
    assert (done.code, causes) == ((1, [cause]) if cause else (0, [])), done.out
    if not cause:
        return
    side = "A" if swapped else "B"
    assert f"of {side}'s configuration is" in done.out
    if question == "diagnose":
        assert done.json["causes"][0]["level"] == "confirmed"
    (said, *_) = done.json["next"]
    verb, path, *rest = shlex.split(said)[1:]
    fixed = place(f"{b.name}-mended")
    assert (verb, path) == ("set", str(b)), said
    assert command(verb, path, *rest[:-2], "-o", fixed, "--force").code == 0
    assert command(question, a, fixed).code == 0


def test_transformers_takes_the_readings_that_are_stated() -> None:
    """A missing head is drawn anew; a head that the flag denies is kept, with a warning."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for name, missing in (("not tied, without a head", True), ("tied, with a head of its own", 0)):
        b = made(name)[1]
        model, info = transformers.AutoModelForCausalLM.from_pretrained(b, output_loading_info=True)
        head, table = model.lm_head.weight, model.model.embed_tokens.weight
        assert (HEAD in info["missing_keys"]) == bool(missing)
        assert not torch.equal(head, table)
