"""`diagnose`: where two models, traces or runs first differ, and why.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from aprfmt.arch import check_arch
from aprfmt.base.budget import Budget
from aprfmt.compare import open_saved_state, reopen_as_tower
from aprfmt.diagnosis.diagnosis_order import DiagnosisRun
from aprfmt.diagnosis.progress import ProgressReporter
from aprfmt.diagnosis.records import Diagnosis, Evidence, PointRow
from aprfmt.diagnosis.sides import Side, open_side, open_tolerating_damage
from aprfmt.diagnosis.stored_names import compare_by_name, damage_texts
from aprfmt.errors import AprfmtError, ArchError, CodecError, FormatError, UsageError
from aprfmt.inference.backends.blas import limit_blas_threads
from aprfmt.measure.findings import Finding
from aprfmt.model import Model, open_model
from aprfmt.model.completeness import ANY
from aprfmt.model.packing import packing_config
from aprfmt.tensors.companions import quantization_section

__all__ = ["Diagnosis", "Evidence", "Finding", "PointRow", "diagnose"]


def diagnose(
    a: str,
    b: str,
    *,
    model: str | None = None,
    adapter: str | None = None,
    ids: Sequence[int] | None = None,
    prompt: str | None = None,
    arch: str | None = None,
    memory: int | None = None,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Return where two models, runs or traces first differ, and why.

    Each of `a` and `b` is a model in any format, `MODEL@RUN`, or a saved trace; `model` is the
    one a trace ran on. `adapter` is a LoRA adapter that the run of a trace served on the model: it
    is merged into the model first. Both sides are run on `ids` or on the text `prompt`; without
    them aprfmt chooses ids. `memory` is the bytes for decoded weights (default: 1.25 GiB at most
    for two models). What `budget` has no time or memory for is named as not compared: tensors in
    the file's order, then passes. `progress` is called with (stages done, all stages), and
    `notice` with a text before passes that take minutes. Raises UsageError if a path does not
    exist, FormatError for a damaged file, ArchError for an unknown `arch`.
    """
    check_arch(arch)  # two saved traces open no model
    if ids is not None and prompt is not None:
        raise UsageError("give one of ids and prompt")

    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # damaged weights may overflow
        try:
            first, second = open_side("A", a, stack, arch), open_side("B", b, stack, arch)
            if first.model is not None and first.kind == "model" and second.kind != "run":
                state = _open_state(second, first.model)
                if state is not None:  # it has no configuration and no tokenizer of its own
                    stack.enter_context(state)
                    return compare_by_name((a, b), first.model, state, only=("tensors",))
            if arch is None and first.model is not None and second.model is not None:
                first.model, second.model = reopen_as_tower(
                    first.model, second.model, stack, open_tolerating_damage
                )
            renamed = _read_renamed(first, second, stack)
        except CodecError as error:
            undecoded = _open_undecoded(a, b, arch, stack)
            renamed = None if undecoded is None else _read_renamed(*undecoded, stack)
            if undecoded is None or renamed is None:
                fault = _diagnose_packing(a, b, arch, stack, error)
                if fault is None:
                    raise
                return fault
            first, second = undecoded
        if renamed is not None:
            second = replace(second, model=renamed[0])
        reference = None
        if model is not None:
            reference = stack.enter_context(open_model(model, arch=arch, allow_missing=ANY))
            reference.cache_remote_reads()
            for side in (first, second):
                if side.kind == "trace":
                    side.model = reference
        if adapter is not None:
            _merge_adapter(first, second, Path(adapter), stack)
            reference = reference and first.model
        stack.enter_context(limit_blas_threads(1))
        tokens = None if ids is None else tuple(int(i) for i in ids)
        if prompt is not None:
            opened = first.model or second.model
            if opened is None:
                raise UsageError("a prompt needs a tokenizer; give a model, or ids")
            tokens = tuple(int(i) for i in opened.tokenizer.encode(prompt))
        if tokens == ():
            raise UsageError("no token ids: --ids or --prompt is empty; leave it out to have some")
        reporter = ProgressReporter(progress, notice, budget or Budget())
        diagnosing = DiagnosisRun(first, second, stack, reference, tokens, memory, reporter)
        diagnosing.relation = None if renamed is None else renamed[1]
        try:
            if any(side.model is not None and damage_texts(side.model) for side in (first, second)):
                return _compare_damaged(a, b, first, second)
            return diagnosing.run()
        except ArchError:
            if (
                first.model is None
                or second.model is None
                or {first.kind, second.kind} != {"model"}
            ):
                raise
            return compare_by_name((a, b), first.model, second.model)


