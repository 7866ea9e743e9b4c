"""Encode the rows of a tensor on several threads; the only place that cuts a weight for this."""

from collections.abc import Callable
from typing import Any, Literal

from numpy.typing import NDArray

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.processors import cpu_count
from aprfmt.codecs import encode
from aprfmt.codecs.parallel import run_tasks
from aprfmt.errors import CodecError

SMALLEST = 1 << 14  # elements below which encoding is not worth a separate thread


def encode_rows(
    encoding: str,
    values: NDArray[Any],
    *,
    fma: Literal["fused", "strict"] = "fused",
    importance: NDArray[Any] | None = None,
    first: int = 0,
    expert_rows: int = 0,
    threads: int = 0,
) -> bytes:
    """Return the encoded blocks of whole rows `values` [..., columns].

    `importance` weighs columns. If it holds several rows of columns, each of them applies to
    `expert_rows` rows of the tensor; `first` is the number of the tensor's row that `values` begin
    with. `threads` 0 means every processor. Raises CodecError as the codecs do, and for an encoding
    that needs companion tensors.
    """
    # Cut the rows into pieces that are worth a thread.
    workers = threads or cpu_count()
    columns = max(values.shape[-1] if values.ndim else 1, 1)
    rows = values.reshape(-1, columns)
    own = importance is not None and importance.size > columns
    step = max(1, -(-len(rows) // workers), SMALLEST // columns)
    if encoding_row(encoding).flat:
        step = max(1, len(rows))  # blocks cross row ends
    # A piece ends where another expert's importance begins.
    cuts: list[tuple[int, int, Any]] = []
    start = 0
    while start < len(rows):
        stop, weights = min(start + step, len(rows)), importance
        if own and importance is not None:
            expert, inside = divmod(first + start, expert_rows)
            stop = min(stop, start + expert_rows - inside)
            weights = importance[expert * columns : (expert + 1) * columns]
        cuts.append((start, stop, weights))
        start = stop
    pieces: list[bytes] = [b""] * max(1, len(cuts))

    def make_task(index: int) -> Callable[[], None]:
        """Return the function that encodes range number `index` of the rows into `pieces`."""
        low, high, weights = cuts[index] if cuts else (0, 0, importance)

        def encode_piece() -> None:
            """Encode one range of the rows and put the bytes into `pieces`.

            Raises CodecError for an encoding that needs more than one stored tensor.
            """
            part = values if len(pieces) == 1 else rows[low:high]
            found = encode(encoding, part, fma=fma, importance=weights)
            if list(found) != [""]:
                raise CodecError(f"{encoding}: needs companion tensors in addition to its blocks")
            pieces[index] = bytes(found[""])

        return encode_piece

    run_tasks([make_task(index) for index in range(len(pieces))], workers)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
