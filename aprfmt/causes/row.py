"""What a row of the table of causes says.

A *level* is one of the stages in which models are compared, from what identifies them to what a
training step did (`aprfmt.measure.verdicts.LEVELS`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aprfmt.measure.verdicts import Certainty, Level, Verdict

if TYPE_CHECKING:
    from aprfmt.measure.findings import Finding
    from aprfmt.model import Model

# What a cause says of B's weights where it decides how a command repairs them. "lost": only A has
# what stood there, so that where they are is enough to write B again from A. "mislabelled": their
# encoding is not the one that their bytes are in, so no copy is written in it. "exchanged": they
# stand under each other's names, which renames may put right. "trained": they are B's own, though
# made from A's, so A's do not replace them. "rank": one side has the share or the copies of ranks
# of a parallel run, so that tensors of other shapes make no other model.
Weights = Literal["", "lost", "mislabelled", "exchanged", "trained", "rank"]

EXCHANGED = (
    "Replacing this part of B's tokenizer by A's makes every probe equal: ids, chats and ends."
)
LAST = 1_000_000  # the rank of a hypothesis that states none: after all of ours


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause: at which level it is first seen, what it means, and how it is recognised.

    `verdict` is that on two models or runs that differ by this cause alone. `signature` is what
    makes it likely, `confirms` the transformation that makes the difference vanish; a cause that
    was only seen and not confirmed is reported as unconfirmed. `keys` are the hyperparameters whose
    difference means this cause. `next` names the next step (`diagnosis/next_commands.py`) where it
    is not the usual one of the level. `most` is how sure it can be: `located` where what happened
    is measured and never made again. `told_by` is what tells a training step's mistake from others
    that give the same weights: what to add to the command.

    `by_place`: its values differ from place to place, so that several places are one finding all
    the same. `shown_by_pass`: a pass with A's tensor in B's place shows it, where any other cause
    of a tensor is only located so. `explains` are hyperparameters that differ with it and mean
    nothing else.

    The rest decides how a command repairs B (`causes/remedies.py`). `weights` is what is known of
    B's weights; where a finding's values decide whether they are "lost", `is_lost(values)` returns
    it. `own_key` is the hyperparameter that mends this cause where B's own tensors show its value.
    `is_trained(a, b)` returns whether B's part was trained, so that A's does not replace it.
    `trained_command(b, finding, pair)` returns the next command where B was trained further than A
    and may have changed this on purpose, "" where the usual one applies; `pair` are A and B as
    quoted arguments.
    """

    name: str
    level: Level
    verdict: Verdict
    means: str
    signature: str
    confirms: str = EXCHANGED
    keys: tuple[str, ...] = ()
    next: str = ""
    most: Certainty = "confirmed"
    told_by: str = ""
    by_place: bool = False
    shown_by_pass: bool = False
    explains: tuple[str, ...] = ()
    weights: Weights = ""
    is_lost: Callable[[Mapping[str, Any]], bool] | None = None
    own_key: str = ""
    is_trained: "Callable[[Model, Model], bool] | None" = None
    trained_command: "Callable[[Model, Finding, str], str] | None" = None
