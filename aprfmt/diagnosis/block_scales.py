"""Finds the faulty tensor of packed weights whose scales are separate tensors (bitsandbytes).

A *part* is one of these stored tensors. No claim of config.json is needed to read them, so nothing
can be wrong but a part. Each is replaced by the reference's: the part after which the weight
decodes to the reference's values is the cause.
"""

from collections.abc import Iterator, Mapping

from aprfmt.base.protocols import LazyTensor, raw_parts
from aprfmt.codecs import decode
from aprfmt.codecs.scale_checks import check_block_scales, check_input_scale_tensors
from aprfmt.diagnosis.packing_repairs import bad_scale_text, wrong_part
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.tensors.companions import stored_part
from aprfmt.tensors.view import decode_tensor

Wrong = tuple[str, str, bool]  # the cause, what is wrong, whether it was seen


def find_wrong_scales(
    good: Model, bad: Model, names: set[str] | None
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (weight, cause, sentence, confirmed) for weights of `bad` with a wrong part.

    Only weights with separate tensors of scales are judged: against the same weight of `good`
    where that is packed in the same way. `names` are the weights of `bad` that cannot be read;
    None for all that `bad` lacks or has without parts.
    """
    for name in names or [name for name in good if name not in bad or not bad[name].parts]:
        right, broken = (
            None if view is None else view.stored[0] for view in (good.get(name), bad.get(name))
        )
        found: Iterator[Wrong] = iter(())
        if right is not None and right.parts and right.packed is None:
            found = _wrong_parts_by_reference(right, bad.source.tensors)
        elif broken is not None and broken.parts and broken.packed is None:
            found = _wrong_parts_without_reference(broken)
        for cause, says, sure in found:
            yield name, cause, says, sure


def _wrong_parts_by_reference(
    right: LazyTensor, stored: Mapping[str, LazyTensor]
) -> Iterator[Wrong]:
    """Yield (cause, sentence, confirmed) for each part that differs from the reference's.

    `right` is the reference's weight, `stored` the tensors of the faulty model's weight. Yields
    nothing where the codes are missing or of another encoding.
    """
    main = right.parts[""].info
    if main.name not in stored or stored[main.name].info.encoding != main.encoding:
        return
    own = {suffix: stored.get(part.info.name) for suffix, part in right.parts.items()}
    for suffix, part in own.items():
        if part is None:
            yield (
                "scales_missing",
                f"{suffix} is not in the file",
                _is_right_with_part(right, own, suffix),
            )
        elif suffix and (
            wrong := wrong_part(suffix, stored_part(part), stored_part(right.parts[suffix]))
        ):
            yield *wrong, _is_right_with_part(right, own, suffix)


def _wrong_parts_without_reference(broken: LazyTensor) -> Iterator[Wrong]:
    """Yield (cause, sentence, False) if a packed weight does not decode, else nothing.

    False, since without a packed reference nothing is confirmed.
    """
    wrong = [bad_scale_text(suffix, stored_part(part)) for suffix, part in broken.parts.items()]
    invalid = next(filter(None, wrong), "")
    try:
        decode_tensor(broken)
    except AprfmtError as error:
        says = invalid or str(error).removeprefix(f"{broken.info.name}: ")
        yield "scales_invalid" if invalid else "scales_shape", says, False


def _is_right_with_part(
    right: LazyTensor, own: Mapping[str, LazyTensor | None], suffix: str
) -> bool:
    """Return whether a weight decodes to the reference's values once one part is replaced.

    `own` is {suffix: part} of the weight, `right` the reference's weight; the part `suffix` is
    replaced by the reference's.
    """
    theirs = raw_parts(right)
    parts = {key: part.raw() for key, part in own.items() if part is not None}
    parts[suffix] = theirs[suffix]
    try:
        check_block_scales(parts)
        check_input_scale_tensors(
            {key: part for key, part in own.items() if part and key != suffix}
        )
        made, wanted = (
            decode(right.info.encoding, each, right.info.shape) for each in (parts, theirs)
        )
    except AprfmtError:
        return False
    return bool(made.tobytes() == wanted.tobytes())
