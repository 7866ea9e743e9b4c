"""Which value of one key would make all shapes right, worked by hand on small models."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import ArchError
from aprfmt.model import wrong_size
from aprfmt.model.wrong_size import is_whole, solve_key, value_at

RULES = (
    SimpleNamespace(role="token_embd.weight", shape=("vocab_size", "hidden_size")),
    SimpleNamespace(role="attn_q.weight", shape=("n_heads*head_dim", "hidden_size")),
    SimpleNamespace(role="ssm_in.weight", shape=("2*n_heads*missing", "hidden_size")),
    SimpleNamespace(role="ssm_x.weight", shape=("3*n_groups", "hidden_size")),
)
KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers", "n_groups": "n_groups",
}  # fmt: skip
VALUES = {
    "vocab_size": 100, "hidden_size": 32, "n_heads": 4, "head_dim": 8, "n_layers": 2, "n_groups": 5
}  # fmt: skip


class Hyper(dict[str, Any]):
    """Hyperparameters, of which head_dim follows from others."""

    def of(self, name: str) -> Any:
        return SimpleNamespace(value=self[name], key=KEYS.get(name, ""))


@dataclass
class Found:
    """A resolution: what is misshapen or missing, and the layers that are there."""

    misshapen: tuple[Any, ...] = ()
    missing: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    layers: tuple[int, ...] = (0, 1)
    style: str = "hf"
    relations: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        keys = {"hf": ("head_dim", "d_head")}
        hyper = (SimpleNamespace(name="head_dim", keys=keys),)
        self.spec = SimpleNamespace(tensors=RULES, hyper=hyper)
        self.hyper = Hyper(VALUES)
        self.roles = ["token_embd.weight", *(f"L{n}.attn_q.weight" for n in self.layers)]
        self.coverage = self


def proposed(*rows: tuple[str, tuple[int, ...]], **more: Any) -> list[tuple[str, int]]:
    made: Any = Found(tuple((role, shape, ()) for role, shape in rows), **more)
    return list(wrong_size._propose_values(made))


def test_each_factor_of_a_wrong_dimension_is_proposed() -> None:
    assert proposed(("token_embd.weight", (120, 32))) == [("vocab_size", 120)]
    found = proposed(("L0.attn_q.weight", (64, 32)))
    assert found == [("num_attention_heads", 8), ("head_dim", 16), ("num_attention_heads", 2)]
    assert proposed(("L0.attn_q.weight", (32, 32))) == []
    assert proposed(("L0.attn_q.weight", (36, 32))) == [("head_dim", 9)]
    assert proposed(("L0.ssm_x.weight", (21, 32))) == [("n_groups", 7)]
    assert proposed(("L0.ssm_x.weight", (22, 32))) == []


def test_what_most_tensors_ask_for_comes_first() -> None:
    found = proposed(
        ("token_embd.weight", (100, 48)), ("L0.attn_q.weight", (32, 64)),
        ("L1.attn_q.weight", (32, 64)),
    )  # fmt: skip
    assert found == [("hidden_size", 64), ("hidden_size", 48)]


def test_shapes_of_other_rules_propose_nothing() -> None:
    assert proposed(("token_embd.weight", (120, 32, 1))) == []
    assert proposed(("L0.other.weight", (120, 32))) == []
    assert proposed(("L0.ssm_in.weight", (64, 32))) == []  # a size that is not known


def test_layers_that_are_there_are_counted() -> None:
    assert proposed(layers=(0, 1, 2)) == [("num_hidden_layers", 3)]
    assert proposed(("token_embd.weight", (120, 32)), layers=(0, 1, 2)) == [
        ("num_hidden_layers", 3), ("vocab_size", 120)
    ]  # fmt: skip
    for layers in ((0, 1), (0,), (0, 1, 3), (1, 2, 3)):
        assert proposed(layers=layers) == []


def test_a_default_is_stated_by_the_first_key_of_its_style() -> None:
    for style, key in (("hf", "head_dim"), ("gguf", "")):
        made: Any = Found(style=style)
        assert wrong_size._absent_key(made, "head_dim") == key
        assert wrong_size._absent_key(made, "other") == ""


def test_a_model_is_whole_with_all_shapes_and_layers() -> None:
    def whole(**facts: Any) -> bool:
        made: Any = Found(**facts)
        return is_whole(made)

    assert whole() and whole(layers=(0,)) and whole(layers=())
    assert not whole(layers=(0, 2))
    assert not whole(misshapen=(1,)) and not whole(missing=("x",)) and not whole(accepted=("x",))


def model_of(config: dict[str, Any], *shapes: tuple[int, ...]) -> Any:
    views = [SimpleNamespace(shape=shape) for shape in shapes]
    return SimpleNamespace(
        path="m", folder=SimpleNamespace(config=config), metadata={}, values=lambda: views
    )


@pytest.fixture(autouse=True)
def plain_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a key be its own path, and a changed model the changes."""
    monkeypatch.setattr(wrong_size, "key_path", lambda model, key: (key,))
    monkeypatch.setattr(wrong_size, "read_with_changes", lambda model, changes: changes)
    monkeypatch.setattr(wrong_size, "opening_path", lambda path: path)


