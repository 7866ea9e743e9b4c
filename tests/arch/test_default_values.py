"""The number that a key of config.json has where it is not there: that of transformers' class.

The oracle is the configuration class of each model type, made without arguments.
"""

from typing import Any

import pytest

from aprfmt.arch import ARCHS

transformers = pytest.importorskip("transformers")

# Keys whose numbers the tensors show, so that what is assumed without them is never used: model
# types, and the key. The class of `mistral3` is of another text model by default.
SHOWN_BY_TENSORS = {
    "type_vocab_size": {"bert", "roberta", "xlm-roberta", "camembert", "nomic_bert",
                        "jina_embeddings_v3"},
    "max_position_embeddings": {"bert", "roberta", "xlm-roberta", "camembert", "mpnet",
                                "modernbert", "jina_embeddings_v3", "mistral3"},
    "num_hidden_layers": {"mamba2"},
    "intermediate_size": {"granitemoehybrid", "lfm2"},
    "num_heads": {"mt5", "umt5"},
    "d_ff": {"mt5", "umt5"},
    "layer_norm_eps": {"xlm-roberta"},  # as jina_embeddings_v3, whose files state it
}  # fmt: skip


def default_config(kind: str, section: str) -> Any:
    """Return the configuration of a model type without any key; None where it cannot be made."""
    if kind not in transformers.CONFIG_MAPPING:
        return None
    try:
        made = transformers.CONFIG_MAPPING[kind]()
    except (TypeError, ValueError, ImportError):
        return None
    return getattr(made, section) if section and hasattr(made, section) else made


def number(config: Any, key: str) -> float | None:
    """Return a number of a configuration; None for other values, and for one by layer."""
    try:
        value = getattr(config, key, None)
    except Exception as error:  # a class of transformers' own, for numbers that differ by layer
        assert "per-layer" in str(error)
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def test_numbers_that_are_not_stated_are_those_of_transformers() -> None:
    """Seen red: 127 elements of an indexer's head in place of 128."""
    seen, apart = 0, []
    for name, spec in ARCHS.items():
        for kind in spec.called.get("hf", ()):
            config = default_config(kind, spec.section)
            for rule in spec.hyper if config is not None else ():
                usual = rule.default_in.get("hf", rule.default)
                keys = rule.keys.get("hf", ())
                if not keys or isinstance(usual, bool) or not isinstance(usual, (int, float)):
                    continue
                value = number(config, keys[0])
                if value is None or kind in SHOWN_BY_TENSORS.get(keys[0], ()):
                    continue
                seen += 1
                if value != usual:
                    apart.append((name, kind, keys[0], usual, value))
    assert apart == [] and seen > 800
