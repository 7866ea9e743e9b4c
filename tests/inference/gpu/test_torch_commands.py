"""Commands with `--device cuda` on the demo: the CPU's answers, and what they say of the run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.inference.gpu.on_gpu import need
from tests.inference.judge import rel
from tests.inference.odd import FEW_TOKENS, ODD_IDS, SIZES, exact, odd

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    need()


@pytest.fixture
def golden(demo_model: Path) -> Any:
    return json.loads((demo_model / "golden.json").read_text())


@pytest.fixture
def ids(golden: Any) -> str:
    return ",".join(map(str, golden["greedy"][0]["prompt_ids"]))


def ran_on_the_gpu(body: dict[str, Any], requested: str, dtype: str = "float32") -> None:
    run = body["run"]
    assert run["requested"] == requested
    assert run["ran"].startswith("torch:cuda") and run["ran"].endswith(dtype)
    backend = run["backend"]
    assert backend["device"].startswith("cuda:") and backend["device_name"]
    assert backend["tf32"] is False and backend["memory_peak_bytes"] > 0
    assert "driver" in backend


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto"])
def test_logits(device: str, demo_model: Path, ids: str, tmp_path: Path) -> None:
    found = {}
    for where in ("cpu", device):
        out = tmp_path / f"{where.replace(':', '')}.npy"
        done = aprfmt("logits", demo_model, "--ids", ids, "--device", where, "--out", out, "--json")
        assert done.code == 0, done.err
        found[where] = np.load(out)
    ran_on_the_gpu(done.json, device)
    assert rel(found[device], found["cpu"]) < 2e-5
    np.testing.assert_array_equal(found[device].argmax(-1), found["cpu"].argmax(-1))


@pytest.mark.parametrize("where", [("--device", "cuda"), ("--backend", "cupy")], ids="=".join)
@pytest.mark.parametrize("size", SIZES)
def test_logits_of_experts_in_odd_sizes(size: str, where: tuple[str, str], tmp_path: Path) -> None:
    """A prompt of few tokens, whose products stopped at rows of 40 or 80 columns."""
    ids, out = ODD_IDS[:FEW_TOKENS], tmp_path / "logits.npy"
    given = ",".join(map(str, ids))
    wanted = exact("qwen2_moe", size, "BF16", len(ids)).recorded_values("logits")
    done = aprfmt("logits", odd("qwen2_moe", size), "--ids", given, *where, "--out", out, "--json")
    assert done.code == 0, done.err
    assert rel(np.load(out), wanted) < 5e-6


def test_run_gives_the_golden_tokens(demo_model: Path, golden: Any) -> None:
    for row in golden["greedy"][:4]:
        given, expected = ",".join(map(str, row["prompt_ids"])), row["output_ids"]
        done = aprfmt(
            "run",
            demo_model,
            "--ids",
            given,
            "--max-tokens",
            len(expected),
            "--ignore-stop",
            "--device",
            "cuda",
            "--json",
        )
        assert done.json["ids"] == expected
    ran_on_the_gpu(done.json, "cuda")


def test_run_in_bfloat16(demo_model: Path, ids: str) -> None:
    done = aprfmt(
        "run",
        demo_model,
        "--ids",
        ids,
        "--max-tokens",
        8,
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--json",
    )
    assert done.code == 0, done.err
    ran_on_the_gpu(done.json, "cuda:bfloat16", "bfloat16")


def test_trace_beside_the_cpu(demo_model: Path, ids: str, tmp_path: Path) -> None:
    saved = tmp_path / "cpu.safetensors"
    done = aprfmt(
        "trace", demo_model, "--payload", "--ids", ids, "--points", "all", "--save", saved, "--json"
    )
    assert done.code == 0, done.err
    done = aprfmt(
        "trace",
        demo_model,
        "--payload",
        "--ids",
        ids,
        "--points",
        "all",
        "--device",
        "cuda",
        "--reference",
        saved,
        "--json",
    )
    assert done.code == 0, done.err
    ran_on_the_gpu(done.json, "cuda")


def test_eval_gives_the_cpus_loss(demo_model: Path, golden: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(golden["losses"][0]["text"])
    cpu, gpu = (
        aprfmt("eval", demo_model, "--text", text, "--device", where, "--json")
        for where in ("cpu", "cuda")
    )
    assert gpu.code == cpu.code, gpu.err  # 1: the demo knows this text too well
    ran_on_the_gpu(gpu.json, "cuda")
    assert gpu.json["loss"] == pytest.approx(cpu.json["loss"], rel=1e-4, abs=1e-4)
