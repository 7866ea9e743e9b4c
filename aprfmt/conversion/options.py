"""The options of a conversion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from aprfmt.base.encoding_names import encoding_name
from aprfmt.base.protocols import TypedValue, Value

if TYPE_CHECKING:
    from aprfmt.model.renames import Rename

Progress = Callable[[int, int], None]  # bytes done, bytes in all

Drops = Sequence[Callable[[str], bool]]  # over one spelling: is the tensor left out?


class ConvertOptions(TypedDict, total=False):
    """The keyword arguments of `aprfmt.convert`: the fields of `Options`."""

    arch: str | None
    generic: bool
    encoding: str | None
    tensor_encodings: Sequence[tuple[str, str]]
    choose: Callable[[str, tuple[int, ...], str], str | None] | None
    quantize: str | None
    pure: bool
    imatrix: Path | None
    allow_requantize: bool
    packing: Mapping[str, Any]
    fma: Literal["fused", "strict"]
    threads: int | None
    jobs: int
    importance: Callable[[str], Any] | None
    allow_overflow: bool
    allow_inexact: bool
    drop: Sequence[str]
    rename: "Sequence[Rename]"
    allow_missing: Sequence[str]
    complete: bool
    plain_copy: bool
    metadata: Mapping[str, Value | TypedValue]
    remove: Sequence[str]
    texts: Mapping[str, str]
    extra_metadata: Mapping[str, Value]
    max_shard_size: int | None
    alignment: int | None
    force: bool
    verify: bool
    source_hash: bool
    carry: bool
    dry_run: bool
    resume: bool
    progress: Progress | None


@dataclass(frozen=True)
class Options:
    """The options of one conversion.

    `encoding` is stored for every weight matrix, and for every float tensor when it is a plain
    float type; `tensor_encodings` are (pattern, encoding) pairs that win over it. `quantize` names
    a scheme of quantizing/mixture.py, whose mixture decides per tensor; `pure` stores its base
    encoding everywhere, `imatrix` is the file of an importance matrix, and `allow_requantize` lets
    tensors that are quantized already be quantized again. `choose` and `importance` (by role or
    name) are computed from `quantize` and `imatrix`; `packing` are encoder options of encodings
    with companions. `arch="none"` copies tensors and metadata under their own names and uses no
    architecture; `generic` is that with every byte kept, and marks the output, so that no loader
    takes it for a model of an architecture. `allow_inexact` accepts that values of packed weights
    change when they are repacked. `drop` are patterns of tensors to leave out, `rename` rules that
    give the source's tensors other names before anything else is done. `metadata` overrides single
    keys of the output, `remove` leaves keys out; `texts` are the new content of text files next to
    the weights. `allow_missing` are patterns of required roles that may be missing in the source,
    which the output records; `complete=False` requires no roles at all. A `plain_copy` of the
    stored tensors requires none either, and the shapes of the architecture. `carry=False` leaves
    the verbatim tokenizer.json out of a GGUF or APR, which has the tokenizer in its own keys as
    well. `resume` keeps what is written when the run is stopped, and continues what an earlier run
    left. `jobs` workers make and write tensors, some rows at a time, each on one thread; 1 writes
    in order, and encodes on `threads`.
    """

    arch: str | None = None
    generic: bool = False
    encoding: str | None = None
    tensor_encodings: Sequence[tuple[str, str]] = ()
    choose: Callable[[str, tuple[int, ...], str], str | None] | None = None
    quantize: str | None = None
    pure: bool = False
    imatrix: Path | None = None
    allow_requantize: bool = False
    packing: Mapping[str, Any] = field(default_factory=dict)
    fma: Literal["fused", "strict"] = "fused"
    threads: int | None = None
    jobs: int = 1
    importance: Callable[[str], Any] | None = None
    allow_overflow: bool = False
    allow_inexact: bool = False
    drop: Sequence[str] = ()
    rename: "Sequence[Rename]" = ()
    allow_missing: Sequence[str] = ()
    complete: bool = True
    plain_copy: bool = False
    metadata: Mapping[str, Value | TypedValue] = field(default_factory=dict)
    remove: Sequence[str] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    extra_metadata: Mapping[str, Value] = field(default_factory=dict)
    max_shard_size: int | None = None
    alignment: int | None = None
    force: bool = False
    verify: bool = True
    source_hash: bool = True
    carry: bool = True
    dry_run: bool = False
    resume: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Replace names of encodings and types by ours (`f16`, `q4_k_m`, `half` are accepted)."""
        if self.encoding is not None:
            object.__setattr__(self, "encoding", encoding_name(self.encoding))
        if self.tensor_encodings:
            pairs = [(pattern, encoding_name(name)) for pattern, name in self.tensor_encodings]
            object.__setattr__(self, "tensor_encodings", pairs)
        if self.quantize is not None:
            from aprfmt.quantizing.mixture import type_name

            object.__setattr__(self, "quantize", type_name(self.quantize))

    @property
    def writer(self) -> str | None:
        """The name of the row of codecs/writers.py that writes weights; None for most schemes."""
        return self.packing.get("writer")
