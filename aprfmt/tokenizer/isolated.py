"""Runs the engine of a suspicious tokenizer.json in a child process with limits.

The library has no limits of its own, and memory that it cannot have ends its process. So it runs in
a child process, with limits of address space and CPU time. Where the child ends, the call raises
FormatError.
"""

import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import RLock, Timer
from typing import Any

from aprfmt.base.child_process import end_child, import_path, start_library_child
from aprfmt.errors import FormatError
from aprfmt.tokenizer.hf_engine import HfEngine
from aprfmt.tokenizer.limits import (
    CPU_SECONDS,
    ENGINE_MEMORY,
    ENGINE_MEMORY_EACH,
    ENGINE_OUTPUT,
    WALL_SECONDS,
)
from aprfmt.tokenizer.tokenizer_cost import (
    refuse_long_frame,
    refuse_long_frame_of_text,
    unbounded_reason,
    unbounded_reason_of_parts,
)

_CHILD = Path(__file__).with_name("engine_child.py")
_COSTLY = ("encode", "split_words", "decode")  # calls that a text may make endless
_ended: set[bytes] = set()  # digests of tokenizers whose child one of these calls has ended


class IsolatedEngine(HfEngine):
    """An HfEngine that runs in a child process; `why` is the reason in the tokenizer."""

    def __init__(self, text: str, where: str, why: str) -> None:
        """Start the child process and send it tokenizer.json. FormatError if that fails."""
        self._where, self._why = where, why
        self._lock = RLock()
        self._digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        self._tokens: dict[int, str | None] = {}
        self._memory = ENGINE_MEMORY + ENGINE_MEMORY_EACH * len(text)
        try:
            self._child = start_library_child(_CHILD)
        except OSError as error:
            raise FormatError(
                f"{where}: a process for the tokenizer could not start: {error}"
            ) from None
        weakref.finalize(self, end_child, self._child)
        limits = {"cpu_seconds": CPU_SECONDS, "memory": self._memory, "output": ENGINE_OUTPUT}
        self._send_request({"path": import_path(), "limits": limits, "text": text, "where": where})

    def _send_request(self, request: Any) -> Any:
        """Send a request to the child and return the value of its answer.

        Raises FormatError for an error in the child, or if the child ends or exceeds a limit.
        """
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        with self._lock:
            timer = Timer(WALL_SECONDS, child.kill)
            timer.start()
            try:
                child.stdin.write(json.dumps(request).encode("ascii") + b"\n")
                child.stdin.flush()
                raw = child.stdout.readline(ENGINE_OUTPUT + 64)
            except (OSError, ValueError):  # it has ended, now or at an earlier call
                raw = b""
            finally:
                timer.cancel()
        status, value = json.loads(raw) if raw.endswith(b"\n") else ("ended", None)
        if status == "ok":
            return value
        if status == "error":
            raise FormatError(str(value))
        end_child(child)
        raise self._limit_error()

    def _limit_error(self) -> FormatError:
        """Return the error of a tokenizer that reached its limits."""
        return FormatError(
            f"{self._where}: the tokenizer needs more than {self._memory >> 20} MiB of memory, "
            f"{CPU_SECONDS} s of CPU or {ENGINE_OUTPUT >> 20} MiB of answer ({self._why}); it is "
            "broken or hostile"
        )

    def _call_child(self, name: str, *arguments: Any) -> Any:
        """Return the result of calling a method of the child's engine.

        A tokenizer that has ended one child is not run again: each text of a check would cost the
        whole limit.
        """
        if name not in _COSTLY:
            return self._send_request([name, arguments])
        if self._digest in _ended:
            raise self._limit_error()
        try:
            return self._send_request([name, arguments])
        except FormatError:
            if self._child.poll() is not None:
                _ended.add(self._digest)
            raise

    def added_token_flags(self) -> dict[str, Mapping[str, bool]]:
        """Return {token: {flag: value}} of the added tokens, which are split off whole."""
        return dict(self._call_child("added_token_flags"))

    def add_tokens(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add tokens given by content and flags, or change the flags of existing ones."""
        self._tokens.clear()
        self._call_child("add_tokens", [dict(row) for row in rows])

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(self._call_child("special_ids"))

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._call_child("size"))

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of a text; with `add_special`, also those that the post-processor adds."""
        return list(self._call_child("encode", text, add_special, parse_special))

    def split_words(self, text: str) -> list[str]:
        """Return the normalised words that a text is split into before merging."""
        return list(self._call_child("split_words", text))

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids."""
        return str(self._call_child("decode", [int(i) for i in ids], skip_special))

    def token(self, i: int) -> str | None:
        """Return a token's spelling in the vocabulary; None without one."""
        if i not in self._tokens:
            found = self._call_child("token", int(i))
            self._tokens[i] = None if found is None else str(found)
        return self._tokens[i]

    def id_of(self, token: str) -> int | None:
        """Return the id of a spelling; None if no token has it."""
        found = self._call_child("id_of", token)
        return None if found is None else int(found)

    def is_control(self, i: int) -> bool:
        """Return whether a token is special."""
        return bool(self._call_child("is_control", int(i)))


def engine_of_text(text: str, where: str) -> HfEngine:
    """Return the engine of a tokenizer.json; in a child process if its need has no bound.

    Raises FormatError if the library cannot read it, or if it puts thousands of tokens around a
    text.
    """
    refuse_long_frame_of_text(text, where)
    why = unbounded_reason(text)
    return IsolatedEngine(text, where, why) if why else HfEngine.from_text(text, where)


def engine_of_data(data: Mapping[str, Any], where: str) -> HfEngine:
    """Return the engine of a parsed BPE tokenizer.json; in a child process if it may cost too much.

    Raises FormatError if the library cannot read it, or if it puts thousands of tokens around a
    text.
    """
    refuse_long_frame(data, where)
    why = unbounded_reason_of_parts(data)
    if why:
        return IsolatedEngine(json.dumps(data), where, why)
    return HfEngine.from_data(data, where)
