"""Which stored tensors make a packed weight, by the dialects that a configuration names."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import dialects
from aprfmt.errors import CodecError, MissingPartError, UnsupportedError
from aprfmt.tensors import card, companions


class Kind:
    """A dialect whose main tensor ends in `main`."""

    def __init__(self, main: str) -> None:
        self.main, self.weight, self.parts, self.name = main, "weight", (main,), main
        self.optional: tuple[str, ...] = ()

    def prefix_of(self, name: str) -> str | None:
        return name.removesuffix(self.main) if name.endswith(self.main) else None

    def stored(self, prefix: str, part: str, tensors: Any) -> str | None:
        return prefix + part if prefix + part in tensors else None


ONE, OTHER, LONG = Kind("qweight"), Kind("qweight"), Kind("weight_packed")


def found(
    monkeypatch: pytest.MonkeyPatch, sections: Any, names: tuple[str, ...], rows: Any = (ONE, LONG)
) -> tuple[dict[str, Any], list[str]]:
    """Return (the weights found, faults); `sections` gives the section of (dialect, prefix)."""

    def of_section(dialect: Any, prefix: str, tensors: Any, said: Any) -> Any:
        held = sections.get((dialect, prefix))
        if isinstance(held, Exception):
            raise held
        return held

    def of(section: Any) -> Any:
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setattr(companions, "_section_for", of_section)
    monkeypatch.setattr(dialects, "dialects_of", of)
    monkeypatch.setattr(dialects, "unmistakable_dialects", lambda rows: (OTHER,))
    faults: list[str] = []
    config: Any = {"quantization_config": {"quant_method": "x"}}
    tensors: Any = dict.fromkeys(names, SimpleNamespace())
    made = companions._find_dialect(tensors, config, lambda error: faults.append(str(error)))
    return dict(made), faults


def test_a_weight_is_that_of_the_first_dialect_that_has_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault of one keeps neither another dialect nor another weight from being found."""
    names = ("a.qweight", "b.qweight", "c.weight_packed", "d.weight")
    held = {(ONE, "a."): {"bits": 4}, (OTHER, "b."): {"bits": 8}, (LONG, "c."): {"bits": 2}}
    made, faults = found(monkeypatch, held, names)
    assert [*made] == ["a.weight", "b.weight", "c.weight"] and not faults
    lost: dict[Any, Any] = {**held, (ONE, "b."): MissingPartError("b lacks scales", ("scales",))}
    made, faults = found(monkeypatch, lost, names)
    assert [*made] == ["a.weight", "b.weight", "c.weight"] and faults == ["b lacks scales"]
    odd = {**held, (OTHER, "b."): CodecError("b is contradicted"), (ONE, "a."): CodecError("a")}
    made, faults = found(monkeypatch, odd, names)
    assert [*made] == ["c.weight"] and faults == ["a", "b is contradicted"]


def test_a_configuration_that_names_no_known_dialect_packs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, held = ("a.qweight",), {(ONE, "a."): {"bits": 4}}
    assert found(monkeypatch, held, names, UnsupportedError("new")) == ({}, [])
    assert found(monkeypatch, held, names, CodecError("bits is 5")) == ({}, ["bits is 5"])
    faults: list[str] = []
    plain: Any = {}
    assert companions._find_dialect(plain, {"a": 1}, lambda error: faults.append("x")) == {}
    assert not faults


def test_a_scale_of_blocks_is_one_number_or_one_for_each_matrix() -> None:
    def join(shape: tuple[int, ...], scale: tuple[int, ...], encoding: str = "F32") -> Any:
        def part(name: str, shape: tuple[int, ...], encoding: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(name=name, shape=shape, encoding=encoding))

        parts: Any = {"": part("w", shape, "NVFP4"), "scale": part("w.scale", scale, encoding)}
        return companions._join_scaled("w", parts)

    for shape, scale in (
        ((4, 64), (1,)),
        ((4, 64), ()),
        ((3, 4, 64), (1,)),
        ((3, 4, 64), (3,)),
        ((3, 4, 64), (3, 1, 1)),
    ):
        assert join(shape, scale)[1:] == (shape, None)
    for shape, scale, said in (
        ((4, 64), (4,), "1"),
        ((3, 4, 64), (4,), "1 or 3"),
        ((4, 64), (0,), "1"),
    ):
        with pytest.raises(CodecError, match=f"expected {said} numbers in F32"):
            join(shape, scale)
    with pytest.raises(CodecError, match=r"w[.]scale is F16 \[1\]"):
        join((4, 64), (1,), "F16")


def test_the_first_six_values_of_a_tensor_are_shown() -> None:
    def shown(shape: tuple[int, ...], **more: Any) -> str:
        values = np.arange(math.prod(shape), dtype=np.float32).reshape(-1, shape[-1])
        about: dict[str, Any] = {
            "shape": shape,
            "damage": "",
            "row_bytes": 8,
            "rows": lambda a, b: values[a:b],
            "name": "w",
            "encoding": "F32",
            "nbytes": 4096,
            "offset": 64,
            "role": None,
            "names": ("w",),
            "steps": (),
            "parts": (),
        } | more
        return card.tensor_card(SimpleNamespace(**about))  # type: ignore[arg-type]

    six = "0 1 2 3 4 5"
    for shape, more in (((6,), False), ((1, 6), False), ((7,), True), ((2, 6), True)):
        text = shown(shape)
        assert six in text and (f"{six} ..." in text) is more and "4,096" in text
    assert "0 1 ..." in shown((2, 2)) and ">0 1<" in shown((1, 2))
    for hidden in ({"damage": "ends early"}, {"row_bytes": None}):
        assert "0 1" not in shown((2, 2), **hidden)
    assert "ends early" in shown((2, 2), damage="ends early") and "0 1" not in shown((0, 2))

    def refused(start: int, stop: int) -> Any:
        raise CodecError("no such block")

    assert "no such block" in shown((2, 2), rows=refused)
