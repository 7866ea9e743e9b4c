"""What of an adapter changes nothing: pairs with a zero factor or scale, vectors of ones.

Training begins with one factor at zero (lora_B; of an embedding lora_embedding_A). The vectors of
an IA3 begin at one. A *pair* is the factors A and B of one module. It still changes nothing where
nothing was trained, or where the file was written before the values were gathered.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from aprfmt.errors import AprfmtError
from aprfmt.model.adapter_parts import (
    PREFIX,
    adapter_parts,
    mlx_parameter,
    peft_config,
    stored_alpha,
    value_by_pattern,
)
from aprfmt.model.file_kinds import is_scaling_vector
from aprfmt.tensors.view import is_zero

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.tensors.view import View

_SHOWN = 3
ZERO_TODO = (
    "save it again from the run that trained it: it was not trained, or it was written before its "
    "values were gathered (ZeRO stage 3, FSDP)"
)


class ZeroPairs(NamedTuple):
    """What of an adapter changes nothing: {module: why, in words}, and what else it has.

    `lengths` are modules whose product is zero, but whose rows DoRA's magnitudes scale. `emptied`
    are those whose magnitudes are all zero, so that a merge makes the weight zero. `pairs` counts
    all pairs, `whole` the tensors that replace the base's. `noun` is what a pair is called.
    """

    zero: Mapping[str, str]
    lengths: tuple[str, ...]
    emptied: tuple[str, ...]
    pairs: int
    whole: int
    noun: str = "pairs"

    @property
    def expected(self) -> str:
        """What an adapter should have instead, in words: pairs or vectors that change weights."""
        if self.noun == "vectors":
            return "vectors that are not one"
        return "pairs whose product is not zero"

    @property
    def text(self) -> str:
        """Which pairs or vectors change nothing and why, as a clause; "" if all change a weight."""
        said = []
        if self.zero:
            reasons = list(dict.fromkeys(self.zero.values()))
            if len(self.zero) < self.pairs:
                what = f"{len(self.zero)} of {self.pairs} {self.noun} change nothing"
                why = f"{' or '.join(reasons)} ({_list_modules(tuple(self.zero))})"
            else:
                whose = f"its {self.noun} change" if self.whole else "the adapter changes"
                what = f"{whose} nothing"
                why = f"every {reasons[0]}" if len(reasons) == 1 else " or ".join(reasons)
            said.append(f"{what}: {why}")
        if self.lengths:
            said.append(
                f"{len(self.lengths)} of {self.pairs} pairs change nothing but the rows' lengths, "
                f"by DoRA's magnitudes: the product is zero ({_list_modules(self.lengths)})"
            )
        if self.emptied:
            said.append(
                f"{len(self.emptied)} of {self.pairs} pairs make their weight zero: DoRA's "
                f"magnitudes are zero ({_list_modules(self.emptied)})"
            )
        return "; ".join(said)


def find_zero_pairs(model: "Model") -> ZeroPairs:
    """Return what of an adapter changes nothing: pairs of zero product, vectors of ones.

    The beginning of every factor is read, and the whole of those that begin with zeros. A factor
    that cannot be decoded counts as not zero. Nothing is found in a file that is no adapter.
    """
    zero: dict[str, str] = {}
    lengths, emptied = [], []
    if model.kind is not None and model.kind.name == "scaling_adapter":
        return _find_vectors_of_one(model)
    if model.kind is None or model.kind.name != "adapter":
        return ZeroPairs({}, (), (), 0, 0)
    parts, config = adapter_parts(model), peft_config(model)
    for module, own in parts.factors.items():
        why = ""
        # The factor that training begins with at zero comes first.
        for part in ("b", "embedding_a", "a", "embedding_b"):
            if part in own and is_zero_factor(model[own[part]]):
                why = f"{_factor_name(own[part])} is zero"
                break
        scale = value_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
        if parts.spellings == {"kohya"}:
            scale = stored_alpha(model, parts, module)
        elif parts.spellings == {"mlx"}:
            scale = mlx_parameter(config, "scale")
        if not why and parts.spellings != {"gguf"} and scale == 0 and not isinstance(scale, bool):
            why = "the scale is 0" if parts.spellings == {"mlx"} else "alpha is 0"
        if "magnitude" in own and is_zero_factor(model[own["magnitude"]]):
            emptied.append(module)
        elif why and "magnitude" in own:
            lengths.append(module)
        elif why:
            zero[module] = why
    whole = len(parts.replacements)
    return ZeroPairs(zero, tuple(lengths), tuple(emptied), len(parts.factors), whole)


def _find_vectors_of_one(model: "Model") -> ZeroPairs:
    """Return the vectors of an IA3 adapter whose values are all 1, by module."""
    vectors = [name for name in model if is_scaling_vector(name)]
    ones = {
        name.rpartition(".ia3_l")[0].removeprefix(PREFIX): "ia3_l is one"
        for name in vectors
        if _is_one(model[name])
    }
    return ZeroPairs(ones, (), (), len(vectors), len(model) - len(vectors), "vectors")


def _is_one(view: "View") -> bool:
    """Return whether a tensor has values, and all are one; False if they cannot be decoded."""
    try:
        return math.prod(view.shape) > 0 and all(
            bool((values == 1).all()) for _, _, values in view.chunks(1 << 16)
        )
    except AprfmtError:
        return False


def is_zero_factor(view: "View") -> bool:
    """Return whether a tensor has values, and all are zero; False if they cannot be decoded."""
    try:
        return math.prod(view.shape) > 0 and is_zero(view)
    except AprfmtError:
        return False


def _factor_name(stored: str) -> str:
    """Return the factor's name in a stored name, such as "lora_B"."""
    return next(word for word in reversed(stored.split(".")) if word.startswith("lora_"))


def _list_modules(modules: tuple[str, ...]) -> str:
    """Return modules as a list in text, of which the first ones are named."""
    more = f", ... {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    return ", ".join(modules[:_SHOWN]) + more
