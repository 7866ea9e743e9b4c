"""Parts of conversions and of what stands beside models, each by itself."""

import io
import json
import os
import struct
import time
import tracemalloc
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from aprfmt.adapters import pair_placement
from aprfmt.arch import ARCHS
from aprfmt.arch.gemma2 import pattern_loss
from aprfmt.attestation.rederive import TensorAttestation, _Difference, _difference_row
from aprfmt.base.protocols import TensorInfo, Value
from aprfmt.cli import hash_
from aprfmt.compare import diff_models
from aprfmt.conversion import (
    Options,
    encoding_choice,
    estimate,
    folder_edits,
    in_place,
    resume_state,
    run,
    scheduling,
)
from aprfmt.conversion.edits import parse_json_value
from aprfmt.conversion.metadata import bare_metadata
from aprfmt.conversion.preflight import PlannedTensor
from aprfmt.conversion.quantize_options import model_mixture
from aprfmt.conversion.repacking import RepackedTensor
from aprfmt.errors import ArchError, ConversionError, FormatError, UsageError
from aprfmt.formats import FORMATS, atomic, open_source, shard_set, temporary_files
from aprfmt.formats.pytorch.zip_archive import _WIDE, _apply_zip64
from aprfmt.model import manifest, open_model, packing
from aprfmt.model.carried_files import BARE as BARE_KEY
from aprfmt.model.unsupported_packing import UndecodedPacking
from aprfmt.model.verdict import Pronounced
from aprfmt.recovery.byte_ranges import Range, join_ranges, remaining_ranges
from aprfmt.remote.read_ahead import AHEAD, PART
from aprfmt.remote.remote_file import GAP, KEPT, RemoteFile
from aprfmt.remote.response_body import ResponseBody
from aprfmt.remote.stream_hash import HELD
from aprfmt.tensors.runs import ByteRun
from tests.conversion.folders import float_bytes, llama_folder


class Unknown:
    """A model of an architecture that no row describes."""

    metadata: Mapping[str, Value] = {"general.architecture": "new", "new.expert_count": 4,
                                     "new.attention.head_count": [8, 8],
                                     "new.attention.head_count_kv": 2}  # fmt: skip

    def __init__(self, *names: str) -> None:
        self.names = names

    def __iter__(self) -> Any:
        return iter(self.names)

    @property
    def hyper(self) -> Any:
        raise ArchError("unknown")


@pytest.mark.parametrize("layers", [0, 1, 5])
def test_a_mixture_counts_the_layers_that_names_have(layers: int) -> None:
    names = [f"blk.{layer}.attn_v.weight" for layer in range(layers)]
    model: Any = Unknown("token_embd.weight", *names)
    found = model_mixture(model, Options(quantize="Q4_K_M"), False)
    assert (found._n_layers, found._n_gqa, found._n_experts) == (layers, 4, 4)


@pytest.mark.parametrize("key", ["", "{"])
def test_what_a_format_cannot_hold_is_one_text_and_comes_back(key: str) -> None:
    """GGUF holds no null and no object; without any there is no such text."""
    values: dict[str, Any] = {"a": 1, "text": "t"}
    rest = {"none": None, "table": {"x": [1, 2]}} if key else {}
    model: Any = SimpleNamespace(metadata={**values, **rest}, path="m")
    made = bare_metadata(model, FORMATS["gguf"])
    assert {name: made[name] for name in values} == values
    assert (BARE_KEY in made) == bool(rest) and len(made) == len(values) + bool(rest)
    back: Any = SimpleNamespace(metadata=made, path="m")
    assert bare_metadata(back, FORMATS["apr"]) == {**values, **rest}


def test_a_text_is_taken_as_it_stands_in_a_file_and_without_quotes_on_a_line() -> None:
    assert parse_json_value("k", "old", '"new"') == "new"
    assert parse_json_value("k", "old", '"new"', from_file=True) == '"new"'
    assert parse_json_value("k", 1, "2") == 2 and parse_json_value("k", None, "[1]") == [1]
    with pytest.raises(UsageError, match="is a"):
        parse_json_value("k", [1], "2")


