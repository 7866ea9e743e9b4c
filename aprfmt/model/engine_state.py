"""Reads the weights that an engine saved, under the tensor names of the published model.

`torch.save(model.state_dict())` of vLLM or SGLang has q, k and v as one `qkv_proj`, gate and up
as one `gate_up_proj`, all experts of a layer as `w13_weight` and `w2_weight`, and with tensor,
expert or pipeline parallelism a file for each rank. Each tensor of the model is assembled from
these, so that whatever compares models compares it. Sources:
vllm/model_executor/layers/linear.py (QKVParallelLinear, MergedColumnParallelLinear,
RowParallelLinear), vocab_parallel_embedding.py and fused_moe/layer.py; SGLang's layers of the
same names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.dump_names import RANK, parse_dump_path
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import Damage, LazyTensor, Note, Source, TensorInfo, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import AprfmtError, FormatError, UnsupportedError, UsageError
from aprfmt.formats import open_source
from aprfmt.formats.pytorch.tensor import AbsentTensor
from aprfmt.model import Model

Cells = NDArray[np.void]
# A joined module -> the published modules whose rows it has, in order.
JOINED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
}
# A stack of all experts -> the published modules of one expert, whose rows it has in order. Each
# row has the names that architectures give them.
STACKED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
# Modules whose columns ranks divide: the last product of a sublayer (RowParallelLinear).
COLUMNS = ("o_proj", "down_proj", "w2", "out_proj", "dense", "c_proj")
# Tables of the vocabulary, whose rows are padded to a multiple and divided.
TABLES = ("embed_tokens", "lm_head", "wte", "word_embeddings")
# Ends of names that an engine computes and nobody publishes.
COMPUTED = (".cos_sin_cache", ".inv_freq", ".rotary_emb.sin", ".rotary_emb.cos")
# Scales of vLLM's attention (vllm/attention/layer.py), which are 1 where no checkpoint sets them.
UNIT_SCALES = ("._k_scale", "._v_scale", "._q_scale", "._prob_scale")
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
_SHOWN = 3
_BEGIN = 4096  # bytes of a share that are compared before the whole of it
_VARIED = 8  # different bytes that a share of trained or random numbers begins with, at least


def is_engine_state(path: Path) -> bool:
    """Return whether a path holds the weights that an engine saved from its memory.

    These are files of several ranks, or a file with names of joined or stacked matrices. False if
    there is a config.json.
    """
    if (path if path.is_dir() else path.parent).joinpath("config.json").is_file():
        return False
    try:
        files = _rank_files(path)
        if not files:
            return False
        if len({tuple(sorted(ranks.items())) for _, ranks in files}) > 1:
            return True
        with open_source(files[0][0]) as source:
            return any(_is_joined_name(name) for name in source.tensors)
    except (AprfmtError, OSError):
        return False


def _is_joined_name(name: str) -> bool:
    """Return whether a name has a module that an engine joins or stacks, such as `qkv_proj`."""
    return any(part in JOINED or part in STACKED for part in name.split("."))


def _rank_files(path: Path) -> list[tuple[Path, Mapping[str, int]]]:
    """Return (file, {parallel axis: rank}) of each file of a state; [] if there are none.

    The ranks come from the paths, as in `tp_rank_01`. A single file has no ranks.
    """
    if path.is_file():
        return [(path, {})] if path.suffix in _SUFFIXES else []
    if not path.is_dir():
        return []
    found = []
    for one in sorted(
        [
            *path.iterdir(),
            *(inner for each in path.iterdir() if each.is_dir() for inner in each.iterdir()),
        ]
    ):
        if one.is_file() and one.suffix in _SUFFIXES:
            below = one.relative_to(path).as_posix().removesuffix(one.suffix)
            ranks = parse_dump_path(below).ranks
            if ranks:
                found.append((one, ranks))
    return found


@dataclass(frozen=True)
class _RankTensor:
    """One tensor name of an engine's state: its parts, and the rank each part is from."""

    name: str
    parts: tuple[LazyTensor, ...]
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first rank's part."""
        return self.parts[0].info.shape


