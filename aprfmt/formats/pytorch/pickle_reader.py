"""Reads a pickle as a description of values: interprets the opcodes that torch.save writes.

Nothing is imported, called or made. A name becomes a `GlobalName`. A call of a function in the
table of `pickle_calls` becomes a description of its result. An instance of a class becomes a
`PickledObject`. Every other opcode is an error. Source of the opcodes: the comments of CPython's
Lib/pickletools.py.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from aprfmt.base.protocols import Region
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats.pytorch.pickle_imports import (
    PLAIN_CLASSES,
    Imports,
    is_enum_member,
    is_model_output,
    is_value_class,
    resolve_name,
)
from aprfmt.formats.pytorch.pickle_values import GlobalName, PickledDict, PickledObject, TensorValue

MAX_OPCODES = 8_000_000  # 200 thousand tensors; the time and memory that a small file may ask for
MAX_LONG = 1024  # bytes of one integer: what Python prints without asking
MAX_NAME = 1024  # bytes of a module or of a name in it
WINDOW = 256 << 10  # bytes that are fetched at a time of a file that is not here


class Stream:
    """The bytes [start, end) of a file, read forward for one pickle after another."""

    def __init__(self, region: Region, start: int, end: int, where: str) -> None:
        """Start at `start` of `region`; `where` begins every error message."""
        self.where = where
        self.at = start
        self.end = end
        self._region = region
        self._base = self._stop = start
        self._chunk = b""  # of the region: [base, stop)

    def take(self, count: int, what: str) -> bytes | memoryview:
        """Return the next `count` bytes and move past them; TruncatedError if fewer remain.

        `what` names them in the message.
        """
        at = self.at
        if count > self.end - at:
            raise TruncatedError(
                f"{self.where}: {what} at byte {at} needs {count} bytes, {self.end - at} remain; "
                "the file is cut or damaged"
            )
        stop = self.at = at + count
        if count > WINDOW:
            return self._region[at:stop]
        if stop > self._stop:
            self._base, self._stop = at, min(self.end, at + WINDOW)
            self._chunk = bytes(self._region[self._base : self._stop])
        return self._chunk[at - self._base : stop - self._base]

    def byte(self, what: str) -> int:
        """Return the next byte and move past it; TruncatedError where none remains."""
        at = self.at
        if at >= self._stop:
            return self.take(1, what)[0]
        self.at = at + 1
        return self._chunk[at - self._base]

    def uint(self, size: int, what: str) -> int:
        """Return the next `size` bytes as a little-endian unsigned integer."""
        if size == 1:
            return self.byte(what)
        return int.from_bytes(self.take(size, what), "little")

    def line(self, what: str) -> str:
        """Return the text up to the next line feed; FormatError above MAX_NAME bytes."""
        start, here = self.at, self.at - self._base
        if start < self._stop:
            stop = self._chunk.find(b"\n", here, here + MAX_NAME + 1)
            if stop >= 0:
                self.at = self._base + stop + 1
                return self._text(self._chunk[here:stop], what)
        found = bytearray()
        while (byte := self.byte(what)) != 10:
            found.append(byte)
            if len(found) > MAX_NAME:
                raise FormatError(
                    f"{self.where}: {what} at byte {start} is longer than {MAX_NAME} bytes; "
                    "the file is damaged"
                )
        return self._text(found, what)

    def text(self, count: int, what: str) -> str:
        """Return the next `count` bytes as text; pickles may spell lone surrogates."""
        return self._text(self.take(count, what), what)

    def _text(self, data: bytes | bytearray | memoryview, what: str) -> str:
        """Return bytes decoded as UTF-8, lone surrogates allowed; FormatError if they are not."""
        try:
            return str(data, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise FormatError(
                f"{self.where}: {what} before byte {self.at} is not UTF-8; the file is damaged"
            ) from None


_MARK = object()
_STOP = object()


class Unpickler:
    """Reads one pickle of a stream; `load` returns the description of its value.

    `call(function, args)` describes the result of a call, and is None for a function that is not in
    the table. `resolve` describes the object of a persistent id. `imports` collects the names of
    all globals, in order.
    """

    def __init__(
        self,
        stream: Stream,
        call: Callable[[GlobalName, tuple[Any, ...]], Any],
        resolve: Callable[[Any], Any],
        imports: Imports,
    ) -> None:
        """Prepare to read the next pickle of `stream`.

        `call(function, args)` gives the description of a call's result, None for a function that is
        not in the table. `resolve` gives the object of a persistent id. The names that loading
        would import are added to `imports`.
        """
        self.stream = stream
        self._call = call
        self._resolve = resolve
        self._imports = imports
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._begin = 0  # of the opcode that is read
        self._code = 0

    # --- messages -----------------------------------------------------------------------------

    def _opcode_name(self) -> str:
        """Return the name of the opcode that is being read, for a message."""
        from pickletools import opcodes

        names = [op.name for op in opcodes if op.code == chr(self._code)]
        return f"opcode {names[0]}" if names else f"byte {self._code:#04x}"

    def _damage_error(self, found: str) -> FormatError:
        """Return the FormatError of a pickle that no pickler writes; `found` says what is wrong."""
        return FormatError(
            f"{self.stream.where}: {self._opcode_name()} at byte {self._begin} {found}; the "
            f"pickle is "
            "damaged, or made by hand: get the file again"
        )

    def _refusal(self, found: str) -> UnsupportedError:
        """Return the UnsupportedError of an opcode that does more than describe values."""
        return UnsupportedError(
            f"{self.stream.where}: {self._opcode_name()} at byte {self._begin} {found}; "
            f"expected only "
            "what torch.save writes for tensors, containers and numbers. Loading this file may run "
            "code: ask for safetensors, or save its state_dict alone"
        )

    # --- the stack ----------------------------------------------------------------------------

    def _pop(self) -> Any:
        """Return the top value and remove it from the stack; FormatError if there is none."""
        if not self._stack or self._stack[-1] is _MARK:
            raise self._damage_error("finds nothing on the stack")
        return self._stack.pop()

    def _peek(self) -> Any:
        """Return the top value and leave it on the stack; FormatError if there is none."""
        if not self._stack or self._stack[-1] is _MARK:
            raise self._damage_error("finds nothing on the stack")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        """Return the values above the last mark, in order; removes them and the mark."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                found = self._stack[at + 1 :]
                del self._stack[at:]
                return found
        raise self._damage_error("finds no mark on the stack")

    # --- the loop -----------------------------------------------------------------------------

    def load(self) -> Any:
        """Return the description of the value; FormatError with opcode and position.

        UnsupportedError for an opcode that is not in the table, or more than MAX_OPCODES of them.
        """
        stream, byte, opcodes = self.stream, self.stream.byte, _OPCODES
        for _ in range(MAX_OPCODES):
            self._begin = stream.at
            code = self._code = byte("an opcode")
            handler = opcodes.get(code)
            if handler is None:
                raise self._refusal("is not read here")
            if handler(self) is _STOP:
                found = self._pop()
                if self._stack:
                    raise self._damage_error(f"leaves {len(self._stack)} values on the stack")
                self._imports.use(found)
                return found
        raise UnsupportedError(
            f"{self.stream.where}: more than {MAX_OPCODES} opcodes in one pickle, the limit; "
            "save fewer values in one file"
        )

    def _push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def _check_protocol(self) -> None:
        """Check the protocol number (2 to 5); UnsupportedError for another."""
        protocol = self.stream.uint(1, "a protocol")
        if not 2 <= protocol <= 5:
            raise self._refusal(f"names protocol {protocol}, which torch.save does not write")

    def _check_frame(self) -> None:
        """Read a frame's length and check that it fits the file; TruncatedError if it does not."""
        size = self.stream.uint(8, "a frame's length")
        if size > self.stream.end - self.stream.at:
            raise TruncatedError(
                f"{self.stream.where}: a frame at byte {self._begin} needs {size} bytes, "
                f"{self.stream.end - self.stream.at} remain; the file is cut or damaged"
            )

    def _push_int(self, size: int, signed: bool = False) -> None:
        """Push the next `size` bytes as a little-endian integer."""
        data = self.stream.take(size, "an integer")
        self._push(int.from_bytes(data, "little", signed=signed))

    def _push_long(self, size: int) -> None:
        """Push an integer whose byte count precedes it in `size` bytes."""
        count = self.stream.uint(size, "an integer's length")
        if count > MAX_LONG:
            raise self._damage_error(
                f"has an integer of {count} bytes; at most {MAX_LONG} are read"
            )
        self._push_int(count, signed=True)

    def _push_float(self) -> None:
        """Push the next eight bytes as a big-endian float64."""
        self._push(struct.unpack(">d", self.stream.take(8, "a number"))[0])

    def _push_text(self, size: int) -> None:
        """Push a text whose byte count precedes it in `size` bytes."""
        count = self.stream.uint(size, "a text's length")
        self._push(self.stream.text(count, "a text"))

    def _push_bytes(self, size: int) -> None:
        """Push bytes whose count precedes them in `size` bytes."""
        count = self.stream.uint(size, "a length of bytes")
        self._push(bytes(self.stream.take(count, "bytes")))

    def _push_memo(self, size: int) -> None:
        """Push the memo whose number is in the next `size` bytes; FormatError if it is unset."""
        key = self.stream.uint(size, "a memo's number")
        if key not in self._memo:
            raise self._damage_error(f"reads memo {key}, which nothing was put in")
        self._push(self._memo[key])

    def _set_memo(self) -> None:
        """Store the top value as the memo whose number is in the next four bytes."""
        self._memo[self.stream.uint(4, "a memo's number")] = self._peek()

    def _set_short_memo(self) -> None:
        """Store the top value as the memo whose number is the next byte."""
        self._memo[self.stream.byte("a memo's number")] = self._peek()

    def _memoize(self) -> None:
        """Store the top value as the next memo, numbered by how many there are."""
        self._memo[len(self._memo)] = self._peek()

    def _push_tuple(self, count: int) -> None:
        """Replace the top `count` values with a tuple of them, in the order they were pushed."""
        found = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(found)))

    def _extend_top(self, values: list[Any]) -> None:
        """Append values to the list on top of the stack, or to the rows of an object there."""
        target = self._peek()
        if isinstance(target, PickledObject):
            target = target.rows
        if not isinstance(target, list):
            raise self._damage_error(f"appends to {describe_value(target)}")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        """Add (key, value, key, value, ...) to the dict or the object's items on top."""
        target = self._peek()
        if isinstance(target, PickledObject):
            target = target.items
        if not isinstance(target, PickledDict):
            raise self._damage_error(f"sets items of {describe_value(target)}")
        if len(values) % 2:
            raise self._damage_error("has a key without a value")
        target.pairs.extend(zip(values[::2], values[1::2], strict=True))

    def _append_popped(self) -> None:
        """Append the top value to the list below it."""
        self._extend_top([self._pop()])

    def _set_popped_item(self) -> None:
        """Set the item of the top two values (key, then value) in the dict below them."""
        value = self._pop()
        self._set_items([self._pop(), value])

    def _push_global(self, module: str, name: str, opcode: str) -> None:
        """Push the name of a class or function, and record it in `imports`; nothing is imported.

        `opcode` is the name of the opcode that imports it.
        """
        found = resolve_name(module, name)
        if str(found) not in self._imports.places:
            self._imports.add(found, f"opcode {opcode} at byte {self._begin}")
        self._push(found)

    def _push_global_of_lines(self) -> None:
        """Push the global whose module and name are the next two lines."""
        module = self.stream.line("a module's name")
        self._push_global(module, self.stream.line("a name"), "GLOBAL")

    def _push_global_of_stack(self) -> None:
        """Push the global whose module and name are the top two values, both texts."""
        name, module = self._pop(), self._pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._damage_error(
                f"names {describe_value(module)} and {describe_value(name)}, no texts"
            )
        if len(module) > MAX_NAME or len(name) > MAX_NAME:
            raise self._damage_error(f"has a name longer than {MAX_NAME} characters")
        self._push_global(module, name, "STACK_GLOBAL")

    def _push_persistent(self) -> None:
        """Replace the persistent id on top of the stack with the description of its object."""
        try:
            given = self._pop()
            self._push(self._resolve(given))
            self._imports.use(given)
        except ValueError as error:
            if isinstance(error, FormatError):
                raise
            raise self._damage_error(str(error)) from None

    def _describe_call(self) -> None:
        """Replace (function, arguments) on the stack with the description of the call's result.

        UnsupportedError if the function is not in the table and no class that only holds values.
        """
        args, function = self._pop(), self._pop()
        if not isinstance(function, GlobalName) or not isinstance(args, tuple):
            raise self._damage_error(
                f"calls {describe_value(function)} with {describe_value(args)}"
            )
        try:
            found = self._call(function, args)
        except ValueError as error:
            if isinstance(error, FormatError):
                raise
            raise self._damage_error(f"calls {shorten(str(function), 200)}: {error}") from None
        plain = str(function) in PLAIN_CLASSES or is_model_output(function)
        if found is None and (plain or is_enum_member(function, args)):
            found = PickledObject(function, args)
        if found is None:
            raise self._refusal(f"calls {shorten(str(function), 200)}")
        self._imports.use((function, args))
        self._push(found)

    def _describe_new_object(self) -> None:
        """Replace (class, arguments) on the stack with an empty dict or a described object.

        UnsupportedError if the class may do more than hold values.
        """
        args, kind = self._pop(), self._pop()
        if not isinstance(kind, GlobalName) or not isinstance(args, tuple):
            raise self._damage_error(f"makes {describe_value(kind)} with {describe_value(args)}")
        self._imports.use((kind, args))
        if str(kind) in ("collections.OrderedDict", "builtins.dict") and not args:
            self._push(PickledDict())
            return
        if not is_value_class(kind):
            raise self._refusal(f"makes {shorten(str(kind), 200)}")
        self._push(PickledObject(kind, args))

    def _set_state(self) -> None:
        """Set the state of the object below the top of the stack to the top value, which is popped.

        A dict's state is dropped.
        """
        state, target = self._pop(), self._peek()
        if isinstance(target, PickledObject):
            target.state = state
        elif isinstance(target, TensorValue):
            target.facts["state"] = state
        elif isinstance(target, PickledDict):
            self._imports.use(state)
        else:
            raise self._damage_error(f"sets the state of {describe_value(target)}")

    def _drop_top(self) -> None:
        """Remove the top of the stack, a mark too; FormatError if the stack is empty."""
        if not self._stack:
            raise self._damage_error("finds nothing on the stack")
        self._stack.pop()


