"""Which files of a set are closed, which copies an index chooses, what an unfinished run leaves."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import bounded_json, shard_index
from aprfmt.formats.foreign_formats import foreign_file, foreign_folder
from aprfmt.formats.resumable_output import FinishedTensor, ResumableFileSet
from aprfmt.formats.safetensors.reader import open_index

# --- files of a set -------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["", "parse", "body"])
def test_files_of_a_set_are_closed_if_anything_fails(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that were opened, and none where the caller got them."""
    homes = {name: Path(f"{name}.safetensors") for name in ("one", "two", "three")}
    closed: list[str] = []
    monkeypatch.setattr(shard_index, "require_files", lambda paths, where: None)
    monkeypatch.setattr(shard_index, "map_paths", lambda paths, do: [do(path) for path in paths])
    monkeypatch.setattr(
        shard_index,
        "open_bytes",
        lambda home: SimpleNamespace(name=home.stem, close=lambda: closed.append(home.stem)),
    )

    def parse(file: Any) -> str:
        if fails == "parse" and file.name == "two":
            raise FormatError("two is torn")
        return f"parsed {file.name}"

    def use() -> dict[str, str]:
        with shard_index.open_files(Path("index"), homes, parse) as opened:
            if fails == "body":
                raise FormatError("a tensor twice")
            return opened

    if not fails:
        assert use() == {name: f"parsed {name}" for name in homes}
        assert closed == []
        return
    with pytest.raises(FormatError, match="torn" if fails == "parse" else "twice"):
        use()
    assert sorted(closed) == (["one", "two"] if fails == "parse" else ["one", "three", "two"])


def test_copies_in_two_shards_are_chosen_by_an_index_that_names_them_all(tmp_path: Path) -> None:
    """One that names them and no other tensor, too; not one that lacks a name."""

    def fault(first: str, second: str, **named: int) -> Any:
        names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        for place, (name, held) in enumerate(zip(names, (first, second), strict=True)):
            save_file({key: np.full(2, place, np.float32) for key in held}, tmp_path / name)
        path = tmp_path / "model.safetensors.index.json"
        homes = {key: names[at] for key, at in named.items()}
        path.write_text(bounded_json.dumps({"metadata": {}, "weight_map": homes}))
        with open_index(path, damaged=True) as source:
            taken = {
                key: float(np.frombuffer(one.raw(), np.float32)[0])
                for key, one in source.tensors.items()
            }
            found = [one for one in source.index_faults if not one.mended]
        assert {key: taken[key] for key in named} == {key: float(at) for key, at in named.items()}
        assert len(found) == 1
        return found[0].where, found[0].by_index

    assert fault("a", "a", a=1) == (("a",), True)
    assert fault("ab", "a", a=1, b=0) == (("a",), True)
    assert fault("ab", "ab", a=0, b=1) == (("a", "b"), True)
    assert fault("ab", "ab", a=1) == (("a", "b"), False)


# --- files of others ------------------------------------------------------------------------------


def test_a_file_of_words_is_told_by_its_beginning_and_by_what_was_expected() -> None:
    said = foreign_file(Path("model"), b"version https://x\n", 18, "an importance matrix")
    assert said == "text that begins 'version https://x'; expected an importance matrix"
    said = foreign_file(Path("model"), b' {"a": 1}', 9)
    assert said == "JSON that begins '{\"a\": 1}'; expected a model file"
    assert foreign_file(Path("model"), b"\x01\x02\xff\xfe\x00\x00\x00\x07", 8) == ""
    assert foreign_file(Path("model"), b"", 0) == ""


def test_models_of_other_programs_are_called_what_they_are(tmp_path: Path) -> None:
    def said(head: bytes, size: int = 10**6) -> str:
        return foreign_file(Path("model.bin"), head, size)

    assert "whisper.cpp" in said(b"lmgg" + struct.pack("<3i", 51865, 1500, 384))
    assert "GGJT" in said(b"tjgg" + bytes(8))
    for vocab, tables in ((32000, 1), (-32000, 2)):
        sizes = struct.pack("<7i", 288, 768, 6, 6, 6, vocab, 256)  # stories15M's
        layer = 4 * 288 * 288 + 3 * 288 * 768 + 2 * 288
        whole = 28 + 4 * (tables * 32000 * 288 + 6 * layer + 288 + 256 * 48)
        assert "llama2.c" in said(sizes, whole) and "llama2.c" not in said(sizes, whole + 4)
    modelfile = b'# mine\nFROM ./base.gguf\nTEMPLATE """{{ .Prompt }}"""\n'
    assert "Ollama Modelfile" in said(modelfile) and "./base.gguf" in said(modelfile)
    assert "Modelfile" not in said(b"FROMAGE is cheese\n")

    (tmp_path / "model.bin").write_bytes(b"\x06\0\0\0")
    assert "CTranslate2" not in foreign_folder(tmp_path)
    (tmp_path / "vocabulary.json").write_text("[]")
    assert "CTranslate2 model (model.bin, vocabulary.json)" in foreign_folder(tmp_path)


# --- a run that was not finished ------------------------------------------------------------------


def test_a_journal_is_kept_where_a_run_can_be_continued(tmp_path: Path) -> None:
    """It is not where nothing was written yet, or where what was written is wrong."""
    output = tmp_path / "m.gguf"

    def journals() -> list[str]:
        return [path.name for path in tmp_path.glob(".*.jsonl")]

    def begun() -> ResumableFileSet:
        made = ResumableFileSet(output)
        made.begin({"source": "1"}, "plan")
        return made

    first = begun()
    assert len(journals()) == 1 and not first.tensors
    with pytest.raises(OutputError, match="another run is writing it"):
        begun()
    first.discard()
    assert journals() == []
    second = begun()
    second.done("w", FinishedTensor(7, (1, 2, 3)))
    second.discard()
    assert len(journals()) == 1
    third = begun()  # the lock was given back
    assert third.tensors == {"w": FinishedTensor(7, (1, 2, 3))}
    third.discard()
    assert len(journals()) == 1
    other = ResumableFileSet(output)
    with pytest.raises(OutputError, match="its source source has changed"):
        other.begin({"source": "2"}, "plan")
    with pytest.raises(OutputError, match="other options, or another version"):
        other.begin({"source": "1"}, "plan 2")
    fourth = begun()
    fourth.reject()
    fourth.discard()
    fourth.discard()
    assert journals() == []
