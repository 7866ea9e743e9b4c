"""`diff`: compares two models tensor by tensor, with their configuration and tokenizer.

A and B are the two models; a *side* is one of them. A *row* is the comparison of one tensor. An
*item* is one thing that a model is made of, or that was compared: a tensor, a key, a text.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.arch.rope_gguf import have_equal_divisors
from aprfmt.arch.spec import HyperParam
from aprfmt.arch.value_checks import same_value
from aprfmt.base.budget import Budget
from aprfmt.base.processors import cpu_count
from aprfmt.base.protocols import Damage, Value
from aprfmt.base.sequences import join_first
from aprfmt.compare.diffs import METADATA_KEYS, SECTIONS, DiffReport
from aprfmt.errors import ArchError, UsageError
from aprfmt.formats import checksum_matches, has_checksum
from aprfmt.measure.alignment import Alignment, TensorPair, align_models, numbered_pairs
from aprfmt.measure.prefetch import BytePrefetch
from aprfmt.measure.records import (
    EQUAL,
    DifferenceImage,
    FieldDiff,
    SideRelation,
    SpellingDiff,
    TensorDiff,
)
from aprfmt.measure.texts import (
    GENERATION_ITEM,
    TOKENIZER_ITEM,
    SideVerdicts,
    compare_equal_tokenizers,
    compare_texts,
    differing_generation_keys,
    template_diff,
    uncompared_tokenizers,
)
from aprfmt.model import Model, missing_shards, open_damaged
from aprfmt.model.hf_folder import holds_rank_files
from aprfmt.model.ledger import (
    DIFFERING,
    LATE,
    WRONG_CHECKSUM,
    Kind,
    Ledger,
    NotCompared,
    State,
    list_not_compared,
    make_ledger,
    same_content,
)
from aprfmt.model.own_keys import (
    ITS_KEY,
    NOT_THERE,
    READ_HERE,
    contradicted_parts,
    contradicted_values,
    is_of_own_keys,
    lacks_demanded_head,
    misleading_keys,
)
from aprfmt.model.packing import input_scale_endings, packing_conflicts
from aprfmt.model.relations import file_relations
from aprfmt.model.resolve import (
    ARCHITECTURE,
    architecture_names,
    spellings_by_role,
    stated_architecture,
)
from aprfmt.remote.paths import is_remote
from aprfmt.tokenizer.keys import GENERATION_KEYS

if TYPE_CHECKING:
    from aprfmt.causes.tensor.adapter_deltas import DeltaComparison
    from aprfmt.measure.findings import Finding
    from aprfmt.measure.requantization import RequantizationOracle
    from aprfmt.tensors.view import View

__all__ = ["DiffReport", "DifferenceImage", "FieldDiff", "TensorDiff", "diff", "diff_models"]

# Verdicts that the hypotheses are asked about.
EXPLAINED = ("DIFFERENT", "SHAPE_DIFFERS", "ONLY_IN_A", "ONLY_IN_B")
# What each section of a report compares of the ledgers; tensors are compared one by one.
_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "tensors": ("file", "index entry"),
    "hyperparameters": ("config key", "metadata key"),
    "tokenizer": ("tokenizer part", "generation setting"),
    "metadata": ("metadata key",),
}
_SIZES = ("hidden_size", "n_layers", "ffn_size", "vocab_size")  # what tensors show as well
_ROPE_KEYS = ("rope_parameters.rope_theta", "rope_scaling.rope_theta")
CONTEXT_LENGTH = "context_length"  # changes no pass by itself
# Metadata that every file has its own value of: compared where metadata is asked for by name.
_OWN_KEYS = ("aprfmt.", "split.", "general.name")
PLACES = 3  # places that a field's line names
CHECKSUMS = "checksums over all bytes"  # the name of the item for those that a budget left


def diff(
    a: Path | str,
    b: Path | str,
    *,
    tensors: Sequence[str] = (),
    only: Collection[str] | None = None,
    arch: str | None = None,
    base: Path | str | None = None,
    imatrix: Path | str | None = None,
    explain: bool = True,
    images: int = 0,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Return the comparison of two model files or folders, in any formats.

    `base` is the float source: every quantized tensor is tested for being made from it, byte for
    byte, with the importance matrix in the file `imatrix` if one was used. `tensors` are patterns
    of names in any naming; UsageError where one matches nothing. `only` are some of SECTIONS: the
    others are not compared and stay empty, and in the chosen ones every difference counts (None:
    all are compared). With `explain` every differing pair is tested against the hypotheses of
    causes.tensor; `images` is the number of worst tensors to make difference images of. Tensors
    that `budget` has no time or memory for are named as not compared; each counts with the bytes of
    the larger of both tensors. Raises FormatError for a file of which nothing can be read; a tensor
    that cannot be read is UNREADABLE, and `report.damage` says what is wrong with the files.
    """
    with ExitStack() as opened:
        # B may be the saved weights of an engine, read under A's names.
        first = opened.enter_context(open_damaged(a, arch=arch))
        state = open_saved_state(b, first) if isinstance(b, Path) else None
        second = opened.enter_context(state or open_damaged(b, arch=arch))
        if arch is None and state is None:
            first, second = reopen_as_tower(first, second, opened, open_damaged)
        if state is not None and only is None and state.folder is first.folder:
            only = ("tensors",)  # it has no configuration and no tokenizer of its own
        # A float base lets every quantized tensor be checked by encoding again.
        oracle = None
        if base is not None:
            from aprfmt.measure.requantization import open_oracle

            oracle = open_oracle(base, imatrix, arch)
            opened.enter_context(oracle.base)
        elif imatrix is not None:
            raise UsageError("an importance matrix explains bytes only with a base: --base")
        report = diff_models(
            first,
            second,
            tensors=tensors,
            only=only,
            oracle=oracle,
            explain=explain,
            images=images,
            budget=budget,
            progress=progress,
        )
        if state is None:
            return report
        from aprfmt.model.engine_state import is_engine_state

        return replace(report, of_engine=is_engine_state(Path(b)), is_state=True)


