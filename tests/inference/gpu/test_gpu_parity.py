"""The headline: one model on the CPU and on a GPU, point by point, for both GPU backends.

Seen red on a GPU backend: the wrong backends of tests/inference/crooked.py are the proof that the
comparison can say no; here every comparison has to say yes.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.conversion import convert
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.device import parse_run
from aprfmt.inference.parity.matched_weights import weights_through_encoding
from aprfmt.inference.parity.outcomes import measure_backend_loss
from aprfmt.inference.parity.parity_records import Parity
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.run_comparison import compare_choices
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import open_model
from tests.inference.gpu.machine import on
from tests.inference.gpu.on_gpu import need
from tests.inference.judge import judged, rel
from tests.inference.odd import ODD_IDS, odd
from tests.models import IDS, MAKERS

TEXT = "The capital of France is Paris. Two and three make five, and water is made of what?"
ONE = pytest.mark.parametrize("machine", ["gpu"], indirect=True)


def compared(path: Path | str, runs: Sequence[str], ids: Sequence[int], **options: Any) -> Parity:
    with open_model(path) as model:
        return compare_choices(
            model, [parse_run(run) for run in runs], ParityRequest(tuple(ids), **options)
        )


def accepted(found: Parity) -> None:
    wrong = [str(check) for check in found.checks if check.outcome == "FAIL"]
    assert not wrong and found.exit_code == 0, wrong
    assert found.verdict in ("same", "precision")
    assert {c.outcome for c in found.checks if c.name == "fused-form"} <= {"PASS"}


@on("name", ["llama"], MAKERS)
def test_cupy_and_the_cpu_agree(machine: Any, name: str) -> None:
    found = compared(judged(name).folder, ["cpu", "cupy"], IDS, arbiter=name == "llama")
    accepted(found)
    assert found.pairs[0].logits is not None
    assert found.pairs[0].logits.rel_l2 < 1e-5 and found.pairs[0].logits.argmax == 1.0
    assert all(0 < d.rel_l2["logits"] < 1e-5 for d in found.arbiter)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
def test_torch_on_the_gpu_and_the_cpu_agree(name: str) -> None:
    need()
    found = compared(judged(name).folder, ["cpu", "cuda"], IDS, arbiter=True)
    accepted(found)
    assert found.pairs[0].logits is not None
    assert found.pairs[0].logits.rel_l2 < 1e-5 and found.pairs[0].logits.argmax == 1.0
    assert {d.of for d in found.arbiter} == {0, 1}
    assert all(0 < d.rel_l2["logits"] < 1e-5 for d in found.arbiter)


def agrees_in_odd_sizes(arch: str, run: str) -> None:
    for size, form in (("50", "BF16"), ("144", "F16")):
        found = compared(odd(arch, size, form), ["cpu", run], ODD_IDS)
        accepted(found)
        assert found.pairs[0].logits is not None
        assert found.pairs[0].logits.rel_l2 < 1e-5 and found.pairs[0].logits.argmax == 1.0


@on("name", [], MAKERS)
def test_cupy_and_the_cpu_agree_in_odd_sizes(machine: Any, name: str) -> None:
    agrees_in_odd_sizes(name, "cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
def test_torch_and_the_cpu_agree_in_odd_sizes(name: str) -> None:
    need()
    agrees_in_odd_sizes(name, "cuda")


@cache
def text_ids(path: Path) -> tuple[int, ...]:
    with open_model(path) as model:
        return tuple(model.tokenizer.encode(TEXT))


# How the demo is stored -> (what `convert` is told, arithmetic of the GPU's side).
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "F32": ({"encoding": "F32"}, "float32"),
    "BF16": ({}, "float32"),
    "BF16 in bfloat16": ({}, "bfloat16"),
    "Q4_K": ({"quantize": "Q4_K_M"}, "float32"),
    "Q8_0": ({"quantize": "Q8_0"}, "float32"),
    "NF4": ({"quantize": "NF4"}, "float32"),
}


@pytest.fixture(scope="module")
def forms(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("forms")

    @cache
    def made(form: str) -> Path:
        how = FORMS[form][0]
        if not how:
            return demo_model
        target = folder / f"{form}{'.safetensors' if form == 'NF4' else '.gguf'}"
        convert(demo_model, target, **how)
        return target

    return made


@on("form", ["NF4"], FORMS)
def test_the_demo_in_every_form_on_cupy(
    machine: Any, form: str, forms: Any, demo_model: Path
) -> None:
    count = 4 if machine.name == "emulated" else None
    ids = text_ids(demo_model)[:count]
    accepted(compared(forms(form), ["cpu", run_of("cupy:cuda", form)], ids, text=TEXT))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_demo_in_every_form_on_torch(form: str, forms: Any, demo_model: Path) -> None:
    need()
    found = compared(
        forms(form), ["cpu", run_of("cuda", form)], text_ids(demo_model), text=TEXT, arbiter=True
    )
    accepted(found)


def run_of(place: str, form: str) -> str:
    return place if FORMS[form][1] == "float32" else f"{place}:{FORMS[form][1]}"


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["cuda", "cupy"])
@pytest.mark.parametrize("through", ["NF4", "Q4_K", "Q8_0"])
def test_quantization_matched_weights(run: str, through: str, demo_model: Path) -> None:
    """Equal weights on both sides: loss, full logits, its bound, and the GPU's own loss."""
    need()
    found = compared(demo_model, ["cpu", run], text_ids(demo_model), text=TEXT, through=through)
    accepted(found)
    assert found.noise is not None and found.noise.rel_l2["logits"] > 1e-3
    names = {c.name: c.outcome for c in found.checks}
    for gate in ("quantized-logits", "quantized-loss", "quantized-loss-bounded", "own-loss"):
        assert names[gate] == "PASS", gate


