"""Choose the encoding of every tensor when a model is quantized: llama.cpp's mixtures as a table.

A *kind* of tensor is its role without layer, such as attn_v. A *group* is the inputs that share a
scale.

Order of decision for one tensor: tensors that are never quantized keep their encoding; then the
head (or the embedding, if tied); then the first matching row; else the scheme's base; last, the
fallback if the columns are not a whole number of blocks. Source: llama.cpp's `src/llama-quant.cpp`
of 2026, where fused attn_qkv and attn_kv_b count as attn_v. One difference is on purpose: llama.cpp
does not count a tensor whose encoding the user names, so that naming one changes the encodings of
others; here every tensor is counted.

bitsandbytes' types have no mixture: transformers packs every Linear except the head, and keeps
embeddings and stacked experts, which are plain parameters.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mod
from typing import Any

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encoding_names import ALIASES, TYPE_ALIASES, find_name, unknown_name_message
from aprfmt.base.encodings import ENCODINGS, find_encoding
from aprfmt.base.metadata_values import FILE_TYPES
from aprfmt.codecs import CODECS
from aprfmt.errors import UsageError

# Version of our encoders' output: part of what makes quantized bytes reproducible.
QUANTIZER_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `--type` names: the base encoding, and how it is encoded.

    `mixed_type` is general.file_type of a GGUF made with it where that is not the base's. Weights
    [out, in] whose sizes are no `multiples` of these are not quantized.
    """

    base: str
    mixed_type: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    multiples: tuple[int, int] = (1, 1)
    arch: str = ""  # the one architecture (as GGUF calls it) whose stacks of experts it is for

    @property
    def dialect(self) -> bool:
        """Whether weights are stored in the tensors of a dialect (codecs/writers.py)."""
        return "writer" in self.options

    @property
    def mixes(self) -> bool:
        """Whether weights of different roles may get different encodings, as in llama.cpp."""
        row = ENCODINGS[self.base]
        return not (self.arch or self.dialect or row.flat or row.numpy)

    @property
    def file_type(self) -> int | None:
        """general.file_type of a GGUF made with it; None where there is none."""
        return ENCODINGS[self.base].file_type if self.mixed_type is None else self.mixed_type


def _pure_schemes(*names: str) -> dict[str, Scheme]:
    """Return {name: scheme} of schemes that give every weight the encoding of the same name."""
    return {name: Scheme(name) for name in names}


def _dialect_scheme(
    base: str, writer: str, multiples: tuple[int, int], version: int = 1, *, rows: bool = False
) -> Scheme:
    """Return a scheme that stores weights of encoding `base` by the writer of this name.

    `multiples` are the numbers that outputs and inputs must be multiples of. Groups are of
    `multiples[1]` inputs, or whole rows with `rows`.
    """
    size = None if rows else multiples[1]
    return Scheme(base, None, {"writer": writer, "size": size, "version": version}, multiples)


_DOUBLE = {"double_quantization": True}
SCHEMES: Mapping[str, Scheme] = {
    **_pure_schemes("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K"),
    "Q3_K_M": Scheme("Q3_K"),
    "Q4_K_S": Scheme("Q4_K", 14),
    "Q4_K_M": Scheme("Q4_K"),
    "Q5_K_S": Scheme("Q5_K", 16),
    "Q5_K_M": Scheme("Q5_K"),
    **_pure_schemes("Q6_K", "IQ4_NL", "IQ4_XS", "NF4"),
    "NF4-double": Scheme("NF4", options=_DOUBLE),
    "FP4": Scheme("FP4"),
    "FP4-double": Scheme("FP4", options=_DOUBLE),
    **{
        f"COMPRESSED-INT4-g{size}": _dialect_scheme(
            "COMPRESSED_PACKED", "COMPRESSED-INT4", (1, size)
        )
        for size in (32, 128)
    },
    "COMPRESSED-FP8": _dialect_scheme("COMPRESSED_PLAIN", "COMPRESSED-FP8", (1, 1), rows=True),
    "COMPRESSED-NVFP4": _dialect_scheme("COMPRESSED_PACKED_FLOAT", "COMPRESSED-NVFP4", (1, 16)),
    "COMPRESSED-MXFP4": _dialect_scheme("COMPRESSED_PACKED_FLOAT", "COMPRESSED-MXFP4", (1, 32)),
    "GPT-OSS-MXFP4": replace(_dialect_scheme("GPT_OSS", "GPT-OSS-MXFP4", (32, 32)), arch="gpt-oss"),
    "MODELOPT-NVFP4": _dialect_scheme("MODELOPT", "MODELOPT-NVFP4", (1, 16)),
    **{f"GPTQ-g{size}": _dialect_scheme("GPTQ", "GPTQ", (32, size)) for size in (32, 128)},
    **{f"GPTQ-v2-g{size}": _dialect_scheme("GPTQ", "GPTQ", (32, size), 2) for size in (32, 128)},
    **{f"AWQ-g{size}": _dialect_scheme("AWQ", "AWQ", (32, size)) for size in (32, 128)},
    **{f"MLX-4bit-g{size}": _dialect_scheme("MLX", "MLX", (1, size)) for size in (32, 64, 128)},
}