def reopen_as_tower(
    a: Model, b: Model, opened: ExitStack, open_again: Callable[..., Model]
) -> tuple[Model, Model]:
    """Return both models; if one is a (vision) tower alone, the other one is opened as its tower.

    `open_again(path, arch=NAME)` opens a model under an architecture, and `opened` closes it later.
    A multimodal model that cannot be read as the tower is returned as it was.
    """
    if not _is_tower(a) and not _is_tower(b):
        return a, b
    from aprfmt.model.towers import tower_architecture

    pair = [a, b]
    for number, (model, other) in enumerate(((a, b), (b, a))):
        name = tower_architecture(model, other)
        if not name:
            continue
        again = opened.enter_context(open_again(model.path, arch=name))
        try:
            pair[number] = again if again.roles else model
        except ArchError:
            continue
    return pair[0], pair[1]


def _is_tower(model: Model) -> bool:
    """Return whether a model is opened as a (vision) tower; False where its architecture is not."""
    try:
        return model.spec.is_tower
    except ArchError:
        return False


def _tower_facts(a: Model, b: Model) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return (the names of one model that are not of its tower, which the other one is; options).

    The options are those of `convert` that write the tower alone. Both are empty unless one model
    is a tower.
    """
    if not _is_tower(a) and not _is_tower(b):
        return frozenset(), ()
    from aprfmt.model.towers import names_outside_tower, tower_options

    outside = frozenset((*names_outside_tower(a, b), *names_outside_tower(b, a)))
    return outside, tower_options(a, b)


def _nameless_options(a: Model) -> tuple[str, ...]:
    """Return the option of `convert` for a file that states no architecture; () for others."""
    return () if a.forced or a.kind is not None or architecture_names(a) else ("--generic",)


def open_saved_state(path: Path, model: Model) -> Model | None:
    """Return the weights that an engine saved at a path, opened by the names of `model`.

    None where the path holds no saved engine state but a model: a GGUF or APR file, a folder with
    config.json (unless its weights are one file per rank), or a file next to a `model` without a
    configuration.
    """
    folder = path if path.is_dir() else path.parent
    configured = (folder / "config.json").is_file()
    if path.suffix in (".gguf", ".apr") or (configured and not holds_rank_files(path)):
        return None
    if path.is_file() and (model.folder is None or model.folder.config is None):
        return None
    from aprfmt.model.engine_state import is_engine_state, is_saved_state, open_engine_state

    held = is_engine_state(path) or is_saved_state(path, model)
    return open_engine_state(path, model) if held else None


def diff_models(
    a: Model,
    b: Model,
    *,
    tensors: Sequence[str] = (),
    only: Collection[str] | None = None,
    oracle: "RequantizationOracle | None" = None,
    explain: bool = True,
    images: int = 0,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Return the comparison of two open models.

    `tensors` are patterns of names, () for all; UsageError where one matches nothing. `only` are
    the sections to compare, None for all. `oracle` judges quantized tensors by their float source;
    None without one. Without `explain` no cause is searched for. `images` is the number of tensors
    that get a picture of their differences. Pairs that `budget` has no time or memory for are not
    compared; None sets no limit. `progress` is called with (pairs done, all pairs).
    """
    from aprfmt.measure.pair_comparison import compare_pair

    asked = () if only is None else tuple(name for name in SECTIONS if name in only)
    only = SECTIONS if only is None else only
    # Pair the tensors, and compare each pair; threads compare bytes ahead.
    if any(one.kind == "container" for model in (a, b) for one in model.relations):
        from aprfmt.measure.container_rows import read_by_names_alone

        a, b = read_by_names_alone(a, b)
    alignment = align_models(a, b)
    pairs = _select_pairs(a, b, alignment, tensors)
    pairs = pairs if "tensors" in only else []
    budget = budget or Budget()
    wanted, pairs = pairs, [pair for pair in pairs if budget.has_room(pair.nbytes)]
    imatrix = _has_imatrix(a.metadata) or _has_imatrix(b.metadata)
    results = []
    tokens = _TokenizerComparison()
    with BytePrefetch(pairs, cpu_count()) as bytes_of:
        if "tokenizer" in only:
            with budget.in_force() as reading:
                tokens = _compare_tokenizers(a, b)
            if reading.over:
                item = NotCompared("tokenizer part", "tokenizer", LATE, budget.reason)
                tokens = _TokenizerComparison(left=(item,))
        for number, pair in numbered_pairs(pairs):
            if not budget.has_time():
                break
            with budget.in_force() as reading:
                result = compare_pair(pair, imatrix, bytes_of.comparer(number - 1))
                if oracle is not None:
                    metadata = a.metadata, b.metadata
                    result = oracle.judge_if_readable(result, pair.a, pair.b, metadata)
            if reading.over:
                break
            results.append(result)
            pair.drop()
            if progress is not None:
                progress(number, len(pairs))
    lost = missing_shards(a), missing_shards(b)
    results = _unreadable_where_lost(results, lost)
    pairs = pairs[: len(results)]
    done = {pair.key for pair in pairs}
    late = [
        NotCompared("tensor", pair.key, LATE, budget.reason)
        for pair in wanted
        if pair.key not in done
    ]
    # Of two adapters what they add counts; their factors only where that differs.
    deltas = _compare_deltas(a, b) if results else None
    if deltas is not None:
        results = deltas.judge(results)
    # What made pairs differ, and images of the worst.
    found: tuple[Finding, ...] = ()
    not_tried: list[str] = []
    if explain and not budget.has_time():
        not_tried.append(f"explanations of tensors that differ: {budget.reason}")
    elif explain:
        results, found, not_tried = _explain_rows(
            a, b, oracle, pairs, results, frozenset() if deltas is None else deltas.named, budget
        )
    results = _unreadable_where_packed(results, a, b)
    found = (*_second_layout_findings(a, b, results), *found) if explain else found
    if found:
        from aprfmt.compare.exchanged_names import with_renames

        found = with_renames(found, results, a, b)
    if deltas is not None:
        found = (*deltas.findings_of(results), *found)
    taken, other = "", ""
    if alignment.by_role and explain and not tensors and not late and "tensors" in only:
        taken, other = _identity_sentences(a, b, results)
    if deltas is not None and not any(one.certainty == "confirmed" for one in found):
        other = deltas.other
    if taken or other:  # what holds of single tensors does not say how one became the other
        found = _taken_findings(taken, len(results))
    pictures: tuple[DifferenceImage, ...] = ()
    if images:
        from aprfmt.measure.difference_image import difference_images as made

        pictures = made(pairs, results, images)
    # What one file states and contradicts, unlike the other: readers compute otherwise.
    contradicted: tuple[Finding, ...] = ()
    if explain and "tensors" in only and a.metadata.get("format") != b.metadata.get("format"):
        from aprfmt.causes.tensor.kernel_orders import torch_kernel_findings

        contradicted = tuple(torch_kernel_findings(a, b, pairs, results))
    if "hyperparameters" in only and alignment.by_role:
        contradicted += _contradiction_findings(a, b)
    fields: tuple[FieldDiff, ...] = ()
    if "hyperparameters" in only:
        fields = _differing_hyperparameters(a, b, alignment, results)
        fields += () if deltas is None else deltas.differing_fields()
    if fields and explain and (any(map(is_of_own_keys, fields)) or not _are_whole(a, b)):
        from aprfmt.causes.restored_keys import misfitting_key_findings

        contradicted += misfitting_key_findings(a, b, [row for row in fields if row.decisive])
    # Remarks about the files, which are no differences.
    notes = [f"{note.where}: {note.text}" for model in (a, b) for note in model.notes]
    notes += [
        f"{model.path}: {one.text}"
        for model in (a, b)
        for one in file_relations(model)
        if one.kind == "extension"
    ]
    notes += [*tokens.remarks, *not_tried]
    # Items that no comparison by meaning covers: they decide the verdict as well.
    kinds: set[Kind] = set()
    if not tensors:
        kinds = {kind for section in only for kind in _KINDS[section]}
    of_tensors: set[Kind] = {"tensor"} if "tensors" in only else set()
    ledgers = make_ledger(a, kinds | of_tensors), make_ledger(b, kinds | of_tensors)
    undone = [row for row in _uncompared_sections(a, b, alignment, tokens) if row.name in asked]
    undone += late
    if "tensors" in only and not tensors and not late:
        undone += _wrong_checksums(a, b) if budget.has_time() else _late_checksums(a, b, budget)
    if "tensors" in only and (a.plain_duplicates or b.plain_duplicates):
        from aprfmt.causes.tensor.second_layouts import unpaired_plain_tensors

        undone += unpaired_plain_tensors(a, b)
    if "hyperparameters" in only and alignment.by_role and not tensors:
        undone += _differing_settings(a, b)
    if "hyperparameters" in only and not alignment.by_role:
        undone += _unlike_architectures(a, b)
    if any(stored.parts for pair in pairs if pair.a is not None for stored in pair.a.stored):
        from aprfmt.measure.activation_scales import differing_input_scales

        undone += differing_input_scales(pairs)
    said = {(row.kind, row.name) for row in undone}
    unsaid = [
        row
        for row in list_not_compared(*ledgers, kinds)
        if (row.kind, row.name) not in said
        and not (row.kind == "file" and any(row.name in one.text for one in (*lost[0], *lost[1])))
    ]
    left = (*unsaid, *tokens.left, *undone)
    if deltas is not None:
        left = tuple(row for row in left if not deltas.covers(row.name))
    spoken = "tokenizer" in only
    outside, options = _tower_facts(a, b)
    return DiffReport(
        str(a.path),
        str(b.path),
        tuple(results),
        fields,
        tokens.rows,
        _differing_metadata(a, b, every="metadata" in asked) if "metadata" in only else (),
        (*alignment.notes, *notes),
        found,
        pictures,
        tuple(dict.fromkeys((*a.damage, *b.damage, *lost[0], *lost[1]))),
        template_diff(a, b) if spoken else (),
        differing_generation_keys(a, b) if spoken else (),
        _with_causes(alignment.relations, {"a": a, "b": b}),
        tokens.verdicts,
        asked,
        left,
        ledgers,
        _section_counts(a, b, alignment, only, tokens),
        {
            pair.key: _stored_names(pair, side)
            for pair, row in zip(pairs, results, strict=True)
            if row.explanation is not None and (side := pair.b or pair.a) is not None
        },
        b.metadata.get("general.file_type"),
        contradicted_values(b),
        _trained_part_causes(found, a, b),
        tuple(not_tried),
        contradicted,
        taken,
        other,
        _set_arguments(left, ledgers),
        input_scale_endings(a),
        left_encodings=_left_encodings(alignment.pairs, done) if found else {},
        outside_tower=outside,
        copy_options=options or _nameless_options(a),
        unwhole=tuple(
            str(model.path)
            for model, gone in zip((a, b), lost, strict=True)
            if model.damage or gone
        ),
    )


