"""Names of published checkpoints, as their index files list them: our tables bind every one.

`published/*.json` holds facts of repositories that anybody can read: where an index file lies, the
config.json beside it and the names of its tensors, with {a-b,c} for numbers that all occur. The
libraries' own tables and the models they save come from code; these were written by whoever
published the weights, years before some of that code.
"""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from aprfmt.arch import ARCHS, find_arch
from aprfmt.arch.binding import BoundNames, bind_names
from aprfmt.arch.draft_head import find_heads
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.required_roles import expected_roles, logical_shape
from aprfmt.arch.spec import ArchSpec, Facts

FILES = sorted((Path(__file__).parent / "published").glob("*.json"))
PARTS = (".scales", ".biases")  # of MLX's packed weights, which are bound with their `.weight`
TOWERS = {  # rows of their own
    "gemma3": "gemma3_vision", "qwen2_vl": "qwen2_vl_vision", "qwen3_vl": "qwen3_vl_vision",
}  # fmt: skip

published = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def numbers(text: str) -> list[str]:
    """Return what "0-2,5" stands for: 0, 1, 2, 5."""
    ends = [part.partition("-") for part in text.split(",")]
    return [str(n) for a, _, b in ends for n in range(int(a), int(b or a) + 1)]


def names_of(patterns: list[str]) -> Iterator[str]:
    """Yield the names of an index file."""
    for pattern in patterns:
        pieces = re.split(r"\{([^}]*)\}", pattern)
        choices = [numbers(each) if i % 2 else [each] for i, each in enumerate(pieces)]
        yield from ("".join(each) for each in product(*choices))


def read(file: Path, without: str = "") -> tuple[ArchSpec, list[str], BoundNames, dict[str, Any]]:
    """Return the tables found by config and names, the names, what is bound, and the file."""
    data = json.loads(file.read_text())
    names = [name for name in names_of(data["tensors"]) if name != without]
    names = [
        name for name in names if not (name.endswith(PARTS) and "quantization" in data["config"])
    ]
    spec = find_arch("hf", data["config"]["model_type"], names, data["config"])
    return spec, names, bind_names(spec, "hf", names), data


def left_and_missing(file: Path, without: str = "") -> tuple[set[str], set[str]]:
    """Return the names that nothing claims and the roles that the config asks for in vain."""
    spec, names, bound, data = read(file, without)
    roles = {role for group in bound.groups for role in group.roles}
    hyper, _ = read_hyper(spec, Facts("hf", data["config"], {}, names="hf"), file.stem)
    shapes = {role: logical_shape(spec, role, hyper) for role in roles}
    hyper, report = read_hyper(spec, Facts("hf", data["config"], shapes, names="hf"), file.stem)
    demanded = {name: row.value for name, row in report.demanded.items()}
    left = set(bound.unbound)
    for head in find_heads(spec, "hf", hyper, names, set()):
        left -= {name for group in head.bound.groups for name in group.stored}
    missing = set(expected_roles(spec, hyper, demanded)) - roles
    if spec.name in TOWERS:
        tower = ARCHS[TOWERS[spec.name]]
        sees = bind_names(tower, "hf", sorted(left))
        left = set(sees.unbound)
        roles = {role for group in sees.groups for role in group.roles}
        hyper, _ = read_hyper(
            tower, Facts("hf", data["config"], {}, names="hf"), file.stem, complete=False
        )
        if "projection_size" not in hyper:
            hyper = hyper.with_values(projection_size=1)  # only a tensor's shape says it
        missing |= set(expected_roles(tower, hyper)) - roles
    return left, missing


@published
def test_every_published_name_is_bound_and_no_role_is_missing(file: Path) -> None:
    data = json.loads(file.read_text())
    assert len(set(names_of(data["tensors"]))) == data["names"]
    assert left_and_missing(file) == (set(), set())


@published
def test_a_name_that_is_gone_is_missed(file: Path) -> None:
    spec, _, bound, _ = read(file)
    group = next(group for group in reversed(bound.groups) if group.layer is not None)
    left, missing = left_and_missing(file, without=group.stored[0])
    assert set(group.roles) & missing or left, spec.name


def test_patterns_are_read_as_they_are_written() -> None:
    assert list(names_of(["a.{0-1,3}.b.{7}", "c"])) == ["a.0.b.7", "a.1.b.7", "a.3.b.7", "c"]
