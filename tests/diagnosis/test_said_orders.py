"""The words for an order that was mixed up say which order it is, and none says "inf".

Seen red: "in another order than AWQ's, or in it", "A's order, as numbers of B", "inf apart".
"""

import math
import re
from functools import partial

import pytest

from aprfmt.measure.named_causes import Effect
from tests.cli.run import aprfmt
from tests.diagnosis import files, packing
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.faults_packed import SIZES, source

EXPERTS = 12
AS_TEXT = sorted(range(EXPERTS), key=str)


@pytest.mark.parametrize("swapped", (False, True), ids=("B sorted", "A sorted"))
def test_experts_sorted_as_text_are_said_to_be(swapped: bool) -> None:
    """https://github.com/pytorch/torchtitan/pull/1918."""
    right = tiny_folder("qwen2_moe", num_experts=EXPERTS)

    def sort(rows: files.Rows) -> None:
        held = dict(rows)
        for name in held:
            match = re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)
            if match:
                rows[name] = held[f"{match[1]}{AS_TEXT[int(match[2])]}{match[3]}"]

    pair = (right, files.copy(right, "experts-as-text", tensors=sort))
    done = aprfmt("diff", *(reversed(pair) if swapped else pair), "--json")
    (cause,) = done.json["causes"]
    assert cause["cause"] == "expert_order"
    assert f"experts of {'A' if swapped else 'B'} are sorted as text" in cause["says"]


GIVEN = "words hold their eight codes in "
ORDERS = {
    "AWQ in plain order": (packing.awq_section(), partial(packing.awq, order=tuple(range(8))),
                           f"{GIVEN}plain order (0 to 7), where AWQ's"),
    "AWQ in reverse order": (packing.awq_section(),
                             partial(packing.awq, order=(7, 5, 3, 1, 6, 4, 2, 0)),
                             f"{GIVEN}reverse order"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_codes_is_named_for_what_is_read(name: str) -> None:
    section, store, says = ORDERS[name]
    right = source("llama", SIZES)
    wrong = packing.folder(
        right,
        f"order-{name.replace(' ', '-')}",
        section,
        lambda prefix, values: store(prefix, packing.nearest(values)),
    )
    done = aprfmt("diff", right, wrong, "--json")
    told = [one["says"] for one in done.json["causes"] if one["cause"] == "packing_order"]
    assert told and says in told[0], done.out


def test_an_infinite_distance_is_no_number() -> None:
    assert Effect(math.inf).text == "" and Effect(math.inf, 0.5).text == "KL 0.5"
    assert Effect(0.5).text == "0.5 apart"
