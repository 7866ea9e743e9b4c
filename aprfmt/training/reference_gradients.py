"""The gradients of a step's batch, computed here to compare a trainer's gradients with."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.installation import install_command
from aprfmt.causes.contradicted_flags import HEAD, TABLE
from aprfmt.errors import BackendUnavailableError, UsageError
from aprfmt.inference.batch import Batch
from aprfmt.inference.capture import point_instances
from aprfmt.inference.gradients.changes import NO_ROUTER_LOSS, BackwardChange, RouterFactors
from aprfmt.inference.gradients.documents import routers, unlabelled
from aprfmt.inference.loss import BITS, IMPLAUSIBLY_GOOD, RANDOM_BOUNDS
from aprfmt.inference.weights import free_memory
from aprfmt.model import Model
from aprfmt.training import ComputedGradients
from aprfmt.training.step_batch import has_routers, read_step_batch, router_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.inference.gradients.batch_gradients import BatchGradients
    from aprfmt.inference.gradients.label_gradients import LabelGradients

GIB = 1 << 30
FAR = 64.0  # times what one pass shows: no rounding leaves a gradient that is further off
FREE_SHARE = 0.9  # of the free memory that a backward may take


# Of quantized weights a trainer computes in bfloat16.
ARITHMETIC = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Recompute(Protocol):
    """Computes a batch's gradients again with one mistake in the backward."""

    def __call__(
        self, change: BackwardChange, trained: Collection[str] | None = None
    ) -> ComputedGradients:
        """Return the gradients with the mistake `change`.

        `trained` are the stored names of the parameters whose gradients are wanted, None for all.
        """
        ...


@dataclass(frozen=True)
class Computed:
    """A batch's gradients, exact and in the trainer's arithmetic (None if that is no other).

    It has the methods of `ComputedGradients`. `recompute` computes the exact ones again with a
    mistake, and `by_label` what each label adds to the last norm's; both need the model to be open.
    `flips` are the routers that chose other experts in the trainer's arithmetic. `noisy` are passes
    in it that round at random.
    """

    exact: "BatchGradients"
    rounded: "BatchGradients | None"
    recompute: Recompute
    by_label: "Callable[[], LabelGradients | None]" = lambda: None
    flips: tuple[str, ...] = ()
    noisy: "Iterable[BatchGradients]" = ()

    @property
    def loss(self) -> float:
        """The mean loss of the batch from the exact pass, in nats per label."""
        return self.exact.loss

    @property
    def scored(self) -> int:
        """The number of labels whose losses the loss is the mean of."""
        return self.exact.scored

    @property
    def how(self) -> str:
        """Where and in which arithmetic the gradients were computed: `torch:cpu:float64`."""
        return self.exact.how

    @property
    def keys(self) -> Collection[str]:
        """The role keys of all parameters that have a gradient."""
        return self.exact.keys

    def gradient(self, key: str) -> "NDArray[Any]":
        """Return dL/dW of a parameter from the exact pass, float64 in the role's shape.

        Raises KeyError for a parameter without a gradient.
        """
        return self.exact.gradient(key)

    def gradient_near(self, key: str, given: "NDArray[Any]") -> "NDArray[Any]":
        """Return the gradient of a parameter, a token table's padding row as the trainer has it.

        Trainers differ in whether that row gets a gradient; `given` is the trainer's gradient.
        """
        return self.exact.gradient_near(key, given)

    def rounding(self, key: str) -> float | None:
        """Return the L2 distance that the trainer's arithmetic alone makes of a gradient.

        None where no second pass was run in it, or where that has no gradient of the parameter.
        """
        if self.rounded is None or key not in self.rounded.keys:
            return None
        return float(np.linalg.norm(self.rounded.gradient(key) - self.exact.gradient(key)))

    def measured_rounding(self, key: str, apart: float) -> float | None:
        """Return how far (L2) rounding may move a right gradient at most, as measured; else None.

        It follows from the distances of passes that round at random from the plain one. No further
        pass runs once it covers `apart`, the distance to explain. None without such passes, or
        if `apart` is beyond FAR times the usual rounding.
        """
        from aprfmt.inference.gradients.rounding_noise import largest_distance

        usual = self.rounding(key)
        if usual is None or self.rounded is None or apart > FAR * usual:
            return None
        most, right = usual, self.rounded.gradient(key)
        for other in self.noisy:
            made = other.gradient(key) if key in other.keys else None
            most = max(most, largest_distance(right, made, self.rounded.dtype))
            if apart <= most:
                break
        return most


