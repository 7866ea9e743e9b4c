"""Scales of activations that stand beside packed weights: they change no value of a weight.

So no verdict of a tensor depends on them, but what an engine computes does.
"""

from collections.abc import Callable, Iterator, Sequence

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs.credible import check_inputs
from aprfmt.codecs.dialect import OF_INPUTS
from aprfmt.compare.align import TensorPair
from aprfmt.errors import CodecError
from aprfmt.tensors.view import View

_SHOWN = 3


def input_scale_notes(pairs: Sequence[TensorPair]) -> Iterator[str]:
    """Yield a remark on packed weights whose scales of activations differ, or are on one side."""
    found: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.a is None or pair.b is None or not (pair.a.parts and pair.b.parts):
            continue
        a, b = _scales(pair.a), _scales(pair.b)
        if a != b:
            how = "differ beside" if a and b else f"are only in {'A' if a else 'B'}, beside"
            found.setdefault(how, []).append(pair.key)
    for how, keys in found.items():
        more = ", ..." if len(keys) > _SHOWN else ""
        yield (
            f"scales of activations {how} {len(keys)} weights: "
            f"{', '.join(keys[:_SHOWN])}{more}; no weight's value depends on them, but what an "
            "engine computes does"
        )


def refuse_inputs(view: View) -> None:
    """Raise CodecError, with the tensor, for a scale of activations that is no number for one."""
    _each_named(view, lambda stored: check_inputs(stored.parts))


def refuse_packed(view: View) -> None:
    """Raise CodecError, with the tensor, for a packed weight whose parts do not fit its claim."""
    _each_named(view, lambda stored: stored.packed and stored.packed().laid_out())


def _each_named(view: View, check: Callable[[LazyTensor], object]) -> None:
    """Check every stored tensor of a view; a CodecError then begins with its name."""
    for stored in view.stored:
        try:
            check(stored)
        except CodecError as error:
            raise CodecError(f"{stored.info.name}: {error}") from error


def _scales(view: View) -> dict[str, bytes]:
    """Return the bytes of the scales of activations of all tensors that a view joins."""
    return {
        f"{number}{suffix.lstrip('._')}": bytes(part.raw())
        for number, stored in enumerate(view.stored)
        for suffix, part in stored.parts.items()
        if OF_INPUTS.search(suffix)
    }
