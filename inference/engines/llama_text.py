"""Reads the text that llama-eval-callback prints: three values from each end of every axis.

A mask says which values were printed; comparisons use only these, to the four printed decimals.
Names are cut to the length that the program prints.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import FormatError
from aprfmt.formats.mapped_file import open_regular
from aprfmt.inference.engines.graph import GraphNode, GraphReader, Mask
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool
from aprfmt.model import Model

Numbers = NDArray[Any]
RESOLUTION = 5e-5  # half a unit of the fourth decimal
EDGE = 3  # values printed from each end of an axis
MAX_LINE = 1 << 16
# Longest useful line: three names of 64 characters and twelve sizes.
MAX_SAYING = 1 << 10
# Values of one node, printed or not: 64 tokens of the largest vocabulary; 64 MiB.
MAX_VALUES = 1 << 24
MAX_TOTAL = 1 << 31  # values of all nodes together; they are stored in a temporary file
_HEAD = re.compile(
    r"(\w*):\s+(\S(?:.*\S)?)\s+= \((\w+)\)\s+(\w+)\((.*)\}\) = "
    r"\{(\d{1,18}), (\d{1,18}), (\d{1,18}), (\d{1,18})\}"
)
_SOURCE = re.compile(r"([^{},][^{}]*)\{[\d, ]*\}?")
_COUNT = re.compile(r".*number of input tokens = (\d{1,9})")
_SUM = re.compile(r"\s+sum = (\S+)")
_LOGGED = re.compile(r"^\d+\.\d+\.\d+\.\d+ [IWE] ")  # time stamp printed by newer builds


def is_eval_text(path: Path) -> bool:
    """Return whether a file begins like this program's output; reads at most 1 MiB."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(1 << 20)
    if b"\0" in head:
        return False
    return any(
        _match_node_head(_without_log_prefix(line))
        for line in head.decode("latin1").splitlines()[:4000]
    )


def _match_node_head(line: str) -> re.Match[str] | None:
    """Return the match of a line that begins a node's print-out; None for any other line."""
    if len(line) > MAX_SAYING:
        return None
    match = _HEAD.match(line)
    said = match is not None and ("eval" in match[1] or "callback" in match[1])
    return match if said else None


def _without_log_prefix(line: str) -> str:
    """Return a line without its newline and the prefix that llama.cpp's logger puts before it."""
    return _LOGGED.sub("", line.rstrip("\n"))


@contextmanager
def load_eval_text(
    path: Path,
    ids: Sequence[int] | None = None,
    model: Model | None = None,
    *,
    positions: Positions = "all",
    wanted: Collection[str] | None = None,
    file: IO[str] | None = None,
) -> Iterator[Trace]:
    """Yield the trace of the values that the text prints; `file` is the text if it is open.

    `model` is the GGUF that ran. Without it weights are recognised by llama.cpp's names, joined
    ones are not read, and llama's adjacent pairs are not converted. Raises FormatError for a text
    that is cut or holds several passes.
    """
    with ExitStack() as stack:
        text = file
        if text is None:
            fd = open_regular(path)  # refuses pipes and devices
            text = stack.enter_context(os.fdopen(fd, encoding="utf-8", errors="replace"))
        lines = _Lines(text, path)
        collector = Collector(
            stack.enter_context(Spool()),
            model,
            tokens=None,
            dtype="float32",
            positions=positions,
            wanted=wanted,
        )
        tokens = _read_nodes(lines, collector, model)
        printed = lines.ids
        if printed is not None and len(printed) != tokens:
            printed = None
        run = {
            "format": "llama-eval-callback", "path": str(path),
            "ids": printed if printed is not None else None if ids is None else list(ids),
            "ids_given": printed is None and ids is not None,
            "backend": {
                "backend": "llama.cpp", "printed": f"{EDGE} values from each end of an axis",
            },
        }  # fmt: skip
        yield collector.trace(run, resolution=RESOLUTION)


def _read_nodes(lines: "_Lines", collector: Collector, model: Model | None) -> int:
    """Read every node of the text into the collector; return how many tokens the pass has.

    Raises FormatError where the text holds no pass, or several.
    """
    reader: GraphReader | None = None
    nodes = 0
    for node, values, seen in lines.nodes():
        nodes += 1
        # The token embedding begins a pass and says its length.
        embeds = node.op == "GET_ROWS" and any("token_embd" in s for s in node.sources)
        if embeds:
            if reader is not None:
                raise FormatError(
                    f"{lines.path}: a second pass begins at line {lines.number}; expected the text "
                    "of one (a prompt within one batch)"
                )
            reader = GraphReader(collector, model, node.shape[-2])
            collector.set_tokens(node.shape[-2])
        if reader is None:
            continue
        if values is None:
            large = math.prod(node.shape) > MAX_VALUES
            why = f"shape {list(node.shape)} has over {MAX_VALUES} values" if large else ""
            collector.unknown[node.name] = why or "no values were printed"
        else:
            reader.add(node, values, seen)
    if reader is None:
        raise FormatError(
            f"{lines.path}: shows no token embedding in {nodes} nodes; expected the output of "
            "llama-eval-callback"
        )
    return reader.tokens


