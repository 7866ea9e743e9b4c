"""`aprfmt trace` as a user types it: what is shown, saved, loaded and compared.

Seen red: a slot left out, statistics of another layer, positions ignored, exit 0 despite a NaN,
a comparison with a reference of other tokens.
"""

import json
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.trace_file import load_trace
from tests.cli.run import aprfmt, process
from tests.cli.test_running import broken, given
from tests.models import IDS, save_tiny

SLOTS = ("attn_norm", "qkv", "attn_out", "ffn_norm", "ffn_gate", "ffn_up", "ffn_silu", "ffn_swigl",
         "ffn_out", "output")  # fmt: skip
SHORT = ("--ids", "1417,362,258,1168,1529")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return folder


@pytest.fixture(scope="module")
def payload(demo_model: Path) -> Any:
    done = aprfmt("trace", demo_model, "--payload", *SHORT, "--json")
    assert done.code == 0
    return done.json


def test_a_ratio_to_rounding_is_that_of_three_saved_runs(demo_model: Path, tmp_path: Path) -> None:
    """R by numpy from the three files; a run and a saved trace as the third say the same."""
    runs = {"engine": "torch:cpu:float16", "wide": "numpy", "same": "torch:cpu:bfloat16"}
    for name, run in runs.items():
        done = aprfmt("trace", f"{demo_model}@{run}", "--payload", *SHORT, "--points", "out,embd",
                      "--save", tmp_path / name)  # fmt: skip
        assert done.code == 0, done.err
    stored = aprfmt("trace", "--load", tmp_path / "engine", "--reference", tmp_path / "wide",
                    "--same-dtype", tmp_path / "same", "--json").json  # fmt: skip
    said = stored["reference"]["rounding_ratios"]
    assert {"L0.out", "L1.out"} <= {*said}
    with ExitStack() as stack:
        held = [stack.enter_context(load_trace(tmp_path / name)) for name in runs]
        for key, ratio in said.items():
            x, y, s = (np.asarray(one.recorded_values(key), np.float64) for one in held)
            apart, usual = np.linalg.norm(x - y), np.linalg.norm(s - y)
            assert ratio == (pytest.approx(apart / usual) if usual else 0.0)
    for third in (tmp_path / "same", f"{demo_model}@{runs['same']}"):
        ran = aprfmt(
            "trace",
            f"{demo_model}@{runs['engine']}",
            "--payload",
            *SHORT,
            "--points",
            "out,embd",
            "--reference",
            tmp_path / "wide",
            "--same-dtype",
            third,
            "--json",
        )
        assert ran.json["reference"]["rounding_ratios"] == pytest.approx(said)
    refused = aprfmt("trace", "--load", tmp_path / "engine", "--reference", tmp_path / "wide",
                     "--same-dtype", demo_model)  # fmt: skip
    assert refused.code == 2 and "is no saved trace" in refused.err


def tensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray] = load_file(path)
    return found


def test_the_ten_slots_of_every_layer_in_order(payload: Any) -> None:
    rows = [row for row in payload["slots"] if row["slot"] != "qkv_nobias"]
    assert [(row["layer"], row["slot"]) for row in rows] == [
        (layer, slot) for layer in range(4) for slot in SLOTS
    ]
    counts = dict.fromkeys(SLOTS, 5 * 256) | dict.fromkeys(SLOTS[4:8], 5 * 512)
    counts["qkv"] = 5 * (256 + 2 * 128)
    for row in rows:
        stats = row["stats"]
        assert stats["count"] == counts[row["slot"]]
        assert row["positions"] == [0, 1, 2, 3, 4]
        assert (row["dtype"], row["device"]) == ("float32", "cpu")
        assert row["form"] in ("fused", "stepped")
        assert stats["min"] <= stats["mean"] <= stats["max"]
        assert stats["absmax"] == max(-stats["min"], stats["max"])
        assert stats["l2"] ** 2 == pytest.approx(
            stats["count"] * (stats["std"] ** 2 + stats["mean"] ** 2), rel=1e-9
        )
        assert (stats["nan"], stats["inf"], stats["std_divisor"]) == (0, 0, "n")
    keys = [record["key"] for record in payload["records"]]
    assert keys[0] == "embd" and keys[-2:] == ["final_norm", "logits"]
    assert payload["logits"]["top"][0]["token"] and len(payload["logits"]["top"]) == 5
    assert payload["run"]["ran"] == "numpy:cpu:float32" and payload["run"]["peak_rss_bytes"] > 0
    assert payload["trace"]["ids"] == payload["tokens"]["ids"] == [1417, 362, 258, 1168, 1529]
    assert payload["schema"] == "aprfmt.trace/1" and payload["nonfinite"] is None


