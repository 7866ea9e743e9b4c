"""Reads the weights that an engine saved, under the tensor names of the published model.

A *state* is the weights that an engine saved, a *parameter* one tensor of it. A rank's *share* is
what it holds of a parameter, a *part* what a parameter holds of one published tensor. A *reading*
says how a parameter is cut into published tensors.

`torch.save(model.state_dict())` of vLLM, SGLang or Megatron Core has q, k and v as one matrix, gate
and up as one, all experts of a layer as a stack, and with tensor, expert or pipeline parallelism a
file for each rank. Each tensor of the model is assembled from these, so that whatever compares
models compares it. Which parameters an architecture has there is said by arch/engine_parameters.py.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import numpy as np

from aprfmt.arch.binding import bind_names
from aprfmt.arch.engine_parameters import (
    ENGINE_MODULES,
    EngineParameter,
    Part,
    companion_parameter,
    find_layout,
    list_parameters,
    may_share_keys,
    role_base,
    whole_parameter,
)
from aprfmt.arch.spec import split_key
from aprfmt.base.dump_names import RANK, parse_dump_path, rank_of_axis
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.name_copies import copies_text, prefix_to_read, repeated_prefixes
from aprfmt.base.protocols import Damage, LazyTensor, Note, Source, TensorInfo, Value
from aprfmt.base.sequences import first_and_more
from aprfmt.base.text_escape import shorten
from aprfmt.errors import AprfmtError, FormatError, UnsupportedError, UsageError
from aprfmt.formats import open_source
from aprfmt.formats.foreign_formats import ZERO_FILE, ZERO_SHARD
from aprfmt.formats.pytorch.state_dict import ALONE
from aprfmt.formats.pytorch.tensor import AbsentTensor
from aprfmt.model import Model
from aprfmt.model.engine_repacks import undo_repacks
from aprfmt.model.hf_folder import model_candidates, pickled_weights, read_folder
from aprfmt.model.placed_parts import join_placed_parts
from aprfmt.model.rank_tensors import (
    Cells,
    EngineReading,
    RankTensor,
    element_array,
    in_published_axes,
)
from aprfmt.tensors.runs import are_same_tensor
from aprfmt.tensors.view import decode_tensor

# Ends of names that an engine computes and nobody publishes.
COMPUTED = (
    ".cos_sin_cache",
    ".inv_freq",
    ".rotary_emb.sin",
    ".rotary_emb.cos",
    "._extra_state",
    ".attn.masked_bias",
    ".attn.bias",
)
# What a trainer saves next to the weights.
NO_WEIGHTS = (
    "optimizer.", "optimizer_state_dict.", "optimizer_states.", "opt_param_scheduler.",
    "rng_state.", "args.",
)  # fmt: skip
# A module around a layer, in a server that can add adapters (vLLM's lora/layers, PEFT).
_AROUND_A_LAYER = ".base_layer."
# Scales of vLLM's attention (vllm/attention/layer.py), which are 1 where no checkpoint sets them.
UNIT_SCALES = ("._k_scale", "._v_scale", "._q_scale", "._prob_scale")
_DECODED = ("F64", "F32", "F16", "BF16")  # what an engine may have of packed weights' values
_OF_KEYS = ("attn_k", "attn_v", "attn_k_norm", "attn_v_norm")  # roles of keys and values
# A layer's number in a name, and what is after it.
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.+)$")
# An expert of Megatron Core: `local_experts.3.linear_fc1.weight`, `linear_fc1.weight3`.
_EXPERT = re.compile(
    r"(.+\.experts)\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d+)?"
)
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_PICKLED = (".pt", ".pth", ".ckpt")
# The number of a part and how many there are, at the end of a file's name.
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_PART_OF_RANK = re.compile(r"(?:^|[-_.])part[-_]?\d+$")
_ENDS = (".weight", ".bias")  # of the names of parameters
_WRAPPERS = 4  # parts of a name that wrappers put before it, at most
_SHOWN = 3
_SHARES = 3  # tensors of too small a shape, at least, that show a rank's state to be alone
_MOST_RANKS = 64
_NORMS = ("norm",)  # ends of the roles of norms
_ONE_ADDED = ("gemma",)  # sglang/srt/models/gemma.py, load_weights (0.5.23)
# What vLLM's fp8_utils.py fills the slots of scales with; of these it takes the largest.
_UNSET = np.finfo("<f4").min.tobytes()
_BEGIN = 4096  # bytes of a share that are compared before the whole of it
_VARIED = 8  # different bytes that a share of trained or random numbers begins with, at least


def is_engine_state(path: Path) -> bool:
    """Return whether a path holds the weights that an engine saved from its memory.

    It does if it is a folder with files of ranks, or a file or folder of files with names of joined
    or stacked matrices.
    """
    try:
        files = _state_files(path)
        # No model's folder has files of ranks alone, be it of one.
        return any(ranks or _has_engine_names(file) for file, ranks in files)
    except (AprfmtError, OSError):
        return False


def _has_engine_names(file: Path) -> bool:
    """Return whether a file has a tensor of a module that only an engine has, as qkv_proj."""
    with open_source(file) as source:
        names = _own_names(source)
        return any(not ENGINE_MODULES.isdisjoint(name.split(".")) for name in names)


def _own_names(source: Source) -> Mapping[str, LazyTensor]:
    """Return the tensors of a file by name: of a tensor that was saved alone the file's name."""
    alone = source.tensors.get(ALONE) if len(source.tensors) == 1 else None
    stem = source.path.stem
    return source.tensors if alone is None or not stem.endswith(_ENDS) else {stem: alone}


def is_saved_state(path: Path, published: Model) -> bool:
    """Return whether a path holds a state whose tensors have the names of `published`.

    It is a file of torch.save, or a folder with a state in several files. Most of its tensors have
    names of `published`, which has a configuration. In a folder the names may begin with those of a
    wrapper; the prefix of a single file is found when it is opened as a model.
    """
    if published.folder is None or published.folder.config is None:
        return False
    files = _parts_of_state(path) if path.is_dir() else [path]
    if not files or (not path.is_dir() and path.suffix not in _PICKLED):
        return False
    names: set[str] = set()
    try:
        for file in files:
            with open_source(file) as source:
                names |= _own_names(source).keys()
    except (AprfmtError, OSError):
        return False
    known = published.source.tensors.keys()
    found = (_names_without_prefix(name) if path.is_dir() else [name] for name in names)
    return 2 * sum(not known.isdisjoint(each) for each in found) > len(names)


def _names_without_prefix(name: str) -> list[str]:
    """Return a name, and what is left of it without its first one to four dotted components.

    A wrapper around a model, such as `_orig_mod.` or `actor.module.`, puts these before its names.
    """
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(min(_WRAPPERS + 1, len(parts)))]


