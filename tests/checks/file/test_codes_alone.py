"""Scales and codes that no quantizer writes, texts that come back, findings that are counted."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.file import scales, stated_facts, template_tokens, values, vocabulary
from aprfmt.checks.records import CheckFinding, NotRun
from aprfmt.codecs import codec
from aprfmt.model.lone_codes import LoneCode

# --- blocks -------------------------------------------------------------------------------------


def blocks(encoding: str, count: int = 3) -> Any:
    """Return blocks of zeros by the layout of an encoding."""
    layout: Any = codec(encoding).layout
    return np.zeros(count, layout)


def bad(encoding: str, held: Any) -> Any:
    return scales.first_bad_block(encoding, memoryview(held.tobytes()))


def test_a_sum_is_wrong_where_rounding_does_not_explain_it() -> None:
    """`s` is float16: one step of its smallest numbers is rounding, two are not."""
    held = blocks("Q8_1")
    held["d"], held["qs"][:, :4] = 0.5, [[1, 2, 3, 4]] * 3
    held["s"] = 5.0
    assert bad("Q8_1", held) is None
    for at in range(3):
        for wrong in (-5.0, 10.0, 4.0, 6.0):
            other = held.copy()
            other["s"][at] = wrong
            assert bad("Q8_1", other) == (at, "s that is not d times the sum of its elements", 1)
    small = blocks("Q8_1", 2)
    for steps, wrong in ((1, False), (2, True)):
        small["s"] = np.float16(steps * 2.0**-24)
        assert (bad("Q8_1", small) is not None) is wrong


def test_each_sum_of_sixteen_codes_is_held_to_its_own() -> None:
    held = blocks("Q8_K", 2)
    held["qs"] = np.arange(512).reshape(2, 256) % 7 - 3
    held["bsums"] = held["qs"].astype(np.int32).reshape(2, 16, 16).sum(axis=2)
    assert bad("Q8_K", held) is None
    for at, group in ((0, 0), (1, 15)):
        other = held.copy()
        other["bsums"][at, group] += 1
        assert bad("Q8_K", other) == (at, "sums that are not those of its elements", 1)


@pytest.mark.parametrize(
    ("encoding", "field", "right", "wrong"),
    [("MXFP4", "e", (0, 0xFE), (0xFF,)), ("NVFP4", "d", (0, 0x7E), (0x7F, 0x80, 0xFF))],
)
def test_a_scale_of_one_byte_that_is_no_number_is_bad(
    encoding: str, field: str, right: Any, wrong: Any
) -> None:
    for value in right:
        held = blocks(encoding)
        held[field] = value
        assert bad(encoding, held) is None, value
    for value in wrong:
        held = blocks(encoding)
        held[field].reshape(3, -1)[1, -1] = value
        held[field].reshape(3, -1)[2, 0] = value
        found = bad(encoding, held)
        assert found is not None and (found[0], found[2]) == (1, 2), value


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_a_half_in_the_top_bits_of_four_words_may_not_be_infinite(sign: int) -> None:
    """IQ1_M: the first word has the lowest four of its bits."""
    for bits, wrong in ((0x7BFF, False), (0x7C00, True), (0x7C01, True), (0x3C00, False)):
        held = blocks("IQ1_M", 2)
        for word in range(4):
            held["scales"][1, word] = ((bits | sign) >> (4 * word) & 0xF) << 12 | 0x0FFF
        found = bad("IQ1_M", held)
        assert found == ((1, "d that is NaN or infinite", 1) if wrong else None), hex(bits)


# --- codes of eight bits ------------------------------------------------------------------------


def test_codes_without_their_scale_fail_unless_another_check_tells_of_them() -> None:
    found = {name: LoneCode("F8_E4M3", 448.0) for name in ("codes", "told")}
    ctx: Any = SimpleNamespace(model=SimpleNamespace(lone_codes=found), reported_parts={"told"})
    [one] = values._codes_without_scale(ctx)
    assert one.where == "codes" and "F8_E4M3 values up to 448" in one.found


# --- what is said of many findings, of rows, of a stated type -----------------------------------


def test_findings_beyond_the_limit_are_counted() -> None:
    every = [CheckFinding(f"w{i}", f"f{i}", f"e{i}", "todo", "warning") for i in range(23)]
    assert vocabulary._MANY == 20
    for count in (0, 19, 20):
        assert vocabulary._limit_findings(iter(every[:count])) == every[:count]
    for count in (21, 23):
        found = vocabulary._limit_findings(iter(every[:count]))
        assert found[:20] == every[:20] and found[20:] == [
            CheckFinding("w20", f"{count - 20} more of this kind", "e20", "", "warning")
        ]


def round_trip(
    monkeypatch: pytest.MonkeyPatch, back: dict[str, str], *, kind: str = "bpe", **more: Any
) -> Any:
    """Return the result where texts come back as these, and all others as they were."""
    engine = SimpleNamespace(
        encode=lambda text, begin, special: [text, begin, special],
        decode=lambda ids, skip: back.get(ids[0], ids[0]) if ids[1:] == [False, False] else "?",
    )
    side = SimpleNamespace(data=more.get("data"), vocabulary=SimpleNamespace(kind=kind))
    monkeypatch.setattr(vocabulary, "ROUND_TRIPS", ("one", "two", "three"))
    monkeypatch.setattr(vocabulary, "_can_spell", lambda text, v: text != more.get("unknown"))
    monkeypatch.setattr(vocabulary, "_build_engine", lambda ctx, side: engine)
    ctx: Any = SimpleNamespace(stated=side, words=SimpleNamespace(where="f"))
    return vocabulary.check_round_trip(ctx)


def test_every_text_has_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for blanks around it, which SentencePiece may add."""
    result = round_trip(monkeypatch, {})
    assert (result.found, result.findings) == ("3 texts", [])
    for text in ("one", "three"):
        result = round_trip(monkeypatch, {text: "x"})
        assert [one.found for one in result.findings] == [f"'{text}' comes back as 'x'"]
    for kind, many in (("spm", 0), ("bpe", 1)):
        found = round_trip(monkeypatch, {"two": " two"}, kind=kind).findings
        assert len(found) == many
    assert len(round_trip(monkeypatch, {"two": " tw"}, kind="spm").findings) == 1
    result = round_trip(monkeypatch, {"two": "x"}, unknown="two")
    assert (result.found, result.findings) == ("2 texts", [])
    changing: Any = {"normalizer": {"type": "Lowercase"}}
    with pytest.raises(NotRun, match=r"^the tokenizer changes texts: Lowercase$"):
        round_trip(monkeypatch, {}, data=changing)


