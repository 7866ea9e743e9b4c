"""Names of hundreds and thousands of characters: shortened in answers, whole in JSON and with -v.

Seen red: lines of 3,000 characters of `validate`, `qa`, `inspect`, `tree`, `scan` and others.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.base.text_escape import LONGEST, shorten_names
from tests.checks.gates.faults import copied
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed

LINE = 6 * LONGEST  # characters of the longest line that names a handful of things
UP = "model.layers.1.mlp.up_proj.weight"
IDS = ("--ids", "1,2,3")


@pytest.fixture(scope="module", params=[200, 4000])
def models(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """Return a folder with a tensor of a long name, a GGUF with such a key, and the name's part."""
    root, part = tmp_path_factory.mktemp("long"), "x" * request.param
    folder = copied(demo_model, root / "m")
    rows = dict(tensors_of(folder))
    rows |= {f"model.layers.1.mlp.{part}{i}.weight": rows[UP] for i in range(3)}
    write_mixed(folder / "model.safetensors", rows)
    assert command("convert", demo_model, root / "g.gguf").code == 0
    gguf = root / "key.gguf"
    assert command("set", root / "g.gguf", f"qwen2.{part}=5", "-o", gguf).code == 0
    return folder, gguf, part


@pytest.mark.parametrize("form", [(), ("--format", "agent")])
@pytest.mark.parametrize("line", [
    "validate", "validate --strict", "qa --only tensor-contract", "inspect", "inspect --account",
    "inspect --metadata", "tree", "scan --jobs 1", "logits", "eval", "parity", "diff", "diagnose",
])  # fmt: skip
def test_no_line_is_as_long_as_a_name(
    line: str, form: tuple[str, ...], models: tuple[Path, Path, str], demo_model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    name, *more = line.split()
    for model in models[:2]:
        args: list[object] = [name, model, *more, *form]
        if name in ("diff", "diagnose"):
            args.insert(1, demo_model)
        args += IDS if name in ("logits", "eval", "parity") else ()
        args += ["--between", "numpy", "numpy:cpu:float64"] if name == "parity" else []
        args += ["-o", tmp_path / "rows.jsonl"] if name == "scan" else []
        done = command(*args)
        longest = max(map(len, (*done.out.splitlines(), *done.err.splitlines())))
        assert longest < LINE, (args, longest)


@pytest.mark.parametrize("line", ["validate --json", "inspect --account --json", "tree --json",
                                  "inspect --account -v"])  # fmt: skip
def test_what_is_asked_for_in_full_is_whole(line: str, models: tuple[Path, Path, str]) -> None:
    name, *more = line.split()
    folder, _, part = models
    done = command(name, folder, *more)
    assert part in (done.out if "-v" in more else json.dumps(done.json))


def test_a_command_and_a_path_stay_as_they_are(tmp_path: Path) -> None:
    """Each part of a path is a name; what can be pasted into a shell is never shortened."""
    path = "/" + "/".join(["part"] * 60)
    assert shorten_names(path) == path
    long = tmp_path / ("p" * 150 + ".gguf")
    long.write_bytes(b"hello" * 100)
    done = command("validate", long)
    assert done.code == 2 and len(done.err) < LINE


def test_a_name_that_a_command_holds_is_whole(
    models: tuple[Path, Path, str], demo_model: Path
) -> None:
    done = command("diff", demo_model, models[0])
    for text in done.out.splitlines():
        assert "…" not in text or not text.startswith("next: ")


def test_a_name_with_blanks_is_no_longer_than_a_line(tmp_path: Path) -> None:
    """Words of a name are no names of their own. Seen red: 40,000 characters of one name."""
    name = "a b, " * 8000
    path = tmp_path / "m.safetensors"
    save_file({name: np.ones(3, np.float32)}, path)
    for line in ("validate", "inspect --account", "tree", "diff"):
        verb, *more = line.split()
        args = [path, tmp_path / "n.safetensors"] if verb == "diff" else [path, *more]
        save_file({name: np.zeros(3, np.float32)}, tmp_path / "n.safetensors")
        done = command(verb, *args)
        assert max(map(len, (*done.out.splitlines(), *done.err.splitlines()))) < 2 * LINE, line
        assert name in json.dumps(command(verb, *args, "--json").json), line
