"""How many modules of ours a command loads, and how deep its calls are.

python -m tests.loaded           a table of diff, parity and diagnose of the demo model
python -m tests.loaded --deepest diagnose-changed    the functions of the deepest stack, in order
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "fixtures" / "demo"
CHILD = f"""
import contextlib, io, json, sys, threading
deepest = []
def enter(frame, event, argument):
    global deepest
    if event != "call" or not frame.f_code.co_filename.startswith({str(ROOT)!r}):
        return
    names = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith({str(ROOT)!r}) and code.co_name[0] != "<":
            names.append(code.co_qualname)
        frame = frame.f_back
    deepest = names if len(names) > len(deepest) else deepest
sys.setprofile(enter), threading.setprofile(enter)
from aprfmt.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    try: main(json.loads(sys.argv[1]))
    except SystemExit: pass
sys.setprofile(None)
print(json.dumps([sum(name.split(".")[0] == "aprfmt" for name in sys.modules), deepest[::-1]]))
"""


def commands(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return {name: arguments} of the commands to count; their other models are in `folder`."""
    demo, copy, changed = str(DEMO), folder / "copy", folder / "changed"
    shutil.copytree(DEMO, copy)
    shutil.copytree(DEMO, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return {
        "diff": ("diff", demo, str(copy)),
        "diff-changed": ("diff", demo, str(changed)),
        "parity": ("parity", demo, "--between", "numpy", "numpy::float64"),
        "diagnose": ("diagnose", demo, str(copy)),
        "diagnose-changed": ("diagnose", demo, str(changed)),
    }


def counted(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return (modules of ours that a command loads, functions of its deepest stack, outer first).

    Comprehensions, lambdas and bodies of modules and classes do not count as functions.
    """
    given = [sys.executable, "-c", CHILD, json.dumps(list(arguments))]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=True)
    modules, deepest = json.loads(done.stdout)
    return modules, deepest


def main(arguments: Sequence[str]) -> int:
    """Print the table, or the deepest stack of one command."""
    parser = argparse.ArgumentParser(prog="python -m tests.loaded", description=__doc__)
    parser.add_argument("--deepest", metavar="NAME", help="list the functions of this command")
    asked = parser.parse_args(arguments).deepest
    with tempfile.TemporaryDirectory() as folder:
        rows = commands(Path(folder))
        if asked:
            print("\n".join(counted(rows[asked])[1]))
            return 0
        print("| command | modules | deepest stack |\n| --- | --- | --- |")
        for name, given in rows.items():
            modules, deepest = counted(given)
            print(f"| {name} | {modules} | {len(deepest)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
