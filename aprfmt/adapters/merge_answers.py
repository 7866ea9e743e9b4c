"""Answers whether B is the base A with an adapter merged: once, twice, in every shard.

A *pair* is the two factors of one module, and the *change* of a weight their product times the
scale. A is the base, and B the model that is judged. An *item* is one thing that a model is made
of: a tensor, a key, a text.

For each weight that the adapter changes, B is compared with A plus the change, as `merge_faults`
does. All other tensors of B are compared with A as `diff` does.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.adapters.fused_merges import FusedPart, find_fused_order
from aprfmt.adapters.merge_faults import (
    ANOTHER,
    EITHER,
    EXCHANGED,
    FRACTIONS,
    MORE,
    NOTHING,
    ONCE,
    OTHER_ROWS,
    OTHERWISE,
    Factor,
    Judged,
    Merge,
    OtherChange,
    Steps,
    find_added_change,
    judge_merge,
    judge_misplaced,
    judge_otherwise,
    mlx_scale_factors,
    scale_factors,
)
from aprfmt.adapters.merging import (
    MergedTensor,
    exchanged_factors,
    merge_adapter,
    merged_values,
    scaled_otherwise,
)
from aprfmt.adapters.parameters import OTHER_ORDERS
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.sequences import first_and_more
from aprfmt.codecs import decode, encode
from aprfmt.errors import AprfmtError
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.model import Model
from aprfmt.model.adapter_parts import HEADS, adapter_parts, alpha_contradiction
from aprfmt.model.adapter_reading import Adapter
from aprfmt.model.ledger import NotCompared, make_ledger
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce
from aprfmt.model.zero_pairs import find_zero_pairs
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.compare.diffs import DiffReport

    F64 = NDArray[np.float64]

_SHOWN = 3
_CLOSE = ("SAME_BYTES", "SAME_VALUES", "WITHIN")
_UNREAD = "nothing here reads it"
_WORDS = VerdictWords("merged", "not merged as it should be")


@dataclass(frozen=True)
class ChangedWeight:
    """One changed weight: B's shard, how many times the change is in it, and what remains.

    `times` is the projection of B - A on the change; `rest` the norm of what that leaves, relative
    to the change; `found` is "once", "twice", "N times", "subtracted", "not at all", "once or not
    at all" where B's type holds none of the change, "nothing to merge" where the pair is zero,
    "scaled otherwise", "with exchanged factors", "transposed", "another weight's change", "in
    other rows" of a fused weight, "in some experts", "once and another change", "otherwise", or the
    order in which the ranks of stacked experts were read, where that one gives B. `says` is the
    mistake in words, or the state of the base that was merged. `lost` is the fraction of the change
    that B's type took away, `source` the weight whose change is in B in place of this one's, ""
    for none.
    """

    key: str
    file: str
    times: float
    rest: float
    found: str
    says: str = ""
    lost: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class AdapterAnswer:
    """Whether B is A with an adapter merged: what was found in each weight, and what else differs.

    `found` is what was found in all changed weights: one of the answers of ChangedWeight, or how
    often each was found. `others` are tensors that the adapter does not change, and that differ.
    `says` are sentences about them: whose change they hold, or in what they were quantized. `own`
    are tensors that the adapter replaces as a whole (modules_to_save), and that B has otherwise.
    """

    adapter: str
    found: str
    weights: tuple[ChangedWeight, ...]
    others: tuple[str, ...]
    says: tuple[str, ...] = ()
    same: int = 0  # those that it does not change, and that agree
    left: tuple[NotCompared, ...] = ()  # what was not compared, of both models and the adapter
    own: tuple[str, ...] = ()

    def pronounced(self, accept: Collection[str] = ()) -> Pronounced:
        """Return the verdict (word, sentence, exit code) on this answer about an adapter.

        It is over weights, other tensors, and what was not compared. `accept` are patterns of items
        that need not be compared, as for `diff`.
        """
        once = sum(each.found in (ONCE, NOTHING) for each in self.weights)
        once = 0 if self.undecided else once
        counts = {"weights": (once, len(self.weights)), "tensors": (self.same, self.same)}
        left = self.left
        if self.undecided:
            left += tuple(
                NotCompared("weight", each.key, "unreadable", each.says, "B")
                for each in self.weights
            )
        return pronounce(
            _WORDS, Compared(self.differs, counts, left, scope=f": {self.text}"), accept
        )

    @property
    def text(self) -> str:
        """How the adapter is merged, in words, with the number of changed weights."""
        what = f"{self.found} ({len(self.weights)} weights)"
        if self.own:
            what += f", but not its own {first_and_more(self.own, _SHOWN)}"
        return what

    @property
    def undecided(self) -> bool:
        """Whether B's values do not tell whether the adapter was merged, and nothing else differs.

        That is so where B's type is too coarse for the change, or the adapter's pairs are zero.
        """
        return self.found in (EITHER, NOTHING) and not self.others and not self.own

    @property
    def differs(self) -> bool:
        """Whether B is certainly not A with the adapter merged."""
        return not (self.is_merged_once or self.undecided)

    @property
    def is_merged_once(self) -> bool:
        """Whether B is A with the adapter once in every weight, and nothing else differs."""
        return self.found == ONCE and not self.others and not self.own

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        found = asdict(self)
        del found["left"], found["same"]
        return {"merged": self.is_merged_once, **found}


def answer_merge(a: Model, b: Model, adapter: Path) -> "tuple[AdapterAnswer, DiffReport]":
    """Return whether B is A with the adapter merged, as (answer, comparison of B with that merge).

    `adapter` is the path of its file or folder. Raises ConversionError, as `merge_adapter` does,
    for an adapter of another base.
    """
    from aprfmt.compare import diff_models

    # A with the adapter, compared with B as `diff` compares.
    model, opened, found = merge_adapter(a, adapter, again=True)
    with opened:
        report = diff_models(model, b, only=("tensors",), explain=False)
        changed = {
            name for name, one in model.source.tensors.items() if isinstance(one, MergedTensor)
        }
        weights = []
        others = []
        same = 0
        # Changed weights are judged one by one; of the others only differing ones count.
        for row in report.tensors:
            mine, theirs = model.find(row.key), b.find(row.key)
            touched = mine is not None and bool(changed.intersection(mine.names))
            if touched and mine is not None and theirs is not None and mine.shape == theirs.shape:
                merge = _merge_values(mine, theirs, row.verdict in _CLOSE)
                more = partial(_other_changes, model, changed, row.key)
                judged = judge_merge(merge, wrong_scale_factors(mine, found), more)
                judged = judge_otherwise(merge, judged, scaled_otherwise(mine))
                judged = judge_otherwise(merge, judged, exchanged_factors(mine), EXCHANGED)
                if judged.found == EITHER and not _has_change(mine):
                    why = "the adapter's pair of it is zero, and B holds the base's values"
                    judged = judged._replace(found=NOTHING, says=why)
                weights.append(_changed_weight(row.key, theirs, judged))
            elif touched or row.verdict not in _CLOSE:
                others.append(row.key)
            else:
                same += 1
        weights = _try_other_layers(model, b, changed, weights)
        # Stacked experts may have been merged with their ranks in another order.
        if any(pair.parameters for pair in found.pairs.values()):
            weights = _try_rank_orders(a, b, adapter, weights)
        weights, moved = _try_fused_orders(model, b, changed, weights)
        own = _tensors_of_adapter(model, found)
        wrong = tuple(key for key in others if key in own)
        about = tuple(_replaced_tensor_text(key, a, b) for key in wrong)
        strange = [key for key in others if key not in own]
        left_over = [key for key in strange if key not in moved]
        others, says = _unexplained_others(model, b, left_over, changed)
        others = [key for key in strange if key in moved or key in others]
        says = (*_spread_rows_text([key for key in strange if key in moved]), *says)
        says = (*_layer_offset_text(weights, int(b.hyper["n_layers"])), *about, *says)
        # Sentences about contradictory alphas and renamed modules come first.
        zeros = find_zero_pairs(opened).text
        says = (zeros, *says) if zeros else says
        apart = alpha_contradiction(found.config, adapter_parts(opened), opened)
        if apart:
            says = (f"judged by adapter_config.json: {apart}", *says)
        left = (*report.not_compared, *_unread_items(opened, found, model))
    if found.relation is not None:
        says = (found.relation.text, *says)
    answer = AdapterAnswer(
        str(found.path),
        _common_answer(weights),
        tuple(weights),
        tuple(others),
        says,
        same,
        left,
        wrong,
    )
    return answer, report


def _has_change(view: View) -> bool:
    """Return whether a pair of the adapter can change this weight of the merged model.

    It cannot where one of its factors is zero.
    """
    return any(one.pair.has_change for one in view.stored if isinstance(one, MergedTensor))


def _tensors_of_adapter(model: Model, found: Adapter) -> set[str]:
    """Return the merged model's keys of the tensors that the adapter replaces (modules_to_save)."""
    names = {name.replace(".base_layer.", ".") for name in found.replacements}
    return {key for key, view in model.roles.items() if names.intersection(view.names)}


