"""What engines get wrong in short convolutions, layers' inputs and copies of the stream."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import convolution, layer_sharing, state_restarts
from aprfmt.inference.replay.patched_model import STREAM


class Patched(SimpleNamespace):
    """Notes what is replaced: operations, taps, keys and values, each with its layers."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.ops: dict[str, Any] = {}
        self.taps: dict[str, Any] = {}
        self.layers: dict[str, Any] = {}
        self.read: Any = None

    def with_op(self, op: str, override: Any, layers: Any) -> "Patched":
        self.ops[op], self.layers[op] = override, layers
        return self

    def with_tap(self, point: str, tap: Any, layers: Any) -> "Patched":
        self.taps[point], self.layers[point] = tap, layers
        return self

    def with_keys_and_values(self, read: Any) -> "Patched":
        self.read = read
        return self


def made(patch: Any) -> Any:
    """Return what a patch or a change replaces in layers "some"."""
    return getattr(patch, "make", patch)(Patched(), "some")


# --- short convolutions ---------------------------------------------------------------------------


def convolve(window: Any, kernel: Any, *bias: Any) -> Any:
    """Return what each channel's taps make of its own row and those before it."""
    tokens = len(window) - kernel.shape[1] + 1
    return np.stack([(window[t : t + kernel.shape[1]] * kernel.T).sum(0) for t in range(tokens)])


def test_taps_and_rows_of_a_convolution_are_those_that_its_words_say() -> None:
    rng = np.random.default_rng(1)
    kernel, rows = rng.normal(size=(3, 4)), rng.normal(size=(6, 3))
    window = np.concatenate([np.zeros((3, 3)), rows])
    found = [
        made(convolution._patch_kernel(taken)).ops["convolve"](convolve, None, window, kernel)
        for _, taken in convolution.TAKEN.values()
    ]
    none = np.zeros((1, 3))
    expected = [
        convolve(window, kernel[:, ::-1]),
        convolve(np.concatenate([none, window[:-1]]), kernel),
        convolve(np.concatenate([window[1:], none]), kernel),
        convolve(window, kernel[:, [2, 1, 0, 3]]),
        rows * kernel[:, -1],
    ]
    for one, right in zip(found, expected, strict=True):
        assert np.allclose(one, right)
    for first in (1, 2, 5):
        restart = made(state_restarts.restart_convolution([first])).ops["convolve"]
        apart = np.concatenate(
            [
                convolve(window, kernel)[:first],
                convolve(np.concatenate([np.zeros((3, 3)), rows[first:]]), kernel),
            ]
        )
        before = window.copy()
        assert np.allclose(restart(convolve, None, window, kernel), apart)
        assert np.array_equal(window, before)
    other = rng.normal(size=(3, 3))
    begun = made(convolution._begin_with_rows(other)).ops["convolve"]
    right = convolve(np.concatenate([other, rows]), kernel)
    assert np.allclose(begun(convolve, None, window, kernel), right)


def test_gates_of_a_convolution_are_left_out_or_exchanged() -> None:
    for point in convolution.GATES:
        override = made(convolution._without_gate(point)).ops["mul"]
        here, there = (SimpleNamespace(point=name) for name in (point, "x"))
        assert override(lambda a, b: a * b, here, 3.0, 4.0) == 4.0
        assert override(lambda a, b: a * b, there, 3.0, 4.0) == 12.0
    assert set(convolution.LAST_GATES) == {0, 2}
    first, second, third = 2.0, 3.0, 5.0
    held = {"conv_in": np.array([[first, second, third]]), "conv": np.array([[7.0]])}
    for part, before, after in ((0, second * third, first * 7), (2, first * second, third * 7)):
        patched = made(convolution._gate_last_with(part))
        assert patched.taps["conv_x"](None, 0, None, held).item() == before
        assert patched.taps["conv_gated"](None, 0, None, held).item() == after
        assert set(patched.layers.values()) == {"some"}


def mistakes(kind: str, monkeypatch: pytest.MonkeyPatch, *weights: str) -> list[str]:
    monkeypatch.setattr(
        convolution, "mixer_of_layer", lambda block, hp, layer: kind if layer else "none"
    )
    for name in ("zero_weights_change", "scale_weights_change"):
        monkeypatch.setattr(
            convolution,
            name,
            lambda cause, says, *given: SimpleNamespace(says=says, keys=given[0], where=()),
        )
    spec = SimpleNamespace(block=None)
    patched: Any = SimpleNamespace(spec=spec, hp=None, n_layers=2, weights=weights)
    found: list[Any] = list(convolution.usual_convolution_mistakes(patched))
    assert all(
        getattr(one, "keys", ["L1.ssm_conv1d.bias"]) == ["L1.ssm_conv1d.bias"] for one in found
    )
    named = {one.where for one in found if one.where}
    assert named <= {("shortconv",) if kind == "short_conv" else ("ssm_conv1d",)}
    return [one.says for one in found]


