"""The JSON schemas of every command's `--json`, as JSON Schema 2020-12.

    from aprfmt.schemas import schema
    jsonschema.validate(output, schema("diff"))

`aprfmt.COMMAND.NUMBER.json` holds one command; the number is that of the object's own `schema` key
(`aprfmt.diff/1`). A key may be added under the same number where a reader can ignore it; removing
or changing one raises the number, and the old file stays. `aprfmt.common.1.json` holds what
several share. `aprfmt explain --schema COMMAND` prints one whole.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from aprfmt.errors import UsageError

# command -> its number; all others have 1
NUMBERS: Mapping[str, int] = {"diagnose": 3, "diff": 3, "qa": 2}
COMMON = "aprfmt.common.1.json"


def schema_number(command: str) -> int:
    """Return the number of the schema that a command's output follows now."""
    return NUMBERS.get(command, 1)


def schema_names() -> Sequence[str]:
    """Return the commands that have a schema, and `aprfmt` for output without a command."""
    found = [path.name.split(".") for path in files(__name__).iterdir()]
    every = {parts[1] for parts in found if parts[0] == "aprfmt" and parts[-1] == "json"}
    return sorted(every - {"common"})


def schema(command: str) -> dict[str, Any]:
    """Return the whole schema of a command, with the common schemas inside.

    Raises UsageError if `command` has no schema.
    """
    if command not in schema_names():
        raise UsageError(f"no schema of {command!r}; known: {', '.join(schema_names())}")
    found = _read_schema(f"aprfmt.{command}.{schema_number(command)}.json")
    return {**found, "$defs": {**found.get("$defs", {}), COMMON: _read_schema(COMMON)}}


@cache
def _read_text(name: str) -> str:
    """Return the text of a schema file."""
    return (files(__name__) / name).read_text(encoding="utf-8")


def _read_schema(name: str) -> dict[str, Any]:
    """Return the parsed content of a schema file."""
    found: dict[str, Any] = json.loads(_read_text(name))
    return found
