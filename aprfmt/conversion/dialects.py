"""Outputs that store weights in a dialect's several tensors (GPTQ, MLX, NVFP4, ...).

A *dialect* is a library's layout of packed weights, and a *writer* stores weights in one. A *grid*
is a weight's codes with the scales of its groups. A *stack* is the experts of a layer as one
tensor.

Which dialect and how, the scheme says (`packing` of the options). A weight whose codes stand in
blocks, or in another dialect, on the very grid that is asked for keeps its codes: that is no second
quantization.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aprfmt.arch.engine_parameters import parts_of_one_factor
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output
from aprfmt.conversion.packed_weights import PackedWeight, has_companions
from aprfmt.conversion.repacking import ScaledTensor
from aprfmt.errors import CodecError, ConversionError
from aprfmt.quantizing.mixture import EMBEDDINGS, base_name
from aprfmt.tensors.runs import RunBytes

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.grids import GridWeight
    from aprfmt.codecs.repacks import GroupCounts
    from aprfmt.codecs.writer import Settings, Writer
    from aprfmt.model import Model

HEAD = "lm_head"
_FLOATS = ("F32", "F16", "BF16")
_CHUNK = 1 << 22  # elements compared at a time
_ACTIVATIONS = "input_scale"  # stands next to ModelOpt's weights where calibration gave it


@dataclass
class LatestGrid:
    """The weight whose codes were made last, so that only one weight's are in memory.

    `most` is the largest magnitude of each weight that shares a factor with others, by name.
    """

    name: str = ""
    source: "GridWeight | None" = None
    most: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class DialectWeight(PackedWeight):
    """One weight to be stored in a dialect's tensors, made when they are written."""

    writer: "Writer" = field(kw_only=True)
    settings: "Settings" = field(kw_only=True)
    output: Output = field(kw_only=True)
    latest: LatestGrid = field(kw_only=True)
    # {name of a companion tensor: its float32 numbers}
    companion_bytes: Mapping[str, bytes] = field(kw_only=True, default_factory=dict)
    joined: Sequence[Output] = field(kw_only=True, default=())  # share its factor of the whole

    def part(self, suffix: str) -> bytes:
        """Return the bytes of the stored tensor `suffix`; "" is the one that holds the codes.

        Raises ConversionError for a weight that the layout cannot store.
        """
        if suffix.lstrip(".") in self.companion_bytes:
            return self.companion_bytes[suffix.lstrip(".")]
        try:
            made = self.writer.part(self.source(), suffix or self.writer.main, self.settings)
        except CodecError as error:
            raise ConversionError(f"{self.name}: {error}") from error
        if not suffix and not self.counted:
            self._count_changes()
        return made

    def source(self) -> "GridWeight":
        """Return the weight's codes and scales as they will be stored.

        They are made again only if another weight's were made since.
        """
        if self.latest.name != self.name or self.latest.source is None:
            self.latest.name, self.latest.source = self.name, self._make_grid()
        return self.latest.source

    def _make_grid(self) -> "GridWeight":
        """Return the weight's own codes in this layout, else its values rounded to codes.

        Raises ConversionError for a weight that the layout cannot store.
        """
        found = convert_codes(self.output, self.writer, self.settings)
        if not isinstance(found, str):
            self.judged = found[1]
            return found[0]
        try:
            most = max(map(self._find_largest, self.joined), default=0.0)
            return self.writer.quantize(self._row_values(), self.settings._replace(most=most))
        except CodecError as error:
            raise ConversionError(f"{self.name}: {error}") from error

    def _find_largest(self, output: Output) -> float:
        """Return the largest magnitude of the weight `output`; only the first call reads it."""
        if output.info.name not in self.latest.most:
            values = output.make()
            most = max(float(values.max(initial=0)), -float(values.min(initial=0)))
            self.latest.most[output.info.name] = most if math.isfinite(most) else 0.0
        return self.latest.most[output.info.name]

    def _count_changes(self) -> None:
        """Add to `counts` the values that rounding changed.

        Nothing is added for a repacked weight, whose changes were counted by groups before.
        """
        self.counted = True
        if self.judged is not None:
            return
        source, values = self.source(), self._row_values()
        step = max(1, _CHUNK // max(self.shape[-1], 1))
        for start in range(0, len(values), step):
            stop = min(start + step, len(values))
            self.counts.add(values[start:stop], source.values(start, stop))

    def _row_values(self) -> "Array":
        """Return the weight's values as [rows, inputs]; a stack's experts follow one another."""
        return self.make().reshape(-1, self.shape[-1])

    def infos(self, main: str) -> dict[str, TensorInfo]:
        """Return {suffix: stored tensor}, where "" is the one that holds the codes.

        Sets `nbytes`, their bytes together. `main` is not used: the dialect gives the names.
        """
        stem = self.name.removesuffix(".weight")
        found = {}
        stored = dict(self.writer.stored(self.shape, self.settings))
        for suffix, part in stored.items():
            row = find_encoding(part.encoding)
            found[suffix if suffix != self.writer.main else ""] = TensorInfo(
                stem + suffix,
                part.shape,
                part.encoding,
                0,
                row.nbytes(part.shape),
                row.row_bytes(part.shape),
            )
        for name, data in self.companion_bytes.items():
            shape = () if len(data) == 4 else (len(data) // 4,)
            found[f".{name}"] = TensorInfo(f"{stem}.{name}", shape, "F32", 0, len(data), None)
        self.nbytes = sum(info.nbytes for info in found.values())
        return found


def dialect_writer(options: Options) -> "Writer | None":
    """Return the writer that the options' scheme names; None where it names none."""
    if options.writer is None:
        return None
    from aprfmt.codecs.writers import WRITERS

    return WRITERS[options.writer]


def make_dialect_weight(
    output: Output,
    writer: "Writer",
    options: Options,
    dtype: str,
    latest: LatestGrid,
    joined: Sequence[Output] = (),
) -> DialectWeight:
    """Return a weight as it will be stored in the writer's tensors.

    `output` is the planned tensor. `dtype` is that of its scales where neither layout nor source
    says it. `latest` keeps the codes made last, which several stored tensors share. `joined` are
    the other weights that engines join with it, as `joined_outputs` lists them. Raises
    ConversionError for a tensor that is no matrix, or no stack of experts where the layout stores
    stacks.
    """
    if len(output.info.shape) != 2 + writer.stacked:
        what = "stacks [experts, out, in]" if writer.stacked else "matrices [out, in]"
        raise ConversionError(
            f"{output.info.name}: has shape {list(output.info.shape)}; {writer.encoding} stores "
            f"{what}: leave it as it is with --tensor PATTERN=ENCODING"
        )
    return DialectWeight(
        output.info.name,
        writer.encoding,
        output.info.shape,
        output.make,
        writer=writer,
        settings=_settings(output, writer, options, dtype),
        output=output,
        latest=latest,
        companion_bytes=_activation_scales(output, writer),
        joined=joined if writer.shares else (),
    )


def joined_outputs(outputs: Sequence[Output]) -> Mapping[str, Sequence[Output]]:
    """Return {name: the weights that engines fuse with this one into one product, itself included}.

    Such are q, k and v, or gate and up. Weights of different encodings are left out. Each expert is
    fused only with its own weights.
    """
    held: dict[str, list[Output]] = {}
    for output in outputs:
        for role in output.spellings:
            held.setdefault(role, []).append(output)
    found: dict[str, Sequence[Output]] = {}
    for parts in parts_of_one_factor(held):
        if len({one.info.encoding for one in parts}) == 1:
            found |= dict.fromkeys((one.info.name for one in parts), parts)
    return found


def _settings(output: Output, writer: "Writer", options: Options, dtype: str = "F32") -> "Settings":
    """Return how the writer stores a weight: group size, encoding of its scales, version.

    The layout says the encoding of the scales, else the weight's source, else it is `dtype`.
    """
    from aprfmt.codecs.writer import Settings

    size = options.packing.get("size") or output.info.shape[-1]
    scales = writer.scales or _scale_encoding(output) or dtype
    return Settings(
        size, scales, options.packing.get("version", 1), bool(_activation_scales(output, writer))
    )


def _scale_encoding(output: Output) -> str:
    """Return the encoding of a weight's scales that its source implies, or "" if it implies none.

    It is a float weight's own encoding, that of a packed weight's scales, or F16 for blocks.
    """
    if output.source_encoding in _FLOATS:
        return output.source_encoding
    if output.runs is not None:
        return "F16"
    parts = output.sources[0].parts if len(output.sources) == 1 else {}
    found = (part.info.encoding for key, part in parts.items() if key.endswith(("scale", "scales")))
    return next((name for name in found if name in _FLOATS), "")


def _activation_scales(output: Output, writer: "Writer") -> Mapping[str, bytes]:
    """Return {"input_scale": bytes} if the layout is ModelOpt's and the source has one, else {}."""
    one = output.sources[0] if len(output.sources) == 1 else None
    if not isinstance(one, ScaledTensor) or writer.encoding != "MODELOPT":
        return {}
    scales = one.companion_bytes.get(_ACTIVATIONS)
    return {} if scales is None else {_ACTIVATIONS: scales}


def convert_codes(
    output: Output, writer: "Writer", settings: "Settings"
) -> "tuple[GridWeight, GroupCounts] | str":
    """Return (a packed weight's codes in the writer's layout, counts of what changes), or a text.

    The text says why the codes of `output` cannot be kept. It is "" where the table has no repack
    for these encodings. `settings` are the group size and dtypes of the new layout.
    """
    from aprfmt.codecs.writers import PAIRS, READS

    if writer.encoding not in PAIRS.get(output.source_encoding, ()):
        return ""
    try:
        if output.source_encoding not in READS:
            return writer.repack(_blocks_as_grid(output), settings)
        one = output.sources[0] if len(output.sources) == 1 else None
        if one is None or one.packed is None or output.steps or one.info.shape != output.info.shape:
            return "its rows are laid out anew"
        micro = "NVFP4" if settings.size == 16 else "MXFP4"
        source = READS[output.source_encoding](one.packed(), micro)
        return writer.repack(source, settings)
    except CodecError as error:
        return str(error)


def _check_alone(outputs: Sequence[Output], model: "Model", options: Options) -> None:
    """Raise ConversionError if other weights are or would be packed in another way.

    A folder has one quantization method: that of the scheme in the options.
    """
    parts = {id(part): view for view in model.values() for part in view.parts.values()}
    for output in outputs:
        if has_companions(output.info.encoding):
            raise ConversionError(
                f"{output.info.name}: {output.info.encoding} with {options.quantize} is a folder "
                "that no library loads; choose a plain float for it"
            )
        stays = next((parts[id(one)] for one in output.sources if id(one) in parts), None)
        if stays is not None:
            raise ConversionError(
                f"{model.path}: {stays.name} is packed as {stays.encoding} already and would stay "
                f"so with {options.quantize}; start from the float model, or decode it with "
                "--tensor PATTERN=BF16"
            )


def _blocks_as_grid(output: Output) -> "GridWeight":
    """Return a weight stored in GGUF blocks as codes and scales.

    Raises CodecError where its rows are not copied whole, or where it is made of several tensors
    that have scale tensors.
    """
    import numpy as np

    from aprfmt.codecs.repack_blocks import grid_of_blocks

    row = find_encoding(output.source_encoding).row_bytes(output.info.shape)
    if output.runs is None or row is None:
        raise CodecError("its rows are laid out anew")
    data, size = RunBytes(output.runs), row
    scales = {
        one.companion_bytes.get("scale", b"")
        for one in output.sources
        if isinstance(one, ScaledTensor)
    }
    if len(scales) > 1 or (scales and len(output.sources) > 1):
        raise CodecError("it is made of tensors with scales of their own")
    held = next(iter(scales), b"")
    return grid_of_blocks(
        output.source_encoding,
        (math.prod(output.info.shape[:-1]), output.info.shape[-1]),
        lambda start, stop: data.window(start * size, stop * size),
        np.frombuffer(held, "<f4") if held else None,
    )


def choose_kept_codes(
    outputs: Sequence[Output], model: "Model", options: Options
) -> tuple[set[str], dict[str, str]]:
    """Return (names of outputs whose codes are kept, {name: why the codes are not kept}).

    Raises ConversionError where keeping codes would change values, unless --allow-inexact is given,
    and where other weights are packed in a way that the same configuration cannot describe.
    """
    writer, path = dialect_writer(options), model.path
    if writer is not None:
        _check_alone(outputs, model, options)
    kept: dict[str, GroupCounts] = {}
    reasons: dict[str, str] = {}
    # Try to keep the codes of each weight in this dialect.
    for output in outputs if writer is not None else ():
        assert writer is not None
        if output.info.encoding != writer.encoding or output.source_encoding == writer.encoding:
            continue
        found = convert_codes(output, writer, _settings(output, writer, options))
        if isinstance(found, str):
            reasons[output.info.name] = found
        else:
            kept[output.info.name] = found[1]
    # Refuse changed values unless the options allow them.
    changed = {name: one for name, one in kept.items() if one.inexact}
    if changed and not options.allow_inexact:
        worst = max(changed, key=lambda name: changed[name].largest)
        raise ConversionError(
            f"{path}: {sum(one.inexact for one in changed.values())} of "
            f"{sum(one.groups for one in changed.values())} groups in {len(changed)} weights "
            f"change when their codes are kept as {options.quantize}, by at most "
            f"{changed[worst].largest:.3g} ({worst}); accept it with --allow-inexact"
        )
    return set(kept), reasons


def quantization_config(outputs: Sequence[Output]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return (keys of config.json, {file name: JSON value}) that describe weights in a dialect.

    The modules listed as not quantized are all other matrices except embeddings, and a tied head.
    """
    weights = [one.part.packed for one in outputs if one.part is not None]
    packed = [one for one in weights if isinstance(one, DialectWeight)]
    plain = [one for one in outputs if one.part is None and _is_module(one)]
    every = all(one.companion_bytes for one in packed)
    settings = packed[0].settings._replace(activations=every)
    names = [one.info.name.removesuffix(".weight") for one in plain]
    if not any(base_name(one.role)[0] == "output" for one in outputs if one.role):
        names.append(HEAD)  # tied: a module all the same
    writer = packed[0].writer
    return writer.section(settings, names), writer.files(settings, names)


def _is_module(output: Output) -> bool:
    """Return whether a tensor is the weight of a Linear module, as far as its name and shape tell.

    The output head counts, embeddings do not.
    """
    base, suffix, _ = base_name(output.role or output.info.name)
    return suffix == "weight" and len(output.info.shape) == 2 and base not in EMBEDDINGS
