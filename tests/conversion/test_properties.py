"""Any small llama, through any ordered pair of formats: the original bytes, and an equal diff."""

import tempfile
from itertools import permutations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import aprfmt
from tests.conversion.folders import llama_folder, tensors_of

NAMES = {"apr": "m.apr", "gguf": "m.gguf", "safetensors": "m-hf"}


@settings(max_examples=12)
@given(
    encoding=st.sampled_from(["BF16", "F16", "F32"]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]),
    head_dim=st.sampled_from([2, 4, 10]),
    layers=st.integers(1, 3),
    ffn=st.integers(1, 40),
    vocab=st.integers(1, 40),
    tied=st.booleans(),
    seed=st.integers(0, 2**16),
    pair=st.sampled_from(list(permutations(NAMES, 2))),
)
def test_round_trip_of_any_pair(
    encoding: str,
    heads: tuple[int, int],
    head_dim: int,
    layers: int,
    ffn: int,
    vocab: int,
    tied: bool,
    seed: int,
    pair: tuple[str, str],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        at = source = llama_folder(
            folder / "source",
            encoding,
            hidden=heads[0] * head_dim,
            layers=layers,
            ffn=ffn,
            vocab=vocab,
            heads=heads[0],
            kv_heads=heads[1],
            tied=tied,
            seed=seed,
        )
        for step, target in enumerate((*pair, "safetensors")):
            place = folder / str(step)
            place.mkdir()
            aprfmt.convert(at, place / NAMES[target], to=target)
            at = place / NAMES[target]
            assert aprfmt.diff(source, at).equal
        assert tensors_of(at) == tensors_of(source)
