"""Every seeded fault is named, with its place, and nothing sound raises an alarm."""

from pathlib import Path

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.role_vocabulary import HYPER_NAMES
from aprfmt.causes import CAUSES, causes_of, modules_of
from aprfmt.causes.forward.table import TABLE
from aprfmt.causes.forward.usual_blocks import UsualMistake
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.causes.hyperparameters import SHOWN_BY, hyper_causes
from aprfmt.diagnosis.diagnosis_text import first_lines, report_text
from aprfmt.diagnosis.records import KINDS, Diagnosis
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.findings import Finding
from aprfmt.measure.verdicts import CERTAINTIES
from aprfmt.model import open_model
from tests import approved
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.faults import CONTROLS, ENGINES, FAULTS, FILES
from tests.diagnosis.table import FLOAT32, PAGE, answer, between, cells, confusion, row
from tests.inference.encoders import ENCODERS
from tests.models import IDS, MAKERS

CERTAINTY = list(CERTAINTIES)
ANSWERS = Path(__file__).parent / "answers"


def _wrong(found: Diagnosis) -> list[Finding]:
    return [one for one in found.findings if one.verdict not in ("same", "precision")]


def check_first_lines(found: Diagnosis) -> None:
    """Hold the answer for a person to what it promises.

    At most 12 lines, how sure, where in the file's own names, what was not compared, what to do.
    """
    lines = [text for text, _ in first_lines(found)]
    text = "\n".join(lines)
    assert 1 <= len(lines) <= 12, text
    assert lines[0].startswith(KINDS[found.kind])
    if found.lead is not None and not found.reason:
        one = found.causes[0]
        assert one.level in text and (one.cause or "no cause of the table fits") in lines[0], text
        assert not one.where or one.where[0] in text, (one.where, text)
        most = CAUSES[one.cause].most if one.cause else "located"
        assert CERTAINTY.index(one.level) <= CERTAINTY.index(most), (one.cause, one.level)
        own = found.stored.get(one.roles[0], ()) if one.roles else ()
        assert not own or own[0] in text, (own, text)
        remedy = one.remedy
        assert remedy is None or f"next: {remedy.command}" in lines or "more commands" in text
    if found.kind in ("bug", "not_exercised"):  # a command mends each, or none is said to
        mended = all(one.to_named_cause({}).remedy is not None for one in _wrong(found))
        assert mended or found.unrepaired_text in lines, text
        assert mended or found.unrepaired_text.startswith("no command mends")
    for one in found.causes:  # all places, by their own names
        assert tuple(one.to_json()["where"]) == tuple(one.where)
    open_items = [row for row in found.pronounced.not_compared if row.state != "equal"]
    assert not open_items or found.reason or "compared" in text, text


@pytest.mark.parametrize("name", FAULTS)
def test_the_verdict_the_cause_and_the_place(name: str) -> None:
    fault, found = FAULTS[name], answer(name)
    check_first_lines(found)
    assert found.verdict == fault.verdict, found.sentence
    named = tuple(dict.fromkeys(finding.cause for finding in found.findings))
    assert named == fault.causes, found.sentence
    assert found.confidence == fault.confidence, found.sentence
    if fault.where:
        assert found.lead is not None
        assert set(fault.where) <= set(found.lead.where), found.lead.where
    assert found.cause == (fault.causes[0] if fault.causes else None if found.reason else "none")
    lead = found.lead
    if lead is not None and lead.verdict == "bug" and fault.confidence == "confirmed":
        assert lead.residual_before is not None
        assert lead.residual_after is not None
        assert lead.residual_after < 0.01 * lead.residual_before
    assert row(fault, found) in PAGE.read_text(), "run python -m tests.diagnosis.table"
    first = "\n".join(text for text, _ in first_lines(found))
    if lead is None or lead.cause != "rounding" or (lead.residual_before or 1) > FLOAT32:
        said = report_text(found)
        if found.verdict == "same":  # whether the bits are equal depends on the processor's sums
            said = said.replace(", not exercised)", ")")
        approved.check(ANSWERS / f"{name}.txt", f"{first}\n\n{said}")


