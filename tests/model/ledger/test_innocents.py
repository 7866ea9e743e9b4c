"""What real writers write is read: no key of theirs is unread, and copies stay equal.

Seen red: a row of a writer's key taken out of a table.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.other_keys import ROWS
from aprfmt.conversion import convert
from aprfmt.model import open_model
from aprfmt.model.key_readings import FILES, METADATA, matching_row
from aprfmt.model.ledger import make_ledger
from aprfmt.model.sidecar_files import ROWS as FILE_ROWS
from tests.arch.listed import LISTED, built
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed
from tests.models import IN_GGUF, MAKERS, save_tiny

ONE_EACH = sorted({prefix: name for name, (prefix, _) in MAKERS.items()}.values())


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_folder_of_transformers_has_nothing_unread(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    assert name in ARCHS
    save_tiny(name, tmp_path / "m")
    with open_model(tmp_path / "m") as model:
        found = make_ledger(model)
    assert [item for item in found.items if item.reading in ("unread", "contradicted")] == []
    assert found.unreadable == ()
    if name in IN_GGUF:
        convert(tmp_path / "m", tmp_path / "m.gguf")
        with open_model(tmp_path / "m.gguf") as model:
            assert make_ledger(model).unread == ()
        done = command("diff", tmp_path / "m", tmp_path / "m.gguf", "--json")
        assert (done.code, done.json["not_compared"]) == (0, []), done.json["says"]


def test_a_name_that_safetensors_saves_for_a_shared_tensor_is_read(tmp_path: Path) -> None:
    """What it says of no tensor that is there stays unread."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    from safetensors.torch import save_model

    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    save_model(net, str(tmp_path / "m.safetensors"), {"2.weight": "3.weight", "note": "0.weight"})
    with open_model(tmp_path / "m.safetensors") as model:
        keys = make_ledger(model).items_of_kind("metadata key")
    unread = {name: item.unread for name, item in keys.items()}
    assert unread == {"1.weight": False, "2.weight": True, "note": True}


def test_generation_keys_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: no transformers")
    rows = FILES["generation_config.json"]
    made: Mapping[str, Any] = deepcopy(vars(transformers.GenerationConfig()))
    unknown = [key for key in made if matching_row(rows, key) is None]
    assert len(made) > 40 and unknown == []


def test_keys_of_gguf_py_are_read_or_hyperparameters() -> None:
    """`general.*` and what it writes beside hyperparameters; a key of an architecture is a rule's.

    Keys of no reader here are left over on purpose: they are unread in a file that has them.
    """
    constants = pytest.importorskip("gguf.constants", reason="NOT-RUN: gguf is not installed")
    rows = METADATA["gguf"]
    names = [value for name, value in vars(constants.Keys.General).items() if name.isupper()]
    names = [name.format(id=0) for name in names if isinstance(name, str)]
    unknown = sorted(name for name in names if matching_row(rows, name) is None)
    assert len(names) > 30 and unknown == []


def test_without_effect_has_its_source() -> None:
    every = [row for rows in (*METADATA.values(), *FILES.values()) for row in rows]
    every_source = [row.source for row in every if row.reading == "without effect"]
    every_source += [row.source for row in FILE_ROWS if row.reading == "without effect"]
    every_source += [row.source for rows in ROWS.values() for row in rows]
    assert len(every_source) > 8 and all(len(source) > 8 for source in every_source)


def test_the_demo_models_files_are_read(demo_model: Path, tmp_path: Path) -> None:
    for name in ("m.gguf", "m.apr", "back"):
        convert(demo_model, tmp_path / name, to="safetensors" if name == "back" else None)
        with open_model(tmp_path / name) as model:
            found = make_ledger(model)
        assert (found.unread, found.unreadable) == ((), ())
        done = command("diff", demo_model, tmp_path / name, "--json")
        assert (done.code, done.json["not_compared"]) == (0, [])
        assert json.loads(json.dumps(found.to_json())) == found.to_json()


TOWERS = ("gemma3_vision", "qwen2_5_vl_vision", "qwen3_vl_vision")


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_is_read_where_loaders_read_it(name: str, tmp_path: Path) -> None:
    """Below the language model's prefix no loader looks for it."""
    pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    import transformers

    auto: Any = transformers
    _, kind, loader, values = LISTED[name]
    model = getattr(auto, loader).from_config(auto.AutoConfig.for_model(kind, **values))
    model.save_pretrained(tmp_path / "m")
    rows = dict(tensors_of(tmp_path / "m"))
    with open_model(tmp_path / "m") as opened:
        items = make_ledger(opened).items
    said = {item.name: item for item in items if item.kind == "config key"}
    for key, role in (("hidden_size", "hidden_size"), ("hidden_act", "activation")):
        item = said[f"vision_config.{key}"]
        assert (item.reading, item.of) == ("hyperparameter", role)
    found = [item for item in items if item.kind == "tensor"]
    towers = {item.name for item in found if item.of == f"tower {name}"}
    assert towers and [item for item in found if item.unread] == []
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.json").write_bytes((tmp_path / "m" / "config.json").read_bytes())
    moved = {f"language_model.{key}" if key in towers else key: row for key, row in rows.items()}
    write_mixed(tmp_path / "moved" / "model.safetensors", moved)
    with open_model(tmp_path / "moved") as opened:
        unread = {item.name for item in make_ledger(opened).unread if item.kind == "tensor"}
    assert unread == {f"language_model.{key}" for key in towers}
    shown = command("inspect", tmp_path / "moved").out.partition("\n")[0]
    assert "stand under other names than readers look for" in shown
    assert "of no role" not in command("inspect", tmp_path / "m").out.partition("\n")[0]


def test_a_buffer_of_a_tower_is_the_towers(tmp_path: Path) -> None:
    """Computed numbers that published towers hold, and readers make anew."""
    pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    _, kind, loader, values = LISTED["gemma3_vision"]
    built(kind, loader, values).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    rows = dict(tensors_of(tmp_path / "m"))
    (embedding,) = [name for name in rows if name.endswith("position_embedding.weight")]
    buffer = embedding.replace("position_embedding.weight", "position_ids")
    rows[buffer] = ("I64", (1, 2), np.arange(2).tobytes())
    write_mixed(file, rows)
    with open_model(tmp_path / "m") as model:
        found = {item.name: item for item in make_ledger(model).items if item.kind == "tensor"}
    assert found[buffer].of == found[embedding].of == "tower gemma3_vision"
    assert not found[buffer].unread
