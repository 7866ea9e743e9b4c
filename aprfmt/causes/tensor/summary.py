"""Joins equal explanations of many tensors: a swapped layer is one finding, not nine.

A and B are the two files that are compared; a *side* is one of them, or its tensor.
"""

from collections.abc import Sequence, Set
from dataclasses import asdict, replace

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.tensor.proof import verdict_of
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import short_keys
from aprfmt.measure.proofs import MOST, Proof
from aprfmt.measure.records import EQUAL, TensorDiff


def summarize_explanations(tensors: Sequence[TensorDiff]) -> tuple[Finding, ...]:
    """Return the findings about differing tensors: confirmed first, then most tensors first.

    Findings that change no pass come last. Explanations of several tensors that say the same
    become one finding.
    """
    groups: dict[tuple[str, str, bool], list[TensorDiff]] = {}
    for tensor in tensors:
        found = tensor.explanation
        if found is not None:
            groups.setdefault(_finding_key(found), []).append(tensor)
    equal = {tensor.key for tensor in tensors if _have_same_values(tensor)}
    made = [_make_finding(*key, rows, equal) for key, rows in groups.items()]
    return tuple(
        sorted(made, key=lambda row: (row.verdict == "same", not row.confirmed, -len(row.keys)))
    )


def _have_same_values(tensor: TensorDiff) -> bool:
    """Return whether both sides have the same values of a tensor, up to rounding of their types."""
    if tensor.verdict in EQUAL or tensor.explanation is None:
        return tensor.verdict in (*EQUAL, "WITHIN")
    return tensor.explanation.cause == "quantisation" and tensor.explanation.certainty != "located"


def _finding_key(found: Finding) -> tuple[str, str, bool]:
    """Return (cause, sentence, confirmed), which are equal for findings that are to be joined."""
    if found.cause == "layer_order":
        return found.cause, "", found.confirmed
    if found.cause == "swapped_tensors" and len(found.where) > 1:
        (layer, role), (there, other) = map(split_key, found.where)
        if layer == there and any(text.endswith("are exchanged") for text in found.evidence):
            pair = " and ".join(sorted((role, other)))
            return found.cause, f"{pair} are exchanged", found.confirmed
    return found.cause, found.evidence[0], found.confirmed


def _make_finding(
    cause: str, text: str, confirmed: bool, rows: Sequence[TensorDiff], equal: Set[str]
) -> Finding:
    """Return one finding for the tensors `rows` with the same explanation.

    `equal` are the keys of tensors that are equal in both files.
    """
    if cause == "layer_order":
        says, detail = _layers_sentence(rows, equal), ""
    else:
        says, detail = f"{short_keys(row.key for row in rows)} - {text}", _first_detail(rows)
    made = Finding(
        cause, says, "tensor", "bug", (), confirmed, of="stored values", proof=_joint_proof(rows),
        detail=detail, side=_joint_side(rows), next=_joint_command(rows),
    )  # fmt: skip
    return add_measurements(made, rows)


def add_measurements(finding: Finding, rows: Sequence[TensorDiff]) -> Finding:
    """Return a finding with keys, distances, verdict and evidence of the tensors in `rows` set."""
    made = [row.explanation for row in rows if row.explanation is not None]
    before = [row.residual_before for row in made if row.residual_before is not None]
    after = [row.residual_after for row in made if row.residual_after is not None]
    odd = {
        row.key: asdict(row.stats.nonfinite)
        for row in rows
        if row.stats is not None and row.stats.nonfinite is not None
    }
    return replace(
        finding,
        verdict=verdict_of(finding.cause, after),
        keys=tuple(row.key for row in rows),
        where=tuple(dict.fromkeys(key for row in made for key in row.where)),
        residual_before=max(before, default=None),
        residual_after=max(after, default=None),
        leaves_side_open=finding.leaves_side_open or any(row.leaves_side_open for row in made),
        values={"evidence": [list(row.evidence) for row in made[:8]]}
        | ({"nonfinite": odd} if odd else {}),
    )