def test_the_page_lists_every_fault_once_and_counts_them() -> None:
    page = PAGE.read_text()
    lines = [
        line
        for part in ("engines", "files", "controls")
        for line in between(page, part).splitlines()[2:]
    ]
    assert [cells(line)[0] for line in lines] == list(FAULTS)
    assert between(page, "confusion") == confusion(lines)


def test_the_table_is_as_wide_as_it_has_to_be() -> None:
    faults = [fault for fault in FAULTS.values() if not fault.control]
    controls = [fault for fault in FAULTS.values() if fault.control]
    assert len(FAULTS) == len(ENGINES) + len(FILES) + len(CONTROLS)
    assert len(faults) >= 40 and len(controls) >= 10
    assert len({fault.base.partition("-")[0] for fault in faults} - {"demo"}) >= 10
    seeded = {cause for fault in FAULTS.values() for cause in fault.causes}
    assert set(CAUSES) - {"none", *SEEDED_ELSEWHERE} <= seeded
    assert any(fault.verdict == "same" and not fault.causes for fault in controls)
    upstream = {number for fault in FAULTS.values() for number in fault.upstream}
    assert {1, 2, 3, 8, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34} <= upstream


def test_tables_name_causes_of_the_one_table() -> None:
    assert {hypothesis.cause for hypothesis in TABLE} <= set(CAUSES)
    run = {
        rule.name for name in ARCHS.own for rule in ARCHS[name].hyper if ARCHS[name].level == "full"
    }
    assert set(hyper_causes()) == run >= set(HYPER_NAMES)
    assert set(hyper_causes().values()) - {""} <= set(CAUSES)
    assert set(SHOWN_BY) <= set(HYPER_NAMES)
    proposed = {row.cause for row in TABLE} | {"capture_rows", "other_sequence", "ranks_differ"}
    proposed.add("requests_differ")
    proposed |= set().union(*({usual.change.cause for usual in tried(base)} for base in USUAL_IN))
    assert proposed <= set(CAUSES)
    computed = {row.name for module in modules_of("forward") for row in causes_of(module)}
    assert len(computed) > 20 and computed <= proposed


# Causes of training steps (tests/training), of the ranks of a dump
# (inference/engines/test_rank_dumps), of recorded ids (test_recorded_ids) and of a numbering of
# tokens (test_renumbered_tokens);
# others have a file of tests of their name, or stand in test_batch_sequences, test_served_adapters,
# test_shared_ranges, test_misread_codes, test_second_layouts, test_packed_copies,
# test_adapter_deltas, test_torch_kernels, test_stored_once, test_weight_norm, test_resized_grids,
# test_repacked_rows, model/relations/test_kernels and model/test_older_packing_files.
SEEDED_ELSEWHERE = {cause.name for name in modules_of("training") for cause in causes_of(name)} | {
    "added_vector",
    "architecture_key",
    "block_fields",
    "clipped_codes",
    "code_type",
    "copied_tensor",
    "delta_change",
    "delta_scale",
    "flat_order",
    "flat_shard",
    "joined_tensors",
    "low_rank",
    "mlx_layout",
    "other_names",
    "other_sequence",
    "overlapping_ranges",
    "packing_file",
    "quant_signs",
    "rank_copies",
    "rank_part",
    "ranks_differ",
    "repacked_rows",
    "requests_differ",
    "resized_positions",
    "rope_precision",
    "served_adapter",
    "shard_order",
    "stale_layout",
    "stored_once",
    "stored_shape",
    "stored_twice",
    "table_under_head",
    "token_numbering",
    "torch_layout",
    "visible_padding",
    "weight_norm_folded",
    "weight_norm_lost",
}
USUAL_IN = ("qwen3", "phi2", "gemma2", "qwen2_moe")  # models that every usual mistake exists in


def tried(base: str) -> list[UsualMistake]:
    """Return the usual mistakes that are tried in a pass of a tiny model."""
    with open_model(tiny_folder(base)) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        found = usual_mistakes(patched)
        patched.weights.close()
    return found


def test_every_architecture_that_runs_has_faults_of_its_own() -> None:
    """Encoders stand in the table by the names of their tiny models."""
    tried = {fault.base for fault in FAULTS.values() if not fault.control}
    runs = {name for name in ARCHS.own if ARCHS[name].level == "full"}
    assert runs - tried == set()
    assert runs == {*MAKERS, *(name for name in ENCODERS if name in runs)}
