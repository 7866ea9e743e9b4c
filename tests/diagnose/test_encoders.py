"""What `diagnose` says of an encoder's trace with one thing changed (the faults are the table's).

Seen red: a causal mask named a window, positions and biases of scores not named.
"""

from pathlib import Path

import pytest

from tests.cli.run import aprfmt
from tests.diagnose.faults_encoders import CHANGED, changed_trace


@pytest.mark.parametrize("fault", CHANGED)
def test_the_cause_of_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    cause, first = CHANGED[fault][3:5]
    path = tmp_path / "trace.safetensors"
    found = aprfmt("diagnose", path, changed_trace(fault, path), "--json")
    assert found.code == 1, found.err
    [told] = found.json["findings"]
    assert (told["cause"], told["confirmed"], told["first"]) == (cause, True, first), told
