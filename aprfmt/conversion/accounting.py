"""Account for every tensor and companion file of a source in a copy, so that no loss is silent.

An *item* is an entry of a model's ledger, the list of all that it is made of: a tensor, a key, a
text, a file.

Two open models are compared: the plan of the conversion is not trusted. Every stored tensor, the
scales of packed weights, a tied head and the files next to the weights are copied, transformed or
dropped; a drop needs a flag, which the copy records. Everything else is lost.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from aprfmt.arch.value_checks import same_value
from aprfmt.base.text_escape import shorten
from aprfmt.codecs.dialect import OF_INPUTS
from aprfmt.conversion.options import Drops, Options
from aprfmt.conversion.sidecar_files import (
    KEYS,
    TEMPLATE,
    VOCABULARY,
    embedded_files,
    sidecar_names,
)
from aprfmt.errors import AprfmtError, ArchError, ConversionError
from aprfmt.model import Model
from aprfmt.model.carried_files import FILES_KEY, foreign_gguf_keys, json_object
from aprfmt.model.hf_folder import TEXT_FILES
from aprfmt.model.ledger import (
    DIFFERING,
    OF_WEIGHTS,
    OPEN,
    Item,
    Kind,
    Ledger,
    NotCompared,
    State,
    folder_files,
    key_paths,
    list_not_compared,
    make_ledger,
)
from aprfmt.model.packing import OLDER_FILES
from aprfmt.model.resolve import spellings_by_name
from aprfmt.model.sidecar_files import companion_kind, file_row
from aprfmt.tensors.view import View
from aprfmt.tokenizer.carriers import has_tokenizer
from aprfmt.tokenizer.hf_json import post_processor_ids
from aprfmt.tokenizer.stored_tokenizer import has_listed_tokens, read_tokenizer_parts, same_frame

if TYPE_CHECKING:
    from aprfmt.tensors.view import View

Fate = Literal["copied", "transformed", "dropped", "lost"]
FATES: tuple[Fate, ...] = ("copied", "transformed", "dropped", "lost")
RECORD = "aprfmt.dropped"  # JSON {name in the source: the flag that left it out}
REMOVED = f"--remove {FILES_KEY}"  # the flag for files whose key is taken out; not recorded
ALONE = "--arch none, --generic"  # the flags that copy a container without its companions
_SHOWN = 5
_UNREAD_KINDS: tuple[Kind, ...] = ("file", "metadata key", "config key")
_PARTS_IN_FILES: tuple[Kind, ...] = ("tokenizer part", "generation setting")
_NO_PLACE = "nothing reads it, and the copy has no place for it"
_NOT_TAKEN = "a conversion leaves it where it is"
_OTHER_VALUE = "another value, which nothing reads"
_EDITED = "changed as asked"
_NOT_READ = "what the copy says of it cannot be read"
_INPUTS_GONE = "of activations, which a weight of the copy has not"


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One thing of the source: its name and kind, what became of it, and how or why.

    `state` is that of an item which nothing reads and no flag speaks of, and of a frame of texts
    that the copy cannot state; None for every other.
    """

    name: str
    kind: str
    fate: Fate
    how: str = ""
    state: State | None = None


@dataclass(frozen=True)
class Account:
    """What became of everything in a source; it is balanced where nothing is lost."""

    entries: tuple[SourceItem, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """{fate: number of entries} for "copied", "transformed", "dropped" and "lost"."""
        found = Counter(entry.fate for entry in self.entries)
        return {fate: found[fate] for fate in FATES}

    @property
    def lost(self) -> tuple[SourceItem, ...]:
        """The entries of what the copy lacks although no flag left it out."""
        return tuple(entry for entry in self.entries if entry.fate == "lost")

    @property
    def left(self) -> tuple[NotCompared, ...]:
        """Keys and files unknown to aprfmt that the copy lacks or changed without a flag.

        Also the ids that the copy puts around a text and the source does not.
        """
        return tuple(
            NotCompared(
                entry.kind.removeprefix("unread "), entry.name, entry.state, entry.how,
                "the source" if entry.state == "only in A" else "",
            )
            for entry in self.entries
            if entry.state is not None and entry.state in DIFFERING | OPEN
        )  # fmt: skip

    @property
    def says(self) -> str:
        """The number of entries, and how many have each fate, in words."""
        counts = ", ".join(f"{count} {fate}" for fate, count in self.counts.items() if count)
        return f"{len(self.entries)} of the source: {counts or 'nothing'}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "items": len(self.entries),
            **self.counts,
            "entries": [asdict(entry) for entry in self.entries],
        }