def _state_files(path: Path) -> list[tuple[Path, Mapping[str, int]]]:
    """Return (file, {parallel axis: rank}) of each file of a state; [] if there are none.

    Ranks come from the paths, as in `tp_rank_01`. There are none for a single file, for a state
    that is stored in several numbered files, and for the only model of a folder. That model counts
    only if it has names that an engine alone uses.
    """
    if path.is_file():
        return [(path, {})] if path.suffix in _SUFFIXES else []
    if not path.is_dir():
        return []
    found = []
    for one in _saved_files(path):
        below = one.relative_to(path).as_posix().removesuffix(one.suffix)
        ranks = parse_dump_path(below).ranks
        if ranks:
            found.append((one, ranks))
    if found:
        return found
    parts = _parts_of_state(path)
    if parts:
        return [(one, {}) for one in parts]
    return [(one, {}) for one in _lone_model(path) if _has_engine_names(one)]


def _parts_of_state(folder: Path) -> list[Path]:
    """Return the sorted files of weights that together hold one state without an index.

    All are safetensors or all are pickles. A single file counts if its name is numbered, as
    `-00001-of-00002`. [] for any other folder: with a config.json, with an index, or with a file
    whose name has a rank (`tp_rank_01`) or the number of a pass.
    """
    if (folder / "config.json").is_file() or any(folder.glob("*.index.json")):
        return []
    stored = [one for one in sorted(folder.glob("[!.]*.safetensors")) if one.is_file()]
    pickled = pickled_weights(folder)
    found = stored or pickled
    places = [parse_dump_path(one.stem) for one in found]
    if (stored and pickled) or any(one.ranks or one.step is not None for one in places):
        return []
    return found if len(found) > 1 or any(_PART.search(one.stem) for one in found) else []


def _refuse_missing_parts(folder: Path, files: Iterable[Path]) -> None:
    """Raise FormatError where a numbered file of a state is missing, by the names of the others.

    Files are numbered from 1, or from 0 where there is a file 0.
    """
    there: dict[tuple[str, int], set[int]] = {}
    for file in files:
        said = _PART.search(file.stem)
        if said is not None:
            whole = file.stem[: said.start()], int(said[2])
            there.setdefault(whole, set()).add(int(said[1]))
    for (name, count), numbers in there.items():
        first = min(1, *numbers)
        lost = [str(one) for one in range(first, first + count) if one not in numbers]
        if lost:
            raise FormatError(
                f"{folder}: of the {count} parts of {shorten(name, 80)!r} "
                f"{first_and_more(lost, _SHOWN)} {'is' if len(lost) == 1 else 'are'} missing; "
                "get all of them"
            )


def _lone_model(folder: Path) -> list[Path]:
    """Return [path] of the only model in a folder (its index or first shard if split), else [].

    [] where the folder has a config.json, no weights, or several models.
    """
    if (folder / "config.json").is_file():
        return []
    found = [*model_candidates(folder), *pickled_weights(folder)]
    return found if len(found) == 1 else []


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a folder and of its folders that may hold weights, sorted."""
    inner = [one for each in folder.iterdir() if each.is_dir() for one in each.iterdir()]
    return [
        one
        for one in sorted([*folder.iterdir(), *inner])
        if one.is_file() and one.suffix in _SUFFIXES
    ]


def _open_shared_files(
    path: Path,
    of_ranks: Collection[Path],
    by_name: Collection[str],
    published: Model,
    stack: ExitStack,
) -> list[Source]:
    """Return the opened files of a state's folder whose tensors every rank shares.

    Such a file has no rank in its name, as `-TP-common.safetensors` next to `-TP-000.safetensors`.
    Most of its names are `published`'s, and none is in a rank's file (`by_name`). `stack` closes
    it. A file that cannot be read is left out.
    """
    found: list[Source] = []
    known = set(by_name)
    suffixes = {file.suffix for file in of_ranks}
    for one in _saved_files(path) if path.is_dir() else []:
        if one in of_ranks or one.suffix not in suffixes:
            continue
        try:
            source = open_source(one)
        except (AprfmtError, OSError):
            continue
        names = source.tensors.keys()
        named = 2 * len(names & published.source.tensors.keys()) > len(names)
        if named and known.isdisjoint(names):
            known |= names
            found.append(stack.enter_context(source))
        else:
            source.close()
    return found


def _other_files(path: Path, read: Collection[Path], ranked: bool) -> list[Note]:
    """Return a warning about the files of a state's folder that are not `read`; [] without any.

    `ranked`: the names of the others say their ranks.
    """
    others = [one for one in _saved_files(path) if one not in read] if path.is_dir() else []
    if not others:
        return []
    names = first_and_more(
        others, _SHOWN, lambda one: shorten(one.relative_to(path).as_posix(), 60)
    )
    text = f"{names}: not read" + (", no rank in the name" if ranked else "")
    return [Note("warning", str(path), text, "remark")]


class StackedExperts(LazyTensor):
    """The experts of one rank, which Megatron has as a tensor each, as one tensor."""

    __slots__ = ("_experts", "info")

    info: TensorInfo
    makes = True

    def __init__(self, name: str, experts: Sequence[LazyTensor]) -> None:
        """Store the experts' tensors, in their order, all of the first one's shape."""
        first = experts[0].info
        shape = (len(experts), *first.shape)
        row = ENCODINGS[first.encoding]
        self._experts = tuple(experts)
        self.info = TensorInfo(
            name, shape, first.encoding, 0, row.nbytes(shape), row.row_bytes(shape)
        )

    @property
    def made_of(self) -> tuple[LazyTensor, ...]:
        """The experts' tensors."""
        return self._experts

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the experts one after the other."""
        whole = b"".join(bytes(one.raw()) for one in self._experts)
        return memoryview(whole)[start : self.info.nbytes if stop is None else stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of all experts."""
        for one in self._experts:
            one.drop()