def _are_whole(*models: Model) -> bool:
    """Return whether every tensor that each model's configuration asks for is there in its shape.

    False where the architecture of a model is not known.
    """
    try:
        return all(model.resolution.coverage.is_whole for model in models)
    except ArchError:
        return False


def _left_encodings(
    pairs: Sequence[TensorPair], done: Collection[str]
) -> Mapping[str, tuple[str, str]]:
    """Return {key: (A's encoding, B's)} of B's matrices that were not compared; "" if A has none.

    `done` are the keys of those that were.
    """
    return {
        pair.key: ("" if pair.a is None else pair.a.encoding, pair.b.encoding)
        for pair in pairs
        if pair.key not in done and pair.b is not None and len(pair.b.shape) > 1
    }


def _contradiction_findings(a: Model, b: Model) -> "tuple[Finding, ...]":
    """Return the findings of flags that tensors contradict, and of contradictory packing files."""
    found: list[Finding] = []
    sides = ((a, b, "A"), (b, a, "B"))
    if any(next(contradicted_parts(model), None) for model in (a, b)):
        from aprfmt.causes.contradicted_flags import contradiction_findings, judged_contradictions

        for model, other, side in sides:
            changing, _ = judged_contradictions(model, other)
            found += contradiction_findings(changing, model, side)
    if any(packing_conflicts(model) for model in (a, b)):
        from aprfmt.causes.packing_files import packing_file_findings

        for model, other, side in sides:
            found += packing_file_findings(model, other, side)
    return tuple(found)