def describe_losses(entries: Sequence[SourceItem]) -> str:
    """Return the names and kinds of the first lost entries, as an error shows them."""
    shown = ", ".join(f"{entry.name} ({entry.kind})" for entry in entries[:_SHOWN])
    return f"{shown}{' ...' if len(entries) > _SHOWN else ''}"


def account_for_source(
    copy: Model,
    source: Model,
    excused: Callable[[str], str],
    edited: Collection[tuple[str, str]] = (),
) -> Account:
    """Return what became of everything in `source`, by comparing it with `copy`.

    `excused(name)` returns the flag that left out a tensor or a file, "" for what should be there.
    `edited` are keys (kind, name) that were to get another value or to be removed.
    """
    both = _Comparison(copy, source, excused, edited)
    files = sidecar_items(source, both.file)
    rest = (*both.hyperparameters(), *both.keys(), *both.frames(), *files, *both.unread())
    rest += (*both.unreadable_parts(),)
    return Account((*both.tensors(), *both.head(), *rest))


def recorded_omissions(copy: Model) -> Callable[[str], str]:
    """Return a function from a name in the source to the flag that left it out of the copy.

    The flag is "" for other names. It is looked up in the record that the copy itself holds.
    Raises FormatError for a record that is not JSON.
    """
    found = _omission_record(copy)
    return lambda name: str(found.get(name, ""))


def _omission_record(model: Model) -> Mapping[str, Any]:
    """Return {name in the source: flag} that a model's metadata records; {} without a record."""
    text = model.metadata.get(RECORD)
    return json_object(text, f"{model.path}: {RECORD}") if isinstance(text, str) else {}


def sidecar_items(source: Model, fate: Callable[[str, str], SourceItem]) -> Iterator[SourceItem]:
    """Yield what `fate(name, kind)` returns for every companion file of a source."""
    for name in sidecar_names(source):
        kind = companion_kind(name)
        if kind:
            yield fate(name, kind)


