"""What a product reads, which codes are read as what, and where a layer's own rule is tried."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import attention, convolution, norm, product_inputs
from aprfmt.causes.tensor import misread_codes
from aprfmt.causes.tensor.misread_codes import CodedSide
from aprfmt.inference.replay.patched_model import STREAM

RNG = np.random.default_rng(12)

# --- what a product reads -------------------------------------------------------------------------

INPUT, ATTENTION = np.array([[1.0, 2.0]]), np.array([[10.0, 20.0]])


class Backend:
    """Operations whose results say which one it was."""

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape)

    def shift(self, x: Any, by: float) -> Any:
        return x + by

    def layer_norm(self, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
        assert bias is None
        return "layer_norm", x.tolist(), weight.tolist(), eps


def context(kind: str = "rms", *there: tuple[int, str]) -> Any:
    return SimpleNamespace(
        backend=Backend(),
        block=SimpleNamespace(norm=kind),
        hp={"norm_eps": 0.125},
        weights=SimpleNamespace(get_role=lambda layer, role: (layer, role) in there or None),
        norm=lambda layer, name, x: ("norm", layer, name, x.tolist()),
        plain_norm=lambda x: ("plain", x.tolist()),
    )


def test_a_product_reads_the_stream_of_its_source_behind_a_norm() -> None:
    """The norm of the same layer, where the layer has its weight; and none without its points."""
    stream = STREAM
    first, after = product_inputs.SOURCES

    def read(source: str, normed: str, held: Any, c: Any = None) -> Any:
        made = product_inputs._read_value(source, normed, c or context(), 3, held)
        return made.tolist() if isinstance(made, np.ndarray) else made

    both = {stream: INPUT, "attn_out": ATTENTION}
    assert read(first, "", both) == [[1, 2]]
    assert read(after, "", both) == [[11, 22]]
    assert read(after, "", both | {"attn_contrib": 2 * ATTENTION}) == [[21, 42]]
    for missing in ({stream: INPUT}, {"attn_out": ATTENTION}, {}):
        assert read(after, "", missing) is read(after, "plain", missing) is None
    assert read(first, "", {}) is read(first, "plain", {}) is read(first, "attn_norm", {}) is None
    own = context("rms", (3, "ffn_norm.weight"), (2, "attn_norm.weight"))
    assert read(after, "ffn_norm", both, own) == ("norm", 3, "ffn_norm", [[11, 22]])
    assert read(first, "attn_norm", both, own) is None, "it is another layer's"
    assert read(first, "plain", both) == ("plain", [[1, 2]])
    layered = ("layer_norm", [[11, 22]], [1, 1], 0.125)
    assert read(after, "plain", both, context("layer")) == layered


@pytest.mark.parametrize("layer", [-1, 0, 1])
@pytest.mark.parametrize("point", ["q", "v", "ffn_up", "router", "attn_out"])
def test_other_inputs_are_tried_for_the_products_of_a_layer(
    point: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention reads no stream behind itself; what stands after it may read either."""
    monkeypatch.setattr(product_inputs, "product_of", lambda case: SimpleNamespace(key="k"))
    case: Any = SimpleNamespace(view=SimpleNamespace(point=point), layer=layer)
    made = list(product_inputs.try_other_inputs(case))
    if point == "attn_out" or layer < 0:
        assert made == []
        return
    norms = len(product_inputs.NORMS)
    who = {"q": "attention", "v": "attention", "ffn_up": "the MLP", "router": "the router"}[point]
    assert len(made) == (norms if who == "attention" else 2 * norms)
    assert all(one.says.startswith(f"{who} reads ") for one in made)
    assert [one.cause for one in made] == (["norm_skipped"] * norms + ["residual"] * norms)[
        : len(made)
    ]
    assert made[0].says == f"{who} reads the layer's input, without a norm"
    assert made[-1].says.endswith(", normed without a weight")
    for found in (None, SimpleNamespace(key="")):
        monkeypatch.setattr(product_inputs, "product_of", lambda case, found=found: found)
        assert list(product_inputs.try_other_inputs(case)) == []


# --- which layers ---------------------------------------------------------------------------------


