from typing import Any, overload

Buffer = Any  # whatever offers contiguous bytes: bytes, memoryview, mmap, array, numpy array

def decode(index: int, raw: Buffer, out: Any, stream: int = -1, /) -> None: ...
def decode_rows(index: int, raw: Buffer, columns: int, first: int, out: Any, /) -> None: ...
def decode_apr_q8(raw: Buffer, out: Any, first: int = -1, /) -> None: ...
def decode_coded(
    packed: Buffer,
    absmax: Any,
    code: Any,
    block: int,
    out: Any,
    first: int = 0,
    to: int = 0,
    stream: int = -1,
    /,
) -> None: ...
def decode_packed(
    streams: Buffer,
    bits: int,
    values: Any,
    at: tuple[int, int, int],
    numbers: tuple[Any, ...],
    tables: tuple[Any, ...],
    group: Any,
    out: Any,
    stream: int = -1,
    /,
) -> None: ...
def recode_packed(
    encoder: int,
    decoder: int,
    out: Any,
    streams: Buffer,
    bits: int,
    values: Any,
    at: tuple[int, int, int],
    numbers: tuple[Any, ...],
    tables: tuple[Any, ...],
    group: Any,
    /,
) -> tuple[int, int, int]: ...
def decode_across(
    order: str,
    held: Any,
    bits: int,
    values: Any,
    at: tuple[int, int, int],
    numbers: tuple[Any, ...],
    tables: tuple[Any, ...],
    group: Any,
    out: Any,
    stream: int = -1,
    /,
) -> None: ...
def halves(codes: Buffer, half: int, out: Any, back: bool = False, /) -> None: ...
def regroup(
    codes: Buffer,
    size: int,
    values: Any,
    before: tuple[Any, ...],
    after: tuple[Any, ...],
    most: float,
    /,
) -> tuple[int, float]: ...
def turn(order: str, held: Buffer, first: int, out: Any, /) -> None: ...
@overload
def encode(
    index: int, x: Any, out: None, columns: int, importance: Any = None, fused: bool = True, /
) -> bytes: ...
@overload
def encode(
    index: int, x: Any, out: Any, columns: int, importance: Any = None, fused: bool = True, /
) -> None: ...
def encode_coded(
    x: Any, packed: Any, absmax: Any, block: int, bounds: Any, order: Buffer, /
) -> None: ...
def moments(
    index: int, raw: Buffer, count: int, part: int, threads: int, /
) -> list[tuple[int, int, int, int, int, float, float, float, float]]: ...
def moments_rows(
    pieces: tuple[tuple[int, Buffer, int, int, int], ...],
    width: int,
    skip: int,
    count: int,
    part: int,
    threads: int,
    /,
) -> list[tuple[int, int, int, int, int, float, float, float, float]]: ...
def changes(before: Any, after: Any, index: int = -1, /) -> tuple[int, int, int]: ...
def apart(x: Any, y: Any, /) -> tuple[float, float, float, int, int, int, int, int, int, int]: ...
def apart_rows(
    x: tuple[tuple[tuple[int, Buffer, int, int, int], ...], int, int],
    y: tuple[tuple[tuple[int, Buffer, int, int, int], ...], int, int],
    count: int,
    /,
) -> tuple[float, float, float, int, int, int]: ...
def distances(
    x: Any, y: Any, steps: Any, known: float, /
) -> tuple[int, int, float, float, float, float, float, int, float, int] | None: ...
def first_not_finite(x: Any, /) -> int: ...
def walk_strings(
    buffer: Buffer, offset: int, count: int, swapped: bool, /
) -> tuple[bytes, int]: ...
def level() -> str: ...
def levels() -> list[str]: ...
def force(level: str, /) -> None: ...
def decoders() -> list[tuple[str, int, int]]: ...
def encoders() -> list[tuple[str, int, int]]: ...
def set_grid(name: str, entries: bytes, /) -> None: ...
def matmuls(
    jobs: tuple[tuple[int, Any, Buffer, Any], ...], tokens: int, threads: int, /
) -> None: ...
def rms_norm(x: Any, weight: Any, out: Any, eps: float, offset: float, threads: int, /) -> None: ...
def rope(
    x: Any, cos: Any, sin: Any, out: Any, heads: int, width: int, interleaved: bool, /
) -> None: ...
def activate(kind: int, x: Any, up: Any, out: Any, threads: int, /) -> None: ...
def softmax(
    scores: Any,
    sinks: Any,
    shape: tuple[int, int, int],
    cached: int,
    window: int,
    scale: float,
    softcap: float,
    threads: int,
    /,
) -> None: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    probs: Any,
    out: Any,
    shape: tuple[int, int, int, int, int, int],
    cached: int,
    window: int,
    scale: float,
    softcap: float,
    threads: int,
    /,
) -> None: ...
def stream_fill(out: Any, /) -> None: ...
