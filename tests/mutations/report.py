"""What is known, as text: counts, errors, and every survivor with its diff."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.mutation import Gone, Mutation
from tests.mutations.results import PAGE, Results, Verdict, explained


def report(root: Path, chosen: Sequence[Mutation | Gone], results: Results, budget: float) -> int:
    """Print how all chosen mutations stand; return 0 if nothing is left to do, else 1."""
    known = explained(root)
    open_ends: list[str] = []
    counts: Counter[str] = Counter()
    for each in chosen:
        row = None if isinstance(each, Gone) else results.get(each, budget)
        ending = _ending(each, row, known)
        counts[ending] += 1
        if ending in ("survived", "error", "not judged"):
            open_ends.append(_open_end(root, each, row, ending))
    for text in open_ends:
        print(text)
    print(f"{len(chosen)} mutations: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if open_ends else 0


def _ending(each: Mutation | Gone, row: Verdict | None, known: set[str]) -> str:
    if isinstance(each, Gone):
        return "error"
    if row is None:
        return "not judged"
    if row.ending == "survived" and each.id in known:
        return f"survived and explained in {PAGE}"
    return row.ending


def _open_end(root: Path, each: Mutation | Gone, row: Verdict | None, ending: str) -> str:
    """Return what there is to say about a mutation that is neither killed nor explained."""
    if isinstance(each, Gone):
        return f"{ending}: {each.id}: {each.why}\n"
    said = f" ({row.how or f'{row.ran} tests passed'})" if row else ""
    head = f"{ending}: {each.id}: {each.means}{said}"
    return f"{head}\n{each.diff((root / each.path).read_text())}\n"