class EngineTensor(LazyTensor):
    """A tensor under the model's name, assembled from the ranks' shares when its bytes are read."""

    __slots__ = ("_made", "_make", "_parts", "info", "reading")

    info: TensorInfo

    def __init__(
        self,
        info: TensorInfo,
        parts: Sequence[LazyTensor],
        make: Callable[[], Cells],
        reading: EngineReading | None = None,
    ) -> None:
        """Store the description, the ranks' shares, and `make`, which assembles the array.

        `reading` says how the shares are read; None where they fit no parameter.
        """
        self.info, self._parts, self._make, self.reading = info, tuple(parts), make, reading
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
    of_engine: bool = True

    def close(self) -> None:
        """Close the files of all ranks."""
        self.close_all.close()

    def __enter__(self) -> "EngineState":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_engine_state(path: Path, published: Model) -> Model:
    """Return an engine's weights as a Model under the tensor names of `published`.

    The configuration and tokenizer are those of the state's folder where it has any, else those of
    `published`. Raises UsageError where `published` is no Hugging Face folder, FormatError where a
    rank is missing or no tensor of the state belongs to the model.
    """
    if published.folder is None or published.folder.config is None:
        raise UsageError(
            f"{published.path}: an engine's state is read by the names and config.json of a "
            "Hugging Face folder; give that as the first model"
        )
    with ExitStack() as stack:
        # All ranks' tensors by name, and the published tensors found among them.
        files = _state_files(path)
        if path.is_dir():
            _refuse_missing_parts(path, _parts_of_state(path))
        sources = [(stack.enter_context(open_source(file)), ranks) for file, ranks in files]
        by_name = _group_by_name(path, sources)
        own = [file for source, _ in sources for file in source.files]
        shared = _open_shared_files(path, own, by_name, published, stack)
        by_name |= {
            name: RankTensor(name, (tensor,), (0,))
            for source in shared
            for name, tensor in source.tensors.items()
        }
        by_name = _without_layers_around(by_name)
        by_name, aside, copies = _without_copies(path, by_name, published)
        reader = _read_as_loaded(path, published, by_name)
        reader.notes += copies
        tensors = dict(reader.tensors())
        if not tensors:
            _refuse_unrelated(path, by_name, published)
        reader.refuse_missing_ranks()
        reader.note_released()
        read = [*own, *(source.path for source in shared)]
        reader.notes += _other_files(path, read, any(ranks for _, ranks in files))
        reader.note_padding()
        reader.note_added_ones(tensors)
        # What the published model does not have is listed under its own name.
        unmatched = [
            name
            for name, one in by_name.items()
            if name not in reader.used
            and not name.endswith(COMPUTED)
            and not name.startswith(NO_WEIGHTS)
            and not _is_unit_scale(one)
            and not reader.is_unused_kv(name, one)
        ]
        for name in reader.without_aliases(unmatched):
            tensors[name] = by_name[name].parts[0]
        tensors |= {name: one.parts[0] for name, one in aside.items()}
        state = EngineState(
            path, tuple(read), sources[0][0].format, tensors, tuple(reader.notes), stack.pop_all()
        )
    folder = read_folder(path) if (path / "config.json").is_file() else published.folder
    return Model(state, folder, published.forced, published.allow_missing)


def _without_layers_around(by_name: Mapping[str, RankTensor]) -> dict[str, RankTensor]:
    """Return a state's tensors by the names of layers without what may add an adapter to them."""
    found: dict[str, RankTensor] = {}
    for name, one in by_name.items():
        own = name.replace(_AROUND_A_LAYER, ".", 1)
        own = name if own in by_name else own
        found[own] = RankTensor(own, one.parts, one.ranks)
    return found


def _without_copies(
    path: Path, by_name: Mapping[str, RankTensor], published: Model
) -> tuple[dict[str, RankTensor], dict[str, RankTensor], list[Note]]:
    """Return (the model's own tensors by name, other copies such as an average, a note on them).

    A trainer saves a model and its average under two prefixes, such as `model.` and `ema.`; the own
    tensors get names without theirs. The copies and the notes are empty if the state repeats no
    names, or if the published model has repeated names itself, as in two equal towers.
    """
    shapes = {name: one.shape for name, one in by_name.items()}
    prefixes = repeated_prefixes(shapes)
    towers = {name: tuple(one.info.shape) for name, one in published.source.tensors.items()}
    if not prefixes or repeated_prefixes(towers):
        return dict(by_name), {}, []
    own = prefix_to_read(prefixes)
    others = tuple(one for one in prefixes if one != own and one)
    aside = {name: one for name, one in by_name.items() if name.startswith(others)}
    found = {
        short: RankTensor(short, one.parts, one.ranks)
        for name, one in by_name.items()
        if name not in aside and (short := name.removeprefix(own))
    }
    read = f"those under {own}" if own else "those without a prefix"
    said = copies_text(prefixes, shapes, "" if path.is_dir() else str(path))
    text = f"{said}; {read} are compared"
    return found, aside, [Note("warning", str(path), text, "remark")]


def _read_as_loaded(path: Path, published: Model, by_name: dict[str, RankTensor]) -> "_StateReader":
    """Return a reader of a state's tensors in the layout in which they were loaded.

    Tensors that the engine laid out for its kernels are replaced in `by_name`, and the reader gets
    a note about them.
    """
    reader = _StateReader(path, published, by_name)
    undone, said = undo_repacks(reader.parameters(), reader.published, published.hyper)
    if undone:
        by_name |= undone
        reader = _StateReader(path, published, by_name)
        reader.notes += [Note("warning", str(path), text, "remark") for text in said]
    return reader


class StateNames:
    """Finds an engine's tensor by the names that a checkpoint gives the same tensor.

    A wrapper around the model (`module.`, `language_model.`) and other names of a block's modules
    do not matter, as long as only one tensor's name ends alike.
    """

    def __init__(self, held: Mapping[str, RankTensor]) -> None:
        """Take the state's tensors by name."""
        self._held = held
        self._tails: dict[tuple[str, str], list[str]] = {}

    def find_exactly(self, names: Sequence[str]) -> RankTensor | None:
        """Return the state's tensor of the first of these names that it has; None without one."""
        return next((self._held[name] for name in names if name in self._held), None)

    def claim(self, names: Iterable[str]) -> None:
        """Prepare the search by endings over all names of the state but these, which are taken."""
        claimed = set(names)
        for name in self._held.keys() - claimed:
            for tail in _name_tails(name):
                self._tails.setdefault(tail, []).append(name)

    def forget(self, names: Collection[str]) -> None:
        """Leave these names out of the search by endings as well."""
        for tail, known in self._tails.items():
            self._tails[tail] = [name for name in known if name not in names]

    def find_by_ending(self, names: Sequence[str]) -> RankTensor | None:
        """Return the state's tensor whose name ends like one of these; None without one.

        The names are tried in order. The longest ending of a name that the state has is used; if
        several of the state's tensors have it, the next name is tried.
        """
        for name in names:
            for tail in _name_tails(name):
                found = self._tails.get(tail, [])
                if found:
                    if len(found) == 1:
                        return self._held[found[0]]
                    break
        return None


def _name_tails(name: str) -> list[tuple[str, str]]:
    """Return (layer number, ending) for each ending by which a tensor's name may be found.

    Endings are whole components of the name after the layer number, the longest first. Outside
    layers the number is "", and the only ending is the last two components.
    """
    found = _LAYER.search(name)
    layer, tail = (found[1], found[2]) if found else ("", name)
    parts = tail.split(".")
    least = 1 if found and parts[-1] not in ("weight", "bias") else 2
    if not found:
        return [(layer, ".".join(parts[-2:]))]
    return [(layer, ".".join(parts[at:])) for at in range(max(1, len(parts) - least + 1))]