class _Lines:
    """Reads the nodes that the text prints; counts lines for error messages."""

    def __init__(self, file: IO[str], path: Path) -> None:
        """Start at the first line of an open text; `path` is for messages."""
        self._file, self.path = file, path
        self.number = 0
        self.values = 0  # number of values of all nodes so far, printed or not
        self.ids: list[int] | None = None

    def _next_line(self) -> str | None:
        """Return the next line without its logger's prefix; None at the end.

        Raises FormatError for a line of MAX_LINE characters or more.
        """
        line = self._file.readline(MAX_LINE)
        self.number += 1
        if len(line) == MAX_LINE:
            raise FormatError(f"{self.path}: line {self.number} is over {MAX_LINE} characters")
        return _without_log_prefix(line) if line else None

    def nodes(self) -> Iterator[tuple[GraphNode, Numbers | None, Mask | None]]:
        """Yield (node, its values, mask of the printed ones); values and mask may be None.

        They are None if nothing was printed or the node is too large. Sets `ids` where the text
        prints the token ids.
        """
        line = self._next_line()
        while line is not None:
            counted = _match_token_count(line)
            if counted and self.ids is None:
                line = self._read_ids(int(counted[1]))
                continue
            match = _match_node_head(line)
            if match is None:
                line = self._next_line()
                continue
            shape = tuple(int(size) for size in reversed(match.groups()[5:9]))
            sources = tuple(s[1].strip().lstrip(", ") for s in _SOURCE.finditer(match[5]))
            node = GraphNode(match[2], match[4], shape, sources)
            line, values, seen = self._values(node)
            yield node, values, seen

    def _read_ids(self, count: int) -> str | None:
        """Read `count` printed token ids into `ids`; return the line after them, None at the end.

        `ids` is unchanged if fewer were printed.
        """
        found: list[int] = []
        line = self._next_line()
        while line is not None and len(found) < count:
            word = line.strip()
            if not (word.isascii() and word.isdigit() and len(word) < 10):
                break
            found.append(int(word))
            line = self._next_line()
        if len(found) == count:
            self.ids = found
        return line

    def _values(self, node: GraphNode) -> tuple[str | None, Numbers | None, Mask | None]:
        """Return (line after a node's values, the values, mask of the printed ones).

        Values and mask are None if nothing was printed or the node is too large. FormatError if
        the printed rows do not fit the node's shape.
        """
        rows: list[list[float]] = []
        line = self._next_line()
        sums = 0
        # Collect printed rows up to the node's sums.
        while line is not None and _match_node_head(line) is None and not _match_token_count(line):
            text = line.strip()
            if _SUM.match(line):
                sums += 1
            elif text.startswith("[") and any(ch.isdigit() or ch == "n" for ch in text):
                rows.append(self._parse_row(text))
            line = self._next_line()
            if sums == node.shape[0]:
                break
        if not rows:
            return line, None, None
        # The number of rows must be that of the printed indices.
        shown = [
            list(range(node.shape[0])) if node.shape[0] <= len(rows) else [],
            *map(_printed_indices, node.shape[1:]),
        ]
        expected = math.prod(map(len, shown[:3]))
        if len(rows) != expected or any(len(row) != len(shown[3]) for row in rows):
            raise FormatError(
                f"{self.path}: line {self.number}: {node.name} of shape {list(node.shape)} shows "
                f"{len(rows)} rows; expected "
                f"{math.prod(map(len, map(_printed_indices, node.shape[1:3])))} "
                f"for each of {node.shape[0]}, of {len(shown[3])} values; is the text cut?"
            )
        # Nodes that are too large are left out.
        count = math.prod(node.shape)
        if count > MAX_VALUES:
            return line, None, None
        self.values += count
        if self.values > MAX_TOTAL:
            raise FormatError(
                f"{self.path}: line {self.number}: {self.values} values so far, printed or not; "
                f"at most {MAX_TOTAL} are read"
            )
        return line, *_spread_printed(node, shown, rows)

    def _parse_row(self, text: str) -> list[float]:
        """Return the numbers of a printed row; FormatError if one is no number."""
        words = text.strip("[], ").replace("...,", " ").replace(",", " ").split()
        try:
            return [float(word) for word in words]
        except ValueError as error:
            raise FormatError(f"{self.path}: line {self.number}: {error}") from None


def _spread_printed(
    node: GraphNode, shown: list[list[int]], rows: list[list[float]]
) -> tuple[Numbers, Mask]:
    """Return (a node's values, zero where not printed, mask of the printed ones).

    `shown` has the printed indices of each of the four axes, `rows` the printed rows in order.
    """
    values = np.zeros(node.shape, np.float32)
    seen = np.zeros(node.shape, np.bool_)
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite
        for (a, b, c), row in zip(product(*shown[:3]), rows, strict=True):
            values[a, b, c, shown[3]] = row
            seen[a, b, c, shown[3]] = True
    return values, seen


def _match_token_count(line: str) -> re.Match[str] | None:
    """Return the match of a line that gives the number of tokens, or None."""
    return _COUNT.match(line) if len(line) <= MAX_SAYING else None


def _printed_indices(size: int) -> list[int]:
    """Return the printed indices of an axis of this size."""
    if size <= 2 * EDGE:
        return list(range(size))
    return [*range(EDGE), *range(size - EDGE, size)]
