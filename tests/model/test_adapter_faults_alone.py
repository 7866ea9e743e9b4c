"""What is no pair of an adapter, and which tensors are a draft head's: by names and shapes."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.arch.binding import BoundNames
from aprfmt.model import adapter_parts, resolve
from aprfmt.model.adapter_parts import GGUF_EMBEDDING, pair_fault

# --- pairs ----------------------------------------------------------------------------------------


def fault(
    a: tuple[int, ...] | None,
    b: tuple[int, ...] | None,
    *,
    spelling: str = "peft",
    module: str = "layers.0.q_proj",
    names: tuple[str, str] = ("a", "b"),
    **config: Any,
) -> str:
    """What is wrong with the pair of a module whose factors have these shapes."""
    shapes = {name: shape for name, shape in zip(names, (a, b), strict=True) if shape is not None}
    model: Any = {
        f"{module}.{name}": SimpleNamespace(shape=shape) for name, shape in shapes.items()
    }
    parts: Any = SimpleNamespace(
        factors={module: {name: f"{module}.{name}" for name in shapes}}, spellings={spelling}
    )
    return pair_fault(config, parts, model, module)


def test_factors_of_a_pair_have_one_rank_which_the_configuration_says() -> None:
    assert fault((4, 16), (8, 4)) == fault((4, 16), (8, 4), r=4) == ""
    said = "layers.0.q_proj: adapter_config.json says rank 8, its factors have 4"
    assert fault((4, 16), (8, 4), r=8) == said
    assert fault((4, 16), (8, 4), r=8, rank_pattern={"q_proj": 4}) == ""
    assert fault((4, 16), (8, 4), r=4, rank_pattern={"q_proj": 8}) == said
    assert fault((4, 16), (8, 4), r=4, rank_pattern={"k_proj": 8}) == ""
    assert fault((4, 16), (8, 4), spelling="kohya", r=8) == "", "each pair has a rank of its own"
    experts: Any = {"target_parameters": ["layers.0.q_proj.weight"]}
    assert fault((8, 16), (8, 8), r=4, **experts) == "", "one for several experts"
    assert fault((8, 16), (8, 8), r=4) != ""


def test_a_factor_without_the_other_or_of_other_axes_is_no_pair() -> None:
    assert fault(None, (8, 4)) == "layers.0.q_proj has no a next to b"
    assert fault((4, 16), None) == "layers.0.q_proj has no b next to a"
    embedding = ("embedding_a", "embedding_b")
    assert fault((4, 16), None, names=embedding) == (
        "layers.0.q_proj has no embedding_b next to embedding_a"
    )
    assert fault((4, 16), (8, 4), names=embedding) == ""
    for a, b in (((4, 16), (8, 5)), ((16, 4), (5, 8)), ((4, 16, 1), (8, 4)), ((0, 16), (8, 0))):
        text = fault(a, b)
        assert text == (
            f"layers.0.q_proj: factors are {list(a)} and {list(b)}; expected [r, in] and [out, r]"
        )
    ungathered = "; a partitioned run (ZeRO stage 3, FSDP) was saved without gathering"
    assert fault((64,), (32,)).endswith(ungathered) and fault((0,), (0,)).endswith(ungathered)
    assert not fault((64,), (8, 4)).endswith(ungathered)


def test_transposed_factors_are_called_that() -> None:
    """Seen red: another rank, of a square weight, or other axes."""
    assert fault((16, 4), (4, 8)).endswith("expected [r, in] and [out, r]; both are transposed")
    square = fault((16, 4), (4, 16), r=4)
    assert square.endswith("says rank 4, its factors have 16; both are transposed: exchanged, they "
                           "have that rank")  # fmt: skip
    assert "transposed" not in fault((16, 4), (4, 16), r=8)
    assert "transposed" not in fault((16, 4), (8, 4), r=4), "one of them alone"


def test_llama_cpp_stores_factors_of_an_embedding_the_other_way_round() -> None:
    assert fault((100, 4), (16, 4), spelling="gguf", module=GGUF_EMBEDDING) == ""
    text = fault((4, 100), (16, 4), spelling="gguf", module=GGUF_EMBEDDING)
    assert text.endswith("expected [tokens, r] and [size, r]")
    assert fault((4, 100), (16, 4), spelling="gguf", module="blk.0.attn_q.weight") == ""
    assert fault((4, 100), (16, 4), module=GGUF_EMBEDDING) == ""


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (20.0, ""),
        (2, ""),
        (0, ""),
        (None, "has no scale"),
        (True, "says scale True"),
        ("20", "says scale '20'"),
        (math.inf, "says scale inf"),
        (math.nan, "says scale nan"),
    ],
)
def test_mlx_multiplies_by_the_scale_that_its_configuration_states(scale: Any, said: str) -> None:
    """Factors of three axes are of stacked experts."""

    def obstacle(*axes: int) -> str:
        model: Any = {f"m{n}.a": SimpleNamespace(shape=(2,) * n) for n in axes}
        parts: Any = SimpleNamespace(factors={f"m{n}": {"a": f"m{n}.a"} for n in axes})
        return adapter_parts._mlx_obstacle({"lora_parameters": {"scale": scale}}, parts, model)

    if said:
        assert obstacle(2) == (
            f"lora_parameters of adapter_config.json {said}, by which MLX multiplies the pairs"
        )
        return
    assert obstacle(2, 1) == ""
    assert obstacle(2, 3) == "m3 has MLX's factors of stacked experts, which are not read here"


def test_factors_of_mlx_are_stored_the_other_way_round_but_for_stacks() -> None:
    def told(a: Any, b: Any, **config: Any) -> str:
        return fault(a, b, spelling="mlx", lora_parameters=config)

    assert told((16, 4), (4, 8)) == told((16, 4), (4, 8), rank=4) == ""
    assert told((3, 4, 16), (3, 8, 4)) == told((3, 4, 16), (3, 8, 4), rank=4) == ""
    said = "layers.0.q_proj: adapter_config.json says rank 8, its factors have 4"
    assert told((16, 4), (4, 8), rank=8) == told((3, 4, 16), (3, 8, 4), rank=8) == said
    for a, b in (
        ((4, 16), (8, 4)),
        ((16, 4), (5, 8)),
        ((16, 4), (3, 8, 4)),
        ((3, 16, 4), (3, 4, 8)),
        ((16, 0), (0, 8)),
    ):
        text = f"factors are {list(a)} and {list(b)}; expected [in, r] and [r, out]"
        assert told(a, b) == f"layers.0.q_proj: {text}"


# --- draft heads ----------------------------------------------------------------------------------


def test_tensors_of_draft_heads_are_taken_from_the_models() -> None:
    """A layer behind the last that is of no draft head has no role; all in the files' order."""

    def group(layer: int | None, *stored: str) -> Any:
        return SimpleNamespace(layer=layer, stored=stored)

    names = ("x", "a", "l0", "l1", "l2", "l2b", "l3", "buf", "own", "odd")
    bound = replace(
        BoundNames((), ("x", "odd", "l2b")),
        groups=(group(None, "a"), group(0, "l0"), group(1, "l1"), group(2, "l2"), group(3, "l3")),
        buffers=("buf", "own"),
    )
    head: Any = SimpleNamespace(
        bound=SimpleNamespace(groups=[group(2, "l2")], unbound=("l2b",), buffers=("buf",))
    )
    found, drafts = resolve._separate_drafts(bound, [head], names, 2)
    assert [one.stored for one in found.groups] == [("a",), ("l0",), ("l1",)]
    assert found.unbound == ("x", "l2b", "l3", "odd") and found.buffers == ("buf", "own")
    assert drafts == ("l2", "l2b", "buf")
    found, drafts = resolve._separate_drafts(bound, [head], names, None)
    assert [one.stored for one in found.groups] == [("a",), ("l0",), ("l1",), ("l3",)]
    assert found.unbound == ("x", "l2b", "odd")
    found, drafts = resolve._separate_drafts(bound, [], names, 1)
    assert [one.stored for one in found.groups] == [("a",), ("l0",)] and drafts == ()
    assert found.unbound == ("x", "l1", "l2", "l2b", "l3", "odd")
