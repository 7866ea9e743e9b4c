"""Generation against transformers' own greedy search; sessions say what they lack.

Seen red: the stop token given out, one token too many.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from aprfmt.arch.spec import HyperParams
from aprfmt.errors import ArchError, UsageError
from aprfmt.inference.sampling import Sampler, Sampling
from aprfmt.inference.session import Session, load_forward, peak_rss
from aprfmt.inference.weights import array_weights
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel
from tests.models import IDS

PROMPT = list(IDS[:12])


def greedy(name: str, count: int) -> list[int]:
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(
        judged(name).folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=-1)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "gpt2"])
def test_greedy_generation_is_transformers(name: str) -> None:
    expected = greedy(name, 8)
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            found = list(session.generate(PROMPT, Sampler(Sampling()), 8))
            assert found == expected
            stop = expected[3]
            first = expected.index(stop)
            stopped = list(session.generate(PROMPT, Sampler(Sampling()), 8, {stop}))
            assert stopped == expected[:first]


def test_a_seed_gives_the_same_text_again() -> None:
    with open_model(judged("llama").folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            sampling = Sampling(1.0, top_k=20, seed=11)
            first = list(session.generate(PROMPT, Sampler(sampling), 12))
            assert first == list(session.generate(PROMPT, Sampler(sampling), 12))
            assert len(first) == 12 and len(session.ids) == len(PROMPT) + 11


def test_what_is_missing_is_named() -> None:
    with open_model(judged("llama").folder) as model:
        spec, b = model.spec, backend("numpy:float32")
        with pytest.raises(UsageError, match="no tokens"):
            Session.open(model, b).extend([])
        bare = Session(spec, HyperParams({}, "x.gguf"), array_weights({}), b)
        with pytest.raises(ArchError, match=r"x\.gguf: hyperparameter 'vocab_size'"):
            bare.logits([1])
        with pytest.raises(ArchError, match="cannot be loaded"):
            load_forward(replace(spec, forward="aprfmt.inference.forward:backward"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "1 of 30 tensors are missing that llama needs: L1.ffn_up.weight"),
        ((72, 47), r"L1.ffn_up.weight has shape \[72, 47\]; llama .* expects \[72, 48\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: tuple[int, int] | None, message: str, tmp_path: Path
) -> None:
    folder = judged("llama").folder
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    if change is not None:
        tensors[name] = np.zeros(change, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    with open_model(tmp_path) as model, pytest.raises(ArchError, match=message):
        Session.open(model, backend("numpy:float32"))


def test_a_replaced_hyperparameter_changes_the_logits() -> None:
    with open_model(judged("llama").folder) as model:
        b = backend("numpy:float64")
        plain = Session.open(model, b)
        hp = model.hyper.with_values(norm_eps=1e-5)
        other = Session(model.spec, hp, plain.weights, b)
        assert np.abs(plain.logits(IDS) - other.logits(IDS)).max() > 1e-4


def test_peak_memory_is_known_or_none() -> None:
    assert peak_rss() is None or peak_rss() > 1 << 20  # type: ignore[operator]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-long"])
@pytest.mark.parametrize("most", [1, 4, 100])
def test_logits_in_parts_are_those_of_the_whole_pass(name: str, most: int) -> None:
    """phi3-long rotates by the length of the whole sequence: its parts come of one pass."""
    rows = range(5, len(IDS) - 1)
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float64")) as session:
            whole = session.logits(IDS)[5:-1]
            parts = list(session.logits_in_parts(IDS, rows, most))
    assert max(map(len, parts)) <= most and sum(map(len, parts)) == len(rows)
    assert rel(np.concatenate(parts), whole) < 1e-12


def test_statistics_on_the_device_are_waited_for_before_the_logits_are_read() -> None:
    """In the pass that is recorded, so that each replay waits, too."""
    calls: list[str] = []
    tracer: Any = SimpleNamespace(
        ran=False,
        restart=lambda: calls.append("restart"),
        join_statistics=lambda: calls.append("join"),
        take_replay=lambda template: calls.append(template),
    )

    def graph(work: Any, ids: Any, cache: None, kind: Any, steps: bool) -> Any:
        found = work(ids, None)
        calls.append("recorded")
        return found

    session: Any = SimpleNamespace(
        _graphs=SimpleNamespace(replay_for=graph, best=None), _templates={("all", 2): "taken over"}
    )

    def run(ids: Any, positions: Any) -> str:
        calls.append("run")
        return "logits"

    assert Session._run_traced(session, tracer, run, np.array([1, 2]), "all") == "logits"
    assert calls == ["restart", "run", "join", "recorded", "taken over"]