class Lies:
    def __init__(self, file: object, at: int, nbytes: int) -> None:
        self.info = SimpleNamespace(nbytes=nbytes)
        self.location = lambda: (file, at)


def test_small_tensors_are_brought_as_far_as_half_of_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought: list[tuple[int, int]] = []
    file = RemoteFile.__new__(RemoteFile)
    monkeypatch.setattr(RemoteFile, "bring", lambda self, ranges: brought.extend(ranges))
    monkeypatch.setattr(scheduling, "is_remote", lambda path: True)
    monkeypatch.setattr(scheduling, "stored_parts", lambda tensor: [tensor])
    small, large = 1000, scheduling._SMALL + 1
    parts = [Lies(file, 10 * i, large if i % 2 else small) for i in range(2000)]
    source: Any = SimpleNamespace(files=["m"], tensors=dict(enumerate(parts)))
    scheduling.prefetch_small_tensors(source)
    assert all(stop - start == small for start, stop in brought)
    assert len(brought) == KEPT // 2 // (small + GAP)


# --- what stands beside a model ------------------------------------------------------------------


def test_a_manifest_is_said_where_it_was_written(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", "F32", layers=1)
    with open_model(folder) as model:
        path = manifest.write_manifest(model, [])
    assert path == manifest.manifest_path(model.path) and path.is_file()
    assert manifest.read_manifest(path)["tensors"] == []


@pytest.mark.parametrize(("code", "style"), [(0, "good"), (1, "bad"), (2, "warn")])
def test_a_check_of_hashes_has_three_ends(
    code: Any, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr("aprfmt.cli.render.say", lambda text, style="": said.append((text, style)))
    hash_.show({"model": "m", "tensors": []}, Pronounced("word", "says", code))
    assert said == [("says", style)]


@pytest.mark.parametrize("kind", ["folder", "pipe", "absent", "file"])
def test_a_member_of_a_set_is_a_regular_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    if kind == "file":
        path.write_bytes(b"")
        shard_set.require_files([path], "index")
        return
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    said = "get the missing file" if kind == "absent" else "is not a regular file"
    with pytest.raises(FormatError, match=f"index: m .*{said}"):
        shard_set.require_files([path], "index")


def test_complex_numbers_of_torch_are_said_to_be_pairs(tmp_path: Path) -> None:
    for name, dtype in (("plain", torch.float32), ("pairs", torch.complex128)):
        torch.save({"x": torch.zeros(2, dtype=dtype)}, tmp_path / f"{name}.pt")
        with open_source(tmp_path / f"{name}.pt") as source:
            said = [note.text for note in source.notes if "complex" in note.text]
        assert said == (["1 complex tensors are shown as pairs of floats: x"] * (name == "pairs"))


@pytest.mark.parametrize("images", [0, 1, 2])
def test_as_many_tensors_are_drawn_as_are_asked_for(images: int, tmp_path: Path) -> None:
    a = llama_folder(tmp_path / "a", "F32", layers=1)
    more = {
        f"model.layers.0.mlp.{name}_proj.weight": float_bytes(np.ones((64, 64), np.float32), "F32")
        for name in ("up", "gate", "down")
    }
    b = llama_folder(tmp_path / "b", "F32", layers=1, replaced=more)
    with open_model(a) as one, open_model(b) as other:
        found = diff_models(one, other, explain=False, only=("tensors",), images=images)
    assert len(found.images) == images


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("equal", [False, True])
def test_a_head_is_the_table_only_where_the_base_ties_them(
    tied: bool, name: str, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensor(number: int) -> Any:
        return SimpleNamespace(numpy=lambda: np.full(3, number))

    monkeypatch.setattr(pair_placement, "_embedding_name", lambda base: "table")
    base: Any = {"table": tensor(1)}
    base = SimpleNamespace(hyper={"tied_embeddings": tied}, path="base", __getitem__=None)
    held = {"table": tensor(1), name: tensor(1 if equal else 2)}
    adapter: Any = SimpleNamespace(replacements=held, path="adapter")
    of = cast(Any, type("Base", (), {"__getitem__": lambda self, key: tensor(1)}))()
    of.hyper, of.path = base.hyper, base.path
    head = tied and name == "lm_head.weight"
    if head and not equal:
        with pytest.raises(ConversionError, match="untie the base first"):
            pair_placement._is_tied_head(adapter, name, of)
    else:
        assert pair_placement._is_tied_head(adapter, name, of) == head


# --- rows of tables ------------------------------------------------------------------------------


def rule(arch: str, name: str) -> Any:
    return next((each for each in ARCHS[arch].hyper if each.name == name), None)


def test_gptjs_base_is_read_where_a_file_says_it_and_its_config_says_none() -> None:
    for name in ("rope_theta", "rope_scaling"):
        found = rule("gptj", name)
        assert "hf" not in found.keys and "hf" not in found.read
        assert found.keys.keys() | found.read.keys() >= {"gguf"}
        assert dict(found.write["hf"](2.0, {})) == {}


@pytest.mark.parametrize("arch", [a for a in ARCHS.own if rule(a, "image_channels") is not None])
def test_an_image_has_three_colours_where_nothing_says_how_many(arch: str) -> None:
    found = rule(arch, "image_channels")
    default = found.default({}) if callable(found.default) else found.default
    assert {default, *found.default_in.values()} - {None} == {3}


@pytest.mark.parametrize("first", [False, True])
def test_a_zip64_field_may_follow_others(first: bool) -> None:
    """A time stamp (0x5455) before it, as other zip libraries write one."""
    wide = struct.pack("<2H2Q", 1, 16, 1 << 33, 1 << 34)
    stamp = struct.pack("<2H5s", 0x5455, 5, b"stamp")
    extra = wide + stamp if first else stamp + wide
    assert _apply_zip64(extra, (_WIDE, 7, _WIDE), "x") == [1 << 33, 7, 1 << 34]
    assert _apply_zip64(b"", (1, 2, 3), "x") == [1, 2, 3]
    with pytest.raises(FormatError, match="zip64"):
        _apply_zip64(stamp, (_WIDE, 7, 3), "x")


def test_a_file_that_changed_since_it_was_opened_is_not_changed_in_place(tmp_path: Path) -> None:
    """The rest of the file is what it was, so that only its time says that it changed."""
    path = llama_folder(tmp_path / "m", "BF16") / "model.safetensors"
    with open_model(path) as model:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        program: Any = SimpleNamespace(head=b"x" + data[1:start], body=())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_place, "_tail_pieces", lambda *given: [(start, data[start:-1] + b"!")])
            identity, pieces = in_place._file_patches(model, program)
            assert identity and [at for at, _ in pieces] == [0, len(data) - len(pieces[1][1])]
            os.utime(path, ns=(1, 1))
            with pytest.raises(FormatError, match="changed"):
                in_place._file_patches(model, program)


def test_a_file_that_a_change_in_place_broke_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with open_source(llama_folder(tmp_path / "m", "BF16") / "model.safetensors") as source:
        places = {name: in_place._facts(tensor.info) for name, tensor in source.tensors.items()}
        path.write_bytes(Path(source.files[0]).read_bytes())
    in_place._verify(path, places)
    moved = {name: (*facts[:2], 0, facts[3]) for name, facts in places.items()}
    with pytest.raises(ConversionError, match="its tensors lie elsewhere"):
        in_place._verify(path, moved)
    path.write_bytes(b"no model")
    with pytest.raises(ConversionError, match="was changed, and does not open"):
        in_place._verify(path, places)


@pytest.mark.parametrize(("stop", "gone"), [(50, False), (100, True), (101, True), (None, True)])
def test_a_repacked_weights_numbers_go_behind_its_last_row(stop: int | None, gone: bool) -> None:
    released: list[bool] = []
    held: Any = SimpleNamespace(
        _blocks="numbers", info=SimpleNamespace(nbytes=100),
        origin=SimpleNamespace(drop=lambda: released.append(True)),
    )  # fmt: skip
    RepackedTensor.drop(held, 0, stop)
    assert (held._blocks is None, released) == (gone, [True])


def test_a_run_that_waits_for_the_folders_lock_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits takes no processor from the run that it waits for."""
    slept: list[float] = []
    with ExitStack() as holder:
        holder.enter_context(temporary_files.lock_folder(tmp_path))

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            holder.close()

        monkeypatch.setattr(temporary_files, "LOCK_SECONDS", 1)
        monkeypatch.setattr(time, "sleep", sleep)
        with temporary_files.lock_folder(tmp_path):
            assert slept and min(slept) > 0


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("config.json:a", "config.json"), ("generation_config.json:a:b", "generation_config.json"),
        ("config.json", None), ("other.json:a", None), ("a:config.json", None), ("a", None),
    ],
)  # fmt: skip
def test_only_a_file_that_readers_have_begins_a_place(key: str, file: str | None) -> None:
    edits: Any = SimpleNamespace(
        _texts={folder_edits.CONFIG: "{}"}, folder="m", _json=lambda file: {},
        _existing_locations=lambda key: [], _location_of_new_key=lambda key: None,
        _near_keys=lambda key: "near",
    )  # fmt: skip
    if file is None:
        with pytest.raises(UsageError, match=f"{key}: stands in no file of m"):
            folder_edits.FolderEdits._locations(edits, key)
        return
    (found,) = folder_edits.FolderEdits._locations(edits, key)
    assert found.file == file and list(found.path) == [key.partition(":")[2]]


@pytest.mark.parametrize(
    ("encoding", "block", "size"),
    [("F32", 1, 4), ("BF16", 1, 2), ("Q4_0", 32, 18), ("Q4_K", 256, 144)],
)
@pytest.mark.parametrize("blocks", [1, 6])
def test_an_estimate_counts_the_elements_that_it_encoded(
    blocks: int, encoding: str, block: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block and bytes are llama.cpp's own of these types."""
    made = iter([np.zeros(blocks * size, np.uint8)])
    monkeypatch.setattr(run, "_encoded_chunks", lambda *given: made)
    output: Any = SimpleNamespace(info=SimpleNamespace(encoding=encoding))
    assert run.first_chunk(output, Options(), 1000) == blocks * block


def test_parts_that_come_in_chunks_are_counted_as_they_come_and_as_they_are_joined() -> None:
    chunk = b"20000\r\n" + bytes(0x20000) + b"\r\n"
    file = io.BytesIO(chunk * (PART // 0x20000) + b"0\r\n\r\n")
    answer: Any = SimpleNamespace(fp=file, chunked=True, length=None)
    body = ResponseBody(answer, {})
    tracemalloc.start()
    try:
        assert len(body.read(PART)) == PART
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert estimate._remote_bytes() == AHEAD * round(peak / PART) * PART + HELD + KEPT


@pytest.mark.parametrize("every", [2, 6])
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("change", [None, 0, 5])
def test_windows_in_other_layers_are_a_loss_where_there_are_windows(
    change: int | None, window: int | None, every: int
) -> None:
    layers = [(i + 1) % every != 0 for i in range(12)]
    if change is not None:
        layers[change] = not layers[change]
    lost = pattern_loss(every)
    hp = {"sliding_window": window, "window_layers": tuple(layers), "n_layers": 12}
    assert bool(lost.applies(hp)) is (window is not None and change is not None)
    assert f"all layers but one in {every}" in lost.consequence


@pytest.mark.parametrize(
    "known",
    [
        [], [(0, 3)], [(2, 5)], [(2, 5), (5, 7)], [(1, 9), (2, 3)], [(4, 6), (0, 2)], [(7, 10)],
        [(0, 10)], [(8, 15)],
    ],
)  # fmt: skip
def test_what_is_left_of_a_file_is_every_byte_that_nothing_covers(
    known: list[tuple[int, int]],
) -> None:
    found = remaining_ranges(known, 10)
    covered = {i for start, stop in known for i in range(start, stop)}
    assert [i for start, stop in found for i in range(start, stop)] == [
        i for i in range(10) if i not in covered
    ]
    assert all(start < stop for start, stop in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))  # joined, in order


@pytest.mark.parametrize(
    "before",
    ["", '{"a": 1}', '{"a": 1}\n', '{\n  "a": 1\n}', '{\n    "a": 1\n}\n', '{\n\t"a": 1\n}\n',
     '{"a": "\u00e9"}'],
)  # fmt: skip
def test_json_is_written_as_the_file_had_it(before: str) -> None:
    """Indentation, one line, escapes and the end of the text; a new file has two blanks."""
    value = {"a": "\u00e9", "b": [1, {"c": None}]}
    text = folder_edits._dump_like(value, before)
    assert json.loads(text) == value
    assert text.endswith("\n") is (before.endswith("\n") or not before)
    lines = text.rstrip("\n").split("\n")
    assert (len(lines) == 1) is (bool(before) and "\n" not in before.rstrip("\n"))
    if len(lines) > 1:
        start = "  " if not before else before.split("\n")[1].partition('"')[0]
        assert lines[1].startswith(f'{start}"a"')
    assert ("\u00e9" in text) is not before.isascii()


@pytest.mark.parametrize("blocks", [None, 1, 2, 7])
@pytest.mark.parametrize(
    ("encoding", "byte", "where", "block", "row"),
    [
        ("Q4_K", 0, "block 0 (row 0)", 0, 0), ("Q4_K", 143, "block 0 (row 0)", 0, 0),
        ("Q4_K", 144 * 3, "block 3 (row 1)", 3, 1), ("F32", 4101, "row 2, byte 4101", None, 2),
    ],
)  # fmt: skip
def test_the_first_byte_that_is_not_reproduced_is_placed(
    encoding: str, byte: int, where: str, block: int | None, row: int, blocks: int | None
) -> None:
    output: Any = SimpleNamespace(
        info=SimpleNamespace(encoding=encoding, name="w", shape=(4, 512)), part=None
    )
    base = TensorAttestation("k", ("w",), encoding, "reproduced")
    found = _difference_row(output, base, _Difference(byte, blocks))
    more = f"; {blocks} blocks differ" if (blocks or 0) > 1 else ""
    assert found.why == f"{where} is not what the base gives{more}"
    assert (found.state, found.byte, found.block, found.row) == ("not reproduced", byte, block, row)


@pytest.mark.parametrize("data", [b"", b"x", b"xyz"])
@pytest.mark.parametrize("offset", [0, 2])
def test_bytes_are_placed_only_before_a_file_is_closed(
    offset: int, data: bytes, tmp_path: Path
) -> None:
    with atomic.FileSet(force=True) as files:
        file = files.create(tmp_path / "a")
        file.place(file.skip(6) + offset, memoryview(data))
        file.write(b"end")
    written = (tmp_path / "a").read_bytes()
    assert written == (bytes(offset) + data).ljust(6, b"\0") + b"end"
    with pytest.raises(ValueError, match="a: is closed"):
        file.place(offset, memoryview(data))
    assert (tmp_path / "a").read_bytes() == written


@pytest.mark.parametrize("lacking", range(1, 7))
@pytest.mark.parametrize("held", [1, 2])
def test_a_list_of_weights_without_a_scale_says_where_it_goes_on(held: int, lacking: int) -> None:
    def view(scaled: bool, at: int) -> Any:
        part = SimpleNamespace(info=SimpleNamespace(name=f"w{at}.input_scale"))
        return SimpleNamespace(stored=[SimpleNamespace(
            packed=lambda: SimpleNamespace(config={}),
            parts={"input_scale": part} if scaled else {}, info=SimpleNamespace(encoding="FP8"),
        )])  # fmt: skip

    views = {f"w{at}": view(at >= lacking, at) for at in range(held + lacking)}
    note = packing.partial_input_scales(cast(Any, SimpleNamespace(items=views.items, path="m")))
    shown = ", ".join(f"w{at}" for at in range(min(lacking, 3))) + ", ..." * (lacking > 3)
    assert note is not None and note.text == (
        f"{lacking} of {held + lacking} FP8 weights have no input_scale, and the others do: "
        f"{shown}; engines take 1.0, or 0, for theirs"
    )


@pytest.mark.parametrize("name", ["m.gguf", "below/m.apr"])
def test_a_file_without_a_folder_of_texts_has_its_own(name: str, tmp_path: Path) -> None:
    model: Any = SimpleNamespace(folder=None, path=tmp_path / name)
    edits = folder_edits.FolderEdits(model)
    assert edits.folder == (tmp_path / name).parent and edits._texts == {}


@pytest.mark.parametrize(
    ("method", "why", "claim", "todo"),
    [
        (
            "aqlm", "its codebooks are additive",
            "quantization 'aqlm' of config.json is not decoded here (its codebooks are additive)",
            "decode them with the tool that made them",
        ),
        (
            "hqq", "", "quantization 'hqq' of config.json is not decoded here",
            "decode them with the tool that made them",
        ),
        (
            "", "", "config.json says nothing of quantization, but weights are packed",
            "get the config.json that belongs to them",
        ),
        (
            "", "two axes",
            "config.json says nothing of quantization, but weights are packed (two axes)",
            "get the config.json that belongs to them",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 3, 4])
def test_packed_weights_that_nothing_decodes_say_what_is_left_to_do(
    count: int, method: str, why: str, claim: str, todo: str
) -> None:
    infos = tuple(TensorInfo(f"t{i}", (2, i + 1), "U8", 0, 2 * i + 2, None) for i in range(count))
    packing = UndecodedPacking(method, frozenset({"a", "b"}), infos, why)
    shown = [f"t{i} U8 [2, {i + 1}]" for i in range(min(count, 3))]
    more = ", ..." if count > 3 else ""
    text = f"{claim}: 2 weights in {count} tensors ({', '.join(shown)}{more})"
    assert packing.refusal == (
        f"{text}; expected weights that can be read; copy them as they are (to safetensors or "
        f"APR), or {todo}"
    )
    note = packing.as_note("m")
    assert (note.where, note.text) == ("m", f"{text}; they are copied as they are stored")


def test_only_roles_of_packed_weights_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, Any] = {"q": [("a",), ("x",)], "k": [("x", "y")], "v": []}
    monkeypatch.setattr(
        "aprfmt.arch.binding.groups_for",
        lambda spec, style, keys, hyper: [SimpleNamespace(stored=one) for one in stored[keys[0]]],
    )
    packing = UndecodedPacking("m", frozenset({"a", "b"}), (), "")
    nothing: Any = None
    assert packing.roles_among(nothing, "hf", nothing, ("q", "k", "v")) == {"q"}


@pytest.mark.parametrize("cut", [(0, None), (0, 12), (3, 12), (3, 4), (5, 5), (11, 12)])
@pytest.mark.parametrize("runs", [[(0, 12)], [(4, 12)], [(4, 6), (0, 6)], [(9, 1), (2, 11)]])
def test_a_planned_tensor_has_the_bytes_that_will_be_copied(
    runs: list[tuple[int, int]], cut: tuple[int, int | None]
) -> None:
    """From where each run begins, whatever part of the tensor is asked for."""
    data = bytes(range(20))
    stored: Any = SimpleNamespace(
        info=SimpleNamespace(nbytes=20), raw=lambda start, stop: memoryview(data)[start:stop]
    )
    output: Any = SimpleNamespace(
        runs=[ByteRun(stored, *run) for run in runs], copies=True, info=SimpleNamespace(nbytes=12)
    )
    whole = b"".join(data[start : start + count] for start, count in runs)
    assert bytes(PlannedTensor(output).raw(*cut)) == whole[slice(*cut)]
    output.copies = False
    assert not PlannedTensor(output).raw(*cut)


@pytest.mark.parametrize(
    "given",
    [
        [], [(3, 3)], [(0, 0), (10, 10), (12, 15)], [(2, 4), (4, 6)], [(2, 4), (5, 6)],
        [(5, 9), (1, 6)], [(1, 9), (3, 3)], [(8, 15), (9, 9)], [(6, 6), (1, 2)], [(4, 2)],
    ],
)  # fmt: skip
def test_joined_ranges_hold_every_byte_of_their_parts_and_none_is_empty(
    given: list[tuple[int, int]],
) -> None:
    found = join_ranges([Range(*one, f"why {i}") for i, one in enumerate(given)], 10)
    held = [i for one in found for i in range(one.start, one.stop)]
    assert held == [i for i in range(10) if any(start <= i < stop for start, stop in given)]
    assert all(one.start < one.stop for one in found)
    assert all(one.stop < other.start for one, other in pairwise(found))
    for one in found:
        parts = {f"why {i}" for i, (start, stop) in enumerate(given)
                 if start < min(stop, 10) and one.start <= start < one.stop}  # fmt: skip
        assert set(one.why.split(", ")) == parts


def test_outputs_are_sorted_by_their_first_byte_in_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that no file holds comes before all, one of an unlisted file before the listed ones."""
    files = [SimpleNamespace(path=Path(name)) for name in "abc"]
    numbers = {Path("a"): 0, Path("b"): 1}
    monkeypatch.setattr(scheduling, "_part_offsets", lambda sources: sources)

    def key(*places: tuple[int, int]) -> tuple[int, int]:
        output: Any = SimpleNamespace(sources=[(files[at], start) for at, start in places])
        return scheduling._source_order_key(output, numbers)

    assert key((1, 5), (0, 9), (0, 7)) == (0, 7)
    assert key((1, 0)) == (1, 0) and key((2, 4), (0, 1)) == (-1, 4) and key() == (-1, 0)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stated", [None, "changed"])
@pytest.mark.parametrize("folder", [False, True])
def test_companion_files_are_carried_but_for_a_configuration_of_the_keys(
    folder: bool, stated: str | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json that was made of a file's own keys is none; another is as it stands now."""
    from aprfmt.conversion import metadata

    embedded = {"config.json": "embedded", "x.json": "embedded", "y.json": "y"}
    texts = {"config.json": "beside", "x.json": "beside", "tokenizer.json": "large"}
    model: Any = SimpleNamespace(
        carried=SimpleNamespace(embedded_texts=embedded),
        folder=SimpleNamespace(texts=texts) if folder else None,
    )
    monkeypatch.setattr(metadata, "has_own_config", lambda model: own)
    monkeypatch.setattr(metadata, "config_text", lambda model: stated)
    where = "beside" if folder else "embedded"
    expected = {"x.json": where, "y.json": "y"}
    if own:
        expected["config.json"] = stated or where
    assert metadata._small_files(model) == expected
    assert embedded["config.json"] == "embedded"
    if own:
        embedded.pop("config.json"), texts.pop("config.json")
        assert "config.json" not in metadata._small_files(model)


def test_what_a_copy_lacks_without_a_flag_is_of_the_source() -> None:
    from aprfmt.conversion.accounting import Account, SourceItem

    rows = [
        SourceItem("a", "unread config key", "lost", "gone", "only in A"),
        SourceItem("b", "config key", "transformed", "changed", "unequal"),
        SourceItem("c", "file", "copied", "", "unreadable"),
        SourceItem("d", "file", "copied", "", "equal"),
        SourceItem("e", "tensor", "dropped", "by a flag"),
    ]
    account = Account(tuple(rows))
    assert [(row.kind, row.name, row.state, row.why, row.side) for row in account.left] == [
        ("config key", "a", "only in A", "gone", "the source"),
        ("config key", "b", "unequal", "changed", ""),
        ("file", "c", "unreadable", "", ""),
    ]
    assert account.counts == {"copied": 2, "transformed": 1, "dropped": 1, "lost": 1}
    assert account.lost == (rows[0],)
    assert account.says == "5 of the source: 2 copied, 1 transformed, 1 dropped, 1 lost"
    assert Account(()).says == "0 of the source: nothing"


def test_a_conversion_goes_on_only_from_files_that_say_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    def opened(path: Path) -> Any:
        identity = "" if path.name == "unsure" else f"etag-{path.name}"
        return SimpleNamespace(identity=identity, size=7, close=lambda: closed.append(path.name))

    def asked(*names: str) -> dict[str, str]:
        closed.clear()
        files = tuple(Path("m") / name for name in names)
        model: Any = SimpleNamespace(source=SimpleNamespace(files=files))
        return resume_state.source_identities(model)

    monkeypatch.setattr(resume_state, "open_bytes", opened)
    assert asked("a", "b") == {"a": "etag-a 7", "b": "etag-b 7"} and closed == ["a", "b"]
    with pytest.raises(UsageError, match=r"unsure: nothing says when it changes \(no ETag\)"):
        asked("a", "unsure", "b")
    assert closed == ["a", "unsure"]


def test_an_importance_has_a_number_for_every_column_or_for_those_of_each_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noted(importance: dict[str, int | None], shape: tuple[int, ...] = (4, 64)) -> list[str]:
        outputs = [
            SimpleNamespace(
                info=SimpleNamespace(name=name, shape=shape),
                copies=name == "copied",
                encoding="F32" if name == "plain" else "Q4_0",
            )
            for name in importance
        ]
        monkeypatch.setattr(
            encoding_choice,
            "column_importances",
            lambda output, options: (
                None if (size := importance[output.info.name]) is None else np.ones(size)
            ),
        )
        plan: Any = SimpleNamespace(outputs=outputs, notes=[])
        encoding_choice.check_importance(plan, cast(Any, OPTIONS))
        return [note.text for note in plan.notes]

    assert noted({"a": 64, "copied": 3, "plain": 3}) == []
    assert noted({"a": 192, "b": 64}, (3, 4, 64)) == []
    for size, shape in ((63, (4, 64)), (256, (4, 64)), (256, (3, 4, 64)), (65, (3, 4, 64))):
        with pytest.raises(ConversionError, match=f"a: the importance matrix has {size} columns"):
            noted({"a": size}, shape)
    for count, shown in ((1, "t0"), (3, "t0, t1, t2"), (4, "t0, t1, t2 ...")):
        (text,) = noted({f"t{at}": None for at in range(count)} | {"a": 64})
        assert f"about {count} tensors" in text and text.endswith(f"without: {shown}")
    plan: Any = SimpleNamespace(outputs=[object()], notes=[])
    encoding_choice.check_importance(plan, cast(Any, SimpleNamespace(importance=None)))
    assert not plan.notes


OPTIONS = SimpleNamespace(importance=lambda name: None, imatrix=None, extra_metadata={})
