"""Tables of named items that are imported on first use, with a helpful error if that fails.

Every extensible table of the package whose rows have names (formats, codecs, architectures,
backends, engines, causes) is a Registry; third parties add rows through the entry-point group
`aprfmt.<kind>` and cannot replace a built-in row. A table whose rows have an order and no names
(hypotheses) is a tuple, followed by the rows of other packages.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aprfmt.errors import AprfmtError, BackendUnavailableError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
NAMED = 12  # names of a table that a message has


def load_attribute(target: str) -> Any:
    """Import `"module:attribute"` and return the attribute.

    Raises ImportError, or AttributeError where the module has no such name.
    """
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class LazyFunction:
    """A function that imports `target`, a `"module:function"`, when it is called."""

    target: str

    def load(self) -> Callable[..., Any]:
        """Return the function itself, imported."""
        found: Callable[..., Any] = load_attribute(self.target)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return what the function returns for these arguments; imports it on the first call."""
        return self.load()(*args, **options)


@cache
def _all_entry_points() -> Any:
    """Return the entry points of all installed packages; their files are read only once."""
    from importlib.metadata import entry_points

    return entry_points()


def installed_entry_points(kind: str) -> "Iterable[EntryPoint]":
    """Return the entry points that installed packages have in the group `aprfmt.<kind>`."""
    found: Iterable[EntryPoint] = _all_entry_points().select(group=f"aprfmt.{kind}")
    return found


@cache
def offered_items(kind: str) -> tuple[Any, ...]:
    """Return the items that other packages offer in the entry-point group `aprfmt.<kind>`, by name.

    Raises BackendUnavailableError where a package that offers a row cannot be imported.
    """
    rows: Registry[Any] = Registry(kind, {})
    return tuple(rows[name] for name in sorted(rows))


def some_names(names: Sequence[str]) -> str:
    """Return names as text for a message: the first ones, and how many more there are."""
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


class Registry(Mapping[str, T], Generic[T]):
    """A lazy table {name: item}; iteration gives names without importing anything.

    `rows` maps a name to `"module:attribute"` or to `("module:attribute", "what to install")`,
    where a function may say what to install; `held` maps names to items that exist already. `error`
    is the class raised for an unknown name.
    """

    def __init__(
        self,
        kind: str,
        rows: Mapping[str, str | tuple[str, str | Callable[[], str]]],
        error: type[AprfmtError] = AprfmtError,
        *,
        held: Mapping[str, T] | None = None,
    ) -> None:
        """Set the built-in rows; nothing is imported yet.

        `rows` is {name: "module:attribute"}, or (that text, what to do where its package is
        missing: a text, or a function that returns it). `held` are items that need no import,
        `error` the exception for an unknown name.
        """
        self.kind = kind
        self._error = error
        self._loaded: dict[str, T] = dict(held or {})
        self._rows = dict.fromkeys(self._loaded, ("", "")) | {
            name: (row, "") if isinstance(row, str) else row for name, row in rows.items()
        }
        self.own = tuple(self._rows)  # our names; looking at them reads no entry points
        self._third_party_read = False

    def _read_entry_points(self) -> None:
        """Add the rows of other packages, once; they replace none."""
        if self._third_party_read:
            return
        self._third_party_read = True
        for point in installed_entry_points(self.kind):
            if point.name not in self._rows:
                self._rows[point.name] = (point.value, f"the package that offers {point.name!r}")

    def __getitem__(self, name: str) -> T:
        """Return the item of a name, imported.

        Raises the registry's error, with near names, for an unknown one.
        """
        if name not in self._rows:
            self._read_entry_points()
        if name not in self._rows:
            from difflib import get_close_matches

            small = {row.lower(): row for row in self._rows}
            near = [small[each] for each in get_close_matches(name.lower(), small, 3)]
            # Qwen2ForCausalLM: the longest name that it begins with
            begun = [row for each, row in small.items() if name.lower().startswith(each)]
            near = near or sorted(begun, key=len)[-1:] or list(self._rows)
            raise self._error(f"{self.kind} {name!r} is not known; known: {some_names(near)}")
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    def _import(self, name: str) -> T:
        """Return the item of a row, imported; BackendUnavailableError if its package is missing."""
        target, said = self._rows[name]
        try:
            loaded = load_attribute(target)
        except ImportError as error:
            hint = said if isinstance(said, str) else said()
            if not hint:
                raise
            raise BackendUnavailableError(
                f"{self.kind} {name!r} needs a package that is not installed: {hint} ({error})"
            ) from error
        result: T = loaded
        return result

    def first(self, fits: Callable[[T], bool], without: Collection[str] = ()) -> str | None:
        """Return the name of the first item for which `fits` returns True; None without any.

        Items of other packages are only tried if none of ours fits. Those named in `without` are
        not tried, and not imported.
        """
        for names in (self.own, self):
            for name in names:
                if name not in without and fits(self[name]):
                    return name
        return None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, third parties' included."""
        self._read_entry_points()
        return iter(tuple(self._rows))

    def __len__(self) -> int:
        """Return the number of rows, third parties' included."""
        self._read_entry_points()
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        """Return whether the name is known, without importing its row."""
        if name in self._rows:
            return True
        self._read_entry_points()
        return name in self._rows
