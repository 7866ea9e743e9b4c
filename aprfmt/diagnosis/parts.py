"""What a finding is about: the numbers and weights of B that can be replaced by A's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Touched:
    """The hyperparameters and role keys of a finding; empty where a pass reads none of it."""

    hyper: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
