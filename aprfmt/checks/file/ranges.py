"""Checks that generation settings and other numbers are in the ranges that readers take."""

from collections.abc import Iterator
from typing import Any

from aprfmt.base.metadata_values import short_value
from aprfmt.checks import bounds
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, NotRun, Result
from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.keys import GENERATION_CONFIG, GENERATION_KEYS

# What config.json and tokenizer_config.json have a few words for.
_WORDS = {"padding_side": ("left", "right"), "truncation_side": ("left", "right")}


def check_ranges(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each setting with a value that its readers do not take.

    Settings are those of generation (generation_config.json, config.json, GGUF's
    `general.sampling`), lengths and padding sides (tokenizer_config.json), norm_eps and rope_theta.
    Raises NotRun where there are none.
    """
    stated = list(_stated_values(ctx))
    findings = [
        CheckFinding(
            where,
            str(short_value(value)),
            expected,
            "set it to what the model's makers publish",
            "warning",
        )
        for where, key, value in stated
        if (expected := _what_is_expected(key, value))
    ]
    if not stated:
        raise NotRun("the file states no setting")
    return Result(f"{len(stated)} values", findings)


def _stated_values(ctx: CheckContext) -> Iterator[tuple[str, str, Any]]:
    """Yield (file and key, name in bounds.SETTINGS, value) of each setting in the model's files."""
    texts = {
        "config.json": ctx.model.config or {},
        GENERATION_CONFIG: ctx.model.carried.parse_file(GENERATION_CONFIG),
        "tokenizer_config.json": ctx.model.carried.tokenizer_config,
    }
    for file, keys in texts.items():
        for key in (*bounds.SETTINGS, *_WORDS):
            if keys.get(key) is not None:
                yield f"{file}: {key}", key, keys[key]
    for name, row in GENERATION_KEYS.items():
        if name in bounds.SETTINGS and row.gguf in ctx.model.metadata:
            yield f"{ctx.where}: {row.gguf}", name, ctx.model.metadata[row.gguf]
    try:
        found = ctx.model.resolution.hyper
    except AprfmtError:
        return  # the check of the architecture says it
    for name in bounds.STATED:
        if name in found and found.of(name).key and isinstance(found[name], (int, float)):
            yield f"{ctx.where}: {found.of(name).key}", name, found[name]


def _what_is_expected(key: str, value: Any) -> str:
    """Return what the value of a setting has to be, in words; "" if `value` is that."""
    if key in _WORDS:
        return "" if value in _WORDS[key] else " or ".join(_WORDS[key])
    bound = bounds.SETTINGS.get(key) or bounds.STATED[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and bound.holds(value):
        return ""
    return f"a number from {bound}: {bound.reason}"
