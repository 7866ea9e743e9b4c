"""Keys that a foreign file leaves out: `inspect -v` notes the values used, no run warns of them.

A contradiction is another matter: every command that runs or describes a model says it.
"""

import json
from pathlib import Path

import pytest

import aprfmt
from aprfmt.formats import open_sink, open_source
from tests.cli.run import aprfmt as command
from tests.models import save_tiny

COMMANDS = {
    "inspect": (),
    "trace": ("--payload", "--ids", "1,2", "--points", "embd"),
    "logits": ("--ids", "1,2"),
    "run": ("--ids", "1,2", "--max-tokens", "1", "--quiet"),
    "eval": ("--ids", "1,2,3"),
    "parity": ("--between", "numpy", "numpy::float64", "--ids", "1,2"),
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF of smollm3 as other writers make it: no key says which layers rotate."""
    folder = tmp_path_factory.mktemp("foreign")
    save_tiny("smollm3", folder / "hf")
    aprfmt.convert(folder / "hf", folder / "ours.gguf", verify=False)
    with open_source(folder / "ours.gguf") as source:
        infos = [tensor.info for tensor in source.tensors.values()]
        with open_sink(folder / "theirs.gguf", "gguf") as sink:
            kept = {k: v for k, v in source.metadata.items() if not k.startswith("aprfmt.")}
            sink.plan(kept, infos)
            for info in infos:
                sink.write(info.name, [source.tensors[info.name].raw()])
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_an_assumption_is_no_warning(name: str, foreign: Path) -> None:
    for each in ("theirs.gguf", "ours.gguf", "hf"):
        assert "no key says" not in command(name, foreign / each, *COMMANDS[name]).err


def test_an_assumption_is_noted(foreign: Path) -> None:
    done = command("inspect", foreign / "theirs.gguf", "-v")
    lines = [line for line in done.out.splitlines() if "no key says rope_layers" in line]
    assert len(lines) == 1 and "all layers but every fourth" in lines[0]
    assert lines[0].startswith(f"note: {foreign / 'theirs.gguf'}: ")
    for ours in ("ours.gguf", "hf"):
        assert "no key says" not in command("inspect", foreign / ours, "-v").out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_conflict_is_said_on_stderr(name: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_bias": True}))
    done = command(name, tmp_path, *COMMANDS[name])
    assert "mlp_bias says mlp_bias = True, the tensors say False" in done.err