def offered_schemes() -> list[str]:
    """Return the names of encodings that other packages offer: schemes without a mixture."""
    return [name for name in CODECS if name not in CODECS.own and name not in SCHEMES]


def scheme_of(name: str) -> Scheme:
    """Return the scheme of a name, or that of another package's encoding.

    Raises UsageError for other names.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    if name in offered_schemes():
        return Scheme(name)
    known = (*SCHEMES, *offered_schemes())
    raise UsageError(
        f"--type {name}: {unknown_name_message(name, known)} "
        f"(aprfmt quantize --help lists all {len(known)})"
    )


def type_name(text: str) -> str:
    """Return the type that a user's spelling means (`q4_k_m`, `Q4_K`, `fp16`); else the text.

    As in llama-quantize, a number is taken for a file type (15 is Q4_K_M).
    """
    if text.isdecimal() and text.isascii():
        text = FILE_TYPES.get(int(text[:4]), text)
    found = find_name(text, (*SCHEMES, *offered_schemes()), {**ALIASES, **TYPE_ALIASES})
    return text if found is None else found


# llama.cpp adds these to the metadata of what it quantizes; 2 is GGML_QNT_VERSION.
FORMAT_VERSION = 2

# Roles (without .weight) that keep their encoding whatever the scheme, besides everything with
# fewer than two dimensions or a name that does not end in "weight".
KEPT = (
    "_norm", "ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types", "ssm_conv1d",
    "shortconv.conv", "per_layer_model_proj", "attn_rel_b", "time_mix_first",
    "time_mix_w0", "time_mix_w1", "time_mix_w2",
    "time_mix_v0", "time_mix_v1", "time_mix_v2", "time_mix_a0", "time_mix_a1", "time_mix_a2",
    "time_mix_g1", "time_mix_g2", "time_mix_decay_w1", "time_mix_decay_w2",
    "time_mix_lerp_fused",
)  # fmt: skip
# What a stack of experts is called: by its role, and in a Hugging Face folder.
_STACK = re.compile(r"_exps\.weight$|\.experts\.(gate_up|down)_proj$")
# Parts of names that keep their encoding wherever they stand: vision and other small tensors.
KEPT_PARTS = (
    "altup", "laurel", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", ".position_embd",
)  # fmt: skip
# Further weights that are not torch Linear modules; bitsandbytes does not pack them.
EMBEDDINGS = ("token_embd", "per_layer_token_embd", "position_embd", "token_types")
NO_LINEAR = (*EMBEDDINGS[:2], "output")
# The gate of a shared expert is a Linear; llama.cpp does not quantize it.
LINEAR_ALL_THE_SAME = ("ffn_gate_inp_shexp",)

# Fallbacks for rows that are not a whole number of blocks.
FALLBACK: Mapping[str, str] = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q2_0": "Q4_0",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
}  # fmt: skip
LAST_RESORT = "F16"
# Architectures, by their names in GGUF, for which llama.cpp's mixtures have rules of their own.
SPECIAL_ARCHS = frozenset({"falcon"})


@dataclass(frozen=True, slots=True)
class RunningNumber:
    """A tensor's number among the `total` tensors of its kind, and facts of the model."""

    number: int
    total: int
    n_gqa: int
    n_experts: int
    imatrix: bool
    arch: str = ""

    @property
    def special_arch(self) -> bool:
        """Whether llama.cpp's mixtures have special rules for the model's architecture."""
        return self.arch in SPECIAL_ARCHS

    @property
    def more_bits(self) -> bool:
        """Whether llama.cpp's `use_more_bits` holds for the tensor.

        It holds for the first and last eighth of the tensors of a kind, and every third one
        between.
        """
        eighth = self.total // 8
        return (
            self.number < eighth
            or self.number >= 7 * self.total // 8
            or (self.number - eighth) % 3 == 2
        )

    def first(self, share: int) -> bool:
        """Return whether the tensor is among the first 1 / `share` of the tensors of its kind."""
        return self.number < self.total // share


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """A rule: under these schemes, tensors of this kind get `encoding` where `when` is true."""

    schemes: tuple[str, ...]
    kind: str
    encoding: str
    when: Callable[[RunningNumber], bool] = lambda place: True


