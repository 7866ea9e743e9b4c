"""Fields of a dataclass whose value may be computed when it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, slots=True)
class Deferred(Generic[Made]):
    """A value that `compute` returns: it is called once, when a `DeferredField` is first read."""

    compute: Callable[[], Made]


class DeferredField(Generic[T]):
    """A field of a dataclass that takes a value, or a Deferred one, and always gives a value.

    `default` is the field's default, if one is given. What `compute` raises is raised by reading
    the field, and the next reading calls it again.
    """

    def __init__(self, *default: T) -> None:
        """Declare a field, with a default or without one."""
        self._default = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the field."""
        self._name = name

    @overload
    def __get__(self, holder: None, owner: type) -> T: ...
    @overload
    def __get__(self, holder: object, owner: type) -> T: ...
    def __get__(self, holder: object | None, owner: type) -> T:
        """Return the value, computed now if it was deferred; of the class, the default."""
        if holder is None:
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        held: Any = holder.__dict__[self._name]
        if isinstance(held, Deferred):
            held = holder.__dict__[self._name] = held.compute()
        value: T = held
        return value

    def __set__(self, holder: object, value: T | Deferred[T]) -> None:
        """Store a value, or how it is computed."""
        holder.__dict__[self._name] = value
