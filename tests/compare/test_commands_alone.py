"""Commands that mend keys, names and stray bytes, and scales of inputs: each by itself."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.compare import exchanged_names
from aprfmt.errors import CodecError
from aprfmt.measure import activation_scales, item_repairs
from aprfmt.measure.activation_scales import ROUNDINGS, InputScale
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.model.ledger import NO_PART, Item, Ledger, NotCompared, Surplus
from aprfmt.model.renames import rename_names
from aprfmt.tensors.view import stored_by_name

# --- keys that `set` writes -----------------------------------------------------------------------


def ledger(*items: Item) -> Ledger:
    return Ledger("m", tuple(items))


def argument(kind: Any, name: str, mine: Any, theirs: Any, *more: Item) -> str:
    """Return the words of `set` for an item with these values; ... for a side without it."""
    a, b = (
        ledger(*(() if value is ... else (Item(kind, name, "unread", holds=value),)), *others)
        for value, others in ((mine, more), (theirs, ()))
    )
    row = NotCompared(kind, name, "unequal")
    return item_repairs.item_arguments([row], a, b)[kind, name]


def test_a_key_is_set_to_what_a_holds_where_a_command_can_write_it() -> None:
    key = "metadata key"
    assert argument(key, "x.y", 5, 6) == "x.y=5"
    assert argument(key, "x.y", "it's", 6) == "'x.y=\"it'\"'\"'s\"'"
    assert argument(key, "x.y", [1, "a"], None) == "'x.y=[1, \"a\"]'"
    assert argument(key, "x.y", partial(int, "7"), 6) == "x.y=7"
    assert argument(key, "x.y", {1, 2}, 6) == ""  # no JSON
    assert argument(key, "x.y", 5, ...) == ""  # its type is not known
    assert argument(key, "x.y", ..., 6) == "--remove x.y"
    assert argument(key, "x.y", ..., ...) == ""
    config = "config key"
    assert argument(config, "a.b", True, ...) == "config.json:a.b=true"
    inside = Item("config key", "a.c", "unread", holds=1)
    assert argument(config, "a.b", ..., 1, inside) == "--remove config.json:a.b"
    assert argument(config, "a.b", ..., 1) == "--remove config.json:a"
    assert argument(config, "b", ..., 1, inside) == "--remove config.json:b"
    assert argument(config, "a.c.d", ..., 1, Item("config key", "ab", "unread"), inside) == (
        "--remove config.json:a.c.d"
    )
    for kind in ("tokenizer part", "generation setting"):
        name = "generation_config.json: top_k"
        assert argument(kind, name, 5, 6) == "generation_config.json:top_k=5"
        assert argument(kind, "tokenizer.json: model", 5, 6) == ""
    assert argument(key, "adapter_config.json: r", 5, 6) == ""
    rows = [NotCompared("file", "f", "unequal"), NotCompared(key, "k", "equal")]
    assert item_repairs.item_arguments(rows, ledger(), ledger()) == {}


def test_items_are_mended_by_one_command_where_each_of_them_is() -> None:
    def command(*rows: NotCompared, **words: str) -> str:
        arguments = {("metadata key", name): text for name, text in words.items()}
        return item_repairs.repair_items_command(rows, arguments, "a.gguf", "b.gguf")

    def key(name: str, state: Any = "unequal") -> NotCompared:
        return NotCompared("metadata key", name, state)

    assert command() == command(key("k", "equal")) == command(key("k")) == ""
    assert command(key("k"), k="k=1") == "aprfmt set b.gguf k=1 -o b-fixed.gguf"
    assert command(key("k"), key("l"), key("m", "equal"), k="k=1", l="k=1") == (
        "aprfmt set b.gguf k=1 -o b-fixed.gguf"
    )
    assert command(key("k"), key("l"), k="k=1", l="") == ""
    for length, there in ((400, True), (401, False)):
        assert bool(command(key("k"), k="k" * length)) is there
    extra = [NotCompared("tensor", f"t{i} x", "only in B") for i in range(9)]
    assert command(*extra[:2], key("k", "equal")) == (
        "aprfmt convert b.gguf b-fixed.gguf --drop 't0 x' --drop 't1 x'"
    )
    assert command(*extra[:8]) and not command(*extra) and not command(extra[0], key("k"), k="k=1")
    assert not command(NotCompared("tensor", "t", "only in A"))
    long = [NotCompared("tensor", "t" * 360, "only in B")]
    assert not command(*long)


def test_bytes_of_no_tensor_are_cut_where_nothing_else_is_apart() -> None:
    def item(name: str, path: str) -> Item:
        return Item(
            "file", name, "unread", NO_PART, Surplus(Path(path), "4 bytes", None) if path else None
        )

    own = ledger(item("f: 4 bytes", "b.gguf"), item("g: 4 bytes", "b.gguf"), item("h", ""))

    def commands(*rows: NotCompared) -> tuple[str, ...]:
        return item_repairs.surplus_commands(rows, own, "b.gguf")

    def row(name: str, state: Any = "only in B", why: str = NO_PART) -> NotCompared:
        return NotCompared("file", name, state, why)

    once = ("aprfmt repair b.gguf --partial -o b-fixed.gguf",)
    assert commands(row("f: 4 bytes")) == commands(row("f: 4 bytes"), row("g: 4 bytes")) == once
    assert commands(row("f: 4 bytes"), row("x", "equal")) == once
    assert commands() == commands(row("h")) == commands(row("unknown")) == ()
    assert commands(row("f: 4 bytes"), row("x", "only in A")) == ()
    assert commands(row("f: 4 bytes"), row("x", why="another")) == ()
    told = item_repairs.inspect_unreadable_command
    odd = [NotCompared("file", "f", "unreadable", side=side) for side in "AB"]
    assert told(odd[:1], "a b", "c") == "aprfmt inspect 'a b' --account"
    assert told(odd[1:], "a", "c") == told(odd, "a", "c") == "aprfmt inspect c --account"


# --- names that were exchanged --------------------------------------------------------------------


def rules_of(wanted: dict[str, str], *others: str) -> list[str]:
    names = [*wanted, *others]
    rules = exchanged_names._find_rules(names, wanted)
    if rules:  # the oracle: what the command makes of all names
        made = rename_names(names, rules, "", strict=False)
        assert {old: new for new, old in made.items()} == {
            name: wanted.get(name, name) for name in names
        }
    return [str(rule) for rule in rules]


def test_the_rules_of_the_fewest_components_that_change_no_other_name() -> None:
    layers = {
        f"l.{x}.{part}": f"l.{y}.{part}" for x, y in ((0, 1), (1, 0)) for part in ("q.w", "k.w")
    }
    assert rules_of(layers, "l.2.q.w", "norm") == ["l.0=l.0_moved", "l.1=l.0", "l.0_moved=l.1"]
    parts = {"l.0.q.w": "l.0.k.w", "l.0.k.w": "l.0.q.w"}
    alone = rules_of(parts)
    assert alone == ["q=q_moved", "k=q", "q_moved=k"]
    assert len(rules_of(parts, "l.1.q.w", "l.1.k.w")) == 3
    assert all("0." in rule for rule in rules_of(parts, "l.1.q.w", "l.1.k.w"))
    assert rules_of({"old.w": "new.w"}, "other.w") == ["old=new"]
    assert rules_of({}) == [] and rules_of({"a.w": "c.w", "b.w": "c.w"}) == []
    assert rules_of({"a.w": "b.c.w"}) == []  # of other lengths
    many = {f"l.p{i}.w": f"l.p{(i + 1) % 9}.w" for i in range(9)}
    assert rules_of(many) == []
    few = {f"l.p{i}.w": f"l.p{(i + 1) % 8}.w" for i in range(8)}
    assert len(rules_of(few)) == 9  # one of them steps aside


def test_names_that_are_right_are_known_by_what_stands_where() -> None:
    def view(*names: str, steps: int = 0) -> Any:
        stored = [SimpleNamespace(parts={}, info=SimpleNamespace(name=name)) for name in names]
        return SimpleNamespace(stored=stored, steps=steps)

    def model(style: str = "hf", **views: Any) -> Any:
        return SimpleNamespace(style=style, find=views.get)

    def row(here: str, there: str, says: str = "B's", verdict: str = "DIFFERENT") -> Any:
        found = SimpleNamespace(where=(here, there), evidence=(f"{says} is",), values={})
        return SimpleNamespace(explanation=found, verdict=verdict)

    a, b = model(q=view("a.q")), model(q=view("b.q"), k=view("b.k"), x=view("b.x"))
    right = exchanged_names._right_names
    both = [row("q", "k"), row("k", "q")]
    assert right(both, a, b) == {"b.q": "b.k", "b.k": "b.q"}
    assert right([row("q", "k", "A's")], a, b) == {"b.k": "b.q"}
    gone = row("q", "x", verdict="ONLY_IN_A")
    assert right([gone], a, b) == {"b.x": "a.q"}
    other: Any = SimpleNamespace(**(vars(a) | {"style": "gguf"}))
    assert right([gone], other, b) == {} and right([*both, gone], other, b) == {}
    assert right([*both, row("q", "x")], a, b) == {}  # two names for one
    for odd in (
        model(q=view("b.q")),
        model(q=view("b.q"), k=view("b.k", steps=1)),
        model(q=view("b.q"), k=view("b.k", "b.l")),
    ):
        assert right([row("q", "k")], a, odd) == {}
    alone: Any = SimpleNamespace(explanation=None, verdict="DIFFERENT")
    assert right([alone], a, b) == {}
    packed = view("w")
    packed.stored[0].parts = {
        s: SimpleNamespace(info=SimpleNamespace(name=s)) for s in ".z .a".split()
    }
    assert [*stored_by_name([packed])] == [".a", ".z"]


def test_b_is_renamed_where_nothing_else_is_wrong_with_it() -> None:
    names = {"q": "l.0.q.w", "k": "l.0.k.w", "n": "norm"}
    views = {
        key: SimpleNamespace(
            stored=[SimpleNamespace(parts={}, info=SimpleNamespace(name=name))], steps=()
        )
        for key, name in names.items()
    }

    def finding(cause: str, *keys: str, confirmed: bool = True, verdict: Any = "bug") -> Finding:
        return Finding(cause, "so", "tensor", verdict, keys, confirmed, keys=keys)

    def row(here: str, there: str, verdict: str = "DIFFERENT") -> Any:
        found = SimpleNamespace(where=(here, there), evidence=("B's is", "and more"), values={})
        return SimpleNamespace(key=here, explanation=found, verdict=verdict)

    swapped = finding("swapped_tensors", "q", "k")
    rows = [row("q", "k"), row("k", "q"), row("n", "n", "SAME_BYTES")]
    a: Any = SimpleNamespace(style="hf", find=views.get)

    def told(findings: Any, rows: Any = rows, **more: Any) -> list[str]:
        source = SimpleNamespace(
            tensors=dict.fromkeys(names.values()), of_engine=more.get("of_engine", False)
        )
        b: Any = SimpleNamespace(
            style="hf", find=views.get, source=source, kind=more.get("kind"), path=Path("b.gguf")
        )
        return [one.next for one in exchanged_names.with_renames(findings, rows, a, b)]

    rules = "--rename q=q_moved --rename k=q --rename q_moved=k"
    command = f"aprfmt convert b.gguf b-fixed.gguf {rules}"
    assert told([swapped]) == [command]
    other = finding("quantisation", "n", verdict="precision")
    assert told([other, swapped]) == ["", command]
    assert told([swapped, finding("bit_rot", "n")]) == ["", ""]
    assert told([swapped, finding("", "n")]) == ["", ""]  # of no cause
    assert told([finding("swapped_tensors", "q", "k", confirmed=False)]) == [""]
    assert told([other]) == [""] and told([]) == []
    assert told([swapped], [*rows, row("n", "n")]) == [""]  # a difference that none explains
    assert told([swapped], [*rows, row("n", "n", "WITHIN")]) == [command]
    assert told([swapped], of_engine=True) == told([swapped], kind="adapter") == [""]
    assert told([finding("swapped_tensors", "q", "k", "x")]) == [command]


# --- scales of inputs -----------------------------------------------------------------------------


def scale(name: str, *values: float, encoding: str = "F32") -> InputScale:
    dtype = {"F32": np.float32, "F16": np.float16, "I32": np.int32}[encoding]
    return InputScale(name, np.array(values, dtype).tobytes(), encoding, (len(values),))


def test_scales_of_inputs_are_compared_as_numbers_where_they_are_stored_otherwise() -> None:
    third = scale("input_scale", 1 / 3)
    assert third.equals(scale("activation_scale", 1 / 3)) and not third.inverts(third)
    assert third.equals(scale("input_scale", 1 / 3, encoding="F16"))
    assert third.equals(scale("input_global_scale", 3.0))
    assert not third.equals(scale("input_scale", np.nextafter(np.float32(1 / 3), np.float32(1))))
    assert not third.equals(scale("activation_scale", 0.3334))
    half = scale("activation_scale", 0.5, encoding="F16")
    step = ROUNDINGS * (storage_noise("F32") + storage_noise("F16"))
    for share, near in ((0.99, True), (1.01, False)):
        assert half.equals(scale("input_scale", 0.5 * (1 + share * step))) is near
    assert third.inverts(scale("input_scale", 3.0)) and not third.inverts(scale("input_scale", 2.0))
    assert third.inverts(scale("input_global_scale", 1 / 3))
    one = scale("activation_scale", 1.0)
    assert not one.inverts(scale("input_scale", 1.0))  # the same
    for odd in (
        scale("input_scale", 1 / 3, 1 / 3),
        scale("input_scale", 0, encoding="I32"),
        scale("input_scale", 0.0),
        scale("input_scale", np.inf),
        scale("act_quant_scale", 1 / 3),
    ):
        assert not third.equals(odd) and not third.inverts(odd)
    values = scale("input_global_scale", 4.0).values
    assert values is not None and values.tolist() == [0.25]


def test_scales_of_inputs_that_differ_are_told_with_their_weight() -> None:
    def part(value: InputScale) -> Any:
        info = SimpleNamespace(encoding=value.encoding, shape=value.shape)
        return SimpleNamespace(raw=lambda: value.raw, info=info)

    def view(*stored: dict[str, InputScale]) -> Any:
        return SimpleNamespace(
            stored=[
                SimpleNamespace(
                    info=SimpleNamespace(name=f"w{i}"),
                    parts={f".{key}": part(value) for key, value in one.items()},
                )
                for i, one in enumerate(stored)
            ]
        )

    def told(a: Any, b: Any) -> list[tuple[str, str, str]]:
        pair: Any = SimpleNamespace(key="L0.q", a=a, b=b)
        found = list(activation_scales.differing_input_scales([pair]))
        assert all(one.kind == "scale of activations" for one in found)
        return [(one.name, one.state, one.why) for one in found]

    weight = {"weight_scale": scale("weight_scale", 1.0)}
    x, y, inverse = (scale("input_scale", value) for value in (0.5, 0.25, 2.0))
    assert told(view({"input_scale": x}), view({"input_scale": x})) == []
    assert told(view({"input_scale": x}), view({"input_scale": y})) == [
        ("L0.q: input_scale", "unequal", "")
    ]
    assert told(view({"input_scale": x}), view({"activation_scale": inverse})) == [
        ("L0.q: input_scale, activation_scale in B", "unequal", "1/s stands for s")
    ]
    beside = "next to w0; engines take 1.0, or 0, where there is none"
    assert told(view({"input_scale": x}), view(weight)) == [
        ("L0.q: input_scale", "only in A", beside)
    ]
    many = told(view(weight, weight), view(weight, {"input_scale": x}))
    assert many == [("L0.q[1]: input_scale", "only in B", beside.replace("w0", "w1"))]
    for odd in (None, view({}), view(weight, weight)):
        assert told(view({"input_scale": x}), odd) == told(odd, view({"input_scale": x})) == []


def test_a_part_that_does_not_fit_is_told_with_its_tensor() -> None:
    def torn() -> Any:
        raise CodecError("is torn")

    def view(value: float, packed: Any) -> Any:
        raw = np.float32(value).tobytes()
        part = SimpleNamespace(raw=lambda: raw, info=SimpleNamespace(encoding="F32", shape=()))
        info = SimpleNamespace(name="w")
        stored = SimpleNamespace(info=info, parts={".input_scale": part}, packed=packed)
        return SimpleNamespace(stored=[stored])

    activation_scales.check_input_scales(view(1.0, torn))
    activation_scales.check_packed_parts(view(np.nan, None))
    with pytest.raises(CodecError, match=r"^w: is torn$"):
        activation_scales.check_packed_parts(view(1.0, torn))
    for wrong in (np.nan, np.inf, -1.0):
        with pytest.raises(CodecError, match=r"^w: part '.input_scale'"):
            activation_scales.check_input_scales(view(wrong, torn))
