"""How sure a cause is follows from what was done to show it, by one function, for every cause."""

import ast
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aprfmt
from aprfmt.compare import diff
from aprfmt.measure import findings
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import share_text
from aprfmt.measure.proofs import BITS, MOST, Proof, cap_proof, certainty_of, unfitted_proof
from aprfmt.measure.verdicts import CERTAINTIES
from aprfmt.model import open_model
from tests.causes import faults
from tests.causes.tensor_faults import FAULTS
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder

SURE = list(CERTAINTIES).index
ONE_EACH = {fault.cause: fault for fault in reversed(FAULTS) if fault.confirmed}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(
        tmp_path_factory.mktemp("proofs") / "source", "BF16", hidden=faults.HIDDEN,
        layers=faults.LAYERS, vocab=faults.VOCAB, heads=faults.HEADS, kv_heads=faults.KV,
    )  # fmt: skip


def test_what_two_causes_explain_alike_confirms_neither() -> None:
    """Seen red: confirmed, though another cause gives the same values."""
    one = Finding("scale", "", "tensor", "bug", ("w",), True, proof=unfitted_proof())
    assert one.certainty == "confirmed"
    assert replace(one, also=("norm_offset",)).certainty == "explained"
    assert replace(one, confirmed=False).certainty == "located"


@pytest.mark.parametrize(
    ("share", "percent"),
    [(None, ""), (1.0, ""), (0.999999, "99.9 %"), (0.99951, "99.9 %"), (0.9, "90 %")],
)
def test_a_share_is_whole_only_where_all_values_come_out(share: float | None, percent: str) -> None:
    """Seen red: rounded to the nearest, so that 999,999 of a million were 100 %."""
    said = share_text(share)
    assert said.startswith(f", {percent} of") if percent else said == ""


