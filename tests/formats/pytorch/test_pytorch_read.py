"""Files of torch.save are read bit for bit as torch.load(weights_only=True) reads them."""

import gc
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aprfmt.errors import FormatError
from aprfmt.formats import open_source
from aprfmt.formats.pytorch import storages, tensor
from aprfmt.formats.pytorch.reader import first_names
from tests.formats import pytorch_files as files
from tests.formats.pytorch.test_pytorch_hostile import zipped

LISTED = [
    *((f"{str(dtype)[6:]}-{form}", lambda dtype=dtype: {"x": files.values(dtype)}, form, 2)
      for dtype in files.DTYPES for form in files.FORMS if form == "zip" or dtype in files.TYPED),
    *((f"{name}-{form}", make, form, 2) for name, make in files.VIEWS.items()
      for form in files.FORMS if (name, form) != ("transposed-fp8", "legacy")),
    *((f"{name}-{form}-{protocol}", files.VIEWS[name], form, protocol)
      for name in ("nested", "shared", "values", "quantized-channels", "ordered", "adam", "conj")
      for form in files.FORMS for protocol in files.PROTOCOLS[1:]),
]  # fmt: skip


def loaded(path: Path, protocol: int = 2) -> Any:
    """Return what torch loads from a file: its safe way reads protocol 2, its pickler wrote all."""
    return torch.load(path, weights_only=protocol == 2)


def check(path: Path, value: Any) -> None:
    """Hold every tensor of a file to the loaded ones, bytes and shape."""
    wanted = dict(files.by_path(value))
    with open_source(path) as source:
        assert sorted(source.tensors) == sorted(wanted)
        for name, tensor in wanted.items():
            found = source.tensors[name]
            shape = tuple(tensor.shape)
            if tensor.dtype == torch.float4_e2m1fn_x2:
                shape = (*shape[:-1], 2 * shape[-1])  # torch counts bytes, each of two values
            assert found.info.shape[: len(shape)] == shape, name
            data = files.raw(tensor)
            assert bytes(found.raw()) == data, name
            third = len(data) // 3  # a window that begins and ends inside rows
            assert bytes(found.raw(third, 2 * third)) == data[third : 2 * third]
        assert source.format == "pytorch"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "form", "protocol"), [row[1:] for row in LISTED],
                         ids=[row[0] for row in LISTED])  # fmt: skip
def test_every_kind(tmp_path: Path, make: Any, form: str, protocol: int) -> None:
    """All that torch writes and loads safely."""
    path = files.save(make(), tmp_path / "x.pt", form, protocol)
    with torch.serialization.safe_globals([set, complex]):
        unsafe = make is files.VIEWS["defaultdict"]  # the safe way sets no items of one
        value = loaded(path, 3 if unsafe else protocol)
    check(path, value)


# What torch writes in its older form and does not read again.
UNREAD = {("nested-tensor", "legacy"), ("float4", "legacy")}


@pytest.mark.filterwarnings("ignore")
def test_dtypes_by_arrangement_and_all_optimizers(tmp_path: Path) -> None:
    """Every dtype in every arrangement and form, every optimizer's state, and other kinds."""
    count = 0
    for dtype in files.DTYPES:
        for arrange in files.ARRANGED.values():
            for form in files.FORMS if dtype in files.TYPED else files.FORMS[:1]:
                path = files.save(arrange(files.values(dtype)), tmp_path / "x.pt", form, 2)
                check(path, loaded(path))
                count += 1
    for name, make in files.OTHERS.items():
        for form, protocol in (("zip", 2), ("legacy", 2), ("zip", 5)):
            if (name, form) not in UNREAD:
                path = files.save(make(), tmp_path / "x.pt", form, protocol)
                check(path, loaded(path, protocol))
                count += 1
    assert count + len(LISTED) >= 500


def torch_says(held: torch.Tensor) -> dict[str, object]:
    """Return what torch says of a quantized or sparse tensor beside its parts."""
    if held.is_nested:
        return {"layout": "nested"}
    if not held.is_quantized:
        return {"layout": str(held.layout), "shape": list(held.shape)}
    name = str(held.qscheme()).removeprefix("torch.")
    scheme = {"qscheme": name.removesuffix("_float_qparams")}  # which torch writes without
    if "per_channel" in scheme["qscheme"]:
        return {**scheme, "axis": held.q_per_channel_axis()}
    return {**scheme, "scale": held.q_scale(), "zero_point": held.q_zero_point()}


