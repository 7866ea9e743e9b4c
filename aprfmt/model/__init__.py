"""A Model: an open file plus its folder, architecture, hyperparameters, and roles.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points.

`model[...]` are the file's own names (companions joined); `model.roles[...]` are the same type
under role keys (`L3.attn_q.weight`), with the file's layout steps undone on demand.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aprfmt.arch import check_arch
from aprfmt.base.data_frames import Row, Tabular
from aprfmt.base.garbage_collector import pause_collector
from aprfmt.base.protocols import Damage, Note, Source, TypedValue, Value, has_aprfmt_keys
from aprfmt.errors import (
    AprfmtError,
    ArchError,
    CodecError,
    FormatError,
    MissingPartError,
    TensorNotFoundError,
    UsageError,
)
from aprfmt.formats import FORMATS, detect_format, open_source
from aprfmt.model.hf_folder import (
    INDEX,
    PICKLED_INDEX,
    WEIGHTS,
    FolderTexts,
    HFFolder,
    find_weights,
    hub_cache_snapshot,
    read_folder,
)
from aprfmt.model.relations import Relation, list_relations, wrong_modules
from aprfmt.remote.paths import RemotePath, can_list, is_remote, parse_location
from aprfmt.tensors.companions import has_parts, holds_codes, join_companions, quantization_section
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec, HyperParams
    from aprfmt.base.protocols import TensorInfo
    from aprfmt.model.file_kinds import Kind
    from aprfmt.model.lone_codes import LoneCode
    from aprfmt.model.renames import Rename
    from aprfmt.model.resolve import Resolution
    from aprfmt.model.unsupported_packing import UndecodedPacking
    from aprfmt.tensors.restoration import Restoration
    from aprfmt.tokenizer.base import Tokenizer
    from aprfmt.tokenizer.stored_parts import Carried

HF_CONFIG_KEYS = {"gguf": "aprfmt.hf_config", "apr": "hf_config"}


# What is public of a model (docs/reference/api.md), and `dir` shows.
PUBLIC = (
    "close", "config", "damage", "format", "get", "hyper", "items", "keys", "metadata", "notes",
    "path", "roles", "spec", "table_rows", "to_arrow", "to_pandas", "tokenizer", "values",
)  # fmt: skip


class LostParts(NamedTuple):
    """A packed weight that does not decode, because tensors of it are missing.

    `stored` are the names of its tensors in the file, `parts` the suffixes of the missing ones.
    """

    stored: tuple[str, ...]
    parts: tuple[str, ...]


class Model(Mapping[str, View], Tabular):
    """An open model; a mapping from the file's own tensor names, and a context manager.

    `arch` forces an architecture by name. Where the architecture is unknown the model still
    opens, and asking for `spec`, `hyper` or `roles` raises ArchError.
    `allow_missing` are patterns of required roles that may be missing (completeness.py).
    With `damaged`, faults in config.json and in packed weights are collected too, not raised.
    """

    def __init__(
        self,
        source: Source,
        folder: HFFolder | None,
        arch: str | None = None,
        allow_missing: Sequence[str] = (),
        damaged: bool = False,
    ) -> None:
        """Wrap an open source and its folder; packed weights are joined, nothing else is read."""
        self.source = source
        self.folder = folder
        self._forced = arch
        self.allow_missing = tuple(allow_missing)
        self._damaged = damaged
        self._found: list[Damage] = []  # found here, in addition to the reader's
        self._without: dict[str, MissingPartError] = {}  # by the weight that lacks them
        self._undecoded: list[Damage] = []
        self._unread: list[AprfmtError] = []  # why packed weights stay as they are stored
        self._remembering: ExitStack | None = None
        self.modules: Relation | None = None  # of the names that the quantization has for modules
        fault = self._add_damage if damaged else None
        self._lazy = join_companions(source.tensors, self._packing, fault, self._unread.append)

    @cached_property
    def _packing(self) -> Mapping[str, Value] | None:
        """What the files say about packed weights, as keys of config.json; None if nothing.

        The section comes from config.json, from the file's metadata, or from a file such as
        hf_quant_config.json. Module names in it that do not match the tensors are renamed, and the
        Relation with the rule for that is stored in `modules`.
        """
        from aprfmt.model.packing import packing_config

        try:
            said = packing_config(self)
        except FormatError as error:
            if not self._damaged:
                raise
            self._add_damage(error)
            return self.config
        self.modules = wrong_modules(self, said)
        if self.modules is None:
            return said
        from aprfmt.model.renames import rename_modules

        return rename_modules(said or {}, self.modules.rules)

    def _add_damage(self, error: AprfmtError) -> None:
        """Append an error to `damage`, its text without the model's path. Returns nothing."""
        text = str(error).removeprefix(f"{self.source.path}: ")
        damage = Damage(str(self.source.path), text, kind=error.kind)
        self._found.append(damage)
        if isinstance(error, CodecError):
            self._undecoded.append(damage)
        if isinstance(error, MissingPartError):
            self._without[error.weight] = error

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What is wrong with the files; empty unless the model was opened with `damaged`."""
        return (*self.source.damage, *self._found)

    @property
    def undecoded(self) -> tuple[Damage, ...]:
        """Why packed weights do not decode, each text begins with the weight's name and ": ".

        It is a part of `damage`, and as empty as that is.
        """
        return tuple(self._undecoded)

    @property
    def forced(self) -> str | None:
        """The architecture that the user named with `arch`; None if it is taken from the file."""
        return self._forced

    # --- the file ---------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The path that was opened (the first file of a split or folder)."""
        return self.source.path

    @property
    def format(self) -> str:
        """The format's name, a key of FORMATS."""
        return self.source.format

    @cached_property
    def key_style(self) -> str:
        """The convention of the metadata keys: "gguf", "apr" or "safetensors" (config.json)."""
        return FORMATS[self.source.format].keys_like or self.source.format

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The metadata of the container: {key: value}."""
        return self.source.metadata

    @property
    def typed(self) -> Mapping[str, Value | TypedValue]:
        """{key: value} of the metadata; values with a declared type in the file are TypedValue."""
        types = self.source.types
        return {
            key: TypedValue(value, types[key]) if key in types else value
            for key, value in self.metadata.items()
        }

    def __getitem__(self, name: str) -> View:
        """Return the tensor with this stored name; TensorNotFoundError with similar names."""
        if name not in self._lazy:
            raise TensorNotFoundError(self._not_found_message(name))
        return View(self._lazy[name])

    def __contains__(self, name: object) -> bool:
        return name in self._lazy  # Mapping's own would look for near names on every miss

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor, or `default` where the file has none of that name."""
        return self[name] if name in self._lazy else default

    def _not_found_message(self, name: str) -> str:
        """Return the message of TensorNotFoundError for a name, with the most similar names."""
        from aprfmt.model.patterns import similar_names

        return (
            f"{self.path}: no tensor {name!r}; near names: "
            f"{', '.join(similar_names(name, self._lazy))}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._lazy)

    def __len__(self) -> int:
        return len(self._lazy)

    @property
    def infos(self) -> "Iterator[TensorInfo]":
        """The TensorInfo of each tensor, in the order of the file. Creates no `View`."""
        return (tensor.info for tensor in self._lazy.values())

    def cache_remote_reads(self) -> None:
        """Cache the bytes fetched from remote files in temporary files until close().

        It is for callers that read a model several times, and does nothing for local files.
        """
        if self._remembering is None and any(isinstance(p, RemotePath) for p in self.source.files):
            from aprfmt.remote.remote_file import keep_fetched

            self._remembering = keep_fetched(self.source.files)

    def close(self) -> None:
        """Close the file. Memory views that raw() returned become invalid."""
        self.source.close()
        if self._remembering is not None:
            self._remembering.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Close the model; without an exception, first raise if a remote file has changed."""
        try:
            if kind is None and any(map(is_remote, self.source.files)):
                from aprfmt.remote.remote_file import refuse_changed

                refuse_changed(self.source.files)
        finally:
            self.close()

    # --- configuration ----------------------------------------------------------------------

    @cached_property
    def config(self) -> Mapping[str, Value] | None:
        """The keys of config.json, from the folder or embedded in a GGUF or APR; None without one.

        Damaged embedded JSON raises FormatError, or with `damaged` is recorded in `damage`.
        """
        if self.folder is not None and self.folder.config is not None:
            return self.folder.config
        carried = self.source.metadata.get(HF_CONFIG_KEYS.get(self.key_style, ""))
        if isinstance(carried, str):
            from aprfmt.formats.bounded_json import loads

            where = f"{self.path}: metadata {HF_CONFIG_KEYS[self.key_style]}"
            try:
                carried = loads(carried, where, max_bytes=16 << 20)
            except FormatError as error:
                if not self._damaged:
                    raise
                self._add_damage(error)
        return carried if isinstance(carried, Mapping) else None

    @cached_property
    def style(self) -> str | None:
        """The naming style of the tensors ("hf", "gguf"); None where neither fits.

        Where names only fit after a rename, it is the style after that.
        """
        from aprfmt.arch.binding import detect_style

        found = detect_style(self._lazy)
        if found is None:
            try:
                found = self.resolution.style  # under a relation
            except AprfmtError:
                pass
        return found

    @cached_property
    def resolution(self) -> "Resolution":
        """The Resolution: architecture, hyperparameters and roles together.

        Raises ArchError or FormatError.
        """
        found = self._resolution_or_error
        if isinstance(found, AprfmtError):
            raise found.with_traceback(None)
        if found.relations:
            self.style = found.style  # under the relation, whatever most names look like
        return found

    @cached_property
    def _resolution_or_error(self) -> "Resolution | AprfmtError":
        """The Resolution, or the error that `resolution` raises; computed at the first use."""
        from aprfmt.model.resolve import resolve

        try:
            return resolve(self, self._forced)
        except AprfmtError as error:
            return error.with_traceback(None)  # whose frames hold the names

    def read_as(self, found: "Resolution") -> None:
        """Read the tensors as `found` has them, in place of what the file itself says."""
        self.__dict__["_resolution_or_error"] = found

    @cached_property
    def kind(self) -> "Kind | None":
        """The Kind of a file that is no whole model (adapter, imatrix, ...); None for a model."""
        from aprfmt.model.file_kinds import find_kind

        return find_kind(self)

    @cached_property
    def relations(self) -> tuple[Relation, ...]:
        """The Relations under which this file is read; usually ().

        They say how it departs from the published form: other names, exchanged axes, wrong keys.
        """
        found = list_relations(self)
        if self.config is None or quantization_section(self.config) is None:
            return found
        from aprfmt.model.quantized_modules import wrong_claims

        claims = wrong_claims(self)
        return found if claims is None else (*found, claims)

    @property
    def spec(self) -> "ArchSpec":
        """The ArchSpec of the architecture. Raises ArchError for an unknown architecture."""
        return self.resolution.spec

    @property
    def hyper(self) -> "HyperParams":
        """The hyperparameters, each with its origin."""
        return self.resolution.hyper

    @property
    def roles(self) -> Mapping[str, View]:
        """{role key: View} of the tensors with a role, in execution order."""
        return self.resolution.roles

    @cached_property
    def roles_of(self) -> Mapping[str, tuple[str, ...]]:
        """{stored name: role keys it holds}; empty where the architecture is unknown."""
        found: dict[str, tuple[str, ...]] = {}
        try:
            roles = self.roles
        except ArchError:
            return found
        for key, view in roles.items():
            for name in view.names:
                found[name] = (*found.get(name, ()), key)
        return found

    def find(self, key: str) -> View | None:
        """Return the tensor with this role key, else the stored tensor of this name, else None."""
        try:
            role = self.roles.get(key)
        except ArchError:
            role = None
        return self.get(key) if role is None else role

    @cached_property
    def carried(self) -> "Carried":
        """The tokenizer's texts and lists in the model's files, each read once on demand.

        Later changes of the folder's text files are not seen.
        """
        from aprfmt.tokenizer.stored_parts import Carried

        return Carried(self)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The Tokenizer, built from the model's files. Raises FormatError if there is none."""
        from aprfmt.tokenizer.loading import load_tokenizer

        return load_tokenizer(self)

    @cached_property
    def embedded_files(self) -> Mapping[str, Any]:
        """{file name: content} of the source's files, such as config.json, that the metadata embed.

        Contents are texts; in a damaged file they may be other values. Raises FormatError where the
        metadata key that holds them is no JSON object.
        """
        from aprfmt.model.carried_files import parse_embedded_files

        return parse_embedded_files(self.metadata, self.path)

    @cached_property
    def records(self) -> "Restoration | None":
        """What aprfmt recorded in the file to restore its source's exact bits; None for nothing."""
        if not has_aprfmt_keys(self.metadata):
            return None
        from aprfmt.tensors.restoration import read_restoration

        return read_restoration(self.metadata, str(self.path))

    @cached_property
    def unread(self) -> "UndecodedPacking | None":
        """The packed weights that no codec decodes; None if there are none."""
        # Without a section, only tensors that hold codes suggest packed weights.
        if quantization_section(self._packing or {}) is None and not holds_codes(self._lazy):
            return None
        from aprfmt.model.unsupported_packing import undecoded_packing

        why = str(self._unread[0]) if self._unread else ""
        return undecoded_packing(self._lazy, self._packing, why, self._without)

    @cached_property
    def lost_parts(self) -> Mapping[str, LostParts]:
        """{packed weight that does not decode: its tensors, and the suffixes that are missing}."""
        found = {name: LostParts(one.stored, one.parts) for name, one in self._without.items()}
        if self.unread is not None and self.unread.lacks:
            lost = LostParts(tuple(one.name for one in self.unread.tensors), self.unread.lacks)
            found |= dict.fromkeys(sorted(self.unread.weights), lost)
        return found

    @cached_property
    def lone_codes(self) -> "Mapping[str, LoneCode]":
        """{stored name: LoneCode} of matrices of 8-bit codes whose scale is not in the file."""
        if not holds_codes(self._lazy):
            return {}
        from aprfmt.model.lone_codes import find_lone_codes

        return find_lone_codes(self)

    @property
    def notes(self) -> Sequence[Note]:
        """Remarks about the file: those of the reader, and oddities of its packed weights."""
        said, other = self.unread, self._conflicting_packings
        found = () if said is None else (said.as_note(str(self.path)),)
        alone = self._lone_codes_note
        more = (note for note in (other, alone, self._partial_input_scales) if note is not None)
        return (*self.source.notes, *found, *more, *self._missing_parts)

    @cached_property
    def _lone_codes_note(self) -> Note | None:
        """The note that weights are codes without their scale; None if there are none."""
        if not self.lone_codes:
            return None
        from aprfmt.model.lone_codes import lone_codes_note

        return lone_codes_note(self)

    @cached_property
    def plain_duplicates(self) -> Mapping[str, View]:
        """{name: View} of plain tensors that are stored under the very name of a packed weight.

        Under that name the model has the packed weight, of which such a tensor is no part.
        """
        if not has_parts(self._lazy):
            return {}
        stored, found = self.source.tensors, {}
        for name, tensor in self._lazy.items():
            if tensor.parts and name in stored:
                if all(part.info.name != name for part in tensor.parts.values()):
                    found[name] = View(stored[name])
        return found

    @cached_property
    def _partial_input_scales(self) -> Note | None:
        """The note that only some packed weights have input scales; None if all or none have."""
        if not has_parts(self._lazy):
            return None
        from aprfmt.model.packing import partial_input_scales

        return partial_input_scales(self)

    @cached_property
    def _missing_parts(self) -> Sequence[Note]:
        """The notes on parts of packed weights that the configuration promises; () without any."""
        if not has_parts(self._lazy):
            return ()
        from aprfmt.model.promised_parts import missing_part_notes

        return missing_part_notes(self)

    @cached_property
    def _conflicting_packings(self) -> Note | None:
        """The note that two files state different quantizations; None if they do not."""
        from aprfmt.model.packing import conflicting_packings

        try:
            return conflicting_packings(self)
        except FormatError:
            return None  # reported where the packing is read

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(
            self, self.path, self.format, self._architecture_text(), f"{len(self)} tensors"
        )

    def _architecture_text(self) -> str:
        """Return the architecture's name, or "architecture not known"."""
        try:
            return self.spec.name
        except AprfmtError:
            return "architecture not known"

    def __dir__(self) -> list[str]:
        from aprfmt.base.object_repr import public_dir

        return public_dir(self, PUBLIC)

    def table_rows(self) -> list[Row]:
        """Return one dict per stored tensor: name, role, shape, encoding, nbytes, offset."""
        roles: dict[str, str] = {}
        with suppress(ArchError):  # an unknown architecture has tensors and no roles
            roles = {name: key for key, side in self.roles.items() for name in side.names}
        return [
            {
                "name": name,
                "role": roles.get(name),
                "shape": list(side.shape),
                "encoding": side.encoding,
                "nbytes": side.nbytes,
                "offset": side.offset,
            }
            for name, side in self.items()
        ]

    def _ipython_key_completions_(self) -> list[str]:
        """Return the tensor names that IPython offers after `model["`."""
        return list(self._lazy)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: sizes, encodings, the first tensors. Reads no tensor data."""
        from aprfmt.base.notebook import ROWS, Card, Table

        # Tensors, parameters and bytes by encoding.
        sizes: dict[str, list[int]] = {}
        for tensor in self.values():
            row = sizes.setdefault(tensor.encoding, [0, 0, 0])
            row[:] = row[0] + 1, row[1] + math.prod(tensor.shape), row[2] + tensor.nbytes
        try:
            known, kind = self.spec.name, ""
        except AprfmtError as error:
            known, kind = str(error), "warn"
        # Damage is shown first; an unknown architecture is a warning.
        broken = "; ".join(f"{one.where}: {one.text}" for one in self.damage)
        first = [(name, self[name].encoding, list(self[name].shape)) for name in list(self)[:ROWS]]
        return Card(
            str(self.path),
            broken or ("" if not kind else known),
            "bad" if broken else "warn",
            [
                ("format", f"{self.format} {self.source.version}".strip()),
                ("architecture", "" if kind else known),
                ("tensors", len(self)),
                ("parameters", f"{sum(row[1] for row in sizes.values()):,}"),
            ],
            [
                Table(
                    ("encoding", "tensors", "parameters", "bytes"),
                    [(name, *map("{:,}".format, row)) for name, row in sizes.items()],
                    len(sizes),
                ),
                Table(("tensor", "encoding", "shape"), first, len(self)),
            ],
        ).html()


def open_model(
    path: Path | str,
    *,
    arch: str | None = None,
    partial: bool = False,
    damaged: bool = False,
    allow_missing: Sequence[str] = (),
    rename: "Sequence[Rename]" = (),
) -> Model:
    """Return the opened Model of a file, shard index, folder, hub name or address.

    A folder is Hugging Face's, a hub name is `org/name` of the local hub cache.
    The format is decided by content. config.json and tokenizer files are read from the folder of
    a safetensors file, and from `path` itself if it is a folder. With `damaged`, faults that leave
    the rest readable are collected in `model.damage`, and only reading an affected tensor raises.
    `allow_missing` are patterns of roles that may be missing. `rename` are rules that give tensors,
    and the modules that config.json's quantization names, other names. Raises FormatError,
    UsageError, ArchError for an unknown `arch`.
    """
    if path == "":
        raise UsageError("the path of the model is empty; is a variable of the shell not set?")
    if arch is not None:
        check_arch(arch)
    path = parse_location(path)
    named_folder = False
    if path.name == "config.json" and can_list(path.parent) and path.is_file():
        path = path.parent  # the folder is meant: a configuration alone is no model
    if not path.exists():
        cached = hub_cache_snapshot(str(path))
        if cached is None:
            from aprfmt.model.missing_path import missing_path_message

            raise UsageError(missing_path_message(path))
        path = cached
    if path.is_dir():
        named_folder = True
        path = find_weights(path)
    with pause_collector():  # its walks over a million tensors take longer than all else
        return _open_checked(path, named_folder, arch, partial, damaged, allow_missing, rename)


def open_damaged(
    path: Path | str, *, arch: str | None = None, allow_missing: Sequence[str] = ()
) -> Model:
    """Return the opened Model of a file or folder of which some parts cannot be read.

    What is wrong with files is in `model.damage`, a shard that is missing or cannot be read in the
    notes (`missing_shards`). `arch` names the architecture, None for the file's; `allow_missing`
    are patterns of roles that may be missing. Raises FormatError where nothing can be read,
    UsageError, and ArchError for an unknown `arch`.
    """
    try:
        return open_model(path, arch=arch, damaged=True, allow_missing=allow_missing)
    except CodecError:
        raise  # packed weights that do not decode
    except FormatError as error:
        try:
            return open_model(path, arch=arch, partial=True, allow_missing=allow_missing)
        except FormatError:
            raise error from None


def missing_shards(model: Model) -> tuple[Damage, ...]:
    """Return the shards of a model that are missing or cannot be read, as Damage of its files."""
    return tuple(
        Damage(note.where, note.text, kind="truncated")
        for note in model.source.notes
        if note.key == "missing_shard"
    )


def _open_checked(
    path: Path,
    named_folder: bool,
    arch: str | None,
    partial: bool,
    damaged: bool,
    allow_missing: Sequence[str],
    rename: "Sequence[Rename]",
) -> Model:
    """Return the opened model, with its folder and with `rename` applied.

    The file is closed on an error. `path` is a file of weights. `named_folder` says that the user
    named its folder: config.json and tokenizer files are read from there whatever the format is.
    """
    source = _open_file_or_index(_shard_index_of(path, named_folder), partial, damaged)
    folder, wrong = None, None
    try:
        keyed = FORMATS[source.format].keys_like or source.format
        if named_folder or (keyed == "safetensors" and can_list(path.parent)):
            try:
                folder = read_folder(path.parent)
            except FormatError as error:
                if not damaged:
                    raise
                folder, wrong = HFFolder(path.parent, None, FolderTexts(path.parent)), error
        if rename:
            source, folder = _rename_source(source, folder, rename)
        model = Model(source, folder, arch, allow_missing, damaged)
        if wrong is not None:
            model._add_damage(wrong)
        return model
    except BaseException:
        source.close()
        raise


def _rename_source(
    source: Source, folder: HFFolder | None, rules: "Sequence[Rename]"
) -> tuple[Source, HFFolder | None]:
    """Return (source, folder) with tensors and the modules in config.json renamed by `rules`.

    Raises UsageError for a rule that changes nothing.
    """
    from aprfmt.model.renames import RenamedSource, rename_modules, rename_names

    config = None if folder is None else folder.config
    made = None if config is None else rename_modules(config, rules)
    rename_names(source.tensors, rules, source.path, strict=made == config)
    if folder is not None and made is not None and made != config:
        texts = {**folder.texts, "config.json": json.dumps(made, indent=2) + "\n"}
        folder = HFFolder(folder.path, made, texts)
    return RenamedSource(source, rules), folder


def _shard_index_of(path: Path, named_folder: bool) -> Path:
    """Return the shard index next to a file that is named like a shard; else `path` itself.

    An index that does not exist is returned too where the user named the folder, and a whole set of
    shards is in it.
    """
    if re.fullmatch(r"pytorch_model-\d{5}-of-\d{5}\.bin", path.name):
        index = path.with_name(PICKLED_INDEX)
        return index if index.is_file() else path
    shard = re.fullmatch(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors", path.name)
    if shard is None:
        return path
    index = path.with_name(f"{shard['stem']}.safetensors.index.json")
    if index.is_file():
        return index
    if named_folder and not is_remote(path):
        from aprfmt.formats.safetensors.index_check import complete_set

        return index if complete_set(index) else path
    return path


def recognize_format(path: Path) -> str:
    """Return the format's name (a key of FORMATS) of a file or folder, even if damaged.

    Raises FormatError or UsageError if it is not a model.
    """
    file = find_weights(path) if path.is_dir() else path
    if _is_safetensors_index(file):
        return next(name for name, spec in FORMATS.items() if spec.weights_name == WEIGHTS)
    return detect_format(file).name


def _is_safetensors_index(path: Path) -> bool:
    """Return whether a path is named like a safetensors shard index."""
    return path.name == INDEX or path.name.endswith(".safetensors.index.json")


def _open_file_or_index(path: Path, partial: bool, damaged: bool) -> Source:
    """Return the opened file, or the opened shards of a safetensors index."""
    if _is_safetensors_index(path):
        from aprfmt.formats.safetensors.reader import open_index

        return open_index(path, partial=partial, damaged=damaged)
    return open_source(path, partial=partial, damaged=damaged)
