"""Sliding windows of config.json and of a GGUF: their size, their layers, and what is wrong."""

from typing import Any

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.sliding_window import (
    Window,
    require_causal,
    rotated_windows,
    window_every_layer,
    window_period,
    window_rules,
)
from aprfmt.arch.spec import Facts
from aprfmt.errors import ArchError

KEY = "{arch}.attention.sliding_window"
STATED = "x.attention.sliding_window"
SLIDING, FULL = "sliding_attention", "full_attention"


def rules(**more: Any) -> tuple[Any, Any]:
    return window_rules(Window(**more))


def facts(style: str, **values: Any) -> Facts:
    return Facts(style, {key.replace("__", "."): value for key, value in values.items()}, {}, "x")


def size(rule: Any, style: str, **values: Any) -> Any:
    return rule.read[style](facts(style, **values), {})


def test_every_layer_but_every_nth_has_a_window() -> None:
    assert window_every_layer(None, {"n_layers": 3}) == (True, True, True)
    for length in (1, 2, 3, 6):
        found = window_period(length)(None, {"n_layers": 7})
        assert found == tuple((layer + 1) % length != 0 for layer in range(7))


# --- sizes ----------------------------------------------------------------------------------------


def test_a_size_is_stated_or_null_or_zero_or_not_there() -> None:
    rule, _ = rules(hf_default=7, gguf_default=9)
    assert rule.default == 7 and rule.default_in == {"gguf": 9, "apr": 9}
    assert size(rule, "hf", sliding_window=4096) == (4096, "sliding_window")
    for none in (None, 0):
        assert size(rule, "hf", sliding_window=none) == (None, "sliding_window")
    assert size(rule, "hf") is size(rule, "gguf") is None
    assert size(rule, "gguf", x__attention__sliding_window=16) == (16, STATED)
    assert size(rule, "gguf", x__attention__sliding_window=0) == (None, STATED)
    with pytest.raises(ArchError, match="sliding_window"):
        size(rule, "hf", sliding_window="wide")
    other, _ = rules(hf="local_attention")
    assert size(other, "hf", local_attention=8, sliding_window=4) == (8, "local_attention")
    assert other.write["hf"](8, {}) == {"local_attention": 8}


def test_a_switch_turns_the_window_off_and_a_list_may_turn_it_on() -> None:
    rule, _ = rules(switch=True)
    on = {"sliding_window": 64, "use_sliding_window": True}
    assert size(rule, "hf", **on) == (64, "sliding_window")
    assert size(rule, "hf", **on | {"use_sliding_window": False}) == (None, "use_sliding_window")
    assert size(rule, "hf", sliding_window=64) is None
    assert rule.write["hf"](64, {}) == on
    assert rule.write["hf"](None, {}) == {"sliding_window": None, "use_sliding_window": False}
    wins, _ = rules(switch=True, listed_wins=True)
    off = on | {"use_sliding_window": False}
    assert size(wins, "hf", **off, layer_types=[FULL, SLIDING]) == (64, "sliding_window")
    assert size(wins, "hf", **off, layer_types=[FULL, FULL]) == (None, "use_sliding_window")
    assert size(wins, "hf", **off) == (None, "use_sliding_window")
    assert size(rule, "hf", **off, layer_types=[FULL, SLIDING])[0] is None
    plain, _ = rules()
    assert plain.write["hf"](None, {}) == {"sliding_window": None}


def test_a_gguf_states_a_size_where_llama_cpp_would_assume_another() -> None:
    plain, _ = rules()
    assert plain.write["gguf"](5, {}) == {KEY: 5} and plain.write["gguf"](None, {}) == {}
    stated, _ = rules(stated=True)
    assert stated.write["gguf"](None, {}) == {KEY: 0} and stated.write["gguf"](5, {}) == {KEY: 5}
    fixed, _ = rules(gguf_fixed=True, gguf_default=128)
    assert fixed.write["gguf"](5, {"window_layers": (False, True)}) == {}
    assert fixed.write["gguf"](None, {"window_layers": (False, False)}) == {KEY: 0}
    assert size(fixed, "gguf", x__attention__sliding_window=5) == (128, STATED)
    assert size(fixed, "gguf", x__attention__sliding_window=0) == (None, STATED)
    assert size(fixed, "gguf") is None


# --- layers ---------------------------------------------------------------------------------------


def layers(rule: Any, style: str, *, window: int | None = 8, count: int = 4, **values: Any) -> Any:
    hp = {"sliding_window": window, "n_layers": count}
    return rule.read[style](facts(style, **values), hp)


