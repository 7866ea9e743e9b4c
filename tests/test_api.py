"""The Python API: what is public, tensors as arrays, and slices that read only their rows."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt import api
from aprfmt.codecs import CODECS, encode
from aprfmt.errors import UsageError
from aprfmt.tokenizer.loading import try_load_tokenizer
from tests.conversion.folders import llama_folder, write_mixed

ROWS = [
    3, -1, slice(None), slice(2, 5), slice(-3, None), slice(5, 2), slice(None, None, 2),
    slice(None, None, -1), slice(7, 1, -2), (slice(1, 3), slice(None, 4)), (2, 5),
    (slice(2, 4), -1), (), ..., None, np.array([1, 3]),
]  # fmt: skip


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GGUF and a safetensors file beside it, with the same matrix in many encodings."""
    folder: Path = tmp_path_factory.mktemp("api")
    source = llama_folder(folder / "s", "F32", hidden=256, layers=1)
    aprfmt.convert(
        source,
        folder / "m.gguf",
        tensor_encodings=[
            ("L0.attn_q", "Q4_K"),
            ("L0.attn_k", "Q8_0"),
            ("L0.attn_v", "BF16"),
            ("L0.attn_output", "F16"),
            ("L0.ffn_gate", "IQ4_NL"),
            ("L0.ffn_up", "Q6_K"),
        ],
    )
    return folder / "m.gguf"


@pytest.mark.parametrize("at", ROWS, ids=str)
def test_a_slice_is_that_of_the_array(encoded: Path, at: Any) -> None:
    tried = set()
    with aprfmt.open(encoded) as model:
        for tensor in model.values():
            if len(tensor.shape) < 2 and isinstance(at, tuple) and len(at) > 1:
                continue
            np.testing.assert_array_equal(tensor[at], tensor.numpy()[at], strict=True)
            tried.add(tensor.encoding)
    assert tried >= {"Q4_K", "Q8_0", "BF16", "F16", "IQ4_NL", "Q6_K"}


def test_an_index_too_far_is_an_index_error(encoded: Path) -> None:
    with aprfmt.open(encoded) as model, pytest.raises(IndexError, match="33 rows"):
        model["token_embd.weight"][33]


