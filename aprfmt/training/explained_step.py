"""One training step while it is explained: its files, what is found, and what is left open.

A *group* is a parameter group of the optimizer: parameters with common settings. The *state* is
what the optimizer saved: moments, groups, step count.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from aprfmt.causes.training.clipped_parts import part_norms
from aprfmt.causes.training.clipping import OtherNorm
from aprfmt.causes.training.optimizers import Recipe
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared
from aprfmt.tensors.view import is_zero
from aprfmt.training import ComputedGradients
from aprfmt.training.differences import DifferenceChecker
from aprfmt.training.judgement import Judgement
from aprfmt.training.parameters import Parameter
from aprfmt.training.reference_gradients import BatchNumbers
from aprfmt.training.report import ArrayFacts
from aprfmt.training.saved_arrays import OptimizerState, SavedArrays, plain_name


@dataclass(frozen=True)
class ComparedGradient:
    """How a given gradient compares with a computed one; `why` says why it was not compared."""

    facts: ArrayFacts | None = None  # of the computed one
    distance: float | None = None
    found: Judgement | None = None
    why: str = ""


@dataclass
class ExplainedStep:
    """One training step that is explained: its files, what is found, and what is left open."""

    model: Model
    parameters: Sequence[Parameter]
    given: SavedArrays | None
    state: OptimizerState | None
    optimizer: str | None
    progress: Callable[[int, int], None] | None
    computed: ComputedGradients | None
    facts: BatchNumbers
    trained_in: str | None
    checker: DifferenceChecker | None = None
    base: Model | None = None  # below an adapter
    # What is found, and what is left open.
    notes: list[str] = field(default_factory=list)
    left: list[NotCompared] = field(default_factory=list)
    gradients: dict[str, ArrayFacts] = field(default_factory=dict)
    compared: dict[str, ComparedGradient] = field(default_factory=dict)
    # Keys whose update is what the rule makes of the given gradient, be that right or wrong.
    ruled: set[str] = field(default_factory=set)
    # The sums of the sizes of all elements of given gradients, by key.
    sums: dict[str, float] = field(default_factory=dict)
    # Keys whose gradient made the step, or was compared with the moments of after it.
    used: set[str] = field(default_factory=set)
    # What the rates that groups began with are multiplied by; None: the state's are taken.
    schedule: float | None = None
    unclipped: bool = False  # whether no clipping but the stated one was made
    clipped_before: bool = False  # whether the given gradients were clipped before the step
    doubted: str = ""  # a cause that what was given does not tell from a right step
    pairs: dict[str, Parameter] = field(default_factory=dict)  # of LoRA: {key: other factor}
    recipe: Recipe | None = None  # the optimizer and its settings, None if nothing gives them

    @property
    def right_parameters(self) -> bool:
        """Whether gradients of parameters were given, and all that were compared agree."""
        found = [one.found for one in self.compared.values() if one.found is not None]
        return bool(found) and all(one.verdict == "agrees" for one in found)

    def has_wrong_gradient(self, key: str) -> bool:
        """Return whether a parameter's given gradient is not the one computed of the batch."""
        one = self.compared.get(key)
        return one is not None and one.found is not None and one.found.verdict == "differs"

    def follows_wrong_gradient(self, key: str) -> bool:
        """Return whether a parameter's gradient is wrong, and its update the rule's for it.

        Then the optimizer is right, and what made the gradient is not.
        """
        return key in self.ruled and self.has_wrong_gradient(key)

    def loss(self) -> tuple[float | None, str | None]:
        """Return (mean loss of the batch, device and arithmetic by which it was computed).

        (None, None) without a batch.
        """
        if self.computed is not None:
            return self.computed.loss, self.computed.how
        if self.checker is not None:
            return self.checker.loss, self.checker.how
        return None, None

    def group_of(self, name: str) -> Mapping[str, Any]:
        """Return the settings of the optimizer's group that has the parameter; {} without one."""
        return {} if self.state is None else self.state.group_of(name)

    def has_rates(self, stated: float) -> bool:
        """Return whether the state's groups have several learning rates, one of them `stated`."""
        assert self.state is not None
        rates = {group.get("lr") for group in self.state.groups}
        return len(rates) > 1 and stated in rates

    @cached_property
    def other_norms(self) -> dict[OtherNorm, float]:
        """The largest element and the sum of absolute values of all given gradients, by OtherNorm.

        Trainers may clip by these instead of the norm. {} without given gradients.
        """
        if not self.sums:
            return {}
        largest = max(each.largest for each in self.gradients.values())
        return {"largest": largest, "sum": sum(self.sums.values())}

    @cached_property
    def part_norms(self) -> dict[str, float]:
        """{words: L2 norm} of some of the gradients together, such as those of an optimizer group.

        The gradients are the given ones, or those computed of the batch if none were given.
        """
        given = {key: one.norm for key, one in self.gradients.items()}
        return part_norms(given or self.computed_norms, self.optimizer_groups)

    @cached_property
    def computed_norms(self) -> dict[str, float]:
        """{key: norm of the gradient that was computed of the batch}."""
        facts = {key: one.facts for key, one in self.compared.items()}
        return {key: one.norm for key, one in facts.items() if one is not None}

    @cached_property
    def optimizer_groups(self) -> list[list[str]]:
        """The parameter keys of each group in the optimizer's state; all empty for one group."""
        groups = () if self.state is None else self.state.groups
        keys: list[list[str]] = [[] for _ in groups]
        for row in self.parameters if len(keys) > 1 else ():
            own = self.group_of(row.names[0])
            for number, group in enumerate(groups):
                if own is group:
                    keys[number].append(row.key)
        return keys

    @cached_property
    def kind_norms(self) -> dict[bool, float]:
        """{False: norm of the given gradients of all matrices, True: that of all vectors}.

        These are the two groups that trainers make; {} where all are of one kind.
        """
        squares: dict[bool, float] = {}
        for row in self.parameters:
            if row.key in self.gradients:
                own = self.gradients[row.key].norm
                squares[row.vector] = squares.get(row.vector, 0.0) + own**2
        return {kind: each**0.5 for kind, each in squares.items()} if len(squares) == 2 else {}

    def names_in_8_bits(self) -> Collection[str]:
        """Return the stored names of parameters whose moments are kept in 8 bits."""
        assert self.state is not None
        return {self.state.names.get(owner, plain_name(owner)) for owner in self.state.coded}

    def has_codes(self, parameter: Parameter) -> bool:
        """Return whether the optimizer's state stores a parameter's moments in 8 bits."""
        return parameter.names[0] in self.names_in_8_bits()

    def is_idle(self, key: str) -> bool:
        """Return whether a parameter is A of a LoRA pair whose B is zero before the step.

        Its gradient is then zero: that of A is B times something, that of B is A times something.
        """
        other = self.pairs.get(key)
        return key.endswith(".lora_a") and other is not None and is_zero(other.before)

    @cached_property
    def largest_norm(self) -> float:
        """The norm of the largest computed gradient, 0.0 without any."""
        assert self.computed is not None
        each = (self.computed.gradient(key) for key in self.computed.keys)
        return max((float(np.linalg.norm(values)) for values in each), default=0.0)

    def computed_norm(self) -> float | None:
        """Return the L2 norm over all gradients computed of the batch, None without any."""
        known = [one.facts.norm for one in self.compared.values() if one.facts is not None]
        return float(np.sqrt(sum(each**2 for each in known))) if known else None

    def given_options(self) -> frozenset[str]:
        """Return which of the options --grads and --optimizer-state were given."""
        held = {"--grads": self.given, "--optimizer-state": self.state}
        return frozenset(name for name, arrays in held.items() if arrays is not None)

    def has_state_after(self) -> bool:
        """Return whether the given state is the one after the step; True if it does not tell."""
        if self.state is None or self.recipe is None:
            return False
        return self.state.steps is None or self.state.steps == self.recipe.step