def test_usual_mistakes_of_a_convolution_are_of_the_models_mixers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert mistakes("none", monkeypatch) == []
    plain = mistakes("mamba", monkeypatch)
    assert plain == list(convolution.TAKEN)
    bias = mistakes("mamba", monkeypatch, "L1.ssm_conv1d.bias", "L1.ssm_conv1d.weight", "L0.q.bias")
    assert bias == [
        *plain,
        "the bias of the convolution is not added",
        "the bias of the convolution is added twice",
    ]
    gates = [*convolution.GATES.values(), *convolution.LAST_GATES.values()]
    assert mistakes("short_conv", monkeypatch) == [*plain, *gates]


def solved(theirs: Any, *, rows: Any = range(8), wrong: Any = (0, 1)) -> Any:
    rng = np.random.default_rng(2)
    kernel, after = rng.normal(size=(3, 3)), rng.normal(size=(8, 3))
    window = np.concatenate([np.zeros((2, 3)), after])
    other = rng.normal(size=(2, 3))
    result = convolve(window, kernel)
    seen = convolve(np.concatenate([other, after]), kernel) if theirs == "other" else theirs
    away = np.where(np.isin(np.arange(8), wrong), 3.0, 1.0)
    call = SimpleNamespace(args=(window, kernel), result=result)
    case: Any = SimpleNamespace(
        call=lambda op: call,
        recorded_result=lambda call: seen,
        rows=rows,
        array=np.asarray,
        view=SimpleNamespace(tolerance=1.0),
        distances_by_row=lambda view: away,
    )
    return convolution._solve_rows_before(case), other


def test_rows_before_the_first_token_are_solved_of_those_that_look_back() -> None:
    found, other = solved("other")
    assert np.allclose(found, other)
    found, other = solved("other", wrong=(1,))
    assert np.allclose(found, other)
    for more in (
        {"theirs": None},
        {"rows": range(1, 9)},
        {"wrong": ()},
        {"wrong": (0, 1, 2)},
        {"wrong": (7,)},
    ):
        given: dict[str, Any] = {"theirs": "other"} | more
        assert solved(**given)[0] is None, more


def test_a_state_may_begin_anew_at_the_first_row_that_is_there_or_wrong() -> None:
    def starts(rows: Any, wrong: Any) -> list[int]:
        away = np.where(np.isin(np.arange(8), wrong), 2.5, 2.0)
        case: Any = SimpleNamespace(
            distances_by_row=lambda view: away, view=SimpleNamespace(tolerance=1.0), rows=rows
        )
        return convolution.starts_to_try(case)

    assert starts(range(8), ()) == starts(range(8), (0, 3)) == []
    assert starts(range(3, 8), ()) == [3] and starts(range(8), (4, 6)) == [4]
    assert starts(range(1, 8), (1,)) == [1, 1]


# --- inputs of layers, copies of the stream -------------------------------------------------------


def test_inputs_and_copies_are_changed_as_their_words_say() -> None:
    patched: Any = SimpleNamespace(hp={"per_layer_size": 4, "hidden_size": 2})
    x = np.arange(1.0, 9.0, dtype=np.float32)[None]
    held = {"altup_predicted": -x, "attn_norm": 9 * x, STREAM: 7 * x}
    root = np.float32(2**0.5)
    first = -x.copy()
    first[:, :2] = x[:, :2]
    expected: dict[str, Any] = {
        "the tokens' rows of the layers' embedding are left out": 0 * x,
        "the tokens' rows of the layers' embedding are not scaled": x / 2,
        "the projection for the layers' inputs is left out": 0 * x,
        "every layer takes the next one's input": np.roll(x, 4, axis=-1),
        "the layers' inputs are not divided by the root of 2": x * root,
        "the layers' inputs are dropped": 0 * x,
        "the copies are not predicted": 7 * x,
        "the copies are not corrected": -x,
        "the first copy alone is corrected": first,
        "the short cut of low rank is left out": 9 * x,
        "the sum with the short cut is not divided by the root of 2": x * root,
    }
    rows = {**layer_sharing.INPUTS, **layer_sharing.COPIES}
    changed = {
        says: altered(x.copy(), held, patched) for each in rows.values() for says, altered in each
    }
    assert changed.keys() == expected.keys()
    for says, values in changed.items():
        assert np.allclose(values, expected[says]) and values.dtype == np.float32, says
    lacking = layer_sharing._input_copy(x, {}, patched)
    assert lacking is x and layer_sharing._input_copy(x, {STREAM: x[:, :4]}, patched) is x

    def altered(*given: Any) -> Any:
        return given

    for point, layers in (("per_layer_embd", None), ("per_layer_proj", "some"), ("mid", "some")):
        one = made(layer_sharing._alter_point(point, altered))
        assert one.layers == {point: layers}
        assert one.taps[point]("model", 3, "x", "held") == ("x", "held", "model")