def _taken_findings(says: str, tensors: int) -> "tuple[Finding, ...]":
    """Return the finding that one model consists of parts of the other; () where `says` is "".

    `says` is its sentence, `tensors` the number of tensors of the smaller model.
    """
    if not says:
        return ()
    from aprfmt.compare.taken_parts import taken_finding

    return (taken_finding(says, tensors),)


def _trained_part_causes(found: "Sequence[Finding]", a: Model, b: Model) -> tuple[str, ...]:
    """Return the causes of a part of B that was trained, so that A's does not replace it.

    Each stands once, in the order of the findings; () without any.
    """
    if not found:
        return ()
    from aprfmt.causes.remedies import is_trained_part

    causes = dict.fromkeys(one.cause for one in found)
    return tuple(cause for cause in causes if is_trained_part(cause, a, b))


def _set_arguments(
    left: Sequence[NotCompared], ledgers: tuple[Ledger, Ledger]
) -> Mapping[tuple[str, str], str]:
    """Return {(kind, name): arguments of `set` that give B what A holds} for unequal items.

    `left` are the items that were not compared, `ledgers` those of A and of B.
    """
    if not any(row.state in DIFFERING for row in left):
        return {}
    from aprfmt.measure.item_repairs import item_arguments

    return item_arguments(left, *ledgers)


def _identity_sentences(a: Model, b: Model, rows: Sequence[TensorDiff]) -> tuple[str, str]:
    """Return (which layers of one model the other consists of, why they are different models).

    Channels of an MLP count as well as layers. The first sentence is "" if neither model consists
    of layers or channels of the other, the second if they are copies of one model or the first is
    not "".
    """
    if _are_of_equal_sizes(a, b) and any(row.verdict in EQUAL for row in rows):
        return "", ""
    from aprfmt.compare.other_models import other_model_sentence
    from aprfmt.compare.taken_parts import taken_parts_text

    taken = taken_parts_text(a, b) or taken_parts_text(b, a, ("B", "A"))
    return taken, "" if taken else other_model_sentence(a, b, rows)


def _are_of_equal_sizes(a: Model, b: Model) -> bool:
    """Return whether two models have equal sizes, so that none lacks layers or channels."""
    sizes = (*_SIZES, "n_experts")
    first, second = ({n: model.hyper[n] for n in sizes if n in model.hyper} for model in (a, b))
    return first == second


def _unreadable_where_lost(
    rows: Sequence[TensorDiff], lost: tuple[Sequence[Damage], Sequence[Damage]]
) -> list[TensorDiff]:
    """Return the rows, UNREADABLE instead of one-sided where the tensor's shard may be missing.

    `lost` are the missing shards of A and of B, whose tensors are not known.
    """
    causes = {
        f"ONLY_IN_{other}": shards[0].text
        for other, shards in zip("BA", lost, strict=True)
        if shards
    }
    return [
        replace(row, verdict="UNREADABLE", cause=causes[row.verdict])
        if row.verdict in causes
        else row
        for row in rows
    ]


