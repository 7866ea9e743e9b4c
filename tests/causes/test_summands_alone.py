"""Sums, windows and rotations of a pass; rows, elements and cells of a tensor: each rule alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import residual_stream, rope, usual_mistakes
from aprfmt.causes.forward.operation_patches import POINTS_BEFORE_SUM
from aprfmt.causes.tensor import flat_order, lattices, overwritten_bytes, permutation, stored_bytes
from aprfmt.causes.tensor.overwritten_bytes import ByteSpan
from aprfmt.causes.tensor.permutation import FoundLines
from aprfmt.errors import FormatError
from aprfmt.inference.moe import ROUTED

# --- sums of the stream ---------------------------------------------------------------------------


@pytest.mark.parametrize(("configured", "value"), [(1, 2), (1, 3), (4, 2), (0.5, 2)])
@pytest.mark.parametrize("sublayer", ["attn", "ffn"])
def test_a_factor_of_a_sublayer_takes_the_place_of_the_models(
    sublayer: str, configured: float, value: float
) -> None:
    """What is added has the model's factor already, so that it is times the quotient of both."""
    made: dict[str, Any] = {}

    def with_op(name: str, override: Any, layers: Any) -> str:
        made.update({"op": name, "override": override, "layers": layers})
        return "patched"

    patched: Any = SimpleNamespace(hp={"residual_scale": configured}, with_op=with_op)
    found = residual_stream.sublayer_factor_change(patched, sublayer, value)
    name = residual_stream.HALVES[sublayer]
    if (configured, value) == (1, 2):
        assert (found.cause, found.says) == ("residual", f"what {name} computed is added twice")
    else:
        assert (found.cause, found.values) == ("multiplier", {"residual_scale": {name: value}})
        says = f"what {name} computed is multiplied by {value:g}; the model says {configured:g}"
        assert found.says == says
    made["patched"] = found.make(patched, None)
    assert made["patched"] == "patched" and made["op"] == "add"
    stream, added = np.ones((2, 3), np.float32), np.full((2, 3), 5, np.float32)
    inside = SimpleNamespace(point=next(iter(POINTS_BEFORE_SUM[sublayer])))
    other = "ffn" if sublayer == "attn" else "attn"
    outside = SimpleNamespace(point=next(iter(POINTS_BEFORE_SUM[other])))
    times = 1 + 5 * value / configured
    assert np.all(made["override"](np.add, inside, stream, added) == times)
    assert np.all(made["override"](np.add, outside, stream, added) == 6)
    assert np.all(made["override"](np.add, inside, stream, added[0]) == 6)  # a bias


