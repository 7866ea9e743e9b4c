"""Checks whether a quantized tensor is what encoding a given float base gives.

A *side* is the tensor of file A or of file B, and the *base* the float model that it should be made
from. A side *derives* if encoding the base gives its bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import raw_parts
from aprfmt.codecs import decode, encode, quant_state
from aprfmt.codecs.base import Array
from aprfmt.errors import AprfmtError, ArchError, CodecError
from aprfmt.measure.bounds import fit_errors
from aprfmt.measure.coarse_steps import wide_steps_of_lattice
from aprfmt.measure.numbers import CHUNK
from aprfmt.measure.records import EQUAL, DerivationResult, TensorDiff
from aprfmt.model import Model, open_model
from aprfmt.quantizing.imatrix import ImportanceMatrix, read_imatrix
from aprfmt.quantizing.mixture import is_quantized
from aprfmt.quantizing.row_encoding import encode_rows
from aprfmt.tensors.view import View

HOPELESS = 0.5  # share of the first chunk's blocks beyond which a way of making is given up


@dataclass(frozen=True, slots=True)
class QuantRecipe:
    """One way to quantize: its arithmetic, and the float type that held the base before."""

    fma: Literal["fused", "strict"]
    through: str = ""

    def __str__(self) -> str:
        """Return the recipe in a few words."""
        return f"{self.fma}, through {self.through}" if self.through else self.fma


# Tried in this order: llama.cpp's converter writes F16 by default, and quantizes from there.
WAYS = tuple(
    QuantRecipe(fma, through) for through in ("", "F16", "BF16") for fma in ("fused", "strict")
)


class RequantizationOracle:
    """Judges quantized tensors by the float model that they should be made from."""

    def __init__(self, base: Model, imatrix: ImportanceMatrix | None = None) -> None:
        """Store the float model and the importance matrix, if one was used."""
        self.base, self.imatrix = base, imatrix

    def base_tensor(self, key: str) -> View | None:
        """Return the base's tensor of a role or name, or None; for a tied head, the embedding."""
        found = self.base.find(key)
        if found is not None or key != "output.weight":
            return found
        try:
            tied = self.base.hyper["tied_embeddings"]
        except ArchError:
            return None
        return self.base.roles.get("token_embd.weight") if tied else None

    def judge_if_readable(
        self,
        diff: TensorDiff,
        a: View | None,
        b: View | None,
        metadata: tuple[Mapping[str, object], ...],
    ) -> TensorDiff:
        """Return what `judge` gives, or `diff` unchanged if a side is missing or of another shape.

        An error of reading makes the pair UNREADABLE.
        """
        if a is None or b is None or diff.verdict in ("UNREADABLE", "SHAPE_DIFFERS"):
            return diff
        try:
            return self.judge(diff, a, b, metadata)
        except AprfmtError as error:
            return replace(diff, verdict="UNREADABLE", cause=f"base: {error}")

    def judge(
        self, diff: TensorDiff, a: View, b: View, metadata: tuple[Mapping[str, object], ...]
    ) -> TensorDiff:
        """Return `diff` with whether each quantized side derives from the base, and a verdict.

        It becomes WITHIN if all quantized sides derive from the base and the others equal it, and
        DIFFERENT if one does not derive, unless both sides are equal. `metadata` are those of both
        files: they tell whether an importance matrix was used.
        """
        base = self.base_tensor(diff.key)
        found: list[DerivationResult] = []
        equal = True
        for label, side, own_metadata in zip("ab", (a, b), metadata, strict=True):
            if not is_quantized(side.encoding.split("+")[0]):
                equal = equal and base is not None and self._has_same_values(side, base)
                continue
            found.append(replace(self._derive_side(diff.key, side, base, own_metadata), side=label))
        if not found:
            return diff
        diff = replace(diff, derivations=tuple(found))
        wrong = [one for one in found if one.derives is not True]
        if any(one.derives is False for one in wrong):
            verdict = diff.verdict if diff.verdict in EQUAL else "DIFFERENT"
            return replace(diff, verdict=verdict, cause=wrong[0].text)
        if wrong:
            return replace(diff, cause="; ".join(filter(None, (diff.cause, wrong[0].text))))
        if equal and diff.verdict in ("DIFFERENT", "WITHIN"):
            texts = {one.text: one.side.upper() for one in found}
            shown = [f"{side} {text}" for text, side in texts.items()]
            cause = found[0].text if len(shown) == 1 else "; ".join(shown)
            return replace(diff, verdict="WITHIN", cause=cause)
        return diff

    def _has_same_values(self, side: View, base: View) -> bool:
        """Return whether both tensors have the same shape and values (NaN equals NaN)."""
        if side.shape != base.shape:
            return False
        pairs = zip(base.chunks(CHUNK), side.chunks(CHUNK), strict=True)
        return all(np.array_equal(x, y, equal_nan=True) for (*_, x), (*_, y) in pairs)

    def _derive_side(
        self, key: str, side: View, base: View | None, metadata: Mapping[str, object]
    ) -> DerivationResult:
        """Return whether one quantized side derives from the base, or why that is unknown.

        `metadata` is that of the side's file, which may say that an importance matrix was used.
        """
        name = side.encoding
        if base is None or base.shape != side.shape:
            shape = "has no such tensor" if base is None else f"has shape {list(base.shape)}"
            return _unknown_derivation(f"the base {shape}")
        if is_quantized(base.encoding.split("+")[0]):
            return _unknown_derivation(f"the base is {base.encoding} itself")
        importance = self.imatrix.of(key) if self.imatrix is not None else None
        used = metadata.get("quantize.imatrix.file")
        if used is not None and self.imatrix is None:
            return _unknown_derivation(
                f"made with importance matrix {used}: name it with --imatrix"
            )
        try:
            if side.lattice is not None:
                return _derive_lattice(name, side, base)
            if side.parts:
                return _derive_packed(name, raw_parts(side.stored[0]), base)
            return _derive_blocks(name, side, base, importance)
        except CodecError as error:
            return _unknown_derivation(str(error))


