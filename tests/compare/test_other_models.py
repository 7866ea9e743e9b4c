"""When two models are other ones, or parts of one another, and which of their keys are held.

What a table says is asked at its bounds, with arrays of a few numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt import compare
from aprfmt.arch.spec import HyperParam, HyperParams
from aprfmt.base.protocols import TensorInfo
from aprfmt.compare.other_models import differ_in_tables_alone, other_model_sentence
from aprfmt.compare.taken_parts import taken_parts_text
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.measure.records import TensorDiff
from aprfmt.tensors.view import View

SIZES = {"hidden_size": 4, "n_layers": 3, "vocab_size": 9, "n_experts": 0, "ffn_size": 6}


def model(block: str = "one", roles: Mapping[str, View] | None = None, **sizes: Any) -> Any:
    spec = SimpleNamespace(block=block, name=f"the {block}")
    return SimpleNamespace(hyper=SIZES | sizes, spec=spec, roles=roles or {})


def row(verdict: Any, key: str = "L0.attn_q.weight", **more: Any) -> TensorDiff:
    return TensorDiff(key, verdict, **more)


def explained(confirmed: bool) -> Any:
    return SimpleNamespace(confirmed=confirmed)


def apart(rel_l2: float) -> Any:
    return SimpleNamespace(rel_l2=rel_l2)


# --- other models -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_models_of_other_sizes_are_other_ones(name: str) -> None:
    said = other_model_sentence(model(), model("one", None, **{name: 7}), [row("SAME_BYTES")])
    wanted = f"these are models of other sizes: {name} {SIZES[name]} and 7"
    assert said == ("" if name == "ffn_size" else wanted)
    empty: Any = SimpleNamespace(hyper={})
    assert other_model_sentence(model(), empty, []) == ""
    assert other_model_sentence(empty, model(), []) == ""


def test_models_of_other_blocks_have_no_tensor_in_common() -> None:
    a, b = model(), model("two")
    assert other_model_sentence(a, b, [row("DIFFERENT"), row("SAME_BYTES")]) == ""
    said = other_model_sentence(a, b, [row("DIFFERENT")])
    assert said == "A is the one, B the two: other blocks, and no tensor in common"


# Of ten tensors in common, how many differ unexplained -> whether these are two trainings.
SHARES = [(8, False), (9, True), (10, True)]


@pytest.mark.parametrize(("strange", "other"), SHARES)
@pytest.mark.parametrize("verdict", ["DIFFERENT", "SHAPE_DIFFERS"])
def test_two_trainings_differ_in_over_four_fifths(strange: int, other: bool, verdict: Any) -> None:
    rows = [row(verdict)] * strange + [row("WITHIN")] * (10 - strange) + [row("ONLY_IN_A")] * 9
    said = other_model_sentence(model(), model(), rows)
    assert said.startswith("none of 10 tensors is equal or explained") == other and other == bool(
        said
    )


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"stats": apart(0.05)}, False), ({"stats": apart(0.051)}, True), ({"stats": None}, True),
        ({"explanation": explained(True)}, False), ({"explanation": explained(False)}, True),
    ],
)  # fmt: skip
def test_a_near_or_explained_tensor_is_no_other_training(more: Any, other: bool) -> None:
    rows = [row("DIFFERENT", **more)] * 3
    assert bool(other_model_sentence(model(), model(), rows)) == other
    assert not other_model_sentence(model(), model(), rows[:2]), "of two tensors nothing is said"


TABLE = "token_embd.weight"


def test_tables_of_two_lengths_are_no_other_models() -> None:
    table = row("SHAPE_DIFFERS", TABLE, shape_a=(9, 4), shape_b=(7, 4))
    why: Any = explained(False)
    same = row("SAME_VALUES")
    assert differ_in_tables_alone([table, same])
    assert differ_in_tables_alone([replace(table, explanation=why)])
    assert not differ_in_tables_alone([table]) and not differ_in_tables_alone([same])
    assert not differ_in_tables_alone([replace(table, explanation=why), table])
    for shape in ((7, 5), (9, 4), (0, 4), (7,), None):
        other = replace(table, shape_b=shape)
        assert not differ_in_tables_alone([other, same]), shape
    assert not differ_in_tables_alone([replace(table, key="L0.attn_q.weight"), same])
    a, b = model(), model(vocab_size=7)
    assert other_model_sentence(a, b, [table, same]) == ""
    assert "vocab_size 9 and 7" in other_model_sentence(a, b, [row("DIFFERENT"), same])
    both = other_model_sentence(a, model(vocab_size=7, n_layers=5), [table, same])
    assert both == "these are models of other sizes: n_layers 3 and 5"


# --- layers and channels that were taken --------------------------------------------------------

WIDE, HIDDEN = 6, 4


def view(name: str, values: np.ndarray) -> View:
    data = np.ascontiguousarray(values, "<f4")
    width = data.nbytes // data.shape[0] if data.ndim > 1 else data.nbytes
    return View(
        MemoryTensor(TensorInfo(name, data.shape, "F32", 0, data.nbytes, width), data.tobytes())
    )


Matrices = dict[str, np.ndarray]


def layer(seed: int, channels: Sequence[int] = range(WIDE)) -> Matrices:
    rng, kept = np.random.default_rng(seed), list(channels)
    made = {
        "attn_q.weight": rng.standard_normal((HIDDEN, HIDDEN)),
        "ffn_up.weight": rng.standard_normal((WIDE, HIDDEN)),
        "ffn_up.bias": rng.standard_normal(WIDE),
        "ffn_down.weight": rng.standard_normal((HIDDEN, WIDE)),
        "ffn_down.bias": rng.standard_normal(HIDDEN),
    }
    made["ffn_up.weight"] = made["ffn_up.weight"][kept]
    made["ffn_up.bias"] = made["ffn_up.bias"][kept]
    made["ffn_down.weight"] = made["ffn_down.weight"][:, kept]
    return made


def made_of(layers: Sequence[Matrices], norm: float = 1.0, **sizes: Any) -> Any:
    roles = {"output_norm.weight": view("n", np.full(HIDDEN, norm))} | {
        f"L{at}.{role}": view(role, values)
        for at, each in enumerate(layers)
        for role, values in each.items()
    }
    return model("one", roles, **{"n_layers": len(layers), "ffn_size": WIDE, **sizes})


WHOLE = [layer(seed) for seed in range(4)]

TAKEN: Mapping[tuple[int, ...], str] = {
    (0, 2, 3): "B's layers 0-2 are A's layers 0, 2-3; A's layer 1 is not in B; all values are A's",
    (0, 3): "B's layers 0-1 are A's layers 0, 3; A's layers 1-2 are not in B; all values are A's",
    (0, 1, 2, 3, 3): "B's layers 0-4 are A's layers 0-3, 3; all values are A's",
    (3,): "B's layers 0-0 are A's layers 3; A's layers 0-2 are not in B; all values are A's",
}


@pytest.mark.parametrize("order", TAKEN)
def test_layers_of_another_model_are_named(order: tuple[int, ...]) -> None:
    part = made_of([WHOLE[at] for at in order])
    assert taken_parts_text(made_of(WHOLE), part) == TAKEN[order]
    swapped = taken_parts_text(made_of(WHOLE), part, ("B", "A"))
    assert swapped == TAKEN[order].translate(str.maketrans("AB", "BA"))


KINDS: Mapping[str, tuple[Any, Any, str]] = {
    "of the first layers": (
        (1, 0, 1, 1),
        (1, 0, 1),
        "layer 1 is of another kind: kinds (types) is 0 for layer 1, and 1 for A's layer 2",
    ),
    "of the taken layers": ((1, 0, 1, 1), (1, 1, 1), ""),
    "of one kind": ((1, 1, 1, 1), (1, 1, 1), ""),
    "no list of layers": ((1, 2), (2, 1), ""),
    "no list": (0, 1, ""),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_read_as_another_kind_are_named(name: str) -> None:
    """Seen red: the first entries of the other model's list were taken without a word."""
    theirs, mine, says = KINDS[name]
    a, b = made_of(WHOLE, kinds=theirs), made_of([WHOLE[at] for at in (0, 2, 3)], kinds=mine)
    b.config = {"types": list(theirs) if isinstance(theirs, tuple) else theirs}
    b.resolution = SimpleNamespace(report=SimpleNamespace(read={"types": "kinds", "on": "kinds"}))
    b.metadata = {}
    tail = f"; but B's {says}" if says else ""
    assert taken_parts_text(a, b) == f"{TAKEN[0, 2, 3]}{tail}"


