"""Validating what a command printed against its schema."""

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from aprfmt.schemas import schema


@cache
def validator(command: str) -> Draft202012Validator:
    return Draft202012Validator(schema(command))


def faults(body: Any, command: str = "") -> list[str]:
    """Return what is wrong with an object a command printed, a line each."""
    found = validator(command or body["command"]).iter_errors(body)
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:300]}" for e in found]
