"""Which differing tensors an explanation is tried on, at both sides of its bounds."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import arithmetic, initial_values, lattices, packed_scales, stored_bytes
from aprfmt.causes.tensor.drawn_numbers import CUT, FAR, Drawn
from aprfmt.causes.tensor.initial_values import LEAST, Initialiser, InitialNumbers
from aprfmt.causes.tensor.lattices import Grouping
from aprfmt.errors import FormatError

# --- weights that were never trained ------------------------------------------------------------


def test_a_model_is_untrained_where_most_of_its_equal_matrices_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first four that are large and fine enough; what cannot be read is left out."""
    dropped: list[str] = []

    def reader(side: Any) -> Any:
        return SimpleNamespace(**{"size": LEAST, "encoding": "F32"} | side.more)

    def sample(reader: Any, most: int, fewest: int) -> Any:
        if getattr(reader, "broken", False):
            raise FormatError("gone")
        return np.array([np.nan if getattr(reader, "odd", False) else 1.0])

    monkeypatch.setattr(initial_values, "RowReader", reader)
    monkeypatch.setattr(initial_values, "sample_values", sample)
    monkeypatch.setattr(
        initial_values, "_drawn_throughout", lambda values, of: True if of.drawn else None
    )

    def untrained(*rows: Any) -> bool:
        dropped.clear()
        pairs: Any = {}
        held: Any = {}
        for at, (drawn, more) in enumerate(rows):
            own = {**more, "drawn": drawn}
            shape = own.pop("shape", (4, 4))
            side = SimpleNamespace(shape=shape, more=own)
            key = f"t{at}"
            pairs[key] = SimpleNamespace(
                b=None if own.pop("absent", False) else side,
                drop=lambda key=key: dropped.append(key),
            )
            held[key] = SimpleNamespace(verdict=own.pop("verdict", "SAME_BYTES"))
        return initial_values._are_untrained(pairs, held)

    drawn: Any = (True, {})
    trained: Any = (False, {})
    for rows, expected in (
        ((), False),
        ((drawn,), True),
        ((trained,), False),
        ((drawn, trained), False),
        ((drawn, drawn, trained), True),
        ((drawn, drawn, drawn, trained, trained, trained, trained), True),
        ((drawn, drawn, trained, trained, drawn, drawn), False),
        ((drawn, (True, {"odd": True})), False),
    ):
        assert untrained(*rows) is expected, rows
        assert dropped == [f"t{at}" for at in range(min(len(rows), 4))]
    for more, looked in (
        ({"verdict": "DIFFERENT"}, False),
        ({"shape": (16,)}, False),
        ({"absent": True}, False),
        ({"size": LEAST - 1}, False),
        ({"encoding": "Q2_K"}, False),
        ({"broken": True}, True),
    ):
        assert untrained((False, more), drawn), more
        assert ("t0" in dropped) is looked
        assert not untrained((True, more), trained), more


def model(config: Any) -> Any:
    return SimpleNamespace(config=config)


def initialisers(
    kind: str,
    key: str,
    shape: Any,
    *,
    own: Any = None,
    other: Any = None,
    hyper: Any = (),
    weights: Any = None,
) -> dict[str, float]:
    context: Any = SimpleNamespace(
        models={"a": model(other), "b": model(own)},
        hyper=hyper,
        sides=lambda label: {} if label != "b" else weights or {},
    )
    known = initial_values._known_initialisers(context, "B", key, shape, kind)
    return {one.name: one.size for one in known}


