"""Yarn's factor on queries and keys in a GGUF: what llama.cpp reads is what is read and written."""

from typing import Any

import pytest

from aprfmt.arch.other_keys import other_readers_text
from aprfmt.arch.rope_gguf import ignored_factor_text, lost_divisors_text, read_gguf, write_gguf
from aprfmt.arch.rope_hf import yarn_attention_factor
from aprfmt.arch.spec import Facts
from aprfmt.arch.value_checks import same_value

HP = {"context_length": 2048, "rope_dim": 32, "global_head_dim": None, "rope_theta": 1e6}
COMPUTED = yarn_attention_factor(4.0, None, None)
KEY = "qwen3.rope.scaling."


def facts(**keys: Any) -> Facts:
    """A GGUF with a yarn scaling by 4, and more keys of it."""
    given = {"type": "yarn", "factor": 4.0, "original_context_length": 512, **keys}
    return Facts("gguf", {KEY + name: value for name, value in given.items()}, {}, "qwen3")


def factor_of(**keys: Any) -> float:
    """The factor on queries and keys that is read."""
    found = read_gguf(facts(**keys), HP, 0.1)
    assert found is not None and found[0] is not None
    return float(found[0]["attention_factor"])


@pytest.mark.parametrize("stated", [0.8782488703727722, 1.0, 1.5, COMPUTED])
def test_what_llama_cpp_overwrites_changes_nothing(stated: float) -> None:
    """Seen red: a GGUF of llama.cpp's own converter was accused of another factor."""
    assert factor_of(yarn_attn_factor=stated) == factor_of() == COMPUTED


@pytest.mark.parametrize("times", [0.5, 1.0, 0.7713246])
def test_what_every_architecture_loads_is_multiplied(times: float) -> None:
    assert same_value(factor_of(attn_factor=times), COMPUTED * times)


@pytest.mark.parametrize("attention", [0.8782488562869419, 1.0, 2.0])
def test_a_factor_is_written_where_it_is_read(attention: float) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 512, "beta_fast": 32.0,
               "beta_slow": 1.0, "attention_factor": attention, "mscale": None,
               "mscale_all_dim": None, "truncate": True}  # fmt: skip
    written = {key.removeprefix("{arch}.rope.scaling."): value
               for key, value in write_gguf(scaling, 0.1).items()}  # fmt: skip
    assert "yarn_attn_factor" not in written
    assert same_value(factor_of(**written), attention)
    plain = write_gguf(scaling | {"attention_factor": COMPUTED}, 0.1)
    assert "{arch}.rope.scaling.attn_factor" not in plain


def remark(**keys: Any) -> str:
    """The remark on a GGUF's factor."""
    given = facts(**keys)
    found = read_gguf(given, HP, 0.1)
    assert found is not None
    return ignored_factor_text(found[0], given)


def test_a_stated_factor_without_effect_is_remarked() -> None:
    said = remark(yarn_attn_factor=0.5)
    assert f"{KEY}yarn_attn_factor is 0.5" in said and f"it reads {KEY}attn_factor" in said
    assert "1.13863" in said
    assert not remark() and not remark(yarn_attn_factor=1.0)
    assert not remark(yarn_attn_factor=COMPUTED)


def test_a_yarn_scaling_lacks_no_divisors() -> None:
    """The key of the factor is one of longrope too, which needs two lists of divisors."""
    assert not lost_divisors_text(facts(attn_factor=0.5))
    assert "which longrope needs" in lost_divisors_text(facts(type="longrope", attn_factor=0.5))


def test_other_readers_of_a_key_are_named() -> None:
    for name in ("rope_scaling", "rope_parameters"):
        assert "vLLM" in other_readers_text(f"{name}.attn_factor")
        assert not other_readers_text(f"{name}.attention_factor")
