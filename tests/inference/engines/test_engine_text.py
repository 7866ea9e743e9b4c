"""The text of llama-eval-callback: what was printed is compared, what was not is absent.

Seen red: adjacent pairs left as they are, the last layer's one row taken for the first, a value
that was not printed taken for zero, a cut text accepted.
"""

from pathlib import Path

import numpy as np
import pytest

from aprfmt.errors import FormatError, UsageError
from aprfmt.inference.aprt import save_aprt
from aprfmt.inference.engines.llama_text import EDGE, load_eval_text
from aprfmt.inference.trace_file import save_trace
from aprfmt.measure.traces import compare_traces
from aprfmt.model import Model, open_model
from tests.cli.run import aprfmt
from tests.inference.judge import judged, traced64
from tests.models import IDS


def printed(nodes: list[tuple[str, str, list[str], np.ndarray]], ids: list[int]) -> str:
    """Print nodes as llama.cpp's common/debug.cpp does: %12.4f, three from each end."""
    lines = [f"number of input tokens = {len(ids)}", *(f"  {i}" for i in ids)]

    def sizes(shape: tuple[int, ...]) -> str:
        return ", ".join(str(size) for size in reversed(shape))

    for name, op, sources, values in nodes:
        first = f"{sources[0]}{{1, 1, 1, 1}}"
        second = f"{sources[1]}{{1, 1, 1, 1}}" if len(sources) > 1 else ""
        lines.append(
            f"common_debug_cb_eval: {name:>24} = (f32) {op:>10}({first}, {second}}}) = "
            f"{{{sizes(values.shape)}}}"
        )

        def ends(size: int) -> list[int]:
            whole = size <= 2 * EDGE
            return list(range(size)) if whole else [0, 1, 2, size - 3, size - 2, size - 1]

        for block in values:
            lines.append("    [")
            for i in ends(block.shape[0]):
                lines.append("        [")
                for j in ends(block.shape[1]):
                    row = [f"{block[i, j, k]:12.4f}" for k in ends(block.shape[2])]
                    lines.append(f"            [{', '.join(row)}  ],")
                lines.append("        ],")
            lines += ["    ]", f"    sum = {float(block.sum()):f}"]
    return "\n".join(lines) + "\n"


def nodes_of(model: Model) -> list[tuple[str, str, list[str], np.ndarray]]:
    """What llama.cpp's graph of a llama holds, by our float64 values in its layouts."""
    ours = traced64("llama")[1]

    def pairs(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        return np.stack([x[..., :half], x[..., half:]], -1).reshape(x.shape)

    def value(key: str) -> np.ndarray:
        found = ours.recorded_values(key)
        assert found is not None
        return found.reshape(1, 1, *found.shape) if found.ndim == 2 else found[None]

    return [
        ("embd", "GET_ROWS", ["token_embd.weight", "inp_tokens"], value("embd")),
        ("norm-0", "RMS_NORM", ["embd"], value("L0.attn_norm") * 3),
        ("attn_norm-0", "MUL", ["norm-0", "blk.0.attn_norm.weight"], value("L0.attn_norm")),
        ("Qcur-0", "MUL_MAT", ["blk.0.attn_q.weight", "attn_norm-0"],
         pairs(value("L0.q")).reshape(1, 1, 29, -1)),
        ("Qcur-0", "ROPE", ["Qcur-0", "inp_pos"], pairs(value("L0.q_rope"))),
        ("kq-0", "MUL_MAT", ["cache_k_l0 (view)", "Qcur-0"], value("L0.scores") * 4.0),
        ("kq_soft_max-0", "SOFT_MAX", ["kq-0", "mask"], value("L0.probs")),
        ("l_out-2", "ADD", ["ffn_out-2", "ffn_inp-2"], value("L2.out")[:, :, -1:]),
    ]  # fmt: skip


def test_the_text_of_eval_callback(tmp_path: Path) -> None:
    from aprfmt.conversion import convert

    gguf = tmp_path / "m.gguf"
    convert(judged("llama").folder, gguf)
    ours = traced64("llama")[1]
    with open_model(gguf) as model:
        path = tmp_path / "log.txt"
        path.write_text(printed(nodes_of(model), list(IDS)))
        with load_eval_text(path, model=model) as trace:
            assert set(trace.records) == {
                "embd",
                "L0.attn_norm",
                "L0.q",
                "L0.q_rope",
                "L0.scores",
                "L0.probs",
                "L2.out",
            }
            assert trace.run["ids"] == list(IDS)
            assert trace.records["L2.out"].positions == (28,)
            mask = trace.values_mask("L0.attn_norm")
            assert mask is not None and mask.sum() == 6 * 6
            diff = compare_traces(ours, trace)
            assert {p.key: p.why for p in diff.points if p.why} == {
                "L2.out": "rows of 29 positions against 1"
            }
            assert diff.first is None and diff.compared == 6
            point = next(p for p in diff.points if p.key == "L0.q_rope")
            assert point.values == 6 * 4 * 6
    wrong = nodes_of(model)
    wrong[4] = (*wrong[4][:3], wrong[4][3] * 1.01)
    path.write_text(printed(wrong, list(IDS)))
    with open_model(gguf) as model, load_eval_text(path, model=model) as trace:
        assert compare_traces(ours, trace).first == "L0.q_rope"


def test_what_was_not_printed_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with open_model(judged("llama").folder) as model:
        path.write_text(printed(nodes_of(model), list(IDS)))
    with load_eval_text(path) as trace:
        assert trace.records["L0.attn_norm"].stats is None  # of 36 values is of nothing
        with pytest.raises(UsageError, match="only printed values are there"):
            save_trace(tmp_path / "x.safetensors", trace)
        with pytest.raises(UsageError, match="only printed values are there"):
            save_aprt(tmp_path / "x", trace)
    shown = aprfmt("trace", "--load", path, "--json")
    assert shown.code == 0 and len(shown.json["records"]) == 7
    assert aprfmt("trace", "--load", path).code == 0
    refused = aprfmt("trace", "--load", path, "--save", tmp_path / "y.safetensors")
    assert refused.code == 2 and "only printed values" in refused.err


def test_cut_or_repeated_text_is_refused(tmp_path: Path) -> None:
    with open_model(judged("llama").folder) as model:
        text = printed(nodes_of(model), list(IDS))
    path = tmp_path / "log.txt"
    path.write_text(text[: len(text) // 2])
    with pytest.raises(FormatError, match="is the text cut"), load_eval_text(path):
        pass
    path.write_text(text * 2)
    with pytest.raises(FormatError, match="a second pass begins"), load_eval_text(path):
        pass
    path.write_text("common_debug_cb_eval: x = (f32) ADD(a{1, 1, 1, 1}, }) = {9, 9, 9, 9}\n")
    with pytest.raises(FormatError, match="shows no token embedding"), load_eval_text(path):
        pass
