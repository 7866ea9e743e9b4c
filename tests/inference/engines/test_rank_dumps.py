"""Dumps of ranks and passes come back as one sequence's points, or as an error that names why."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.base.dump_names import parse_dump_path
from aprfmt.causes.forward.shards import ROLES as SUMS
from aprfmt.causes.forward.shards import role_of
from aprfmt.cli.trace.reference import reference_verdict
from aprfmt.codecs import native_kernels
from aprfmt.errors import FormatError
from aprfmt.inference.engines import captured_arrays, captures, stored_arrays
from aprfmt.inference.engines.dump_folders import Dump, Pass, read_dump
from aprfmt.inference.engines.dumps import _widths_by_name
from aprfmt.inference.engines.engine_modules import is_normed, under_module_names
from aprfmt.inference.engines.mapping import load_mapped
from aprfmt.inference.engines.rank_dims import Division, parse_dims
from aprfmt.inference.engines.rank_joining import (
    JoinedArray,
    PointWidths,
    lone_shares,
    may_be_summands,
)
from aprfmt.inference.engines.sequences import align
from aprfmt.inference.engines.tiles import Tiles
from aprfmt.inference.record import Record
from aprfmt.inference.trace import Trace
from aprfmt.measure.repeated_tokens import repeated_tokens
from aprfmt.measure.trace_view import unread_arrays
from aprfmt.measure.traces import compare_traces, rounding_ratios
from aprfmt.model import open_model
from aprfmt.tensors.stats import Stats, compute_stats
from tests.cli.run import aprfmt
from tests.diagnosis.engines import broken, tiny_folder
from tests.inference.engine_dumps import batch, columns, dumper, hook_passes, modules, rows, state
from tests.inference.engines.test_captures import npy, own
from tests.models import IDS

torch = pytest.importorskip("torch")
ALL = range(len(IDS))
WHOLE = batch(IDS, ALL, [len(IDS)])
Writer = Callable[[Path], Path]


@cache
def own_of(base: str = "llama") -> dict[str, Any]:
    """Return every point's value of a tiny model's pass, made once."""
    return own(base)


def written(base: str = "llama", **how: Any) -> dict[str, Any]:
    """Return what a tiny model's modules put out, of all tokens."""
    return modules(own(base, **how) if how else own_of(base))


def of_rank(rank: int, ranks: int) -> Callable[[str, Any], Any]:
    """Return what cuts a module's output to a tensor-parallel rank's."""
    return lambda name, value: columns(name, value, rank, ranks)


def tensor_parallel(folder: Path) -> Path:
    """SGLang's hook on two ranks, with a warm-up pass; logits of the last token alone."""
    for rank in range(2):
        found = state(written(), of_rank(rank, 2))
        found["logits_processor"] = found["logits_processor"][-1:]
        blank = {
            name: [0 * one for one in value] if isinstance(value, list) else 0 * value
            for name, value in found.items()
        }
        warm = batch([0] * len(IDS), ALL, [len(IDS)])
        hook_passes(folder / f"TP{rank}_PP0_Rank{rank}_pid{rank}", [(warm, blank), (WHOLE, found)])
    return folder


def shared_key_heads(folder: Path) -> Path:
    """vLLM's folder by rank: four ranks share two key heads; the first alone has the logits."""
    for rank in range(4):
        found = state(written(), of_rank(rank, 4))
        if rank:
            del found["logits_processor"]
        (folder / f"rank{rank}").mkdir(parents=True)
        torch.save({**WHOLE, **found}, folder / f"rank{rank}" / "Pass0.pt")
    return folder


def pipeline(folder: Path) -> Path:
    """Two stages of two ranks each."""
    for stage in range(2):
        for rank in range(2):
            found = {name: value for name, value in written().items() if _stage(name) == stage}
            place = folder / f"TP{rank}-PP{stage}"
            place.mkdir(parents=True)
            torch.save({**WHOLE, **state(found, of_rank(rank, 2))}, place / "Pass0.pt")
    return folder


def _stage(name: str) -> int:
    if name.startswith("model.layers."):
        return int(int(name.split(".")[2]) > 0)
    return int(name != "model.embed_tokens")


def sequence_parallel(folder: Path) -> Path:
    """Norms and sums hold a rank's tokens only."""

    def cut(rank: int) -> Callable[[str, Any], Any]:
        own_rows = np.array_split(np.arange(28), 2)[rank]
        return lambda name, value: (
            columns(name, value, rank, 2)
            if name.endswith(("qkv_proj", "attn", "gate_up_proj", "act_fn"))
            else value
            if "logits" in name
            else rows(value, own_rows)
        )

    for rank in range(2):
        found = {name: rows(value, range(28)) for name, value in written().items()}
        place = folder / f"tp_rank={rank}"
        place.mkdir(parents=True)
        torch.save(
            {**batch(IDS[:28], range(28), [28]), **state(found, cut(rank))}, place / "Pass1.pt"
        )
    return folder


def context_parallel(folder: Path) -> Path:
    """Each rank holds two chunks, from both ends, with their positions."""
    chunks = np.array_split(np.arange(28), 4)
    for rank in range(2):
        mine = np.concatenate([chunks[rank], chunks[3 - rank]])
        found = {name: rows(value, mine) for name, value in written().items()}
        place = folder / f"CP{rank}"
        place.mkdir(parents=True)
        said = {
            "input_ids": torch.tensor([IDS[at] for at in mine]),
            "positions": torch.tensor(mine),
        }
        torch.save({**said, **state(found)}, place / "Pass0.pt")
    return folder


def data_parallel(folder: Path) -> Path:
    """Two ranks with requests of their own; one of them has ours."""
    for rank in range(2):
        ids = list(IDS) if rank else [7] * len(IDS)
        place = folder / f"DP{rank}"
        place.mkdir(parents=True)
        found = {
            name: rows(value, ALL) if rank else rows(value, [3] * len(IDS))
            for name, value in written().items()
        }
        torch.save({**batch(ids, ALL, [len(IDS)]), **state(found)}, place / "Pass0.pt")
    return folder


def expert_parallel(folder: Path) -> Path:
    """Experts of two ranks: each has a share of the sum, taken before the all-reduce."""
    return two_expert_ranks(folder, written("mixtral"))


def two_expert_ranks(folder: Path, found: dict[str, Any]) -> Path:
    """Write a mixtral's outputs as two expert-parallel ranks: each has a share of the sum."""
    for rank in range(2):

        def share(name: str, value: Any, rank: int = rank) -> Any:
            if not name.endswith("experts"):
                return value
            part = np.where(np.arange(value.shape[1]) % 3 == 0, 0.25, 0.75).astype(np.float32)
            return value * part if rank else value - value * part

        place = folder / f"ep_rank_{rank}"
        place.mkdir(parents=True)
        torch.save({**WHOLE, **state(found, share)}, place / "Pass0.pt")
    return folder


DIMS = {"t h[tp]": ("self_attn.attn", "mlp.act_fn"), "t h": ("o_proj", "down_proj", "embed_tokens")}


def dims(folder: Path) -> Path:
    """SGLang's dumper with dims: names say less than these."""
    for rank in range(2):
        ends = ("attn", "act_fn", "o_proj", "down_proj", "embed_tokens")
        found = {name: value for name, value in written().items() if name.endswith(ends)}
        said = {
            name: text
            for name in found
            for text, own_ends in DIMS.items()
            if name.endswith(own_ends)
        }
        dumper(
            folder, 3, rank, state(found, of_rank(rank, 2)), said, {"tp_rank": rank, "tp_size": 2}
        )
        info = {"input_ids": torch.tensor(IDS), "positions": torch.arange(len(IDS))}
        dumper(folder, 3, rank, info, {}, {"tp_rank": rank, "tp_size": 2})
    return folder


def spec(folder: Path) -> Path:
    """Plain .npy by rank under names of nobody; `ranks.json` says how they are divided."""
    right = own_of()
    for rank in range(2):
        arrays = {f"L{n}.attn": np.split(right[f"L{n}.attn"], 2, 1)[rank] for n in range(3)}
        arrays |= {f"L{n}.out": right[f"L{n}.out"] for n in range(3)}
        folder.mkdir(exist_ok=True)
        npy(folder / f"rank{rank}", arrays)
    (folder / "ranks.json").write_text(json.dumps({"arrays": {"*.attn": "t (h*d)[rank]"}}))
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


LAYOUTS: dict[str, tuple[Writer, str, int]] = {
    # how ranks divide the work -> who writes it, the model, the tokens that are there
    "tensor": (tensor_parallel, "llama", 29),
    "shared key heads": (shared_key_heads, "llama", 29),
    "pipeline": (pipeline, "llama", 29),
    "sequence": (sequence_parallel, "llama", 28),
    "context": (context_parallel, "llama", 28),
    "data": (data_parallel, "llama", 29),
    "expert": (expert_parallel, "mixtral", 29),
    "dims": (dims, "llama", 29),
    "spec": (spec, "llama", 29),
}


@contextmanager
def opened(folder: Path, base: str = "llama", tokens: int = 29) -> Iterator[Trace]:
    """Open a dump as a trace of a tiny model."""
    with open_model(tiny_folder(base)) as model:
        with load_mapped(folder, IDS[:tokens], model) as trace:
            yield trace


def equal_points(trace: Trace, right: dict[str, Any], tokens: int) -> set[str]:
    """Return the points that a trace has, all of them equal to the model's own."""
    found = set()
    for key, value in right.items():
        record, mine = trace.find_record(key), trace.recorded_values(key)
        if record is None or mine is None or key.endswith(("scores", "probs")):
            continue
        wanted = value[:tokens][list(record.positions or range(tokens))]
        np.testing.assert_allclose(mine.reshape(wanted.shape), wanted, 1e-5, 1e-5, err_msg=key)
        found.add(key.rpartition(".")[2])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_come_together(layout: str, tmp_path: Path) -> None:
    write, base, tokens = LAYOUTS[layout]
    with opened(write(tmp_path / "d"), base, tokens) as trace:
        found = equal_points(trace, own_of(base), tokens)
        assert not trace.run["unknown"], trace.run["unknown"]
    assert {"attn", "out" if layout == "spec" else "attn_out"} <= found
    if layout not in ("dims", "spec"):
        assert {"q", "k", "v", "mid", "out", "final_norm", "logits"} <= found
        assert {"moe_out"} <= found if base == "mixtral" else {"ffn_gate", "ffn_up"} <= found


# How outputs of layers are called by the layer's number -> the name of layer n's.
NUMBERED: dict[str, Callable[[int], str]] = {
    "layers": lambda n: f"model.layers.{n}",
    "h": lambda n: f"transformer.h.{n}",
    "hidden_states": lambda n: f"hidden_states.{n + 1}",
}


def _in_passes(folder: Path, found: dict[str, Any]) -> None:
    _made(folder)
    torch.save({"input_ids": torch.tensor(IDS), **found}, folder / "Pass0.pt")


def _in_ranks(folder: Path, found: dict[str, Any]) -> None:
    for rank in range(2):
        _in_passes(folder / f"rank{rank}", found)


def _in_files_of_ranks(folder: Path, found: dict[str, Any]) -> None:
    for rank in range(2):
        arrays = {name: value.numpy() for name, value in found.items()}
        npy(_made(folder / f"rank{rank}") / "x", {**arrays, "input_ids": np.array(IDS)})


def _in_dumper_files(folder: Path, found: dict[str, Any]) -> None:
    for rank in range(2):
        for at, (name, value) in enumerate({"input_ids": torch.tensor(IDS), **found}.items()):
            held = {"value": value, "meta": {"dims": "t" if name == "input_ids" else "t h"}}
            file = f"step=0___rank={rank}___dump_index={at}___name={name}.pt"
            folder.mkdir(exist_ok=True)
            torch.save(held, folder / file)


IN_FILES = [_in_passes, _in_ranks, _in_files_of_ranks, _in_dumper_files]