def _unreadable_where_packed(rows: Sequence[TensorDiff], a: Model, b: Model) -> list[TensorDiff]:
    """Return the rows, UNREADABLE for weights that one side stores in codes that are not decoded.

    The rows of the codes, on that side only, become UNREADABLE too. Rows with an explanation stay,
    and so do all rows of a model whose packed weights lack codes or scales: that is a fault of the
    file.
    """
    causes: dict[tuple[str, str], str] = {}
    for model, mine, other in ((a, "ONLY_IN_A", "ONLY_IN_B"), (b, "ONLY_IN_B", "ONLY_IN_A")):
        packed = model.unread
        if packed is None or packed.lacks or model.style is None:
            continue
        keys = [row.key for row in rows if row.verdict == other]
        held = packed.roles_among(model.spec, model.style, model.hyper, keys)
        if held:
            names = [(mine, one.name) for one in packed.tensors]
            every = (*((other, key) for key in held), *names)
            causes |= dict.fromkeys(every, packed.why_not_compared)
    return [
        replace(row, verdict="UNREADABLE", cause=cause)
        if row.explanation is None and (cause := causes.get((row.verdict, row.key)))
        else row
        for row in rows
    ]


def _with_causes(
    relations: Sequence[SideRelation], sides: Mapping[str, Model]
) -> tuple[SideRelation, ...]:
    """Return the relations, each with the name of its cause filled in.

    `sides` is {"a": A, "b": B}.
    """
    if not relations:
        return ()
    from aprfmt.causes.hyperparameters import relation_cause

    return tuple(
        replace(one, cause=relation_cause(one.relation, sides[one.side])) for one in relations
    )


def _uncompared_sections(
    a: Model, b: Model, alignment: Alignment, tokens: "_TokenizerComparison"
) -> Iterator[NotCompared]:
    """Yield a NotCompared for each section but the tensors that cannot be compared.

    These are hyperparameters, tokenizer and metadata.
    """
    if not alignment.by_role:
        why = "the architecture of one is not known"
        yield NotCompared("config key", "hyperparameters", "unreadable", why)
    if tokens.verdicts is not None and tokens.verdicts.tokenizer == "not compared":
        yield NotCompared("tokenizer part", "tokenizer", "unreadable", "one could not be read")
    if a.format != b.format:
        why = f"A is {a.format}, B is {b.format}, and each format has its own keys"
        yield NotCompared("metadata key", "metadata", "unreadable", why)


def _wrong_checksums(a: Model, b: Model) -> list[NotCompared]:
    """Return one item, which names the side or sides whose stored checksum is wrong; [] for none.

    Where both are wrong it says whether the files' bytes are equal. A file with other damage is
    not checked again. Every byte is read, so remote files are left out.
    """
    if is_remote(a.path) or is_remote(b.path):
        return []
    wrong = [not side.source.damage and checksum_matches(side.source) is False for side in (a, b)]
    if not any(wrong):
        return []
    state: State = "only in A" if wrong[0] else "only in B"
    if all(wrong):
        files = list(zip(a.source.files, b.source.files, strict=False))
        alike = len(a.source.files) == len(b.source.files)
        alike = alike and all(same_content(x, y) for x, y in files)
        state = "equal" if alike else "unequal"
    why = "it was changed or damaged since it was written"
    return [NotCompared("file", WRONG_CHECKSUM, state, why)]


def _late_checksums(a: Model, b: Model, budget: Budget) -> list[NotCompared]:
    """Return one item that says that `budget` left no time for checksums.

    [] where no file has one, and for remote files.
    """
    if is_remote(a.path) or is_remote(b.path):
        return []  # of which none is made without a budget either
    if not any(has_checksum(side.source) for side in (a, b)):
        return []
    return [NotCompared("file", CHECKSUMS, LATE, budget.reason)]


def _unlike_architectures(a: Model, b: Model) -> list[NotCompared]:
    """Return the keys in which two models state different architectures, as NotCompared.

    It is for models whose architectures are not both known, so that no hyperparameter is compared.
    """
    from aprfmt.base.metadata_values import short_value

    sides: tuple[tuple[Kind, str, Mapping[str, Value], Mapping[str, Value]], ...] = (
        ("config key", "model_type", a.config or {}, b.config or {}),
        ("metadata key", "general.architecture", a.metadata, b.metadata),
    )
    return [
        NotCompared(
            kind,
            key,
            "unequal",
            f"{short_value(mine[key])} and {short_value(theirs[key])}, not both known",
        )
        for kind, key, mine, theirs in sides
        if key in mine and key in theirs and mine[key] != theirs[key]
    ]


