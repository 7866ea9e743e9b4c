"""Bytes of one version: what proves it, what is read twice where nothing does, and what is cached.

Seen red: the date or a weak ETag in the cache's key, the hub's key without its endpoint, no second
reading of the first ranges, no pass over the whole file, a signature in a journal, two addresses
that differ in their query taken for one file.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.errors import RemoteError
from aprfmt.remote.paths import RemotePath, parse_location
from aprfmt.remote.remote_file import AGAIN, WINDOW, RemoteObject
from aprfmt.remote.site import hash_identity, is_strong
from tests.cli.run import aprfmt as command
from tests.remote.conftest import forget
from tests.remote.server import RangeServer, serving

COMMIT = "0" * 39 + "2"
UNPROVEN = ["weak", "date", "none"]
FILE = "/m.safetensors"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Two versions of a file, of one size and one header, whose values all differ."""
    folder, found = tmp_path_factory.mktemp("versions"), []
    for version in (1, 2):
        rng = np.random.default_rng(version)
        values = {f"t{i}": rng.standard_normal((512, 1024)).astype("<f4") for i in range(6)}
        save_file(values, folder / "m.safetensors")
        found.append((folder / "m.safetensors").read_bytes())
    old, new = found
    assert len(old) == len(new) and old[:256] == new[:256]
    return old, new


def late(old: bytes) -> bytes:
    """Return a file with two other bytes: one after 1 MiB, and the last."""
    at = 1 << 20
    return old[:at] + bytes([old[at] ^ 1]) + old[at + 1 : -1] + bytes([old[-1] ^ 1])


@pytest.mark.parametrize("version", UNPROVEN)
@pytest.mark.parametrize("line", ["hash --raw-only SRC", "validate SRC", "diff SRC HERE",
                                  "cat SRC t5 --limit 3", "inspect --json SRC"])  # fmt: skip
def test_a_mixture_is_an_error(
    server: RangeServer, two: tuple[bytes, bytes], version: str, line: str, tmp_path: Path
) -> None:
    """The file is replaced after the first answer; `inspect` needs no other, and says nothing."""
    server.versions, server.files[FILE] = version, two[0]
    server.swaps[FILE] = 1, two[1]
    (tmp_path / "here.safetensors").write_bytes(two[1])
    places = {"SRC": f"{server.url}{FILE}", "HERE": str(tmp_path / "here.safetensors")}
    done = command(*(places.get(word, word) for word in line.split()))
    if line.startswith("inspect"):
        assert done.code == 0 and len(server.log) == 1 and "ETag" not in done.err
        return
    assert done.code == 2 and "changed while it was read" in done.err, (done.out, done.err)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("version", UNPROVEN)
def test_in_python_it_is_an_error_on_leaving(
    server: RangeServer, two: tuple[bytes, bytes], version: str
) -> None:
    server.versions, server.files[FILE] = version, two[0]
    server.swaps[FILE] = 1, two[1]
    with pytest.raises(RemoteError, match="changed while it was read"):
        with aprfmt.open(f"{server.url}{FILE}") as model:
            model["t5"].numpy()
    forget()
    server.files[FILE] = two[0]
    with pytest.raises(ValueError, match="ours"), aprfmt.open(f"{server.url}{FILE}") as model:
        model["t5"].numpy()
        before = len(server.log)
        raise ValueError("ours")  # another error is not replaced, and nothing is asked for
    assert len(server.log) == before