def test_statistics_are_those_of_the_saved_values(
    payload: Any, demo_model: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "t.safetensors"
    done = aprfmt("trace", demo_model, "--payload", *SHORT, "--save", saved, "--json")
    assert done.code == 0 and done.json["saved"] == [str(saved)]
    found = tensors(saved)
    assert set(found) == {record["key"] for record in done.json["records"]}
    for row in payload["slots"]:
        values = [found[f"L{row['layer']}.{point}"].ravel() for point in row["points"]]
        joined = np.concatenate(values).astype(np.float64)
        assert row["stats"]["std"] == pytest.approx(joined.std(), rel=1e-6), row["slot"]
        assert row["stats"]["mean"] == pytest.approx(joined.mean(), rel=1e-6, abs=1e-9)
    loaded = aprfmt("trace", "--load", saved, "--json")
    assert loaded.code == 0
    for key in ("slots", "records", "logits", "nonfinite"):
        mine = dict(done.json)
        for row in mine["logits"]["top"]:
            row.pop("token", None)  # a saved trace has no tokenizer
            row.pop("piece", None)
        assert loaded.json[key] == mine[key], key
    assert aprfmt("trace", demo_model, "--payload", *SHORT, "--save", saved).code == 2  # is there
    assert aprfmt("trace", "--load", demo_model / "model.safetensors").code == 2


def test_naming_an_engine_runs_it(demo_model: Path, tmp_path: Path) -> None:
    """`trace MODEL --engine transformers --save X` is all it takes to keep a foreign run."""
    pytest.importorskip("transformers")
    saved = tmp_path / "foreign.safetensors"
    done = aprfmt(
        "trace", demo_model, "--engine", "transformers", *SHORT, "--save", saved, "--json"
    )
    assert done.code == 0 and done.json["saved"] == [str(saved)]
    assert {"embd", "L3.ffn_out", "logits"} <= set(tensors(saved))


def test_points_layers_and_positions_choose(demo_model: Path) -> None:
    body = aprfmt(
        "trace",
        demo_model,
        "--payload",
        *SHORT,
        "--points",
        "attn_out,qkv",
        "--layers",
        "1,3",
        "--positions",
        "1,4",
        "--json",
    ).json
    keys = [record["key"] for record in body["records"]]
    assert keys == [f"L{layer}.{name}" for layer in (1, 3) for name in ("q", "k", "v", "attn_out")]
    assert all(record["positions"] == [1, 4] for record in body["records"])
    assert {record["count"] for record in body["records"]} == {2 * 256, 2 * 128}
    last = aprfmt(
        "trace", demo_model, "--payload", *SHORT, "--points", "out", "--positions", "last", "--json"
    ).json
    assert [record["positions"] for record in last["records"]] == [[4]] * 4
    every = aprfmt(
        "trace", demo_model, "--payload", *SHORT, "--points", "all", "--layers", "0", "--json"
    ).json
    names = {record["point"] for record in every["records"]}
    assert {"scores", "probs", "q_rope", "attn", "mid"} <= names
    shapes = {record["point"]: record["shape"] for record in every["records"]}
    assert shapes["scores"] == [4, 5, 5] and shapes["q_rope"] == [5, 4, 64]


def test_aprt_folder(demo_model: Path, tmp_path: Path) -> None:
    folder, saved = tmp_path / "aprt", tmp_path / "t.safetensors"
    done = aprfmt("trace", demo_model, "--payload", *SHORT, "--save-aprt", folder, "--save", saved)
    assert done.code == 0
    values = tensors(saved)
    files = sorted(folder.rglob("*.bin"))
    names = {str(path.relative_to(folder)) for path in files}
    assert {
        "embedding.bin",
        "final_norm.bin",
        "lm_head.bin",
        "layer-3/ffn_swigl.bin",
        "layer-0/qkv_bias.bin",
        "layer-2/attn_scores.bin",
    } <= names
    for path in files:
        data = path.read_bytes()
        magic, layer, count = struct.unpack("<4sII", data[:12])
        assert magic == b"APRT" and len(data) == 12 + 4 * count
        inside = path.parent.name.removeprefix("layer-")
        assert layer == (int(inside) if path.parent != folder else 0xFFFFFFFF)
    swigl = np.frombuffer((folder / "layer-3/ffn_swigl.bin").read_bytes()[12:], "<f4")
    assert np.array_equal(swigl, values["L3.ffn_mul"].ravel())
    loaded = aprfmt("trace", "--load", folder, "--json")
    assert loaded.code == 0
    point = next(r for r in loaded.json["records"] if r["key"] == "L3.ffn_mul")
    assert point["positions"] == [0, 1, 2, 3, 4] and point["count"] == swigl.size
    back = aprfmt("trace", demo_model, "--payload", *SHORT, "--reference", folder, "--json")
    # q, k, v joined, with and without bias
    assert back.code == 0 and back.json["reference"]["compared"] == 3 + 4 * 11


def test_reference_of_the_same_model_and_of_another_format(
    demo_model: Path, tmp_path: Path
) -> None:
    saved, gguf = tmp_path / "t.safetensors", tmp_path / "m.gguf"
    aprfmt("convert", demo_model, gguf, "--no-verify")
    aprfmt("trace", f"{demo_model}@numpy::float64", "--payload", *SHORT, "--save", saved)
    for reference in (saved, f"{gguf}@numpy:float64", demo_model):
        done = aprfmt("trace", demo_model, "--payload", *SHORT, "--reference", reference, "--json")
        found = done.json["reference"]
        assert (done.code, found["first"], found["only_in_a"]) == (0, None, [])
        assert found["compared"] == len(done.json["records"])
        assert all(point["rel_l2"] < 2e-5 for point in found["points"])
    text = aprfmt("trace", demo_model, "--payload", *SHORT, "--reference", saved)
    assert "points within tolerance" in text.out


def test_reference_with_another_eps_names_the_first_point(tiny: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "eps"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] *= 10
    (other / "config.json").write_text(json.dumps(config))
    options = ("--payload", "--ids", given(IDS), "--reference", other)
    done = aprfmt("trace", tiny, *options, "--json")
    assert (done.code, done.json["reference"]["first"]) == (1, "L0.attn_norm")
    first = done.json["reference"]["points"][0]
    assert (first["key"], first["rel_l2"], first["beyond"]) == ("embd", 0.0, False)
    text = aprfmt("trace", tiny, *options)
    assert text.code == 1 and "first point beyond tolerance: L0.attn_norm" in text.out


def test_reference_of_other_tokens_is_refused(demo_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "t.safetensors"
    aprfmt("trace", demo_model, "--payload", "--ids", "1417,362,259", "--save", saved)
    done = aprfmt("trace", demo_model, "--payload", "--ids", "1417,362,258", "--reference", saved)
    assert done.code == 2 and "first difference at 2" in done.err
    aprfmt(
        "trace",
        demo_model,
        "--payload",
        "--ids",
        "1417,362,259",
        "--positions",
        "last",
        "--save",
        saved,
        "--force",
    )
    done = aprfmt(
        "trace",
        demo_model,
        "--payload",
        "--ids",
        "1417,362,259",
        "--points",
        "out",
        "--reference",
        saved,
        "--json",
    )
    assert done.json["exit"] == done.code == 2  # nothing could be compared
    assert all("3 positions against 1" in p["why"] for p in done.json["reference"]["points"])


def test_an_aprt_folder_refuses_other_tokens_and_a_foreign_one_says_it_cannot(
    demo_model: Path, tmp_path: Path
) -> None:
    folder, run = tmp_path / "aprt", ("trace", demo_model, "--payload", "--ids")
    assert aprfmt(*run, "1417,362,259", "--save-aprt", folder).code == 0
    done = aprfmt(*run, "1417,362,258", "--reference", folder)
    assert (done.code, done.out) == (2, "") and "first difference at 2" in done.err
    done = aprfmt(*run, "1417,362,259", "--reference", folder, "--json")
    assert (done.code, done.json["reference"]["not_checked"]) == (0, [])
    (folder / "aprfmt-trace.json").unlink()  # as `apr` writes one
    done = aprfmt(*run, "1417,362,259", "--reference", folder)
    said = "token ids: the reference does not record them, so they were not checked"
    assert done.code == 0 and f"NOT-RUN  {said}" in done.out
    done = aprfmt(*run, "1417,362,258", "--reference", folder, "--json")
    assert (done.code, done.json["reference"]["not_checked"]) == (1, [said])
    both = aprfmt("trace", "--load", folder, "--reference", folder, "--json").json["reference"]
    assert [text.split(": ")[1][:14] for text in both["not_checked"]] == [
        "this trace doe",
        "the reference ",
    ]


@pytest.mark.parametrize("reference", ["nowhere", "{tiny}@wrong", "{tiny}@torch:cpu:int3", "{bad}"])
def test_a_reference_that_is_none_is_refused_before_the_run(
    reference: str, demo_model: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.inference.session import Session

    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    monkeypatch.setattr(Session, "trace", lambda *a, **k: pytest.fail("the model was run"))
    named = reference.format(tiny=tiny, bad=bad)
    done = aprfmt("trace", demo_model, "--payload", "--ids", "1,2", "--reference", named)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    done = aprfmt("trace", demo_model, "--payload", "--ids", "1,1400", "--reference", tiny)
    assert done.code == 2 and "token id 1400" in done.err  # the other model's embedding ends


def test_a_reference_that_is_none_is_refused_before_anything_is_saved(
    tiny: Path, tmp_path: Path
) -> None:
    saved, other = tmp_path / "t.safetensors", tmp_path / "other.safetensors"
    run = ("trace", tiny, "--payload", "--points", "out", "--ids")
    assert aprfmt(*run, "1,2,3", "--save", saved).code == 0
    assert aprfmt(*run, "1,2,4", "--save", other).code == 0
    for reference in ("nowhere", tiny, other):
        again = tmp_path / "again.safetensors"
        done = aprfmt("trace", "--load", saved, "--save", again, "--reference", reference)
        assert (done.code, done.out, again.exists()) == (2, "", False)


@pytest.mark.parametrize(
    ("tensor", "point"),
    [
        ("model.layers.1.mlp.gate_proj.weight", "L1.ffn_gate"),
        ("model.layers.2.input_layernorm.weight", "L2.attn_norm"),
        ("model.layers.0.self_attn.o_proj.weight", "L0.attn_out"),
    ],
)
def test_a_nan_stops_and_names_where_it_began(
    tensor: str, point: str, tiny: Path, tmp_path: Path
) -> None:
    folder = broken(tiny, tmp_path / "nan", tensor)
    done = aprfmt("trace", folder, "--payload", "--ids", "1,2,3", "--json")
    assert (done.code, done.json["nonfinite"]) == (1, point)
    assert done.json["records"][-1]["key"] == point
    assert done.json["records"][-1]["stats"]["nan"] > 0
    text = aprfmt("trace", folder, "--payload", "--ids", "1,2,3")
    said = f"first NaN or infinity: {point}; "
    assert text.code == 1 and f"{said}the pass stopped there\n" in text.out
    text = aprfmt("trace", folder, "--payload", "--ids", "1,2,3", "--points", "logits")
    assert text.code == 1 and f"{said}of what was asked for, logits shows it\n" in text.out


@pytest.mark.parametrize("words", [("--backend", "nope"), ("--dtype", "float3")])
def test_the_plan_refuses_a_run_that_is_not_known(words: tuple[str, ...], demo_model: Path) -> None:
    done = aprfmt("trace", demo_model, *words)
    assert done.code == 2 and words[1] in done.err and not done.out


def test_the_plan_invents_nothing(demo_model: Path) -> None:
    done = aprfmt("trace", demo_model, "--json")
    assert done.code == 0 and done.json["stats_source"] == "metadata-only"
    assert "stats" not in json.dumps(done.json["points"]) and "slots" not in done.json
    assert "nothing was run" in aprfmt("trace", demo_model).out
    listed = aprfmt("trace", demo_model, "--list-points").out
    for name in ("ffn_mul", "ffn_swigl", "input_layernorm", "kq_soft_max"):
        assert name in listed


def test_the_only_model_of_a_folder_is_taken(demo_model: Path, tmp_path: Path) -> None:
    empty = process("trace", "--payload", "--ids", "1", cwd=tmp_path)
    assert empty.code == 2 and "no model here" in empty.err and empty.err.count("\n") == 1
    aprfmt("convert", demo_model, tmp_path / "one.gguf", "--no-verify")
    done = process("trace", "--payload", "--prompt", "It is", cwd=tmp_path)
    assert done.code == 0 and "using one.gguf" in done.err and "top 5" in done.out
    aprfmt("convert", demo_model, tmp_path / "two.apr", "--no-verify")
    done = process("trace", "--payload", "--prompt", "It is", cwd=tmp_path)
    assert done.code == 2 and "one.gguf" in done.err and "two.apr" in done.err


@pytest.mark.parametrize("run", ["numpy:float64", "numpy::float64", "torch:cpu:bfloat16"])
def test_the_run_behind_the_model(run: str, demo_model: Path) -> None:
    body = aprfmt(
        "trace", f"{demo_model}@{run}", "--payload", *SHORT, "--points", "out", "--json"
    ).json
    backend, _, rest = run.partition(":")
    assert body["run"]["ran"] == f"{backend}:cpu:{rest.rpartition(':')[2]}"
    assert {record["dtype"] for record in body["records"]} == {rest.rpartition(":")[2]}


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (("{m}", "--payload"), "found none of them"),
        (("{m}", "--payload", "--ids", "1", "--points", "ffn_gat"), "ffn_gate"),
        (("{m}", "--payload", "--ids", "1", "--layers", "3"), "layers 0 to 2"),
        (("{m}", "--payload", "--ids", "1", "--layers", "2-1"), "layers 0 to 2"),
        (("{m}", "--payload", "--ids", "1", "--positions", "1"), "positions 1 are not in the pass"),
        (("{m}", "--payload", "--ids", "1", "--positions", "first"), "all, last, or numbers"),
        (("{m}", "--payload", "--ids", "1", "--device", "cuda", "--backend", "numpy"), "cpu only"),
        (("{m}", "--save", "x.safetensors"), "needs --payload"),
        (("{m}", "--reference", "x"), "needs --payload"),
        (("{m}", "--payload", "--ids", "1", "--reference", "nowhere"), "no such file"),
        (("--load", "nowhere.safetensors"), "nowhere.safetensors"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(
    args: tuple[str, ...], fragment: str, tiny: Path
) -> None:
    done = aprfmt("trace", *(arg.replace("{m}", str(tiny)) for arg in args))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert fragment in done.err
