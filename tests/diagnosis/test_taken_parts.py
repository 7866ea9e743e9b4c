"""A model made of another's layers or channels is derived, with what was taken.

Seen red: exit 2, "models of other sizes"; `diff` confirmed other causes, and wrote B again from A.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from aprfmt.compare import diff
from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO
from tests.diagnosis.files import Rows

LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def with_layers(order: list[int], damaged: int = 0, stored: int = 0) -> Diagnosis:
    """Return what is said of the demo model whose layers are those of `order`.

    `damaged` is a byte of a matrix that differs, from its end where it is negative. `stored` are
    layers that the files have though the configuration does not.
    """

    def edit(rows: Rows) -> None:
        old = dict(rows)
        for name in [name for name in rows if LAYER.match(name)]:
            del rows[name]
        for at, source in enumerate([*order, *range(len(order), len(order) + stored)]):
            for name, row in old.items():
                found = LAYER.match(name)
                if found and int(found[1]) == source:
                    rows[f"model.layers.{at}.{found[2]}"] = row
        if damaged:
            dtype, shape, data = rows["model.layers.0.self_attn.o_proj.weight"]
            at = damaged if damaged > 0 else len(data) + damaged
            wrong = data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :]
            rows["model.layers.0.self_attn.o_proj.weight"] = dtype, shape, wrong

    count = len(order)
    config = {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}
    name = f"layers-{'-'.join(map(str, order))}-{damaged}-{stored}"
    return both_say(files.copy(DEMO, name, tensors=edit, config=config))


def both_say(made: Path) -> Diagnosis:
    """Return what `diagnose` says; `diff` names the same parts, from both sides, and no other."""
    found = diagnose(str(DEMO), str(made))
    report = diff(DEMO, made)
    if found.kind == "derived":
        assert [cause.says for cause in report.causes] == [found.findings[0].says]
        assert report.causes[0].level == "confirmed" and report.causes[0].remedy is None
        (turned,) = diff(made, DEMO).causes
        assert turned.cause == "derived" and turned.level == "confirmed"
    elif found.kind == "not_comparable":
        assert report.other_model in found.sentence and not report.causes
    return found


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([0, 2, 3], "layers 0-2 are A's layers 0, 2-3; A's layer 1 is not in B"),
        ([0, 1], "layers 0-1 are A's layers 0-1; A's layers 2-3 are not in B"),
        ([0, 1, 2, 1, 2, 3], "layers 0-5 are A's layers 0-2, 1-3"),
    ],
    ids=["removed", "cut", "repeated"],
)
def test_layers_that_were_taken(order: list[int], says: str) -> None:
    found = with_layers(order)
    assert (found.kind, found.cause, found.exit_code) == ("derived", "derived", 1)
    assert says in found.sentence


def test_what_is_no_part_of_the_other_is_not_called_one() -> None:
    """Seen red: one value of a matrix differs, at a place that a sample of it does not have."""
    for byte in (3, 1003, -2501):
        assert with_layers([0, 2, 3], damaged=byte).kind == "not_comparable"
    assert with_layers([0, 1, 2], stored=1).kind != "derived"  # only the key is wrong


def test_channels_that_were_pruned() -> None:
    kept = np.sort(np.random.default_rng(3).permutation(512)[:384])

    def edit(rows: Rows) -> None:
        for name in [name for name in rows if ".mlp." in name]:
            dtype, shape, data = rows[name]
            values = np.frombuffer(data, np.uint16).reshape(shape)
            values = values[:, kept] if "down" in name else values[kept]
            rows[name] = dtype, values.shape, values.tobytes()

    made = files.copy(DEMO, "fewer-channels", tensors=edit, config={"intermediate_size": 384})
    found = both_say(made)
    assert (found.kind, found.cause, found.exit_code) == ("derived", "derived", 1)
    assert "384 of A's 512 channels of each MLP were kept" in found.sentence
