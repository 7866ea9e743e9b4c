"""How rows of dumps, gradients and calls are read and kept, each by itself."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.base.dump_names import SHAPES_FILE
from aprfmt.errors import FormatError
from aprfmt.inference.engines import captures, sequences
from aprfmt.inference.fast import cupy_experts
from aprfmt.inference.gradients import given_points
from aprfmt.inference.replay.patched_model import CallRecorder, PassLocation, PatchedBackend
from aprfmt.measure import bounds


def test_a_position_that_is_in_two_passes_is_named() -> None:
    for positions, twice in (((0, 1, 2, 2), 2), ((3, 0, 1, 3, 2), 3), ((0, 1, 1, 0), 0)):
        run = sequences.TokenRun(
            0, [sequences.Segment(0, 0, 0, 1, tuple(range(len(positions))), positions, None)]
        )
        with pytest.raises(
            FormatError, match=rf"^position {twice} of one sequence is there in two"
        ):
            sequences._align_sequence([], run, None, ())


def test_files_of_a_folder_that_no_reader_knows_are_named(tmp_path: Path) -> None:
    names = (
        "pass.dat",
        "odd",
        "a.npy",
        SHAPES_FILE,
        "x.map.json",
        "notes.md",
        "run.py",
        ".hidden",
        "LICENSE",
        "weights.unknown",
    )
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.dat").mkdir()
    found = captures._other_files(tmp_path, {"a.npy"})
    assert sorted(found) == ["odd", "pass.dat", "weights.unknown"]


def test_of_an_operation_with_a_state_the_values_are_kept() -> None:
    values, state = np.ones(3), np.zeros(2)
    base: Any = SimpleNamespace(scan=lambda x: (values, state), other=lambda x: "not recorded")
    name = "scan"
    for keeps in (True, False):
        recorder = CallRecorder()
        recorder.keeps_calls = keeps
        recorder.at = PassLocation("q", 3)
        backend = PatchedBackend(base, {}, recorder)
        assert getattr(backend, name)(1) == (values, state) and backend.other(1) == "not recorded"
        assert len(recorder.calls) == keeps
        for call in recorder.calls:
            assert call.result is values and (call.op, call.args) == (name, (1,))
            assert call.location == PassLocation("q", 3)
    recorder = CallRecorder()
    overrides = {name: (lambda op, at, x: op(x)[1],)}
    found = getattr(PatchedBackend(base, overrides, recorder), name)(1)
    assert found is state and recorder.calls[0].result is state


def test_experts_have_an_address_each_where_all_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(pointer=lambda held: held, copy_to_gpu=lambda x: x)
    monkeypatch.setattr(cupy_experts, "memory", memory)
    refused: list[str] = []

    def addresses(held: dict[int, int | None], *, fits: bool = True) -> tuple[Any, dict[Any, Any]]:
        notes: dict[Any, Any] = {}
        stack: Any = SimpleNamespace(
            shape=(3, 4, 4), expert=lambda each: each, notes=notes, fits_budget=lambda owner: fits
        )
        owner: Any = Owner(held, refused)
        for _ in range(2):
            found = cupy_experts.CupyExperts._expert_addresses(owner, stack)
        return (None if found is None else found.tolist()), notes

    found, notes = addresses({0: 7, 1: 0, 2: 9})
    assert found == [7, 0, 9] and len(notes) == 1 and len(refused) == 1
    for lacks in range(3):
        assert addresses({0: 7, 1: 8, 2: 9} | {lacks: None})[0] is None
    assert addresses({0: 7, 1: 8, 2: 9}, fits=False)[0] is None


class Owner:
    """A backend that holds matrices at addresses."""

    def __init__(self, held: dict[int, int | None], refused: list[str]) -> None:
        self.held = held
        self._uploads = SimpleNamespace(refuse_in_recording=refused.append)
        self._place_experts: Callable[[Any], Any] = lambda stack: (
            cupy_experts.CupyExperts._place_experts(self, stack)  # type: ignore[arg-type]
        )

    def matrix(self, expert: int) -> int | None:
        return self.held[expert]


def test_copies_of_the_stream_are_columns_of_a_token_s_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of models with several streams, [copies, rows, columns, width]; of others no such array."""
    key = "L0.out"
    instance: Any = SimpleNamespace(point=SimpleNamespace(rows="tokens"), key=key)
    monkeypatch.setattr(given_points, "point_instances", lambda *of: {key: instance})
    monkeypatch.setattr(given_points, "resolve_alias", lambda name, known: known.get(name))
    monkeypatch.setattr(given_points, "_reader", lambda *of: (None, None))
    part: Any = SimpleNamespace(row=1, start=1, ids=(5, 6))
    monkeypatch.setattr(given_points, "documents", lambda batch: [part])
    copies = np.arange(2 * 3 * 4 * 5, dtype=np.float64).reshape(2, 3, 4, 5)

    def read(values: Any, streams: str) -> Any:
        model: Any = SimpleNamespace(
            spec=SimpleNamespace(block=SimpleNamespace(streams=streams)), hyper={}, roles={}
        )
        batch: Any = SimpleNamespace(mask=np.ones((3, 4), bool))
        return given_points.read_points(model, batch, {key: values.shape}, lambda name: values)

    found = read(copies, "altup")
    wanted = np.moveaxis(copies[:, 1, 1:3], 0, 1).reshape(2, 10)
    assert np.array_equal(found.values[key], wanted) and found.names == {key: key}
    plain = copies[0]
    for streams in ("altup", "one"):
        assert np.array_equal(read(plain, streams).values[key], plain[1, 1:3])
    refused = read(copies, "one")
    assert not refused.values and "expected [3, 4, ...]" in refused.refused[key]
    assert read(copies[:, :2], "altup").refused and not read(copies[:, :2], "altup").values


def test_runs_that_wider_steps_would_bring_nearer_are_of_whole_runs() -> None:
    columns = 2 * bounds.RUN + 5
    step, delta = np.ones((2, columns)), np.full((2, columns), 0.1)
    width, clipped = np.full((2, columns), 16.0), np.zeros((2, columns), bool)

    def share(**changed: Any) -> float:
        held = {"delta": delta, "step": step, "clipped": clipped, "width": width} | changed
        return bounds._share_of_saturated(**held)

    assert share() == 0.0
    far, cut = delta.copy(), clipped.copy()
    far[0, 3], cut[0, 3] = 9.0, True
    assert share(delta=far, clipped=cut) == 0.25
    assert share(delta=far) == share(clipped=cut) == 0.0
    far[1, -1], cut[1, -1] = 9.0, True  # behind the last whole run
    assert share(delta=far, clipped=cut) == 0.25
    narrow = np.full((2, columns), bounds.FEWEST_LEVELS * 1.0)
    assert share(delta=far, clipped=cut, width=narrow) == 0.25
    assert share(delta=far, clipped=cut, width=narrow - 0.5) == 0.0
    short = slice(0, bounds.RUN - 1)
    held = {"delta": far, "step": step, "clipped": cut, "width": width}
    assert bounds._share_of_saturated(**{name: x[:, short] for name, x in held.items()}) == 0.0
    usual = bounds.RUN * 4 / 12 * bounds.SATURATED
    for more, expected in ((1e-6, 0.25), (-1e-6, 0.0)):
        at = np.zeros((2, columns))
        at[0, 3] = (usual + more) ** 0.5
        assert share(delta=at, clipped=cut) == expected