def _group_by_name(
    path: Path, sources: Sequence[tuple[Source, Mapping[str, int]]]
) -> dict[str, RankTensor]:
    """Return {name: RankTensor} of all files' tensors, each with the ranks' shares in order.

    A tensor of a trainer whose files say where parts belong is one part, put together. Layers that
    each rank of a pipeline numbers from 0, as Megatron does, get their numbers in the whole model.
    Experts of a rank that have a tensor each are stacked. Raises FormatError for a
    rank that is missing or given twice.
    """
    sources = _name_expert_ranks(sources)
    axes = [axis for axis in ("tp", "ep", RANK) if any(axis in ranks for _, ranks in sources)]
    axis = axes[0] if axes else ""
    numbered = [(one, next(iter(ranks.values()), at)) for at, (one, ranks) in enumerate(sources)]
    if not any(ranks for _, ranks in sources):
        placed = join_placed_parts(path, numbered)
        return _group_parts(path, [source for source, _ in sources], placed) | placed
    _refuse_ranks_given_twice(path, sources)
    _refuse_lost_rank_parts(path, sources)
    numbers = sorted({ranks.get(axis, 0) for _, ranks in sources})
    if numbers and numbers != list(range(numbers[-1] + 1)):
        lost = sorted(set(range(numbers[-1] + 1)) - set(numbers))
        raise FormatError(
            f"{path}: {axis} rank {', '.join(map(str, lost[:8]))} is missing; there are "
            f"{', '.join(map(str, numbers))}, and perhaps more"
        )
    placed = join_placed_parts(path, numbered)
    before = _layers_before(sources)
    found: dict[str, dict[int, LazyTensor]] = {}
    for source, ranks in sources:
        first = next((one for one in axes if one in ranks), axis)
        held_here = {name: one for name, one in source.tensors.items() if name not in placed}
        for own, tensor in _stack_experts(held_here).items():
            name = _renumber_layer(own, before.get(ranks.get("pp", 0), 0))
            # With both axes ranks of one tp rank hold the same but for their experts.
            expert = len(axes) > 1 and axes[1] == "ep" and ".experts." in name
            number = ranks.get("ep" if expert else first, 0)
            held = found.setdefault(name, {})
            again = len(axes) > 1 or "pp" in ranks
            if number in held and not (again and are_same_tensor(held[number], tensor)):
                which = rank_of_axis(first) if first else "the rank"
                raise FormatError(
                    f"{path}: {shorten(name, 80)!r} of {which} {number} "
                    f"is there twice, the second in {source.path.name}"
                    + (", with other values" if again else "")
                )
            held.setdefault(number, tensor)
    made = dict(placed)
    for name, parts in found.items():
        order = sorted(parts)
        made[name] = RankTensor(name, tuple(parts[one] for one in order), tuple(order))
    return made


def _group_parts(
    path: Path, sources: Sequence[Source], placed: Collection[str]
) -> dict[str, RankTensor]:
    """Return {name: RankTensor} of the tensors of files that together are one state of one rank.

    Those named in `placed` are left out. A name may be in two files with the same values. Raises
    FormatError where the values differ.
    """
    found: dict[str, tuple[Source, LazyTensor]] = {}
    for source in sources:
        for name, tensor in _own_names(source).items():
            if name in placed:
                continue
            first, held = found.setdefault(name, (source, tensor))
            if first is not source and not are_same_tensor(held, tensor):
                raise FormatError(
                    f"{path}: {shorten(name, 80)!r} is in {_relative_path(first, path)} and in "
                    f"{_relative_path(source, path)}, with other values: keep the files of one "
                    "state, or say in their names of which rank each is, as tp_rank_0"
                )
    tensors = _stack_experts({name: tensor for name, (_, tensor) in found.items()})
    return {name: RankTensor(name, (tensor,), (0,)) for name, tensor in tensors.items()}


def _refuse_lost_rank_parts(
    path: Path, sources: Sequence[tuple[Source, Mapping[str, int]]]
) -> None:
    """Raise FormatError where a rank has several numbered files, and one of them is missing.

    vLLM writes `model-rank-1-part-0.safetensors`. Ranks of one stage hold shares of the same
    tensors: a rank that lacks some of them lacks a file.
    """
    parts = [_PART_OF_RANK.search(source.path.stem) for source, _ in sources]
    if not all(parts) or any("pp" in ranks for _, ranks in sources):
        return
    held: dict[frozenset[tuple[str, int]], list[Source]] = {}
    for source, ranks in sources:
        held.setdefault(frozenset(ranks.items()), []).append(source)
    every = {name for source, _ in sources for name in source.tensors}
    for rank, files in held.items():
        lost = sorted(every - {name for source in files for name in source.tensors})
        if lost:
            there = ", ".join(_relative_path(source, path) for source in files[:_SHOWN])
            raise FormatError(
                f"{path}: {_ranks_text(dict(rank))} lacks {len(lost)} tensors that another rank "
                f"has, such as {shorten(lost[0], 80)!r}: is one of its files missing? There are "
                f"{there}" + (", ..." if len(files) > _SHOWN else "")
            )


def _refuse_ranks_given_twice(
    path: Path, sources: Sequence[tuple[Source, Mapping[str, int]]]
) -> None:
    """Raise FormatError where two files hold a tensor of one name for the same rank.

    It is raised too where they name their ranks differently: `tp_rank_1` and `rank_1` may be one
    rank or two.
    """
    before: dict[str, tuple[Source, Mapping[str, int]]] = {}
    seen: dict[tuple[str, frozenset[tuple[str, int]]], Source] = {}
    for source, ranks in sources:
        for name in source.tensors:
            first, others = before.setdefault(name, (source, ranks))
            if others.keys() != ranks.keys():
                words = " and ".join("+".join(sorted(one)) for one in (others, ranks))
                raise FormatError(
                    f"{path}: {shorten(name, 80)!r} is in {_relative_path(first, path)} and "
                    f"{_relative_path(source, path)}, which count ranks by {words}: two states, or "
                    "a rank twice? keep the files of one"
                )
            same = seen.setdefault((name, frozenset(ranks.items())), source)
            if same is not source:
                raise FormatError(
                    f"{path}: {shorten(name, 80)!r} of {_ranks_text(ranks)} is there twice: "
                    f"{_relative_path(same, path)} and {_relative_path(source, path)}; "
                    "keep one of them"
                )


def _relative_path(source: Source, folder: Path) -> str:
    """Return the path of a file in a folder, relative to it."""
    return source.path.relative_to(folder).as_posix()


def _ranks_text(ranks: Mapping[str, int]) -> str:
    """Return the ranks of a file in words, such as "tp rank 1, pp rank 0"; "the rank" for none."""
    return ", ".join(f"{rank_of_axis(axis)} {at}" for axis, at in ranks.items()) or "the rank"


