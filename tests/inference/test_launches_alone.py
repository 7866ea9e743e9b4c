"""What is launched on a device, and what a cache takes, of sizes made for it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from aprfmt.inference import memory_estimate
from aprfmt.inference.backends.base import ROWS
from aprfmt.inference.backends.torch_backend import TorchBackend
from aprfmt.inference.fast import cupy_recurrent
from aprfmt.inference.fast.cuda import layers, memory
from aprfmt.inference.fast.cuda.ops import GROUP
from aprfmt.inference.recurrence import TINY

# --- launches -----------------------------------------------------------------------------------


class Placed:
    """A tensor of zeros with an address of its own."""

    def __init__(self, address: int, *shape: int, size: int = 2) -> None:
        self.held = torch.zeros(shape, dtype=torch.float16 if size == 2 else torch.float32)
        self.address, self.shape = address, shape

    def data_ptr(self) -> int:
        return self.address

    def stride(self, axis: int) -> int:
        return self.held.stride(axis)

    def element_size(self) -> int:
        return self.held.element_size()

    def numel(self) -> int:
        return self.held.numel()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The name, grid, block and arguments of what is launched."""
    found: list[tuple[Any, ...]] = []

    def load(name: str, dtype: str) -> Any:
        assert dtype == "float16"

        def launch(grid: Any, block: Any, given: Any, **more: Any) -> None:
            assert more.pop("stream") == "stream 7"
            found.append((name, grid, block, given, *more.values()))

        return launch

    monkeypatch.setattr(layers, "_load_kernel", load)
    monkeypatch.setattr(layers, "stream_of", lambda stream: f"stream {stream}")
    return found


COMMON: Any = {"dtype": "float16", "stream": 7}


def test_elements_are_covered_by_as_many_blocks_as_they_need(launched: Any) -> None:
    for width, blocks in ((1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)):
        gate, up, y = Placed(1, 3, 2 * width), Placed(2, 3, width), Placed(3, 3, width)
        layers.act_mul(gate, up, y, "gelu", **COMMON)
        k, v = Placed(1, 1, width - 1), Placed(2, 1, 1)
        layers.append(k, v, Placed(3, 8, width), Placed(4, 8, width), Placed(5, 1), **COMMON)
        assert launched == [
            ("act_mul", (blocks, 3), (256,), (1, 2 * width, 2, width, 3, width, 1)),
            ("append", (blocks,), (256,), (1, 2, 3, 4, 5, width - 1, 1)),
        ]
        launched.clear()


def test_a_row_of_a_norm_has_threads_for_its_pieces(launched: Any) -> None:
    """Of 16 bytes each, in whole warps, and no more than a block has."""
    for width, threads in ((1, 32), (256, 32), (257, 64), (512, 64), (8192, 1024), (9000, 1024)):
        x, weight, y = Placed(1, 2, 3, width), Placed(2, width), Placed(3, 2, 3, width)
        layers.rms_norm(x, weight, y, eps=0.5, offset=1, before=True, **COMMON)
        given = (1, 2, 3, width, 0.5, 1.0, 1)
        assert launched.pop() == ("rms_norm", (6,), (threads,), given)


