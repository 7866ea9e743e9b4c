"""Small rules of causes, each by itself, at both sides of its bounds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import attention, kv_cache, residual_stream, rope
from aprfmt.causes.tensor import (
    added_vectors,
    code_orders,
    joined_transposition,
    packed_damage,
    scale_bytes,
)
from aprfmt.causes.tensor.drawn_numbers import Drawn, is_even_throughout
from aprfmt.codecs import fp8
from aprfmt.diagnosis.trace_results import weights_inside

RNG = np.random.default_rng(5)

# --- tensors ------------------------------------------------------------------------------------


class Rows:
    """A tensor of a model, of which rows are taken."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float64)
        self.rows, self.columns = self.values.shape
        self.dropped = 0

    def take(self, rows: Any) -> Any:
        return self.values[rows]

    def drop(self) -> None:
        self.dropped += 1


def test_a_vector_that_was_added_is_named_by_where_it_is_in_the_model() -> None:
    table = Rows([[0, 0, 0, 0], [9, 1, 1, 2], [5, 7, 1, 0]])
    norm = Rows([[3], [1], [4], [1]])
    held = {
        "token_embd.weight": table,
        "output_norm.weight": norm,
        "L0.attn_k.weight": Rows([[1, 2, 3, 9]]),  # a matrix of a layer is no table
        "L0.attn_norm.weight": Rows([[2], [2], [8]]),
        "other": None,
    }
    context = SimpleNamespace(sides=lambda label: list(held), reader=lambda label, key: held[key])
    a = Rows([[1, 2, 3, 4], [3, 2, 1, 0], [2, 2, 2, 8], [2, 2, 2, 4]])
    case: Any = SimpleNamespace(
        a=a, context=context, windows=lambda rows: [np.arange(2), np.arange(2, 4)]
    )

    def named(row: Any, slack: float = 0.0) -> tuple[list[float], str]:
        vector, name = added_vectors._named_row(case, np.array(row, np.float64), slack)
        return vector.tolist(), name

    assert named([-2, -2, -2, -4]) == ([-2, -2, -2, -4], "minus the mean of all of them")
    assert named([2, 2, 2, 4]) == ([2, 2, 2, 4], "")
    assert named([3, 1, 4, 1]) == ([3, 1, 4, 1], "plus output_norm.weight")
    assert named([-5, -7, -1, 0]) == ([-5, -7, -1, 0], "minus row 2 of token_embd.weight")
    assert named([1, 2, 3, 9]) == ([1, 2, 3, 9], "")
    size = 9 + 1 + 16 + 1
    assert named([3, 1, 4, 1.01], 0.01 / size**0.5)[1] == "plus output_norm.weight"
    assert named([3, 1, 4, 1.01], 0.004 / size**0.5) == ([3, 1, 4, 1.01], "")
    assert table.dropped and norm.dropped


def test_exponents_of_two_bytes_tell_how_they_were_misread() -> None:
    meant = fp8.E8M0.values.astype(np.float64)
    for says, numbers, either in scale_bytes.byte_readings(fp8.E8M0):
        if either or not scale_bytes.tells_bytes_apart(numbers):
            continue

        def told(*held: int, numbers: Any = numbers, wrong: int = 0) -> str:
            at = np.array(held)
            factor = meant[at] / numbers[at]
            factor[:wrong] *= 1.3
            return scale_bytes.describe_misread_exponents(numbers[at], factor)

        with np.errstate(all="ignore"):
            odd = np.log2(np.abs(numbers))
            usable = [
                b
                for b in range(90, 123)
                if np.isfinite(odd[b]) and abs(odd[b] - np.rint(odd[b])) > 0.1
            ]
        if len(usable) < 9:
            continue  # a power of two itself
        assert told(*usable[:2]) and told(*[usable[0]] * 9, usable[4])
        assert told(*[usable[0]] * 10) == "", "one byte"
        assert told(*usable[:2] * 5, wrong=1) and not told(*usable[:2] * 5, wrong=2)
        if "as whole numbers," in says:
            assert told(*usable[:2]) == says