@pytest.mark.parametrize("stored", ["table", "head", "both", "damaged", "flat", "none"])
def test_rows_of_tokens_are_looked_at_where_they_can_be_read(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table every token that the template writes, in the head the one that ends a turn."""
    looked: list[Any] = []
    found = [
        SimpleNamespace(id=5, text="<a>", written=True),
        SimpleNamespace(id=7, text="<end>", written=True),
        SimpleNamespace(id=9, text="<b>", written=False),
    ]
    monkeypatch.setattr(template_tokens, "_template_tokens", lambda ctx: ("side", found))
    monkeypatch.setattr(template_tokens, "turn_end_of", lambda side, marks: 7)

    def rows(logical: Any, wanted: Any) -> list[str]:
        looked.append((logical.name, wanted))
        return [logical.name]

    monkeypatch.setattr(template_tokens, "_find_untrained_rows", rows)
    sound = {
        role: SimpleNamespace(
            name=role,
            shape=(4,) if stored == "flat" else (4, 2),
            damage="cut" if stored == "damaged" else "",
        )
        for role in ("token_embd.weight", "output.weight")
    }
    kept = {"table": ["token_embd.weight"], "head": ["output.weight"], "none": []}
    roles = {role: sound[role] for role in kept.get(stored, sound)}
    ctx: Any = SimpleNamespace(carried=None, resolution=SimpleNamespace(roles=roles))
    if "token_embd.weight" not in roles:
        with pytest.raises(NotRun, match=r"^the model stores no token embedding$"):
            template_tokens.check_token_rows(ctx)
        return
    result: Any = template_tokens.check_token_rows(ctx)
    table = ("token_embd.weight", {5: "<a>", 7: "<end>"})
    head = ("output.weight", {7: "<end>"})
    wanted = {"table": [table], "both": [table, head]}.get(stored, [])
    assert looked == wanted and result.findings == [name for name, _ in wanted]
    assert result.found == "rows of 2 tokens"


@pytest.mark.parametrize(
    ("stated", "main", "words"),
    [
        ("bfloat16", "BF16", None),
        ("float32", "BF16", "float32; most float weights are BF16"),
        ("bfloat16", "", NotRun("the file holds no plain float matrices")),
        (None, "BF16", NotRun("config.json names no float dtype (None)")),
        (7, "BF16", "7"),
    ],
)
def test_a_stated_type_is_held_to_the_type_of_most_weights(
    stated: Any, main: str, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stated_facts, "main_float_encoding", lambda model: main)
    for key in ("dtype", "torch_dtype"):
        model = SimpleNamespace(config={key: stated}, folder="f")
        ctx: Any = SimpleNamespace(model=model)
        if isinstance(words, NotRun):
            with pytest.raises(NotRun) as error:
                stated_facts.check_dtype(ctx)
            assert str(error.value) == str(words)
            continue
        result = stated_facts.check_dtype(ctx)
        assert [one.found for one in result.findings] == ([] if words is None else [words])
        assert result.found == str(stated)
        assert all(one.level == "warning" for one in result.findings)
    model.config, without = None, r"^there is no config.json next to the weights$"
    with pytest.raises(NotRun, match=without):
        stated_facts.check_dtype(ctx)
