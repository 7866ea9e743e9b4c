"""Foreign runs at our points: transformers, llama.cpp, npz, printed text, APRT.

Seen red: query and key swapped in a joined projection, adjacent pairs left as they are, a head
axis before the tokens, an embedding taken for the scaled one, a router's experts unsorted.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.base import registry
from aprfmt.errors import ArchError, BackendUnavailableError, FormatError, UsageError
from aprfmt.inference.aprt import save_aprt
from aprfmt.inference.capture import POINTS
from aprfmt.inference.device import DeviceChoice, choose_device, parse_run, split_run
from aprfmt.inference.engines import ENGINES, EngineRun
from aprfmt.inference.engines.npz import load_npz
from aprfmt.inference.engines.opening import is_trace, open_trace
from aprfmt.inference.points_page import render_page
from aprfmt.inference.running import RunRequest, make_request, run_and_trace
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues, Trace
from aprfmt.inference.trace_file import save_trace
from aprfmt.measure.traces import common_keys, compare_traces
from aprfmt.model import Model, open_model
from tests.cli.run import aprfmt
from tests.inference.judge import WITHOUT_A_FUNCTION, architecture, backend, judged, rel, traced64
from tests.llama import needs_llama
from tests.models import IDS, MAKERS, save_tiny

# Points that no engine shows by these means.
NOT_SHOWN = {
    "q_mm", "k_mm", "v_mm", "router_margin", "k_pe_rope",
    "index_q_rope", "index_k_rope", "index_scores", "index_keys", "index_margin",
    "index_block_scores", "index_blocks",
}  # fmt: skip


@contextmanager
def ran(name: str, run: str, **options: Any) -> Iterator[tuple[Model, Trace]]:
    with open_model(judged(name).folder) as model:
        with run_and_trace(RunRequest(IDS, parse_run(run), **options), model) as trace:
            yield model, trace


VARIED = ("phi2-qk-norm", "stablelm-parallel", "gemma3-softcap", "deepseek_v2-lite", "phi3-long")


@pytest.mark.parametrize("name", [*MAKERS, *VARIED])
def test_transformers_is_read_at_our_points(name: str) -> None:
    ours = traced64(name)[1]
    with ran(name, "transformers:float64") as (model, trace):
        # transformers computes delta nets in float32 whatever the dtype.
        limit = 2e-6 if model.spec.block.recurrence == "none" else 5e-6
        for key in common_keys(trace, ours):
            assert rel(trace.recorded_values(key), ours.recorded_values(key)) < limit, key
        missing = {key.rpartition(".")[2] for key in ours.records if trace.find_record(key) is None}
        scaled = {"embd"} if float(model.hyper["embedding_scale"]) != 1 else set()
        apart = {"mid"} if model.spec.block.placement == "post" else set()
        if model.spec.block.placement == "by_mixer":  # of delta layers it is; q, k and v are apart
            apart = {"mid", "delta_qkv"}
        if model.spec.block.recurrence == "kimi_delta":
            apart = {"delta_qkv"}  # three products there
        if model.spec.block.residual == "norm":  # with factors
            apart = {"attn_contrib", "ffn_contrib"}
        factor = float(model.hyper["residual_scale"]) != 1
        factor = factor or model.spec.block.multipliers != "none"
        added = {"attn_contrib", "ffn_contrib"} if factor else set()
        if name == "granite_hybrid_moe":
            added |= {"moe_out"}  # no module adds the shared MLP's
        # What rope gives is shown where nothing follows it.
        late = {f"{x}_rope" for x in "qk" if f"L0.{x}_attn" in ours.records}
        if architecture(name) in WITHOUT_A_FUNCTION:
            late = {"q_rope", "k_rope", "scores", "probs"}
        inside = {"conv", "beta", "decay", "delta"}  # of a delta net: no module computes them
        inside |= {"conv_x"}  # nor what a short convolution reads
        inside |= {"ssm_step", "ssm_scan"}  # nor a state space mixer's functions
        inside |= {"ssm_dt"} if model.spec.block.recurrence == "mamba" else set()
        inside |= {"attn_mixed"} if model.spec.block.attention_gate != "none" else set()
        missing -= inside if model.spec.block.recurrence != "none" else set()
        missing -= {"per_layer", "ffn_stream"}  # sums that no module reads alone
        missing -= {  # of altup, whose steps are no modules
            "altup_modes", "altup_modes_after", "altup_predicted", "altup_corrected",
        }  # fmt: skip
        missing -= {  # of deepseek_v4: no module gives them
            "hc_embd",
            "hc_attn_pre",
            "hc_attn_comb",
            "hc_ffn_pre",
            "hc_ffn_comb",
            "hc_head_pre",
            "compressed_k",
            "index_compressed_k",
        }
        if model.spec.block.attention == "compressed":
            missing -= {"attn_mixed"}
        called = {"ffn_act"} if architecture(name).startswith("lfm") else set()  # no module
        assert missing <= NOT_SHOWN | called | scaled | apart | added | late
        assert trace.run["unknown"] == {} and trace.run["ids"] == list(IDS)
        assert {record.positions for record in trace.records.values()} == {tuple(range(29))}
        assert not compare_traces(trace, ours).first


# What llama.cpp computes as we do; the others lose configuration in a GGUF that it reads.
SAME_IN_LLAMA = (
    "llama", "llama-bias", "mixtral", "qwen3", "qwen2-yarn", "olmo3", "stablelm", "granite",
    "cohere", "qwen2_moe", "phi3-plain",
)  # fmt: skip


@needs_llama
@pytest.mark.parametrize("name", SAME_IN_LLAMA)
def test_llama_cpp_is_read_at_our_points(name: str) -> None:
    ours = traced64(name)[1]
    with ran(name, "llama.cpp") as (_, trace):
        shown = common_keys(trace, ours)
        for key in shown:
            if POINTS[key.rpartition(".")[2]].name not in ("experts", "router_margin"):
                assert rel(trace.recorded_values(key), ours.recorded_values(key)) < 3e-5, key
        for point in ("q", "k", "v", "q_rope", "k_rope", "scores", "probs", "attn", "attn_out"):
            assert f"L1.{point}" in shown or trace.aliases.get(f"L1.{point}") in shown, point
        assert trace.run["unknown"] == {}
        assert trace.run["backend"]["nodes"] > 40


@needs_llama
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_llama_cpp_runs_delta_nets(name: str, tmp_path: Path) -> None:
    """It wants heads of one size and sections within a head.

    It brings vectors to length one by their length, at least eps: small ones differ.
    """
    rope = {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
    sizes: dict[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    save_tiny(name, tmp_path, rope_parameters=rope, **sizes)
    kept = KeptValues()
    with open_model(tmp_path) as model:
        with Session.open(model, backend("numpy:float64")) as session:
            keys = tuple(session.points)
            ours = session.trace(IDS, keys, keep=kept.keep, fetch=kept.fetch, logits_rows="all")
        with run_and_trace(RunRequest(IDS, parse_run("llama.cpp")), model) as trace:
            for key in common_keys(trace, ours):
                if POINTS[key.rpartition(".")[2]].name not in ("experts", "router_margin"):
                    assert rel(trace.recorded_values(key), ours.recorded_values(key)) < 1e-3, key
            attention = next(key for key in ours.records if key.endswith(".q")).partition(".")[0]
            for key in ("L0.attn_out", *(f"{attention}.{p}" for p in ("q", "attn_gate", "attn"))):
                assert key in trace.records, key


@needs_llama
def test_a_joined_projection_and_experts_come_apart() -> None:
    for name in ("gpt2", "gpt_oss", "mixtral"):
        ours = traced64(name)[1]
        with ran(name, "llama.cpp") as (_, trace):
            for point in ("q", "k", "v"):
                key = f"L0.{point}"
                assert rel(trace.recorded_values(key), ours.recorded_values(key)) < 3e-5, (
                    name,
                    key,
                )
            if name != "gpt2":
                np.testing.assert_array_equal(
                    trace.recorded_values("L0.experts"), ours.recorded_values("L0.experts")
                )
                assert (
                    rel(trace.recorded_values("L0.expert_w"), ours.recorded_values("L0.expert_w"))
                    < 3e-5
                )


@needs_llama
def test_llama_cpp_shows_what_a_gguf_has_lost() -> None:
    """Mistral's window is not a key that llama.cpp reads: the first wrong point is the mask's."""
    with ran("mistral", "llama.cpp") as (_, trace):
        assert compare_traces(trace, traced64("mistral")[1]).first == "L0.probs"


def test_without_the_library_the_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APRFMT_LLAMA_CPP", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="holds no libggml-base"):
        with ran("llama", "llama.cpp"):
            pass
    monkeypatch.delenv("APRFMT_LLAMA_CPP")
    monkeypatch.setattr("aprfmt.inference.engines.llama_library.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="pip install llama-cpp-python"):
        with ran("llama", "llama.cpp"):
            pass


def test_runs_are_named_without_importing_the_engines() -> None:
    import subprocess
    import sys

    code = (
        "from aprfmt.inference.device import parse_run, split_run\n"
        "assert split_run('m.gguf@transformers:bfloat16') == ('m.gguf', 'transformers:bfloat16')\n"
        "assert split_run('m.gguf@llama.cpp') == ('m.gguf', 'llama.cpp')\n"
        "assert parse_run('transformers:cpu:bfloat16').is_engine\n"
        "import sys; assert not {'torch', 'transformers', 'llama_cpp'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    choice = parse_run("transformers:cuda:bfloat16")
    assert (choice.backend, choice.device, choice.dtype) == ("transformers", "cuda", "bfloat16")
    assert split_run("user@host") == ("user@host", None)
    with pytest.raises(UsageError, match="expected one of numpy, torch"):
        parse_run("llama.cpp").open()


def test_an_engine_takes_what_a_run_gives_and_nothing_else() -> None:
    """Rows are strings, which no type checker follows. Seen red: an engine without `hashes`."""
    wanted = list(inspect.signature(EngineRun.__call__).parameters)[1:]
    for name in ENGINES.own:
        assert list(inspect.signature(ENGINES[name]).parameters) == wanted, name


def test_a_third_partys_engine_is_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    point = metadata.EntryPoint("halves", "tests.inference.crooked:halved", "aprfmt.engines")
    monkeypatch.setattr(registry, "installed_entry_points", lambda kind: [point])
    monkeypatch.setattr(ENGINES, "_third_party_read", False)
    monkeypatch.setattr(ENGINES, "_rows", dict(ENGINES._rows))
    with ran("llama", "halves") as (_, trace):
        assert (
            rel(
                trace.recorded_values("final_norm"),
                traced64("llama")[1].recorded_values("final_norm"),
            )
            > 0.4
        )
        assert trace.run["backend"] == {"backend": "halves"}


def test_a_run_needs_ids_and_a_trace_is_told_by_its_content(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs token ids"):
        with run_and_trace(make_request(f"{judged('llama').folder}@numpy")):
            pass
    path = tmp_path / "trace.bin"
    save_trace(path.with_suffix(".safetensors"), traced64("llama")[1])
    path.with_suffix(".safetensors").rename(path)
    assert is_trace(path) and not is_trace(judged("llama").folder)
    with open_trace(path) as trace:
        assert trace.run["ids"] == list(IDS)
    with pytest.raises(FormatError, match="is no saved trace"):
        with open_trace(judged("llama").folder / "config.json"):
            pass


# --- npz ----------------------------------------------------------------------------------------


def savez(path: Path, arrays: dict[str, np.ndarray]) -> None:
    write: Any = np.savez  # keys are names that no keyword could be
    write(path, **arrays)


def captured(name: str) -> dict[str, np.ndarray]:
    """What a user's own hooks on transformers write: raw outputs under module paths."""
    import torch
    from transformers import AutoModelForCausalLM

    from aprfmt.inference.engines import transformers as engine
    from aprfmt.inference.engines.modules import ModuleMap

    network: Any = AutoModelForCausalLM.from_pretrained(
        judged(name).folder, dtype=torch.float32, attn_implementation="eager"
    )
    if getattr(network, "_can_set_experts_implementation", lambda: False)():
        network.set_experts_implementation("eager")
    names = [path for path, _ in network.named_modules()]
    layers = [path for path in names if path.rpartition(".")[2].isdigit()]
    keys = [*names, *(f"{path}#in" for path in names)]
    keys += [f"{layer}#{part}" for layer in layers for part in ("q_rope", "k_rope")]
    found: dict[str, np.ndarray] = {}

    def take(key: str, values: Any) -> None:
        found[key] = values.detach().float().numpy()

    with torch.inference_mode(), engine.hook_modules(network.eval(), ModuleMap(keys), take):
        logits = network(torch.tensor([IDS]), use_cache=False).logits
    order = [*found, "logits"]
    return found | {
        "logits": logits.float().numpy(),
        "input_ids": np.array([IDS]),
        "__order__": np.array(order),
    }