def _name_expert_ranks(
    sources: Sequence[tuple[Source, Mapping[str, int]]],
) -> Sequence[tuple[Source, Mapping[str, int]]]:
    """Return (file, {parallel axis: rank}) with "pp" replaced by "ep" where it counts expert ranks.

    It is about the second number of `mp_rank_00_001`: Megatron Core writes a pipeline's rank there,
    and without a pipeline the rank of experts. Experts' ranks all have the same names.
    """
    names: dict[int, set[str]] = {}
    for source, ranks in sources:
        if "pp" in ranks:
            names.setdefault(ranks["pp"], set()).update(source.tensors)
    alike = len(names) > 1 and len({frozenset(one) for one in names.values()}) == 1
    if not alike or not any(".experts." in name for name in names[min(names)]):
        return sources
    head = [name for name in names[min(names)] if "word_embeddings" in name]
    if not head:
        return sources
    return [
        (source, {("ep" if axis == "pp" else axis): rank for axis, rank in ranks.items()})
        for source, ranks in sources
    ]


def _layers_before(sources: Sequence[tuple[Source, Mapping[str, int]]]) -> dict[int, int]:
    """Return {pipeline rank: number of layers in earlier ranks}; {} where no renumbering is needed.

    It is needed where two pipeline ranks have a layer 0.
    """
    counts: dict[int, int] = {}
    first = 0
    for source, ranks in sources:
        layers = {int(found[1]) for name in source.tensors if (found := _LAYER.search(name))}
        stage = ranks.get("pp", 0)
        if stage not in counts and 0 in layers:
            first += 1
        counts.setdefault(stage, max(layers, default=-1) + 1)
    if first < 2:
        return {}
    before, total = {}, 0
    for stage in sorted(counts):
        before[stage] = total
        total += counts[stage]
    return before


def _renumber_layer(name: str, more: int) -> str:
    """Return a name with its layer's number raised by `more`."""
    found = _LAYER.search(name) if more else None
    if found is None:
        return name
    return f"{name[: found.start(1)]}{int(found[1]) + more}{name[found.end(1) :]}"


