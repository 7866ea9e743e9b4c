"""An adapter that is merged into the model of a pass, so that it can be merged otherwise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that a model's weights have in them, as its configuration states it.

    `keys` are the role keys of the weights that it changes. `mistakes` are the usual mistakes with
    its scale: words, and for each changed weight by which number its change is multiplied.
    `merged` returns the values of the weights of a {role key: number}, float32 in their logical
    shapes, with their changes multiplied by these numbers; 0 gives the base's values.
    `rounded` returns the merged weights as a merge stores them in the base's types, without those
    that are float32.
    """

    path: str
    keys: tuple[str, ...]
    mistakes: Sequence[tuple[str, Mapping[str, float]]]
    merged: Callable[[Mapping[str, float]], Mapping[str, Array]]
    rounded: Callable[[], Mapping[str, Array]]