def _differing_settings(a: Model, b: Model) -> Iterator[NotCompared]:
    """Yield keys that differ and that no forward pass depends on, but that other programs act on.

    These are the context length where both sides state one; a size that one side's config.json
    states and the other's does not, where other programs take a default; and a value that one
    config.json states twice, differently, so that programs differ in which they take.
    """
    alike = a.key_style == b.key_style
    of_a, of_b = _stated_length(a, alike), _stated_length(b, alike)
    if of_a is not None and of_b is not None and not same_value(of_a.value, of_b.value):
        key = of_b.key or of_a.key
        kind = "config key" if "config" in (of_a.origin, of_b.origin) else "metadata key"
        why = f"{CONTEXT_LENGTH}: {of_a.value} and {of_b.value}"
        if key:
            yield NotCompared(kind, key, "unequal", why)
    if not alike or a.config is None or b.config is None:
        return
    sides: tuple[tuple[State, Model, Model], ...] = (("only in A", a, b), ("only in B", b, a))
    for name, (state, model, other) in product(_SIZES, sides):
        if not (name in model.hyper and name in other.hyper):
            continue
        mine, theirs = model.hyper.of(name), other.hyper.of(name)
        contradicted = name in other.resolution.report.overruled  # stated too, and said there
        if mine.origin == "config" and theirs.origin == "shape" and not contradicted:
            why = f"{name}: read from the tensors here; other readers take a default"
            yield NotCompared("config key", mine.key, state, why)
    twice: dict[str, NotCompared] = {}
    for state, model, other in sides:
        for key, value in _values_stated_twice(model):
            stated = other.config or {}
            taken = model.hyper.of(key)
            why = f"{value}; {taken.key} is {taken.value}, and readers differ in what they take"
            if key not in stated:
                twice[key] = NotCompared("config key", key, state, why)
            elif not same_value(stated[key], value):
                twice[key] = NotCompared("config key", key, "unequal", why)
    yield from twice.values()


def _values_stated_twice(model: Model) -> Iterator[tuple[str, int | float]]:
    """Yield (key, number) of each top-level key of config.json that its rope object overrules."""
    config = model.config if model.key_style == "safetensors" else None  # others' is a copy
    for key, value in (config or {}).items():
        if key not in model.hyper or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        read = model.hyper.of(key)
        if read.origin == "config" and read.key in _ROPE_KEYS and read.value != value:
            yield key, value


def _stated_length(model: Model, default: bool) -> HyperParam | None:
    """Return the context length that a model's keys state.

    Where no key states it: the default that is used for it with `default`, else None.
    """
    native = model.resolution.native
    read = {} if native is None else native.read
    key = next((key for key, name in read.items() if name == CONTEXT_LENGTH), "")
    if key and model.metadata.get(key) is not None:
        return HyperParam(model.metadata[key], "metadata", key)
    found = model.hyper.of(CONTEXT_LENGTH) if CONTEXT_LENGTH in model.hyper else None
    return found if found is not None and (found.key or default) else None


def _stored_names(pair: TensorPair, side: "View") -> tuple[str, ...]:
    """Return the file's names of a tensor; of a stack that both have, of the parts that differ.

    `side` is the pair's tensor of B, or A's if B lacks it.
    """
    if len(side.names) < 2 or pair.a is None or pair.b is None:
        return side.names
    from aprfmt.measure.differing_units import differing_names  # most files have no such stack

    return differing_names(pair.b, pair.a)


def _section_counts(
    a: Model, b: Model, alignment: Alignment, only: Collection[str], tokens: "_TokenizerComparison"
) -> Mapping[str, int]:
    """Return {section: number of items compared} for hyperparameters, tokenizers and metadata.

    `only` are the sections asked for. Two tokenizers are 2 items.
    """
    found = {}
    if "hyperparameters" in only and alignment.by_role:
        found["hyperparameters"] = len(dict.fromkeys((*a.hyper, *b.hyper)))
    if tokens.both:
        found["tokenizers"] = 2
    if "metadata" in only and a.format == b.format:
        found[METADATA_KEYS] = len(dict.fromkeys((*a.metadata, *b.metadata)))
    return found


def _explain_rows(
    a: Model,
    b: Model,
    oracle: "RequantizationOracle | None",
    pairs: Sequence[TensorPair],
    results: list[TensorDiff],
    named: AbstractSet[str] = frozenset(),
    budget: Budget | None = None,
) -> "tuple[list[TensorDiff], tuple[Finding, ...], list[str]]":
    """Return (rows with explanations, findings that rows share, sentences on what was not tried).

    `results` are the rows of `pairs`, in the same order. `named` are keys whose difference is
    already explained: they are left alone. `budget` ends the search.
    """
    asked = [(pair, row) for pair, row in zip(pairs, results, strict=True) if row.key not in named]
    if not any(row.verdict in EXPLAINED for _, row in asked):
        return results, (), []
    lost: Mapping[str, Finding] = {}
    if a.lost_parts or b.lost_parts:  # of codes that count for nothing known no cause is asked
        from aprfmt.causes.tensor.packed_parts import explain_lost_parts

        lost = explain_lost_parts(a, b, pairs, results)
        asked = [(pair, row) for pair, row in asked if row.key not in lost]
    from aprfmt.causes.tensor.explanation import explain_pairs, not_tried_lines
    from aprfmt.causes.tensor.summary import summarize_explanations

    base = None if oracle is None else oracle.base
    left, shown = [pair for pair, _ in asked], [row for _, row in asked]
    known, not_tried = explain_pairs(a, b, base, left, shown, budget)
    known += [replace(row, explanation=lost[row.key]) for row in results if row.key in lost]
    by_key = {row.key: row for row in known}
    rows = [by_key.get(row.key, row) for row in results]
    return rows, summarize_explanations(known), not_tried_lines(not_tried)


def _second_layout_findings(
    a: Model, b: Model, results: Sequence[TensorDiff]
) -> "tuple[Finding, ...]":
    """Return the findings of parameters that one side alone stores in two layouts."""
    alone = {row.key for row in results if row.verdict in ("ONLY_IN_A", "ONLY_IN_B")}
    if not (alone or a.plain_duplicates or b.plain_duplicates):
        return ()
    from aprfmt.causes.tensor.second_layouts import second_layout_findings

    return tuple(second_layout_findings(a, b, alone))


