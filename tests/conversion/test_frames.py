"""The ids that a copy's tokenizer puts around a text are held to those of its source.

llama.cpp puts [CLS] and [SEP] around every text of a WordPiece vocabulary, and has keys for one BOS
and one EOS around the others. Seen red: "verified" for a copy whose texts begin or end otherwise.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.diagnosis.changed_encoders import pooled_otherwise
from tests.diagnosis.test_encoders import with_wordpieces

CLS, SEP = 2, 3


def template(before: Sequence[int], after: Sequence[int]) -> dict[str, Any] | None:
    """A post-processor that puts these ids around one text, each named by its number."""
    if not before and not after:
        return None
    pieces: list[dict[str, Any]] = [
        *({"SpecialToken": {"id": f"t{i}", "type_id": 0}} for i in before),
        {"Sequence": {"id": "A", "type_id": 0}},
        *({"SpecialToken": {"id": f"t{i}", "type_id": 0}} for i in after),
    ]
    tokens = {f"t{i}": {"id": f"t{i}", "ids": [i], "tokens": [f"t{i}"]} for i in (*before, *after)}
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": tokens}


def processed(folder: Path, made: dict[str, Any] | None) -> Path:
    """Put another post-processor into a folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": made}))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("frames") / "a"
    with_wordpieces(Path(shutil.copytree(str(pooled_otherwise()[0]), folder)))
    weights = folder / "model.safetensors"
    held = {name: value for name, value in load_file(weights).items() if "pooler" not in name}
    save_file(held, weights, metadata={"format": "pt"})
    return folder


FRAMES = {
    "both": ((CLS,), (SEP,), ""),
    "none": ((), (), "ids after every text unequal (nothing in the source, and [3] in the copy)"),
    "cls alone": ((CLS,), (), "ids after every text unequal"),
    "cls twice": ((CLS, CLS), (SEP,), "ids before every text unequal ([2, 2] in the source"),
}


@pytest.mark.parametrize("through", ["", "m.apr"])
@pytest.mark.parametrize("carry", [(), ("--no-carry",)])
@pytest.mark.parametrize("name", FRAMES)
def test_a_wordpiece_copy_is_verified_where_its_texts_are_framed_alike(
    name: str, carry: tuple[str, ...], through: str, encoder: Path, tmp_path: Path
) -> None:
    before, after, says = FRAMES[name]
    source = processed(Path(shutil.copytree(encoder, tmp_path / "a")), template(before, after))
    if through:
        assert aprfmt("convert", source, tmp_path / through).code == 0
        source = tmp_path / through
    made = tmp_path / "b.gguf"
    done = aprfmt("convert", source, made, *carry)
    assert done.code == bool(says) and says in done.out, done.out + done.err
    # `diagnose` says of the two what the conversion said.
    assert aprfmt("diagnose", source, made, "--json").code == bool(says)
    took = aprfmt("convert", source, made, *carry, "--force", "--accept", "unread:tokenizer part")
    assert took.code == (0 if says else 2), took.out + took.err  # 2: it accepts nothing


TEXT_FRAMES = {
    "nothing": ((), (), ""),
    "bos": ((1,), (), ""),
    "bos and eos": ((1,), (2,), ""),
    "another before": ((1, 7), (), "ids before every text unequal ([1, 7] in the source"),
    "another after": ((), (7, 2), "ids after every text unequal ([7, 2] in the source"),
}


@pytest.mark.parametrize("name", TEXT_FRAMES)
def test_a_byte_level_copy_is_verified_where_its_texts_are_framed_alike(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    before, after, says = TEXT_FRAMES[name]
    source = Path(shutil.copytree(demo_model, tmp_path / "a"))
    stated = json.loads((source / "tokenizer_config.json").read_text())
    pieces = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    named = {i: token for token, i in pieces.items()}
    stated = {key: value for key, value in stated.items() if not key.startswith("add_")}
    stated |= {"bos_token": named[1], "eos_token": named[2]}
    (source / "tokenizer_config.json").write_text(json.dumps(stated))
    processed(source, template(before, after))
    for made in (tmp_path / "b.gguf", tmp_path / "b.apr"):
        wrong = bool(says) and made.suffix == ".gguf"
        done = aprfmt("convert", source, made)
        assert done.code == wrong and (says in done.out or not wrong), done.out + done.err


def unstated(encoder: Path, folder: Path) -> Path:
    """Copy the encoder so that the post-processor alone names its special tokens."""
    made = Path(shutil.copytree(encoder, folder))
    (made / "special_tokens_map.json").unlink(missing_ok=True)
    for name in ("config.json", "tokenizer_config.json"):
        if (made / name).is_file():
            held = json.loads((made / name).read_text())
            kept = {k: v for k, v in held.items() if not k.startswith(("cls", "sep", "bos", "eos"))}
            (made / name).write_text(json.dumps(kept))
    return processed(made, template((CLS,), (SEP,)))


FLAGS = {
    "both": (("bos", "sep"), "before", []),
    "before": (("bos",), "before", [SEP]),
    "after": (("sep",), "after", [CLS]),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_takes_what_is_put_around_a_wordpiece_text_off(
    name: str, encoder: Path, tmp_path: Path
) -> None:
    """Seen red: the flags ignored; ids of the post-processor alone taken for lost ones."""
    roles, where, left = FLAGS[name]
    source = unstated(encoder, tmp_path / "a")
    made, bad = tmp_path / "b.gguf", tmp_path / "bad.gguf"
    assert aprfmt("convert", source, made).code == 0
    assert aprfmt("diagnose", source, made, "--json").json["verdict"] == "same"
    ids = aprfmt("tokenize", source, "ab", "--json").json["ids"]
    assert aprfmt("tokenize", made, "ab", "--json").json["ids"] == ids
    keys = [f"tokenizer.ggml.add_{role}_token" for role in roles]
    assert aprfmt("set", made, *(f"{key}=false" for key in keys), "-o", bad).code == 0
    found = aprfmt("diagnose", source, bad, "--json").json
    says = [row["says"] for row in found["findings"]]
    assert found["verdict"] == "bug" and f"the frame {where} a text is" in says[0], says
    assert len(says) == len(roles) and f"{keys[0]} is false in B" in says[0]
    assert found["findings"][0]["where"][0] == keys[0]
    inner = [i for i in ids if i not in (CLS, SEP)]
    assert aprfmt("tokenize", bad, "ab", "--json").json["ids"] == sorted(
        [*left, *inner], key=ids.index
    )
    words = [key + "=true" for key in keys]
    assert all(word in found["next"][0] for word in words), found["next"]
    mended = tmp_path / "good.gguf"
    assert aprfmt("set", bad, *words, "-o", mended).code == 0
    assert aprfmt("diagnose", source, mended, "--json").json["verdict"] == "same"


def test_the_id_of_a_separator_that_only_the_post_processor_has_is_written(
    encoder: Path, tmp_path: Path
) -> None:
    source, made = unstated(encoder, tmp_path / "a"), tmp_path / "b.gguf"
    assert aprfmt("convert", source, made).code == 0
    with open_model(str(made)) as model:
        assert model.metadata["tokenizer.ggml.seperator_token_id"] == SEP
        assert model.metadata["tokenizer.ggml.bos_token_id"] == CLS
    # Nor is a file at fault that names no eos, which an encoder does not write.
    other = tmp_path / "other.gguf"
    assert aprfmt("set", made, "--remove", "tokenizer.ggml.eos_token_id", "-o", other).code == 0
    assert aprfmt("diagnose", source, other, "--json").json["verdict"] == "same"