class _Comparison:
    """A copy and its source, compared item by item."""

    def __init__(
        self,
        copy: Model,
        source: Model,
        excused: Callable[[str], str],
        edited: Collection[tuple[str, str]] = (),
    ) -> None:
        """Look up the roles, the ledger's items and the companion texts of both models.

        `excused` and `edited` are those of `account_for_source`.
        """
        self.copy, self.source, self.excused, self.edited = copy, source, excused, edited
        self.roles, self.roles_of = _roles(copy, source), source.roles_of
        ledger = make_ledger(source, (*OF_WEIGHTS, *_UNREAD_KINDS))
        items, self.unreadable = ledger.items, ledger.unreadable
        self.mine = Ledger(str(source.path), items)
        self.read = {item.name: item for item in items if item.kind in OF_WEIGHTS}
        self._texts, self._stated = _texts_of(copy), _texts_of(source)

    # --- tensors ------------------------------------------------------------------------------

    def tensors(self) -> Iterator[SourceItem]:
        """Yield an entry on what became of each stored tensor, scales of packed weights too."""
        for name, view in self.source.items():
            entry = self._tensor(name, view)
            yield entry
            main = view.stored[0].parts.get("")
            for part in view.parts.values():
                if part is not main:
                    yield self._scale(part.info.name, name, view, entry)

    def _copies_of(self, name: str) -> "tuple[View, ...]":
        """Return the copy's tensors that hold the values of a tensor of the source; () for none.

        They are found by role, else by name.
        """
        keys = self.roles_of.get(name, ())
        held = tuple(self.roles[key] for key in keys if key in self.roles)
        if keys and len(held) == len(keys):
            return held
        same = self.copy.get(name)
        return () if same is None else (same,)

    def _tensor(self, name: str, view: "View") -> SourceItem:
        """Return an entry that says whether a weight's main tensor was copied or lost, and why.

        Its fate is one of copied, transformed, dropped and lost.
        """
        # What the source's tensor is.
        stored = view.stored[0]
        name = stored.parts[""].info.name if stored.parts else name
        item = self.read[name] if name in self.read else Item("tensor", name, "unread")
        kind = next((kind for kind in ("draft head", "tower") if kind in item.of), "tensor")
        # Nothing in the copy: left out by a flag, not needed, or lost.
        found = self._copies_of(view.name)
        if not found:
            why = self.excused(name) or self.excused(view.name)
            if why:
                return SourceItem(name, kind, "dropped", why)
            if item.reading == "hyperparameter":
                return SourceItem(name, kind, "transformed", item.of)
            if item.reading == "without effect":
                return SourceItem(name, kind, "dropped", item.of)
            return SourceItem(name, kind, "lost", "the copy has no such tensor")
        # Something in the copy: transformed if encoding or layout differs.
        encodings = "+".join(dict.fromkeys(one.encoding for one in found))
        names = ", ".join(dict.fromkeys(each for one in found for each in one.names))
        steps = {step for one in found for step in one.steps}
        if encodings != view.encoding:
            return SourceItem(name, kind, "transformed", f"{view.encoding} to {encodings}: {names}")
        before = {step for key in self.roles_of.get(view.name, ())
                  for step in self.source.roles[key].steps}  # fmt: skip
        if steps != before or (not before and any(one.shape != view.shape for one in found)):
            return SourceItem(name, kind, "transformed", f"laid out anew: {names}")
        return SourceItem(name, kind, "copied", names if names != name else "")

    def _scale(self, name: str, weight: str, view: "View", main: SourceItem) -> SourceItem:
        """Return an entry that says what became of the scale `name` of a packed weight.

        `weight` is the weight's name and `main` the entry of its main tensor. The scale is copied
        where the copy stores it, transformed where it went into decoded values.
        """
        if main.fate in ("dropped", "lost"):
            return SourceItem(name, "scale", main.fate, main.how)
        found = self._copies_of(weight)
        suffix = next(key for key, part in view.parts.items() if part.info.name == name)
        kind = suffix.lstrip("._")
        held = [[stored.parts for stored in one.stored] for one in found]
        if any(all(kind in {p.lstrip("._") for p in parts} for parts in one) for one in held):
            return SourceItem(name, "scale", "copied")
        if any(part.info.name == name for one in held for parts in one for part in parts.values()):
            return SourceItem(name, "scale", "copied")
        if all(one.encoding == view.encoding for one in found):
            why = self.excused(name)
            return SourceItem(
                name, "scale", "dropped" if why else "lost", why or "the copy has it not"
            )
        if OF_INPUTS.search(kind):
            why = self.excused(name)
            return SourceItem(name, "scale", "dropped" if why else "lost", why or _INPUTS_GONE)
        return SourceItem(name, "scale", "transformed", f"part of {main.how}")

    def head(self) -> Iterator[SourceItem]:
        """Yield an entry on what became of a tied head, if the source has one."""
        key, table = "output.weight", "token_embd.weight"
        try:
            hyper = self.source.hyper
        except ArchError:
            return
        tied = "tied_embeddings" in hyper and bool(hyper["tied_embeddings"])
        if not tied or self.source.roles.get(key) is not None or table not in self.source.roles:
            return
        name = f"{key} (tied)"
        if key in self.roles:
            yield SourceItem(name, "tied head", "transformed", "a separate tensor")
        elif not self.roles or (table in self.roles and self._has_tied_head()):
            yield SourceItem(name, "tied head", "copied", "tied")
        else:
            why = self.excused(key) or self.excused(table)
            yield SourceItem(name, "tied head", "dropped" if why else "lost", why or "is not tied")

    def _has_tied_head(self) -> bool:
        """Return whether the copy's head uses the embedding; True for an unknown architecture."""
        try:
            return bool(self.copy.hyper["tied_embeddings"])
        except ArchError:
            return True

    # --- what stands in keys ------------------------------------------------------------------

    def hyperparameters(self) -> Iterator[SourceItem]:
        """Yield an entry on each hyperparameter of the source that has another value in the copy.

        Only values that a key of the source states are compared, not defaults. Values that tensors
        show are left out, as the tensors have entries. Nothing is yielded where keys were to
        change, or where the architectures differ or are not known.
        """
        try:
            mine, other = self.source.hyper, self.copy.hyper
        except ArchError:
            return
        if self.edited or self.source.spec.name != self.copy.spec.name:
            return
        for name in mine:
            stated = mine.of(name).origin in ("config", "metadata") and name in other
            if not stated or other.of(name).origin in ("tensor", "shape"):
                continue
            if not same_value(mine[name], other[name]):
                before, after = (shorten(repr(each[name]), 40) for each in (mine, other))
                how = f"{before}, and would be {after} in the copy"
                why = self.excused("config.json")
                yield SourceItem(name, "hyperparameter", "dropped" if why else "lost", why or how)

    def keys(self) -> Iterator[SourceItem]:
        """Yield an entry on each of vocabulary, template and licence in the source's keys.

        It says whether the copy has it.
        """
        copy, source = self.copy, self.source
        for name, kind in embedded_files(source).items():
            if name == VOCABULARY:
                there, same = has_tokenizer(copy.carried), copy.format == source.format
            elif name == TEMPLATE:
                there, same = (
                    copy.carried.readable_template() is not None,
                    copy.carried.readable_template() == source.carried.readable_template(),
                )
            else:
                there = (found := _metadata_value(copy, name)) is not None
                same = found == _metadata_value(source, name)
            if there:
                how = "in the copy's own form" if name == VOCABULARY else "another"
                yield SourceItem(name, kind, *(("copied",) if same else ("transformed", how)))
            else:
                why = self.excused(name)
                yield SourceItem(
                    name, kind, "dropped" if why else "lost", why or "the copy has none"
                )

    def frames(self) -> Iterator[SourceItem]:
        """Yield an entry where the copy's tokenizer puts other ids before or after a text.

        llama.cpp puts [CLS] and [SEP] around every text of a WordPiece vocabulary, for example, and
        no key of a GGUF says otherwise. Nothing is yielded where a tokenizer cannot be read, or
        where keys of the tokenizer were to change.
        """
        if any(name.startswith("tokenizer.") for _, name in self.edited):
            return
        try:
            if _keeps_processor(self.source, self.copy):
                return
            mine, theirs = (read_tokenizer_parts(one) for one in (self.source, self.copy))
        except AprfmtError:
            return  # what cannot be read has its own entry
        if mine is None or theirs is None:
            return
        for at, place in enumerate(("before", "after")):
            if same_frame(mine, theirs, at):
                continue
            put, puts = (list(side.frame[at]) or "nothing" for side in (mine, theirs))
            how = f"{put} in the source, and {puts} in the copy"
            why = self.excused("tokenizer.json")
            state: State | None = None if why else "unequal"
            name = f"ids {place} every text"
            yield SourceItem(name, "tokenizer part", "transformed", why or how, state)

    # --- what nothing reads -------------------------------------------------------------------

    def unread(self) -> Iterator[SourceItem]:
        """Yield an entry on what became of each file and key of the source unknown to aprfmt.

        Files that only other loaders need have an entry too. An unknown key is copied if the copy's
        format can hold it; an unknown file never is. Files and keys that cannot be read are entered
        as not compared.
        """
        fates: Mapping[State, tuple[Fate, str]] = {
            "equal": ("copied", ""),
            "unequal": ("transformed", _OTHER_VALUE),
            "only in A": ("dropped", _NO_PLACE),
            "unreadable": ("transformed", _NOT_READ),
        }
        left = list_not_compared(self.mine, make_ledger(self.copy, _UNREAD_KINDS), _UNREAD_KINDS)
        states = {(row.kind, row.name): row.state for row in left}
        for item in self.mine.items:
            lost = item.kind == "file" and item.needed and (item.kind, item.name) in states
            if not (item.unread or lost):
                continue
            if item.kind in OF_WEIGHTS or (item.kind == "file" and companion_kind(item.name)):
                continue  # it has its entry by what it is
            fate, how = fates.get(states.get((item.kind, item.name), "equal"), ("copied", ""))
            how = how if item.unread else _NOT_TAKEN
            why = _EDITED if how and (item.kind, item.name) in self.edited else ""
            why = self.excused("config.json" if item.kind == "config key" else item.name) or why
            state = None if why else states.get((item.kind, item.name))
            yield SourceItem(item.name, f"unread {item.kind}", fate, why or how, state)
        for row in self.unreadable:
            why = self.excused(row.name)
            state = None if why else row.state
            yield SourceItem(row.name, f"unread {row.kind}", "dropped", why or row.why, state)

    def unreadable_parts(self) -> Iterator[SourceItem]:
        """Yield an entry on each part of the source's tokenizer and settings that cannot be read.

        Its bytes may be in the copy, but what they say was not compared. A file that a flag left
        out, or that was written anew, has none.
        """
        for row in make_ledger(self.source, _PARTS_IN_FILES).unreadable:
            text = self._stated.get(row.name)
            if self.excused(row.name) or self._texts.get(row.name, text) != text:
                continue
            fate: Fate = "copied" if row.name in self._texts else "dropped"
            yield SourceItem(row.name, f"unread {row.kind}", fate, row.why, row.state)

    # --- files --------------------------------------------------------------------------------

    def file(self, name: str, kind: str) -> SourceItem:
        """Return an entry that says whether a companion file was copied or lost, and why.

        Its fate is one of copied, transformed, dropped and lost.
        """
        if name in self._texts:
            same = self._texts[name] == self._stated.get(name)
            return SourceItem(name, kind, "copied" if same else "transformed",
                         "" if same else "says what the copy is")  # fmt: skip
        made = self._location_text(name, kind)
        if made:
            return SourceItem(name, kind, "transformed", made)
        why = self.excused(name)
        return SourceItem(
            name, kind, "dropped" if why else "lost", why or "the copy has no such file"
        )

    def _location_text(self, name: str, kind: str) -> str:
        """Return in words where the copy has the content of a source's file, "" if nowhere.

        The file itself is not in the copy. `name` is its name, `kind` what it holds.
        """
        if kind == "tokenizer" and has_tokenizer(self.copy.carried):
            return "the copy's vocabulary"
        if kind == "template" and self.copy.carried.readable_template() is not None:
            return "the copy's chat template"
        if name == "config.json" and (self.copy.config is not None or self.roles):
            return "the copy's hyperparameters"
        if name == "hf_quant_config.json" and not any(
            view.encoding.startswith("MODELOPT") for view in self.copy.values()
        ):
            return "in the encodings of the copy"
        if name in OLDER_FILES and not any(
            part.packed is not None for view in self.copy.values() for part in view.stored
        ):
            return "in the encodings of the copy"
        return ""