def _stack_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return a rank's tensors, with Megatron's experts stacked: one tensor per projection."""
    made: dict[str, LazyTensor] = {}
    stacks: dict[str, dict[int, LazyTensor]] = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is None or (found[2] or found[4]) is None:
            made[name] = tensor
            continue
        above, each, module, number = found.group(1, 2, 3, 4)
        stacks.setdefault(f"{above}.{module}", {})[int(each or number)] = tensor
    for name, experts in stacks.items():
        made[name] = StackedExperts(name, [experts[one] for one in sorted(experts)])
    return made


def _is_unit_scale(one: RankTensor) -> bool:
    """Return whether a tensor is an attention scale that was never set: float32, all 1."""
    return one.name.endswith(UNIT_SCALES) and all(
        part.info.encoding == "F32" and bool(np.all(np.frombuffer(part.raw(), "<f4") == 1))
        for part in one.parts
    )


def _refuse_unrelated(path: Path, tensors: Mapping[str, RankTensor], published: Model) -> None:
    """Raise FormatError: no tensor of the state matches a tensor of the published model."""
    names = [f"{shorten(name, 60)} {list(one.shape)}" for name, one in tensors.items()]
    near = ", ".join(list(published)[:_SHOWN])
    raise FormatError(
        f"{path}: none of its {len(names)} tensors is one of {published.path} "
        f"({', '.join(names[:_SHOWN])}, ...); expected names such as {near}, or those joined "
        f"(qkv_proj, gate_up_proj, w13_weight, linear_qkv)"
    )


class _StateReader:
    """Finds each tensor of a published model in an engine's state.

    `used` collects the names of the state's tensors that were read, `notes` remarks for the user.
    """

    def __init__(self, path: Path, published: Model, held: Mapping[str, RankTensor]) -> None:
        """Store the published model and `held`, the state's tensors by name."""
        self._path, self._model, self._held = path, published, held
        self.used: set[str] = set()
        self.notes: list[Note] = []
        self._empty: dict[str, None] = {}
        self._hyper = published.hyper
        self._chosen: dict[str, int] = {}
        self._stack: tuple[tuple[str, str, int], Sequence[Cells]] | None = None
        self._lock = Lock()
        self._readings: dict[str, list[tuple[EngineReading, Part]]] = {}
        self._misfits: dict[str, tuple[EngineParameter, RankTensor]] = {}
        self._published: dict[str, LazyTensor] = dict(published.source.tensors)
        self._collect_readings(self._published)
        self._packed = {
            name: tensor
            for name, tensor in ((one, published[one].whole) for one in published)
            if tensor is not None and tensor.parts
        }
        self._collect_companions()
        self._collect_decoded()

    def _collect_companions(self) -> None:
        """Find the scales and other companions of codes that the state joins or stacks.

        They are recorded as readings. An engine has them next to the joined codes:
        `w13_weight_scale` next to `w13_weight`.
        """
        done: set[str] = set()
        for name, tensor in self._packed.items():
            main, roles = tensor.parts[""].info.name, len(self._model.roles_of.get(name, ()))
            for reading, _ in self._readings.get(main, [])[:1]:
                whole, leaf = reading.tensor, main.rpartition(".")[2]
                if whole.name in done or not whole.name.endswith(leaf):
                    continue
                done.add(whole.name)
                above = whole.name.removesuffix(leaf)
                for part in tensor.parts.values():
                    own = part.info.name.rpartition(".")[2]
                    held = self._held.get(f"{above}{own}")
                    if held is not None and part.info.name not in self._readings:
                        shapes = {
                            code: self._published[other].info.shape
                            for code in (n for one in reading.parameter.parts for n in one.stored)
                            if (other := code.removesuffix(leaf) + own) in self._published
                        }
                        found = companion_parameter(
                            reading.parameter,
                            (leaf, own),
                            shapes,
                            roles if held.shape == (roles,) else 1,
                        )
                        if found is not None:
                            self._record_readings(found, held)

    def _collect_decoded(self) -> None:
        """Find the packed weights whose values, not their codes, the state holds.

        Each is then in `_published` under the weight's name, with the shape of the decoded weight,
        and has its readings recorded.
        """
        packed, stored = self._packed, self._readings
        wanted = {
            name: tensor
            for name, tensor in packed.items()
            if (main := tensor.parts[""].info).name not in stored
            or (main.encoding not in _DECODED and _is_decoded(stored[main.name]))
        }
        if not wanted:
            return
        parts = {one.info.name for each in packed.values() for one in each.parts.values()}
        plain = {name: one for name, one in self._published.items() if name not in parts}
        misfits, self._readings, self._misfits = self._misfits, {}, {}
        self._collect_readings({**plain, **packed}, wanted)
        found, self._readings, self._misfits = self._readings, stored, misfits
        for name, tensor in wanted.items():
            if name not in found or not _is_decoded(found[name]):
                continue
            names = [part.info.name for part in tensor.parts.values()]
            for one in (tensor.parts[""].info.name, *(n for n in names if n not in stored)):
                self._published.pop(one, None)
            for one in (name, *names):
                self._misfits.pop(one, None)
            self._readings[name] = found[name]
            self._published[name] = _decode_packed(tensor, found[name][0][0].tensor)

    def _collect_readings(
        self, tensors: Mapping[str, LazyTensor], wanted: Collection[str] | None = None
    ) -> None:
        """Fill `_readings` and `_misfits`: which tensors of the state may hold each published one.

        `tensors` are the published ones by name. With `wanted`, only parameters with one of these
        names are looked for.
        """
        shapes = {name: tensor.info.shape for name, tensor in tensors.items()}
        bound = bind_names(self._model.spec, "hf", tensors)
        listed = [
            one
            for one in list_parameters(self._model.spec, bound.groups, shapes, self._hyper)
            if wanted is None or any(name in wanted for part in one.parts for name in part.stored)
        ]
        names = StateNames(self._held)
        exact = [names.find_exactly(one.names) for one in listed]
        names.claim(one.name for one in exact if one is not None)
        for parameter, whole in zip(listed, exact, strict=True):
            if whole is not None:
                self._record_readings(parameter, whole)
        # What an ending decides leaves shorter endings to the rest: a norm next to a mixer's norm.
        found = {""}
        while found:
            found = set()
            for parameter in listed:
                stored = [name for part in parameter.parts for name in part.stored]
                if not all(name in self._readings for name in stored):
                    whole = names.find_by_ending(parameter.names)
                    if whole is not None:
                        self._record_readings(parameter, whole)
                        found.add(whole.name)
            names.forget(found)
        others = {*bound.unbound, *bound.buffers, *bound.derived} & set(self._held)
        for name in sorted(others if wanted is None else others.intersection(wanted)):
            self._record_readings(whole_parameter(name, shapes[name]), self._held[name])

    def _record_readings(self, parameter: EngineParameter, whole: RankTensor) -> None:
        """Record how each published tensor of a parameter is read from the state's tensor `whole`.

        Where the shape of `whole` fits no division among the ranks, it is recorded as a misfit.
        """
        local = in_published_axes(whole.shape, parameter.shape)
        layout = find_layout(parameter, local, len(whole.parts))
        for part in parameter.parts:
            for name in part.stored:
                if layout is None:
                    self._misfits.setdefault(name, (parameter, whole))
                else:
                    reading = EngineReading(parameter, whole, layout)
                    self._readings.setdefault(name, []).append((reading, part))

    @property
    def published(self) -> Mapping[str, LazyTensor]:
        """The published model's tensors by name.

        A packed weight is its decoded values if the engine saved these, else its stored parts.
        """
        return self._published

    def parameters(self) -> list[tuple[list[EngineParameter], RankTensor]]:
        """Return each tensor found in the state, as (parameters that it may be, the tensor)."""
        found: dict[str, tuple[list[EngineParameter], RankTensor]] = {}
        held = [
            *((one.parameter, one.tensor) for each in self._readings.values() for one, _ in each),
            *self._misfits.values(),
        ]
        for parameter, whole in held:
            known = found.setdefault(whole.name, ([], whole))[0]
            if parameter not in known:
                known.append(parameter)
        return list(found.values())

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield (published name, tensor) for each published tensor that the state has."""
        for name, tensor in self._published.items():
            found = self._find_tensor(name, tensor)
            if found is not None:
                yield name, found

    def _find_tensor(self, name: str, published: LazyTensor) -> LazyTensor | None:
        """Return the state's tensor for a published one, cut out of a joined tensor if need be.

        None if the state does not have it. `published` is the tensor in the model's own file.
        """
        readings = self._readings.get(name)
        if not readings:
            if name not in self._misfits:
                return None
            whole = self._misfits[name][1]
            self._note_lacking(whole)
            self.used.add(whole.name)
            if _lacks_bytes(whole, published):
                return self._absent_tensor(name, published, whole)
            first = whole.parts[0]
            return _engine_tensor(name, first.info.shape, whole, lambda: element_array(first), None)
        whole = readings[0][0].tensor
        self.used.add(whole.name)
        if _lacks_bytes(whole, published):
            return self._absent_tensor(name, published, whole)
        same = [one for one in readings if one[0].tensor is whole]
        reading, part = same[self._choose_order(name, published, same)]
        places = [one for one in same if one[0].parameter is reading.parameter]
        if len(places) > 1:
            reading, part = self._choose_part(name, published, places)
        if name == reading.parameter.parts[0].stored[0]:
            self._note_doubled(reading, published)
        copy = self._choose_copy(name, published, reading, part)
        at = part.stored.index(name)
        logarithm = reading.parameter.negated_exp and whole.name.endswith(".A")

        def make() -> Cells:
            """Return the published tensor's elements, put together from the state of all ranks.

            With `logarithm`, the logarithms of what the engine stores, which is the negated
            exponential.
            """
            made = self._published_tensors(reading, part, copy)[at]
            return _logarithms(made, whole, published) if logarithm else made

        encoding = published.info.encoding if logarithm else ""
        return _engine_tensor(name, published.info.shape, whole, make, reading, encoding)

    def refuse_missing_ranks(self) -> None:
        """Raise FormatError where files of ranks are missing.

        They are where most tensors of a wrong shape are a rank's share among more ranks than there
        are files. A few such tensors may as well be damaged.
        """
        odd = {whole.name: (parameter, whole) for parameter, whole in self._misfits.values()}
        if len(odd) < _SHARES:
            return
        known = max((len(one.parts) for one in self._held.values()), default=1)
        fits = {
            ranks: [name for name, (one, whole) in odd.items()
                    if find_layout(one, whole.shape, ranks)]
            for ranks in range(known + 1, _MOST_RANKS + 1)
        }  # fmt: skip
        ranks = max(fits, key=lambda count: len(fits[count]), default=0)
        shares = fits.get(ranks, [])
        if len(shares) < _SHARES or 2 * len(shares) <= len(odd):
            return
        parameter, whole = odd[shares[0]]
        raise FormatError(
            f"{self._path}: holds {known} of {ranks} ranks: {len(shares)} tensors are a "
            f"rank's share of it, such as {shorten(shares[0], 100)} {list(whole.shape)} of "
            f"{list(parameter.shape)}; give the folder with the files of all ranks"
        )

    def _note_lacking(self, whole: RankTensor) -> None:
        """Add a warning where some ranks lack the tensor `whole`, whose shape fits no division."""
        every = sorted({rank for one in self._held.values() for rank in one.ranks})
        lost = [rank for rank in every if rank not in whole.ranks]
        if lost:
            ranks = ", ".join(map(str, lost))
            text = f"{shorten(whole.name, 100)}: rank {ranks} of {len(every)} does not have it"
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def _published_tensors(self, reading: EngineReading, part: Part, copy: int) -> Sequence[Cells]:
        """Return the published tensors of a part of a parameter, as `copy` of the ranks holds them.

        The tensors of the last stack of experts are cached.
        """
        if len(part.stored) == 1:
            return reading.published_tensors(part, self._hyper, copy)
        key = (reading.tensor.name, part.stored[0], copy)
        with self._lock:
            if self._stack is None or self._stack[0] != key:
                self._stack = None
                self._stack = key, reading.published_tensors(part, self._hyper, copy)
            return self._stack[1]

    def _choose_order(
        self, name: str, published: LazyTensor, readings: Sequence[tuple[EngineReading, Part]]
    ) -> int:
        """Return the index of the reading that gives a tensor's rows in the published order.

        Several readings of one tensor differ by the order of rows: gpt_neox's q, k and v may be
        head by head, as published, or one after the other. The first layer whose values are equal
        in some order decides for all layers. 0 where none is.
        """
        if len(readings) == 1:
            return 0
        kind = re.sub(r"\d+", "#", name)
        if kind not in self._chosen:
            published_bytes = bytes(published.raw())
            at = readings[0][1].stored.index(name)
            equal = [
                number
                for number, (reading, part) in enumerate(readings)
                if reading.published_tensors(part, self._hyper)[at].tobytes() == published_bytes
            ]
            if not equal:
                return 0
            self._chosen[kind] = equal[0]
            if equal[0] and readings[0][0].parameter.published:
                text = (
                    f"{shorten(kind, 100)}: rows stand in the order of an engine's joined matrix, "
                    "not in the checkpoint's"
                )
                self.notes.append(Note("note", str(self._path), text, "remark"))
        return self._chosen[kind]

    def _choose_part(
        self, name: str, published: LazyTensor, places: Sequence[tuple[EngineReading, Part]]
    ) -> tuple[EngineReading, Part]:
        """Return which (reading, part) of a state to compare, of several that hold a tensor.

        A layer whose values are its keys has them twice in one parameter, say. It is the first with
        other values than published, else the first of all; a warning is added where they differ. A
        scale that was never loaded does not count if another copy of it was loaded.
        """
        published_bytes = bytes(published.raw())
        made = [
            reading.published_tensors(part, self._hyper)[part.stored.index(name)].tobytes()
            for reading, part in places
        ]
        loaded = [place for place, raw in zip(places, made, strict=True) if raw != _UNSET]
        odd = [
            place
            for place, raw in zip(places, made, strict=True)
            if raw != published_bytes and (raw != _UNSET or not loaded)
        ]
        if odd and len(odd) < len(places):
            reading, part = odd[0]
            text = (
                f"{name}: {shorten(reading.tensor.name, 100)} holds it {len(places)} times, and "
                f"its part {reading.index_of(part) + 1} has other values, which are compared"
            )
            self.notes.append(Note("warning", str(self._path), text, "remark"))
        return [*odd, *loaded, *places][0]

    def is_unused_kv(self, name: str, tensor: RankTensor) -> bool:
        """Return whether a parameter belongs to keys or values that its layer does not compute.

        SGLang makes them in every layer, and loads none into a layer that uses another layer's.
        """
        bound = bind_names(self._model.spec, "hf", {name: tensor.parts[0]})
        keys = [key for group in bound.groups for key in group.roles]
        if not keys or not may_share_keys(self._model.spec):
            return False
        layer, _ = split_key(keys[0])
        own = self._hyper["own_kv_layers"]
        if layer is None or layer >= len(own) or own[layer]:
            return False
        return role_base(keys[0]) in _OF_KEYS

    def _choose_copy(
        self, name: str, published: LazyTensor, reading: EngineReading, part: Part
    ) -> int:
        """Return the index of the copy to compare, of several ranks that hold the same rows.

        It is the first copy with other values than published, else 0; a warning is added where
        copies differ.
        """
        copies = reading.copies_of(part)
        if copies == 1:
            return 0
        at, replicated = part.stored.index(name), reading.layout.axis is None
        if replicated and len({bytes(one.raw()) for one in reading.tensor.parts}) == 1:
            return 0
        made = [
            reading.published_tensors(part, self._hyper, copy)[at].tobytes()
            for copy in range(copies)
        ]
        if len(set(made)) == 1:
            return 0
        published_bytes = bytes(published.raw())
        summed = role_base(part.keys[0]) == "ffn_down_exps" and part.keys[0].endswith(".bias")
        if summed and made[0] == published_bytes and not any(map(any, made[1:])):
            return 0  # ranks add their products up, and one adds the bias: vLLM's gpt_oss
        odd = next((copy for copy, raw in enumerate(made) if raw != published_bytes), 0)
        what = "what every rank has whole" if replicated else "a key head that ranks share"
        rank = reading.tensor.ranks[odd]
        text = f"{name}: ranks hold other values of {what}; rank {rank}'s is compared"
        self.notes.append(Note("warning", str(self._path), text, "remark"))
        return odd

    def _absent_tensor(self, name: str, published: LazyTensor, whole: RankTensor) -> LazyTensor:
        """Return a tensor of the published shape that raises UnsupportedError when it is read.

        It stands for a parameter whose bytes the engine released. The parameter's name is recorded.
        """
        self._empty[whole.name] = None
        part = next(one for one in whole.parts if not one.info.nbytes)
        place = part.location()
        assert place is not None
        why = "the engine packed it for its kernel after loading; save the state before that"
        file = place[0].path.name
        if ZERO_FILE.fullmatch(file):
            why = f"{file} {ZERO_SHARD}"
        text = (
            f"{self._path}: {shorten(whole.name, 100)} holds no number (shape "
            f"{list(part.info.shape)}): {why}"
        )
        info = replace(published.info, name=name)
        return AbsentTensor(place[0], info, UnsupportedError(text))

    def _note_doubled(self, reading: EngineReading, published: LazyTensor) -> None:
        """Add a warning where ranks hold the same bytes though their shares should differ.

        Shares of zeros or of one number are not warned of here; the comparison shows them.
        """
        layout, whole = reading.layout, reading.tensor
        if layout.axis is None or layout.ranks == 1:
            return
        held = [one for each in layout.sections for one in each]
        if held and min(one.copies(layout.ranks) for one in held) > 1:
            return  # ranks share all that they have
        self._note_zeros(whole, published)
        seen: dict[bytes, list[int]] = {}
        for number, part in enumerate(whole.parts):
            seen.setdefault(bytes(part.raw(0, min(_BEGIN, part.info.nbytes))), []).append(number)
        published_bytes = bytes(published.raw(0, min(_BEGIN, published.info.nbytes)))
        for begin, numbers in seen.items():
            first = whole.parts[numbers[0]]
            twins = [n for n in numbers[1:] if bytes(whole.parts[n].raw()) == bytes(first.raw())]
            if not twins or len(set(begin)) < _VARIED or len(set(published_bytes)) < _VARIED:
                continue
            ranks = ", ".join(str(whole.ranks[n]) for n in (numbers[0], *twins))
            text = f"{shorten(whole.name, 100)}: ranks {ranks} hold the same share of it"
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def _note_zeros(self, whole: RankTensor, published: LazyTensor) -> None:
        """Add a warning where a rank's share is zeros: a parameter that the rank did not load.

        None is added where as much of the published tensor is zeros too.
        """
        empty = [
            whole.ranks[number]
            for number, part in enumerate(whole.parts)
            if part.info.nbytes
            and not any(part.raw(0, min(_BEGIN, part.info.nbytes)))
            and not np.any(np.frombuffer(part.raw(), np.uint8))
        ]
        if not empty or len(empty) == len(whole.parts):
            return
        cells = element_array(published).reshape(-1)
        size = cells.itemsize
        filled = np.frombuffer(cells.tobytes(), np.uint8).reshape(-1, size).any(axis=1)
        if np.count_nonzero(~filled) * len(whole.parts) < filled.size:
            ranks = ", ".join(map(str, empty))
            text = f"{shorten(whole.name, 100)}: the share of rank {ranks} is zeros: not loaded"
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def note_padding(self) -> None:
        """Add a note on whether the rows that pad the vocabulary are zeros."""
        for name, readings in self._readings.items():
            layout, whole = readings[0][0].layout, readings[0][0].tensor
            if not layout.padding:
                continue
            padding = b"".join(
                element_array(part)[
                    max(0, layout.parameter.shape[0] - at * part.info.shape[0]) :
                ].tobytes()
                for at, part in enumerate(whole.parts)
            )
            zero = not np.any(np.frombuffer(padding, np.uint8))
            kind = "zeros" if zero else "no zeros, and were not compared"
            text = f"{name}: {layout.padding} rows after the vocabulary are {kind}"
            level = "note" if zero else "warning"
            self.notes.append(Note(level, str(self._path), text, "remark"))

    def note_added_ones(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Add a warning where norms of a Gemma hold 1 + what was published, in every layer.

        SGLang adds it when it loads the first Gemma's weights; vLLM adds it when it computes, so
        that the state alone does not say whether it is right. `tensors` are those found.
        """
        if self._model.spec.name not in _ONE_ADDED:
            return
        norms = [
            name
            for name, readings in self._readings.items()
            if name in tensors and role_base(readings[0][1].keys[0]).endswith(_NORMS)
        ]
        if norms and all(_is_one_more(tensors[name], self._published[name]) for name in norms):
            text = (
                f"{len(norms)} norms hold 1 + the published weight: as SGLang loads them, and one "
                "too many for vLLM"
            )
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def note_released(self) -> None:
        """Add a warning that names the parameters whose bytes the engine released, if any."""
        if self._empty:
            names = list(self._empty)
            text = (
                f"{len(names)} parameters hold no numbers, as the engine packed them for its "
                f"kernels after loading ({first_and_more(names, _SHOWN)}); save the state before "
                "that to have them compared"
            )
            self.notes.append(Note("warning", str(self._path), text, "remark"))

    def without_aliases(self, names: Sequence[str]) -> list[str]:
        """Return `names` without tensors that are copies of one that was read.

        A module that is reached in two ways is in a state twice, and an output head that is the
        embedding is stored under both names.
        """
        used: dict[tuple[int, ...], list[RankTensor]] = {}
        for name in self.used:
            used.setdefault(self._held[name].shape, []).append(self._held[name])
        return [
            name
            for name in names
            if not any(
                _same_parts(self._held[name], one) for one in used.get(self._held[name].shape, [])
            )
        ]