def test_a_layer_has_a_window_by_its_own_entry() -> None:
    def has(layer: int, *windows: bool) -> bool:
        case: Any = SimpleNamespace(
            layer=layer, patched=SimpleNamespace(hp={"window_layers": windows})
        )
        return attention._layer_has_window(case)

    assert [has(layer, True, False, True) for layer in (-1, 0, 1, 2)] == [False, True, False, True]
    assert [has(layer, False, True, True) for layer in (-1, 0, 1)] == [False, False, True]


def test_a_convolution_is_tried_in_every_layer_that_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer too; not before the layers, and in none that has attention."""
    kinds = ["short_conv", "none", "ssm"]
    monkeypatch.setattr(convolution, "mixer_of_layer", lambda block, hp, layer: kinds[layer])
    monkeypatch.setattr(convolution, "usual_convolution_mistakes", lambda patched: ["usual"])
    monkeypatch.setattr(convolution, "starts_to_try", lambda case: [2, 5])
    monkeypatch.setattr(convolution, "_looks_back_wrongly", lambda case: None)
    patched = SimpleNamespace(spec=SimpleNamespace(block=None), hp={}, n_layers=3)

    def tried(layer: int, rows: Any = None) -> list[Any]:
        monkeypatch.setattr(convolution, "_solve_rows_before", lambda case: rows)
        case: Any = SimpleNamespace(layer=layer, patched=patched, call=lambda op: None)
        return list(convolution.try_convolution_mistakes(case))

    assert tried(-1) == tried(1) == []
    for layer in (0, 2):
        usual, *restarts = tried(layer)
        assert usual == "usual"
        assert [one.values for one in restarts] == [{"restarted": 2}, {"restarted": 5}]
        assert all(one.cause == "conv_state" and one.where == ("shortconv",) for one in restarts)
        assert "to token 5: the convolution begins with zeros there" in restarts[1].says
        *_, last = tried(layer, np.ones((2, 3)))
        assert last.general and last.says.endswith("begins with rows of another sequence")


# --- weights of norms -----------------------------------------------------------------------------


def test_a_norms_weight_is_another_tensor_then_a_multiple_then_other_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorded weight is what all others are measured against."""
    own, other = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 1.0, 0.5, 8.0])
    key, near = "L0.attn_norm.weight", "L0.ffn_norm.weight"
    held = {key: own, near: other}
    asked: list[tuple[list[float], list[float]]] = []

    def agree(mine: Any, theirs: Any) -> bool:
        asked.append((mine.tolist(), theirs.tolist()))
        return bool(np.linalg.norm(mine - theirs) <= 0.1 * np.linalg.norm(theirs))

    monkeypatch.setattr(norm, "weights_of_same_shape", lambda patched, key: [near])
    monkeypatch.setattr(norm, "other_weight_changes", lambda case, *keys: [keys])
    stored = {name: SimpleNamespace(numpy=lambda x=x: x) for name, x in held.items()}

    def named(values: Any) -> Any:
        asked.clear()
        case: Any = SimpleNamespace(patched=SimpleNamespace(stored=stored), agree=agree)
        (found,) = norm._name_norm_weight(case, key, np.asarray(values, np.float64))
        return found

    assert named(1.05 * other) == (key, near)
    assert asked == [(other.tolist(), (1.05 * other).tolist())]
    found = named(-0.5 * own)
    assert (found.cause, found.says) == ("scale", f"{key} is multiplied by -0.5")
    assert found.values == {"factor": -0.5} and found.where == (key,)
    assert asked[-1] == ((-0.5 * own).tolist(), (-0.5 * own).tolist())
    for values in ([1.0, 2.0, 3.0, -4.0], [0.0, 0.0, 0.0, 0.0]):
        found = named(values)
        assert (found.cause, found.values) == ("stale_tensor", {})
        assert found.general and not found.scoped
    held[key] = np.zeros(4)
    stored[key] = SimpleNamespace(numpy=lambda: held[key])
    assert named(own).cause == "stale_tensor", "nothing is a multiple of zeros"


# --- codes ----------------------------------------------------------------------------------------

TABLE = np.arange(16) - 8.0
CODES = np.stack([RNG.permutation(16) for _ in range(4)])
SCALE = RNG.choice([0.25, 0.5, 3.0], size=(4, 16))
ZERO = RNG.choice([1.0, 2.0, -3.0], size=(4, 16))
OFFSET = RNG.choice([0.5, -7.0], size=(4, 16))