KINDS = {**files.VIEWS, **files.OTHERS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", files.FORMS)
@pytest.mark.parametrize(
    "name", [name for name in KINDS if name.startswith(("quantized", "sparse", "nested-"))]
)
def test_the_numbers_beside_a_tensor_are_those_of_torch(
    name: str, form: str, tmp_path: Path
) -> None:
    """Its codes are values only by the scale and the zero point, its parts by layout and shape."""
    made = KINDS[name]()
    path = files.save(made, tmp_path / "x.pt", form, 2)
    held = made["x"] if (name, form) in UNREAD else loaded(path)["x"]
    with open_source(path) as source:
        for key, value in torch_says(held).items():
            said = source.metadata[f"x.{key}"]
            assert (type(said), said) == (type(value), value), key


TREES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
        npst.arrays(
            st.sampled_from([np.float32, np.int64, np.float16, np.uint8]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ).map(torch.from_numpy),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(
    value=st.dictionaries(st.text("xyz", min_size=1, max_size=3), TREES, max_size=4),
    form=st.sampled_from(files.FORMS),
    protocol=st.sampled_from(files.PROTOCOLS),
    transposed=st.booleans(),
)
def test_random_states(
    tmp_path_factory: pytest.TempPathFactory, value: Any, form: str, protocol: int, transposed: bool
) -> None:
    """Random nested states come back, whatever their form."""
    if transposed:
        value = {"t": torch.arange(12.0).reshape(3, 4).t(), **value}
    path = files.save(value, tmp_path_factory.mktemp("r") / "x.pt", form, protocol)
    check(path, loaded(path, protocol))
    gc.collect()


def test_a_big_endian_file(tmp_path: Path) -> None:
    """A byteorder record of big: torch swaps, and so does this reader."""
    import zipfile

    state = {
        "x": files.values(torch.float32),
        "c": files.values(torch.complex64),
        "b": torch.ones(3).bool(),
    }
    files.save(state, tmp_path / "le.pt", "zip", 2)
    with zipfile.ZipFile(tmp_path / "le.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    check(tmp_path / "x.pt", loaded(tmp_path / "x.pt"))


def test_values_beside_tensors(tmp_path: Path) -> None:
    """Numbers and texts are metadata by path; names that would be imported are listed."""
    path = files.save(files.VIEWS["nested"](), tmp_path / "x.pt", "zip", 2)
    with open_source(path) as source:
        assert source.metadata["epoch"] == 3
        assert source.metadata["optimizer.param_groups.0.betas"] == [0.9, 0.99]
        imports = source.imports  # type: ignore[attr-defined]
    assert imports == (
        "torch._utils._rebuild_tensor_v2",
        "torch.FloatStorage",
        "collections.OrderedDict",
    )


def test_a_meta_tensor(tmp_path: Path) -> None:
    """A tensor without data is listed, and reading it says so."""
    path = files.save(
        {"x": torch.empty(3, 4, device="meta"), "y": torch.ones(2)}, tmp_path / "x.pt", "zip", 2
    )
    with open_source(path) as source:
        assert source.tensors["x"].info.shape == (3, 4)
        assert "no data" in source.tensors["x"].damage
        with pytest.raises(FormatError, match="meta tensor"):
            source.tensors["x"].raw()
        assert bytes(source.tensors["y"].raw()) == files.raw(torch.ones(2))


def test_a_pickled_module(tmp_path: Path) -> None:
    """A whole module is its state_dict's names, and its classes are only named."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(module, tmp_path / "x.pt")
    check(tmp_path / "x.pt", dict(module.state_dict()))
    with open_source(tmp_path / "x.pt") as source:
        assert any("torch.nn.modules.linear.Linear (1)" in note.text for note in source.notes)


def test_shards(tmp_path: Path) -> None:
    """An index opens all its files; one that names a tensor elsewhere is refused."""
    parts = {"a.bin": {"x": torch.ones(2)}, "b.bin": {"y": torch.zeros(3)}}
    for name, state in parts.items():
        torch.save(state, tmp_path / name)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": "a.bin", "y": "b.bin"}}))
    check(index, {"x": torch.ones(2), "y": torch.zeros(3)})
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": "a.bin", "y": "a.bin"}}))
    with pytest.raises(FormatError, match=r"'y' is said to be in a\.bin"):
        open_source(index)
    index.write_text(json.dumps({"weight_map": {"x": "a.bin", "y": "c.bin"}}))
    with pytest.raises(FormatError, match=r"c\.bin cannot be opened"):
        open_source(index)


def tar_file(path: Path) -> None:
    """Write the oldest form, as torch's own reader of it takes it (torch cannot write it now)."""
    data = torch.arange(12.0)
    storages = io.BytesIO()
    pickle.dump(1, storages, 2)
    pickle.dump((7, "cpu", torch.FloatStorage), storages, 2)
    storages.write(struct.pack("<q", 12) + data.numpy().tobytes())
    pickle.dump([], storages, 2)
    tensors = io.BytesIO()
    pickle.dump(2, tensors, 2)
    for key, size, stride, offset in ((8, (3, 4), (4, 1), 0), (9, (2, 3), (1, 2), 4)):
        pickle.dump((key, 7, torch.FloatTensor), tensors, 2)
        tensors.write(struct.pack("<ii", 2, 0) + struct.pack("<5q", *size, *stride, offset))

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return str(value[1:]) if isinstance(value, str) and value[:1] == "@" else None

    state = io.BytesIO()
    Pickler(state, 2).dump({"x": "@8", "y": "@9", "step": 5})
    system = pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        members = (system, state.getvalue(), tensors.getvalue(), storages.getvalue())
        for name, held in zip(("sys_info", "pickle", "tensors", "storages"), members, strict=True):
            info = tarfile.TarInfo(name)
            info.size = len(held)
            tar.addfile(info, io.BytesIO(held))


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")  # of torch's reader
def test_the_oldest_form(tmp_path: Path) -> None:
    """A tar archive of before 0.1.10, as torch's own reader reads it."""
    tar_file(tmp_path / "x.pt")
    check(tmp_path / "x.pt", torch.load(tmp_path / "x.pt", weights_only=False))


def test_tensors_that_a_tensor_holds_are_read_under_its_name(tmp_path: Path) -> None:
    """As attributes, in lists and in dicts; what else it holds is no tensor."""
    x: Any = torch.arange(3.0)
    held = [torch.full((2,), float(i)) for i in range(5)]
    x.one, x.some, x.pair, x.more = held[0], held[1:3], (held[3], 7), {"a": held[4]}
    x.text, x.numbers, x.nothing = "a", [1, 2], []
    torch.save({"x": x}, tmp_path / "x.pt")
    names = ("x.one", "x.some.0", "x.some.1", "x.pair.0", "x.more.a")
    check(tmp_path / "x.pt", {"x": x.detach().clone(), **dict(zip(names, held, strict=True))})


@pytest.mark.parametrize(("count", "more"), [(12, ""), (14, " and 2 more")])
def test_twelve_names_are_listed_and_the_others_counted(count: int, more: str) -> None:
    names = [f"n{i}" for i in range(count)]
    assert first_names(names) == ", ".join(names[:12]) + more


def test_a_pickle_of_the_most_bytes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt"
    torch.save({"x": torch.zeros(2)}, path)
    with zipfile.ZipFile(path) as file:
        size = next(row.file_size for row in file.infolist() if row.filename.endswith("data.pkl"))
    monkeypatch.setattr(storages, "MAX_PICKLE", size)
    with open_source(path) as source:
        assert list(source.tensors) == ["x"]
    monkeypatch.setattr(storages, "MAX_PICKLE", size - 1)
    with pytest.raises(FormatError, match=f"at most {size - 1} are read"):
        open_source(path)


@pytest.mark.parametrize(
    "row", [None, 5, "abc", ("k",), ("k", 1), ("k", 1, 2, 3), (1.5, 1, 2), [1, 2, 3], (b"k", 1, 2)]
)
def test_a_tensor_of_a_tar_is_described_by_three_values(row: Any) -> None:
    reader: Any = SimpleNamespace(
        stream=lambda name: SimpleNamespace(where="m.tar: tensors"), count=lambda stream: 1,
        load=lambda stream: row, storages={}, tensors={},
    )  # fmt: skip
    with pytest.raises(FormatError, match=r"m\.tar: tensors: a tensor is .*; it is damaged"):
        storages._TarReader.read_tensors(reader)
    assert not reader.tensors


@pytest.mark.parametrize(("offset", "count"), [(0, 12), (3, 9), (12, 0), (4, 2), (3, 10), (0, 13)])
@pytest.mark.parametrize("key", [5, 10**6, "view"])
def test_a_view_of_the_oldest_form_lies_in_its_storage(
    key: int | str, offset: int, count: int
) -> None:
    """Whatever the keys of the two are: a storage has 12 elements from byte 100."""
    loaded = iter([1, (0, "cpu", "float"), [(key, 0, offset, count)]])
    stream = SimpleNamespace(where="x.pt", at=100, end=200, uint=lambda size, what: 12)
    reader: Any = SimpleNamespace(
        stream=lambda name: stream, load=lambda stream: next(loaded), count=lambda stream: 1,
        places={}, storages={},
    )  # fmt: skip
    next(loaded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storages, "storage_dtype", lambda kind: "float32")
        if offset + count > 12:
            with pytest.raises(FormatError, match=r"x\.pt: a view reaches past its storage"):
                storages._TarReader.read_storages(reader)
            return
        storages._TarReader.read_storages(reader)
    view = reader.storages[str(key)]
    assert (view.key, view.start, view.nbytes) == ("0", 4 * offset, 4 * count)


@pytest.mark.parametrize("form", files.FORMS)
@pytest.mark.parametrize(
    ("layout", "make"),
    [
        ("sparse_coo", lambda: torch.eye(4).to_sparse()),
        ("sparse_csr", lambda: torch.eye(4).to_sparse_csr()),
        ("sparse_csc", lambda: torch.eye(4).to_sparse_csc()),
        ("sparse_bsr", lambda: torch.eye(4).to_sparse_bsr((2, 2))),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_shape_that_the_parts_of_a_sparse_tensor_make_is_kept(
    layout: str, make: Any, form: str, tmp_path: Path
) -> None:
    path = files.save({"x": make()}, tmp_path / "x.pt", form, 2)
    with open_source(path) as source:
        assert source.metadata["x.layout"] == f"torch.{layout}"
        assert source.metadata["x.shape"] == [4, 4]


def outputs(kind: str) -> Any:
    """Return what a model of transformers returned, or holds."""
    made: Any = pytest.importorskip("transformers.modeling_outputs")
    caches: Any = pytest.importorskip("transformers.cache_utils")
    states = tuple(files.values(torch.bfloat16) for _ in range(3))
    cache = caches.DynamicCache()
    for layer in range(2):
        keys, values = (torch.randn(1, 2, 3, 4) for _ in range(2))
        cache.update(keys, values, layer)
    table: dict[str, Callable[[], Any]] = {
        "logits": lambda: made.CausalLMOutputWithPast(logits=states[0], hidden_states=states),
        "cache": lambda: made.BaseModelOutputWithPast(states[0], past_key_values=cache),
        "sequence": lambda: made.Seq2SeqLMOutput(logits=states[0], encoder_hidden_states=states),
        "in a dict": lambda: {"a": [made.BaseModelOutput(hidden_states=states)], "b": states[0]},
        "cache alone": lambda: cache,
    }
    return table[kind]()


def fields_of(value: Any) -> Any:
    """Return an output's fields, and a cache's, as dicts and lists."""
    if hasattr(value, "layers"):
        return {"layers": [{"keys": one.keys, "values": one.values} for one in value.layers]}
    if isinstance(value, dict):
        return {key: fields_of(one) for key, one in value.items()}
    return [fields_of(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", ["logits", "cache", "sequence", "in a dict", "cache alone"])
def test_outputs_of_transformers(kind: str, protocol: int, tmp_path: Path) -> None:
    """They are pickled by calls of their own classes, whose fields are items and attributes."""
    torch.save(outputs(kind), tmp_path / "x.pt", pickle_protocol=protocol)
    check(tmp_path / "x.pt", fields_of(torch.load(tmp_path / "x.pt", weights_only=False)))


@pytest.mark.parametrize(
    "kind",
    ["transformers.utils.hub cached_file", "transformers.modeling_outputs os.Output",
     "transformers AOutput", "transformersx.modeling_outputs AOutput", "os.path AOutput",
     "transformers.modeling_outputs AnOutputOf", "outputs.modeling AOutput"],
)  # fmt: skip
def test_other_calls_are_refused(kind: str, tmp_path: Path) -> None:
    code = f"c{kind.replace(' ', chr(10))}\n)R".encode()
    path = zipped(tmp_path / "x.pt", code)
    with pytest.raises(FormatError, match="calls"), open_source(path):
        pass


@pytest.mark.parametrize("behind", [b"", b"\0" * 512, b"x" * 512, b"\0" * 511 + b"x", b"y" * 40])
def test_a_tar_ends_at_its_first_empty_block(behind: bytes, tmp_path: Path) -> None:
    """As Python's tarfile reads it, whatever stands behind that block."""
    path = tmp_path / "x.pt"
    tar_file(path)
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
        end = last.offset_data + -(-last.size // 512) * 512
    path.write_bytes(path.read_bytes()[:end] + b"\0" * 512 + behind)
    with tarfile.open(path) as tar:
        expected = {
            row.name: (row.offset_data, row.offset_data + row.size) for row in tar.getmembers()
        }
    with open_source(path) as source:
        assert list(source.tensors) == ["x", "y"]
    held: Any = SimpleNamespace(view=memoryview(path.read_bytes()), size=path.stat().st_size)
    assert storages._read_tar_members(held, "x.pt") == expected


def header_with(size: bytes, head: bytearray) -> None:
    """Put a size into a tar header, and the sum that belongs to it."""
    head[124:136] = size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)


@pytest.mark.parametrize("size", ["octal", "binary", "spaces"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.AREGTYPE])
@pytest.mark.parametrize("end", ["blocks", "padded", "cut"])
def test_members_of_a_tar_are_those_of_tarfile(
    size: str, kind: bytes, end: str, tmp_path: Path
) -> None:
    """Folders and links hold nothing; the last member may end where the file does."""
    path = tmp_path / "x.tar"
    held = {"./a": b"a" * 700, "sub/b": b"b" * 512, "c": b"", "last": b"l" * 40}
    with tarfile.open(path, "w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, other in (("sub", tarfile.DIRTYPE), ("link", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type = other
            tar.addfile(info)
        for name, data in held.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), kind
            tar.addfile(info, io.BytesIO(data))
    with tarfile.open(path) as tar:
        rows = tar.getmembers()
    raw = bytearray(path.read_bytes())
    for row in rows:
        head = raw[row.offset : row.offset + 512]
        header_with(
            {"octal": b"%011o\0" % row.size, "spaces": b"%10o \0" % row.size,
             "binary": b"\x80" + row.size.to_bytes(11, "big")}[size], head
        )  # fmt: skip
        raw[row.offset : row.offset + 512] = head
    stop = rows[-1].offset_data + rows[-1].size
    if end != "blocks":
        raw = raw[: -(-stop // 512) * 512]
    path.write_bytes(raw)
    with tarfile.open(path) as tar:
        expected = {
            row.name.removeprefix("./"): (row.offset_data, row.offset_data + row.size)
            for row in tar.getmembers() if row.isreg()
        }  # fmt: skip
    if end == "cut":  # tarfile wants the last block filled up
        raw = raw[:stop]
    whole: Any = SimpleNamespace(view=memoryview(raw), size=len(raw))
    assert storages._read_tar_members(whole, "x.tar") == expected
    assert expected.keys() == {"a", "sub/b", "c", "last"}
    less: Any = SimpleNamespace(view=memoryview(raw[: stop - 1]), size=stop - 1)
    with pytest.raises(FormatError, match="ends inside 'last'"):
        storages._read_tar_members(less, "x.tar")


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """A mesh of two ranks, of which this process is the second; nothing is exchanged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_rank_part_has_its_tensor_name_and_a_summand_has_not(
    tmp_path: Path, two_ranks: Any
) -> None:
    """What a rank holds of a tensor is named as the tensor; a summand has other numbers."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    local = torch.arange(6.0).reshape(2, 3)
    state = {
        name: DTensor.from_local(local, two_ranks, [placed], run_check=False)
        for name, placed in (("s", Shard(0)), ("r", Replicate()), ("p", Partial()))
    }
    path = files.save(state, tmp_path / "x.pt", "zip", 2)
    with open_source(path) as source:
        assert sorted(source.tensors) == ["p._local_tensor", "r", "s"]
        assert all(bytes(one.raw()) == files.raw(local) for one in source.tensors.values())
        assert source.metadata["s.global_shape"] == [4, 3]
        assert "r.global_shape" not in source.metadata


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4])
def test_values_of_codes_by_range(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any range of bytes of a quantized tensor is that of its values."""
    monkeypatch.setattr(tensor, "_STEP", 4)
    made = files.packed(dtype)
    path = files.save({"x": made}, tmp_path / "x.pt", "zip", 2)
    whole = files.raw(made.dequantize())
    with open_source(path) as source:
        held = source.tensors["x"]
        assert (held.info.encoding, held.info.shape) == ("F32", (3, 5))
        for start, stop in ((0, 0), (1, 3), (4, 40), (17, 60), (60, 60)):
            assert bytes(held.raw(start, stop)) == whole[start:stop]


@pytest.mark.filterwarnings("ignore")
def test_codes_whose_scales_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A scale a channel is asked for, and not made up."""
    made = files.packed(torch.qint8)
    path = files.save({"x": made}, tmp_path / "x.pt", "zip", 2)
    data = path.read_bytes()
    axis = data.index(b"per_channel_affine")
    at = data.index(b"K\x00tq", axis)  # the axis, behind scales and zero points
    path.write_bytes(data[: at + 1] + b"\x01" + data[at + 2 :])
    with pytest.raises(FormatError, match="scales are not one number a channel"):
        open_source(path)