def open_oracle(
    base: Path | str, imatrix: Path | str | None, arch: str | None
) -> RequantizationOracle:
    """Return the oracle with its base opened; the caller closes `oracle.base`."""
    matrix = None if imatrix is None else read_imatrix(Path(imatrix))
    return RequantizationOracle(open_model(base, arch=arch), matrix)


def _unknown_derivation(why: str) -> DerivationResult:
    """Return the result that it is not known whether the side derives, and why."""
    return DerivationResult(None, "", f"whether it derives from the base is not known: {why}")


def _derive_blocks(name: str, side: View, base: View, importance: Array | None) -> DerivationResult:
    """Return whether blocks equal the base's values encoded in any recipe of WAYS.

    If none gives all blocks, the result names the first differing block of the best recipe.
    Unknown where the blocks cannot be read row by row.
    """
    row, data, row_bytes = encoding_row(name), side.data, side.row_bytes
    if data is None or row_bytes is None:
        return _unknown_derivation(f"its {name} blocks cannot be read row by row")
    best: tuple[int, int, QuantRecipe] | None = (
        None  # blocks that differ, the first of them, the way
    )
    blocks = row_bytes // row.type_size  # in a row
    for way in WAYS:
        differ, first, seen = 0, -1, 0
        for start, stop, values in base.chunks(CHUNK):
            stored = np.frombuffer(data.window(start * row_bytes, stop * row_bytes), np.uint8)
            made = encode_rows(
                name,
                store_through(values, way),
                fma=way.fma,
                importance=importance,
                first=start,
                expert_rows=side.shape[-2] if len(side.shape) > 2 else 0,
            )
            again = np.frombuffer(made, np.uint8)
            wrong = (stored != again).reshape(-1, row.type_size).any(axis=1)
            if first < 0 and wrong.any():
                first = start * blocks + int(np.argmax(wrong))
            differ, seen = differ + int(wrong.sum()), seen + wrong.size
            if differ > HOPELESS * seen:
                break
        if not differ:
            weighed = ", with its importance matrix" if importance is not None else ""
            return DerivationResult(True, str(way), f"requantized from base, {way}{weighed}")
        if best is None or differ < best[0]:
            best = differ, first, way
    assert best is not None
    differ, block, way = best
    at, element = block // blocks, block % blocks * row.block_size
    last = element + row.block_size - 1
    return DerivationResult(
        False,
        str(way),
        f"block {block} (row {at}, elements {element}-{last}) does not derive from the base; "
        f"at least {differ} blocks do not ({way})",
        block,
        at,
        element,
    )


