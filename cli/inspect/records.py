"""What `aprfmt inspect` says of a file, key by key."""

from typing import Any, NotRequired, TypedDict

from aprfmt.base.outcome import Outcome
from aprfmt.base.protocols import Value


class EncodingCount(TypedDict):
    """What a file stores in one encoding."""

    tensors: int
    parameters: int
    bytes: int


class HyperRow(TypedDict):
    """One hyperparameter, where it comes from, and under which key."""

    value: Value
    origin: str
    key: str


class KeysRead(TypedDict):
    """How a file's keys were used: read, defaulted, ignored or unknown (`KeyReport`)."""

    read: dict[str, str]
    defaulted: list[str]
    ignored: list[str]
    unknown: list[str]


class MisshapenRole(TypedDict):
    """A role whose stored tensor has another shape than the configuration gives it."""

    role: str
    shape: list[int]
    expected: list[int]


class RolesFound(TypedDict):
    """How many roles there are, which required ones are missing, and which are misshapen.

    Roles in `packed` are there, in packed weights that are not decoded. `misshapen` has those whose
    shape is not the configuration's, each with the shape found and the one that is due.
    """

    found: int
    required: int
    missing: list[str]
    packed: list[str]
    misshapen: list[MisshapenRole]
    accepted: list[str]


class InspectSummary(TypedDict):
    """The facts of the first line, and the whole line as `line`."""

    name: str
    kind: str
    says: str
    next: str
    architecture: str
    level: str
    parameters: int
    bits_per_weight: float | None
    quantization: str
    context_length: int | None
    tokenizer: str
    licence: str
    unusual: list[str]
    line: str


class ArchFacts(TypedDict, total=False):
    """What the architecture's tables tell of a file; only the error for an unknown architecture."""

    architecture: str | None
    architecture_error: str
    architecture_named: str
    notes: list[dict[str, str]]
    level: str
    hyperparameters: dict[str, HyperRow]
    used: list[str]
    keys: KeysRead
    conflicts: list[str]
    roles: RolesFound
    unclaimed: list[str]
    stored_again: list[str]
    towers: dict[str, int]
    draft: list[str]


class InspectBody(ArchFacts, total=False):
    """The whole JSON of `aprfmt inspect`."""

    path: str
    format: str
    version: str
    files: list[str]
    imports: NotRequired[list[str]]
    file_bytes: int
    tensor_count: int
    parameters: int
    encodings: dict[str, EncodingCount]
    metadata: dict[str, object]
    metadata_names: dict[str, str]
    config: str | None
    tokenizer: dict[str, object]
    relations: list[dict[str, object]]
    unread: list[str]
    unreadable: list[str]
    summary: InspectSummary
    damage: list[dict[str, object]]
    account: dict[str, Any]
    checksum: Outcome
    html: str
