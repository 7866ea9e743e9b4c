"""The check of a file against the model it was made of."""

from typing import TYPE_CHECKING

from aprfmt.arch.value_checks import same_value
from aprfmt.base.metadata_values import short_value
from aprfmt.causes.tokenizer.comparison import compare_tokens
from aprfmt.checks.records import CheckFinding, NotRun, Result
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.checks.context import CheckContext
    from aprfmt.model import Model

_STATED = ("config", "metadata")
_UNUSED = ("context_length", "vocab_size")  # the tables have as many rows as they have
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def check_accounted(ctx: "CheckContext") -> Result:
    """Return a Result with a failure for each tensor, text or key of the source that is lost.

    One is lost if it is neither copied nor transformed, and the file does not record it as left
    out. Raises NotRun without a source.
    """
    from aprfmt.conversion.accounting import account_for_source, recorded_omissions

    if ctx.source is None:
        raise NotRun("no source was given (--against SRC)")
    found = account_for_source(ctx.model, ctx.source, recorded_omissions(ctx.model))
    findings = [
        CheckFinding(
            f"{ctx.where}: {entry.name}",
            f"{entry.kind} of the source: {entry.how}",
            "everything of the source, or a record of the flag that left it out",
            "convert the source again",
        )
        for entry in found.lost
        if entry.kind != "hyperparameter"  # a separate row
    ]
    dropped = [entry.name for entry in found.entries if entry.fate == "dropped"]
    return Result(found.says, findings, details={"dropped": dropped})


def check_settings(ctx: "CheckContext") -> Result:
    """Return a Result with a failure for each setting that differs from the source's.

    Settings are the hyperparameters that either model states, the tokenizer, the chat template, and
    the ids that end a generation. What the file records as left out is not compared. Raises NotRun
    without a source, or where nothing of it could be compared; the result names what could not.
    """
    from aprfmt.conversion.accounting import recorded_omissions

    if ctx.source is None:
        raise NotRun("no source was given (--against SRC)")
    excused, source, model = recorded_omissions(ctx.model), ctx.source, ctx.model
    findings: list[CheckFinding] = []
    compared: list[str] = []
    left: list[str] = []
    # Hyperparameters that change what is computed.
    try:
        names = _comparable_names(source, model)
        compared.append(f"{len(names)} hyperparameters")
        for name in names if not excused("config.json") else ():
            if not same_value(source.hyper[name], model.hyper[name]):
                findings.append(
                    CheckFinding(
                        f"{ctx.where}: {_stated_key(model, name)}",
                        f"{short_value(model.hyper[name])}, in the source "
                        f"{short_value(source.hyper[name])}",
                        "what the source says",
                        f"aprfmt diagnose {source.path} {model.path} gives the command",
                    )
                )
    except ArchError as error:
        left.append(f"hyperparameters ({error})")
    # The tokenizer with all that belongs to it.
    report = compare_tokens(source, model)
    lacking = report.carried != "AB"
    if report.checked and not lacking:
        compared.append("tokenizer, chat template, stops")
    left += [] if lacking else report.not_checked
    for row in report.findings if not any(map(excused, TOKENIZER_FILES)) else ():
        shown = f", first shown by {row.example[0]} in the source" if row.example else ""
        findings.append(
            CheckFinding(
                f"{ctx.where}: {row.where[0] if row.where else 'tokenizer'}",
                f"{row.cause}: {row.says}{shown}",
                "what the source says",
                f"aprfmt diagnose {source.path} {model.path} gives the command",
            )
        )
    more = f"; not compared: {'; '.join(left)}" if left else ""
    if not compared:
        raise NotRun(f"nothing to compare{more}", findings)
    return Result(f"{', '.join(compared)} as in the source{more}", findings)


def _comparable_names(source: "Model", model: "Model") -> list[str]:
    """Return the names of hyperparameters that both models have and a key of either states.

    Those whose value is read off the tensors of either, and those that no pass uses, are left out.
    [] for models of two architectures.
    """
    if source.spec.name != model.spec.name:
        return []
    return [
        name
        for name in source.hyper
        if name in model.hyper
        and name not in _UNUSED
        and any(one.hyper.of(name).origin in _STATED for one in (source, model))
        and not any(one.hyper.of(name).origin in ("tensor", "shape") for one in (source, model))
    ]


def _stated_key(model: "Model", name: str) -> str:
    """Return the file's key that gives a hyperparameter, or its name where no key does."""
    return model.hyper.of(name).key or name
