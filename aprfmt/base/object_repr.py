"""Show an object in an interactive session: one short line, and the names that are public."""

from collections.abc import Iterable

from aprfmt.base.text_escape import escape

_LONGEST = 80  # characters of one fact


def short_repr(what: object, *facts: object) -> str:
    """Return `<Kind fact, fact>` for a `__repr__`, all facts escaped, empty ones left out."""
    said = ", ".join(escape(str(fact), _LONGEST) for fact in facts if str(fact))
    return f"<{type(what).__name__} {said}>"


def public_dir(what: object, names: Iterable[str]) -> list[str]:
    """Return what `__dir__` should: the public names, and those that Python itself looks for."""
    return sorted({*names, *(name for name in object.__dir__(what) if name.startswith("__"))})
