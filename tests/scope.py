"""What `python -m tests` takes of large families of parametrized tests, and what it leaves out.

A family is a folder, a file, or one function, whose tests try many combinations. The whole of each
runs in `python -m tests --everything` and whenever pytest is called by itself; `python -m tests`
takes the first of each function, every test that a requirement names, and one in so many of the
rest, chosen by the hash of its name, so that the same tests run everywhere: other architectures in
one function than in the next. Those in which each has its row are listed. What is left out is
counted.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCOPE = "APRFMT_TESTS"  # "sampled" takes the part, anything else the whole
SAMPLED = "sampled"


def without_group(node: str) -> str:
    """Return a test's id without what xdist puts behind those of a group."""
    return _GROUP.sub("", node)


def cause(name: str) -> str:
    """Return what a seeded fault's row stands for: its first cause and its verdict."""
    from tests.diagnosis.faults import FAULTS

    fault = FAULTS[name]
    return f"{fault.causes[0] if fault.causes else ''} {fault.verdict}"


def architecture(name: str) -> str:
    """Return the longest name of an architecture that a test's name contains, or ""."""
    from tests.models import MAKERS

    return max((key for key in MAKERS if key in name), key=len, default="")


def first_word(name: str) -> str:
    """Return the first parameter of a test's name: the command, where a table goes by commands."""
    return name.partition("-")[0]


def last_word(name: str) -> str:
    """Return the last parameter of a test's name: what a server says, where a table goes by it."""
    return name.rpartition("-")[2]


def container(name: str) -> str:
    """Return the format and the level of a hand-made file: "gguf-legal" of "gguf-legal-plain"."""
    return "-".join(name.split("-")[:2])


def inspected_or_command(name: str) -> str:
    """Return the command of a test that gives it a file; the whole name where that is `inspect`.

    So each hostile file is opened once, and each command meets one of them.
    """
    return name if name.startswith("inspect-") else first_word(name)


def page(name: str) -> str:
    """Return the page of documentation that an example's name begins with."""
    return name.partition(":")[0]


@dataclass(frozen=True)
class Family:
    """One in `every` tests is taken, and the first of each kind where `kind` says a test's.

    Where `unit` says which tests need each other, they are taken or left out together, and those
    of the units in `always` are taken.
    """

    every: int
    kind: Callable[[str], str] | None = None
    unit: Callable[[str], str] | None = None
    always: frozenset[str] = frozenset()