# One of each layout: split and joined projections, gates, heads, norms, scaled embedding, routers.
LAYOUTS = (
    "llama", "gpt2", "phi3", "gemma3", "olmo2", "mixtral", "gpt_oss", "deepseek_v3", "cohere",
    "phi2-qk-norm",
)  # fmt: skip


# Of what a file holds under these names only the model says which of two, or which layout.
UNTOLD = ("embd", "embd_scaled", "in", "q_rope", "k_rope", "q_attn", "k_attn")


@pytest.mark.parametrize("name", LAYOUTS)
def test_npz_of_module_outputs(name: str, tmp_path: Path) -> None:
    arrays = captured(name)
    path = tmp_path / "hf.npz"
    again = re.compile(r"[\w.]*(?:layers|h)\.(\d+)(#(?:in|out|q_rope))")  # by number alone
    short = {again.sub(r"\1\2", key): value for key, value in arrays.items()}
    order = np.array([again.sub(r"\1\2", key) for key in arrays["__order__"]])
    short |= {"__order__": order, "model.layers.0.mystery": np.zeros(3)}
    savez(path, short)
    ours = traced64(name)[1]
    with open_model(judged(name).folder) as model, load_npz(path, model=model) as trace:
        keys = common_keys(trace, ours)
        assert len(keys) > 15 and "logits" in keys
        for key in keys:
            if not key.endswith(".router"):  # float32 either way
                assert rel(trace.recorded_values(key), ours.recorded_values(key)) < 2e-5, key
        assert trace.run["ids"] == list(IDS)
        assert trace.run["unknown"]["model.layers.0.mystery"] == "not a capture point"
        assert compare_traces(trace, ours).first is None
    with load_npz(path) as bare:  # without the model: joined stays joined, nothing is guessed
        for key in common_keys(ours, bare):
            x, y = bare.recorded_values(key), ours.recorded_values(key)
            if key.rpartition(".")[2] in UNTOLD:
                continue
            if x is not None and y is not None and x.size == y.size:
                assert rel(x, y) < 2e-5, key


