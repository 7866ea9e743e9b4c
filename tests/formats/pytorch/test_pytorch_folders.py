"""Folders of pytorch_model.bin and single checkpoints go through the commands like others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aprfmt
from aprfmt.checks import validate
from aprfmt.cli.main import main
from aprfmt.compare import diff
from aprfmt.errors import UsageError
from aprfmt.formats.mapped_file import BufferFile
from aprfmt.formats.pytorch.reader import PickledFile
from aprfmt.model import open_model
from tests.cli.run import aprfmt as command

DEMO = Path(__file__).resolve().parents[3] / "fixtures" / "demo"


def old_folder(folder: Path, shards: int) -> Path:
    """Return a folder as transformers wrote it before safetensors, of the demo model."""
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    state = load_file(DEMO / "model.safetensors")
    names = list(state)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = names[number::shards]
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", ["folder", "file in it", "index", "file.bin", "file.pt"])
def test_the_next_command_writes_a_format_that_is_written(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a damaged old model; what it writes is the right one."""
    old = old_folder(tmp_path / "old", 2 if form == "index" else 1)
    path = next(old.glob("pytorch_model*.bin"))
    state = torch.load(path)
    name = next(name for name in state if state[name].dim() == 2)
    state[name][3, 5] += 1
    torch.save(state, path)
    asked = {"folder": old, "file in it": path, "index": old / "pytorch_model.bin.index.json"}
    if form.startswith("file."):
        asked[form] = Path(shutil.copy(path, tmp_path / form))
    monkeypatch.chdir(tmp_path)
    done = command("diff", DEMO, asked[form], "--format", "agent")
    words = done.out.partition("next: aprfmt ")[2].split()
    assert done.code == 1 and words[0] == "convert", done.out
    assert command(*words).code == 0, words
    assert diff(DEMO, tmp_path / words[-1], only=("tensors",)).equal


@pytest.mark.parametrize("shards", [1, 3])
def test_an_old_folder(tmp_path: Path, shards: int) -> None:
    """It differs in nothing from the folder of safetensors, and converts to the same bytes."""
    old = old_folder(tmp_path / "old", shards)
    assert diff(DEMO, old).equal
    torch.save({"step": 1}, old / "training_args.bin")
    for target in ("new", "new.apr", "new.gguf"):
        to = "safetensors" if target == "new" else None
        aprfmt.convert(old, tmp_path / target, to=to)
    assert diff(DEMO, tmp_path / "new").equal
    found = {check.name: check.outcome for check in validate(old).checks}
    assert found["layout"] == found["checksum"] == found["completeness"] == "PASS"
    if shards == 3:
        with open_model(old / "pytorch_model-00002-of-00003.bin") as model:
            assert len(model) == 50  # the index stands for its shards


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """A flipped bit in a record is a failed checksum, and a difference of one tensor."""
    old = old_folder(tmp_path / "old", 1)
    with open_model(old) as model:
        at = model["model.norm.weight"].offset
    data = bytearray((old / "pytorch_model.bin").read_bytes())
    data[at] ^= 1
    (old / "pytorch_model.bin").write_bytes(data)
    found = {check.name: check.outcome for check in validate(old).checks}
    assert found["checksum"] == "FAIL"
    assert not diff(DEMO, old).equal


def test_files_without_checksums(tmp_path: Path) -> None:
    """Archives whose writer left them out, and the older form, are not run: never a pass."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save({"x": torch.ones(3)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    for name in ("a.pt", "b.pt"):
        found = {check.name: check.outcome for check in validate(tmp_path / name).checks}
        assert found["checksum"] == "NOT_RUN"


def test_scan_finds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two old folders and a loose checkpoint are three models."""
    old_folder(tmp_path / "one", 1)
    old_folder(tmp_path / "two", 2)
    (tmp_path / "loose").mkdir()
    torch.save({"x": torch.ones(3)}, tmp_path / "loose" / "x.ckpt")
    (tmp_path / "loose" / "other.bin").write_bytes(b"raw numbers")
    with pytest.raises(SystemExit):
        main(["scan", str(tmp_path), "--json", "-o", str(tmp_path / "rows.jsonl")])
    assert len(json.loads(capsys.readouterr().out)["models"]) == 3


def test_inspect_names_the_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a loader of pickles would import stands in the answer."""
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path / "x.pt"), "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["imports"][:2] == ["torch._utils._rebuild_tensor_v2", "torch.FloatStorage"]


@pytest.mark.parametrize(
    "name", ["out.pt", "out.pth", "out.bin", "out.ckpt"], ids=lambda name: f"pytorch-{name}"
)
def test_nothing_is_written(tmp_path: Path, name: str) -> None:
    """The format is only read, and the error names what is written."""
    with pytest.raises(UsageError, match="read here, not written"):
        aprfmt.convert(DEMO, tmp_path / name)
    assert not list(tmp_path.iterdir())


class Counting(BufferFile):
    """A file in memory whose reads are counted, as those of one that lies elsewhere."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, Path("x.pt"))
        whole, self.fetched = self.view, 0

        class Region:
            def __len__(inner) -> int:
                return len(whole)

            def __getitem__(inner, where: slice) -> memoryview:
                found: memoryview = whole[where]
                self.fetched += len(found)
                return found

        self.view: Any = Region()

    def read(self, ranges: Any) -> list[memoryview]:
        """Return ranges, counted."""
        return [self.view[start:stop] for start, stop in ranges]


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Opening reads the directory and the pickle; a tensor its own bytes."""
    state = {str(i): torch.full((1 << 18,), float(i)) for i in range(16)}
    torch.save(state, tmp_path / "x.pt")
    file = Counting((tmp_path / "x.pt").read_bytes())
    opened = PickledFile(file)
    assert file.fetched < 200 << 10  # of 16 MiB
    before = file.fetched
    assert bytes(opened.tensors["7"].raw(0, 4)) == torch.tensor([7.0]).numpy().tobytes()
    assert file.fetched - before == 4
