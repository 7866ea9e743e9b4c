"""The loss of a batch as a function of one factor of an adapter, for gradients by differences."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.inference.batch import Batch
from aprfmt.inference.gradients.adapter_pairs import AdapterPair, Array
from aprfmt.inference.gradients.differences import BatchLoss
from aprfmt.inference.gradients.documents import Reduction
from aprfmt.inference.weights import Weights, model_weights
from aprfmt.model import Model

# Fields of AdapterPair by the end of a factor's key.
FIELDS = {"lora_a": "a", "lora_b": "b", "lora_magnitude": "lengths"}


class AdapterLoss(BatchLoss):
    """The loss of a batch as a function of one factor of an adapter on its frozen base.

    The passes run with the merged weights, float64. What DoRA divides by is the length of each
    row of weight and product before any change, as it is a constant in its backward. `first` has
    the stages of the factors' keys, too.
    """

    def __init__(
        self,
        model: Model,
        batch: Batch,
        pairs: Sequence[AdapterPair],
        reduction: Reduction = "tokens",
    ) -> None:
        """Run the batch once with the pairs merged; see BatchLoss for what is raised."""
        self._base = model_weights(model)
        self._pairs = {key: pair for pair in pairs for key in pair.names}
        self._divisors = {
            role: np.linalg.norm(self._product(role, pair), axis=1)
            for pair in pairs
            if pair.lengths is not None
            for role in pair.rows
        }
        super().__init__(model, batch, reduction)
        for key, pair in self._pairs.items():
            stages = [self.first[role] for role in pair.rows if role in self.first]
            if stages:
                self.first[key] = min(stages)

    def _open_weights(self, model: Model) -> Weights:
        """Return the base's weights with all pairs merged."""
        by_role = {role: pair for pair in self._pairs.values() for role in pair.rows}
        return self._base.with_arrays(
            {role: self._merge_pair(role, by_role[role]) for role in by_role}
        )

    def _product(self, role: str, pair: AdapterPair) -> Array:
        """Return a role's frozen weight plus its part of the pair's product, float64 [out, in]."""
        weight = np.asarray(self._base[role].numpy(), np.float64)
        b = np.asarray(pair.b, np.float64)[pair.rows[role]]
        found: Array = weight + pair.scale * (b @ np.asarray(pair.a, np.float64))
        return found

    def _merge_pair(self, role: str, pair: AdapterPair) -> Array:
        """Return what a role's product is made with: weight and pair, with DoRA's lengths."""
        found = self._product(role, pair)
        if pair.lengths is None:
            return found
        lengths = np.asarray(pair.lengths, np.float64)[pair.rows[role]]
        scaled: Array = found * (lengths / self._divisors[role])[:, None]
        return scaled

    def values(self, role: str) -> Array:
        """Return a factor's numbers, or those of a weight of the base, as float64."""
        pair = self._pairs.get(role)
        if pair is None:
            return super().values(role)
        return np.asarray(getattr(pair, _factor_field(role)), np.float64)

    def _changed_weights(self, role: str, values: Array) -> Mapping[str, Array]:
        """Return the merged weights by role key with `values` in place of one factor."""
        pair = self._pairs.get(role)
        if pair is None:
            return super()._changed_weights(role, values)
        changed: dict[str, Any] = {_factor_field(role): values}
        other = replace(pair, **changed)
        return {key: self._merge_pair(key, other) for key in pair.rows}

    def close(self) -> None:
        """Release the weights, and those of the base."""
        super().close()
        self._base.close()


def _factor_field(key: str) -> str:
    """Return the field of AdapterPair that holds the factor of a key."""
    return FIELDS[key.rpartition(".")[2]]
