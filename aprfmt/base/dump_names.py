"""Parse the path of a dumped array: its name, the rank and the step that it is of.

Engines write a folder for each rank, a file for each pass, or tags in a file's name:

- `TP0_PP1_Rank2_pid77/Pass00003.pt`: SGLang's `--debug-tensor-dump-output-folder`
  (sglang/srt/debug_utils/tensor_dump_forward_hook.py), a dict by module in each file.
- `step=0___rank=1___dump_index=7___name=q___layer_id=3.pt`: SGLang's dumper
  (sglang/srt/debug_utils/dumper.py), `{"value": tensor, "meta": {...}}` in each file.
- `mp_rank_01_000/model_optim_rng.pt`: Megatron Core's checkpoints (training/checkpointing.py).
- `rank1/Pass3.pt`, `tp_rank=1/...`, `TP0-PP1/...`, `model-rank-0-part-0.safetensors`: vLLM's
  dumps by rank and its sharded states, TensorRT-LLM's folders, and scripts of people.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

# Words for an axis along which work is divided -> the axis.
AXES: Mapping[str, str] = {
    "tp": "tp",
    "attn_tp": "tp",
    "moe_tp": "tp",
    "pp": "pp",
    "ep": "ep",
    "moe_ep": "ep",
    "dp": "dp",
    "attn_dp": "dp",
    "moe_dp": "dp",
    "cp": "cp",
    "attn_cp": "cp",
    "etp": "tp",
    "edp": "dp",
    "sp": "sp",
    "rank": "rank",
    "world": "rank",
    "global": "rank",
}
SHAPES_FILE = "shapes.json"  # of raw .bin files: name -> shape, or {"shape": ..., "dtype": ...}
MAPPING_FILE = "aprfmt-map.json"  # which point each array of the folder is
RANK = "rank"  # the axis of a number that says no more than which process it was
STEP_TAGS = ("step", "forward_pass_id")
# Tags of SGLang's dumper that say nothing of what an array is.
_EMPTY_TAGS = ("dump_index", "recompute_status", "local_rank", "part")
_WORD = "|".join(sorted((word for word in AXES if word != RANK), key=len, reverse=True))
# `TP0`, `tp_rank_1`, `rank-2`: the axis, or the word rank, or both, and a number.
_RANK = rf"(?:(?P<axis>{_WORD})[_-]?(?:rank[_=-]?)?|rank[_=-]?)(?P<rank>\d{{1,5}})"
_FIRST = re.compile(rf"{_RANK}(?=$|[_.,-])[_.,-]*", re.IGNORECASE)
_LAST = re.compile(rf"(?:^|[_.,-]){_RANK}(?:[_-]part[_-]?\d{{1,5}})?$", re.IGNORECASE)
# Megatron's folder of a rank: of tensors, then of the pipeline where it has one.
_MODEL_PARALLEL = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")
_PROCESS = re.compile(r"pid\d{1,10}$")
# What a folder of a rank may be called by besides the rank: where it ran.
_MACHINE = re.compile(
    r"(?:host|node|worker|gpu|cuda|npu|device|machine|server|local|actor|replica)[_-]?\d{0,6}[_.-]*",
    re.IGNORECASE,
)
_STEP = re.compile(r"(?:Pass[_-]?|step[_=-]?|F)(\d{1,9})(?=$|[_.-])[_.-]*")
# And of a folder, which is not called as an array is.
_STEP_FOLDER = re.compile(
    r"(?:chunk|iter(?:ation)?|forward(?:_pass)?|step|pass)[_=-]?(\d{1,9})$", re.IGNORECASE
)
_DIGITS = 9  # of a number in a name
_PREFIX = "non_intrusive__"  # of SGLang's dumper for outputs of modules
# Last components of names whose numbered members are no results of one module.
_COUNTED = re.compile(
    r"(?:^|[._])(?:layers?|h|blocks?|blk|modules|experts|hidden_?states?|attentions|"
    r"(?:past_)?key_values?)$",
    re.IGNORECASE,
)
_LAYER = re.compile(r"(?:^|[._])(?:layers?|h|blocks?|blk)[._]?\d{1,9}$", re.IGNORECASE)


@dataclass(frozen=True)
class DumpPlace:
    """What a dumped array's path says of it.

    `ranks` is {axis: number}; `name` is "" where the path has none.
    """

    name: str
    ranks: Mapping[str, int]
    step: int | None = None
    layer: int | None = None


def parse_dump_path(path: str) -> DumpPlace:
    """Return the array name, ranks, step and layer that the path of a dumped file states.

    `path` is relative to the dump's folder, without extension. A step or layer that it does not
    state is None.
    """
    ranks: dict[str, int] = {}
    words: list[str] = []
    step: int | None = None
    layer: int | None = None
    parts = path.split("/")
    for number, part in enumerate(parts):
        if "=" in part:
            for key, value in _tags(part):
                if key in STEP_TAGS and value.isdigit():
                    step = int(value)
                elif key == "name":
                    words.append(value)
                elif key == "layer_id" and value.isdigit():
                    layer = int(value)
                elif (axis := rank_axis(key)) and value.isdigit():
                    ranks[axis] = int(value)
                elif key not in _EMPTY_TAGS and not key.endswith("_size"):
                    # After a name: `q_proj.tp_rank=1`.
                    words.append(_without_ranks(f"{key}={value}", ranks))
            continue
        # Other parts: ranks, then a step, then the name.
        rest = _without_ranks(part, ranks)
        inner = number + 1 < len(parts)
        found = _STEP.match(rest) or (_STEP_FOLDER.match(rest) if inner else None)
        if found is not None:
            step, rest = int(found[1]), rest[found.end() :]
        if rest and inner and (not ranks or (rest != part and _MACHINE.fullmatch(rest))):
            rest = ""  # a folder around the dump, such as the time it was taken, or of a machine
        if rest:
            words.append(rest)
    return DumpPlace(module_path(".".join(filter(None, words)), layer), ranks, step, layer)


def rank_of_axis(axis: str) -> str:
    """Return what a rank of an axis is called in messages: "tp rank", or "rank" of no axis."""
    return RANK if axis == RANK else f"{axis} {RANK}"


def place_in_dump(step: int, word: str = "pass") -> str:
    """Return which pass of a dump an array is of, in words: "pass 3"; "" where none is stated."""
    return f"{word} {step}" if step >= 0 else ""


@lru_cache(1024)
def rank_axis(key: str) -> str:
    """Return the axis that a key such as `tp_rank` or `moe_ep_rank` numbers; "" for other keys."""
    word = key.lower().removesuffix("_rank").removesuffix("rank")
    if not key.lower().endswith("rank"):
        return ""
    return AXES.get(word.rstrip("_") or RANK, "")


def module_path(name: str, layer: int | None) -> str:
    """Return a dump's name as a module path, without the additions of dumpers and hooks.

    An input gets the ending "#in". With `layer`, "layers.N." is put in front if it is missing.
    """
    name = name.removeprefix(_PREFIX)
    name = re.sub(r"\.output(?=\.\d+$|$)", "", name)
    name = re.sub(r"\.inputs?(?:\.(?:0|hidden_states))?$", "#in", name)
    if layer is None or re.search(r"(?:^|\.)layers\.\d", name) or not name:
        return name
    return f"layers.{layer}.{name}"


def tuple_member(name: str) -> tuple[str, int] | None:
    """Return (module, number) of a name such as `model.norm.1`: one of what a module returned.

    None for other names, also where the number counts layers, experts or hidden states
    (`model.layers.1`).
    """
    above, _, last = name.rpartition(".")
    if not above or not (last.isascii() and last.isdigit()) or len(last) > _DIGITS:
        return None
    return None if _COUNTED.search(above) else (above, int(last))


def is_layer(name: str) -> bool:
    """Return whether a module's name is that of a whole layer, such as `model.layers.3`."""
    return _LAYER.search(name) is not None


def _tags(part: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of the tags in a file name such as `step=0___rank=1`."""
    for tag in part.split("___"):
        key, _, value = tag.partition("=")
        yield key, value


def _without_ranks(part: str, ranks: dict[str, int]) -> str:
    """Return a component of a path without the ranks at its ends, and add these to `ranks`.

    The result is "" for a component that only names the process.
    """
    megatron = _MODEL_PARALLEL.match(part)
    if megatron is not None:
        numbers = zip(("tp", "pp", "ep"), megatron.groups(), strict=True)
        ranks.update({axis: int(number) for axis, number in numbers if number is not None})
        return ""
    rest = part
    while (found := _FIRST.match(rest)) is not None:
        ranks[AXES[(found["axis"] or RANK).lower()]] = int(found["rank"])
        rest = rest[found.end() :]
    if rest != part and _PROCESS.match(rest):
        return ""
    found = _LAST.search(rest)
    if found is not None and not rest[: found.start()].lower().endswith("lora"):
        ranks[AXES[(found["axis"] or RANK).lower()]] = int(found["rank"])
        rest = rest[: found.start()]
    return rest