@pytest.mark.parametrize("version", [*UNPROVEN, "strong"])
@pytest.mark.parametrize("to", ["x.gguf", "x.safetensors", "x.apr"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_conversion_of_a_mixture_is_not_published(
    server: RangeServer, two: tuple[bytes, bytes], version: str, to: str, after: int, tmp_path: Path
) -> None:
    """Two bytes differ, which no second reading of the first ranges finds."""
    server.versions, server.files[FILE] = version, two[0]
    server.swaps[FILE] = after, late(two[0])
    (tmp_path / "out").mkdir()
    done = command("convert", f"{server.url}{FILE}", tmp_path / "out" / to, "--arch", "none")
    if done.code == 0:  # what came of the old one alone, or after it, is in both
        assert after == 1 if version != "strong" else len(server.log) == after
        (tmp_path / "is.safetensors").write_bytes(server.files[FILE])
        words = (tmp_path / "is.safetensors", tmp_path / "out" / to)
        assert command("diff", *words).code == 0
        return
    assert done.code == 2 and "changed while it was read" in done.err, done.err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("version", UNPROVEN)
def test_what_cannot_be_proven_is_said_and_a_whole_pass_proves_it(
    server: RangeServer, two: tuple[bytes, bytes], version: str, tmp_path: Path
) -> None:
    server.versions, server.files[FILE] = version, two[0]
    address = f"{server.url}{FILE}"
    done = command("hash", address, "--raw-only")
    assert done.code == 0
    assert done.err.count(f"{server.url}/: gives no strong ETag: that what came of a file") == 1
    assert server.sent() <= len(two[0]) + AGAIN * WINDOW  # the first ranges came twice
    forget()
    server.log.clear()
    done = command("convert", address, tmp_path / "x.gguf", "--arch", "none")
    assert done.code == 0 and "no strong ETag" not in done.err, done.err
    assert 2 * len(two[0]) <= server.sent() <= 2 * len(two[0]) + AGAIN * WINDOW + (128 << 10)
    assert f"bytes=0-{len(two[0]) - 1}" in server.asked(FILE)
    forget()
    done = command("convert", address, tmp_path / "y.gguf", "--arch", "none", "--no-source-hash")
    assert done.code == 0 and "gives no strong ETag" in done.err, done.err


def test_a_strong_etag_is_proof(server: RangeServer, two: tuple[bytes, bytes]) -> None:
    server.files[FILE] = two[0]
    done = command("hash", f"{server.url}{FILE}", "--raw-only")
    assert done.code == 0 and "ETag" not in done.err
    assert server.sent() <= len(two[0])


def digests(place: object) -> list[object]:
    """Return the digests of a model's tensors as `hash` says them."""
    done = command("hash", place, "--raw-only", "--json")
    return [row["raw"] for row in done.json["tensors"]]


def digests_of(data: bytes, folder: Path) -> list[object]:
    """Return those of a file on disk with these bytes."""
    (folder / "here.safetensors").write_bytes(data)
    return digests(folder / "here.safetensors")


@pytest.mark.parametrize("version", UNPROVEN)
def test_nothing_is_kept_on_disk_without_proof(
    server: RangeServer, two: tuple[bytes, bytes], version: str, tmp_path: Path
) -> None:
    """A replaced file of one size and one date was `equal` by the ranges of the old one."""
    server.versions = version
    for data in two:
        forget()
        server.files[FILE] = data
        assert digests(f"{server.url}{FILE}") == digests_of(data, tmp_path)
        assert not list((tmp_path / "ranges").glob("*/*"))


def test_ranges_of_a_strong_etag_are_those_of_that_version(
    server: RangeServer, two: tuple[bytes, bytes], tmp_path: Path
) -> None:
    for data in (*two, two[0]):
        forget()
        server.files[FILE] = data
        assert digests(f"{server.url}{FILE}") == digests_of(data, tmp_path)
    assert list((tmp_path / "ranges").glob("*/*"))


@pytest.mark.parametrize(("tag", "strong"), [
    ('"a"', True), ('"5e-1"', True), ("", False), ('""', False), ('W/"a"', False), ('w/"a"', False),
    ("a", False), ('"a', False), ('"a"b"', False), ('"a", "b"', False), ('"a b"', False),
])  # fmt: skip
def test_which_etag_is_strong(tag: str, strong: bool) -> None:
    """RFC 9110, 8.8.3: an opaque tag in quotes, without W/."""
    assert is_strong(tag) == strong


# --- the hub ------------------------------------------------------------------------------------


@pytest.fixture
def other() -> Iterator[RangeServer]:
    with serving() as found:
        yield found


@pytest.mark.parametrize("large", [True, False])
def test_a_mirrors_bytes_are_not_believed_of_the_hub(
    server: RangeServer, other: RangeServer, two: tuple[bytes, bytes], large: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Two hubs have other bytes under one name and one commit."""
    lfs = ("m.safetensors",) if large else ()
    for hub, data in ((server, two[0]), (other, two[1])):
        hub.add_repository("someone/m", COMMIT, {"m.safetensors": data}, lfs)
    for number, data in enumerate(two):
        (tmp_path / f"{number}.safetensors").write_bytes(data)
    for hub, number in ((server, 0), (other, 1), (server, 0)):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        words = ("hf://someone/m/m.safetensors", tmp_path / f"{number}.safetensors")
        done = command("diff", *words)
        assert done.code == 0, (hub.url, done.out)
        forget()


def test_a_mirror_that_lists_the_hubs_digest_is_still_another(
    server: RangeServer, other: RangeServer, two: tuple[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """What it sent under that digest is kept for it alone."""
    for hub, data in ((server, two[0]), (other, two[1])):
        hub.add_repository("someone/m", COMMIT, {"m.safetensors": data}, ("m.safetensors",))
    path = "/api/models/someone/m/revision/main"
    (place_there,) = (to for to in other.files if to.startswith("/cdn/"))
    other.answers[path] = server.answers[path]
    (tmp_path / "hub.safetensors").write_bytes(two[0])
    words = ("cat", "hf://someone/m/m.safetensors", "t5", "--limit", "9")
    found = []
    for hub in (other, server):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found.append(command(*words).out)
        forget()
    assert list((tmp_path / "ranges").glob("*/*")) and other.files[place_there] == two[1]
    right = command("cat", tmp_path / "hub.safetensors", "t5", "--limit", "9").out
    assert found[1].splitlines()[1:] == right.splitlines()[1:] != found[0].splitlines()[1:]


def test_another_hub_in_one_process_is_another_site(
    server: RangeServer, other: RangeServer, two: tuple[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = []
    for hub, data in ((server, two[0]), (other, two[1])):
        hub.add_repository("someone/m", COMMIT, {"m.safetensors": data}, ("m.safetensors",))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with aprfmt.open("hf://someone/m/m.safetensors") as model:
            found.append(bytes(model["t0"].raw()))
    assert found[0] != found[1]


@pytest.mark.parametrize(("digest", "version", "kept"), [
    (True, "strong", True), (True, "weak", True), (False, "strong", True), (False, "weak", False),
    (False, "none", False),
])  # fmt: skip
def test_the_hub_proves_by_its_digest_or_a_strong_etag(
    server: RangeServer, two: tuple[bytes, bytes], digest: bool, version: str, kept: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.versions = version
    server.add_repository("someone/m", COMMIT, {"m.safetensors": two[0]}, ("m.safetensors",))
    path = "/api/models/someone/m/revision/main"
    listed = json.loads(server.answers[path])
    if not digest:
        listed["siblings"][0]["lfs"]["sha256"] = "main"
    server.answers[path] = json.dumps(listed).encode()
    done = command("hash", "hf://someone/m", "--raw-only")
    assert done.code == 0 and ("no strong ETag" in done.err) != kept
    assert bool(list((tmp_path / "ranges").glob("*/*"))) == kept


def test_a_small_file_has_the_digest_that_the_hub_lists(
    server: RangeServer, two: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """git's SHA-1 of a blob; the oracle is the test server's own, and git's of an empty one."""
    assert hashlib.sha1(b"blob 0\0").hexdigest() == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.add_repository("someone/m", COMMIT, {"m.safetensors": two[0]})
    with aprfmt.open("hf://someone/m") as model:
        assert len(model) == 6
    forget()
    server.files[f"/someone/m/resolve/{COMMIT}/m.safetensors"] = late(two[0])
    with pytest.raises(RemoteError, match=r"git's SHA-1 [0-9a-f]{40}, the hub's list says"):
        aprfmt.open("hf://someone/m")


# --- what an address says -----------------------------------------------------------------------


@pytest.mark.parametrize(("one", "another", "said"), [
    ("?v=1", "?v=2", "another query"), ("?Signature=sigsecret", "?Signature=sigother", "query"),
])  # fmt: skip
def test_two_addresses_that_differ_in_their_query_are_two_files(
    server: RangeServer, two: tuple[bytes, bytes], one: str, another: str, said: str
) -> None:
    server.files[FILE] = two[0]
    done = command("diff", f"{server.url}{FILE}{one}", f"{server.url}{FILE}{another}")
    assert done.code == 2 and said in done.err and "sig" not in done.err.replace("signature", "")
    done = command("diff", f"{server.url}{FILE}{one}", f"{server.url}{FILE}{one}")
    assert done.code == 0


def test_two_passwords_for_one_host_are_refused(server: RangeServer) -> None:
    a, b = (server.url.replace("//", f"//me:{word}@") + FILE for word in ("s3cret", "0ther"))
    done = command("diff", a, b)
    assert done.code == 2 and "another name and password" in done.err
    assert "s3cret" not in done.err and "0ther" not in done.err


def test_no_signature_goes_into_a_journal(
    server: RangeServer, two: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.conversion.verification import Verifier
    from aprfmt.errors import ConversionError

    server.files[FILE] = two[0]

    def stopping(*of: object) -> None:
        raise ConversionError("stopped")

    monkeypatch.setattr(Verifier, "written", stopping)
    done = command("convert", f"{server.url}{FILE}?Signature=sigsecret", tmp_path / "x.gguf",
                   "--arch", "none", "--resume")  # fmt: skip
    assert done.code == 2 and "stopped" in done.err
    (journal,) = tmp_path.glob(".*.jsonl")
    assert FILE[1:] in journal.read_text() and "sigsecret" not in journal.read_text()


def test_an_identity_is_a_digest_of_all_its_facts(
    server: RangeServer, two: tuple[bytes, bytes]
) -> None:
    facts = [("http", "a", '"x"', 1), ("http", "a", '"x"', 11), ("http", "b", '"x"', 1),
             ("http", "a", '"y"', 1), ("hf", "a", '"x"', 1), ("http", 'a"x', '"', 1)]  # fmt: skip
    found = [hash_identity(*each) for each in facts]
    assert len(set(found)) == len(facts) and all(re.fullmatch("[0-9a-f]{64}", e) for e in found)
    server.files[FILE] = two[0]
    path = parse_location(f"{server.url}{FILE}?Signature=sigsecret")
    assert isinstance(path, RemotePath)
    assert "sigsecret" not in repr(path.site.facts(path.inner))


def test_buckets_at_two_endpoints_are_two() -> None:
    from aprfmt.remote import buckets

    def facts(**environment: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return buckets.SITE.endpoint()

    plain = facts()
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AZURE_STORAGE_ACCOUNT_NAME",
                 "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"):  # fmt: skip
        assert facts(**{name: "one"}) != facts(**{name: "two"}) != plain
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        assert facts(**{name: "sigsecret"}) == plain


def test_so_many_early_answers_are_read_again() -> None:
    """No fewer than AGAIN prove little, and no more are kept: they cost memory and requests."""
    made = RemoteObject.__new__(RemoteObject)
    made._cache_lock, made._early, made._unsure, made.mixed = threading.Lock(), [], False, False
    made.facts = SimpleNamespace(proven=False)  # type: ignore[assignment]
    for start in range(2 * AGAIN):
        made._note(start, memoryview(b"x"))
    assert [start for start, _ in made._early] == list(range(AGAIN))
