"""Summarizes the rows of many models: damage, faults, copies, families, templates.

What has to be grouped is in a temporary database on disk, so that memory does not grow with the
number of models. An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import json
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.fleet.answer_lines import RowFacts
from aprfmt.fleet.model_search import FleetModel
from aprfmt.fleet.questions import ACCOUNT
from aprfmt.fleet.tasks import DERIVES, ERROR

SHARED = 0.5  # share of equal tensors from which two models are listed as a family
MANY = 1000  # groups of copies listed; the sums are of all
COUNTED = ("PASS", "FAIL", "NOT_RUN", "ERROR")  # the outcomes that a model's line counts

_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE models (identity TEXT PRIMARY KEY, model TEXT, bytes INT, places TEXT, format TEXT,
                     arch TEXT, level TEXT, shapes TEXT, quantized INT, template TEXT,
                     vocabulary TEXT, encodings TEXT);
CREATE TABLE tensors (raw TEXT, decoded TEXT, bytes INT, identity TEXT, key TEXT);
CREATE TABLE answers (identity TEXT, name TEXT, base TEXT, outcome TEXT, found TEXT, findings TEXT,
                      details TEXT, PRIMARY KEY (identity, name, base)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class QuantizedPair:
    """The identities of a quantized model and of one that it may have been made of."""

    subject: str
    base: str


class Summary:
    """A database of the answers about the models of one scan; a context manager.

    Answers are added as they come; of a model and question the last one counts. Those about other
    models, which are in the results from another scan, are left out.
    """

    def __init__(self, subjects: Collection[FleetModel]) -> None:
        """Create the SQLite database in a temporary folder, with a row for each model."""
        self._folder = tempfile.TemporaryDirectory(prefix="aprfmt-scan-")
        self._sql = sqlite3.connect(Path(self._folder.name) / "rows")
        self._sql.executescript(_TABLES)
        self._sql.executemany(
            "INSERT INTO models (identity, model, bytes, places) VALUES (?, ?, ?, ?)",
            (
                (each.identity, each.places[0], each.bytes, json.dumps(each.places))
                for each in subjects
            ),
        )
        self._models = {each.identity for each in subjects}
        self._indexed = False

    def __enter__(self) -> "Summary":
        return self

    def __exit__(self, *exc: object) -> None:
        self._sql.close()
        self._folder.cleanup()

    def add(self, facts: RowFacts) -> None:
        """Add an answer, or replace an earlier one to the same question.

        Nothing is added for a model that is not of this scan.
        """
        identity, name = facts.identity, facts.name
        if identity not in self._models:
            return
        if facts.tensors:
            self._delete_tensors(identity)
            self._sql.executemany(
                "INSERT INTO tensors VALUES (?, ?, ?, ?, ?)",
                ((raw, decoded, size, identity, key) for raw, decoded, size, key in facts.tensors),
            )
        if facts.model:
            self._sql.execute(
                f"UPDATE models SET {', '.join(f'{name} = ?' for name in facts.model)} "
                "WHERE identity = ?",
                (*facts.model.values(), identity),
            )
        self._sql.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
            (identity, name, facts.base, facts.outcome, facts.found, facts.findings, facts.details),
        )

    def _delete_tensors(self, identity: str) -> None:
        """Delete the tensor rows that an earlier answer about a model added, if there was one."""
        known = "SELECT 1 FROM answers WHERE identity = ? AND name = 'digests'"
        if self._sql.execute(known, (identity,)).fetchone():
            self._sql.execute("CREATE INDEX IF NOT EXISTS by_identity ON tensors (identity)")
            self._sql.execute("DELETE FROM tensors WHERE identity = ?", (identity,))

    def _query(self, text: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of an SQL query; the indexes are created before the first one."""
        if not self._indexed:  # an index costs less when the rows are there
            self._sql.execute("CREATE INDEX by_raw ON tensors (raw)")
            self._sql.execute("CREATE INDEX by_decoded ON tensors (decoded)")
            self._indexed = True
        with closing(self._sql.execute(text, values)) as cursor:
            yield from cursor

    # --- what is asked ------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return {outcome: number of answers}, with all four outcomes."""
        found = dict.fromkeys(("PASS", "FAIL", "NOT_RUN", ERROR), 0)
        rows = self._query(
            "SELECT outcome, count(*) FROM answers WHERE name != ? GROUP BY 1", DERIVES
        )
        return found | {outcome: count for outcome, count in rows}

    def models(self) -> list[dict[str, Any]]:
        """Return a JSON row for every model: path, size, format, and its answers by outcome."""
        lines = self._query(
            "SELECT m.model, m.bytes, m.places, m.format, m.arch, m.level, m.encodings, "
            "sum(a.outcome = 'PASS'), sum(a.outcome = 'FAIL'), sum(a.outcome = 'NOT_RUN'), "
            "sum(a.outcome = 'ERROR') FROM models m LEFT JOIN answers a ON a.identity = m.identity "
            "AND a.name != ? GROUP BY m.identity ORDER BY m.model",
            DERIVES,
        )
        return [
            {
                "model": model,
                "bytes": size,
                "places": len(json.loads(places)),
                "format": form,
                "architecture": arch,
                "level": level,
                "encodings": json.loads(kinds or "{}"),
                **dict(zip(COUNTED, (count or 0 for count in counts), strict=True)),
            }
            for model, size, places, form, arch, level, kinds, *counts in lines
        ]

    def unread(self) -> list[dict[str, Any]]:
        """Return [{model, items, weights}] of each model with items that no table lists.

        `weights` counts those that may change what the model computes.
        """
        lines = self._query(
            "SELECT m.model, a.details FROM answers a JOIN models m ON m.identity = a.identity "
            "WHERE a.name = ? ORDER BY m.model",
            ACCOUNT,
        )
        rows = [{"model": model, **json.loads(details or "{}")} for model, details in lines]
        return [row for row in rows if row.get("items")]

    def damage(self) -> list[dict[str, Any]]:
        """Return a JSON row for every check that failed and every question without an answer."""
        lines = self._query(
            "SELECT m.model, a.name, a.outcome, a.found, a.findings FROM answers a JOIN models m "
            "ON m.identity = a.identity WHERE a.outcome IN ('FAIL', 'ERROR') AND a.name != ? "
            "ORDER BY m.model",
            DERIVES,
        )
        return [
            {
                "model": model,
                "check": name,
                "outcome": outcome,
                "found": found,
                "findings": json.loads(findings),
            }
            for model, name, outcome, found, findings in lines
        ]

    def faults(self) -> list[dict[str, Any]]:
        """Return [{check, outcome, models}]: how many models fail each check, commonest first.

        The outcome is FAIL or ERROR.
        """
        lines = self._query(
            "SELECT name, outcome, count(*) FROM answers WHERE outcome IN ('FAIL', 'ERROR') "
            "AND name != ? GROUP BY 1, 2 ORDER BY 3 DESC, 1",
            DERIVES,
        )
        return [{"check": name, "outcome": what, "models": count} for name, what, count in lines]

    def copies(self) -> dict[str, Any]:
        """Return {tensors, bytes, groups} of tensors whose stored bytes exist more than once.

        `tensors` is the number of different ones, `bytes` what storing each once would save.
        `groups` lists at most MANY, those that would save most, with up to 5 places of each.
        """
        groups = (
            "SELECT raw, max(bytes) AS size, count(*) AS copies, "
            "count(DISTINCT identity) AS models FROM tensors WHERE bytes > 0 "
            "GROUP BY raw HAVING copies > 1"
        )
        tensors, saved = next(
            self._query(f"SELECT count(*), coalesce(sum(size * (copies - 1)), 0) FROM ({groups})")
        )
        worst = self._query(f"{groups} ORDER BY size * (copies - 1) DESC, raw LIMIT {MANY}")
        listed = []
        for raw, size, copies, models in worst:
            where = self._query(
                "SELECT m.model, t.key FROM tensors t JOIN models m ON m.identity = t.identity "
                "WHERE t.raw = ? ORDER BY 1, 2 LIMIT 5",
                raw,
            )
            listed.append(
                {
                    "raw": raw,
                    "bytes": size,
                    "copies": copies,
                    "models": models,
                    "where": [{"model": model, "tensor": key} for model, key in where],
                }
            )
        return {"tensors": tensors, "bytes": saved, "groups": listed}

    def pairs(self, limit: int = 4) -> Iterator[QuantizedPair]:
        """Yield pairs of a quantized model and an unquantized one with the same roles and shapes.

        A quantized model has at most `limit` pairs, those that share most decoded tensors first.
        """
        quantized = list(
            self._query(
                "SELECT identity, shapes FROM models WHERE quantized AND shapes IS NOT NULL "
                "ORDER BY model"
            )
        )
        for identity, shapes in quantized:
            bases = self._query(
                "SELECT b.identity, (SELECT count(*) FROM tensors x JOIN tensors y "
                "ON x.decoded = y.decoded AND x.key = y.key WHERE x.identity = ? "
                "AND y.identity = b.identity) AS shared FROM models b WHERE b.shapes = ? "
                "AND b.quantized = 0 ORDER BY shared DESC, b.model LIMIT ?",
                identity,
                shapes,
                limit,
            )
            for base, _ in list(bases):
                yield QuantizedPair(identity, base)

    def families(self) -> list[dict[str, Any]]:
        """Return rows {model, base, proof, found, details} of models that derive from others.

        `proof` is "encoded again" where encoding the base gives the model's tensors, else that all
        or most decoded tensors are equal.
        """
        proven = self._query(
            "SELECT m.model, b.model, a.found, a.details FROM answers a "
            "JOIN models m ON m.identity = a.identity JOIN models b ON b.identity = a.base "
            "WHERE a.name = ? AND a.outcome = 'PASS' ORDER BY 2, 1",
            DERIVES,
        )
        found = [
            {
                "model": model,
                "base": base,
                "proof": "encoded again",
                "found": said,
                "details": json.loads(details),
            }
            for model, base, said, details in proven
        ]
        return [*found, *self._equal_models()]

    def _equal_models(self) -> Iterator[dict[str, Any]]:
        """Yield a row of `families` for each model that has most tensors of another one.

        The other is the first model by name that has a tensor of the same name and values. At least
        the fraction SHARED of the tensors must be equal, by the SHA-256 of their decoded values.
        """
        lines = self._query(
            "WITH counted AS (SELECT identity, count(*) AS n FROM tensors GROUP BY 1), "
            "some AS (SELECT DISTINCT t.decoded, t.key, m.model, t.identity FROM tensors t "
            "JOIN models m ON m.identity = t.identity WHERE t.decoded IS NOT NULL), "
            "heads AS (SELECT decoded, key, min(model) AS first FROM some GROUP BY 1, 2 "
            "HAVING count(*) > 1) "
            "SELECT a.model, b.model, count(*), max(ca.n, cb.n) FROM some s "
            "JOIN heads h ON h.decoded = s.decoded AND h.key = s.key AND h.first != s.model "
            "JOIN models a ON a.identity = s.identity JOIN models b ON b.model = h.first "
            "JOIN counted ca ON ca.identity = s.identity "
            "JOIN counted cb ON cb.identity = b.identity "
            "GROUP BY s.identity, h.first HAVING count(*) >= ? * max(ca.n, cb.n) ORDER BY 2, 1",
            SHARED,
        )
        for model, base, shared, of in lines:
            proof = "all tensors equal" if shared == of else "most tensors equal"
            said = f"{shared} of {of} tensors have the same values"
            yield {"model": model, "base": base, "proof": proof, "found": said, "details": {}}

    def template_drift(self) -> list[dict[str, Any]]:
        """Return [{vocabulary, templates}] of the vocabularies with several chat templates.

        `vocabulary` is a SHA-256. `templates` is [{template, models, example}]: the template's
        SHA-256, the number of models that have it, and one of them.
        """
        lines = self._query(
            "SELECT vocabulary, template, count(*), min(model) FROM models WHERE vocabulary IN "
            "(SELECT vocabulary FROM models WHERE vocabulary IS NOT NULL GROUP BY 1 "
            "HAVING count(DISTINCT template) > 1) GROUP BY 1, 2 ORDER BY 1, 3 DESC"
        )
        groups: dict[str, list[dict[str, Any]]] = {}
        for vocabulary, template, count, example in lines:
            groups.setdefault(vocabulary, []).append(
                {"template": template, "models": count, "example": example}
            )
        return [{"vocabulary": name, "templates": rows} for name, rows in groups.items()]

    def to_json(self) -> Mapping[str, Any]:
        """Return the whole summary as JSON: counts, models, damage, copies, families and more."""
        return {
            "counts": self.counts(),
            "models": self.models(),
            "damage": self.damage(),
            "unread": self.unread(),
            "faults": self.faults(),
            "copies": self.copies(),
            "families": self.families(),
            "templates": self.template_drift(),
        }