def _same_parts(a: RankTensor, b: RankTensor) -> bool:
    """Return whether two tensors of a state have the same bytes on every rank."""
    return len(a.parts) == len(b.parts) and all(
        x.info.nbytes == y.info.nbytes
        and bytes(x.raw(0, min(_BEGIN, x.info.nbytes)))
        == bytes(y.raw(0, min(_BEGIN, y.info.nbytes)))
        and bytes(x.raw()) == bytes(y.raw())
        for x, y in zip(a.parts, b.parts, strict=True)
    )


def _is_one_more(stored: LazyTensor, published: LazyTensor) -> bool:
    """Return whether each value is 1 + the published one, added in the published encoding."""
    from aprfmt.codecs import decode, encode

    x, y = (
        decode(one.info.encoding, {"": one.raw()}, one.info.shape).astype(np.float32)
        for one in (stored, published)
    )
    encoding = published.info.encoding
    more = encode(encoding, (y + np.float32(1)).astype(np.float32))
    return x.shape == y.shape and np.array_equal(x, decode(encoding, more, y.shape))


def _lacks_bytes(whole: RankTensor, published: LazyTensor) -> bool:
    """Return whether a rank's share has no bytes where the published tensor has some."""
    return bool(published.info.nbytes) and any(not one.info.nbytes for one in whole.parts)


