"""The names that a pickle imports: which stand for values, and which a file of tensors lacks.

Loading a pickle imports a name as soon as it is read, whether it is called or not. torch.save
writes names of the functions and classes that make up its values, and no other.
"""

import io
import re
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from aprfmt.formats.pytorch.pickle_values import (
    GlobalName,
    PickledDict,
    PickledObject,
    SparseTensorValue,
    TensorValue,
)

# Classes of the standard library that only hold values.
PLAIN_CLASSES = frozenset(
    (
        "argparse.Namespace", "types.SimpleNamespace", "collections.OrderedDict",
        "collections.Counter", "collections.defaultdict", "collections.deque", "datetime.datetime",
        "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone",
        "decimal.Decimal", "fractions.Fraction", "uuid.UUID",
        *(f"pathlib{part}.{kind}{name}" for part in ("", "._local") for kind in ("", "Pure")
          for name in ("PosixPath", "WindowsPath", "Path")),
    )
)  # fmt: skip
# Types that may be values themselves, such as the type of an option.
_TYPES = frozenset(
    f"builtins.{name}"
    for name in (
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
        "object", "range", "set", "slice", "str", "tuple", "Ellipsis", "NotImplemented",
    )
)  # fmt: skip

_OUTPUT_MODULE = re.compile(r"transformers(\.[a-z_][a-z0-9_]*)+")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OUTPUT_NAME = re.compile(r"[A-Za-z]\w*Outputs?((With|For)\w+)?")


def resolve_name(module: str, name: str) -> GlobalName:
    """Return the name that an unpickler imports for these two texts of a pickle.

    Python 2's names of modules and functions become those of today, as pickle maps them in the
    protocols that have them.
    """
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    module, name = NAME_MAPPING.get((module, name), (module, name))
    return GlobalName(IMPORT_MAPPING.get(module, module), name)


def is_value_class(kind: GlobalName) -> bool:
    """Return whether instances of a class may be described: it only holds values.

    A class of a package outside the standard library is described by its name. The standard
    library has classes and functions that act, so only those of PLAIN_CLASSES are described.
    """
    return str(kind) in PLAIN_CLASSES or not (_is_standard(kind) or _leads_elsewhere(kind))


def is_model_output(kind: GlobalName) -> bool:
    """Return whether a name is that of one of transformers' classes of a model's outputs.

    They are dicts of their fields (ModelOutput), pickled as a call with the fields' values. Their
    names are such as CausalLMOutputWithPast.
    """
    return bool(_OUTPUT_MODULE.fullmatch(kind.module) and _OUTPUT_NAME.fullmatch(kind.name))


def is_enum_member(kind: Any, args: Any) -> bool:
    """Return whether a call may be that of an Enum class, which gives the member of a value.

    Pickle writes a member so. Enum classes outside the standard library are told from functions by
    their names, which begin with a capital letter. The value is one number or one word, which
    leaves out commands, addresses and paths.
    """
    if not isinstance(kind, GlobalName) or not isinstance(args, tuple) or len(args) != 1:
        return False
    word = isinstance(args[0], str) and _WORD.fullmatch(args[0])
    if not word and type(args[0]) not in (int, float, bool):
        return False
    return is_value_class(kind) and kind.name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_standard(name: GlobalName) -> bool:
    """Return whether a name is from a module of Python's standard library."""
    return name.module.partition(".")[0] in sys.stdlib_module_names


def _leads_elsewhere(name: GlobalName) -> bool:
    """Return whether a name goes through a module to what it imports, such as torch's os.system.

    Only classes have names with a dot in them; they begin with a capital letter.
    """
    parts = name.name.split(".")
    outer = any(not part.lstrip("_")[:1].isupper() for part in parts[:-1])
    return outer or parts[-1] in sys.stdlib_module_names