def test_one_summand_of_every_sum_of_a_layer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums of a stream; a bias is none, and what experts add has words of its own."""
    monkeypatch.setattr(residual_stream, "is_score_bias", lambda call: call.name == "score")
    monkeypatch.setattr(residual_stream, "_sum_number", lambda adds, index: index)
    monkeypatch.setattr(
        residual_stream, "keep_one_summand", lambda point, keep, number: (point, keep, number)
    )
    monkeypatch.setattr(residual_stream, "_sublayer_of", lambda case, call: "")
    monkeypatch.setattr(residual_stream, "parallel_change", lambda patched: "parallel")
    monkeypatch.setattr(residual_stream, "shared_norm_input_change", lambda: "one norm")
    routed = next(iter(ROUTED))

    def tried(layer: int, *calls: tuple[str, str, int], **more: Any) -> list[Any]:
        adds = [
            SimpleNamespace(
                name=name, location=SimpleNamespace(point=point), args=(None, np.zeros((2,) * axes))
            )
            for name, point, axes in calls
        ]
        facts = {"placement": "post", "parallel": False} | more
        case: Any = SimpleNamespace(
            layer=layer,
            calls=lambda op: adds,
            array=lambda x: x,
            view=SimpleNamespace(point="mid"),
            patched=SimpleNamespace(
                spec=SimpleNamespace(block=SimpleNamespace(placement=facts["placement"])),
                hp={"parallel_residual": facts["parallel"]},
            ),
        )
        return [
            one if isinstance(one, str) else (one.cause, one.make, one.values)
            for one in residual_stream.try_residual_sums(case)
        ]

    sums = [("sum", "attn_out", 2), ("bias", "q", 1), ("score", "scores", 2), ("sum", "x", 3)]
    assert tried(0, *sums) == [
        ("residual", (point, keep, number), {"kept": "added" if keep else "stream"})
        for keep in (1, 0)
        for point, number in (("attn_out", 0), ("x", 2))
    ]
    assert tried(-1, *sums) == []
    assert tried(0, ("sum", "per_layer_x", 2), ("sum", "altup_y", 2)) == []
    assert tried(0, ("positions", "embd", 2), ("types", "embd_in", 2)) == []  # no sublayer's
    assert tried(1, ("sum", routed, 2)) == [
        ("moe_routing", (routed, 1, 0), {"left_out": "routed experts are"}),
        ("moe_routing", (routed, 0, 0), {"left_out": "shared expert is"}),
    ]
    assert tried(0, placement="pre") == ["parallel", "one norm"]
    assert tried(0, placement="pre", parallel=True) == ["parallel"]


# --- windows and rotations ------------------------------------------------------------------------


def test_windows_are_of_other_sizes_and_in_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        usual_mistakes, "hyper_mistake", lambda cause, says, **values: (cause, says, values)
    )

    def tried(size: int | None, *layers: int) -> list[Any]:
        patched: Any = SimpleNamespace(hp={"sliding_window": size, "window_layers": layers})
        found: list[Any] = list(usual_mistakes._window_mistakes(patched))
        assert all(cause == "sliding_window" for cause, _, _ in found)
        return [value for _, _, values in found for value in values.values()]

    assert tried(None, 0, 0) == tried(8, 0, 0) == []
    assert tried(8, 1, 1) == [None, 9, 7, 4, 16]
    assert tried(1, 1) == [None, 2, 2]
    everywhere = (True,) * 4
    assert tried(8, 1, 0, 0, 0)[5:] == [
        everywhere,
        (False, True, True, True),
        (False, False, False, True),
        (False, True, False, False),
    ]
    assert tried(8, 1, 0)[5:] == [(True, True), (False, True)]  # one layer further is flipped
    assert tried(8, 0, 1, 1)[5:] == [
        (True, True, True),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    ]


def test_other_elements_of_a_head_are_rotated_where_only_some_are() -> None:
    def tried(n: int, width: int, attention: str = "gqa") -> list[list[int]]:
        patched: Any = SimpleNamespace(
            hp={"rope_dim": n, "head_dim": width},
            spec=SimpleNamespace(block=SimpleNamespace(attention=attention)),
        )
        found = list(rope.rotated_element_changes(patched))
        assert all(one.says.endswith(f"; the model says the first {n}") for one in found)
        return [one.values["elements"] for one in found]

    assert tried(4, 12) == [[8, 9, 10, 11], [0, 1, 6, 7], [0, 2, 4, 6]]
    assert tried(4, 6) == [[2, 3, 4, 5], [0, 1, 3, 4]]  # every second would be there twice
    assert tried(2, 3)[0] == [1, 2]
    assert tried(0, 8) == tried(8, 8) == tried(4, 8, "mla") == []


# --- whole rows and experts -----------------------------------------------------------------------


def units(
    monkeypatch: pytest.MonkeyPatch, *spans: tuple[int, int], held: Any = 0.0, **more: Any
) -> Any:
    """The finding on a tensor of 8 rows of 64 bytes, or of 4 experts of 2 rows, by its ranges."""
    shape = more.pop("shape", (8, 16))
    asked: list[Any] = []
    values = np.broadcast_to(np.asarray(held, np.float32), (8, 16))

    def judge(a: Any, b: Any) -> Any:
        asked.append((a, b))
        return SimpleNamespace(sure=more.get("foreign", False), says="unrelated")

    monkeypatch.setattr(overwritten_bytes, "judge_foreign", judge)
    monkeypatch.setattr(overwritten_bytes, "SelectedRows", lambda side, rows: rows.tolist())
    side = SimpleNamespace(row_bytes=64, columns=16, rows=8, take=lambda rows: values[rows])
    case: Any = SimpleNamespace(
        a=side, b=side, key="k", shape=shape, before=SimpleNamespace(relative=0.5)
    )
    found = list(overwritten_bytes._explain_units(case, [ByteSpan(*one) for one in spans]))
    if not found:
        return asked
    (one,) = found
    assert (one.cause, one.residual_before, one.residual_after) == ("stale_tensor", 0.5, 0.0)
    return one


def test_rows_that_hold_one_value_were_never_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = units(monkeypatch, (64, 190), (450, 460), held=3.0)
    assert found.evidence == (
        "rows 1-2, row 7: B holds 3 everywhere there, and was never filled",
        "all 5 other rows are equal to the byte",
    )
    assert found.proof is None
    assert units(monkeypatch, (64, 128)) == [([1], [1])], "zeros of a row may be lost bytes"
    stack = {"shape": (4, 2, 16)}
    found = units(monkeypatch, (128, 250), **stack)
    assert found.evidence == (
        "expert 1: B holds 0 everywhere there, and was never filled",
        "all 6 other rows are equal to the byte",
    )
    assert found.proof.count == 32
    half = units(monkeypatch, (0, 256), held=3.0)
    assert half.evidence[0].startswith("rows 0-3: ")
    assert units(monkeypatch, (0, 257), held=3.0) == [], "more than half of the rows"


def test_rows_of_other_values_are_of_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).normal(size=(8, 16))
    assert units(monkeypatch, (64, 192), held=values) == [([1, 2], [1, 2])]
    found = units(monkeypatch, (64, 192), held=values, foreign=True)
    assert found.evidence[0] == (
        "rows 1-2: other values, as of another state of training: unrelated"
    )
    found = units(monkeypatch, (256, 384), held=values, foreign=True, shape=(4, 2, 16))
    assert found.evidence[0].startswith("expert 2: other values")
    monkeypatch.setattr(overwritten_bytes, "GAP", 8)
    for span, whole in (((71, 185), True), ((72, 192), False), ((64, 184), False)):
        found = units(monkeypatch, span, held=values, foreign=True)
        assert bool(found) is whole, span


# --- elements -------------------------------------------------------------------------------------


def test_exchanged_elements_are_the_same_ones_in_another_order() -> None:
    x = np.arange(1, 17, dtype="<f4")

    def share(y: Any, encoding: str = "F32") -> float:
        a, b = x.tobytes(), y.tobytes()
        places = [at for at in range(len(a)) if a[at] != b[at]]
        case: Any = SimpleNamespace(
            a=SimpleNamespace(bytes=a), b=SimpleNamespace(bytes=b, encoding=encoding)
        )
        return stored_bytes._exchanged_share(case, places)

    def with_values(**at: float) -> Any:
        y = x.copy()
        for place, value in at.items():
            y[int(place[1:])] = value
        return y

    assert share(with_values(_2=x[9], _9=x[2])) == 2 / 16
    assert share(with_values(_0=x[1], _1=x[5], _5=x[0])) == 3 / 16
    assert share(with_values(_2=x[9], _9=77.0)) == 0
    assert share(with_values(_2=x[9])) == 0
    assert share(with_values(_2=x[9], _9=x[2]), "Q4_0") == 0


def test_lines_are_shifted_where_each_is_as_far_as_all_others() -> None:
    def shift(index: Any, at: Any, count: int = 8) -> int | None:
        return permutation.constant_shift(FoundLines(np.array(index), np.array(at), count, 0))

    every = np.arange(8)
    for by in (1, 2, 4):
        assert shift(every, (every + by) % 8) == by
    for by in (-1, -3):
        assert shift(every, (every + by) % 8) == by
    assert shift(every, every) is None
    assert shift([0, 1, 2], [1, 2, 4]) is None
    assert shift([0, 3, 7], [1, 4, 0]) == 1


def test_blocks_are_not_read_as_the_bits_of_16_bit_floats() -> None:
    """Though all of their values fit there."""
    values = np.tile(np.arange(32, dtype=np.float32), (2, 1))

    def told(encoding: str) -> list[Any]:
        side: Any = SimpleNamespace(
            encoding=encoding, row_bytes=None, shape=(2, 32), columns=32, take=lambda rows: values
        )
        case: Any = SimpleNamespace(
            a=side,
            b=side,
            sample_a=values,
            sample_b=values,
            guess=lambda cause, says, label, take, slack: says[0],
        )
        return list(stored_bytes.guess_dtype_mislabel(case))

    assert told("Q8_0") == []
    assert told("F32") == [
        f"{told}'s values are {label}'s {first} bits read as {second}"
        for label, told in ("AB", "BA")
        for first, second in (stored_bytes.SIXTEEN, stored_bytes.SIXTEEN[::-1])
    ]
    values[0, 3] = 1 + 2.0**-20
    assert told("F32") == []


# --- one buffer -----------------------------------------------------------------------------------


def test_tensors_of_one_buffer_are_plain_floats_of_equal_shapes() -> None:
    dropped: list[str] = []

    def view(name: str, shape: tuple[int, ...], encoding: str = "F32") -> Any:
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        return SimpleNamespace(
            stored=[SimpleNamespace(info=SimpleNamespace(name=name))],
            encodings=[encoding],
            shape=shape,
            numpy=lambda: values,
        )

    def pool(**sides: Any) -> Any:
        dropped.clear()
        pairs: Any = {
            key: SimpleNamespace(a=a, b=b, drop=lambda key=key: dropped.append(key))
            for key, (a, b) in sides.items()
        }
        return flat_order._pool_of(pairs, list(sides))

    right = {key: (view(key, (2, 3)), view(key, (2, 3), "BF16")) for key in "xy"}
    found = pool(**right)
    assert list(found.a) == list(found.b) == dropped == ["x", "y"]
    assert found.a["x"].dtype == np.uint16 and found.a["x"].size == 6  # bits of the coarser type
    for odd in (
        (view("z", (2, 3)), view("z", (3, 2))),
        (None, view("z", (2, 3))),
        (view("z", (2, 3)), None),
        (view("z", (2, 3)), view("z", (2, 3), "Q8_0")),
    ):
        assert pool(**right, z=odd) is None
    one = {key: (view("same", (2, 3)), view(key, (2, 3))) for key in "xy"}
    assert pool(**one) is None, "parts of one stored tensor"
    torn = view("z", (2, 3))

    def fail() -> Any:
        raise FormatError("torn")

    torn.numpy = fail
    assert pool(**right, z=(torn, view("z", (2, 3)))) is None and dropped[-1] == "z"


# --- cells ----------------------------------------------------------------------------------------


def test_so_many_cells_must_fit_and_later_ones_are_not_fitted_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted: list[int] = []

    def fit(cells: Any, code: Any, unit: Any) -> Any:
        fitted.append(len(cells))
        return cells[:, 0], np.where(cells[:, 0] < 0, np.inf, cells[:, 0])

    monkeypatch.setattr(lattices, "_fit_cell_scales", fit)

    def told(count: int, *bad: int) -> Any:
        fitted.clear()
        cells = np.arange(1.0, count + 1)[:, None]
        cells[list(bad)] *= -1
        any_: Any = None
        return lattices._fit_nearly_all(cells, any_, any_)

    first, most = lattices.FIRST_CELLS, round((1 - lattices.ALL) * 200)
    scales, bits = told(200)
    assert scales.tolist() == bits.tolist() == list(range(1, 201))
    assert fitted == [first, first, 2 * first, 4 * first, 200 - 8 * first]
    assert told(200, *range(0, 30 * most, 30)) is not None
    assert told(200, *range(0, 30 * (most + 1), 30)) is None
    assert told(200, *range(most + 1)) is None and fitted == [first]
    assert told(200, *range(200 - most - 1, 200)) is None and len(fitted) == 5


@pytest.mark.parametrize("layer", [-1, 0])
def test_the_tokens_of_a_second_segment_have_another_type(layer: int) -> None:
    """Where rows differ, from the first such row on, or after a separator that is there twice."""
    ids, rng = (1, 5, 2, 6, 7, 2), np.random.default_rng(6)
    table = rng.normal(size=(3, 4)).astype(np.float32)
    x = rng.normal(size=(6, 4)).astype(np.float32)

    def told(differs: list[int], at: int = layer, types: Any = table, rows: int = 6) -> Any:
        held = None if types is None else SimpleNamespace(numpy=lambda: types)
        patched = SimpleNamespace(
            ids=ids, weights=SimpleNamespace(get_role=lambda layer, role: held)
        )
        case: Any = SimpleNamespace(
            layer=at,
            patched=patched,
            view=SimpleNamespace(mine=np.zeros((rows, 4)), axis=0, tolerance=1e-3),
            distances_by_row=lambda view: np.asarray(differs, float),
        )
        return list(residual_stream.try_token_types(case))

    found = told([0, 0, 0, 1, 1, 1])
    said = [one.says for one in found if "at positions" in one.says]
    says = "the tokens at positions {} have type {}; the model says 0"
    assert said == [says.format(at, row) for row in (1, 2) for at in ("3-5",)]
    every = {one.values.get("at") for one in told([1, 0, 1, 1, 1, 1])}
    assert every == {None, "0, 2-5", "3-5"}  # all rows differ where tokens see later ones
    assert not told([0, 0, 0, 1, 1, 1], at=1) and not told([0, 0, 0, 1, 1, 1], types=None)
    assert len(told([0, 1], rows=2)) == 3  # a point with other rows: other types of all tokens
    made: dict[str, Any] = {}
    own = next(one for one in found if one.values.get("at") == "3-5")
    own.make(
        SimpleNamespace(with_op=lambda op, override, layers: made.update({op: override})), None
    )
    outside, inside = SimpleNamespace(point="embd"), SimpleNamespace(point="attn_out")
    wanted = x + table[[0, 0, 0, 1, 1, 1]]
    assert np.array_equal(made["add"](np.add, outside, x, table[0]), wanted)
    for at, added in ((inside, table[0]), (outside, table[1]), (outside, x)):
        assert np.array_equal(made["add"](np.add, at, x, added), x + added)
