"""Ten tasks, with aprfmt and the best other tool installed here: docs/explanation/ten_tasks.md.

`python -m tests.docs.tasks` runs every command of both, from one folder, and writes the table of
the page: how many commands, and the processor time of all of them (user and system, so that a busy
machine says the same; the median of three).
"""

import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.examples import DOCS, environment

PAGE = DOCS / "explanation" / "ten_tasks.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of what was measured -->\n"
REPEATS = 3
PREPARE = (
    "aprfmt demo --into demo --quiet",
    "aprfmt convert demo right.gguf --quiet",
    "cp right.gguf damaged.gguf",
    "printf '\\174' | dd of=damaged.gguf bs=1 seek=2000001 conv=notrunc status=none",
    "aprfmt set right.gguf qwen2.rope.freq_base=10000 -o base.gguf --quiet",
    "aprfmt quantize demo small.gguf --type Q4_K_M --quiet",
    "echo She had not expected so quick an answer, and read the letter twice. > text.txt",
)


@dataclass(frozen=True)
class Task:
    """One task: our commands with their exit codes, another tool's, and what that leaves open.

    Without `theirs`, `gap` says why nothing was run.
    """

    what: str
    ours: Sequence[tuple[str, int]]
    gap: str
    tool: str = ""
    theirs: Sequence[tuple[str, int]] = ()


TASKS = (
    Task("inspect a file", [("aprfmt inspect right.gguf", 0)],
         "every key and tensor as it stands; no hyperparameters, no roles, no checks",
         "gguf-py", [("gguf-dump right.gguf", 0)]),
    Task("find a flipped bit", [("aprfmt diff right.gguf damaged.gguf", 1)],
         "names the tensor; neither the byte nor the bit",
         "libgguf", [("gguf-compare right.gguf damaged.gguf --tensor-bytes", 1)]),
    Task("find the cause of gibberish", [("aprfmt diagnose demo base.gguf", 1)],
         "no tool takes a folder and a GGUF of one model"),
    Task("quantize and judge it",
         [("aprfmt quantize demo q.gguf --type Q4_K_M --force", 0),
          ("aprfmt eval q.gguf --text text.txt --against demo", 0)],
         "llama-quantize and twice llama-perplexity, by their documentation; not run"),
    Task("convert, and load it elsewhere",
         [("aprfmt convert right.gguf back --to safetensors --force", 0),
          ("aprfmt parity back --between numpy transformers --ids 1417,362,258", 0)],
         "loads it; does not write what it loaded as safetensors",
         "transformers",
         [("python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('.', "
          "gguf_file='right.gguf')\"", 0)]),
    Task("compare two engines",
         [("aprfmt parity demo --between numpy torch --ids 1417,362,258,1168", 0)],
         "ONNX Runtime against torch, on what was exported: the end's logits, no point between",
         "Polygraphy",
         [("python -m tests.docs.to_onnx demo 1417,362,258,1168", 0),
          ("polygraphy run net.onnx --onnxrt --load-inputs ids.json "
           "--load-outputs torch.json --atol 1e-4", 0)]),
    Task("edit metadata", [("aprfmt set right.gguf general.name=Jane -o named.gguf --force", 0)],
         "some keys only; what was written is not compared with the source",
         "gguf-py",
         [("gguf-new-metadata --force --general-name Jane right.gguf named2.gguf", 0)]),
    Task("repair", [("aprfmt diagnose demo base.gguf", 1),
                    ("aprfmt set base.gguf qwen2.rope.freq_base=1000000.0 -o ok.gguf --force", 0)],
         "one must know the key and the value; it changes the file in place",
         "gguf-py",
         [("cp base.gguf theirs.gguf", 0),
          ("gguf-set-metadata --force theirs.gguf qwen2.rope.freq_base 1000000.0", 0)]),
    Task("prove derivation", [("aprfmt attest small.gguf --from demo", 0)],
         "quantize again with the same build and compare bytes, by hand"),
    Task("explain a warning", [("aprfmt explain dtype_mislabel", 0)], "the manuals"),
)  # fmt: skip


def cost(command: str, folder: Path) -> tuple[float, int]:
    """Run a command of the shell; return its processor seconds and its exit code."""
    child = subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime, child.returncode


def measured(commands: Sequence[tuple[str, int]], folder: Path) -> float:
    """Return the processor seconds of all commands; AssertionError for another exit code."""
    total = 0.0
    for command, code in commands:
        runs = [cost(command, folder) for _ in range(REPEATS)]
        assert all(found == code for _, found in runs), (command, runs)
        total += statistics.median(seconds for seconds, _ in runs)
    return total


def rows(folder: Path) -> list[str]:
    """Return the rows of the page's table."""
    found = [
        "| task | ours | CPU s | the best other tool here | commands | CPU s | left open |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        mine = measured(task.ours, folder)
        other = measured(task.theirs, folder)
        theirs = f"{task.tool} | {len(task.theirs)} | {other:.1f}" if task.theirs else "- | - | -"
        found.append(f"| {task.what} | {len(task.ours)} | {mine:.1f} | {theirs} | {task.gap} |")
    return found


def commands() -> str:
    """Return the commands of every task, as the page shows them."""
    lines = []
    for task in TASKS:
        lines.append(f"- **{task.what}**")
        lines += [f"    - `{command}`" for command, _ in task.ours]
        lines += [f"    - {task.tool}: `{command}`" for command, _ in task.theirs]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything and write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command in PREPARE:
            assert cost(command, folder)[1] == 0, command
        table = "\n".join(rows(folder))
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{commands()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
