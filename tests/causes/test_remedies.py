"""The command that a cause prints is run, for the causes that `diagnose`'s table of faults lacks.

The model that it writes is A's, within the rounding of B's encoding. Others are run by
tests/diagnosis/test_remedies, and in the tests of a cause's own name.

Seen red: `convert` of B instead of A.
"""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes import CAUSES
from tests.causes import faults, test_flat_order
from tests.causes.tensor import test_flat_shards, test_rank_parts
from tests.causes.tensor_faults import FAULTS
from tests.cli.run import aprfmt as command
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.diagnosis import test_shared_ranges
from tests.diagnosis.faults import FILES
from tests.diagnosis.test_remedies import written

Pair = tuple[Path, Path]
# Levels whose faults are in what an engine or a trainer does: no file that a command writes has it.
OF_A_RUN = ("forward", "capture", "gradient", "update")
# {cause: the test that runs its command}, of causes that no table of pairs has.
RUN_ELSEWHERE = {
    "architecture_key": "diagnosis.test_architecture_key:test_the_files_own_key_counts",
    "clipped_codes": "causes.tensor.test_packed_copies:test_cut_codes_are_written_again",
    "code_type": "causes.tensor.test_misread_codes:test_codes_read_as_values_are_written_again",
    "delta_scale": (
        "causes.test_adapter_deltas:test_one_factor_is_named_with_the_key_that_takes_it_back"
    ),
    "packing_file": "model.test_older_packing_files:test_a_contradiction_is_a_difference",
    "pooling": (
        "diagnosis.test_encoders:test_what_an_encoder_has_in_gguf_is_no_fault_and_its_pooling_is"
    ),
    "quant_signs": (
        "causes.tensor.test_block_signs:test_signs_are_named_with_a_command_that_mends_them"
    ),
    "stale_layout": "causes.test_second_layouts:test_the_command_leaves_the_stale_layout_out",
    "table_under_head": (
        "causes.tensor.test_stored_once:"
        "test_a_table_under_the_heads_name_alone_is_named_and_renamed"
    ),
    "weight_norm_lost": "causes.tensor.test_weight_norm:test_the_command_gives_the_lengths_back",
}
# {cause: the test of an answer that says that no command mends it}.
NO_COMMAND = {
    "delta_change": "causes.test_adapter_deltas:test_another_change_is_said_to_have_no_command"
}
SIZES: dict[str, Any] = {"hidden": 96, "layers": 1, "ffn": 160, "heads": 4, "kv_heads": 2}
# One fault of each cause that one tensor shows, and that a command undoes.
ALONE = {
    fault.cause: fault
    for fault in FAULTS
    if fault.confirmed and CAUSES[fault.cause].verdict == "bug"
}


def buffer(folder: Path) -> Pair:
    """Return a model, and one cut from a buffer that was filled in another order."""
    a = test_flat_order.source(folder / "a")
    return a, test_flat_order.cut(a, folder / "b", test_flat_order.in_turn)


def flat_part(folder: Path) -> Pair:
    """Return a model, and one whose embedding is a rank's part of a flat parameter."""
    a, name = llama_folder(folder / "a", "F32", **SIZES), test_flat_shards.EMBED
    part = np.frombuffer(tensors_of(a)[name][2], np.float32)[:792]
    return a, _with(a, folder / "b", {name: ("F32", part.shape, part.tobytes())})


