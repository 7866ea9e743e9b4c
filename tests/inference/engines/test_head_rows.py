"""Norms of heads give a row for each head: hooks' arrays [tokens * heads, head size] are points."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder


def hooked(folder: Path, ids: list[int]) -> dict[str, Any]:
    """Return {module: its result} of a pass of transformers, as forward hooks give them."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, given: Any) -> None:
            given = given[0] if isinstance(given, tuple) else given
            if torch.is_tensor(given) and given.is_floating_point():
                seen[name] = given.detach().clone()

        return hook

    for name, module in model.named_modules():
        if name and "rotary" not in name:
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        seen["logits"] = model(torch.tensor([ids])).logits
    held = {name: (one[0] if one.shape[0] == 1 else one).numpy() for name, one in seen.items()}
    return {**held, "input_ids": np.array(ids)}


def saved(arrays: dict[str, Any], path: Path) -> Path:
    """Return the path of a file of arrays."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)
    return path


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_next", "qwen3"])
@pytest.mark.parametrize("flat", [False, True])
def test_rows_of_heads_are_read_whatever_the_number_of_tokens(
    arch: str, flat: bool, tmp_path: Path
) -> None:
    """Seen red: with as many tokens as a head has elements the rows were called transposed."""
    folder = tiny_folder(arch)
    with open_model(folder) as model:
        hp = model.hyper
        tokens = int(hp.get("delta_value_dim") or hp["head_dim"])
    arrays = hooked(folder, [3 + 7 * n % 80 for n in range(tokens)])
    if flat:  # as engines that view q and k by heads
        for name, x in arrays.items():
            if name.endswith(("q_norm", "k_norm")):
                arrays[name] = x.reshape(-1, x.shape[-1])
    path = saved(arrays, tmp_path / "run.safetensors")
    found = aprfmt("diagnose", folder, path, "--json").json
    assert (found["verdict"], found["exit"]) in (("precision", 0), ("same", 0)), found["sentence"]
    assert not [row for row in found["not_compared"] if "norm" in row["name"]]
    name = next(name for name in arrays if name.endswith(("linear_attn.norm", "q_norm")))
    arrays[name] = 1.5 * arrays[name]
    wrong = saved(arrays, tmp_path / "wrong.safetensors")
    [cause] = aprfmt("diagnose", folder, wrong, "--json").json["causes"]
    assert cause["cause"] == "capture_point" and "is its value times 1.5" in cause["says"]


def test_a_shape_that_no_transposition_explains_has_no_such_hint(tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    tokens = 7
    arrays = hooked(folder, [3 + 5 * n for n in range(tokens)])
    width = arrays["model.layers.1.mlp"].shape[1]
    for rows, hint in ((width, True), (width + 1, False)):
        arrays["model.layers.1.mlp"] = np.ones((rows, tokens), np.float32)
        path = saved(arrays, tmp_path / f"{rows}.safetensors")
        told = aprfmt("diagnose", folder, path)
        assert told.code == 2 and f"[{rows}, {tokens}]; expected a row for each" in told.out
        assert ("is it transposed?" in told.out) == hint
