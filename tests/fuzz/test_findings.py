"""What fuzzing found, one test each: inputs that once ended in something else than one error."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats.bounded_json import loads
from aprfmt.formats.gguf.reader import open_buffer
from aprfmt.inference.aprt import read_aprt
from aprfmt.inference.engines.npz import NpzFile, load_npz
from aprfmt.model import Model
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.keys import HF_JSON
from aprfmt.tokenizer.loading import load_tokenizer
from tests.cli.run import aprfmt, process
from tests.formats.apr_files import AprFile, Tensor
from tests.formats.gguf_files import ARR, F32, I32, STR, File
from tests.fuzz.contract import judge
from tests.fuzz.parsers import parse_imatrix
from tests.fuzz.targets import TARGETS
from tests.tokenizer.fake import fake
from tests.tokenizer.test_hostile import JSON, SPM


def changed(**parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json with parts replaced; None takes a part away."""
    found = {**JSON, **parts}
    return {key: value for key, value in found.items() if value is not None}


PANICKING = changed(
    post_processor={
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<other>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    }
)
UNIGRAM = changed(model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", []], ["a", -1.5]]})
# Each of these raised KeyError, TypeError or a panic of the library, which is no Exception.
TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "a post-processor whose token is not listed": PANICKING,
    "no pre_tokenizer": changed(pre_tokenizer=None),
    "a score that is no number": UNIGRAM,
}


def use(model: Model) -> None:
    for work in (
        tokenizer_facts,
        to_gguf,
        to_apr,
        to_hf,
        lambda m: load_tokenizer(m).encode("ab <s>"),
    ):
        try:
            work(model)
        except AprfmtError as error:
            assert len(str(error)) < 2000


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_the_library_or_we_fell_over(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(TOKENIZERS[name])
    use(fake("gguf", {HF_JSON: text}))
    judge(TARGETS["tokenizer"], text.encode())
    assert capfd.readouterr().err == ""  # a panic reports itself, in several lines


def test_a_panic_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    from tests.fuzz.planted import folder

    made = folder(tmp_path)
    (made / "tokenizer.json").write_text(json.dumps(PANICKING))
    done = process("tokenize", made, "ab")
    assert done.code == 2
    assert done.err.count("\n") == 1 and "panick" not in done.err


def test_stderr_is_back_after_the_library_was_asked(capfd: pytest.CaptureFixture[str]) -> None:
    load_tokenizer(fake("gguf", {HF_JSON: json.dumps(JSON)})).encode("ab")
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"


@pytest.mark.parametrize("token", ["<0xZZ>", "", "x", "<0x0A"])
def test_byte_tokens_that_are_none(token: str) -> None:
    tokens = [*SPM["tokenizer.ggml.tokens"], token, "<0x0A>", "<0x0A>"]
    model = fake(
        "gguf",
        SPM
        | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 6, 6, 6],
        },
    )
    made = load_tokenizer(model)
    ids = made.encode("a\n")
    assert ids[-1] == 8
    assert made.decode([7, 8, 4]) == "\n\na"  # two ids of one byte
    assert made.decode([6]) == token


@pytest.mark.parametrize("text", ["\udc80", '{"a": "\ud800"}', '{"\udcff": 1}'])
def test_json_in_metadata_that_is_not_utf8(text: str) -> None:
    """GGUF strings keep bytes that are no UTF-8 as surrogates; these were encoded strictly."""
    with pytest.raises(FormatError, match="not UTF-8"):
        loads(text, "x", max_bytes=100)
    for key in (HF_JSON, "aprfmt.files", "aprfmt.hf_config", "aprfmt.source.encodings"):
        use(fake("gguf", SPM | {key: text}))
    raw = text.encode("utf-8", "surrogatepass")
    file = File().key("general.architecture", STR, "llama").key("aprfmt.hf_config", STR, raw)
    with open_buffer(file.build(), Path("x.gguf")) as source:
        with pytest.raises(FormatError, match="not UTF-8"):
            assert Model(source, None).config


