"""Tables of tokens of two lengths: the rows that both have are compared, and what is behind said.

Seen red: exit 2, "models of other sizes: vocab_size", for a resized model with a random head; rows
of tokens that B alone has as "row_offset", to be undone by writing A again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder
from tests.diagnosis.faults import DEMO
from tests.diagnosis.files import Rows

EMBD, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB = 1536  # rows and ids of the demo model


def widened(raw: bytes) -> Any:
    """Return the float32 values of bfloat16 bytes."""
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def shortened(values: Any) -> bytes:
    """Return the bfloat16 bytes of values, cut off."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype("<u2").tobytes()


def rows_of(data: dict[str, Any], name: str) -> Any:
    """Return a table as float32 [rows, columns]."""
    return widened(data[name][2]).reshape(data[name][1])


def untied(rows: Rows) -> None:
    """Give the demo model a head of its own: its embedding with some noise."""
    table = rows_of(rows, EMBD)
    noise = 0.02 * np.random.default_rng(5).standard_normal(table.shape)
    rows[HEAD] = ("BF16", table.shape, shortened(table + noise))


def grown(table: Any, more: int) -> Any:
    """Return a table with rows near its mean behind, as `resize_token_embeddings` adds."""
    noise = 0.01 * np.random.default_rng(6).standard_normal((more, table.shape[1]))
    return np.concatenate([table, table.mean(0) + noise])


def drawn(rows: int, columns: int) -> Any:
    """Return fresh normal numbers of the configuration's initializer_range."""
    return 0.02 * np.random.default_rng(7).standard_normal((rows, columns))


def shifted(table: Any) -> Any:
    """Return rows that all stand one later."""
    return np.roll(table, 1, axis=0)


def of_zeros(table: Any) -> Any:
    """Return a table of which ten rows were never written."""
    table = table.copy()
    table[100:110] = 0
    return table


SOURCE = {"tie_word_embeddings": False}
CHANGES: dict[str, tuple[int, Any, Any]] = {
    # rows, then what the embedding and the head of A become
    "random-head": (VOCAB + 8, lambda e: grown(e, 8), lambda h: drawn(VOCAB + 8, h.shape[1])),
    "random-embedding": (VOCAB + 8, lambda e: drawn(VOCAB + 8, e.shape[1]), lambda h: grown(h, 8)),
    "padded-random-head": (
        1600, lambda e: np.pad(e, ((0, 64), (0, 0))), lambda h: drawn(1600, h.shape[1]),
    ),
    "doubled-head": (VOCAB + 8, lambda e: grown(e, 8), lambda h: 2 * grown(h, 8)),
    "shifted-head": (VOCAB + 8, lambda e: grown(e, 8), lambda h: shifted(grown(h, 8))),
    "zero-rows": (VOCAB + 8, lambda e: grown(e, 8), lambda h: of_zeros(grown(h, 8))),
    "resized": (VOCAB + 8, lambda e: grown(e, 8), lambda h: grown(h, 8)),
    "cut": (1400, lambda e: e[:1400], lambda h: h[:1400]),
    "cut-random-head": (1400, lambda e: e[:1400], lambda h: drawn(1400, h.shape[1])),
}  # fmt: skip


def source() -> Path:
    """Return the demo model with a head of its own."""
    return files.copy(DEMO, "tables-source", tensors=untied, config=SOURCE)


def changed(name: str, added: bool = False) -> Path:
    """Return A with the tables of CHANGES; with `added` its tokenizer gets tokens for new rows."""
    count, embedding, head = CHANGES[name]

    def edit(rows: Rows) -> None:
        untied(rows)
        for key, change in ((EMBD, embedding), (HEAD, head)):
            table = change(rows_of(rows, key))
            rows[key] = ("BF16", table.shape, shortened(table))

    config = {**SOURCE, "vocab_size": count}
    folder = files.copy(DEMO, f"tables-{name}-{added}", tensors=edit, config=config)
    if added:
        path = folder / "tokenizer.json"
        data = json.loads(path.read_text())
        like = data["added_tokens"][0]
        data["added_tokens"] += [
            {**like, "id": VOCAB + i, "content": f"<|new{i}|>"} for i in range(count - VOCAB)
        ]
        path.write_text(json.dumps(data))
    return folder


def judged(name: str, added: bool = False, ending: str = "") -> Diagnosis:
    """Return what is said of a changed copy, in another container where `ending` names one."""
    b = changed(name, added)
    if ending:
        path = place(f"tables-{name}{ending}")
        path.unlink(missing_ok=True)
        aprfmt.convert(b, path)
        b = path
    return diagnose(str(source()), str(b))


@pytest.mark.parametrize(
    ("name", "cause", "where", "says"),
    [
        ("random-head", "stale_tensor", "output.weight", "B was never trained or loaded here"),
        ("random-embedding", "stale_tensor", "token_embd.weight", "B was never trained or loaded"),
        ("padded-random-head", "stale_tensor", "output.weight", "B was never trained or loaded"),
        ("doubled-head", "scale", "output.weight", "B's values are A's times 2"),
        ("shifted-head", "row_offset", "output.weight", "A's 1536 rows are rows 1 to 1536 of B"),
        ("zero-rows", "stale_tensor", "output.weight", "in 10 of 1536 rows: 100, 101"),
        ("cut-random-head", "stale_tensor", "output.weight", "B was never trained or loaded here"),
        ("cut", "row_offset", "output.weight", "B's 1400 rows are rows 0 to 1399 of A"),
    ],
)
def test_a_fault_beside_another_number_of_tokens(
    name: str, cause: str, where: str, says: str
) -> None:
    found = judged(name)
    assert (found.kind, found.exit_code) == ("bug", 1)
    (fault,) = [one for one in found.findings if one.cause == cause and where in one.where]
    assert says in fault.says + fault.detail
    if "cut" not in name:
        assert found.lead is fault
        (other,) = [one for one in found.findings if one.cause == "padded_vocabulary"]
        assert other.verdict == "same" and fault.where[0] not in other.where


