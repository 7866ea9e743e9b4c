"""Keys of latent attention, scalings of rope, and keys that other programs do not read."""

from typing import Any

import pytest

from aprfmt.arch import ARCHS, gemma4, mla
from aprfmt.arch.carried_hyperparameters import _OPTIONAL, SCALINGS, _check_scaling
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.spec import CARRIED, Facts
from aprfmt.base.protocols import Note
from aprfmt.errors import ArchError
from aprfmt.model.resolve import read_missing_as_default


def test_lengths_of_latent_attention_are_of_the_compressed_vectors_and_of_the_heads() -> None:
    hp = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "value_head_dim": 128}
    assert mla._write_lengths(192, hp) == {
        "{arch}.attention.key_length": 576,
        "{arch}.attention.value_length": 512,
        "{arch}.attention.key_length_mla": 192,
        "{arch}.attention.value_length_mla": 128,
    }
    length = mla.mla_length_rules(nope=96)[0].read["hf"]
    for values, size in (
        ({}, 96 + 64),
        ({"qk_nope_head_dim": 32}, 32 + 64),
        ({"qk_rope_head_dim": 16}, 96 + 16),
        ({"qk_nope_head_dim": 32, "qk_rope_head_dim": 16}, 48),
    ):
        assert length(Facts("hf", values, {}), {}) == (size, "qk_nope_head_dim")


def test_experts_of_latent_attention_are_counted_both_ways() -> None:
    rule = mla.shared_experts_rule("n_shared shared", hf_default=2)
    for size in (8, 0):
        hp = {"moe_ffn_size": size}
        for style, key in (("hf", "n_shared"), ("hf", "shared"), ("gguf", "x.expert_shared_count")):
            read = rule.read[style](Facts(style, {key: 3}, {}, "x"), hp)
            assert read == (3 * size, key) and rule.read[style](Facts(style, {}, {}), hp) is None
        count = 3 if size else 0
        assert rule.write["hf"](24, hp) == {"n_shared": count}
        assert rule.write["gguf"](24, hp) == {"{arch}.expert_shared_count": count}
        assert rule.default_in["hf"](hp) == 2 * size
    dense = mla.dense_first_rule(1)
    for first in range(5):
        found: Any = dense.read["hf"](
            Facts("hf", {"first_k_dense_replace": first}, {}), {"n_layers": 4}
        )
        assert found[0] == tuple(i >= first for i in range(4))


GOOD: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context_length": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.25,
    "truncate": False,
    "mscale": None,
    "mscale_all_dim": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 4.0],
    "factors": [1.0, 2.0],
    "rotated": 0,
}
BAD: dict[str, Any] = {
    "original_context_length": 0,
    "truncate": 1,
    "mscale_all_dim": "1",
    "factors": 2.0,
    "short_factor": "1",
    "rotated": -1,
    "factor": 0.0,
    "attention_factor": -1.0,
    "beta_fast": None,
    "low_freq_factor": 4.0,
}


def test_a_scaling_in_normal_form_has_all_of_its_fields_and_no_other() -> None:
    for kind, wanted in SCALINGS.items():
        whole = {"type": kind, **{name: GOOD[name] for name in wanted}}
        found = _check_scaling(whole, "k")
        assert found == {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in whole.items()
        }
        for name in wanted:
            less = {key: value for key, value in whole.items() if key != name}
            for wrong in (less, {**less, "other": 1.0}, {**whole, "other": 1.0}):
                with pytest.raises(ArchError, match=r"^k: is .*expected a rope scaling"):
                    _check_scaling(wrong, "k")
            if name in BAD:
                with pytest.raises(ArchError):
                    _check_scaling({**whole, name: BAD[name]}, "k")
            assert name not in _OPTIONAL or _check_scaling({**whole, name: None}, "k")[name] is None
    odd: tuple[Any, ...] = ({}, [], None, {"type": "new"}, {"type": ["linear"], "factor": 2.0})
    for wrong in odd:
        with pytest.raises(ArchError, match="expected a rope scaling"):
            _check_scaling(wrong, "k")
    llama = {"type": "llama3", **{name: GOOD[name] for name in SCALINGS["llama3"]}}
    with pytest.raises(ArchError, match=r"^k: low_freq_factor and high_freq_factor are equal$"):
        _check_scaling({**llama, "low_freq_factor": 4.0}, "k")
    assert _check_scaling({**llama, "low_freq_factor": 4.1}, "k")["low_freq_factor"] == 4.1


