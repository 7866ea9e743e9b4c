"""The meaning of RUN and --device; a request for a GPU never runs on the CPU silently.

Seen red: auto without its reason, every `@` parsed as a run.
"""

import pytest
import torch

from aprfmt.errors import BackendUnavailableError, UsageError
from aprfmt.inference import device
from aprfmt.inference.backends.torch_backend import TorchBackend
from aprfmt.inference.device import choose_device, parse_run, split_run

NO_GPU = not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", "numpy:cpu:float32"),
        ("cuda", "torch:cuda:float32"),
        ("cuda:1", "torch:cuda:1:float32"),
        ("numpy", "numpy:cpu:float32"),
        ("torch:cpu:bfloat16", "torch:cpu:bfloat16"),
        ("torch:cuda:0:float16", "torch:cuda:0:float16"),
        ("numpy:float64", "numpy:cpu:float64"),
        ("numpy::float64", "numpy:cpu:float64"),
        ("cpu:float64", "numpy:cpu:float64"),
        ("cupy", "cupy:cuda:float32"),
        ("transformers:bfloat16", "transformers:cpu:bfloat16"),
        ("llama.cpp", "llama.cpp:cpu:float32"),
    ],
)
def test_runs_are_read(text: str, expected: str) -> None:
    assert str(parse_run(text)) == expected


@pytest.mark.parametrize("text", ["", "jax", "torch:tpu", "torch:cpu:float8", "numpy:cpu:3"])
def test_words_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_run(text)


def test_a_model_path_may_hold_an_at_sign() -> None:
    assert split_run("a@b/model.gguf") == ("a@b/model.gguf", None)
    assert split_run("a@b/model.gguf@torch:cpu") == ("a@b/model.gguf", "torch:cpu")
    assert split_run("model.gguf@cpu") == ("model.gguf", "cpu")


def test_defaults_and_requests_are_told_apart() -> None:
    assert choose_device().why == "the default"
    assert choose_device("cpu").why == "as asked"
    assert choose_device("cpu", "torch", "float64").requested == "torch:cpu:float64"


@pytest.mark.skipif(not NO_GPU, reason="NOT-RUN: this machine has a GPU")
def test_without_a_gpu_cuda_is_refused_and_auto_says_why() -> None:
    with pytest.raises(BackendUnavailableError, match=r"CUDA.*nothing was run on the CPU instead"):
        parse_run("cuda").open()
    auto = choose_device("auto")
    assert str(auto) == "numpy:cpu:float32"
    assert "auto chose the CPU" in auto.why and "CUDA" in auto.why


def test_a_backend_refuses_what_it_cannot_do() -> None:
    for run, message in [
        ("numpy:cuda", "computes on cpu only"),
        ("numpy:cpu:bfloat16", "expected float32 or float64"),
    ]:
        with pytest.raises(BackendUnavailableError, match=message):
            parse_run(run).open()
    facts = parse_run("torch:cpu:bfloat16").open().facts()
    assert facts["device"] == "cpu" and facts["dtype"] == "bfloat16" and facts["tf32"] is False


@pytest.mark.parametrize("run", ["numpy", "torch", "torch:bfloat16"])
def test_a_deterministic_backend_has_one_thread_unless_told(run: str) -> None:
    """The number is part of the bits, and what the API, parity and diagnose open has it too."""
    before = torch.get_num_threads()
    try:
        choice = parse_run(run)
        assert choice.open(deterministic=True, threads=2).facts()["threads"] == 2
        assert choice.open(deterministic=True).facts()["threads"] == 1
    finally:
        choice.open(threads=before)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_products_have_the_precision_that_was_asked_for(before: str, tf32: bool) -> None:
    """Whatever another program part left: torch's setting is of the whole process."""
    kept = torch.get_float32_matmul_precision()
    try:
        backend = TorchBackend("cpu", "float32", tf32=tf32)
        for _ in range(2):
            torch.set_float32_matmul_precision(before)
            backend.set_position(0)
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert backend.facts()["tf32"] is tf32
    finally:
        torch.set_float32_matmul_precision(kept)


@pytest.mark.parametrize(
    ("backend", "opened"), [(None, "torch"), ("torch", "torch"), ("cupy", "cupy")]
)
def test_auto_takes_the_gpu_where_its_backend_opens(
    backend: str | None, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the GPU; tests/inference/gpu/test_torch_commands.py asks for one."""
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(device, "gpu_problem", lambda backend: "")
    monkeypatch.setattr(device, "BACKENDS", {opened: lambda *given: asked.append(given)})
    found = choose_device("auto", backend, "bf16")
    assert asked == [("cuda", "bfloat16")]
    assert (found.backend, found.device, found.dtype) == (opened, "cuda", "bfloat16")
    assert found.why == "auto chose the GPU" and "auto" in found.requested
