"""What was made of a model is derived, with what was done; what was lost is not.

Seen red: zeros of any size counted as pruned, a correlation printed as 1.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.compare import diff
from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.diagnosis.diagnosis_text import first_lines
from aprfmt.model import open_model
from tests.cli import run
from tests.conversion.folders import tensors_of
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.faults import DEMO
from tests.diagnosis.files import Rows
from tests.field import hf


def half(x: Any) -> Any:
    """Set the smaller half of the values to zero."""
    return np.where(np.abs(x) < np.quantile(np.abs(x), 0.5), 0, x)


def two_of_four(x: Any) -> Any:
    """Set the two smallest of every four values to zero."""
    fours = x.reshape(-1, 4).copy()
    np.put_along_axis(fours, np.argsort(np.abs(fours), 1)[:, :2], 0, 1)
    return fours.reshape(x.shape)


def large_half(x: Any) -> Any:
    """Set the larger half of the values to zero."""
    return np.where(np.abs(x) >= np.quantile(np.abs(x), 0.5), 0, x)


def moved(x: Any) -> Any:
    """Add a little to every value."""
    return x + 0.02 * x.std() * np.random.default_rng(x.size).standard_normal(x.shape)


def answer(name: str, words: tuple[str, ...], change: object) -> Diagnosis:
    """Return what is said of a tiny model with some matrices changed."""

    def edit(rows: Rows) -> None:
        for each in [each for each in rows if any(word in each for word in words)]:
            files.edit(each, change)(rows)  # type: ignore[arg-type]

    source = tiny_folder("llama")
    return diagnose(str(source), str(files.copy(source, f"derived-{name}", tensors=edit)))


@pytest.mark.parametrize(
    ("words", "change", "says"),
    [
        (("mlp.",), half, "pruned, 50 % of the values are zero, small ones, and all others equal"),
        (("proj",), half, "pruned, 50 % of the values are zero"),
        (("layers.2.mlp",), half, "in layer 2 alone"),
        (("proj",), two_of_four, "pruned, 2 of every 4 values are zero and all others equal"),
        (("mlp.",), moved, "trained further"),
        (("lm_head",), moved, "trained further: output.weight alone"),
    ],
    ids=["mlp", "all", "a-layer", "2-of-4", "trained", "head"],
)
def test_what_was_done_is_said_once(words: tuple[str, ...], change: object, says: str) -> None:
    found = answer(f"{change.__name__}-{words[0]}", words, change)  # type: ignore[attr-defined]
    assert (found.kind, found.cause) == ("derived", "derived")
    lines = [text for text, _ in first_lines(found)]
    assert sum(says in text for text in lines) == 1, lines
    assert "at least 0.9" in lines[0]


def exchanged(rows: np.ndarray) -> np.ndarray:
    """Return a matrix with two of its rows exchanged."""
    out = rows.copy()
    out[[3, 7]] = rows[[7, 3]]
    return out


@pytest.mark.parametrize(
    ("fault", "cause"), [(lambda x: 1.5 * x, "scale"), (exchanged, "row_offset")]
)
def test_a_confirmed_fault_beats_derived(
    fault: Callable[[np.ndarray], np.ndarray], cause: str
) -> None:
    """Seen red: `derived` of one matrix, above the place and the certainty of a scaled other."""

    def edit(rows: Rows) -> None:
        for name in [name for name in rows if name.endswith("o_proj.weight")]:
            files.edit(name, moved)(rows)
        for name in [name for name in rows if name.endswith("q_proj.weight")]:
            files.edit(name, fault)(rows)

    source = tiny_folder("llama")
    there = files.copy(source, f"derived-and-{cause}", tensors=edit)
    found = diagnose(str(source), str(there))
    assert (found.kind, found.exit_code, found.cause) == ("bug", 1, cause), found.sentence
    lines = [text for text, _ in first_lines(found)]
    assert lines[0].startswith(f"bug: {cause}") and "; apart from that B is derived: " in lines[0]
    assert "attn_output" in lines[0] and "q_proj.weight" in lines[1], lines


def less(name: str, x: Any, share: float, own: bool) -> Any:
    """Take a share of one direction of the stream out of a matrix; `own`: of a row of its own."""
    table = "embed_tokens" in name
    width = x.shape[1] if table else x.shape[0]
    v = np.random.default_rng(9).standard_normal(width)
    v /= np.linalg.norm(v)
    w = x.T if table else x
    row = np.random.default_rng(x.size).standard_normal(w.shape[1]) if own else v @ w
    made = w - share * np.outer(v, row)
    return made.T if table else made


@pytest.mark.parametrize(
    ("words", "share", "own", "says"),
    [
        (("o_proj", "down_proj"), 1.0, False, "one direction of the stream was removed from "),
        (("embed_tokens", "o_proj", "down_proj"), 1.0, False, "the stream was removed from "),
        (("down_proj",), 1.0, False, "one direction of the stream was removed from "),
        (("o_proj", "down_proj"), 0.5, False, "0.5 to 0.5 of one direction of the stream"),
        (("o_proj", "down_proj"), 0.1, True, "an adapter was merged"),
    ],
    ids=["writers", "table-too", "mlp", "half", "an-adapter"],
)
def test_a_direction_of_the_stream_that_was_removed(
    words: tuple[str, ...], share: float, own: bool, says: str
) -> None:
    """Seen red: called a merged adapter of rank 1."""

    def edit(rows: Rows) -> None:
        for name in [name for name in rows if any(word in name for word in words)]:
            files.edit(name, lambda x, name=name: less(name, x, share, own))(rows)  # type: ignore[misc]

    source = tiny_folder("llama")
    made = files.copy(source, f"direction-{share}-{own}-{'-'.join(words)}", tensors=edit)
    found = diagnose(str(source), str(made))
    assert found.kind == "derived", found.sentence
    assert says in found.sentence
    assert ("of the stream" in found.sentence) is not own


def test_zeros_that_are_not_small_are_no_pruning() -> None:
    found = answer("large", ("mlp.",), large_half)
    assert "pruned" not in found.sentence


@pytest.mark.parametrize("more", [-8, 8])
def test_a_training_with_other_rows_of_tokens_is_derived_with_both(more: int) -> None:
    """Rows that no id of the tokenizer reaches, cut or added, while all weights were trained."""

    def edit(rows: Rows) -> None:
        for name in [name for name in rows if len(rows[name][1]) > 1]:
            files.edit(name, moved)(rows)
        for name in [
            name for name in rows if name.endswith(("embed_tokens.weight", "lm_head.weight"))
        ]:
            files.edit(name, resized)(rows)

    def resized(x: Any) -> Any:
        return x[:more] if more < 0 else np.concatenate([x, x[:more] * 0.01])

    source = tiny_folder("llama")
    size = len(files.values(tensors_of(source), "model.embed_tokens.weight")) + more
    there = files.copy(source, f"derived-rows-{more}", tensors=edit, config={"vocab_size": size})
    found = diagnose(str(source), str(there))
    assert (found.kind, found.exit_code) == ("derived", 1), found.sentence
    assert "trained further" in found.sentence and "8 more rows after" in found.sentence


def test_trained_biases_are_not_rounded() -> None:
    """They moved by more than their own size, though by less than a unit of their largest."""

    def store(rows: Rows, step: float) -> None:
        for name in [name for name, row in rows.items() if row[0] == "F32"]:
            x, rng = files.values(rows, name), np.random.default_rng(len(name))
            if name.endswith("bias"):
                x = rng.standard_normal(x.shape) / 300
                x[0], step_of = 3.0, step * 0.003
            else:
                step_of = step * 0.02 * x.std()
            x = x + step_of * np.random.default_rng(x.size).standard_normal(x.shape)
            rows[name] = ("BF16", x.shape, x.astype(ml_dtypes.bfloat16).tobytes())

    source = tiny_folder("qwen2")
    pair = [
        files.copy(source, f"derived-bias-{step}", tensors=lambda rows: store(rows, step))  # noqa: B023
        for step in (0, 1)
    ]
    rows = diff(*pair).tensors
    found = {row.key: row.explanation for row in rows if row.key.endswith(".bias")}
    assert found and {one.cause for one in found.values() if one} == {"derived"}, found


def stops_elsewhere(values: Any) -> None:
    """Name another token as the tokenizer's end."""
    values["eos_token"] = "<|endoftext|>"