def describe_value(value: Any) -> str:
    """Return a noun phrase for a described value, for a message: "a dict", "an object of X"."""
    if value is _MARK:
        return "a mark"
    if isinstance(value, GlobalName):
        return shorten(str(value), 200)
    if isinstance(value, PickledObject):
        return f"an object of {shorten(str(value.kind), 200)}"
    if isinstance(value, PickledDict):
        return "a dict"
    return f"a {type(value).__name__}"


_OPCODES: Mapping[int, Callable[[Unpickler], Any]] = {
    ord(code): handler
    for code, handler in {
        "\x80": Unpickler._check_protocol,
        "\x95": Unpickler._check_frame,
        ".": lambda self: _STOP,
        "(": lambda self: self._push(_MARK),
        "0": Unpickler._drop_top,
        "1": lambda self: self._pop_to_mark() and None,
        "N": lambda self: self._push(None),
        "\x88": lambda self: self._push(True),
        "\x89": lambda self: self._push(False),
        "J": lambda self: self._push_int(4, signed=True),
        "K": lambda self: self._push_int(1),
        "M": lambda self: self._push_int(2),
        "\x8a": lambda self: self._push_long(1),
        "\x8b": lambda self: self._push_long(4),
        "G": Unpickler._push_float,
        "X": lambda self: self._push_text(4),
        "\x8c": lambda self: self._push_text(1),
        "\x8d": lambda self: self._push_text(8),
        "B": lambda self: self._push_bytes(4),
        "C": lambda self: self._push_bytes(1),
        "\x8e": lambda self: self._push_bytes(8),
        "\x96": lambda self: self._push_bytes(8),
        "}": lambda self: self._push(PickledDict()),
        "]": lambda self: self._push([]),
        "\x8f": lambda self: self._push([]),  # a set, as its members in order
        ")": lambda self: self._push(()),
        "t": lambda self: self._push(tuple(self._pop_to_mark())),
        "\x85": lambda self: self._push_tuple(1),
        "\x86": lambda self: self._push_tuple(2),
        "\x87": lambda self: self._push_tuple(3),
        "\x91": lambda self: self._push(self._pop_to_mark()),
        "a": Unpickler._append_popped,
        "e": lambda self: self._extend_top(self._pop_to_mark()),
        "\x90": lambda self: self._extend_top(self._pop_to_mark()),
        "s": Unpickler._set_popped_item,
        "u": lambda self: self._set_items(self._pop_to_mark()),
        "h": lambda self: self._push_memo(1),
        "j": lambda self: self._push_memo(4),
        "q": Unpickler._set_short_memo,
        "r": Unpickler._set_memo,
        "\x94": Unpickler._memoize,
        "c": Unpickler._push_global_of_lines,
        "\x93": Unpickler._push_global_of_stack,
        "Q": Unpickler._push_persistent,
        "R": Unpickler._describe_call,
        "\x81": Unpickler._describe_new_object,
        "b": Unpickler._set_state,
    }.items()
}
