"""Rows that one side alone has are said, and are never part of `within tolerance`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.cli.logprobs import table_verdict
from aprfmt.cli.trace import recording
from aprfmt.inference.trace_file import load_trace
from aprfmt.measure.logprob_tables import Logprobs, compare_logprobs, rows_from_logits
from aprfmt.measure.tolerances import Threshold
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.inference.engines.test_captures import npy, own
from tests.models import IDS

TEXT = ",".join(map(str, IDS))
LAST = len(IDS) - 1
LEFT = f"logits at positions 0 to {LAST - 1} (the reference has no such rows)"


def logits_folder(folder: Path, rows: int, wrong: bool = False) -> Path:
    """Write the last rows of the model's logits; `wrong`: all but the last hold other values."""
    values = np.array(own()["logits"])[-rows:]
    if wrong:
        values[:-1] = values[:-1][:, ::-1]
    return npy(folder, {"input_ids": np.array(IDS), "logits": values})


def saved_trace(path: Path, *more: object) -> Path:
    """Save a run of the model with all points."""
    asked = ("--payload", "--points", "all", "--ids", TEXT, "--save", path)
    done = aprfmt("trace", tiny_folder("llama"), *asked, *more)
    assert done.code == 0, done.err
    return path


@pytest.fixture
def sides(tmp_path: Path) -> dict[str, Any]:
    """A dump of all rows, of which all but the last are wrong; one of the last row; the model."""
    return {
        "model": tiny_folder("llama"),
        "all": logits_folder(tmp_path / "all", len(IDS), wrong=True),
        "last": logits_folder(tmp_path / "last", 1),
        "npz": saved_trace(tmp_path / "run.safetensors", "--positions", "last"),
    }


# Commands that compare the dump of all rows with the last row alone.
ASKED: dict[str, tuple[str, ...]] = {
    "a dump with a dump": ("trace", "model", "--map", "all", "--reference", "last"),
    "a dump with a saved run": ("trace", "model", "--map", "all", "--reference", "npz"),
    "two traces": ("trace", "model", "--load", "all", "--reference", "last"),
    "diagnose": ("diagnose", "last", "all"),
    "log-probabilities": ("logits", "model", "--load", "all", "--reference", "last"),
}


@pytest.mark.parametrize("command", ASKED)
def test_rows_that_the_reference_lacks_leave_no_verdict(
    command: str, sides: dict[str, Any]
) -> None:
    first, *rest = ASKED[command]
    asked = [first, *(sides.get(word, word) for word in rest)]
    if command == "two traces":
        asked.remove(sides["model"])
    done = aprfmt(*asked, "--format", "agent")
    assert done.code == 2, done.out
    assert f"at positions 0 to {LAST - 1} (the reference " in done.out, done.out
    assert LEFT in done.out or command == "log-probabilities"


def test_a_reference_may_have_more_rows(sides: dict[str, Any]) -> None:
    """An engine computes the last row alone: it is said how many rows that is not."""
    asked = ("--map", sides["last"], "--reference", sides["all"], "--format", "agent")
    done = aprfmt("trace", sides["model"], *asked)
    assert done.code == 0
    assert f"logits at positions 0 to {LAST - 1} (of the reference alone)" in done.out


def test_a_run_computes_the_rows_of_its_reference(sides: dict[str, Any]) -> None:
    asked = ("--payload", "--points", "logits", "--ids", TEXT, "--reference", sides["all"])
    done = aprfmt("trace", sides["model"], *asked, "--format", "agent")
    assert done.code == 1 and "first token: position 0, at logits" in done.out, done.out


@pytest.mark.parametrize("room", [None, 1000])
def test_a_saved_run_has_every_row_of_logits(
    room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it is said that it has the last alone."""
    if room is not None:
        monkeypatch.setattr(recording, "LOGITS", room)
    path = tmp_path / "run.safetensors"
    asked = ("--payload", "--points", "all", "--ids", TEXT, "--save", path)
    done = aprfmt("trace", tiny_folder("llama"), *asked)
    assert done.code == 0
    with load_trace(path) as trace:
        positions = trace.records["logits"].positions
    assert positions == ((LAST,) if room else tuple(range(len(IDS))))
    assert (f"logits: the last of {len(IDS)} rows alone is recorded" in done.err) == bool(room)


def listed(*positions: int, token: int = 0) -> Logprobs:
    """Return an answer that lists the next token, or token `token`, at these positions."""
    ids = tuple(range(10, 18))
    return Logprobs(ids, {at: {token or ids[at + 1]: -2.0 - at} for at in positions})


TABLES: dict[str, tuple[Any, Any, int, str]] = {
    # what the sides list -> this one, the reference, the exit code, what is said
    "the same": (listed(0, 1, 2), listed(0, 1, 2), 0, "3 positions"),
    "more here": (listed(0, 1, 2), listed(0), 2, "1 of 3 positions; could not be compared: log-"
                  "probabilities at positions 1, 2 (the reference does not have them)"),
    "more there": (listed(0), listed(0, 1, 2), 0, "2 positions of the reference"),
    "other tokens": (listed(0, 1), Logprobs(listed().ids, {**listed(0).rows, 1: {3: -1.0}}), 2,
                     "at positions 1 (no token is listed on both sides)"),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_positions_that_were_not_compared_are_said(case: str) -> None:
    here, there, code, says = TABLES[case]
    found = compare_logprobs(here, there, Threshold(0.1, 1.0, "", ""))
    verdict = table_verdict(found, "x.json")
    assert verdict.exit == code and says in verdict.says, verdict.says


def test_of_the_last_position_an_answer_has_nothing() -> None:
    """What a trace has there is not held against an answer."""
    ids = listed().ids
    trace = rows_from_logits(ids, np.zeros((8, 40), np.float32), range(8), "t")
    found = compare_logprobs(trace, listed(*range(7)), Threshold(9.0, 9.0, "", ""))
    assert found.lost == () and found.compared == 7
    assert compare_logprobs(trace, listed(1), Threshold(9.0, 9.0, "", "")).lost == (
        0,
        2,
        3,
        4,
        5,
        6,
    )


@pytest.mark.parametrize(
    ("names", "padding", "rows"),
    [
        (["L0.out", "L1.out", "L2.out", "logits"], 5, len(IDS)),
        (["L1.attn_out", "L2.ffn_out"], 3, len(IDS)),
        (["L0.out", "L2.out"], 4, len(IDS) - 2),
    ],
)
def test_rows_before_padding_are_the_first_ones(
    names: list[str], padding: int, rows: int, tmp_path: Path
) -> None:
    """Seen red: the rows were taken as the last ones, and they "agree" beside "no cause fits".

    Where fewer rows are there than the padding explains, they are not known.
    """
    made: dict[str, Any] = {name: np.array(own()[name])[:rows] for name in names}
    ids = np.array([*IDS, *[0] * padding])
    done = aprfmt("diagnose", tiny_folder("llama"), npy(tmp_path / "d", {"input_ids": ids, **made}))
    if rows == len(IDS):
        assert done.code == 0, done.out
        assert f"rows of positions 0 to {LAST} only; these agree" in done.out
    else:
        assert done.code == 1 and "these agree" not in done.out, done.out
        assert "taken as the last ones only; not all that differs" in done.out
        assert "capture_rows (confirmed)" not in done.out
