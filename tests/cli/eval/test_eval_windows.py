"""`eval` on texts of several windows, against transformers and against llama.cpp's own library.

Seen red: BOS before the first window only; a window's first token scored after the last token of
the window before; the row of another label.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.run import aprfmt
from tests.llama import needs_llama, tokenized

BOS = 1534  # <|im_start|>
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be "
    "on his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered the rightful property of some one or other of "
    "their daughters."
)


@pytest.fixture(scope="module")
def with_bos(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The demo model with a tokenizer that puts BOS before a text, in every format."""
    folder = tmp_path_factory.mktemp("bos") / "folder"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        found = json.loads((demo_model / name).read_text())
        if name == "tokenizer_config.json":
            found |= {"bos_token": "<|im_start|>", "add_bos_token": True}
        elif "bos_token_id" in found:
            found["bos_token_id"] = BOS
        (folder / name).write_text(json.dumps(found))
    tokenizer = json.loads((demo_model / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    first, second = ({"Sequence": {"id": side, "type_id": 0}} for side in "AB")
    special = {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {"<|im_start|>": special},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes((demo_model / "model.safetensors").read_bytes())
    made = {"folder": folder, "apr": folder.parent / "m.apr", "gguf": folder.parent / "m.gguf"}
    for form in ("apr", "gguf"):
        assert aprfmt("convert", folder, made[form], "--encoding", "F32").code == 0
    (folder.parent / "text.txt").write_text(TEXT)
    return made | {"text": folder.parent / "text.txt"}


def judge(folder: Path) -> Any:
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def plain_ids(folder: Path, **options: Any) -> list[int]:
    """Return transformers' tokens of the text, by default without special tokens."""
    import transformers

    loader: Any = transformers.AutoTokenizer
    ids: list[int] = loader.from_pretrained(folder)(TEXT, **options)["input_ids"]
    return ids


def nats(model: Any, windows: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return transformers' mean loss, and how many labels: every token behind a window's first."""
    losses = []
    with torch.no_grad():
        for window in windows:
            logits = model(torch.tensor([window])).logits[0, :-1]
            labels = torch.tensor(window[1:])
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    joined = torch.cat(losses).double()
    return float(joined.mean()), len(joined)


@pytest.mark.parametrize("form", ["folder", "apr", "gguf"])
def test_every_window_begins_with_bos_as_in_transformers(
    form: str, with_bos: Mapping[str, Path]
) -> None:
    ids = plain_ids(with_bos["folder"], add_special_tokens=False)
    assert plain_ids(with_bos["folder"]) == [BOS, *ids]
    model = judge(with_bos["folder"])
    for size in (24, 4096):
        pieces = [[BOS, *ids[at : at + size - 1]] for at in range(0, len(ids), size - 1)]
        expected, labels = nats(model, pieces)
        done = aprfmt(
            "eval", with_bos[form], "--text", with_bos["text"], "--json", "--max-seq-len", size
        )
        assert done.json["loss"] == pytest.approx(expected, abs=1e-4)
        assert done.json["loss_tokens"] == labels == len(ids)
        assert done.json["bos"] == {
            "ids": [BOS],
            "tokens": ["<|im_start|>"],
            "windows": len(pieces),
        }
        assert (done.json["windows"], done.json["overlap"]) == (len(pieces), 0)
        assert (done.json["convention"], done.json["max_seq_len"]) == ("disjoint", size)
    shown = aprfmt(
        "eval", with_bos[form], "--text", with_bos["text"], "--max-seq-len", 24, "-v"
    ).out
    count = -(-len(ids) // 23)
    assert f"{count} of at most 24 tokens, overlap 0, disjoint" in shown
    assert f"<|im_start|> (1534) before {count} of {count} windows" in shown
    assert f"{len(ids)} labels" in shown


def test_without_bos_windows_share_no_token_as_in_transformers(
    demo_model: Path, with_bos: Mapping[str, Path]
) -> None:
    ids = plain_ids(demo_model)
    expected, labels = nats(judge(demo_model), [ids[at : at + 24] for at in range(0, len(ids), 24)])
    args = ("eval", demo_model, "--text", with_bos["text"], "--max-seq-len", 24)
    done = aprfmt(*args, "--json")
    assert done.json["loss"] == pytest.approx(expected, abs=1e-4)
    assert done.json["loss_tokens"] == labels == len(ids) - done.json["windows"]
    assert done.json["bos"] == {"ids": [], "tokens": [], "windows": 0}
    overlapping = aprfmt(*args, "--overlap", 1, "--json").json
    assert overlapping["loss_tokens"] == len(ids) - 1


def test_ids_without_the_bos_that_the_model_adds_are_warned_of(
    with_bos: Mapping[str, Path],
) -> None:
    done = aprfmt("eval", with_bos["folder"], "--ids", "5,6,7,8", "--json")
    assert "does not begin with <|im_start|>" in done.err and done.json["bos"]["ids"] == []
    done = aprfmt(
        "eval", with_bos["folder"], "--ids", f"{BOS},5,6,7,8", "--max-seq-len", 3, "--json"
    )
    assert done.err == "" and done.json["bos"]["windows"] == done.json["windows"] == 2


def test_what_a_convention_has_no_word_for_is_refused(demo_model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "samples.jsonl"
    lines.write_text('{"prompt": "It is", "response": " a truth"}')
    for more, named in (
        (("--overlap", 1, "--ids", "1,2"), "--overlap"),
        (("--samples", lines), "prompt with its response"),
    ):
        done = aprfmt("eval", demo_model, *more, "--convention", "llama.cpp", "--json")
        assert done.code == 2 and named in done.json["error"]["message"]
    done = aprfmt("eval", demo_model, "--ids", "1,2,3", "--convention", "llama.cpp", "--json")
    assert done.code == 2 and "fill no window of 512" in done.json["skipped"][0]


def test_logits_held_in_parts_are_those_of_one_pass(
    with_bos: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (
        "eval",
        with_bos["apr"],
        "--text",
        with_bos["text"],
        "--against",
        with_bos["gguf"],
        "--dtype",
        "float64",
        "--json",
    )
    whole = aprfmt(*args).json
    monkeypatch.setattr("aprfmt.inference.loss.LOGIT_BYTES", 4 * 1536 * 7)
    parts = aprfmt(*args).json
    for key in ("loss", "loss_tokens"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-12)
        assert parts["against"][key] == pytest.approx(whole["against"][key], rel=1e-12)
    assert parts["against"]["divergence"]["tokens"] == whole["loss_tokens"]


def expected_by_llama_perplexity(path: Path, size: int, text: str) -> tuple[float, int]:
    """Return the mean loss and labels as llama.cpp's tool counts them, by its library's logits.

    The first of `size` tokens is replaced by BOS if the library adds one; row r of a chunk is
    scored for size/2 <= r < size - 1.
    """
    from aprfmt.inference.engines.llama_library import Library

    library = Library.open()
    losses = []
    with library.model(path) as model:
        vocab = library.vocab_size(model)
        tokens, bos = tokenized(library, model, text)
        for at in range(0, len(tokens) // size * size, size):
            chunk = tokens[at : at + size]
            fed = chunk if bos is None else [bos, *chunk[1:]]
            with library.context(model, size, 1) as context:
                assert library.decode(context, fed) == 0
                for row in range(size // 2, size - 1):
                    logits = library.logits(context, row, vocab).astype(np.float64)
                    wide = logits - logits.max()
                    losses.append(math.log(np.exp(wide).sum()) - wide[chunk[row + 1]])
    return float(np.mean(losses)), len(losses)


@needs_llama
@pytest.mark.parametrize("size", [16, 33])
def test_llama_perplexity_is_computed_alike(
    size: int, with_bos: Mapping[str, Path], demo_model: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.gguf"
    assert aprfmt("convert", demo_model, plain, "--encoding", "F32").code == 0
    for path, first in ((with_bos["gguf"], [BOS]), (plain, [])):
        expected, labels = expected_by_llama_perplexity(path, size, TEXT)
        found = aprfmt(
            "eval",
            path,
            "--text",
            with_bos["text"],
            "--convention",
            "llama.cpp",
            "--max-seq-len",
            size,
            "--json",
        ).json
        assert found["loss"] == pytest.approx(expected, abs=1e-5)
        assert found["loss_tokens"] == labels and found["bos"]["ids"] == first