def stops_once(values: Any) -> None:
    """Stop at one id instead of two."""
    values["eos_token_id"] = 1533


def cut_merges(values: Any) -> None:
    """Leave the last merges out."""
    del values["model"]["merges"][-200:]


def train(state: hf.State) -> None:
    """Change every matrix a little."""
    for name in [name for name in state if state[name].ndim == 2]:
        noise = np.random.default_rng(len(name)).standard_normal(state[name].shape)
        spread = 0.02 * state[name].float().std().item()
        state[name] = (state[name].float() + spread * state[name].new_tensor(noise).float()).to(
            state[name].dtype
        )


BESIDE = {
    "tokenizer_config": ("tokenizer_config.json", hf.json_edit(stops_elsewhere), "special_ids"),
    "generation_config": (
        "generation_config.json", hf.json_edit(stops_once), "generation_config",
    ),
    "template": (
        "chat_template.jinja", lambda text: text.replace("'<|im_end|>' + ", ""), "chat_template",
    ),
    "merges": ("tokenizer.json", hf.json_edit(cut_merges), "tokenizer_merges"),
}  # fmt: skip
SET_BACK = {"tokenizer_config", "generation_config"}


@pytest.mark.parametrize("kind", BESIDE)
def test_a_training_does_not_hide_another_tokenizer_or_stop(kind: str) -> None:
    """Seen red: tokenizers were compared only where nothing was trained."""
    file, edit, cause = BESIDE[kind]
    there = hf.copy(DEMO, f"derived-beside-{kind}", train, files={file: edit})
    found = diagnose(str(DEMO), str(there))
    assert (found.kind, found.exit_code) == ("derived", 1), found.sentence
    lines = [text for text, _ in first_lines(found)]
    assert lines[0].endswith(f"; apart from the weights: {cause}")
    assert sum(line.startswith(f"  {cause} (confirmed") for line in lines) == 1, lines
    if kind in SET_BACK:  # what mends is printed first; run, it leaves the training alone
        words = shlex.split(found.next[0])
        assert words[:3] == ["aprfmt", "set", str(there)], found.next
        done = there.parent / f"derived-beside-{kind}-fixed"
        assert run.aprfmt("set", *words[2:-1], done, "--force").code == 0
        again = diagnose(str(DEMO), str(done))
        assert (again.kind, {one.cause for one in again.findings}) == ("derived", {"derived"})