def _is_decoded(readings: Sequence[tuple[EngineReading, Part]]) -> bool:
    """Return whether the state's tensor of these readings has a plain encoding, not codes."""
    return readings[0][0].tensor.parts[0].info.encoding in _DECODED


def _decode_packed(packed: LazyTensor, whole: RankTensor) -> LazyTensor:
    """Return a packed published weight as a tensor of its decoded values.

    They are rounded to the encoding of `whole`, the state's tensor.
    """
    from aprfmt.codecs import encode

    encoding = whole.parts[0].info.encoding

    def make() -> Cells:
        """Return a packed weight's elements, decoded and stored in the state's encoding."""
        made = encode(encoding, decode_tensor(packed))[""]
        return np.frombuffer(made, f"V{len(made) // math.prod(packed.info.shape)}")

    return _engine_tensor(packed.info.name, packed.info.shape, whole, make, None)


def _engine_tensor(
    name: str,
    shape: tuple[int, ...],
    whole: RankTensor,
    make: Callable[[], Cells],
    reading: EngineReading | None,
    encoding: str = "",
) -> LazyTensor:
    """Return an EngineTensor of this shape whose bytes `make` assembles.

    Its encoding is that of the ranks' shares, unless `encoding` is given.
    """
    encoding = encoding or whole.parts[0].info.encoding
    row = ENCODINGS[encoding]
    info = TensorInfo(name, shape, encoding, 0, row.nbytes(shape), row.row_bytes(shape))
    return EngineTensor(info, whole.parts, make, reading)


def _logarithms(made: Cells, whole: RankTensor, published: LazyTensor) -> Cells:
    """Return the published elements x where an engine holds -exp(x), as a state space's A.

    `made` are the engine's elements, `whole` their tensor in the state. An element is the published
    one where -exp of it, in float32, is within two roundings of what the engine holds; else it is
    the logarithm, rounded to the published encoding.
    """
    from aprfmt.codecs import decode, encode

    encoding, own = published.info.encoding, element_array(published)
    held = decode(whole.parts[0].info.encoding, {"": made.tobytes()}, made.shape)
    x = decode(encoding, {"": own.tobytes()}, own.shape).astype(np.float32)
    with np.errstate(all="ignore"):
        right = np.abs(-np.exp(x) - held) <= 2 * np.spacing(np.abs(held))
        other = encode(encoding, np.log(-held).astype(np.float32))
    return np.where(right, own, np.frombuffer(other[""], own.dtype).reshape(own.shape))
