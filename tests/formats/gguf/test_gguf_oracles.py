"""gguf-py, libgguf and transformers against our reader and writer, in both directions."""

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from libgguf.inspect import validate_gguf

from aprfmt.base import fork_types
from aprfmt.base.encodings import BY_GGML
from aprfmt.formats.gguf.reader import GGUFSource, open_source
from tests.formats.gguf_files import DATA
from tests.formats.gguf_writing import Stored, plain, read, rewrite, write

# 0.19.0 has 40 bytes for Q8_1 where C has 36, and does not know Q2_0.
PEERS = [
    row
    for row in BY_GGML.values()
    if row.known and row.name not in ("Q8_1", "Q2_0", *(name for name, *_ in fork_types.DECODED))
]
ALL_TYPES: dict[str, Stored] = {
    f"of.{row.name}": (row.name, (3, 2 * row.block_size), (DATA * 6)[: 6 * row.type_size])
    for row in PEERS
}
META: dict[str, Any] = {
    "general.architecture": "llama", "general.name": "größe", "llama.block_count": 2,
    "llama.rope.freq_base": 10_000.0, "flag": True, "text": "",
    "tokenizer.ggml.tokens": ["<s>", "", "é", "\U0001f40b"], "tokenizer.ggml.scores": [0.0, -1.5],
    "tokenizer.ggml.token_type": [1, 3], "general.tags": ["a"], "flags": [True, False],
    "split.of.mine": 3,
}  # fmt: skip


def fill(writer: GGUFWriter) -> None:
    """Give gguf-py one value of each type, and tensors of several."""
    writer.add_string("general.name", "größe")
    for name, value in (
        ("uint8", 255),
        ("int8", -128),
        ("uint16", 65_535),
        ("int16", -32_768),
        ("uint32", 2**32 - 1),
        ("int32", -(2**31)),
        ("float32", 0.1),
        ("uint64", 2**64 - 1),
        ("int64", -(2**63)),
        ("float64", 0.1),
        ("bool", True),
    ):
        getattr(writer, f"add_{name}")(f"one.{name}", value)
    writer.add_token_list(["a", "", "é"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_token_types([1, 2])
    writer.add_array("flags", [True, False])
    random = np.random.default_rng(1)
    for name, dtype in (
        ("f32", np.float32),
        ("f16", np.float16),
        ("f64", np.float64),
        ("i8", np.int8),
        ("i16", np.int16),
        ("i32", np.int32),
        ("i64", np.int64),
    ):
        writer.add_tensor(name, random.integers(-9, 9, (3, 5)).astype(dtype))
    writer.add_tensor("scalars", np.arange(3, dtype=np.float32))
    writer.add_tensor("four", np.zeros((2, 1, 3, 4), np.float32))


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_equal(source: GGUFSource, reader: GGUFReader) -> None:
    """Compare everything gguf-py found in a file with what we found."""
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(fields) == list(source.metadata)
    for key, field in fields.items():
        kinds = ":".join(kind.name.lower() for kind in dict.fromkeys(field.types))
        assert kinds == source.types[key]
        assert field.contents() == plain(source.metadata[key])
    tensors = source.shards[0].parsed.infos if len(source.files) > 1 else source.tensors
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    for tensor in reader.tensors:
        found = source.tensors[tensor.name]
        assert tensor.tensor_type.name == found.info.encoding
        assert tuple(tensor.shape[::-1]) == found.info.shape
        assert (tensor.data_offset, tensor.n_bytes) == (found.info.offset, found.info.nbytes)
        assert tensor.data.astype(tensor.data.dtype.newbyteorder("<")).tobytes() == found.raw()


@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG], ids=["little", "big"])
@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_what_gguf_py_writes(tmp_path: Path, order: GGUFEndian, alignment: int | None) -> None:
    path, copy = tmp_path / "x.gguf", tmp_path / "copy.gguf"
    writer = GGUFWriter(path, "llama", endianess=order)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    fill(writer)
    finish(writer)
    with open_source(path) as source:
        assert [note.text for note in source.notes if note.level == "warning"] == []
        assert_equal(source, GGUFReader(path))
        rewrite(source, copy)
    assert read(copy) == read(path)
    if order is GGUFEndian.LITTLE:
        assert copy.read_bytes() == path.read_bytes()


