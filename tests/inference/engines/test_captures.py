"""Arrays that other engines dumped: how they are read, mapped to points, and refused."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from aprfmt.errors import FormatError
from aprfmt.inference.engines import captures, statistics
from aprfmt.inference.engines.captures import open_captures
from aprfmt.inference.engines.layouts import CHAINS, PADDED, PointLayout, apply_layout
from aprfmt.inference.engines.mapping import load_mapped, read_mapping
from aprfmt.inference.engines.mapping_proposal import propose_mapping
from aprfmt.inference.engines.opening import open_trace, trace_kind
from aprfmt.inference.trace_file import load_trace
from aprfmt.measure.trace_view import unread_arrays
from aprfmt.model import open_model
from tests.cli.run import Done, aprfmt
from tests.diagnosis.engines import tiny_folder, trace
from tests.inference.engine_dumps import modules, state
from tests.models import IDS

TEXT = ",".join(map(str, IDS))


def own(base: str = "llama", **how: Any) -> dict[str, Any]:
    """Return every point's value of a tiny model's pass."""
    with load_trace(trace(tiny_folder(base), f"captures-{base}-{'-'.join(how)}", **how)) as found:
        return {key: np.array(found.recorded_values(key)) for key in found.records}


def ran(code: int, *args: object) -> Done:
    """Run a command that ends with this exit code."""
    done = aprfmt(*args)
    assert done.code == code, (done.out, done.err)
    return done


def npy(folder: Path, arrays: Mapping[str, Any]) -> Path:
    """Write one .npy an array."""
    folder.mkdir()
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def test_every_layout_comes_back_into_ours() -> None:
    values = np.arange(7 * 3 * 4, dtype=np.float32).reshape(7, 3, 4)
    pairs = np.stack([values[..., :2], values[..., 2:]], -1).reshape(7, 3, 4)
    there = {
        ("unbatch", "reshape"): values.reshape(1, 7, 12),
        ("unbatch", "heads_first"): values.swapaxes(0, 1)[None],
        ("unbatch", "transpose"): values.reshape(7, 12).T,
        ("unbatch", "dims_first"): values.swapaxes(1, 2),
        ("unbatch", "reshape", "adjacent_pairs"): pairs,
        ("unbatch", "heads_first", "adjacent_pairs"): pairs.swapaxes(0, 1),
    }
    assert set(there) == set(CHAINS)
    wide = np.concatenate([values.reshape(7, 12), np.ones((7, 5), np.float32)], 1)[None]
    there[PADDED] = wide
    for chain, given in there.items():
        assert np.array_equal(apply_layout(given, chain, PointLayout((7, 3, 4), 7), "x"), values), (
            chain
        )


@pytest.mark.parametrize("chain", [("unbatch", "sideways"), ("",), ("reshape", "Reshape")])
def test_an_unknown_step_of_a_layout_is_named(chain: tuple[str, ...]) -> None:
    with pytest.raises(FormatError, match=f"x: layout '{chain[-1]}' is not known; .*heads_first"):
        apply_layout(np.zeros((7, 12), np.float32), chain, PointLayout((7, 3, 4), 7), "x")


@pytest.mark.parametrize("given", [(3, 4), (1, 3, 4), (1, 1, 3, 4), (1, 7, 12), (1, 12), (12,)])
@pytest.mark.parametrize("shape", [(1, 3, 4), (7, 12), (1, 12), (12,)])
def test_only_axes_that_the_point_lacks_are_taken_off(
    given: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Of one token the first axis is the token's own."""
    x = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    found = apply_layout(x, ("unbatch",), PointLayout(shape, shape[0]), "x")
    wanted = given
    while len(wanted) > len(shape) and wanted[0] == 1:
        wanted = wanted[1:]
    assert found.shape == wanted and np.array_equal(found, x.reshape(wanted))


@pytest.mark.parametrize("step", ["heads_first", "dims_first"])
def test_a_step_that_needs_heads_is_refused_without(step: str) -> None:
    with pytest.raises(FormatError, match=rf"x: \[7, 12\] cannot be read as {step} of \[7, 12\]"):
        apply_layout(np.zeros((7, 12), np.float32), (step,), PointLayout((7, 12), 7), "x")


@pytest.mark.parametrize("heads_first", [False, True])
def test_query_shows_the_axis_of_heads_among_as_many_tokens(
    heads_first: bool, tmp_path: Path
) -> None:
    """Four tokens and four heads: only the query before rope tells which axis is which."""
    torch = pytest.importorskip("torch")
    found = own()
    query, turned = found["L0.q"][:4], found["L0.q_rope"][:4]
    assert query.shape[:2] == (4, 4)
    held = turned.swapaxes(0, 1) if heads_first else turned
    path = tmp_path / "d.pt"
    torch.save(
        {
            "input_ids": torch.tensor(IDS[:4]),
            "model.layers.0.self_attn.q_proj": torch.tensor(query.reshape(4, -1)),
            "model.layers.0#q_rope": torch.tensor(np.ascontiguousarray(held)),
        },
        path,
    )
    with open_model(tiny_folder("llama")) as model, open_trace(path, None, model) as trace_:
        assert not trace_.run["unknown"]
        assert np.array_equal(np.asarray(trace_.recorded_values("L0.q_rope")), turned)


def test_arrays_are_mapped_by_values_layouts_and_rows(tmp_path: Path) -> None:
    """Names say nothing here; a fault of the engine begins in layer 1."""
    right, wrong = own(), own(backend=None, hp={"rope_theta": 1e4})
    mixed = {key: (right if key.startswith(("embd", "L0.")) else wrong)[key] for key in right}
    arrays = {
        f"t{layer}_{letter}": mixed[f"L{layer}.{point}"]
        for layer in range(3)
        for letter, point in (("a", "attn_norm"), ("d", "v"), ("e", "attn_out"), ("f", "out"))
    }
    for layer in range(3):
        arrays[f"t{layer}_b"] = mixed[f"L{layer}.q"].swapaxes(0, 1)[None]
        arrays[f"t{layer}_c"] = mixed[f"L{layer}.k"].reshape(len(IDS), -1).T
    arrays["z"] = mixed["logits"][-1:]
    with open_captures(npy(tmp_path / "d", arrays)) as captures:
        found = propose_mapping(captures, right, IDS)
    points = {"a": "attn_norm", "b": "q", "c": "k", "d": "v", "e": "attn_out", "f": "out"}
    for name, row in found.names.items():
        if name == "z":
            continue
        assert row is not None and row.key == f"L{name[1]}.{points[name[-1]]}", (name, row)
        assert row.certainty == ("certain" if name[1] == "0" else row.certainty)
    assert {found.names[f"t{i}_b"].layout for i in range(3)} == {("unbatch", "heads_first")}  # type: ignore[union-attr]
    assert found.names["t0_c"].layout == ("unbatch", "transpose")  # type: ignore[union-attr]
    assert found.names["t2_f"].certainty != "certain"  # type: ignore[union-attr]


def test_the_last_row_alone_is_seen_as_such(tmp_path: Path) -> None:
    right = own()
    with open_captures(npy(tmp_path / "d", {"z": right["logits"][-1]})) as captures:
        row = propose_mapping(captures, right, IDS).names["z"]
    assert row is not None and (row.key, row.rows, row.certainty) == ("logits", "last", "certain")


