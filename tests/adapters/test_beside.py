"""What stands beside an adapter's weights says what they mean: two adapters differ by it.

Seen red: another alpha, a key of no reader, or a file beside the weights was "equal", exit 0.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

CONFIG = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "base",
}  # fmt: skip


def config(**changes: object) -> Callable[[Path], object]:
    return lambda b: (b / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))


BESIDE: dict[str, tuple[Callable[[Path], object], int]] = {
    "nothing": (lambda b: None, 0),
    "alpha": (config(lora_alpha=16), 1),
    "unknown key": (config(mystery=5), 1),
    "file": (lambda b: (b / "odd.notes").write_text("x"), 1),
}


@pytest.mark.parametrize("name", BESIDE)
def test_adapters_differ_by_what_stands_beside_their_weights(name: str, tmp_path: Path) -> None:
    a, b, at = tmp_path / "a", tmp_path / "b", "base_model.model.model.layers.0.self_attn.q_proj"
    a.mkdir()
    random = np.random.default_rng(0)
    rows = {"A": random.standard_normal((4, 64)), "B": random.standard_normal((64, 4))}
    values = {f"{at}.lora_{x}.weight": row.astype(np.float32) for x, row in rows.items()}
    save_file(values, a / "adapter_model.safetensors")
    config()(a)
    shutil.copytree(a, b)
    change, code = BESIDE[name]
    change(b)
    for asked in ("diff", "diagnose"):
        done = aprfmt(asked, a, b)
        assert done.code == code, done.out