def _replaced_tensor_text(key: str, a: Model, b: Model) -> str:
    """Return a sentence on a tensor that the adapter replaces, and that B does not have from it.

    It says what B has instead: nothing, the base's tensor, the base's token embedding, or another
    one.
    """
    base, theirs = a.find(key), b.find(key)
    if theirs is None:
        tied = ": its head is the embedding" if key == "output.weight" else ""
        return f"{key}: the adapter has its own, and B has none{tied}"
    table = "token_embd.weight"
    for held, whose in ((base, "the base's"), (a.find(table), f"the base's {table}")):
        if held is not None and held.shape == theirs.shape:
            near = np.linalg.norm((held.numpy() - theirs.numpy()).astype(np.float64))
            size = np.linalg.norm(held.numpy().astype(np.float64))
            if near <= (storage_noise(theirs.encoding) + storage_noise(held.encoding)) * size:
                return f"{key}: the adapter has its own, and B holds {whose}"
    return f"{key}: the adapter has its own, and B holds another"


def _unexplained_others(
    model: Model, b: Model, others: Sequence[str], changed: Set[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return (keys of `others` that differ without an explanation, sentences about `others`).

    `others` are the keys of tensors that the adapter does not change, and that differ between the
    merged `model` and B. Those that are A's, quantized and decoded, are explained: the base was
    trained on like that. A tensor that holds the change of another weight gets a sentence.
    `changed` are the stored names of the tensors that the merge changes.
    """
    from aprfmt.compare import diff_models

    if not others:
        return [], ()
    says = []
    rows = diff_models(model, b, tensors=tuple(others), only=("tensors",), explain=True).tensors
    known = {
        row.key: row.explanation
        for row in rows
        if row.key in others and row.explanation is not None
    }
    quantized = [key for key, one in known.items() if one.cause == "quantisation" and one.confirmed]
    if quantized:
        why = known[quantized[0]].evidence[0]
        says.append(f"{len(quantized)} tensors that it does not change are A's, quantized: {why}")
    left = [key for key in others if key not in quantized]
    for key in left:
        mine, theirs = model.find(key), b.find(key)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            continue
        plain, held = (one.numpy().astype(np.float64) for one in (mine, theirs))
        whose = find_added_change(plain, held, theirs.encoding, _other_changes(model, changed, key))
        if whose:
            says.append(f"{key} holds the change of {whose}")
    return left, tuple(says)


def _unread_items(opened: Model, found: Adapter, merged: Model) -> tuple[NotCompared, ...]:
    """Return the adapter's tensors, keys and neighbouring files that a merge does not use.

    They count as not compared ("unreadable"): they may change what the adapter does. `opened` is
    the adapter's file as a Model, `merged` the base with the adapter `found`.
    """
    parts = adapter_parts(opened)
    tied = bool(merged.hyper["tied_embeddings"])  # a head that equals the table is not in the base
    used = {
        view.names[0]
        for name, view in found.replacements.items()
        if name.replace(".base_layer.", ".") in merged or (tied and name.endswith(HEADS))
    }
    left = {*parts.replacements.values()} - used
    used.update(parts.copies)
    ledger = make_ledger(opened)
    items = (
        NotCompared(one.kind, one.name, "unreadable", one.of or _UNREAD, "the adapter")
        for one in ledger.items
        if one.name in left or (one.unread and one.name not in used)
    )
    return (*items, *(replace(one, side="the adapter") for one in ledger.unreadable))


def _try_other_layers(
    model: Model, b: Model, changed: Set[str], weights: "list[ChangedWeight]"
) -> "list[ChangedWeight]":
    """Return the weights, after trying whether one has the change of its role in another layer.

    Only weights that no answer fits are judged again; neighbouring layers were tried before.
    Distances in layers that were found for other weights come first. Once two weights have no such
    layer, the remaining ones are returned as they were. `model` is the merge, `changed` are the
    stored names of the tensors that it changes.
    """
    found = list(weights)
    failed = 0
    for at, one in enumerate(weights):
        mine, theirs = model.find(one.key), b.find(one.key)
        if one.found not in (OTHERWISE, MORE) or mine is None or theirs is None:
            continue
        if failed > 1:
            break
        known = {moved for each in found if (moved := _layers_moved(each))}
        judged = judge_misplaced(
            _merge_values(mine, theirs, False),
            Judged(one.found, one.times, one.rest, one.says, one.lost),
            _changes_of_layers(model, changed, one.key, known),
        )
        failed += judged.found != ANOTHER
        found[at] = _changed_weight(one.key, theirs, judged)
    return found


def _try_fused_orders(
    model: Model, b: Model, changed: Set[str], weights: "list[ChangedWeight]"
) -> "tuple[list[ChangedWeight], set[str]]":
    """Return (the weights, keys of other tensors) after joining what writers fuse.

    The changes of q, k and v, or of gate and up, may have been added to a fused tensor whose rows
    stand in another order. Only layers with a weight that no answer fits are tried; once two of a
    family have no such order, its other layers are left. The keys are of parts that the adapter
    does not change, and that hold rows of the other parts' changes. `model` is the merge, `changed`
    are the stored names of the tensors that it changes.
    """
    open_keys = {one.key for one in weights if one.found in (OTHERWISE, MORE)}
    if not open_keys:
        return weights, set()
    from aprfmt.causes.tensor.fused_rows import FAMILIES

    found: dict[str, str] = {}
    layers = sorted({layer for key in open_keys if (layer := split_key(key)[0]) is not None})
    for family in FAMILIES:
        failed = 0
        for layer in layers:
            named = {f"L{layer}.{part}": name for part, name in family.keys_with_suffix("weight")}
            if open_keys.isdisjoint(named) or failed > 1:
                continue
            says = _fused_order_words(model, b, changed, named, layer if family.heads else None)
            failed += not says
            found.update(dict.fromkeys(named, says) if says else {})
    judged = [
        replace(one, found=OTHER_ROWS, says=found[one.key], source="")
        if one.key in found and one.found not in (ONCE, EITHER, NOTHING)
        else one
        for one in weights
    ]
    return judged, set(found) - {one.key for one in weights}


def _fused_order_words(
    model: Model, b: Model, changed: Set[str], named: "dict[str, str]", grouped: int | None
) -> str:
    """Return in words how the changes of the parts of a fused weight were laid out; "" for none.

    `named` is {key: short name} of the parts, `grouped` the layer whose KV heads group them, None
    for parts without heads. "" too where a side lacks a part, or has another shape of it.
    """
    parts = []
    for key, name in named.items():
        mine, theirs = model.find(key), b.find(key)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return ""
        parts.append(FusedPart(name, _merge_values(mine, theirs, False)))
    kv_heads = model.hyper.get("n_kv_heads") if grouped is not None else 0
    if isinstance(kv_heads, tuple | list):
        kv_heads = kv_heads[grouped or 0] if (grouped or 0) < len(kv_heads) else 0
    return find_fused_order(parts, kv_heads if isinstance(kv_heads, int) else 0)


def _spread_rows_text(keys: Sequence[str]) -> tuple[str, ...]:
    """Return (sentence,) on parts that hold rows of other parts' changes; () for no `keys`."""
    if not keys:
        return ()
    said = first_and_more(keys, _SHOWN)
    return (f"{said}: the adapter does not change it, and its rows hold those of other changes",)


def _layers_moved(weight: ChangedWeight) -> int:
    """Return how many layers above its own a weight's change was added; negative for below.

    0 where no other weight's change was added, or that of another role.
    """
    (layer, role), (there, its) = split_key(weight.key), split_key(weight.source)
    return layer - there if role == its and layer is not None and there is not None else 0


def _changes_of_layers(
    model: Model, changed: Set[str], key: str, first: Set[int]
) -> Iterator[OtherChange]:
    """Yield the changes that the merge `model` makes to the same weight in other layers.

    `key` is the weight, `changed` are the stored names of the tensors that the merge changes.
    Layers whose distance below the weight's layer is in `first` come first, then the nearest.
    """
    layer, role = split_key(key)
    own = model.find(key)
    if layer is None or own is None:
        return
    layers = {split_key(other)[0]: other for other in model.roles if split_key(other)[1] == role}
    there = [one for one in layers if one not in (None, layer)]
    for one in sorted(there, key=lambda one: (layer - one not in first, abs(layer - one))):
        yield from _change_of(model, changed, layers[one], own.shape)


def _change_of(
    model: Model, changed: Set[str], key: str, shape: tuple[int, ...]
) -> Iterator[OtherChange]:
    """Yield the change that the merge makes to the weight `key`: values after it less those before.

    Nothing is yielded if none of its tensors is in `changed`, the stored names that the merge
    changes, or if the weight's shape is not `shape`.
    """
    view = model.roles[key]
    if view.shape == shape and not changed.isdisjoint(view.names):
        yield OtherChange(key, merged_values(view, 1) - merged_values(view, 0))


def _layer_offset_text(weights: Sequence[ChangedWeight], layers: int) -> tuple[str, ...]:
    """Return (sentence,) if all misplaced changes are equally many layers off, else ().

    `layers` is the number of layers: a change may have been moved past the last to the first. ()
    too for fewer than two misplaced changes.
    """
    moved = [one for one in weights if _layers_moved(one)]
    offsets = {_layers_moved(one) for one in moved}
    if len(moved) < 2 or len({one % layers for one in offsets}) != 1:
        return ()
    near = min(offsets, key=abs)
    rest = [one for one in offsets if one != near]
    way = "up" if near > 0 else "down"
    far = f"{abs(near)} layer{'s' * (abs(near) > 1)}"
    says = f"the pairs were merged {far} too far {way}: that of layer N into layer N{near:+d}"
    if rest:
        says += ", counted on from the other end where there is none"
    return (f"{says} ({len(moved)} of {len(weights)} weights)",)


def _try_rank_orders(
    a: Model, b: Model, adapter: Path, weights: "list[ChangedWeight]"
) -> "list[ChangedWeight]":
    """Return the weights, after trying other orders of the ranks in pairs for stacked experts.

    A weight that no answer fits gets an order as its answer if B is A with the adapter read in that
    order. The list `weights` itself is changed.
    """
    for order in OTHER_ORDERS:
        if all(one.found not in (OTHERWISE, MORE) for one in weights):
            break
        model, opened, _ = merge_adapter(a, adapter, again=True, order=order)
        with opened:
            for at, one in enumerate(weights):
                mine, theirs = model.find(one.key), b.find(one.key)
                if one.found not in (OTHERWISE, MORE) or mine is None or theirs is None:
                    continue
                again = judge_merge(_merge_values(mine, theirs, False))
                if again.found == ONCE:
                    weights[at] = _changed_weight(one.key, theirs, again._replace(found=order.says))
    return weights


def _changed_weight(key: str, b: View, judged: Judged) -> ChangedWeight:
    """Return the judgement of a weight as a row of the answer, with the file of B that holds it."""
    file = b.stored[0].path
    where = "" if file is None else file.name
    return ChangedWeight(
        key, where, judged.times, judged.rest, judged.found, judged.says, judged.lost,
        judged.source,
    )  # fmt: skip


def _merge_values(merged: View, b: View, close: bool) -> Merge:
    """Return one weight's values in the base, in the merge and in B, as a Merge.

    `merged` is the weight of A with the adapter, `b` that of B. `close` says that `diff` found the
    two equal up to rounding.
    """
    plain, full = (merged_values(merged, times) for times in (0, 1))
    kinds = {one.base_encoding for one in merged.stored if isinstance(one, MergedTensor)}
    kinds = kinds or {merged.encoding}  # of a weight that the adapter does not change
    base = kinds.pop() if len(kinds) == 1 else "+".join(sorted(kinds))
    noise = max(storage_noise(one) for one in (b.encoding, base))
    theirs = b.numpy().astype(np.float64)
    store_again = None
    if b.encoding not in FRACTIONS and not any(one.packed for one in b.stored):
        parts = any(one.parts for one in b.stored)
        dtype = _dtype_of_values(theirs) if parts else "F32"

        def store_again(values: "F64") -> "F64 | None":
            """Return a weight's values (float64) encoded in B's packed type and decoded again.

            None where that type cannot be encoded from the values alone.
            """
            return _encode_and_decode(b.encoding, values, dtype)

    change, steps = full - plain, _own_steps(b)
    return Merge(plain, change, theirs, b.encoding, base, close, noise, store_again, steps)


def _own_steps(b: View) -> "Steps | None":
    """Return step, lowest and highest value of each element of B's packed weight, in float64.

    None for types that are not packed, and for codes whose values are not evenly spaced.
    """
    packed = [one.packed for one in b.stored]
    if not packed or any(one is None for one in packed) or b.lattice is None:
        return None
    tables = [table for one in packed if one is not None and (table := one().codes()) is not None]
    if len(tables) < len(packed) or not all(_are_equally_apart(table.values) for table in tables):
        return None
    step, low, high = (np.asarray(part, np.float64) for part in b.lattice[:3])
    return Steps(step, low, high) if (step > 0).all() else None


def _are_equally_apart(values: "F64") -> bool:
    """Return whether the numbers of codes, once sorted, are all equally far apart."""
    return bool(np.ptp(np.diff(np.unique(np.asarray(values, np.float64)))) == 0)


def _dtype_of_values(values: "F64") -> str:
    """Return the coarsest float type that holds all values exactly: BF16, F16 or else F32.

    It is taken as the type to which a packed weight was decoded.
    """
    for name in ("BF16", "F16"):
        if np.array_equal(_rounded_to(values, name), values):
            return name
    return "F32"


def _rounded_to(values: "F64", dtype: str) -> "F64":
    """Return values rounded to the plain float type `dtype`, as float64."""
    held = np.ascontiguousarray(values, np.float32)
    return decode(dtype, encode(dtype, held), held.shape).astype(np.float64)


def _encode_and_decode(kind: str, values: "F64", dtype: str) -> "F64 | None":
    """Return values encoded in the packed type `kind` and decoded again, as float64.

    They are rounded to the float type `dtype` before and after, as the library's own weights are.
    None where the type cannot be encoded from values alone.
    """
    held = np.ascontiguousarray(_rounded_to(values, dtype), np.float32)
    try:
        return _rounded_to(decode(kind, encode(kind, held), held.shape), dtype)
    except AprfmtError:
        return None


def wrong_scale_factors(view: View, found: Adapter) -> tuple[Factor, ...]:
    """Return the multiples of a weight's change that usual mistakes with the adapter's scale give.

    () where the weight has no pair, or pairs of different scales. `view` is the merged weight.
    """
    pairs = [one.pair for one in view.stored if isinstance(one, MergedTensor)]
    if not pairs or any(one.scale != pairs[0].scale for one in pairs):
        return ()
    if found.spelling == "mlx":
        return mlx_scale_factors(pairs[0].scale, pairs[0].rank)
    config = found.config
    r = config.get("r", 0)
    stored = {
        float(one.parts["alpha"].numpy().reshape(-1)[0]) / one.rank
        for one in found.pairs.values()
        if "alpha" in one.parts and one.rank == pairs[0].rank and found.spelling == "peft"
    }
    return scale_factors(
        pairs[0].scale,
        pairs[0].rank,
        stored=tuple(stored),
        rank_stabilised=bool(config.get("use_rslora")),
        alpha=found.alpha,
        r=r if isinstance(r, int) and r > 0 else 0,
    )


def _other_changes(model: Model, changed: Set[str], key: str) -> Iterator[OtherChange]:
    """Yield the changes that the merge makes to other weights which may have been added to `key`.

    These are all weights of the same shape and layer, and the same weight of a neighbouring layer.
    `changed` are the stored names of the tensors that the merge changes.
    """
    layer, role = split_key(key)
    own = model.find(key)
    for other in model.roles:
        there, its = split_key(other)
        close = there == layer or (
            its == role and None not in (layer, there) and abs((layer or 0) - (there or 0)) == 1
        )
        if other != key and close and own is not None:
            yield from _change_of(model, changed, other, own.shape)


def _common_answer(weights: Sequence[ChangedWeight]) -> str:
    """Return the one answer found in all weights, or how often each was found and in which files.

    A weight that does not tell whether the change was added (B's type holds none of it, or the pair
    is zero) counts only where all weights are such.
    """
    decided = [each for each in weights if each.found not in (EITHER, NOTHING)]
    if weights and not decided:
        return EITHER if any(each.found == EITHER for each in weights) else NOTHING
    counts = Counter(each.found for each in decided)
    if len(counts) == 1:
        return next(iter(counts))
    if not counts:
        return "not at all"
    files = sorted({each.file for each in decided if each.found != ONCE})
    said = ", ".join(f"{word} in {count}" for word, count in counts.most_common())
    return f"in part: {said} of {len(decided)} weights; not once in {', '.join(files[:5])}"
