"""The byte map of a block, as a row of the encoding table states it."""

import pytest

from aprfmt.base.encodings import block_encoding, block_members
from aprfmt.errors import CodecError


def test_members_in_order() -> None:
    found = list(block_members("d:f2 qs:16u1 at:2(a:u1 b:3i2)"))
    assert found == [("d", 0, "f2"), ("qs", 16, "u1"), ("at", 2, "a:u1 b:3i2")]
    assert block_encoding("X", 32, "d:f2 qs:16u1 at:2(a:u1 b:3i2)").type_size == 2 + 16 + 2 * (
        1 + 6
    )


@pytest.mark.parametrize("layout", ["d:b2 qs:16u1", "d:f2,qs:16u1", "d qs:16u1", "d:f2 qs:16"])
def test_a_member_that_is_not_understood_is_refused(layout: str) -> None:
    with pytest.raises(CodecError, match="is not NAME:TYPE"):
        block_encoding("X", 32, layout)
