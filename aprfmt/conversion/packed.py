"""Weights that a target stores in several tensors: bitsandbytes' packed bytes and companions.

The size of a quant state is known only when its numbers are, so a weight is encoded once while
planning where that matters, and once more when its bytes are written. Between the two only small
parts are kept; of everything else the weight encoded last is held, and no other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aprfmt.base.encodings import encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.conversion.counts import Counts
from aprfmt.errors import ConversionError

STATE = ".quant_state.bitsandbytes__"  # in the name of a quant state, and of nothing else
_SMALL = 4096  # bytes: parts up to this are kept from planning to writing


def has_companions(name: str) -> bool:
    """Say whether an encoding is stored in several tensors."""
    from aprfmt.codecs import CODECS

    return name in CODECS and len(CODECS[name].parts) > 1


@dataclass
class Latest:
    """The parts of the weight that was encoded last; one for a plan."""

    name: str = ""
    parts: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Packed:
    """One weight on its way into several stored tensors.

    `make` gives the weight's values, float32 of `shape`; `encode(values)` its parts by suffix,
    "" being the packed bytes; `counts` says how the values fared.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    make: Callable[[], Any]
    encode: Callable[[Any], Mapping[str, bytes]]
    latest: Latest
    counts: Counts = field(default_factory=Counts)
    kept: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0  # of all parts together
    counted: bool = False

    def part(self, suffix: str) -> bytes:
        """Return one part's bytes, encoding the weight again where they are not at hand."""
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

        self.part(quant_state.STATE + self.encoding.lower())  # encodes once
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
        """Return its bytes."""
        return self.packed.part(self.suffix)


def weight_dtype(source: str, config: Mapping[str, Any] | None, name: str) -> str:
    """Return the dtype a packed weight says it had: the source's own, else the model's.

    Raises ConversionError where neither is one that bitsandbytes knows.
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
    """Return `quantization_config` as transformers writes it for a model it packed itself.

    `left_out` are Linear modules that are not packed; the head never is.
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