@pytest.mark.parametrize("alone", [False, True])
def test_heads_are_rotated_a_block_each(alone: bool, launched: Any) -> None:
    for dim, block in ((64, 32), (65, 64), (128, 64)):
        q, out = Placed(1, 5, 4, dim), Placed(2, 5, 4, dim)
        k, k_out = (None, None) if alone else (Placed(3, 5, 2, dim), Placed(4, 5, 2, dim))
        table: Any = (Placed(5, 5, dim // 2), Placed(6, 5, dim // 2))
        for wide in (False, True):
            layers.rope(
                q,
                out,
                k,
                k_out,
                table,
                float32_table=wide,
                interleaved=wide,
                stepped=not wide,
                **COMMON,
            )
            more = (0, 0, 0, 0) if alone else (3, 2 * dim, 4, 2)
            assert launched.pop() == (
                "rope_wide" if wide else "rope_rounded",
                (4 if alone else 6, 5),
                (block,),
                (1, 4 * dim, 2, 4, *more, 5, 6, dim, dim // 2, int(wide), int(not wide)),
            )


def test_few_long_rows_are_shared_by_warps() -> None:
    """While each has two steps at least, and a device is not yet busy."""
    for rows, columns, lane, split in (
        (1, 255, 8, 1),
        (1, 511, 8, 1),
        (1, 512, 8, 2),
        (1, 1023, 8, 2),
        (1, 1024, 8, 4),
        (1, 1 << 20, 8, layers.WARPS),
        (layers.BUSY_WARPS - 1, 512, 8, 2),
        (layers.BUSY_WARPS, 512, 8, 1),
        (layers.BUSY_WARPS // 2, 1024, 8, 2),
        (layers.BUSY_WARPS // 2 - 1, 1024, 8, 4),
        (1, 255, 4, 1),
        (1, 256, 4, 2),
    ):
        assert layers.warps_per_row(rows, columns, lane) == split, (rows, columns, lane)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_product_joins_the_rows_of_its_weights(count: int, launched: Any) -> None:
    for rows, columns in ((4, 64), (5, 512), (8 * layers.BUSY_WARPS, 64)):
        weights = [Placed(10 + at, rows // (at + 1), columns) for at in range(count)]
        biases: Any = [Placed(20 + at, 4) if at != 1 else None for at in range(count)]
        x, y = Placed(1, 1, columns), Placed(2, 1, rows)
        total = sum(one.shape[0] for one in weights)
        split = layers.warps_per_row(total, columns, 8)
        several = 2 if total >= 8 * layers.BUSY_WARPS else 1
        each = layers.WARPS // split * several
        for residual in (None, Placed(3, 1, rows)):
            layers.matvec(weights, biases, x, y, residual=residual, **COMMON)
            name, grid, block, given = launched.pop()
            assert (name, block) == (f"matvec{several}", (layers.BLOCK,))
            assert (grid[0] - 1) * each < total <= grid[0] * each
            pad = (0,) * (3 - count)
            assert given == (
                *(10 + at for at in range(count)),
                *pad,
                *(0 if at == 1 else 20 + at for at in range(count)),
                *pad,
                *(one.shape[0] for one in weights),
                *pad,
                1,
                2,
                0 if residual is None else 3,
                columns,
                split,
            )
    gate, up = Placed(1, 5, 512), Placed(2, 5, 512)
    for first, second in ((None, Placed(4, 5)), (Placed(3, 5), None)):
        layers.matvec_gated(
            gate, up, first, second, Placed(5, 1, 512), Placed(6, 1, 5), "relu", **COMMON
        )
        added = (0, 4) if first is None else (3, 0)
        assert launched.pop() == (
            "matvec_gated",
            (3,),
            (layers.BLOCK,),
            (1, 2, *added, 5, 5, 6, 512, 2, 3),
        )


@pytest.mark.parametrize("given", [False, True])
def test_attention_is_launched_by_heads_and_rows(given: bool, launched: Any) -> None:
    sinks, cached = (Placed(8, 4), Placed(9, 1)) if given else (None, None)
    window, cap = (5, 2.5) if given else (None, None)
    at = (8, 9) if given else (0, 0)
    for keys, block in ((1024, 128), (1025, 256)):
        scores, probs = Placed(1, 4, 3, keys), Placed(2, 4, 3, keys)
        layers.softmax_causal(
            scores, sinks, probs, cached=cached, before=6, window=window, **COMMON
        )
        assert launched.pop() == (
            "softmax_causal",
            (12,),
            (block,),
            (1, at[0], 2, at[1], 6, 3, keys, window or 0),
        )
    for size, v_dim in ((2, 32), (2, 4096), (4, 32)):
        q, held, values = (
            Placed(1, 1, 4, 64, size=size),
            Placed(2, 2, 99, 64),
            Placed(3, 2, 99, v_dim),
        )
        layers.attend(
            q,
            held,
            values,
            sinks,
            Placed(4),
            Placed(5),
            Placed(6),
            cached=cached,
            count=7,
            window=window,
            scale=0.5,
            softcap=cap,
            **COMMON,
        )
        *begin, numbers, shared = launched.pop()
        assert begin == ["attend", (4, layers.SPLITS), (layers.KEYS,)]
        assert numbers == (
            1,
            2,
            3,
            at[0],
            4,
            5,
            6,
            at[1],
            7,
            window or 0,
            99,
            64,
            v_dim,
            0.5,
            cap or 0.0,
        )
        assert shared == 4 * (64 + max(v_dim, layers.KEYS * 16 // size))


# --- layer norms --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_norm_with_a_bias_is_torchs_to_the_bit(dtype: str) -> None:
    """Without one, or with rows of weights, it is the same norm step by step."""
    backend = TorchBackend("cpu", dtype)
    kind = getattr(torch, dtype)
    made = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(*shape, generator=made).to(kind) for shape in ((64, 96), (96,), (96,))
    )
    whole = backend.layer_norm(x, weight, bias, eps=1e-5)
    assert torch.equal(whole, functional.layer_norm(x, (96,), weight, bias, 1e-5))
    wide = x.double() - x.double().mean(-1, keepdim=True)
    plain = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    rows = torch.randn(64, 96, generator=made).to(kind)
    near = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    for scale, added in ((weight, None), (rows, None), (rows, bias)):
        found = backend.layer_norm(x, scale, added, eps=1e-5)
        right = plain * scale.double() + (0.0 if added is None else added.double())
        assert found.dtype == kind
        assert float((found.double() - right).abs().max() / right.abs().max()) < near


# --- what a cache takes -------------------------------------------------------------------------


def cache_bytes(monkeypatch: pytest.MonkeyPatch, tokens: int, **more: Any) -> dict[str, int]:
    """The bytes of a cache of two layers, each on a device of its own, by 2 or 4 a number."""
    kind = more.pop("kind", "none")
    monkeypatch.setattr(memory_estimate, "mixer_of_layer", lambda block, hp, layer: kind)
    monkeypatch.setattr(memory_estimate, "has_mixer", lambda *of: more.get("mixes", True))
    monkeypatch.setattr(memory_estimate, "_key_value_width", lambda kind, hp, layer: 10 + layer)
    monkeypatch.setattr(memory_estimate, "_window_size", lambda hp, layer, tokens: 1000 + tokens)
    monkeypatch.setattr(memory_estimate, "_state_size", lambda kind, hp: 7000)
    hp = {
        "n_layers": 2,
        "own_kv_layers": (True, more.get("own", True)),
        "head_dim": 8,
        "index_layers": (True, False),
        "index_head_dim": 3,
    }
    block = {"attention": "plain", "recurrence_place": "alone", "indexer": "none"}
    shapes = {
        "L0.conv.weight": (5, 6, 4),
        "L0.conv.bias": (5,),
        "L0.conv_proj.weight": (9, 9),
        "L0.own.weight": (8, 8),
        "L00.conv.weight": (99, 99),
        "conv.weight": (98, 98),
        "L0.conv1d.weight": (6,),
    }
    model: Any = SimpleNamespace(
        hyper=hp,
        spec=SimpleNamespace(block=SimpleNamespace(**block | more.get("block", {}))),
        roles={key: SimpleNamespace(shape=shape) for key, shape in shapes.items()},
    )
    on: Any = SimpleNamespace(
        itemsize=2,
        wide_itemsize=4,
        device_of_layer=lambda layer, count: "one" if more.get("together") else f"d{layer}",
    )
    return memory_estimate._cache_bytes(model, on, tokens)


def test_a_cache_holds_keys_states_and_what_an_indexer_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = ROWS
    for tokens, rows in (
        (1, least),
        (least, least),
        (least + 1, 2 * least),
        (4 * least, 4 * least),
    ):
        assert cache_bytes(monkeypatch, tokens) == {"d0": rows * 20, "d1": rows * 22}
        indexed = cache_bytes(monkeypatch, tokens, block={"indexer": "lightning"})
        assert indexed == {"d0": rows * 26, "d1": rows * 22}
        compressed = {"attention": "compressed", "indexer": "lightning"}
        found = cache_bytes(monkeypatch, tokens, block=compressed)
        assert found == dict.fromkeys(("d0", "d1"), 2 * (8 * rows + 1000 + tokens))
    assert cache_bytes(monkeypatch, 1, together=True) == {"one": least * 42}
    assert cache_bytes(monkeypatch, 1, own=False) == {"d0": least * 20, "d1": 0}
    assert cache_bytes(monkeypatch, 1, mixes=False) == {"d0": 0, "d1": 0}
    # A recurrence has its state and the last inputs of its kernels, and keys where it is beside.
    state = {"d0": 28000 + 2 * 30 * 3, "d1": 28000}
    assert cache_bytes(monkeypatch, 1, kind="mamba") == state
    beside = {"recurrence_place": "parallel"}
    assert cache_bytes(monkeypatch, 1, kind="mamba", block=beside) == {
        "d0": state["d0"] + least * 20,
        "d1": state["d1"] + least * 22,
    }


def test_keys_and_states_have_the_sizes_of_their_kind() -> None:
    hp: dict[str, Any] = {
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 3,
        "value_head_dim": 4,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 7,
        "global_head_dim": None,
        "global_kv_heads": None,
        "window_layers": (False, True),
        "delta_value_heads": 3,
        "delta_key_dim": 4,
        "delta_value_dim": 5,
        "ssm_size": 6,
        "ssm_state": 7,
        "index_layers": (True, False),
        "heavy_layers": (False, True),
        "sparse_rate": 4,
        "heavy_rate": 8,
        "index_head_dim": 2,
    }
    width = memory_estimate._key_value_width
    assert width("mla", hp, 0) == 6 * (5 + 3 + 4)
    assert width("plain", hp, 0) == 2 * (7 + 4)
    for same in (None, 7):
        assert width("plain", hp | {"value_head_dim": same}, 0) == 2 * 14
    wide = hp | {"global_head_dim": 11, "global_kv_heads": 3, "value_head_dim": None}
    assert (width("plain", wide, 0), width("plain", wide, 1)) == (3 * 22, 2 * 14)
    states = {
        kind: memory_estimate._state_size(kind, hp)
        for kind in ("gated_delta", "kimi_delta", "mamba", "mamba2", "lightning", "short_conv")
    }
    assert states == {
        "gated_delta": 60,
        "kimi_delta": 60,
        "mamba": 42,
        "mamba2": 42,
        "lightning": 6 * 49,
        "short_conv": 0,
    }
    window = memory_estimate._window_size
    # Of 4 tokens each: with the keys of the indexer, windows that overlap and what is left of them.
    assert [window(hp, 0, n) for n in (3, 4, 6)] == [9 * 12, 9 * (1 + 16), 9 * (1 + 24)]
    assert [window(hp, 1, n) for n in (7, 8, 9)] == [7 * 14, 7, 7 * (1 + 2)]
    assert window(hp | {"heavy_layers": (False, False)}, 1, 99) == 0


# --- arrays of cupy, by numpy's -------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
def test_arrays_are_joined_along_their_last_axis(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "array_module", lambda: np)
    given = [np.full((2, 2, 1 + n), n) for n in range(parts)]
    found = cupy_recurrent.CupyRecurrent.concat(SimpleNamespace(), given)  # type: ignore[arg-type]
    assert found.tolist() == torch.cat([torch.tensor(each) for each in given], -1).tolist()


@pytest.mark.parametrize(("keys", "lane"), [(16, 1), (32, 1), (64, 2), (256, 8)])
@pytest.mark.parametrize("channels", [False, True])
def test_the_delta_rule_is_launched_with_its_sizes_and_the_scale_of_queries(
    keys: int, lane: int, channels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp for each value of a head; queries are divided by the root of their size."""
    monkeypatch.setattr(memory, "array_module", lambda: np)
    monkeypatch.setattr(memory, "pointer", lambda x: x.shape)
    monkeypatch.setattr(cupy_recurrent, "make_contiguous", lambda x: x)
    launches: list[tuple[Any, ...]] = []
    owner: Any = SimpleNamespace(
        _wide=np.float32, _empty=lambda *shape: np.zeros(shape), wide=lambda x: x,
        _ops=SimpleNamespace(launch=lambda *given: launches.append(given)),
    )  # fmt: skip
    k, v = np.zeros((3, 2, keys)), np.zeros((3, 4, 5))
    decay = np.zeros((3, 4, keys) if channels else (3, 4))
    read, after = cupy_recurrent.CupyRecurrent.delta(owner, k, k, v, decay, v[..., 0], None)
    assert read.shape == v.shape and after.shape == (4, keys, 5)
    (given,) = launches
    assert given[0] == f"delta{lane}" and given[1][1] == 4
    assert given[1][0] * GROUP >= 5 * 32
    assert given[-7:-1] == (3, 2, keys, 5, channels, TINY)
    assert given[-1] == pytest.approx(1 / keys**0.5, rel=1e-12)
