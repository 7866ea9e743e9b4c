"""`inspect`: the answer in the first line, what is used, numbers with their names.

Seen red: a hyperparameter of another kind of model listed, a file type named from the wrong row,
a contradiction between name and tensors that the first line leaves out.
"""

import json
import shutil
from pathlib import Path

import gguf
import pytest

from aprfmt.arch.used_hyperparameters import used_names
from aprfmt.base.metadata_values import FILE_TYPES, GUESSED, NAMES, file_type_name, number_name
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.models import save_tiny


@pytest.fixture(scope="module")
def q4(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "q4.gguf"
    assert aprfmt("quantize", demo_model, path, "--type", "Q4_K_M").code == 0
    return path


def test_file_types_are_those_of_gguf() -> None:
    theirs = {
        int(row): row.name.removeprefix("ALL_").removeprefix("MOSTLY_")
        for row in gguf.LlamaFileType
        if row != gguf.LlamaFileType.GUESSED
    }
    assert theirs.items() <= FILE_TYPES.items()
    pooling = {int(row): row.name.lower() for row in gguf.PoolingType}
    gating = {int(row): row.name.lower() for row in gguf.ExpertGatingFuncType}
    assert pooling.items() <= NAMES[".pooling_type"].items()
    assert gating.items() <= NAMES[".expert_gating_func"].items()
    assert file_type_name(15 | GUESSED) == "Q4_K_M" and file_type_name(GUESSED) == ""
    assert not number_name("general.file_type", True) and not number_name("x.block_count", 1)
    for end, rows in NAMES.items():
        for number, name in rows.items():
            assert number_name(end.lstrip(".") if end[0] != "." else f"x{end}", number) == name
        for odd in (True, 999, "1", 1.0, None):
            assert number_name(f"x{end}", odd) == "", (end, odd)


def test_the_first_line_of_a_real_file_answers(smollm2: Path) -> None:
    done = aprfmt("inspect", smollm2)
    first = done.out.splitlines()[0]
    for part in (
        "llama (runs here)",
        "134.5 M parameters",
        "Q4_1 at 5.74 bits a weight",
        "context 8192",
        "BPE tokenizer of 49152",
        "licence apache-2.0",
        "unusual: nothing",
    ):
        assert part in first
    assert not done.err
    assert aprfmt("inspect", smollm2, "--json").json["summary"]["line"] == first


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_the_first_line_names_what_cannot_be_read(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "unusual: nothing"; a tokenizer too long to be parsed was called read."""
    folder = tmp_path / "b"
    shutil.copytree(demo_model, folder)
    sound = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text('{"a": [1,')
    body = aprfmt("inspect", folder, "--json").json
    assert f"{name} cannot be read" in body["summary"]["unusual"]
    (why,) = body["unreadable"]
    assert why.startswith(f"{name} (") and "not JSON" in why
    (folder / name).write_text(json.dumps({**sound, "filler": "x" * (1 << 21)}))
    body = aprfmt("inspect", folder, "--json").json
    assert not body["unreadable"]
    in_part = "(read in part)" in body["summary"]["line"]
    assert in_part is (name == "tokenizer.json")


def test_the_first_line_names_what_is_unusual(q4: Path, tmp_path: Path, demo_model: Path) -> None:
    before = aprfmt("inspect", q4, "--json").json["summary"]
    assert before["quantization"] == "Q4_K_M" and before["unusual"] == []
    assert 4 < before["bits_per_weight"] < 8
    lying = tmp_path / "lying.gguf"
    assert aprfmt("convert", demo_model, tmp_path / "plain.gguf").code == 0
    done = aprfmt("set", tmp_path / "plain.gguf", "general.file_type=15", "-o", lying)
    assert "  general.file_type: 32 = BF16 -> 15 = Q4_K_M\n" in done.out
    found = aprfmt("inspect", lying, "--json").json["summary"]["unusual"]
    assert found == ["called Q4_K_M, but no tensor is Q4_K"]
    folder = tmp_path / "folder"
    aprfmt("convert", demo_model, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"bfloat16"', '"float16"'))
    found = aprfmt("inspect", folder, "--json").json["summary"]["unusual"]
    assert found == ["config.json says F16, no tensor is F16"]


USED = {
    "llama": ({"rope_theta", "attn_scale"},
              {"n_experts", "router", "sliding_window", "kv_lora_rank", "rope_layers",
               "value_head_dim", "swiglu_limit", "logit_scale"}),
    "mixtral": ({"n_experts", "n_experts_used", "router"}, {"kv_lora_rank", "sliding_window"}),
    "gemma2": ({"sliding_window", "window_layers", "attn_softcap", "final_softcap",
                "embedding_scale"}, {"n_experts", "router"}),
    "deepseek_v3": ({"kv_lora_rank", "q_lora_rank", "n_expert_groups", "n_expert_groups_used",
                     "value_head_dim", "moe_layers"}, {"sliding_window"}),
    "smollm3": ({"rope_layers"}, {"n_experts"}),
    "granite": ({"logit_scale", "residual_scale", "embedding_scale"}, {"n_experts"}),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_only_hyperparameters_in_use_are_shown(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    there, absent = USED[name]
    with open_model(tmp_path) as model:
        found = set(used_names(model.hyper))
    assert there <= found and not absent & found
    out = aprfmt("inspect", tmp_path).out
    shown = {line.split()[0] for line in out.splitlines() if line}
    assert there <= shown and not absent & shown
    everything = aprfmt("inspect", tmp_path, "-v").out
    assert all(f"\n{each} " in everything for each in there | absent)


def test_metadata_numbers_have_names_and_arrays_are_shown_whole(q4: Path) -> None:
    short = aprfmt("inspect", q4, "--metadata").out
    assert "15 = Q4_K_M" in short and "array of 1536" in short
    assert "characters; --full)" in short
    whole = aprfmt("inspect", q4, "--metadata", "--full", "--json").json["metadata"]
    assert len(whole["tokenizer.ggml.tokens"]) == 1536
    assert "array of" not in aprfmt("inspect", q4, "--metadata", "--full").out
    assert "--full goes with --metadata" in aprfmt("inspect", q4, "--full").err


def test_keys_that_nobody_knows_are_shown_and_ignored_ones_where_all_is(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mystery": 3}))
    keys = aprfmt("inspect", tmp_path, "--json").json["keys"]
    assert keys["unknown"] == ["mystery"] and keys["ignored"]
    for options in ((), ("-v",)):
        out = aprfmt("inspect", tmp_path, *options).out
        assert "config keys unknown: mystery\n" in out
        assert ("config keys ignored: " in out) == bool(options)
