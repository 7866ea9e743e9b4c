"""What is known about each mutation, kept between runs, and what makes it no longer true."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tests.mutations.mutation import Mutation
from tests.mutations.product import STATE, digest, digest_of, files_of_tests, test_key

PAGE = Path("docs") / "notes" / "mutations.md"
Ending = Literal["killed", "survived", "error"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a mutation ended. `by` is the test that failed; `how` says what else there is to say.

    `ran` tests ran, `left` reach it too but cost more than the budget of seconds. `of` is what
    the verdict was made of: the mutation, the file and the tests.
    """

    id: str
    ending: Ending
    by: str = ""
    how: str = ""
    ran: int = 0
    left: int = 0
    budget: float = 0.0
    seconds: float = 0.0
    of: str = ""


class Results:
    """The file of verdicts: one JSON object a line, the last of an id counts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / STATE / "results.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._all_tests = digest_of(root, files_of_tests(root))
        self._found: dict[str, Verdict] = {}
        for line in self.path.read_text().splitlines() if self.path.is_file() else ():
            try:
                row = Verdict(**json.loads(line))
            except (ValueError, TypeError):
                continue  # the line a stopped run did not end, or one of another version
            self._found[row.id] = row

    def of(self, mutation: Mutation, by: str) -> str:
        """Return what a verdict rests on: a kill on one test file, all else on every test."""
        text = f"{mutation.path}\0{mutation.old}\0{mutation.new}"
        name = by.partition("::")[0]
        tests = test_key(self.root, name) if name.startswith("tests/") else self._all_tests
        parts = f"{text}\0{digest(self.root / mutation.path)}\0{tests}"
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def get(self, mutation: Mutation, budget: float) -> Verdict | None:
        """Return the verdict of a mutation if nothing it rests on has changed."""
        row = self._found.get(mutation.id)
        if row is None or row.ending == "error" or row.of != self.of(mutation, row.by):
            return None
        return None if row.ending == "survived" and row.left and row.budget < budget else row

    def put(self, row: Verdict) -> None:
        """Keep a verdict."""
        self._found[row.id] = row
        with self.path.open("a") as out:
            out.write(json.dumps(asdict(row)) + "\n")


def explained(root: Path) -> set[str]:
    """Return the ids whose rows on the page say why no test can tell the mutation."""
    page = root / PAGE
    lines: Iterable[str] = page.read_text().splitlines() if page.is_file() else ()
    found = (re.match(r"\|\s*`([\w.-]+)`\s*\|.*\w.*\|", line) for line in lines)
    return {match[1] for match in found if match}
