"""What a copy derives from, which command writes it again, and bounds of losses, worked by hand."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import quant_state
from aprfmt.codecs.lattice import Lattice
from aprfmt.measure import (
    alignment,
    bounds,
    named_causes,
    numbers,
    requantization,
    sampling,
    tolerances,
    trace_view,
)
from aprfmt.measure.coarse_steps import WideSteps
from aprfmt.measure.requantization import QuantRecipe
from aprfmt.model import name_relations

# --- blocks that derive from a base -------------------------------------------------------------

ROWS, BLOCKS, SIZE = 6, 2, 34  # Q8_0: blocks of 32 values in 34 bytes
ONE, TWO = QuantRecipe("fused"), QuantRecipe("strict", "F16")


def derived(
    wrong: dict[QuantRecipe, set[int]], monkeypatch: pytest.MonkeyPatch, importance: Any = None
) -> tuple[Any, list[tuple[str, int]]]:
    """Return the result where recipes give these blocks wrong, and which chunks each has made."""
    made: list[tuple[str, int]] = []

    def encode_rows(name: str, values: Any, **given: Any) -> bytes:
        way = next(one for one in (ONE, TWO) if one.fma == given["fma"])
        assert (name, values[0], given["expert_rows"]) == ("Q8_0", way, 0)
        assert given["importance"] is importance
        made.append((way.fma, given["first"]))
        held = np.zeros((ROWS * BLOCKS, SIZE), np.uint8)
        held[sorted(wrong[way]), -1] = 1
        begin = given["first"] * BLOCKS
        return held[begin : begin + len(values[1]) * BLOCKS].tobytes()

    def chunks(size: int) -> Any:
        yield from ((start, start + 2, [0] * 2) for start in range(0, ROWS, 2))

    monkeypatch.setattr(requantization, "WAYS", (ONE, TWO))
    monkeypatch.setattr(requantization, "store_through", lambda values, way: (way, values))
    monkeypatch.setattr(requantization, "encode_rows", encode_rows)
    data = SimpleNamespace(window=lambda start, stop: bytes(stop - start))
    side: Any = SimpleNamespace(data=data, row_bytes=BLOCKS * SIZE, shape=(ROWS, 64))
    base: Any = SimpleNamespace(chunks=chunks)
    return requantization._derive_blocks("Q8_0", side, base, importance), made


def test_the_first_block_that_a_recipe_does_not_give_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the very first one of all, and one behind chunks that are right."""
    for wrong, block, row, element in (
        ({0}, 0, 0, 0),
        ({0, 4, 11}, 0, 0, 0),
        ({1, 4}, 1, 0, 32),
        ({5, 9}, 5, 2, 32),
        ({11}, 11, 5, 32),
    ):
        found, _ = derived({ONE: wrong, TWO: set(range(12))}, monkeypatch)
        assert (found.block, found.row, found.element) == (block, row, element), wrong
        assert found.text == (
            f"block {block} (row {row}, elements {element}-{element + 31}) does not derive from "
            f"the base; at least {len(wrong)} blocks do not (fused)"
        )


def test_the_recipe_that_gives_most_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = derived({ONE: {3, 7}, TWO: {9}}, monkeypatch)
    assert (found.derives, found.block, found.mode) == (False, 9, "strict, through F16")
    found, _ = derived({ONE: {3}, TWO: {9}}, monkeypatch)
    assert (found.block, found.mode) == (3, "fused")  # of two alike the first
    weights: Any = object()
    for matrix, more in ((None, ""), (weights, ", with its importance matrix")):
        found, _ = derived({ONE: {3}, TWO: set()}, monkeypatch, matrix)
        assert (found.derives, found.mode) == (True, "strict, through F16")
        assert found.text == f"requantized from base, strict, through F16{more}"