NAMED = {
    # transformers' path or our key -> the point it says, and one that is nearer in values
    "model.layers.1": ("L1.out", "L1.mid"),
    "hidden_states_2": ("L1.out", "L1.mid"),
    "model.layers.2.mlp": ("L2.ffn_out", "L1.ffn_out"),
    "model.norm": ("final_norm", "L2.ffn_norm"),
    "L1.attn_out": ("L1.attn_out", "L0.attn_out"),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("apart", [0.02, 0.09, 0.3])
def test_a_name_decides_before_a_near_value(name: str, apart: float, tmp_path: Path) -> None:
    """A fault in one branch brings a point nearer to its neighbour than to its own value."""
    key, neighbour = NAMED[name]
    right = own()
    mine, near = right[key], right[neighbour]
    size = np.linalg.norm(mine) / np.linalg.norm(near)
    right[neighbour] = mine + apart / 2 * near * size  # so that the neighbour is the nearer one
    given = mine + apart * near * size
    with open_captures(npy(tmp_path / "d", {name: given})) as captures:
        row = propose_mapping(captures, right, IDS).names[name]
    assert row is not None and row.key == key, row
    assert row.certainty in ("likely", "possible") and row.why == "its name says so"


@pytest.mark.parametrize("name", ["hidden_states_1", "hidden_states.1", "model.layers.0"])
def test_a_name_decides_where_no_value_is_near(name: str, tmp_path: Path) -> None:
    """Seen red: entries of `hidden_states` with a large fault were of no point."""
    right = own()
    far = np.random.default_rng(0).standard_normal(right["L0.out"].shape).astype(np.float32)
    with open_captures(npy(tmp_path / "d", {name: far})) as captures:
        row = propose_mapping(captures, right, IDS).names[name]
    assert row is not None and (row.key, row.certainty) == ("L0.out", "possible")


def test_rows_of_zeros_say_nothing_of_a_point(tmp_path: Path) -> None:
    right = own()
    values = right["L1.v"].copy()
    values[[2, 3]] = 0
    with open_captures(npy(tmp_path / "d", {"z": values})) as captures:
        row = propose_mapping(captures, right, IDS).names["z"]
    assert row is not None and (row.key, row.certainty) == ("L1.v", "certain")
    assert "2 rows of zeros" in row.why


def test_of_two_points_that_are_as_near_none_is_taken(tmp_path: Path) -> None:
    right = own()
    noise = np.random.default_rng(0).standard_normal(right["L1.v"].shape).astype(np.float32)
    given = right["L1.v"] * (1 + 0.3 * noise)
    for apart, key in ((0.0, None), (0.3, "L1.v")):
        right["L2.v"] = right["L1.v"] * (1 + apart * noise[::-1])
        with open_captures(npy(tmp_path / str(apart), {"z": given})) as captures:
            found = propose_mapping(captures, right, IDS)
        row = found.names["z"]
        assert (None if row is None else row.key) == key
        assert key is not None or ("L1.v" in found.reasons["z"] and "L2.v" in found.reasons["z"])


@pytest.mark.parametrize("name", NAMED)
def test_an_equal_value_decides_against_a_name(name: str, tmp_path: Path) -> None:
    key, neighbour = NAMED[name]
    right = own()
    with open_captures(npy(tmp_path / "d", {name: right[neighbour]})) as captures:
        row = propose_mapping(captures, right, IDS).names[name]
    assert row is not None and (row.key, row.certainty) == (neighbour, "certain"), (key, row)


# How an engine leaves logits -> what stands behind the vocabulary; the mapped distance is equal.
PADDINGS: dict[str, Any] = {
    "zeros": 0.0, "minus infinity": -np.inf, "the least number": np.finfo(np.float32).min,
}  # fmt: skip


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["lm_head", "logits", "head"])
def test_columns_behind_the_vocabulary_are_left_out(
    name: str, padding: str, tmp_path: Path
) -> None:
    right = own()["logits"]
    behind = np.full((len(right), 31), PADDINGS[padding], np.float32)
    wide = np.concatenate([right, behind], 1)[None]
    dumps = npy(tmp_path / "d", {name: wide, "input_ids": np.array(IDS)})
    out = tmp_path / "t.safetensors"
    done = ran(0, "trace", tiny_folder("llama"), "--map", dumps, "-o", out, "--json")
    rows = {row["name"]: row for row in done.json["mapping"]["names"]}
    assert (rows[name]["key"], rows[name]["certainty"]) == ("logits", "certain")
    with open_trace(out) as made:
        assert np.array_equal(np.asarray(made.recorded_values("logits_raw")), right)
    found = ran(0, "diagnose", tiny_folder("llama"), out if name == "head" else dumps, "--json")
    assert found.json["verdict"] in ("same", "precision")


def test_other_columns_behind_the_vocabulary_are_named(tmp_path: Path) -> None:
    right = own()["logits"]
    wide = np.concatenate([right, right[:, :9]], 1)
    dumps = npy(tmp_path / "d", {"lm_head": wide, "input_ids": np.array(IDS)})
    done = aprfmt("diagnose", tiny_folder("llama"), dumps)
    assert "after the vocabulary" in done.out and "not compared" in done.out


PARTS: dict[str, tuple[str, Any, str]] = {
    # array -> (its name, what of the point it has, what is said of it)
    "second of two": ("lm_head", lambda x: x[:, 48:], "columns 48 to 95 of the 96 of logits"),
    "a third": ("logits", lambda x: x[:, :32], "columns 0 to 31 of the 96 of logits: rank 0 of 3"),
    "no name": ("t", lambda x: x[:, 48:], "columns 48 to 95 of the 96 of logits: rank 1 of 2"),
    "an odd part": ("lm_head", lambda x: x[:, :50], "50 columns; logits"),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_columns_of_one_rank_are_no_logits(part: str, tmp_path: Path) -> None:
    name, taken, says = PARTS[part]
    right = own()
    right["logits"] = right["logits"][:, :96]
    with open_captures(npy(tmp_path / "d", {name: taken(right["logits"])})) as captures:
        found = propose_mapping(captures, right, IDS, aliases={"logits_raw": "logits"})
    assert found.names[name] is None and says in found.reasons[name], found


def test_rows_of_one_rank_are_named(tmp_path: Path) -> None:
    right = {key: value[:28] for key, value in own().items() if key in ("L0.out", "L1.out")}
    half = {"model.layers.1": right["L1.out"][14:]}
    with open_captures(npy(tmp_path / "d", half)) as captures:
        found = propose_mapping(captures, right, IDS[:28])
    assert "rows 14 to 27 of the 28 of L1.out: rank 1 of 2" in found.reasons["model.layers.1"]


def test_one_ranks_columns_end_with_their_reason(tmp_path: Path) -> None:
    """Neither command compares them, and no tensor is accused."""
    model, right = tiny_folder("llama"), own()["logits"]
    dumps = npy(tmp_path / "d", {"lm_head": right[:, :40], "input_ids": np.array(IDS)})
    mapped = aprfmt("trace", model, "--map", dumps)
    assert mapped.code == 2 and f"40 columns; logits has {right.shape[1]}" in mapped.err
    found = aprfmt("diagnose", model, dumps)
    assert found.code == 2 and f"40 of the {right.shape[1]} columns" in found.out + found.err


def test_the_command_proposes_writes_and_uses_a_mapping(tmp_path: Path) -> None:
    model, right = tiny_folder("llama"), own()
    dumps = npy(
        tmp_path / "dumps",
        {
            "blk0_query": right["L0.q"].swapaxes(0, 1)[None],
            "head": right["logits"][None],
            "noise": np.random.default_rng(0).normal(size=(29, 48)).astype(np.float32),
        },
    )
    out = tmp_path / "trace.safetensors"
    first = ran(0, "trace", model, "--map", dumps, "--ids", TEXT, "-o", out, "--json")
    said = {row["name"]: row for row in first.json["mapping"]["names"]}
    assert said["blk0_query"]["key"] == "L0.q" and said["blk0_query"]["certainty"] == "certain"
    assert said["noise"]["key"] is None
    proposed = tmp_path / "trace.map.json"
    assert read_mapping(proposed).names["head"].key == "logits"  # type: ignore[union-attr]
    assert trace_kind(proposed) == "captures"
    with open_trace(out) as made, open_trace(proposed, IDS, None) as direct:
        assert np.array_equal(np.asarray(made.recorded_values("L0.q")), right["L0.q"])
        assert list(direct.records) == list(made.records)
    corrected = json.loads(proposed.read_text())
    corrected["names"]["head"] = None
    proposed.write_text(json.dumps(corrected))
    again = ran(0, "trace", model, "--map", dumps, "--mapping", proposed, "--json")
    assert [row["key"] for row in again.json["records"]] == ["L0.q"]


def test_arrays_of_every_container_are_the_same_trace(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    right = own()
    arrays = {"L0.q": right["L0.q"], "logits": right["logits"]}
    folder = npy(tmp_path / "npy", {**arrays, "input_ids": np.array(IDS)})
    raw = tmp_path / "raw"
    raw.mkdir()
    shapes = {}
    for name, values in arrays.items():
        values.astype("<f4").tofile(raw / f"{name}.bin")
        shapes[name] = list(values.shape)
    (raw / "shapes.json").write_text(json.dumps(shapes))
    save_file(arrays, tmp_path / "arrays.safetensors")
    names = {"aprfmt_mapping": 1, "captures": "arrays.safetensors", "names": {k: k for k in arrays}}
    (tmp_path / "map.json").write_text(json.dumps(names))
    for path in (folder, raw, tmp_path / "map.json"):
        with open_trace(path, IDS) as found:
            assert set(found.records) == set(arrays)
            for key, values in arrays.items():
                assert np.array_equal(
                    np.ravel(np.asarray(found.recorded_values(key))), np.ravel(values)
                ), path


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (np.array([{"a": 1}], object), "pickled objects"),
        (np.array(["x", "y"]), "holds text"),
        (np.ones((7, 4), complex), "expected numbers"),
        (np.ones((0, 4)), "holds no value"),
    ],
)
def test_an_array_that_holds_no_numbers_ends_no_other(odd: Any, why: str, tmp_path: Path) -> None:
    """One of a point had to be compared. Seen red: no trace at all, a bug, no word of it."""
    right, path, layer = own(), tmp_path / "a.npz", "model.layers.0.self_attn"
    with open_model(tiny_folder("llama")) as model:
        for given, point, other in (
            (model, "L0.q", "L0.k"),
            (None, f"{layer}.q_proj", f"{layer}.k_proj"),
        ):
            for name in (point, "notes"):
                q, k = (right[key].reshape(len(IDS), -1) for key in ("L0.q", "L0.k"))
                arrays = {point: q, other: k, name: odd}
                np.savez(path, **cast(Any, arrays))
                with open_trace(path, list(IDS), given) as found:
                    assert found.records and ("L0.q" in found.records) == (name == "notes")
                    (row,) = unread_arrays(found)
                state = "unread" if name == "notes" else "unreadable"
                assert (row.name, row.state) == (name, state) and why in row.why


