"""Repositories of a hub on this machine; its own library says what is right where it can."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub as library
import pytest
from huggingface_hub import constants

import aprfmt
from aprfmt.errors import RemoteError, UsageError
from aprfmt.remote import hub
from aprfmt.remote.paths import RemotePath, parse_location
from aprfmt.tensors.runs import ByteRun, all_runs, published_equal
from tests.cli.run import aprfmt as command
from tests.remote.conftest import forget
from tests.remote.server import RangeServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
NAME = "someone/tiny"


@pytest.fixture
def files(demo_model: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in demo_model.iterdir() if path.is_file()}


@pytest.fixture
def served(
    server: RangeServer, files: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> RangeServer:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.add_repository(NAME, COMMIT, files, lfs=("model.safetensors",))
    return server


def test_a_repository_is_the_folder(served: RangeServer, demo_model: Path) -> None:
    here = command("inspect", demo_model, "--json").json
    there = command("inspect", f"hf://{NAME}", "--json").json
    for key in ("architecture", "tensor_count", "hyperparameters", "encodings", "metadata"):
        assert there[key] == here[key]
    assert there["tokenizer"].keys() == here["tokenizer"].keys()
    assert there["path"] == f"hf://{NAME}/model.safetensors"
    assert len(served.asked(f"/api/models/{NAME}/revision/main")) == 1


def test_a_file_that_is_not_stored_apart_is_sent_once_and_whole(
    served: RangeServer, files: Mapping[str, bytes], demo_model: Path
) -> None:
    served.add_repository("someone/plain", COMMIT, files)
    path = parse_location("hf://someone/plain/model.safetensors")
    assert isinstance(path, RemotePath)
    facts = path.site.facts(path.inner)
    assert facts is not None
    assert path.site.fetch(path.inner, facts, 5, 99) == files["model.safetensors"][5:99]
    with aprfmt.open("hf://someone/plain") as there, aprfmt.open(demo_model) as here:
        for name, view in here.items():
            assert bytes(there[name].raw()) == bytes(view.raw()), name
    assert len(served.asked(f"/someone/plain/resolve/{COMMIT}/model.safetensors")) == 1


def test_everything_is_read_at_one_commit(served: RangeServer, files: Mapping[str, bytes]) -> None:
    with aprfmt.open(f"hf://{NAME}") as model:
        served.add_repository(NAME, OTHER, {**files, "config.json": b"{}"})  # main moves on
        assert model.tokenizer.encode("hello")
        assert model["model.norm.weight"].numpy().size
    resolved = [path for path, _, _ in served.log if "/resolve/" in path]
    assert len(resolved) >= 3 and all(f"/resolve/{COMMIT}/" in path for path in resolved)


@pytest.mark.parametrize("at", ["main", COMMIT, "refs%2Fpr%2F1"])
def test_a_revision_is_asked_for(served: RangeServer, files: Mapping[str, bytes], at: str) -> None:
    served.add_repository(NAME, COMMIT, files, ("model.safetensors",), revision="refs%2Fpr%2F1")
    served.answers = {path.replace("%2F", "/"): body for path, body in served.answers.items()}
    with aprfmt.open(f"hf://{NAME}@{at}/model.safetensors") as model:
        assert str(model.path) == f"hf://{NAME}@{at}/model.safetensors"
        assert model.config is not None  # the folder of a file is known


def test_the_token_goes_to_the_hub_alone(
    served: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    cdn = f"http://localhost:{served.server_address[1]}"
    served.moved = {path: f"{cdn}{to}" for path, to in served.moved.items()}
    done = command("inspect", f"hf://{NAME}", "--json")
    assert done.code == 0, done.err
    for path, _, headers in served.log:
        told = headers.get("authorization")
        assert told == (None if path.startswith("/cdn/") else "Bearer hf_secret")
    assert any(path.startswith("/cdn/") for path, _, _ in served.log)
    assert "hf_secret" not in done.out + done.err and "sigsecret" not in done.out + done.err


def test_a_signed_address_that_ran_out_is_asked_for_again(
    served: RangeServer, files: Mapping[str, bytes]
) -> None:
    with aprfmt.open(f"hf://{NAME}/model.safetensors") as model:
        (old,) = set(served.moved.values())
        path = old.partition("?")[0]
        served.files["/cdn/new"] = served.files[path]
        served.denied[path] = 403, {}, b"expired"
        served.moved = dict.fromkeys(served.moved, "/cdn/new?Signature=sigsecret")
        name = max(model, key=lambda name: model[name].nbytes)
        tensor = model[name]
        at = tensor.offset
        assert bytes(tensor.raw()) == files["model.safetensors"][at : at + tensor.nbytes]


@pytest.mark.parametrize(("status", "code", "token", "said"), [
    (401, "RepoNotFound", "", "does not exist, or is private: set HF_TOKEN"),
    (403, "GatedRepo", "", "is gated; accept its terms at"),
    (403, "GatedRepo", "hf_secret", "is gated, and the token of HF_TOKEN has no access; accept"),
    (401, "RepoNotFound", "hf_secret", "the token of HF_TOKEN may not read it"),
    (401, "", "hf_secret", "the token of HF_TOKEN may not read it"),
    (404, "RepoNotFound", "", "no such repository or revision"),
])  # fmt: skip
def test_a_repository_that_may_not_be_read(
    served: RangeServer,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    token: str,
    said: str,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    path = f"/api/models/{NAME}/revision/main"
    served.denied[path] = status, {"X-Error-Code": code}, b"{}"
    done = command("inspect", f"hf://{NAME}")
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert "hf_secret" not in done.err


def test_a_gated_file_of_an_open_repository(served: RangeServer) -> None:
    path = f"/{NAME}/resolve/{COMMIT}/model.safetensors"
    served.denied[path] = 403, {"X-Error-Code": "GatedRepo"}, b""
    done = command("tensors", f"hf://{NAME}")
    assert done.code == 2 and "is gated" in done.err


def test_small_files_of_a_gated_repository(served: RangeServer, files: Mapping[str, bytes]) -> None:
    """The hub lists a gated repository for anybody; the index of shards is refused first."""
    index = b'{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    path = f"/api/models/{NAME}/revision/main"
    listed = json.loads(served.answers[path])
    listed["siblings"] += [{"rfilename": "model.safetensors.index.json", "size": len(index)}]
    listed["siblings"] = [
        row for row in listed["siblings"] if row["rfilename"] != "model.safetensors"
    ]
    served.answers[path] = json.dumps(listed).encode()
    for name in ("model.safetensors.index.json", "config.json", "tokenizer.json"):
        at = f"/{NAME}/resolve/{COMMIT}/{name}"
        served.denied[at] = 401, {"X-Error-Code": "GatedRepo"}, b""
    for words in (("inspect",), ("tokenize", "x")):
        done = command(*words[:1], f"hf://{NAME}", *words[1:])
        assert done.code == 2 and "is gated; accept its terms at" in done.err, done.err
        assert "set HF_TOKEN" in done.err and done.err.count("\n") == 1


def test_a_token_that_was_left_is_named_by_its_file(
    served: RangeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hf_secret\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    path = f"/api/models/{NAME}/revision/main"
    served.denied[path] = 403, {"X-Error-Code": "GatedRepo"}, b"{}"
    done = command("inspect", f"hf://{NAME}")
    assert done.code == 2 and f"the token of {tmp_path / 'token'} has no access" in done.err
    assert "hf_secret" not in done.err


def test_the_local_cache_is_taken_first(
    served: RangeServer, files: Mapping[str, bytes], tmp_path: Path
) -> None:
    """As the hub's library lays it out: blobs, links to them in snapshots, refs."""
    folder = tmp_path / "hf" / "hub" / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs" / "1").write_bytes(files["config.json"])
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert isinstance(parse_location(f"hf://{NAME}"), RemotePath)  # no weights there
    for number, name in enumerate(files):
        (folder / "blobs" / f"b{number}").write_bytes(files[name])
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(f"../../blobs/b{number}")
    for address in (f"hf://{NAME}", f"hf://{NAME}@{COMMIT}/model.safetensors", NAME):
        forget()
        done = command("inspect", address, "--json")
        assert done.code == 0 and "remote" not in done.json
        assert f"{address}: read from the local hub cache, commit {COMMIT}" in done.err
    assert isinstance(
        parse_location(f"hf://{NAME}@v1"), RemotePath
    )  # another revision is not this one
    assert not served.log


