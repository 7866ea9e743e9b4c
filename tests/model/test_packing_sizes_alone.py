"""Which sizes a quantization section may have to state instead, and as what they are written."""

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from aprfmt.errors import CodecError
from aprfmt.model import packing_sizes
from aprfmt.model.packing_sizes import (
    BITS,
    GROUPS,
    changes_text,
    fitting_sizes,
    in_every_section,
    mode_changes,
    size_changes,
)

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def test_sizes_are_those_that_libraries_write() -> None:
    assert GROUPS == (16, 32, 64, 128, 256) and BITS == (2, 3, 4, 5, 6, 8)


def test_groups_come_alone_first_and_then_bits_and_then_both() -> None:
    found = list(size_changes(GPTQ, ["a.weight"]))
    sized = [{("group_size",): size} for size in GROUPS]
    single = [{("bits",): bits} for bits in BITS]
    assert found[:5] == sized and found[5:11] == single
    assert found[11:] == [one | other for one in single for other in sized]


def test_a_section_without_one_of_the_sizes_has_the_other() -> None:
    assert list(size_changes({"bits": 4}, [])) == [{("bits",): bits} for bits in BITS]
    assert list(size_changes({"group_size": 4}, [])) == [{("group_size",): n} for n in GROUPS]
    assert not list(size_changes({"bits": None}, []))
    assert not list(size_changes({}, []))


def test_sizes_of_the_weights_own_module_are_tried_first() -> None:
    section = {**GPTQ, "own": {"l.q": {"bits": 8}, "l.k": {"bits": 3}}}
    found = list(size_changes(section, ["l.q.weight", "x.weight"]))
    assert found[:6] == [{("own", "l.q", "bits"): bits} for bits in BITS]
    assert found[6] == {("group_size",): 16}
    whole = {("bits",), ("own", "l.q", "bits"), ("own", "l.k", "bits")}
    assert set(found[11]) == whole and set(found[-1]) == {*whole, ("group_size",)}
    assert next(iter(size_changes(section, ["l.v.weight"]))) == {("group_size",): 16}


def test_bits_have_the_name_of_compressed_tensors_too() -> None:
    section = {"groups": {"g0": {"weights": {"num_bits": 4, "group_size": 32}}}}
    above = ("groups", "g0", "weights")
    found = list(size_changes(section, []))
    assert found[0] == {(*above, "group_size"): 16} and found[5] == {(*above, "num_bits"): 2}


def test_modes_of_mlx_come_with_their_sizes() -> None:
    section = {"bits": 4, "group_size": 64}
    modes = {one[("mode",)]: one for one in mode_changes(section, [("bits",)])}
    assert modes["affine"] == {("mode",): "affine"}
    assert modes["mxfp4"] == {("mode",): "mxfp4", ("group_size",): 32}
    assert modes["mxfp8"] == {("mode",): "mxfp8", ("group_size",): 32, ("bits",): 8}
    nested = {"l.q": {"bits": 8, "group_size": 32}, **section}
    found = [one for one in mode_changes(nested, [("l.q", "bits")]) if "mxfp8" in one.values()]
    assert found == [{("l.q", "mode"): "mxfp8"}]
    assert not list(mode_changes(GPTQ, [("bits",)]))


def test_equal_sections_change_together() -> None:
    changes: dict[tuple[str, ...], int] = {("bits",): 8}
    config = {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}
    both = {("quantization", "bits"): 8, ("quantization_config", "bits"): 8}
    assert in_every_section(config, changes) == both
    assert len(in_every_section({**config, "quantization": {"bits": 3}}, changes)) == 1
    assert in_every_section({"quantization_config": {"bits": 4}}, changes) == {
        ("quantization_config", "bits"): 8
    }
    assert in_every_section({}, changes) == {}


def test_changes_are_arguments_of_a_shell() -> None:
    found = changes_text({("q", "bits"): 8, ("q", "mode"): "a b", ("q", "sym"): True})
    assert found == [
        "config.json:q.bits=8",
        "'config.json:q.mode=\"a b\"'",
        "config.json:q.sym=true",
    ]


class Packed:
    """A model whose weights decode to their shapes only with the sizes that it was packed with."""

    right: ClassVar = {"bits": 8, "group_size": 128}

    def __init__(self, section: dict[str, Any] | None, *, damaged: bool = False) -> None:
        self.config = {} if section is None else {"quantization_config": section}
        self.folder = SimpleNamespace(config=self.config)
        self.damage = ["parts"] if damaged else []
        self.source = SimpleNamespace(damage=[])
        fits = section is not None and all(section[key] == self.right[key] for key in self.right)
        shown = () if fits else (("L0.attn_q.weight", (1,), (2,)),)
        self.resolution: Any = SimpleNamespace(
            coverage=SimpleNamespace(misshapen=shown, missing=())
        )
        stored = (SimpleNamespace(packed=lambda: SimpleNamespace(laid_out=lambda: 1)),)
        self.roles = {"L0.attn_q.weight": SimpleNamespace(stored=stored, names=("q.weight",))}


def read_changed(model: Packed, changes: Any) -> Packed:
    section = json.loads(json.dumps(model.config["quantization_config"]))
    for (_, key), value in changes.items():
        section[key] = value
    if section["bits"] == 3:
        raise CodecError("three bits")
    return Packed(section)


def test_sizes_by_which_all_weights_fit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_sizes, "read_with_changes", read_changed)

    def sizes(section: Any, **more: Any) -> list[str]:
        made: Any = Packed(section, **more)
        return fitting_sizes(made)

    start = "config.json:quantization_config."
    assert sizes({**GPTQ, "bits": 8, "group_size": 64}) == [f"{start}group_size=128"]
    assert sizes({**GPTQ, "bits": 4}) == [f"{start}bits=8"]
    both = [f"{start}bits=8", f"{start}group_size=128"]
    assert sizes({**GPTQ, "bits": 2, "group_size": 32}) == both
    assert sizes({**GPTQ, "bits": 8}) == []
    assert sizes({**GPTQ, "bits": 8}, damaged=True) == [f"{start}group_size=128"]
    assert sizes(None) == []
    monkeypatch.setattr(Packed, "right", {"bits": 7, "group_size": 128})
    assert sizes(GPTQ) == []


def test_weights_whose_parts_do_not_fit_are_wrong() -> None:
    def failing() -> Any:
        raise CodecError("parts")

    made: Any = Packed({**GPTQ, "bits": 8})
    assert packing_sizes._wrong_weights(made) == []
    made.roles["x"] = SimpleNamespace(stored=(SimpleNamespace(packed=failing),), names=("x.w",))
    made.roles["p"] = SimpleNamespace(stored=(SimpleNamespace(packed=None),), names=("p.w",))
    made.resolution.coverage.misshapen = (("p", (1,), (2,)),)
    assert packing_sizes._wrong_weights(made) == ["x.w"]
    made.resolution.coverage.misshapen = (("L0.attn_q.weight", (1,), (2,)),)
    assert packing_sizes._wrong_weights(made) == ["q.weight", "x.w"]