@dataclass
class Imports:
    """The names that a file's pickles import, in order.

    `places` are opcode and byte of each name's first import. `pending` are the names of which no
    value was made yet.
    """

    places: dict[str, str] = field(default_factory=dict)
    pending: dict[str, GlobalName] = field(default_factory=dict)
    _seen: dict[str, GlobalName] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def add(self, name: GlobalName, place: str) -> None:
        """Note where a name is imported (opcode and byte), if it is the first time."""
        text = str(name)
        if text not in self.places:
            self.places[text] = place
            self.pending[text] = self._seen[text] = name

    def use(self, value: Any) -> None:
        """Record that a value is part of the file's values, so that all names in it are needed."""
        if not self.pending:
            return
        stack, visited = [value], set[int]()
        while stack and self.pending:
            one = stack.pop()
            if isinstance(one, GlobalName):
                self.pending.pop(str(one), None)
                continue
            if isinstance(one, str | int | None):
                continue
            inner = list(_inner_values(one))
            if inner and id(one) not in visited:
                visited.add(id(one))
                stack += inner

    def unfit(self, described: frozenset[str]) -> Iterator[str]:
        """Yield a clause on each imported name that no value needs, with its opcode and byte.

        `described` are the functions whose calls are described. The names that `unlisted` yields
        are among them.
        """
        listed = described | _TYPES | PLAIN_CLASSES
        for text, name in self._seen.items():
            why = self._unfit_reason(text, name, listed)
            if why:
                yield f"imports {text} ({self.places[text]}), {why}"

    def unlisted(self, described: frozenset[str]) -> Iterator[tuple[str, str, str]]:
        """Yield (name, opcode and byte of its import, why) of imported names that no value needs.

        A name is yielded if nothing is made of it, or it cannot stand for a value. Those in
        `described`, the functions whose calls are described, and plain types are never yielded.
        """
        listed = described | _TYPES | PLAIN_CLASSES
        for text, name in self._seen.items():
            why = "" if text in listed else self._unfit_reason(text, name, listed)
            if why:
                yield text, self.places[text], why

    def _unfit_reason(self, text: str, name: GlobalName, listed: Collection[str]) -> str:
        """Return why no value of a pickle needs an imported name; "" if one may.

        The reason is the end of a sentence. `text` is the name as text, `listed` are the names that
        values are described by.
        """
        if text not in listed and _is_standard(name):
            return "of Python's standard library, which stands for no value"
        if text not in listed and _leads_elsewhere(name):
            return "which leads out of its package"
        return "of which nothing is made" if text in self.pending else ""


def _inner_values(value: Any) -> Iterator[Any]:
    """Yield the values inside a described value; none for a number or a text."""
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, PickledDict):
        yield from (each for pair in value.pairs for each in pair)
    elif isinstance(value, PickledObject):
        yield from (value.kind, value.args, value.state, value.items, value.rows)
    elif isinstance(value, TensorValue | SparseTensorValue):
        yield from (*value.facts.values(), *value.parts.values())


def hidden_imports(data: bytes) -> tuple[str, ...]:
    """Return the names that the pickles in some bytes import, each once; () for other bytes.

    All opcodes of Python's pickles are understood, and nothing is executed. Bytes are taken for a
    pickle if they begin like one of protocol 2 and above, or can be read to its end.
    """
    from pickletools import genops

    found: dict[str, None] = {}
    whole = data[:1] == b"\x80"
    stream = io.BytesIO(data)
    try:
        while stream.tell() < len(data):
            texts = ["", ""]
            for opcode, argument, _ in genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    found[str(resolve_name(*str(argument).split(" ", 1)))] = None
                elif opcode.name == "STACK_GLOBAL":
                    found[str(resolve_name(*texts[-2:]))] = None
                elif isinstance(argument, str):
                    texts.append(argument)
            whole = True
    except (ValueError, TypeError, OverflowError, struct.error):
        pass  # no pickle, or one that ends here
    return tuple(found) if whole else ()