def _compare_deltas(a: Model, b: Model) -> "DeltaComparison | None":
    """Return two LoRA adapters compared by what they add; None for anything else."""
    if any(side.kind is None or side.kind.name != "adapter" for side in (a, b)):
        return None
    from aprfmt.causes.tensor.adapter_deltas import compare_deltas

    return compare_deltas(a, b)


def _select_pairs(
    a: Model, b: Model, alignment: Alignment, tensors: Sequence[str]
) -> list[TensorPair]:
    """Return the pairs whose names match the patterns, or all without patterns.

    UsageError where a pattern matches none.
    """
    pairs = list(alignment.pairs)
    if not tensors:
        return pairs
    from aprfmt.model.patterns import matching_indices

    of_a, of_b = spellings_by_role(a), spellings_by_role(b)
    names = [(*pair.spellings, *of_a.get(pair.key, ()), *of_b.get(pair.key, ())) for pair in pairs]
    return [pairs[i] for i in matching_indices(names, tensors, f"{a.path} and {b.path}")]


def _has_imatrix(metadata: Mapping[str, Value]) -> bool:
    """Return whether the metadata record an importance matrix."""
    return any(key.startswith("quantize.imatrix.") for key in metadata)


def _differing_hyperparameters(
    a: Model, b: Model, alignment: Alignment, results: Sequence[TensorDiff]
) -> tuple[FieldDiff, ...]:
    """Return the differing hyperparameters; () where an architecture is not known.

    Every row but the context length changes the forward pass and so decides the verdict. One that
    only the presence of tensors shows is left out where `results` finds these tensors equal.
    """
    if not alignment.by_role:
        return ()
    rows = []
    names = stated_architecture(a), stated_architecture(b)
    if names[0] != names[1]:
        of_a, of_b = (name or "none stated" for name in names)
        rows.append(FieldDiff(ARCHITECTURE, of_a, of_b, decisive=True))
    for name in dict.fromkeys((*a.hyper, *b.hyper)):
        mine = a.hyper.of(name) if name in a.hyper else None
        other = b.hyper.of(name) if name in b.hyper else None
        left = None if mine is None else mine.value
        right = None if other is None else other.value
        if same_value(left, right):
            continue
        if name == "rope_scaling" and left and right and have_equal_divisors(a.hyper, b.hyper):
            continue
        settled = _is_settled(name, results)
        if (settled and _stated_alike(name, a, b)) or _follows_from_lost_head(name, a, b, results):
            continue
        rows.append(
            FieldDiff(
                name,
                left,
                right,
                "" if mine is None else f"{mine.origin} {_own_keys(mine, a, b)}".strip(),
                "" if other is None else f"{other.origin} {_own_keys(other, b, a)}".strip(),
                decisive=name != CONTEXT_LENGTH and not settled,
            )
        )
    return (*rows, *_misleading_rows(a, b, {row.name for row in rows}))


def _own_keys(one: HyperParam, model: Model, other: Model) -> str:
    """Return a hyperparameter's key in config.json; for an object, its inner keys that differ.

    `model` is the model that stated it, `other` the one compared with. The inner keys are joined by
    commas, the first few only, with the path of their object.
    """
    above, dot, _ = one.key.rpartition(".")
    if not dot or not isinstance(one.value, Mapping) or one.origin != "config":
        return one.key

    from aprfmt.base.inner_keys import differing_inner_keys
    from aprfmt.model.config_paths import value_at_path

    mine, theirs = (value_at_path(side.config, tuple(above.split("."))) for side in (model, other))
    if not (isinstance(mine, Mapping) and isinstance(theirs, Mapping)):
        return one.key
    found = [f"{above}.{key.path}" for key in differing_inner_keys(mine, theirs) if key.in_a]
    return join_first(found, PLACES) if found else one.key


def _misleading_rows(a: Model, b: Model, known: AbstractSet[str]) -> Iterator[FieldDiff]:
    """Yield the keys that differ and by which other programs misread a side.

    `known` are the hyperparameters already listed as differing. A key of config.json decides the
    verdict only against another config.json, since a conversion writes what the tensors show; one
    that demands missing tensors always decides it.
    """
    of_a, of_b = misleading_keys(a), misleading_keys(b)
    if of_a or of_b:
        from aprfmt.causes.hyperparameters import is_read_as_flag, lacks_tensors_of
    for name in dict.fromkeys((*of_a, *of_b)):
        mine, other = of_a.get(name), of_b.get(name)
        one = mine or other
        assert one is not None
        if name in known or (mine and other and same_value(mine.says, other.says)):
            continue
        if is_read_as_flag(one.style, name, one.says):
            continue  # `contradicted` has it
        decisive = any(
            each.style != "hf" or a.key_style == b.key_style or lacks_tensors_of(model, name)
            for model, each in ((a, mine), (b, other))
            if each is not None
        )
        left, right = (
            (model.hyper[name], READ_HERE)
            if each is None
            else (each.says, NOT_THERE if each.says is None else ITS_KEY)
            for model, each in ((a, mine), (b, other))
        )
        yield FieldDiff(one.key, left[0], right[0], left[1], right[1], decisive=decisive)