def coded(**parts: Any) -> Any:
    side = SimpleNamespace(
        **{"table": TABLE, "codes": CODES, "scale": None, "zero": None, "offset": None} | parts
    )
    side.read_as = lambda *given, **how: CodedSide.read_as(side, *given, **how)  # type: ignore[arg-type]
    return side


def misread(side: Any, values: Any, sample: Any = (0, 1)) -> Any:
    plain: Any = SimpleNamespace(
        encoding="F32", rows=len(values), size=values.size, take=lambda rows: values[rows]
    )
    case: Any = SimpleNamespace(
        key="k",
        sample=np.array(sample),
        windows=lambda rows: [rows[:3], rows[3:]],
        before=SimpleNamespace(relative=0.5),
    )
    return misread_codes._misread(case, plain, side, "B", "A")


READ = {
    "scales": ("quant_scale", ("B holds the codes of A as numbers: their scales are ignored, as if"
                               " each were 1",)),
    "zero points": ("zero_point", ("B holds the codes of A times their scales: their zero points "
                                   "are ignored",)),
    "both": ("quant_scale", ("B holds the codes of A as numbers: their scales are ignored, as if "
                             "each were 1", "their zero points are ignored, too")),
}  # fmt: skip


@pytest.mark.parametrize("part", ["zero", "offset"])
@pytest.mark.parametrize("lost", READ)
def test_scales_and_zero_points_may_be_left_out_each_and_together(lost: str, part: str) -> None:
    side = coded(scale=SCALE, **{part: ZERO if part == "zero" else OFFSET})
    every = np.arange(4)
    how = {"scaled": lost == "zero points", "moved": lost == "scales"}
    values = side.read_as(TABLE, every, **how)
    found = misread(side, values)
    assert (found.cause, found.evidence) == READ[lost]
    assert (found.residual_before, found.residual_after) == (0.5, 0.0)
    assert found.proof.count == 64
    wrong = values.copy()
    wrong[3, 5] += 0.5  # in a row that only the proof reads
    assert misread(side, wrong) is None
    assert misread(side, side.read_as(TABLE, every, scaled=True, moved=True)) is None


def test_codes_that_are_read_as_they_are_meant_are_not_misread() -> None:
    every = np.arange(4)
    for side in (coded(), coded(scale=SCALE), coded(zero=ZERO)):
        meant = side.read_as(TABLE, every, scaled=True, moved=True)
        assert misread(side, meant) is None
    scaled = coded(scale=SCALE)
    found = misread(scaled, TABLE[CODES])
    assert (found.cause, found.evidence) == READ["scales"]
    plain = np.arange(16.0)
    for kind, numbers in (
        ("unsigned integers", plain),
        ("signed integers", np.where(plain < 8, plain, plain - 16)),
        ("integers plus 8", TABLE + 8),
    ):
        shown = "unsigned integers" if kind == "integers plus 8" else kind
        for side, more in ((coded(), ", times their scales"), (scaled, ", times their scales")):
            values = side.read_as(numbers, every, scaled=True, moved=True)
            found = misread(side, values)
            assert found.cause == "code_type"
            assert found.evidence == (f"B's values are the codes of A, read as {shown}{more}",)
        found = misread(scaled, numbers[CODES])
        text = f"B's values are the codes of A, read as {shown}, and their scales are ignored"
        assert found.evidence == (text,)


def test_so_few_codes_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen in the sampled rows do, or every code of a smaller table; one value does not."""
    plain = np.arange(16.0)
    assert misread(coded(), plain[CODES], (0, 1, 2, 3)) is not None
    few = np.where(CODES == 15, 14, CODES)
    assert misread(coded(codes=few), plain[few], (0, 1, 2, 3)) is None
    four = CODES % 4
    small = coded(table=np.array([-2.0, -1.0, 0.0, 1.0]), codes=four)
    assert misread(small, four.astype(np.float64)) is not None
    three = np.minimum(four, 2)
    small.codes = three
    assert misread(small, three.astype(np.float64)) is None
    monkeypatch.setattr(misread_codes, "FEW", 3)
    assert misread(small, three.astype(np.float64)) is not None
    assert misread(coded(scale=0 * SCALE), np.zeros((4, 16)), (0, 1, 2, 3)) is None
