"""Chooses token ids that reach what differs: long contexts, embedding rows, experts.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.compare.diffs import DiffReport
from aprfmt.diagnosis.paired_pass import Probe
from aprfmt.diagnosis.static_findings import POSITIONS, DifferingRows
from aprfmt.inference.probe_ids import LONGEST, TILE, choose_ids, critical_lengths
from aprfmt.inference.rope import depends_on_length
from aprfmt.measure.differing_units import SLICE, differing_units
from aprfmt.measure.records import EQUAL
from aprfmt.measure.row_reader import RowReader
from aprfmt.model import Model

MOST_ROWS = 24  # differing rows of the embedding that are put among the ids
FIRST_ROW = 6  # the place of the first of them
MOST_ADDED = 12  # special and added tokens that are put at the end
LENGTHS = (1, 2, TILE - 1, TILE, TILE + 1)
MOST_LOGITS = 16 << 20  # bytes of logits of a pass; above, only the rows of LENGTHS and some more
FAR, TINY = 8.0, 1e-12  # times the median distance of a table's rows
TABLES = ("token_embd.weight", POSITIONS)


def differing_rows(a: Model, b: Model, report: DiffReport | None) -> DifferingRows:
    """Return the numbers of rows and experts whose stored bytes differ, for tensors of both models.

    Where the two sides have different encodings, they are rows much further apart than most.
    """
    found = DifferingRows()
    for row in report.tensors if report is not None else ():
        if row.verdict in EQUAL or row.shape_a != row.shape_b:
            continue
        sides = [model.find(row.key) for model in (a, b)]
        if sides[0] is None or sides[1] is None:
            continue
        if row.encoding_a != row.encoding_b:
            if row.key in TABLES and row.verdict == "DIFFERENT":
                found.rows[row.key] = _distant_rows(sides)
        elif row.key in TABLES:
            found.rows[row.key] = differing_units(sides, sides[0].shape[0])
        elif "_exps." in row.key and row.shape_a:
            found.experts[row.key] = differing_units(sides, sides[0].shape[0])
    return found


def _distant_rows(sides: Sequence[Any]) -> list[int]:
    """Return the numbers of the rows of a weight in which A and B differ far more than usual.

    `sides` are the weight of A and of B. A row's distance is |x - y| / |x|: over 8 times the median
    of all rows it is far, and so is one that is NaN.
    """
    readers = [RowReader(side) for side in sides]
    count, columns = readers[0].rows, max(1, readers[0].columns)
    apart = np.zeros(count)
    with np.errstate(all="ignore"):
        for start in range(0, count, max(1, SLICE // (8 * columns))):
            rows = np.arange(start, min(count, start + max(1, SLICE // (8 * columns))))
            x, y = (reader.take(rows).astype(np.float64) for reader in readers)
            apart[rows] = np.linalg.norm(x - y, axis=1) / np.maximum(
                np.linalg.norm(x, axis=1), TINY
            )
    for reader in readers:
        reader.drop()
    far = ~(apart <= max(FAR * float(np.nanmedian(apart)), TINY))
    return [int(row) for row in np.flatnonzero(far)]


@dataclass(frozen=True)
class ChosenProbes:
    """The probes, the longest one first, and the differing embedding rows among its ids."""

    probes: tuple[Probe, ...]
    rows: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the first probe."""
        return self.probes[0].ids


def choose_probes(
    models: Sequence[Model],
    differing: DifferingRows,
    *,
    long: bool,
    least: int,
    added: Sequence[int],
) -> ChosenProbes:
    """Return probes of `least` tokens or more that reach what differs between the models.

    They are cut to the length of a position table. `long`: longer than every attention window.
    `differing` are the differing rows, of which some are among the ids. `added` are special and
    added tokens, some of which are put at the end.
    """
    every = [model.hyper for model in models]
    ids = _lengthen(list(choose_ids(every, long=long)), least, every)
    positions = differing.rows.get(POSITIONS, [])
    if positions and positions[0] < LONGEST:
        ids = _lengthen(ids, positions[0] + 2, every)
    longest = min(
        (model.roles[POSITIONS].shape[0] for model in models if POSITIONS in model.roles),
        default=len(ids),
    )
    ids = ids[: max(1, min(len(ids), longest))]
    vocab = min(int(hp["vocab_size"]) for hp in every)
    rows = [row for row in differing.rows.get("token_embd.weight", ()) if row < vocab]
    taken = _spread_evenly(rows, min(MOST_ROWS, max(0, len(ids) - FIRST_ROW)))
    ids[FIRST_ROW : FIRST_ROW + len(taken)] = taken
    room = max(0, len(ids) - FIRST_ROW - len(taken))
    last = _spread_evenly([i for i in added if i < vocab], min(MOST_ADDED, room))
    ids[len(ids) - len(last) :] = last
    probes = [make_probe(ids, every, "main")]
    if len(ids) > TILE + 1 and any(depends_on_length(hp) for hp in every):
        probes.append(make_probe(ids[: TILE + 1], every, "short: frequencies depend on the length"))
    return ChosenProbes(tuple(probes), tuple(taken))


def make_probe(ids: Sequence[int], every: Sequence[Mapping[str, Any]], why: str) -> Probe:
    """Return a probe of these ids; only some rows of logits are compared if there are many.

    `every` are the hyperparameters of both models, `why` says in words what the probe is for.
    """
    size = 4 * len(ids) * max(int(hp["vocab_size"]) for hp in every)
    if size <= MOST_LOGITS:
        return Probe(tuple(ids), None, why)
    rows = {length - 1 for length in LENGTHS} | set(range(FIRST_ROW, FIRST_ROW + 2))
    for hp in every:
        rows |= set(critical_lengths(hp))
    rows |= {len(ids) // 2, len(ids) - 1}
    return Probe(tuple(ids), tuple(sorted(row for row in rows if row < len(ids))), why)


def _lengthen(ids: list[int], length: int, every: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids extended to `length` by ids spread over the vocabulary."""
    vocab = min(int(hp["vocab_size"]) for hp in every)
    return ids + [(7919 * i + 5) % vocab for i in range(len(ids), length)]


def _spread_evenly(values: Sequence[int], most: int) -> list[int]:
    """Return up to `most` of the values, evenly from the first to the last."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[:most])
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def probe_other_ids(vocab: int, length: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield `count` sequences of `length` ids that together go through the vocabulary.

    The step from id to id has no factor in common with `vocab`, so that all ids come.
    """
    step = next(k for k in range(max(2, vocab * 5 // 13), 2 * vocab + 3) if math.gcd(k, vocab) == 1)
    for run in range(count):
        yield tuple((step * (run * length + i) + run) % vocab for i in range(length))


def unrouted_experts(
    differing: DifferingRows, routed: Mapping[int, set[int]]
) -> dict[str, list[int]]:
    """Return {role key: numbers of differing experts that no pass chose}, without empty ones.

    `differing` are the rows that differ, `routed` the experts chosen, by layer.
    """
    found: dict[str, list[int]] = {}
    for key, experts in differing.experts.items():
        layer = int(key[1:].partition(".")[0])
        left = [expert for expert in experts if expert not in routed.get(layer, set())]
        if left:
            found[key] = left
    return found
