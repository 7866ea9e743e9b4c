"""The seeded faults of one tensor, of all causes of causes/tensor."""

from tests.causes.faults import Fault
from tests.causes.seeded import seeded

FAULTS: tuple[Fault, ...] = seeded("tensor", "FAULTS")
