"""Validating what a command printed against its schema."""

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from aprfmt.schemas import schema


@cache
def validator(command: str) -> Draft202012Validator:
    """Return a command's validator.

    Its references are found beforehand: a registry that was not walked is walked again for every
    reference to the schema inside, which took nine tenths of the time of tests of JSON.
    """
    whole = schema(command)
    resource = DRAFT202012.create_resource(whole)
    registry: Registry[Any] = Registry().with_resource(whole["$id"], resource).crawl()
    return Draft202012Validator(whole, registry=registry)


def faults(body: Any, command: str = "") -> list[str]:
    """Return what is wrong with an object a command printed, a line each."""
    found = validator(command or body["command"]).iter_errors(body)
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:300]}" for e in found]