def _roles(copy: Model, source: Model) -> Mapping[str, "View"]:
    """Return {role: tensor} of the copy, by the source's architecture where it names none.

    {} where neither can be bound to its names.
    """
    try:
        return copy.roles
    except ArchError:
        pass
    from aprfmt.arch.binding import bind_names

    try:
        groups = bind_names(source.spec, copy.style or "", tuple(copy)).groups
    except ArchError:
        return {}
    return {
        key: View(*(copy[name].stored[0] for name in group.stored))
        for group in groups
        for key in group.roles
    }


def _keeps_processor(source: Model, copy: Model) -> bool:
    """Return whether a copy frames texts as its source's post-processor does, seen without a parse.

    True where both have a tokenizer.json, which is copied, or both have lists. Of a tokenizer.json
    next to lists only the post-processor is looked at: a large vocabulary takes seconds to read.
    """
    by_lists = [has_listed_tokens(one) for one in (source, copy)]
    if by_lists[0] == by_lists[1]:
        return True
    lists, files = (source, copy) if by_lists[0] else (copy, source)
    read = read_tokenizer_parts(lists)
    return read is None or read.frame == post_processor_ids(files.carried.tokenizer_json_keys())


def _metadata_value(model: Model, key: str) -> Any:
    """Return the value of a metadata key, such as the licence's; None where the model has none.

    Where the model's own metadata lack the key, the value is that of the GGUF that it was converted
    from, if it carries that. Arrays are returned as lists.
    """
    stated = foreign_gguf_keys(model).get(key)
    found = stated[1] if isinstance(stated, list) and len(stated) == 2 else None
    value = model.metadata.get(key, found)
    return value if isinstance(value, str) or not hasattr(value, "tolist") else value.tolist()


