"""What `diagnose` says of an encoder's trace with one thing changed (the faults are the table's).

Seen red: a causal mask named a window, positions and biases of scores not named.
"""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from aprfmt.model.hf_folder import WEIGHTS
from tests.cli.run import aprfmt
from tests.diagnosis.changed_encoders import CHANGED, changed_trace, pooled_otherwise


@pytest.mark.parametrize("fault", CHANGED)
def test_the_cause_of_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    cause, first = CHANGED[fault][3:5]
    path = tmp_path / "trace.safetensors"
    found = aprfmt("diagnose", path, changed_trace(fault, path), "--json")
    assert found.code == 1, found.err
    [told] = found.json["findings"]
    assert (told["cause"], told["confirmed"], told["first"]) == (cause, True, first), told


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
