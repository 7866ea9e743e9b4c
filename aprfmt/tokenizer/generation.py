"""How text is generated from a model: generation_config.json, or the keys that a GGUF has for it.

A GGUF states some settings of sampling under `general.sampling`; an APR made of one embeds those
keys. Where such a file embeds generation_config.json too, the keys win: a user may have set them.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.model.carried_files import foreign_gguf_keys
from aprfmt.tokenizer.keys import (
    GENERATION,
    GENERATION_CONFIG,
    GENERATION_KEYS,
    LEFT_OUT_BY_WRITERS,
)

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.tokenizer.stored_parts import Carried

ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # compared with the tokenizer's


def stated_settings(carried: "Carried") -> dict[str, Any]:
    """Return {name in generation_config.json: value} of the keys that a GGUF or APR has for them.

    {} where there are none, and for a folder. Numbers of float32 are the shortest ones that it
    holds: 0.7. Raises FormatError for a damaged record of a GGUF's keys.
    """
    model = carried.model
    if model.key_style == "gguf":
        found = model.metadata
    elif model.key_style == "apr":
        rows = foreign_gguf_keys(model).items()
        found = {key: row[1] for key, row in rows if isinstance(row, list) and len(row) == 2}
    else:
        return {}
    values = ((name, found.get(key.gguf)) for name, key in GENERATION_KEYS.items())
    return {name: shortest(value) for name, value in values if value is not None}


def generation_settings(carried: "Carried") -> dict[str, Any]:
    """Return {name: value} of how text is generated, by the names in generation_config.json.

    {} where nothing states it. Raises FormatError for a damaged file.
    """
    said = dict(carried.parse_file(GENERATION_CONFIG))
    for name, value in stated_settings(carried).items():
        if not same_setting(said.get(name), value):
            said[name] = value
    return said


def shortest(value: Any) -> Any:
    """Return a float as the shortest one with the same float32; other values as they are."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def same_setting(x: Any, y: Any) -> bool:
    """Return whether two values of a setting are equal, numbers as float32 holds them."""
    numbers = all(isinstance(value, (int, float)) for value in (x, y))
    return bool(x == y or (numbers and shortest(float(x)) == shortest(float(y))))


def has_file(carried: "Carried") -> bool:
    """Return whether there is a generation_config.json that states anything.

    Raises FormatError for a damaged file.
    """
    return bool(carried.parse_file(GENERATION_CONFIG))


def has_keys_alone(carried: "Carried") -> bool:
    """Return whether keys of a GGUF are all that states how text is generated.

    Raises FormatError for a damaged file.
    """
    return not has_file(carried) and bool(stated_settings(carried))


def placeless_settings(carried: "Carried", other: "Carried") -> tuple[str, ...]:
    """Return the settings of `other` for which `carried` cannot have a key.

    Only for a `carried` that states its settings by a GGUF's keys alone, else (). Token ids are
    left out, and `do_sample` where it follows from the temperature. Raises FormatError for a
    damaged file.
    """
    if not has_keys_alone(carried):
        return ()
    own, theirs = stated_settings(carried), generation_settings(other)
    return tuple(
        name
        for name, value in theirs.items()
        if name in GENERATION
        and name not in ID_KEYS
        and _is_placeless(name, own)
        and not (name == "do_sample" and value == _samples(own))
    )


def differing_settings(a: "Carried", b: "Carried") -> list[tuple[str, Any, Any]]:
    """Return (name, value in A, value in B) of settings that differ; [] if both have the file.

    The file is generation_config.json: if both have it, it is compared elsewhere. A model without
    it states settings by a GGUF's keys alone. A value is None where it is not stated. A default of
    transformers that generation_config.json states is no difference. [] too where the formats
    differ and one model states nothing. Raises FormatError for a damaged file.
    """
    sides = a, b
    x, y = (generation_settings(side) for side in sides)
    crossed = a.model.key_style != b.model.key_style
    if not (has_keys_alone(a) or has_keys_alone(b)) or (crossed and not (x and y)):
        return []
    defaults_of = [GENERATION if has_file(side) else None for side in sides]
    found = []
    for name in GENERATION_KEYS:
        if name not in x and name not in y:
            continue
        if crossed and any(
            name in LEFT_OUT_BY_WRITERS and name not in own and defaults is None
            for own, defaults in zip((x, y), defaults_of, strict=True)
        ):
            continue
        left, right = (
            own.get(name, (defaults or {}).get(name))
            for own, defaults in zip((x, y), defaults_of, strict=True)
        )
        if not same_setting(left, right):
            found.append((name, x.get(name), y.get(name)))
    return found


def settings_by_keys(carried: "Carried", other: "Carried") -> dict[str, Any]:
    """Return {name: value} of the settings of a model that states them by a GGUF's keys alone.

    A setting that only `other` states, and that a GGUF has a key for, is None. {} where the model
    has generation_config.json, or no such key. Raises FormatError for a damaged file.
    """
    if not has_keys_alone(carried):
        return {}
    own, theirs = stated_settings(carried), generation_settings(other)
    lost = [name for name in theirs if name in GENERATION_KEYS and not _is_placeless(name, own)]
    return {**dict.fromkeys(lost), **own}


def gguf_settings(model: "Model") -> dict[str, Value | TypedValue]:
    """Return GGUF's keys for what a folder's or APR's generation_config.json states.

    Values that the key's type cannot hold are left out. Raises FormatError for a damaged file.
    """
    found: dict[str, Value | TypedValue] = {}
    for name, value in generation_settings(model.carried).items():
        key = GENERATION_KEYS.get(name)
        if key is not None and _fits_gguf_type(value, key.type):
            found[key.gguf] = TypedValue(float(value) if "float" in key.type else value, key.type)
    return found


def text_with_settings(model: "Model", text: str | None) -> str | None:
    """Return the text of a generation_config.json that also has what a GGUF's keys state.

    `text` is the file so far, None without one; it is returned as it is where the keys add nothing.
    Raises FormatError for a damaged file.
    """
    said: dict[str, Any] = {} if text is None else json.loads(text)
    stated = stated_settings(model.carried)
    new = {k: v for k, v in stated.items() if not same_setting(said.get(k), v)}
    if not new:
        return text
    if "do_sample" not in said:
        said["do_sample"] = _samples(stated)
    return json.dumps({**said, **new}, indent=2, ensure_ascii=False) + "\n"


def _is_placeless(name: str, own: Mapping[str, Any]) -> bool:
    """Return whether a GGUF cannot be expected to state a setting.

    That is so where it has no key for it, and where writers leave the key out. `own` are the
    settings that the GGUF states.
    """
    return name not in GENERATION_KEYS or (name in LEFT_OUT_BY_WRITERS and name not in own)


def _samples(stated: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp draws tokens at random: unless the temperature is 0.

    `stated` are the settings that the keys of a GGUF state.
    """
    return bool(stated.get("temperature", 1) > 0)


def _fits_gguf_type(value: Any, kind: str) -> bool:
    """Return whether a value of generation_config.json fits a GGUF type."""
    if kind == "string":
        return isinstance(value, str)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return "float" in kind or (isinstance(value, int) and -(1 << 31) <= value < 1 << 31)
