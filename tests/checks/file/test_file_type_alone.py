"""What a GGUF's file type claims, of facts made for it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.checks.file import stated_facts
from aprfmt.checks.records import NotRun

TYPE, VERSION = "general.file_type", "general.quantization_version"


def test_a_mixture_may_hold_what_stands_in_where_rows_are_no_whole_blocks() -> None:
    for claimed, others in (
        ("F16", set()),
        ("Q8_0", set()),
        ("Q4_K", {"Q5_0"}),
        ("Q6_K", {"Q8_0"}),
        ("IQ2_S", {"IQ2_XS", "IQ4_NL"}),
        ("IQ3_S", {"IQ3_XXS", "IQ4_NL"}),
        ("IQ1_S", {"IQ4_NL"}),
        ("IQ4_XS", {"IQ4_NL"}),
        ("TQ1_0", {"Q4_0"}),
    ):
        assert stated_facts._with_fallbacks(claimed) == {claimed, *others}


def number(encoding: str) -> int:
    return next(key for key, name in stated_facts.file_types().items() if name == encoding)


def test_a_file_type_is_held_to_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of floats to most weights, of a mixture to some; a quantized file has a version."""

    def checked(stated: Any, counts: dict[str, int], **more: Any) -> tuple[str, list[Any]]:
        monkeypatch.setattr(stated_facts, "elements_by_encoding", lambda model: Counter(counts))
        metadata = {TYPE: stated, VERSION: 2, **more}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        ctx: Any = SimpleNamespace(model=SimpleNamespace(metadata=metadata), where="m")
        result = stated_facts.check_file_type(ctx)
        return result.found, [(one.level, one.found) for one in result.findings]

    q4, f16 = number("Q4_K"), number("F16")
    text, findings = checked(q4, {"Q4_K": 10, "Q6_K": 90})
    assert text == f"{q4} (Q4_K); 90.0% of the weights are Q6_K" and not findings
    assert not checked(q4, {"Q5_0": 10, "F16": 90})[1]  # rows that are no whole blocks
    (one,) = checked(q4, {"Q6_K": 90, "F16": 10})[1]
    said = f"{q4} (Q4_K), and no tensor is Q4_K; 90.0% of the weights are Q6_K"
    assert one == ("fail", said)
    assert not checked(f16, {"F16": 51, "F32": 49})[1]
    (one,) = checked(f16, {"F16": 49, "F32": 51})[1]
    assert one == ("fail", f"{f16} (F16), but 51.0% of the weights are F32")
    (one,) = checked(q4, {"Q4_K": 1}, **{VERSION: None})[1]
    assert one == ("warning", f"no {VERSION} with Q4_K tensors")
    assert not checked(f16, {"F16": 1}, **{VERSION: None})[1]
    assert not checked(q4 | 1024, {"Q4_K": 1})[1]  # a type that a loader guessed
    (one,) = checked(999, {"Q4_K": 1})[1]
    assert one == ("warning", "999, which is no type; most weights are Q4_K")
    for stated, counts in ((None, {"F16": 1}), (1024, {"F16": 1}), (f16, {})):
        with pytest.raises(NotRun):
            checked(stated, counts)