def test_listed_layers_have_a_window_by_their_kind() -> None:
    _, rule = rules(layers=window_period(2))
    kinds = [SLIDING, FULL, FULL, SLIDING, SLIDING]  # of one layer more: a draft head's
    assert layers(rule, "hf", layer_types=kinds) == ((True, False, False, True), "layer_types")
    assert layers(rule, "hf") == ((True, False, True, False), "sliding_window")
    assert layers(rule, "hf", window=None, layer_types=kinds) is None
    assert layers(rule, "hf", window=None) is None
    for window in (8, None):
        with pytest.raises(ArchError, match=f"layer 1 is 'chunked'; .* one of: {SLIDING}, {FULL}"):
            layers(rule, "hf", window=window, layer_types=[FULL, "chunked", FULL, FULL])
    with pytest.raises(ArchError, match="layer_types"):
        layers(rule, "hf", layer_types=kinds[:3])
    _, own = rules(kind="local")
    assert layers(own, "hf", layer_types=["local", FULL] * 2)[0] == (True, False) * 2
    _, silent = rules(listed=False)
    assert layers(silent, "hf", layer_types=kinds) == ((True,) * 4, "sliding_window")


def test_layers_of_a_gguf_are_a_period_or_a_list() -> None:
    _, rule = rules()
    key = f"{STATED}_pattern"

    def read(value: Any, **more: Any) -> Any:
        return layers(rule, "gguf", x__attention__sliding_window_pattern=value, **more)

    assert read(3) == ((True, True, False, True), key)
    assert read([1, 0, True, False, True]) == ((True, False, True, False), key)
    assert read(3, window=None) is None and layers(rule, "gguf") is None
    for wrong in ([1, 2, 1, 1], [1, 0, 1], 0, True):
        with pytest.raises(ArchError, match="sliding_window_pattern"):
            read(wrong)


def test_layers_that_nothing_lists_are_those_of_the_family() -> None:
    _, rule = rules(layers=window_period(2), gguf_layers=window_period(3))
    hp = {"sliding_window": 8, "n_layers": 4}
    assert rule.default(hp) == (True, False, True, False)
    assert rule.default_in["gguf"](hp) == (True, True, False, True)
    off = hp | {"sliding_window": None}
    assert rule.default(off) == rule.default_in["gguf"](off) == (False,) * 4
    _, same = rules(layers=window_period(2))
    assert same.default_in["gguf"](hp) == (True, False, True, False)


def test_layers_are_written_as_kinds_and_as_a_period_where_they_are_one() -> None:
    _, rule = rules(layers=window_period(2))
    hp = {"sliding_window": 8, "n_layers": 6}
    value = (True, False, False, True, True, False)
    kinds = [SLIDING, FULL, FULL, SLIDING, SLIDING, FULL]
    assert rule.write["hf"](value, hp) == {"layer_types": kinds}
    pattern = f"{KEY}_pattern"
    assert rule.write["gguf"](value, hp) == {pattern: list(value)}
    assert rule.write["gguf"](window_period(2)(None, hp), hp) == {}
    for length in (3, 4, 6):
        assert rule.write["gguf"](window_period(length)(None, hp), hp) == {pattern: length}
    for plain in ((True,) * 6, (False,) * 6, (False, *(True,) * 5)):
        assert rule.write["gguf"](plain, hp) == {pattern: list(plain)}
    _, every = rules()
    assert every.write["gguf"](window_period(2)(None, hp), hp) == {pattern: 2}
    assert every.write["gguf"]((True,) * 6, hp) == {}
    _, silent = rules(listed=False)
    assert silent.write["hf"](value, hp) == {}
    _, switched = rules(switch=True)
    for first in range(7):
        late = tuple(layer >= first for layer in range(6))
        found = switched.write["hf"](late, hp)
        assert found["max_window_layers"] == first and len(found["layer_types"]) == 6


# --- rotations and causes -------------------------------------------------------------------------


@pytest.mark.parametrize("without", [False, True])
def test_layers_with_a_window_alone_are_rotated(without: bool) -> None:
    rule: Any = rotated_windows(without)
    hp = {"sliding_window": 8, "n_layers": 3, "window_layers": (True, False, True)}
    assert rule.default(hp) == (True, False, True)
    assert rule.default(hp | {"sliding_window": None}) == (without,) * 3


def test_a_window_that_looks_both_ways_is_refused() -> None:
    for value in (None, False, "vision"):
        assert require_causal((), facts("hf", use_bidirectional_attention=value), {}) == ""
    assert require_causal((), facts("hf"), {}) == ""
    for value in (True, "all"):
        with pytest.raises(ArchError, match="attention is bidirectional; expected a causal model"):
            require_causal((), facts("hf", use_bidirectional_attention=value), {})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sliding_window": 8}, True), ({"sliding_window": 8, "use_sliding_window": False}, False),
        ({"sliding_window": 8, "use_sliding_window": True}, False),
        ({"sliding_window": None}, False), ({}, False), ({"sliding_window": 0}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])
def test_a_window_without_its_switch_is_remarked(
    arch: str, keys: dict[str, Any], said: bool
) -> None:
    """A switch that says false was decided by somebody: published models have a size beside it."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
              "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}  # fmt: skip
    report = read_hyper(ARCHS[arch], Facts("hf", config | keys, {}), "x", complete=False)[1]
    says = [str(one) for one in report.conflicts if "use_sliding_window is not there" in str(one)]
    assert bool(says) == said, report.conflicts
