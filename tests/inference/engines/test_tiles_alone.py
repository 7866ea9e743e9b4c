"""Stored rows of parts of arrays, and engines' names of modules, each by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.engines import engine_modules
from aprfmt.inference.engines.modules import ModuleReader
from aprfmt.inference.engines.tiles import StoredRows, Tiles, join_columns, join_rows


def tiles_of(values: Any) -> Tiles:
    rows, width = values.shape

    def fill(row: int, column: int, out: Any) -> None:
        out[...] = values[row : row + out.shape[0], column : column + out.shape[1]]

    def stored(row: int, count: int) -> list[StoredRows]:
        assert 0 <= row and row + count <= rows
        raw = memoryview(values[row : row + count].tobytes())
        return [StoredRows("F32", raw, width, 0, width, lambda: None, "here")]

    return Tiles(rows, width, fill, stored)


def held(tiles: Tiles, row: int, count: int) -> Any:
    """Return what stored rows hold, side by side."""
    assert tiles.stored is not None
    parts = [
        np.frombuffer(one.raw, np.float32).reshape(count, -1)[:, one.first : one.first + one.wide]
        for one in tiles.stored(row, count)
    ]
    return np.concatenate(parts, axis=1)


def test_stored_rows_of_a_part_are_those_of_the_whole() -> None:
    x, y = (np.random.default_rng(i).normal(size=(9, 4 + i)).astype(np.float32) for i in (0, 1))
    whole = np.hstack([x, y])
    beside = join_columns([tiles_of(x), tiles_of(y)])
    for tiles, expected in (
        (beside, whole),
        (beside.row_range(3, 5), whole[3:8]),
        (beside.row_range(2, 6).row_range(1, 4), whole[3:7]),
        (beside.columns(2, 4), whole[:, 2:6]),
        (beside.columns(4, 5).row_range(4, 5), y[4:9]),
        (beside.row_range(4, 5).columns(0, 4), x[4:9]),
    ):
        assert (tiles.rows, tiles.width) == expected.shape
        assert np.array_equal(tiles.read(), expected)
        for row in range(tiles.rows):
            for count in (1, tiles.rows - row):
                assert np.array_equal(held(tiles, row, count), expected[row : row + count])
    assert join_rows([tiles_of(x), tiles_of(x)]).row_range(1, 2).stored is None


def test_names_of_engines_modules_are_those_of_transformers() -> None:
    """The function of gated activations multiplies by the other half, so that it is the product."""
    layer = "model.layers.3"
    for name, gated, plain in (
        (f"{layer}.self_attn.attn", f"{layer}.self_attn.o_proj#in", None),
        (f"{layer}.mlp.act_fn", f"{layer}.mlp.down_proj#in", f"{layer}.mlp.act_fn"),
        (f"{layer}.mlp.experts", f"{layer}.mlp", None),
        (f"{layer}.block_sparse_moe.experts", f"{layer}.block_sparse_moe", None),
        ("layers.0.mlp.experts", "layers.0.mlp", None),
        ("logits_processor", "logits", None),
        ("next_token_logits", "logits", None),
        ("language.logits_processor", "language.logits", None),
        (f"{layer}.mlp.experts.w13", f"{layer}.mlp.experts.w13", None),
        (f"{layer}.mlp.down_proj", f"{layer}.mlp.down_proj", None),
    ):
        expected = {True: gated, False: gated if plain is None else plain}
        for kind, new in expected.items():
            assert engine_modules.module_name(name, kind, {}) == new, (name, kind)
            if new != name:  # what is there already keeps its name
                there: Any = {new: None}
                assert engine_modules.module_name(name, kind, there) == name
    assert engine_modules.has_engine_modules(["a.mlp.gate_up_proj"])
    assert engine_modules.has_engine_modules(["a.self_attn.attn", "b"])
    assert not engine_modules.has_engine_modules(["a.mlp.gate_proj", "a.attn", "gate_up_proj"])


def test_the_stream_before_a_norm_is_what_its_layer_or_its_norm_takes() -> None:
    for name, stream in (
        ("model.layers.4.input_layernorm", "model.layers.4#in"),
        ("model.layers.4.post_attention_layernorm", "model.layers.4.post_attention_layernorm#in"),
        ("model.layers.4.mlp", ""),
        ("model.norm", ""),
    ):
        assert engine_modules._stream_before(name) == stream
    for name, module in (
        ("model.layers.4.0", "model.layers.4"),
        ("model.layers.4.1", "model.layers.4"),
        ("model.layers.4.2", "model.layers.4.2"),
        ("model.norm.1", "model.norm"),
        ("a.mlp.0", "a.mlp"),
        ("a.mlp.1", "a.mlp.1"),
    ):
        assert engine_modules.module_of_size(name) == module


@pytest.mark.parametrize(
    ("tokens", "rows", "unread"),
    [(None, None, True), (4, None, True), (3, None, False), (5, None, False), (3, [0, 2], True)],
)
def test_an_array_is_left_unread_where_it_has_a_row_for_each_token(
    tokens: int | None, rows: list[int] | None, unread: bool
) -> None:
    """Of rows that are named, or where the number of tokens is not known, no row is missing."""
    recorded: list[Any] = []
    collector = SimpleNamespace(
        takes_unread=True,
        add_unread=lambda point, layer, shape, tiles, **more: recorded.append((point, shape, more)),
    )
    reading = SimpleNamespace(point=SimpleNamespace(name="q"), layer=1, rank=0)
    reader: Any = SimpleNamespace(
        _collector=collector, _tokens=tokens, _lengths={}, _is_meant=lambda reading: True,
        modules=SimpleNamespace(read=lambda key: [reading]),
        _plain_shape=lambda reading, tiles: (tiles.rows, tiles.width),
    )  # fmt: skip
    tiles: Any = SimpleNamespace(rows=4, width=6, size=24)
    assert ModuleReader.add_unread(reader, "key", tiles, rows) is unread
    assert recorded == [("q", (4, 6), {"rows": rows, "rank": 0})] * unread
    assert reader._lengths == ({"1.q": 4} if unread else {})
