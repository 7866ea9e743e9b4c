"""Names of an adapter that no loader finds, and strengths that contradict each other."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.adapters import answer_merge, convert_merged
from aprfmt.adapters.pair_placement import _prefix_rules
from aprfmt.model import open_model
from tests.adapters.golden import write
from tests.cli.run import aprfmt as command

P = "base_model.model."
Tensors = dict[str, np.ndarray]
NAMES: dict[str, Callable[[str], str]] = {
    "a wrapper": lambda name: name.replace(P, f"{P}llm."),
    "the prefix twice": lambda name: name.replace(P, P + P),
    "a module in place of model": lambda name: name.replace(f"{P}model.", f"{P}thinker."),
    "another component": lambda name: name.replace("mlp", "feed_forward"),
    # https://github.com/vllm-project/vllm/issues/34186
    "a multimodal wrapper": lambda name: name.replace(f"{P}model.", f"{P}model.language_model."),
    "the bare model": lambda name: name.replace(f"{P}model.", P),
    "two modules in its place": lambda name: name.replace(f"{P}model.", f"{P}a.b.model."),
}


def changed(adapter: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def weights(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", NAMES)
def test_a_prefix_that_fits_nothing_is_one_relation(case: str, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    out = ("--to", "safetensors", "--adapter", adapter)
    assert command("convert", base, tmp_path / "right", *out).code == 0
    changed(adapter, lambda held: {NAMES[case](name): value for name, value in held.items()})
    done = command("convert", base, tmp_path / "out", *out)
    assert done.code == 0 and "loaders leave them out" in done.err, done.err
    assert f"--base {base}" in done.err
    one, other = weights(tmp_path / "right"), weights(tmp_path / "out")
    assert all(np.array_equal(one[name], other[name]) for name in one)
    done = command("diff", base, base, "--adapter", adapter)  # what loaders make of it
    assert done.code == 1 and "not at all" in done.out and "loaders leave them out" in done.out
    if case != "another component":
        config = adapter / "adapter_config.json"
        said = json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}
        config.write_text(json.dumps(said))
        assert "so that loaders leave them out" in command("inspect", adapter).out
    # The command that is said writes an adapter that is found.
    done = command("convert", adapter, tmp_path / "named", "--base", base)
    assert done.code == 0, done.err
    done = command("diff", base, tmp_path / "right", "--adapter", tmp_path / "named")
    assert done.code == 0 and "loaders" not in done.out
    assert "loaders" not in command("inspect", tmp_path / "named").out


@pytest.mark.parametrize("part", ["q_proj", "v_proj"])
def test_names_that_may_be_one_weight_or_another_are_refused(part: str, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    changed(adapter, lambda held: {name.replace(part, "nix"): v for name, v in held.items()})
    done = command("convert", base, tmp_path / "out", "--to", "safetensors", "--adapter", adapter)
    assert done.code == 2 and "nix" in done.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_strength_beside_the_pairs_agrees_or_is_said(share: float, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    out = ("--to", "safetensors", "--adapter", adapter)
    assert command("convert", base, tmp_path / "ignored", *out).code == 0
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": share * config["lora_alpha"]}))
    assert command("convert", base, tmp_path / "honoured", *out).code == 0
    path.write_text(json.dumps(config))
    alpha = np.float32(share * config["lora_alpha"])
    changed(
        adapter,
        lambda held: (
            held
            | {
                name.replace(".lora_A.weight", ".alpha"): np.array(alpha)
                for name in held
                if name.endswith(".lora_A.weight")
            }
        ),
    )
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    done = command("convert", base, tmp_path / "out", *out)
    promised = command("inspect", adapter, "--json").json["summary"]["next"]
    assert ("--adapter" in promised) == (done.code == 0) == (share == 1.0), done.err
    assert ("PEFT's merge" in promised) is False
    said = command("diff", base, tmp_path / "ignored", "--adapter", adapter)
    assert said.code == 0 and ("PEFT goes by the configuration" in said.out) == (share != 1.0)
    if share != 1.0:
        assert "PEFT goes by the configuration" in done.err and "PEFT goes by" in promised
        said = command("diff", base, tmp_path / "honoured", "--adapter", adapter)
        assert said.code == 1 and "that of the .alpha tensors" in said.out


def test_a_pair_for_a_tied_head_says_so(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    held = weights(base)
    rows, size = held["model.embed_tokens.weight"].shape
    held.pop("lm_head.weight", None)
    save_file(held, base / "model.safetensors", {"format": "pt"})
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    changed(
        adapter,
        lambda own: (
            own
            | {
                f"{P}lm_head.lora_A.weight": np.ones((rank, size), np.float32),
                f"{P}lm_head.lora_B.weight": np.ones((rows, rank), np.float32),
            }
        ),
    )
    done = command("convert", base, tmp_path / "out", "--to", "safetensors", "--adapter", adapter)
    assert done.code == 2 and "one tensor for head and table" in done.err, done.err


def test_every_prefix_that_is_tried_takes_the_wrong_one_away() -> None:
    """Of names that a base of another spelling says nothing of: all components in front of one."""
    base: Any = ["blk.0.attn_q.weight"]
    astray = ["thinker.llm.layers.0.q", "thinker.llm.layers.1.k"]
    tried = [[rule(name) for name in astray] for rule in _prefix_rules(astray, base)]
    tails = [[name.split(".", depth)[depth] for name in astray] for depth in (1, 2, 3)]
    with_model = [[f"model.{name}" for name in names] for names in (*tails, astray)]
    assert sorted(tried) == sorted([*tails, *with_model])


def test_the_remedy_is_a_command_that_writes_the_adapter_by_other_names(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    changed(adapter, lambda held: {NAMES["a wrapper"](name): v for name, v in held.items()})
    done = command("convert", base, tmp_path / "out", "--to", "safetensors", "--adapter", adapter)
    said = re.search(r"aprfmt (convert \S+ OUT --base \S+)", done.err)
    assert said, done.err
    words, out = shlex.split(said[1]), tmp_path / "named"
    done = command(*(str(out) if word == "OUT" else word for word in words))
    assert done.code == 0 and (out / "adapter_model.safetensors").is_file(), done.err


@pytest.mark.parametrize("layers", [(), (0,), (0, 1)])
@pytest.mark.parametrize("case", ["plain", "saved"])
def test_tensors_of_an_adapter_that_no_merge_uses_are_not_compared(
    case: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """What loaders compute is in old adapters; what PEFT stores whole (modules_to_save) is used."""
    planted = [f"{P}model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers]
    base, adapter, _ = write(tmp_path, case)
    merged = tmp_path / "merged"
    convert_merged(base, merged, adapter, to="safetensors")
    changed(adapter, lambda held: held | {name: np.ones(3, np.float32) for name in planted})
    with open_model(base) as one, open_model(merged) as other:
        answer, _ = answer_merge(one, other, adapter)
    left = {row.name: row for row in answer.left if row.side == "the adapter"}
    assert set(left) == set(planted)
    for row in left.values():
        assert (row.kind, row.state) == ("adapter tensor", "unreadable")
    assert answer.pronounced().exit == (2 if planted else 0)
