"""Which tests one worker takes together, and which are begun first.

What a file makes for its tests is made once where one worker runs all of them, and so is what the
files of tests/inference make of one architecture. Units are begun by the number of their tests, but
those of FIRST, which are long, before all others: a long one at the end leaves other workers idle.
"""

from collections.abc import Sequence
from typing import Any

from tests.scope import architecture

FIRST: Sequence[str] = (
    "docs/reference/examples.md", "README.md", "tests/diagnosis/test_faults.py", "rows",
    "tests/inference/gpu/test_kernels_matvec.py", "tests/field/test_answers.py", "smoke",
    "tests/checks/gates/test_gates.py", "tests/fleet/test_scan.py", "tests/causes/test_explain.py",
)  # fmt: skip
BY_ARCHITECTURE = "tests/inference/test_"


def unit(node: str) -> str:
    """Return what a test is run together with: its group, its architecture, or its file."""
    if node.rfind("@") > node.rfind("]"):
        return node.rpartition("@")[2]
    file, _, test = node.partition("::")
    name = test.partition("[")[2]
    of = architecture(name) if file.startswith(BY_ARCHITECTURE) and name else ""
    return f"inference of {of}" if of else file


def scheduler(config: Any, log: Any) -> Any:
    """Return xdist's scheduler of groups, with our units; None for another --dist."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Units(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
        """Gives workers our units, those of FIRST before the others."""

        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            long = next((name for name in FIRST if name in self.workqueue), None)
            if long is not None:
                self.workqueue.move_to_end(long, last=False)
            super()._assign_work_unit(node)

    return Units(config, log)
