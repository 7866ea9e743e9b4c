"""The seeded faults of one tensor, of all causes of causes/tensor."""

from tests.causes.seeded import seeded
from tests.compare.faults import Fault

FAULTS: tuple[Fault, ...] = seeded("tensor", "FAULTS")