def test_the_known_initialisations_are_those_of_the_libraries() -> None:
    """By the fans of a matrix, or of the one that a bias belongs to, and by the configuration."""
    usual = "transformers' usual initializer_range"
    assert initialisers("uniform", "L0.ffn_up.weight", (6, 4)) == {
        "1/sqrt(4), as torch.nn.Linear": 0.5,
        "as Kaiming's of 4 inputs": 1.5**0.5,
        "as Xavier's of 4 and 6": 0.6**0.5,
    }
    matrix = {"L0.ffn_up.weight": SimpleNamespace(shape=(6, 16))}
    vector = {"L0.ffn_up.weight": SimpleNamespace(shape=(16,))}
    bias = initialisers("uniform", "L0.ffn_up.bias", (6,), weights=matrix)
    assert bias == {"1/sqrt(16), as torch.nn.Linear": 0.25, "as Kaiming's of 16 inputs": 0.375**0.5}
    assert initialisers("uniform", "L0.ffn_up.bias", (6,), weights=vector) == {}
    assert initialisers("uniform", "L0.ffn_up.bias", (6,)) == {}
    assert initialisers("uniform", "L0.attn_norm.weight", (6,), weights=matrix) == {}
    assert initialisers("cut", "L0.ffn_up.weight", (6, 4)) == {usual: 0.02}
    fans = {
        "as Kaiming's of 4 inputs": 0.5**0.5,
        "as LeCun's of 4 inputs": 0.5,
        "as Xavier's of 4 and 6": 0.2**0.5,
    }
    assert initialisers("normal", "L0.ffn_up.weight", (6, 4)) == {usual: 0.02, **fans}
    assert initialisers("normal", "token_embd.weight", (6, 4)) == {
        usual: 0.02,
        **fans,
        "as torch.nn.Embedding": 1.0,
    }
    stated = "the initializer_range"
    for own, other, name, size in (
        ({"initializer_range": 0.5}, {"initializer_range": 0.25}, stated, 0.5),
        (None, {"initializer_range": 0.25}, stated, 0.25),
        ({"initializer_range": "x"}, None, None, 0.02),
        ({"initializer_range": 1}, None, stated, 1.0),
        ({"hidden_size": 8}, {"initializer_range": 0.25}, usual, 0.02),
    ):
        found = initialisers("cut", "x.weight", (6, 4), own=own, other=other)
        assert list(found.values()) == [size] and (name is None or list(found) == [name]), own
    deep = initialisers("cut", "x.weight", (6, 4), hyper=({}, {"n_layers": 8}, {"n_layers": 2}))
    assert deep == {usual: 0.02, f"{usual} / sqrt(2 * 8 layers)": 0.005}


def test_the_nearest_of_the_initialisations_that_fit_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the error of a deviation of so many values, of the drawn numbers' own kind."""
    sizes = [Initialiser(0.0, "none"), Initialiser(1.0, "one"), Initialiser(1.04, "more")]
    monkeypatch.setattr(initial_values, "_known_initialisers", lambda *given: iter(sizes))

    def name(size: float, shape: Any, kind: str = "normal") -> str:
        context: Any = None
        of = {"normal": 1.0, "uniform": 3**-0.5, "cut": CUT}[kind]
        drawn = Drawn(kind, 0.0, size * of)
        found = initial_values.usual_initialiser(context, "B", "x", shape, drawn)
        return "" if found is None else found.name

    for kind in ("normal", "uniform", "cut"):
        assert name(1.0, (64, 64), kind) == name(1.015, (64, 64), kind) == "one"
        assert name(1.025, (64, 64), kind) == name(1.04, (64, 64), kind) == "more"
        assert name(0.9, (64, 64), kind) == name(1.2, (64, 64), kind) == ""
        assert name(1.002, (512, 512), kind) == name(1.002, (2048, 2048), kind) == "one"
    # As far as its error goes, of no more values than are looked at.
    for kurtosis, kind in ((3.0, "normal"), (1.8, "uniform")):
        for shape, count in (((64, 64), 4096), ((1024, 1024), initial_values.LOOKED_AT)):
            near = FAR * ((kurtosis - 1) / 4 / count) ** 0.5 + 0.002
            assert name(1 - 0.99 * near, shape, kind) == "one"
            assert name(1 - 1.01 * near, shape, kind) == ""


@dataclass(frozen=True)
class Row:
    """What is known of a pair: its verdict, and whether a strong cause explains it."""

    verdict: str = "DIFFERENT"
    shape_b: tuple[int, ...] = (32, 32)
    strong: bool = False
    stats: Any = None

    def is_explained(self, weak: Any) -> bool:
        assert weak == initial_values.WEAK
        return self.strong


def fresh(
    monkeypatch: pytest.MonkeyPatch,
    rows: dict[str, Any],
    side: str = "B",
    *,
    untrained: bool = False,
    both: int = 0,
) -> dict[str, Any]:
    """The findings of a side of which the first word of a row says what its values are."""
    usual = Initialiser(0.02, "usual")
    drawn = Drawn("normal", 0.0, 0.02)
    kinds: dict[str, Any] = {
        "drawn": (drawn, None, usual),
        "drawn unusually": (drawn, None, None),
        "constant": (None, 1.0, None),
    }
    tried: list[Any] = []

    def initial(context: Any, pair: Any, key: str, label: str, all_of: list[bool]) -> Any:
        assert label == side
        if pair.kind == "broken":
            raise FormatError("gone")
        all_of += [True] * both
        if pair.kind not in kinds:
            return None
        of, constant, how = kinds[pair.kind]
        return InitialNumbers(key, side, of, constant, how, f"line of {key}")

    monkeypatch.setattr(initial_values, "_find_initial_numbers", initial)
    monkeypatch.setattr(initial_values, "_are_untrained", lambda pairs, rows: untrained)
    context: Any = SimpleNamespace(record_not_tried=lambda *given: tried.append(given[:2]))
    pairs: Any = {
        key: SimpleNamespace(
            key=key, kind=kind, a=None if kind == "absent" else 1, b=1, drop=lambda: None
        )
        for key, (kind, _) in rows.items()
    }
    found = initial_values._explain_side(
        context, pairs, {key: row for key, (_, row) in rows.items()}, side
    )
    broken = [key for key, (kind, _) in rows.items() if kind == "broken"]
    assert tried == [(("stale_tensor",), key) for key in broken]
    for key, one in found.items():
        assert (one.cause, one.where, one.side) == ("stale_tensor", (key,), side)
        assert one.evidence[1].endswith(f"line of {key}")
    return found


