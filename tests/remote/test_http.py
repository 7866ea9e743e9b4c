"""Files at http addresses: equal to local ones, in few requests, and nothing believed unseen."""

import random
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.remote import client
from aprfmt.remote.paths import RemotePath, parse_location
from aprfmt.remote.read_ahead import PART
from aprfmt.remote.remote_file import RemoteFile, coalesce_ranges
from tests.cli.run import aprfmt as command
from tests.patience import PATIENCE
from tests.remote.conftest import forget
from tests.remote.server import RangeServer


def vocabulary(tmp_path: Path, count: int, merges: int) -> bytes:
    """Return a GGUF file whose header is a vocabulary, as real ones are."""
    words = [b"x" * (1 + number * 2654435761 % 12) for number in range(count)]

    def strings(key: bytes, values: list[bytes]) -> bytes:
        head = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, len(values))
        return head + b"".join(struct.pack("<Q", len(value)) + value for value in values)

    def numbers(key: bytes, kind: int) -> bytes:
        head = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, count)
        return head + bytes(4 * count)

    data = struct.pack("<4sIQQ", b"GGUF", 3, 200, 4)
    data += strings(b"tokenizer.ggml.tokens", words) + numbers(b"tokenizer.ggml.scores", 6)
    data += numbers(b"tokenizer.ggml.token_type", 5)
    data += strings(b"tokenizer.ggml.merges", [b"ab " + word for word in words[:merges]])
    for number in range(200):
        name = b"blk.%d.attn_q.weight" % number
        data += struct.pack("<Q", len(name)) + name
        data += struct.pack("<IQQIQ", 2, 64, 64, 0, number * 64 * 64 * 4)
    data += bytes(-len(data) % 32) + bytes(200 * 64 * 64 * 4)
    if count < 1000:
        (tmp_path / "judged.gguf").write_bytes(data)
        assert len(gguf.GGUFReader(tmp_path / "judged.gguf").tensors) == 200
    return data


@pytest.mark.parametrize(
    "name", ["small.safetensors", "many.safetensors", "small.gguf", "small.apr"]
)
def test_a_remote_file_is_the_local_one(
    server: RangeServer, made: Mapping[str, bytes], tmp_path: Path, name: str
) -> None:
    server.files[f"/{name}"] = made[name]
    (tmp_path / name).write_bytes(made[name])
    with aprfmt.open(tmp_path / name) as here, aprfmt.open(f"{server.url}/{name}") as there:
        assert list(there) == list(here) and dict(there.metadata) == dict(here.metadata)
        for tensor in here:
            assert there[tensor].shape == here[tensor].shape
            assert bytes(there[tensor].raw()) == bytes(here[tensor].raw())


@pytest.mark.parametrize("name", ["small.safetensors", "many.safetensors"])
def test_inspect_of_a_safetensors_file_takes_two_requests(
    server: RangeServer, made: Mapping[str, bytes], name: str
) -> None:
    server.files[f"/{name}"] = made[name]
    done = command("inspect", f"{server.url}/{name}", "--json")
    assert done.code == 0, done.err
    assert done.json["remote"]["requests"] == len(server.log) == (2 if "many" in name else 1)
    assert done.json["remote"]["bytes"] == server.sent()
    assert done.json["path"] == f"{server.url}/{name}"


@pytest.mark.parametrize(("count", "merges"), [(100, 50), (30_000, 20_000), (262_144, 260_000)])
def test_a_gguf_header_costs_little_more_than_itself(
    server: RangeServer, tmp_path: Path, count: int, merges: int
) -> None:
    server.files["/v.gguf"] = data = vocabulary(tmp_path, count, merges)
    (tmp_path / "local.gguf").write_bytes(data)
    with aprfmt.open(tmp_path / "local.gguf") as here:
        header = min(tensor.offset for tensor in here.values())
        tokens = here.metadata["tokenizer.ggml.tokens"].tolist()
        merged = here.metadata["tokenizer.ggml.merges"][-1]
    with aprfmt.open(f"{server.url}/v.gguf") as there:
        assert len(server.log) <= (8 if count > 1000 else 3)  # 12 are promised
        assert server.sent() <= max(1.25 * header, header + (512 << 10))
        before = len(server.log)
        assert there.metadata["tokenizer.ggml.tokens"].tolist() == tokens
        assert there.metadata["tokenizer.ggml.merges"][-1] == merged
        assert len(server.log) == before