@dataclass(frozen=True)
class BatchNumbers:
    """Numbers of a batch that a wrong factor may equal, and how the batch is laid out.

    `labels` are the counts of scored labels of each row, `row_length` the columns, padding among
    them. `packed` says that a row holds several documents. `routers` are the factors of routers'
    auxiliary losses in the batch's gradients. `notes` say who states them, and which labels are
    left out. `repeated` are the tokens that occur more than once. `experts`: the model, or the
    base, has experts. `unread` are arrays of the file that nothing reads. `padded_first`: a row
    begins with padding, `padded_last`: one ends with it. `adapter` is (scale, rank) of an adapter
    whose pairs all have these, else None. `partly_labelled`: some tokens of the text are no labels.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    tokens: frozenset[int] = frozenset()
    labels: tuple[int, ...] = ()
    row_length: int = 0
    packed: bool = False
    routers: RouterFactors = NO_ROUTER_LOSS
    notes: tuple[str, ...] = ()
    repeated: frozenset[int] = frozenset()
    experts: bool = False
    unread: tuple[str, ...] = ()
    padded_first: bool = False
    adapter: tuple[float, int] | None = None
    padded_last: bool = False
    partly_labelled: bool = False


def batch_numbers(batch: Batch, scale: float | None = None) -> BatchNumbers:
    """Return the numbers of a batch that a wrong factor may equal, and its token ids.

    Among them are the counts of labels, samples and tokens, and ratios of them. `scale` is an
    adapter's alpha / r, None without one.
    """
    labels, samples = batch.label_count, len(batch.mask)
    tokens = int(batch.mask.sum())
    counts = {
        "labels": labels,
        "samples": samples,
        "labels / samples": labels / max(1, samples),
        "tokens / labels, padding left out": tokens / max(1, labels),
        "tokens / labels, padding counted": batch.mask.size / max(1, labels),
        "row length": batch.row_length,
        **_label_shares(labels, tokens, batch.mask.shape),
        "1 / ln 2, a loss in bits": BITS,
    }
    if scale is not None:
        counts["alpha / r"] = scale
    ids = batch.ids[:, : batch.row_length][batch.mask]
    known, often = np.unique(ids, return_counts=True)
    return BatchNumbers(
        counts,
        frozenset(int(i) for i in known),
        tuple(int(count) for count in batch.predicted.sum(1)),
        batch.row_length,
        bool(batch.document_starts.any()),
        routers(batch),
        (*filter(None, (router_text(batch), _after_padding_text(batch))),),
        frozenset(int(i) for i in known[often > 1]),
        unread=batch.unread,
        padded_first=bool((~batch.mask[:, 0]).any()),
        padded_last=bool((~batch.mask[:, -1]).any()),
        partly_labelled=bool(unlabelled(batch)[:, 1:].any()),
    )


def _label_shares(labels: int, tokens: int, shape: tuple[int, ...]) -> dict[str, float]:
    """Return {words: share} of the positions that are labels, as a mean over more of them divides.

    The words say the two counts. `tokens` are those of the batch without padding, `shape` is its
    samples and columns. Nothing where all positions are labels.
    """
    positions = shape[0] * (shape[1] - 1)
    whole = "labels over all positions but each sample's first"
    every = {
        f"{labels} / {positions}, {whole}": positions,
        f"{labels} / {tokens - shape[0]}, {whole}, padding left out": tokens - shape[0],
    }
    return {words: labels / count for words, count in every.items() if count > labels}


def _after_padding_text(batch: Batch) -> str:
    """Return a sentence on labels that are the first token after padding; "" if there are none."""
    count = batch.unpredicted_labels
    if not count:
        return ""
    return (
        f"labels left out: {count}, each the first token of a text after padding, which no token "
        "predicts; a trainer that scores it by the padding adds noise (label it -100)"
    )


def doubtful_loss(loss: float, vocabulary: int) -> str:
    """Return why a loss in nats is hardly that of a trained model, as a sentence; "" if it may be.

    A loss above ln(vocabulary) is worse than guessing, as of random weights; one above their bound
    too is another fault. Near zero there is nothing left to learn, and gradients show nothing.
    """
    uniform = math.log(max(2, vocabulary))
    text = f"the batch's loss is {loss:.4g} nats"
    if loss < IMPLAUSIBLY_GOOD:
        return f"{text}: too good to be true of text, and its gradients say little"
    if loss <= uniform:
        return ""
    above = f"{text}, above ln({vocabulary}) = {uniform:.4g} of guessing"
    if loss <= RANDOM_BOUNDS[1] * uniform:
        return f"{above}: right of random weights, of trained ones not"
    return f"{above}, and above what random weights give: other tokens, or another checkpoint"


@contextmanager
def explaining_missing_torch() -> Iterator[None]:
    """Turn an ImportError in this context into BackendUnavailableError: install torch."""
    try:
        yield
    except ImportError as error:
        raise BackendUnavailableError(
            f"gradients of a batch need torch ({error}); run {install_command('torch')}"
        ) from error


def compute_gradients(
    base: Model,
    batch: Path,
    *,
    adapter: Path | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    trained_in: str | None = None,
    points: Collection[str] = (),
    head_twice: bool = False,
) -> tuple["Computed", BatchNumbers]:
    """Return (the gradients of a batch's mean loss over its labels, the batch's numbers).

    `points` are the keys of the capture points whose gradients are wanted too. `head_twice` says
    that the model's file has a tied head next to the embedding: both are one parameter, whose key
    is the embedding's. Raises UsageError where the memory of the device does not suffice, and for
    weights that make the loss or a gradient NaN or infinite.
    """
    with explaining_missing_torch():
        from aprfmt.inference.gradients.batch_gradients import Activations, batch_gradients
        from aprfmt.inference.gradients.device_gradients import flipped_routers
        from aprfmt.inference.gradients.memory import gradient_memory
        from aprfmt.inference.gradients.rounding_noise import NoisyPasses
    from aprfmt.adapters.trained_pairs import open_trained_pairs

    loaded = read_step_batch(batch, base)
    with ExitStack() as stack:
        pairs = open_trained_pairs(adapter, base, stack)
        free = _free_device_memory(device)
        held: Activations = "all"
        if free is not None:
            for held in ("all", "layer"):
                memory = gradient_memory(
                    base,
                    loaded,
                    dtype=dtype,
                    pairs=pairs,
                    activations=held,
                    points=points,
                    device=device,
                )
                if memory.peak <= FREE_SHARE * free:
                    break
            else:
                raise UsageError(
                    f"{base.path}: a backward in {dtype} takes {memory.peak / GIB:.1f} GiB on "
                    f"{device}, {free / GIB:.1f} GiB are free; give shorter rows, or --dtype "
                    "float32"
                )
        lower = trained_in or dtype_of(base)
        if lower != dtype:
            points = (*points, *_router_points(base))
        pass_in = partial(
            batch_gradients,
            base,
            loaded,
            device=device,
            pairs=pairs,
            activations=held,
            points=points,
        )
        result = _with_one_table(pass_in(dtype=dtype), head_twice)
        rounded = None
        noisy: Iterable[BatchGradients] = ()
        if lower != dtype:
            rounded = _with_one_table(pass_in(dtype=lower), head_twice)
            noisy = NoisyPasses(
                lambda: _with_one_table(pass_in(dtype=lower, points=()), head_twice)
            )
        scales = {pair.scale for pair in pairs}
        kinds = {(pair.scale, len(pair.a)) for pair in pairs}

    def recompute(
        change: BackwardChange, trained: Collection[str] | None = None
    ) -> ComputedGradients:
        """Return the batch's gradients computed with a mistake, `change`, in the backward pass.

        `trained` are the parameters that get a gradient, None for all.
        """
        with ExitStack() as again:
            found = batch_gradients(
                base,
                loaded,
                device=device,
                dtype=dtype,
                trained=None if adapter is not None else trained,
                pairs=[
                    replace(pair, scale=pair.scale * change.adapter_scale)
                    for pair in open_trained_pairs(adapter, base, again)
                ],
                activations=held,
                change=change,
            )
            return Computed(_with_one_table(found, head_twice), None, recompute)

    def by_label() -> "LabelGradients | None":
        """Return what each label of the batch adds to the gradient at the last norm.

        None for an adapter, and where an output head is stored next to a tied embedding.
        """
        if adapter is not None or head_twice:
            return None
        from aprfmt.inference.gradients.label_gradients import label_gradients

        return label_gradients(base, loaded, device=device, dtype=dtype, activations=held)

    numbers = batch_numbers(loaded, scales.pop() if len(scales) == 1 else None)
    experts = has_routers(base)
    one = kinds.pop() if len(kinds) == 1 else None
    return (
        Computed(
            result,
            rounded,
            recompute,
            by_label,
            () if rounded is None else flipped_routers(rounded.values, result.values),
            noisy,
        ),
        replace(numbers, experts=experts, adapter=one),
    )


def _with_one_table(found: "BatchGradients", head_twice: bool) -> "BatchGradients":
    """Return gradients in which the output head's is added to the tied embedding's.

    The head then has none. Without `head_twice` they are returned as they are.
    """
    if not head_twice:
        return found
    values = dict(found.by_role)
    head = values.pop(HEAD, None)
    if head is not None:
        values[TABLE] = values[TABLE] + head if TABLE in values else head
    return replace(found, by_role=values)


def _router_points(base: Model) -> list[str]:
    """Return the keys of the capture points that hold the experts which routers chose."""
    every = point_instances(base.spec.block, base.hyper, base.roles)
    return [key for key in every if split_key(key)[1] == "experts"]


def dtype_of(base: Model) -> str:
    """Return the dtype in which a trainer computes most of a model's weights, such as `bfloat16`.

    Quantized weights count as bfloat16.
    """
    elements: Counter[str] = Counter()
    for view in base.roles.values():
        elements[ARITHMETIC.get(view.encoding, "bfloat16")] += math.prod(view.shape)
    return elements.most_common(1)[0][0]


def _free_device_memory(device: str) -> int | None:
    """Return the free memory of a device in bytes; None where it is not known."""
    if device == "cpu":
        return free_memory()
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else None
