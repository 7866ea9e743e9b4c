"""The CUDA kernels on one GPU: checked, then timed beside what else does the work.

    python -m tests.benchmarks.gpu_kernels [--json FILE] [--only decode,matvec,reduce,trace]

Times are medians over replays of CUDA graphs, on fresh random data that rotates where it would fit
the cache; results are checked against the codecs before. Bytes are those read plus those written,
shares are of the bandwidth of a device-to-device copy measured in the same run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import codec, decode_into
from aprfmt.inference.fast import cuda

WEIGHTS = 1 << 28
Row = dict[str, Any]
rows: list[Row] = []


def timed(launches: Sequence[Callable[[], None]], repeat: int = 15) -> float:
    """Return the median microseconds of one launch; all of them are one graph."""
    import cupy

    cupy.cuda.Device().synchronize()  # the inputs may still be in the making, on another stream
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for launch in launches:
            launch()
        stream.synchronize()
        stream.begin_capture()
        for launch in launches:
            launch()
        graph = stream.end_capture()
        times = []
        for _ in range(repeat + 3):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / len(launches))
    return float(np.median(times[3:]))


def torch_timed(function: Callable[[], Any], repeat: int = 15) -> float:
    """Return the median microseconds of what torch enqueues, from events around each."""
    torch: Any = import_module("torch")

    times = []
    for _ in range(repeat + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times[3:]))


def say(work: str, case: str, us: float, **more: Any) -> None:
    row = {"work": work, "case": case, "us": round(us, 2), **more}
    rows.append(row)
    rest = "  ".join(f"{name} {value}" for name, value in more.items())
    print(f"{work:10} {case:42} {us:10.2f} us  {rest}", flush=True)


def copy_bandwidth() -> float:
    """Return GB/s of a large copy, read and written bytes counted."""
    import torch

    a = torch.randint(0, 255, (1 << 32,), dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    us = torch_timed(lambda: b.copy_(a))
    bandwidth: float = 2 * a.numel() / us / 1e3
    say("ceiling", "copy of 4 GiB", us, GBps=round(bandwidth))
    return bandwidth


def random_blocks(encoding: str, count: int) -> Any:
    """Return random bytes on the GPU whose scales are finite: no 0x7c in a half's upper byte."""
    import cupy

    row = ENCODINGS[encoding]
    raw = cupy.random.randint(0, 256, (count // row.block_size, row.type_size), dtype=cupy.uint8)
    at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
    for place in at.get(encoding, (0, 2) if encoding in ("Q4_1", "Q5_1") else (0,)):
        raw[:, place + 1] = raw[:, place + 1] & 0x9F  # exponents below 8: |scale| < 2^-7
    return raw.reshape(-1)


def check(encoding: str, raw: Any, out: Any, dtype: str) -> None:
    """Compare both ends of a decoded tensor with the codec, bit for bit."""
    row, count = ENCODINGS[encoding], 1 << 16
    for start in (0, out.size - count):
        at = start // row.block_size * row.type_size
        part = raw[at : at + count // row.block_size * row.type_size].get()
        wanted = np.empty(count, np.float32)
        decode_into(encoding, part.tobytes(), wanted)
        if dtype == "bfloat16":
            import ml_dtypes

            wanted = wanted.astype(ml_dtypes.bfloat16)
        found = out[start : start + count].get()
        if not np.array_equal(found.view(f"u{found.itemsize}"), wanted.view(f"u{found.itemsize}")):
            raise SystemExit(f"{encoding} to {dtype}: bits differ from the codec's")


def bench_decode(bandwidth: float) -> None:
    import cupy

    stored = {"float32": "float32", "bfloat16": "uint16"}
    for encoding in ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "Q5_0", "Q3_K", "Q2_K", "BF16"):
        raw = random_blocks(encoding, WEIGHTS)
        for dtype in ("float32", "bfloat16"):
            if (encoding, dtype) == ("BF16", "bfloat16"):
                continue
            out = cupy.full(WEIGHTS, 0xA5A5, stored[dtype])
            cuda.decode(encoding, raw, out, dtype=dtype)
            check(encoding, raw, out, dtype)
            us = timed([partial(cuda.decode, encoding, raw, out, dtype=dtype)] * 3)
            speed = (raw.nbytes + out.nbytes) / us / 1e3
            say(
                "decode",
                f"{encoding} -> {dtype}",
                us,
                GBps=round(speed),
                of_copy=round(speed / bandwidth, 3),
            )
            del out
        del raw
    bench_coded(bandwidth)


def bench_coded(bandwidth: float) -> None:
    """NF4 with float32 absmax over blocks of 64, beside bitsandbytes."""
    import cupy

    packed = cupy.random.randint(0, 256, WEIGHTS // 2, dtype=cupy.uint8)
    absmax = cupy.random.random(WEIGHTS // 64, dtype=cupy.float32)
    code: Any = codec("NF4")
    table = cupy.asarray(code.code)
    for dtype, stored in (("float32", "float32"), ("bfloat16", "uint16")):
        out = cupy.full(WEIGHTS, 0xA5A5, stored)

        def launch(out: Any = out, dtype: str = dtype) -> None:
            cuda.decode_coded(packed, absmax, table, out, blocksize=64, dtype=dtype)

        launch()
        peer = bitsandbytes(packed, absmax, table, dtype, out)
        us = timed([launch] * 3)
        speed = (packed.nbytes + absmax.nbytes + out.nbytes) / us / 1e3
        say(
            "decode",
            f"NF4 -> {dtype}",
            us,
            GBps=round(speed),
            of_copy=round(speed / bandwidth, 3),
            **peer,
        )
        del out


def bitsandbytes(packed: Any, absmax: Any, table: Any, dtype: str, ours: Any) -> dict[str, Any]:
    """Return bitsandbytes' microseconds for the same, after comparing all bits with ours."""
    try:
        peer: Any = import_module("bitsandbytes.functional")
        torch: Any = import_module("torch")
    except ImportError as error:
        return {"bitsandbytes": f"NOT-RUN ({error})"}
    kind = getattr(torch, dtype)
    weight = torch.from_dlpack(packed).reshape(-1, 1)
    state = peer.QuantState(
        torch.from_dlpack(absmax), torch.Size([WEIGHTS]), torch.from_dlpack(table), 64, "nf4", kind
    )
    out = torch.empty(WEIGHTS, dtype=kind, device="cuda")
    peer.dequantize_4bit(weight, state, out=out)
    mine = torch.from_dlpack(ours).view(kind)
    same = bool(
        (
            mine.view(torch.int16 if kind is torch.bfloat16 else torch.int32)
            == out.view(torch.int16 if kind is torch.bfloat16 else torch.int32)
        ).all()
    )
    us = torch_timed(lambda: peer.dequantize_4bit(weight, state, out=out))
    return {"bitsandbytes": f"{us:.1f} us", "bits": "equal" if same else "DIFFER"}


def bench_matvec(bandwidth: float) -> None:
    import cupy
    import torch

    cases = [
        ("Q4_K", 14336, 4096, 10),
        ("Q4_K", 4096, 14336, 10),
        ("Q4_K", 114688, 4096, 2),
        ("Q4_K", 4096, 4096, 30),
        ("Q6_K", 14336, 4096, 8),
        ("Q8_0", 14336, 4096, 6),
        ("Q5_K", 14336, 4096, 8),
        ("Q4_0", 14336, 4096, 10),
        ("Q8_0", 151936, 896, 3),
        ("Q6_K", 4096, 14336, 8),
    ]
    for encoding, n, k, copies in cases:
        raws = [random_blocks(encoding, n * k) for _ in range(copies)]
        x = cupy.random.standard_normal(k, dtype=cupy.float32)
        y = cupy.full(n, cupy.nan, cupy.float32)
        w = cupy.empty(n * k, cupy.float32)
        cuda.decode(encoding, raws[0], w)
        exact = (
            w.reshape(n, k).astype(cupy.float64) @ x.astype(cupy.float64)
            if n * k < 1 << 27
            else None
        )
        for tensor in (True, False) if encoding == "Q4_K" else (False,):
            cuda.matvec(encoding, raws[0], x, y, tensor_cores=tensor)
            wrong = float("nan")
            if exact is not None:
                wrong = float(cupy.linalg.norm(y - exact) / cupy.linalg.norm(exact))
                if not wrong < 1e-6:
                    raise SystemExit(f"{encoding} {n}x{k}: relative error {wrong}")
            us = timed([partial(cuda.matvec, encoding, r, x, y, tensor_cores=tensor) for r in raws])
            speed = (raws[0].nbytes + x.nbytes + y.nbytes) / us / 1e3
            say(
                "matvec",
                f"{encoding} {n}x{k}{' tensor cores' if tensor else ''}",
                us,
                GBps=round(speed),
                of_copy=round(speed / bandwidth, 3),
                error=f"{wrong:.1e}",
            )
        del raws, w, exact
    ws = [torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    xs = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

    def peers() -> None:
        for w in ws:
            torch.nn.functional.linear(xs, w)

    graph = torch.cuda.CUDAGraph()
    peers()
    with torch.cuda.graph(graph):
        peers()
    say("matvec", "peer: cuBLAS bf16 14336x4096", torch_timed(graph.replay) / 4)


def bench_reduce(bandwidth: float) -> None:
    import cupy
    import torch

    room = cupy.zeros(cuda.WORKSPACE)
    result = cupy.zeros(cuda.RESULT)
    for shape in ((512, 896), (512, 4864), (512, 151936), (1 << 28,)):
        a = torch.randn(shape, device="cuda")

        def torch_stats(a: Any = a) -> Any:
            return (
                a.mean(dtype=torch.float64),
                a.std(unbiased=False),
                a.min(),
                a.max(),
                a.abs().max(),
                torch.linalg.vector_norm(a, dtype=torch.float64),
                a.isnan().sum(),
                a.isinf().sum(),
                (a == 0).sum(),
            )

        times = 20 if a.numel() < 1 << 22 else 3
        us = timed([partial(cuda.launch_stats, a, result, room)] * times)
        found = cuda.to_stats(a.numel(), result.get())
        wanted = float(a.mean(dtype=torch.float64))
        if found.mean is None or abs(found.mean - wanted) > 1e-9 or found.count != a.numel():
            raise SystemExit(f"statistics of {shape}: mean {found.mean}, torch {wanted}")
        say(
            "stats",
            f"float32 {shape}",
            us,
            GBps=round(4 * a.numel() / us / 1e3),
            torch=f"{torch_timed(torch_stats):.1f} us",
        )
        del a


def bench_trace(bandwidth: float) -> None:
    """Plain and traced prefill of a qwen2 of 0.5B shape through the cupy backend, float32."""
    from tests.benchmarks.shapes import qwen2_session

    for dtype in ("float32", "bfloat16"):
        with qwen2_session("cupy", dtype) as (session, ids):
            times: dict[str, float] = {}
            points = tuple(session.points)
            fused = tuple(key for key in points if not key.endswith((".scores", ".probs")))
            for name, wanted in (
                ("plain", None),
                ("trace of fused points", fused),
                ("trace of all points", points),
            ):
                taken = []
                for _ in range(6):
                    session.truncate()
                    begin = time.perf_counter()
                    if wanted is None:
                        session.backend.to_numpy(session._run_pass(ids, None, None, "last"))
                    else:
                        session.trace(ids, wanted)
                    taken.append(time.perf_counter() - begin)
                times[name] = float(np.median(taken[2:]))
                say(
                    "forward",
                    f"cupy {dtype} 512 tokens, {name}",
                    times[name] * 1e6,
                    of_plain=round(times[name] / times["plain"], 3),
                )
            session.prefill(ids[:32])
            taken = []
            for token in ids[32:96]:
                begin = time.perf_counter()
                session.step(token)
                taken.append(time.perf_counter() - begin)
            say("forward", f"cupy {dtype} step", float(np.median(taken[8:])) * 1e6)
            facts = session.backend.facts()
            print({k: facts[k] for k in ("memory_peak", "weights_held", "weights_streamed")})


BENCHES = {
    "decode": bench_decode,
    "matvec": bench_matvec,
    "reduce": bench_reduce,
    "trace": bench_trace,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", default=",".join(BENCHES))
    options = parser.parse_args()
    try:
        from aprfmt.inference.fast.cupy_backend import CupyBackend

        facts = dict(CupyBackend("cuda", "float32").facts())
    except Exception as error:  # no cupy, no GPU
        print(f"NOT-RUN: {error}")
        return 2
    print(facts["device_name"], facts["driver"], facts["versions"])
    bandwidth = copy_bandwidth()
    for name in options.only.split(","):
        BENCHES[name](bandwidth)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"facts": facts, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
