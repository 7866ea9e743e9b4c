"""Input scales stored with packed weights: they change no value of a weight.

So no verdict of a tensor depends on them, but what an engine computes does.
"""

from collections.abc import Callable, Iterator, Sequence

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs.dialect import OF_INPUTS
from aprfmt.codecs.scale_checks import check_input_scale_tensors
from aprfmt.errors import CodecError
from aprfmt.measure.alignment import TensorPair
from aprfmt.model.ledger import NotCompared, State
from aprfmt.tensors.view import View


def differing_input_scales(pairs: Sequence[TensorPair]) -> Iterator[NotCompared]:
    """Yield an item per input scale that differs between the sides or is on one side only.

    Only for pairs of which both sides are packed weights.
    """
    for pair in pairs:
        if pair.a is None or pair.b is None or not (pair.a.parts and pair.b.parts):
            continue
        a, b = _input_scale_bytes(pair.a), _input_scale_bytes(pair.b)
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) == b.get(name):
                continue
            one_sided: State = "only in A" if name in a else "only in B"
            state: State = "unequal" if name in a and name in b else one_sided
            weight = (pair.b if state == "only in B" else pair.a).names[0]
            yield NotCompared(
                "scale of activations",
                f"{pair.key}: {name[1:]}",
                state,
                f"beside {weight}; engines take 1.0 where there is none" * (state != "unequal"),
            )


def check_input_scales(view: View) -> None:
    """Raise CodecError, with the tensor's name, for an input scale that is not one number."""
    _check_each_tensor(view, lambda stored: check_input_scale_tensors(stored.parts))


def check_packed_parts(view: View) -> None:
    """Raise CodecError, with the tensor's name, if a packed weight's parts do not fit its claim."""
    _check_each_tensor(view, lambda stored: stored.packed and stored.packed().laid_out())


def _check_each_tensor(view: View, check: Callable[[LazyTensor], object]) -> None:
    """Call `check` on every stored tensor of a view; a CodecError gets the tensor's name."""
    for stored in view.stored:
        try:
            check(stored)
        except CodecError as error:
            raise CodecError(f"{stored.info.name}: {error}") from error


def _input_scale_bytes(view: View) -> dict[str, bytes]:
    """Return {tensor's number in the view and suffix, as "0input_scale": bytes} of input scales."""
    return {
        f"{number}{suffix.lstrip('._')}": bytes(part.raw())
        for number, stored in enumerate(view.stored)
        for suffix, part in stored.parts.items()
        if OF_INPUTS.search(suffix)
    }