def test_a_foreign_trace_becomes_ours(tmp_path: Path) -> None:
    """Without its model a joined projection stays joined, saved and loaded again too."""
    path, ours = tmp_path / "hf.npz", tmp_path / "ours.safetensors"
    savez(path, captured("gpt2"))
    done = aprfmt("trace", "--load", path, "--save", ours, "--json")
    assert done.code == 0 and done.json["saved"] == [str(ours)]
    with open_trace(ours) as trace:
        assert "L1.qkv" in trace.records and "L1.q" not in trace.records
        diff = compare_traces(traced64("gpt2")[1], trace)
        assert diff.first is None and "L1.qkv" in [p.key for p in diff.points if not p.why]
    given = ("--payload", "--ids", ",".join(map(str, IDS)), "--points", "all")
    back = aprfmt("trace", judged("gpt2").folder, *given, "--reference", path, "--json")
    assert back.code == 0 and back.json["reference"]["compared"] > 30
    whole = aprfmt("trace", judged("gpt2").folder, "--load", path, "--reference", ours, "--json")
    assert whole.code == 0 and "L1.q" in [r["key"] for r in whole.json["records"]]


def test_npz_names_what_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    batch = np.zeros((2, 5, 8), np.float32)
    order = np.array(["model.layers.0.self_attn.q_proj", "gone"])
    savez(path, {"model.layers.0.self_attn.q_proj": batch, "__order__": order})
    with load_npz(path, ids=[1, 2, 3, 4, 5]) as trace:
        unknown: Any = trace.run["unknown"]
        assert "named in __order__" in unknown["gone"]
        assert trace.run["ids"] == [1, 2, 3, 4, 5]