def test_a_recipe_is_given_up_where_most_blocks_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [(way, start) for way in ("fused", "strict") for start in (0, 2, 4)]
    assert derived({ONE: {0, 1}, TWO: {0}}, monkeypatch)[1] == every  # half of a chunk
    assert derived({ONE: {0, 1, 2}, TWO: {0}}, monkeypatch)[1] == [every[0], *every[3:]]
    late = derived({ONE: {0, 4, 5, 6, 7}, TWO: {0}}, monkeypatch)[1]
    assert late == [every[0], every[1], *every[3:]]  # five of the first eight


# --- commands that write a copy again -----------------------------------------------------------


def test_encodings_of_few_matrices_are_named_one_by_one() -> None:
    def command(*others: str) -> Any:
        theirs = {"a": "Q8_0", "b": "Q8_0", "c": "Q8_0", "d": "Q8_0", "e": "Q8_0", "f": "Q8_0"}
        theirs |= {f"t{i}": name for i, name in enumerate(others)}
        return named_causes._encoding_options(dict.fromkeys(theirs, "BF16"), theirs, None)

    assert command() == ["convert", "--encoding Q8_0"]
    for most in range(1, named_causes._NAMED + 1):
        named = [f"--tensor t{i}=F16" for i in range(most)]
        assert command(*["F16"] * most) == ["convert", "--encoding Q8_0", *named]
    assert command(*["F16"] * (named_causes._NAMED + 1)) is None
    assert command("no such encoding") is None
    assert command("Q6_K", "F16") == [
        "convert", "--encoding Q8_0", "--tensor t0=Q6_K", "--tensor t1=F16",
    ]  # fmt: skip


def test_what_a_side_lacks_does_not_decide_how_a_copy_is_written() -> None:
    options = named_causes._encoding_options
    assert options({"a": "F32", "b": "Q8_0"}, {"a": "F32", "b": "Q8_0"}, None) == ["convert"]
    assert options({"a": "F32"}, {"a": "F32", "lost": "Q8_0"}, None) == ["convert"]
    assert options({"a": "F32", "more": "F16"}, {"a": "Q8_0"}, None) == [
        "convert", "--encoding Q8_0",
    ]  # fmt: skip
    # All of A's numbers are B's too, though of two types.
    assert options({"a": "BF16", "b": "F16"}, {"a": "F32", "b": "F16"}, 1) == ["convert"]


# --- ranges of bytes ----------------------------------------------------------------------------


def test_bytes_are_compared_of_one_shape_and_one_encoding_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "_stored_bytes", lambda view: view.data)

    def view(shape: Any = (2, 3), encoding: str = "F32", data: Any = b"123") -> Any:
        return SimpleNamespace(shape=shape, encoding=encoding, data=data)

    def reason(a: Any, b: Any) -> Any:
        pair: Any = SimpleNamespace(a=a, b=b)
        return sampling._reason_not_compared(pair)

    assert reason(view(), view()) == ("", False)
    assert reason(None, view()) == ("only in B", True)
    assert reason(view(), None) == ("only in A", True)
    assert reason(view((2, 3)), view((3, 2))) == ("shape [2, 3] in A, [3, 2] in B", True)
    for a, b in (("F32", "I32"), ("Q8_0", "F32")):
        words = f"{a} in A, {b} in B: values must be compared"
        assert reason(view(encoding=a), view(encoding=b)) == (words, False)
    layouts = ("the layouts have no bytes in common: values must be compared", False)
    for other in (None, b"1234"):
        assert reason(view(), view(data=other)) == layouts
        assert reason(view(data=other), view()) == layouts


