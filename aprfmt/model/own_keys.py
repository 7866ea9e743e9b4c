"""Keys of a file's own by which other programs read another model than aprfmt does.

aprfmt believes the tensors where a key contradicts them, and reads the config.json that a GGUF
carries where a key is missing. Other programs go by the keys alone.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.arch.spec import Facts, HyperParam
from aprfmt.arch.value_checks import same_value
from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.model.resolve import ARCH_KEYS

if TYPE_CHECKING:
    from aprfmt.measure.records import FieldDiff
    from aprfmt.model import Model

# Where a side's value is from, in the row of a comparison of such keys.
READ_HERE, ITS_KEY, NOT_THERE = "read here", "its key", "not there"
# What readers of GGUF take from the vocabulary where no key says it (llama.cpp, llama-vocab.cpp).
_TOLD_BY_TOKENS = ("vocab_size",)


@dataclass(frozen=True, slots=True)
class MisleadingKey:
    """A key by which other programs read another model than aprfmt does.

    It gives the hyperparameter `name` the value `says` (None: the key is absent), where `read` is
    the right value. `key` is its name in the file, `style` the key style ("hf", "gguf", "apr").
    """

    key: str
    name: str
    says: Value
    read: Value
    style: str

    @property
    def text(self) -> str:
        """What is wrong with the key, in words."""
        if self.says is None:
            return (
                f"{self.key} is not there: other programs need it, and only aprfmt reads "
                f"{self.read!r} in the carried config.json"
            )
        return (
            f"{self.key} says {self.says!r}, the tensors say {self.read!r}: other programs go by "
            "the key"
        )


def is_of_own_keys(row: "FieldDiff") -> bool:
    """Return whether a comparison is of what the files' keys state, not of derived values."""
    return {row.origin_a, row.origin_b} <= {READ_HERE, ITS_KEY, NOT_THERE}


def contradicted_parts(model: "Model") -> Iterator[tuple[str, HyperParam]]:
    """Yield (hyperparameter, what keys say of it) for optional weights that tensors contradict.

    Examples are biases that a flag denies, or an output head in a model that is said to be tied.
    """
    for name, row in model.resolution.report.demanded.items():
        if name in model.hyper and not same_value(row.value, model.hyper[name]):
            yield name, row


def lacks_demanded_head(model: "Model") -> bool:
    """Return whether config.json denies a tied head, and the output head is not stored.

    False for GGUF and APR, whose readers take a missing head for a tied one, and where no key says
    that the head is not the embedding.
    """
    said = model.resolution.report.overruled.get("tied_embeddings")
    if said is None or not said.key or said.value or model.key_style in ARCH_KEYS:
        return False
    coverage = model.resolution.coverage
    return "output.weight" in (*coverage.missing, *coverage.accepted)


def misleading_keys(model: "Model") -> dict[str, MisleadingKey]:
    """Return {hyperparameter: MisleadingKey} of keys by which other programs read another model.

    These are keys that the tensors contradict, and keys that a GGUF lacks and only its embedded
    config.json has. In a GGUF or APR file its own keys count, else config.json. Raises ArchError.
    """
    found = {one.name: one for one in _unstated_keys(model)}
    report = model.resolution.native or model.resolution.report
    style = model.key_style if model.key_style in ARCH_KEYS else "hf"
    for name, said in report.overruled.items():
        if name in model.hyper and said.key:
            found[name] = MisleadingKey(said.key, name, said.value, model.hyper[name], style)
    return found


def _unstated_keys(model: "Model") -> Iterator[MisleadingKey]:
    """Yield the keys that a GGUF or APR file lacks and its readers have no default for.

    Only for a file that embeds a config.json, from which aprfmt reads them.
    """
    from aprfmt.arch.hyperparameters import read_back_hyper, read_hyper

    style, spec = model.key_style, model.spec
    if style not in ARCH_KEYS or model.config is None:
        return
    called = spec.called.get(style) or ("",)
    prefix = str(model.metadata.get(ARCH_KEYS[style][0][1], ""))
    if prefix not in called:
        return  # no other program opens a file of that name
    try:
        alone, _ = read_hyper(
            spec, Facts(style, model.metadata, {}, prefix), str(model.path), complete=False
        )
    except ArchError:
        return  # a value that cannot be read is no missing key: its relation says what it is
    reread = read_back_hyper(spec, model.hyper, style)
    for name in model.hyper:
        if name in alone or name not in reread or name in _TOLD_BY_TOKENS:
            continue
        key = reread.of(name).key
        if key.startswith(f"{called[0]}."):
            key = prefix + key.removeprefix(called[0])
        if key and key not in model.metadata and reread.of(name).origin == "metadata":
            yield MisleadingKey(key, name, None, model.hyper[name], style)


def contradicted_values(model: "Model") -> dict[str, str]:
    """Return {hyperparameter: KEY=VALUE} for a model's keys that its tensors contradict.

    VALUE is that of the tensors, by which the model is read. KEY=VALUE is quoted for a shell. {}
    where the hyperparameters cannot be read.
    """
    try:
        hyper = model.hyper
    except AprfmtError:
        return {}
    found = {}
    for name in hyper:
        row = hyper.of(name)
        if row.origin not in ("shape", "tensor") or not row.key:
            continue
        stated: object = model.metadata.get(row.key)
        if stated is None and model.config is not None:
            stated = model.config
            for part in row.key.split("."):
                stated = stated.get(part) if isinstance(stated, Mapping) else None
        number = isinstance(row.value, int | float)
        if number and stated is not None and not same_value(stated, row.value):
            found[name] = shlex.quote(f"{row.key}={json.dumps(row.value)}")
    return found