def _is_settled(name: str, results: Sequence[TensorDiff]) -> bool:
    """Return whether the tensors that show hyperparameter `name` were compared and are all equal.

    A head that is a copy of the embedding counts as the other side's tied head. True too where no
    compared tensor shows the hyperparameter, and False for one that tensors never show.
    """
    from aprfmt.causes.hyperparameters import SHOWN_BY

    shown = SHOWN_BY.get(name, ())
    rows = [row for row in results if row.key in shown or row.key.partition(".")[2] in shown]
    return bool(shown) and all(row.verdict in EQUAL for row in rows)


def _follows_from_lost_head(name: str, a: Model, b: Model, results: Sequence[TensorDiff]) -> bool:
    """Return whether a hyperparameter differs only since one side lost its output head.

    Its configuration demands the head, and `results` have the head on the other side alone.
    """
    from aprfmt.causes.hyperparameters import SHOWN_BY

    sides = {"ONLY_IN_A": b, "ONLY_IN_B": a}
    return name == "tied_embeddings" and any(
        row.key in SHOWN_BY[name]
        and row.verdict in sides
        and lacks_demanded_head(sides[row.verdict])
        for row in results
    )


def _stated_alike(name: str, a: Model, b: Model) -> bool:
    """Return whether both files' keys, or the defaults without them, give the same value."""
    stated = [model.resolution.report.demanded.get(name) for model in (a, b)]
    first, second = stated
    return first is not None and second is not None and same_value(first.value, second.value)


@dataclass(frozen=True)
class _TokenizerComparison:
    """The comparison of two tokenizers; `both`: both sides have one that could be compared."""

    rows: tuple[FieldDiff, ...] = ()
    remarks: tuple[str, ...] = ()
    verdicts: SideVerdicts | None = None
    left: tuple[NotCompared, ...] = ()
    both: bool = False


def _compare_tokenizers(a: Model, b: Model) -> _TokenizerComparison:
    """Return the comparison of two models' tokenizers: what differs, and what was not compared."""
    report = compare_equal_tokenizers(a, b)
    if report is None:
        from aprfmt.causes.tokenizer.comparison import compare_tokens

        report = compare_tokens(a, b)
    verdicts = compare_texts(a, b, report)
    lacking = uncompared_tokenizers(a, b, report)
    if len(report.carried) == 1:  # ids cannot be compared
        said = ("present", "absent") if report.carried == "A" else ("absent", "present")
        absent = FieldDiff("tokenizer", *said, item=TOKENIZER_ITEM)
        return _TokenizerComparison((absent,), (), verdicts, lacking)
    rows = []
    for one in report.findings:
        item = GENERATION_ITEM if one.name == "generation_config" else ""
        where = one.where[-1], one.where[0]
        if isinstance(one.a, Mapping) and isinstance(one.b, Mapping):
            where = _stated_place(one.where, one.a), _stated_place(one.where, one.b)
        rows.append(FieldDiff(one.name, one.a, one.b, *where, decisive=True, item=item))
        if one.example:
            shown = one.example[0], one.example[-1]
            rows.append(FieldDiff(f"{one.name}: shown by", *shown, item=item))
    for one in report.notes:
        note = SpellingDiff if a.key_style != b.key_style else FieldDiff
        rows.append(note(one.name, one.a, one.b, one.where[-1], one.where[0]))
    if not report.carried:
        return _TokenizerComparison(tuple(rows), report.remarks, verdicts, lacking)
    return _TokenizerComparison(
        tuple(rows), (*report.remarks, *report.not_checked), verdicts, lacking, bool(report.checked)
    )


def _stated_place(places: Sequence[str], held: Mapping[str, Value]) -> str:
    """Return where one side states the differing settings, as one text; "" if it states none.

    `places` are those of all differing settings, such as "generation_config.json: eos_token_id" or
    a GGUF key. `held` is {setting: value} of this side.
    """
    names = {GENERATION_KEYS[name].gguf if name in GENERATION_KEYS else name for name in held}
    own = [place for place in places if place.rpartition(": ")[2] in {*held, *names}]
    return join_first([*own[:1], *(place.rpartition(": ")[2] for place in own[1:])], PLACES)


def _differing_metadata(a: Model, b: Model, *, every: bool) -> tuple[FieldDiff, ...]:
    """Return the differing metadata keys of two files of one format; () for two formats.

    Keys that every file has a different value of, such as dates, are left out unless `every`.
    Listed keys decide the verdict only where metadata was asked for.
    """
    if a.format != b.format:
        return ()

    rows = []
    for key in dict.fromkeys((*a.metadata, *b.metadata)):
        if key.startswith(_OWN_KEYS) and not every:
            continue
        left, right = a.metadata.get(key), b.metadata.get(key)
        if not _metadata_equal(left, right):
            rows.append((key, left, right))
    if not rows:
        return ()
    from aprfmt.base.metadata_values import short_value

    return tuple(
        FieldDiff(key, short_value(left), short_value(right), item=f"metadata key {key}")
        for key, left, right in rows
    )


def _metadata_equal(left: Value, right: Value) -> bool:
    """Return whether two metadata values are equal; arrays of one type are compared as stored."""
    if type(left) is type(right):
        return bool(left == right)
    return bool(hashable_value(left) == hashable_value(right))


def hashable_value(value: Value) -> Value:
    """Return a metadata value with sequences as tuples, to compare by value."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return tuple(value)
