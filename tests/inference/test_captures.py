"""Arrays that other engines dumped: how they are read, mapped to points, and refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import FormatError
from aprfmt.inference.engines import captures, statistics
from aprfmt.inference.engines.captures import open_captures
from aprfmt.inference.engines.layouts import CHAINS, PointLayout, laid_out
from aprfmt.inference.engines.mapping import load_mapped, read_mapping
from aprfmt.inference.engines.opening import open_trace, trace_kind
from aprfmt.inference.engines.proposing import propose
from aprfmt.inference.trace_file import load_trace
from tests.cli.run import Done, aprfmt
from tests.diagnose.engines import tiny_folder, trace
from tests.models import IDS

TEXT = ",".join(map(str, IDS))


def own(base: str = "llama", **how: Any) -> dict[str, Any]:
    """Return every point's value of a tiny model's pass."""
    with load_trace(trace(tiny_folder(base), f"captures-{base}-{'-'.join(how)}", **how)) as found:
        return {key: np.array(found.values(key)) for key in found.records}


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
    for chain, given in there.items():
        assert np.array_equal(laid_out(given, chain, PointLayout((7, 3, 4), 7), "x"), values), chain


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
        found = propose(captures, right, IDS)
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
        row = propose(captures, right, IDS).names["z"]
    assert row is not None and (row.key, row.rows, row.certainty) == ("logits", "last", "certain")


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
        assert np.array_equal(np.asarray(made.values("L0.q")), right["L0.q"])
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
                assert np.array_equal(np.ravel(np.asarray(found.values(key))), np.ravel(values)), (
                    path
                )


BAD: Mapping[str, tuple[Any, str]] = {
    "no mark": ({"names": {}}, "is no mapping file"),
    "names": ({"aprfmt_mapping": 1, "names": []}, "an object of array names"),
    "key": ({"aprfmt_mapping": 1, "names": {"a": "L0.nothing"}}, "L0.nothing"),
    "entry": ({"aprfmt_mapping": 1, "names": {"a": 3}}, "expected null, a key"),
    "layout": ({"aprfmt_mapping": 1, "names": {"a": {"key": "L0.q", "layout": ["x"]}}}, "layout"),
    "rows": ({"aprfmt_mapping": 1, "names": {"a": {"key": "L0.q", "rows": "some"}}}, "rows"),
    "ids": ({"aprfmt_mapping": 1, "ids": [-1], "names": {}}, "token ids"),
    "dtype": ({"aprfmt_mapping": 1, "dtype": "int4", "names": {}}, "dtype"),
    "outside": ({"aprfmt_mapping": 1, "captures": "../x", "names": {}}, "beside the mapping file"),
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


@pytest.mark.parametrize("rows", [2, 3])
def test_a_table_of_too_many_rows_is_none(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "MAX_ROWS", 2)
    path = table(tmp_path / "t.csv", {f"L{i}.q": np.ones(3) for i in range(rows)})
    assert statistics.is_table(path) == (rows == 2)


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
        values = trace.values("logits")
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
