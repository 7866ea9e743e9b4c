"""What a row of the table of causes says.

A *level* is one of the stages in which models are compared, from what identifies them to what a
training step did (`aprfmt.measure.verdicts.LEVELS`).
"""

from dataclasses import dataclass

from aprfmt.measure.verdicts import Certainty, Level, Verdict

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
