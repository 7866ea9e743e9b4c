"""Encoders against transformers: every point, the embedding, every backend, both formats.

Seen red, each alone: a causal mask; token types left out; positions without roberta's offset; the
norm of the sum before the sum; a window of twice the width; the windowed layers' base on all;
buckets with the signs swapped; a mean over all but the first row; gate and up exchanged.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.arch import ARCHS
from aprfmt.errors import UsageError
from aprfmt.inference.engines.llama_library import Library
from aprfmt.inference.running import make_request
from aprfmt.inference.running import run_and_trace as run_traced
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues, Trace
from aprfmt.measure.traces import common_keys
from aprfmt.model import open_model
from tests.cli.run import aprfmt as cli
from tests.inference.encoders import ENCODERS, IDS, encoded, made, pooled, write_pooling
from tests.inference.judge import backend, rel
from tests.llama import needs_llama

every = pytest.mark.parametrize("name", ENCODERS)
WITHOUT_GGUF = ("roberta", "xlm-roberta", "mpnet")
INSIDE = {"q", "k", "v", "attn", "attn_out", "mid", "ffn_up", "ffn_out", "out"}


def traced(path: Path, run: str, ids: tuple[int, ...] = IDS, **options: Any) -> Trace:
    kept = KeptValues()
    with open_model(path) as model, Session.open(model, backend(run, **options)) as session:
        return session.trace(ids, tuple(session.points), keep=kept.keep, fetch=kept.fetch)


def embedding(path: Path, run: str, ids: tuple[int, ...] = IDS, **options: Any) -> np.ndarray:
    with open_model(path) as model, Session.open(model, backend(run, **options)) as session:
        return session.embedding(ids)


def test_every_encoder_has_a_tiny_model() -> None:
    known = {name for name in ARCHS.own if ARCHS[name].block.head == "none"}
    found = set()
    for name in ENCODERS:
        with open_model(encoded(name).folder) as model:
            found.add(model.spec.name)
    assert found == known


@every
def test_float64_is_transformers_at_every_point(name: str) -> None:
    judge, trace = encoded(name), traced(encoded(name).folder, "numpy:float64")
    compared = set()
    for key, expected in judge.found.items():
        found = trace.recorded_values(key)
        assert found is not None, f"{key} is not captured"
        assert rel(found, expected) < 1e-12, key
        compared.add(key.rpartition(".")[2])
    assert compared >= INSIDE
    assert compared & {"embd_norm"}
    last = trace.recorded_values("final_norm")
    rows = trace.recorded_values("L3.out") if last is None else last
    assert rel(rows, judge.rows) < 1e-12
    assert rel(trace.recorded_values("pooled"), judge.embedding) < 1e-12
    assert trace.find_record("logits") is None


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "mpnet", "bert"])
def test_padding_inside_a_text_moves_positions_as_in_transformers(
    name: str, tmp_path: Path
) -> None:
    ids = (1, *IDS[:4], 1, 1, *IDS[4:], 1)
    expected = made(name, tmp_path, ids)
    assert rel(embedding(tmp_path, "numpy:float64", ids), expected) < 1e-12
    assert rel(embedding(tmp_path, "torch:float64", ids), expected) < 1e-12


@every
@pytest.mark.parametrize("run", ["numpy:float32", "torch:float32", "torch:float64"])
def test_the_embedding_on_every_backend(name: str, run: str) -> None:
    found, expected = embedding(encoded(name).folder, run), encoded(name).embedding
    assert rel(found, expected) < (1e-12 if run.endswith("64") else 5e-6)
    cosine = found.ravel() @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert abs(cosine - 1) < 1e-6


@every
def test_stepped_equals_fused_and_row_blocks_change_nothing(name: str) -> None:
    folder = encoded(name).folder
    fused = embedding(folder, "numpy:float32")
    stepped = traced(folder, "numpy:float32").recorded_values("pooled")
    blocks = embedding(folder, "numpy:float32", deterministic=True)
    assert rel(stepped, fused) < 2e-6 and rel(blocks, fused) < 2e-6


@pytest.mark.parametrize(
    ("name", "extension"),
    [(name, "apr") for name in ENCODERS] + [(n, "gguf") for n in ENCODERS if n not in WITHOUT_GGUF],
)
def test_other_containers_give_the_same_embedding(
    name: str, extension: str, tmp_path: Path
) -> None:
    target = tmp_path / f"model.{extension}"
    drop = ("pooler",) if extension == "gguf" else ()
    with open_model(encoded(name).folder) as model:
        known = any("pooler" in role for role in model.roles)
    aprfmt.convert(encoded(name).folder, target, drop=drop if known else ())
    with open_model(target) as model:
        assert model.resolution.notes == () and model.hyper["pooling"] == ENCODERS[name][2]
    assert rel(embedding(target, "numpy:float64"), encoded(name).embedding) < 1e-12
    if extension == "gguf":  # a file of somebody else's, which carries no config.json
        bare = tmp_path / "bare.gguf"
        remove = [part for key in _own(target) for part in ("--remove", key)]
        assert cli("set", target, "-o", bare, *remove).code == 0
        distance = rel(embedding(bare, "numpy:float64"), encoded(name).embedding)
        # GGUF has no key for the activation, and its epsilon is a float32.
        assert distance > 0.01 if name == "bert-relu" else distance < 1e-7


def _own(path: Path) -> list[str]:
    """Return the keys of a GGUF that only this package writes."""
    with open_model(path) as model:
        return [key for key in model.metadata if key.startswith("aprfmt.")]


@pytest.mark.parametrize("length", [1, 2, 61])
@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_any_length_the_positions_allow(name: str, length: int) -> None:
    ids = tuple(int(i) for i in np.random.default_rng(length).integers(3, 57, length))
    found = embedding(encoded(name).folder, "numpy:float64", ids)
    assert rel(found, _theirs(name, ids)) < 1e-5  # its norms and angles are float32


def _theirs(name: str, ids: tuple[int, ...]) -> np.ndarray:
    import torch
    import transformers

    auto: Any = transformers
    model = auto.AutoModel.from_pretrained(encoded(name).folder).double().eval()
    with torch.no_grad():
        rows = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return pooled(rows, ENCODERS[name][2])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    import shutil

    shutil.copytree(encoded("bert").folder, tmp_path / "bert")
    yield tmp_path / "bert"


def test_the_pooling_is_read_where_it_is_said(folder: Path) -> None:
    for kind in ("mean", "cls", "last"):
        write_pooling(folder, kind)
        found = embedding(folder, "numpy:float64")
        assert rel(found, pooled(encoded("bert").rows, kind)) < 1e-12
    write_pooling(folder, "max")
    with open_model(folder) as model:
        assert model.hyper["pooling"] is None
        assert "pooling other than mean" in " ".join(map(str, model.resolution.report.conflicts))
    (folder / "1_Pooling" / "config.json").unlink()
    with open_model(folder) as model:
        row = model.hyper.of("pooling")
        assert (row.value, row.origin) == ("mean", "default")


def test_only_what_is_unusual_is_shown(folder: Path) -> None:
    """The list of layers with a norm before attention, where the first one has none."""
    shown = cli("inspect", encoded("modernbert").folder).out
    assert "attn_norm_layers  (False, True" in shown
    assert "attn_norm_layers" not in cli("inspect", folder).out


def test_a_position_behind_the_last_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="61 learned positions"):
        embedding(folder, "numpy:float64", (3,) * 62)


def test_trace_shows_the_embedding_and_lists_the_points(folder: Path) -> None:
    ids = ("--ids", ",".join(map(str, IDS)))
    shown = cli("trace", folder, "--payload", "--points", "pooled", *ids, "--json")
    assert shown.code == 0, shown.err
    assert [row["key"] for row in shown.json["records"]] == ["pooled"]
    assert rel(shown.json["embedding"], encoded("bert").embedding) < 5e-6
    assert "embedding: 36 numbers" in cli("trace", folder, "--payload", *ids).out
    listed = cli("trace", folder, "--list-points", "--json").json["points"]
    absent = {row["key"] for row in listed if row["absent"]}
    assert {"logits", "final_norm", "L0.ffn_gate"} <= absent and "pooled" not in absent


def test_what_needs_a_head_says_what_to_do_instead(folder: Path) -> None:
    ids = ("--ids", "3,4,5")
    for command in (
        ("run", folder, *ids),
        ("eval", folder, *ids),
        ("parity", folder, "--between", "numpy", "torch", *ids),
        ("trace", folder, "--payload", "--behind", "1", *ids),
    ):
        done = cli(*command)
        assert done.code == 2, (command, done.out, done.err)
        assert "predicts no tokens" in done.err, (command, done.err)
        assert "--points pooled" in done.err
        assert done.err.strip().count("\n") == 0, done.err
    gates = {row["name"]: row for row in cli("qa", folder, "--json").json["gates"]}
    assert gates["tensor-contract"]["outcome"] == "PASS"
    for name in ("logits", "format-parity", "state-isolation"):
        assert gates[name]["outcome"] == "NOT_RUN" and "predicts no tokens" in gates[name]["why"]


@needs_llama
@pytest.mark.parametrize("name", [n for n in ENCODERS if n not in (*WITHOUT_GGUF, "bert-relu")])
def test_llama_cpp_gives_the_same_embedding(name: str, tmp_path: Path) -> None:
    """Of our GGUF; its GELU goes through a table of float16 values."""
    path = tmp_path / "model.gguf"
    with open_model(encoded(name).folder) as model:
        drop = ("pooler",) if "pooler.weight" in model.roles else ()
    aprfmt.convert(encoded(name).folder, path, drop=drop, metadata={"tokenizer.ggml.model": "none"})
    library = Library.open()
    pointer = ctypes.POINTER(ctypes.c_float)
    run: Any = library.llama
    run.llama_set_embeddings.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    run.llama_get_embeddings_seq.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    run.llama_get_embeddings_seq.restype = pointer
    with library.model(path) as loaded, library.context(loaded, len(IDS), 2) as context:
        run.llama_set_embeddings(context, True)
        assert library.decode(context, IDS) == 0
        found = np.ctypeslib.as_array(run.llama_get_embeddings_seq(context, 0), (36,)).copy()
    assert rel(found, encoded(name).embedding) < 1e-3


TEXTS = (
    "A small harbour town wakes before the sun.",
    "Before dawn the little port is already busy.",
    "The compiler rejects a pointer to an incomplete type.",
)


def test_a_published_encoder_gives_the_embeddings_of_its_library(
    minilm: Path, tmp_path: Path
) -> None:
    """all-MiniLM-L6-v2: tokens, embeddings and what is near what, from its folder and a GGUF."""
    import torch
    import transformers

    auto: Any = transformers
    tokenizer = auto.AutoTokenizer.from_pretrained(minilm)
    judge = auto.AutoModel.from_pretrained(minilm).eval()
    expected = []
    with torch.no_grad():
        for text in TEXTS:
            rows = judge(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected.append(rows.mean(0).numpy())
    aprfmt.convert(minilm, tmp_path / "minilm.gguf", drop=("pooler",))
    for path in (minilm, tmp_path / "minilm.gguf"):
        with open_model(path) as model, Session.open(model, backend("numpy:float32")) as session:
            assert model.resolution.unbound == ()
            given = [model.tokenizer.encode(text) for text in TEXTS]
            found = [session.embedding(ids)[0] for ids in given]
        assert given == [tokenizer(text)["input_ids"] for text in TEXTS]
        for mine, theirs in zip(found, expected, strict=True):
            assert rel(mine, theirs) < 2e-6
        unit = np.array([each / np.linalg.norm(each) for each in found])
        near = unit @ unit.T
        assert near[0, 1] > 0.4 > 0.2 > near[0, 2]


@every
def test_transformers_is_read_at_our_points(name: str) -> None:
    """The engine's hooks: every point of ours that it shows has our value."""
    ours = traced(encoded(name).folder, "numpy:float64")
    request = make_request(f"{encoded(name).folder}@transformers:float64", ids=IDS)
    with run_traced(request) as trace:
        shown = common_keys(trace, ours)
        for key in shown:
            assert rel(trace.recorded_values(key), ours.recorded_values(key)) < 2e-6, key
        assert trace.run["unknown"] == {}
    assert {key.rpartition(".")[2] for key in shown} >= INSIDE | {"embd_norm"}


def test_a_decoder_with_a_pooling_file_has_the_embedding_too(tmp_path: Path) -> None:
    """As Qwen3's embedding models are published: the last token's row, before any head."""
    import torch

    from tests.models import IDS as TOKENS
    from tests.models import save_tiny

    judge = save_tiny("qwen3", tmp_path / "model")
    write_pooling(tmp_path / "model", "last")
    with torch.no_grad():
        rows = judge.model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    assert rel(embedding(tmp_path / "model", "numpy:float32", TOKENS), rows[-1]) < 5e-6
    aprfmt.convert(tmp_path / "model", tmp_path / "model.gguf")
    assert rel(embedding(tmp_path / "model.gguf", "torch:float32", TOKENS), rows[-1]) < 5e-6
    with open_model(tmp_path / "model") as model:
        assert model.resolution.report.conflicts == () and model.resolution.report.unknown == ()