def _first_detail(rows: Sequence[TensorDiff]) -> str:
    """Return the second line of evidence of the first tensor; "" if there is none.

    It begins with the tensor's key unless it is the same of all.
    """
    lines = [() if (made := row.explanation) is None else made.evidence[1:2] for row in rows]
    more, *others = lines
    alike = all(other == more for other in others)
    return "".join(more if alike else (f"{rows[0].key}: {text}" for text in more))


def _joint_side(rows: Sequence[TensorDiff]) -> str:
    """Return the side that is wrong in all these tensors, "A" or "B"; "" if not known."""
    sides = {row.explanation.side for row in rows if row.explanation is not None}
    return sides.pop() if len(sides) == 1 else ""


def _joint_command(rows: Sequence[TensorDiff]) -> str:
    """Return the command that mends all these tensors; "" if their findings name none or others."""
    commands = {row.explanation.next for row in rows if row.explanation is not None}
    return commands.pop() if len(commands) == 1 else ""


def _joint_proof(rows: Sequence[TensorDiff]) -> Proof | None:
    """Return the weakest of these tensors' proofs, with the fraction explained in all of them.

    None where one of them is only located.
    """
    found = [row.explanation for row in rows if row.explanation is not None]
    proofs = [one.proof for one in found if one.proof is not None and one.proof.share >= MOST]
    if len(proofs) < len(found):
        return None
    sizes = [1 if row.stats is None else row.stats.count for row in rows if row.explanation]
    given = sum(size * one.share for size, one in zip(sizes, proofs, strict=True))
    least = min(proofs, key=lambda one: (one.judged, not one.accused))
    accused = any(one.accused for one in proofs)
    return replace(least, share=given / max(1, sum(sizes)), accused=accused)


def _layers_sentence(rows: Sequence[TensorDiff], equal: Set[str]) -> str:
    """Return a sentence about which layers are exchanged, moved or copied.

    `equal` are keys of tensors that are equal in both files up to rounding: only such a layer can
    be the original of a copy.
    """
    copied: dict[tuple[str, int], int] = {}  # side and layer -> the layer it is a copy of
    moved: dict[int, dict[int, int]] = {}  # layer -> other layer -> tensors
    for row in rows:
        assert row.explanation is not None
        (layer, _), (there, _) = map(split_key, row.explanation.where)
        if layer is not None and there is not None:
            counts = moved.setdefault(layer, {})
            counts[there] = counts.get(there, 0) + 1
            if row.explanation.where[1] in equal:
                copied[row.explanation.evidence[0][0], layer] = there
    # A layer counts as the one that most of its tensors are from.
    whole = {layer: max(counts, key=lambda k: counts[k]) for layer, counts in moved.items()}
    tensors = {layer: sum(counts.values()) for layer, counts in moved.items()}
    said: list[str] = []
    done: set[int] = set()
    for layer, there in sorted(whole.items()):
        if layer not in done and whole.get(there) == layer:
            many = tensors[layer]
            each = f"{many} tensor{'s' if many > 1 else ''} each"
            said.append(f"layers {layer} and {there} are exchanged ({each})")
            done |= {layer, there}
    # Copies, after exchanged pairs.
    for (side, layer), there in sorted(copied.items(), key=lambda item: item[0][1]):
        if whole[layer] == there and layer not in done:
            own = f"{tensors[layer]} tensor{'s' * (tensors[layer] > 1)}"
            said.append(f"layer {layer} of {side} is a copy of layer {there} ({own})")
            done.add(layer)
    # All other moves in one list.
    rest = {layer: there for layer, there in sorted(whole.items()) if layer not in done}
    if rest:
        (layer, there), *others = list(rest.items())[:12]
        shown = "".join(f", {layer} is {there}" for layer, there in others)
        more = " ..." if len(rest) > 12 else ""
        said.append(
            f"layers stand elsewhere: layer {layer} of one file is layer {there} of the other"
            f"{shown}{more}"
        )
    return "; ".join(said)
