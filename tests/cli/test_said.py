"""What commands print: help without arguments, only files that exist, nothing with --quiet."""

from pathlib import Path

import pytest

from tests.cli.run import aprfmt, process


def test_nothing_asked_shows_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text as `--help`; the exit code is 2, as in click, because nothing was done.

    (git prints to stdout as well, but exits with 1, which here means that the answer is no.)
    """
    nothing, asked = aprfmt(), aprfmt("--help")
    assert (nothing.out, nothing.err) == (asked.out, "")
    assert (nothing.code, asked.code) == (2, 0)
    assert "\\n" not in nothing.out and nothing.out.count("\n") > 30


def test_backends_in_help_are_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.inference.backends import BACKENDS

    assert "cupy" in BACKENDS.own
    for command in ("run", "trace", "logits", "eval", "qa"):
        text = " ".join(process(command, "--help").out.split())
        said = text.partition("--backend NAME ")[2].partition(" --")[0]
        assert all(name in said for name in BACKENDS.own), said


QUIET = {
    "convert": ("SRC", "OUT.apr"),
    "import": ("SRC", "-o", "OUT.apr"),
    "export": ("SRC", "--to", "gguf", "-o", "OUT.gguf"),
    "quantize": ("SRC", "OUT.gguf", "--type", "Q8_0"),
    "split": ("SRC", "OUT", "--max-shard-size", "3M"),
    "merge": ("SRC", "OUT"),
    "set": ("SRC/model.safetensors", "format=pt", "-o", "OUT/x.safetensors"),
}


@pytest.mark.parametrize("command", QUIET)
def test_quiet_conversions_say_nothing(command: str, demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    args = [
        word.replace("SRC", str(demo_model)).replace("OUT", str(tmp_path / "m"))
        for word in QUIET[command]
    ]
    done = aprfmt(command, *args, "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert "wrote " in aprfmt(command, *args, "--force").out


def test_quiet_keeps_warnings(demo_model: Path, tmp_path: Path) -> None:
    """A key the forward pass does not know stays a warning."""
    done = aprfmt(
        "set",
        demo_model / "model.safetensors",
        "__metadata__:no.such.key=x",
        "--quiet",
        "-o",
        tmp_path / "x.safetensors",
    )
    assert (done.code, done.out) == (0, "") and done.err.startswith("warning: ")


def paths(text: str, folder: Path) -> list[Path]:
    """Return the words of a report that are paths below `folder`."""
    words = [word.strip("():,;") for word in text.split()]
    return [Path(word) for word in words if word.startswith(str(folder))]


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [("x.gguf", "2M", 3), ("x.apr", "2M", 4), ("x.safetensors", "2M", 4), ("folder", "2M", 1),
     ("y.gguf", "1G", 1)],
)  # fmt: skip
@pytest.mark.parametrize("command", ["split", "convert"])
def test_what_is_said_to_be_written_is_there(
    command: str, name: str, size: str, count: int, demo_model: Path, tmp_path: Path
) -> None:
    """Every path that is printed exists, and nothing of the weights is left out."""
    to = ["--to", "safetensors"] if command == "convert" and name == "folder" else []
    if command == "split" and Path(name).suffix in (".gguf", ".apr"):
        source = tmp_path / f"whole{Path(name).suffix}"
        assert aprfmt("convert", demo_model, source).code == 0
    else:
        source = demo_model
    done = aprfmt(command, source, tmp_path / name, "--max-shard-size", size, *to)
    assert done.code == 0, done.err
    said = paths(done.out, tmp_path)
    assert len(said) >= count and all(path.exists() for path in said), done.out
    shards = [path for path in tmp_path.glob(f"{Path(name).stem}*{Path(name).suffix}")]
    assert set(shards) <= set(said)


def test_a_dry_run_names_the_files_it_would_write(demo_model: Path, tmp_path: Path) -> None:
    args = (demo_model, tmp_path / "x.gguf", "--max-shard-size", "2M")
    planned = paths(aprfmt("convert", *args, "--dry-run").out, tmp_path)
    assert planned and not list(tmp_path.iterdir())
    assert planned == paths(aprfmt("convert", *args).out, tmp_path)
