"""Tensors and single values of a described pickle by their path: `model.layers.0.weight`."""

import hashlib
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats.cursor import MAX_COUNT
from aprfmt.formats.pytorch.distributed import LOCAL, SHARDS, RankPart, rank_parts
from aprfmt.formats.pytorch.numpy_arrays import array_tensor
from aprfmt.formats.pytorch.pickle_imports import is_enum_member, is_model_output
from aprfmt.formats.pytorch.pickle_values import (
    GlobalName,
    PickledDict,
    PickledObject,
    SparseTensorValue,
    Storage,
    TensorValue,
)

MAX_DEPTH = 100  # containers in containers
MAX_VISITS = 2_000_000  # values visited; one that is shared counts each time
# The same of a small file: so many, and as many more for each byte of it.
FREE_VISITS, BYTE_VISITS = 50_000, 2
MAX_PATH = 4096  # characters of a name
ALONE = "tensor"  # the name of a tensor that is all the file holds
_MODULE = ("_parameters", "_buffers", "_modules")  # of a pickled module, none of them in its names
# What torch.nn.Module keeps for itself in addition: hooks, names of buffers, a compiled call.
_BOOKKEEPING = frozenset(
    (
        "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
        "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks", "_compiled_call_impl", "_backend",
    )
)  # fmt: skip
_SHORT = 100  # bytes that are shown whole
_SCALARS = (str, int, float, bool, type(None))