def test_a_bfloat16_runs_npz_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    values = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    coarse = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    savez(path, {"model.layers.0.input_layernorm": coarse, "input_ids": np.arange(5)})
    with load_npz(path) as trace:
        assert trace.records["L0.attn_norm"].dtype == "bfloat16"


# --- joined stages ------------------------------------------------------------------------------


def test_a_joined_stage_is_compared_with_its_parts(tmp_path: Path) -> None:
    ours = traced64("qwen2")[1]
    save_aprt(tmp_path / "a", ours)
    with open_trace(tmp_path / "a") as folder:
        diff = compare_traces(ours, folder)
        keys = [point.key for point in diff.points]
        assert keys.index("L1.qkv") == keys.index("L1.qkv_nobias") + 1
        assert keys.index("L1.attn_norm") < keys.index("L1.qkv") < keys.index("L1.q_rope")
        assert diff.first is None and not [p for p in diff.points if p.why]
        back = compare_traces(folder, ours)
        assert "L1.qkv" in [p.key for p in back.points] and back.first is None
    path = tmp_path / "a" / "layer-1" / "qkv_bias.bin"
    raw = bytearray(path.read_bytes())
    values = np.frombuffer(raw, "<f4", offset=12)
    changed = values.reshape(29, -1).copy()
    changed[:, 60] += 0.01  # a key's bias
    path.write_bytes(bytes(raw[:12]) + changed.astype("<f4").tobytes())
    (tmp_path / "a" / "aprfmt-trace.json").unlink()  # as another program leaves a folder
    with open_trace(tmp_path / "a") as folder:
        assert compare_traces(ours, folder).first == "L1.qkv"


