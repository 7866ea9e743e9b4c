"""Parts of codecs and readers, each by itself."""

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import CODECS, encode, writable
from aprfmt.codecs.repack_blocks import _scale
from aprfmt.errors import AprfmtError, CodecError
from aprfmt.formats.pytorch.pickle_calls import _sparse


def test_what_is_writable_encodes_weights_and_nothing_else_does() -> None:
    """Integers are copied and never made of weights; others encode a row or have no encoder."""
    found = writable()
    assert len(set(found)) == len(found) > 20
    for name in CODECS:
        whole = ENCODINGS[name].numpy.startswith(("int", "uint", "bool", "complex"))
        try:
            x = np.random.default_rng(0).normal(size=(2, 512))
            encode(name, x if name == "F64" else x.astype(np.float32))
            encodes = True
        except (AprfmtError, NotImplementedError):
            encodes = False
        assert (name in found) == (encodes and not whole), name


@pytest.mark.parametrize("bad", [(0, 2), (1, 0), (2, 1)])
def test_the_first_block_whose_scale_is_no_number_is_named(bad: tuple[int, int]) -> None:
    held = np.ones((3, 3), np.float16)
    assert _scale(held).shape == (3, 3)
    held[bad], held[2, 2] = np.inf, np.nan
    with pytest.raises(CodecError, match=rf"its block \[{bad[0]}, {bad[1]}\] holds inf"):
        _scale(held)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_has_its_parts_and_then_its_size(layout: str) -> None:
    parts = ["p0", "p1"] if layout == "coo" else ["p0", "p1", "p2"]
    found = _sparse(f"torch.sparse_{layout}", (*parts, (3, 4)))
    assert list(found.parts.values()) == parts and found.facts["shape"] == [3, 4]
    with pytest.raises(ValueError, match=r"has [23] values|its layout is"):
        _sparse(f"torch.sparse_{layout}", tuple(parts))
    if layout != "coo":
        with pytest.raises(ValueError, match="has 3 values"):
            _sparse(f"torch.sparse_{layout}", tuple(parts))