def _merge_adapter(first: Side, second: Side, adapter: Path, stack: ExitStack) -> None:
    """Merge an adapter into the one model of the two sides, which runs of traces served with it.

    Raises UsageError unless one side is a saved trace and there is one model, and what the merge
    raises.
    """
    from aprfmt.diagnosis.served_adapters import merge_served_adapter

    sides = [side for side in (first, second) if side.model is not None]
    kinds = {first.kind, second.kind}
    if not sides or "trace" not in kinds or "run" in kinds:
        raise UsageError(
            "--adapter is for a model and a saved trace of it; `diff BASE MERGED --adapter` judges "
            "a merged model"
        )
    model = sides[0].model
    assert model is not None
    merged, served = merge_served_adapter(model, adapter, stack)
    for side in sides:
        side.model, side.adapter = merged, served


def _open_state(side: Side, model: Model) -> Model | None:
    """Return the engine's saved weights at a side's path as a Model, by the names of `model`.

    None if there are none. One file of weights per rank looks like the dumps of a pass: it counts
    as weights if it has more than half of the model's weights. The scales and other parts of a
    packed weight do not count: the state has only what they were decoded to.
    """
    if side.kind != "trace":
        return open_saved_state(side.path, model)
    try:
        state = open_saved_state(side.path, model)
    except (AprfmtError, OSError):
        return None  # a trace
    if state is None:
        return None
    if 2 * len(state.keys() & model.keys()) > len(model):
        return state
    state.close()
    return None


def _open_undecoded(a: str, b: str, arch: str | None, stack: ExitStack) -> tuple[Side, Side] | None:
    """Return (A, B) with B opened although its packed weights do not decode; None if it cannot be.

    `stack` closes the models.
    """
    try:
        first = open_side("A", a, stack, arch)
        model = stack.enter_context(open_model(b, arch=arch, allow_missing=ANY, damaged=True))
    except AprfmtError:
        return None
    return first, Side("B", b, "model", Path(b), model)


def _read_renamed(first: Side, second: Side, stack: ExitStack) -> tuple[Model, Finding] | None:
    """Return (B with tensors of its packed weights renamed so that it reads, the finding), or None.

    None unless A and B are models, and where B can be read without renaming. `stack` closes B.
    """
    if first.model is None or second.model is None or second.kind != "model":
        return None
    try:
        if quantization_section(packing_config(second.model) or {}) is None:
            return None
        from aprfmt.diagnosis.renamed_parts import read_with_renamed_parts

        found = read_with_renamed_parts(first.model, second.model, "B")
    except ArchError:
        return None  # said where the two are compared by their names
    if found is not None:
        stack.enter_context(found[0])
    return found


def _compare_damaged(a: str, b: str, first: Side, second: Side) -> Diagnosis:
    """Return the diagnosis by the readable tensors of two models, where a file of one is damaged.

    Raises FormatError with what is damaged where A or B is a trace or run.
    """
    if first.model is None or second.model is None or {first.kind, second.kind} != {"model"}:
        for side in (first, second):
            if side.model is not None and damage_texts(side.model):
                raise FormatError("; ".join(damage_texts(side.model)))
    assert first.model is not None and second.model is not None
    return compare_by_name((a, b), first.model, second.model)


def _diagnose_packing(
    a: str, b: str, arch: str | None, stack: ExitStack, error: CodecError
) -> Diagnosis | None:
    """Return the diagnosis of a model that does not open because of its packed weights, or None.

    Where the fault in these weights is not found, all other tensors are compared by stored names.
    None where packed weights are not the reason. `error` is why the model did not open.
    """
    try:
        first, second = (
            stack.enter_context(open_model(text, arch=arch, allow_missing=ANY, damaged=True))
            for text in (a, b)
        )
    except AprfmtError:
        return None
    from aprfmt.diagnosis.packing import examine_packed
    from aprfmt.diagnosis.packing_keys import repair_packing_command

    for good, bad, label in ((first, second, "B"), (second, first, "A")):
        fault = None if good.damage else examine_packed(good, bad, label)
        if fault is not None:
            found = [
                replace(one, next=repair_packing_command(good, bad, one) if label == "B" else "")
                for one in fault.findings
            ]
            return Diagnosis(
                a,
                b,
                tuple(found),
                (Evidence("tensor", str(error)), *fault.evidence),
                ("tensors: packed weights that do not decode",),
                (
                    f"{label} does not open, so nothing else",
                    *(f"{name}: what is wrong with it" for name in fault.left),
                ),
            )
    return compare_by_name((a, b), first, second) if first.damage or second.damage else None