@pytest.mark.parametrize("ending", [".gguf", ".apr"])
def test_in_another_container(ending: str) -> None:
    found = judged("random-head", ending=ending)
    assert (found.kind, found.cause) == ("bug", "stale_tensor")
    assert "output.weight" in (found.lead.where if found.lead else ())


def test_rows_of_tokens_that_one_side_added() -> None:
    found = judged("resized", added=True)
    assert (found.kind, found.exit_code) == ("derived", 1)
    assert "8 more rows after the 1536 of A, for ids that A's tokenizer does not have" in (
        found.sentence
    )
    assert not [one for one in found.findings if one.cause == "row_offset"]
    assert not [command for command in found.next if "convert" in command]
    report = aprfmt.diff(source(), changed("resized", added=True))
    assert [one.cause for one in report.findings] == ["derived"]
    assert not [command for command in report.next if "convert" in command]


def test_a_fault_beside_rows_of_added_tokens() -> None:
    found = judged("random-head", added=True)
    assert (found.kind, found.cause) == ("bug", "stale_tensor")
    assert {one.cause for one in found.findings} == {"stale_tensor", "derived", "added_tokens"}


def test_a_resized_model_is_the_same() -> None:
    assert judged("resized").kind == "same"


def test_the_fault_is_said_before_the_rows_behind() -> None:
    report = aprfmt.diff(source(), changed("random-head"))
    assert [one.cause for one in report.findings] == ["stale_tensor", "padded_vocabulary"]


@pytest.mark.parametrize(("said", "kind"), [(97, "bug"), (91, "same")])
def test_rows_that_the_own_key_counts_are_no_padding(said: int, kind: str) -> None:
    """Seen red: "same, confirmed" of a table without the last rows that B's own key counts."""

    def cut(rows: Rows) -> None:
        for name in (EMBD, HEAD):
            files.edit(name, lambda table: table[:91])(rows)

    source = tiny_folder("llama")
    b = files.copy(source, f"tables-own-key-{said}", tensors=cut, config={"vocab_size": said})
    found = diagnose(str(source), str(b))
    assert (found.kind, found.exit_code) == (kind, int(kind == "bug"))
    assert found.cause == ("row_offset" if kind == "bug" else "padded_vocabulary")


def trimmed(first: int, moves: bool) -> Path:
    """Return the demo model without 60 tokens, from about the share `first` / 3 of its merges on.

    The tokens left have new ids. With `moves` their rows move with them, else the first rows stay.
    """
    kept: list[int] = []

    def cut(data: dict[str, Any]) -> None:
        vocab, merges = data["model"]["vocab"], data["model"]["merges"]
        pairs = [one.split(" ") if isinstance(one, str) else one for one in merges]
        parts = {part for pair in pairs for part in pair}
        free = [pair for pair in pairs if "".join(pair) not in parts]
        lost = {"".join(pair) for pair in free[first * len(free) // 3 :][:60]}
        kept[:] = [i for i in range(VOCAB) if i not in {vocab[text] for text in lost}]
        ids = {old: new for new, old in enumerate(kept)}
        data["model"]["vocab"] = {t: ids[i] for t, i in vocab.items() if t not in lost}
        data["model"]["merges"] = [
            one for one, pair in zip(merges, pairs, strict=True) if "".join(pair) not in lost
        ]
        for token in data["added_tokens"]:
            token["id"] = ids[token["id"]]

    def edit(rows: Rows) -> None:
        table = rows_of(rows, EMBD)
        table = table[kept] if moves else table[: len(kept)]
        rows[EMBD] = ("BF16", table.shape, shortened(table))

    data = json.loads((DEMO / "tokenizer.json").read_text())
    cut(data)
    name = f"tables-trimmed-{first}-{moves}"
    folder = files.copy(DEMO, name, tensors=edit, config={"vocab_size": len(kept)})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_of_a_trimmed_vocabulary_are_those_of_its_tokens(first: int) -> None:
    """Seen red: "derived", where the rows of all tokens behind the cut are other tokens'."""
    stayed = diagnose(str(DEMO), str(trimmed(first, moves=False)))
    assert stayed.verdict == "bug"
    fault = next(one for one in stayed.findings if one.cause == "value_order")
    assert fault.where == ("token_embd.weight",) and fault.confirmed
    assert "rows of B are those of other tokens" in fault.says
    moved = diagnose(str(DEMO), str(trimmed(first, moves=True)))
    assert moved.verdict == "not_comparable"  # of other weights: derived
    said = next(one.says for one in moved.findings if one.cause == "derived")
    assert "60 more rows, for ids that B's tokenizer does not have" in said
    assert "rows of the tokens that both have are equal, at other ids" in said
