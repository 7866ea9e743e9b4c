"""What a finding is about: the numbers and weights of B that can be replaced by A's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Touched:
    """The hyperparameters and role keys of a finding; none: a pass reads nothing of it."""

    hyper: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
