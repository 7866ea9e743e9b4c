"""The one table of gates: name, requirements, what it proves, the function, what it stands on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.base.registry import load
from aprfmt.qa.baseline import GATE as BASELINE
from aprfmt.qa.records import Findings

if TYPE_CHECKING:
    from aprfmt.qa.subject import Subject


@dataclass(frozen=True)
class GateSpec:
    """One gate.

    `function` is `module:name` under aprfmt.qa, taking a Subject and returning Findings; it may
    raise NotRunError. `requirements` are ids of docs/requirements.md. A gate that fails leaves
    those that `need` it without an answer: they would fail for its reason.
    """

    name: str
    requirements: tuple[str, ...]
    proves: str
    function: str
    needs: tuple[str, ...] = ()

    def load(self) -> "Callable[[Subject], Findings]":
        """Import and return the function."""
        found: Callable[[Subject], Findings] = load(f"aprfmt.qa.{self.function}")
        return found


_RUNS = ("tensor-contract",)
GATES: tuple[GateSpec, ...] = (
    GateSpec(
        "tensor-contract", ("R11", "R12", "R13", "R14"),
        "every tensor the configuration demands is there, fits and can be decoded; none is unknown",
        "structure:tensor_contract",
    ),
    GateSpec(
        "metadata", ("R14", "R24", "R73"),
        "hyperparameters, special ids and template can be a working model's and agree",
        "structure:metadata",
    ),
    GateSpec(
        "init-statistics", ("R05", "R08", "R09", "R10"),
        "weights are filled and of the size their part has in working models",
        "weights:init_statistics",
    ),
    GateSpec(
        "logits", ("R15", "R16", "R17", "R18", "R19"),
        "the forward pass gives finite, spread and peaked logits",
        "forward:logits", _RUNS,
    ),
    GateSpec(
        "loss", ("R39", "R40", "R41", "R42", "R43", "R47"),
        "the loss in nats is neither worse than guessing nor too good, and is of the next token",
        "forward:loss", _RUNS,
    ),
    GateSpec(
        "state-isolation", ("R45", "R46"),
        "no call leaves anything behind: the same question has the same bits as answer",
        "forward:state", _RUNS,
    ),
    GateSpec(
        "format-parity", ("R57", "R60", "R61", "R71"),
        "the same weights give equal bytes, capture points and logits in every format",
        "copies:format_parity", _RUNS,
    ),
    GateSpec(
        "device-parity", ("R20", "R28", "R32", "R52", "R53"),
        "every device asked for computes the same",
        "copies:device_parity", _RUNS,
    ),
    GateSpec(
        "golden-output", ("R71", "R72", "R73", "R74", "R75"),
        "prompts get the answers they should, no gibberish, and an end",
        "generation:golden_output", _RUNS,
    ),
    GateSpec(
        BASELINE, ("R69",),
        "no gate and no number got worse than in a baseline file",
        "baseline:baseline",
    ),
)  # fmt: skip
NAMES: tuple[str, ...] = tuple(gate.name for gate in GATES)
