"""Whole models whose config.json says odd things: each command ends with an answer or one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import save_tiny
from tests.robustness.jail import Done, Job, run
from tests.robustness.verdicts import assert_plain
from tests.scope import selected

pytestmark = pytest.mark.xdist_group("configs")
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "M"),
    "validate": ("validate", "M"),
    "plan": ("trace", "M"),
    "trace": ("trace", "M", "--payload", "--ids", "1,2,1", "--points", "all"),
    "run": ("run", "M", "--ids", "1,2", "--max-tokens", "2"),
    "diff": ("diff", "G", "M"),
}
# Architecture -> keys of its config and what they are made to say.
ODD: dict[str, list[tuple[str, Any]]] = {
    "llama": [
        ("num_attention_heads", 3), ("num_attention_heads", 1 << 20), ("head_dim", 0),
        ("num_hidden_layers", 4096), ("num_hidden_layers", 1 << 40), ("rms_norm_eps", 1e300),
        ("rope_scaling", {"rope_type": "yarn"}), ("rope_scaling", {"rope_type": "x\u001b[2J"}),
        ("hidden_act", "\u202e"), ("vocab_size", 1), ("max_position_embeddings", 1),
        ("num_key_value_heads", 4000), ("rope_theta", 1e-300), ("tie_word_embeddings", "x"),
        ("intermediate_size", None), ("eos_token_id", 1 << 62), ("model_type", "x" * 5000),
    ],
    "deepseek_v2": [
        ("n_group", 4000), ("n_group", 3), ("topk_group", 1 << 30),
        ("num_experts_per_tok", 1 << 30), ("first_k_dense_replace", -1),
        ("first_k_dense_replace", 1 << 30), ("q_lora_rank", 0),
        ("qk_rope_head_dim", 7), ("v_head_dim", 1 << 31), ("topk_method", "\u001b"),
    ],
    "gpt_oss": [
        ("sliding_window", 0), ("sliding_window", 1 << 62), ("layer_types", []),
        ("layer_types", ["\u001b[2J"] * 3), ("num_local_experts", 1), ("swiglu_limit", -1),
    ],
}  # fmt: skip
CASES = [
    (f"{arch}-{number}", arch, key, value)
    for arch, rows in ODD.items()
    for number, (key, value) in enumerate(rows)
]
PAIRS = [(command, case[0]) for command in COMMANDS for case in CASES]


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    asked = selected(request, "command", "id")
    folder = tmp_path_factory.mktemp("configs")
    warm, jobs = [], []
    for arch in ODD:
        good = folder / arch
        save_tiny(arch, good)
        warm += [_line(command, good, good) for command in COMMANDS]
        config = json.loads((good / "config.json").read_text())
        for id, of, key, value in CASES:
            if of != arch:
                continue
            odd = folder / id
            odd.mkdir()
            for file in good.iterdir():
                (odd / file.name).symlink_to(file)
            (odd / "config.json").unlink()
            (odd / "config.json").write_text(json.dumps({**config, key: value}))
            jobs += [
                Job(f"{command} {id}", _line(command, good, odd))
                for command in COMMANDS
                if (command, id) in asked
            ]
    return run(jobs, warm)


def _line(command: str, good: Path, odd: Path) -> tuple[str, ...]:
    words = {"G": str(good), "M": str(odd)}
    return tuple(words.get(word, word) for word in COMMANDS[command])


@pytest.mark.parametrize(("command", "id"), PAIRS, ids=str)
def test_odd_config(command: str, id: str, done: dict[str, Done]) -> None:
    """Groups that do not divide the experts were a ValueError of numpy."""
    one = done[f"{command} {id}"]
    assert_plain(one)
    assert one.code in (0, 1, 2)
    if one.code == 2 and not one.out:
        lines = [line for line in one.err.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1 and lines[0].startswith("aprfmt: "), one.err[:500]
        assert len(lines[0]) < 2000
