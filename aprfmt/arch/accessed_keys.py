"""Two mappings used while rules are read: keys that record their use, values read so far.

AccessedKeys records the keys read, PartialHyperParams has the results.
"""

from collections.abc import Iterator, Mapping

from aprfmt.arch.spec import HyperParam, HyperParams
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

# Of a multimodal model the outer object says it: transformers ties the whole model's head.
_OUTER_FIRST = frozenset({"tie_word_embeddings"})


class AccessedKeys(Mapping[str, Value]):
    """A file's values, a mapping that records which keys were read, nested objects included.

    Listing the keys reads no value: in a GGUF that would decode the whole vocabulary.
    Keys of `inner` (a section of multimodal configs) are found before the outer ones, except
    those of `_OUTER_FIRST`.
    """

    def __init__(self, values: Mapping[str, Value], label: str = "", inner: str = "") -> None:
        """Wrap `values`, and the object under their key `inner` as if its keys were among them.

        `label` is the path of `values` in the file, with a dot at its end. `inner` is "" for none,
        and is ignored if no object is stored under it.
        """
        self._values = values
        self._label = label
        nested = values.get(inner) if inner else None
        self._inner = nested if isinstance(nested, Mapping) else {}
        self._inner_key = inner if isinstance(nested, Mapping) else None
        self._inner_label = f"{label}{inner}."
        self._nested: dict[str, AccessedKeys] = {}
        self.seen: dict[str, None] = {}

    def __getitem__(self, key: str) -> Value:
        """Return the value of a key and record the key as read; an object as AccessedKeys."""
        if key in self._inner and key in self._values and key in _OUTER_FIRST:
            self.seen[self._inner_label + key] = None
            value, label = self._values[key], self._label
        elif key in self._inner:
            value, label = self._inner[key], self._inner_label
        else:
            value, label = self._values[key], self._label
        if isinstance(value, Mapping):
            if key not in self._nested:
                self._nested[key] = AccessedKeys(value, f"{label}{key}.")
            return self._nested[key]
        self.seen[label + key] = None
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._inner or key in self._values

    def __iter__(self) -> Iterator[str]:
        """Yield the keys, those of the inner section first, each once."""
        return iter(dict.fromkeys((*self._inner, *self._values)))

    def __len__(self) -> int:
        return len(dict.fromkeys((*self._inner, *self._values)))

    def accessed_keys(self) -> dict[str, None]:
        """Return {full key: None} of the keys read so far, in order."""
        every = dict(self.seen)
        for nested in self._nested.values():
            every.update(nested.accessed_keys())
        return every

    def unread_keys(self) -> Iterator[str]:
        """Yield the full keys never read; a nested object never opened counts as one key."""
        seen = self.accessed_keys()
        for values, label in ((self._inner, self._inner_label), (self._values, self._label)):
            for key in values:
                if values is self._values and key == self._inner_key:
                    continue
                if key in self._nested and isinstance(values[key], Mapping):
                    yield from self._nested[key].unread_keys()
                elif label + key not in seen:
                    yield label + key


class NotSettledError(ArchError):
    """A rule asks for a hyperparameter that has no value yet."""


class PartialHyperParams(HyperParams):
    """The hyperparameters read so far; asking for any other raises NotSettledError."""

    def __init__(self, rows: dict[str, HyperParam]) -> None:
        """Share `rows` with the reader, which adds to them."""
        self._rows = rows  # those that a reading adds to

    def of(self, name: str) -> HyperParam:
        """Return the HyperParam (value, origin, key) of `name`; NotSettledError if not read yet."""
        if name not in self._rows:
            raise NotSettledError(f"{name} is not known here, and this depends on it")
        return self._rows[name]
