"""Two sides with the same codes: where the files do not say which is wrong, neither is accused.

Seen red: the sound packed side called the one that departs, a command that writes B again from a
side that may be wrong, a side left open though the float original says it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor.proof import either_side_text
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.records import Diagnosis
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof
from tests.causes.tensor.test_named_orders import AWQ, awq_copy, decoded_as
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import SIZES, source

Array = Any
OPEN = "no command mends A or B: the files do not say which side is wrong"
PLAIN = list(range(8))


def decoded_with_moved_zeros() -> Path:
    """Return an AWQ copy decoded to float16, with the zero points of each word in other places."""

    def write(prefix: str, values: Array) -> packing.Rows:
        packed = packing.nearest(values)
        moved = np.arange(len(packed.codes)).reshape(-1, 8)[:, AWQ].reshape(-1)
        zeros, group = packed.zeros[moved], packed.group
        made = (packed.codes - zeros[:, group]) * packed.scales[:, group]
        return {f"{prefix}.weight": packing.row(made.astype(np.float16))}

    return Path(packing.folder(source("llama", SIZES), "moved-zeros", None, write))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", ["codes", "zeros"])
def test_the_same_codes_accuse_neither_side(case: str, turned: bool) -> None:
    packed = awq_copy(source("llama", SIZES), tuple(AWQ))
    decoded = decoded_with_moved_zeros() if case == "zeros" else decoded_as(PLAIN)
    pair = (decoded, packed) if turned else (packed, decoded)
    found = diagnose(*map(str, pair))
    lead = found.lead
    assert lead is not None and (lead.cause, lead.side) == ("packing_order", "")
    assert lead.leaves_side_open and found.unrepaired_text == OPEN
    assert not [one for one in found.next if one.startswith("aprfmt convert")]
    shown = aprfmt.diff(*pair)
    assert [one.remedy for one in shown.causes if one.cause == "packing_order"] == [None]


def test_the_float_original_says_which_side_is_wrong() -> None:
    """Innocent of the rule: a side is named, and what has right values is said."""
    right = source("llama", SIZES)
    wrong = awq_copy(right, tuple(PLAIN))
    found = diagnose(str(wrong), str(right))
    assert found.lead is not None and (found.lead.cause, found.lead.side) == ("packing_order", "A")
    assert found.unrepaired_text == (
        "no command mends A: it is the side that departs, and B has the right values"
    )
    turned = diagnose(str(right), str(wrong))
    assert turned.lead is not None and turned.lead.side == "B"
    assert not turned.lead.leaves_side_open and "A or B" not in turned.unrepaired_text


def test_the_sound_copy_is_quiet() -> None:
    right = source("llama", SIZES)
    packed = awq_copy(right, tuple(AWQ))
    assert diagnose(str(right), str(packed)).verdict == "precision"
    assert diagnose(str(packed), str(decoded_as(AWQ))).verdict in ("same", "precision")


SURE = Proof(100.0, 1.0, 0, 3.0)
OF_A = Finding(
    "zero_point", "A's are less one", "tensor", "bug", ("x",), True, side="A", proof=SURE
)
EITHER = Finding(
    "quant_scale", "A's are turned", "tensor", "bug", ("y",), True, proof=SURE,
    leaves_side_open=True,
)  # fmt: skip
# A sentence that reads like one of an open side is none: the field says it.
WORDED = replace(
    EITHER, says="A's are turned" + either_side_text("A's", "scales are"), leaves_side_open=False
)
OF_B = replace(OF_A, cause="bit_rot", side="B", next="aprfmt convert A B-fixed")


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ((EITHER,), OPEN),
        ((WORDED,), "no command mends B: it has to be made again by what made it"),
        ((OF_A,), "no command mends A: it is the side that departs, and B has the right values"),
        ((EITHER, OF_B),
         "no command mends quant_scale: the files do not say which side is wrong"),
        ((EITHER, OF_A),
         "no command mends quant_scale, zero_point: the files do not say of quant_scale which "
         "side is wrong"),
        ((OF_B,), ""),
    ],
)  # fmt: skip
def test_what_no_command_mends_names_a_side_only_if_it_is_known(
    findings: tuple[Finding, ...], said: str
) -> None:
    assert Diagnosis("A", "B", findings, (), ("tensor",), ()).unrepaired_text == said