def test_texts_that_are_not_utf8_are_not_written(tmp_path: Path) -> None:
    from tests.fuzz.seeds import vocabulary

    file = File().key("general.architecture", STR, "llama")
    file.key("tokenizer.ggml.model", STR, "llama")
    file.raw_key("tokenizer.ggml.tokens", ARR, file.array(STR, ["<unk>", "<s>", "</s>", b"\xff"]))
    file.raw_key("tokenizer.ggml.token_type", ARR, file.array(I32, [2, 3, 3, 1]))
    file.raw_key("tokenizer.ggml.scores", ARR, file.array(F32, [0, 0, 0, 0]))
    assert vocabulary()
    (tmp_path / "x.gguf").write_bytes(file.build())
    for line in (["inspect"], ["tokenize"]):
        done = aprfmt(*line, tmp_path / "x.gguf", *(["a"] if line == ["tokenize"] else []))
        assert "bug" not in done.err


def npz(**members: bytes) -> io.BytesIO:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return made


def test_npz_messages_quote_little() -> None:
    """zipfile's own message holds the whole local header, as long as a file says it is."""
    buffer = io.BytesIO()
    np.savez(buffer, input_ids=np.arange(3), x=np.ones(400))
    data = bytearray(buffer.getvalue())
    data[26:28] = b"\xff\x07"  # the length of the first name
    with ExitStack() as stack, pytest.raises(FormatError) as caught:
        NpzFile(Path("x.npz"), stack, io.BytesIO(bytes(data)))
    assert len(str(caught.value)) < 700
    with ExitStack() as stack, pytest.raises(FormatError) as caught:
        NpzFile(Path("x.npz"), stack, npz(**{"k" * 60_000: b"x"}))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("descr", "data"), [("<U0", b""), ("<U1", b"\xff" * 4), (">U1", b"\x00\x11\x00\x00")]
)
def test_npz_text_that_is_none(descr: str, data: bytes) -> None:
    """numpy raises ValueError for both, one when it reads and one when it is looked at."""
    header = repr({"descr": descr, "fortran_order": False, "shape": (1,)}).encode() + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
    made = npz(__order__=array).getvalue()
    with pytest.raises(FormatError), load_npz(Path("x.npz"), file=io.BytesIO(made)):
        raise AssertionError
    assert judge(TARGETS["npz"], made) is False


@pytest.mark.parametrize("what", ["aprt", "npz"])
def test_a_pipe_is_refused_and_not_waited_for(what: str, tmp_path: Path) -> None:
    pipe = tmp_path / "x.bin"
    os.mkfifo(pipe)
    with pytest.raises(FormatError, match="not a regular file"):
        if what == "aprt":
            read_aprt(pipe, 0)
        else:
            with load_npz(pipe):
                raise AssertionError


def test_a_trace_that_finds_no_room_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.errors import OutputError
    from aprfmt.inference.trace_file import Spool

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(OutputError, match=r"absent: cannot hold the values .*TMPDIR"):
        Spool()


@pytest.mark.parametrize(("kind", "layers"), [("Default", "full"), ("linear", "all")])
def test_rope_of_windowed_layers_is_read_as_it_was_written(kind: str, layers: str) -> None:
    """`Default` was taken for a scaling, and one of all layers was written as one of the full."""
    from aprfmt.arch import ARCHS
    from aprfmt.arch.hyperparameters import read_hyper, write_hyper
    from aprfmt.arch.spec import Facts

    def objects(name: str, theta: float) -> dict[str, Any]:
        return {"rope_type": name, "rope_theta": theta, "factor": 8.0}

    values: dict[str, Any] = {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "sliding_attention": objects(kind, 300.0),
            "full_attention": objects("linear", 9000.0),
        },
    }
    spec = ARCHS["gemma3"]
    found, _ = read_hyper(spec, Facts("hf", values, {}), "x", complete=False)
    assert found["rope_scaling_layers"] == layers
    written = write_hyper(spec, found, "hf")
    again, _ = read_hyper(spec, Facts("hf", written, {}), "x", complete=False)
    assert dict(again) == dict(found)