@pytest.mark.parametrize("broken", ["L0.k.npy", "notes.npy", "more.pt", "more.npz", "notes.bin"])
def test_a_damaged_file_ends_no_other(broken: str, tmp_path: Path) -> None:
    """One that may hold a point had to be compared. Seen red: no trace of a folder of 60 arrays."""
    q, k = (own()[key].reshape(len(IDS), -1) for key in ("L0.q", "L0.k"))
    folder = npy(tmp_path / "d", {"L0.q": q, "L0.k": k})
    (folder / broken).write_bytes(b"PK\x03\x04 and no more.")  # of 17 bytes: no float32
    with open_model(tiny_folder("llama")) as model, open_trace(folder, list(IDS), model) as found:
        assert set(found.records) == {"L0.q"} | ({"L0.k"} - {broken.removesuffix(".npy")})
        (row,) = unread_arrays(found)
    state = "unread" if broken.startswith("notes") else "unreadable"
    assert (row.name, row.state) == (broken, state) and str(folder) not in row.why


@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_a_point_that_the_model_does_not_have_is_said(form: str, tmp_path: Path) -> None:
    """One of a layer behind the last, or of another architecture. Seen red: no word of it."""
    right, path = own(), tmp_path / f"a.{form}"
    q = right["L0.q"].reshape(len(IDS), -1)
    arrays = {"L0.q": q, "L77.q": q, "L0.q_norm": q, "L1.q": q[:0]}
    save: Any = np.savez if form == "npz" else lambda to, **rows: save_file(rows, to)
    save(path, **arrays)
    with open_model(tiny_folder("llama")) as model, open_trace(path, list(IDS), model) as found:
        assert set(found.records) == {"L0.q"}
        said = {row.name: row.state for row in unread_arrays(found)}
    assert said == {"L77.q": "unread", "L0.q_norm": "unread", "L1.q": "unreadable"}


