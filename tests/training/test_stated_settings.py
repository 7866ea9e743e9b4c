"""What is stated beside a step, and is not so: names, settings, clippings that fit by chance.

Seen red, each alone: `--accept` of a parameter by its name in the file, refused; a rename that
changes nothing, passed over; bitsandbytes' nested state, "of another model"; norms "clipped to 0.1"
beside exchanged betas; NaN in moments, of an unknown cause.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.gradient_layout import guess_wrong_blocks
from aprfmt.errors import UsageError
from aprfmt.model.renames import parse_rename
from aprfmt.training.step import explain_step
from tests.training.steps import (
    LR,
    Q1,
    WD,
    Made,
    adamw_all,
    gradients,
    save,
    save_arrays,
    stepped_optimizer,
    torch_steps,
    weights,
)

ADAMW = f"adamw:lr={LR},wd={WD},step=1"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Write a right first step, with the gradients of all but layer 1."""
    (after,), made = stepped_optimizer(adamw_all)
    held = {name: g for name, g in gradients(1).items() if ".layers.1." not in name}
    torch.save(made.state_dict(), tmp_path / "state.pt")
    return {
        "model": save(tmp_path / "before", weights(), "F32"),
        "after": save(tmp_path / "after", after, "F32"),
        "grads": [save_arrays(tmp_path / "grads.npz", held)],
        "optimizer": ADAMW,
    }


@pytest.mark.parametrize(
    ("patterns", "code"),
    [
        ([], 2),
        (["unread:model.layers.1.*"], 0),
        (["unread:L1.*"], 0),
        (["unread:model.layers.1.self_attn", "unread:L1.*"], 0),
        (["unread:model.layers.1.self_attn"], 2),
        (["unread:*"], 0),
    ],
)
def test_a_parameter_is_accepted_by_role_and_by_name(
    patterns: list[str], code: int, files: dict[str, Any]
) -> None:
    assert explain_step(**files, accept=patterns).exit_code == code


def test_what_matches_nothing_is_refused(files: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--accept unread:model.layers.7.*: no item"):
        explain_step(**files, accept=["unread:model.layers.7.*"]).exit_code  # noqa: B018
    with pytest.raises(UsageError, match=r"--rename 'trunk.=model.' changes no name; near"):
        explain_step(**files, rename=[parse_rename("trunk.=model.")])


def test_a_state_that_bitsandbytes_nests_is_read(files: dict[str, Any], tmp_path: Path) -> None:
    """bitsandbytes 0.49 and later put moments one dictionary further in."""
    state = torch.load(tmp_path / "state.pt")
    nested = {
        key: {
            "step": int(held["step"]),
            "__bnb_optimizer_quant_state__": {
                name: held[own] for name, own in (("state1", "exp_avg"), ("state2", "exp_avg_sq"))
            },
        }
        for key, held in state["state"].items()
    }
    torch.save(state | {"state": nested}, tmp_path / "nested.pt")
    del files["grads"]
    report = explain_step(**files, optimizer_state=tmp_path / "nested.pt")
    assert report.exit_code == 0 and report.counts["agrees"] == len(weights())


def test_moments_that_are_not_finite_are_said(files: dict[str, Any], tmp_path: Path) -> None:
    state = torch.load(tmp_path / "state.pt")
    number = list(weights()).index(Q1)
    state["state"][number]["exp_avg"][0, 0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    del files["grads"]
    report = explain_step(**files, optimizer_state=tmp_path / "nan.pt")
    assert [(one.cause, one.roles) for one in report.causes] == [
        ("nonfinite", ("L1.attn_q.weight",))
    ]
    assert "a moment in the optimizer's state holds NaN" in report.causes[0].says


def test_no_clipping_is_said_that_gives_some_parameters_alone(tmp_path: Path) -> None:
    """Lion's betas exchanged: to some bound or other a few signs of norms come right."""
    steps, _ = torch_steps(adamw_all)
    size = 4.23 / np.sqrt(sum(float(np.square(g).sum()) for g in gradients(2).values()))
    moment = {name: 0.1 * size * g.astype(np.float64) for name, g in gradients(1).items()}
    grads = {name: (size * g).astype(np.float32) for name, g in gradients(2).items()}
    after = {
        name: w - LR * np.sign(0.99 * moment[name] + 0.01 * grads[name]) - LR * WD * w
        for name, w in steps[0].items()
    }
    made = Made(
        {name: w.astype(np.float32) for name, w in after.items()},
        f"lion:lr={LR},wd={WD},b1=0.9,b2=0.99,step=2",
        before=steps[0],
        grads=grads,
        state={f"{name}.exp_avg": m.astype(np.float32) for name, m in moment.items()}
        | {"step": np.asarray([1.0])},
    )
    report = made.report(tmp_path)
    assert [(one.cause, len(one.roles)) for one in report.causes] == [("betas", len(weights()))]
    assert not [note for note in report.notes if "clipped" in note]


def test_blocks_of_experts_are_no_heads() -> None:
    """Seen red: `head 1` of stacked experts, of a model with as many heads."""
    computed = np.random.default_rng(3).standard_normal((4, 60))
    given = computed * np.array([[1.0], [0.5], [1.0], [1.0]])
    sizes = {"n_heads": 4, "n_experts": 4}
    for key, what in (("L0.ffn_up_exps.weight", "expert 1"), ("L0.attn_q.weight", "head 1")):
        case = GradientCase(key, given, computed, sizes=sizes)
        (found,) = guess_wrong_blocks(case)
        assert found.says == f"the gradient of some blocks is another one: {what}: 0.5 times"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (slice(32, 64), "part 2 of 2 of the rows did not move, as of a shard"),
        (slice(16, 32), "part 2 of 4 of the rows did not move, as of a shard"),
        (slice(30, 62), "many rows did not move"),
        (slice(2, 4), "rows did not move: 2, 3"),
    ],
)
def test_the_shard_that_stood_still_is_said(rows: slice, says: str, tmp_path: Path) -> None:
    """Seen red: `many rows did not move`, of the second of two ranks."""
    (after,), _ = torch_steps(adamw_all)
    after[Q1][rows] = weights()[Q1][rows]
    report = Made(after, ADAMW, grads=gradients(1)).report(tmp_path)
    assert [one.cause for one in report.causes] == ["rows_frozen"]
    assert report.causes[0].says.endswith(says)