class EngineTensor(LazyTensor):
    """A tensor under the model's name, assembled from the ranks' parts when its bytes are read."""

    __slots__ = ("_made", "_make", "_parts", "info")

    info: TensorInfo

    def __init__(self, info: TensorInfo, parts: Sequence[LazyTensor], make: Any) -> None:
        """Store the description, the ranks' parts, and `make`, which assembles the array."""
        self.info, self._parts, self._make = info, tuple(parts), make
        self._made: memoryview | None = None

    @property
    def makes(self) -> bool:
        """True: the bytes are computed from other tensors."""
        return True

    @property
    def made_of(self) -> tuple[LazyTensor, ...]:
        """The ranks' tensors that this one is assembled from."""
        return self._parts

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the assembled tensor; it is assembled at the first call."""
        if self._made is None:
            made: Cells = self._make()
            self._made = memoryview(made.tobytes())
        return self._made[start : self.info.nbytes if stop is None else stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Free the assembled bytes once `stop` reaches the end of the tensor."""
        if stop is None or stop >= self.info.nbytes:
            self._made = None


@dataclass
class EngineState:
    """An engine's weights as a Source: tensors under the published model's names."""

    path: Path
    files: tuple[Path, ...]
    format: str
    tensors: Mapping[str, LazyTensor]
    notes: Sequence[Note]
    close_all: ExitStack
    version: str = ""
    metadata: Mapping[str, Value] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    damage: Sequence[Damage] = ()

    def close(self) -> None:
        """Close the files of all ranks."""
        self.close_all.close()

    def __enter__(self) -> "EngineState":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_engine_state(path: Path, published: Model) -> Model:
    """Return an engine's weights as a Model under the tensor names of `published`.

    Raises UsageError where `published` is no Hugging Face folder, FormatError where a rank is
    missing or no tensor of the state belongs to the model.
    """
    if published.folder is None or published.folder.config is None:
        raise UsageError(
            f"{published.path}: an engine's state is read by the names and config.json of a "
            "Hugging Face folder; give that as the first model"
        )
    with ExitStack() as stack:
        # All ranks' tensors by name, and the published tensors found among them.
        files = _rank_files(path)
        sources = [(stack.enter_context(open_source(file)), ranks) for file, ranks in files]
        held = _group_by_name(path, sources)
        reader = _StateReader(path, published, held)
        tensors = dict(reader.tensors())
        if not tensors:
            _refuse_unrelated(path, held, published)
        reader.note_released()
        # What the published model does not have is listed under its own name.
        left = [
            name
            for name, one in held.items()
            if name not in reader.used and not name.endswith(COMPUTED) and not _is_unit_scale(one)
        ]
        for name in left:
            if not reader.is_tied(name):
                tensors[name] = held[name].parts[0]
        state = EngineState(
            path,
            tuple(file for file, _ in files),
            sources[0][0].format,
            tensors,
            tuple(reader.notes),
            stack.pop_all(),
        )
    return Model(state, published.folder, published.forced, published.allow_missing)


def _group_by_name(
    path: Path, sources: Sequence[tuple[Source, Mapping[str, int]]]
) -> dict[str, _RankTensor]:
    """Return {name: its parts by rank}. FormatError for a rank that is missing or given twice."""
    axes = [axis for axis in ("tp", "ep", RANK) if any(axis in ranks for _, ranks in sources)]
    axis = axes[0] if axes else ""
    numbers = sorted({ranks.get(axis, 0) for _, ranks in sources})
    if numbers and numbers != list(range(numbers[-1] + 1)):
        lost = sorted(set(range(numbers[-1] + 1)) - set(numbers))
        raise FormatError(
            f"{path}: {axis} rank {', '.join(map(str, lost[:8]))} of {numbers[-1] + 1} is missing"
        )
    found: dict[str, dict[int, LazyTensor]] = {}
    for source, ranks in sources:
        for name, tensor in source.tensors.items():
            held = found.setdefault(name, {})
            number = ranks.get(axis, 0)
            if number in held and ranks.get("pp") is None:
                raise FormatError(
                    f"{path}: {shorten(name, 80)!r} of {axis or 'the'} rank {number} "
                    f"is there twice, the second in {source.path.name}"
                )
            held.setdefault(number, tensor)
    made = {}
    for name, parts in found.items():
        order = sorted(parts)
        made[name] = _RankTensor(name, tuple(parts[one] for one in order), tuple(order))
    return made


def _is_unit_scale(one: _RankTensor) -> bool:
    """Return whether a tensor is a scale of attention that nothing set: float32, all 1."""
    return one.name.endswith(UNIT_SCALES) and all(
        part.info.encoding == "F32" and bool(np.all(np.frombuffer(part.raw(), "<f4") == 1))
        for part in one.parts
    )


