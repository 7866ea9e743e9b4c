"""The ledger: an inventory of all items of a model, and what two of them did not compare.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text. Its *reading* is
what a loader takes it for. Of two compared models a *side* is one, "A" or "B".

Each item has exactly one reading. Every command takes its totals from here, and
`aprfmt.model.verdict` its verdict. Nothing is read before the ledger is asked for, and no tensor
then.
"""

import hashlib
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from aprfmt.arch import ARCHS
from aprfmt.arch.aliases import CALLED
from aprfmt.base.protocols import SURPLUS, Damage, Note, Value
from aprfmt.base.sequences import join_first, listed
from aprfmt.base.text_escape import shorten
from aprfmt.errors import AprfmtError, ArchError, FormatError
from aprfmt.model.carried_files import foreign_keys
from aprfmt.model.hf_folder import INDEX, MAX_TEXT, MLX_ADAPTER, WEIGHTS, read_text, rival_weights
from aprfmt.model.key_readings import FILES, METADATA, TENSORS, KeyPattern, Reading, matching_row
from aprfmt.model.packing import OLDER_FILES, settings_of_older_file
from aprfmt.model.sidecar_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    companion_kind,
    file_row,
    folder_row,
)
from aprfmt.remote.paths import is_remote
from aprfmt.tensors.companions import SECTIONS

if TYPE_CHECKING:
    from aprfmt.arch.hyperparameters import KeyReport
    from aprfmt.arch.spec import ArchSpec
    from aprfmt.formats.mapped_file import Shard
    from aprfmt.model import Model

