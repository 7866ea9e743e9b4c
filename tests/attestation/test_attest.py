"""`aprfmt attest`: what was made of a base is reproduced, and one changed block is found.

The files are written by `quantize` and `convert`; that their bytes are the libraries' own is held
by tests/quantizing and tests/codecs. Seen red: a comparison that looks at the first block of a
tensor only, a statement whose digests are not compared, an importance matrix that is taken without
a look at its digest, a repack that is decoded.
"""

import json
import os
import random
import shutil
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import aprfmt as package
from aprfmt.attestation import attest
from aprfmt.attestation.rederive import TensorAttestation
from aprfmt.attestation.statement import PREDICATE, TYPE
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.errors import AprfmtError, CodecError, ConversionError, UsageError
from aprfmt.formats import open_sink
from aprfmt.model import open_model
from aprfmt.quantizing.mixture import SCHEMES
from tests.cli.run import aprfmt
from tests.scope import SAMPLED, SCOPE

# Every scheme that can be written of the demo model: gpt-oss's is of stacks of experts.
KINDS = [name for name, row in SCHEMES.items() if not row.arch]
CHANGED = 4 if os.environ.get(SCOPE) == SAMPLED else 143  # blocks of each file
DEMO = Path(package.__file__).parent.parent / "fixtures" / "demo"


