"""Every command that takes a MODEL says of an address what it says of the file itself."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import aprfmt as command
from tests.remote.conftest import forget
from tests.remote.server import RangeServer, serving

COMMIT = "0" * 39 + "1"
IDS = "1417,362,258,1168"


@pytest.fixture(scope="module")
def here(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the shipped model as `tiny` and as `demo.gguf`."""
    folder = tmp_path_factory.mktemp("here")
    shutil.copytree(demo_model, folder / "tiny", ignore=shutil.ignore_patterns("__pycache__"))
    assert command("convert", demo_model, folder / "demo.gguf", "--no-verify").code == 0
    return folder


@pytest.fixture(scope="module")
def hosting(here: Path) -> Iterator[RangeServer]:
    files = {path.name: path.read_bytes() for path in (here / "tiny").iterdir() if path.is_file()}
    with serving() as server:
        server.add_repository("someone/tiny", COMMIT, files, ("model.safetensors",))
        server.files["/demo.gguf"] = (here / "demo.gguf").read_bytes()
        yield server


@pytest.fixture
def places(hosting: RangeServer, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    monkeypatch.setenv("HF_ENDPOINT", hosting.url)
    return {"hub": "hf://someone/tiny", "gguf": f"{hosting.url}/demo.gguf"}


def settled(value: Any, here: Path, places: Mapping[str, str]) -> Any:
    """Return JSON without what must differ: places, and what was timed."""
    if isinstance(value, dict):
        return {
            key: settled(item, here, places)
            for key, item in value.items()
            if key not in ("remote", "seconds", "peak_bytes", "tokens_per_second", "loaded")
        }
    if isinstance(value, list):
        return [settled(item, here, places) for item in value]
    if isinstance(value, str):
        for found in (str(here / "tiny"), places["hub"]):
            value = value.replace(found, "HUB")
        for found in (str(here / "demo.gguf"), places["gguf"]):
            value = value.replace(found, "GGUF")
    return value


@pytest.mark.parametrize("line", [
    "tensors HUB --stats", "tensors GGUF blk.0", "tree GGUF", "tree HUB", "hex HUB", "hex GGUF",
    "hex GGUF blk.0.ffn_up.weight", "hex GGUF --offset 3", "cat HUB model.norm.weight",
    "cat GGUF output_norm.weight", "hash HUB", "hash GGUF --raw-only", "validate HUB",
    "validate GGUF", "diff HUB GGUF", "tokenize HUB hello", "tokenize GGUF hello",
    "template HUB --user hi", "inspect GGUF --verify",
])  # fmt: skip
def test_it_says_the_same(here: Path, places: Mapping[str, str], line: str) -> None:
    told = []
    for hub, gguf in ((here / "tiny", here / "demo.gguf"), (places["hub"], places["gguf"])):
        forget()
        words = [word.replace("HUB", str(hub)).replace("GGUF", str(gguf)) for word in line.split()]
        done = command(*words, "--json")
        body = dict(done.json)
        body.pop("ledger", None)  # other files of a repository are not listed,
        for row in body.get("checks", ()):  # nor counted
            row["found"] = row["found"] if row["name"] != "unread" else ""
        told.append((done.code, settled(body, here, places)))
        assert ("remote" in done.json) == (hub == places["hub"]), done.err
    assert told[0] == told[1]


@pytest.mark.parametrize("line", [
    f"trace HUB --payload --ids {IDS} --layers 0", f"run GGUF --ids {IDS} --max-tokens 2",
    f"logits HUB --ids {IDS}",
    f"diagnose HUB GGUF --ids {IDS}", "qa GGUF --only init-statistics",
])  # fmt: skip
def test_it_runs(places: Mapping[str, str], line: str) -> None:
    words = line.replace("HUB", places["hub"]).replace("GGUF", places["gguf"]).split()
    done = command(*words, "--json")
    assert done.code == 0 and done.json["remote"]["requests"], done.err


@pytest.mark.parametrize("line", [
    "convert HUB OUT/x.apr", "convert GGUF OUT/x.safetensors", "import HUB -o OUT/x.apr",
    "quantize GGUF OUT/x.gguf --type Q4_0", "split GGUF OUT/x.gguf --max-shard-size 3M",
    "merge GGUF OUT/x.gguf", "set GGUF general.name=x -o OUT/x.gguf",
    "export GGUF --to safetensors -o OUT/x", "convert HUB OUT/x.gguf --encoding F16 --jobs 3",
    "split GGUF OUT/x.gguf --max-shard-size 3M --jobs 3",
])  # fmt: skip
def test_it_writes_the_same_bytes(
    here: Path, places: Mapping[str, str], tmp_path: Path, line: str
) -> None:
    written = []
    for name, hub, gguf in (
        ("here", here / "tiny", here / "demo.gguf"),
        ("there", places["hub"], places["gguf"]),
    ):
        forget()
        out = tmp_path / name
        out.mkdir()
        found = {"HUB": str(hub), "GGUF": str(gguf)}
        words = [found.get(word, word.replace("OUT", str(out))) for word in line.split()]
        done = command(*words, "--quiet")
        assert done.code == 0, done.err
        written.append(
            {
                str(path.relative_to(out)): path.read_bytes()
                for path in sorted(out.rglob("*"))
                if path.is_file()
            }
        )
    assert written[0] and written[0] == written[1]


def test_a_folder_address_is_read_like_a_folder(
    hosting: RangeServer, here: Path, demo_model: Path
) -> None:
    for path in demo_model.iterdir():
        if path.is_file():
            hosting.files[f"/f/{path.name}"] = path.read_bytes()
    found = command("inspect", f"{hosting.url}/f/", "--json").json
    assert found["architecture"] == "qwen2"
    assert found["config"] == f"{hosting.url}/f/config.json"
    forget()
    alone = command("inspect", f"{hosting.url}/f/model.safetensors", "--json").json
    assert alone["architecture"] is None  # nothing beside a file is guessed


def test_what_went_over_the_network_is_said_on_stderr(places: Mapping[str, str]) -> None:
    done = command("tree", places["gguf"])
    assert done.err.startswith("remote: ") and " requests, " in done.err
    forget()
    assert not command("cat", places["gguf"], "output_norm.weight", "--quiet").err


def test_a_dry_run_fetches_headers_only(here: Path, places: Mapping[str, str]) -> None:
    forget()
    size = (here / "tiny" / "model.safetensors").stat().st_size
    done = command("run", places["hub"], "--ids", IDS, "--dry-run", "--json")
    assert done.json["dry_run"]["runs"][0]["read_bytes"] > 0.9 * size
    assert done.json["remote"]["bytes"] < 0.1 * size, done.json["remote"]


def test_a_local_file_says_nothing_of_a_network(here: Path) -> None:
    done = command("inspect", here / "demo.gguf", "--json")
    assert "remote" not in done.json and "remote" not in done.err


def test_a_model_named_by_an_option_may_be_an_address(
    here: Path, places: Mapping[str, str], tmp_path: Path
) -> None:
    gguf, hub = here / "demo.gguf", places["hub"]
    assert command("quantize", gguf, tmp_path / "q.gguf", "--type", "Q8_0", "--no-verify").code == 0
    for args in (
        ("diff", gguf, tmp_path / "q.gguf", "--base", hub, "--accept", "within"),
        ("trace", gguf, "--payload", "--ids", IDS, "--layers", "0", "--reference", f"{hub}@numpy"),
        ("qa", gguf, "--against", hub, "--only", "format-parity"),
    ):
        forget()
        done = command(*args, "--json")
        assert done.code == 0 and done.json["remote"]["requests"], done.err


def test_an_engine_that_needs_files_gets_them(places: Mapping[str, str]) -> None:
    pytest.importorskip("transformers", reason="NOT-RUN: transformers is not installed")
    args = ("parity", places["hub"], "--between", "numpy", "transformers", "--ids", IDS)
    done = command(*args, "--json")
    assert done.code == 0, done.err


def test_outputs_are_files_on_this_machine(hosting: RangeServer, places: Mapping[str, str]) -> None:
    """Seen red: everything was fetched and hashed before it was said."""
    before = hosting.sent()
    done = command("hash", places["gguf"], "--write", "--raw-only")
    assert done.code == 2 and "outputs are files on this machine" in done.err
    whole = max(len(data) for path, data in hosting.files.items() if path.endswith(".gguf"))
    assert hosting.sent() - before < whole // 2


def test_a_manifest_may_be_an_address(
    hosting: RangeServer, here: Path, places: Mapping[str, str]
) -> None:
    assert command("hash", here / "demo.gguf", "--write", "--force").code == 0
    manifest = here / "demo.gguf.aprfmt-hash.json"
    hosting.files[f"/{manifest.name}"] = manifest.read_bytes()
    args = ("hash", here / "demo.gguf", "--check", f"{hosting.url}/{manifest.name}")
    assert command(*args).code == 0


def test_an_address_that_comes_first_is_inspected(places: Mapping[str, str]) -> None:
    told = command(places["gguf"], "--json").json
    assert told["command"] == "inspect" and told["exit"] == 0 and told["remote"]["requests"]
