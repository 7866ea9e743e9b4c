"""What libmtmd of llama.cpp makes of an image or a sound with our mmproj files is transformers'.

Its GELU is a table of float16 values: with that table in transformers gemma3's distance is 2e-6.
Seen red: gemma3's norm without the one that is added, a pixtral tower's heads in halves, qwen3_vl's
mergers in reverse, voxtral without the number of frames it joins.
"""

import pytest

from tests.arch.seen import row
from tests.arch.towers import CHANGED
from tests.llama import needs_mtmd


@needs_mtmd
@pytest.mark.parametrize("label", [label for label in CHANGED if label != "voxtral_tower"])
def test_a_tower_gives_transformers_rows(label: str) -> None:
    found = row(label)
    assert found["loads"], found
    assert found["distance"] < 1e-3


@needs_mtmd
def test_voxtral_is_loaded_and_ends_where_the_library_counts_one_row_less() -> None:
    assert row("voxtral_tower")["why"].endswith("Invalid number of output tokens")
