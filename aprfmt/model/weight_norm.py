"""The two spellings of weight norm: a weight that is stored as its lengths g and directions v.

torch's older `weight_norm` stores `weight_g` and `weight_v`; the parametrization that replaced it
stores `parametrizations.weight.original0` and `original1`, and its loader takes the older names
(`_weight_norm_compat_hook` of torch.nn.utils.parametrizations).
"""

import re
from collections.abc import Collection, Mapping

_NEW = re.compile(r"(.*)\bparametrizations\.(\w+)\.original([01])$")


def older_spellings(names: Collection[str]) -> Mapping[str, str]:
    """Return {stored name: torch's older name} of the g and v of weight norm in the newer spelling.

    Only where both are stored, and neither older name is.
    """
    held, found = frozenset(names), dict[str, str]()
    for name in names:
        parts = _NEW.match(name)
        if parts is None:
            continue
        before, weight, _ = parts.groups()
        both = [f"{before}parametrizations.{weight}.original{number}" for number in (0, 1)]
        older = [f"{before}{weight}_{letter}" for letter in "gv"]
        if held.issuperset(both) and held.isdisjoint(older):
            found |= dict(zip(both, older, strict=True))
    return found


def normed_weights(names: Collection[str]) -> Mapping[str, tuple[str, str]]:
    """Return {name of the weight: (stored name of g, of v)} of all weights with weight norm."""
    older = older_spellings(names)
    stored = {older.get(name, name): name for name in names}
    return {
        name.removesuffix("_v"): (stored[f"{name.removesuffix('_v')}_g"], stored[name])
        for name in stored
        if name.endswith("_v") and f"{name.removesuffix('_v')}_g" in stored
    }
