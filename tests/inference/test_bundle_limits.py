"""What a bundle's hyperparameters may be: tables and loops are made of them."""

import pytest

from aprfmt.arch.value_checks import MAX_SIZE
from aprfmt.errors import FormatError
from aprfmt.inference.parity import bundle


@pytest.mark.parametrize(
    ("name", "most"), [("head_dim", 1 << 20), ("ffn_size", 1 << 20), ("vocab_size", MAX_SIZE)]
)
def test_a_hyperparameter_is_bounded(name: str, most: int) -> None:
    found = {"n_layers": 1, name: most}
    assert bundle._read_hyper(found, "llama", "x") == found
    with pytest.raises(FormatError, match=f"x: {name}"):
        bundle._read_hyper(found | {name: most + 1}, "llama", "x")
