"""What `diagnose` says of an encoder's trace with one thing changed (the faults are the table's).

Seen red: a causal mask named a window, positions and biases of scores not named.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from aprfmt.model.hf_folder import WEIGHTS
from tests.cli.run import aprfmt
from tests.diagnosis.changed_encoders import CHANGED, changed_trace, pooled_otherwise
from tests.inference.encoders import IDS, encoded, pooled


@pytest.mark.parametrize("fault", CHANGED)
def test_the_cause_of_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    cause, first = CHANGED[fault][3:5]
    path = tmp_path / "trace.safetensors"
    found = aprfmt("diagnose", path, changed_trace(fault, path), "--json")
    assert found.code == 1, found.err
    [told] = found.json["findings"]
    assert (told["cause"], told["confirmed"], told["first"]) == (cause, True, first), told


def embedding_dump(
    kind: str, path: Path, *, unit: bool = True, rows: bool = True, name: str = "text_embeds"
) -> Path:
    """Write an engine's embedding, which pools by `kind`, and with `rows` the last rows."""
    held = encoded("bert")
    made = pooled(held.rows, kind)
    made = made / np.linalg.norm(made) if unit else made
    arrays: dict[str, Any] = {"input_ids": np.array(IDS), name: made.astype(np.float32)}
    if rows:
        arrays["last_hidden_state"] = held.rows.astype(np.float32)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(
    ("kind", "says"),
    [("mean", "the mean of the last layer's rows"), ("last", "the last row of the last layer")],
)
def test_another_pooling_is_named_by_the_embedding_alone(
    kind: str, says: str, rows: bool, unit: bool, tmp_path: Path
) -> None:
    """Seen red: "not comparable", and a command whose mapping left the embedding out."""
    name = "text_embeds" if unit else "sentence_embedding"
    dump = embedding_dump(kind, tmp_path / "dump.npz", unit=unit, rows=rows, name=name)
    found = aprfmt("diagnose", pooled_otherwise()[0], dump, "--json")
    (one,) = found.json["causes"]
    assert (found.code, one["cause"], one["level"]) == (1, "pooling", "confirmed"), one
    assert one["says"].endswith(f"the embedding is {says} ({kind}); the model says cls"), one


@pytest.mark.parametrize("unit", [True, False])
def test_a_right_embedding_is_none_whatever_its_length(unit: bool, tmp_path: Path) -> None:
    """Seen red: 7.3 apart, of an embedding of length 1."""
    dump = embedding_dump("cls", tmp_path / "dump.npz", unit=unit)
    found = aprfmt("diagnose", pooled_otherwise()[0], dump, "--json")
    assert found.code == 0 and not [c for c in found.json["causes"] if c["cause"] != "rounding"]


def test_an_embedding_of_other_rows_is_no_pooling(tmp_path: Path) -> None:
    """Of the second row alone: no pooling of the table makes it."""
    made = encoded("bert").rows[1]
    np.savez(tmp_path / "dump.npz", input_ids=np.array(IDS), text_embeds=np.float32(made))
    found = aprfmt("diagnose", pooled_otherwise()[0], tmp_path / "dump.npz", "--json")
    assert found.code == 1 and all(c["cause"] != "pooling" for c in found.json["causes"])


def with_wordpieces(folder: Path) -> Path:
    """Give an encoder of 57 tokens BERT's own kind of tokenizer, which names no end of text."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(52))]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    keys = '"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"'
    (folder / "tokenizer_config.json").write_text("{" + keys + "}")
    return folder


def test_what_an_encoder_has_in_gguf_is_no_fault_and_its_pooling_is(tmp_path: Path) -> None:
    """Seen red: [SEP] named eos by our own writer, another pooling "not comparable"."""
    from safetensors.numpy import load_file, save_file

    folder = with_wordpieces(Path(shutil.copytree(str(pooled_otherwise()[0]), tmp_path / "a")))
    held = {k: v for k, v in load_file(folder / WEIGHTS).items() if "pooler" not in k}
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    b, other, mended = (tmp_path / name for name in ("b.gguf", "other.gguf", "mended.gguf"))
    assert aprfmt("convert", folder, b, "--quiet").code == 0
    assert aprfmt("diagnose", folder, b).code == 0
    assert aprfmt("set", b, "bert.pooling_type=1", "-o", other, "--quiet").code == 0
    found = aprfmt("diagnose", folder, other, "--json")
    (one,) = found.json["causes"]
    assert (found.code, one["cause"], one["level"]) == (1, "pooling", "confirmed")
    step = one["remedy"]["command"].split()
    assert step[:2] == ["aprfmt", "set"] and "bert.pooling_type=2" in step
    assert aprfmt("set", other, "bert.pooling_type=2", "-o", mended, "--quiet").code == 0
    assert aprfmt("diagnose", folder, mended).code == 0