def _texts_of(model: Model) -> Mapping[str, str]:
    """Return {file name: text} of a folder's text files, or of those embedded in one file."""
    if model.folder is not None:
        return model.folder.texts
    found = dict(model.carried.embedded_texts)
    kept = {"config.json": model.metadata.get("aprfmt.hf_config"),
            "tokenizer.json": model.carried.tokenizer_json()}  # fmt: skip
    return {**found, **{name: text for name, text in kept.items() if isinstance(text, str)}}


def omissions_by_flag(
    source: Model, drops: Drops, *, files_too: bool, removed: Sequence[str]
) -> dict[str, str]:
    """Return {name: flag} of everything a conversion leaves out of a source by its flags.

    `files_too`: the container alone is copied, without companion files. `removed` are metadata keys
    that are removed by name, which may hold embedded files. What an earlier conversion recorded as
    left out stays in the result.
    """
    earlier = {} if RECORD in removed else _omission_record(source)
    found = {name: str(flag) for name, flag in earlier.items()}
    # What single files store in keys.
    for name in embedded_files(source):
        keys = [key for key in removed if key == name or key.startswith(KEYS.get(name, name))]
        if keys:
            found[name] = f"--remove {keys[0]}"
        elif files_too:
            found[name] = ALONE
    # Tensors, with the stored parts of packed weights.
    every = spellings_by_name(source) if drops else {}
    for name, view in source.items() if drops else ():
        spellings = (name, *view.names, *every.get(name, ()))
        whole = any(match(each) for match in drops for each in spellings)
        stored = [one.info.name for one in view.parts.values() or view.stored]
        dropped = (each for each in stored if whole or any(match(each) for match in drops))
        found.update(dict.fromkeys(dropped, "--drop"))
    # Companion files, also those that nothing reads.
    there = [path.name for path in folder_files(source) if not path.is_dir()]
    unread = {name for name in there if file_row(name).reading == "unread" or file_row(name).needed}
    for name in (*sidecar_names(source), *sorted(unread - {*sidecar_names(source)})):
        if any(match(name) for match in drops):
            found[name] = "--drop"
        elif files_too:
            found[name] = ALONE
        elif FILES_KEY in removed and name not in unread:
            found[name] = REMOVED
    return found