def test_a_slice_reads_its_rows_only(encoded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with aprfmt.open(encoded) as model:
        tensor = model["blk.0.attn_q.weight"]
        read: list[tuple[int, int | None]] = []
        kind = type(tensor.stored[0])
        whole = kind.raw

        def spy(self: Any, start: int = 0, stop: int | None = None) -> memoryview:
            read.append((start, stop))
            return whole(self, start, stop)

        monkeypatch.setattr(kind, "raw", spy)
        tensor[10:12]
        row = 256 // 256 * 144
        assert read == [(10 * row, 12 * row)]


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I32", "F64"])
def test_torch_tensors_keep_every_bit(encoding: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    size = CODECS[encoding].type_size
    raw = np.random.default_rng(0).integers(0, 256, 60 * size, np.uint8).tobytes()
    write_mixed(tmp_path / "x.safetensors", {"t": (encoding, (5, 12), raw)})
    from safetensors import safe_open

    with (
        safe_open(tmp_path / "x.safetensors", "pt") as theirs,
        aprfmt.open(tmp_path / "x.safetensors") as model,
    ):
        found, expected = model["t"].torch(), theirs.get_tensor("t")
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_a_packed_weight_is_sliced_too(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "F32", hidden=64, layers=1)
    aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize="NF4")
    with aprfmt.open(tmp_path / "q") as model:
        tensor = model["model.layers.0.mlp.up_proj.weight"]
        assert tensor.encoding == "NF4"
        np.testing.assert_array_equal(tensor[3:9], tensor.numpy()[3:9])
        assert tensor.torch().shape == (64, 64)


def test_flat_vectors_of_blocks_are_cut_at_elements(tmp_path: Path) -> None:
    """A one-dimensional quantized tensor is decoded from the block its slice begins in."""
    values = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    stored = encode("Q8_0", values)[""]
    from aprfmt.base.protocols import LazyTensor, TensorInfo
    from aprfmt.tensors.view import View

    class Held(LazyTensor):
        info = TensorInfo("t", (128,), "Q8_0", 0, len(stored), 136)

        def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
            return memoryview(stored)[start:stop]

        def drop(self, start: int = 0, stop: int | None = None) -> None: ...

    tensor = View(Held())
    for at in (slice(5, 70), 33, slice(127, None), slice(40, 40)):
        np.testing.assert_array_equal(tensor[at], tensor.numpy()[at])


def test_a_tensor_of_a_closed_model_is_one_clear_error(demo_model: Path) -> None:
    with aprfmt.open(demo_model) as model:
        tensor = model["model.norm.weight"]
        assert tensor.numpy().shape == (256,)
    for read in (tensor.numpy, tensor.raw, lambda: tensor[1:3]):
        with pytest.raises(UsageError, match="is closed; read model"):
            read()


def test_the_public_names_are_these() -> None:
    """A name leaves only after a release in which using it warns (docs/reference/api.md)."""
    assert set(aprfmt.__all__) == {
        "__version__",
        "convert",
        "diagnose",
        "diff",
        "eval",
        "hash",
        "open",
        "parity",
        "qa",
        "repair",
        "run",
        "scan",
        "set",
        "step",
        "trace",
        "validate",
    }
    for name in aprfmt.__all__:
        assert getattr(aprfmt, name)
        assert name == "__version__" or getattr(aprfmt, name).__doc__
    from aprfmt import testing

    assert testing.__all__ == [
        "assert_same_model",
        "check_arch",
        "check_backend",
        "check_codec",
        "check_format",
    ]


def test_a_trace_keeps_what_was_asked_for(demo_model: Path) -> None:
    found = aprfmt.trace(demo_model, ids=[5, 6, 7], points=["attn_out", "logits"], layers=[1])
    assert list(found.records) == ["L1.attn_out", "logits"]
    values = found.recorded_values("L1.attn_out")
    assert values is not None and values.shape == (3, 256)
    body = found.to_json()
    assert [row["point"] for row in body["records"]] == ["attn_out", "logits"]
    ids = hashlib.sha256(np.array([5, 6, 7], "<i8").tobytes()).hexdigest()
    files = {
        name: hashlib.sha256((demo_model / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "config.json")
    }
    assert (found.run["prompt_sha256"], found.run["model_sha256"]) == (ids, files)
    with pytest.raises(UsageError, match="one of prompt and ids"):
        aprfmt.trace(demo_model)
    with pytest.raises(UsageError, match="layer 9: the model has layers 0 to 3"):
        aprfmt.trace(demo_model, ids=[1], layers=[9])
    wrong: list[Any] = [[1.5], "1,2", [], [1536]]
    for ids in wrong:
        with pytest.raises(UsageError, match="token"):
            aprfmt.trace(demo_model, ids=ids)


@pytest.mark.parametrize("dtype", [None, np.float32, np.float16, "<f8", np.int8])
def test_numpy_takes_a_tensor_for_an_array(encoded: Path, dtype: Any) -> None:
    with aprfmt.open(encoded) as model:
        tensors = [*model.values(), *model.roles.values()]
        for tensor in tensors:
            values = tensor.numpy()
            for make in (np.asarray, np.array):
                found = make(tensor, dtype)
                assert isinstance(found, np.ndarray) and found.shape == tensor.shape
                np.testing.assert_array_equal(found, values.astype(found.dtype), strict=True)
                assert dtype is None or found.dtype == np.dtype(dtype)
                assert found.flags.writeable and not np.shares_memory(found, make(tensor, dtype))

        assert float(np.linalg.norm(tensors[0])) == float(np.linalg.norm(tensors[0].numpy()))


def test_no_copy_is_refused_as_the_protocols_ask(encoded: Path) -> None:
    with aprfmt.open(encoded) as model:
        for tensor in model.values():
            with pytest.raises(ValueError, match="copy"):
                np.array(tensor, copy=False)
            assert np.array(tensor, copy=True).shape == tensor.shape
            with pytest.raises(BufferError, match="copy"):
                np.from_dlpack(tensor, copy=False)


def test_dlpack_gives_the_values_to_other_libraries(encoded: Path) -> None:
    torch = pytest.importorskip("torch")
    with aprfmt.open(encoded) as model:
        for tensor in model.values():
            values = tensor.numpy()
            assert tensor.__dlpack_device__() == values.__dlpack_device__()
            for found in (np.from_dlpack(tensor), torch.from_dlpack(tensor).numpy()):
                np.testing.assert_array_equal(found, values, strict=True)


def _completed(what: object) -> list[str]:
    return [name for name in dir(what) if not name.startswith("_")]


def test_dir_shows_what_is_public_and_documented(demo_model: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "api.md").read_text()
    words = set(page.replace("`", " ").replace(".", " ").split())
    assert set(dir(aprfmt)) == {*aprfmt.__all__, "errors"}
    with aprfmt.open(demo_model) as model:
        for what in (model, model["model.norm.weight"], model.roles["L0.attn_q.weight"]):
            names = _completed(what)
            assert len(names) < 20 and set(names) <= words
            for name in names:
                getattr(what, name)
            assert {"__repr__", "__getitem__"} <= set(dir(what))


def test_completion_of_keys(demo_model: Path) -> None:
    with aprfmt.open(demo_model) as model:
        assert model._ipython_key_completions_() == list(model)
        assert model.hyper._ipython_key_completions_() == list(model.hyper)
    traced = aprfmt.trace(demo_model, ids=[1, 2], points=["logits"])
    assert traced._ipython_key_completions_() == ["logits"]


def test_objects_show_themselves_in_one_short_line(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.apr"
    shown = [repr(aprfmt.convert(demo_model, out)), repr(aprfmt.diff(demo_model, out)),
             repr(aprfmt.validate(out)), repr(aprfmt.diagnose(demo_model, out)),
             repr(aprfmt.trace(demo_model, ids=[1, 2]))]  # fmt: skip
    with aprfmt.open(out) as model:
        shown += [repr(model), repr(model.hyper), repr(model["model.norm.weight"]),
                  repr(model.tokenizer), repr(model.roles["token_embd.weight"])]  # fmt: skip
    aprfmt.convert(demo_model, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        shown += [repr(model.metadata)]
    for text in shown:
        assert len(text) < 250 and text.isprintable(), text
        assert text.startswith("<") and text.endswith(">") and " object at " not in text
    assert "same" in shown[3] and "PASS" in shown[2] and "SAME_" in shown[1]
    with aprfmt.open(out) as model:
        assert repr(model["model.norm.weight"]) == "<View model.norm.weight, [256], BF16>"


def test_a_model_of_no_known_architecture_shows_itself_too(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a\x1b[31m": np.zeros((2, 2), np.float32)}, tmp_path / "x.safetensors")
    with aprfmt.open(tmp_path / "x.safetensors") as model:
        assert "architecture not known" in repr(model) and "1 tensors" in repr(model)
        (tensor,) = model.values()
        assert "\x1b" not in repr(tensor)


@pytest.mark.parametrize("ignore", [False, True])
def test_the_token_that_ends_a_generation_is_no_part_of_it(
    ignore: bool, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with aprfmt.open(demo_model) as model:
        tokenizer = try_load_tokenizer(model)
    assert tokenizer is not None
    stop = min(tokenizer.stop_ids)
    drawn = [1417, 362, stop, 258]
    left = iter(drawn)
    monkeypatch.setattr(api, "Sampler", lambda settings: lambda logits: next(left))
    made = aprfmt.run(demo_model, ids=[1417], max_tokens=4, ignore_stop=ignore)
    assert list(made.ids) == (drawn if ignore else drawn[:2])
    assert made.stop == ("max_tokens" if ignore else "stop_token")
