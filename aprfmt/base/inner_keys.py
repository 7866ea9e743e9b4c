"""The inner keys in which two nested objects (of JSON documents, say) differ."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class InnerKey(NamedTuple):
    """An inner key in which two objects differ: its dotted path, and the value in both.

    `in_a` and `in_b` say whether an object has the key: a value of None is stated as null there.
    """

    path: str
    a: Any
    b: Any
    in_a: bool
    in_b: bool


def differing_inner_keys(
    a: Mapping[str, Any], b: Mapping[str, Any], above: str = ""
) -> Iterator[InnerKey]:
    """Yield an InnerKey for each key that differs between two nested objects, in A's order first.

    Where both have an object under a key, the keys inside it are compared instead. `above` is the
    path of the two objects, put before every yielded path ("" or "rope_scaling.", say).
    """
    for key in dict.fromkeys((*a, *b)):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from differing_inner_keys(x, y, f"{above}{key}.")
        elif key not in a or key not in b or bool(x != y):
            yield InnerKey(f"{above}{key}", x, y, key in a, key in b)
