"""The file's own names for the places of a finding: stored tensors and configuration keys."""

from collections.abc import Iterable, Mapping, Sequence

from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding
from aprfmt.model import Model


def stored_names_of_places(
    findings: Iterable[Finding], a: Model | None, b: Model | None
) -> Mapping[str, tuple[str, ...]]:
    """Return {place of a finding: stored names}, for places that a file has a name for.

    B's names, and A's of what B lacks; for a finding about side A the other way round.
    """
    found: dict[str, tuple[str, ...]] = {}
    for finding in findings:
        sides = [side for side in ((a, b) if finding.side == "A" else (b, a)) if side is not None]
        for place in finding.where:
            names = next(filter(None, (_stored_names_of(side, place) for side in sides)), ())
            if names and place not in found:
                found[place] = tuple(names)
    return found


def _stored_names_of(model: Model, place: str) -> Sequence[str]:
    """Return a model's stored names of a role, or the key of a hyperparameter; () for none."""
    try:
        if place in model.roles:
            return tuple(model.roles[place].names)
        if place in model.hyper:
            key = model.hyper.of(place).key
            return (key,) if key else ()
    except AprfmtError:
        pass  # an architecture that is not read has stored names only
    return ()