def test_a_stack_is_exchanged_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(outer: int, rows: int, columns: int) -> list[tuple[int, bool, Any]]:
        found = joined_transposition._exchanges(outer, np.arange(rows), columns)
        return [(one.count, one.across, one.axes) for one in found]

    single = [(1, False, (0, 2, 1)), (1, True, (0, 2, 1))]
    monkeypatch.setattr(joined_transposition, "MOST", 24)
    assert exchanged(1, 3, 4) == single and exchanged(1, 4, 4) == single[:1]
    assert exchanged(2, 3, 5) == single
    axes = [(1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    stacked = [(2, across, each) for across in (False, True) for each in axes]
    assert exchanged(2, 3, 4) == [*single, *stacked]
    assert exchanged(2, 3, 3) == [single[0], *stacked]


def part(values: Any, name: str = "w", at: int = 100, encoding: str = "F32") -> Any:
    """A stored tensor of float32 values, from byte `at` of its file on."""
    held = np.asarray(values, "<f4")
    raw = held.tobytes()
    info = SimpleNamespace(
        name=name, offset=at, nbytes=len(raw), shape=held.shape, encoding=encoding
    )
    return SimpleNamespace(info=info, raw=lambda start, stop: raw[start:stop])


def damaged(a: dict[str, Any], b: dict[str, Any], **more: Any) -> list[str]:
    """The evidence on packed weights of these parts."""

    def side(parts: dict[str, Any], encoding: str = "Q", stored: int = 1) -> Any:
        return SimpleNamespace(
            side=SimpleNamespace(stored=[None] * stored, encoding=encoding, parts=parts)
        )

    case: Any = SimpleNamespace(
        key="L0.ffn_up.weight",
        a=side(a, **more.get("first", {})),
        b=side(b, **more.get("second", {})),
        before=SimpleNamespace(relative=0.5),
    )
    found = list(packed_damage.explain_damaged_parts(case))
    assert all(one.cause == "bit_rot" for one in found) and len(found) < 2
    return [line for one in found for line in one.evidence]


def test_damage_of_packed_parts_is_told_by_bytes_of_b() -> None:
    values = RNG.normal(size=(4, 64)).astype(np.float32)
    zeroed = values.copy()
    zeroed[1, 8:12] = 0
    a, b = {"": part(values, "a", 0)}, {"": part(zeroed, "b", 1000)}
    runs = packed_damage._differing_runs(a[""], b[""])
    assert runs is not None
    assert [run.says() for run in runs] == ["bytes 1288 to 1303 of b, all zero in B"]
    assert b"".join(runs[0].before) == values[1, 8:12].tobytes() and not any(runs[0].after[0])
    for first, second, where in (
        (a, b, "bytes 1288 to 1303 of b, all zero in B"),
        (b, a, "bytes 288 to 303 of a"),
    ):
        told = damaged(first, second)
        assert "no transformation" in told[0] and told[-1] == where
    swapped = values.copy()
    swapped[0, 3], swapped[0, 40] = values[0, 40], values[0, 3]
    assert "values are exchanged" in " ".join(damaged(a, {"": part(swapped)}))
    assert not damaged(a, {"": part(values)})
    # Four runs, of one part or of several, are no damage.
    four = values.copy()
    four[0, ::16] += 1
    assert not damaged(a, {"": part(four)})
    four[0, 0] = values[0, 0]
    assert damaged(a, {"": part(four)})
    assert not damaged(a | {"s": part(values)}, {"": part(four), "s": part(swapped)})
    assert damaged(a | {"s": part(values)}, {"": part(zeroed), "s": part(swapped)})
    # Of other parts, encodings or shapes nothing is told.
    assert not damaged(a | {"s": part(values)}, b) and not damaged(a, b | {"s": part(values)})
    assert not damaged(a, {"": part(zeroed, encoding="I32")})
    assert not damaged(a, {"": part(zeroed.reshape(8, 32))})
    for more in ({"encoding": "P"}, {"stored": 2}):
        assert not damaged(a, b, first=more) and not damaged(a, b, second=more)


def test_elements_are_of_the_word_whose_codes_they_follow() -> None:
    def by_word(of: Any, count: int, places: int, scale: Any = 1.0) -> Any:
        """`of`: the code that each element decodes, by its place among all."""
        made = code_orders._elements_by_word(
            lambda codes: codes.reshape(-1)[np.array(of)] * np.asarray(scale), count, places, 4
        )
        return None if made is None else made.tolist()

    assert by_word([0, 1, 2, 3], 2, 2) == [[0, 1], [2, 3]]
    assert by_word([0, 2, 1, 3, 5, 4], 3, 2) == [[0, 2], [1, 3], [4, 5]]
    assert by_word([0, 3, 3, 1], 2, 2) == [[0, 3], [1, 2]]
    assert by_word([0, 2, 2, 3], 2, 2) is None
    assert by_word([0, 1], 1, 2, [0.0, 1.0]) == [[0, 1]]
    assert by_word([2, 3, 0, 0], 2, 2, [1, 1, 0, 0]) == [[2, 3], [0, 1]]  # a scale of 0: the first
    assert by_word([2, 3, 2, 0], 2, 2, [1, 0, 0, 0]) is None


def test_numbers_are_even_where_no_row_and_no_column_stands_out() -> None:
    drawn = Drawn("normal", 0.0, 1.0)
    values = RNG.normal(size=(64, 96))
    assert is_even_throughout(values, drawn)
    assert not is_even_throughout(RNG.uniform(-1, 1, size=(64, 96)), drawn)
    few = RNG.normal(size=(7, 4096)) * np.linspace(0.9, 1.1, 7)[:, None]
    assert is_even_throughout(few, drawn) and is_even_throughout(few.T, drawn)
    more = RNG.normal(size=(8, 4096)) * np.linspace(0.9, 1.1, 8)[:, None]
    assert not is_even_throughout(more, drawn) and not is_even_throughout(more.T, drawn)


# --- the pass -----------------------------------------------------------------------------------


def test_heads_are_mapped_otherwise_where_some_share_a_key_head() -> None:
    for heads, shared, tried in ((4, 1, 0), (4, 2, 3), (4, 4, 0), (6, 3, 3)):
        patched: Any = SimpleNamespace(hp={"n_heads": heads, "n_kv_heads": shared})
        asked: list[Any] = []

        def chosen(own: Any, count: int, asked: Any = asked) -> list[Any]:
            asked.append((own.tolist(), count))
            return [own, own[::-1].copy()]

        changes = list(attention.head_mapping_changes(patched, chosen))
        own = [head * shared // heads for head in range(heads)]
        assert asked == ([(own, shared)] if tried else []) and len(changes) == tried
        for change, what in zip(changes, ("key and value", "key", "value"), strict=False):
            assert change.says == (
                f"query heads read {what} heads {', '.join(map(str, own[::-1]))}; they should "
                f"read {', '.join(map(str, own))}"
            )


def test_rows_of_a_cache_are_tried_from_the_first_that_is_twice_beyond() -> None:
    def tried(*distances: float) -> list[tuple[str, dict[str, int]]]:
        case: Any = SimpleNamespace(
            view=SimpleNamespace(point="attn_out", tolerance=1.0),
            tokens=len(distances),
            call=lambda name: object(),
            gives_point_value=lambda call: False,
            distances_by_row=lambda view: np.array(distances),
        )
        return [
            (change.says.partition(" are not")[0], dict(change.values["rows"]))
            for change in kv_cache.find_cached_rows(case)
            if "since" not in change.values
        ]

    rows = [{"1": 0, "2": 1, "3": 2}, {"0": 1, "1": 2, "2": 3}]
    for distances, start in (((0, 1.5, 2.5, 3), 2), ((0, 2.0, 1.5, 2.1), 3), ((0, 2.1, 9, 9), 1)):
        stale = [
            {str(start): start - 1},
            {str(at): start - 1 for at in range(start, 4)},
            {str(start): -1},
        ]
        whose = ("keys and values", "keys", "values")
        assert tried(*distances) == [(what, each) for each in (*rows, *stale) for what in whose]


class Hyper(dict[str, Any]):
    """Hyperparameters by name."""

    def with_values(self, **values: Any) -> "Hyper":
        return Hyper(self | values)


def test_angles_of_a_whole_head_turn_the_pairs_of_the_model_or_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compute(hp: Any, kind: Any, length: int) -> Any:
        return SimpleNamespace(inv_freq=0.5 ** np.arange(hp["rope_dim"] // 2), factor=2.0)

    monkeypatch.setattr(rope, "compute_frequencies", compute)
    monkeypatch.setattr(rope, "pass_length", lambda patched: 4)
    monkeypatch.setattr(rope, "rotate_with", lambda frequencies, factor: (frequencies, factor))

    def changes(n: int, width: int, attends: str = "gqa", *, scaled: bool = False) -> list[Any]:
        patched: Any = SimpleNamespace(
            hp=Hyper(rope_dim=n, head_dim=width),
            spec=SimpleNamespace(block=SimpleNamespace(attention=attends)),
        )
        kind: Any = SimpleNamespace(dim=None, scaled=scaled)
        return list(rope.head_width_changes(patched, kind))

    for n, width in ((4, 8), (6, 8), (2, 10)):
        turned = (0.5 ** np.arange(n // 2)).tolist()
        plain, spread = changes(n, width)
        assert plain.make[0].tolist() == turned and plain.make[1] == spread.make[1] == 2.0
        assert spread.make[0].tolist() == turned + [0.0] * (width // 2 - n // 2)
        for one in (plain, spread):
            assert one.values == {"frequencies": turned}
            assert f"the {n // 2} frequencies of the rotated pairs" in one.says
            assert (", and the pairs too" in one.says) == (one is spread)
    assert not changes(8, 8) and not changes(0, 8) and not changes(4, 8, "mla")
    assert not changes(4, 8, scaled=True)


def test_the_size_of_what_enters_a_layer_is_fitted_to_what_was_recorded_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted: list[tuple[Any, ...]] = []

    def fit(case: Any, make: Any, configured: float, usual: Any, stream: Any) -> list[Any]:
        fitted.append((configured, tuple(usual), stream))
        return [make(3.0)]

    monkeypatch.setattr(residual_stream, "_fit_size", fit)
    monkeypatch.setattr(residual_stream, "_sublayer_of", lambda case, call: call)

    def entering(recorded: Any, adds: list[str], after: tuple[str, ...] = ("L1.out",)) -> list[Any]:
        fitted.clear()
        case: Any = SimpleNamespace(
            layer=2,
            calls=lambda name: adds,
            view=SimpleNamespace(after=after),
            recorded=SimpleNamespace(value_of=lambda key: recorded if key == "L1.out" else None),
            patched=SimpleNamespace(hp={"hidden_size": 16}),
        )
        return list(residual_stream._find_entering_size(case))

    values = np.arange(6.0).reshape(2, 3)
    whole = SimpleNamespace(values=values, rows=None)
    for recorded in (None, whole):
        for adds in ([], ["attn"]):
            (change,) = entering(recorded, adds)
            ((configured, usual, stream),) = fitted
            assert configured == 1.0 and usual == ((4.0, 0.25) if adds else ())
            assert stream is (None if recorded is None else values)
            assert change.drop == (frozenset() if recorded is None else {"L1.out"})
            assert "in layer 2 is 3 times what left layer 1" in change.says
            patched: Any = SimpleNamespace(
                with_tap=lambda point, tap, layers: (
                    point,
                    tap(None, 1, np.ones((1, 2, 3)), {}).tolist(),
                    sorted(layers),
                )
            )
            wanted = np.full((2, 3), 3.0) if recorded is None else 3 * values
            assert change.make(patched, None) == ("out", [wanted.tolist()], [1])
    assert not entering(SimpleNamespace(values=values, rows=[1]), ["attn"])
    assert not entering(whole, [], ("L0.out", "L2.q")) and not fitted
    assert entering(whole, [], ("L2.q", "L1.mid"))


def test_weights_of_a_divergence_are_those_read_and_vectors_of_equal_values() -> None:
    def stored(*values: float) -> Any:
        held = np.array(values)
        return SimpleNamespace(shape=held.shape, numpy=lambda: held)

    weights = {
        "L1.attn_norm.weight": stored(1, 2),
        "L0.attn_norm.weight": stored(3, 4),
        "L1.ffn_norm.weight": stored(5, 6),
        "output_norm.weight": stored(1, 2),
        "L1.attn_q.bias": stored(1, 2, 3),
    }

    def inside(*calls: tuple[str, list[str], list[Any]], layer: int = 1) -> tuple[str, ...]:
        made = [
            SimpleNamespace(
                op=op,
                weights=[SimpleNamespace(key=key) for key in keys],
                vectors=[np.array(each, np.float64) for each in vectors],
            )
            for op, keys, vectors in calls
        ]
        case: Any = SimpleNamespace(
            patched=SimpleNamespace(stored=weights), layer=layer, view=SimpleNamespace(calls=made)
        )
        return weights_inside(case)

    both = ("L1.attn_norm.weight", "output_norm.weight")
    assert inside(("rms_norm", [], [[1, 2]])) == both
    assert inside(("rms_norm", [], [[3, 4]])) == () and inside(("rms_norm", [], [[9, 9]])) == ()
    assert inside(("rms_norm", [], [[3, 4]]), layer=0) == ("L0.attn_norm.weight",)
    assert inside(("matmul", ["a[3]", "b", "a[4]"], [[1, 2, 3]]), ("add", ["b"], [[5, 6]])) == (
        "a",
        "b",
        "L1.attn_q.bias",
        "L1.ffn_norm.weight",
    )
