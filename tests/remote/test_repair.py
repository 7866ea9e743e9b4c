"""A file that is cut or damaged is completed, from the bytes that are needed and no others."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import aprfmt
from tests.cli.run import aprfmt as command
from tests.remote.conftest import forget
from tests.remote.server import RangeServer

FIRST = 128 << 10


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One model of 25 MB in every format; in safetensors its tensors lie in the order of names."""
    folder = tmp_path_factory.mktemp("good")
    rng = np.random.default_rng(5)
    save_file(
        {f"t{i:02}": rng.standard_normal((250, 500)).astype("<f4") for i in range(50)},
        folder / "model.safetensors",
    )
    for to in ("apr", "gguf"):
        path = folder / f"model.{to}"
        args = ("convert", folder / "model.safetensors", path, "--arch", "none", "--no-verify")
        assert command(*args).code == 0
    return {path.suffix[1:]: path for path in folder.iterdir()}


FORMATS = ("safetensors", "gguf", "apr")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_download_that_was_cut_fetches_the_rest_and_no_more(
    server: RangeServer, good: Mapping[str, Path], tmp_path: Path, kind: str
) -> None:
    data = good[kind].read_bytes()
    server.files[f"/model.{kind}"] = data
    broken, fixed = tmp_path / f"cut.{kind}", tmp_path / f"fixed.{kind}"
    broken.write_bytes(data[:10_000_000])
    address = f"{server.url}/model.{kind}"
    done = command("repair", broken, "--from", address, "-o", fixed, "--json")
    assert done.code == 0, done.err
    assert fixed.read_bytes() == data and broken.read_bytes() == data[:10_000_000]
    missing = len(data) - 10_000_000
    assert done.json["taken_bytes"] == missing
    assert missing <= done.json["remote"]["bytes"] <= missing + FIRST  # and the header's answer
    assert done.json["proof"] == "" and "nothing proves them" in done.err
    (unproven,) = done.json["unproven"]
    assert unproven["stop"] == 10_000_000 and unproven["start"] < 100_000