def test_large_drawn_matrices_carry_the_short_ones_of_their_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, equal = Row(shape_b=(32,)), Row("SAME_BYTES")
    rows = {
        "L0.a.weight": ("drawn", Row()),
        "L0.b.bias": ("constant", short),
        "L0.c.bias": ("drawn", short),
        "L1.b.bias": ("constant", short),
        "L1.c.weight": ("other", Row()),
        "L2.c.weight": ("broken", Row()),
        "L2.d.weight": ("absent", Row()),
        "L2.e.weight": ("drawn", Row(strong=True)),
        "L2.f.weight": ("drawn", equal),
        "out.bias": ("constant", short),
    }
    assert set(fresh(monkeypatch, rows)) == {"L0.a.weight", "L0.b.bias", "L0.c.bias"}
    # What stands outside of layers goes with most of them.
    for layers, of in ((1, 3), (2, 3), (3, 3), (2, 4), (3, 4)):
        own = {f"L{at}.a.weight": ("drawn", Row()) for at in range(layers)}
        more = {f"L{at}.b.weight": ("other", Row()) for at in range(of)}
        found = fresh(monkeypatch, {**own, **more, "out.bias": ("constant", short)})
        assert ("out.bias" in found) is (layers > of / 2), (layers, of)
    # Alone only where half of all is equal, and a known initialisation draws it.
    for equals, kind, joined in (
        (1, "drawn", True),
        (0, "drawn", False),
        (1, "constant", False),
        (1, "drawn unusually", False),
    ):
        rest = {f"L{at + 1}.a.weight": ("other", equal) for at in range(equals)}
        found = fresh(monkeypatch, {"L0.b.bias": (kind, short), **rest})
        assert set(found) == ({"L0.b.bias"} if joined else set())
    for size, large in (((31, 33), False), ((32, 32), True)):
        lone = fresh(
            monkeypatch,
            {"L0.a.weight": ("drawn", Row(shape_b=size)), "L0.b.bias": ("constant", short)},
        )
        assert set(lone) == ({"L0.a.weight", "L0.b.bias"} if large else set())