@on("count", [1, 5], [1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 200, 255, 256, 257, 300])
def test_fused_passes_are_the_stepped_ones_at_every_length(
    machine: Any, count: int, demo_model: Path
) -> None:
    """What a trace runs and what users run, on weights that went through NF4; equal every time."""
    ids = [(7 * i * i + 13 * i) % 1500 for i in range(count)]
    with open_model(demo_model) as model:
        logits = []
        for name, device in (("numpy", "cpu"), ("cupy", "cuda")):
            weights = weights_through_encoding(model, "NF4", None)
            backend = BACKENDS[name](device, "float32")
            with Session(model.spec, model.hyper, weights, backend) as session:
                kept = KeptValues()
                trace = session.trace(
                    ids, tuple(session.points), logits_rows="all", keep=kept.keep, fetch=kept.fetch
                )
                fused = [session.prefill(ids, "all") for _ in range(3)]
                plain = session.logits(ids)
            np.testing.assert_array_equal(fused[1], fused[0])
            np.testing.assert_array_equal(fused[2], fused[0])
            assert rel(fused[0], trace.recorded_values("logits")) < 5e-6
            assert rel(plain, trace.recorded_values("logits")) < 5e-6
            logits.append(fused[0])
    assert rel(logits[1], logits[0]) < 2e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_loss_on_the_gpu_is_that_of_the_logits(machine: Any, dtype: str) -> None:
    random = np.random.default_rng(0)
    backend = BACKENDS["cupy"]("cuda", dtype)
    logits = backend.to_numpy(backend.array(random.standard_normal((20, 97)).astype(np.float32)))
    ids = [int(i) for i in random.integers(0, 97, 20)]
    found = measure_backend_loss(backend, logits, ids)
    wide = logits[:-1].astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    wanted = -np.mean(logs[np.arange(19), ids[1:]])
    assert found.why == "" and found.nats == pytest.approx(wanted, rel=1e-5)
    assert found.off is not None and found.bound is not None and found.off <= found.bound


@pytest.mark.parametrize(
    ("width", "deviation", "eps", "bound"), [(896, 0.02, 1e-6, 1e-5), (4096, 0.04, 1e-5, 1e-5)]
)
def test_cupy_norms_rows_as_the_cpu_does(
    machine: Any, width: int, deviation: float, eps: float, bound: float
) -> None:
    random = np.random.default_rng(0)
    x = (random.standard_normal((4, width)) * deviation).astype(np.float32)
    gamma = (1 + 0.05 * random.standard_normal(width)).astype(np.float32)
    found = []
    for name, device in (("numpy", "cpu"), ("cupy", "cuda")):
        b = BACKENDS[name](device, "float32")
        made = b.rms_norm(b.array(x), b.array(gamma), eps=eps, offset=0, cast="after_weight")
        found.append(b.to_numpy(made))
    assert np.abs(found[1] - found[0]).max() < bound
