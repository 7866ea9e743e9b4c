"""Arrays under llama.cpp's names of graph nodes, in files that anyone's callback may write.

Values are those of our float64 run in llama.cpp's layouts, which tests of its library hold to it.
Seen red: a query of two axes taken for the one after rope, adjacent pairs left as they are, a name
of several nodes given to one of them, a bias left out of sight.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.conversion import convert
from aprfmt.inference.engines.modules import points_named
from aprfmt.inference.engines.node_names import parse_node_name
from aprfmt.inference.engines.opening import open_trace
from aprfmt.measure.traces import compare_traces
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.inference.judge import judged, traced64
from tests.models import IDS

F32 = np.ndarray[Any, np.dtype[np.float32]]


def in_pairs(x: F32) -> F32:
    """Return [..., d] in split halves as adjacent pairs, as llama.cpp has a llama's q and k."""
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half:]], -1).reshape(x.shape)


# {name of a node: (key, layout)} that one file by name can hold of a model with three layers.
PLAIN = {
    "attn_norm": "attn_norm", "Vcur": "v", "kqv_out": "attn", "ffn_inp": "mid",
    "ffn_norm": "ffn_norm", "ffn_gate": "ffn_gate", "ffn_up": "ffn_up", "ffn_silu": "ffn_act",
    "ffn_swiglu": "ffn_mul", "ffn_out": "ffn_out", "l_out": "out", "kq_soft_max": "probs",
}  # fmt: skip


def dumped(model: str, rotated: bool, pairs: bool) -> dict[str, F32]:
    """Return arrays of one pass by llama.cpp's names; `rotated`: q and k are those after rope."""
    ours = traced64(model)[1]

    def value(key: str) -> F32:
        found = ours.recorded_values(key)
        assert found is not None, key
        return found.astype(np.float32)

    made = {}
    for layer in range(3):
        for name, point in PLAIN.items():
            x = value(f"L{layer}.{point}")
            made[f"{name}-{layer}"] = x.reshape(len(x), -1) if point in ("v", "attn") else x
        for part in "qk":
            x = value(f"L{layer}.{part}{'_rope' if rotated else ''}")
            x = in_pairs(x) if pairs else x
            made[f"{part.upper()}cur-{layer}"] = x if rotated else x.reshape(len(x), -1)
    made["result_norm"], made["result_output"] = value("final_norm")[-1:], value("logits")[-1:]
    return made


def write_npz(path: Path, arrays: dict[str, F32]) -> Path:
    write: Any = np.savez
    write(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_npy(path: Path, arrays: dict[str, F32]) -> Path:
    path.mkdir()
    for name, x in arrays.items():
        np.save(path / f"{name}.npy", x[None])
    return path


def write_pt(path: Path, arrays: dict[str, F32]) -> Path:
    import torch

    torch.save({n: torch.from_numpy(x.copy()) for n, x in arrays.items()}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def write_safetensors(path: Path, arrays: dict[str, F32]) -> Path:
    from safetensors.numpy import save_file

    save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()},
              path.with_suffix(".safetensors"))  # fmt: skip
    return path.with_suffix(".safetensors")


WRITERS = {"npz": write_npz, "npy": write_npy, "pt": write_pt, "safetensors": write_safetensors}


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("form", WRITERS)
def test_arrays_are_the_points_that_the_nodes_are(form: str, rotated: bool, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    convert(judged("llama").folder, gguf)
    path = WRITERS[form](tmp_path / "dump", dumped("llama", rotated, pairs=True))
    keys = {f"L{layer}.{point}" for layer in range(3) for point in PLAIN.values()}
    keys |= {f"L{n}.{part}{'_rope' if rotated else ''}" for n in range(3) for part in "qk"}
    with open_model(gguf) as model, open_trace(path, list(IDS), model) as trace:
        assert not trace.run["unknown"]
        assert set(trace.records) == keys | {"final_norm", "logits"}
        assert trace.records["logits"].positions == (len(IDS) - 1,)
        found = compare_traces(trace, traced64("llama")[1])
        assert {p.key for p in found.points if p.why} <= {"final_norm"}  # rows of another number
        assert found.first is None and found.compared >= len(keys)


@pytest.mark.parametrize(
    ("model", "rotated", "said"),
    [("llama", False, "give the GGUF|the GGUF that ran"), ("qwen3", True, "before its norm")],
)
def test_what_a_name_leaves_open_is_said(
    model: str, rotated: bool, said: str, tmp_path: Path
) -> None:
    """Queries held to a folder of transformers; of three axes where heads are normalised."""
    folder = judged(model).folder
    arrays = dumped(model, rotated, pairs=False)
    if model == "qwen3":
        convert(folder, tmp_path / "m.gguf")
        folder = tmp_path / "m.gguf"
    else:
        arrays |= {"attn_out-0": arrays["l_out-0"], "norm-0": arrays["l_out-0"]}
    with (
        open_model(folder) as opened,
        open_trace(write_npz(tmp_path / "d", arrays), list(IDS), opened) as trace,
    ):
        unknown = trace.run["unknown"]
        asked = {name for name in arrays if name[0] in "QK" or name in ("attn_out-0", "norm-0")}
        assert set(unknown) == asked
        import re

        assert re.search(said, unknown["Qcur-0"])
        assert compare_traces(trace, traced64(model)[1]).first is None


def test_biases_decide_which_node_a_name_keeps(tmp_path: Path) -> None:
    folder, gguf = judged("qwen2").folder, tmp_path / "m.gguf"
    convert(folder, gguf)
    arrays = dumped("qwen2", rotated=False, pairs=False)
    with (
        open_model(gguf) as model,
        open_trace(write_npz(tmp_path / "d", arrays), list(IDS), model) as trace,
    ):
        assert "L0.q" in trace.records and "L0.q_mm" not in trace.records
        assert compare_traces(trace, traced64("qwen2")[1]).first is None


def test_diagnose_names_the_node_that_does_not_fit(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    convert(judged("llama").folder, gguf)
    arrays = dumped("llama", rotated=True, pairs=True)
    arrays["ffn_swiglu-1"] = arrays["ffn_swiglu-1"] * np.float32(1.05)
    path = write_npz(tmp_path / "dump", arrays)
    ids = ",".join(map(str, IDS))
    done = aprfmt("diagnose", str(path), str(gguf), "--ids", ids)
    # What was computed from it agrees, so that only the recording is wrong.
    assert done.code == 0 and "ffn_mul is its value times 1.05" in done.out, done.out + done.err


@pytest.mark.parametrize(
    "name",
    [
        "l_out",
        "l_out-",
        "result_output-1",
        "blk.0.attn_out",
        "norm_x-1",
        "norm",
        "model.norm",
        "out-3",
        "",
    ],
)
def test_other_names_are_no_nodes(name: str) -> None:
    assert parse_node_name(name) is None


def test_nodes_say_points() -> None:
    assert {point.name for point in points_named("ffn_inp-3")} == {"mid"}
    assert {point.name for point in points_named("Qcur-0")} >= {"q", "q_rope"}
    assert not points_named("attn_out-0")