# Pages that are run in every sample: what they print counts the checks, and names accepted items.
PAGES = (
    "README.md",
    "docs/explanation/verdicts.md",
    "docs/how-to/release_gate.md",
    "docs/reference/from-0.1.md",
)
# The sample as a whole is thinned by this, where the default run outgrows its time.
THINNED = 2
ROW_EACH = Family(8, architecture)
# By file, or by function where a file's tests are not all alike.
FAMILIES: Mapping[str, Family] = {
    "tests/adapters/test_merging.py::test_peft_makes_its_file_again": Family(3),
    "tests/agents/test_play.py::test_the_skills_advice_is_right": Family(4),
    "tests/arch/test_find.py": Family(4),
    "tests/arch/test_hyper.py::test_a_wrong_value_is_read_or_refused_by_the_name_of_a_key": Family(
        8
    ),
    "tests/arch/test_listed.py::test_an_unsaid_base_is_that_of_transformers": Family(4),
    "tests/arch/test_listed.py::test_there_and_back_is_the_same_file": Family(8),
    "tests/arch/test_names.py": Family(4),
    "tests/arch/test_page.py": Family(4, first_word),
    "tests/arch/test_required.py": Family(8),
    "tests/arch/test_required.py::test_what_the_pass_can_do_without_may_be_allowed": Family(24),
    "tests/arch/test_transformers.py::test_an_unsaid_base_is_that_of_transformers": Family(4),
    "tests/arch/test_transformers.py::test_written_keys_read_back_equal": Family(4),
    "tests/attestation/test_attest.py": Family(5),
    "tests/cli/test_damage.py": Family(8),
    "tests/cli/test_forms.py::test_an_answer_for_agents_is_short_plain_and_the_same": Family(
        4, first_word
    ),
    "tests/cli/test_forms.py::test_what_is_not_done_says_the_next_command_and_it_runs": Family(
        4, first_word
    ),
    "tests/cli/test_missing.py": Family(4),
    "tests/cli/test_set_folder.py": Family(3),
    "tests/cli/test_streams.py": Family(3),
    "tests/cli/trace/test_trace_scope.py": Family(6),
    "tests/cli/pages/test_pages.py::test_a_page_is_readable": Family(3, first_word),
    "tests/codecs/test_encode_ggml.py": Family(4),
    "tests/codecs/test_native.py::test_changes_of_blocks_are_those_of_their_values": Family(4),
    "tests/codecs/test_native_encode.py": Family(3),
    "tests/codecs/test_oracles_made.py": Family(1 << 64),
    "tests/compare/test_block_types.py": Family(4),
    "tests/arch/test_engine_parameters.py": Family(12),
    "tests/causes/test_causes.py": Family(4, first_word),
    "tests/causes/test_explain.py": Family(8),
    "tests/causes/test_explain.py::test_a_fault_is_named_in_every_format": Family(8),
    "tests/causes/test_explain_models.py": Family(4),
    "tests/compare/test_nonfinite.py": Family(3),
    "tests/causes/tensor/test_folded_factors.py::test_factors_in_a_coarse_copy_are_no_bug": Family(
        4
    ),
    "tests/causes/tensor/test_misread_scales.py": Family(4),
    "tests/causes/tensor/test_packed_copies.py": Family(6),
    "tests/causes/tensor/test_packed_damage.py": Family(4),
    "tests/causes/test_planted_mistakes.py": Family(4),
    "tests/causes/tokenizer/test_tokenizer_comparison.py": Family(3),
    "tests/causes/test_needed_rows.py": Family(12),
    "tests/causes/test_symmetry.py": Family(3),
    "tests/testing/test_conformance.py::test_architectures": Family(4),
    "tests/conversion/test_back_to_folders.py": Family(8),
    "tests/conversion/test_dialect_faults.py": Family(3),
    "tests/conversion/test_dialect_mixtures.py": Family(3),
    "tests/conversion/test_dialects.py": Family(3),
    "tests/conversion/test_estimate.py": Family(4),
    "tests/conversion/test_oracles.py": Family(3),
    "tests/conversion/test_plan_memory.py": Family(4),
    "tests/conversion/test_repacked.py": Family(3),
    "tests/conversion/test_resume.py::test_kills_and_resumes_give_the_bytes_of_one_run": Family(4),
    "tests/conversion/test_round_trips.py": Family(8),
    "tests/diagnosis/test_agreement.py": Family(3),
    "tests/diagnosis/test_coverage.py": Family(3),
    "tests/diagnosis/test_detours.py": Family(8),
    "tests/diagnosis/test_exit_codes.py": Family(12),
    "tests/diagnosis/test_faults.py": Family(64, cause),
    "tests/diagnosis/test_hypotheses.py::test_what_an_engine_did_otherwise_is_named": Family(3),
    "tests/diagnosis/test_later_passes.py": Family(4),
    "tests/diagnosis/test_logit_relations.py": Family(8),
    "tests/diagnosis/test_lost_companions.py": Family(3),
    "tests/diagnosis/test_own_keys.py": Family(3),
    "tests/diagnosis/test_remedies.py": Family(12),
    "tests/diagnosis/test_search.py": Family(4),
    "tests/diagnosis/test_diagnosis_order.py": Family(12),
    "tests/docs/test_examples.py": Family(24, unit=page, always=frozenset(PAGES)),
    "tests/docs/test_tasks.py": Family(3),
    "tests/field/test_answers.py": Family(12),
    "tests/field/test_field.py": Family(8),
    "tests/field/test_rounded.py": Family(12),
    "tests/formats/test_atomic_faults.py": Family(3),
    "tests/formats/test_atomic_kills.py": Family(12),
    "tests/formats/test_atomic_writers.py": Family(3),
    "tests/formats/gguf/test_gguf_forks.py": Family(3),
    "tests/fuzz/test_fuzz.py": Family(5),
    "tests/fuzz/test_planted.py": Family(8),
    "tests/fuzz/test_templates.py": Family(4),
    "tests/inference/gradients/test_gradient_differences.py::test_two_passes_agree": Family(8),
    "tests/inference/gradients/test_gradients.py::test_every_gradient_is_transformers": Family(4),
    "tests/inference/gpu/test_cupy_backend.py": Family(6),
    "tests/inference/gpu/test_cupy_faults.py": Family(4),
    "tests/inference/gpu/test_cupy_recorded.py": Family(20),
    "tests/inference/gpu/test_gpu_parity.py": Family(4),
    "tests/inference/gpu/test_kernels_decode.py": Family(4),
    "tests/inference/gpu/test_kernels_layers.py": Family(4),
    "tests/inference/gpu/test_kernels_matvec.py": Family(4),
    "tests/inference/gpu/test_odd_sizes.py": Family(16),
    "tests/inference/gpu/test_torch_cuda.py": Family(4),
    "tests/inference/gpu/test_torch_many.py": Family(4),
    "tests/inference/test_expert_blocks.py": Family(4),
    "tests/inference/test_cache.py": Family(8),
    "tests/inference/engines/test_captures.py": Family(4),
    "tests/inference/test_device_errors.py": Family(4),
    "tests/inference/test_draft_faults.py": Family(4),
    "tests/inference/test_dry_run.py": Family(12),
    "tests/inference/test_encoders.py": Family(3),
    "tests/inference/engines/test_engines.py": Family(8),
    "tests/inference/test_formats.py": Family(8),
    "tests/inference/test_forward.py": Family(8),
    "tests/inference/test_forward.py::test_float64_is_transformers_at_every_point": ROW_EACH,
    "tests/inference/engines/test_hidden_states.py::"
    "test_only_points_that_were_taken_elsewhere_are_named": Family(4),
    "tests/inference/test_ignored_keys.py": Family(4),
    "tests/inference/test_log_softmax.py": Family(4),
    "tests/inference/test_nonfinite.py": Family(12),
    "tests/inference/test_old_configs.py": Family(3),
    "tests/inference/parity/test_parity_text.py": Family(12),
    "tests/inference/test_points.py": Family(8),
    "tests/inference/test_points.py::test_exactly_the_tables_points_come_by_in_its_order": ROW_EACH,
    "tests/inference/test_real_models.py": Family(1 << 64),
    "tests/inference/test_rounding.py": Family(8),
    "tests/inference/test_unusual.py": Family(4),
    "tests/model/ledger/test_commands.py::test_one_model": Family(4),
    "tests/model/ledger/test_innocents.py": Family(4),
    "tests/model/ledger/test_sections.py": Family(1, str),  # each command is a row of its own
    "tests/checks/gates/test_checks.py": Family(3),
    "tests/checks/gates/test_gates.py": Family(6),
    "tests/quantizing/test_dialects.py": Family(3),
    "tests/quantizing/test_imatrix.py": Family(4),
    "tests/quantizing/test_requant.py": Family(3),
    "tests/quantizing/test_types.py::test_bytes_and_numbers_of_the_libraries": Family(3),
    "tests/model/relations/test_keys.py": Family(8),
    "tests/model/relations/test_tensor_names.py": Family(4),
    "tests/remote/test_commands.py": Family(3),
    "tests/remote/test_identity.py::test_a_mixture_is_an_error": Family(8, last_word),
    "tests/remote/test_once.py": Family(8),
    "tests/remote/test_once.py::test_bytes_that_are_not_the_published_ones_are_refused": Family(2),
    "tests/remote/test_once.py::test_what_reads_a_whole_file_fetches_it_once": Family(2),
    "tests/remote/test_remembered.py": Family(4),
    "tests/robustness/test_configs.py": Family(8, first_word),
    "tests/robustness/test_differences.py": Family(4),
    "tests/robustness/test_files.py": Family(12, container),
    "tests/robustness/test_side_inputs.py": Family(3, first_word),
    "tests/robustness/test_smoke.py": Family(10, inspected_or_command),
    "tests/robustness/test_smoke.py::test_valid_and_odd_files_are_read": Family(4),
    "tests/test_packaging.py": Family(1 << 64),
    "tests/tokenizer/test_hostile.py": Family(2),
    "tests/tokenizer/test_isolated.py::test_no_command_ends_without_a_word": Family(4),
    "tests/tokenizer/test_isolated.py::"
    "test_tokens_that_a_template_repeats_are_counted_before_they_are_listed": Family(4),
    "tests/tokenizer/test_template.py": Family(3),
    "tests/training/test_batch.py": Family(3),
    "tests/training/test_both_ways.py": Family(3),
    "tests/training/test_moments.py": Family(3),
    "tests/training/test_judged_steps.py": Family(8),
    "tests/training/test_step.py": Family(7),
    "tests/training/test_points.py::test_every_point_that_a_hook_saves_is_transformers": Family(8),
    "tests/training/test_points.py::"
    "test_every_point_of_a_pass_has_a_gradient_but_those_of_a_choice": Family(8),
}
# Folders whose functions try many cases: what has no family of its own there.
FOLDERS: Mapping[str, Family] = dict.fromkeys(
    (
        "tests/arch",
        "tests/causes",
        "tests/checks",
        "tests/cli",
        "tests/compare",
        "tests/diagnosis",
        "tests/inference",
        "tests/measure",
        "tests/model",
        "tests/tokenizer",
        "tests/training",
    ),
    Family(6),
)
# Files whose tests are of parts alone, with facts made for them: thousands cost less than a minute.
ALONE = "_alone.py"
# Others of which all tests cost hardly more than their sample: some milliseconds each.
CHEAP = frozenset(
    {
        "tests/arch/test_chained.py",
        "tests/arch/test_foreign.py",
        "tests/arch/test_steps.py",
        "tests/causes/training/test_clipped_values.py",
        "tests/causes/tensor/test_explained_parts.py",
        "tests/causes/tensor/test_words_of_orders.py",
        "tests/checks/file/test_file_digest.py",
        "tests/checks/file/test_table.py",
        "tests/checks/gates/test_golden.py",
        "tests/checks/gates/test_report.py",
        "tests/cli/test_listings.py",
        "tests/cli/test_page_files.py",
        "tests/cli/test_refused_together.py",
        "tests/cli/test_small_answers.py",
        "tests/cli/test_summary_lines.py",
        "tests/compare/test_other_models.py",
        "tests/diagnosis/test_agreement_rule.py",
        "tests/diagnosis/test_derived_quantities.py",
        "tests/inference/test_device.py",
        "tests/inference/engines/test_engine_files.py",
        "tests/inference/engines/test_llama_library.py",
        "tests/inference/test_loss.py",
        "tests/inference/test_probe_ids.py",
        "tests/inference/test_rope.py",
        "tests/inference/test_rules_of_recorders.py",
        "tests/inference/test_sampling.py",
        "tests/inference/test_stored_arrays.py",
        "tests/measure/test_tolerances.py",
        "tests/model/ledger/test_files_beside.py",
        "tests/model/ledger/test_verdict.py",
        "tests/model/relations/test_mlx_layout.py",
        "tests/model/test_sentences_of_parts.py",
        "tests/tokenizer/test_named_problems.py",
        "tests/tokenizer/test_pre_tokenizers.py",
        "tests/training/test_optimizer_settings.py",
        "tests/training/test_verdict_rules.py",
    }
)
# Tests that take many seconds, where others of their file ask the same of small models or files.
LONG = frozenset({
    "tests/arch/test_required.py::test_which_losses_a_pass_survives",
    "tests/causes/test_explain.py::test_noise_and_unrelated_values_confirm_nothing",
    "tests/causes/test_explain_models.py::test_layers_of_a_quantized_model_somebody_made",
    "tests/causes/tensor/test_misread_codes.py::test_other_whole_numbers_are_not_bytes_of_floats",
    "tests/causes/tensor/test_named_orders.py::test_two_with_the_same_codes_do_not_say_which_side_is_wrong",
    "tests/causes/forward/test_rope_precision.py::test_other_faults_of_rope_and_right_angles_are_not_that",
    "tests/causes/tensor/test_spread_rounding.py::test_a_flipped_bit_beside_them_is_damage_still",
    "tests/causes/tensor/test_spread_rounding.py::test_two_arithmetics_of_one_merge_are_precision",
    "tests/causes/tokenizer/test_tokenizer_comparison.py::test_a_real_sentencepiece_model_is_its_own_folders_equal",
    "tests/causes/tokenizer/test_tokenizer_comparison.py::test_commands_agree_on_a_template_that_names_unknown_tokens",
    "tests/checks/gates/test_gates.py::test_real_models_pass",
    "tests/checks/gates/test_report.py::test_another_copy_is_held_against_the_original",
    "tests/compare/test_memory.py::test_equal_tensors_leave_nothing_behind",
    "tests/compare/test_memory.py::test_explaining_leaves_nothing_behind",
    "tests/compare/test_memory.py::test_windows_leave_nothing_behind",
    "tests/conversion/test_estimate.py::test_threads_count",
    "tests/conversion/test_foreign_gguf.py::test_gemma_keeps_every_byte",
    "tests/conversion/test_plan_memory.py::test_a_row_takes_a_few_numbers",
    "tests/conversion/test_unread.py::test_diagnose_says_that_they_are_not_decoded_and_blames_no_tensor",
    "tests/diagnosis/test_detours.py::test_a_copy_of_a_quantized_copy_is_coarse_and_says_both",
    "tests/diagnosis/test_taken_parts.py::test_what_is_no_part_of_the_other_is_not_called_one",
    "tests/diagnosis/test_two_at_once.py::test_a_quantization_alone_is_no_pruning",
    "tests/diagnosis/test_two_at_once.py::test_pruned_then_quantized",
    "tests/docs/test_installing.py::test_a_codec_of_another_package_is_quantized_bounded_and_explained",
    "tests/field/test_field.py::test_rows_are_asked_side_by_side",
    "tests/field/test_rounded.py::test_a_fault_beyond_the_rounding_is_found",
    "tests/field/test_rounded.py::test_a_wrong_number_in_float32_is_not_taken_for_rounding",
    "tests/fleet/test_scan.py::test_a_derivation_is_proven_and_another_seed_is_not",
    "tests/fleet/test_scan.py::test_a_line_that_a_kill_cut_off_is_asked_again",
    "tests/fleet/test_scan.py::test_a_question_that_takes_too_long_is_one_row",
    "tests/fleet/test_scan.py::test_a_question_that_takes_too_much_memory_is_one_row",
    "tests/formats/gguf/test_gguf_oracles.py::test_a_real_file_is_read_like_gguf_py_and_copied_whole",
    "tests/fuzz/test_fuzz.py::test_atheris_finds_a_parser_that_breaks_its_promise",
    "tests/fuzz/test_fuzz.py::test_atheris_finds_nothing",
    "tests/fuzz/test_planted_sides.py::test_names_of_arrays_are_escaped",
    "tests/inference/gpu/test_cupy_recorded.py::test_bits_are_equal_recorded_or_not",
    "tests/inference/gpu/test_cupy_recorded.py::test_encoders_are_recorded",
    "tests/inference/gpu/test_cupy_recorded.py::test_generation_is_the_cpus",
    "tests/inference/engines/test_hidden_states.py::test_a_norm_that_was_really_applied_twice_is_a_bug",
    "tests/inference/test_log_softmax.py::test_temperature_is_no_constant",
    "tests/inference/parity/test_parity_text.py::test_unusual_text_is_no_bug_of_a_real_model",
    "tests/mutations/test_parts.py::test_every_product_file_can_be_traced",
    "tests/mutations/test_parts.py::test_one_of_each_function_and_others_by_another_seed",
    "tests/mutations/test_parts.py::test_what_is_drawn_of_the_product_parses",
    "tests/mutations/test_tool.py::test_a_planted_mistake_is_killed_by_the_test_that_sees_it",
    "tests/mutations/test_tool.py::test_a_product_that_cannot_be_imported_is_killed",
    "tests/mutations/test_tool.py::test_survivors_are_listed_with_their_diff",
    "tests/robustness/test_json_budget.py::test_real_shapes_pass",
    "tests/test_packaging.py::test_the_wheel_of_the_archive_is_installed_and_used",
    "tests/training/test_step_memory.py::test_what_is_said_is_taken_and_no_more",
})  # fmt: skip
# Tests of large families that are in every sample: the first of their kind asks something else.
ALWAYS = frozenset({
    "tests/diagnosis/test_faults.py::test_the_verdict_the_cause_and_the_place[logits-theta]",
})  # fmt: skip
# Model types of 2022 and 2023 that nobody converts any more: read and run as before, tried less.
OLD = re.compile(
    r"(?<![a-z0-9_])(bloom|falcon(_40b|_rw|_rw_40b)?|gpt_bigcode|gptj|jais2|mpt)(?![a-z0-9_])"
)
OLDER = 4  # of so many tests of theirs in a sample one is taken
_GROUP = re.compile(r"@[\w./-]+$")
_PARTS = re.compile(r"^(?P<file>[^:]+)::(?P<test>[^\[]+)\[(?P<name>.*)\]$", re.S)


