"""The configuration of a packed model, as the library that reads it writes its own."""

import pytest
import torch
from transformers import BitsAndBytesConfig

from aprfmt.codecs import fp4, nf4


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False, None])
@pytest.mark.parametrize("left_out", [(), ("model.norm", "score")])
def test_bitsandbytes_configs_are_those_of_transformers(
    kind: str, double: bool | None, left_out: tuple[str, ...]
) -> None:
    codec = {"nf4": nf4, "fp4": fp4}[kind].CODEC
    options = {} if double is None else {"double_quantization": double}
    theirs = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=[*left_out, "lm_head"] if left_out else None,
    ).to_dict()
    assert dict(codec.config(options, left_out)) == theirs
