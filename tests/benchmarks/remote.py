"""Reading from a server of 50 ms an answer: headers of many shards, and a diff at the raw rate.

    python tests/benchmarks/remote.py [--json FILE] [--size 2.0] [--shards 163] [--latency 0.05]

The server is a process of its own on this machine. The raw rate is that of obstore where it is
installed (8 ranges of 8 MiB at a time), else of http.client; the command is timed whole.
"""

import argparse
import http.client
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.files import APRFMT, PYTHON
from tests.benchmarks.measure import Row, compile_as_installed, report

PART, AT_A_TIME = 8 << 20, 8
SERVER = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
root, latency = sys.argv[1], float(sys.argv[2])
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *of): pass
    def do_GET(self):
        time.sleep(latency)
        path = os.path.join(root, os.path.basename(self.path.partition("?")[0]))
        if not os.path.isfile(path):
            self.send_response(404); self.send_header("Content-Length", "0"); self.end_headers()
            return
        size = os.path.getsize(path)
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{size}-{os.path.basename(path)}"')
        self.end_headers()
        with open(path, "rb") as file:
            self.wfile.flush()
            at = start
            while at < stop:
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, stop - at)
class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256
server = Server(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def shards(folder: Path, count: int) -> Path:
    """Write a sharded model of so many small shards; return its index."""
    names = {}
    for number in range(1, count + 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        header: dict[str, object] = {}
        for at in range(20):
            name = f"model.layers.{number}.experts.{at}.weight"
            header[name] = {"dtype": "U8", "shape": [64], "data_offsets": [64 * at, 64 * at + 64]}
            names[name] = file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64 * 20))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def model(path: Path, nbytes: int) -> Path:
    """Write a safetensors file of random bytes: large tensors, and a small one behind each."""
    rng = np.random.default_rng(5)
    count = max(1, nbytes // (24 << 20))
    sizes = [size for _ in range(count) for size in (nbytes // count - 4096, 4096)]
    header, end = {}, 0
    for number, size in enumerate(sizes):
        at = [end, end + size]
        header[f"t{number:04d}"] = {"dtype": "U8", "shape": [size], "data_offsets": at}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size in sizes:
            file.write(rng.integers(0, 256, size, np.uint8).data)
    return path


def raw(port: int, names: tuple[str, ...], nbytes: int) -> tuple[float, str]:
    """Return the seconds a client library takes to fetch files side by side, and its name."""
    places = [(start, min(start + PART, nbytes)) for start in range(0, nbytes, PART)]
    began = time.perf_counter()
    try:
        import obstore
        from obstore.store import HTTPStore
    except ImportError:

        def fetch(job: tuple[str, int, int]) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request(
                "GET", f"/{job[0]}", headers={"Range": f"bytes={job[1]}-{job[2] - 1}"}
            )
            return len(connection.getresponse().read())

        library = "http.client"
    else:
        store = HTTPStore.from_url(f"http://127.0.0.1:{port}", client_options={"allow_http": True})

        def fetch(job: tuple[str, int, int]) -> int:
            return len(obstore.get_range(store, job[0], start=job[1], end=job[2]))

        library = "obstore"
    jobs = [(name, start, stop) for start, stop in places for name in names]
    with ThreadPoolExecutor(AT_A_TIME * len(names)) as pool:
        assert sum(pool.map(fetch, jobs)) == nbytes * len(names)
    return time.perf_counter() - began, library


def timed(*words: str, cache: Path) -> float:
    """Return the seconds of a command whose cache is empty."""
    environment = {**os.environ, "APRFMT_CACHE": str(cache), "APRFMT_CACHE_SIZE": "0"}
    began = time.perf_counter()
    subprocess.run(
        [*APRFMT, *words, "--quiet"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    return time.perf_counter() - began


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=163)
    parser.add_argument("--latency", type=float, default=0.05)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_as_installed(folder / "compiled")
        index = shards(folder, args.shards)
        one = model(folder / "a.safetensors", int(args.size * 1e9))
        os.link(one, folder / "b.safetensors")
        server = subprocess.Popen(
            [PYTHON, "-c", SERVER, str(folder), str(args.latency)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            base, cache = f"http://127.0.0.1:{port}", folder / "cache"
            first = f"{base}/model-00001-of-{args.shards:05d}.safetensors"
            timed("diff", first, first, cache=cache)  # compiles what no run before it imported
            took = timed("tensors", f"{base}/{index.name}", cache=cache)
            rows.append(Row("remote", f"headers of {args.shards} shards", "s", took, 3.0, "3 s"))
            peer, library = raw(port, ("a.safetensors", "b.safetensors"), one.stat().st_size)
            took = timed("diff", f"{base}/a.safetensors", f"{base}/b.safetensors", cache=cache)
            rows.append(
                Row(
                    "remote",
                    f"diff of two equal {args.size:g} GB",
                    "s",
                    took,
                    peer,
                    f"{library}, the same bytes",
                )
            )
            timed(
                "cat",
                first,
                "model.layers.1.experts.0.weight",
                "-o",
                str(folder / "w.npy"),
                cache=cache,
            )
            took = timed(
                "cat", f"{base}/a.safetensors", "t0000", "-o", str(folder / "t.npy"), cache=cache
            )
            rows.append(Row("remote", "cat of one tensor", "s", took, None, ""))
        finally:
            server.terminate()
            server.wait()
    report(rows, args.json)


if __name__ == "__main__":
    main()