def record_text(found: Mapping[str, str]) -> str:
    """Return the record of omissions {name: flag} as JSON text for the metadata."""
    return json.dumps(dict(found), ensure_ascii=False, sort_keys=True)


def check_files(source: Model, left_out: Mapping[str, str]) -> None:
    """Raise ConversionError for companion files that would be lost without a flag.

    `left_out` is {name: flag} of what the options leave out.
    """

    def make_item(name: str, kind: str) -> SourceItem:
        """Return how a companion file fares: an item "copied", or "lost" without a flag for that.

        "copied" includes files that a flag leaves out; `kind` is what the file is.
        """
        carried = name in TEXT_FILES or (kind == "tokenizer" and has_tokenizer(source.carried))
        return SourceItem(name, kind, "copied" if carried or name in left_out else "lost")

    lost = [entry for entry in sidecar_items(source, make_item) if entry.fate == "lost"]
    if lost:
        raise ConversionError(
            f"{source.path}: {describe_losses(lost)} would not be in the copy: no output holds "
            f"such a file; say so with --drop {lost[0].name}, and take it along yourself"
        )


def edited_keys(source: Model, options: Options) -> frozenset[tuple[str, str]]:
    """Return (kind, name) of the keys that a conversion is asked to change or remove."""
    found = {("metadata key", key) for key in (*options.metadata, *options.remove)}
    text = options.texts.get("config.json")
    if text is not None and source.config is not None:
        sides = (source.config, json_object(text, f"{source.path}: config.json"))
        before, after = (dict(key_paths(side)) for side in sides)
        for key in (*before, *after):
            if key not in before or key not in after or before[key] != after[key]:
                found.add(("config key", key))
    return frozenset(found)


def balanced_account(
    copy: Model,
    source: Model,
    left_out: Mapping[str, str],
    edited: Collection[tuple[str, str]] = (),
) -> Account:
    """Return what became of everything in the source; ConversionError where something is lost.

    `left_out` is {name: flag}, `edited` are the (kind, name) of keys that were to change.
    """
    found = account_for_source(copy, source, lambda name: left_out.get(name, ""), edited)
    scales = [entry for entry in found.lost if entry.how == _INPUTS_GONE]
    if scales and len(scales) == len(found.lost):
        matches = (OF_INPUTS.search(entry.name) for entry in scales)
        ends = dict.fromkeys(match[0] for match in matches if match)
        raise ConversionError(
            f"{source.path}: {describe_losses(scales)} would be lost: they are scales of "
            "activations, and the weights of the copy have none; leave them out with "
            + " ".join(f"--drop '*{end}'" for end in ends)
        )
    changed = [entry for entry in found.lost if entry.kind == "hyperparameter"]
    if changed:
        says = "; ".join(f"{entry.name} is {entry.how}" for entry in changed[:_SHOWN])
        raise ConversionError(
            f"{source.path}: {says}; the keys of a {copy.format} file cannot say it: change it in "
            "the source first (aprfmt set), or keep the source's format"
        )
    if found.lost:
        raise ConversionError(
            f"{copy.path}: {len(found.lost)} of {len(found.entries)} things of the source are "
            "neither copied, nor transformed, nor dropped by a flag: "
            f"{describe_losses(found.lost)}; report it as a bug"
        )
    return found
