"""Explains one training step: what it did to the weights, and whether its gradients are right.

`explain_step` pairs the parameters of a checkpoint before a step with those after it, reads the
gradients and the optimizer's state that a trainer saved, and says of each parameter whether the
update is what the optimizer makes of them. What a mistake looks like stands in `causes.training`.

Where gradients are computed: this package computes none. It takes an object with the methods of
`ComputedGradients`, which `aprfmt.inference` makes of a model and a batch, and holds the trainer's
gradients against it. Both are looked up by the same key: the role of a weight (`L3.attn_q.weight`),
and for the factors of an adapter the role with `.lora_a` or `.lora_b` after it. Values are
float64, laid out as the role is: [out, in], joined projections apart, nothing transposed.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ComputedGradients"]


class ComputedGradients(Protocol):
    """The loss of a batch and its gradients by parameter, computed here."""

    @property
    def loss(self) -> float:
        """The mean loss of the batch, in nats per label."""
        ...

    @property
    def scored(self) -> int:
        """The number of labels whose losses the loss is the mean of."""
        ...

    @property
    def how(self) -> str:
        """Where and in which arithmetic the gradients were computed: `torch:cpu:float64`."""
        ...

    @property
    def keys(self) -> Collection[str]:
        """The role keys of all parameters that have a gradient."""
        ...

    def gradient(self, key: str) -> "NDArray[Any]":
        """Return dL/dW of a parameter, float64 in the role's shape; KeyError for none."""
        ...

    def gradient_near(self, key: str, given: "NDArray[Any]") -> "NDArray[Any]":
        """Return the gradient of a parameter, a token table's padding row as the trainer has it.

        Trainers differ in whether that row gets a gradient; `given` is the trainer's gradient.
        """
        ...

    def rounding(self, key: str) -> float | None:
        """Return the L2 distance that the trainer's arithmetic alone makes of a gradient.

        None where that was not measured.
        """
        ...