def test_the_page_of_capture_points_is_current() -> None:
    path = Path(__file__).resolve().parents[3] / "docs" / "reference" / "capture_points.md"
    assert path.read_text() == render_page(), "run python -m aprfmt.inference.points_page"
    for name in POINTS:
        assert f"| `{name}` |" in render_page()


def test_a_wrong_model_is_an_error_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    import torch

    from aprfmt.inference.engines.transformers import load_network

    with pytest.raises(ArchError, match="transformers does not open it"):
        load_network(tmp_path, "float32", torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            with ran("llama", "transformers:cuda"):
                pass
    assert isinstance(choose_device(), DeviceChoice)


def test_what_a_module_gives_keeps_its_values() -> None:
    torch = pytest.importorskip("torch")
    from aprfmt.inference.engines.transformers import _to_numpy

    types = {
        "float64": "float64",
        "float32": "float32",
        "bfloat16": "float32",
        "float16": "float32",
        "int32": "int64",
    }
    for dtype, expected in types.items():
        values = torch.tensor([1 / 3, 2.5, 7.0], dtype=torch.float64).to(getattr(torch, dtype))
        found = _to_numpy(values)
        assert found.dtype == expected
        assert found.astype(np.float64).tolist() == values.to(torch.float64).tolist(), dtype


def test_hooks_end_with_the_block() -> None:
    torch = pytest.importorskip("torch")
    from aprfmt.inference.engines import transformers as engine
    from aprfmt.inference.engines.modules import ModuleMap

    network = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 2)})
    taken: list[str] = []
    known = ModuleMap(["lm_head"])
    assert known.read("lm_head")
    with engine.hook_modules(network, known, lambda key, _: taken.append(key)):
        network["lm_head"](torch.zeros(1, 2))
    before = list(taken)
    network["lm_head"](torch.zeros(1, 2))
    assert before == taken == ["lm_head"]
    assert not network["lm_head"]._forward_hooks
