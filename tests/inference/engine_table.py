"""Prints what is said of every kind of dump, sound and with a seeded fault, as a table.

    python -m tests.inference.engine_table [--write]

With --write the tables are put into docs/notes/engine_dumps.md.
Sound dumps are those of the tests: layouts of ranks, forms of steps, forms of log-probabilities, in
two arithmetics, and what vLLM itself wrote. Faults are an engine's (shares, sums, ranks that
differ), a dump's (a rank or a step that is missing, twice or of another run) and a rollout's. Exit
1 where a sound dump is accused, a fault is not seen, or a cause other than the seeded one is said.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.inference import test_logprobs as answers
from tests.inference.engines import test_rank_dumps as dumps
from tests.inference.engines import test_real_engine
from tests.inference.engines.test_captures import own
from tests.models import IDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notes" / "engine_dumps.md"
HEADING = "## Sound dumps and seeded faults"
DTYPES = ("float32", "bfloat16")
REAL = "vLLM 0.32.0 on a CPU, bfloat16"
Line = tuple[str, str, str, str, bool]  # kind, dump or fault, what is said, where, as it should be


def _place(folder: Path, name: str) -> Path:
    """Return the path of a new dump; the folder above it is made."""
    (folder / name).mkdir()
    return folder / name / "d"


def _said(done: Any) -> tuple[str, str]:
    """Return (verdict with the causes and their levels, where the first is) of a command."""
    if done.code == 2 and not done.out.strip().startswith("{"):
        return "refused", done.err.strip().rpartition(": ")[2][:60]
    found = done.json
    if "error" in found:
        return "refused", str(found["error"]["message"]).rpartition("/d: ")[2].partition(";")[0]
    causes = [f"{one['cause']} ({one['level']})" for one in found.get("causes", [])]
    word = found.get("verdict") or found["pronounced"]["word"]
    where = [one["where"] for one in found.get("causes", [])][:1]
    table = found.get("logprobs")
    if table:
        size = f"{table['scaled']:.1e} of {table['tolerance']:.1e}"
        where = [size if table["first"] is None else f"position {table['first']}: {size}"]
    place = str(where[0][0] if where and isinstance(where[0], list) else where[0] if where else "")
    return ", ".join([word, *causes]), place


def sound(folder: Path) -> Iterator[Line]:
    """Yield the rows of sound dumps."""
    for name, (write, base, tokens) in dumps.LAYOUTS.items():
        made = write(_place(folder, f"layout {name}"))
        ids = ",".join(map(str, IDS[:tokens]))
        done = aprfmt("diagnose", tiny_folder(base), made, "--ids", ids, "--json")
        said, where = _said(done)
        yield "ranks", name, said, where, done.code == 0
    for name, step in dumps.STEPS.items():
        made = step(_place(folder, f"steps {name}"))
        ids = ",".join(map(str, IDS))
        done = aprfmt("diagnose", tiny_folder("llama"), made, "--ids", ids, "--json")
        said, where = _said(done)
        yield "steps", name, said, where, done.code == 0
    for dtype in DTYPES:
        rows = answers.engine(dtype)
        for name, form in answers.FORMS.items():
            path = answers.answer(folder, form(rows), f"{dtype}-{name}.json")
            done = aprfmt("logits", tiny_folder("llama"), "--reference", path, "--json")
            said, where = _said(done)
            yield "log-probabilities", f"{name}, {dtype}", said, where, done.code == 0

    real = test_real_engine.FOLDER
    said, where = _said(done := aprfmt("diagnose", real / "model", real / "dump", "--json"))
    yield "steps", REAL, said, where, done.code == 0
    given = ("--reference", real / "answer.json", "--json")
    said, where = _said(done := aprfmt("logits", real / "model", *given))
    yield "log-probabilities", REAL, said, where, done.code == 0


def faulty(folder: Path) -> Iterator[Line]:
    """Yield the rows of seeded faults."""
    for name, (change, roles, cause, where) in dumps.WRONG.items():
        found = dumps.written(backend=dumps.through(change, roles))
        made = dumps.two_ranks(folder / f"share {name}", found)
        done = aprfmt("diagnose", tiny_folder("llama"), made, "--json")
        said, place = _said(done)
        right = [one["cause"] for one in done.json["causes"]] == [cause] and where in str(
            done.json["causes"][0]["where"]
        )
        yield "engine", name, said, place, right and done.code == 1
    for name, (layers, order, _) in dumps.WRONG_EXPERTS.items():
        found = dumps.written("mixtral", weights=dumps.with_experts(layers, order))
        made = dumps.two_expert_ranks(folder / f"experts {name}", found)
        done = aprfmt("diagnose", tiny_folder("mixtral"), made, "--json")
        said, place = _said(done)
        right = {one["cause"] for one in done.json["causes"]} == {"expert_order"}
        yield "engine", name, said, place, right and done.code == 1
    for name, unlike in dumps.UNLIKE.items():
        made = dumps.two_ranks(folder / f"unlike {name}", dumps.written(), unlike)
        done = aprfmt("diagnose", tiny_folder("llama"), made, "--json")
        said, place = _said(done)
        right = done.json["causes"][0]["cause"] == "ranks_differ"
        yield "engine", f"ranks differ: {name}", said, place, right and done.code == 1
    for break_it in dumps.REFUSED:
        made = _place(folder, break_it.__name__)
        break_it(made)
        ids = ",".join(map(str, IDS))
        done = aprfmt("diagnose", tiny_folder("llama"), made, "--ids", ids, "--json")
        said, place = _said(done)
        yield "dump", break_it.__name__.replace("_", " "), said, place, done.code == 2
    exact = own()["logits"].astype("float64")
    rows = answers._renormalised(exact)
    for name, fault in answers.FAULTS.items():
        path = answers.answer(folder, answers.vllm(fault(rows)), f"fault-{len(name)}.json")
        done = aprfmt("logits", tiny_folder("llama"), "--reference", path, "--json")
        said, place = _said(done)
        yield "rollout", name, said, place, done.code == 1


def sound_rows() -> list[tuple[str, str]]:
    """Return (kind, name) of every row of sound dumps, in order."""
    forms = [f"{name}, {dtype}" for dtype in DTYPES for name in answers.FORMS]
    return [
        *(("ranks", name) for name in dumps.LAYOUTS),
        *(("steps", name) for name in dumps.STEPS),
        *(("log-probabilities", name) for name in forms),
        ("steps", REAL),
        ("log-probabilities", REAL),
    ]


def faulty_rows() -> list[tuple[str, str]]:
    """Return (kind, name) of every row of seeded faults, in order."""
    return [
        *(("engine", name) for name in (*dumps.WRONG, *dumps.WRONG_EXPERTS)),
        *(("engine", f"ranks differ: {name}") for name in dumps.UNLIKE),
        *(("dump", break_it.__name__.replace("_", " ")) for break_it in dumps.REFUSED),
        *(("rollout", name) for name in answers.FAULTS),
    ]


def tables() -> tuple[str, int]:
    """Return (both tables as text, how many rows are not as they should be)."""
    lines, bad = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for title, rows in (("sound", sound(folder)), ("seeded fault", faulty(folder))):
            lines += [
                f"| kind | {title} | said | where | right |",
                "| --- | --- | --- | --- | --- |",
            ]
            count = 0
            for kind, name, said, place, right in rows:
                where = place.replace(f"{folder}/", "")
                lines.append(f"| {kind} | {name} | {said} | {where} | {'yes' if right else 'NO'} |")
                count += 1
                bad += not right
            lines += ["", f"{count} rows", ""]
    return "\n".join([*lines, f"{bad} rows are not as they should be", ""]), bad


def main() -> int:
    """Print both tables, or put them into the page; return 1 if a row is not as it should be."""
    made = argparse.ArgumentParser()
    made.add_argument("--write", action="store_true", help="put them into the page")
    text, bad = tables()
    if made.parse_args().write:
        page = PAGE.read_text()
        PAGE.write_text(f"{page[: page.index(HEADING)]}{HEADING}\n\n{text}")
    else:
        print(text, end="")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
