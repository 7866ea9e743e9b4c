"""Flat parts of matrices, as FSDP leaves them in a checkpoint that was saved without gathering.

The parts are torch's own: FSDP's flat parameter of some tensors, padded and cut for its ranks.

Seen red: the length of the vector was taken for the size of the vocabulary.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

torch = pytest.importorskip("torch")

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def rank_part(arrays: list[np.ndarray], rank: int, ranks: int) -> np.ndarray:
    """Return one rank's part of a flat parameter, as FSDP cuts it."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    flat = torch.cat([torch.from_numpy(one.copy()).reshape(-1) for one in arrays])
    part, _ = FlatParamHandle._get_shard(flat, rank, ranks)
    return part.numpy()


# the tensors of the flat parameter, under whose name it is stored, rank and number of ranks,
# which values of the matrix it holds
CASES = {
    "embedding": ((EMBED,), EMBED, 0, 4, "values 0 to 791 of 3168, in their order;"),
    "embedding-and-norm": ((EMBED, NORM), EMBED, 0, 4, "values 0 to 815 of 3168, in their order;"),
    "last-rank": (
        (EMBED, NORM),
        EMBED,
        3,
        4,
        "values 2448 to 3167 of 3168, in their order; 96 more",
    ),
    "of-a-layer": ((UP, DOWN), UP, 0, 8, "values 0 to 3839 of 15360, in their order;"),
    "more-than-all": ((DOWN, NORM), DOWN, 0, 1, "all values of 15360, in their order; 96 more"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_s_part_is_named(case: str, tmp_path: Path) -> None:
    held, name, rank, ranks, which = CASES[case]
    llama_folder(tmp_path / "a", "F32", hidden=96, layers=1, ffn=160, heads=4, kv_heads=2)
    llama_folder(tmp_path / "b", "F32", hidden=96, layers=1, ffn=160, heads=4, kv_heads=2)
    rows = tensors_of(tmp_path / "a")
    arrays = [np.frombuffer(rows[one][2], np.float32) for one in held]
    part = rank_part(arrays, rank, ranks)
    write_mixed(
        tmp_path / "b" / "model.safetensors", rows | {name: ("F32", part.shape, part.tobytes())}
    )
    told = aprfmt("diagnose", tmp_path / "a", tmp_path / "b", "--json").json
    assert told["verdict"] == "bug"
    (found,) = told["causes"]
    assert (found["cause"], found["level"]) == ("flat_shard", "confirmed")
    assert found["where"] == [name]
    assert f"it is {which}" in found["says"]
    checked = aprfmt("validate", tmp_path / "b")
    assert checked.code == 1
    assert "one rank's part of flat parameters" in checked.out
    assert "the tokenizer is not of this model" not in checked.out


@pytest.mark.parametrize(("rank", "ranks", "held"), [(1, 2, (UP, DOWN)), (0, 1, (DOWN,))])
def test_a_vector_of_all_values_has_its_axes_joined(
    rank: int, ranks: int, held: tuple[str, ...], tmp_path: Path
) -> None:
    """Nothing is to be gathered where no value is missing: only the shape is lost."""
    for side in "ab":
        llama_folder(tmp_path / side, "F32", hidden=96, layers=1, ffn=160, heads=4, kv_heads=2)
    rows = tensors_of(tmp_path / "a")
    part = rank_part([np.frombuffer(rows[one][2], np.float32) for one in held], rank, ranks)
    write_mixed(
        tmp_path / "b" / "model.safetensors", rows | {DOWN: ("F32", part.shape, part.tobytes())}
    )
    told = aprfmt("diagnose", tmp_path / "a", tmp_path / "b", "--json").json
    (found,) = told["causes"]
    assert (found["cause"], found["level"]) == ("stored_shape", "confirmed")
    assert "all values of B are A's, of shape [15360] for [96, 160], in" in found["says"]
    checked = aprfmt("validate", tmp_path / "b").out
    assert "the axes were joined" in checked and "store it in the shape [96, 160]" in checked
    assert "FSDP" not in checked + found["says"]


@pytest.mark.parametrize("begins_as", [0, 1, 64, 3839])
def test_another_vector_is_no_part(begins_as: int, tmp_path: Path) -> None:
    """Other values of the same form are placed and not explained, however many begin alike."""
    for side in "ab":
        llama_folder(tmp_path / side, "F32", hidden=96, layers=1, ffn=160, heads=4, kv_heads=2)
    rows = tensors_of(tmp_path / "a")
    part = np.random.default_rng(1).standard_normal(3840).astype(np.float32)
    part[:begins_as] = np.frombuffer(rows[UP][2], np.float32)[:begins_as]
    write_mixed(tmp_path / "b" / "model.safetensors", rows | {UP: ("F32", (3840,), part.tobytes())})
    (found,) = aprfmt("diff", tmp_path / "a", tmp_path / "b", "--json").json["causes"]
    assert (found["cause"], found["level"]) == ("flat_shard", "located")
