"""Folders, shards, indexes and damaged files as inputs of every command that takes a MODEL."""

import inspect
import json
from pathlib import Path
from typing import Any

import click
import pytest

import aprfmt as aprfmt_package
from aprfmt.cli.commands import COMMANDS
from aprfmt.errors import ArchError
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder


def test_a_container_only_copy_comes_back(tmp_path: Path) -> None:
    """`--arch none` keeps metadata through every format, also values the format has no type for."""
    source = llama_folder(tmp_path / "source", "BF16")
    assert aprfmt("convert", source, tmp_path / "a.gguf").code == 0
    at = tmp_path / "a.gguf"
    for name in ("b.safetensors", "c.apr", "d.gguf"):
        done = aprfmt("convert", at, tmp_path / name, "--arch", "none")
        assert done.code == 0, done.err
        at = tmp_path / name
    done = aprfmt("diff", tmp_path / "a.gguf", at, "--json")
    assert done.code == 0
    assert done.json["counts"]["SAME_BYTES"] == len(done.json["tensors"])


def test_any_shard_opens_the_whole_folder(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    assert aprfmt("split", source, tmp_path / "s", "--max-shard-size", "60K").code == 0
    shard = sorted((tmp_path / "s").glob("model-00002-of-*.safetensors"))[0]
    assert aprfmt("convert", shard, tmp_path / "one", "--to", "safetensors").code == 0
    assert aprfmt("diff", source, tmp_path / "one").code == 0
    assert aprfmt("hex", tmp_path / "s", "--json").code == 0
    assert aprfmt("merge", tmp_path / "s", tmp_path / "merged").code == 0


def test_a_damaged_footer_is_said_when_converting(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    assert aprfmt("import", source, "-o", tmp_path / "m.apr").code == 0
    data = bytearray((tmp_path / "m.apr").read_bytes())
    data[-200] ^= 1
    (tmp_path / "m.apr").write_bytes(data)
    assert "checksum" in aprfmt("convert", tmp_path / "m.apr", tmp_path / "y.gguf").err
    assert "checksum" in aprfmt("inspect", tmp_path / "m.apr", "--verify").err


# What each command that has --arch is given besides; M is a model, N a second one, OUT a new file.
WITH_ARCH: dict[str, list[str]] = {
    "inspect": ["M"],
    "tensors": ["M"],
    "cat": ["M", "lm_head.weight"],
    "convert": ["M", "OUT.apr"],
    "import": ["M", "-o", "OUT.apr"],
    "export": ["M", "--to", "gguf", "-o", "OUT.gguf"],
    "quantize": ["M", "OUT.gguf", "--type", "Q8_0"],
    "diff": ["M", "N"],
    "diagnose": ["M", "N"],
    "parity": ["M", "--between", "numpy", "numpy:float64", "--ids", "1,2"],
    "attest": ["N", "--from", "M"],
    "step": ["M", "--after", "N"],
    "hash": ["M"],
    "run": ["M", "--ids", "1,2"],
    "trace": ["M", "--payload", "--ids", "1,2"],
    "logits": ["M", "--ids", "1,2"],
    "eval": ["M", "--text", "TEXT"],
    "validate": ["M"],
    "qa": ["M"],
}
# Other ways through the same commands, where another function opens the model.
MORE_WITH_ARCH: list[tuple[str, list[str]]] = [
    ("convert", ["M", "OUT.apr", "--dry-run"]),
    ("convert", ["M", "OUT.apr", "--generic"]),
    ("quantize", ["M", "OUT.gguf", "--type", "Q4_K_M", "--calibrate", "TEXT"]),
    ("diff", ["M", "N", "--only", "metadata"]),
    ("diff", ["M", "N", "--sample", "1000"]),
    ("diff", ["M", "N", "--base", "M"]),
    ("diagnose", ["T", "T"]),
    ("diagnose", ["T", "T", "--model", "M"]),
    ("trace", ["M", "--payload", "--ids", "1,2", "--reference", "N"]),
    ("trace", ["M", "--dry-run", "--ids", "1,2"]),
    ("trace", ["M"]),
    ("parity", ["M", "--between", "cpu", "transformers", "--ids", "1,2"]),
    ("run", ["M@transformers", "--ids", "1,2"]),
    ("eval", ["N", "--text", "TEXT", "--against", "M"]),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("arch")
    first = llama_folder(folder / "first", "BF16")
    second = llama_folder(folder / "second", "BF16")
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    (folder / "text.txt").write_text("Some text to score, long enough for a window or two.")
    made = aprfmt("trace", first, "--payload", "--ids", "1,2", "--save", folder / "t.safetensors")
    assert made.code == 0, made.err
    return {
        "M": str(first),
        "N": str(second),
        "T": str(folder / "t.safetensors"),
        "TEXT": str(folder / "text.txt"),
    }


def with_inputs(args: list[str], inputs: dict[str, str], out: Path) -> list[str]:
    filled = [f"{inputs['M']}{arg[1:]}" if arg.startswith("M@") else arg for arg in args]
    filled = [str(out / arg) if arg.startswith("OUT") else arg for arg in filled]
    return [inputs.get(arg, arg) for arg in filled]


def test_every_command_with_the_arch_option_is_asked() -> None:
    from aprfmt.cli.main import group

    ctx = click.Context(group)
    commands = {name: group.get_command(ctx, name) for name in COMMANDS}
    having = {
        name
        for name, command in commands.items()
        if command is not None and any("--arch" in param.opts for param in command.params)
    }
    assert having == set(WITH_ARCH)


@pytest.mark.parametrize(("command", "args"), [*WITH_ARCH.items(), *MORE_WITH_ARCH])
def test_an_unknown_arch_option_is_an_error_everywhere(
    command: str, args: list[str], inputs: dict[str, str], tmp_path: Path
) -> None:
    done = aprfmt(command, *with_inputs(args, inputs, tmp_path), "--arch", "lama")
    assert done.code == 2, done.out
    assert "'lama' is not known" in done.err
    assert "llama" in done.err
    assert len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


ARCH_CALLS: dict[str, Any] = {
    "open": lambda m, n, out: aprfmt_package.open(m, arch="lama"),
    "convert": lambda m, n, out: aprfmt_package.convert(m, out / "x.gguf", arch="lama"),
    "diagnose": lambda m, n, out: aprfmt_package.diagnose(m, n, arch="lama"),
    "diff": lambda m, n, out: aprfmt_package.diff(m, n, arch="lama"),
    "hash": lambda m, n, out: aprfmt_package.hash(m, arch="lama"),
    "parity": lambda m, n, out: aprfmt_package.parity(m, ("cpu", "cpu"), arch="lama"),
    "step": lambda m, n, out: aprfmt_package.step(m, after=n, arch="lama"),
    "validate": lambda m, n, out: aprfmt_package.validate(m, arch="lama"),
}


def test_every_function_that_takes_arch_is_asked() -> None:
    functions = {name: getattr(aprfmt_package, name) for name in aprfmt_package.__all__}
    taking = {
        name
        for name, function in functions.items()
        if callable(function) and "arch" in inspect.signature(function).parameters
    }
    assert taking | {"convert", "step"} == set(ARCH_CALLS)  # these take it as one of their options


@pytest.mark.parametrize("name", ARCH_CALLS)
def test_an_unknown_arch_is_an_error_in_python(
    name: str, inputs: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ArchError, match="'lama' is not known"):
        ARCH_CALLS[name](inputs["M"], inputs["N"], tmp_path)
    assert list(tmp_path.iterdir()) == []