def test_a_file_of_torch_save_is_read_by_range(server: RangeServer, tmp_path: Path) -> None:
    """Its directory stands at the end: neither listing nor one tensor reads the others' bytes."""
    torch = pytest.importorskip("torch")
    tensors = {
        "big": torch.arange(2 << 20, dtype=torch.float32).reshape(4, -1),
        "small": torch.arange(3000, dtype=torch.float32),
        "behind": torch.ones(1 << 20),
    }
    torch.save(tensors, tmp_path / "x.pt")
    server.files["/x.pt"] = data = (tmp_path / "x.pt").read_bytes()
    done = command("inspect", f"{server.url}/x.pt", "--json")
    assert done.code == 0, done.err
    assert done.json["remote"]["bytes"] == server.sent() < len(data) // 8
    forget()
    before = server.sent()
    with aprfmt.open(f"{server.url}/x.pt") as model:
        assert np.array_equal(model["small"].numpy(), tensors["small"].numpy())
        assert server.sent() - before < len(data) // 8
        assert np.array_equal(model["big"].numpy(), tensors["big"].numpy())
        assert server.sent() - before < tensors["big"].nbytes + len(data) // 8


def test_one_tensor_costs_two_requests_beyond_the_header(
    server: RangeServer, tmp_path: Path
) -> None:
    big = np.arange(6 << 20, dtype="<f4").reshape(6, -1)
    save_file({"a": big, "b": big[:1] + 1, "c": big[:1, :4096]}, tmp_path / "big.safetensors")
    server.files["/big.safetensors"] = (tmp_path / "big.safetensors").read_bytes()
    for name, values in (("a", big), ("b", big[:1] + 1), ("c", big[:1, :4096])):
        forget()
        with aprfmt.open(f"{server.url}/big.safetensors") as model:
            before = len(server.log)
            assert np.array_equal(model[name].numpy(), values)
            assert len(server.log) - before <= 2
    done = command("cat", f"{server.url}/big.safetensors", "b", "--limit", "3", "--json")
    assert done.json["values"] == [1.0, 2.0, 3.0]