def changed(role: str) -> Matrices:
    """Return layer 2 with the last number of one tensor another."""
    made = {name: values.copy() for name, values in WHOLE[2].items()}
    made[role].flat[-1] += 1
    return made


@pytest.mark.parametrize("role", WHOLE[2])
def test_one_other_value_of_any_tensor_is_no_taken_layer(role: str) -> None:
    a = made_of(WHOLE)
    assert taken_parts_text(a, made_of([WHOLE[0], changed(role)])) == ""
    lacking = {name: values for name, values in WHOLE[2].items() if name != role}
    assert taken_parts_text(a, made_of([WHOLE[0], lacking])) == ""


def test_other_sizes_blocks_and_tables_are_no_taken_parts() -> None:
    a, b = made_of(WHOLE), made_of(WHOLE[:2])
    assert taken_parts_text(a, b)
    assert taken_parts_text(a, made_of(WHOLE)) == ""
    assert taken_parts_text(a, made_of(WHOLE[:2], hidden_size=5)) == ""
    assert taken_parts_text(a, made_of(WHOLE[:2], norm=2.0)) == ""
    b.spec = SimpleNamespace(block="two")
    assert taken_parts_text(a, b) == ""
    b.spec, b.hyper = a.spec, {}
    assert taken_parts_text(a, b) == taken_parts_text(b, a) == ""


