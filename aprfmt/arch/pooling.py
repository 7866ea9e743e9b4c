"""How the rows of the last layer become one embedding: read where each style says it.

sentence-transformers has it in a separate file (FILE), GGUF under a key. Sources:
sentence_transformers/models/Pooling.py; llama.cpp's `enum llama_pooling_type`.
"""

from collections.abc import Mapping

from aprfmt.arch.spec import Facts, Found, HyperRule, Params
from aprfmt.arch.value_checks import boolean, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

# The file in config.json's folder, and the key under which its content is given with the config's.
FILE = "1_Pooling/config.json"
_KEY = "{arch}.pooling_type"
_CAUSAL = "{arch}.attention.causal"
_NUMBERS = {0: None, 1: "mean", 2: "cls", 3: "last"}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_WORDS = {"mean": "mean", "cls": "cls", "lasttoken": "last", "last": "last"}


def _read_file(facts: Facts, hp: Params) -> Found:
    """Return (kind of pooling or None, key) of the pooling file; None without one."""
    found = facts.first(FILE)
    if found is None or not isinstance(found[0], Mapping):
        return None
    stated: Mapping[str, Value] = found[0]
    return _parse_mode(stated), found[1]


def _parse_mode(stated: Mapping[str, Value]) -> str | None:
    """Return the one mode a pooling file turns on; None for several, or one not computed here."""
    named = stated.get("pooling_mode")
    if isinstance(named, str):
        return _WORDS.get(named)
    on = [key for key, value in stated.items() if key.startswith("pooling_mode_") and value is True]
    return _FLAGS.get(on[0]) if len(on) == 1 else None


def _read_gguf(facts: Facts, hp: Params) -> Found:
    """Return (kind of pooling or None, key) of a GGUF; None without the key."""
    found = facts.first(_KEY)
    return None if found is None else (_NUMBERS.get(whole_number(*found)), found[1])


def _write_gguf(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: number of the pooling}, empty without pooling."""
    return {} if value is None else {_KEY: next(n for n, name in _NUMBERS.items() if name == value)}


def _write_encoder(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: value} of an encoder: not causal, and the number of the pooling."""
    number = next(n for n, name in _NUMBERS.items() if name == value)
    return {_CAUSAL: False, _KEY: number}


def _check_pooling(value: Value, facts: Facts) -> str:
    """Return a remark if a file asks for a pooling that is not computed here, else ""."""
    found = facts.first(FILE, _KEY)
    if found is None or value is not None or found[0] == 0:
        return ""
    return f"{found[1]}: asks for a pooling other than mean, cls or last; no embedding is computed"


def pooling_rule(default: str | None = None, *, causal: bool = True) -> HyperRule:
    """Return the rule for the pooling; `default` is for a folder without a pooling file.

    Unless `causal`, a GGUF says that attention looks both ways, which llama.cpp goes by.
    """

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Return a warning on a pooling that is not computed here, "" for none.

        `value` is the pooling. Raises ArchError if a GGUF contradicts `causal`: whether attention
        of this architecture sees earlier tokens only.
        """
        stated = facts.first(_CAUSAL)
        if stated is not None and boolean(*stated) is not causal:
            raise ArchError(f"{stated[1]}: is {stated[0]}; expected {causal}: no other is known")
        return _check_pooling(value, facts)

    return HyperRule(
        "pooling",
        {"gguf": (_KEY,), "hf": (FILE,)},
        read={"hf": _read_file, "gguf": _read_gguf},
        write={"hf": lambda value, hp: {}, "gguf": _write_gguf if causal else _write_encoder},
        default=None,
        default_in={"hf": default},
        check=check,
    )
