"""What the codecs' benchmark compares with: ggml, libgguf, bitsandbytes, and the machine."""

import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import parallel
from aprfmt.codecs.native import stream_fill

Task = Callable[[], object]
_WIDENERS = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}


@dataclass(frozen=True, slots=True)
class Row:
    """One rate beside a peer's and the limit, in `unit`, higher is better; None: there is none."""

    work: str
    case: str
    threads: int
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    limit: float | None

    def line(self) -> str:
        """Return the row as a line of the table."""
        peer = (
            f"{self.peer:9.4f} {self.ours / self.peer:7.2f}" if self.peer else f"{'-':>9} {'-':>7}"
        )
        share = (
            f"{self.limit:9.3f} {self.ours / self.limit:6.2f}"
            if self.limit
            else f"{'-':>9} {'-':>6}"
        )
        return (
            f"{self.work:11} {self.case:22} {self.threads}T {self.ours:9.4f} {self.unit} "
            f"{peer}  {share}  {self.peer_name}"
        )


HEADING = (
    f"{'work':11} {'case':22} {'':2} {'ours':>9} {'':4} {'peer':>9} {'ratio':>7}  "
    f"{'limit':>9} {'share':>6}  peer"
)


def best(tasks: Mapping[str, Task], rounds: int) -> dict[str, float]:
    """Return the least seconds of each task; all take turns in every round."""
    found = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def in_parts(
    count: int, unit: int, threads: int, part: Callable[[int, int], None], parts: int = 0
) -> None:
    """Run part(start, stop) over `count` in threads; starts are multiples of `unit`."""
    if parts:
        step = -(-count // (unit * parts)) * unit
        bounds = [(a, min(a + step, count)) for a in range(0, count, step)]
    else:
        bounds = parallel.split_range(count, unit, threads)
    parallel.run_tasks([partial(part, a, b) for a, b in bounds], threads)


def fill(out: Any, threads: int) -> None:
    """Fill with streaming stores."""
    in_parts(out.size, 1, threads, lambda a, b: stream_fill(out[a:b]))


def memcpy(out: Any, source: Any, threads: int) -> None:
    """Copy with the C library's memmove."""

    def part(a: int, b: int) -> None:
        ctypes.memmove(out[a:b].ctypes.data, source[a:b].ctypes.data, out[a:b].nbytes)

    in_parts(out.size, 1, threads, part)


class Ggml:
    """The ggml libraries of the package libggml-python, through ctypes, which releases the GIL."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("libggml")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("package libggml-python is not installed")
        folder = Path(next(iter(spec.submodule_search_locations)))
        self.library = ctypes.CDLL(str(next(folder.glob("lib*/libggml-base.so"))))
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def decoder(self, encoding: str) -> Callable[[Any, Any], None] | None:
        """Return `decode(raw, out)`, or None where ggml has no such function."""
        kind = encoding[:-1].lower() + "K" if encoding.endswith("_K") else encoding.lower()
        name = _WIDENERS.get(encoding, f"dequantize_row_{kind}")
        function = getattr(self.library, name, None)
        if function is None or ENCODINGS[encoding].ggml is None:
            return None

        def decode(raw: Any, out: Any) -> None:
            function(
                ctypes.c_void_p(raw.ctypes.data),
                ctypes.c_void_p(out.ctypes.data),
                ctypes.c_int64(out.size),
            )

        return decode

    def encoder(self, encoding: str) -> Callable[[Any, Any], None]:
        """Return `encode(x, out)` of rows."""
        kind = ENCODINGS[encoding].ggml
        assert kind is not None

        def encode(x: Any, out: Any) -> None:
            self.library.ggml_quantize_chunk(
                ctypes.c_int(kind),
                ctypes.c_void_p(x.ctypes.data),
                ctypes.c_void_p(out.ctypes.data),
                ctypes.c_int64(0),
                ctypes.c_int64(x.shape[0]),
                ctypes.c_int64(x.shape[1]),
                None,
            )

        return encode


def ggml() -> Ggml | None:
    """Return ggml, or None with a line on stderr."""
    try:
        return Ggml()
    except (ImportError, OSError, StopIteration) as error:
        print(f"no ggml: {error}", file=sys.stderr)
        return None


def libgguf_encoder(encoding: str, x: Any, threads: int) -> Task | None:
    """Return libgguf's encoder of all of `x` on its own threads, or None if not installed."""
    if importlib.util.find_spec("libgguf") is None:
        return None
    import libgguf

    os.environ["LIBGGUF_NUM_THREADS"] = str(threads)
    return partial(libgguf.quantize_rows, x, ENCODINGS[encoding].ggml)


def bitsandbytes_decoder(packed: Any, absmax: Any, count: int, threads: int) -> Task | None:
    """Return bitsandbytes' NF4 decoder of blocks of 64, or None if not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    import torch
    from bitsandbytes import functional

    torch.set_num_threads(threads)
    library: Any = functional
    state = library.QuantState(
        torch.from_numpy(absmax),
        shape=torch.Size((count // 4096, 4096)),
        code=library.get_4bit_type("nf4", device="cpu"),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
    )
    return partial(library.dequantize_4bit, torch.from_numpy(packed).reshape(-1, 1), state)


def bitsandbytes_encoder(x: Any, threads: int) -> Task | None:
    """Return bitsandbytes' NF4 encoder with blocks of 64, or None if not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    import torch
    from bitsandbytes import functional

    torch.set_num_threads(threads)
    library: Any = functional
    return partial(library.quantize_4bit, torch.from_numpy(x), quant_type="nf4", blocksize=64)


def reading_rate(rounds: int = 5) -> float:
    """Return the bytes a second at which numpy ORs 256 MiB together."""
    words = np.zeros(1 << 25, np.uint64)
    return words.nbytes / best({"read": lambda: np.bitwise_or.reduce(words)}, rounds)["read"]
