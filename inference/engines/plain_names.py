"""The plain names of dumped arrays: module paths without what hooks and scripts add to them.

Added are `NAME.output` and `NAME.input`, a word before all names (`outputs.`, `tensors.`), and
underscores in place of the dots, as a name of a file has them (`model_layers_0_mlp_act_fn`).
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from aprfmt.arch.engine_parameters import ENGINE_MODULES
from aprfmt.base.dump_names import is_layer, module_path, tuple_member
from aprfmt.inference.capture import POINTS
from aprfmt.inference.engines.engine_modules import JOINED, MODULES
from aprfmt.inference.engines.modules import points_named

# Names of a dict in which a script saves arrays, or what a model returned.
_AROUND = frozenset(
    ("output", "outputs", "tensors", "activations", "captures", "captured", "values", "arrays",
     "hooks", "dump")
)  # fmt: skip
_WRAPPERS = frozenset(
    ("model", "language_model", "transformer", "decoder", "backbone", "gpt_neox", "base_model")
)
_BLOCKS = frozenset(("layers", "layer", "h", "blocks"))
# Modules of vLLM and SGLang that have no row among the points' names.
_MODULES = frozenset(
    (*JOINED, *ENGINE_MODULES, "attn", "act_fn", "experts", "shared_experts", "logits_processor",
     "rotary_emb")
)  # fmt: skip
_WORDS = frozenset(
    word
    for point in POINTS.values()
    for name in point.hf
    for word in name.text.partition("#")[0].split(".")
).union(_MODULES, _WRAPPERS, _BLOCKS)
_LONGEST = max(word.count("_") for word in _WORDS) + 1  # words of a part
_MOST_WAYS = 64  # in which the words of a name are put together
_OF_ENGINES = re.compile("|".join(f"(?:.*[.])?(?:{old})" for old, _ in MODULES))


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return {plain name: stored name} of a file's or folder's arrays, in their order.

    A name stays as it is if it is a module's already, if its plain name is none's, or if another
    array has that.
    """
    every = list(names)
    taken, found = set(every), dict[str, str]()
    for name in every:
        first, dot, _ = name.partition(".")
        keep = bool(dot) and first not in _AROUND and bool(points_named(name))
        short = name if keep else _plain_name(name)
        own = short if short not in taken and is_module_name(short) else name
        taken.add(own)
        found[own] = name
    return found


def _plain_name(name: str) -> str:
    """Return a name without what was added to it, its underscores as the dots they stand for."""
    short = module_path(name, None)
    first, _, rest = short.partition(".")
    short = rest if first in _AROUND and rest else short
    return dotted_name(short)


@lru_cache(maxsize=1 << 16)
def is_module_name(name: str) -> bool:
    """Return whether a name is that of a capture point or of an engine's module.

    Also that of one of the values that such a module returns (`model.layers.1.0`).
    """
    base, _ = tuple_member(name) or (name, -1)
    if points_named(base) or is_layer(base) or _OF_ENGINES.fullmatch(base):
        return True
    return base.rpartition(".")[2] in JOINED


def dotted_name(name: str) -> str:
    """Return a module's path of a name with underscores for dots; any other name as it is.

    The words between underscores are put together to known parts of paths, of which the fewest
    that are a module's path are taken. A path has a layer's number, or begins with a wrapper such
    as `model`.
    """
    name, mark, end = name.partition("#")
    head, *more = name.split(".")  # `model_norm.1`
    for parts in sorted(_known_parts(head.split("_")), key=len):
        numbered = any(a in _BLOCKS and b.isdigit() for a, b in pairwise(parts))
        path = ".".join((*parts, *more))
        if len(parts) > 1 and (numbered or parts[0] in _WRAPPERS) and is_module_name(path):
            return f"{path}{mark}{end}"
    return f"{name}{mark}{end}"


def _known_parts(words: list[str]) -> list[list[str]]:
    """Return the ways to put words together by underscores to parts of paths that are known.

    A number is a part too.
    """
    ways: list[list[list[str]]] = [[[]]]
    for stop in range(1, len(words) + 1):
        found = []
        for start in range(max(0, stop - _LONGEST), stop):
            part = "_".join(words[start:stop])
            if part in _WORDS or part.isdigit():
                found += [[*before, part] for before in ways[start]]
        ways.append(found[:_MOST_WAYS])
    return ways[-1]