KEYS = {
    "general.architecture": "llama",
    "llama.embedding_length": 24,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.feed_forward_length": 40,
    "llama.vocab_size": 56,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 64,
}


def test_a_key_that_only_this_package_reads_is_told_where_the_style_has_its_own() -> None:
    def read(arch_key: str = "llama", style: str = "gguf", **more: Any) -> tuple[Any, Any]:
        values = {**KEYS, **{key.replace("__", "."): value for key, value in more.items()}}
        facts = Facts(style, values, {}, arch_key, names="gguf")
        hyper, _ = read_hyper(ARCHS["llama"], Facts("gguf", values, {}, "llama", names="gguf"), "m")
        return read_missing_as_default(ARCHS["llama"], hyper, facts, "m")

    carried = CARRIED.replace(".", "__")
    theta, cap = f"{carried}rope_theta", f"{carried}attn_softcap"
    rows, notes = read(**{theta: "5000.0"})
    assert notes == [
        Note(
            "warning",
            "m: llama.rope.freq_base",
            "is not there, so other programs take rope_theta = 10000.0; aprfmt.hyper.rope_theta "
            "says 5000.0, and only aprfmt reads that here",
            "contradiction",
        )
    ]
    assert (rows["rope_theta"].value, rows["rope_theta"].origin) == (10000.0, "default")
    for given in (
        {},
        {theta: "10000.0"},  # what they take
        {"llama__rope__freq_base": 5000.0},
        {theta: "5000.0", "llama__rope__freq_base": 5000.0},
        {cap: "30.0"},  # no key of GGUF says it
        {theta: "5000.0", "arch_key": "mine"},  # which no other program opens
        {theta: "5000.0", "style": "apr"},
    ):
        rows, notes = read(**given)
        assert not notes
    assert read(**{cap: "30.0"})[0]["attn_softcap"].value == 30.0


def test_gemma_4s_layers_are_written_by_their_kinds_and_read_back() -> None:
    """Widths of wide layers are twice the smallest; key-value heads differ with the window."""
    for wide, width in (((False, True, False), [6, 12, 6]), ((False, False, False), 6)):
        written = gemma4._write_ffn_size(6, {"wide_layers": wide})
        assert written == {"{arch}.feed_forward_length": width}
        facts = Facts("gguf", {"x.feed_forward_length": width}, {}, "x")
        assert gemma4._read_ffn_size(facts, {}) == (6, "x.feed_forward_length")
    assert gemma4._read_ffn_size(Facts("gguf", {}, {}, "x"), {}) is None
    key = "x.attention.head_count_kv"
    for window, own, heads in (((True, False, True), 2, [4, 2, 4]), ((True, False, True), 4, 4)):
        hp = {"global_kv_heads": own, "window_layers": window}
        assert gemma4._write_kv_heads(4, hp) == {"{arch}.attention.head_count_kv": heads}
        pattern = "x.attention.sliding_window_pattern"
        facts = Facts("gguf", {key: heads, pattern: list(window)}, {}, "x")
        assert gemma4._read_kv_heads(True, facts, {}) == (4, key)
        assert gemma4._read_kv_heads(False, facts, {}) == (own, key)
    plain = Facts("gguf", {key: [4, 2]}, {}, "x")  # every layer has a window where none is said
    assert gemma4._read_kv_heads(True, plain, {}) == gemma4._read_kv_heads(False, plain, {})
    assert gemma4._read_kv_heads(True, plain, {}) == (4, key)
    assert gemma4._read_kv_heads(True, Facts("gguf", {}, {}, "x"), {}) is None
    assert gemma4._write_head_lengths({"global_head_dim": 64, "head_dim": 32}) == {
        "{arch}.attention.key_length": 64,
        "{arch}.attention.value_length": 64,
        "{arch}.attention.key_length_swa": 32,
        "{arch}.attention.value_length_swa": 32,
        "{arch}.rope.dimension_count": 64,
        "{arch}.rope.dimension_count_swa": 32,
    }