def test_an_index_whose_shards_are_not_all_there_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "hub" / "models--a--b"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    names = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (snapshot / names["x"]).write_bytes(b"")
    assert isinstance(parse_location("hf://a/b"), RemotePath)
    (snapshot / names["y"]).write_bytes(b"")
    assert parse_location("hf://a/b") == snapshot


def test_offline_says_so(served: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE is set"):
        aprfmt.open(f"hf://{NAME}")
    assert not served.log


@pytest.mark.parametrize(
    "address", ["hf://", "hf://one", "hf://a/b@", "hf://a/../b", "hf://a b/c", "hf://a/b@x y"]
)
def test_an_address_without_a_repository(address: str) -> None:
    if address == "hf://a/b@":
        assert parse_location(address).parts[1:] == ("a", "b@")
        return
    with pytest.raises(UsageError):
        parse_location(address)


def test_a_file_that_the_list_has_not_is_missing(served: RangeServer) -> None:
    path = parse_location(f"hf://{NAME}/model-00002.safetensors")
    assert isinstance(path, RemotePath) and path.site.facts(path.inner) is None
    with pytest.raises(RemoteError, match="the site has no such file"):
        path.site.first(path.inner)


@pytest.mark.parametrize("body", [
    b"[]", b"{}", b'{"sha": "main", "siblings": []}', b"<html>", b'{"sha": 3}',
    b'{"sha": "%s", "siblings": [3, {"rfilename": 4}, {"rfilename": "x", "size": -1}]}'
    % COMMIT.encode(),
])  # fmt: skip
def test_a_listing_that_is_none(served: RangeServer, body: bytes) -> None:
    served.answers[f"/api/models/{NAME}/revision/main"] = body
    done = command("inspect", f"hf://{NAME}")
    assert done.code == 2 and "bug" not in done.err and done.err.count("\n") == 1


def test_a_size_that_the_list_contradicts(served: RangeServer, files: Mapping[str, bytes]) -> None:
    (path,) = {to.partition("?")[0] for to in served.moved.values()}
    served.files[path] += b"!"
    with pytest.raises(RemoteError, match="the hub's list says"):
        aprfmt.open(f"hf://{NAME}/model.safetensors")


def test_a_published_digest_settles_a_file_without_fetching_it(
    served: RangeServer, files: Mapping[str, bytes], demo_model: Path, tmp_path: Path
) -> None:
    served.add_repository("other/copy", OTHER, files, lfs=("model.safetensors",))
    size = len(files["model.safetensors"])
    for a, b in ((f"hf://{NAME}", "hf://other/copy"), (demo_model, f"hf://{NAME}")):
        forget()
        served.log.clear()
        done = command("diff", a, b, "--only", "tensors", "--json")
        assert done.code == 0 and {r["verdict"] for r in done.json["tensors"]} == {"SAME_BYTES"}
        assert served.sent() <= 2 * (128 << 10) + 100_000 < size
        named = [each for each in map(str, (a, b)) if each.startswith("hf://")]
        said = [line for line in done.err.splitlines() if "SHA-256 that its site publishes" in line]
        assert len(said) == len(named) and all(map(str.startswith, sorted(said), sorted(named)))
    changed = bytearray(files["model.safetensors"])
    changed[-1] ^= 1
    served.add_repository(
        "other/copy", OTHER, {**files, "model.safetensors": bytes(changed)}, ("model.safetensors",)
    )
    forget()
    done = command("diff", f"hf://{NAME}", "hf://other/copy", "--only", "tensors", "--json")
    verdicts = [row["verdict"] for row in done.json["tensors"]]
    assert done.code == 1 and len(verdicts) - verdicts.count("SAME_BYTES") == 1
    assert "publishes" not in done.err


def test_other_places_of_one_file_are_not_equal_by_its_digest(served: RangeServer) -> None:
    with aprfmt.open(f"hf://{NAME}") as model:
        runs = [all_runs(tensor) for tensor in model.source.tensors.values()]
        a, b = next((a, b) for a in runs for b in runs if a != b and a[0].nbytes == b[0].nbytes)
        assert published_equal(a, a) and not published_equal(a, b)
        half = [ByteRun(a[0].tensor, 0, a[0].nbytes // 2)]
        assert not published_equal(a, half) and not published_equal(a, [])


# --- judged by the hub's own library ------------------------------------------------------------


def test_the_token_is_the_librarys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hub.hub_token() == ("", "")
    place = tmp_path / "hf" / "token"
    place.parent.mkdir(exist_ok=True)
    place.write_text("hf_file\n")
    assert hub.hub_token() == ("hf_file", str(place))
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    assert hub.hub_token() == ("hf_environment", "HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert hub.hub_token() == ("", "")
    sent: Any = library.utils
    assert "authorization" not in sent.build_hf_headers()


def test_a_token_that_cannot_be_had_is_one_line(
    served: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise RuntimeError("no identity\nat all")

    monkeypatch.setattr(library, "get_token", fails)
    done = command("inspect", f"hf://{NAME}")
    assert done.code == 2 and "the token of the hub cannot be read: no identity" in done.err
    assert done.err.count("\n") == 1 and not served.log


def test_the_listing_is_what_the_library_reads(
    served: RangeServer, files: Mapping[str, bytes]
) -> None:
    info = library.HfApi(endpoint=served.url).model_info(NAME, revision="main", files_metadata=True)
    site = hub.HubSite(("hf:", *NAME.split("/")))
    assert site.commit == info.sha == COMMIT
    siblings = info.siblings or []
    theirs = {row.rfilename: row.size for row in siblings}
    assert {name: site.facts(name).size for name in site.names("")} == theirs  # type: ignore[union-attr]
    (large,) = [row for row in siblings if row.lfs is not None]
    assert site.facts(large.rfilename).sha256 == large.lfs.sha256  # type: ignore[union-attr]
    assert theirs == {name: len(data) for name, data in files.items()}
