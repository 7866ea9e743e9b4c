"""What all checks of one model share: the open file, and the one pass over its values.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aprfmt.arch.draft_head import stored_groups
from aprfmt.arch.spec import ArchSpec
from aprfmt.checks.file.stored_vocabulary import StoredVocabulary, read_vocabulary
from aprfmt.checks.file.value_pass import Progress, TensorScan, scan_values
from aprfmt.checks.records import NotRun
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.model import Model
from aprfmt.model.ledger import Item, Ledger, NotCompared, make_ledger
from aprfmt.model.resolve import Resolution, find_spec
from aprfmt.model.verdict import acceptance_predicate
from aprfmt.tokenizer.carriers import has_tokenizer
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer, read_tokenizer_parts

if TYPE_CHECKING:
    from aprfmt.model.config_paths import Changes


@dataclass
class CheckContext:
    """One model to be checked, and what its checks share; costly ones are made at first use."""

    model: Model
    arch: str | None = None
    progress: Progress | None = None
    source: "Model | None" = None  # what the model was made of, where that was given
    accept: Collection[str] = ()  # `unread:PATTERN`s: items that no warning is given for
    shared: dict[str, Any] = field(default_factory=dict, repr=False)  # what checks share, by name
    running: str = ""  # the row that runs
    compared: set[str] = field(default_factory=set)  # tensors of no role that a check compared
    _reported: dict[str, str] = field(default_factory=dict, repr=False)  # {fault: the row}

    @property
    def where(self) -> str:
        """The path of the model as text, for findings to say where they were made."""
        return str(self.model.path)

    @cached_property
    def census(self) -> Mapping[str, TensorScan]:
        """{stored name: what one pass over the tensor's bytes found}, made at the first use."""
        return scan_values(self.model, self.progress)

    @property
    def scanned(self) -> Mapping[str, TensorScan]:
        """The census if a check has asked for it already, else {}: nothing is read for it."""
        return self.census if "census" in self.__dict__ else {}

    @cached_property
    def reported_parts(self) -> frozenset[str]:
        """Names of the stored tensors of `reported_weights`, for which no second finding is made.

        These weights are packed and lack a stored tensor. They are read as their codes: their shape
        is not the weight's, and their other tensors have no role.
        """
        lost = self.model.lost_parts
        return frozenset(name for weight in self.reported_weights for name in lost[weight].stored)

    @cached_property
    def reported_weights(self) -> frozenset[str]:
        """Names of packed weights that lack a stored tensor, as the check `layout` reports."""
        said = " ".join(one.text for one in self.model.damage)
        lost = self.model.lost_parts
        return frozenset(one for one in lost if any(name in said for name in (one, *lost[one][0])))

    def is_reported_role(self, key: str) -> bool:
        """Return whether the tensor of a role key belongs to one of `reported_weights`."""
        found = self.resolution
        if not (self.reported_weights and found.style):
            return False
        groups = stored_groups(found.spec, found.style, [key], found.hyper)
        return any(name in self.reported_weights for group in groups for name in group.stored)

    @cached_property
    def ledger(self) -> Ledger:
        """Every file, tensor and key of the model, each with how it is read."""
        return make_ledger(self.model)

    @cached_property
    def sizes_command(self) -> str:
        """The `aprfmt set` command that states the bits and group sizes of all packed weights.

        Its sizes are those by which all of them decode; it is "" where no sizes do.
        """
        from aprfmt.measure.named_causes import set_command
        from aprfmt.model.packing_sizes import changes_text

        sizes = changes_text(self.fitting_changes)
        return set_command(self.model.path, sizes, in_place=True) if sizes else ""

    @cached_property
    def fitting_changes(self) -> "Changes":
        """The changes of config.json by which all packed weights decode; {} where none are."""
        from aprfmt.model.packing_sizes import fitting_changes

        return fitting_changes(self.model)

    @cached_property
    def unread(self) -> tuple[Item, ...]:
        """The items that no table lists, without those that the user accepts."""
        taken = acceptance_predicate(self.accept)
        return tuple(
            item
            for item in self.ledger.unread
            if not taken(NotCompared(item.kind, item.name, "unread"))
        )

    def reported_by(self, error: AprfmtError) -> str:
        """Return the name of the check that reported an error first.

        If none did, it is the running check, which is recorded as the first. Two errors are the
        same if their texts are, or if both name the same unreadable tensor or file of the model.
        """
        text = str(error)
        parts = (row.name for row in self.ledger.unreadable if f"{row.name}: " in text)
        return self._reported.setdefault(next(parts, text), self.running)

    @cached_property
    def spec(self) -> ArchSpec:
        """The tables of the model's architecture; NotRun where it is not known."""
        try:
            return find_spec(self.model, self.arch)
        except ArchError as error:
            raise NotRun(f"architecture not known: {error}") from error

    @cached_property
    def resolution(self) -> Resolution:
        """The model's roles and hyperparameters; NotRun where its tensors do not fit the tables."""
        name = self.spec.name
        try:
            return self.model.resolution
        except ArchError as error:
            raise NotRun(f"the file does not fit {name}; see the check architecture") from error

    @cached_property
    def stated(self) -> StatedTokenizer | None:
        """The tokenizer that programs reading this format would use; None where the model has none.

        Raises AprfmtError where it cannot be read.
        """
        return read_tokenizer_parts(self.model)

    @property
    def readable(self) -> StatedTokenizer | None:
        """The tokenizer of `stated`; None also where it cannot be read: another check says it."""
        try:
            return self.stated
        except AprfmtError:
            return None

    @cached_property
    def carried(self) -> Carried:
        """The tokenizer's files and metadata as stored; NotRun where the model has no tokenizer."""
        carried = self.model.carried
        if not has_tokenizer(carried):
            raise NotRun("the model carries no tokenizer")
        return carried

    @cached_property
    def words(self) -> StoredVocabulary:
        """The vocabulary as stored; NotRun where it cannot be read."""
        try:
            return read_vocabulary(self.carried)
        except NotRun:
            raise
        except AprfmtError as error:
            raise NotRun("the vocabulary cannot be read; see the check tokenizer") from error
