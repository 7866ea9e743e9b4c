"""Steps that a trainer's own code got wrong or right: what is said of each is what is right.

Seen red, each alone: gradients computed without the mistake; the first mistake that is tried taken
without a look at its gradients; a parameter without a gradient left out of the comparison; a factor
of differences that no other direction confirms; three directions for bfloat16; labels left out
of the pass that are not left out of their number; a rate of zero left out of a state's settings;
a router's loss of the batch for that of the trainer; a gradient that is lacking not taken for zero;
SparseAdam's epsilon as Adam's, and rows of padding taken for rows that were not read; a mistake of
biases alone held to all gradients; saved moments taken where they were lost; blocks in any order.
"""

from pathlib import Path

import pytest
import torch

from aprfmt.training.step import explain_step
from tests import approved
from tests.models import tiny
from tests.training.adapter_steps import ADAPTER_FAULTS, ADAPTER_INNOCENTS
from tests.training.framework_steps import (
    FRAMEWORK_FAULTS,
    FRAMEWORK_INNOCENTS,
    FRAMEWORK_RELATIVES,
)
from tests.training.judged_steps import (
    FAULTS,
    INNOCENTS,
    RELATIVES,
    RULE,
    Grads,
    JudgedStep,
    adamw,
    backward,
    batch_of,
    detached_step,
    gradient_step,
    judged,
    with_gradients,
    written,
)
from tests.training.loop_steps import LOOP_FAULTS, LOOP_INNOCENTS, LOOP_RELATIVES
from tests.training.mixer_steps import MIXER_FAULTS, MIXER_INNOCENTS
from tests.training.part_steps import PART_FAULTS, PART_INNOCENTS
from tests.training.thread_steps import THREAD_FAULTS, THREAD_INNOCENTS
from tests.training.trainer_steps import TRAINER_FAULTS, TRAINER_INNOCENTS, TRAINER_RELATIVES

ANSWERS = Path(__file__).parent / "answers"
EVERY = (
    *FAULTS,
    *RELATIVES,
    *INNOCENTS,
    *THREAD_FAULTS,
    *THREAD_INNOCENTS,
    *LOOP_FAULTS,
    *LOOP_RELATIVES,
    *LOOP_INNOCENTS,
    *TRAINER_FAULTS,
    *TRAINER_RELATIVES,
    *TRAINER_INNOCENTS,
    *ADAPTER_FAULTS,
    *ADAPTER_INNOCENTS,
    *FRAMEWORK_FAULTS,
    *FRAMEWORK_RELATIVES,
    *FRAMEWORK_INNOCENTS,
    *PART_FAULTS,
    *PART_INNOCENTS,
    *MIXER_FAULTS,
    *MIXER_INNOCENTS,
)

# What is not known yet, and what nothing in the files can say.
MISSED = {
    "kernel_of_other_weights": "seen, not named",
    "merge_drift": "not seen",
    "tables_frozen": "open",
    "amsgrad_unsaid": "seen, not named",
    "qk_norms_of_one_rank": "seen, not named",
    "softcap_identity": "seen, not named",
    "softmax_without_sum": "seen, not named",
    "silu_of_sigmoid": "seen, not named",
    "residual_detached": "seen, not named",
    "two_steps": "seen, not named",
    "tempered": "seen, not named",
    "experts_in_bfloat16": "open",
    "noise_in_embeddings": "seen, not named",
    "kahan": "open",
    # Gradients of a later step beside the moments of after it: nothing says them.
    "resumed": "open",
    "dampened": "open",
    "part_by_state": "open",
    # Nothing says whether a parameter that counts fewer steps should have moved.
    "no_gradient_now": "open",
}


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_step_is_answered_rightly(row: JudgedStep, tmp_path: Path) -> None:
    answer = judged(row, tmp_path)
    assert answer.word == MISSED.get(row.name, "right"), answer.texts
    if row.cause:
        assert answer.report.causes[0].cause == row.cause
    said = "\n".join((*approved.leaves(answer.report.to_json(), most=4), *answer.texts))
    approved.check(ANSWERS / f"{row.name}.txt", said, {str(tmp_path): "FOLDER"})


def test_a_tied_table_beside_wrong_layers_lacks_no_part(tmp_path: Path) -> None:
    """What comes down through them is another part. Seen red: "only the head's part"."""
    noise = torch.Generator().manual_seed(4)

    def wrong(grads: Grads) -> Grads:
        used = torch.unique(batch_of()["input_ids"])
        made = {n: g.clone() for n, g in grads.items()}
        for name, g in made.items():
            if ".h." in name:
                g.add_(torch.randn(g.shape, generator=noise) * g.std())
            if "wte" in name:
                g[used] += torch.randn(g[used].shape, generator=noise) * g.std()
        return made

    given = gradient_step("gpt2", change=wrong)(tmp_path)
    report = explain_step(given.pop("model"), **given)
    assert report.exit_code == 1 and not {one.cause for one in report.causes} & {"gradient_tied"}


def test_frozen_parameters_are_not_detached(tmp_path: Path) -> None:
    """All other gradients are right. Seen red: the guess without a wrong gradient."""
    given = detached_step("llama", r"self_attn\.o_proj$", frozen=True)(tmp_path)
    report = explain_step(given.pop("model"), **given)
    assert not report.causes and not report.counts["differs"]


# Of a gradient whose distance three random directions do not settle, and of one that they fit.
BY_DIFFERENCES = {
    "kernel_of_other_weights": "seen, not named",
    "all_positions_counted": "right",
    "bfloat16": "right",
}


@pytest.mark.parametrize("name", BY_DIFFERENCES)
def test_a_step_is_checked_without_a_backward(name: str, tmp_path: Path) -> None:
    row = next(row for row in (*FAULTS, *INNOCENTS) if row.name == name)
    answer = judged(row, tmp_path, differences=True)
    assert answer.word == BY_DIFFERENCES[name], answer.texts


def test_a_step_without_a_gradient_shows_in_half_of_the_elements(tmp_path: Path) -> None:
    """Zeros do not decay: where more than half are zero the weight decay alone shows too little."""
    for every, named in ((1, True), (2, True), (3, False)):
        model, batch = tiny("llama", tied=False), batch_of()
        frozen = {name: p for name, p in model.named_parameters() if ".layers.1.mlp." in name}
        with torch.no_grad():
            for p in frozen.values():
                p.zero_().view(-1)[::every] = 0.5
        grads = backward(model, batch)
        held = {name: g for name, g in grads.items() if name not in frozen}
        folder = tmp_path / str(every)
        folder.mkdir()
        given = written(folder, model, batch) | with_gradients(folder, held)
        del given["batch"]
        for p in frozen.values():
            assert p.grad is not None
            p.grad.zero_()
        adamw()(model).step()
        model.save_pretrained(folder / "after")
        given |= {"after": folder / "after", "optimizer": f"{RULE},step=1"}
        found = {one.cause for one in explain_step(given.pop("model"), **given).causes}
        assert ("moved_without_gradient" in found) == named, (every, found)