def test_what_the_hub_publishes_proves_it(
    server: RangeServer, good: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = good["safetensors"].read_bytes()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.add_repository("a/b", "1" * 40, {"model.safetensors": data}, ("model.safetensors",))
    broken, fixed = tmp_path / "model.safetensors", tmp_path / "fixed.safetensors"
    broken.write_bytes(data[:9_000_000])
    done = command("repair", broken, "--from", "hf://a/b", "-o", fixed, "--json")
    assert done.code == 0 and done.json["proof"] == "sha256" and not done.json["unproven"]
    assert fixed.read_bytes() == data
    forget()
    broken.write_bytes(data[:5_000_000] + b"!" + data[5_000_001:9_000_000])
    done = command("repair", broken, "--from", "hf://a/b", "-o", tmp_path / "x.safetensors")
    assert done.code == 2 and "--compare finds them" in done.err
    assert not (tmp_path / "x.safetensors").exists()
    forget()
    args = ("repair", broken, "--from", "hf://a/b", "-o", tmp_path / "x.safetensors", "--compare")
    done = command(*args, "--json")
    assert done.code == 0 and (tmp_path / "x.safetensors").read_bytes() == data
    assert [row["why"] for row in done.json["ranges"]] == ["bytes", "missing"]


@pytest.mark.parametrize(("options", "most"), [(("--blocks",), 2 << 20), ((), 1_500_000)])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_manifest_says_which_bytes_are_wrong(
    server: RangeServer,
    good: Mapping[str, Path],
    tmp_path: Path,
    kind: str,
    options: tuple[str, ...],
    most: int,
) -> None:
    data = good[kind].read_bytes()
    copy = tmp_path / f"model.{kind}"
    copy.write_bytes(data)
    args = ("hash", copy, "--write", "--raw-only", "--arch", "none", *options)
    done = command(*(word for word in args if word not in ("--arch", "none")))
    assert done.code == 0, done.err
    manifest = copy.with_name(copy.name + ".aprfmt-hash.json")
    server.files[f"/model.{kind}"] = data
    server.files[f"/{manifest.name}"] = manifest.read_bytes()
    copy.unlink()
    manifest.unlink()
    spoilt = bytearray(data)
    spoilt[12_345_678] ^= 1
    spoilt[200] ^= 4  # in the header
    (tmp_path / f"broken.{kind}").write_bytes(spoilt)
    fixed = tmp_path / f"fixed.{kind}"
    address = f"{server.url}/model.{kind}"
    done = command("repair", tmp_path / f"broken.{kind}", "--from", address, "-o", fixed, "--json")
    assert done.code == 0, done.err
    assert fixed.read_bytes() == data
    assert done.json["proof"] == ("blocks" if options else "tensors")
    assert not done.json["unproven"] and done.json["taken_bytes"] <= most


@pytest.mark.parametrize("kind", FORMATS)
def test_a_copy_on_this_machine_is_compared(
    good: Mapping[str, Path], tmp_path: Path, kind: str
) -> None:
    data = good[kind].read_bytes()
    rng = random.Random(kind)
    spoilt = bytearray(data[: len(data) - 1000])
    for _ in range(7):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    broken = tmp_path / f"broken.{kind}"
    broken.write_bytes(spoilt)
    done = command("repair", broken, "--from", good[kind], "-o", broken, "--force", "--json")
    assert done.code == 0 and broken.read_bytes() == data
    assert done.json["proof"] == "compared" and done.json["taken_bytes"] <= 8 * 4096 + 1000
    done = command("repair", broken, "--from", good[kind], "-o", broken, "--force", "--json")
    assert done.code == 0 and done.json["taken_bytes"] == 0


def test_a_file_that_is_too_long_is_cut(good: Mapping[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "long.gguf"
    broken.write_bytes(good["gguf"].read_bytes() + bytes(999))
    assert command("repair", broken, "--from", good["gguf"], "-o", tmp_path / "x.gguf").code == 0
    assert (tmp_path / "x.gguf").read_bytes() == good["gguf"].read_bytes()


def test_nothing_known_to_be_wrong_is_said(
    server: RangeServer, good: Mapping[str, Path], tmp_path: Path
) -> None:
    data = good["gguf"].read_bytes()
    server.files["/m.gguf"] = data
    (tmp_path / "b.gguf").write_bytes(data[:-5] + b"wrong")
    args = ("repair", tmp_path / "b.gguf", "--from", f"{server.url}/m.gguf", "-o")
    done = command(*args, tmp_path / "x.gguf")
    assert done.code == 2 and "nothing says what else could be wrong" in done.err
    assert not (tmp_path / "x.gguf").exists()


def test_a_copy_of_another_model_is_refused(good: Mapping[str, Path], tmp_path: Path) -> None:
    save_file(
        {f"t{i:02}": np.zeros((25, 50), "<f2") for i in range(50)}, tmp_path / "o.safetensors"
    )
    args = ("repair", tmp_path / "o.safetensors", "--from", good["safetensors"], "-o")
    done = command(*args, tmp_path / "x.safetensors")
    assert done.code == 2 and "0 of its 50 tensors" in done.err


def test_a_damaged_copy_is_refused(good: Mapping[str, Path], tmp_path: Path) -> None:
    data = good["gguf"].read_bytes()
    (tmp_path / "a.gguf").write_bytes(data[:5000])
    (tmp_path / "b.gguf").write_bytes(data[:-5000])
    args = ("repair", tmp_path / "a.gguf", "--from", tmp_path / "b.gguf", "-o", tmp_path / "c.gguf")
    assert command(*args).code == 2 and not (tmp_path / "c.gguf").exists()


def test_a_copy_that_is_lost_on_the_way_leaves_nothing(
    server: RangeServer, waits: list[float], good: Mapping[str, Path], tmp_path: Path
) -> None:
    data = good["safetensors"].read_bytes()
    server.files["/m.safetensors"] = data
    server.faults["/m.safetensors"] = ["", "", "", "tag"]
    (tmp_path / "b.safetensors").write_bytes(data[:1000])
    args = ("repair", tmp_path / "b.safetensors", "--from", f"{server.url}/m.safetensors", "-o")
    done = command(*args, tmp_path / "x.safetensors")
    assert done.code == 2 and "changed while it was read" in done.err
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"ranges"} == {"b.safetensors"}  # ranges: what came before, kept on disk


# --- without a copy -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_sound_is_written(good: Mapping[str, Path], tmp_path: Path, kind: str) -> None:
    data = good[kind].read_bytes()
    broken, fixed = tmp_path / f"cut.{kind}", tmp_path / f"part.{kind}"
    broken.write_bytes(data[:10_000_000])
    done = command("repair", broken, "--partial", "-o", fixed, "--json")
    assert done.code == 0, done.err
    assert 15 <= done.json["kept"] == 50 - len(done.json["missing"]) <= 20
    with aprfmt.open(fixed) as part, aprfmt.open(good[kind]) as whole:
        assert len(part) == done.json["kept"]
        assert set(part) | set(done.json["missing"]) == set(whole)
        assert all(bytes(part[name].raw()) == bytes(whole[name].raw()) for name in part)
        listed = part.metadata["aprfmt.repair.missing"].split("\n")
        assert listed == list(done.json["missing"])
        assert {k: part.metadata[k] for k in whole.metadata} == dict(whole.metadata)
    if kind == "safetensors":  # as its own library reads it
        with safe_open(fixed, "np") as file:
            assert len(list(file.keys())) == done.json["kept"]
        whole_values = load_file(good[kind])
        assert all(
            (load_file(fixed)[name] == whole_values[name]).all() for name in load_file(fixed)
        )


def test_a_sound_file_needs_no_repair(good: Mapping[str, Path], tmp_path: Path) -> None:
    done = command("repair", good["gguf"], "--partial", "-o", tmp_path / "x.gguf")
    assert done.code == 2 and "nothing of it is missing" in done.err


def test_a_source_or_partial_is_asked_for(good: Mapping[str, Path], tmp_path: Path) -> None:
    for more in ((), ("--partial", "--from", good["gguf"])):
        done = command("repair", good["gguf"], "-o", tmp_path / "x.gguf", *more)
        assert done.code == 2 and "--from SOURCE, or --partial" in done.err


def test_a_folder_is_not_repaired(good: Mapping[str, Path], tmp_path: Path) -> None:
    args = ("repair", tmp_path, "--from", good["gguf"], "-o", tmp_path / "x.gguf")
    assert "is a folder; give the file" in command(*args).err
    assert "no such file" in command("repair", tmp_path / "n", *args[2:]).err


def test_a_manifest_whose_blocks_are_damaged_is_refused(
    good: Mapping[str, Path], tmp_path: Path
) -> None:
    import json

    copy = tmp_path / "m.gguf"
    copy.write_bytes(good["gguf"].read_bytes())
    assert command("hash", copy, "--write", "--blocks", "--raw-only").code == 0
    manifest = tmp_path / "m.gguf.aprfmt-hash.json"
    for value in (3, {"size": 0, "sha256": []}, {"size": 1 << 20, "sha256": [1]}, {"size": 9}):
        body = json.loads(manifest.read_text())
        body["files"][0]["blocks"] = value
        (tmp_path / "bad.json").write_text(json.dumps(body))
        args = ("repair", copy, "--from", good["gguf"], "--manifest", tmp_path / "bad.json", "-o")
        done = command(*args, tmp_path / "x.gguf")
        assert done.code == 2 and "digests of blocks are damaged" in done.err