def test_a_base_of_windowed_layers_is_written_where_no_old_key_says_it() -> None:
    from aprfmt.arch import ARCHS
    from aprfmt.arch.hyperparameters import read_hyper, write_hyper
    from aprfmt.arch.spec import Facts

    values: dict[str, Any] = {
        "model_type": "olmo2",
        "rope_parameters": {"sliding_attention": {"rope_theta": 5000.0}},
    }
    found, _ = read_hyper(ARCHS["olmo2"], Facts("hf", values, {}), "x", complete=False)
    assert found["rope_theta_local"] == 5000.0
    written = write_hyper(ARCHS["olmo2"], found, "hf")
    again, _ = read_hyper(ARCHS["olmo2"], Facts("hf", written, {}), "x", complete=False)
    assert dict(again) == dict(found)


def test_imatrix_messages_quote_little_of_a_name() -> None:
    name = b"n" * 4000
    for values, says in ((b"", "positive"), (b"\0\0\x80\x7f", "finite")):
        head = (len(values) // 4).to_bytes(4, "little")
        raw = b"\1\0\0\0" + len(name).to_bytes(4, "little") + name + b"\1\0\0\0" + head + values
        with pytest.raises(FormatError, match=says) as caught:
            parse_imatrix(raw, Path("x.dat"))
        assert len(str(caught.value)) < 400


def test_a_message_about_a_shape_stays_short() -> None:
    data = AprFile(tensors=(Tensor(b"a", (4123389851770370361,) * 64),)).build()
    assert not judge(TARGETS["apr"], data)  # which raises for a message of over 2000 characters


def test_an_empty_tensor_with_axes_no_array_can_have_is_refused() -> None:
    from aprfmt.codecs import decode
    from aprfmt.errors import CodecError

    assert decode("F32", b"", (0, 1 << 30)).shape == (0, 1 << 30)
    with pytest.raises(CodecError, match="expected one that an array can have"):
        decode("F32", b"", (0, 1 << 40, 1 << 40))


def test_a_message_about_an_architecture_quotes_little_of_its_name() -> None:
    from aprfmt.arch import find_arch
    from aprfmt.errors import ArchError

    with pytest.raises(ArchError, match="is not known") as caught:
        find_arch("hf", "olm" + "\x1b[2J" * 400)
    assert len(str(caught.value)) < 1300
    assert "\\x1b" not in str(caught.value)  # it is escaped where it is shown, and once


@pytest.mark.parametrize(
    "wrong", [{"ndim": 104}, {"code": 99}, {"size": 5}, {"shape": (2**40,) * 8}]
)
def test_a_message_of_apr_quotes_little_of_a_name(wrong: dict[str, Any]) -> None:
    data = AprFile(tensors=(Tensor(b"a" + b"\x7f" * 1500, **wrong),)).build()
    assert not judge(TARGETS["apr"], data)  # which raises for a message of over 2000 characters


def test_an_importance_matrix_may_say_anything_of_its_datasets() -> None:
    from tests.formats.gguf_files import DATA, U32

    file = File(data=DATA[4:36]).key("general.type", STR, "imatrix").key("imatrix.datasets", U32, 7)
    file.tensor("blk.0.attn_q.weight.in_sum2", [2]).tensor("blk.0.attn_q.weight.counts", [1], 0, 32)
    file.data = struct.pack("<2f24xf28x", 3, 4, 2)
    assert parse_imatrix(file.build(), Path("x.gguf")).datasets == ()


def test_a_scalar_has_no_heads_to_permute() -> None:
    from aprfmt.arch.layout_steps import RowsPermuted
    from aprfmt.errors import ArchError

    step = RowsPermuted("n_heads")
    for use in (step.moves, step.shapes):
        with pytest.raises(ArchError, match=r"shape \[\] has 0 rows"):
            use([()], {"n_heads": 2})