def store_through(values: Array, way: QuantRecipe) -> Array:
    """Return float32 values after being stored in the recipe's float type, if it has one."""
    values = np.asarray(values, np.float32)
    if not way.through:
        return values
    return decode(way.through, encode(way.through, values), values.shape)


def _derive_packed(name: str, raw: Mapping[str, memoryview], base: View) -> DerivationResult:
    """Return whether a bitsandbytes weight equals the base packed with the same options.

    `raw` are the bytes of the weight's stored tensors by suffix.
    """
    # Pack the base with the options that the weight's quant state has.
    state = quant_state.read_state(name, raw)
    options = {
        "blocksize": state.blocksize,
        "double_quantization": bool(state.nested_blocksize),
        "dtype": state.dtype,
    }
    made = encode(name, np.asarray(base.numpy(), np.float32), options=options)
    # The first block whose scale or codes differ.
    block: int | None = None
    for suffix, per in ((quant_state.ABSMAX, 1 if state.nested_blocksize else 4), ("", 0)):
        mine, other = np.frombuffer(raw[suffix], np.uint8), np.frombuffer(made[suffix], np.uint8)
        if mine.size != other.size or np.array_equal(mine, other):
            continue
        at = int(np.argmax(mine != other))
        found = at // per if per else 2 * at // state.blocksize
        block = found if block is None else min(block, found)
    if block is None and all(bytes(raw[suffix]) == made[suffix] for suffix in made):
        return DerivationResult(True, state.dtype, f"requantized from base, as {state.dtype}")
    if block is None:
        return DerivationResult(False, state.dtype, "its quant state does not derive from the base")
    first, columns = block * state.blocksize, max(base.shape[-1], 1)
    return DerivationResult(
        False,
        state.dtype,
        f"block {block} (row {first // columns}, elements {first % columns}-"
        f"{first % columns + state.blocksize - 1}) does not derive from the base",
        block,
        first // columns,
        first % columns,
    )


def _derive_lattice(name: str, side: View, base: View) -> DerivationResult:
    """Return whether a packed weight's errors from the base are those of a quantizer.

    Where a scheme leaves the choice of scales open, the copy's own are used. Its codes then have to
    be those of the base's values, or near them where the quantizer compensates errors, as GPTQ
    does.
    """
    # The errors of the copy in its own steps.
    lattice = side.lattice
    assert lattice is not None
    columns = max(base.shape[-1], 1)
    x, y = (np.asarray(v.numpy(), np.float64).reshape(-1, columns) for v in (base, side))
    step, low, high = (np.asarray(part, np.float64).reshape(x.shape) for part in lattice[:3])
    found = fit_errors(x, y, lattice)
    same = 100 * found.near
    wide = wide_steps_of_lattice(x, lattice) if found.how else None
    if wide is not None:
        row, column = wide.places[0]
        return DerivationResult(
            False, name, f"scales are too large for the base {wide.text()}", None, row, column
        )
    if found.how:
        return DerivationResult(
            True,
            name,
            f"requantized from base: {found.how}; {same:.4g} % of its codes are the base's under "
            f"its own scales, which are off by {100 * abs(found.slope):.2g} % together",
        )
    # The first value that is more than a step off and was not clipped.
    away = np.where(step > 0, np.abs(x - y) / np.where(step > 0, step, 1.0), 0.0)
    inside = (x >= np.minimum(low, high)) & (x <= np.maximum(low, high))
    far = np.flatnonzero((away > 1.0) & inside)
    at = int(far[0]) if far.size else int(np.argmax(away))
    return DerivationResult(
        False,
        name,
        f"row {at // columns}, element {at % columns} does not derive from the base under its own "
        f"scales: {same:.4g} % of its codes are the base's ({found.text()})",
        None,
        at // columns,
        at % columns,
    )
