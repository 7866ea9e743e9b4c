"""A Relation: one change that maps what a file holds onto what its readers look for.

An *item* is one tensor, key, module or file of the model.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.protocols import Note, Overlay, Value
from aprfmt.errors import AprfmtError
from aprfmt.formats import FORMATS
from aprfmt.model.hf_folder import WEIGHT_FILES
from aprfmt.tensors.companions import quantization_section

if TYPE_CHECKING:
    from pathlib import Path

    from aprfmt.model import Model
    from aprfmt.model.renames import Rename
    from aprfmt.model.resolve import Resolution

RelationKind = Literal[
    "names", "container", "extension", "index", "axes", "kernels", "keys", "modules", "claims"
]
SHOWN = 2  # examples in a sentence
# The style of names that every reader of a format looks for; APR's know both.
STYLE_OF = {"gguf": "gguf", "safetensors": "hf"}
# Prefixes of a language model inside a multimodal one, and what its own class has in their place.
NESTED = (("model.language_model.", "model."), ("language_model.", ""))


@dataclass(frozen=True, slots=True)
class Relation:
    """One change that explains many differences: a prefix, an index, exchanged axes, a key.

    `says` is the sentence without the items, `where` are all items it maps, `examples` are the
    first of them (as stored, as read), `remedy` is the command that mends the file, "" where none
    does. `rules` are renames of tensors, `values` keys of the configuration with their value.
    """

    kind: RelationKind
    says: str
    where: tuple[str, ...]
    examples: tuple[tuple[str, str], ...] = ()
    remedy: str = ""
    rules: "tuple[Rename, ...]" = ()
    values: tuple[tuple[str, object], ...] = ()

    @property
    def count(self) -> int:
        """How many items the relation maps."""
        return len(self.where)

    def to_json(self) -> dict[str, object]:
        """Return plain data: every item, the rules and values, and the command."""
        return {
            "kind": self.kind,
            "says": self.says,
            "count": self.count,
            "where": list(self.where),
            "examples": [list(pair) for pair in self.examples],
            "rules": [str(rule) for rule in self.rules],
            "values": {key: value for key, value in self.values},
            "remedy": self.remedy,
        }

    @property
    def text(self) -> str:
        """The sentence, its examples, and the command."""
        return self.says + self.examples_text + self.remedy_clause

    @property
    def examples_text(self) -> str:
        """The first examples in brackets; "" without any."""
        shown = ", ".join(f"{stored} for {read}" for stored, read in self.examples[:SHOWN])
        return f" ({shown})" if shown else ""

    @property
    def remedy_clause(self) -> str:
        """The command as the end of a sentence; "" where there is none."""
        return f"; {self.remedy}" if self.remedy else ""

    def as_note(self, where: object) -> Note:
        """Return the relation as a warning Note about the file `where`."""
        return Note("warning", str(where), self.text, "relation")


def is_as_published(model: "Model", found: "Resolution") -> bool:
    """Return whether a file shows no sign of other names, axes or keys than readers look for.

    Every role is there in its shape, every tensor has a role or a place, and the names are of the
    file's own format. `found` is the resolution under the names and keys as they are stored.
    """
    covered = found.coverage
    nested = tuple(prefix for prefix, _ in NESTED)
    return (
        not (covered.missing or covered.accepted or covered.misshapen or found.unclaimed)
        and STYLE_OF.get(model.format, found.style) == found.style
        and not any(name.startswith(nested) for name in model)
        and not has_uncounted_layers(found)
    )


def has_uncounted_layers(found: "Resolution") -> bool:
    """Return whether there are roles of layers beyond the configured number of layers."""
    count = int(found.hyper["n_layers"])
    return any((split_key(key)[0] or 0) >= count for key in found.roles)


def list_relations(model: "Model") -> tuple[Relation, ...]:
    """Return every Relation under which a model is read; () for a file as loaders expect it."""
    found = [*file_relations(model)]
    try:
        found += model.resolution.relations
    except AprfmtError:
        pass  # said where the architecture is asked for
    return tuple(found)


def file_relations(model: "Model") -> tuple[Relation, ...]:
    """Return the Relations known without the architecture: extension, index, module names."""
    return tuple(filter(None, (wrong_extension(model), wrong_index(model), model.modules)))


def wrong_modules(model: "Model", config: "Mapping[str, Value] | None") -> Relation | None:
    """Return the Relation whose prefix rule maps quantization keys to modules in the file.

    Loaders find no module for such a key, and use the defaults. None where each key has a module,
    or no single prefix rule maps the others to modules.
    """
    section = quantization_section(config or {})
    if section is None:
        return None
    own = [
        key
        for key, value in section.items()
        if "." in key and ":" not in key and isinstance(value, (Mapping, bool))
    ]
    if not own:
        return None
    there = {name.rpartition(".")[0] for name in model.source.tensors}
    astray = [key for key in own if key not in there]
    if not astray:
        return None
    from aprfmt.model.renames import command_line, prefix_rule_onto

    rule = prefix_rule_onto(astray, there)
    if rule is None:
        return None
    pairs = tuple((key, rule(key)) for key in astray)
    says = (
        f"{len(astray)} modules that the quantization of config.json speaks of are not in the "
        f"file, and loaders take what holds for the others: {rule.text}"
    )
    remedy = command_line("convert", opening_path(model.path), "OUT", "--rename", str(rule))
    return Relation("modules", says, tuple(astray), pairs[:SHOWN], remedy, (rule,))


def wrong_index(model: "Model") -> Relation | None:
    """Return the Relation that says how a shard index contradicts its shards; None if it fits."""
    source = model.source
    while isinstance(source, Overlay):
        source = source.wrapped_source
    faults = getattr(source, "index_faults", ())
    if not faults:
        return None
    from aprfmt.model.renames import command_line

    says = "; ".join(fault.says for fault in faults)
    where = tuple(name for fault in faults for name in fault.where)
    pairs = tuple(pair for fault in faults for pair in fault.examples)
    # Files get their listed names first; an index that fits them is made anew then.
    moves = [
        shlex.join(("mv", str(model.path.with_name(stored)), str(model.path.with_name(listed))))
        for fault in faults
        for stored, listed in fault.examples
        if fault.renamed
    ]
    rest = [fault for fault in faults if not fault.renamed]
    anew = [command_line("repair", "--index", opening_path(model.path))] if rest else []
    remedy = " && ".join((*moves, *anew)) if all(fault.mended for fault in rest) else ""
    if all(fault.by_index for fault in faults):
        folder = opening_path(model.path)
        out = f"{folder.name}-fixed"
        remedy = command_line("repair", folder, "--by-index", "-o", out)
    return Relation("index", says, where, pairs[:SHOWN], remedy)


def wrong_extension(model: "Model") -> Relation | None:
    """Return the Relation that a file's extension names another format than its content has.

    None where both agree, or the extension is that of no format.
    """
    path, form = model.path, model.source.format
    if path.suffix in FORMATS[form].extensions:
        return None
    claimed = next((name for name, spec in FORMATS.items() if path.suffix in spec.extensions), "")
    if not claimed:
        return None
    right = path.with_suffix(FORMATS[form].extensions[0])
    says = (
        f"the name says {claimed}, the content is {form}: loaders that go by the name do not open "
        "it; give it the name of its content, or convert it"
    )
    remedy = shlex.join(("mv", str(path), str(right)))
    return Relation("extension", says, (path.name,), ((path.name, right.name),), remedy)


def opening_path(path: "Path") -> "Path":
    """Return the path that a user gives to open this file: the folder, for a folder's weights."""
    return path.parent if path.name in WEIGHT_FILES else path