def test_copies_are_mixed_and_gates_are_cut_in_another_way() -> None:
    coefs = np.arange(18.0).reshape(2, 9)
    mixed = made(layer_sharing._transpose_coefficients).ops["mix_copies"]
    turned = mixed(lambda x, coefs: coefs, None, None, coefs)
    assert np.array_equal(turned.reshape(2, 3, 3), coefs.reshape(2, 3, 3).swapaxes(1, 2))
    assert made(layer_sharing._without_tanh).ops["tanh"](np.tanh, None, 2.0) == 2.0
    cut = made(layer_sharing._without_gate_cut).ops["gaussian_topk"]
    assert cut(lambda x, factor: 0, None, 5.0, 2.0) == 5.0
    sample = made(layer_sharing._sample_variance).ops["gaussian_topk"]
    _, factor = sample(lambda x, factor: (x, factor), None, np.zeros((2, 5)), 2.0)
    assert factor == pytest.approx(2.0 * np.std([1, 2, 3, 4, 9], ddof=1) / np.std([1, 2, 3, 4, 9]))
    for size, streams, sparse, rows in (
        (0, "plain", (0.0, 0.0), 0),
        (4, "plain", (0.0, 0.0), 6),
        (0, "altup", (0.0,), 7),
        (0, "plain", (0.0, 0.95), 2),
        (4, "altup", (0.95,), 15),
    ):
        patched: Any = SimpleNamespace(
            hp={"per_layer_size": size, "ffn_sparsity": sparse},
            spec=SimpleNamespace(block=SimpleNamespace(streams=streams)),
        )
        found = [
            *layer_sharing.usual_layer_input_mistakes(patched),
            *layer_sharing.usual_stream_copy_mistakes(patched),
        ]
        assert len(found) == rows, (size, streams, sparse)
        for one in found:
            assert (one.cause, *one.where) in (
                ("per_layer_input", "per_layer_size"),
                ("altup", "altup_streams"),
                ("activation", "ffn_sparsity"),
            )
            replaced = made(one)
            assert [*replaced.taps, *replaced.ops] and one.values
            assert set(replaced.taps) <= {*layer_sharing.INPUTS, *layer_sharing.COPIES}
        case: Any = SimpleNamespace(patched=patched, view=SimpleNamespace(point="q"))
        assert not list(layer_sharing.try_layer_inputs(case))
        for point in ("per_layer_embd", "out", "ffn_stream"):
            case.view.point = point
            assert bool(list(layer_sharing.try_layer_inputs(case))) is bool(size)


def test_a_layer_without_keys_reads_those_of_another_that_has_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_sharing, "key_value_layer", lambda hp, layer: layer - 2)
    monkeypatch.setattr(layer_sharing, "kv_head_count", lambda hp, layer: 1 + (layer == 1))
    monkeypatch.setattr(layer_sharing, "head_dim_of_layer", lambda hp, layer: 8 + (layer == 2))
    own = (True, True, True, True, True, False, False)
    patched: Any = SimpleNamespace(hp={"own_kv_layers": own}, n_layers=7)
    found = list(layer_sharing.shared_key_changes(patched))
    told = [(one.where, one.values["layer"]) for one in found]
    # L5 has those of L3, L6 of L4; L1 has more heads, L2 larger ones.
    assert told == [
        (("L5.own_kv_layers",), 0),
        (("L5.own_kv_layers",), 4),
        (("L6.own_kv_layers",), 0),
        (("L6.own_kv_layers",), 3),
    ]
    assert found[1].says == "L5 reads the keys and values of L4; by the model those of L3"
    for layer, rows in ((-1, 0), (0, 0), (5, 2), (6, 2)):
        case: Any = SimpleNamespace(layer=layer, patched=patched)
        assert len(list(layer_sharing.try_shared_keys(case))) == rows
    read = made(found[1]).read
    assert [read("k", layer, f"own{layer}") for layer in range(7)] == [
        "own0",
        "own1",
        "own2",
        "own3",
        "own4",
        "own4",
        "own6",
    ]
    assert read("v", 5, "own5") == "own5"  # which the owner has not given yet
