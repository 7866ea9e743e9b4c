"""Attestation that a quantized model derives from its base, by making every tensor again.

`recipes` finds how a file was made, `rederive` makes its tensors again and compares their bytes,
`statement` writes the result as an in-toto statement and compares a later one with it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.attestation.recipes import Recipe, find_recipes
from aprfmt.attestation.rederive import COPIED, STATES, TensorAttestation, rederive
from aprfmt.attestation.statement import make_statement, statement_faults
from aprfmt.base.budget import Budget
from aprfmt.compare import diff_models
from aprfmt.conversion.outputs import PLAIN_FLOATS
from aprfmt.errors import UsageError
from aprfmt.measure.records import FieldDiff
from aprfmt.model import Model, open_model
from aprfmt.model.ledger import LATE, Kind, NotCompared, list_not_compared, make_ledger
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce
from aprfmt.quantizing.imatrix import read_imatrix

if TYPE_CHECKING:
    from aprfmt.quantizing.imatrix import ImportanceMatrix

__all__ = ["Attestation", "TensorAttestation", "attest"]

WORDS = VerdictWords("derived", "not derived")
_SECTIONS = ("hyperparameters", "tokenizer")
_FILES: set[Kind] = {"file", "index entry"}


@dataclass(frozen=True)
class Attestation:
    """Whether a model derives from a base, for each tensor and for hyperparameters and tokenizer.

    `fields` are the hyperparameters and the parts of the tokenizer that differ and count. `faults`
    are sentences about what a statement that was checked says otherwise. `statement` is the in-toto
    statement of the result.
    """

    model: str
    base: str
    recipe: Recipe
    tensors: tuple[TensorAttestation, ...]
    fields: tuple[FieldDiff, ...] = ()
    left: tuple[NotCompared, ...] = ()
    checked: str | None = None
    faults: tuple[str, ...] = ()
    statement: Mapping[str, Any] = field(default_factory=dict, repr=False)
    accept: tuple[str, ...] = ()  # unread:PATTERN of what was not tried or compared

    @property
    def counts(self) -> Mapping[str, int]:
        """{state: number of tensors}, with every state."""
        return {state: sum(row.state == state for row in self.tensors) for state in STATES}

    @property
    def pronounced(self) -> Pronounced:
        """The verdict over tensors, fields, what was not compared, and the checked statement."""
        counts = self.counts
        open_rows = [
            NotCompared(
                "tensor", row.key, LATE if row.state == "not reached" else "unreadable", row.why
            )
            for row in self.tensors
            if row.state in ("not tried", "not reached")
        ]
        said = [f"{count} {state}" for state, count in counts.items() if count]
        if self.fields:
            said.append(f"{len(self.fields)} fields differ")
        if self.faults:
            said.append(f"the statement says otherwise in {len(self.faults)} places")
        tried = len(self.tensors) - len(open_rows)
        return pronounce(
            WORDS,
            Compared(
                bool(counts["not reproduced"] or self.fields or self.faults),
                {"tensors": (tried, len(self.tensors))},
                (*open_rows, *self.left),
                ", ".join(said),
            ),
            self.accept,
        )

    @property
    def remark(self) -> str:
        """A sentence on tensors other than plain floats that the base has as they are; "" if none.

        Their bytes were compared, and nothing was quantized to get them.
        """
        rows = [row for row in self.tensors if row.encoding not in PLAIN_FLOATS]
        copied = sum(row.how == COPIED for row in rows)
        if not copied:
            return ""
        whose = "the base is the model itself" if self.model == self.base else "the base has them"
        return (
            f"{copied} quantized or packed tensors are the base's own bytes ({whose}): how they "
            "were quantized was not tried; name the model from before quantization"
        )

    @property
    def exit_code(self) -> int:
        """0 where all was reproduced, 1 where something was not, 2 where that is not known."""
        return self.pronounced.exit

    def to_json(self) -> dict[str, Any]:
        """Return the verdict and all rows as the JSON object of `--json`."""
        found = self.pronounced
        return {
            "model": self.model,
            "base": self.base,
            "verdict": found.word,
            "says": found.says,
            "recipe": self.recipe.to_json(),
            "counts": dict(self.counts),
            "tensors": [asdict(row) for row in self.tensors],
            "fields": [asdict(row) for row in self.fields],
            "remark": self.remark or None,
            "not_compared": [asdict(row) for row in found.not_compared],
            "checked": self.checked,
            "faults": list(self.faults),
            **found.to_json(),
        }


def attest(
    quantized: Path | str,
    base: Path | str,
    *,
    scheme: str | None = None,
    imatrix: Path | str | None = None,
    drop: Sequence[str] = (),
    arch: str | None = None,
    check: Mapping[str, Any] | None = None,
    checked: str | None = None,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Attestation:
    """Return an Attestation: whether making `quantized` again from `base` gives its bytes.

    `scheme` is the type that it was quantized as; None takes it from the file's own record or its
    tensors. `imatrix` is the importance matrix that was used. `drop` are patterns of tensors of the
    base that it leaves out. `check` is a statement of an earlier run, and `checked` its name: the
    result is compared with it. Weights that `budget` leaves are named as not reached; the
    attestation has no statement then. Raises FormatError for files that cannot be read, UsageError
    for another importance matrix than the file names, ConversionError where the base cannot be
    written as such a file at all.
    """
    if budget is not None and check is not None:
        raise UsageError("a statement is of the whole model; leave the budget out")
    matrix = None if imatrix is None else read_imatrix(Path(imatrix))
    with ExitStack() as opened:
        source, made = (
            opened.enter_context(open_model(path, arch=arch)) for path in (base, quantized)
        )
        return _attest_models(source, made, scheme, matrix, drop, check, checked, budget, progress)


def _attest_models(
    base: Model,
    quantized: Model,
    scheme: str | None,
    matrix: "ImportanceMatrix | None",
    drop: Sequence[str],
    check: Mapping[str, Any] | None,
    checked: str | None,
    budget: Budget | None,
    progress: Callable[[int, int], None] | None,
) -> Attestation:
    """Return the attestation of the open model `quantized` against the open `base`.

    `scheme` is the type that it was quantized as, None for the recorded one; `matrix` is the
    importance matrix that was used. `drop` are patterns of tensors of the base that it leaves out.
    The result is compared with `check`, the statement of an earlier run with the name `checked`.
    Weights that `budget` leaves are named as not reached.
    """
    for model in (base, quantized):
        # What is fetched is read for the tensors, and again for the digests.
        model.cache_remote_reads()
    recipes = find_recipes(base, quantized, scheme=scheme, imatrix=matrix, drop=drop)
    rows = tuple(rederive(recipes, quantized, progress, budget))
    # Of fields that differ only those count that change what the model computes.
    report = replace(diff_models(base, quantized, only=_SECTIONS, budget=budget), asked=())
    fields = [row for row in (*report.hyperparameters, *report.tokenizer) if row.decisive]
    files = list_not_compared(make_ledger(base, _FILES), make_ledger(quantized, _FILES), _FILES)
    found = Attestation(
        str(quantized.path), str(base.path), recipes[0], rows, tuple(fields),
        (*files, *report.not_compared),
    )  # fmt: skip
    if budget is not None:  # a statement has digests of every file and tensor
        return replace(found, checked=checked)
    statement = make_statement(base, quantized, found.to_json())
    faults = () if check is None else tuple(statement_faults(check, statement))
    return replace(found, statement=statement, checked=checked, faults=faults)