@pytest.mark.parametrize("write", IN_FILES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("names", NUMBERED)
@pytest.mark.parametrize("layers", [(0, 1), (0,), (1,)])
def test_numbered_layers_are_no_summands(
    names: str,
    write: Callable[[Path, dict[str, Any]], None],
    layers: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """Outputs of layers 0 and 1 are two points, and no (hidden, residual) of one module."""
    called = NUMBERED[names]
    write(tmp_path / "d", {called(n): torch.tensor(own_of()[f"L{n}.out"]) for n in layers})
    with open_model(tiny_folder("llama")) as model:
        with load_mapped(tmp_path / "d", IDS, model) as trace:
            assert equal_points(trace, own_of(), 29) == {"out"}
            assert set(trace.records) == {f"L{n}.out" for n in layers}
            assert not trace.run["unknown"]


@pytest.mark.parametrize("write", IN_FILES, ids=lambda one: one.__name__)
def test_the_first_two_hidden_states_are_no_summands(
    write: Callable[[Path, dict[str, Any]], None], tmp_path: Path
) -> None:
    """They are numbered as what one module returned is: the embedding, and layer 0's output."""
    own = own_of()
    write(tmp_path / "d", {
        f"hidden_states.{i}": torch.tensor(own[key]) for i, key in enumerate(("embd", "L0.out"))
    })  # fmt: skip
    with opened(tmp_path / "d") as trace:
        assert set(trace.records) == {"embd", "L0.out"}
        assert equal_points(trace, own, 29) == {"embd", "out"}


def test_a_norm_of_any_name_gives_the_stream_beside_its_result(tmp_path: Path) -> None:
    """`norm_f` and `ln_f` are no layers, whose two results would be added up."""
    for name in ("model.norm", "backbone.norm_f", "transformer.ln_f"):
        folder = tmp_path / name
        pair = [torch.tensor(own_of()[key]) for key in ("final_norm", "L2.out")]
        _in_passes(folder, {name: pair})
        with opened(folder) as trace:
            assert equal_points(trace, own_of(), 29) == {"final_norm"}, name


@pytest.mark.parametrize("write", [_in_passes, _in_ranks], ids=lambda one: one.__name__)
def test_two_results_of_an_attention_are_no_summands(
    write: Callable[[Path, dict[str, Any]], None], tmp_path: Path
) -> None:
    """The second has the first's shape and is no residual, as of no other module's."""
    found = own_of()
    pair = [torch.tensor(found[key]) for key in ("L1.attn_out", "L1.out")]
    write(tmp_path / "d", {"model.layers.1.self_attn": pair})
    with opened(tmp_path / "d") as trace:
        assert equal_points(trace, found, 29) == {"attn_out"}
        assert list(trace.run["unknown"]) == ["model.layers.1.self_attn.1"]


def test_the_first_of_an_attentions_results_is_its_output(tmp_path: Path) -> None:
    """Its weights are beside it; modules below it were dumped, too."""
    found = own_of()
    weights = torch.zeros(29, 29)
    _in_ranks(
        tmp_path / "d",
        {
            "model.layers.1.self_attn": [torch.tensor(found["L1.attn_out"]), weights],
            "model.layers.1.self_attn.o_proj": torch.tensor(found["L1.attn_out"]),
            "model.layers.1": [torch.tensor(found["L1.out"])],
        },
    )
    with opened(tmp_path / "d") as trace:
        assert equal_points(trace, found, 29) == {"attn_out", "out"}
        assert list(trace.run["unknown"]) == ["model.layers.1.self_attn.1"]


def embedding_of_ranks(folder: Path, *values: Any) -> Path:
    """Each rank's embedding and nothing else, as SGLang's hook writes it."""
    for rank, held in enumerate(values):
        place = folder / f"TP{rank}_PP0_Rank{rank}_pid{rank}"
        hook_passes(place, [(WHOLE, {"model.embed_tokens": torch.as_tensor(held)})])
    return folder


def test_same_says_which_points_are_absent(tmp_path: Path) -> None:
    value = own_of()["embd"]
    folder = embedding_of_ranks(tmp_path / "d", value, value)
    done = aprfmt("diagnose", str(tiny_folder("llama")), str(folder), "--json")
    assert done.json["verdict"] == "same"
    assert "points are not in the trace: L0.attn_norm" in done.json["sentence"]


def test_nan_on_one_rank_is_said(tmp_path: Path) -> None:
    value = own_of()["embd"]
    wrong = np.array(value)
    wrong[1, 0] = np.nan
    with opened(embedding_of_ranks(tmp_path / "d", value, wrong)) as trace:
        dump: Any = trace.run["dump"]
    assert "NaN or infinity on one of them" in dump["unequal"][0]["says"]


@pytest.mark.parametrize("layout", ["tensor", "expert", "dims"])
def test_values_are_read_from_the_dump_again(layout: str, tmp_path: Path) -> None:
    """Nothing is copied to a temporary file, and what is fetched is what was counted."""
    write, base, tokens = LAYOUTS[layout]
    write(tmp_path / "d")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", None)
        with opened(tmp_path / "d", base, tokens) as trace:
            assert trace.records
            for key, record in trace.records.items():
                values = trace.fetch(key)
                assert values is not None and values.shape == record.shape
                assert compute_stats(values) == record.stats, key
                assert trace.fetch("no.such") is None


def decode(folder: Path) -> Path:
    """A prompt, then one token a pass."""
    cuts = [(0, 25), (25, 26), (26, 27), (27, 28), (28, 29)]
    return hook_passes(
        folder / "TP0_PP0_Rank0_pid1",
        [
            (batch(IDS[a:b], range(a, b), [b]), _logits_of_last(rows_of(range(a, b))))
            for a, b in cuts
        ],
    ).parent


def rows_of(chosen: Any) -> dict[str, Any]:
    """Return modules' outputs of some tokens."""
    return {name: rows(value, list(chosen)) for name, value in written().items()}


def _logits_of_last(found: dict[str, Any]) -> dict[str, Any]:
    made = state(found)
    made["logits_processor"] = made["logits_processor"][-1:]
    return made


def chunked(folder: Path) -> Path:
    """A prompt in three chunks, the last padded to a size of a graph."""
    made = []
    for a, b, pad in ((0, 10, 0), (10, 20, 0), (20, 29, 7)):
        found = state(
            {name: rows(value, [*range(a, b), *[0] * pad]) for name, value in written().items()}
        )
        ids, at = [*IDS[a:b], *[0] * pad], [*range(a, b), *[0] * pad]
        said = {
            "input_ids": torch.tensor(ids),
            "positions": torch.tensor(at),
            "query_start_loc": torch.tensor([0, b - a]),
        }
        made.append((said, found))
    folder.mkdir()
    for number, (said, found) in enumerate(made):
        torch.save({**said, **found}, folder / f"Pass{number}.pt")
    return folder


def continuous(folder: Path) -> Path:
    """Two requests in one batch by name, the second joining later and standing first."""
    folder.mkdir()
    passes = [
        ([("a", range(20))], "query_start_loc"),
        ([("b", range(5)), ("a", range(20, 28))], "query_start_loc"),
        ([("b", range(5, 6)), ("a", range(28, 29))], "query_start_loc"),
    ]
    for number, (requests, key) in enumerate(passes):
        at = [one for _, own_rows in requests for one in own_rows]
        ids = [IDS[one] if who == "a" else 9 for who, own_rows in requests for one in own_rows]
        found = {
            name: rows(
                value, [one if ids[i] != 9 or IDS[one] == 9 else 0 for i, one in enumerate(at)]
            )
            for name, value in written().items()
        }
        starts = np.cumsum([0, *(len(own_rows) for _, own_rows in requests)])
        said = {
            "input_ids": torch.tensor(ids),
            "positions": torch.tensor(at),
            key: torch.tensor(starts),
            "req_ids": [who for who, _ in requests],
        }
        torch.save({**said, **state(found)}, folder / f"Pass{number}.pt")
    return folder


def padded(folder: Path) -> Path:
    """transformers' batch of two, padded on the left, with its mask."""
    own_rows, other = np.arange(29), np.array([0] * 9 + list(range(20)))
    ids = np.array([IDS, [0] * 9 + [5] * 20])
    mask = np.array([[1] * 29, [0] * 9 + [1] * 20])
    arrays = {
        name: np.stack([value[own_rows], value[other]])
        for name, value in (
            (f"L{n}.{point}", own_of()[f"L{n}.{point}"])
            for n in range(3)
            for point in ("attn_out", "out")
        )
    }
    return npy(
        folder,
        {**arrays, "input_ids": ids[::-1], "attention_mask": mask[::-1]}
        | {name: value[::-1] for name, value in arrays.items()},
    )


def counted(folder: Path) -> Path:
    """A prompt padded on the left, then one token; positions count the hidden rows, too."""
    names = [f"L{n}.{point}" for n in range(3) for point in ("attn_out", "out")]
    rows = np.array([0] * 4 + list(range(28)))
    prompt = {name: own_of()[name][rows][None] for name in names}
    last = {name: own_of()[name][28:][None] for name in names}
    said = {
        "input_ids": np.array([[0] * 4 + list(IDS[:28])]),
        "attention_mask": np.array([[0] * 4 + [1] * 28]),
        "position_ids": np.arange(32)[None],
    }
    npy(_made(folder) / "step_0", {**prompt, **said})
    after = {"input_ids": np.array([IDS[28:]]), "position_ids": np.array([[32]])}
    return npy(folder / "step_1", {**last, **after}).parent


def packed(folder: Path) -> Path:
    """Two sequences behind one another, ours the second, told by positions alone."""
    order = [*range(6), *ALL]
    arrays = {f"L{n}.out": own_of()[f"L{n}.out"][order][None] for n in range(3)}
    return npy(
        folder,
        {**arrays, "input_ids": np.array([[8] * 6 + list(IDS)]), "position_ids": np.array([order])},
    )


def lengths(folder: Path) -> Path:
    """The same by cu_seqlens."""
    made = packed(folder)
    (made / "position_ids.npy").unlink()
    np.save(made / "cu_seqlens.npy", np.array([0, 6, 35]))
    return made


def of_llama_cpp(folder: Path) -> Path:
    """The same with llama.cpp's names of the ids and the positions."""
    made = packed(folder)
    for name, other in (("input_ids", "inp_tokens"), ("position_ids", "inp_pos")):
        (made / f"{name}.npy").rename(made / f"{other}.npy")
    return made


STEPS: dict[str, Writer] = {
    "llama.cpp's names": of_llama_cpp,
    "decode": decode,
    "chunked": chunked,
    "continuous": continuous,
    "padded": padded,
    "counted": counted,
    "packed": packed,
    "lengths": lengths,
}


DOWN = "model.layers.1.mlp.down_proj"


# What rank 1 holds of a product, given rank 0's -> whether ranks that hold so may be added up.
SECONDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "factor": (lambda x: 1.5 * x, False),
    "negated": (lambda x: -x, False),
    "zeros": (lambda x: 0 * x, False),
    "not finite": (lambda x: np.where(np.arange(x.shape[-1]) == 2, np.nan, x), False),
    "most rows": (lambda x: x + (np.arange(len(x)) < 5)[:, None], False),
    "another product": (lambda x: np.roll(x, 1, 0)[:, ::-1].copy(), True),
    "one row alike": (
        lambda x: np.where(np.arange(len(x))[:, None] == 0, x, np.roll(x, 1, 0)[:, ::-1]), True
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SECONDS)
def test_only_products_are_added_up(kind: str, tmp_path: Path) -> None:
    """A rank whose buffer is another after the all-reduce is said, and its values are not added."""
    change, summed = SECONDS[kind]
    for rank in range(2):
        found = state(written(), of_rank(rank, 2))
        if rank:
            found[DOWN] = torch.tensor(np.asarray(change(np.asarray(found[DOWN])), np.float32))
        hook_passes(tmp_path / "d" / f"TP{rank}_PP0_Rank{rank}_pid{rank}", [(WHOLE, found)])
    with opened(tmp_path / "d") as trace:
        assert bool(trace.run["dump"]["unequal"]) != summed
        held = np.asarray(trace.recorded_values("L1.ffn_out"))
        assert np.allclose(held, own_of()["L1.ffn_out"], 1e-5, 1e-5) != summed


@pytest.mark.parametrize("point, summed", [("moe_out", True), ("embd", True), ("ffn_out", False)])
def test_a_rank_may_have_no_expert_and_no_row_of_the_vocabulary(point: str, summed: bool) -> None:
    held = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    ranks = [
        JoinedArray("x", held.shape, "float32", read) for read in (lambda: held, lambda: 0 * held)
    ]
    assert may_be_summands(ranks, point) == summed


# Dumps by names of modules, whose rows follow one another in every pass.
BY_BLOCKS = (
    "tensor", "shared key heads", "pipeline", "sequence", "data", "expert", "dims",
    "decode", "chunked", "continuous",
)  # fmt: skip


def in_dtype(folder: Path, dtype: str) -> None:
    """Store the floats of every .pt file below a folder as another dtype."""
    for path in folder.rglob("*.pt"):
        held = torch.load(path, weights_only=True)
        torch.save(_cast(held, getattr(torch, dtype)), path)


def _cast(held: Any, dtype: Any) -> Any:
    if isinstance(held, dict):
        return {name: _cast(value, dtype) for name, value in held.items()}
    if isinstance(held, list | tuple):
        return type(held)(_cast(value, dtype) for value in held)
    floats = isinstance(held, torch.Tensor) and held.is_floating_point()
    return held.to(dtype) if floats else held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", [*LAYOUTS, *STEPS])
def test_blocks_give_what_whole_arrays_give(
    form: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, base, tokens = LAYOUTS.get(form) or (STEPS[form], "llama", 29)
    folder = write(tmp_path / "d")
    in_dtype(folder, dtype)
    found: list[Any] = []
    counted: list[Tiles] = []
    stats = Tiles.stats

    def count(one: Tiles) -> Stats:
        counted.append(one)
        return stats(one)

    monkeypatch.setattr(Tiles, "stats", count)
    for encodings, first in (
        (stored_arrays._SINGLE, "values"),
        (stored_arrays._SINGLE, "statistics"),
        ((), ""),
    ):
        monkeypatch.setattr(stored_arrays, "_SINGLE", encodings)
        with opened(folder, base, tokens) as trace:
            if first == "statistics":
                assert not counted or native_kernels() is None  # values have brought theirs
                assert trace.nonfinite is None
            values = {key: trace.fetch(key) for key in trace.records}
            said = dict(trace.records), trace.run["unknown"], trace.run["dump"]
            assert all(record.stats is not None for record in trace.records.values())
            found.append((*said, values))
    (*said_by_blocks, held), (*said_again, _), (*expected, wanted) = found
    assert said_by_blocks == said_again == expected
    assert held.keys() == wanted.keys()
    for key, value in wanted.items():
        assert held[key].dtype == value.dtype and held[key].shape == value.shape, key
        assert held[key].tobytes() == value.tobytes(), key
    assert bool(counted) == (form in BY_BLOCKS)


def _flat(held: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a module's outputs, of which one may have several."""
    found: dict[str, Any] = {}
    for name, value in held.items():
        parts = value if isinstance(value, list) else [value]
        found |= {f"{name}.{at}" if len(parts) > 1 else name: one for at, one in enumerate(parts)}
    return found


def _as_dumped(place: Path, held: dict[str, Any], rank: int) -> None:
    meta = {"sglang_parallel_info": {"tp_rank": rank, "tp_size": 2}}
    for at, (name, value) in enumerate(held.items()):
        said = {"value": value, "meta": {"name": name, "rank": rank, "step": 0, **meta}}
        torch.save(said, place / f"step=0___rank={rank}___dump_index={at}___name={name}.pt")


def _as_tensors(place: Path, held: dict[str, Any], rank: int) -> None:
    for name, value in held.items():
        torch.save(value, place / f"{name}.pt")


def _as_npy(place: Path, held: dict[str, Any], rank: int) -> None:
    for name, value in held.items():
        np.save(place / f"{name}.npy", value.numpy())


# A file for each array, in the forms that have one.
ONE_EACH: dict[str, Callable[[Path, dict[str, Any], int], None]] = {
    "dumper": _as_dumped, "tensors": _as_tensors, "npy": _as_npy,
}  # fmt: skip


@pytest.mark.parametrize("open_files", [1, 3, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ONE_EACH)
def test_a_file_for_each_array_gives_what_one_file_gives(
    form: str, dtype: str, open_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, statistics and a comparison to the bit; each file is described once."""
    monkeypatch.setattr(stored_arrays.FilePool, "MOST", open_files)
    described: list[Path] = []
    read_file = captures.read_array_file

    def describe(path: Path, stack: ExitStack) -> captures.Captures:
        described.append(path)
        return read_file(path, stack)

    monkeypatch.setattr(captured_arrays, "read_array_file", describe)
    one, each = tmp_path / "one", tmp_path / "each"
    for rank in range(2):
        name = f"TP{rank}_PP0_Rank{rank}_pid{rank}"
        held = _flat(_cast({**WHOLE, **state(written(), of_rank(rank, 2))}, getattr(torch, dtype)))
        torch.save(held, _made(one / name) / "Pass00000.pt")
        ONE_EACH[form](_made(each / name), held, rank)
    found = []
    for folder in (one, each):
        with opened(folder) as trace, opened(one) as reference:
            stats = {key: repr(record.stats) for key, record in trace.records.items()}
            values = {key: np.asarray(trace.fetch(key)) for key in trace.records}
            points = [repr(point) for point in compare_traces(trace, reference).points]
            found.append((stats, {key: x.tobytes() for key, x in values.items()}, points))
        again = [path for path in described if path.is_relative_to(each)]
        assert len(again) == len(set(again))
    assert found[0] == found[1] and len(found[0][2]) > 40


@pytest.mark.parametrize("form", ONE_EACH)
def test_a_file_that_was_replaced_since_it_was_described_is_an_error(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_arrays.FilePool, "MOST", 1)
    for rank in range(2):
        place = _made(tmp_path / "d" / f"TP{rank}_PP0_Rank{rank}_pid{rank}")
        ONE_EACH[form](place, _flat({**WHOLE, **state(written(), of_rank(rank, 2))}), rank)
    with opened(tmp_path / "d") as trace:
        for path in list(tmp_path.rglob("*down_proj*")):
            other = path.with_name("other")
            other.write_bytes(path.read_bytes())
            other.replace(path)
        with pytest.raises(FormatError, match="changed while it was read"):
            trace.fetch("L0.ffn_out")


@pytest.mark.parametrize("form", STEPS)
def test_passes_are_aligned_by_token(form: str, tmp_path: Path) -> None:
    with opened(STEPS[form](tmp_path / "d")) as trace:
        found = equal_points(trace, own_of(), 29)
        assert not trace.run["unknown"] and list(trace.run["ids"]) == list(IDS)
        record = trace.find_record("L2.out")
        assert record is not None and record.positions == tuple(ALL)
        if form == "decode":
            assert trace.run["dump"]["steps"] == [0] * 25 + [1, 2, 3, 4]
    assert "out" in found


def of_passes(folder: Path, *spans: tuple[int, int], again: float = 1.0) -> Path:
    """SGLang's hook, a pass for each span of positions; the last one's values are `again` times."""
    passes = []
    for number, (first, last) in enumerate(spans):
        own = range(first, last)
        times = again if number == len(spans) - 1 else 1.0
        held = {
            name: [one * times for one in value] if isinstance(value, list) else value * times
            for name, value in state(
                {name: rows(value, own) for name, value in written().items()}
            ).items()
        }
        passes.append((batch([IDS[at] for at in own], own, [last]), held))
    hook_passes(folder / "TP0_PP0_Rank0_pid0", passes)
    return folder


@pytest.mark.parametrize(
    "spans, says",
    [
        ([(0, 28), (28, 29), (27, 28)], ("pass 2", "holds tokens 27 to 27 of this sequence once")),
        ([(0, 29), (0, 20)], ("pass 1", "holds tokens 0 to 19 of this sequence once more")),
        ([(0, 28), (28, 29)], None),
    ],
)
def test_tokens_that_a_dump_has_twice_are_not_passed_over(
    spans: list[tuple[int, int]], says: tuple[str, str] | None, tmp_path: Path
) -> None:
    """The second values are other ones: the dump is not the same without a word."""
    again = 2.0 if says else 1.0
    with opened(of_passes(tmp_path / "d", *spans, again=again)) as trace:
        equal_points(trace, own_of(), 29)
        unknown = trace.run["unknown"]
        assert list(unknown) == ([says[0]] if says else [])
        assert says is None or says[1] in unknown[says[0]]


OTHER = [5, 6] * 10  # the tokens of another request


def _two_rows(
    folder: Path, side: str, *, places: bool = False, pad: int = 0, other: Sequence[int] = OTHER
) -> Path:
    """A padded batch of two rows, ours of 29 tokens and one of 20; lengths alone say so."""
    rows = [*range(20), *[3] * 9] if side == "right" else [*[3] * 9, *range(20)]
    ids = [*other, *[pad] * 9] if side == "right" else [*[pad] * 9, *other]
    at = [*range(20), *[0] * 9] if side == "right" else [*[0] * 9, *range(20)]
    arrays = {name: np.stack([own_of()[name], own_of()[name][rows]]) for name in STREAM}
    said: dict[str, Any] = {"input_ids": np.array([IDS, ids]), "seq_lens": np.array([29, 20])}
    if places:
        said["position_ids"] = np.array([list(ALL), at])
    return npy(folder, {**arrays, **said})


def _one_row(folder: Path, *, places: bool = False) -> Path:
    """A prompt in a graph of 32 rows, of which its length says 29."""
    rows = [*ALL, 3, 3, 3]
    arrays = {name: own_of()[name][rows] for name in STREAM}
    said: dict[str, Any] = {"input_ids": np.array([*IDS, 0, 0, 0]), "seq_lens": np.array([29])}
    if places:
        said["positions"] = np.array([*ALL, 0, 0, 0])
    return npy(folder, {**arrays, **said})


def _decoded_in_a_graph(folder: Path) -> Path:
    """A prompt, then a decode step in a graph of four rows, of which one is the request's."""
    _made(folder)
    for number, (span, pad) in enumerate(((range(28), 0), (range(28, 29), 3))):
        rows_held = [*span, *[3] * pad]
        said = batch([*(IDS[at] for at in span), *[0] * pad], [*span, *[0] * pad], [span.stop])
        torch.save({**said, **state(rows_of(rows_held))}, folder / f"Pass{number}.pt")
    return folder


PADDED: dict[str, Writer] = {
    "right": lambda folder: _two_rows(folder, "right"),
    "left": lambda folder: _two_rows(folder, "left"),
    "left, an id of its own": lambda folder: _two_rows(folder, "left", pad=90),
    "right, by positions": lambda folder: _two_rows(folder, "right", places=True, pad=6),
    "one row": _one_row,
    "one row, positions": lambda folder: _one_row(folder, places=True),
    "decode": _decoded_in_a_graph,
}


@pytest.mark.parametrize("form", PADDED)
def test_lengths_alone_say_which_rows_are_padding(form: str, tmp_path: Path) -> None:
    folder = PADDED[form](tmp_path / "d")
    with opened(folder) as trace:
        assert "out" in equal_points(trace, own_of(), 29)
        assert list(trace.run["ids"]) == list(IDS) and not trace.run["unknown"]
        others = trace.run["dump"]["others"]
    assert others == ([OTHER] if form.startswith(("left", "right")) else [])


def _without_padding_rows(folder: Path, side: str, rows: str) -> Path:
    """Write a padded batch whose arrays hold no rows of padding: `rows` flat, or of columns."""
    shown = {"one": 1, "flat": 2, "columns": 2}[rows]
    lengths, width = (29, 20)[:shown], 29 if rows == "flat" else 35
    texts = (list(IDS), OTHER)[:shown]
    ids, mask = np.zeros((shown, width), np.int64), np.zeros((shown, width), np.int64)
    for row, (text, count) in enumerate(zip(texts, lengths, strict=True)):
        places = slice(0, count) if side == "right" else slice(width - count, width)
        ids[row, places], mask[row, places] = text, 1
    arrays = {}
    for name in STREAM:
        values = own_of()[name]
        if rows == "columns":
            held = np.zeros((2, 29, *values.shape[1:]), values.dtype)
            held[0] = values
            held[1, slice(0, 20) if side == "right" else slice(9, 29)] = values[:20]
        else:
            held = np.concatenate([values[:count] for count in lengths])
            held = held[None] if rows == "one" else held
        arrays[name] = held
    return npy(folder, {**arrays, "input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rows", ["one", "flat", "columns"])
def test_rows_of_padding_may_be_cut_from_arrays(rows: str, side: str, tmp_path: Path) -> None:
    """Seen red: no point of the two has values on the same rows."""
    folder = _without_padding_rows(tmp_path / "d", side, rows)
    with opened(folder) as trace:
        assert "out" in equal_points(trace, own_of(), 29)
        assert list(trace.run["ids"]) == list(IDS) and not trace.run["unknown"]


def test_rows_that_no_mask_leaves_are_not_read(tmp_path: Path) -> None:
    """One row more than the mask leaves, and columns that do not follow each other."""
    folder = _without_padding_rows(tmp_path / "d", "right", "one")
    mask = np.load(folder / "attention_mask.npy")
    mask[0, 28] = 0
    np.save(folder / "attention_mask.npy", mask)
    with opened(folder, tokens=28) as trace:
        assert set(STREAM) <= set(trace.run["unknown"])


def test_padding_on_an_unknown_side_is_refused(tmp_path: Path) -> None:
    """Ids that are all one number are padded on either side, and other ones on none."""
    folder = _two_rows(tmp_path / "d", "right", pad=5, other=[5] * 20)
    says = r"rows of 29 tokens have \[29, 20\], .* on which side they are padded; save"
    with pytest.raises(FormatError, match=says), opened(folder):
        pass
    ids = np.load(folder / "input_ids.npy")
    ids[1] = range(29)
    np.save(folder / "input_ids.npy", ids)
    with pytest.raises(FormatError, match=says), opened(folder):
        pass


STREAM = tuple(f"L{n}.{point}" for n in range(3) for point in ("attn_out", "out"))


def twice(folder: Path, form: str, change: Callable[[str, Any], Any]) -> Path:
    """Write the prompt twice into one dump, the second time with changed rows."""
    first = {name: own_of()[name] for name in STREAM}
    second = {name: change(name, value.copy()) for name, value in first.items()}
    both = np.array([IDS, IDS])
    if form == "padded batch":
        arrays = {name: np.stack([first[name], second[name]]) for name in STREAM}
        return npy(folder, {**arrays, "input_ids": both})
    if form == "packed":
        arrays = {name: np.concatenate([first[name], second[name]]) for name in STREAM}
        said = {"input_ids": both.reshape(-1), "cu_seqlens": np.array([0, 29, 58])}
        return npy(folder, {**arrays, **said})
    said = {"input_ids": np.array(IDS), "position_ids": np.arange(29)}
    _made(folder)
    if form == "two passes":
        npy(folder / "step_0", {**first, **said})
        return npy(folder / "step_1", {**second, **said}).parent
    # The second request gets another token after the prompt.
    names = {"req_ids": ["a", "b"]}
    cut = {name: np.concatenate([first[name][:28], second[name][:28]]) for name in STREAM}
    last = {name: np.stack([first[name][28], second[name][3]]) for name in STREAM}
    ids, tails = [*IDS[:28], *IDS[:28]], [IDS[28], 7]
    for number, (held, tokens, at, starts) in enumerate(
        ((cut, ids, [*range(28), *range(28)], [0, 28, 56]), (last, tails, [28, 28], [0, 1, 2]))
    ):
        lists: dict[str, Any] = {"input_ids": tokens, "positions": at, "query_start_loc": starts}
        made = {name: torch.tensor(np.array(value)) for name, value in {**held, **lists}.items()}
        torch.save({**made, **names}, folder / f"Pass{number}.pt")
    return folder


TWICE = ("padded batch", "packed", "two passes", "answers part")


@pytest.mark.parametrize("form", TWICE)
def test_the_same_tokens_twice_in_a_dump_are_compared(form: str, tmp_path: Path) -> None:
    """Equal to the bit; another value within tolerance; another value beyond it."""

    def at(factor: float) -> Callable[[str, Any], Any]:
        def change(name: str, value: Any) -> Any:
            value[11, 5] *= factor if name == "L1.out" else 1.0
            return value

        return change

    ids = ("--ids", ",".join(map(str, IDS)))
    for number, (factor, says, exact, plain) in enumerate(
        ((1.0, "every value of 6 points is equal", 0, 0),
         (1 + 3e-7, "values differ within tolerance at 1 of 6 points, first at L1.out", 1, 0),
         (2.0, "values differ beyond tolerance at 1 of 6 points, first at L1.out", 1, 1))
    ):  # fmt: skip
        folder = twice(tmp_path / str(number), form, at(factor))
        tokens = 28 if form == "answers part" else 29
        with opened(folder) as trace:
            (found,) = repeated_tokens(trace)
            assert says in found.says and f"the same {tokens} tokens" in found.says
            assert found.differs(True) == bool(exact) and found.differs(False) == bool(plain)
            assert not trace.run["unknown"]
        for more, code in (((), plain), (("--exact",), exact)):
            done = aprfmt("trace", tiny_folder("llama"), "--map", folder, *ids, *more)
            assert done.code == code and says in done.out, done.out
        done = aprfmt("diagnose", tiny_folder("llama"), folder, *ids, "--json")
        causes = [one["cause"] for one in done.json["causes"]]
        assert causes == ["requests_differ"] * plain, done.out
        assert any(says in one["says"] for one in done.json["evidence"])


def test_requests_with_other_tokens_are_not_paired(tmp_path: Path) -> None:
    """One first token is common to all requests, and is no prompt; exact needs two requests."""
    folder = packed(tmp_path / "d")
    ids = np.load(folder / "input_ids.npy")
    ids[0, 0] = IDS[0]
    np.save(folder / "input_ids.npy", ids)
    with opened(folder) as trace:
        assert not repeated_tokens(trace)
    asked = ("--map", folder, "--ids", ",".join(map(str, IDS)), "--exact")
    done = aprfmt("trace", tiny_folder("llama"), *asked)
    assert done.code == 2 and "no two requests of the dump have the same tokens" in done.err


def test_a_step_that_was_not_kept_is_named(tmp_path: Path) -> None:
    folder = of_passes(tmp_path / "d", (0, 27), (28, 29))
    wanted = r"1 of 29 tokens of the sequence are in no pass \(position 27 is the first\)"
    with pytest.raises(FormatError, match=wanted), opened(folder):
        pass


def _of_stage(rank: int, name: str, value: Any) -> Any:
    return value if _stage(name) == rank else None


def _logits_of_first(rank: int, name: str, value: Any) -> Any:
    return None if rank and name == "logits_processor" else columns(name, value, rank, 2)


LATE: dict[str, tuple[str, Callable[[int, str, Any], Any]]] = {
    "last stage": ("TP0_PP{0}_Rank{0}_pid7{0}", _of_stage),
    "first rank": ("TP{0}_PP0_Rank{0}_pid7{0}", _logits_of_first),
}


@pytest.mark.parametrize("form", LATE)
def test_a_last_file_of_late_outputs_is_no_step_of_its_own(form: str, tmp_path: Path) -> None:
    """One rank writes logits a file later than the other ends; a lost pass is still refused."""
    folder = tmp_path / "d"
    place, share = LATE[form]
    for rank in range(2):
        passes = [
            (batch(IDS[a:b], range(a, b), [b]), state(rows_of(range(a, b)), partial(share, rank)))
            for a, b in ((0, 28), (28, 29))
        ]
        hook_passes(folder / place.format(rank), passes)
    with opened(folder) as trace:
        assert {"out", "logits"} <= equal_points(trace, own_of(), 29)
        assert trace.run["dump"]["steps"] == [0] * 28 + [1]
    for rank in range(2):
        whole = [path.name for path in rank_of(folder, rank).iterdir()]
        if len(whole) == 2:
            (rank_of(folder, rank) / "Pass00001.pt").unlink()
    with pytest.raises(FormatError, match="expected the same steps"), opened(folder):
        pass


def attention_groups(folder: Path, ranks: int, own: int, rows_each: int, summed: bool) -> Path:
    """SGLang's hook, two groups of ranks with a request each; all ranks share what is fed forward.

    Group `own` has the tokens IDS. Each group has `rows_each` rows of the fed-forward arrays, or as
    many as its tokens (0); `summed`: sums are taken before they are added up over ranks.
    """
    spans = [list(ALL) if group == own else list(range(20, 8, -1)) for group in range(2)]

    def share(rank: int, name: str, value: Any) -> Any:
        group = spans[rank // ranks]
        if ".mlp." not in name:
            return columns(name, rows(value, group), rank % ranks, ranks)
        parts = value if isinstance(value, tuple) else (value,)
        blank = [[np.zeros_like(part[:1])] * max(0, rows_each) for part in parts]
        both = tuple(
            np.concatenate(
                [np.concatenate([part[one], *pad])[: rows_each or None] for one in spans]
            )
            for part, pad in zip(parts, blank, strict=True)
        )
        if summed and name.endswith("down_proj"):
            times = np.random.default_rng(3).uniform(-1, 1, (2 * ranks, *both[0].shape))
            times += (1 - times.sum(0)) / (2 * ranks)
            return (times[rank] * both[0]).astype(np.float32)
        return columns(name, both if isinstance(value, tuple) else both[0], rank, 2 * ranks)

    for rank in range(2 * ranks):
        one = spans[rank // ranks]
        said = batch([IDS[at] for at in one], range(len(one)), [len(one)])
        found = state(written(), partial(share, rank))
        hook_passes(folder / f"TP{rank}_PP0_Rank{rank}_pid7{rank}", [(said, found)])
    return folder


@pytest.mark.parametrize(
    "ranks, own, rows_each, summed", [(1, 0, 0, False), (1, 1, 0, True), (2, 1, 32, False)]
)
def test_groups_of_ranks_hold_other_requests(
    ranks: int, own: int, rows_each: int, summed: bool, tmp_path: Path
) -> None:
    folder = attention_groups(tmp_path / "d", ranks, own, rows_each, summed)
    with opened(folder) as trace:
        found = equal_points(trace, own_of(), 29)
        assert not trace.run["unknown"] and not trace.run["dump"]["unequal"]
    assert {"q", "attn", "mid", "ffn_up", "ffn_mul", "ffn_out", "logits"} <= found
    path = rank_of(folder, 1) / "Pass00000.pt"
    held = torch.load(path)
    if ranks > 1:  # a rank of a group has the group's tokens
        held["model.forward_batch_info.input_ids"][4] += 1
        says = "input_ids: tp rank 0 holds .12., rank 2 .29."
    else:  # what is divided among all ranks is there of each
        del held["model.layers.1.mlp.act_fn"]
        says = "layers.1.mlp.act_fn: tp rank 1 of 2 lacks it"
    torch.save(held, path)
    with pytest.raises(FormatError, match=says), opened(folder):
        pass


def test_a_row_alone_and_in_a_batch(tmp_path: Path) -> None:
    """Batch invariance of activations: the same request's rows of two dumps, value by value."""
    points = {f"L{n}.out": own_of()[f"L{n}.out"] for n in range(3)}
    alone = npy(tmp_path / "alone", {**points, "input_ids": np.array(IDS)})
    batched = lengths(tmp_path / "batch")
    asked = ("--map", batched, "--reference", alone, "--ids", ",".join(map(str, IDS)))
    done = aprfmt("trace", tiny_folder("llama"), *asked, "--format", "agent")
    assert done.code == 0 and "every value equal" in done.out
    gate = aprfmt("trace", tiny_folder("llama"), *asked, "--exact", "--format", "agent")
    assert gate.code == 0 and "every value equal" in gate.out
    rows_of_batch = np.load(batched / "L1.out.npy")
    rows_of_batch[0, 6 + 11, 5] *= 1 + 3e-7
    np.save(batched / "L1.out.npy", rows_of_batch)
    done = aprfmt("trace", tiny_folder("llama"), *asked, "--format", "agent")
    assert done.code == 0 and "values differ at 1 of 3 points" in done.out
    gate = aprfmt("trace", tiny_folder("llama"), *asked, "--exact", "--format", "agent")
    assert gate.code == 1
    assert gate.out.startswith("values differ at 1 of 3 points, first at L1.out; ")
    lone = aprfmt("trace", tiny_folder("llama"), *asked[:2], *asked[4:], "--exact")
    assert lone.code == 2 and "--exact is of a comparison" in lone.err
    lone = aprfmt("trace", "--load", batched, *asked[4:], "--exact")
    assert lone.code == 2 and "--exact is of a comparison" in lone.err


def rank_of(folder: Path, rank: int) -> Path:
    """Return the folder of a rank."""
    return next(path for path in sorted(folder.iterdir()) if f"Rank{rank}" in path.name)


def lost_rank(folder: Path) -> None:
    shared_key_heads(folder)
    shutil.rmtree(folder / "rank2")


def rank_twice(folder: Path) -> None:
    tensor_parallel(folder)
    shutil.copytree(rank_of(folder, 1), folder / "TP1_PP0_Rank1_pid99")


def other_run(folder: Path) -> None:
    tensor_parallel(folder)
    path = rank_of(folder, 1) / "Pass00001.pt"
    held = torch.load(path)
    held["model.forward_batch_info.input_ids"][4] += 1
    torch.save(held, path)


def lost_step(folder: Path) -> None:
    tensor_parallel(folder)
    (rank_of(folder, 1) / "Pass00002.pt").unlink()


def cut_off(folder: Path) -> None:
    tensor_parallel(folder)
    path = rank_of(folder, 1) / "Pass00001.pt"
    path.write_bytes(path.read_bytes()[:-300])


def lost_array(folder: Path) -> None:
    tensor_parallel(folder)
    path = rank_of(folder, 0) / "Pass00001.pt"
    held = torch.load(path)
    del held["model.layers.1.self_attn.attn"]
    torch.save(held, path)


def too_few_ranks(folder: Path) -> None:
    """Two of four ranks: their numbers are right, their sizes are not."""
    shared_key_heads(folder)
    for rank in (2, 3):
        shutil.rmtree(folder / f"rank{rank}")


def last_rank_lost(folder: Path) -> None:
    """Three of four ranks, numbered from 0 on: sizes alone tell that one more was there."""
    shared_key_heads(folder)
    shutil.rmtree(folder / "rank3")


def unequal_key_head(folder: Path) -> None:
    shared_key_heads(folder)
    path = folder / "rank1" / "Pass0.pt"
    held = torch.load(path)
    held["model.layers.0.self_attn.qkv_proj"][:, 20] += 1
    torch.save(held, path)


def cached_prefix(folder: Path) -> None:
    said = batch(IDS[9:], range(9, 29), [29])
    hook_passes(folder / "TP0_PP0_Rank0_pid1", [(said, state(rows_of(range(9, 29))))])


def prompt_after_its_answer(folder: Path) -> None:
    of_passes(folder, (28, 29), (0, 28))


def exchanged_answers(folder: Path) -> None:
    of_passes(folder, (0, 26), (27, 28), (26, 27), (28, 29))


def exchanged_chunks(folder: Path) -> None:
    """Chunks of a named request, of which the last two have each other's number."""
    _made(folder)
    for number, (first, last) in enumerate(((0, 10), (20, 29), (10, 20))):
        own = range(first, last)
        said = {
            "input_ids": torch.tensor([IDS[at] for at in own]),
            "positions": torch.tensor(list(own)),
            "query_start_loc": torch.tensor([0, len(own)]),
            "req_ids": ["a"],
        }
        torch.save({**said, **state(rows_of(own))}, folder / f"Pass{number}.pt")


def other_order_of_a_rank(folder: Path) -> None:
    for rank in range(2):
        for number, (first, last) in enumerate(((0, 20), (20, 29))):
            own = range(first, last)
            said = batch([IDS[at] for at in own], own, [last])
            place = folder / f"rank{rank}"
            place.mkdir(parents=True, exist_ok=True)
            found = {**said, **state(rows_of(own), of_rank(rank, 2))}
            torch.save(found, place / f"Pass{1 - number if rank else number}.pt")


def only_warm_ups(folder: Path) -> None:
    hook_passes(folder / "TP0_PP0_Rank0_pid1", [(batch([0] * 29, ALL, [29]), state(written()))])


def wrong_dims(folder: Path) -> None:
    spec(folder)
    (folder / "ranks.json").write_text(json.dumps({"arrays": {"*.attn": "t h[xp]"}}))


def nobodys_names(folder: Path) -> None:
    for rank in range(2):
        npy(_made(folder / f"rank{rank}") / "x", {"thing": np.ones((29, 7)) * rank})


REFUSED: dict[Callable[[Path], None], str] = {
    lost_rank: ": rank 2 is missing; there are 0, 1, 3, and perhaps more",
    rank_twice: r"of tp 1 is there twice: .*were two runs dumped",
    other_run: r"step 1: tp ranks 0 and 1 are of other runs: .*input_ids differ",
    lost_step: r"tp 1 has 2 steps, tp 0 has 3 \(step 2\)",
    cut_off: "Pass00001.pt",
    lost_array: "layers.1.self_attn.attn: tp rank 0 of 2 lacks it",
    too_few_ranks: "2 ranks hold 48 columns each of 128; 2 of 4 ranks are missing",
    last_rank_lost: "3 ranks hold 48 columns each of 128; 1 of 4 ranks is missing",
    unequal_key_head: "share a key head and hold other values",
    cached_prefix: "9 of 29 tokens of the sequence are in no pass",
    prompt_after_its_answer: "ran: pass 0 has the tokens from position 28 on, pass 1 after it .* 0",
    exchanged_answers: "ran: pass 1 has the tokens from position 27 on, pass 2 after it .* 26 on",
    exchanged_chunks: "ran: pass 1 has the tokens from position 20 on, pass 2 after it .* 10 on",
    other_order_of_a_rank: "rank 1 has the passes of rank 0 in another order: its step 0 .* step 1",
    only_warm_ups: "all 1 passes are warm-ups",
    wrong_dims: r"axis 'xp'; expected one of tp",
    nobodys_names: r"its name says no point; say its dims in ranks\.json",
}


@pytest.mark.parametrize("break_it", REFUSED, ids=lambda one: one.__name__)
def test_what_is_missing_is_named(break_it: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "d"
    break_it(folder)
    with pytest.raises(FormatError, match=REFUSED[break_it]), opened(folder) as trace:
        raise AssertionError(trace.run)


def test_passes_in_another_order_are_told_without_ids(tmp_path: Path) -> None:
    prompt_after_its_answer(tmp_path / "d")
    says = "if these 2 sequences are one, its passes are not in the order in which they ran"
    with pytest.raises(FormatError, match=says), load_mapped(tmp_path / "d"):
        pass


def test_a_prompt_behind_another_requests_answer_is_in_order(tmp_path: Path) -> None:
    """A prefix came from the cache, and a later request has as many tokens of its own."""
    folder, cut = _made(tmp_path / "d"), range(9, 29)
    rest = {**batch(IDS[9:], cut, [29]), **state(rows_of(cut))}
    other = {**batch([7] * 9, range(9), [9]), **state(rows_of(range(9)))}
    for number, held in enumerate((rest, other)):
        torch.save(held, folder / f"Pass{number}.pt")
    with pytest.raises(FormatError, match="came from a prefix cache"), opened(folder):
        pass


def _second_is_first(folder: Path) -> None:
    """Two ranks, of which the second one's pass is the first one's file."""
    tensor_parallel(folder)
    shutil.copy(rank_of(folder, 0) / "Pass00001.pt", rank_of(folder, 1) / "Pass00001.pt")


def _last_is_third(folder: Path) -> None:
    """Four ranks, of which the last one's file is the third one's."""
    shared_key_heads(folder)
    shutil.copy(folder / "rank2" / "Pass0.pt", folder / "rank3" / "Pass0.pt")


def _exchanged(folder: Path) -> None:
    """Two ranks whose files have each other's names."""
    tensor_parallel(folder)
    paths = [rank_of(folder, rank) / "Pass00001.pt" for rank in range(2)]
    held = [torch.load(path) for path in paths]
    for path, other in zip(paths, reversed(held), strict=True):
        torch.save(other, path)


@pytest.mark.parametrize(
    "write, says",
    [
        (_second_is_first, "rank 1 has that of rank 0), at L0.q"),
        (_last_is_third, "rank 3 has that of rank 2), at L0.q"),
    ],
)
def test_a_file_of_another_rank_is_no_pass_that_was_seen(
    write: Writer, says: str, tmp_path: Path
) -> None:
    """Seen red: "same", exit 0, where no value of the second rank was there."""
    write(tmp_path / "d")
    done = aprfmt("diagnose", tiny_folder("llama"), tmp_path / "d")
    assert done.code == 2 and says in done.err, (done.out, done.err)
    assert "were computed and are not in the dump" in done.err


def test_ranks_whose_files_are_exchanged_are_seen_whole(tmp_path: Path) -> None:
    """All values are there, under other ranks' names: they are those of the model."""
    _exchanged(tmp_path / "d")
    done = aprfmt("diagnose", tiny_folder("llama"), tmp_path / "d", "--json")
    (found,) = done.json["causes"]
    assert (done.code, found["cause"]) == (0, "capture_point")


def _first_rank_alone(write: Writer) -> Writer:
    """Return a writer whose dump has the files of rank 0 alone, of all axes."""

    def alone(folder: Path) -> Path:
        write(folder)
        for path in sorted(folder.iterdir()):
            if any(parse_dump_path(f"{path.name}/x").ranks.values()):
                shutil.rmtree(path)
        (folder / "ranks.json").unlink(missing_ok=True)
        return folder

    return alone


def _hook_of_last_token(folder: Path) -> Path:
    """A decode step: one row an array, of which rank 0 has its columns."""
    held = state(rows_of([0]), of_rank(0, 2))
    return hook_passes(folder / "TP0_PP0_Rank0_pid1", [(batch(IDS[:1], [0], [1]), held)]).parent


LONE: dict[str, tuple[Writer, int]] = {
    # dumps of which the first rank's files alone are left -> who writes it, its tokens
    **{
        name: (_first_rank_alone(LAYOUTS[name][0]), LAYOUTS[name][2])
        for name in ("tensor", "shared key heads", "pipeline", "sequence", "spec")
    },
    "one token": (_hook_of_last_token, 1),
}


@pytest.mark.parametrize("layout", LONE)
def test_the_first_rank_alone_is_refused(layout: str, tmp_path: Path) -> None:
    """Its name does not say that there were more; its arrays' sizes do."""
    write, tokens = LONE[layout]
    wanted = r"as one rank of [24] has them; the other ranks' files are missing"
    with pytest.raises(FormatError, match=wanted):
        with opened(write(tmp_path / "d"), tokens=tokens) as trace:
            raise AssertionError(trace.run)


@pytest.mark.parametrize(
    "arch", ["gemma3n", "gemma4", "deepseek_v2", "qwen3_next", "nemotron_h", "mixtral", "gpt2"]
)
def test_a_whole_pass_is_no_ranks_share(arch: str) -> None:
    """Sizes of transformers' modules, whatever they are, are not those of one rank."""
    from transformers import AutoModelForCausalLM

    folder, shapes = tiny_folder(arch), {}
    made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def note(name: str) -> Callable[..., None]:
        def hook(module: Any, given: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) and out else out
            if torch.is_tensor(first):
                shapes[name] = tuple(first.shape)

        return hook

    for name, module in made.named_modules():
        module.register_forward_hook(note(name))
    with torch.no_grad():
        made(torch.tensor([list(IDS)]))
    with open_model(folder) as model:
        widths = _widths_by_name(model)(list(shapes))
    assert len(widths.widths) > 8
    assert lone_shares(shapes, widths, len(IDS)) == {}


def _one_rank_in_a_file(folder: Path) -> Path:
    _made(folder)
    held = {"input_ids": torch.tensor(IDS), **state(written(), of_rank(0, 2))}
    torch.save(held, folder / "x.pt")
    return folder


def _one_rank_in_arrays(folder: Path) -> Path:
    flat: dict[str, Any] = {}
    for name, value in state(written(), of_rank(0, 2)).items():
        rows_of_it = value if isinstance(value, list) else [value]
        several = len(rows_of_it) > 1
        flat |= {f"{name}.{n}" if several else name: x for n, x in enumerate(rows_of_it)}
    return npy(folder, {"input_ids": np.array(IDS), **{k: v.numpy() for k, v in flat.items()}})


@pytest.mark.parametrize("write", [_one_rank_in_a_file, _one_rank_in_arrays])
def test_a_ranks_columns_are_never_compared_as_whole(write: Writer, tmp_path: Path) -> None:
    """No path says a rank: what is whole is compared, and the rest is said, exit 2."""
    folder, model = write(tmp_path / "d"), str(tiny_folder("llama"))
    saved = tmp_path / "right.safetensors"
    ids = ",".join(map(str, IDS))
    aprfmt("trace", model, "--payload", "--points", "all", "--ids", ids, "--save", str(saved))
    for asked in (
        ("diagnose", model, str(folder)),
        ("trace", model, "--map", str(folder), "--reference", str(saved)),
        ("trace", model, "--map", str(folder)),
    ):
        done = aprfmt(*asked, "--format", "agent")
        assert done.code == 2, (asked, done.out)
        assert "12 captured arrays: model.layers.0." in done.out, (asked, done.out)
    done = aprfmt("diagnose", model, str(folder), "--json")
    why = {row["name"]: row["why"] for row in done.json["pronounced"]["not_compared"]}
    assert (
        "64 of 128 columns, as one rank of 2 has them" in why["model.layers.0.self_attn.qkv_proj"]
    )


def test_several_sequences_are_listed_without_ids(tmp_path: Path) -> None:
    folder = continuous(tmp_path / "d")
    with pytest.raises(FormatError, match=r"2 sequences in the dump \(29 tokens 3,17,.*; 6 tokens"):
        with load_mapped(folder):
            pass
    with pytest.raises(FormatError, match="no sequence of these 3 token ids"):
        with load_mapped(folder, [1, 2, 3]):
            pass


@pytest.mark.parametrize(
    "path, says",
    [
        ("TP1_PP0_Rank3_pid88/Pass00007", ({"tp": 1, "pp": 0, "rank": 3}, 7, "")),
        ("tp_rank=1/model.layers.0.mlp", ({"tp": 1}, None, "model.layers.0.mlp")),
        ("TP0-PP1/q", ({"tp": 0, "pp": 1}, None, "q")),
        ("rank_2/Pass3", ({"rank": 2}, 3, "")),
        ("host1_rank2/Pass3", ({"rank": 2}, 3, "")),
        ("node-0-tp1/q", ({"tp": 1}, None, "q")),
        ("experts_rank2/q", ({"rank": 2}, None, "experts.q")),
        ("rank2/host/q", ({"rank": 2}, None, "host.q")),
        (
            "dump_1/step=4___rank=1___dump_index=9___name=q___recompute_status=disabled___layer_id=2",
            ({"rank": 1}, 4, "layers.2.q"),
        ),
        ("x/forward_pass_id=1___rank=0___name=hidden___dump_index=2", ({"rank": 0}, 1, "x.hidden")),
        ("model-rank-1-part-0", ({"rank": 1}, None, "model")),
        ("mp_rank_01_002/model_optim_rng", ({"tp": 1, "pp": 2}, None, "model_optim_rng")),
        ("layers.1.o_proj.tp_rank=1", ({"tp": 1}, None, "layers.1.o_proj")),
        ("q_proj-rank=2", ({"rank": 2}, None, "q_proj")),
        ("q_proj.mode=2", ({}, None, "q_proj.mode=2")),
        ("lora_rank8", ({}, None, "lora_rank8")),
        ("blk0.query", ({}, None, "blk0.query")),
        ("t0_a", ({}, None, "t0_a")),
    ],
)
def test_paths_say_ranks_steps_and_names(path: str, says: Any) -> None:
    found = parse_dump_path(path)
    assert (dict(found.ranks), found.step) == says[:2]
    assert found.name == says[2] or path.startswith(("dump_1", "x/"))
    assert found.name.endswith(says[2].rpartition(".")[2])


@pytest.mark.parametrize(
    "text, says",
    [
        ("t h[tp] d", (Division("tp", 1),)),
        ("t (h*d)[tp]", (Division("tp", 1),)),
        ("b s[cp:zigzag,sp] h", (Division("cp", 1, "zigzag"), Division("sp", 1))),
        (
            "b s(cp,zigzag) h(tp,partial)",
            (Division("cp", 1, "zigzag"), Division("tp", 2, "partial")),
        ),
        ("t h[tp:partial] # what follows is a remark", (Division("tp", 1, "partial"),)),
        ("t h", ()),
        (
            "t[attn_dp] e[moe_dp] h[etp:sharded]",
            (Division("dp", 0), Division("dp", 1), Division("tp", 2)),
        ),
    ],
)
def test_dims_say_what_is_divided(text: str, says: Any) -> None:
    assert parse_dims(text, "x") == says


def test_summands_in_another_order_are_refused() -> None:
    with pytest.raises(FormatError, match="are not put together"):
        parse_dims("t[cp:zigzag+partial] h", "x")


def through(change: Callable[[Any], Any], roles: tuple[str, ...]) -> Any:
    """Return an engine whose products of some roles are changed: `change` gets (x) or gives (y)."""

    def linear(op: Any, x: Any, w: Any, *rest: Any) -> Any:
        at = role_of(w.key)
        if at in roles and at in SUMS:
            return op(change(x), w, *rest)
        y = op(x, w, *rest)
        return change(y) if at in roles else y

    return lambda: broken("linear", linear)


def exchanged(x: Any) -> Any:
    """Return both ranks' columns in each other's place."""
    return np.concatenate(np.split(x, 2, -1)[::-1], -1)


def doubled(x: Any) -> Any:
    """Return the first rank's columns in both places."""
    return np.concatenate(np.split(x, 2, -1)[:1] * 2, -1)


def lost(x: Any) -> Any:
    """Return the second rank's columns as zeros: its sum did not arrive."""
    first, second = np.split(x, 2, -1)
    return np.concatenate([first, 0 * second], -1)


def on_first(x: Any) -> Any:
    """Return the input whose second half is multiplied by the first rank's columns of a weight."""
    first, second = np.split(x, 2, -1)
    return np.concatenate([first + second, 0 * second], -1)


def halved(x: Any) -> Any:
    """Return the input of a sum over two ranks that is divided by their number."""
    return x * np.float32(0.5)


def summed_again(x: Any) -> Any:
    """Return the input of a sum over two ranks that is taken twice."""
    return x * np.float32(2)


def second_times(factor: float) -> Callable[[Any], Any]:
    """Return what multiplies the second rank's columns by a factor."""

    def change(x: Any) -> Any:
        first, second = np.split(x, 2, -1)
        return np.concatenate([first, np.float32(factor) * second], -1)

    return change


WRONG: dict[str, tuple[Any, tuple[str, ...], str, str]] = {
    # what an engine on two ranks gets wrong -> change, roles, the cause, where it is
    "query shards": (exchanged, ("attn_q",), "shard_order", "attn_q"),
    "all of qkv": (exchanged, ("attn_q", "attn_k", "attn_v"), "shard_order", "attn_v"),
    "gate twice": (doubled, ("ffn_gate",), "shard_order", "ffn_gate"),
    "columns of o": (exchanged, ("attn_output",), "shard_order", "attn_output"),
    "columns of down": (exchanged, ("ffn_down",), "shard_order", "ffn_down"),
    "share of o twice": (on_first, ("attn_output",), "shard_order", "attn_output"),
    "share of down twice": (on_first, ("ffn_down",), "shard_order", "ffn_down"),
    "mean of o": (halved, ("attn_output",), "tensor_parallel", "attn_output"),
    "sum of down again": (summed_again, ("ffn_down",), "tensor_parallel", "ffn_down"),
    "all-reduce of o": (lost, ("attn_output",), "tensor_parallel", "attn_output"),
    "all-reduce of down": (lost, ("ffn_down",), "tensor_parallel", "ffn_down"),
    "factor of q": (second_times(2), ("attn_q",), "tensor_parallel", "q_proj"),
    "factor of gate": (second_times(0.7), ("ffn_gate",), "tensor_parallel", "gate_proj"),
    "factor of o": (second_times(1.5), ("attn_output",), "tensor_parallel", "o_proj"),
}


def two_ranks(folder: Path, found: dict[str, Any], change: Any = None) -> Path:
    """Write modules' outputs as two tensor-parallel ranks; `change` alters those of the second."""
    for rank in range(2):
        mine = {
            name: change(name, value) if change and rank else value for name, value in found.items()
        }
        place = folder / f"TP{rank}"
        place.mkdir(parents=True)
        torch.save({**WHOLE, **state(mine, of_rank(rank, 2))}, place / "Pass0.pt")
    return folder


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_share_is_the_cause(fault: str, tmp_path: Path) -> None:
    change, roles, cause, where = WRONG[fault]
    folder = two_ranks(tmp_path / "d", written(backend=through(change, roles)))
    done = aprfmt("diagnose", tiny_folder("llama"), folder, "--json")
    assert done.code == 1, done.out
    causes = [(one["cause"], one["level"]) for one in done.json["causes"]]
    assert causes == [(cause, "confirmed")], done.json["causes"]
    assert where in str(done.json["causes"][0]["where"])
    if fault.startswith("factor"):
        times = change(np.ones(2, np.float32))[1]
        assert f"rank 1 multiplies its part by {times:.6g}" in done.json["causes"][0]["says"]


def test_a_factor_of_the_whole_weight_is_no_ranks(tmp_path: Path) -> None:
    """All ranks' parts have it: the weight is named, as without ranks."""
    twice = written(backend=through(lambda x: x * np.float32(2), ("attn_q",)))
    done = aprfmt("diagnose", tiny_folder("llama"), two_ranks(tmp_path / "d", twice), "--json")
    assert {one["cause"] for one in done.json["causes"]} == {"scale"}, done.out


# What ranks with three of six experts each load wrong -> in which layers, the expert of which each
# has the weights, and what is said of the first such layer.
WRONG_EXPERTS: dict[str, tuple[tuple[int, ...], list[int], str]] = {
    "experts exchanged": ((1,), [3, 4, 5, 0, 1, 2], "in the order [3, 4, 5, 0, 1, 2]"),
    "another rank's experts": (
        (1,), [0, 1, 2, 0, 1, 2], "3 those of 0, 4 those of 1, 5 those of 2; 3, 4, 5 are nowhere",
    ),
    "another rank's experts, all layers": (
        (0, 1, 2), [3, 4, 5, 3, 4, 5], "0 those of 3, 1 those of 4, 2 those of 5; 0, 1, 2 are",
    ),
    "one expert twice": ((1,), [0, 1, 1, 3, 4, 5], "weights: 2 those of 1; 2 is nowhere"),
    "one expert on all": ((2,), [4, 4, 4, 4, 4, 4], "3 those of 4, 5 those of 4; 0, 1, 2, 3, 5"),
}  # fmt: skip


def with_experts(layers: tuple[int, ...], order: list[int]) -> Callable[[Any], dict[str, Any]]:
    """Return an overlay of weights: expert e of these layers has those of expert order[e]."""
    return lambda weights: {
        key: np.array(weights[key].numpy(), np.float32)[order]
        for key in (f"L{n}.ffn_{one}_exps.weight" for n in layers for one in ("gate", "up", "down"))
    }


@pytest.mark.parametrize("fault", WRONG_EXPERTS)
def test_an_expert_on_the_wrong_rank_is_the_cause(fault: str, tmp_path: Path) -> None:
    """Seen red: a rank with another rank's experts was located at moe_out, without a cause."""
    layers, order, says = WRONG_EXPERTS[fault]
    found = written("mixtral", weights=with_experts(layers, order))
    folder = two_expert_ranks(tmp_path / "d", found)
    done = aprfmt("diagnose", tiny_folder("mixtral"), folder, "--json")
    assert done.code == 1, done.out
    causes = done.json["causes"]
    told = {(one["cause"], one["level"]) for one in causes}
    assert told == {("expert_order", "confirmed")}, causes
    assert says in causes[0]["says"]
    # Layers of which the same is said are one cause.
    roles = {role for one in causes for role in one["roles"]}
    stacks = {role for role in roles if role.endswith("ffn_gate_exps.weight")}
    assert stacks == {f"L{n}.ffn_gate_exps.weight" for n in layers}


def test_shares_of_other_values_accuse_no_expert(tmp_path: Path) -> None:
    """Experts that no expert of the model has are no order of the model's."""

    def blended(weights: Any) -> dict[str, Any]:
        """Return the experts' output weights of layer 1, each half another's."""
        down = np.array(weights["L1.ffn_down_exps.weight"].numpy(), np.float32)
        return {"L1.ffn_down_exps.weight": (down + 0.8 * np.roll(down, 1, 0)).astype(np.float32)}

    folder = two_expert_ranks(tmp_path / "d", written("mixtral", weights=blended))
    done = aprfmt("diagnose", tiny_folder("mixtral"), folder, "--json")
    assert done.code == 1
    assert "expert_order" not in [one["cause"] for one in done.json["causes"]]


def _mixed(x: Any) -> Any:
    """Return the ranks' columns, one less than the other and moved by one: no usual mistake."""
    first, second = np.split(x, 2, -1)
    return np.concatenate([0.7 * first, np.roll(second, 1, -1)], -1).astype(x.dtype)


@pytest.mark.parametrize("role", ["attn_output", "ffn_down"])
def test_a_product_that_nothing_explains_accuses_no_weight(role: str, tmp_path: Path) -> None:
    """Fewer tokens than columns: any product is that of some weight. Seen red: stale_tensor."""
    folder = two_ranks(tmp_path / "d", written(backend=through(_mixed, (role,))))
    done = aprfmt("diagnose", tiny_folder("llama"), folder, "--json")
    (found,) = done.json["causes"]
    assert done.code == 1 and not found["cause"] and found["level"] == "located"
    assert found["where"][0] == "linear" and "it may be wrong, or what it reads" in found["says"]


def _last_logits(folder: Path, change: Callable[[Any], Any], base: str = "llama") -> Path:
    """Write a dump of two ranks that has the last token's logits alone: `change` of all rows."""
    found = written(base)
    found["logits_processor"] = change(found["logits_processor"])[-1:]
    return two_ranks(folder, found)


@pytest.mark.parametrize("away", [-1, -5])
def test_logits_of_another_token_are_the_heads_row(away: int, tmp_path: Path) -> None:
    """Seen red: "stale_tensor" of the sound head."""
    folder = _last_logits(tmp_path / "d", lambda rows: np.roll(rows, -away, 0))
    done = aprfmt("diagnose", tiny_folder("llama"), folder, "--json")
    (found,) = done.json["causes"]
    assert (done.code, found["cause"], found["level"]) == (1, "logits_row", "confirmed")
    assert f"are made of the row of position {len(IDS) - 1 + away}:" in found["says"]


def test_all_rows_of_logits_that_are_one_token_late_are_one_cause(tmp_path: Path) -> None:
    found = written()
    rows = found["logits_processor"]
    found["logits_processor"] = np.concatenate([rows[:1], rows[:-1]])
    done = aprfmt("diagnose", tiny_folder("llama"), two_ranks(tmp_path / "d", found), "--json")
    (row,) = done.json["causes"]
    assert (
        done.code == 1 and row["cause"] == "logits_row" and "rows one token before" in row["says"]
    )


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_one_row_of_logits_shows_a_temperature(temperature: float, tmp_path: Path) -> None:
    """Seen red: rows that the dump lacks were fitted with it, and the head was accused."""
    folder = _last_logits(tmp_path / "d", lambda rows: rows / np.float32(temperature))
    done = aprfmt("diagnose", tiny_folder("llama"), folder, "--json")
    (found,) = done.json["causes"]
    assert done.code == 1 and found["cause"] == "multiplier"
    assert f"a temperature of {temperature:g} divided the logits" in found["says"]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_in_16_bits_is_no_number_of_a_row(temperature: float, tmp_path: Path) -> None:
    """Seen red: "same", as the tolerance of 16 bits let rows be 0.6 apart."""
    held = state(written(), of_rank(0, 1))
    held["logits_processor"] /= temperature
    torch.save({**WHOLE, **_cast(held, torch.bfloat16)}, _made(tmp_path / "d") / "Pass0.pt")
    done = aprfmt("diagnose", tiny_folder("llama"), tmp_path / "d", "--json")
    assert done.code == 1 and done.json["causes"][0]["cause"] == "multiplier", done.json["causes"]


def test_the_last_row_of_sound_logits_is_the_same(tmp_path: Path) -> None:
    folder = _last_logits(tmp_path / "d", lambda rows: rows)
    done = aprfmt("diagnose", tiny_folder("llama"), folder, "--json")
    assert done.code == 0 and done.json["verdict"] == "same"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_of_16_bits_with_logits_in_float32_is_read_in_16_bits(
    dtype: str, tmp_path: Path
) -> None:
    """Sums of (hidden, residual) are rounded once more in the next norm's residual.

    Seen red: "one of the two was written over after it was captured", exit 2.
    """
    held = state(written(), of_rank(0, 1))
    logits = held.pop("logits_processor")
    (tmp_path / "d").mkdir()
    short = _cast(held, getattr(torch, dtype))
    torch.save({**WHOLE, **short, "logits_processor": logits}, tmp_path / "d" / "Pass0.pt")
    done = aprfmt("diagnose", tiny_folder("llama"), tmp_path / "d", "--json")
    assert done.code == 0 and done.json["verdict"] == "precision", done.json["not_compared"]


def test_a_sound_dump_of_two_ranks_is_the_same(tmp_path: Path) -> None:
    done = aprfmt("diagnose", tiny_folder("llama"), two_ranks(tmp_path / "d", written()), "--json")
    assert done.code == 0 and done.json["verdict"] == "same" and not done.json["not_compared"]


def _of_one(name: str) -> Callable[[str, Any], Any]:
    return lambda at, value: (value[0] * 1.3, value[1]) if at == name else value


UNLIKE: dict[str, Callable[[str, Any], Any]] = {
    "a norm": _of_one("model.layers.1.post_attention_layernorm"),
    "the end": lambda at, value: (
        tuple(one * 0.9 for one in value)
        if at in ("model.layers.2", "model.norm")
        else value * 0.9
        if at == "model.layers.2.mlp.down_proj"
        else value
    ),
}


@pytest.mark.parametrize("fault", UNLIKE)
def test_ranks_that_differ_are_never_the_same(fault: str, tmp_path: Path) -> None:
    """The first rank agrees with the model; the second does not."""
    folder = two_ranks(tmp_path / "d", written(), UNLIKE[fault])
    done = aprfmt("diagnose", tiny_folder("llama"), folder, "--json")
    assert done.code == 1 and done.json["causes"][0]["cause"] == "ranks_differ"
    assert done.json["causes"][0]["level"] == "located"
    mapped = aprfmt("trace", tiny_folder("llama"), "--map", folder, "--json")
    assert mapped.code == 1
    with opened(folder) as trace:
        assert compare_traces(trace, trace).pronounced.exit == 1
        assert reference_verdict(compare_traces(trace, trace))[0].startswith(
            "ranks of one dump differ: model.layers."
        )


def test_a_buffer_that_was_overwritten_is_seen(tmp_path: Path) -> None:
    """The next norm ran in place: hidden holds its result, residual the whole stream."""
    found, right = written(), own_of()
    for n in range(2):
        found[f"model.layers.{n}"] = right[f"L{n + 1}.attn_norm"], right[f"L{n}.out"]
    with opened(two_ranks(tmp_path / "d", found)) as trace:
        assert "out" in equal_points(trace, right, 29)
        assert any("wrote into the buffer" in note for note in trace.run["dump"]["notes"])
    told = aprfmt("diagnose", tiny_folder("llama"), tmp_path / "d", "--json").json
    said = [row["says"] for row in told["evidence"] if row["says"].startswith("B: ")]
    assert any(line.startswith("B: put together from 2 ") for line in said)
    assert any("wrote into the buffer" in line for line in said)


@pytest.mark.parametrize("form", ["pt", "npy"])
def test_ranks_are_compared_by_their_stored_bytes(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What ranks hold alike is converted for none of them; NaN and other bits still differ."""
    folder = tmp_path / "dump"
    values = np.where(np.arange(64) % 9 == 4, np.nan, np.arange(64)).reshape(8, 8)
    for rank in range(3):
        place = folder / f"tp_rank={rank}"
        place.mkdir(parents=True)
        for name in "abcdef":
            array = values.astype(np.float32)
            if name == "c" and rank == 2:
                array[7, 7] = 1
            if form == "npy":
                np.save(place / f"{name}.npy", array)
        if form == "pt":
            held = {name: torch.from_numpy(values.astype(np.float32)) for name in "abcdef"}
            if rank == 2:
                held["c"] = held["c"].clone()
                held["c"][7, 7] = 1
            torch.save(held, place / "Pass0.pt")
    read: list[str] = []

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a converter that notes each call."""

        def call(*given: Any, **options: Any) -> Any:
            """Note the call and make it."""
            read.append("")
            return make(*given, **options)

        return call

    for module, one in ((stored_arrays, "decode"), (captures, "decode_numbers")):
        monkeypatch.setattr(module, one, counted(getattr(module, one)))
    spec = {"arrays": {"*": "t h"}}
    (folder / "ranks.json").write_text(json.dumps(spec))
    with ExitStack() as stack:
        dump = read_dump(folder, stack, lambda names: PointWidths())
        # Of the 18 arrays only the one that differs, and the first rank's of it, are converted.
        assert len(read) == 4, read
        assert [one.name.rpartition(".")[2] for _, one in dump.unequal] == ["c"]
        read.clear()
        found = dump.passes[0].arrays
        assert all(np.isnan(found[name].read()).sum() == 7 for name in found)
        assert len(read) == len(found) == 6


def test_sums_before_their_all_reduce_are_added(tmp_path: Path) -> None:
    """SGLang joins the all-reduce with the next norm: o_proj then gives a rank's part of it."""
    found = written()
    folder = tmp_path / "d"
    rng = np.random.default_rng(0)
    first = {
        name: (value * rng.standard_normal(value.shape)).astype(np.float32)
        for name, value in found.items()
        if name.endswith("o_proj")
    }
    for rank in range(2):
        mine = dict(found)
        mine |= {name: found[name] - own if rank else own for name, own in first.items()}
        (folder / f"TP{rank}").mkdir(parents=True)
        torch.save({**WHOLE, **state(mine, of_rank(rank, 2))}, folder / f"TP{rank}" / "Pass0.pt")
    with opened(folder) as trace:
        assert "attn_out" in equal_points(trace, own_of(), 29)
        assert not trace.run["dump"]["unequal"]


def test_the_first_token_that_differs_is_named_with_its_pass(tmp_path: Path) -> None:
    """From the second decode step on, key heads of layer 1 are off."""
    right = own_of()
    off = {key: np.array(value) for key, value in right.items()}
    off["L1.k"][26:] *= 1.5
    reference = tmp_path / "right.safetensors"
    cuts = [(0, 25), (25, 26), (26, 27), (27, 29)]
    found = modules(off)
    hook_passes(
        tmp_path / "d" / "TP0_PP0_Rank0_pid1",
        [
            (
                batch(IDS[a:b], range(a, b), [b]),
                state({name: rows(value, range(a, b)) for name, value in found.items()}),
            )
            for a, b in cuts
        ],
    )
    model = tiny_folder("llama")
    aprfmt(
        "trace",
        model,
        "--payload",
        "--points",
        "all",
        "--ids",
        ",".join(map(str, IDS)),
        "--save",
        reference,
    )
    done = aprfmt("trace", model, "--map", tmp_path / "d", "--reference", reference, "--json")
    assert done.code == 1
    first = done.json["reference"]["first_token"]
    assert (first["position"], first["key"], first["dump_pass"]) == (26, "L1.k", 2)
    told = aprfmt("diagnose", model, tmp_path / "d", "--json")
    assert told.json["facts"]["first_token"]["position"] == 26
    # Keys that were recorded elsewhere are no difference of a token, and the answer names none.
    assert told.json["verdict"] == "same"
    assert "first token" not in aprfmt("diagnose", model, tmp_path / "d").out


def test_the_ratio_of_three_tensors() -> None:
    """1 for rounding of the same kind, larger for more than rounding, 0 for no difference."""
    exact = np.linspace(1, 2, 8)
    known = {"logits": exact}

    def trace(values: Any) -> Trace:
        record = Record("logits", -1, (1, 8), (0,), "float32", None, "cpu", None)
        return Trace({}, {"logits": record}, fetch=lambda key: np.reshape(values, (1, 8)))

    runs = [trace(known["logits"] + one) for one in (0.002, 0.0, 0.001)]
    assert rounding_ratios(["logits"], runs[0], runs[1], runs[2])["logits"] == pytest.approx(2)
    assert rounding_ratios(["logits"], runs[1], runs[1], runs[2])["logits"] == 0
    assert rounding_ratios(["logits"], runs[0], runs[1], runs[1])["logits"] == np.inf


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
@pytest.mark.parametrize("split", [(5,), (2, 3), (1, 1, 1, 1, 1)])
def test_the_first_tokens_of_a_longer_sequence_are_read(split: tuple[int, ...], cut: int) -> None:
    """Of one pass and of several; the reference's text may end earlier than the dump's."""
    ids, values = np.array([7, 3, 9, 4, 8]), np.arange(15.0, dtype=np.float32).reshape(5, 3)
    passes, start = [], 0
    for step, count in enumerate(split):
        part = slice(start, start + count)
        said = {"ids": ids[part], "positions": np.arange(5)[part]}
        passes.append(
            Pass(step, 0, {"x": joined("x", values[part])},
                 {name: joined(name, held) for name, held in said.items()})
        )  # fmt: skip
        start += count
    found = align(Dump(tuple(passes), {}, {}), ids[:cut].tolist())
    assert not found.left and found.ids == tuple(ids[:cut].tolist())
    assert np.array_equal(found.arrays["x"].read(), values[:cut])
    assert found.arrays["x"].shape[0] == cut and len(found.steps) == cut


def joined(name: str, values: Any) -> JoinedArray:
    return JoinedArray(name, values.shape, values.dtype.name, lambda: values)


@pytest.mark.parametrize("named", [(1, 1, 1), (0, 0, 0), (1, 0, 1), (1, 1, 0)])
def test_a_pass_that_names_no_request_goes_on_by_its_position(named: tuple[int, ...]) -> None:
    ids, passes = np.array([7, 3, 9]), []
    for at, says in enumerate(named):
        said = {"ids": ids[at : at + 1], "positions": np.array([at])}
        passes.append(
            Pass(at, 0, {"x": joined("x", np.full((1, 2), at + 1.0, np.float32))},
                 {name: joined(name, held) for name, held in said.items()},
                 {"rids": ["a"]} if says else {})
        )  # fmt: skip
    found = align(Dump(tuple(passes), {}, {}), None)
    assert found.ids == (7, 3, 9) and found.positions == (0, 1, 2)
    assert found.arrays["x"].read()[:, 0].tolist() == [1.0, 2.0, 3.0]


def of_tokens(step: int, first: int, *ids: int, request: str = "") -> Pass:
    """Return a pass of one request that computes these ids at positions from `first`."""
    batch = {
        "positions": joined("positions", np.arange(first, first + len(ids))),
        "ids": joined("input_ids", np.array(ids)),
    }
    texts: dict[str, list[Any]] = {"req_ids": [request]} if request else {}
    return Pass(step, 0, {"x": joined("x", np.ones((len(ids), 6)))}, batch, texts)


@pytest.mark.parametrize(
    "passes, says",
    [
        ([(0, "", 7, 8, 9), (4, "", 5)], r"1 of 5 tokens .*position 3 is the first.* 2 requests"),
        ([(0, "", 7), (2, "", 5), (5, "", 6)], r"3 of 6 tokens .*position 1 is the first"),
        ([(0, "", 7, 8, 9), (0, "", 7, 5), (4, "", 5)], "3 sequences in the dump"),
        ([(0, "a", 7, 8, 9), (4, "b", 5)], "2 sequences in the dump"),
        ([(0, "", 7, 8, 9), (2, "", 5, 6)], "2 sequences in the dump"),  # a cached prefix
        ([(0, "", 7, 8, 9), (3, "", 5)], ""),
    ],
)
def test_a_pass_behind_a_gap_is_of_the_sequence_that_lacks_one(
    passes: list[tuple[Any, ...]], says: str
) -> None:
    rows = [of_tokens(n, at, *ids, request=own) for n, (at, own, *ids) in enumerate(passes)]
    dump = Dump(tuple(rows), {}, {})
    if not says:
        assert align(dump, None).ids == (7, 8, 9, 5)
        return
    with pytest.raises(FormatError, match=says):
        align(dump, None)


SPECULATIVE: tuple[tuple[Any, ...], ...] = (
    (0, "", 7, 8),
    (2, "", 9, 1, 2),  # both drafts are wrong
    (3, "", 5, 6, 3),  # the second is
    (5, "", 4),
)


@pytest.mark.parametrize(
    "changed, ids",
    [
        ({}, (7, 8, 9, 5, 6, 4)),
        ({n: "a" for n in range(4)}, (7, 8, 9, 5, 6, 4)),
        ({2: "b"}, None),  # another request
        ({2: (3, "", 1, 6)}, None),  # the draft itself: the pass was kept once more
        ({1: (2, "", 9, *range(90, 110))}, None),  # a chunk of a prompt, and a cached prefix
        ({2: (2, "", 5, 6, 3)}, None),  # a step has a token that is no draft
    ],
)
def test_drafts_that_were_taken_back_are_left_out(
    changed: dict[int, Any], ids: tuple[int, ...] | None
) -> None:
    passes = []
    for n, row in enumerate(SPECULATIVE):
        new = changed.get(n, row)
        at, request, *own = (row[0], new, *row[2:]) if isinstance(new, str) else new
        passes.append(of_tokens(n, at, *own, request=request))
    dump = Dump(tuple(passes), {}, {})
    if ids is None:
        with pytest.raises(FormatError, match="sequences in the dump"):
            align(dump, None)
        return
    found = align(dump, None)
    assert found.ids == ids and found.positions == tuple(range(6))
    assert found.steps == (0, 0, 1, 2, 2, 3) and found.arrays["x"].shape == (6, 6)
    assert [note.partition(" token")[0] for note in found.notes] == [
        "pass 1: 2 drafted",
        "pass 2: 1 drafted",
    ]


@pytest.mark.parametrize("base", ["llama", "mixtral"])
def test_a_width_is_that_of_an_array_with_a_row_a_token(base: str) -> None:
    """Scores have a row a head: their other axes are no width."""
    with open_model(tiny_folder(base)) as model:
        shapes = {key: value.shape for key, value in own_of(base).items()}
        found = _widths_by_name(model)(list(shapes))
        tokens = {key: int(np.prod(shape[1:])) for key, shape in shapes.items()
                  if shape[0] == len(IDS)}  # fmt: skip
    assert set(found.widths) <= set(tokens) and len(found.widths) > 10
    assert all(found.widths[key] == tokens[key] for key in found.widths)
    assert found.known <= set(tokens.values())


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_norm_is_a_factor_a_row_times_one_a_column(size: float) -> None:
    """Columns of zeros have any factor; rows of zeros have none."""
    rng = np.random.default_rng(6)
    residual, weight = size * rng.standard_normal((5, 8)), rng.standard_normal(8)

    def array(values: Any) -> JoinedArray:
        return JoinedArray("x", values.shape, "float32", lambda: values)

    def normed(x: Any) -> Any:
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True)) * weight

    assert is_normed(array(normed(residual)), array(residual))
    empty = residual.copy()
    empty[:, [0, 3]] = 0
    assert is_normed(array(normed(empty)), array(empty))
    assert not is_normed(array(normed(empty) + (np.arange(8) == 3)), array(empty))
    assert not is_normed(array(normed(residual) + rng.standard_normal((5, 8))), array(residual))
    assert not is_normed(array(0 * residual), array(residual))
    assert not is_normed(array(normed(residual)[:1]), array(residual[:1]))
    none = residual.copy()
    none[2] = 0
    assert not is_normed(array(residual), array(none))
    for wrong in (np.nan, np.inf):
        odd = residual.copy()
        odd[1, 1] = wrong
        assert not is_normed(array(odd), array(residual))
        assert not is_normed(array(residual), array(odd))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("overwritten", [(), (1,), (0, 2), (0, 1, 2)])
def test_the_stream_behind_a_layer_is_found_where_a_norm_wrote_over_it(
    overwritten: tuple[int, ...], turned: bool
) -> None:
    """A layer gives what it adds and the stream before; a norm in place, its result and the sum."""
    rng = np.random.default_rng(8)
    arrays, streams = {}, []
    stream = rng.standard_normal((5, 8))
    for layer in range(3):
        adds, before = rng.standard_normal((5, 8)), stream
        stream = before + adds
        streams.append(stream)
        if layer in overwritten:
            weight = rng.uniform(0.5, 2, 8)
            normed = stream / np.sqrt(np.mean(stream**2, axis=1, keepdims=True)) * weight
            given = normed, stream
        else:
            given = adds, before
        for number, values in enumerate(given):
            name = f"model.layers.{layer}.{number}"
            arrays[name] = joined(name, values)
    norm = rng.standard_normal((5, 8))
    arrays |= {"model.layers.1.input_layernorm.0": joined("n", norm),
               "model.layers.1.input_layernorm.1": joined("s", streams[0])}  # fmt: skip
    if turned:
        arrays = dict(reversed(arrays.items()))
    found = under_module_names(arrays, {"model.layers.1.0": (2, 3)})
    for layer, expected in enumerate(streams):
        np.testing.assert_allclose(found.arrays[f"model.layers.{layer}"].read(), expected)
    assert np.array_equal(found.arrays["model.layers.1.input_layernorm"].read(), norm)
    assert np.array_equal(found.arrays["model.layers.1#in"].read(), streams[0])
    assert len(found.arrays) == 5 and found.rows == {"model.layers.1": (2, 3)}
    said = [f"{len(overwritten)} layers' hidden values"] if overwritten else []
    assert [note[: len(text)] for note, text in zip(found.notes, said, strict=True)] == said


@pytest.mark.parametrize("first", [0, 2])
def test_passes_that_put_heads_before_tokens_are_aligned(first: int, tmp_path: Path) -> None:
    """As hooks on the norms of q and k give them; of as many tokens as heads, too."""
    held = own_of("qwen3")
    heads = held["L0.q_norm"].shape[1]
    edges = [0, heads, len(IDS) - 2, len(IDS) - 1, len(IDS)]
    for number, (start, stop) in enumerate(pairwise(edges)):
        found = {"input_ids": np.array(IDS[start:stop]), "positions": np.arange(start, stop)}
        found["model.layers.0"] = held["L0.out"][None, start:stop]
        if number >= first:  # the passes in which the harness kept them
            for name in "qk":
                turned = held[f"L0.{name}_norm"][None, start:stop].swapaxes(1, 2)
                found[f"model.layers.0.self_attn.{name}_norm"] = turned
        (tmp_path / "d").mkdir(exist_ok=True)
        npy(tmp_path / "d" / f"step_{number}", found)
    with opened(tmp_path / "d", "qwen3", len(IDS)) as trace:
        assert equal_points(trace, held, len(IDS)) == {"q_norm", "k_norm", "out"}
        record = trace.find_record("L0.q_norm")
        assert record is not None and record.positions == tuple(ALL[edges[first] :])


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("form", ONE_EACH)
def test_a_damaged_file_of_a_rank_ends_no_other(form: str, lost: bool, tmp_path: Path) -> None:
    """Its point is not compared; of a pass of which nothing is left nothing is known."""
    for rank in range(2):
        held = _flat({**WHOLE, **state(written(), of_rank(rank, 2))})
        ONE_EACH[form](_made(tmp_path / f"TP{rank}_PP0_Rank{rank}_pid{rank}"), held, rank)
    kept = [path for path in sorted(tmp_path.rglob("TP1*/*")) if path.is_file()]
    name = "model.layers.0.self_attn.o_proj"
    damaged = [path for path in kept if lost or name in path.name]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:40])
    if lost:
        with pytest.raises(FormatError, match="TP1"), opened(tmp_path):
            pass
        return
    with opened(tmp_path) as trace:
        assert "L0.attn_out" not in trace.records and "L1.attn_out" in trace.records
        (row,) = [row for row in unread_arrays(trace) if name in row.name]
    assert row.state == "unreadable" and f"no rank's part of {name} is compared" in row.why


def _two_passes_of_two_ranks(folder: Path, ends: str, *, several: bool = False) -> Path:
    """Write the output of a module of each layer in two passes, one file for each of its arrays.

    With `several`, a module's two arrays (hidden and residual) share one file.
    """
    for rank in range(2):
        for step, kept in enumerate((range(20), range(20, len(IDS)))):
            place = _made(folder / f"step_{step}" / f"TP{rank}")
            found = {
                name: rows(one, kept) for name, one in written().items() if name.endswith(ends)
            }
            held = state(found, of_rank(rank, 2))
            _as_tensors(place, held if several else _flat(held), rank)
            said = batch([IDS[at] for at in kept], kept, [kept.stop])
            _as_tensors(place, said, rank)
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_file_of_one_pass_leaves_the_rows_of_the_others(
    rank: int, tmp_path: Path
) -> None:
    """Seen red: the file's name stood for the array in every pass."""
    dump = _two_passes_of_two_ranks(tmp_path / "d", "down_proj")
    name = "model.layers.1.mlp.down_proj"
    (path,) = dump.glob(f"step_1/TP{rank}/{name}*")
    path.write_bytes(path.read_bytes()[:40])
    with opened(dump) as trace:
        positions = {key: record.positions for key, record in trace.records.items()}
        (row,) = unread_arrays(trace)
        values = trace.recorded_values("L1.ffn_out")
        assert values is not None and np.array_equal(values, own_of()["L1.ffn_out"][:20])
    assert positions.pop("L1.ffn_out") == tuple(range(20))
    assert positions == dict.fromkeys(["L0.ffn_out", "L2.ffn_out"], tuple(ALL))
    assert row.name == str(path.relative_to(dump)) and row.state == "unreadable"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_file_of_several_arrays_takes_all_of_them(rank: int, tmp_path: Path) -> None:
    """What the other rank holds whole may be a summand, so that none of them is compared."""
    dump = _two_passes_of_two_ranks(tmp_path / "d", "post_attention_layernorm", several=True)
    name = "model.layers.1.post_attention_layernorm"
    for path in dump.glob(f"*/TP{rank}/{name}*"):
        path.write_bytes(path.read_bytes()[:40])
    with opened(dump) as trace:
        points = set(trace.records)
        damaged = unread_arrays(trace)
    assert points == {f"L{layer}.{point}" for layer in (0, 2) for point in ("ffn_norm", "mid")}
    assert [row.state for row in damaged] == ["unreadable"] * 2
    assert all(f"{name}.0" in row.why and f"{name}.1" in row.why for row in damaged)


def test_a_damaged_file_takes_no_array_that_its_rank_has_in_another_file(tmp_path: Path) -> None:
    """A layer's output is called as the modules in it begin; the first rank alone has logits."""
    for rank in range(2):
        held = state(written(), of_rank(rank, 2))
        if rank:
            del held["logits_processor"]
        _as_tensors(_made(tmp_path / f"TP{rank}"), {**WHOLE, **held}, rank)
    path = tmp_path / "TP1" / "model.layers.1.pt"
    path.write_bytes(path.read_bytes()[:40])
    with opened(tmp_path) as trace:
        assert {"L1.attn", "L1.attn_out", "L1.ffn_out", "logits"} <= set(trace.records)
        (row,) = unread_arrays(trace)
    assert row.name == "TP1/model.layers.1.pt" and "o_proj" not in row.why


@pytest.mark.parametrize("saved", ["bfloat16", "float32"])
@pytest.mark.parametrize("short", [True, False])
def test_a_rank_that_holds_a_shorter_type_is_not_compared_unseen(
    short: bool, saved: str, tmp_path: Path
) -> None:
    """Seen red: no word of it where the answer did not take it from the dump, or from its files."""
    for rank in range(2):
        held = _flat({**WHOLE, **state(written(), of_rank(rank, 2))})
        for name, value in held.items():
            if short and rank and value.dtype == torch.float32:
                held[name] = value.bfloat16().to(getattr(torch, saved))
        _as_dumped(_made(tmp_path / f"TP{rank}_PP0_Rank{rank}_pid{rank}"), held, rank)
    with opened(tmp_path) as trace:
        told = [row.why for row in unread_arrays(trace) if "rank 1" in row.name]
    assert told == ["its values are bfloat16, those of the other ranks are not"] * short


@pytest.mark.parametrize("change", ["all", "zeros"])
def test_ranks_of_one_type_or_of_zeros_are_not_named(change: str, tmp_path: Path) -> None:
    """All ranks computed in bfloat16; or one has nothing of the sums, such as experts' tokens."""
    for rank in range(2):
        held = _flat({**WHOLE, **state(written(), of_rank(rank, 2))})
        for name, value in held.items():
            if value.dtype == torch.float32 and (change == "all" or rank):
                held[name] = value.bfloat16().float() if change == "all" else 0 * value
        _as_dumped(_made(tmp_path / f"TP{rank}_PP0_Rank{rank}_pid{rank}"), held, rank)
    with opened(tmp_path) as trace:
        assert not [row.why for row in unread_arrays(trace) if "its values are" in row.why]
