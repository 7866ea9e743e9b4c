"""`quantize --calibrate`: sums of squares against hooks in transformers, read back by libgguf.

Seen red, each alone: the output's matrix counted too; an expert's rows counted for the first; the
entry of a fused tensor left out; windows without BOS; the text's tail run as one more window.
"""

import tempfile
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest

import aprfmt
from aprfmt.errors import UsageError
from aprfmt.inference import importance
from aprfmt.inference.engines.llama_cpp import _node_values
from aprfmt.inference.engines.llama_library import Callback, Library
from aprfmt.inference.importance import collect_imatrix
from tests.cli.run import aprfmt as command
from tests.inference.judge import rel
from tests.llama import needs_llama
from tests.models import save_tiny

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 90, 45)]
DENSE = {"llama": gguf.MODEL_ARCH.LLAMA, "gpt2": gguf.MODEL_ARCH.GPT2}
PRODUCTS = (b"MUL_MAT", b"MUL_MAT_ID")
DENSE |= {"qwen2": gguf.MODEL_ARCH.QWEN2, "phi3": gguf.MODEL_ARCH.PHI3}


def hooked(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """Return the sum of squares of what goes into every linear module of a transformers model."""
    import torch

    found: dict[str, np.ndarray] = {}

    def hook(name: str) -> Any:
        def count(module: Any, inputs: Any) -> None:
            found[name] = (
                inputs[0].double().reshape(-1, inputs[0].shape[-1]).square().sum(0).numpy()
            )

        return count

    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return found


@pytest.mark.parametrize("arch", DENSE)
def test_hooks_of_transformers_count_the_same(arch: str, tmp_path: Path) -> None:
    theirs = hooked(save_tiny(arch, tmp_path), IDS)
    with aprfmt.open(tmp_path) as model:
        ours = collect_imatrix(model, IDS, "ids")
        layers = int(model.hyper["n_layers"])
    names = gguf.get_tensor_name_map(DENSE[arch], layers)
    expected = {str(names.get_name(name, (".weight",))): sums for name, sums in theirs.items()}
    expected.pop("output.weight")
    assert ours.entries.keys() == expected.keys()
    for name, sums in expected.items():
        assert rel(ours.entries[name].sums, sums) < 1e-5, name
        np.testing.assert_array_equal(ours.entries[name].counts, [len(IDS)])


@needs_llama
@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen2", "mixtral"])
def test_llama_cpp_multiplies_by_what_is_counted(arch: str, tmp_path: Path) -> None:
    """The inputs of its own products, read by the callback that llama-imatrix reads them with."""
    options: dict[str, Any] = (
        {"use_sliding_window": False} if arch == "qwen2" else {}
    )  # llama.cpp knows none there
    save_tiny(arch, tmp_path / "hf", **options)
    aprfmt.convert(
        tmp_path / "hf",
        tmp_path / "m.gguf",
        encoding="F32",
        metadata={"tokenizer.ggml.model": "no_vocab"},
    )
    library, theirs = Library.open(), dict[str, np.ndarray]()

    def evaluated(pointer: Any, ask: bool, data: Any) -> bool:
        weight = pointer.contents.src[0]
        name = weight.contents.name.decode() if weight else ""
        wanted = name.startswith("blk.") and library.base.ggml_op_desc(pointer) in PRODUCTS
        if wanted and not ask:
            x = np.asarray(_node_values(pointer.contents.src[1], library.base), np.float64)
            theirs[name] = np.square(x).reshape(-1, x.shape[-1]).sum(0)
        return wanted

    with library.model(tmp_path / "m.gguf") as loaded:
        made = library.context(loaded, len(IDS), 1, callback=Callback(evaluated))
        with made as context:
            assert library.decode(context, IDS) == 0
    with aprfmt.open(tmp_path / "hf") as model:
        ours = collect_imatrix(model, IDS, "ids").entries
    dense = {name for name in ours if "_exps" not in name}
    assert dense and dense <= theirs.keys() <= ours.keys()
    for name in dense:
        assert rel(ours[name].sums, theirs[name]) < 1e-3, name  # its tables of GELU and SiLU
    for name in ours.keys() - dense:
        if "down" in name:  # others read a token once for all its experts
            assert rel(ours[name].sums.sum(0), theirs[name]) < 1e-3, name


def test_an_expert_counts_the_rows_that_chose_it(tmp_path: Path) -> None:
    reference = save_tiny("mixtral", tmp_path)
    chosen: list[Any] = []
    reference.model.layers[1].mlp.experts.register_forward_pre_hook(
        lambda module, inputs: chosen.append([each.detach() for each in inputs[:2]])
    )
    hooked(reference, IDS)
    [(x, experts)] = chosen
    with aprfmt.open(tmp_path) as model:
        entries = collect_imatrix(model, IDS, "ids").entries
    for role in ("ffn_gate_exps", "ffn_up_exps"):
        entry = entries[f"blk.1.{role}.weight"]
        for expert, sums in enumerate(entry.sums):
            rows = (experts == expert).any(-1)
            assert entry.counts[expert] == int(rows.sum())
            assert rel(sums, x[rows].double().square().sum(0).numpy()) < 1e-5
    assert entries["blk.1.ffn_down_exps.weight"].counts.sum() == experts.numel()
    assert entries["blk.1.ffn_gate_inp.weight"].counts == [len(IDS)]


def test_windows_are_whole_and_begin_with_bos(demo_model: Path) -> None:
    with aprfmt.open(demo_model) as model:
        size = int(model.hyper["context_length"])
        ids = [1, *range(2, 2 * size + 10)]
        found = collect_imatrix(model, [i % 200 for i in ids], "ids", prefix=1)
        by_hand = [
            collect_imatrix(model, [1, *(i % 200 for i in ids[at + 1 : at + size])], "ids")
            for at in (0, size)
        ]
        one = collect_imatrix(model, [i % 200 for i in ids], "ids", prefix=1, chunks=1)
    assert (found.chunks, found.chunk_size, one.chunks) == (2, size, 1)
    for name, entry in found.entries.items():
        np.testing.assert_array_equal(entry.counts, [2 * size])
        total = sum(each.entries[name].sums for each in by_hand)
        np.testing.assert_allclose(entry.sums, total, rtol=1e-12)
        np.testing.assert_array_equal(one.entries[name].sums, by_hand[0].entries[name].sums)


def test_what_is_kept_gives_the_same_bytes(demo_model: Path, tmp_path: Path) -> None:
    text, kept = tmp_path / "text.txt", tmp_path / "kept.gguf"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    made, again, plain = (tmp_path / f"{name}.gguf" for name in "abc")
    typed = ("--type", "Q4_K_M")
    done = command(
        "quantize", demo_model, made, *typed, "--calibrate", text, "--imatrix", kept, "--chunks", 1
    )
    assert done.code == 0, done.err
    entries = libgguf.load_imatrix(kept)
    file = gguf.GGUFReader(kept)
    assert file.fields["imatrix.datasets"].contents() == ["text.txt"]
    assert file.fields["imatrix.chunk_count"].contents() == 1
    sums = {each.name: np.array(each.data) for each in file.tensors}
    assert sums.keys() == {f"{name}{part}" for name in entries for part in (".in_sum2", ".counts")}
    for name, values in entries.items():
        mean = sums[f"{name}.in_sum2"].reshape(-1) / sums[f"{name}.counts"][0]
        np.testing.assert_allclose(values, mean, rtol=1e-6)
    assert command("quantize", demo_model, again, *typed, "--imatrix", kept).code == 0
    assert command("quantize", demo_model, plain, *typed).code == 0
    assert made.read_bytes() == again.read_bytes()
    with aprfmt.open(made) as weighed, aprfmt.open(plain) as unweighed:
        name = "blk.0.ffn_up.weight"
        assert weighed[name].raw() != unweighed[name].raw()
    refused = command("quantize", demo_model, made, *typed, "--calibrate", text, "--imatrix", kept)
    assert refused.code == 2
    assert "exists; leave --calibrate out to use it" in refused.err
    assert (
        "give --calibrate TEXT" in command("quantize", demo_model, made, *typed, "--chunks", 2).err
    )


@pytest.mark.parametrize("kept", [False, True])
def test_a_warning_names_the_text_that_was_measured(
    kept: bool, demo_model: Path, tmp_path: Path
) -> None:
    """It named a temporary file, which is gone when the warning is read."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.")
    more = ("--imatrix", tmp_path / "kept.gguf") if kept else ()
    out = tmp_path / "q.gguf"
    done = command(
        "quantize", demo_model, out, "--type", "Q4_K_M", "--calibrate", text, *more, "--json"
    )
    lines = [line for line in done.err.splitlines() if "imatrix_gaps" in line]
    assert len(lines) == 1 and "warning: importance matrix of text.txt: says nothing" in lines[0]
    assert tempfile.gettempdir() + "/aprfmt-" not in done.err + done.out


def test_a_text_without_tokens_is_refused(demo_model: Path) -> None:
    with aprfmt.open(demo_model) as model, pytest.raises(UsageError, match="1 tokens; expected a"):
        collect_imatrix(model, [1], "text.txt")


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_text_fills_a_window_or_is_refused(count: int, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with aprfmt.open(tmp_path) as model:
        if count < 3:  # llama.cpp's window leaves the first half without a label
            with pytest.raises(UsageError, match=f"^short.txt: {count} tokens; expected a text"):
                collect_imatrix(model, list(IDS[:count]), "short.txt")
            return
        found = collect_imatrix(model, list(IDS[:count]), "short.txt")
    assert (found.chunks, found.chunk_size) == (1, count)


def test_windows_that_are_done_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(importance, "CHUNK", 10)
    with aprfmt.open(tmp_path) as model:
        for chunks, count in ((None, 4), (3, 3), (9, 4)):
            told: list[tuple[int, int]] = []
            made = collect_imatrix(
                model, IDS, "ids", chunks=chunks, progress=lambda *row, told=told: told.append(row)
            )
            assert told == [(done, count) for done in range(1, count + 1)]
            assert (made.chunks, made.chunk_size) == (count, 10)
        for short in ([], IDS[:1]):
            with pytest.raises(UsageError, match=f"ids: {len(short)} tokens"):
                collect_imatrix(model, short, "ids")