def family_of(file: str, test: str) -> Family | None:
    """Return the family of a function, else that of its file, else that of its folder.

    None where all tests are taken, as those of parts alone are.
    """
    if file.endswith(ALONE) or file in CHEAP:
        return None
    folder = "/".join(file.split("/")[:2])
    return FAMILIES.get(f"{file}::{test}", FAMILIES.get(file, FOLDERS.get(folder)))


def left_out(ids: Sequence[str], named: frozenset[str] = frozenset()) -> set[str]:
    """Return which tests of `ids` are not in the sample; `named` and ALWAYS are always in it.

    Tests without parameters are in it but for LONG, and so is what is of no family.
    """
    out: set[str] = set()
    kinds: set[tuple[str, str, str]] = set()
    for node in ids:
        plain = without_group(node)
        if plain.partition("[")[0] in LONG and plain not in named:
            out.add(node)
            continue
        found = _PARTS.match(plain)
        family = family_of(found["file"], found["test"]) if found else None
        if found is None or family is None:
            continue
        if family.unit is not None:
            unit = family.unit(found["name"])
            if unit not in family.always and not chosen(unit, family.every):
                out.add(node)
            continue
        kind = family.kind(found["name"]) if family.kind else ""
        first = (found["file"], found["test"], kind) not in kinds
        kinds.add((found["file"], found["test"], kind))
        every = family.every * THINNED * (OLDER if OLD.search(found["name"]) else 1)
        if not (first or plain in named | ALWAYS or chosen(plain, every)):
            out.add(node)
    return out


def selected(request: Any, *names: str) -> set[tuple[Any, ...]]:
    """Return the values of these parameters in the tests of a fixture's module that will run.

    What a module prepares for all its tests at once it need not prepare for those left out.
    """
    return {
        tuple(item.callspec.params[name] for name in names)
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and set(names) <= item.callspec.params.keys()
    }


def chosen(node: str, every: int) -> bool:
    """Say whether a test is the one in `every`, by the hash of its name."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:4], "big") % every == 0


def sample(config: Any, items: list[Any]) -> None:
    """Deselect what is left out of this run, in place; pytest counts it as deselected."""
    if os.environ.get(SCOPE) != SAMPLED:
        return
    from tests.requirements import PAGE, rows

    named = frozenset(test for row in rows(PAGE.read_text()) for test in row.tests)
    out = left_out([item.nodeid for item in items], named)
    if out:
        gone = [item for item in items if item.nodeid in out]
        items[:] = [item for item in items if item.nodeid not in out]
        config.hook.pytest_deselected(items=gone)