def test_the_value_at_a_key_is_that_of_the_configuration() -> None:
    made = model_of({"a": 1})
    assert value_at(made, "a") == 1 and value_at(made, "b") is None
    made.folder, made.metadata = None, {"a": 2}
    assert value_at(made, "a") == 2


def reads(*right: tuple[str, int]) -> Any:
    """Return a reader to which these values are right, others misshapen, and 1 or 9 an error."""

    def read(changes: Any) -> Any:
        ((path, value),) = changes.items()
        if value in (1, 9):
            raise ArchError("one and nine")
        return Found() if (path[0], value) in right else Found(misshapen=(1,))

    return read


def test_one_value_that_makes_all_right_is_the_answer() -> None:
    wrong: Any = Found((("L0.attn_q.weight", (64, 32), ()),))
    made = model_of({"num_attention_heads": 4})
    found: Any = solve_key(made, wrong, None, reads(("num_attention_heads", 8)))
    (relation,) = found.relations
    assert relation.says == (
        "num_attention_heads is 4, the tensors say 8: 1 tensors have other shapes than it gives"
    )
    assert relation.values == (("num_attention_heads", 8),)
    assert relation.remedy == "aprfmt set m num_attention_heads=8 --in-place"
    found = solve_key(made, wrong, None, reads(("head_dim", 16)))
    assert found.relations[0].says.startswith("head_dim is not there, the tensors say 16: ")
    both = reads(("num_attention_heads", 8), ("head_dim", 16))
    assert solve_key(made, wrong, None, both) is None
    assert solve_key(made, wrong, None, reads()) is None


def test_layers_and_errors_are_said_in_their_own_words() -> None:
    more: Any = Found(layers=(0, 1, 2))
    made = model_of({"num_hidden_layers": 2})
    found: Any = solve_key(made, more, None, reads(("num_hidden_layers", 3)))
    says = "num_hidden_layers is 2, the tensors say 3: tensors of 3 layers are there"
    assert found.relations[0].says == says
    odd = model_of({"num_attention_heads": 7}, (12, 12), (1,))
    error = ArchError("m: num_attention_heads: is 7, and divides no 12")
    found = solve_key(odd, None, error, reads(("num_attention_heads", 3)))
    says = "num_attention_heads is 7, the tensors say 3: it cannot be read"
    assert found.relations[0].says == says


def values(config: dict[str, Any], text: str, *shapes: tuple[int, ...]) -> list[Any]:
    return list(wrong_size._values_for_error(model_of(config, *shapes), ArchError(text)))


def test_an_errors_key_may_be_a_size_or_a_divisor_of_the_commonest() -> None:
    shapes = ((12, 1), (12, 20), (1,))
    expected = [("k", n) for n in (12, 20, 1, 2, 3, 4, 6)]
    assert values({"k": 5}, "m: k: is 5", *shapes) == expected
    assert values({"k": 5}, "metadata k: is 5", *shapes) == expected
    assert values({"k": 5.0}, "k: is 5.0", *shapes) == expected
    assert values({}, "nothing says how many; expected k", *shapes) == expected
    assert values({"k": 5.5}, "k: is 5.5", *shapes) == []
    assert values({"k": 5}, "no shape fits", *shapes) == []
    assert values({"k": 5}, "k: is 5") == []
    assert values({"k": 5}, "k: is 5", (2, 2)) == [("k", 2), ("k", 1)]
    wide = values({"k": 5}, "k: is 5", (512, 512))
    assert wide == [("k", 512), *(("k", 1 << n) for n in range(9))]
    many = values({"k": 5}, "k: is 5", *((size,) for size in range(101, 115)))
    assert [value for _, value in many][:9] == [*range(101, 109), 1]