def test_the_splits_of_gguf_py(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=4)
    fill(writer)
    finish(writer)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    with open_source(files[1]) as source:
        assert source.files == tuple(files)
        assert (len(source.tensors), source.notes) == (9, [])
        again = tmp_path / "again"
        again.mkdir()
        rewrite(source, again / "m.gguf")
    names = [name for path in files for name in (t.name for t in GGUFReader(path).tensors)]
    assert list(read(again / "m.gguf")[2]) == names


@pytest.mark.parametrize("alignment", [32, 1, 4096])
def test_what_we_write(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "x.gguf"
    write(path, META, ALL_TYPES, alignment=alignment)
    with open_source(path) as source:
        assert_equal(source, GGUFReader(path))
    assert validate_gguf(path).ok


def test_the_splits_we_write(tmp_path: Path) -> None:
    files = write(tmp_path / "m.gguf", META, ALL_TYPES, max_shard_size=4000)
    assert len(files) > 3
    names: list[str] = []
    for number, path in enumerate(files):
        reader = GGUFReader(path)
        fields = {key: reader.fields[key] for key in reader.fields if key.startswith("split.")}
        found = {key: (f.types[0].name, f.contents()) for key, f in fields.items()}
        found.pop("split.of.mine", None)
        assert found == {
            "split.no": ("UINT16", number),
            "split.count": ("UINT16", len(files)),
            "split.tensors.count": ("INT32", len(ALL_TYPES)),
        }
        assert validate_gguf(path).ok
        for tensor in reader.tensors:
            names.append(tensor.name)
            assert tensor.data.tobytes() == ALL_TYPES[tensor.name][2]
    assert names == list(ALL_TYPES)


@pytest.mark.parametrize("row", PEERS, ids=lambda row: row.name)
def test_ids_and_block_sizes_are_gguf_pys(row: Any) -> None:
    kind = GGMLQuantizationType[row.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (row.block_size, row.type_size)
    assert kind.value == row.ggml


def test_transformers_loads_what_we_write(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 16,
        "attention.layer_norm_rms_epsilon": 3e-4,
        "rope.freq_base": 5_000,
        "vocab_size": 8,
    }
    metadata = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in sizes.items()}
    shapes = {
        "attn_q": (32, 32),
        "attn_k": (32, 32),
        "attn_v": (32, 32),
        "attn_output": (32, 32),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
        "attn_norm": (32,),
        "ffn_norm": (32,),
    }
    full = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    full |= {"token_embd.weight": (8, 32), "output_norm.weight": (32,), "output.weight": (8, 32)}
    random = np.random.default_rng(2)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in full.items()}
    stored: dict[str, Stored] = {k: ("F32", v.shape, v.tobytes()) for k, v in arrays.items()}
    half = arrays["blk.0.ffn_up.weight"].astype(np.float16)
    stored["blk.0.ffn_up.weight"] = ("F16", half.shape, half.tobytes())
    write(tmp_path / "x.gguf", metadata, stored)
    model = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf")
    assert model.config.rms_norm_eps == float(np.float32(3e-4))
    assert model.config.vocab_size == 8
    layer = model.model.layers[0]
    for found, expected in (
        (model.model.embed_tokens, arrays["token_embd.weight"]),
        (model.lm_head, arrays["output.weight"]),
        (layer.mlp.up_proj, half.astype(np.float32)),
        (layer.mlp.down_proj, arrays["blk.0.ffn_down.weight"]),
        (layer.self_attn.v_proj, arrays["blk.0.attn_v.weight"]),
        (layer.post_attention_layernorm, arrays["blk.0.ffn_norm.weight"]),
    ):
        assert np.array_equal(found.weight.detach().float().numpy(), expected)


def test_a_real_file_is_read_like_gguf_py_and_copied_whole(smollm2: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    with open_source(smollm2) as source:
        assert_equal(source, GGUFReader(smollm2))
        rewrite(source, copy)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (smollm2, copy)]
    assert digests[0] == digests[1]