def _refuse_unrelated(path: Path, held: Mapping[str, _RankTensor], published: Model) -> None:
    """Raise FormatError: no tensor of the state matches a tensor of the published model."""
    names = [f"{shorten(name, 60)} {list(one.shape)}" for name, one in held.items()]
    near = ", ".join(list(published)[:_SHOWN])
    raise FormatError(
        f"{path}: none of its {len(names)} tensors is one of {published.path} "
        f"({', '.join(names[:_SHOWN])}, ...); expected names such as {near}, or those joined "
        f"({', '.join([*JOINED, *STACKED][:4])})"
    )


class _StateReader:
    """Finds each tensor of a published model in an engine's state.

    `used` collects the state's names that were needed, `notes` remarks for the user.
    """

    def __init__(self, path: Path, published: Model, held: Mapping[str, _RankTensor]) -> None:
        """Store the published model and `held`, the state's tensors by name."""
        self._path, self._model, self._held = path, published, held
        self.used: set[str] = set()
        self.notes: list[Note] = []
        self._empty: dict[str, None] = {}
        hyper = published.hyper
        self._head = int(hyper["head_dim"] or 1)

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield (published name, tensor) for each published tensor that the state has."""
        for name, tensor in self._model.source.tensors.items():
            found = self._find_tensor(name, tensor)
            if found is not None:
                yield name, found

    def _find_tensor(self, name: str, published: LazyTensor) -> LazyTensor | None:
        """Return the state's tensor for a published one, cut out of a joined tensor if need be.

        None if the state does not have it. `published` is the tensor in the model's own file.
        """
        own = self._held.get(name)
        if own is not None:
            self.used.add(name)
            if _is_released(own, published):
                return self._released(name, published, own)
            return self._joined_part(name, published, own, [published.info.shape], 0)
        above, _, leaf = name.rpartition(".")
        base, _, module = above.rpartition(".")
        for joined, parts in JOINED.items():
            whole = self._held.get(f"{base}.{joined}.{leaf}")
            if module in parts and whole is not None:
                sizes = [self._published_shape(f"{base}.{part}.{leaf}") for part in parts]
                if None in sizes:
                    continue
                self.used.add(whole.name)
                if _is_released(whole, published):
                    return self._released(name, published, whole)
                shapes = [size for size in sizes if size is not None]
                return self._joined_part(name, published, whole, shapes, parts.index(module))
        return self._find_expert(name, published, base, module)

    def _find_expert(
        self, name: str, published: LazyTensor, base: str, module: str
    ) -> LazyTensor | None:
        """Return one expert's matrix, cut out of a stack of all experts; None without a stack.

        `base` is the name of the expert (`...experts.3`), `module` its matrix (`up_proj`).
        """
        above, _, number = base.rpartition(".")
        if not number.isdigit():
            return None
        for stacked, rows in STACKED.items():
            whole = self._held.get(f"{above}.{stacked}")
            parts = next((row for row in rows if module in row), None)
            if whole is None or parts is None:
                continue
            self.used.add(whole.name)
            if _is_released(whole, published):
                return self._released(name, published, whole)
            expert, at = int(number), parts.index(module)
            count = whole.shape[0]
            ranks = len(whole.parts)
            experts = int(self._model.hyper["n_experts"] or count)
            if count < experts and count * ranks == experts:  # expert parallel
                holder = _RankTensor(
                    whole.name, (whole.parts[expert // count],), (expert // count,)
                )
                return self._expert_slice(name, published, holder, expert % count, len(parts), at)
            return self._expert_slice(name, published, whole, expert, len(parts), at)
        return None

    def _expert_slice(
        self,
        name: str,
        published: LazyTensor,
        shares: _RankTensor,
        expert: int,
        count: int,
        at: int,
    ) -> LazyTensor | None:
        """Return matrix `at` of an expert's `count` joined matrices; None if out of range.

        The shares of all ranks are joined. Stacks are [experts, rows of all matrices, columns].
        """
        if expert >= shares.shape[0]:
            return None
        shape = published.info.shape

        def make() -> Cells:
            """Return the expert's elements: each rank's share, joined along the cut axis."""
            made = []
            for part in shares.parts:
                cells = _element_array(part)[expert]
                made.append(np.split(cells, count, 0)[at] if count > 1 else cells)
            if len(made) == 1 or made[0].shape == shape:
                return made[0]
            return np.concatenate(made, 0 if made[0].shape[1] == shape[1] else 1)

        return self._engine_tensor(name, shares, make, shape)

    def _published_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of the published model, None if it has none of that name."""
        tensor = self._model.source.tensors.get(name)
        return None if tensor is None else tensor.info.shape

    def _joined_part(
        self,
        name: str,
        published: LazyTensor,
        shares: _RankTensor,
        shapes: Sequence[tuple[int, ...]],
        at: int,
    ) -> LazyTensor:
        """Return matrix `at` of a joined tensor, with the shares of all ranks concatenated.

        `shapes` are the published shapes of the matrices that are joined along their rows. Where
        the shares do not add up, the first rank's tensor is returned as it is stored.
        """
        # A tensor that every rank holds whole.
        ranks, local, wanted = len(shares.parts), shares.shape, shapes[at]
        if at == 0 and (len(shapes) > 1 or local != wanted):
            self._note_doubled(shares, published)
        module = name.split(".")[-2] if "." in name else name
        if len(shapes) == 1 and local == wanted:
            return self._replicated(name, published, shares)
        # A matrix whose columns are divided among the ranks.
        if module in COLUMNS and len(local) == 2 and local[0] == wanted[0]:
            return self._engine_tensor(
                name,
                shares,
                lambda: np.concatenate([_element_array(one) for one in shares.parts], 1),
                (local[0], sum(one.info.shape[1] for one in shares.parts)),
            )
        # Rows that each rank has of each joined matrix; else a padded table.
        sizes = [
            _rows_per_rank(shape[0], ranks, self._head if len(shapes) == 3 else 1)
            for shape in shapes
        ]
        if sum(sizes) != local[0]:
            if module in TABLES and local[0] * ranks >= wanted[0]:
                return self._vocabulary_table(name, shares, wanted)
            return self._engine_tensor(name, shares, lambda: _element_array(shares.parts[0]), local)
        # Cut this matrix out of every rank's rows, and join the ranks.
        first = sum(sizes[:at])
        copies = max(1, sizes[at] * ranks // wanted[0])
        shape = (sizes[at] * len(range(0, ranks, copies)), *wanted[1:])

        def make(start: int) -> Cells:
            """Return the matrix's rows from ranks `start`, `start` + `copies`, ..., joined."""
            cut = [_element_array(one)[first : first + sizes[at]] for one in shares.parts]
            return np.concatenate(cut[start::copies], 0)

        start = 0
        if copies > 1:  # ranks that share key heads
            made = [make(one).tobytes() for one in range(copies)]
            if len(set(made)) > 1:
                own = bytes(published.raw())
                start = next((one for one, raw in enumerate(made) if raw != own), 0)
                self._note_unequal_ranks(name, shares.ranks[start], "a key head that ranks share")
        return self._engine_tensor(name, shares, lambda: make(start), shape)

    def _released(self, name: str, published: LazyTensor, shares: _RankTensor) -> LazyTensor:
        """Return a tensor of the published shape whose bytes are not in the state."""
        self._empty[shares.name] = None
        part = next(one for one in shares.parts if not one.info.nbytes)
        place = part.lies()
        assert place is not None
        text = (
            f"{self._path}: {shorten(shares.name, 100)} holds no number (shape "
            f"{list(part.info.shape)}): the engine packed it for its kernel after loading; save "
            "the state before that"
        )
        info = replace(published.info, name=name)
        return AbsentTensor(place[0], info, UnsupportedError(text))

    def _note_doubled(self, shares: _RankTensor, published: LazyTensor) -> None:
        """Add a warning where two ranks hold one share, and the published tensor repeats nothing.

        A share of zeros or of one number is left to the comparison.
        """
        seen: dict[bytes, list[int]] = {}
        for number, part in enumerate(shares.parts):
            seen.setdefault(bytes(part.raw(0, min(_BEGIN, part.info.nbytes))), []).append(number)
        own = bytes(published.raw(0, min(_BEGIN, published.info.nbytes)))
        for begin, numbers in seen.items():
            first = shares.parts[numbers[0]]
            twins = [n for n in numbers[1:] if bytes(shares.parts[n].raw()) == bytes(first.raw())]
            if not twins or len(set(begin)) < _VARIED or len(set(own)) < _VARIED:
                continue
            ranks = ", ".join(str(shares.ranks[n]) for n in (numbers[0], *twins))
            text = f"{shorten(shares.name, 100)}: ranks {ranks} hold the same share of it"
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def note_released(self) -> None:
        """Add a warning that names the parameters without numbers, if there are any."""
        if self._empty:
            names = list(self._empty)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = (
                f"{len(names)} parameters hold no numbers, as the engine packed them for its "
                f"kernels after loading ({', '.join(names[:_SHOWN])}{more}); save the state before "
                "that to have them compared"
            )
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def _note_unequal_ranks(self, name: str, rank: int, what: str) -> None:
        """Add a warning that ranks hold different values, and which rank's is compared."""
        text = f"{name}: ranks hold other values of {what}; rank {rank}'s is compared"
        self.notes.append(Note("warning", str(self._path), text, "remark"))

    def _replicated(self, name: str, published: LazyTensor, shares: _RankTensor) -> LazyTensor:
        """Return a tensor that each rank holds whole: the first rank's if all are equal.

        Else the first rank's that is unlike the published model's, with a warning.
        """
        chosen = shares.parts[0]
        if len(shares.parts) > 1:
            all_bytes = [bytes(part.raw()) for part in shares.parts]
            if len(set(all_bytes)) > 1:
                own = bytes(published.raw())
                odd = next((at for at, raw in enumerate(all_bytes) if raw != own), 0)
                chosen = shares.parts[odd]
                self._note_unequal_ranks(name, shares.ranks[odd], "what every rank has whole")
        return self._engine_tensor(name, shares, lambda: _element_array(chosen), chosen.info.shape)

    def _vocabulary_table(
        self, name: str, shares: _RankTensor, wanted: tuple[int, ...]
    ) -> LazyTensor:
        """Return a vocabulary table of all ranks, cut to `wanted`, the published shape.

        A note says whether the padding rows after it are zero.
        """
        total = sum(one.info.shape[0] for one in shares.parts)
        if total > wanted[0]:
            behind = _element_array(shares.parts[-1])[wanted[0] - total :]
            zero = not np.any(np.frombuffer(behind.tobytes(), np.uint8))
            kind = "zeros" if zero else "no zeros, and were not compared"
            text = f"{name}: {total - wanted[0]} rows behind the vocabulary are {kind}"
            level = "note" if zero else "warning"
            self.notes.append(Note(level, str(self._path), text, "remark"))
        return self._engine_tensor(
            name,
            shares,
            lambda: np.concatenate([_element_array(one) for one in shares.parts], 0)[: wanted[0]],
            wanted,
        )

    def _engine_tensor(
        self, name: str, shares: _RankTensor, make: Any, shape: tuple[int, ...]
    ) -> LazyTensor:
        """Return an EngineTensor of this shape whose bytes `make` assembles."""
        encoding = shares.parts[0].info.encoding
        row = ENCODINGS[encoding]
        info = TensorInfo(name, shape, encoding, 0, row.nbytes(shape), row.row_bytes(shape))
        return EngineTensor(info, shares.parts, make)

    def is_tied(self, name: str) -> bool:
        """Return whether a tensor is a copy of the embedding that the published model lacks.

        Such as the output head of a model whose head is its embedding.
        """
        module = name.split(".")[-2] if "." in name else name
        if module not in TABLES or name in self._model.source.tensors:
            return False
        tables = (one for key, one in self._held.items() if key.endswith("embed_tokens.weight"))
        table = next(tables, None)
        return table is not None and all(
            bytes(x.raw()) == bytes(y.raw())
            for x, y in zip(table.parts, self._held[name].parts, strict=False)
        )


def _is_released(shares: _RankTensor, published: LazyTensor) -> bool:
    """Return whether a rank's part has no bytes where the published tensor has some."""
    return bool(published.info.nbytes) and any(not one.info.nbytes for one in shares.parts)


def _rows_per_rank(rows: int, ranks: int, head: int) -> int:
    """Return how many rows of a matrix each rank has: whole heads of `head` rows, at least one."""
    return max(rows // ranks, head) if head > 1 else rows // ranks


def _element_array(tensor: LazyTensor) -> Cells:
    """Return a stored tensor as an array of opaque elements, without decoding it.

    Raises FormatError for a block encoding, in which an element has no bytes alone.
    """
    shape, count = tensor.info.shape, math.prod(tensor.info.shape)
    size, rest = divmod(tensor.info.nbytes, max(count, 1))
    if rest or (count and not size):
        raise FormatError(
            f"{tensor.info.name}: {tensor.info.encoding} has no bytes of its own for "
            "each element, and is not put together"
        )
    return np.frombuffer(tensor.raw(), f"V{max(size, 1)}").reshape(shape)
