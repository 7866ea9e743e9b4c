"""Values of a pass that a hypothesis changes right where they are captured: routing, for one.

Some steps of a pass are no operation of a backend (the choice of experts is plain numpy). A tap
gets the value of such a point and what the layer's earlier points hold, and gives the value that
the pass goes on with.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.inference.points import WHOLE

if TYPE_CHECKING:
    from aprfmt.diagnosis.world import World

# Called as tap(world, layer, x, held): `held` are the values of the layer's earlier points, by
# name, as the pass went on with them.
Tap = Callable[["World", int, Any, Mapping[str, Any]], Any]
STREAM = "stream"  # the name under which `held` has what enters the layer


class Tapped:
    """A recorder that changes values at some points before another recorder sees them."""

    def __init__(self, world: "World", inner: Any, taps: Mapping[str, tuple[Tap, ...]]) -> None:
        self._world = world
        self._inner = inner
        self._taps = taps
        self._layer = WHOLE
        self._held: dict[str, Any] = {}

    def begin(self, facts: Any) -> None:
        """Start recording a pass."""
        self._inner.begin(facts)

    def wants(self, point: str, layer: int) -> bool:
        """Want what the inner recorder wants, and every tapped point."""
        return point in self._taps or bool(self._inner.wants(point, layer))

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Change the value, then let the inner recorder see it."""
        if layer != self._layer:
            last = [self._held.get(name) for name in ("out", "embd_scaled", "embd", STREAM)]
            entering = next((value for value in last if value is not None), None)
            self._layer, self._held = layer, {STREAM: entering}
        for tap in self._taps.get(point, ()):
            x = tap(self._world, layer, x, self._held)
        self._held[point] = self._inner.capture(point, layer, x)
        return self._held[point]