def target(name: str) -> str:
    """Return the file name of a model in a scheme: a folder where the type is no block's."""
    row = find_encoding(SCHEMES[name].base)
    return f"{name}.gguf" if row.ggml is not None else name


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the demo model in every scheme."""
    folder = tmp_path_factory.mktemp("attested")
    found = {}
    for name in KINDS:
        found[name] = folder / target(name)
        to = None if found[name].suffix == ".gguf" else "safetensors"
        package.convert(DEMO, found[name], to=to, quantize=name)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_scheme_is_reproduced(name: str, made: Mapping[str, Path]) -> None:
    found = attest(made[name], DEMO)
    assert found.exit_code == 0, found.pronounced.says
    assert found.counts["reproduced"] == len(found.tensors) == 50
    assert found.recipe.type == name
    assert found.pronounced.says == "derived, 50 tensors: 50 reproduced"


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "GPTQ-g128"])
@pytest.mark.parametrize("whose", ["itself", "a copy"])
def test_bytes_of_the_base_are_said_to_be_no_quantization(
    name: str, whose: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    base = made[name]
    if whose == "a copy":
        base = tmp_path / made[name].name
        (shutil.copytree if made[name].is_dir() else shutil.copy)(made[name], base)
    found = attest(made[name], base)
    assert found.exit_code == 0 and found.to_json()["remark"] == found.remark
    said = "the base is the model itself" if whose == "itself" else "the base has them"
    assert f"quantized or packed tensors are the base's own bytes ({said})" in found.remark
    assert found.remark in aprfmt("attest", made[name], "--from", base).out
    # What was quantized again, and what was never quantized, has no remark.
    assert not attest(made[name], DEMO).remark and not attest(DEMO, DEMO).remark


def test_a_type_other_than_the_recorded_one_is_refused(made: Mapping[str, Path]) -> None:
    """Seen red: the statement said F16 of a file that is Q4_K_M."""
    with pytest.raises(UsageError, match="says Q4_K_M, --type says"):
        attest(made["Q4_K_M"], DEMO, scheme="F16")
    assert attest(made["Q4_K_M"], DEMO, scheme="q4_k_m").exit_code == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_file_without_a_record_is_reproduced(
    name: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """As other writers leave it: what it was quantized as is seen from its tensors."""
    copy = tmp_path / made[name].name
    if made[name].suffix == ".gguf":
        bare = ("aprfmt.quantize.type", "aprfmt.quantize.fma", "aprfmt.quantize.version")
        package.convert(made[name], copy, remove=bare)
    else:
        shutil.copytree(made[name], copy)
        strip_record(copy / "model.safetensors")
    with open_model(copy) as model:
        assert not [key for key in model.metadata if key.startswith("aprfmt.quantize")]
    found = attest(copy, DEMO)
    assert found.exit_code == 0, found.pronounced.says


def strip_record(path: Path) -> None:
    """Take the metadata of ours out of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    head["__metadata__"] = {"format": "pt"}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    ("base", "copy"),
    [("GPTQ-g128", "GPTQ-g128.gguf"), ("AWQ-g32", "gptq"), ("GPTQ-g32", "int4"),
     ("Q4_K_M", "q4.apr"), ("COMPRESSED-NVFP4", "nvfp4.gguf"), ("MODELOPT-NVFP4", "ct")],
)  # fmt: skip
def test_what_was_laid_out_anew_is_reproduced(
    base: str, copy: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    types = {"gptq": "GPTQ-g32", "int4": "COMPRESSED-INT4-g32", "ct": "COMPRESSED-NVFP4"}
    path = tmp_path / copy
    to = "safetensors" if copy in types else None
    package.convert(made[base], path, to=to, quantize=types.get(copy), allow_inexact=True)
    found = attest(path, made[base])
    assert found.exit_code == 0, found.pronounced.says
    # It is no rounding of that base's decoded values that gives these bytes.
    assert {row.state for row in found.tensors} == {"reproduced"}


def test_the_way_through_f16_is_found(made: Mapping[str, Path], tmp_path: Path) -> None:
    """llama.cpp's converter writes F16, and quantizes from there."""
    package.convert(DEMO, tmp_path / "f16.gguf", encoding="F16")
    package.convert(tmp_path / "f16.gguf", tmp_path / "q4.gguf", quantize="Q4_K_M", fma="strict")
    found = attest(tmp_path / "q4.gguf", DEMO)
    assert found.exit_code == 0, found.pronounced.says
    hows = {row.how for row in found.tensors if row.encoding in ("Q4_K", "Q6_K")}
    assert hows == {"strict, through F16"} or hows <= {"strict", "strict, through F16"}
    assert attest(tmp_path / "q4.gguf", tmp_path / "f16.gguf").exit_code == 0


def test_an_importance_matrix_is_asked_for_and_held_to_its_digest(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("She had not expected so quick an answer, and read the letter twice. " * 8)
    q4, matrix = tmp_path / "q4.gguf", tmp_path / "imatrix.gguf"
    made = aprfmt("quantize", DEMO, q4, "--type", "Q4_K_M", "--calibrate", text,
                  "--imatrix", matrix, "--quiet")  # fmt: skip
    assert made.code == 0, made.err
    without = attest(q4, DEMO)
    assert without.exit_code == 2 and without.counts["not tried"] == 29
    assert "imatrix.gguf: give it with --imatrix" in without.pronounced.says
    assert attest(q4, DEMO, imatrix=matrix).exit_code == 0
    other = tmp_path / "other.gguf"
    text.write_text("An importance matrix of another text, which is as long as the first was. " * 8)
    aprfmt("quantize", DEMO, tmp_path / "x.gguf", "--type", "Q4_K_M", "--calibrate", text,
           "--imatrix", other, "--quiet")  # fmt: skip
    done = aprfmt("attest", q4, "--from", DEMO, "--imatrix", other)
    assert done.code == 2 and "is not the importance matrix" in done.err


def blocks_of(path: Path) -> list[tuple[Path, str, int, int]]:
    """Return (file, stored tensor, offset of its bytes in the file, bytes of a block)."""
    rows = []
    with open_model(path) as model:
        for name, tensor in model.source.tensors.items():
            file, at = tensor.path, tensor.info.offset
            assert file is not None
            row = find_encoding(tensor.info.encoding)
            rows += [(file, name, at + i, row.type_size)
                     for i in range(0, tensor.info.nbytes, row.type_size)]  # fmt: skip
    return rows


@pytest.mark.parametrize("name", ["Q4_K_M", "Q4_0", "NF4-double", "COMPRESSED-INT4-g128",
                                  "MLX-4bit-g64", "GPTQ-g128", "AWQ-g32"])  # fmt: skip
def test_one_changed_block_is_found(name: str, made: Mapping[str, Path], tmp_path: Path) -> None:
    """Any bit of any block, of weights, scales and vectors alike; and the tensor is named."""
    copy = tmp_path / made[name].name
    (shutil.copytree if made[name].is_dir() else shutil.copy)(made[name], copy)
    draw = random.Random(f"attest {name}")
    every = blocks_of(copy)
    missed = []
    for file, tensor, at, size in draw.sample(every, CHANGED):
        byte, bit = at + draw.randrange(size), 1 << draw.randrange(8)
        flip(file, byte, bit)
        try:
            found = attest(copy, DEMO)
            named = [row.tensor for row in found.tensors if row.state != "reproduced"]
            if found.exit_code != 1 or named != [tensor]:
                missed.append((tensor, byte, found.pronounced.says))
        except package.errors.AprfmtError:
            pass  # a scale that cannot be: refused, with exit 2
        finally:
            flip(file, byte, bit)
    assert not missed
    assert attest(copy, DEMO).exit_code == 0


def flip(path: Path, byte: int, bit: int) -> None:
    """Change one bit of a file where it lies."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ bit]))


def test_the_place_of_a_changed_block_is_said(made: Mapping[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "bad.gguf"
    shutil.copy(made["Q4_K_M"], copy)
    with open_model(copy) as model:
        info = model.source.tensors["blk.2.ffn_up.weight"].info
    columns, size = info.shape[-1], find_encoding("Q4_K").type_size
    block = 5 * (columns // 256)  # the first of row 5
    flip(copy, info.offset + block * size + 17, 4)
    (row,) = [one for one in attest(copy, DEMO).tensors if one.state != "reproduced"]
    assert (row.key, row.tensor) == ("L2.ffn_up.weight", "blk.2.ffn_up.weight")
    assert (row.block, row.row, row.blocks) == (block, 5, 1)
    done = aprfmt("attest", copy, "--from", DEMO)
    assert (
        done.code == 1
        and f"blk.2.ffn_up.weight (L2.ffn_up.weight), Q4_K: block {block}" in done.out
    )


def test_tensors_of_one_side_alone_are_no_derivation(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    """A tensor more, a tensor less, and a base of another shape."""
    less = tmp_path / "less.gguf"
    package.convert(made["Q4_K_M"], less, drop=["blk.3.attn_k.bias"],
                    allow_missing=["attn_k.bias"])  # fmt: skip
    found = attest(less, DEMO)
    assert found.exit_code == 1
    (row,) = [one for one in found.tensors if one.state != "reproduced"]
    assert row.key == "L3.attn_k.bias" and "there is no tensor" in row.why
    more = attest(made["Q4_K_M"], less)
    (row,) = [one for one in more.tensors if one.state != "reproduced"]
    assert row.key == "blk.3.attn_k.bias" and "gives no such tensor" in row.why
    other = attest(made["Q4_0"], made["Q4_K_M"])
    assert other.exit_code == 1


@pytest.mark.parametrize(
    ("edit", "name"),
    [("qwen2.rope.freq_base=10000", "rope_theta"),
     ("tokenizer.chat_template={{ messages[0].content }}", "chat_template"),
     ("tokenizer.ggml.eos_token_id=5", "eos")],
)  # fmt: skip
def test_what_stands_beside_the_tensors_counts(
    edit: str, name: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """Equal weights under another rope, template or end of text are not what the base gives."""
    copy = tmp_path / "edited.gguf"
    done = aprfmt("set", made["Q4_K_M"], edit, "-o", copy, "--quiet")
    assert done.code == 0, done.err
    found = attest(copy, DEMO)
    assert found.counts["reproduced"] == 50 and found.exit_code == 1
    assert any(name in one.name for one in found.fields), found.fields


def test_a_statement_is_written_and_held_to(made: Mapping[str, Path], tmp_path: Path) -> None:
    copy, statement = tmp_path / "q4.gguf", tmp_path / "q4.json"
    shutil.copy(made["Q4_K_M"], copy)
    done = aprfmt("attest", copy, "--from", DEMO, "-o", statement, "--json")
    assert done.code == 0 and done.json["statement"] == str(statement)
    said = json.loads(statement.read_text())
    assert (said["_type"], said["predicateType"]) == (TYPE, PREDICATE)
    assert [one["name"] for one in said["subject"]] == ["q4.gguf"]
    digests = {row["key"]: row for row in aprfmt("hash", copy, "--json").json["tensors"]}
    for key, row in said["predicate"]["tensors"].items():
        assert row["sha256"] == digests[key]["raw"], key
        assert row["state"] == "reproduced"
    source = {row["key"]: row for row in aprfmt("hash", DEMO, "--json").json["tensors"]}
    assert said["predicate"]["base"]["tensors"] == {k: r["decoded"] for k, r in source.items()}
    again = aprfmt("attest", copy, "--from", DEMO, "--check", statement, "--json")
    assert again.code == 0 and again.json["faults"] == []
    # The base may lie in another format: its digests are of values.
    package.convert(DEMO, tmp_path / "base.apr")
    assert aprfmt("attest", copy, "--from", tmp_path / "base.apr", "--check", statement).code == 0


EDITS: Mapping[str, tuple[Any, str]] = {
    "subject": (lambda s: s["subject"][0]["digest"].update(sha256="0" * 64), "files are not"),
    "base": (lambda s: s["predicate"]["base"]["tensors"].update({"L0.attn_q.weight": "0" * 64}),
             "the base's values of L0.attn_q.weight"),
    "tensor": (lambda s: s["predicate"]["tensors"]["L0.attn_q.weight"].update(sha256=["0" * 64]),
               "the stored bytes of L0.attn_q.weight"),
    "state": (lambda s: s["predicate"]["tensors"]["L0.attn_q.weight"].update(state="not tried"),
              "the state of L0.attn_q.weight"),
    "gone": (lambda s: s["predicate"]["tensors"].pop("L0.attn_q.weight"), "not in the statement"),
    "more": (lambda s: s["predicate"]["tensors"].update(other=s["predicate"]["tensors"][
        "L0.attn_q.weight"]), "here is none"),
    "matrix": (lambda s: s["predicate"]["recipe"].update(imatrix={"name": "x", "sha256": "1" * 64}),
               "importance matrix none"),
    "verdict": (lambda s: s["predicate"].update(verdict="not derived"), "itself says not derived"),
    "type": (lambda s: s["predicate"]["recipe"].update(type="Q8_0"), "the statement says 'Q8_0'"),
    "drop": (lambda s: s["predicate"]["recipe"].update(drop=["output*"]), "recipe drop []"),
    "encoding": (lambda s: s["predicate"]["tensors"]["L0.attn_q.weight"].update(encoding="Q8_0"),
                 "the encoding of L0.attn_q.weight"),
    "names": (lambda s: s["predicate"]["tensors"]["L0.attn_q.weight"].update(names=["other"]),
              "the stored names of L0.attn_q.weight"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_statement_of_something_else_is_not_held(
    edit: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "said.json"
    aprfmt("attest", made["Q4_0"], "--from", DEMO, "-o", path)
    said = json.loads(path.read_text())
    change, says = EDITS[edit]
    change(said)
    path.write_text(json.dumps(said))
    done = aprfmt("attest", made["Q4_0"], "--from", DEMO, "--check", path)
    assert done.code == 1 and says in done.out, done.out


def test_another_type_than_the_files_own_is_refused(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    """By its record, by general.file_type, and by the encodings. Seen red: derived, as Q5_K_M."""
    bare = tmp_path / "bare.gguf"
    records = [key for key in open_model(made["Q4_K_M"]).metadata if key.startswith("aprfmt.")]
    keys = [part for key in records for part in ("--remove", key)]
    assert aprfmt("set", made["Q4_K_M"], *keys, "-o", bare, "--quiet").code == 0
    for path, scheme in ((made["Q4_K_M"], "Q5_K_M"), (bare, "Q4_K_S"), (bare, "NF4")):
        done = aprfmt("attest", path, "--from", DEMO, "--type", scheme)
        assert done.code == 2 and scheme in done.err and done.err.count("\n") == 1, done
    assert aprfmt("attest", bare, "--from", DEMO, "--type", "Q4_K_M").code == 0


NO_STATEMENTS: list[Any] = [
    [], {}, None, {"_type": 1}, {"_type": TYPE}, {"_type": TYPE, "predicateType": PREDICATE},
    {"_type": TYPE, "predicateType": PREDICATE, "subject": [], "predicate": {"base": []}},
]  # fmt: skip


@pytest.mark.parametrize("text", ["", *map(json.dumps, NO_STATEMENTS)])
def test_a_file_that_is_no_statement_is_refused(
    text: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "said.json"
    path.write_text(text)
    done = aprfmt("attest", made["Q4_0"], "--from", DEMO, "--check", path)
    assert done.code == 2 and str(path) in done.err and done.err.count("\n") == 1


def test_a_type_without_an_encoder_is_not_tried(tmp_path: Path) -> None:
    """Bytes of IQ1_M stand for a weight: nothing here writes it, so nothing is claimed of it."""
    package.convert(DEMO, tmp_path / "plain.gguf")
    row = find_encoding("IQ1_M")
    with open_model(tmp_path / "plain.gguf") as model:
        infos, data = [], {}
        for name, tensor in model.source.tensors.items():
            info = tensor.info
            if name == "blk.0.ffn_up.weight":
                size = row.nbytes(info.shape)
                info = TensorInfo(name, info.shape, "IQ1_M", 0, size, row.row_bytes(info.shape))
                data[name] = np.zeros(size, np.uint8).tobytes()
            else:
                data[name] = bytes(tensor.raw())
            infos.append(info)
        metadata = dict(model.typed)
        with open_sink(tmp_path / "iq.gguf", "gguf") as sink:
            sink.plan(metadata, infos)
            for info in infos:
                sink.write(info.name, [memoryview(data[info.name])])
    found = attest(tmp_path / "iq.gguf", DEMO)
    (one,) = [row for row in found.tensors if row.state != "reproduced"]
    assert (one.state, one.why) == ("not tried", "nothing here writes IQ1_M")
    assert found.exit_code == 2


@pytest.mark.parametrize("kind", [CodecError, ConversionError])
def test_a_tensor_that_cannot_be_made_is_not_tried_and_the_rest_is(
    kind: type[AprfmtError], made: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rederive = import_module("aprfmt.attestation.rederive")  # the package has a function so named
    right, name = rederive._attest_tensor, "blk.0.ffn_up.weight"

    def attest_tensor(output: Any, *rest: Any) -> Any:
        if output.info.name == name:
            raise kind("cannot be encoded")
        return right(output, *rest)

    monkeypatch.setattr(rederive, "_attest_tensor", attest_tensor)
    found = attest(made["Q8_0"], DEMO)
    (one,) = [row for row in found.tensors if row.state != "reproduced"]
    assert (one.state, one.tensor, one.why) == ("not tried", name, "cannot be encoded")
    assert found.exit_code == 2


def test_the_way_of_rounding_that_leaves_the_fewest_wrong_blocks_is_the_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted are blocks of a Q8_0, of 34 bytes, however many bytes of one are wrong.

    Seen red: the few wrong blocks before a way was given up counted as fewer than another's.
    """

    @dataclass(frozen=True)
    class Given:
        fma: bool = False

    class Way(NamedTuple):
        fma: bool
        through: str = ""

        def __str__(self) -> str:
            return "fused" if self.fma else "separate"

    rederive = import_module("aprfmt.attestation.rederive")
    stored = bytes(range(34 * 7))
    dropped: list[str] = []
    tensor: Any = SimpleNamespace(
        raw=lambda start, stop: memoryview(stored)[start:stop], drop=lambda: dropped.append("x")
    )
    wrong: dict[bool, list[int]] = {}

    def encode(output: Any, options: Any, importance: Any, piece: Any) -> Any:
        made = bytearray(stored)
        for at in wrong[options.fma]:
            made[at] ^= 1
        return bytes(made[34 * piece.values : 34 * (piece.values + 1)]), None

    Piece = namedtuple("Piece", "values band")
    monkeypatch.setattr(rederive, "encode_piece", encode)
    monkeypatch.setattr(rederive, "column_importances", lambda output, options: None)
    monkeypatch.setattr(
        rederive, "decoded_pieces", lambda output, size: iter(Piece(i, None) for i in range(7))
    )
    monkeypatch.setattr(rederive, "HOPELESS", 1.0)
    output: Any = SimpleNamespace(info=SimpleNamespace(encoding="Q8_0"))
    recipe: Any = SimpleNamespace(ways=(Way(False), Way(True)), options=Given())
    for separate, fused, byte, blocks, how in (
        ([], [0], -1, 0, "separate"),
        ([3], [], -1, 0, "fused"),
        ([35, 36, 37], [34, 68], 35, 1, "separate"),
        ([35, 68], [40, 60, 67], 40, 1, "fused"),
        ([0, 237], [1, 200], 0, 2, "separate"),
    ):
        wrong |= {False: separate, True: fused}
        found = rederive._least_difference(output, tensor, recipe, True)
        assert (found.byte, found.blocks, found.how) == (byte, blocks, how)
    assert dropped
    monkeypatch.setattr(rederive, "HOPELESS", 0.5)
    for separate, fused, expected in (
        ([0], [1, 40, 80, 120], (0, 1, "separate", 1)),  # both are given up at once
        ([0, 200], [69, 140, 235], (69, 3, "fused", None)),  # the first after one block
        ([0, 200], [36, 70, 110], (36, 2, "fused", 3)),
    ):
        wrong |= {False: separate, True: fused}
        found = rederive._least_difference(output, tensor, recipe, True)
        assert found == expected
    row = TensorAttestation("k", ("n",), "Q8_0", "not tried")
    output.info = TensorInfo("n", (7, 32), "Q8_0", 0, 34 * 7, 34)
    for seen, says in ((None, "; 2 blocks differ"), (3, "; 2 of the first 3 blocks differ")):
        found = rederive._Difference(36, 2, "fused", seen)
        said = rederive._difference_row(output, row, found)
        assert (said.block, said.row, said.blocks) == (1, 1, 2)
        assert said.why == f"block 1 (row 1) is not what the base gives{says}"


def attested(shape: Any = (4, 32), encoding: str = "Q8_0", *, how: Any = None, **given: Any) -> Any:
    """Return the row of a tensor of this shape and encoding, where a Q8_0 of [4, 32] is planned."""
    rederive = import_module("aprfmt.attestation.rederive")
    tensor: Any = SimpleNamespace(info=SimpleNamespace(shape=shape, encoding=encoding))
    planned: Any = SimpleNamespace(
        info=SimpleNamespace(name="w", shape=(4, 32), encoding=given.pop("planned", "Q8_0")),
        copies=given.pop("copies", False),
        part=given.pop("part", None),
        made=given.pop("made", False),
    )
    recipe: Any = SimpleNamespace(type="", lacks="", options=None, **{})
    vars(recipe).update(given)
    base = rederive.TensorAttestation("L0.w", ("w",), "Q8_0", "not tried")
    least = rederive._Difference(-1 if how is None else 5, 1, "strict")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rederive, "output_chunks", lambda *given: ())
        patch.setattr(rederive, "_first_difference", lambda chunks, tensor: how)
        patch.setattr(rederive, "_least_difference", lambda *given: least)
        patch.setattr(rederive, "_difference_row", lambda output, base, found: (base.how, found))
        return rederive._attest_tensor(planned, tensor, base, recipe)


def test_how_a_tensor_was_made_again_is_said_with_its_state() -> None:
    rederive = import_module("aprfmt.attestation.rederive")
    part = object()
    for given, how in (
        ({"copies": True}, "bytes of the base"),
        ({"copies": True, "made": True}, "laid out anew"),
        ({"part": part}, "Q8_0"),
        ({"part": part, "type": "GPTQ-g32"}, "GPTQ-g32"),
        ({"part": part, "lacks": "m"}, "Q8_0"),
        ({}, "strict"),
        ({"encoding": "F16", "planned": "F16", "lacks": "m"}, "strict"),
    ):
        row = attested(**given)
        assert (row.state, row.how) == ("reproduced", how), given
        found = rederive._Difference(5, 1, "strict")
        assert attested(how=found, **given) == (how, found)
    row = attested(lacks="m.gguf")
    assert (row.state, row.tensor) == ("not tried", "w") and "give it with --imatrix" in row.why
    row = attested((4, 31))
    assert (row.state, row.tensor) == ("not reproduced", "w")
    assert row.why == "has shape [4, 31]; the base gives [4, 32]"
    row = attested(encoding="Q4_0")
    assert (row.state, row.why) == ("not reproduced", "is Q4_0; the base gives Q8_0")
    row = attested(encoding="IQ1_M")
    assert (row.state, row.encoding) == ("not tried", "IQ1_M") and "nothing here writes" in row.why
