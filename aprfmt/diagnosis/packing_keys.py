"""Keys of a quantization section that mend packed weights: tried on B's own bytes.

A weight whose codes are right and whose section says how they are read wrongly needs its key set,
not its quantization made again.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.model import Model
from aprfmt.tensors.companions import key_of_section, quantization_section

_GONE = 0.8  # of the distance at most is left with the key that mends
_TRIED = 12  # weights that are read again
# The values that a key may have instead, by method. Source: GPTQModel, FORMAT; classic GPTQ stores
# zero points less one.
_OTHERS: Mapping[str, Mapping[str, tuple[Value, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")}
}
_DEFAULTS: Mapping[str, Value] = {"checkpoint_format": "gptq"}


def mending_key(good: Model, bad: Model, finding: Finding, target: str) -> str:
    """Return the command that writes a copy of B with the key that mends all of a finding.

    "" where there is none: every weight that was tried must come nearer to A's.
    """
    section = None if bad.config is None else quantization_section(bad.config)
    keys = [key for key in finding.keys if key in good.roles and key in bad.roles]
    packed = [key for key in keys if any(one.packed for one in bad.roles[key].stored)]
    if section is None or not keys or packed != keys:
        return ""
    place = key_of_section(bad.config or {})
    for key, value in _changes(section) if place and bad.folder is not None else ():
        try:
            made = _with(bad, place, {**section, key: value})
            if all(_nearer(good, bad, made, one) for one in keys[:_TRIED]):
                words = shlex.quote(f"config.json:{place}.{key}={json.dumps(value)}")
                return f"aprfmt set {shlex.quote(str(bad.path.parent))} {words} -o {target}"
        except AprfmtError:
            continue
    return ""


def _changes(section: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    for key, values in _OTHERS.get(str(section.get("quant_method")), {}).items():
        now = section.get(key, _DEFAULTS.get(key))
        yield from ((key, value) for value in values if value != now)


def _with(bad: Model, place: str, section: Mapping[str, Value]) -> Model:
    assert bad.folder is not None
    folder = replace(bad.folder, config={**(bad.config or {}), place: section})
    return Model(bad.source, folder, allow_missing=bad.allow_missing)


def _nearer(good: Model, bad: Model, made: Model, key: str) -> bool:
    right = good.roles[key].numpy()
    before = rel_l2(bad.roles[key].numpy(), right)
    return rel_l2(made.roles[key].numpy(), right) <= _GONE * before