@pytest.mark.parametrize("side", ["A", "B"])
def test_where_nothing_was_trained_no_training_is_missing(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of B with a known initialisation it may be said all the same."""
    rows: dict[str, Any] = {f"L{at}.a.weight": ("drawn", Row()) for at in range(4)}
    assert set(fresh(monkeypatch, rows, side)) == set(rows)
    assert fresh(monkeypatch, rows, side, both=1) == {}
    three = dict(list(rows.items())[:3])
    assert set(fresh(monkeypatch, three, side, both=1)) == set(three)
    assert set(fresh(monkeypatch, rows, side, untrained=True)) == (
        set(rows) if side == "B" else set()
    )
    odd = {**rows, "L4.a.weight": ("drawn unusually", Row())}
    assert set(fresh(monkeypatch, odd, side)) == set(odd)
    assert set(fresh(monkeypatch, odd, side, untrained=True)) == (
        set(rows) if side == "B" else set()
    )


# --- other labels -------------------------------------------------------------------------------


def test_labels_of_as_many_bytes_are_of_types_that_are_read_by_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(name: str, **more: Any) -> Any:
        width = more.pop("width", 16)
        facts = {"known": True, "removed": "", "flat": False, "claim": "", "layout": "x"}
        return SimpleNamespace(
            **{"name": name, "block_size": 4, "row_bytes": lambda shape: width} | facts | more
        )

    table = {
        "own": row("own"),
        "as large": row("as large"),
        "unknown": row("unknown", known=False),
        "removed": row("removed", removed="gone"),
        "flat": row("flat", flat=True),
        "several": row("several", claim="scale"),
        "plain": row("plain", layout=""),
        "BF16": row("BF16", layout=""),
        "longer": row("longer", width=17),
        "blocks": row("blocks", block_size=5),
        "no codec": row("no codec"),
        "eight": row("eight", block_size=8),
    }
    monkeypatch.setattr(stored_bytes, "ENCODINGS", table)
    monkeypatch.setattr(stored_bytes, "CODECS", set(table) - {"no codec"})
    monkeypatch.setattr(stored_bytes, "encoding_row", table.__getitem__)

    def named(**more: Any) -> list[str]:
        side: Any = SimpleNamespace(
            **{"encoding": "own", "row_bytes": 16, "shape": (2, 8), "columns": 8} | more
        )
        return list(stored_bytes._same_size_encodings(side))

    assert named() == ["as large", "BF16", "eight"]
    assert named(encoding="as large") == ["own", "BF16", "eight"]
    assert named(columns=12) == ["as large", "BF16"]
    assert named(columns=5) == ["blocks"] and named(row_bytes=17) == ["longer"]
    assert named(row_bytes=None) == named(shape=(8,)) == []


# --- quantized again ----------------------------------------------------------------------------


def test_a_coarser_type_is_tried_where_what_is_stored_leaves_it_to_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = {"T": 0.1, "S": 0.01, "F32": 0.0, "N": 0.5}
    monkeypatch.setattr(arithmetic, "storage_noise", noise.__getitem__)
    monkeypatch.setattr(arithmetic, "_detour_encodings", lambda stored: ["T", "N"])
    monkeypatch.setattr(arithmetic, "_has_encoder", lambda name: name in ("T", "S"))
    monkeypatch.setattr(arithmetic, "encoding_row", lambda name: SimpleNamespace(block_size=4))
    monkeypatch.setattr(arithmetic, "_encode_again", lambda take, name: (take, name))
    monkeypatch.setattr(arithmetic, "steps_apart", lambda case: None)
    monkeypatch.setattr(arithmetic, "replace", lambda made, **facts: made)

    def tried(relative: float, a: str, b: str, columns: int = 8) -> list[Any]:
        case: Any = SimpleNamespace(
            a=SimpleNamespace(encoding=a, take="a", rows=3, columns=columns),
            b=SimpleNamespace(encoding=b, take="b", rows=3, columns=columns),
            before=SimpleNamespace(relative=relative),
            changed_rows=[0, 1],
            guess=lambda cause, says, label, take, slack, rows: (
                label,
                take,
                slack,
                says[0].split("'s, ")[1],
                len(rows),
            ),
        )
        return list(arithmetic.guess_quantization(case))

    # 0.1 of noise: up to twice that much, and above a quarter of it the stored type may hide it.
    own = ("B", ("b", "T"), 0.0, "quantized to T", 3)
    assert tried(0.2, "T", "F32")[-1] == own
    assert not tried(0.2001, "T", "F32") and not tried(0.2, "T", "F32", columns=6)
    for relative, twice, once in (
        (0.2, True, True),
        (0.04, True, True),
        (0.039, True, False),
        (0.0251, True, False),
        (0.025, False, False),
    ):
        found = tried(relative, "F32", "S")
        labels = [row for row in found if row[0] == "A"]
        assert (
            labels
            == [("A", (("a", "T"), "S"), 0.0, "quantized to T, then to S", 3)] * twice
            + [("A", ("a", "T"), 0.02, "quantized to T and decoded again", 3)] * once
        )
        assert [row for row in found if row[0] == "B"] == [
            ("B", ("b", "T"), 0.0, "quantized to T and decoded again", 3)
        ]
    assert not tried(1.1, "F32", "S")


def test_a_factor_is_asked_of_cells_of_four_values_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Grouping] = []
    sizes = [Grouping(1, 4), Grouping(1, 3), Grouping(1, 4), Grouping(2, 2), Grouping(1, 5)]
    monkeypatch.setattr(lattices, "possible_groupings", lambda *shape: sizes)
    monkeypatch.setattr(
        packed_scales, "_cells_fit_inside", lambda grouping, copy: grouping.columns < 5
    )
    monkeypatch.setattr(packed_scales, "_scales_of_cells", lambda copy, grouping: None)
    monkeypatch.setattr(packed_scales, "replace", lambda copy, grouping, scales: grouping)
    monkeypatch.setattr(packed_scales, "_repair_cells", asked.append)
    copy: Any = SimpleNamespace(grouping=Grouping(0, 1), y=np.zeros((4, 8)))
    for related in (True, False):
        asked.clear()
        assert not list(packed_scales.explain_scales(copy, related=related))
        assert asked == [Grouping(0, 1), Grouping(1, 4), Grouping(2, 2)]
    copy.y = np.zeros((3, 8))  # a column has three values
    asked.clear()
    assert not list(packed_scales.explain_scales(copy))
    assert asked == [Grouping(1, 4), Grouping(2, 2)]
