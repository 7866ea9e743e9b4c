"""Every model is found once, wherever it lies, and is known again by its content.

Seen red: blobs counted beside snapshots, a link between folders followed, shards as models of
their own, an identity made of the path, one without the end of the file.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from aprfmt.errors import UsageError
from aprfmt.fleet.model_search import (
    ENDS,
    FleetModel,
    Unlisted,
    describe_model,
    find_models,
    model_files,
)
from tests.cli.run import aprfmt
from tests.fleet.stores import folder, hub, ollama, sparse, weights


def found(*roots: object) -> list[FleetModel]:
    each = list(find_models(map(str, roots)))
    assert all(isinstance(one, FleetModel) for one in each), each
    return [one for one in each if isinstance(one, FleetModel)]


def names(subjects: list[FleetModel], root: Path) -> list[str]:
    return [str(Path(each.path).relative_to(root)) for each in subjects]


def test_a_folder_of_the_hub_stands_for_its_weights_and_texts(tmp_path: Path) -> None:
    (one,) = found(folder(tmp_path / "m").parent)
    files = [path.name for path in model_files(Path(one.path))]
    assert files == ["config.json", "model.safetensors"]
    assert one.bytes == sum((tmp_path / "m" / name).stat().st_size for name in files)


def test_shards_are_one_model_and_files_beside_them_others(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    assert aprfmt("split", model, tmp_path / "split", "--max-shard-size", "1K").code == 0
    gguf = tmp_path / "split" / "whole.gguf"
    assert aprfmt("convert", model, gguf).code == 0
    save_file(weights(1), tmp_path / "split" / "other.safetensors")
    shards = [path.name for path in (tmp_path / "split").glob("model-*.safetensors")]
    subjects = found(tmp_path / "split")
    assert len(shards) > 1
    assert names(subjects, tmp_path) == ["split", "split/other.safetensors", "split/whole.gguf"]
    assert {path.name for path in model_files(tmp_path / "split")} >= {*shards, "config.json"}


def test_the_shards_of_a_gguf_are_one_model(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    gguf = tmp_path / "whole.gguf"
    assert aprfmt("convert", model, gguf).code == 0
    (tmp_path / "s").mkdir()
    assert aprfmt("split", gguf, tmp_path / "s" / "part.gguf", "--max-shard-size", "1K").code == 0
    (one,) = found(tmp_path / "s")
    assert len(model_files(Path(one.path))) == len(list((tmp_path / "s").iterdir())) > 1


def test_two_snapshots_of_the_same_blobs_are_one_model(tmp_path: Path) -> None:
    hub(tmp_path, "owner/name", folder(tmp_path / "source"), revisions=2)
    (one,) = found(tmp_path / "models--owner--name")
    assert len(one.places) == 2 and all("snapshots" in place for place in one.places)


def test_ollamas_store_is_read_by_its_manifests(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    assert aprfmt("convert", folder(tmp_path / "m"), gguf).code == 0
    store = ollama(tmp_path / "models", {"tiny/latest": gguf, "tiny/again": gguf})
    bad = store / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "bad"
    bad.write_text(
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", '
        '"digest": "sha256:../../../etc/passwd"}]}'
    )
    each = list(find_models([str(store)]))
    unlisted = [one for one in each if isinstance(one, Unlisted)]
    (one,) = [one for one in each if isinstance(one, FleetModel)]
    assert one.places == (
        "ollama:registry.ollama.ai/library/tiny/again",
        "ollama:registry.ollama.ai/library/tiny/latest",
    )
    assert [each.place for each in unlisted] == ["ollama:registry.ollama.ai/library/tiny/bad"]


def test_a_circle_of_links_is_not_entered(tmp_path: Path) -> None:
    folder(tmp_path / "a" / "m")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    assert names(found(tmp_path), tmp_path) == ["a/m"]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="NOT-RUN: root reads every folder"
)
def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    (one,) = find_models([str(tmp_path)])
    assert isinstance(one, Unlisted) and one.place == str(closed)


def test_a_root_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        list(find_models([str(tmp_path / "none")]))


def test_a_model_that_was_moved_is_the_same_and_one_that_was_changed_is_not(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    before = describe_model(model, "")
    model.rename(tmp_path / "n")
    assert describe_model(tmp_path / "n", "").identity == before.identity
    config = tmp_path / "n" / "config.json"
    about = config.stat()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 2e4}))
    assert describe_model(tmp_path / "n", "").identity != before.identity
    assert about.st_size != config.stat().st_size or about.st_mtime_ns != config.stat().st_mtime_ns


@pytest.mark.parametrize("at", [0, ENDS - 1, 3 * ENDS - 1])
def test_both_ends_of_a_file_are_its_identity(tmp_path: Path, at: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(3 * ENDS))
    before = describe_model(path, "")
    times = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    os.utime(path, ns=(times, times))
    assert describe_model(path, "").identity != before.identity


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    sparse(tmp_path / "s.safetensors", 1 << 20)
    assert names(found(tmp_path), tmp_path) == ["s.safetensors"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError("no number"), "no number"),
    ],
)
def test_why_a_folder_is_not_listed_is_said(
    error: OSError, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders beside it are listed all the same."""
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.gguf").write_bytes(b"GGUF")
    listed = os.scandir

    def scandir(folder: Any) -> Any:
        if Path(folder).name == "closed":
            raise error
        return listed(folder)

    monkeypatch.setattr("aprfmt.fleet.model_search.os.scandir", scandir)
    lost, there = find_models([str(tmp_path)])
    assert isinstance(lost, Unlisted) and (lost.place, lost.why) == (str(tmp_path / "closed"), why)
    assert not isinstance(there, Unlisted) and there.path == str(tmp_path / "open" / "m.gguf")


@pytest.mark.parametrize("held", ["", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("shards", [0, 1, 3])
def test_pickled_weights_count_where_there_are_no_others(
    shards: int, held: str, tmp_path: Path
) -> None:
    """transformers takes the first of its names that is there."""
    names = [f"pytorch_model-{n:05d}-of-{shards:05d}.bin" for n in range(1, shards + 1)]
    own = [*names, "pytorch_model.bin.index.json"] if shards else ["pytorch_model.bin"]
    index = json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(names)}})
    for name in own:
        (tmp_path / name).write_text(index if name.endswith(".json") else "x")
    if held:
        (tmp_path / held).write_text('{"weight_map": {}}')
    found = [path.name for path in model_files(tmp_path)]
    assert [name for name in found if name.startswith("pytorch_model")] == (
        [] if held else sorted(own)
    )
