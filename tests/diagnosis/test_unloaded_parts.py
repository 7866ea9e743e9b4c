"""Layers that were never loaded are told by norms of 1 where no initialisation is known.

Seen red: "the bias is not added", confirmed, as the first cause, and matrices without any.
"""

from typing import Any

import pytest

import aprfmt
from aprfmt.compare.diffs import DiffReport
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO
from tests.diagnosis.test_initial_values import Draw, filled

SAID = "was never loaded"


def fresh(size: float, biases: bool = True, norm: float | None = 1.0) -> Draw:
    """Return an initialisation of no known size: Laplace numbers, biases of 0 and norms of 1.

    `biases`: those are drawn as well if False. `norm`: None leaves numbers around 1.
    """

    def draw(x: Any, name: str) -> None:
        import torch

        drawn = torch.distributions.Laplace(0.0, size).sample(x.shape)
        if name.endswith("bias") and biases:
            x.zero_()
        elif "norm" in name:
            x.fill_(norm) if norm is not None else x.copy_(1 + drawn)
        else:
            x.copy_(drawn)

    return draw


def compared(
    name: str, words: tuple[str, ...], draw: Draw, swapped: bool = False, **more: Any
) -> DiffReport:
    """Return the comparison of the demo model with one of which some tensors are drawn anew."""
    sides = [DEMO, files.copy(DEMO, f"unloaded-{name}", tensors=filled(words, draw), **more)]
    return aprfmt.diff(*(reversed(sides) if swapped else sides))


@pytest.mark.parametrize("swapped", [False, True], ids=["B", "A"])
@pytest.mark.parametrize(
    ("name", "words", "draw"),
    [
        ("layer", ("layers.2.",), fresh(0.3)),
        ("layers", ("layers.1.", "layers.3."), fresh(0.3)),
        ("biases", ("layers.2.",), fresh(0.3, biases=False)),
        ("all", ("layers.",), fresh(0.3)),
    ],
)
def test_layers_with_norms_of_one_were_never_loaded(
    name: str, words: tuple[str, ...], draw: Draw, swapped: bool
) -> None:
    (finding,) = compared(name, words, draw, swapped).findings
    assert (finding.cause, finding.certainty) == ("stale_tensor", "located")
    assert SAID in finding.says and finding.side == ("A" if swapped else "B")
    assert len(finding.keys) == 12 * {"layers": 2, "all": 4}.get(name, 1)


@pytest.mark.parametrize(
    ("name", "words", "draw"),
    [
        ("trained norms", ("layers.2.",), fresh(0.3, norm=None)),
        ("norms alone", ("norm.weight",), fresh(0.3)),
        ("biases alone", (".bias",), fresh(0.3)),
        ("one matrix", ("layers.1.mlp.up_proj", "layers.1.input_layernorm"), fresh(0.3)),
    ],
)
def test_what_norms_of_one_do_not_show_is_not_called_unloaded(
    name: str, words: tuple[str, ...], draw: Draw
) -> None:
    report = compared(name, words, draw)
    assert report.findings and not [one for one in report.findings if SAID in one.says]
