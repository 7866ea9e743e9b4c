"""The names that published index files list, each of them bound by the tables of its model type.

published.txt has the names, with the repository and commit that each list was read at.

Seen red: a buffer of gpt_neox that is not known, a tower's prefix changed, another name of MiMo's
draft heads.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from aprfmt.arch import ARCHS, find_arch
from aprfmt.arch.bind import bind
from aprfmt.arch.draft import heads
from aprfmt.arch.hyper import read_hyper
from aprfmt.arch.spec import Facts

LIST = Path(__file__).with_name("published.txt")
# What is not the language model's: a picture's half, which has an architecture of its own.
BESIDE = {"gemma3": "gemma3_vision"}


@dataclass(frozen=True)
class Index:
    """A published index: its model type, where it was read, its names."""

    model_type: str
    source: str
    names: tuple[str, ...]


def numbered(line: str) -> Iterator[str]:
    """Yield the names that a line with {0-2,5} stands for."""
    parts = re.split(r"\{([-0-9,]+)\}", line)
    runs = []
    for each in parts[1::2]:
        ends = [[int(n) for n in run.split("-")] for run in each.split(",")]
        runs.append([n for run in ends for n in range(run[0], run[-1] + 1)])
    for numbers in product(*runs):
        yield "".join(
            text + (str(numbers[at]) if at < len(numbers) else "")
            for at, text in enumerate(parts[::2])
        )


def published() -> list[Index]:
    found: list[Index] = []
    for each in LIST.read_text(encoding="utf-8").split("\n= ")[1:]:
        head, *lines = each.splitlines()
        model_type, count, source = head.split(" ", 2)
        names = tuple(name for line in lines for name in numbered(line))
        assert len(set(names)) == len(names) == int(count), source
        found.append(Index(model_type, source, names))
    return found


INDEXES = published()


@pytest.mark.parametrize("index", INDEXES, ids=[one.source.split()[0] for one in INDEXES])
def test_every_name_is_bound(index: Index) -> None:
    spec = find_arch("hf", index.model_type, list(index.names))
    bound = bind(spec, "hf", index.names)
    rest = set(bound.unbound)
    beside = BESIDE.get(index.model_type)
    if beside is not None:
        assert rest, "nothing but the language model"
        rest = set(bind(ARCHS[beside], "hf", sorted(rest)).unbound)
    if rest:  # heads that draft tokens have a table of their own
        layers = 1 + max(int(name.split(".")[2]) for name in index.names
                         if name.startswith("model.layers."))  # fmt: skip
        # MiMo-7B's sizes, which names do not say.
        config = {
            "num_hidden_layers": layers, "num_nextn_predict_layers": 1, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 11008,
            "vocab_size": 151680, "max_position_embeddings": 32768, "rope_theta": 640000.0,
            "rms_norm_eps": 1e-5,
        }  # fmt: skip
        hyper, _ = read_hyper(spec, Facts("hf", config, {}), index.source)
        for head in heads(spec, "hf", hyper, index.names, set()):
            rest -= {name for group in head.bound.groups for name in group.stored}
    assert not rest, sorted(rest)[:5]
    keys = [key for group in bound.groups for key in group.roles]
    assert len(keys) == len(set(keys))


def test_they_are_of_many_architectures() -> None:
    names = {find_arch("hf", one.model_type, list(one.names)).name for one in INDEXES}
    assert len(names) >= 13
