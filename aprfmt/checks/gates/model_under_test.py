"""What the gates of `qa` work on: the open model, its session, tokenizer and copies.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from aprfmt.base.budget import Budget
from aprfmt.checks.context import CheckContext
from aprfmt.checks.gates.baseline_file import read_baseline
from aprfmt.checks.gates.golden import GoldenFile, find_golden
from aprfmt.checks.records import Answer, NotRun
from aprfmt.conversion import convert
from aprfmt.errors import AprfmtError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.inference.device import DeviceChoice, choose_device
from aprfmt.inference.running import RunRequest
from aprfmt.inference.session import Session
from aprfmt.model import Model, open_model
from aprfmt.model.completeness import check_predicts
from aprfmt.tokenizer.base import Tokenizer
from aprfmt.tokenizer.identity import tokenizer_facts

PROBE_TOKENS = 24  # of the prompt on which forward passes are compared
ROOM = 8  # positions left for decoding steps after it


class RequestOptions(TypedDict, total=False):
    """The fields of `QaRequest` but for `path`, as keyword arguments."""

    arch: str | None
    choice: DeviceChoice
    also: tuple[DeviceChoice, ...]
    against: Path | None
    golden: Path | None
    baseline: Path | None
    random_weights: bool
    threads: int | None
    memory: int | None
    deterministic: bool
    allow_missing: tuple[str, ...]
    strict: bool
    accept: tuple[str, ...]
    budget: Budget | None


@dataclass(frozen=True)
class QaRequest:
    """What `aprfmt qa` was asked for.

    `choice` is where every gate runs, `also` are runs to compare it with; `against` is another copy
    of the model. `random_weights` says the model is untrained: only loss bounds of such a model
    apply. `memory` is the budget in bytes for decoded weights of one session. `allow_missing` are
    patterns of required roles that may be missing. `strict` makes warnings failures; `accept` are
    `unread:PATTERN`s of items that no gate fails for.
    """

    path: Path
    arch: str | None = None
    choice: DeviceChoice = field(default_factory=choose_device)
    also: tuple[DeviceChoice, ...] = ()
    against: Path | None = None
    golden: Path | None = None
    baseline: Path | None = None
    random_weights: bool = False
    threads: int | None = None
    memory: int | None = None
    deterministic: bool = False
    allow_missing: tuple[str, ...] = ()
    strict: bool = False
    accept: tuple[str, ...] = ()
    budget: Budget | None = None


class ModelUnderTest(CheckContext):
    """The model under test, and what its gates share; closes everything that it opened."""

    def __init__(self, request: QaRequest, model: Model) -> None:
        """Start without copies, session or answers; `model` is open and closed with this object."""
        super().__init__(model, request.arch, accept=request.accept)
        self.request = request
        self.done: list[Answer] = []  # the gates before this one
        self._stack = ExitStack()
        self._copies: dict[str, Path | AprfmtError] = {}

    @classmethod
    def open(cls, request: QaRequest) -> "ModelUnderTest":
        """Return the model under test, opened with its golden file, baseline and other copy.

        Raises AprfmtError where one of these cannot be read, or the architecture is not known.
        """
        model = open_model(request.path, arch=request.arch, allow_missing=request.allow_missing)
        try:
            model.cache_remote_reads()
            _ = model.resolution
            subject = cls(request, model)
            _ = subject.golden, subject.baseline  # broken inputs are errors, not verdicts
            _ = subject.other
            return subject
        except BaseException:
            model.close()
            raise

    def __enter__(self) -> "ModelUnderTest":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self.model.close()

    @cached_property
    def golden(self) -> GoldenFile:
        """The prompts and texts for the model."""
        return find_golden(self.model, self.request.golden)

    @cached_property
    def session(self) -> Session:
        """The session in which the gates run the model, open until the subject is closed."""
        return self._stack.enter_context(self.open_session(self.model))

    def open_session(self, model: Model, choice: DeviceChoice | None = None) -> Session:
        """Return a new session with its own backend, which the caller closes (a context manager).

        `choice` is the device, by default the one that all gates use. Raises NotRun for an encoder,
        which predicts no tokens.
        """
        try:
            check_predicts(model.spec, model.path)
        except UsageError as error:
            raise NotRun(str(error)) from error
        request = self.request
        return RunRequest(
            choice=choice or request.choice,
            threads=request.threads,
            memory=request.memory,
            deterministic=request.deterministic,
        ).open_session(model)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where it has none. A damaged one raises FormatError."""
        return self.model.tokenizer if tokenizer_facts(self.model, quick=True) else None

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises NotRun where the model has none."""
        if self.tokenizer is None:
            raise NotRun("the model carries no tokenizer; put tokenizer.json next to it")
        return self.tokenizer

    @cached_property
    def probe(self) -> list[int]:
        """Token ids for the passes that gates compare.

        They are a golden text's, else ids spread over the vocabulary.
        """
        hyper = self.model.hyper
        vocab, context = int(hyper["vocab_size"]), int(hyper["context_length"])
        found: list[int] = []
        for text in self.golden.texts:
            if text.ids is not None:
                found = list(text.ids)
            elif self.tokenizer is not None and text.text is not None:
                found = self.tokenizer.encode(text.text)
            if len(found) > 1 and max(found) < vocab:
                break
        else:  # spread over the vocabulary, the same for every format of a model
            found = [1 + i * 7919 % (vocab - 1) for i in range(PROBE_TOKENS)]
        return found[: max(min(PROBE_TOKENS, context - ROOM), 2)]

    def copy(self, format: str) -> Model:
        """Return the model converted to a format, open; AprfmtError where that cannot be done.

        Each format is converted once.
        """
        if format not in self._copies:
            try:
                target = self._copies_folder / f"copy{FORMATS[format].extensions[0]}"
                if FORMATS[format].weights_name is not None:
                    target = self._copies_folder / f"copy-{format}"
                convert(
                    self.request.path,
                    target,
                    to=format,
                    arch=self.request.arch,
                    allow_missing=self.request.allow_missing,
                    verify=False,
                    source_hash=False,
                )
                self._copies[format] = target
            except AprfmtError as error:
                self._copies[format] = error
        found = self._copies[format]
        if isinstance(found, AprfmtError):
            raise found
        return self.open_other(found)

    @cached_property
    def _copies_folder(self) -> Path:
        """The temporary folder of copies; NotRun where they do not fit the disk."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="aprfmt-qa-")))
        needed = 2 * sum(tensor.nbytes for tensor in self.model.values())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise NotRun(
                f"copies need about {needed} bytes in {folder.parent}, {free} are free; set TMPDIR"
            )
        return folder

    def open_other(self, path: Path) -> Model:
        """Return the open model of another copy; it is closed together with this object."""
        request = self.request
        model = self._stack.enter_context(
            open_model(path, arch=request.arch, allow_missing=request.allow_missing)
        )
        model.cache_remote_reads()
        return model

    @cached_property
    def other(self) -> Model | None:
        """The model of `against`, open; None where none was given."""
        return None if self.request.against is None else self.open_other(self.request.against)

    @cached_property
    def baseline(self) -> Mapping[str, Any] | None:
        """The gates of the baseline file; None where none was given."""
        return None if self.request.baseline is None else read_baseline(self.request.baseline)

    def outcome_of(self, gate: str) -> str | None:
        """Return the outcome of a gate that ran before this one, None where it did not."""
        return next((result.outcome for result in self.done if result.name == gate), None)
