"""What forks of llama.cpp store under ggml type ids of their own, and ids that mean two things.

Plain data; `base.encodings` makes rows of it. Sources: ik_llama.cpp (ggml.h for the ids, ggml.c for
the sizes, ggml-common.h for the blocks), the threads that CONTESTED names. In ik_llama.cpp a row
may begin with a header, so a row takes `header + blocks` bytes (its `row_meta_size`); in types that
end in _R4, _R8 or _R16 so many rows lie interleaved, block by block.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

IK = "ik_llama.cpp"

# Types whose blocks we decode: name, elements of a block, its layout, id, header of a row.
DECODED: tuple[tuple[str, int, str, int, str], ...] = (
    ("Q6_0", 32, "d:f2 qh:8u1 qs:16u1", 133, ""),
    ("IQ1_BN", 64, "ql:12u1 extra:u1", 134, "d:f2"),
    ("IQ2_BN", 64, "qs:16u1", 135, "d:f4"),
    ("IQ2_K", 256, "d:f2 extra:u2 scales:8u1 qs:64u1", 137, ""),
    ("IQ3_K", 256, "d:f2 extra:u2 scales_h:u2 scales_l:8u1 qs:64u1 qh:32u1", 138, ""),
    ("IQ4_K", 256, "d:f2 extra:u2 scales_h:4u1 scales_l:8u1 qs:128u1", 139, ""),
    ("IQ5_K", 256, "d:f2 extra:u2 scales_h:4u1 scales_l:8u1 qs:128u1 qh:32u1", 140, ""),
    ("IQ6_K", 256, "d:f2 extra:u2 scales:16i1 qs:128u1 qh:64u1", 141, ""),
    ("IQ4_KS", 256, "scales:8u1 qs:128u1", 144, "d:f4"),
    ("IQ2_KS", 256, "extra:u2 scales:4u1 qs:64u1", 145, "d:f2"),
    ("IQ4_KSS", 256, "qs:64u2", 146, "d:f4"),
    ("Q8_KV", 32, "qs:32i1", 151, "d:f4 sum:i4"),
    ("IQ5_KS", 256, "scales:8u1 qs:128u1 qh:32u1", 152, "d:f4"),
    ("IQ2_KT", 256, "scales:4u1 ql:32u2", 153, "d:f4"),
    ("IQ3_KT", 256, "scales:4u1 ql:32u2 qh:32u1", 154, "d:f4"),
    ("IQ4_KT", 256, "scales:8u4 ql:64u1 qh:32u1", 155, "d:f4"),
    ("IQ3_KS", 256, "extra:u2 scales:4u1 qs:64u1 qh:32u1", 156, "d:f2"),
    ("IQ2_KL", 256, "scales_h:u2 scales_l:4u1 qs:64u1 qh:16u1", 157, "d:f2"),
    ("IQ1_KT", 256, "sh:8u1 ql:32u1 qh:16u1", 158, "d:f4"),
)


class TypeSize(NamedTuple):
    """The size of a type that is not decoded: `size` bytes for `elements`, `header` bytes a row."""

    elements: int
    size: int
    header: int = 0
    tail: int = 0  # after the whole tensor

    def nbytes(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of a tensor of `shape`, None where its rows are no whole blocks."""
        columns = shape[-1] if shape else 1
        if columns % self.elements or not columns:
            return None
        rows = prod(shape) // columns
        return rows * (self.header + columns // self.elements * self.size) + self.tail

    def __str__(self) -> str:
        """Return the sizes in words, for messages."""
        head = f", {self.header} bytes in front of every row" if self.header else ""
        return f"{self.size} bytes for {self.elements} elements{head}"


def _interleaved_reason(rows: int) -> str:
    """Return why a type with `rows` interleaved rows is not decoded, for messages."""
    return f"{IK} interleaves {rows} rows of it, and it alone runs it; get the plain type"


_CACHE = f"{IK} computes with it and stores no model in it"

# Types that are copied and measured, not decoded: name, id, measure, why.
MEASURED: tuple[tuple[str, int, TypeSize, str], ...] = (
    ("Q8_0_X4", 97, TypeSize(32, 34), _CACHE),
    ("Q8_1_X4", 98, TypeSize(32, 36), _CACHE),
    ("Q8_2_X4", 99, TypeSize(32, 36), _CACHE),
    ("Q8_K64", 136, TypeSize(64, 68), _CACHE),
    ("Q8_K16", 147, TypeSize(64, 64, 20), _CACHE),
    ("Q8_K32", 148, TypeSize(256, 292), _CACHE),
    ("Q8_KR8", 149, TypeSize(256, 292), _CACHE),
    ("Q8_K128", 150, TypeSize(128, 140), _CACHE),
    ("Q4_0_R8", 202, TypeSize(32, 18), _interleaved_reason(8)),
    ("Q5_0_R4", 206, TypeSize(32, 22), _interleaved_reason(4)),
    ("Q8_0_R8", 208, TypeSize(32, 34), _interleaved_reason(8)),
    ("Q2_K_R4", 210, TypeSize(256, 84), _interleaved_reason(4)),
    ("Q3_K_R4", 211, TypeSize(256, 110), _interleaved_reason(4)),
    ("Q4_K_R4", 212, TypeSize(256, 144), _interleaved_reason(4)),
    ("Q5_K_R4", 213, TypeSize(256, 176), _interleaved_reason(4)),
    ("Q6_K_R4", 214, TypeSize(256, 210), _interleaved_reason(4)),
    ("IQ2_XXS_R4", 216, TypeSize(256, 66), _interleaved_reason(4)),
    ("IQ2_XS_R4", 217, TypeSize(256, 74), _interleaved_reason(4)),
    ("IQ3_XXS_R4", 218, TypeSize(256, 98), _interleaved_reason(4)),
    ("IQ1_S_R4", 219, TypeSize(32, 6, 2), _interleaved_reason(4)),
    ("IQ4_NL_R4", 220, TypeSize(32, 18), _interleaved_reason(4)),
    ("IQ3_S_R4", 221, TypeSize(256, 110), _interleaved_reason(4)),
    ("IQ2_S_R4", 222, TypeSize(256, 82), _interleaved_reason(4)),
    ("IQ4_XS_R8", 223, TypeSize(256, 136), _interleaved_reason(8)),
    ("IQ1_M_R4", 229, TypeSize(32, 7, 2), _interleaved_reason(4)),
    ("BF16_R16", 230, TypeSize(1, 2), _interleaved_reason(16)),
    ("Q6_0_R4", 233, TypeSize(32, 26), _interleaved_reason(4)),
    ("IQ2_BN_R4", 335, TypeSize(64, 16, 4), _interleaved_reason(4)),
    ("IQ2_K_R4", 337, TypeSize(256, 76), _interleaved_reason(4)),
    ("IQ3_K_R4", 338, TypeSize(256, 110), _interleaved_reason(4)),
    ("IQ4_K_R4", 339, TypeSize(256, 144), _interleaved_reason(4)),
    ("IQ5_K_R4", 340, TypeSize(256, 176), _interleaved_reason(4)),
    ("IQ4_KS_R4", 344, TypeSize(256, 136, 4), _interleaved_reason(4)),
    ("IQ5_KS_R4", 352, TypeSize(256, 168, 4), _interleaved_reason(4)),
    ("MXFP4_R8", 353, TypeSize(32, 17), _interleaved_reason(8)),
    ("Q8_K_R16", 397, TypeSize(256, 258), _interleaved_reason(16)),
    ("Q8_KV_R8", 398, TypeSize(32, 32, 4), _interleaved_reason(8)),
    ("Q8_K_R8", 399, TypeSize(256, 258), _interleaved_reason(8)),
)


class TypeClaim(NamedTuple):
    """One more meaning of an id: its name, who uses it so, and how many bytes it takes."""

    name: str
    who: str
    measure: TypeSize
    key: tuple[str, object] | None = None  # what the files say that have it

    def __str__(self) -> str:
        """Return name, user and size in words, for messages."""
        return f"{self.name} ({self.who}; {self.measure})"


_STQ, _G128 = TypeSize(256, 42), TypeSize(128, 34)
_PR = "llama.cpp PR 22836"


def _hifi(name: str, size: int) -> TypeClaim:
    """Return the meaning that the HIFI forks give an id: a K-quant with outliers in each block.

    `size` is the bytes of a block of 256.
    """
    return TypeClaim(name, "the HIFI forks", TypeSize(256, size))


# What else an id is used for. Upstream's meaning, where it has one, is the row's of the encoding
# table; types of a KV cache are never stored in a file and do not stand here.
CONTESTED: Mapping[int, tuple[TypeClaim, ...]] = {
    36: (TypeClaim("I2_S", "BitNet", TypeSize(4, 1, 0, 32)),),
    42: (TypeClaim("STQ1_0", f"the first files of {_PR}", _STQ),
         TypeClaim("Q2_0_G128", "Bonsai's forks", _G128, ("GGML_Q2_0_G128", 1)),
         _hifi("Q3_K_HIFI", 136)),
    43: (
        TypeClaim("STQ1_0", f"{_PR} since upstream took 42", _STQ),
        TypeClaim("IQ1_XS", "unsloth's fork", TypeSize(256, 46)),
        TypeClaim("Q2_0_G128", "Bonsai's forks", _G128, ("GGML_Q2_0_G128", 1)),
        TypeClaim("NF4DQ", "a fork with NF4", TypeSize(1024, 532)),
        _hifi("Q6_K_HIFI", 222),
    ),
    44: (_hifi("Q6_K_HIFI_DYNAMIC", 236),),
    45: (_hifi("Q6_K_HIFI_RES8", 232),),
    46: (_hifi("Q5_K_HIFI_RES8", 196),),
    47: (TypeClaim("Q2_0", "TurboQuant's forks", TypeSize(64, 18)), _hifi("Q3_K_HIFI_RES8", 132)),
    48: (_hifi("Q4_K_HIFI", 168),),
    49: (_hifi("Q2_K_HIFI", 96),),
    50: (_hifi("Q2_K_LITE", 96),),
    51: (_hifi("Q3_K_LITE", 104),),
    52: (_hifi("Q4_K_LITE", 128),),
    53: (_hifi("Q5_K_LITE", 164),),
    54: (_hifi("Q6_K_LITE", 196),),
    142: (TypeClaim("IQ2_TN", f"{IK} of 2024", TypeSize(256, 66)),
          TypeClaim("PQ2_0", "Bonsai's forks", _G128, ("general.file_type", 141))),
    143: (TypeClaim("IQ1_TN", f"{IK} of 2024", TypeSize(256, 54)),
          TypeClaim("PTQ1_0", "Bonsai's forks", TypeSize(128, 28))),
}  # fmt: skip