class Flattened:
    """The content of a described pickle: `tensors` and `values` by path.

    `classes` counts the objects of each class.
    """

    def __init__(self, value: Any, where: str, nbytes: int) -> None:
        """Collect the tensors and values inside the description `value` of a pickle.

        `where` begins messages. `nbytes` is the size of the pickle's file, which limits how many
        values are visited: a few bytes can describe values that refer to each other without end.
        """
        self.where = where
        self._most = min(MAX_VISITS, FREE_VISITS + BYTE_VISITS * nbytes)
        self.tensors: dict[str, TensorValue] = {}
        self.values: dict[str, Any] = {}
        self.classes: dict[str, int] = {}
        self._visits = 0
        self._modules: set[int] = set()  # ids of the modules that were walked
        self._settings: list[tuple[tuple[str, ...], Any, int]] = []
        self._in_settings = False
        self._walk(value, (), 0)
        # A setting may refer to a module, which has its place among the modules.
        self._in_settings = True
        for path, setting, depth in self._settings:
            self._walk(setting, path, depth)

    def _walk(self, value: Any, path: tuple[str, ...], depth: int) -> None:
        """Add a value and everything inside it under `path`; `depth` counts containers.

        Raises UnsupportedError for too many values, FormatError for too deep nesting, which also
        ends containers inside themselves.
        """
        self._visits += 1
        if self._visits > self._most:
            raise UnsupportedError(
                f"{self.where}: more than {self._most} values, counted each time they are shared; "
                "the limit: save the state_dict alone"
            )
        if depth > MAX_DEPTH:
            raise FormatError(
                f"{self.where}: containers nest deeper than {MAX_DEPTH}, or hold themselves, at "
                f"{shorten('.'.join(path), 100)!r}; save the state_dict alone"
            )
        if isinstance(value, TensorValue):
            self._add_tensor(value, path, depth)
        elif isinstance(value, SparseTensorValue):
            for suffix, part in value.parts.items():
                self._walk(part, (*path, suffix), depth + 1)
            self._add_facts(value.facts, path)
        elif isinstance(value, PickledDict):
            self._add_dict(value, path, depth)
        elif isinstance(value, PickledObject):
            self._add_object(value, path, depth)
        elif isinstance(value, list | tuple):
            self._add_list(value, path, depth)
        elif isinstance(value, Storage):
            size = (value.nbytes,)
            self._add_tensor(TensorValue(value, "uint8", 0, size, (1,), "storage"), path, depth)
        elif isinstance(value, _SCALARS):
            self._add_value(path, value)
        elif isinstance(value, bytes) and len(value) > _SHORT:
            digest = hashlib.sha256(value).hexdigest()
            self._add_value(path, f"{len(value)} bytes, SHA-256 {digest}")
        else:  # bytes, complex numbers and names
            self._add_value(path, shorten(str(value), 500))

    def _add_dict(self, table: PickledDict, path: tuple[str, ...], depth: int) -> None:
        """Add the items of a dict; of equal keys the last one counts."""
        last = {}
        for key, value in table.pairs:
            last[_key_text(key)] = value
        for name, value in last.items():
            self._walk(value, (*path, name), depth + 1)

    def _add_list(
        self, values: list[Any] | tuple[Any, ...], path: tuple[str, ...], depth: int
    ) -> None:
        """Add a list of scalars as one value, any other list element by element.

        A list of (name, tensor), as of `list(model.named_parameters())`, is added as a dict.
        """
        if all(isinstance(each, _SCALARS) for each in values):
            self._visits += len(values)
            self._add_value(path, list(values))
            return
        if all(_is_named_tensor(each) for each in values):
            self._add_dict(PickledDict([(each[0], each[1]) for each in values]), path, depth)
            return
        for number, value in enumerate(values):
            self._walk(value, (*path, str(number)), depth + 1)

    def _add_object(self, value: PickledObject, path: tuple[str, ...], depth: int) -> None:
        """Add the state and items of an object, and count its class.

        A module's parameters and submodules have no key of their own in the path. Of an Enum's
        member its value is added, and an array of numbers is added as a tensor.
        """
        if is_model_output(value.kind) and value.items.pairs:
            # A dict of fields, which are attributes of the same names too.
            state = value.state.pairs if isinstance(value.state, PickledDict) else []
            held = [pair for pair in state if pair[1] is not None]
            self._add_dict(PickledDict([*held, *value.items.pairs]), path, depth)
            return
        array = self._array(value)
        if array is not None:
            self._add_tensor(array, path, depth)
            return
        name = str(value.kind)
        self.classes[name] = self.classes.get(name, 0) + 1
        if value.state is None and is_enum_member(value.kind, value.args):
            self._add_value(path, value.args[0])
            return
        if self._in_settings:
            if id(value) in self._modules:
                return
            self._modules.add(id(value))
        self._add_state(value, path, depth)
        if value.items.pairs:
            self._add_dict(value.items, path, depth)
        if value.rows:
            self._add_list(value.rows, path, depth)
        if value.args:
            self._add_list(value.args, (*path, "args"), depth)

    def _add_state(self, value: PickledObject, path: tuple[str, ...], depth: int) -> None:
        """Add the attributes of an object, or another state under the name `state`.

        A module's settings are put off until all modules are added. An object that several modules
        share is then added once.
        """
        state = value.state
        tables = state if isinstance(state, tuple) else (state,)  # without and with slots
        if not all(table is None or isinstance(table, PickledDict) for table in tables):
            self._walk(state, (*path, "state"), depth + 1)
            return
        for table in tables:
            pairs = [] if table is None else table.pairs
            module = any(key == "_parameters" for key, _ in pairs)
            if module:
                self._modules.add(id(value))
            for key, held in pairs:
                own = (*path, _key_text(key))
                if not module:
                    self._walk(held, own, depth + 1)
                elif key in _MODULE:
                    self._walk(held, path, depth + 1)
                elif key not in _BOOKKEEPING:
                    self._settings.append((own, held, depth + 1))

    def _array(self, value: PickledObject) -> TensorValue | None:
        """Return an object that is an array of numbers as a tensor; None for any other.

        FormatError where its bytes do not fit its shape.
        """
        try:
            return array_tensor(value)
        except ValueError as error:
            raise FormatError(f"{self.where}: {error}; it is damaged") from None

    def _add_tensor(self, value: TensorValue, path: tuple[str, ...], depth: int) -> None:
        """Add a tensor, and the tensors among its attributes; FormatError for a name used twice."""
        inner = {suffix: part for suffix, part in value.parts.items() if _holds_tensors(part)}
        parts = rank_parts(value)
        if parts and not inner.keys() - {LOCAL, SHARDS}:
            for number, part in enumerate(parts):
                own = path if len(parts) == 1 else (*path, str(number))
                self._add_rank_part(part, value, own, depth + 1)
            return
        if value.storage is not None or not inner:
            name = self._join_path(path) or ALONE
            if name in self.tensors:
                raise FormatError(
                    f"{self.where}: two tensors come to the name {shorten(name, 100)!r} by their "
                    "paths; save one of them alone"
                )
            if len(self.tensors) >= MAX_COUNT:
                raise FormatError(f"{self.where}: more than {MAX_COUNT} tensors, the limit")
            self.tensors[name] = value
        for suffix, part in inner.items():
            self._walk(part, (*path, suffix), depth + 1)
        self._add_facts(value.facts, path)

    def _add_rank_part(
        self, part: RankPart, whole: TensorValue, path: tuple[str, ...], depth: int
    ) -> None:
        """Add one rank's part of the tensor `whole` under the tensor's path.

        If the part is smaller, the shape of the whole and, if known, the part's offsets in it are
        added as values.
        """
        if part.tensor.shape != whole.shape:
            self._add_value((*path, "global_shape"), list(whole.shape))
            if part.offsets is not None:
                self._add_value((*path, "shard_offsets"), list(part.offsets))
        part.tensor.kind = part.tensor.kind or whole.kind
        self._walk(part.tensor, path, depth)

    def _add_facts(self, facts: dict[str, Any], path: tuple[str, ...]) -> None:
        """Add the scalars and lists of integers among a tensor's facts as values."""
        for key, fact in facts.items():
            if isinstance(fact, _SCALARS) or (
                isinstance(fact, list) and all(isinstance(each, int) for each in fact)
            ):
                self._add_value((*path, key), fact)

    def _add_value(self, path: tuple[str, ...], value: Any) -> None:
        """Add a single value under its path; the first value of a path counts."""
        if path or not isinstance(value, list):
            self.values.setdefault(self._join_path(path) or "value", value)

    def _join_path(self, path: tuple[str, ...]) -> str:
        """Return a path joined by dots; FormatError if it is too long."""
        name = ".".join(path)
        if len(name) > MAX_PATH:
            raise FormatError(
                f"{self.where}: a path of {len(name)} characters ({shorten(name, 60)!r}); at most "
                f"{MAX_PATH} are read"
            )
        return name


def _is_named_tensor(value: Any) -> bool:
    """Return whether a value is a pair of a text and a tensor."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], str):
        return False
    return isinstance(value[1], TensorValue | SparseTensorValue)


def _key_text(key: Any) -> str:
    """Return a key of a dict as one component of a path."""
    if isinstance(key, str):
        return key
    if isinstance(key, tuple) and all(isinstance(each, _SCALARS) for each in key):
        return "(" + ", ".join(str(each) for each in key[:8]) + ")"
    if isinstance(key, int | float | None | bytes | GlobalName):
        return str(key)
    if isinstance(key, PickledObject) and is_enum_member(key.kind, key.args):
        return str(key.args[0])
    return type(key).__name__


def _holds_tensors(value: Any) -> bool:
    """Return whether an attribute of a tensor is a tensor, or a container with one in it."""
    if isinstance(value, TensorValue | SparseTensorValue):
        return True
    if isinstance(value, PickledDict):
        return any(isinstance(each, TensorValue) for _, each in value.pairs)
    return isinstance(value, list | tuple) and any(isinstance(each, TensorValue) for each in value)
