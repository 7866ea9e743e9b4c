"""A conversion fetches its source once, for its bytes, its digest and its verification together.

Seen red: pieces of megabytes around norms that lie apart, parts forgotten by a read out of turn,
the digest from a second reading, tensors written in the target's order, whole tensors read before
their windows, verification against the source, no check of the published digest; a plan that took
what lay in the cache for what a network carries.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aprfmt.checks.gates.model_under_test import ModelUnderTest, QaRequest
from aprfmt.conversion import convert, estimate
from aprfmt.conversion.outputs import Output
from aprfmt.conversion.verification import Verifier
from aprfmt.errors import ConversionError
from aprfmt.formats.output_file import ReservedRange
from aprfmt.remote.paths import parse_location
from aprfmt.remote.read_ahead import AHEAD, PART
from aprfmt.remote.stream_hash import HELD
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder
from tests.remote.conftest import forget
from tests.remote.server import RangeServer, serving

COMMIT = "0" * 39 + "1"
FOOTER = 4  # bytes: an APR file's own checksum, which is looked at by itself


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
    "convert SRC x.apr --jobs 3 --max-shard-size 20M", "quantize SRC x.gguf --type Q8_0 --jobs 3",
    "convert SRC x.gguf --resume",
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
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
        if name == "there":
            assert done.json["remote"]["bytes"] <= 1.1 * weights.stat().st_size
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "line", ["diff SRC HERE", "convert SRC OUT/x.gguf", "validate SRC", "hash SRC --raw-only"]
)
def test_small_layers_come_once_too(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Layers of 4 MB, whose norms lie near to one another, and are read in another order."""
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    here = llama_folder(tmp_path / "m", "BF16", hidden=384, ffn=1024, layers=12, vocab=1000)
    server.files = {f"/m/{path.name}": path.read_bytes() for path in here.iterdir()}
    places = {"SRC": f"{server.url}/m/", "HERE": str(here), "OUT": str(tmp_path)}
    for name, at in places.items():
        line = line.replace(name, at)
    done = command(*line.split())
    assert done.code == 0, done.err
    assert server.sent() <= 1.06 * (here / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of small layers in every format, as it is and quantized."""
    folder = tmp_path_factory.mktemp("kinds")
    here = llama_folder(folder / "m", "BF16", hidden=384, ffn=1024, layers=12, vocab=1000)
    (folder / "hf.safetensors").write_bytes((here / "model.safetensors").read_bytes())
    for name in ("plain.gguf", "plain.apr"):
        assert command("convert", here, folder / name).code == 0
    for name in ("q4.gguf", "q4.apr"):
        assert command("quantize", here, folder / name, "--type", "Q4_0").code == 0
    return folder


@pytest.mark.parametrize("more", [(), ("--no-source-hash",), ("--no-verify",), ("--jobs", "3")],
                         ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("to", ["x.gguf", "x.apr"])
@pytest.mark.parametrize("name", ["plain.gguf", "plain.apr", "q4.gguf", "q4.apr"])
def test_every_pair_of_formats_comes_once(
    kinds: Path, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, to: str, more: tuple[str, ...],
) -> None:  # fmt: skip
    """Bytes that the server sent; a plan that read norms one by one fetched all of it twice.

    So did the checksum that an APR file carries.
    """
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    data = (kinds / name).read_bytes()
    server.files[f"/{name}"] = data
    done = command("convert", f"{server.url}/{name}", tmp_path / to, *more)
    assert done.code == 0, done.err
    assert server.sent() <= len(data) + FOOTER
    (tmp_path / "here").mkdir()
    assert command("convert", kinds / name, tmp_path / "here" / to, *more).code == 0
    assert (tmp_path / to).read_bytes() == (tmp_path / "here" / to).read_bytes()


@pytest.mark.parametrize("to", ["x.gguf", "x.apr"])
def test_a_wrong_checksum_is_said_without_a_second_reading(
    kinds: Path, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    data = bytearray((kinds / "plain.apr").read_bytes())
    data[-100] ^= 1
    server.files["/m.apr"] = bytes(data)
    for more in ((), ("--no-source-hash",)):
        forget()
        server.log.clear()
        done = command("convert", f"{server.url}/m.apr", tmp_path / to, "--force", *more)
        assert "the footer's checksum is not that of the bytes before it" in done.err, done.err
        # A copy in the same format keeps a wrong footer, for which the source is read once more.
        assert server.sent() <= (2 if to == "x.apr" else 1) * (len(data) + FOOTER)


def test_of_many_shards_only_those_whose_turn_it_is_are_fetched_ahead(
    hub: RangeServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("split", source, tmp_path / "s", "--max-shard-size", "12M")
    assert done.code == 0, done.err
    files = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    hub.add_repository("someone/split", COMMIT, files, tuple(n for n in files if "-of-" in n))
    begun: list[set[str]] = []  # the shards of which megabytes were asked for
    real = Verifier.written

    def written(self: Verifier, *of: Any) -> None:
        asked = [(path, stated.removeprefix("bytes=").split("-")) for path, stated, _ in hub.log
                 if stated]  # fmt: skip
        begun.append({path for path, (first, last) in asked if int(last) - int(first) > 1 << 20})
        real(self, *of)

    monkeypatch.setattr(Verifier, "written", written)
    convert("hf://someone/split", tmp_path / "x.gguf")
    assert len(begun[0]) <= 1 and len(begun[-1]) > 4
    assert all(len(now) <= len(before) + 1 for before, now in itertools.pairwise(begun))


def test_a_stopped_run_goes_on_and_fetches_only_the_rest(
    hub: RangeServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"quantize": "Q8_0", "resume": True, "source_hash": False}
    expected = convert(source, tmp_path / "one.gguf", quantize="Q8_0", source_hash=False).files[0]
    real = Verifier.written

    def stopping(self: Verifier, sink: Any, output: Output, *rest: Any) -> None:
        if output.info.name == "blk.1.ffn_up.weight":
            raise ConversionError("stopped")
        real(self, sink, output, *rest)

    with monkeypatch.context() as stop:
        stop.setattr(Verifier, "written", stopping)
        with pytest.raises(ConversionError, match="stopped"):
            convert("hf://someone/m", tmp_path / "x.gguf", **options)
    before = hub.sent()
    report = convert("hf://someone/m", tmp_path / "x.gguf", **options)
    assert report.resumed_tensors > 9
    assert hub.sent() - before < (source / "model.safetensors").stat().st_size // 2
    assert (tmp_path / "x.gguf").read_bytes() == expected.read_bytes()


def test_a_plan_counts_what_is_fetched_ahead(hub: RangeServer, source: Path) -> None:
    words = ("x.gguf", "--dry-run", "--json")
    here, there = (command("convert", model, *words) for model in (source, "hf://someone/m"))
    assert here.code == there.code == 0, there.err
    more = there.json["estimate"]["memory_bytes"] - here.json["estimate"]["memory_bytes"]
    assert more >= HELD + AHEAD * PART
    assert there.json["estimate"]["memory_bytes"] <= 1 << 30


def test_a_plan_measures_the_network(
    hub: RangeServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of what would be fetched is; here that, and every other piece of work, takes 1 s."""
    words = ("convert", "hf://someone/m", "x.gguf", "--dry-run", "--json")

    def second(work: Callable[[], object]) -> float:
        work()
        return 1.0

    monkeypatch.setattr(estimate, "_time_call", second)
    done = command(*words)
    assert done.code == 0, done.err
    weights = (source / "model.safetensors").stat().st_size
    fetched = done.json["remote"]["bytes"]
    assert weights / 20 < fetched < weights / 4
    seconds = done.json["estimate"]["seconds"]
    assert seconds["fetch"] == pytest.approx(weights / (weights // 8), rel=0.01)
    assert seconds["total"] >= seconds["fetch"]
    here = command("convert", source, "x.gguf", "--dry-run", "--json")
    assert here.json["estimate"]["seconds"]["fetch"] == 0
    monkeypatch.setenv("APRFMT_CACHE_SIZE", str(1 << 30))
    command(*words)
    seconds = command(*words).json["estimate"]["seconds"]
    assert seconds["fetch"] is None and seconds["total"] is None
    assert "the source is cached" in command(*words[:-1]).out


@pytest.mark.parametrize("line", [
    "convert SRC x.gguf", "hash SRC", "hash SRC --raw-only", "validate SRC",
])  # fmt: skip
def test_bytes_that_are_not_the_published_ones_are_refused(
    hub: RangeServer, tmp_path: Path, line: str
) -> None:
    place = next(path for path, data in hub.files.items() if len(data) > 1 << 24)
    data = bytearray(hub.files[place])
    data[-5000] ^= 1
    hub.files[place] = bytes(data)
    words = [str(tmp_path / word) if word == "x.gguf" else word
             for word in line.replace("SRC", "hf://someone/m").split()]  # fmt: skip
    done = command(*words)
    assert done.code == 2 and "the site publishes" in done.err
    assert done.out == ""
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("line", ["hash", "hash --raw-only", "validate"])
def test_what_reads_a_whole_file_fetches_it_once(hub: RangeServer, source: Path, line: str) -> None:
    name, *more = line.split()
    done = command(name, "hf://someone/m", *more)
    assert done.code == 0, done.err
    place = next(path for path, data in hub.files.items() if len(data) > 1 << 24)
    size = len(hub.files[place])
    fetched = sum(int(stop) - int(start) + 1
                  for path, stated, _ in hub.log if path.startswith(place) and stated
                  for start, stop in [stated.removeprefix("bytes=").split("-")])  # fmt: skip
    assert size <= fetched <= size + (256 << 10)


def test_a_fetched_tensor_is_read_back(
    hub: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ReservedRange.put

    def wrong(self: ReservedRange, offset: int, data: bytes | memoryview) -> None:
        real(self, offset, bytes(len(data)) if self.nbytes > 1 << 20 else data)

    monkeypatch.setattr(ReservedRange, "put", wrong)
    with pytest.raises(ConversionError, match="reads back with other bytes"):
        convert("hf://someone/m", tmp_path / "x.gguf")


def test_gates_fetch_what_they_read_again_once(hub: RangeServer, source: Path) -> None:
    """The model under test and what it is held against: each gate reads all of both."""
    there: Any = parse_location("hf://someone/m")
    for other in (False, True):
        forget()
        path = source if other else there
        with ModelUnderTest.open(QaRequest(path, random_weights=True)) as subject:
            model = subject.open_other(there) if other else subject.model
            first = [bytes(tensor.raw()) for tensor in model.source.tensors.values()]
            assert [stated for _, stated, _ in hub.log if stated]
            hub.log.clear()
            assert [bytes(tensor.raw()) for tensor in model.source.tensors.values()] == first
            assert not [stated for _, stated, _ in hub.log if stated], path
