"""A conversion fetches its source once, for its bytes, its digest and its verification together.

Seen red: the digest from a second reading, tensors written in the target's order, whole tensors
read before their windows, verification against the source, no check of the published digest.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.conversion import convert
from aprfmt.errors import ConversionError
from aprfmt.formats.output import OutputRoom
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder
from tests.remote.server import RangeServer, serving

COMMIT = "0" * 39 + "1"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 28 MB, as those of models are larger than what is read around a norm."""
    folder = tmp_path_factory.mktemp("once") / "m"
    return llama_folder(folder, "BF16", hidden=1024, ffn=4096, layers=2, vocab=1000)


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    with serving() as server:
        files = {path.name: path.read_bytes() for path in source.iterdir()}
        server.add_repository("someone/m", COMMIT, files, ("model.safetensors",))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.parametrize("line", [
    "convert SRC x.gguf", "convert SRC x.apr", "quantize SRC x.gguf --type Q8_0",
])  # fmt: skip
def test_every_byte_comes_once(hub: RangeServer, source: Path, tmp_path: Path, line: str) -> None:
    made = []
    for name, model in (("there", "hf://someone/m"), ("here", str(source))):
        (tmp_path / name).mkdir()
        words = [str(tmp_path / name / word) if word.startswith("x.") else word
                 for word in line.replace("SRC", model).split()]  # fmt: skip
        done = command(*words, "--json")
        assert done.code == 0, done.err
        weights = source / "model.safetensors"
        assert done.json["source_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
        assert done.json["verified"] == len(done.json["tensors"])
        made.append(next((tmp_path / name).glob("x.*")).read_bytes())
        if name == "there":
            assert done.json["remote"]["bytes"] <= 1.1 * weights.stat().st_size
    assert made[0] == made[1]


def test_bytes_that_are_not_the_published_ones_are_refused(
    hub: RangeServer, tmp_path: Path
) -> None:
    place = next(path for path, data in hub.files.items() if len(data) > 1 << 24)
    data = bytearray(hub.files[place])
    data[-5000] ^= 1
    hub.files[place] = bytes(data)
    done = command("convert", "hf://someone/m", tmp_path / "x.gguf")
    assert done.code == 2 and "the site publishes" in done.err
    assert not list(tmp_path.glob("x*"))


def test_a_fetched_tensor_is_read_back(
    hub: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OutputRoom.put

    def wrong(self: OutputRoom, offset: int, data: bytes | memoryview) -> None:
        real(self, offset, bytes(len(data)) if self.nbytes > 1 << 20 else data)

    monkeypatch.setattr(OutputRoom, "put", wrong)
    with pytest.raises(ConversionError, match="reads back with other bytes"):
        convert("hf://someone/m", tmp_path / "x.gguf")