CHANNELS = ([0, 1, 2, 3], [5, 3, 1, 0])


@pytest.mark.parametrize("kept", CHANNELS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2)])
def test_channels_of_another_model_s_mlp_are_named(kept: list[int], order: tuple[int, ...]) -> None:
    narrow = made_of([layer(seed, kept) for seed in order], ffn_size=len(kept))
    found = taken_parts_text(made_of(WHOLE), narrow)
    ranges = "0-3" if kept == CHANNELS[0] else "5, 3, 1, 0"
    says = f"4 of A's 6 channels of each MLP were kept, such as of layer 0: {ranges}"
    assert found.endswith(f"{says}; all values are A's")
    assert found.startswith("B's layers 0-1 are A's layers 0, 2; ") == (len(order) == 2)


@pytest.mark.parametrize(
    "role", ["ffn_up.weight", "ffn_up.bias", "ffn_down.weight", "ffn_down.bias"]
)
def test_all_matrices_of_the_mlp_agree_on_the_channels(role: str) -> None:
    kept = [0, 2, 3, 5]
    layers = [layer(seed, kept) for seed in range(4)]
    assert taken_parts_text(made_of(WHOLE), made_of(layers, ffn_size=4))
    layers[1][role] = layers[1][role].copy()
    layers[1][role].flat[1] += 1
    assert taken_parts_text(made_of(WHOLE), made_of(layers, ffn_size=4)) == ""


# --- keys of the metadata -----------------------------------------------------------------------


def stated(config: Any, **rows: HyperParam) -> Any:
    return SimpleNamespace(key_style="safetensors", config=config, hyper=HyperParams(rows))


BASE = HyperParam(10_000.0, "config", "rope_parameters.rope_theta")


def test_a_number_that_the_rope_object_overrules_is_stated_twice() -> None:
    found = compare._values_stated_twice
    other = {"rope_theta": 500_000, "n_heads": 3}
    heads = HyperParam(4, "config", "num_attention_heads")
    assert list(found(stated(other, rope_theta=BASE, n_heads=heads))) == [("rope_theta", 500_000)]
    scaling = replace(BASE, key="rope_scaling.rope_theta")
    assert list(found(stated({"rope_theta": 1.5}, rope_theta=scaling))) == [("rope_theta", 1.5)]
    for value in (10_000, 10_000.0, True, "500000", None, [1]):
        assert not list(found(stated({"rope_theta": value}, rope_theta=BASE))), value
    for read in (replace(BASE, key="rope_theta"), replace(BASE, origin="metadata")):
        assert not list(found(stated(other, rope_theta=read)))
    assert not list(found(stated(None, rope_theta=BASE))) and not list(found(stated(other)))
    copy = stated(other, rope_theta=BASE)
    copy.key_style = "gguf"  # its config.json is a copy that nobody reads
    assert not list(found(copy))


SCALARS = st.one_of(st.integers(0, 2), st.booleans(), st.text("ab", max_size=1), st.floats(0, 1))


@settings(max_examples=150, deadline=None)
@given(st.lists(SCALARS, max_size=3), st.lists(SCALARS, max_size=3))
def test_metadata_is_equal_by_value_whatever_holds_it(one: list[Any], other: list[Any]) -> None:
    assert compare._metadata_equal(tuple(one), other) == (one == other)
    assert compare._metadata_equal(one, other) == (one == other)
    assert compare.hashable_value(one) == tuple(one)


def test_a_text_is_no_sequence_of_its_letters() -> None:
    assert compare.hashable_value("ab") == "ab" and not compare._metadata_equal("ab", ["a", "b"])
    assert not compare._metadata_equal(None, []) and compare._metadata_equal(None, None)


def holding(form: str = "gguf", **metadata: Any) -> Any:
    return SimpleNamespace(
        format=form, metadata={k.replace("__", "."): v for k, v in metadata.items()}
    )


def test_keys_of_one_format_are_compared_but_for_each_file_s_own() -> None:
    a = holding(x__one=1, x__both=2, aprfmt__made="a", split__no=0, general__name="a", only=3)
    b = holding(x__one=2, x__both=2, aprfmt__made="b", split__no=1, general__name="b", more=4)
    found = compare._differing_metadata
    keys = ["x.one", "only", "more"]
    assert [each.name for each in found(a, b, every=False)] == keys
    own = ["aprfmt.made", "split.no", "general.name"]
    assert [each.name for each in found(a, b, every=True)] == ["x.one", *own, "only", "more"]
    assert [each.item for each in found(a, b, every=False)] == [
        f"metadata key {key}" for key in keys
    ]
    assert found(a, SimpleNamespace(format="apr", metadata={}), every=True) == ()  # type: ignore[arg-type]