BAD: Mapping[str, tuple[Any, str]] = {
    "no mark": ({"names": {}}, "is no mapping file"),
    "names": ({"aprfmt_mapping": 1, "names": []}, "an object of array names"),
    "key": ({"aprfmt_mapping": 1, "names": {"a": "L0.nothing"}}, "L0.nothing"),
    "entry": ({"aprfmt_mapping": 1, "names": {"a": 3}}, "expected null, a key"),
    "layout": ({"aprfmt_mapping": 1, "names": {"a": {"key": "L0.q", "layout": ["x"]}}}, "layout"),
    "rows": ({"aprfmt_mapping": 1, "names": {"a": {"key": "L0.q", "rows": "some"}}}, "rows"),
    "ids": ({"aprfmt_mapping": 1, "ids": [-1], "names": {}}, "token ids"),
    "dtype": ({"aprfmt_mapping": 1, "dtype": "int4", "names": {}}, "dtype"),
    "outside": ({"aprfmt_mapping": 1, "captures": "../x", "names": {}}, "next to the mapping file"),
    "absent": ({"aprfmt_mapping": 1, "captures": "d", "names": {"b": "L0.q"}}, "no such array"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_mapping_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    said, expected = BAD[name]
    npy(tmp_path / "d", {"a": np.zeros((2, 3), np.float32)})
    (tmp_path / "map.json").write_text(json.dumps(said))
    with pytest.raises(FormatError, match=expected) as error, load_mapped(tmp_path / "map.json"):
        pass
    assert "\n" not in str(error.value)


def test_damaged_and_hostile_arrays_are_refused(tmp_path: Path) -> None:
    folder = npy(tmp_path / "d", {"a": np.zeros((4, 6), np.float32)})
    whole = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(whole[:-5])
    with pytest.raises(FormatError, match="bytes"), open_captures(folder):
        pass
    np.save(folder / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FormatError, match="pickled"), open_captures(folder):
        pass
    (folder / "a.npy").unlink()
    with pytest.raises(FormatError, match=r"no \.npy or \.bin"), open_captures(folder):
        pass
    (folder / "b.bin").write_bytes(bytes(12))
    (folder / "shapes.json").write_text('{"b": [4]}')
    with pytest.raises(FormatError, match=r"say its shape in shapes\.json"), open_captures(folder):
        pass


def test_a_shape_that_no_layout_fits_is_refused(tmp_path: Path) -> None:
    folder = npy(tmp_path / "d", {"a": np.zeros((5, 7), np.float32)})
    said = {
        "aprfmt_mapping": 1,
        "ids": list(IDS),
        "names": {"a": {"key": "L0.q", "layout": ["heads_first"]}},
    }
    (folder / "aprfmt-map.json").write_text(json.dumps(said))
    result = ran(2, "diagnose", tiny_folder("llama"), folder)
    assert "cannot be read as heads_first" in result.err


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    folder = npy(tmp_path / "d", {"a": np.zeros((4, 6), np.float32)})
    model = tiny_folder("llama")
    for options, said in (
        (("--mapping", "x.json"), "goes with --map"),
        (("--map", folder, "--payload"), "leave --load, --payload"),
        (("--map", folder), "one of --prompt, --ids"),
    ):
        result = ran(2, "trace", model, *options)
        assert said in result.err, result.err


# --- tables of statistics -------------------------------------------------------------------------


def table(path: Path, values: Mapping[str, Any]) -> Path:
    """Write statistics of arrays, as .csv or .json."""
    rows = {
        key: {
            "mean": float(x.mean()),
            "std": float(x.std()),
            "min": float(x.min()),
            "max": float(x.max()),
            "l2": float(np.linalg.norm(x)),
        }
        for key, x in values.items()
    }
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = ["name,mean,std,min,max,l2"]
        lines += [f"{k},{','.join(f'{v:.7g}' for v in row.values())}" for k, row in rows.items()]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_table_of_statistics_gives_observations_and_no_cause(kind: str, tmp_path: Path) -> None:
    model = tiny_folder("llama")
    wrong = table(tmp_path / f"wrong.{kind}", own(hp={"rope_theta": 1e4}))
    assert trace_kind(wrong) == "statistics"
    found = ran(2, "diagnose", model, wrong, "--ids", TEXT, "--json").json
    assert (found["verdict"], found["causes"]) == ("not_comparable", [])
    seen = [row["where"][0] for row in found["evidence"] if "observation" in row["says"]]
    assert seen and seen[0] in ("L0.q_rope", "L0.k_rope") and "L0.q" not in seen
    assert any("next: dump" in row["says"] and "--map" in row["says"] for row in found["evidence"])
    right = table(tmp_path / f"right.{kind}", own())
    same = ran(2, "diagnose", model, right, "--ids", TEXT, "--json").json
    assert not any("observation" in row["says"] for row in same["evidence"])
    assert any("statistics of all common points agree" in r["says"] for r in same["evidence"])


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [2, 3])
def test_a_table_of_too_many_rows_is_none(
    most: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "t.csv", {f"L{i}.q": np.ones(3) for i in range(rows)})
    monkeypatch.setattr(statistics, "MAX_ROWS", most)
    assert statistics.is_table(path) == (rows <= most)
    monkeypatch.setattr(statistics, "MAX_ROWS", rows - 1)
    with pytest.raises(FormatError, match=f"more than {rows - 1} rows"):
        statistics._table_rows(path)


@pytest.mark.parametrize("form", ["x.safetensors", "x.npz", "x.pt", "x.bin"])
@pytest.mark.parametrize("names", [("x",), ("y",), ("x", "y")])
def test_only_a_tensor_that_was_saved_alone_is_the_files_own(
    names: tuple[str, ...], form: str, tmp_path: Path
) -> None:
    """One that has a name keeps it, though it is the file's."""
    torch = pytest.importorskip("torch")
    path = tmp_path / form
    arrays = {name: np.full(3, i, np.float32) for i, name in enumerate(names)}
    if path.suffix == ".safetensors":
        save_file(arrays, path)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        torch.save({name: torch.from_numpy(value) for name, value in arrays.items()}, path)
    with ExitStack() as stack:
        found = captures.read_array_file(path, stack)
        assert found.shapes == dict.fromkeys(names, (3,))
        assert all((found.read(name) == arrays[name]).all() for name in names)
    torch.save(torch.arange(3.0), tmp_path / "x.pt")
    with ExitStack() as stack:
        found = captures.read_array_file(tmp_path / "x.pt", stack)
        assert found.shapes == {"": (3,)} and found.read("").tolist() == [0, 1, 2]


@pytest.mark.parametrize("files", [2, 3])
def test_a_folder_of_too_many_arrays_is_refused(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "MAX_MEMBERS", 2)
    folder = npy(tmp_path / "d", {f"k{i}": np.ones(3, np.float32) for i in range(files)})
    if files == 2:
        with open_captures(folder) as found:
            assert set(found.shapes) == {"k0", "k1"}
    else:
        with pytest.raises(FormatError, match="3 files; at most 2 are read"):
            open_captures(folder).__enter__()


def test_a_table_with_text_for_a_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,mean\nL0.q,much\n")
    result = ran(2, "diagnose", tiny_folder("llama"), path, "--ids", TEXT)
    assert "mean is 'much'; expected a number" in result.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", ["batched", "rows", "last", "flat"])
def test_logits_alone_of_a_16_bit_run_are_precision_with_their_size(
    shape: str, dtype: str, tmp_path: Path
) -> None:
    """A rollout in 16 bits against a float32 model: transformers is the other engine."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tiny_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits.float().numpy()
    given = {
        "batched": logits, "rows": logits[0], "last": logits[:, -1], "flat": logits[0, -1],
    }[shape]  # fmt: skip
    arrays = {"logits": given, "input_ids": np.array([IDS])}
    made = tmp_path / "made.safetensors"
    ran(0, "trace", folder, "--map", npy(tmp_path / "d", arrays), "-o", made)
    with open_trace(made) as trace:
        values = trace.recorded_values("logits")
        assert values is not None and values.ndim == 2 and values.shape[1] == logits.shape[2]
    found = ran(0, "diagnose", folder, made, "--json").json
    assert found["verdict"] == "precision" and found["cause"] == "rounding", found["sentence"]
    reference = own()["logits"][-1]
    apart = np.linalg.norm(logits[0, -1] - reference) / np.linalg.norm(reference)
    assert 0.2 * apart < found["residual_before"] < 5 * apart


# What servers answer: the writer's name in words -> the JSON.
ANSWERS: dict[str, Any] = {
    "vLLM's": {
        "prompt_token_ids": list(range(1000)),
        "prompt_logprobs": [None, {"5": {"logprob": -0.5, "rank": 1}}],
    },
    "SGLang's": {"text": "x", "meta_info": {"input_token_logprobs": [[None, 5], [-0.5, 7]]}},
    "server's completion": {"choices": [{"logprobs": {"token_logprobs": [None, -0.5]}}]},
    "server's chat": {
        "choices": [{"logprobs": {"content": [{"logprob": -0.5, "top_logprobs": []}]}}]
    },
    "list of tokens": [None, {"5": {"logprob": -0.5, "rank": 1}}],
}


@pytest.mark.parametrize("writer", ANSWERS)
def test_log_probabilities_of_servers_are_named_with_what_to_save(
    writer: str, tmp_path: Path
) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(ANSWERS[writer]))
    for words in (("diagnose", tiny_folder("llama"), path),
                  ("trace", tiny_folder("llama"), "--load", path)):  # fmt: skip
        done = ran(2, *words)
        assert writer in done.err and "logits [tokens, vocabulary]" in done.err, done.err


def test_other_json_is_no_answer_of_a_server(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ('{"logprobs": 1}', '["prompt_logprobs"]', "", "{"):
        path.write_text(text)
        assert trace_kind(path) is None, text


# What torch.save is given -> the names of its arrays; `q` and `head` are points of the model.
SAVED: dict[str, Any] = {
    "a dict": (lambda q, head: {"L0.q": q, "lm_head": head}, ["L0.q", "lm_head"]),
    "tuples of one": (lambda q, head: {"L0.q": (q,), "lm_head": [head]}, ["L0.q", "lm_head"]),
    "nested": (lambda q, head: {"L0": {"q": q}, "lm_head": head}, ["L0.q", "lm_head"]),
    "pairs": (lambda q, head: {"x": (q, q * 2), "lm_head": head}, ["x.0", "x.1", "lm_head"]),
    "a list": (lambda q, head: [q, head], ["0", "1"]),
    "a view": (lambda q, head: {"L0.q": q.repeat(1, 2, 1)[:, ::2][:, : q.shape[1]] * 0 + q,
                                "lm_head": head.T.contiguous().T}, ["L0.q", "lm_head"]),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", SAVED)
def test_arrays_of_torch_save_are_mapped(kind: str, zipped: bool, tmp_path: Path) -> None:
    """In one file and in a folder with the ids: what torch saved comes back bit for bit."""
    import torch

    right = own()
    make, names = SAVED[kind]
    said = make(torch.tensor(right["L0.q"]), torch.tensor(right["logits"]))
    file = tmp_path / "run.pt"
    torch.save(said, file, _use_new_zipfile_serialization=zipped)
    with open_captures(file) as captures:
        assert captures.names == names
        row = propose_mapping(captures, right, IDS, aliases={"logits_raw": "logits"}).names
        assert {one.key for one in row.values() if one} >= {"L0.q", "logits"}
        assert np.array_equal(captures.read(names[-1]), right["logits"])
    folder = tmp_path / "runs"
    folder.mkdir()
    torch.save(said, folder / "run.pt", _use_new_zipfile_serialization=zipped)
    torch.save(torch.tensor(IDS), folder / "input_ids.pt")
    with open_captures(folder) as captures:
        assert captures.ids == list(IDS)
        points = ("L0.q", "lm_head")  # say more without the file's name
        assert captures.names == [n if n in points else f"run.{n}" for n in names]


def test_files_of_torch_save_are_captures_where_they_have_ids(tmp_path: Path) -> None:
    import torch

    right = own()
    arrays = {"L0.q": torch.tensor(right["L0.q"]), "lm_head": torch.tensor(right["logits"])}
    torch.save({**arrays, "input_ids": list(IDS)}, tmp_path / "ids.pt")
    weights = {"lm_head.weight": arrays["lm_head"], "model.norm.weight": arrays["L0.q"][0]}
    torch.save(weights, tmp_path / "weights.pt")
    assert trace_kind(tmp_path / "ids.pt") == "pt"
    assert trace_kind(tmp_path / "weights.pt") is None
    with open_trace(tmp_path / "ids.pt") as made:
        assert made.run["ids"] == list(IDS)
        assert np.array_equal(np.asarray(made.recorded_values("L0.q")), right["L0.q"])
    found = ran(0, "diagnose", tiny_folder("llama"), tmp_path / "ids.pt", "--json")
    assert found.json["verdict"] in ("same", "precision")
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, value in {**arrays, "input_ids": torch.tensor(IDS)}.items():
        torch.save(value, parts / f"{name}.pt")
    assert trace_kind(parts) == "captures"
    out = tmp_path / "t.safetensors"
    ran(0, "trace", tiny_folder("llama"), "--map", parts, "-o", out)
    with open_trace(out) as made:
        assert np.array_equal(np.asarray(made.recorded_values("L0.q")), right["L0.q"])
    (parts / "config.json").write_text("{}")
    assert trace_kind(parts) is None, "a model in pickles"


OF_LAYERS = "model.layers.0", "model.layers.1.mlp", "model.layers.1.self_attn.q_proj"
# Arrays by name with their shapes -> whether they are outputs of a pass, not a model's parameters.
OUTPUTS: dict[str, tuple[dict[str, tuple[int, ...]], bool]] = {
    "modules": ({name: (7, 16) for name in OF_LAYERS}, True),
    "modules in a batch of one": ({name: (1, 7, 16) for name in OF_LAYERS}, True),
    "modules in a batch of two": ({name: (2, 7, 16) for name in OF_LAYERS}, True),
    "a last row of logits": ({"model.layers.0": (7, 16), "lm_head": (1, 32)}, True),
    "one token's vectors": ({"model.layers.0": (16,), "model.norm": (16,)}, True),
    "hidden states": ({f"hidden_states.{n}": (1, 7, 16) for n in range(3)}, True),
    "own names": ({"L0.attn_out": (7, 16), "final_norm": (7, 16), "logits": (7, 32)}, True),
    "some of no point": ({"model.layers.0": (7, 16), "model.layers.0.act_fn": (7, 64)}, True),
    "a model": ({"model.layers.0.mlp.up_proj.weight": (64, 16), "lm_head.weight": (32, 16)}, False),
    "an adapter": ({"base_model.model.model.layers.0.mlp.lora_A.weight": (4, 16)}, False),
    "parameters without a suffix": (
        {
            "model.layers.0.input_layernorm": (16,),
            "model.layers.0.self_attn.q_proj": (16, 16),
            "model.layers.0.mlp.up_proj": (64, 16),
        },
        False,
    ),
    "experts in one stack": (
        {
            "model.layers.0.mlp.experts.gate_up_proj": (4, 16, 64),
            "model.layers.0.mlp.experts.down_proj": (4, 32, 16),
        },
        False,
    ),
    "a head and a norm": ({"lm_head": (32, 16), "norm": (16,)}, False),
    "nothing known": ({"vae.decoder": (7, 16)}, False),
}


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_a_file_of_outputs_is_known_by_names_and_shapes(
    case: str, kind: str, tmp_path: Path
) -> None:
    """A model's file has such names only as those of parameters."""
    shapes, captured = OUTPUTS[case]
    arrays = {name: torch.ones(shape) for name, shape in shapes.items()}
    path = tmp_path / f"a.{kind}"
    if kind == "pt":
        torch.save(arrays, path)
    else:
        save_file({name: values.numpy() for name, values in arrays.items()}, path)
    assert trace_kind(path) == (kind if captured else None)
    if kind == "safetensors":
        for beside in ("", "config.json"):
            (tmp_path / (beside or "log.txt")).write_text("{}")
            assert trace_kind(tmp_path) == ("captures" if captured else None)


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
def test_a_folder_of_one_or_of_several_files_is_what_they_hold(kind: str, tmp_path: Path) -> None:
    """Seen red: of .safetensors a model, of several .npz nothing."""
    arrays: dict[str, Any] = {
        "model.layers.0": np.ones((3, 4), np.float32),
        "logits": np.ones((3, 9), np.float32),
        "input_ids": np.arange(3),
    }
    writers: Mapping[str, Any] = {
        "safetensors": save_file,
        "npz": lambda held, path: np.savez(path, **held),
        "pt": lambda held, path: torch.save({k: torch.tensor(v) for k, v in held.items()}, path),
    }
    names = [*arrays]
    for parts in ([names], [names[:1], names[1:]], [[names[0], names[2]], names[1:2]]):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for n, part in enumerate(parts):
            writers[kind]({name: arrays[name] for name in part}, folder / f"part{n}.{kind}")
        assert trace_kind(folder) is not None
        with open_trace(folder) as found:
            assert {*found.records} == {"L0.out", "logits"} and found.run["ids"] == [0, 1, 2]


@pytest.mark.parametrize("name", ["transformer.wpe", "model.decoder.embed_positions"])
def test_the_rows_of_a_position_table_are_named(name: str, tmp_path: Path) -> None:
    values = np.ones((7, 16), np.float32)
    arrays: dict[str, Any] = {"transformer.h.0": values, name: values}
    np.savez(tmp_path / "a.npz", **arrays)
    with open_trace(tmp_path / "a.npz") as found:
        assert "rows of the position table" in found.run["unknown"][name]


def test_a_pickle_that_would_run_is_no_capture(tmp_path: Path) -> None:
    """It is described and never run; cut short it is refused in one line."""
    import os as system

    import torch

    class Runs:
        def __reduce__(self) -> Any:
            return system.mkdir, (str(tmp_path / "ran"),)

    torch.save({"L0.q": torch.zeros(3, 4), "x": Runs()}, tmp_path / "bad.pt")
    done = aprfmt("trace", tiny_folder("llama"), "--map", tmp_path / "bad.pt", "--ids", TEXT)
    assert done.code == 2 and "Traceback" not in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    whole = (tmp_path / "bad.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    done = aprfmt("trace", tiny_folder("llama"), "--map", tmp_path / "cut.pt", "--ids", TEXT)
    assert done.code == 2 and "cut.pt" in done.err and done.err.count("\n") == 1


def test_an_array_of_a_file_may_be_as_large_as_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = npy(tmp_path / "d", {"k": np.ones(300, np.float32)})
    size = (folder / "k.npy").stat().st_size
    for room in (0, 1):
        monkeypatch.setattr(captures, "MAX_MEMBER", size + room)
        with open_captures(folder) as found:
            assert found.shapes["k"] == (300,)
    monkeypatch.setattr(captures, "MAX_MEMBER", size - 1)
    with pytest.raises(FormatError, match=f"{size} bytes; at most {size - 1} of an array"):
        open_captures(folder).__enter__()


def engine_outputs() -> dict[str, Any]:
    """Return what vLLM's modules put out, one array a name, as scripts save them."""
    pytest.importorskip("torch")
    found = {}
    for name, value in state(modules(own("llama"))).items():
        parts = value if isinstance(value, list) else [value]
        for number, part in enumerate(parts):
            found[f"{name}.{number}" if len(parts) > 1 else name] = part
    return found


def _as_npy(folder: Path, found: dict[str, Any]) -> Path:
    return npy(folder, {name: one.numpy() for name, one in found.items()})


def _as_npz(folder: Path, found: dict[str, Any]) -> Path:
    folder.mkdir()
    np.savez(folder / "x.npz", **{name: one.numpy() for name, one in found.items()})
    return folder / "x.npz"


def _as_pt(folder: Path, found: dict[str, Any]) -> Path:
    import torch

    folder.mkdir()
    torch.save({**found, "input_ids": torch.tensor(IDS)}, folder / "x.pt")
    return folder / "x.pt"


def _in_a_folder(folder: Path, found: dict[str, Any]) -> Path:
    return _as_pt(folder, found).parent


@pytest.mark.parametrize(
    "write", [_as_npy, _as_npz, _as_pt, _in_a_folder], ids=lambda one: one.__name__
)
def test_an_engines_names_mean_the_engines_modules_in_every_container(
    write: Callable[[Path, dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Its act_fn multiplies by up, its norms give the stream, too; transformers' do not."""
    path, right = write(tmp_path / "d", engine_outputs()), own("llama")
    with open_model(tiny_folder("llama")) as model, open_trace(path, list(IDS), model) as trace:
        assert not trace.run["unknown"] and len(trace.records) > 40
        for key in trace.records:
            value = trace.recorded_values(key)
            assert value is not None
            assert np.allclose(value.reshape(-1), right[key].reshape(-1), atol=1e-5), key
        assert {"L1.ffn_mul", "L1.mid", "L2.out", "L0.attn", "logits", "embd"} <= set(trace.records)
        assert "L1.ffn_act" not in trace.records


# What a script kept of an engine's modules -> points that these must give.
KEPT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention and the gated product": (
        ("self_attn.attn", "mlp.act_fn"), ("attn", "ffn_mul")),
    "joined modules alone": (
        ("qkv_proj", "gate_up_proj"), ("q", "k", "v", "ffn_gate", "ffn_up")),
    "attention beside the joined one": (
        ("self_attn.attn", "qkv_proj"), ("attn", "q", "k", "v")),
    "the gated product beside the joined one": (
        ("mlp.act_fn", "gate_up_proj"), ("ffn_mul", "ffn_gate", "ffn_up")),
    "queries, keys and values": (("qkv_proj",), ("q", "k", "v")),
    "projections that all engines call so": (
        ("o_proj", "down_proj"), ("attn_out", "ffn_out")),
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
def test_a_part_of_an_engines_modules_is_read_as_in_the_whole(kept: str, tmp_path: Path) -> None:
    ends, points = KEPT[kept]
    found = {name: one for name, one in engine_outputs().items() if name.endswith(ends)}
    path, right = _as_pt(tmp_path / "d", found), own("llama")
    with open_model(tiny_folder("llama")) as model, open_trace(path, list(IDS), model) as trace:
        assert {*trace.records} == {f"L{n}.{point}" for n in range(3) for point in points}
        assert not trace.run["unknown"]
        for key in trace.records:
            value = trace.recorded_values(key)
            assert value is not None
            assert np.allclose(value.reshape(-1), right[key].reshape(-1), atol=1e-5), key


def _by_layer(change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return outputs of layers and of their attention by module, each changed, and the ids."""
    right = own("llama")
    names = {"": "out", ".self_attn.o_proj": "attn_out", ".mlp.down_proj": "ffn_out"}
    found = {
        f"model.layers.{n}{module}": change(right[f"L{n}.{point}"])
        for n in range(3)
        for module, point in names.items()
    }
    return {"input_ids": np.array(IDS), **found}


def _npz(folder: Path, arrays: Mapping[str, Any]) -> Path:
    folder.mkdir()
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


def _pt(folder: Path, arrays: Mapping[str, Any]) -> Path:
    import torch

    folder.mkdir()
    found = {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in arrays.items()}
    torch.save(found, folder / "x.pt")
    return folder / "x.pt"


# What is no value of a point -> how it came about, and what is said.
UNLIKE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bits of bfloat16": (
        lambda x: (x.view(np.uint32) >> 16).astype(np.uint16),
        "uint16, no floats",
    ),
    "bits of float16": (lambda x: x.astype(np.float16).view(np.int16), "int16, no floats"),
    "quantized": (lambda x: np.round(x * 50).astype(np.int8), "int8, no floats"),
    "transposed": (lambda x: x.T.copy(), "expected a row for each of 29 tokens; is it transposed?"),
}


@pytest.mark.parametrize("write", [npy, _npz, _pt], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", UNLIKE)
def test_what_is_no_value_of_a_point_is_no_fault(
    kind: str, write: Callable[[Path, Mapping[str, Any]], Path], tmp_path: Path
) -> None:
    """A sound run that was saved in another form is not compared, and accuses nothing."""
    change, says = UNLIKE[kind]
    path = write(tmp_path / "d", _by_layer(change))
    done = aprfmt("diagnose", tiny_folder("llama"), path, "--json")
    assert done.code == 2 and done.json["verdict"] == "not_comparable", done.out
    assert says in done.json["sentence"], done.json["sentence"]


def _underscores(folder: Path, arrays: Mapping[str, Any]) -> Path:
    return npy(folder, {name.replace(".", "_"): value for name, value in arrays.items()})


def _npz_of_each_layer(folder: Path, arrays: Mapping[str, Any]) -> Path:
    """An archive a layer, in which names say no more of it."""
    folder.mkdir()
    np.save(folder / "input_ids.npy", arrays["input_ids"])
    for n in range(3):
        layer = {
            name.partition(f"layers.{n}.")[2] or "out": value
            for name, value in arrays.items()
            if name == f"model.layers.{n}" or name.startswith(f"model.layers.{n}.")
        }
        np.savez(folder / f"model.layers.{n}.npz", **layer)
    return folder


def _chunks(folder: Path, arrays: Mapping[str, Any]) -> Path:
    """A folder for each chunk of the prompt."""
    for number, rows in enumerate((slice(0, 20), slice(20, 29))):
        place = folder / f"chunk{number}"
        place.parent.mkdir(exist_ok=True)
        held = {name: value[rows] for name, value in arrays.items()}
        npy(place, {**held, "positions": np.arange(29)[rows]})
    return folder


@pytest.mark.parametrize(
    "write", [_underscores, _npz_of_each_layer, _chunks], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("fault", [False, True])
def test_habits_of_naming_are_read(
    write: Callable[[Path, Mapping[str, Any]], Path], fault: bool, tmp_path: Path
) -> None:
    arrays = _by_layer(lambda x: x)
    if fault:
        arrays["model.layers.1.mlp.down_proj"] = arrays["model.layers.1.mlp.down_proj"] * 1.5
    with open_model(tiny_folder("llama")) as model:
        with open_trace(write(tmp_path / "d", arrays), list(IDS), model) as trace:
            right, wrong = own("llama"), set()
            for key in trace.records:
                value = trace.recorded_values(key)
                assert value is not None
                if not np.allclose(value, right[key], atol=1e-5):
                    wrong.add(key)
            assert {"L0.attn_out", "L1.ffn_out", "L2.ffn_out"} <= set(trace.records)
    assert wrong == ({"L1.ffn_out"} if fault else set())


@pytest.mark.parametrize("form", ["folder", "x.pt", "run.safetensors"])
def test_the_next_command_of_a_dump_writes_no_model(form: str, tmp_path: Path) -> None:
    """A bias that the engine did not add is proven: there is no file of it to write anew."""
    import torch

    wrong = tmp_path / "m"
    shutil.copytree(tiny_folder("qwen2"), wrong)
    weights = load_file(wrong / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.bias"] *= 0
    save_file(weights, wrong / "model.safetensors", {"format": "pt"})
    saved = tmp_path / "run.safetensors"
    ran(0, "trace", wrong, "--payload", "--points", "all", "--ids", TEXT, "--save", saved)
    with load_trace(saved) as found:
        points = {key: np.array(found.recorded_values(key)) for key in found.records}
    held = {key: one for key, one in points.items() if not key.endswith(("scores", "probs"))}
    path = tmp_path / form
    if form == "folder":
        npy(path, {"input_ids": np.array(IDS), **held})
    elif form == "x.pt":
        tensors = {key: torch.from_numpy(one) for key, one in held.items()}
        torch.save({"input_ids": torch.tensor(IDS), **tensors}, path)
    done = ran(1, "diagnose", tiny_folder("qwen2"), path, "--json")
    assert done.json["cause"] == "missing_bias"
    assert [line.split()[1] for line in done.json["next"]] == ["trace"]


def test_files_of_two_requests_are_named(tmp_path: Path) -> None:
    import torch

    for name in ("a", "b"):
        torch.save(
            {"input_ids": torch.tensor(IDS), "x": torch.ones(29, 2)}, tmp_path / f"{name}.pt"
        )
    with pytest.raises(FormatError, match=r"a\.pt and b\.pt each hold the token ids of a pass"):
        with open_captures(tmp_path):
            pass


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_no_points(dtype: str, tmp_path: Path) -> None:
    """Their real parts alone would be within tolerance."""
    torch = pytest.importorskip("torch")
    name = "model.layers.1.self_attn.o_proj"
    held = {**engine_outputs(), "input_ids": torch.tensor(IDS)}
    held[name] = (held[name] * (1 + 3j)).to(getattr(torch, dtype))
    torch.save(held, tmp_path / "x.pt")
    with open_model(tiny_folder("llama")) as model:
        try:
            with open_trace(tmp_path / "x.pt", list(IDS), model) as trace:
                assert "L1.attn_out" not in trace.records
                assert any(name in one for one in trace.run["unknown"])
        except FormatError as error:
            assert "holds complex numbers; expected real ones" in str(error)


def test_a_table_is_told_by_its_columns_in_every_form(tmp_path: Path) -> None:
    """As CSV, as an object of names, and as one below "statistics"; one without them is none."""
    csv, plain = (table(tmp_path / name, {"L0.q": own()["L0.q"]}) for name in ("a.csv", "a.json"))
    rows = json.loads(plain.read_text())
    for name, said, right in (
        ("below", {"statistics": rows}, True),
        ("one", {"L0.q": {"l2": rows["L0.q"]["l2"]}}, True),
        ("other columns", {"L0.q": {"shape": 3}}, False),
        ("one of two", {**rows, "L0.k": {"shape": 3}}, False),
        ("no object", [rows], False),
        ("no rows", {"L0.q": 1.5}, False),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(said))
        assert statistics.is_table(path) == right, name
    found = []
    for path in (csv, plain, tmp_path / "below.json"):
        with statistics.load_table(path, [1, 2]) as trace:
            found.append({key: record.stats for key, record in trace.records.items()})
    assert list(found[0]) == ["L0.q"] and found[1] == found[2]
    one, other = found[0]["L0.q"], found[1]["L0.q"]
    assert one is not None and other is not None
    for column in statistics.COLUMNS:
        assert getattr(one, column) == pytest.approx(getattr(other, column), rel=1e-6)


def test_a_file_that_is_cut_off_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    for size in (0, 1, 47):  # of its 48 bytes
        folder = npy(tmp_path / f"d{size}", {"x": values, "y": values})
        with open_captures(folder) as found:
            assert np.array_equal(found.read("x"), values)
            path = folder / "x.npy"
            os.truncate(path, path.stat().st_size - 48 + size)
            with pytest.raises(FormatError, match=r"x\.npy: .*(cut off|bytes)"):
                found.read("x")
            assert np.array_equal(found.read("y"), values)


def test_a_file_that_is_replaced_after_it_was_described_is_an_error(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    folder = npy(tmp_path / "d", {"x": values, "y": values})
    with open_captures(folder) as found:
        np.save(folder / "other.npy", values)
        (folder / "other.npy").replace(folder / "x.npy")
        with pytest.raises(FormatError, match=r"x\.npy: changed while it was read"):
            found.read("x")
        assert np.array_equal(found.read("y"), values)


def test_raw_files_are_read_as_their_shapes_say(tmp_path: Path) -> None:
    """Every dtype that may be stated; a file that is cut off while it is open is an error."""
    values = np.arange(-3, 3).reshape(2, 3)
    for dtype in captures.RAW:
        folder = tmp_path / dtype
        folder.mkdir()
        held = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        (folder / "x.bin").write_bytes(held.tobytes())
        (folder / "shapes.json").write_text(json.dumps({"x": {"shape": [2, 3], "dtype": dtype}}))
        with open_captures(folder) as found:
            assert (found.shapes["x"], found.dtypes["x"]) == ((2, 3), dtype)
            assert np.array_equal(found.read("x"), values)
            for left in (held.nbytes - held.itemsize, held.nbytes - 1, 1):
                os.truncate(folder / "x.bin", left)
                with pytest.raises(FormatError, match="cut off"):
                    found.read("x")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x.bin").write_bytes(values.astype(np.float32).tobytes())
    with open_captures(plain) as found:
        assert np.array_equal(found.read("x"), values.reshape(-1))


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ([1], "holds a list; expected names and shapes"),
        ({"x": "2,3"}, "'x': '2,3'; expected a list of sizes"),
        ({"x": [2, -3]}, "expected a list of sizes"),
        ({"x": [2, 3.0]}, "expected a list of sizes"),
        ({"x": [True, 6]}, "expected a list of sizes"),
        ({"x": {"dtype": "float32"}}, r"'float32'}.; expected a list of sizes"),
        ({"x": {"shape": [2, 3], "dtype": "int4"}}, "dtype 'int4'; expected one of float32, "),
        ({"x": {"shape": [2, 3], "dtype": 7}}, "dtype '7'; expected one of float32, "),
        ({"x": [2, 4]}, r"24 bytes; float32 \[2, 4\] takes 32"),
    ],
)
def test_shapes_that_say_nothing_are_refused(said: Any, match: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(24))
    (tmp_path / "shapes.json").write_text(json.dumps(said))
    with pytest.raises(FormatError, match=match), open_captures(tmp_path):
        pass


def test_one_file_of_arrays_gives_them_in_every_form(tmp_path: Path) -> None:
    """An array that is alone has no name; stored bytes and blocks hold what is read."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "b.npz", x=x, y=x + 1)
    save_file({"x": x, "y": x + 1}, tmp_path / "c.safetensors")
    torch.save(torch.from_numpy(x), tmp_path / "d.pt")
    torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(x + 1)}, tmp_path / "e.pt")
    for name in ("a.npy", "b.npz", "c.safetensors", "d.pt", "e.pt"):
        with ExitStack() as stack:
            found = captures.read_array_file(tmp_path / name, stack)
            alone = name in ("a.npy", "d.pt")
            assert dict(found.shapes) == dict.fromkeys([""] if alone else ["x", "y"], (3, 4)), name
            assert set(found.dtypes.values()) == {"float32"}
            for key in found.shapes:
                wanted = x + (key == "y")
                assert np.array_equal(found.read(key), wanted)
                stored, tiles = found.stored(key), found.tiles(key)
                assert (stored is None) == (name == "b.npz")
                if stored is not None:
                    raw = b"".join(bytes(window) for window in stored.windows())
                    assert raw == wanted.tobytes()
                assert (tiles is None) == (name in ("a.npy", "b.npz"))
                if tiles is not None:
                    part = np.empty((2, 3), np.float32)
                    tiles.fill(1, 1, part)
                    assert np.array_equal(part, wanted[1:, 1:])


@pytest.mark.parametrize("ids", [True, False])
def test_a_module_with_rows_of_several_passes_is_no_parameter(ids: bool, tmp_path: Path) -> None:
    """Seen red: one such array made a dump of joined passes a model with other tensors."""
    block = "model.layers.0.self_attn."
    held: dict[str, np.ndarray] = {
        f"{block}q_proj": np.ones((5, 4)),
        f"{block}kv_b_proj": np.ones((8, 6)),
    }
    held |= {"input_ids": np.arange(5)[None]} if ids else {}
    save_file(held, tmp_path / "a.safetensors")
    assert captures.is_stored_captures(tmp_path / "a.safetensors") is ids


@pytest.mark.parametrize("ids", [True, False])
def test_a_head_alone_is_a_capture_with_its_token_ids(ids: bool, tmp_path: Path) -> None:
    """Seen red: `diff` compared two runs' logits as the tensors of two models."""
    held = {"logits": np.ones((1, 3, 8), np.float32)}
    held |= {"input_ids": np.array([[1, 2, 3]])} if ids else {}
    save_file(held, tmp_path / "a.safetensors")
    assert captures.is_stored_captures(tmp_path / "a.safetensors") is ids
    if ids:
        refused = aprfmt("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors")
        assert refused.code == 2 and "aprfmt diagnose" in refused.err


def test_whole_numbers_have_their_type_in_every_form(tmp_path: Path) -> None:
    """Codes of 8 bits are told by it from numbers."""
    kinds = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
    held = {kind: np.array([0, 1, 1]).astype(kind) for kind in kinds}
    np.savez(tmp_path / "a.npz", **held)  # type: ignore[arg-type]
    save_file(held, tmp_path / "b.safetensors")
    torch.save({kind: torch.from_numpy(each) for kind, each in held.items()}, tmp_path / "c.pt")
    for name in ("a.npz", "b.safetensors", "c.pt"):
        with open_captures(tmp_path / name) as found:
            assert dict(found.dtypes) == {kind: kind for kind in kinds}, name
            for kind in kinds:
                assert found.read(kind).dtype.name == kind
                assert np.array_equal(found.read(kind), held[kind])


def test_token_ids_are_those_of_one_sequence(tmp_path: Path) -> None:
    for number, (ids, right) in enumerate((
        (np.array([3, 1, 2]), True), (np.array([[3, 1, 2]], np.int32), True),
        (np.array([[3], [1], [2]], np.uint16), True), (np.zeros(0, np.int64), True),
        (np.array([[3, 1], [2, 0]]), False), (np.array([3.0, 1.0]), False),
    )):  # fmt: skip
        path = npy(tmp_path / str(number), {"input_ids": ids, "x": np.ones(2)})
        with open_captures(path) as found:
            assert found.names == ["x"]
            if right:
                assert found.ids == [int(i) for i in ids.reshape(-1)]
                continue
            with pytest.raises(FormatError, match="expected the ids of one sequence"):
                _ = found.ids
    with open_captures(npy(tmp_path / "none", {"x": np.ones(2)})) as found:
        assert found.ids is None


def test_arrays_that_are_no_numbers_or_there_twice_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, odd in enumerate((np.array(["a"]), np.array([1j]), np.array([b"x"]))):
        folder = npy(tmp_path / str(number), {"x": odd})
        with pytest.raises(FormatError, match="expected numbers"), open_captures(folder):
            pass
    twice = npy(tmp_path / "twice", {"x": np.ones(2)})
    (twice / "x.bin").write_bytes(bytes(8))
    with pytest.raises(FormatError, match="'x' is there in two files"), open_captures(twice):
        pass
    monkeypatch.setattr(captures, "MAX_MEMBER", 200)
    for name, size in (("x.npy", 18), ("x.bin", 50)):  # of float32, 200 bytes with .npy's header
        for more in (0, 1):
            folder = tmp_path / f"{name}{more}"
            folder.mkdir()
            values = np.ones(size + more, np.float32)
            if name == "x.npy":
                np.save(folder / name, values)
            else:
                values.tofile(folder / name)
            with ExitStack() as stack:
                if more:
                    stack.enter_context(pytest.raises(FormatError, match="at most 200 of an array"))
                with open_captures(folder) as found:
                    assert found.shapes["x"] == (size,)


def test_what_is_a_folder_or_file_of_captures(tmp_path: Path) -> None:
    assert not captures.is_folder_of_arrays(tmp_path / "none")
    (tmp_path / "d").mkdir()
    assert not captures.is_folder_of_arrays(tmp_path / "d")
    torch.save({"x": torch.ones(2)}, tmp_path / "d" / "a.pt")
    assert captures.is_folder_of_arrays(tmp_path / "d")
    assert not captures.is_folder_of_arrays(tmp_path / "d" / "a.pt")
    (tmp_path / "d" / "config.json").write_text("{}")
    assert not captures.is_folder_of_arrays(tmp_path / "d")
    np.save(tmp_path / "d" / "b.npy", np.ones(2))
    assert captures.is_folder_of_arrays(tmp_path / "d")
    torch.save({"x": torch.ones(2), "input_ids": torch.tensor([1])}, tmp_path / "with.pt")
    assert captures.is_pickled_captures(tmp_path / "with.pt")
    assert not captures.is_pickled_captures(tmp_path / "d" / "a.pt")
    (tmp_path / "bad.pt").write_bytes(b"PK no zip")
    assert not captures.is_pickled_captures(tmp_path / "bad.pt")


def test_arrays_that_are_no_point_are_said_with_shapes_and_nearest_points(tmp_path: Path) -> None:
    from aprfmt.inference.engines.opening import open_trace

    with open_model(tiny_folder("llama")) as model:
        width = int(model.hyper["hidden_size"])
        np.save(tmp_path / "one.npy", np.ones((len(IDS), width), np.float32))
        np.save(tmp_path / "two.npy", np.ones((len(IDS), width + 1), np.float32))
        with open_trace(tmp_path, list(IDS), model) as trace:
            assert not trace.records
            one, two = (trace.run["unknown"][name] for name in ("one", "two"))
        assert f"of shape [{len(IDS)}, {width}], as embd, " in one and one.endswith(
            "of the model have"
        )
        assert "no point of the model has as many values, nearest is " in two
        assert f"[{len(IDS)}, {width}]" in two
        with open_trace(tmp_path) as trace:
            assert trace.run["unknown"]["two"].endswith(f"of shape [{len(IDS)}, {width + 1}]")


@pytest.mark.parametrize(
    ("ids", "name", "known"),
    [
        ("list", "x", True), ("list", "x.weight", True), ("tensor", "x.weight", True),
        ("", "x", False), ("", "x.weight", False), ("words", "x", False),
    ],
)  # fmt: skip
def test_token_ids_alone_say_that_a_file_is_of_a_pass(
    ids: str, name: str, known: bool, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    given = {"list": [1, 2], "tensor": torch.tensor([1, 2]), "words": ["a", "b"]}
    held = {name: torch.ones(2, 3)} | ({"input_ids": given[ids]} if ids else {})
    torch.save(held, tmp_path / "x.pt")
    assert captures.is_pickled_captures(tmp_path / "x.pt") is known


def test_results_and_inputs_of_hooks_are_read_by_their_modules(tmp_path: Path) -> None:
    """As forward hooks save them, beside other names that these must not take."""
    right = own("llama")
    held = {
        "model.layers.0.output": torch.tensor(right["L0.out"][None]),
        "model.layers.1.self_attn.o_proj.input": (torch.tensor(right["L1.attn"][None]),),
        "model.layers.2": torch.tensor(right["L2.out"]),
        "model.layers.2.output": torch.tensor(right["L2.out"] * 2),
        "outputs": {"logits": torch.tensor(right["logits"][None])},
        "outputs_of_mine": torch.ones(3),
        "input_ids": torch.tensor(IDS),
    }
    torch.save(held, tmp_path / "hooks.pt")
    with open_model(tiny_folder("llama")) as model:
        with open_trace(tmp_path / "hooks.pt", None, model) as trace:
            for key in ("L0.out", "L1.attn", "L2.out", "logits"):
                values = trace.recorded_values(key)
                assert values is not None, (key, trace.run["unknown"])
                np.testing.assert_array_equal(np.ravel(values), right[key].ravel())
            assert sorted(trace.run["unknown"]) == ["model.layers.2.output", "outputs_of_mine"]
