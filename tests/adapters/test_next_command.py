"""The command that `diff --adapter` prints for a wrong merge: it is run, or why none can is said.

Seen red: `next: convert --adapter` that was refused, without `--arch`, and with words that a shell
takes apart.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import aprfmt as api
from aprfmt.adapters import convert_merged
from tests.adapters.test_merged_otherwise import Values, factors, write_adapter, write_merged
from tests.adapters.test_parts import PREFIX, base_folder
from tests.cli.run import aprfmt

Rows = dict[str, Values]


def merged(base: Path, held: Rows, folder: Path, times: float) -> Path:
    """Write the base with the adapter's change added so many times."""
    rows = load_file(base / "model.safetensors")
    for name, weight in rows.items():
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in held:
            rows[name] = weight + times * (held[f"{at}B.weight"] @ held[f"{at}A.weight"])
    return write_merged(folder, base, rows)


def printed(done: str, begin: str) -> list[str]:
    """Return what follows `begin` in the lines that begin with it."""
    return [line.removeprefix(begin) for line in done.splitlines() if line.startswith(begin)]


def as_it_is(base: Path, adapter: Path, wrong: Path) -> tuple[Path, Path]:
    return base, wrong


def packed(base: Path, adapter: Path, wrong: Path) -> tuple[Path, Path]:
    """The base has packed weights; its name has a point."""
    there = base.with_name("base.v2.gguf")
    api.convert(base, there, tensor_encodings=[("attn_q.weight", "Q8_0")])
    return there, wrong


def to_gguf(base: Path, adapter: Path, wrong: Path) -> tuple[Path, Path]:
    api.convert(wrong, wrong.with_suffix(".gguf"))
    return base, wrong.with_suffix(".gguf")


def spaces(base: Path, adapter: Path, wrong: Path) -> tuple[Path, Path]:
    return base.rename(base.with_name("my base & more")), wrong


RUNS: dict[str, Callable[[Path, Path, Path], tuple[Path, Path]]] = {
    "as it is": as_it_is, "packed": packed, "to GGUF": to_gguf, "spaces": spaces,
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_the_printed_command_merges_anew(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_folder(tmp_path / "a")
    held = factors(base)
    adapter = write_adapter(tmp_path / "adapter", held)
    wrong = merged(base, held, tmp_path / "b", 0.5)
    mine, theirs = RUNS[case](base, adapter, wrong)
    done = aprfmt("diff", mine, theirs, "--adapter", adapter)
    (line,) = printed(done.out, "next: ")
    monkeypatch.chdir(tmp_path)
    for part in line.split(" && "):
        assert aprfmt(*shlex.split(part)[1:]).code == 0, line
    (made,) = tmp_path.glob("OUT*")
    again = aprfmt("diff", mine, made, "--adapter", adapter)
    assert "once" in again.out and not printed(again.out, "next: "), again.out


def test_the_stated_architecture_is_in_the_command(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "a")
    held = factors(base)
    adapter = write_adapter(tmp_path / "adapter", held)
    wrong = merged(base, held, tmp_path / "b", 0.5)
    done = aprfmt("diff", base, wrong, "--adapter", adapter, "--arch", "llama")
    (line,) = printed(done.out, "next: ")
    assert line.endswith("--to safetensors --arch llama")


def no_configuration(base: Path, adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()


def no_place(base: Path, adapter: Path) -> None:
    """A tensor that no merge reads, which a comparison passes over."""
    path = adapter / "adapter_model.safetensors"
    rows = load_file(path)
    rows[f"{PREFIX}model.layers.0.mlp.up_proj.lora_extra"] = next(iter(rows.values())).clone()
    save_file(rows, path)


def in_the_base(base: Path, adapter: Path) -> None:
    """The base's own metadata say that the adapter is merged into it."""
    convert_merged(base, base.with_name("own"), adapter, to="safetensors")
    base.rename(base.with_name("old"))
    base.with_name("own").rename(base)


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "no configuration": (no_configuration, "no adapter_config.json that can be read lies"),
    "no place": (no_place, "is no part of a LoRA that is read here"),
    "in the base": (in_the_base, "its metadata say that"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_that_is_refused_is_not_printed(case: str, tmp_path: Path) -> None:
    change, why = REFUSED[case]
    base = base_folder(tmp_path / "a")
    held = factors(base)
    adapter = write_adapter(tmp_path / "adapter", held)
    wrong = merged(base, held, tmp_path / "b", 0.5)
    change(base, adapter)
    done = aprfmt("diff", base, wrong, "--adapter", adapter)
    assert done.code == 1, done.out
    assert not printed(done.out, "next: ")
    (said,) = printed(done.out, "no command merges it anew here: ")
    assert why in said
    refused = aprfmt("convert", base, tmp_path / "OUT", "--adapter", adapter, "--to", "safetensors")
    assert refused.code == 2 and why in refused.err
    assert json.loads(aprfmt("diff", base, wrong, "--adapter", adapter, "--json").out)


def test_a_right_merge_has_no_command(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "a")
    held = factors(base)
    adapter = write_adapter(tmp_path / "adapter", held)
    done = aprfmt("diff", base, merged(base, held, tmp_path / "b", 2.0), "--adapter", adapter)
    assert done.code == 0
    assert not printed(done.out, "next: ") and "no command" not in done.out
