"""bitsandbytes' double quantization: the absmax values of a weight, themselves stored in 8 bits.

Source: bitsandbytes 0.50, functional.create_dynamic_map and quantize_4bit, csrc/cpu_ops.cpp. Bytes
equal those of its CPU library: it rounds through a table of 65,536 positions, so that a value
near the middle of two codes may go to the farther one (its CUDA kernel searches exactly). Its
offset is torch's mean, whose order of summation is followed for one thread; with more than 32,767
blocks torch's threads change the last bits of it.
"""

import numpy as np

from aprfmt.codecs.arithmetic import F32
from aprfmt.codecs.base import U8

GROUP = 256
_POSITIONS = 65536
_LANES, _STREAMS, _LEVELS = 8, 4, 4


def dynamic_map() -> F32:
    """Return the 256 ascending values of the signed dynamic 8-bit type, -0.993 to 1."""
    values = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for exponent in range(7):
        bounds = _linspace(1 << exponent)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        scaled = means * np.float32(10.0 ** (exponent - 6))
        values += [scaled, -scaled]
    return np.sort(np.concatenate(values))


def _linspace(steps: int) -> F32:
    """Return float32 [steps + 1] with the bits of torch.linspace(0.1, 1, steps + 1).

    torch counts up from the start and, in the second half, down from the end, with one rounding.
    """
    first, last = np.float32(0.1), np.float32(1)
    step = (last - first) / np.float32(steps)
    index = np.arange(steps + 1, dtype=np.float64)
    up = float(first) + float(step) * index  # exact in float64
    down = float(last) - float(step) * (steps - index)
    return np.where(index < (steps + 1) // 2, up, down).astype(np.float32)


def quantize_absmax(absmax: F32) -> tuple[U8, F32, F32]:
    """Return (codes uint8 [blocks], their scales [blocks / 256], offset as one float32)."""
    offset = torch_mean(absmax)
    rest = absmax - offset
    groups = -(-rest.size // GROUP)
    padded = np.zeros(groups * GROUP, np.float32)
    padded[: rest.size] = rest
    scales: F32 = np.abs(padded.reshape(groups, GROUP)).max(axis=1, initial=0)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    normal = np.clip(padded.reshape(groups, GROUP) * inverse[:, None], -1, 1)
    place = (normal + np.float32(1)) * np.float32(0.5) * np.float32(_POSITIONS - 1)
    codes = _position_codes()[(place + np.float32(0.5)).astype(np.int32)]
    codes[scales == 0] = 0
    return codes.reshape(-1)[: rest.size], scales, offset


def _position_codes() -> U8:
    """Return uint8 [65536]: the code nearest to each of 65536 positions from -1 to 1."""
    values = dynamic_map()
    middle = np.float32(0.5) * (values[:-1] + values[1:])
    twice = np.float32(2) * np.arange(_POSITIONS, dtype=np.float32)
    positions = np.float32(-1) + twice / np.float32(_POSITIONS - 1)
    codes: U8 = np.searchsorted(middle, positions, side="left").astype(np.uint8)
    return codes


def torch_mean(x: F32) -> F32:
    """Return the mean of float32 [n] with torch's bits.

    torch adds partial sums in a cascade; one thread is assumed.
    """
    # torch sums in lanes of a vector and in four streams of rows at a time,
    width = _LANES if x.size >= _LANES else 1
    rows = x[: x.size // width * width].reshape(-1, width)
    length = len(rows) // _STREAMS
    streams = rows[: length * _STREAMS].reshape(length, _STREAMS, width)
    # with partial sums on levels, each of which takes over after 2**power steps.
    power = max(4, max(length - 1, 0).bit_length() // _LEVELS)
    step, mask = 1 << power, (1 << power) - 1
    partial = np.zeros((_LEVELS, _STREAMS, width), np.float32)
    index = 0
    while index + step <= length:
        for _ in range(step):
            partial[0] += streams[index]
            index += 1
        for level in range(1, _LEVELS):
            partial[level] += partial[level - 1]
            partial[level - 1] = 0
            if index & mask << level * power:
                break
    # Rows left over, then the sum of levels, of streams, of lanes.
    for stream in streams[index:]:
        partial[0] += stream
    for level in range(1, _LEVELS):
        partial[0] += partial[level]
    lanes = partial[0]
    for row in rows[length * _STREAMS :]:
        lanes[0] += row
    for stream in range(1, _STREAMS):
        lanes[0] += lanes[stream]
    total = np.float32(0)
    for value in (*x[rows.size :], *lanes[0]):
        total += value
    result: F32 = np.array(total / np.float32(x.size), np.float32)
    return result