Kind = Literal[
    "file", "index entry", "tensor", "adapter tensor", "metadata key", "config key",
    "tokenizer part", "generation setting", "captured array", "batch array",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
READINGS: tuple[Reading, ...] = get_args(Reading)
# Kinds whose items are compared with the tensors, one by one.
OF_TENSORS: tuple[Kind, ...] = ("tensor", "adapter tensor", "index entry")
OF_WEIGHTS: tuple[Kind, ...] = ("tensor", "adapter tensor")
DRAFT_HEAD = "draft head"  # what the tensors of one are read as
WRONG_CHECKSUM = "of weights with a wrong checksum"  # the name of such a file's item
NO_TENSOR = "it holds no tensor"
NO_PART = "of no tensor and of no key"  # bytes of a file that its format has no place for
# Kinds of which an item that nothing reads may change what a pass computes.
OF_A_PASS: tuple[Kind, ...] = ("tensor", "config key", "metadata key")
_SHOWN = 3  # names of a sentence; more are counted
_WIDEST = 60  # characters of an inner key's values
_BLOCK = 1 << 20
_VERSIONS = frozenset({"transformers_version", "__version__", "producer"})  # of a JSON's writer


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a model is made of: a file, a tensor, a key.

    `reading` says how it is used. `of` says what for: the role, the hyperparameter, the packed
    weight it belongs to, the source that says it has no effect, or what contradicts it. `holds` is
    its value, a function that returns it, or the path of a file; None for tensors. `as_stored`: two
    such items are compared by their stored values, and where these differ by `means`: what a loader
    makes of the value, None if that is not known. `needed`: a model without it is another one, if
    it has other items of the same home. `loaded_first`: a weight file that transformers loads
    instead of the index by which the model is opened.
    """

    kind: Kind
    name: str
    reading: Reading
    of: str = ""
    holds: Any = field(default=None, compare=False, repr=False)
    as_stored: bool = field(default=False, compare=False, repr=False)
    means: Value = field(default=None, compare=False, repr=False)
    needed: bool = field(default=False, compare=False, repr=False)
    loaded_first: bool = field(default=False, compare=False, repr=False)

    @property
    def unread(self) -> bool:
        """Whether nothing here reads this item, as no table lists it."""
        return self.reading == "unread"

    @property
    def home(self) -> str:
        """The file of a key that is named with its file, such as "tokenizer.json"; else ""."""
        return self.name.partition(": ")[0] if ": " in self.name else ""


State = Literal[
    "equal", "unequal", "only in A", "only in B", "unreadable", "not reached", "unread",
    "no counterpart",
]  # fmt: skip
Side = Literal["A", "B"]
SIDES: tuple[Side, ...] = get_args(Side)
LATE: State = "not reached"  # a budget ended before it
OPEN: frozenset[State] = frozenset({"unreadable", LATE})  # nothing is known
DIFFERING: frozenset[State] = frozenset({"unequal", "only in A", "only in B"})


@dataclass(frozen=True, slots=True)
class NotCompared:
    """An item that was not compared by its meaning, and what is known about it all the same.

    `state`: its bytes are equal or unequal on both sides, it is on one side only, it cannot be
    read; `not reached` where a budget ended before it; `unread` where there is one model only; `no
    counterpart` where the other model's format cannot hold it, by the convention of its writers.
    `side` is "A" or "B", or words for the two sides where they have other names.
    """

    kind: str
    name: str
    state: State
    why: str = ""
    side: str = ""

    @property
    def is_open(self) -> bool:
        """Whether its absence from the comparison leaves a verdict open.

        It does if it was unreadable or not reached, or is a weight that nothing reads.
        """
        return self.state in OPEN or (self.state == "unread" and self.kind in OF_WEIGHTS)

    @property
    def text(self) -> str:
        """The item in a few words: kind, name, side or difference, and the reason in brackets."""
        why = f" ({self.why})" if self.why else ""
        return f"{self.kind} {self.name}{self.place}{why}"

    @property
    def place(self) -> str:
        """The end of a phrase: " only in A", " unequal", " of B"; "" if no side is known."""
        if self.state in ("only in A", "only in B") and self.side:
            return f" only in {self.side}"
        if self.state in DIFFERING:
            return f" {self.state}"
        return f" of {self.side}" if self.side else ""


@dataclass(frozen=True)
class Ledger:
    """The items of a model, in the order of KINDS, and what of it cannot be read.

    `read_carried` returns the keys of another format that the file embeds. A ledger made for some
    kinds has no items of the others.
    """

    where: str
    items: tuple[Item, ...]
    unreadable: tuple[NotCompared, ...] = ()
    read_carried: Callable[[], Mapping[str, Value]] = field(default=dict, repr=False)
    style: str = ""  # of the container's keys
    refused: bool = False  # no architecture could be made of its keys: what they lack is not known
    of_a_model: bool = True  # it says what it is: a model of an architecture, known or not, a LoRA
    has_template: bool = False  # a chat template; said where parts of tokenizers are asked for

    @cached_property
    def embedded_keys(self) -> Mapping[str, Value] | AprfmtError:
        """{key: value} of its source's keys that the file embeds, or the error of reading them.

        The model has to be open when this is read first.
        """
        try:
            return self.read_carried()
        except AprfmtError as error:
            return error

    @property
    def counts(self) -> Mapping[str, int]:
        """{reading: number of items}, with zero for readings that do not occur."""
        found = Counter(item.reading for item in self.items)
        return {reading: found[reading] for reading in READINGS}

    @cached_property
    def unread(self) -> tuple[Item, ...]:
        """The items that no table lists."""
        return tuple(item for item in self.items if item.unread)

    @property
    def not_compared(self) -> tuple[NotCompared, ...]:
        """The unread items and unreadable parts as NotCompared, for a verdict on this one model."""
        rows = (NotCompared(item.kind, item.name, "unread", item.of) for item in self.unread)
        return (*rows, *self.unreadable)

    @cached_property
    def has_tokenizer_file(self) -> bool:
        """Whether the folder has a file of a tokenizer: it is a model's, and not weights alone.

        False for a ledger made without files.
        """
        return any(
            item.reading == "tokenizer part" and isinstance(item.holds, Path)
            for item in self.items_of_kind("file").values()
        )

    def items_of_kind(self, kind: Kind) -> Mapping[str, Item]:
        """Return {name: item} of the items of a kind."""
        return {item.name: item for item in self.items if item.kind == kind}

    def to_json(self) -> dict[str, Any]:
        """Return plain data: counts by reading and kind, unread and contradicted items."""
        kinds = Counter((item.reading, item.kind) for item in self.items)
        rows = [(reading, kind) for reading in READINGS for kind in KINDS]
        listed = ("unread", "contradicted")
        return {
            "items": len(self.items),
            "counts": dict(self.counts),
            "kinds": [
                {"reading": reading, "kind": kind, "items": kinds[reading, kind]}
                for reading, kind in rows
                if kinds[reading, kind]
            ],
            **{
                name: [
                    {"kind": item.kind, "name": item.name, "why": item.of}
                    for item in self.items
                    if item.reading == name
                ]
                for name in listed
            },
            "unreadable": [asdict(row) for row in self.unreadable],
        }


# --- making one -------------------------------------------------------------------------------


def make_ledger(model: "Model", kinds: Collection[Kind] = KINDS) -> Ledger:
    """Return the ledger of an open model, with items of `kinds` only.

    Raises nothing: what cannot be read is listed in `unreadable`.
    """
    return _LedgerBuilder(model).build(kinds)


def join_ledgers(first: Ledger, second: Ledger) -> Ledger:
    """Return one ledger with the items of two ledgers of one model, which list different kinds."""
    unreadable = dict.fromkeys((*first.unreadable, *second.unreadable))
    return replace(
        first,
        items=(*first.items, *second.items),
        unreadable=tuple(unreadable),
        has_template=first.has_template or second.has_template,
    )


def items_of_other_model(other: "Model", model: "Model") -> tuple[NotCompared, ...]:
    """Return the items of `other` that nothing reads, where its passes are compared with `model`'s.

    Each has "the other model" as its `side`. () where both models are one file: its items are
    listed for `model`.
    """
    if other.path == model.path:
        return ()
    rows = make_ledger(other, OF_A_PASS).not_compared
    return tuple(replace(row, side="the other model") for row in rows)


class _LedgerBuilder:
    """Collects the items of a model's ledger; each public method yields one section."""

    def __init__(self, model: "Model") -> None:
        """Read the architecture, its key reports and towers, as far as the model resolves."""
        self.model = model
        self.unreadable: list[NotCompared] = []
        self.spec: ArchSpec | None = None
        self.native: KeyReport | None = None  # of the container's own keys
        self.of_config: KeyReport | None = None
        self.refused = False
        try:
            found = model.resolution
            self.spec = found.spec
            own = model.config is None and model.key_style != "safetensors"
            self.native = found.report if own else found.native
            self.of_config = None if own else found.report
        except AprfmtError:
            self.refused = True
        self.towers = tuple(multimodal_towers(model))

    def build(self, kinds: Collection[Kind]) -> Ledger:
        """Return the ledger with the items of these kinds.

        A file without tensors and tokenizer is listed as unreadable: nothing can be said of it.
        """
        makers: tuple[tuple[Callable[[], Iterator[Item]], tuple[Kind, ...]], ...] = (
            (self.files, ("file",)),
            # They are files in the metadata: looked at where both are asked for.
            (self.embedded_files, ("file",) if "metadata key" in kinds else ()),
            (self.index_entries, ("index entry",)),
            (self.tensors, ("tensor", "adapter tensor")),
            (self.metadata_keys, ("metadata key",)),
            (self.config_keys, ("config key",)),
            (self.tokenizer_items, ("tokenizer part",)),
            (self.generation_items, ("generation setting",)),
        )
        items = [
            item
            for make, made in makers
            if not set(made).isdisjoint(kinds)
            for item in self._yield_until_error(make)
        ]
        if not self.model.source.tensors and not self.model.carried.origin:
            self._add_unreadable("file", self.model.path.name, FormatError(NO_TENSOR))
        return Ledger(
            str(self.model.path),
            tuple(items),
            tuple(self.unreadable),
            self._read_embedded_keys,
            self.model.key_style,
            self.refused,
            self._states_architecture_or_kind(),
            "tokenizer part" in kinds and self.model.carried.readable_template() is not None,
        )

    def _states_architecture_or_kind(self) -> bool:
        """Return whether the file states an architecture or a kind of file, such as an adapter.

        If not, it only holds arrays. True where what it states cannot be read.
        """
        from aprfmt.model.resolve import architecture_names

        try:
            names = architecture_names(self.model)
        except AprfmtError:
            return True
        return self.spec is not None or self.model.kind is not None or bool(names)

    def _yield_until_error(self, make: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Yield the items of a section; an AprfmtError ends it and is recorded as unreadable."""
        try:
            yield from make()
        except AprfmtError as error:
            self._add_unreadable("section", make.__name__, error)

    def _add_unreadable(self, kind: str, name: str, error: AprfmtError) -> None:
        """Record that something cannot be read, with the error's text."""
        why = str(error).removeprefix(f"{self.model.path}: ")
        self.unreadable.append(NotCompared(kind, name, "unreadable", why))

    # --- files ---------------------------------------------------------------------------------

    def files(self) -> Iterator[Item]:
        """Yield an item per file of the model, and of its folder if that belongs to the model."""
        model, source = self.model, self.model.source
        weights = {path.name for path in source.files}
        for path in source.files:
            yield Item("file", path.name, "role", "weights", path)
        yield from self._surplus_bytes()
        if source.path not in source.files:
            yield Item("file", source.path.name, "part of", "the index of the weights", source.path)
            weights.add(source.path.name)
        for path in folder_files(model):
            if path.name not in weights:
                yield self._file_item(path)

    def embedded_files(self) -> Iterator[Item]:
        """Yield an item per file that the metadata embed and the folder does not have.

        It is used as it would be next to the weights.
        """
        known = {path.name for path in folder_files(self.model)}
        try:
            found = self.model.embedded_files
        except AprfmtError as error:
            self._add_unreadable("file", "embedded files", error)
            return
        for name, text in found.items():
            if name not in known:
                row = file_row(name)
                yield Item("file", name, row.reading, row.source, text)  # type: ignore[arg-type]

    def _surplus_bytes(self) -> Iterator[Item]:
        """Yield an item for the bytes of each file that belong to no tensor and to no header."""
        source: Any = self.model.source
        shards: Sequence[Shard[Any]] = getattr(source, "shards", ())
        said: list[Damage | Note] = [one for one in source.damage if one.kind == SURPLUS]
        said += [one for one in source.notes if one.key == "trailing_bytes"]
        for one in said:
            text = surplus_text(one)
            at = next((i for i, each in enumerate(shards) if each.parsed.where == one.where), None)
            next_shard = shards[at] if at is not None and " follow " in text else None
            if at is not None and len(shards) > 1:
                text = f"{text} (file {at + 1} of {len(shards)})"
            held = Surplus(Path(one.where), one.text, next_shard)
            yield Item("file", text, "unread", NO_PART, held)

    def _file_item(self, path: Path) -> Item:
        """Return the ledger's item of a file or subfolder in the model's folder: how it is read.

        Tables of file names say how it is read; for some files it depends on the model too.
        """
        row = folder_row(path) if path.is_dir() else file_row(path.name)
        reading, of = row.reading, row.source
        needed = row.needed
        if path.suffix == ".py" and path.name in self._named_code:
            of, needed = f"code that {self._named_code[path.name]} names", True
        if path.name in _CLAIM_FILES and self._is_claim_false:
            reading, of, needed = "contradicted", _NOT_PACKED, True
        if path.name == ADAPTER_CONFIG and self._is_adapter:
            reading, of = "hyperparameter", "its keys are items"
        if path.is_dir() and path.name in self._module_types:
            return self._module_item(path)
        if reading == "tokenizer part" and path.name in self.model.carried.unread_files():
            if self.model.carried.origin:
                reading, of = "without effect", "transformers' fast tokenizers take tokenizer.json"
            else:
                reading, of = "unread", "there is no tokenizer.json, which is read here"
        first = path == self._loaded_first
        if first:
            reading, says = "unread", "transformers loads it and no shard of the index"
            of = f"{_file_contents_text(path)}; {says}".removeprefix("; ")
        elif reading == "unread" and not of:
            of = _file_contents_text(path)
        there = path.is_file() or path.is_dir()
        lost = reading not in ("unread", "text", "without effect") and not there
        if lost and not is_remote(path):
            what = "a link to nothing" if path.is_symlink() else "no regular file"
            self._add_unreadable("file", path.name, FormatError(f"it is {what}"))
        stored = row.as_stored and not lost
        means = partial(_file_value, path) if stored and path.is_file() else None
        if means is not None and path.name in OLDER_FILES:
            means = partial(settings_of_older_file, self.model, path.name)
        needed = stored and needed
        return Item("file", path.name, reading, of, path, stored, means, needed, first)  # type: ignore[arg-type]

    @cached_property
    def _loaded_first(self) -> Path | None:
        """The weight file that transformers loads instead of the index opened here; else None."""
        return file_loaded_first(self.model)

    @cached_property
    def _named_code(self) -> Mapping[str, str]:
        """{file name of code in the folder: the file and key, or the module, that names it}."""
        from aprfmt.model.remote_code import named_code

        return named_code(self.model.folder)

    @cached_property
    def _module_types(self) -> Mapping[str, str]:
        """{subfolder: type} from sentence-transformers' modules.json; {} without one."""
        from aprfmt.formats.bounded_json import load_file

        folder = self.model.folder
        path = None if folder is None else folder.path / "modules.json"
        if path is None or not path.is_file():
            return {}
        try:
            rows = load_file(path, max_bytes=_BLOCK)
        except AprfmtError as error:
            self._add_unreadable("file", path.name, error)
            return {}
        named = (row for row in rows if isinstance(row, Mapping)) if isinstance(rows, list) else ()
        return {str(row["path"]): str(row.get("type", "")) for row in named if row.get("path")}

    def _module_item(self, path: Path) -> Item:
        """Return the item of a subfolder that modules.json lists."""
        last = self._module_types[path.name].rpartition(".")[2]
        if last == "Pooling":
            return Item("file", path.name, "hyperparameter", "how a text's rows become one", path)
        if last == "Normalize":
            return Item("file", path.name, "without effect", "Normalize has no weights", path)
        return Item("file", path.name, "unread", f"modules.json: {last or 'a module'}", path)

    def index_entries(self) -> Iterator[Item]:
        """Yield an item per entry of a shard index, and per key of its metadata."""
        source: Any = self.model.source
        here = {path.name for path in source.files}
        stored = source.tensors
        for name, file in getattr(source, "weight_map", {}).items():
            if name in stored:
                yield Item("index entry", name, "part of", file)
            else:
                why = "is not there" if file not in here else "does not hold it"
                yield Item("index entry", name, "contradicted", f"{file} {why}")
        for key, value in getattr(source, "index_metadata", {}).items():
            yield _item_by_pattern("index entry", f"metadata.{key}", key, FILES["index"], value)

    # --- tensors -------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Item]:
        """Yield an item per stored tensor, a packed weight's codes and scales too.

        Items of adapters and importance matrices have other kinds and readings.
        """
        kind = self.model.kind
        if kind is not None and self.spec is None and kind.name in ("adapter", "imatrix"):
            yield from self._special_tensors(kind.name)
            return
        readings = self._readings_by_name()
        weights = weights_of_parts(self.model)
        for stored in self.model.source.tensors:
            weight, suffix = weights.get(stored, (stored, ""))
            reading, of = readings.get(weight, ("unread", ""))
            if stored in self.model.plain_duplicates:
                reading, of = "unread", f"stores {stored} again, next to its packed form"
            elif suffix:
                reading, of = "part of", weight
            elif weight != stored and reading == "unread":
                of = f"part of {weight}"
            elif reading == "unread" and not of:
                row = matching_row(TENSORS, stored)
                of = "" if row is None else row.source
            yield Item("tensor", stored, reading, of)

    def _readings_by_name(self) -> Mapping[str, tuple[Reading, str]]:
        """Return {tensor name: (reading, what for)} of the tensors that the architecture knows.

        Packed weights that no codec decodes are "unread", with the reason.
        """
        found: dict[str, tuple[Reading, str]] = {}
        if self.spec is None:
            return found
        resolution, spec = self.model.resolution, self.spec
        style = self.model.style or ""
        for spec_of, names in self.towers:
            found.update(dict.fromkeys(names, ("role", f"tower {spec_of.name}")))
        for name, key in resolution.stored_again.items():
            found[name] = ("unread", f"stores {key} again, in another layout")
        for name in resolution.buffers:
            found[name] = ("without effect", "a buffer, which loaders compute")
        for row in spec.derived:
            found[row.name(style)] = ("hyperparameter", "follows from hyperparameters")
        for key, view in resolution.roles.items():
            for name in view.names:
                found[name] = ("role", key)
        for name in resolution.draft:
            found[name] = ("role", DRAFT_HEAD)
        if resolution.unread is not None:
            for info in resolution.unread.tensors:
                found.setdefault(info.name, ("unread", resolution.unread.claim))
        return found

    def _special_tensors(self, kind: str) -> Iterator[Item]:
        """Yield the items of an adapter's or an importance matrix's tensors."""
        whole = _modules_to_save(self.model) if kind == "adapter" else ()
        lengths = _magnitudes_of_mlx(self.model) if kind == "adapter" else frozenset()
        for name in self.model.source.tensors:
            if kind == "imatrix":
                known = name.endswith((".in_sum2", ".counts"))
                reading: Reading = "role" if known else "unread"
                yield Item("tensor", name, reading, "importance of a weight" if known else "")
                continue
            if name in lengths:
                yield Item(
                    "adapter tensor", name, "part of", "the rows' lengths of a change (DoRA)"
                )
                continue
            yield Item("adapter tensor", name, *_adapter_reading(name, whole))

    # --- keys ----------------------------------------------------------------------------------

    def metadata_keys(self) -> Iterator[Item]:
        """Yield an item per metadata key of the container."""
        style = self.model.key_style
        rows = METADATA.get(style, ())
        report = self.native
        prefix = ""
        if style == "gguf":
            prefix = f"{self.model.metadata.get('general.architecture', '')}."
        for key in self.model.metadata:
            value = partial(self.model.metadata.__getitem__, key)
            said = _key_reading(report, key, self.spec, style, prefix)
            if said is not None:
                yield Item("metadata key", key, *said, value)
            elif key in self.model:  # torchao describes each weight under its name
                yield Item("metadata key", key, "part of", "what is said of that tensor", value)
            elif style == "safetensors" and self._is_shared(key):
                of = "safetensors' save_model: a name for the tensor that it holds"
                yield Item("metadata key", key, "part of", of, value)
            else:
                yield _item_by_pattern("metadata key", key, key, rows, value)

    def _is_shared(self, key: str) -> bool:
        """Return whether a key's value is a stored tensor's name, as of a tensor under two names.

        The last components of key and value have to be equal.
        """
        held = self.model.metadata[key]
        if not isinstance(held, str) or held not in self.model.source.tensors:
            return False
        return key.rpartition(".")[2] == held.rpartition(".")[2]

    def config_keys(self) -> Iterator[Item]:
        """Yield an item per key of config.json, nested ones by their dotted path."""
        if self._is_adapter:
            yield from self._adapter_keys()
        config = self.model.config
        if config is None:
            return
        from aprfmt.arch.other_keys import CAUSAL_KEY, known_rows, other_readers_text

        known = known_rows("hf")
        causal = self.spec is None or self.spec.block.attends == "causal"
        inner = self.spec.section if self.spec is not None else ""
        cut_out = inner in _SECTIONS and isinstance(config.get(inner), Mapping)
        for path, value in key_paths(config):
            parts = path.removeprefix(f"{inner}.").split(".") if inner else path.split(".")
            if parts[0] in SECTIONS and self._is_claim_false:
                yield Item(
                    "config key",
                    path,
                    "contradicted",
                    _NOT_PACKED,
                    value,
                    as_stored=True,
                    needed=True,
                )
                continue
            if parts[0] in SECTIONS:
                yield Item("config key", path, "part of", "the claim of packed weights", value)
                continue
            if isinstance(value, Mapping):
                yield Item("config key", path, "without effect", "an empty object", value)
                continue
            said = _key_reading(self.of_config, path, self.spec, "hf", "")
            if said is None or said[0] == "unread":
                said = self._tower_key_reading(path) or said
            if said is None:
                bare = path.removeprefix(f"{inner}.") if inner else path
                known_row = known.get(bare) or known.get(bare.partition(".")[0])
                unknown: tuple[Reading, str] = ("unread", "")
                said = unknown if known_row is None else (known_row.reading, known_row.source)
            if said == ("unread", ""):
                said = "unread", other_readers_text(path.removeprefix(f"{inner}."))
            if said[0] == "unread" and cut_out and not path.startswith(f"{inner}."):
                said = "without effect", "of the whole model, of which this is a tower"
            if parts[-1] == CAUSAL_KEY and causal and not value:
                said = "unread", "attention that is not causal"
            row = known.get(parts[0])  # of the whole model: a tower's own is not asked for
            as_stored = row is not None and row.as_stored
            yield Item(
                "config key", path, said[0], said[1], value, as_stored,
                self._meaning(parts[0], value) if as_stored else None,
                needed=row is not None and row.needed,
            )  # fmt: skip

    @cached_property
    def _is_adapter(self) -> bool:
        """Whether the tensors are those of an adapter."""
        kind = self.model.kind
        return kind is not None and self.spec is None and kind.name == "adapter"

    def _adapter_keys(self) -> Iterator[Item]:
        """Yield an item per key of the adapter_config.json next to an adapter's weights.

        Keys that PEFT has and no merge here reads are unread only where they are set.
        """
        from aprfmt.formats.bounded_json import load_file

        path = self.model.path.with_name(ADAPTER_CONFIG)
        if is_remote(path) or not path.is_file():
            return
        try:
            found = load_file(path, max_bytes=_BLOCK)
        except AprfmtError as error:
            self._add_unreadable("config key", ADAPTER_CONFIG, error)
            return
        for key, value in found.items() if isinstance(found, Mapping) else ():
            item = _item_by_pattern(
                "config key", f"{ADAPTER_CONFIG}: {key}", key, FILES[ADAPTER_CONFIG], value
            )
            if item.unread and key in _PEFT_UNREAD and not value:
                item = replace(item, reading="without effect", of="it is not set", as_stored=True)
            if key in _SETS and isinstance(value, list):  # PEFT writes them in any order
                item = replace(item, means=sorted(map(str, value)))
            yield item

    @cached_property
    def _is_claim_false(self) -> bool:
        """Whether a safetensors model's tensors have roles, and none of them is packed.

        A quantization section in its config.json is then false. Weights that are packed and do not
        decode make it no false one.
        """
        own = self.spec is not None and self.model.key_style == "safetensors"
        return (
            own
            and self.model.resolution.unread is None
            and not self.model.lost_parts
            and not self.model.undecoded
            and all(
                view.stored[0].packed is None and not view.stored[0].parts
                for view in self.model.values()
            )
        )

    def _meaning(self, key: str, value: Value) -> Value:
        """Return what loaders make of a key's value; None if the value is compared as it is.

        For names of classes it is the block that they compute, if the file's own tensors are all
        theirs, else the names of architectures. For a dtype it is True if it is that of the
        weights. A dtype in an embedded config.json is not used in loading: it is True as well.
        """
        if key in _NAMES_OF_CLASSES:
            found = [_architecture_called(each) for each in listed(value)]
            spec = self._fitting_class
            if spec is not None and set(found) == {spec.name}:
                # Loaders of this class find every tensor, so that only what it computes counts.
                return ["a class that computes", repr(spec.block)]
            return None if None in found else found
        if key in _DTYPE_KEYS:
            from aprfmt.model.stated_dtype import is_of_weights

            return self.model.folder is None or is_of_weights(self.model, value) or None
        return None

    @cached_property
    def _fitting_class(self) -> "ArchSpec | None":
        """The one architecture that the file's keys state, if the tensors are exactly its own.

        None if the keys state several, or the tensors are others.
        """
        if self.spec is None:
            return None
        config, resolution = self.model.config or {}, self.model.resolution
        names = [name for key in _NAMES_OF_CLASSES for name in listed(config.get(key) or [])]
        if not {*map(_architecture_called, names)} <= {self.spec.name}:
            return None
        whole = resolution.coverage.is_whole and not resolution.unbound
        return self.spec if whole else None

    def _tower_key_reading(self, path: str) -> tuple[Reading, str] | None:
        """Return (reading, what for) of a key in a tower's section of config.json.

        None for a key that is in no such section.
        """
        section, dot, _ = path.partition(".")
        if section not in _SECTIONS or not dot:
            return None
        here = [report for spec, report in self._tower_reports if spec.section == section]
        if not self._holds_tower:
            return "without effect", "the file holds no tower"
        for report in here:
            said = _key_reading(report, path, None, "hf", "")
            if said is not None and said[0] != "unread":
                return said
        from aprfmt.arch.other_keys import known_rows

        row = known_rows("hf").get(path.partition(".")[2])
        return ("unread", "the section of a tower") if row is None else (row.reading, row.source)

    @cached_property
    def _holds_tower(self) -> bool:
        """Whether the file may hold a tower: one was found, or tensors have no role."""
        return bool(self.towers) or self.spec is None or bool(self.model.resolution.unclaimed)

    @cached_property
    def _tower_reports(self) -> "list[tuple[ArchSpec, KeyReport]]":
        """(spec, key report) of each tower: which keys of config.json its tables read."""
        from aprfmt.arch.hyperparameters import read_hyper
        from aprfmt.arch.spec import Facts

        found = []
        for spec, _ in self.towers:
            facts = Facts("hf", self.model.config or {}, {})
            try:
                _, report = read_hyper(spec, facts, str(self.model.path), complete=False)
            except ArchError as error:
                self._add_unreadable("config key", spec.section, error)
                continue
            found.append((spec, report))
        return found

    # --- tokenizer and generation settings -----------------------------------------------------

    def tokenizer_items(self) -> Iterator[Item]:
        """Yield an item per key of the tokenizer's files."""
        carried = self.model.carried
        try:
            found = carried.tokenizer_json_keys()
        except AprfmtError as error:
            self._add_unreadable("tokenizer part", "tokenizer.json", error)
            found = {}
        for key, value in found.items():
            yield self._file_key_item("tokenizer.json", key, value)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json"):
            yield from self._file_keys(name, "tokenizer part")
        try:
            carried.chat_template()
            for name, text in carried.named_templates().items():
                yield Item(
                    "tokenizer part",
                    f"{TEMPLATES}: {name}",
                    "tokenizer part",
                    "a chat template by its name",
                    text.removesuffix("\n"),
                    True,
                    needed=True,
                )
        except AprfmtError as error:
            self._add_unreadable("tokenizer part", "chat template", error)

    def generation_items(self) -> Iterator[Item]:
        """Yield an item per key of generation_config.json."""
        yield from self._file_keys("generation_config.json", "generation setting")

    def _file_keys(self, name: str, kind: Kind) -> Iterator[Item]:
        """Yield an item per key of a JSON file of the tokenizer or generation config.

        A file that cannot be read is recorded as unreadable.
        """
        try:
            found = self.model.carried.parse_file(name)
        except AprfmtError as error:
            self._add_unreadable(kind, name, error)
            return
        for key, value in found.items():
            yield self._file_key_item(name, key, value)

    def _file_key_item(self, file: str, key: str, value: Value) -> Item:
        """Return the item of one key of a tokenizer or generation file, by that file's table."""
        kind: Kind = "generation setting" if file.startswith("generation") else "tokenizer part"
        item = _item_by_pattern(kind, f"{file}: {key}", key, FILES[file], value)
        if key == "tokenizer_class" and isinstance(value, str):
            return replace(item, means=_SAME_CLASS.get(value, value.removesuffix("Fast")))
        if file == "special_tokens_map.json":
            return replace(item, means=_token_texts(value))
        return self._template_item(item, value) if key == "chat_template" else item

    def _template_item(self, item: Item, value: Value) -> Item:
        """Return the item of a file's chat template; contradicted if aprfmt uses another one.

        Loaders that read this file first would use it. A difference in the last line break is none:
        Jinja leaves that out. Of a list of named templates all but the default one are compared.
        """
        from aprfmt.tokenizer.stored_parts import DEFAULT_TEMPLATE, templates_by_name

        carried = self.model.carried
        taken = carried.readable_template()
        if not value or taken is None:
            return item
        if isinstance(value, str):
            if value.removesuffix("\n") == taken.removesuffix("\n"):
                return item
        elif isinstance(value, (list, Mapping)):
            named = templates_by_name(value)
            named.pop(DEFAULT_TEMPLATE, None)
            if named == carried.named_templates():
                return item
        why = "another file's template is taken before it"
        return replace(item, reading="contradicted", of=why, as_stored=True, needed=True)

    def _read_embedded_keys(self) -> Mapping[str, Value]:
        """Return {key: value} of another format's keys that the file embeds."""
        return foreign_keys(self.model)


# Keys of PEFT's LoraConfig that change what an adapter computes, and that no merge here reads.
_PEFT_UNREAD = frozenset({
    "layer_replication", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
})  # fmt: skip
_SETS = ("target_modules", "modules_to_save", "target_parameters")
_SECTIONS = ("vision_config", "audio_config")
_NAMES_OF_CLASSES = ("architectures", "model_type")
# Of tokenizers: names of one class in versions of transformers.
_SAME_CLASS = {"PreTrainedTokenizerFast": "TokenizersBackend"}
_DTYPE_KEYS = ("dtype", "torch_dtype")
_CLAIM_FILES = ("hf_quant_config.json", *OLDER_FILES)
_NOT_PACKED = "the file holds no packed weight"
TEMPLATES = "chat templates"  # with ": NAME", the item of a template that has a name
_OF_TEMPLATES = (TEMPLATES, "chat_template.json")  # a folder has these files or not, as it likes
_TABLES = ("embed_tokens", "lm_head")  # peft, utils/constants.py: EMBEDDING_LAYER_NAMES


def file_loaded_first(model: "Model") -> Path | None:
    """Return the weight file that transformers loads instead of the opened index, or None."""
    found = rival_weights(model.path, model.source.files)
    return None if found is None or found.suffix == ".json" else found


def folder_files(model: "Model") -> list[Path]:
    """Return the paths of a model's folder that belong to the model; [] without a folder.

    These are all files and subfolders, sorted. In a remote folder, and where the weights' name does
    not show that the folder is theirs (there may be other models), they are only the text files
    that are read.
    """
    folder = model.folder
    if folder is None:
        return []
    weights = (INDEX, WEIGHTS, ADAPTER_WEIGHTS, MLX_ADAPTER)
    whole = model.path.name in weights and not is_remote(folder.path)
    if not whole or not folder.path.is_dir():  # one that is only planned is not there yet
        return [folder.path / name for name in folder.texts]
    return sorted(folder.path.iterdir())


def surplus_text(record: Damage | Note) -> str:
    """Return a phrase about the bytes of a file that belong to no tensor."""
    return f"of weights: {record.text.partition(';')[0].partition(', where')[0]}"


def damaged_files(damage: Iterable[Damage]) -> tuple[NotCompared, ...]:
    """Return one NotCompared of state "unreadable" for each damaged file, with its first fault.

    Surplus bytes do not count as damage here: the ledger lists them as items.
    """
    faults: dict[str, list[str]] = {}
    for one in damage:
        if one.kind != SURPLUS:
            faults.setdefault(one.where, []).append(one.text)
    return tuple(
        NotCompared("file", where, "unreadable", texts[0] + _more_clause(texts))
        for where, texts in faults.items()
    )


def _more_clause(texts: Sequence[str]) -> str:
    """Return "; 3 more" for all texts but the first, "" for one."""
    return f"; {len(texts) - 1} more" if len(texts) > 1 else ""


@dataclass(frozen=True, slots=True)
class Surplus:
    """Bytes of a file of weights that belong to no tensor. Calling it returns their digest.

    `shard` is the shard at whose end they are, None where they lie between tensors.
    """

    path: Path
    text: str
    shard: "Shard[Any] | None"

    def __call__(self) -> str:
        """Return the SHA-256 in hex of the bytes after the last tensor, or `text`.

        It is `text` where `shard` is None.
        """
        if self.shard is None:
            return self.text
        file, digest = self.shard.file, hashlib.sha256()
        for window in file.windows(min(self.shard.parsed.end, file.size), file.size):
            digest.update(window)
        return digest.hexdigest()


def _file_value(path: Path) -> Value:
    """Return the content of a file for comparing it; None where it is no text or cannot be read.

    It is the JSON value without the writer's version, or the lines of a text.
    """
    from aprfmt.formats.bounded_json import load_file

    try:
        if path.suffix == ".txt":
            lines = read_text(path).removesuffix("\n").split("\n")
            return [line for line in lines if not line.startswith("#version")]
        found = load_file(path, max_bytes=MAX_TEXT)
    except AprfmtError:
        return None
    if isinstance(found, Mapping):
        return {key: value for key, value in found.items() if key not in _VERSIONS}
    return found


def _token_texts(value: Value) -> Value:
    """Return the text of a special token, or the sorted texts of several; None for another value.

    transformers writes a text, or an object with flags.
    """
    if isinstance(value, (list, Mapping)) and not (
        isinstance(value, Mapping) and "content" in value
    ):
        held = value.values() if isinstance(value, Mapping) else value
        found = [_token_texts(each) for each in held]
        return sorted(found) if all(isinstance(each, str) for each in found) else None
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _file_contents_text(path: Path) -> str:
    """Return how many tensors an unlisted .safetensors file holds, and their names, in words.

    "" for other files.
    """
    if path.suffix != ".safetensors":
        return ""
    from aprfmt.formats.safetensors.reader import open_source

    try:
        with open_source(path, damaged=True) as source:
            names = list(source.tensors)
    except (AprfmtError, OSError):
        return "no index names it"
    shown = join_first(names, _SHOWN)
    return f"{len(names)} tensors that no index names: {shown}"


def weights_of_parts(model: "Model") -> Mapping[str, tuple[str, str]]:
    """Return {stored name: (packed weight's name, suffix)} for the tensors of packed weights."""
    return {
        part.info.name: (name, suffix)
        for name, view in model.items()
        for suffix, part in view.stored[0].parts.items()
    }


def _modules_to_save(model: "Model") -> tuple[str, ...]:
    """Return the modules that a PEFT adapter replaces as a whole (modules_to_save).

    () where the configuration lists none.
    """
    from aprfmt.model.adapter_parts import peft_config

    found = peft_config(model).get("modules_to_save")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _magnitudes_of_mlx(model: "Model") -> frozenset[str]:
    """Return the stored names of DoRA's magnitudes in an adapter of MLX; empty for other adapters.

    Their names, MODULE.m, are only recognised next to the factors of the module.
    """
    from aprfmt.model.adapter_parts import MLX_LENGTHS, adapter_parts

    factors = adapter_parts(model).factors.values()
    held = (own["magnitude"] for own in factors if "magnitude" in own)
    return frozenset(name for name in held if name.endswith(MLX_LENGTHS))


def _adapter_reading(name: str, trained_whole: Sequence[str]) -> tuple[Reading, str]:
    """Return (reading, what for) of an adapter's tensor.

    `trained_whole` are the modules of its modules_to_save.
    """
    from aprfmt.model.adapter_parts import adapter_name, without_adapter_name
    from aprfmt.model.file_kinds import FACTOR_PARTS, FACTORS

    name = without_adapter_name(name, adapter_name([name]))
    if name.endswith(FACTORS):
        return "role", "a factor of the change"
    if name.endswith(FACTOR_PARTS):
        return "part of", "the scale of a change"
    parts = name.split(".")
    if "base_layer" in parts:
        return "role", "the base's embedding, which PEFT saves with its adapter"
    if parts[-1] == "weight" and not {*_TABLES}.isdisjoint(parts[-2:]):
        return "role", "a table of tokens, which PEFT saves whole"
    if "modules_to_save" in parts or any(module in parts for module in trained_whole):
        return "role", "a whole tensor of the base (modules_to_save)"
    return "unread", ""


def multimodal_towers(model: "Model") -> "Iterator[tuple[ArchSpec, tuple[str, ...]]]":
    """Yield (spec, stored names) of each tower, such as a vision tower, next to the text model.

    Names under the language model's prefix are not considered: no loader reads a tower there.
    """
    # Only a configuration with a tower's section describes one.
    config = model.config or {}
    if not any(isinstance(config.get(section), Mapping) for section in _SECTIONS):
        return
    try:
        resolution, style = model.resolution, model.style or ""
    except AprfmtError:
        return
    # Names without a role that are not under the language model's prefix.
    below = ("model.language_model.", "language_model.")
    unmapped = (*resolution.unclaimed, *resolution.towers)
    left = [name for name in unmapped if not name.startswith(below)]
    if not left or resolution.spec.section in _SECTIONS:
        return
    from aprfmt.arch.binding import bind_names

    # For each kind of tower, the architecture that binds most of these names.
    for section in _SECTIONS:
        best: tuple[ArchSpec, tuple[str, ...]] | None = None
        for name, called in CALLED.items():
            spec = ARCHS[name] if called.get("gguf") == ("clip",) else None
            if spec is None or spec.section != section:
                continue
            try:
                bound = bind_names(spec, style, left)
            except ArchError:
                continue
            taken = tuple(stored for group in bound.groups for stored in group.stored)
            taken += (*bound.derived, *bound.buffers)
            if taken and (best is None or len(taken) > len(best[1])):
                best = (spec, taken)
        if best is not None:
            yield best


def _key_reading(
    report: "KeyReport | None", key: str, spec: "ArchSpec | None", style: str, prefix: str
) -> tuple[Reading, str] | None:
    """Return (reading, what for) of a key, by the report of which keys were read; None if unknown.

    `report` says from which keys the hyperparameters came. `style` selects the table of other known
    keys, `prefix` is a GGUF's "ARCH.".
    """
    if report is None:
        return ("unread", "") if prefix.strip(".") and key.startswith(prefix) else None
    if key in report.contradicted:
        return "contradicted", report.contradicted[key]
    if key in report.read:
        return "hyperparameter", report.read[key]
    if _is_key_or_below(key, report.unknown):
        return "unread", ""
    if _is_key_or_below(key, report.ignored):
        from aprfmt.arch.other_keys import known_rows

        known = known_rows(style)
        bare = key.removeprefix(prefix) if prefix else key
        section = f"{spec.section}." if spec is not None else ""
        bare = bare.removeprefix(section) if section else bare
        if bare.partition(".")[0] in _SECTIONS:
            return None  # a tower's table may know more
        row = known.get(bare) or known.get(bare.partition(".")[0])
        if row is not None:
            return row.reading, row.source
        return "without effect", "" if spec is None else f"the tables of {spec.name}"
    return None


def _architecture_called(name: Value) -> str | None:
    """Return the architecture that config.json's `name` means; None for an unknown name."""
    return next((known for known, called in CALLED.items() if name in called.get("hf", ())), None)


def _is_key_or_below(key: str, rows: Sequence[str]) -> bool:
    """Return whether a dotted key is one of `rows` or lies inside an object that is one of them."""
    return key in rows or any(key.startswith(f"{row}.") for row in rows)


def _item_by_pattern(
    kind: Kind, name: str, key: str, rows: Sequence[KeyPattern], value: Value
) -> Item:
    """Return the item of a key, used as the first matching row says; unread if no row matches.

    `name` is the item's name, `key` what the rows' patterns are matched with.
    """
    row = matching_row(rows, key)
    if row is None:
        return Item(kind, name, "unread", "", value)
    return Item(kind, name, row.reading, row.source, value, row.as_stored, needed=row.needed)


def key_paths(values: Mapping[str, Value], above: str = "") -> Iterator[tuple[str, Value]]:
    """Yield (dotted path, value) of each leaf of nested objects; an empty object is a leaf."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from key_paths(value, f"{path}.")
        else:
            yield path, value


# --- two of them ------------------------------------------------------------------------------


def list_not_compared(
    a: Ledger, b: Ledger, kinds: Collection[Kind] = KINDS
) -> tuple[NotCompared, ...]:
    """Return the items that no comparison by meaning covers, and what is known about each.

    `kinds` restricts them. Tensors are left out: commands that compare tensors also compare the
    unread ones, by name. A key that the other side embeds from its source is compared with that.
    """
    found: list[NotCompared] = []
    for kind in KINDS:  # in the table's order: `kinds` may be a set
        if kind in OF_TENSORS or kind not in kinds:
            continue
        left, right = a.items_of_kind(kind), b.items_of_kind(kind)
        for name in dict.fromkeys((*left, *right)):
            x, y = left.get(name), right.get(name)
            one = _compare_items(kind, name, x, y, a, b)
            if one is not None:
                found.append(one)
    for label, side in (("A", a), ("B", b)):
        found += [
            NotCompared(row.kind, row.name, row.state, row.why, label)
            for row in side.unreadable
            if row.kind in kinds or row.kind == "section"
        ]
    return tuple(found)


def _compare_items(
    kind: Kind, name: str, x: Item | None, y: Item | None, a: Ledger, b: Ledger
) -> NotCompared | None:
    """Return the NotCompared of an item that one or both models have; None if it is settled.

    It is settled if both ledgers read it by meaning, its stored values are equal, or it has no
    effect. `x` is the item of ledger `a`, `y` that of `b`.
    """
    there = x or y
    assert there is not None
    if x is not None and y is not None:
        try:
            if x.unread or y.unread:
                state: State = "equal" if same_content(x.holds, y.holds) else "unequal"
                return NotCompared(kind, name, state, _with_inner_keys(there.of, x.holds, y.holds))
            if (x.as_stored or y.as_stored) and not same_content(x.holds, y.holds):
                mine = read_value(x.means)
                if mine is None or not same_content(mine, y.means):
                    why = _with_inner_keys(there.of, x.holds, y.holds)
                    return NotCompared(kind, name, "unequal", why)
        except OSError as error:
            return NotCompared(kind, name, "unreadable", error.strerror or str(error))
        return None
    other = b if x is not None else a
    needed = there.needed or (other.refused and there.reading == "hyperparameter")
    if needed and _has_home_of(there, a, b):
        return NotCompared(kind, name, "only in A" if x is not None else "only in B", there.of)
    if not there.unread:
        return None
    if kind == "metadata key":
        carried = other.embedded_keys
        if isinstance(carried, AprfmtError):
            why = str(carried).removeprefix(f"{other.where}: ")
            return NotCompared(kind, name, "unreadable", why, "B" if x is not None else "A")
        if name in carried:
            if same_content(there.holds, carried[name]):
                return None
            return NotCompared(kind, name, "unequal", there.of)
    return NotCompared(kind, name, "only in A" if x is not None else "only in B", there.of)


def _with_inner_keys(why: str, x: Value, y: Value) -> str:
    """Return `why` an item is unequal, followed by the first differing inner keys and their values.

    `x` and `y` are the item's contents in both models. Only `why` if they are not JSON objects.
    """
    from aprfmt.base.inner_keys import differing_inner_keys

    left, right = _json_object(read_value(x)), _json_object(read_value(y))
    found = [] if left is None or right is None else list(differing_inner_keys(left, right))
    told = [f"{key.path}: {shorten(f'{key.a} | {key.b}', _WIDEST)}" for key in found]
    return "; ".join(part for part in (why, join_first(told, _SHOWN)) if part)


def _json_object(held: Value) -> Mapping[str, Value] | None:
    """Return an item's contents as an object: a mapping, JSON text, or a .json file; else None."""
    from aprfmt.formats.bounded_json import loads

    if isinstance(held, Mapping):
        return held
    text: object = held
    try:
        if isinstance(held, Path):
            text = read_text(held) if held.suffix == ".json" and held.is_file() else None
        if not isinstance(text, str) or not text.lstrip().startswith("{"):
            return None
        found = loads(text, "a file next to the weights", max_bytes=MAX_TEXT)
    except AprfmtError:
        return None
    return found if isinstance(found, Mapping) else None


def _has_home_of(item: Item, a: Ledger, b: Ledger) -> bool:
    """Return whether both ledgers have what an item belongs to: a folder, file or key style."""
    if item.home in _OF_TEMPLATES:
        return a.has_template and b.has_template
    if item.kind == "file" and item.name == "config.json":  # a folder with a tokenizer lost it
        return a.has_tokenizer_file and b.has_tokenizer_file
    if item.kind == "file":  # a folder, of which the configuration tells
        tells = [side.items_of_kind("file").get("config.json") for side in (a, b)]
        if companion_kind(item.name):  # which a single file embeds
            return all(tells)
        return all(each is not None and isinstance(each.holds, Path) for each in tells)
    if item.kind == "metadata key":
        return a.style == b.style
    if item.kind == "config key":
        return all(side.items_of_kind("config key") for side in (a, b))
    return all(
        any(each.home == item.home for each in side.items if each.kind == item.kind)
        for side in (a, b)
    )


def read_value(held: Any) -> Any:
    """Return what an item holds, read now if it is read on demand; the file has to be open."""
    return held() if isinstance(held, (partial, Surplus)) else held


def same_content(x: Value, y: Value) -> bool:
    """Return whether what two items hold is equal: values as plain data, files byte for byte.

    Values that are read on demand are read first. Raises OSError for a file that cannot be read.
    """
    x, y = read_value(x), read_value(y)
    if isinstance(x, Path) and isinstance(y, Path):
        return _files_equal(x, y)
    if isinstance(x, Path) or isinstance(y, Path):  # and a file that the other side embeds
        path, text = (x, y) if isinstance(x, Path) else (y, x)
        return path.is_file() and isinstance(text, str) and path.read_bytes() == text.encode()
    return bool(_comparable_value(x) == _comparable_value(y))


def _files_equal(x: Path, y: Path) -> bool:
    """Return whether two files, or two folders, hold the same bytes.

    Raises OSError for what cannot be read, or is no file: a pipe never ends, a device has no size.
    """
    if x.is_dir() or y.is_dir():
        return x.is_dir() and y.is_dir() and _folders_equal(x, y)
    sizes = []
    for path in (x, y):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path.name} is no regular file")
        sizes.append(found.st_size)
    if sizes[0] != sizes[1]:
        return False
    return x.samefile(y) or _file_digest(x) == _file_digest(y)


def _folders_equal(x: Path, y: Path) -> bool:
    """Return whether two folders hold files of the same names and bytes; OSError as for files."""
    mine, theirs = ({each.name: each for each in side.iterdir()} for side in (x, y))
    return mine.keys() == theirs.keys() and all(_files_equal(mine[n], theirs[n]) for n in mine)


def _file_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _comparable_value(value: Value) -> Value:
    """Return a value as plain lists and dicts that compare by value; NaN equals NaN."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        value = tolist()
    if isinstance(value, Mapping):
        return {key: _comparable_value(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_comparable_value(each) for each in value]
    return "NaN" if value != value else value


def array_items(kind: str, names: Collection[str]) -> tuple[NotCompared, ...]:
    """Return a NotCompared for each array of a batch or state that nothing reads.

    Its state is "unreadable": a result may depend on the array.
    """
    return tuple(NotCompared(kind, name, "unreadable", "nothing here reads it") for name in names)


def one_sided_tensors(
    names: Iterable[str], side: Side, ledger: Ledger, why: str = ""
) -> tuple[NotCompared, ...]:
    """Return those tensors of one side alone that no table lists, as items not compared.

    `names` are tensors that only `side` has, `ledger` is that side's. Tensors that a table lists
    are left out: their role is known. `why` is the reason for items without one in the ledger.
    """
    unlisted = {item.name: item.of for item in ledger.unread if item.kind == "tensor"}
    state: State = "only in A" if side == "A" else "only in B"
    return tuple(
        NotCompared("tensor", name, state, unlisted[name] or why)
        for name in names
        if name in unlisted
    )


def tensor_outside_tower(row: NotCompared) -> NotCompared:
    """Return the row of a one-sided tensor as "no counterpart", since the other side is a tower."""
    return replace(row, state="no counterpart", why="the other side is a tower alone")
