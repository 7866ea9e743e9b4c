"""Adapters merged into packed weights, and packed again as the base is.

A change below the steps may be lost, as where a quantized base is fused: then nothing shows whether
it was merged. A larger one is there, or it is not.

Seen red: the base's scales were read for the decoded weights, "0 weights", "otherwise".
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.adapters.test_parts import PREFIX
from tests.cli.run import aprfmt
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import WIDE, gptq, mlx, nearest, source

MLX = {"group_size": 32, "bits": 4, "mode": "affine"}
EITHER = "once or not at all"
KINDS: dict[str, tuple[Any, Any, str]] = {
    "mlx": (mlx, MLX, "quantization"),
    "gptq": (gptq, packing.gptq_section(), "quantization_config"),
}


def made(kind: str, size: float, folder: Path) -> dict[str, Path]:
    """Write a packed base, an adapter for q_proj, and the packed merge; return their folders."""
    write, section, key = KINDS[kind]
    plain = source("llama", WIDE)
    generator = torch.Generator().manual_seed(3)
    held: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    coded = nearest(write)

    def base(name: str, x: Any) -> packing.Rows:
        values[name] = packing.nearest(x).values()
        return coded(name, x)

    def merged(name: str, x: Any) -> packing.Rows:
        if name.endswith("q_proj"):
            a = torch.randn((4, x.shape[1]), generator=generator) * size
            b = torch.randn((x.shape[0], 4), generator=generator) * 0.1
            at = f"{PREFIX}{name}.lora_"
            held[f"{at}A.weight"], held[f"{at}B.weight"] = a, b
            x = values[name] + 2 * (b @ a).numpy()
        elif name in values:
            return coded(name, x)
        return coded(name, x.astype(np.float32))

    found = {}
    for label, make in (("a", base), ("merged", merged)):
        path = packing.folder(plain, f"adapted-{kind}-{size}-{label}", section, make, key=key)
        found[label] = folder / label
        shutil.copytree(path, found[label])
    found["base"] = found["a"]
    found["adapter"] = folder / "adapter"
    found["adapter"].mkdir()
    save_file(held, found["adapter"] / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (found["adapter"] / "adapter_config.json").write_text(json.dumps(said))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "of_merge", "of_base"),
    [(0.2, "once", "not at all"), (0.0005, "once", EITHER), (1e-7, EITHER, EITHER)],
)
def test_a_packed_merge_is_judged(
    kind: str, size: float, of_merge: str, of_base: str, tmp_path: Path
) -> None:
    """Seen red: a change below half a step was "otherwise", where B's own steps reproduce it."""
    paths = made(kind, size, tmp_path)
    told = aprfmt("diff", paths["a"], paths["merged"], "--adapter", paths["adapter"])
    assert f": {of_merge} (1 weights)" in told.out, told.out
    assert told.code == (0 if of_merge == "once" else 2)
    told = aprfmt("diff", paths["a"], paths["base"], "--adapter", paths["adapter"])
    assert f": {of_base} (1 weights)" in told.out, told.out
    assert told.code == (1 if of_base == "not at all" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_that_merges_into_a_packed_base_runs(kind: str, tmp_path: Path) -> None:
    """Seen red: the command that was printed merged into packed weights, which is refused."""
    paths = made(kind, 0.2, tmp_path)
    told = aprfmt("diff", paths["a"], paths["base"], "--adapter", paths["adapter"])
    (command,) = [line for line in told.out.splitlines() if line.startswith("next: ")]
    commands = command.removeprefix("next: ").split(" && ")
    out = tmp_path / "OUT"
    for one in commands:
        words = [str(out) if word == "OUT" else word for word in shlex.split(one)[1:]]
        done = aprfmt(*words)
        assert done.code == 0, done.err
    told = aprfmt("diff", paths["a"], out, "--adapter", paths["adapter"])
    assert ": once (1 weights)" in told.out and told.code == 0, told.out