def test_ranges_are_joined_of_files_and_of_what_is_made_in_memory() -> None:
    """Each file is read once; ranges come back in the order in which they were asked for."""
    asked: list[tuple[str, Any]] = []

    class File:
        def __init__(self, name: str) -> None:
            self.name, self.held = name, bytes(range(100)) if name == "f" else bytes(100)

        def read(self, places: Any) -> Any:
            asked.append((self.name, list(places)))
            return [memoryview(self.held[start:stop]) for start, stop in places]

    files = {name: File(name) for name in "fg"}

    def run(name: str, start: int, nbytes: int) -> Any:
        def location(at: int) -> Any:
            return None if name == "made" else (files[name], 10 + at)

        def raw(begin: int, end: int) -> bytes:
            return bytes(200 + at for at in range(begin, end))

        tensor = SimpleNamespace(location=location, raw=raw)
        return SimpleNamespace(tensor=tensor, start=start, nbytes=nbytes)

    def data(*runs: Any) -> Any:
        return SimpleNamespace(runs=lambda start, stop: list(runs))

    wanted = [
        (data(run("f", 5, 2), run("made", 1, 3), run("g", 0, 1)), 0, 6),
        (data(run("made", 0, 1)), 0, 1),
        (data(run("f", 0, 1), run("f", 8, 2)), 0, 3),
    ]
    assert sampling._read_ranges(wanted) == [
        bytes([15, 16, 201, 202, 203, 0]), bytes([200]), bytes([10, 18, 19]),
    ]  # fmt: skip
    assert asked == [("f", [(15, 17), (10, 11), (18, 20)]), ("g", [(10, 11)])]


# --- words and bounds ---------------------------------------------------------------------------


def test_wide_steps_are_named_by_the_first_place_in_the_tensors_own_rows() -> None:
    one = WideSteps(1, 8, 2.0, ((3, 64),), 32)
    assert one.text() == "in 1 of 8 blocks of 32, at [3, 64], about 2 times too large"
    more = WideSteps(2, 8, 16.04, ((1, 32), (3, 64)), 32)
    assert more.text() == "in 2 of 8 blocks of 32, the first at [1, 32], about 16 times too large"
    assert "the first at [70, 32]" in more.text(np.array([9, 70, 80, 90]))


def test_a_labels_loss_may_be_off_by_its_roundings() -> None:
    """Of each: two of exp and ln, three of the loss, one for each e-fold of the vocabulary."""
    for dtype, u in (("float32", 2.0**-24), ("bfloat16", 2.0**-8)):
        both, sums = u + 2.0**-53, 2.0**-24 + 2.0**-53
        least = tolerances.label_loss_bound(0.0, dtype, 1)
        assert least == pytest.approx(2 * both + sums / tolerances.LANES, rel=1e-12)
        more = tolerances.label_loss_bound(1.0, dtype, 1) - least
        assert more == pytest.approx(3 * both, rel=1e-12)
        wide = tolerances.label_loss_bound(0.0, dtype, 8001) - least
        expected = math.log(8001) * both + 8000 * sums / tolerances.LANES
        assert wide == pytest.approx(expected, rel=1e-12)


def test_logits_may_be_off_by_the_root_of_their_roundings() -> None:
    """17 of a layer, 3 outside, one of the logits' own size; sums by their terms in float32."""
    for dtype in ("float32", "bfloat16"):

        def roundings(*given: Any, dtype: str = dtype) -> float:
            least = tolerances.logit_bound(dtype, 0, 0, 0.0)
            return 3 * (tolerances.logit_bound(dtype, *given) / least) ** 2

        assert roundings(4, 0, 0.0) == pytest.approx(71)
        assert roundings(0, 0, 5.0) == pytest.approx(28)
        u = {"float32": 1.0, "bfloat16": 2.0**-16}[dtype]  # float32's over that of the type
        assert roundings(4, 64, 0.0) == pytest.approx(71 + u**2 * 25 * 64)
        with_experts = tolerances.logit_bound(dtype, 4, 64, 5.0, moe=True)
        times = with_experts / tolerances.logit_bound(dtype, 4, 64, 5.0)
        assert times == pytest.approx(5.0 if dtype == "bfloat16" else 1.0)


