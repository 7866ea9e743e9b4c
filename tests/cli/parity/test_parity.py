"""The parity command: verdicts by exit code, one object of JSON, reproductions, calibration."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.inference.backends import BACKENDS
from tests.cli.run import aprfmt
from tests.inference.crooked import CROOKED

IDS = ("--ids", "5,17,42,9,3,80")


@pytest.fixture(autouse=True)
def crooked_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = dict(BACKENDS._rows)
    for name, kind in CROOKED.items():
        rows[name] = (f"tests.inference.crooked:{kind.__name__}", "")
    monkeypatch.setattr(BACKENDS, "_rows", rows)
    yield


def test_two_backends_agree(demo_model: Path) -> None:
    done = aprfmt("parity", demo_model, "--between", "cpu", "torch", *IDS, "--arbiter", "--json")
    body = done.json
    assert (done.code, body["schema"], body["ok"]) == (0, "aprfmt.parity/1", True)
    assert body["verdict"] == "precision" and [r["ran"] for r in body["runs"]] == [
        "numpy:cpu:float32",
        "torch:cpu:float32",
    ]
    [pair] = body["pairs"]
    assert (pair["a"], pair["b"]) == (0, 1)
    point = next(p for p in pair["points"] if p["key"] == "L2.q_rope")
    assert {"rel_l2", "max_over_rms", "tolerance", "reason", "unit", "bits"} <= set(point)
    assert pair["logits"]["argmax"] == 1.0 and pair["losses"]["unit"] == "nats"
    assert pair["losses"]["own"] == pytest.approx(pair["losses"]["reference"], abs=1e-4)
    assert len(body["arbiter"]) == 2
    text = aprfmt("parity", demo_model, "--between", "cpu", "torch", *IDS, "-v")
    assert text.code == 0 and "precision: rounding" in text.out and "tolerance: " in text.out
    everything = aprfmt("parity", demo_model, "--between", "cpu", "torch", *IDS, "--all")
    assert everything.out.count("within") > text.out.count("within")


@pytest.mark.parametrize(
    ("runs", "options", "code", "said"),
    [
        ("torch", (), 0, ("precision: rounding", "logits: relL2", "-v")),
        ("numpy", IDS, 0, ("same: every value is equal",)),
        ("torch", (*IDS, "--arbiter"), 0, ("torch:cpu:float32) from", "numpy:cpu:float32) from")),
        ("torch", (*IDS, "--through", "NF4"), 0, ("the reference from",)),
        ("torch numpy:float64 torch:cpu:bfloat16 torch:cpu:float16 numpy:float32 torch:cpu:float64",
         (), 0, ("more lines (-v, --json)",)),
        ("wrong-pairs", (), 1, ("operation L0.q_rope alone", "FAIL points", "next: aprfmt trace")),
        ("wrong-pairs", (*IDS, "--bundle", "NEW"), 1, ("wrote ", "next: aprfmt trace")),
    ],
)  # fmt: skip
def test_the_answer_is_short_and_the_rest_comes_with_v(
    runs: str, options: tuple[str, ...], code: int, said: tuple[str, ...], demo_model: Path,
    tmp_path: Path
) -> None:  # fmt: skip
    """Verdict first, the next command last, 12 lines at most.

    Seen red: 39 lines for two runs that agree; no operation named where one is wrong.
    """
    given = [str(tmp_path / "new") if each == "NEW" else each for each in options]
    done = aprfmt("parity", demo_model, "--between", "cpu", *runs.split(), *given)
    lines = done.out.splitlines()
    assert done.code == code and len(lines) <= 12, done.out
    assert all(each in done.out for each in said), done.out
    assert lines[0].split(":")[0] in ("same", "precision", "bug")
    assert lines[-1].startswith("next: ") == (code == 1)
    if "--bundle" not in given:
        whole = aprfmt("parity", demo_model, "--between", "cpu", *runs.split(), *given, "-v")
        assert whole.code == code and len(whole.out.splitlines()) > 20


@pytest.mark.parametrize("option", ["--bundle", "--calibrate", "--html"])
def test_what_cannot_be_written_is_said_before_the_runs(
    option: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.inference.session import Session

    monkeypatch.setattr(Session, "trace", lambda *a, **k: pytest.fail("the model was run"))
    there = tmp_path / "there"
    there.write_text("mine")
    args = ("parity", demo_model, "--between", "cpu", "torch", *IDS, option)
    assert "exists" in aprfmt(*args, there).err and there.read_text() == "mine"
    assert "no folder" in aprfmt(*args, tmp_path / "no" / "where").err
    base = aprfmt("parity", demo_model, "--between", "cpu", "torch", *IDS, "--base", "nowhere")
    assert (base.code, base.out) == (2, "") and "nowhere" in base.err


def test_ids_are_chosen_as_diagnose_does_and_said(demo_model: Path) -> None:
    """Without --prompt, --ids and --chat; what is printed gives the same run again."""
    from aprfmt.diagnosis import diagnose
    from aprfmt.inference.probe_ids import choose_ids
    from aprfmt.model import open_model

    runs = ("parity", demo_model, "--between", "cpu", "torch")
    body = aprfmt(*runs, "--json").json
    ids = body["tokens"]["ids"]
    with open_model(demo_model) as model:
        assert tuple(ids) == choose_ids([model.hyper], long=True)
    walked = diagnose(str(demo_model), f"{demo_model}@torch")
    assert any(f"token ids: {len(ids)} chosen" in row.says for row in walked.evidence)
    assert body["ids_chosen"] and body["verdict"] == "precision"
    text = aprfmt(*runs)
    line = next(each for each in text.out.splitlines() if "chosen" in each)
    said = line.partition("--ids ")[2]
    assert said == ",".join(map(str, ids))
    given = aprfmt(*runs, "--ids", said, "--json").json
    assert given["tokens"] == body["tokens"] and not given["ids_chosen"]
    assert "chosen" not in aprfmt(*runs, *IDS).out


def test_ids_that_are_chosen_reach_behind_a_window(tmp_path: Path) -> None:
    """Where an engine's window is wrong, no shorter pass shows it: half of it as much again."""
    from tests.models import save_tiny

    save_tiny("llama", tmp_path / "plain")
    save_tiny("mistral", tmp_path / "window")
    for name, window, least, most in (("window", 96, 97, 144), ("plain", None, 48, 48)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        if window is not None:
            assert "sliding_window" in config
            config |= {"sliding_window": window}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        runs = ("--between", "numpy", "numpy", "--points", "embd", "--json")
        body = aprfmt("parity", tmp_path / name, *runs).json
        assert least <= len(body["tokens"]["ids"]) <= most


def test_the_same_run_twice_is_the_same(demo_model: Path) -> None:
    done = aprfmt("parity", demo_model, "--between", "cpu", "numpy", *IDS, "--json")
    assert (done.code, done.json["verdict"]) == (0, "same")


def test_a_wrong_backend_is_found_bundled_and_replayed(demo_model: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b.safetensors"
    runs = ("--between", "cpu", "wrong-pairs")
    done = aprfmt("parity", demo_model, *runs, *IDS, "--bundle", bundle, "--json")
    assert done.code == 1 and done.json["verdict"] == "bug"
    found = done.json["pairs"][0]["first_operation"]
    assert found["key"] == "L0.q_rope" and found["wrong"] and found["inputs"] == ["L0.q"]
    assert done.json["bundle"]["path"] == str(bundle) and bundle.stat().st_size < 100_000
    text = aprfmt("parity", demo_model, *runs, *IDS, "--bundle", bundle)
    assert text.code == 2 and "exists" in text.err
    again = aprfmt("parity", "--replay", bundle, "--json")
    assert again.code == 1 and again.json["replay"]["reproduced"]
    assert again.json["replay"]["reference_moved"] == 0.0
    fixed = aprfmt("parity", "--replay", bundle, "--between", "cpu", "torch")
    assert fixed.code == 0 and "not reproduced" in fixed.out
    shown = aprfmt("parity", demo_model, *runs, *IDS, "-v")
    assert shown.code == 1 and "operation L0.q_rope alone" in shown.out and "BEYOND" in shown.out


def test_a_bundle_is_written_only_of_a_difference(demo_model: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b.safetensors"
    done = aprfmt("parity", demo_model, "--between", "cpu", "torch", *IDS, "--bundle", bundle)
    assert done.code == 0 and not bundle.exists() and "no operation to reproduce" in done.out


def test_calibration_is_written_and_read(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    runs = ("--between", "cpu", "torch")
    done = aprfmt("parity", demo_model, *runs, *IDS, "--calibrate", path, "--repeats", 2, "--json")
    assert done.code == 0 and done.json["written"] == str(path)
    assert done.json["calibration"]["schema"] == "aprfmt.thresholds/1"
    used = aprfmt("parity", demo_model, *runs, *IDS, "--thresholds", path, "--json")
    assert used.code == 0 and used.json["calibrated"] == str(path)
    wrong = ("--between", "cpu", "truncated")
    other = tmp_path / "u.json"
    done = aprfmt("parity", demo_model, *wrong, *IDS, "--calibrate", other, "--repeats", 2)
    assert done.code == 1 and not other.exists() and "beyond what a tolerance" in done.out


def test_quantization_matched(demo_model: Path) -> None:
    runs = ("--between", "cpu", "torch", "--through", "NF4")
    done = aprfmt("parity", demo_model, *runs, "--prompt", "What is 2+2? What is 3+4?", "--json")
    assert done.code == 0 and done.json["weights"]["through"] == "NF4"
    gates = {c["name"]: c["outcome"] for c in done.json["pairs"][0]["gate"]["checks"]}
    assert gates["own-loss"] == gates["quantized-logits"] == gates["quantized-loss"] == "PASS"
    assert done.json["noise"]["rel_l2"]["logits"] > 0.01


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--between", "cpu"), "expected one MODEL"),
        (("x.gguf", "y.gguf", "--between", "cpu", "torch"), "found the models x.gguf, y.gguf"),
        (("MODEL", "--between", "cpu"), "give at least two"),
        (("MODEL", "--between", "cpu", "torch", "--prompt", "x", *IDS), "found --prompt and --ids"),
        (("MODEL", "--between", "cpu", "torch", "--through", "NF4", "--base", "x", *IDS), "--base"),
        (("MODEL", "--replay", "x"), "--replay needs no model"),
        (
            ("MODEL", "--between", "cpu", "transformers", "--through", "NF4", *IDS),
            "write the model",
        ),
        (("--replay", "CONFIG"), "has no"),
    ],
)
def test_what_cannot_be_done_is_2(demo_model: Path, args: tuple[str, ...], message: str) -> None:
    named = {"MODEL": str(demo_model), "CONFIG": str(demo_model / "model.safetensors")}
    done = aprfmt("parity", *(named.get(arg, arg) for arg in args))
    assert done.code == 2 and message in done.err, done.err


def test_a_device_that_is_not_there_is_2(demo_model: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = aprfmt("parity", demo_model, "--between", "cpu", "cuda", *IDS, "--json")
    assert done.code == 2 and done.json["error"]["kind"] == "backendunavailable"
    engine = aprfmt("parity", demo_model, "--between", "cpu", "transformers:cuda", *IDS)
    assert engine.code == 2 and "no CUDA device" in engine.err


def test_trace_saves_what_an_engine_computes(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "hf.safetensors"
    given = ("--payload", *IDS, "--points", "all")
    done = aprfmt("trace", demo_model, *given, "--engine", "transformers", "--save", path, "--json")
    assert done.code == 0 and done.json["run"]["ran"] == "transformers:cpu:float32"
    assert done.json["run"]["backend"]["backend"] == "transformers"
    assert done.json["logits"]["top"][0]["token"]
    back = aprfmt("trace", demo_model, *given, "--reference", path, "--json")
    assert back.code == 0 and back.json["reference"]["compared"] == 75
    named = aprfmt("trace", f"{demo_model}@transformers", *given, "--reference", path, "--json")
    assert named.code == 0 and all(p["bits"] for p in named.json["reference"]["points"])
    text = aprfmt("trace", demo_model, *given, "--reference", f"{demo_model}@transformers")
    assert text.code == 0 and "all 75 points within tolerance" in text.out
    shown = aprfmt("trace", "--load", path, "--json")
    assert shown.code == 0 and len(shown.json["records"]) == 75
    refused = aprfmt("trace", demo_model, *given, "--engine", "torch")
    assert refused.code == 2 and "is a backend of ours" in refused.err


def test_a_trace_behind_a_cache_shows_what_attention_reads(
    demo_model: Path, tmp_path: Path
) -> None:
    given = ("--payload", *IDS, "--points", "k_cache,v_cache,k_rope,out")
    whole = tmp_path / "whole.safetensors"
    done = aprfmt("trace", demo_model, *given, "--save", whole, "--json")
    assert done.json["aliases"]["L1.k_cache"] == "L1.k_rope"
    assert not [r for r in done.json["records"] if r["point"] == "k_cache"]
    done = aprfmt("trace", demo_model, *given, "--behind", 4, "--json")
    records = {r["key"]: r for r in done.json["records"]}
    assert records["L1.k_cache"]["shape"][0] == 6 and records["L1.k_cache"]["positions"] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert records["L1.k_rope"]["positions"] == records["L1.out"]["positions"] == [4, 5]
    # A cached pass reads the values that the whole pass computed.
    back = aprfmt("trace", demo_model, *given, "--behind", 4, "--reference", whole, "--json")
    points = {p["key"]: p for p in back.json["reference"]["points"]}
    assert points["L3.k_cache"]["rel_l2"] < 1e-6 and points["L3.v_cache"]["rel_l2"] < 1e-6
    assert "2 positions against 6" in points["L3.out"]["why"]
    refused = aprfmt("trace", demo_model, *given, "--behind", 6)
    assert refused.code == 2 and "leave one to trace" in refused.err


@pytest.mark.parametrize("options", [("--arbiter",), ("--through", "NF4"), ()])
@pytest.mark.parametrize("much", ["", "-v", "--all"])
def test_distances_are_said_at_every_length(
    options: tuple[str, ...], much: str, demo_model: Path
) -> None:
    given = ("parity", demo_model, "--between", "cpu", "torch", *IDS, *options)
    done = aprfmt(*given, *([much] if much else []))
    body = aprfmt(*given, "--json").json
    noise = [body["noise"]] if body["noise"] else []
    distances = [*noise, *body["arbiter"]]
    assert len(distances) == {"--arbiter": 2, "--through": 1}.get("".join(options[:1]), 0)
    lines = [line for line in done.out.splitlines() if ": largest relL2 " in line]
    assert len(lines) == len(distances)
    for line, row in zip(lines, distances, strict=True):
        assert f" from {row['what']}: " in line and f"logits {row['rel_l2']['logits']:.3g}" in line


@pytest.mark.parametrize("much", ["-v", "--all"])
def test_every_run_is_named_with_its_points(much: str, demo_model: Path) -> None:
    given = ("parity", demo_model, "--between", "cpu", "torch", "numpy:float64", *IDS)
    done, body = aprfmt(*given, much), aprfmt(*given, "--json").json
    for number, run in enumerate(body["runs"]):
        name = f"run {number}" if number else "reference"
        (line,) = [line for line in done.out.splitlines() if line.startswith(f"  {name}: ")]
        assert run["requested"] in line and f"({run['points']} points" in line
