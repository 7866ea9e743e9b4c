"""Find the key by which a file of each format stores one fact: one fact, three spellings.

A *fact* is a hyperparameter (the architecture's table has its keys in config.json, GGUF and APR),
or one of the tokenizer's (`tokenizer/keys.py`). So `rope_theta`, `llama.rope.freq_base` and
`rope.freq_base` are one thing, and `set` takes any of them for any file.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.keys import (
    APR_CHAT_TEMPLATE,
    CHAT_TEMPLATE,
    FLAGS,
    GENERATION_KEYS,
    IDS,
    KEYS,
    TEMPLATE_FILE,
)

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec
    from aprfmt.model import Model

TEMPLATE_KEYS = (APR_CHAT_TEMPLATE, CHAT_TEMPLATE, TEMPLATE_FILE)


def format_keys(model: "Model", key: str, style: str) -> tuple[str, ...]:
    """Return the keys of a style ("hf", "gguf", "apr") for the fact that `key` names.

    `key` is a spelling of any style, or our name of the hyperparameter. The result is () where it
    names no known fact, or one that the style stores in another way (inverted, or computed).
    """
    if key in TEMPLATE_KEYS:
        return {"gguf": (CHAT_TEMPLATE,), "apr": TEMPLATE_KEYS[:2]}.get(style, (TEMPLATE_FILE,))
    for role, row in IDS.items():
        if key in (f"{role}_token_id", row.gguf, row.apr):
            return _pick(style, f"{role}_token_id", row.gguf, row.apr)
    for name, row in FLAGS.items():
        if key in (name, row.gguf, row.apr):
            return _pick(style, name, row.gguf, row.apr)
    for name, row in GENERATION_KEYS.items():
        if key in (name, row.gguf):
            return _pick(style, name, row.gguf, row.apr)
    for row in KEYS:
        if key in (row.gguf, row.apr):
            return _pick(style, "", row.gguf, row.apr)
    try:
        spec = model.spec
    except AprfmtError:
        return ()
    return next(_hyperparameter_keys(model, spec, key, style), ())


def _pick(style: str, hf: str, gguf: str, apr: str) -> tuple[str, ...]:
    """Return the key of a style as a tuple, () where the style has none."""
    found = {"hf": hf, "gguf": gguf, "apr": apr}[style]
    return (found,) if found else ()


def _hyperparameter_keys(
    model: "Model", spec: "ArchSpec", key: str, style: str
) -> Iterator[tuple[str, ...]]:
    """Yield the keys in `style` of each hyperparameter that `key` is a spelling of."""
    arch = str(model.metadata.get("general.architecture") or spec.called.get("gguf", ("",))[0])
    for rule in spec.hyper:
        for theirs, names in rule.keys.items():
            spelled = [name.replace("{arch}", arch) for name in names]
            spelled += [name.removeprefix("{arch}.") for name in names]
            if key not in spelled and key != rule.name:
                continue
            alike = (theirs in rule.inverse_in) == (style in rule.inverse_in)
            if style in rule.keys and (alike or key == rule.name):
                yield tuple(name.replace("{arch}", arch) for name in rule.keys[style])


def file_key(model: "Model", key: str) -> str:
    """Return the key of a GGUF or APR for the fact that `key` names, in the file's own spelling.

    `key` itself is returned where the file has it, or where the format has no key for the fact.
    """
    style = model.key_style
    if key in model.metadata or style not in ("gguf", "apr"):
        return key
    found = format_keys(model, key, style)
    return next((each for each in found if each in model.metadata), found[0] if found else key)
