"""`diff` names the inner keys that differ in JSON documents, and the places of each side."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.inner_keys import differing_inner_keys
from tests.cli.run import aprfmt

ENDS = {"eos_token_id": [1535, 0], "do_sample": True, "temperature": 0.6, "top_p": 0.95}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo model."""
    folder = tmp_path_factory.mktemp("inner") / "demo"
    assert aprfmt("demo", "--into", folder).code == 0
    return folder


def pair(demo: Path, into: Path, file: str, a: Any, b: Any) -> tuple[Path, Path]:
    """Return two copies of the demo whose JSON file `file` states the keys of `a`, of `b`.

    A generation config holds nothing else.
    """
    made = []
    for name, stated in (("a", a), ("b", b)):
        folder = into / name
        shutil.copytree(demo, folder)
        path = folder / file
        whole = not path.exists() or file.startswith("generation")
        held = {} if whole else json.loads(path.read_text())
        path.write_text(json.dumps(held | stated))
        made.append(folder)
    return made[0], made[1]


def test_settings_are_named_one_by_one_and_at_their_own_places(demo: Path, tmp_path: Path) -> None:
    """Seen red: two objects were printed, each cut before the key that differs."""
    last = {"eos_token_id": 0}
    a, b = pair(demo, tmp_path, "generation_config.json", ENDS, last)
    lines = aprfmt("diff", a, b).out
    assert "generation_config: eos_token_id: [1535, 0] | 0, do_sample: True | -" in lines
    [row] = aprfmt("diff", a, b, "--json").json["tokenizer"]
    assert (row["a"], row["b"]) == (ENDS, last)
    assert row["origin_b"] == "generation_config.json: eos_token_id"
    assert row["origin_a"] == "generation_config.json: eos_token_id, do_sample, temperature, ..."


@pytest.mark.parametrize(
    ("file", "a", "b", "says"),
    [
        ("preprocessor_config.json", {"size": {"height": 224, "width": 224}},
         {"size": {"height": 224, "width": 448}}, "size.width: 224 | 448"),
        ("tokenizer_config.json", {"extra": {"x": 1, "y": 2}}, {"extra": {"x": 1, "y": 3}},
         "tokenizer_config.json: extra unequal (y: 2 | 3)"),
        ("config.json", {"rope_scaling": YARN}, {"rope_scaling": YARN | {"factor": 8.0}},
         "rope_scaling: factor: 4.0 | 8.0"),
        ("config.json", {"unknown": {"groups": {"weights": {"bits": 4, "size": 128}}}},
         {"unknown": {"groups": {"weights": {"bits": 4, "size": 64}}}},
         "unknown.groups.weights.size unequal"),
    ],
)  # fmt: skip
def test_the_inner_keys_of_each_document_are_named(
    file: str, a: Any, b: Any, says: str, demo: Path, tmp_path: Path
) -> None:
    sides = pair(demo, tmp_path, file, a, b)
    assert says in aprfmt("diff", *sides).out
    same = aprfmt("diff", sides[0], sides[0]).out
    assert says not in same and " | " not in same


def test_the_place_of_a_rope_object_is_the_key_that_differs(demo: Path, tmp_path: Path) -> None:
    """Seen red: it was the key of the object's type, which both sides state alike."""
    other = YARN | {"original_max_position_embeddings": 64}
    sides = pair(demo, tmp_path, "config.json", {"rope_scaling": YARN}, {"rope_scaling": other})
    [row] = aprfmt("diff", *sides, "--json").json["hyperparameters"]
    place = "config rope_scaling.original_max_position_embeddings"
    assert (row["origin_a"], row["origin_b"]) == (place, place)


def test_inner_keys_are_compared_at_every_depth() -> None:
    a = {"x": {"y": {"z": 1, "w": 2}}, "same": [1], "gone": None}
    b = {"x": {"y": {"z": 3, "w": 2}}, "same": [1], "new": {"k": 1}}
    found = [tuple(one) for one in differing_inner_keys(a, b)]
    assert found == [
        ("x.y.z", 1, 3, True, True),
        ("gone", None, None, True, False),
        ("new", None, {"k": 1}, False, True),
    ]
