"""The text that llama-eval-callback prints: three values from each end of every axis.

What was not printed is absent: a mask travels with the values, and comparisons look at what is
there, to the four decimals that are printed. Names are cut to what the program prints.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import FormatError
from aprfmt.inference.engines.collect import Collector
from aprfmt.inference.engines.graph import GraphReader, Mask, Node
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool

if TYPE_CHECKING:
    from aprfmt.model import Model

Numbers = NDArray[Any]
RESOLUTION = 5e-5  # half of the fourth decimal
EDGE = 3  # values printed from each end of an axis
MAX_LINE = 1 << 16
MAX_VALUES = 1 << 28  # of one node, printed or not
_HEAD = re.compile(
    r"\w*(?:eval|callback)\w*:\s+(\S(?:.*\S)?)\s+= \((\w+)\)\s+(\w+)\((.*)\}\) = "
    r"\{(\d+), (\d+), (\d+), (\d+)\}"
)
_SOURCE = re.compile(r"([^{},][^{}]*)\{[\d, ]*\}?")
_COUNT = re.compile(r".*number of input tokens = (\d{1,9})")
_SUM = re.compile(r"\s+sum = (\S+)")
_LOGGED = re.compile(r"^\d+\.\d+\.\d+\.\d+ [IWE] ")  # the time that newer builds print before


def is_eval_text(path: Path) -> bool:
    """Say whether a file begins like this program's output; reads 1 MiB at most."""
    if path.is_dir() or path.suffix in (".gguf", ".safetensors", ".apr", ".npz"):
        return False
    with open(path, "rb") as file:
        head = file.read(1 << 20)
    if b"\0" in head:
        return False
    return any(_HEAD.match(_plain(line)) for line in head.decode("latin1").splitlines()[:4000])


def _plain(line: str) -> str:
    return _LOGGED.sub("", line.rstrip("\n"))


@contextmanager
def load_eval_text(
    path: Path,
    ids: Sequence[int] | None = None,
    model: "Model | None" = None,
    *,
    positions: Positions = "all",
    wanted: Collection[str] | None = None,
) -> Iterator[Trace]:
    """Open the text as a trace of what it shows.

    `model` is the GGUF that ran: without it weights are told by llama.cpp's names, joined ones
    stay unread, and llama's adjacent pairs are not undone. Raises FormatError for text that is
    cut, or that holds several passes.
    """
    with ExitStack() as stack:
        lines = _Lines(stack.enter_context(open(path, encoding="utf-8", errors="replace")), path)
        collector = Collector(
            stack.enter_context(Spool()), model, tokens=None, dtype="float32",
            positions=positions, wanted=wanted,
        )  # fmt: skip
        reader: GraphReader | None = None
        nodes = 0
        for node, values, seen in lines.nodes():
            nodes += 1
            embeds = node.op == "GET_ROWS" and any("token_embd" in s for s in node.sources)
            if embeds:
                if reader is not None:
                    raise FormatError(
                        f"{path}: a second pass begins at line {lines.number}; expected the text "
                        "of one (a prompt within one batch)"
                    )
                reader = GraphReader(collector, model, node.shape[-2])
                collector.expect(node.shape[-2])
            if reader is None:
                continue
            if values is None:
                collector.unknown[node.name] = "no values were printed"
            else:
                reader.add(node, values, seen)
        if reader is None:
            raise FormatError(
                f"{path}: shows no token embedding in {nodes} nodes; expected the output of "
                "llama-eval-callback"
            )
        printed = lines.ids
        if printed is not None and len(printed) != reader.tokens:
            printed = None
        run = {
            "format": "llama-eval-callback", "path": str(path),
            "ids": printed if printed is not None else None if ids is None else list(ids),
            "backend": {
                "backend": "llama.cpp", "printed": f"{EDGE} values from each end of an axis",
            },
        }  # fmt: skip
        yield collector.trace(run, resolution=RESOLUTION)


class _Lines:
    """The text as nodes; counts lines for messages."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file, self._path = file, path
        self.number = 0
        self.ids: list[int] | None = None

    def _next(self) -> str | None:
        line = self._file.readline(MAX_LINE)
        self.number += 1
        if len(line) == MAX_LINE:
            raise FormatError(f"{self._path}: line {self.number} is over {MAX_LINE} characters")
        return _plain(line) if line else None

    def nodes(self) -> Iterator[tuple[Node, Numbers | None, Mask | None]]:
        line = self._next()
        while line is not None:
            counted = _COUNT.match(line)
            if counted and self.ids is None:
                line = self._read_ids(int(counted[1]))
                continue
            match = _HEAD.match(line)
            if match is None:
                line = self._next()
                continue
            shape = tuple(int(size) for size in reversed(match.groups()[4:8]))
            sources = tuple(s[1].strip().lstrip(", ") for s in _SOURCE.finditer(match[4]))
            node = Node(match[1], match[3], shape, sources)
            line, values, seen = self._values(node)
            yield node, values, seen

    def _read_ids(self, count: int) -> str | None:
        found: list[int] = []
        line = self._next()
        while line is not None and len(found) < count:
            word = line.strip()
            if not (word.isascii() and word.isdigit() and len(word) < 10):
                break
            found.append(int(word))
            line = self._next()
        if len(found) == count:
            self.ids = found
        return line

    def _values(self, node: Node) -> tuple[str | None, Numbers | None, Mask | None]:
        """Return the line after a node, its values, and which of them were printed."""
        count = int(np.prod([float(size) for size in node.shape]))
        rows: list[list[float]] = []
        line = self._next()
        sums = 0
        while line is not None and _HEAD.match(line) is None and not _COUNT.match(line):
            text = line.strip()
            if _SUM.match(line):
                sums += 1
            elif text.startswith("[") and any(ch.isdigit() or ch == "n" for ch in text):
                rows.append(self._row(text))
            line = self._next()
            if sums == node.shape[0]:
                break
        if not rows:
            return line, None, None
        if count > MAX_VALUES:
            raise FormatError(
                f"{self._path}: line {self.number}: {node.name} has shape {list(node.shape)}; at "
                f"most {MAX_VALUES} values are read"
            )
        return line, *self._spread(node, rows)

    def _row(self, text: str) -> list[float]:
        words = text.strip("[], ").replace("...,", " ").replace(",", " ").split()
        try:
            return [float(word) for word in words]
        except ValueError as error:
            raise FormatError(f"{self._path}: line {self.number}: {error}") from None

    def _spread(self, node: Node, rows: list[list[float]]) -> tuple[Numbers, Mask]:
        shown = [_shown(size) for size in node.shape]
        index = [(a, b, c) for a in range(node.shape[0]) for b in shown[1] for c in shown[2]]
        if len(rows) != len(index) or any(len(row) != len(shown[3]) for row in rows):
            raise FormatError(
                f"{self._path}: line {self.number}: {node.name} of shape {list(node.shape)} shows "
                f"{len(rows)} rows; expected {len(index)} of {len(shown[3])} values; is the text "
                "cut?"
            )
        values = np.zeros(node.shape, np.float32)
        seen = np.zeros(node.shape, np.bool_)
        for (a, b, c), row in zip(index, rows, strict=True):
            values[a, b, c, shown[3]] = row
            seen[a, b, c, shown[3]] = True
        return values, seen


def _shown(size: int) -> list[int]:
    """Return the places of an axis that are printed."""
    if size <= 2 * EDGE:
        return list(range(size))
    return [*range(EDGE), *range(size - EDGE, size)]
