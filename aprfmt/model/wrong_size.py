"""Finds the one wrong size in a configuration, from the shapes of the tensors."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.model.config_paths import key_path, read_with_changes, value_at_path
from aprfmt.model.relations import Relation, opening_path
from aprfmt.model.renames import command_line

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.model.resolve import Resolution

Read = Callable[["Model"], "Resolution"]
Keyed = tuple[str, int]
_TRIED = 48  # values that are tried
_SAYS = re.compile(r"(?:^|: )(?:metadata )?([\w.]+): is |nothing says [^;]*; expected ([\w.]+)")


def solve_key(
    model: "Model", found: "Resolution | None", error: ArchError | None, read: Read
) -> "Resolution | None":
    """Return the resolution with the one key value that makes all shapes right; else None.

    `found` is the resolution with wrong shapes; it is None where there is none, and `error` says
    why. `read` resolves a model with another value of a key. None too where several values do.
    """
    answers: dict[Keyed, Resolution] = {}
    tries = _propose_values(found) if found is not None else _values_for_error(model, error)
    for key, value in list(dict.fromkeys(tries))[:_TRIED]:
        try:
            made = read(read_with_changes(model, {key_path(model, key): value}))
        except AprfmtError:
            continue
        if is_whole(made):
            answers[key, value] = made
    if len(answers) != 1:
        return None
    (((key, value), made),) = answers.items()
    wrong = 0 if found is None else len(found.coverage.misshapen)
    before = value_at(model, key)
    many = f"{wrong} tensors have other shapes than it gives" if wrong else "it cannot be read"
    if found is not None and not wrong:
        many = f"tensors of {value} layers are there"
    says = f"{key} is {'not there' if before is None else before}, the tensors say {value}: {many}"
    remedy = command_line("set", opening_path(model.path), f"{key}={value}", "--in-place")
    relation = Relation("keys", says, (key,), (), remedy, (), ((key, value),))
    return replace(made, relations=(relation, *made.relations))


def is_whole(found: "Resolution") -> bool:
    """Return whether all tensors are found with right shapes, in layers that are counted.

    False too if tensors are missing whose absence is accepted.
    """
    layers = {layer for key in found.roles if (layer := split_key(key)[0]) is not None}
    count = int(found.hyper["n_layers"])
    coverage = found.coverage
    fits = not coverage.misshapen and not coverage.missing and not coverage.accepted
    return fits and layers <= {*range(count)}


def value_at(model: "Model", key: str) -> Value:
    """Return the value of a configuration's dotted key, None where it is absent."""
    config = model.folder.config if model.folder is not None else None
    found: Value = value_at_path(model.metadata if config is None else config, key_path(model, key))
    return found


def _propose_values(found: "Resolution") -> Iterator[Keyed]:
    """Yield (key, value) that would make a wrong dimension right, the most frequent first.

    A value is more frequent if it mends more tensors' dimensions.
    """
    rules = {rule.role: rule for rule in found.spec.tensors}
    votes: Counter[Keyed] = Counter()
    for key, shape, _ in found.coverage.misshapen:
        rule = rules.get(split_key(key)[1])
        if rule is None or len(rule.shape) != len(shape):
            continue
        for expression, size in zip(rule.shape, shape, strict=True):
            votes.update(_propose_factors(found, expression, size))
    layers = {layer for key in found.roles if (layer := split_key(key)[0]) is not None}
    row = found.hyper.of("n_layers")
    if row.key and layers == {*range(len(layers))} and len(layers) > int(row.value):
        yield row.key, len(layers)
    yield from (keyed for keyed, _ in votes.most_common())


def _propose_factors(found: "Resolution", expression: str, size: int) -> Iterator[Keyed]:
    """Yield (key, value) for each factor of a dimension that alone could be wrong.

    `expression` is a product such as "n_heads*head_dim", `size` the dimension in the file.
    """
    hyper = found.hyper
    names = expression.split("*")
    if not all(name.isdecimal() or name in hyper for name in names):
        return
    for name in (name for name in names if not name.isdecimal()):
        rest = 1
        for other in names:
            if other != name:
                rest *= int(other) if other.isdecimal() else int(hyper[other])
        if not rest or size % rest or size // rest == hyper[name]:
            continue
        row = hyper.of(name)
        key = row.key or _absent_key(found, name)
        if key:
            yield key, size // rest
        if not row.key and name in ("head_dim", "value_head_dim") and hyper.of("n_heads").key:
            if size // rest and int(hyper["hidden_size"]) % (size // rest) == 0:
                yield hyper.of("n_heads").key, int(hyper["hidden_size"]) // (size // rest)


def _absent_key(found: "Resolution", name: str) -> str:
    """Return the key that would state a hyperparameter which has its default; "" if none would."""
    rule = next((rule for rule in found.spec.hyper if rule.name == name), None)
    keys = () if rule is None else rule.keys.get("hf" if found.style == "hf" else "", ())
    return keys[0] if keys else ""


def _values_for_error(model: "Model", error: ArchError | None) -> Iterator[Keyed]:
    """Yield (key, value) to try for the key that an error names.

    Values are the sizes that are usual among the tensors, and their divisors.
    """
    named = _SAYS.search(str(error).removeprefix(f"{model.path}: "))
    if named is None:
        return
    sizes: Counter[int] = Counter()
    for view in model.values():
        sizes.update(size for size in view.shape if size > 1)
    common = [size for size, _ in sizes.most_common(8)]
    key = named[1] or named[2]
    value = value_at(model, key)
    if isinstance(value, float) and value != int(value):
        return  # a size is whole: what is refused is another kind of block, and no tensor says it
    yield from ((key, size) for size in common)
    width = common[0] if common else 0
    yield from ((key, n) for n in range(1, min(width, 257)) if width % n == 0)