ROWS: tuple[SchemeRow, ...] = (
    SchemeRow(tuple(SCHEMES), "attn_v", "Q8_0", lambda p: p.n_experts == 8),
    SchemeRow(("Q2_K",), "attn_v", "Q4_K", lambda p: p.n_gqa >= 4),
    SchemeRow(("Q2_K",), "attn_v", "Q3_K"),
    SchemeRow(("Q3_K_M",), "attn_v", "Q5_K", lambda p: p.number < 2),
    SchemeRow(("Q3_K_M",), "attn_v", "Q4_K"),
    SchemeRow(("IQ4_NL", "IQ4_XS"), "attn_v", "Q5_K", lambda p: p.n_gqa >= 4),
    SchemeRow(("Q4_K_M", "Q5_K_M"), "attn_v", "Q6_K", lambda p: p.more_bits),
    SchemeRow(("Q4_K_S",), "attn_v", "Q5_K", lambda p: p.number < 4),
    SchemeRow(tuple(SCHEMES), "attn_k", "Q8_0", lambda p: p.n_experts == 8),
    SchemeRow(("Q2_K",), "ffn_down", "Q3_K"),
    SchemeRow(("Q3_K_M",), "ffn_down", "Q5_K", lambda p: p.first(16)),
    SchemeRow(("Q3_K_M",), "ffn_down", "Q4_K", lambda p: not p.special_arch or p.more_bits),
    SchemeRow(("Q4_K_M",), "ffn_down", "Q6_K", lambda p: p.special_arch and p.first(16)),
    SchemeRow(("Q4_K_M",), "ffn_down", "Q5_K", lambda p: p.special_arch and p.more_bits),
    SchemeRow(("Q4_K_M",), "ffn_down", "Q6_K", lambda p: not p.special_arch and p.more_bits),
    SchemeRow(("IQ4_NL", "IQ4_XS"), "ffn_down", "Q5_K", lambda p: p.first(8) and not p.imatrix),
    SchemeRow(("Q5_K_M",), "ffn_down", "Q6_K", lambda p: p.more_bits),
    SchemeRow(("Q4_K_S",), "ffn_down", "Q5_K", lambda p: not p.special_arch and p.first(8)),
    SchemeRow(("Q4_0",), "ffn_down", "Q4_1", lambda p: p.first(8) and p.imatrix),
    SchemeRow(("Q5_0",), "ffn_down", "Q5_1", lambda p: p.first(8) and p.imatrix),
    SchemeRow(("Q2_K", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M"), "attn_output", "Q5_K",
        lambda p: p.n_experts == 8 and not p.special_arch),
    SchemeRow(("Q2_K",), "attn_output", "Q3_K", lambda p: p.n_experts != 8 and not p.special_arch),
    SchemeRow(("Q3_K_M",), "attn_output", "Q4_K",
        lambda p: p.n_experts != 8 and not p.special_arch),
)  # fmt: skip
# Models of 80 layers that llama.cpp calls 70B never have attn_v below Q5_K. Source: its hparams.
LAYERS_70B, ARCHS_70B = 80, ("llama", "qwen2", "deci", "olmo")

# Which kind of the table a base name counts as.
KINDS: Mapping[str, str] = {
    "attn_v": "attn_v", "attn_qkv": "attn_v", "attn_kv_b": "attn_v", "attn_k": "attn_k",
    "attn_output": "attn_output", "ffn_down": "ffn_down", "ffn_down_exps": "ffn_down",
    "ffn_down_shexp": "ffn_down",
}  # fmt: skip
# These kinds are numbered by the layer in models with experts; attn_v always by running count.
BY_LAYER = ("ffn_down",)


def base_name(name: str) -> tuple[str, str, int | None]:
    """Return (base, suffix, layer) of a name: ("attn_q", "weight", 3) for `L3.attn_q.weight`.

    `name` is a role key or a GGUF name. The layer is None outside the layers.
    """
    layer, role = split_key(name)
    parts = role.split(".")
    if parts[0] == "blk" and len(parts) > 2 and parts[1].isdecimal():
        layer, parts = int(parts[1]), parts[2:]
    return ".".join(parts[:-1]), parts[-1], layer


def is_quantized(name: str) -> bool:
    """Return whether an encoding is quantized in blocks, so that encoding again adds an error.

    False for plain numbers and the float types of safetensors.
    """
    row = find_encoding(name)
    return not row.numpy and not row.safetensors


class Mixture:
    """Chooses encodings for the tensors of one model; made once, asked for every tensor.

    `names` are the role keys (or GGUF names) of all tensors that will be stored. Running numbers
    count over them by layer, then name, as llama.cpp walks a file.
    """

    def __init__(
        self,
        scheme: str,
        names: Sequence[str],
        *,
        n_layers: int,
        n_gqa: int = 1,
        n_experts: int = 0,
        pure: bool = False,
        imatrix: bool = False,
        arch: str = "",
    ) -> None:
        """Set the scheme and the running numbers of the tensors of each kind, which rules use.

        `names` are the model's tensors, `n_gqa` is the number of query heads per key-value head.
        `pure` gives every weight the base encoding, `imatrix` says whether there is an importance
        matrix. Raises UsageError for an unknown scheme, or one of another architecture than `arch`.
        """
        row = scheme_of(scheme)
        self._base, self._dialect, self._multiples = row.base, row.dialect, row.multiples
        self._of = row.arch
        if row.arch not in ("", arch):
            raise UsageError(
                f"--type {scheme}: is how {row.arch} is stored; the model is {arch or 'unknown'}"
            )
        self.scheme, self.pure = scheme, pure or scheme not in SCHEMES
        self._has_output = any(base_name(name)[0] == "output" for name in names)
        self._n_layers, self._n_gqa, self._n_experts = n_layers, n_gqa, n_experts
        self._imatrix, self._arch = imatrix, arch
        self._wide_v = arch in ARCHS_70B and n_layers == LAYERS_70B
        self._numbers: dict[tuple[int, str], int] = {}
        self._totals: dict[str, int] = {}
        # Number the tensors of each kind by layer, then name.
        found = [base_name(name) for name in names]
        placed = {
            (-1 if at is None else at, base)
            for base, suffix, at in found
            if suffix == "weight" and base in KINDS
        }
        for layer, base in sorted(placed):
            kind = KINDS[base]
            count = self._totals.get(kind, 0)
            parsed = n_experts > 1 and kind in BY_LAYER
            self._numbers[layer, base] = layer if parsed else count
            self._totals[kind] = count + 1

    def choose(self, name: str, shape: tuple[int, ...], source: str) -> str | None:
        """Return the encoding for one tensor; None to leave it unquantized.

        `source` is its present encoding.
        """
        row = find_encoding(source)
        if row.numpy and not row.numpy.startswith(("float", "bfloat")):
            return None
        base, suffix, layer = base_name(name)
        if self._of:
            stack = len(shape) == 3 and _STACK.search(name) is not None
            return self._base if stack and not any(map(mod, shape[1:], self._multiples)) else None
        if self._dialect:
            whole = fits_groups(scheme_of(self.scheme), shape)
            return self._base if whole and is_linear(name, base, suffix, shape) else None
        if ENCODINGS[self._base].flat:
            return (
                self._base
                if suffix == "weight" and is_bitsandbytes_linear(name, base, shape)
                else None
            )
        if _count_dimensions(shape) < 2 or suffix != "weight" or keeps_encoding(name, base):
            return None
        if ENCODINGS[self._base].numpy:
            return self._base
        return fitting_encoding(
            self._wanted_encoding(base, -1 if layer is None else layer, shape), shape[-1]
        )

    def _wanted_encoding(self, base: str, layer: int, shape: tuple[int, ...]) -> str:
        """Return the encoding that the scheme wants for a weight, before any fallback.

        `layer` is -1 for a tensor outside layers.
        """
        if self.pure:
            return self._base
        embedding = base in ("token_embd", "per_layer_token_embd")
        if base == "output" or (embedding and not self._has_output):
            if shape[-1] % ENCODINGS[self._base].block_size or self._arch in SPECIAL_ARCHS:
                return "Q8_0"
            return self._base if self._base == "Q8_0" else "Q6_K"
        kind = KINDS.get(base)
        if kind is None:
            return self._base
        total = self._n_layers if kind in BY_LAYER else self._totals.get(kind, 0)
        place = RunningNumber(
            self._numbers.get((layer, base), 0), total, self._n_gqa, self._n_experts,
            self._imatrix, self._arch,
        )  # fmt: skip
        chosen = self._base
        for row in ROWS:
            if row.kind == kind and self.scheme in row.schemes and row.when(place):
                chosen = row.encoding
                break
        if kind == "attn_v" and self._wide_v and chosen in ("Q3_K", "Q4_K"):
            return "Q5_K"
        return chosen


def keeps_encoding(name: str, base: str) -> bool:
    """Return whether a tensor is never quantized, whatever the scheme (norms, routers, ...)."""
    return base.endswith(KEPT) or any(part in name for part in KEPT_PARTS)


def is_bitsandbytes_linear(name: str, base: str, shape: tuple[int, ...]) -> bool:
    """Return whether transformers has a weight as a Linear that bitsandbytes packs."""
    if base in LINEAR_ALL_THE_SAME:
        return True
    if base in NO_LINEAR or base.endswith("_exps"):
        return False
    return len(shape) == 2 and not keeps_encoding(name, base)


def is_linear(name: str, base: str, suffix: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight is a Linear that tools for GPTQ, AWQ and the like pack.

    `base` is its role without layer and `suffix` what follows it ("weight"). The weight of a single
    expert counts, a stack of experts does not.
    """
    return (
        suffix == "weight"
        and len(shape) == 2
        and base not in NO_LINEAR
        and not keeps_encoding(name, base)
    )


def fits_groups(scheme: Scheme, shape: Sequence[int]) -> bool:
    """Return whether a weight [out, in] is a whole number of the scheme's groups."""
    return len(shape) == 2 and all(shape) and not any(map(mod, shape, scheme.multiples))


def fitting_schemes(scheme: Scheme, shapes: Sequence[Sequence[int]]) -> list[str]:
    """Return the types of the same writer whose groups fit all these weights, largest groups first.

    `shapes` are those of the weights, [out, in].
    """
    wanted = {**scheme.options, "size": None}
    found = [
        (row.multiples, name)
        for name, row in SCHEMES.items()
        if row.dialect
        and {**row.options, "size": None} == wanted
        and all(fits_groups(row, shape) for shape in shapes)
    ]
    return [name for _, name in sorted(found, reverse=True)]


def deciding_name(names: Sequence[str]) -> str:
    """Return the one of a stored tensor's names by which its encoding is chosen.

    It is that of an attn_v if there is one, else the first. A fused q/k/v counts as attn_v, as in
    llama.cpp.
    """
    for name in names:
        if KINDS.get(base_name(name)[0]) == "attn_v":
            return name
    return names[0]


def _count_dimensions(shape: tuple[int, ...]) -> int:
    """Return the number of dimensions as ggml counts: outermost ones of size 1 do not count."""
    count = len(shape)
    while count > 1 and shape[len(shape) - count] == 1:
        count -= 1
    return count


def fitting_encoding(wanted: str, columns: int) -> str:
    """Return `wanted` if `columns` is a whole number of its blocks, else llama.cpp's fallback."""
    for candidate in (wanted, FALLBACK.get(wanted, LAST_RESORT), LAST_RESORT):
        row = ENCODINGS[candidate]
        if row.flat or columns % row.block_size == 0:
            return candidate
    return LAST_RESORT