def test_headers_of_many_shards_are_fetched_together(server: RangeServer, tmp_path: Path) -> None:
    """The server answers only when six requests wait: one after the other would never end."""
    from aprfmt.conversion import convert

    tensors = {f"w{i}": np.full((64, 64), i, "<f4") for i in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    convert(
        tmp_path / "model.safetensors", tmp_path / "out", to="safetensors", max_shard_size=17000
    )
    index = next((tmp_path / "out").glob("*.index.json"))
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == 6
    for path in (index, *shards):
        server.files[f"/m/{path.name}"] = path.read_bytes()
    parse_location(f"{server.url}/m/{index.name}").is_file()
    server.together = threading.Barrier(6)
    with aprfmt.open(f"{server.url}/m/{index.name}") as model:
        assert len(model) == 6 and len(server.log) == 7
        server.together = None
        assert model["w5"].numpy()[0, 0] == 5


# --- reading much, and reading again ------------------------------------------------------------


def test_a_connection_in_use_is_not_kept_after_its_client_was_closed(server: RangeServer) -> None:
    server.files["/x"] = bytes(1 << 20)
    site = RemotePath("http:", f"127.0.0.1:{server.server_address[1]}", "x").site
    facts, _ = site.first("x")
    server.stuck = threading.Event()
    asking = threading.Thread(target=site.fetch, args=("x", facts, 1 << 19, 1 << 20))
    asking.start()
    assert server.arrived.acquire(timeout=PATIENCE) and server.arrived.acquire(timeout=PATIENCE)
    client.CLIENT.close()
    server.stuck.set()
    asking.join(PATIENCE)
    assert not client.CLIENT._idle


def test_ranges_that_lie_close_come_together() -> None:
    assert coalesce_ranges([(900, 1000), (0, 10), (10, 20), (500_000, 500_001)]) == [
        (0, 1000),
        (500_000, 500_001),
    ]


def test_a_stream_is_fetched_ahead_and_once(server: RangeServer) -> None:
    data = random.Random(0).randbytes(36 << 20)
    server.files["/x"] = data
    source = RemoteFile(RemotePath("http:", f"127.0.0.1:{server.server_address[1]}", "x"))
    got = b"".join(bytes(window) for window in source.windows(0, len(data)))
    assert got == data
    assert server.sent() <= len(data) + (128 << 10)
    assert all(
        int(last) + 1 - int(first) <= PART
        for _, stated, _ in server.log
        for first, last in [stated.removeprefix("bytes=").split("-")]
    )
    for start, stop in ((10, 1000), (100_000, 200_000), (0, 0), (len(data) - 5, len(data))):
        assert b"".join(map(bytes, source.windows(start, stop))) == data[start:stop]
    source.close()


def test_small_reads_near_each_other_share_requests(server: RangeServer) -> None:
    data = random.Random(0).randbytes(8 << 20)
    server.files["/x"] = data
    source = RemoteFile(RemotePath("http:", f"127.0.0.1:{server.server_address[1]}", "x"))
    for at in range(1 << 20, 7 << 20, 2048):
        assert bytes(source.view[at : at + 64]) == data[at : at + 64]
    assert len(server.log) <= 6


def test_the_second_run_finds_the_ranges_on_disk(
    server: RangeServer, made: Mapping[str, bytes], tmp_path: Path
) -> None:
    server.files["/m.safetensors"] = made["many.safetensors"]
    address = f"{server.url}/m.safetensors"
    first = command("inspect", address, "--json").json
    forget()
    second = command("inspect", address, "--json").json
    assert second["remote"]["requests"] == 1 and second["remote"]["cached_bytes"] > 0
    assert {k: v for k, v in second.items() if k != "remote"} == {
        k: v for k, v in first.items() if k != "remote"
    }
    for path in (tmp_path / "ranges").glob("*/*"):
        path.write_bytes(b"!" + path.read_bytes()[1:])  # damaged: it is fetched again
    forget()
    third = command("inspect", address, "--json").json
    assert third["remote"]["requests"] == 2 and third["tensor_count"] == first["tensor_count"]


def test_the_cache_has_a_limit(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from aprfmt.remote import disk_cache

    monkeypatch.setenv("APRFMT_CACHE_SIZE", "1000")
    for i in range(8):
        disk_cache.DiskCache().put(f"file {i}", 0, memoryview(bytes(300)))
        assert bytes(disk_cache.DiskCache().get(f"file {i}", 0, 300) or b"") == bytes(300)
    disk_cache.DiskCache().put("large", 0, memoryview(bytes(501)))
    assert disk_cache.DiskCache().get("large", 0, 501) is None
    assert sum(path.stat().st_size for path in (tmp_path / "ranges").glob("*/*")) <= 1000
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    assert disk_cache.DiskCache().get("file 7", 0, 300) is None


def test_a_header_that_claims_too_much_is_refused(server: RangeServer) -> None:
    server.files["/x.gguf"] = b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1) + bytes(4 << 20)
    done = command("inspect", f"{server.url}/x.gguf")
    assert done.code == 2 and "the tensor count" in done.err
    assert len(server.log) == 1 and PATIENCE