# --- places and names ---------------------------------------------------------------------------


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_the_place_of_a_value_counts_from_the_first_of_all_pieces(
    kernel: bool, differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though most pieces are added by a kernel, or found equal as a whole."""
    if not kernel:
        monkeypatch.setattr(numbers, "native_kernels", lambda: None)
    size = 2 * numbers.PIECE + 5
    x = np.linspace(1, 2, size).astype(np.float32)
    for at in (0, numbers.PIECE - 1, numbers.PIECE, size - 1):
        y = x.copy()
        y[at] = np.nan
        if differ:
            y[:: numbers.PIECE // 2] *= 2
            y[at] = np.nan
        sums = numbers.PairSums(x.shape)
        with np.errstate(all="ignore"):
            sums.add(x, y, None)
        found = sums.odd.result(x.shape)
        assert found is not None and found.count == size
        assert (found.at, found.a, found.b, found.alone, found.both) == ((at,), 0, 1, 1, 0)


def packed(**changed: Any) -> Any:
    """Return the result for a bitsandbytes weight of 4 x 128 in blocks of 64, with wrong bytes."""
    from aprfmt.codecs import encode

    values = np.random.default_rng(5).normal(size=(4, 128)).astype(np.float32)
    options = {"blocksize": 64, "double_quantization": False, "dtype": "float32"}
    made = encode("NF4", values, options=options)
    parts = {key: bytearray(data) for key, data in made.items()}
    for suffix, at in changed.items():
        own = {"codes": "", "absmax": quant_state.ABSMAX}.get(suffix, suffix)
        parts[own][at] ^= 1
    raw = {key: memoryview(bytes(data)) for key, data in parts.items()}
    base: Any = SimpleNamespace(numpy=lambda: values, shape=values.shape)
    return requantization._derive_packed("NF4", raw, base)


def test_the_first_block_of_packed_codes_or_scales_is_named() -> None:
    """Two codes a byte, four bytes a scale: a block of 64 has 32 bytes of codes."""
    right = packed()
    assert (right.derives, right.text) == (True, "requantized from base, as float32")
    for changed, block in (
        ({"codes": 0}, 0), ({"codes": 31}, 0), ({"codes": 32}, 1), ({"codes": 255}, 7),
        ({"absmax": 3}, 0), ({"absmax": 4}, 1), ({"codes": 200, "absmax": 12}, 3),
        ({"codes": 40, "absmax": 28}, 1),
    ):  # fmt: skip
        found = packed(**changed)
        place = (block, block // 2, block % 2 * 64)
        assert (found.derives, found.block, found.row, found.element) == (False, *place), changed
        assert found.text == (
            f"block {block} (row {place[1]}, elements {place[2]}-{place[2] + 63}) does not derive "
            "from the base"
        )


@pytest.mark.parametrize("towers", [False, True])
def test_names_are_paired_by_their_rules_and_towers_by_their_module(towers: bool) -> None:
    rule = SimpleNamespace(function=lambda name: name.removeprefix("base."))
    model: Any = SimpleNamespace(
        relations=[SimpleNamespace(rules=[rule])],
        config={"vision_config": {"layers": 1}} if towers else {},
        kind=None,
    )
    names = ["base.x", "model.vision_tower.vision_model.y", "vision_tower.y", "other"]
    found = alignment._names_for_pairing(model, names)
    plain = {"x": "base.x", "other": "other", "vision_tower.y": "vision_tower.y"}
    assert found == plain | {names[1]: names[1]}  # one of two with one name keeps its own
    alone, model.relations = names[1], []
    tower = "vision_tower.y" if towers else alone
    assert alignment._names_for_pairing(model, [alone, "base.x"]) == {
        tower: alone, "base.x": "base.x",
    }  # fmt: skip


class Sets(dict[str, Any]):
    """A model's tensors by stored name, of no relation and no tower."""

    relations: tuple[Any, ...] = ()
    roles: tuple[str, ...] = ()
    config: Any = None
    kind: Any = None


def test_tensors_under_one_prefix_are_pairs_though_no_shape_fits() -> None:
    """Of several sets of the same names only one whose shapes fit is paired without its prefix."""

    def tensor(*shape: int, value: float = 1.0) -> Any:
        return SimpleNamespace(shape=shape, value=value)

    def paired(a: Any, b: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
        def apart(pairs: Any) -> tuple[float, float]:
            alike = [(x, y) for x, y in pairs if x.shape == y.shape]
            off = [abs(x.value - y.value) for x, y in alike]
            return 1 - len(alike) / len(pairs), sum(off) / len(off) if off else 1.0

        monkeypatch.setattr(alignment, "_set_distance", apart)
        monkeypatch.setattr(name_relations, "relation_between_names", lambda *given: given[2])
        found, _ = alignment._pair_by_name(Sets(a), Sets(b), list(a), list(b))  # type: ignore[arg-type]
        names = {id(one): name for side in (a, b) for name, one in side.items()}
        return [(names.get(id(one.a)), names.get(id(one.b))) for one in found]

    ours = {f"block{i}.w": tensor(2, 2) for i in range(4)}
    with pytest.MonkeyPatch.context() as patch:
        for shape in ((2, 2), (3, 3)):
            theirs = {f"model.{name}": tensor(*shape) for name in ours}
            assert paired(ours, theirs, patch) == [(name, f"model.{name}") for name in ours]
        near = {f"near.{name}": tensor(2, 2) for name in ours}
        far = {f"far.{name}": tensor(2, 2, value=1.25) for name in ours}
        for theirs in (near | far, far | near):
            found = paired(ours, theirs, patch)
            assert found[:4] == [(name, f"near.{name}") for name in ours]
            assert sorted(found[4:]) == [(None, f"far.{name}") for name in ours]
        odd = {f"odd.{name}": tensor(9, 9) for name in ours}
        assert paired(ours, odd | far, patch)[:4] == [(name, f"far.{name}") for name in ours]
        more = {f"more.{name}": tensor(8, 8) for name in ours}
        alone = [(name, None) for name in ours] + [(None, name) for name in odd | more]
        assert paired(ours, odd | more, patch) == alone  # of two that fit no shape none is the one


def test_values_beyond_an_end_are_clipped_and_far_beyond_it_where_wider_than_the_group() -> None:
    """The group holds 4 to 12 in steps of 1: 8 wide; a value that was clipped has no error."""
    codes = np.arange(4.0, 13.0)
    y = np.tile(codes, (8, 8))[:, :64]
    lattice: Any = tuple(np.full(y.shape, value) for value in (1.0, 4.0, 12.0))
    for off, far in ((7.5, False), (8.0, False), (8.5, True), (15.5, True)):
        for end, sign in ((12.0, 1), (4.0, -1)):
            x = y.copy()
            (at, *_) = np.argwhere(y == end)
            x[tuple(at)] += sign * off
            found = bounds.fit_errors(x, y, Lattice(*lattice))
            assert found.ends == pytest.approx(1 / y.size)
            assert found.far == pytest.approx(far / y.size), (off, end)


@pytest.mark.parametrize(
    ("dump", "told"),
    [
        (None, ()),
        ({}, ()),
        ({"passes": 1}, ()),
        ({"passes": 1, "layouts": {"by rows": 3}, "notes": ["one"]}, ("one",)),
        ({"passes": 2}, ("put together from 2 passes",)),
        ({"passes": 3, "layouts": {"by rows": 3}}, (
            "put together from 3 passes; 3 arrays by rows",)),
        ({"passes": 2, "ranks": {"tp": 4}, "notes": ["one"]}, (
            "put together from 4 tp ranks, 2 passes", "one")),
        ({"passes": 1, "ranks": {"tp": 4}}, ("put together from 4 tp ranks",)),
    ],
)  # fmt: skip
def test_a_dump_is_put_together_from_more_than_one(dump: Any, told: tuple[str, ...]) -> None:
    trace: Any = SimpleNamespace(run={} if dump is None else {"dump": dump})
    assert trace_view.dump_sentences(trace) == told
