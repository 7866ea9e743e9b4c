"""Write codes and scales as the blocks of a GGUF encoding.

A *group* is the elements that share one scale.

The half of a repack that writes. `repack_sources` and `repack_blocks` read. A *member* is a field
of a block, such as its scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from aprfmt.codecs import codec, decode, encode, native_kernels
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.bits import pairs_to_halves
from aprfmt.codecs.grids import Groups
from aprfmt.errors import CodecError

_CHUNK = 1 << 19  # codes put into blocks at a time

BlockMembers = Mapping[str, Array]  # member of a block -> [rows, groups], as the block stores it


@dataclass(frozen=True)
class RepackTarget:
    """A row of the table of targets: how blocks of a GGUF encoding are made.

    `group` is the smallest number of inputs under one of its scales. `half` is the number of bytes
    in a run of codes whose low nibbles come before the high ones. `numbers(groups)` returns the
    members of blocks, or raises CodecError where they cannot hold the numbers. `fits` is true where
    every member equals the number that was given. `stored(groups, numbers)` returns the groups as
    the blocks store them; both are of some rows.
    """

    name: str
    group: int
    half: int
    numbers: Callable[[Groups], BlockMembers]
    fits: Callable[[Groups, BlockMembers], bool]
    stored: Callable[[Groups, BlockMembers], Groups]

    def blocks(self, codes: U8, numbers: BlockMembers) -> U8:
        """Return blocks, uint8 [rows, bytes], of codes [rows, columns/2], the low nibble first.

        `numbers` are the other members of the blocks, [rows, groups] each.
        """
        kind = codec(self.name)
        assert kind.layout is not None
        rows, columns = len(codes), codes.shape[1] * 2
        made = np.empty((rows, columns // kind.block_size), kind.layout)
        step, native = max(1, _CHUNK // max(columns, 1)), native_kernels()
        if native is not None:
            qs = made["qs"].reshape(-1, made["qs"].shape[-1])
            native.halves(np.ascontiguousarray(codes).reshape(qs.shape), self.half, qs)
        for start in range(0, 0 if native is not None else rows, step):
            some = slice(start, start + step)
            turned = pairs_to_halves(codes[some].reshape(-1, self.half))
            made["qs"][some] = turned.reshape(made["qs"][some].shape)
        for name, held in numbers.items():
            times = columns // self.group // held.shape[1]
            each = held if times == 1 else np.repeat(held, times, axis=1)
            _store_numbers(each, made[name])
        return made.view(np.uint8).reshape(rows, -1)


def _store_numbers(numbers: Array, members: Array) -> None:
    """Write numbers [rows, groups] into `members`, one field of all blocks' records.

    `members` is [rows, blocks], or [rows, blocks, groups of a block].
    """
    if members.ndim == 2:
        members[...] = numbers.reshape(members.shape)
        return
    one = np.dtype(f"u{members.itemsize * members.shape[2]}")
    held = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, one.itemsize).view(one)
    members.view(one)[...] = held.reshape((*members.shape[:2], 1))


def _to_float16(what: str, numbers: Array) -> Array:
    """Return numbers as float16; CodecError where one is too large for it, or not finite.

    `what` names the numbers in the error.
    """
    with np.errstate(all="ignore"):
        if numbers.dtype == np.float32:
            raw = encode("F16", np.ascontiguousarray(numbers))[""]
            found: Array = np.frombuffer(raw, "<f2").reshape(numbers.shape)
        else:
            found = numbers.astype("<f2")
    if (found.view(np.uint16) & 0x7C00).max(initial=0) == 0x7C00:  # numpy's isfinite is far slower
        index = [int(i) for i in np.argwhere(~np.isfinite(found))[0]]
        raise CodecError(f"{what} {numbers[tuple(index)]} at {index} is beyond float16")
    return found


def _to_float32(stored: Array) -> F32:
    """Return stored float16 numbers as float32."""
    raw = np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data
    found: F32 = decode("F16", raw, stored.shape)
    return found


def _is_unchanged(exact: Array, stored: Array) -> bool:
    """Return whether float16 `stored` equals float32 `exact`, so that nothing was rounded."""
    return bool(np.array_equal(exact, _to_float32(stored)))


def _make_q4_0(groups: Groups) -> BlockMembers:
    """Return {"d": float16 scales} of Q4_0's blocks; CodecError for groups with offsets."""
    if groups.offset is not None:
        raise CodecError(f"{groups.why}, and Q4_0 has no minimum")
    return {"d": _to_float16("scale", groups.scale)}


def _make_q4_1(groups: Groups) -> BlockMembers:
    """Return {"d": float16 scales, "m": float16 minimums} of Q4_1's blocks.

    Without an offset the minimum is -8 times the scale.
    """
    offset = -8 * groups.scale if groups.offset is None else groups.offset
    return {"d": _to_float16("scale", groups.scale), "m": _to_float16("minimum", offset)}


def _fits_q4_1(groups: Groups, numbers: BlockMembers) -> bool:
    """Return whether Q4_1's stored scales and minimums equal those of the groups exactly."""
    offset = -8 * groups.scale if groups.offset is None else groups.offset
    return _is_unchanged(groups.scale, numbers["d"]) and _is_unchanged(offset, numbers["m"])


def _make_mxfp4(groups: Groups) -> BlockMembers:
    """Return {"e": exponents} of MXFP4's blocks, the bytes of the scales."""
    return {"e": groups.scale}


def _make_nvfp4(groups: Groups) -> BlockMembers:
    """Return {"d": scales} of NVFP4's blocks, the bytes of the scales with the sign bit cleared."""
    return {"d": groups.scale & 0x7F}  # -0 is the one number with a sign that a source may have


def _stored_scales(groups: Groups, made: BlockMembers) -> Groups:
    """Return the scales that Q4_0 blocks store as `Groups`, rounded to float16."""
    return Groups(groups.size, _to_float32(made["d"]))


def _stored_scales_and_minima(groups: Groups, made: BlockMembers) -> Groups:
    """Return the scales and minimums that Q4_1 blocks store as `Groups`, rounded to float16."""
    return Groups(groups.size, _to_float32(made["d"]), _to_float32(made["m"]))


def _stored_bytes(member: str) -> Callable[[Groups, BlockMembers], Groups]:
    """Return a function that gives groups with the scales that blocks store, from a byte field.

    It takes the groups and the members of the blocks, whose member `member` has the scales.
    """
    return lambda groups, made: replace(groups, scale=made[member], divisor=None)


TARGETS: Mapping[str, RepackTarget] = {
    row.name: row
    for row in (
        RepackTarget(
            "Q4_0",
            32,
            16,
            _make_q4_0,
            lambda groups, made: _is_unchanged(groups.scale, made["d"]),
            _stored_scales,
        ),
        RepackTarget("Q4_1", 32, 16, _make_q4_1, _fits_q4_1, _stored_scales_and_minima),
        RepackTarget("MXFP4", 32, 16, _make_mxfp4, lambda groups, made: True, _stored_bytes("e")),
        RepackTarget(
            "NVFP4", 16, 8, _make_nvfp4, lambda groups, made: groups.exact, _stored_bytes("d")
        ),
    )
}