def test_no_cause_is_confirmed_but_by_its_proof(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: `certainty` that goes by `confirmed`, and `judged` that is always true."""
    assert not {"certainty", "reached"} & {row.name for row in fields(Finding)}
    found: list[tuple[str, Finding]] = []
    for number, (cause, fault) in enumerate(ONE_EACH.items()):
        report = diff(source, edited(source, tmp_path / str(number), fault.change))
        found += [(cause, one) for one in report.findings if one.cause == cause]
        found += [(cause, row.explanation) for row in report.tensors
                  if row.explanation is not None and row.explanation.cause == cause]  # fmt: skip
    assert {cause for cause, _ in found} == set(ONE_EACH)
    confirmed = {cause for cause, one in found if one.certainty == "confirmed"}
    assert len(confirmed) > 12
    for _, one in found:
        proof = one.proof
        assert (one.certainty == "confirmed") <= (proof is not None and proof.judged)
        assert replace(one, proof=None).certainty == "located"
        assert replace(one, proof=replace(unfitted_proof(), accused=True)).certainty == "explained"
    monkeypatch.setattr(Proof, "judged", False)
    assert not [cause for cause, one in found if one.certainty == "confirmed"]
    monkeypatch.setattr(findings, "certainty_of", lambda proof: "located")
    assert {one.certainty for _, one in found} == {"located"}


def test_a_cause_for_the_outside_is_made_of_a_finding() -> None:
    """Seen red: a level stated where the cause is named, beside what was done to show it."""
    package, makes = Path(aprfmt.__file__).parent, ("name_cause", "NamedCause")
    makers = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if "NamedCause" in (text := file.read_text(encoding="utf-8")) or "name_cause" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in makes
    }
    assert makers == {"measure/findings.py", "measure/named_causes.py"}


counts = st.integers(1, 40)
digits = st.sampled_from([0.0, 0.5, 2.0, 24.0])
shares = st.sampled_from([0.0, MOST, 1.0])


@given(counts, counts, digits, shares, st.booleans())
@example(count=16, free=9, bits=24.0, share=1.0, accused=False)
@example(count=15, free=0, bits=2.0, share=1.0, accused=False)
def test_less_shown_is_never_surer(
    count: int, free: int, bits: float, share: float, accused: bool
) -> None:
    """Seen red: `free` not counted; the share compared with 0."""
    proof = Proof(count, share, free, bits, accused)
    sure = SURE(certainty_of(proof))
    for less in (
        replace(proof, share=share / 2), replace(proof, free=2 * free), replace(proof, bits=0.0),
        replace(proof, accused=True), replace(proof, count=count / 2), replace(proof, moved=0),
    ):  # fmt: skip
        assert SURE(certainty_of(less)) <= sure
    if certainty_of(proof) == "confirmed":
        assert share == 1.0 and not accused
        assert count >= 2 * free and (count - free) * bits >= BITS
    assert (certainty_of(proof) == "located") == (share < MOST)


def test_a_change_of_nothing_explains_nothing() -> None:
    """Such as "in 0 of 1024 groups", or a factor of 1. Seen red: neither was looked at."""
    proof = unfitted_proof(64)
    assert certainty_of(proof) == "confirmed"
    assert certainty_of(replace(proof, moved=0)) == "located"
    assert certainty_of(replace(proof, count=0)) == "located"


@pytest.mark.parametrize(("before", "after", "sure"), [
    (0.3, 0.0, True), (0.3, 0.2, True), (0.3, 0.3, False), (0.3, 0.4, False), (None, 0.0, True),
])  # fmt: skip
def test_what_leaves_as_much_as_there_was_explains_nothing(
    before: float | None, after: float, sure: bool
) -> None:
    """Seen red: residuals were not looked at."""
    one = Finding("scale", "x", "tensor", "bug", ("w",), True, residual_before=before,
                  residual_after=after, proof=unfitted_proof())  # fmt: skip
    assert (one.certainty == "confirmed") == sure


def test_steps_of_both_sides_are_no_proof(source: Path, tmp_path: Path) -> None:
    """Two quantizers of one source: the bound is made of what may be wrong itself.

    Seen red: a proof that counts the values alone, so that a wrong quantizer was confirmed as one.
    """
    for name, top in (("a", 127.0), ("b", 120.0)):
        path = tmp_path / f"{name}.gguf"
        aprfmt.convert(source, path, encoding="Q8_0")
        with open_model(source) as model:
            blocks = model.roles["L0.ffn_up.weight"].numpy().astype(np.float32).reshape(-1, 32)
        scale = (np.abs(blocks).max(1) / top).astype(np.float16)
        codes = np.rint(blocks / scale.astype(np.float32)[:, None]).clip(-127, 127)
        raw = np.concatenate(
            [scale.view(np.uint8).reshape(-1, 2), codes.astype(np.int8).view(np.uint8)], axis=1
        )
        with open_model(path) as model:
            at = model.roles["L0.ffn_up.weight"].stored[0].info.offset
        held = bytearray(path.read_bytes())
        held[at : at + raw.size] = raw.tobytes()
        path.write_bytes(held)
    (found,) = diff(tmp_path / "a.gguf", tmp_path / "b.gguf").causes
    assert (found.cause, found.level) == ("quantisation", "explained"), found.says
    assert "both are Q8_0 of one source" in found.says


def test_a_proof_is_enough_from_half_of_the_items_and_32_digits_on() -> None:
    """As many items have to judge as gave the numbers, and 32 digits of them have to agree."""
    for count, free, bits, judged in (
        (16, 8, 4.0, True),
        (15, 8, 99.0, False),
        (16, 8, 3.99, False),
        (17, 9, 99.0, False),
        (1, 0, 32.0, True),
        (1, 0, 31.9, False),
        (0, 0, math.inf, False),
        (4, 4, math.inf, False),
        (2, 1, math.inf, True),
        (32, 0, 1.0, True),
        (31, 0, 1.0, False),
    ):
        proof = Proof(count, 1.0, free, bits)
        assert proof.judged is judged, proof
        if count:
            assert certainty_of(proof) == ("confirmed" if judged else "explained")
    whole = Proof(100, 1.0, 0, 1.0)
    for changed, certainty in (
        ({"share": 0.999}, "explained"),
        ({"share": MOST}, "explained"),
        ({"share": MOST - 1e-9}, "located"),
        ({"accused": True}, "explained"),
        ({"moved": 1}, "confirmed"),
        ({"moved": 0}, "located"),
        ({"count": 0}, "located"),
    ):
        made: Any = changed
        assert certainty_of(replace(whole, **made)) == certainty, changed
    assert cap_proof(whole, "located") is None and cap_proof(whole, "confirmed") is whole
    capped = cap_proof(whole, "explained")
    assert certainty_of(capped) == "explained" and certainty_of(None) == "located"
    assert certainty_of(unfitted_proof()) == "confirmed"
    assert certainty_of(unfitted_proof(3, 0.9)) == "explained"