def joined_axes(folder: Path) -> Pair:
    """Return a model, and one of which a matrix is a vector of all its values."""
    a, name = llama_folder(folder / "a", "F32", **SIZES), test_flat_shards.DOWN
    raw = tensors_of(a)[name][2]
    return a, _with(a, folder / "b", {name: ("F32", (len(raw) // 4,), raw)})


def rank_part(folder: Path) -> Pair:
    """Return a model, and the part of it that rank 1 of 2 holds."""
    a = llama_folder(folder / "a", "F32", **test_rank_parts.SIZES)
    return a, _with(a, folder / "b", test_rank_parts.cut(tensors_of(a), 1, 2))


def rank_copies(folder: Path) -> Pair:
    """Return a model, and one whose norms are the copies of 8 ranks, joined."""
    a = llama_folder(folder / "a", "F32", **test_rank_parts.SIZES)
    return a, _with(a, folder / "b", dict(test_rank_parts.joined("norm", 8)(tensors_of(a))))


def shared_range(folder: Path) -> Pair:
    """Return a GGUF, and one of which a tensor is written over the end of another."""
    a = folder / "a.gguf"
    aprfmt.convert(llama_folder(folder / "source", "F32", **SIZES), a)
    return a, test_shared_ranges.moved(folder / "b.gguf", a, -32, overwritten=True)


def _with(a: Path, b: Path, rows: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Write a copy of a folder with other tensors of some names; return it."""
    shutil.copytree(a, b)
    write_mixed(b / "model.safetensors", tensors_of(a) | rows)
    return b


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "flat_order": buffer,
    "flat_shard": flat_part,
    "stored_shape": joined_axes,
    "rank_part": rank_part,
    "rank_copies": rank_copies,
    "overlapping_ranges": shared_range,
}


def check_commands(cause: str, pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what `diff` and `diagnose` print for a cause; each writes a model with A's values.

    What `diff` cannot read it leaves undecided.
    """
    a, b = pair
    for asked in ("diff", "diagnose"):
        told = command(asked, a, b, "--json").json
        if (asked, told["exit"]) == ("diff", 2):
            continue
        rows = [row for row in told["causes"] if row["remedy"]]
        assert [row["cause"] for row in rows] == [cause], (asked, rows)
        mended = written(rows[0]["remedy"]["command"], b, folder / asked, monkeypatch)
        again = command("diff", a, mended, "--accept", "within")
        assert again.code == 0, (rows[0]["remedy"], again.out)


@pytest.mark.parametrize("cause", PAIRS)
def test_the_command_of_a_cause_mends_b(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_commands(cause, PAIRS[cause](tmp_path), tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the faults of one tensor are made for."""
    return llama_folder(
        tmp_path_factory.mktemp("remedies") / "source", "BF16", hidden=faults.HIDDEN,
        layers=faults.LAYERS, vocab=faults.VOCAB, heads=faults.HEADS, kv_heads=faults.KV,
    )  # fmt: skip


@pytest.mark.parametrize("cause", ALONE)
def test_the_command_of_a_fault_of_one_tensor_mends_b(
    cause: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = source, edited(source, tmp_path / "b", ALONE[cause].change)
    check_commands(cause, pair, tmp_path, monkeypatch)


# --- every cause ----------------------------------------------------------------------------------


def in_the_tables_of_pairs() -> frozenset[str]:
    """Return the causes whose commands this module or tests/diagnosis/test_remedies runs."""
    of_files = (cause for fault in FILES if not fault.control for cause in fault.causes)
    return frozenset((*ALONE, *PAIRS, *of_files))


@pytest.mark.parametrize("cause", [cause.name for cause in CAUSES.values()])
def test_the_command_of_every_cause_is_run_or_none_is_said_to_mend_it(cause: str) -> None:
    """What is no bug needs none, and what a run does is in no file."""
    known = in_the_tables_of_pairs()
    if CAUSES[cause].verdict != "bug" or CAUSES[cause].level in OF_A_RUN:
        assert cause not in RUN_ELSEWHERE and cause not in NO_COMMAND
        return
    homes = [cause in known, cause in RUN_ELSEWHERE, cause in NO_COMMAND]
    assert sum(homes) == 1, cause
    if cause not in known:
        module, _, name = (RUN_ELSEWHERE | NO_COMMAND)[cause].partition(":")
        assert callable(getattr(import_module(f"tests.{module}"), name))


def test_tables_of_other_homes_name_causes_that_are_known() -> None:
    assert set(RUN_ELSEWHERE | NO_COMMAND) <= set(CAUSES)