def keyed(**values: Any) -> Callable[[str], str]:
    """Return an edit that sets keys of a JSON file."""
    return hf.json_edit(lambda held: held.update(values))


Edits = Mapping[str, Callable[[str], str | None]]
# What both sides say of ends: a base that ends texts with <|endoftext|>.
BASE = {
    "tokenizer_config.json": keyed(eos_token="<|endoftext|>", pad_token="<|endoftext|>"),
    "generation_config.json": keyed(eos_token_id=1533),
    "config.json": keyed(eos_token_id=1533),
}
TOKENIZER = "tokenizer_config.json"
ENDING_TEXT = "chat_template.jinja"
# what the training changed -> (edits of A, edits of B, what is set in B, "" for nothing)
MEANT: Mapping[str, tuple[Edits, Edits, str]] = {
    # https://github.com/hiyouga/LlamaFactory/issues/9338
    "eos": ({}, {TOKENIZER: keyed(eos_token="<|im_end|>")},
            "generation_config.json:eos_token_id=[1533, 1535]"),
    "eos, no generation_config": (
        {"generation_config.json": lambda _: None},
        {TOKENIZER: keyed(eos_token="<|im_end|>"), "generation_config.json": lambda _: None},
        "config.json:eos_token_id=[1533, 1535]"),
    "eos and what stops": (
        {}, {TOKENIZER: keyed(eos_token="<|im_end|>"),
             "generation_config.json": keyed(eos_token_id=[1533, 1535])}, ""),
    "template": ({ENDING_TEXT: lambda text: text.replace("<|im_end|>", "<|endoftext|>")}, {},
                 "generation_config.json:eos_token_id=[1533, 1535]"),
    "pad": ({}, {TOKENIZER: keyed(pad_token="<|im_end|>")}, ""),
    "bos": ({TOKENIZER: keyed(bos_token="<|endoftext|>")},
            {TOKENIZER: keyed(bos_token="<|im_start|>")}, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", MEANT)
def test_no_command_undoes_what_a_training_meant(what: str) -> None:
    """B is made whole in its own direction, or left. Seen red: A's end was set in B."""
    of_a, of_b, wanted = MEANT[what]
    stem = f"derived-meant-{what.replace(' ', '-').replace(',', '')}"
    base = hf.copy(DEMO, f"{stem}-base", files=BASE)
    a = hf.copy(base, f"{stem}-a", files=of_a)
    b = hf.copy(base, f"{stem}-b", train, files=of_b)
    found = diagnose(str(a), str(b))
    assert found.kind == "derived" and len(found.findings) > 1, found.sentence
    mends = [command for command in found.next if command.startswith("aprfmt set ")]
    assert [shlex.split(command)[3] for command in mends] == [wanted] * bool(wanted), found.next
    if wanted:
        done = b.parent / f"{stem}-fixed"
        assert run.aprfmt(*shlex.split(mends[0])[1:-1], done, "--force").code == 0
        (row,) = [row for row in run.aprfmt("validate", done, "--json").json["checks"]
                  if row["name"] == "special_ids"]  # fmt: skip
        assert row["outcome"] == "PASS" and "turns" not in str(row), row
        with open_model(done) as made, open_model(b) as before:
            assert made.carried.token_ids() == before.carried.token_ids()
