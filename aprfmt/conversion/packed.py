"""Weights that a target stores in several tensors: bitsandbytes' packed bytes and companions.

The size of a quant state depends on the values, so a weight may be encoded once for the plan and
again for writing. In between only small parts are kept in memory, and all parts of the weight
encoded last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aprfmt.base.encodings import encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.conversion.counts import Counts
from aprfmt.errors import ConversionError

STATE = ".quant_state.bitsandbytes__"  # only names of quant states contain it
_SMALL = 4096  # bytes: parts up to this are kept from planning to writing


def has_companions(name: str) -> bool:
    """Say whether an encoding is stored in several tensors."""
    from aprfmt.codecs import CODECS

    return name in CODECS and len(CODECS[name].parts) > 1


@dataclass
class Latest:
    """The parts of the weight that was encoded last; one object per plan."""

    name: str = ""
    parts: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Packed:
    """One weight to be stored in several tensors.

    `make` returns the weight's values, float32 of `shape`; `encode(values)` its parts by suffix
    ("" are the packed bytes); `counts` says how many values changed.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    make: Callable[[], Any]
    encode: Callable[[Any], Mapping[str, bytes]]
    latest: Latest
    counts: Counts = field(default_factory=Counts)
    kept: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0  # sum over all parts
    counted: bool = False

    def part(self, suffix: str) -> bytes:
        """Return one part's bytes; encodes the weight again if they are no longer in memory."""
        if suffix in self.kept:
            return self.kept[suffix]
        if self.latest.name != self.name:
            values = self.make()
            parts = self.encode(values)
            if not self.counted:
                self._count(values, parts)
            self.latest.name, self.latest.parts = self.name, parts
            self.kept.update({s: data for s, data in parts.items() if s and len(data) <= _SMALL})
        return self.latest.parts[suffix]

    def _count(self, values: Any, parts: Mapping[str, bytes]) -> None:
        from aprfmt.codecs import decode

        self.counts.add(values, decode(self.encoding, parts, self.shape))
        self.counted = True

    def infos(self, main: str) -> dict[str, TensorInfo]:
        """Return the stored tensors by suffix; `main` is the name of the packed bytes.

        Names, dtypes and shapes are those of bitsandbytes' own files.
        """
        found = {}
        for suffix, dtype, count in self._layout():
            name = f"{self.name}.{suffix}" if suffix else main
            shape: tuple[int, ...] = (count, 1) if not suffix else (count,)
            size = encoding(dtype).nbytes(shape)
            found[suffix] = TensorInfo(
                name, shape, dtype, 0, size, encoding(dtype).row_bytes(shape)
            )
        self.nbytes = sum(info.nbytes for info in found.values())
        return found

    def _layout(self) -> list[tuple[str, str, int]]:
        """Return (suffix, dtype, elements) of every part, in no particular order."""
        from aprfmt.codecs import quant_state

        self.part(quant_state.STATE + self.encoding.lower())  # encodes the weight
        sizes = {suffix: len(data) for suffix, data in self.latest.parts.items()}
        floats = {quant_state.QUANT_MAP, quant_state.NESTED_ABSMAX, quant_state.NESTED_QUANT_MAP}
        if quant_state.NESTED_ABSMAX not in sizes:
            floats.add(quant_state.ABSMAX)
        return [
            (suffix, "F32", size // 4) if suffix in floats else (suffix, "U8", size)
            for suffix, size in sizes.items()
        ]


@dataclass(frozen=True, eq=False)
class Part:
    """One stored tensor of a packed weight."""

    packed: Packed
    suffix: str

    def data(self) -> bytes:
        """Return the part's bytes."""
        return self.packed.part(self.suffix)


def weight_dtype(source: str, config: Mapping[str, Any] | None, name: str) -> str:
    """Return the original dtype to record for a packed weight: the tensor's, else the model's.

    Raises ConversionError if bitsandbytes knows neither of the two.
    """
    own = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(source)
    if own is not None:
        return own
    said = (config or {}).get("dtype") or (config or {}).get("torch_dtype") or "float32"
    if said not in ("float32", "float16", "bfloat16"):
        raise ConversionError(
            f"{name}: config.json says dtype {said!r}; expected float32, float16 or bfloat16"
        )
    return str(said)


def quantization_config(
    encoding_name: str, double: bool, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the `quantization_config` that transformers writes for a model packed by itself.

    `left_out` are Linear modules that are not packed, in addition to the head, which never is.
    Source: transformers' BitsAndBytesConfig.to_dict with its defaults.
    """
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": encoding_name.lower(),
        "bnb_4bit_use_double_quant": double,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": [*left_out, "lm_head"] if left_out else None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
