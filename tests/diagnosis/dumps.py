"""Dumps that a wrong transformers makes: hooks on every module, arrays under the module's path."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.diagnosis.engines import place, tiny_folder
from tests.models import IDS, tiny

Break = Callable[[Any, ExitStack], None]
Keep = Callable[[str], bool]


def everything(name: str) -> bool:
    """Keep every module's output."""
    return not name.endswith("rotary_emb")


def layer_outputs(name: str) -> bool:
    """Keep the layers' outputs and the logits."""
    return name == "logits" or name.rpartition(".")[2].isdigit()


def logits_only(name: str) -> bool:
    """Keep the logits."""
    return name == "logits"


def outputs(base: str, sizes: Mapping[str, Any], wrong: Break | None) -> dict[str, Any]:
    """Run a tiny model that was broken; return what every module gave by path.

    Arrays are float32, and float64 where the model was made so.
    """
    import torch

    found: dict[str, Any] = {}

    def in_float(x: Any) -> Any:
        return x if x.dtype == torch.float64 else x.float()

    def hook(name: str) -> Callable[..., None]:
        def seen(module: Any, given: Any, result: Any) -> None:
            result = result[0] if isinstance(result, tuple) else result
            if torch.is_tensor(result) and not result.is_complex():
                found[name] = in_float(result.detach()).numpy()

        return seen

    model = tiny(base, **sizes)
    with ExitStack() as stack:
        if wrong is not None:
            wrong(model, stack)
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(hook(name))
        with torch.no_grad():
            found["logits"] = in_float(model(torch.tensor([IDS])).logits).numpy()
    return found


def as_npy(values: Mapping[str, Any], name: str) -> Path:
    """Write one .npy an array."""
    folder = place(f"dump-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for key, value in {**values, "input_ids": np.array(IDS)}.items():
        np.save(folder / f"{key}.npy", value)
    return folder


def as_npz(values: Mapping[str, Any], name: str) -> Path:
    """Write one .npz."""
    path = place(f"dump-{name}.npz")
    np.savez(path, **{**values, "input_ids": np.array([IDS])})
    return path


def as_raw(values: Mapping[str, Any], name: str) -> Path:
    """Write raw float32 files under names of another engine, and a mapping of them."""
    folder = place(f"dump-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names: dict[str, Any] = {}
    for key, value in values.items():
        parts = key.split(".")
        point = POINTS.get(parts[-1])
        if len(parts) < 4 or not parts[2].isdigit() or point is None:
            continue
        file = f"blk{parts[2]}-{parts[-1]}"
        np.asarray(value, "<f4").tofile(folder / f"{file}.bin")
        names[file] = {"key": f"L{parts[2]}.{point}"}
    names["result"] = "logits"
    np.asarray(values["logits"], "<f4").tofile(folder / "result.bin")
    mapping = {"aprfmt_mapping": 1, "ids": list(IDS), "dtype": "float32", "names": names}
    (folder / "aprfmt-map.json").write_text(json.dumps(mapping))
    return folder


POINTS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "attn_out", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_out",
}  # fmt: skip


def dump(
    base: str,
    name: str,
    sizes: Mapping[str, Any],
    wrong: Break | None,
    keep: Keep,
    write: Callable[[Mapping[str, Any], str], Path],
) -> tuple[Path, Path]:
    """Return a tiny model's folder, and the dump of a wrong run of it."""
    values = {key: x for key, x in outputs(base, sizes, wrong).items() if keep(key)}
    return tiny_folder(base, **sizes), write(values, name)


# --- what is broken ------------------------------------------------------------------------------


@contextmanager
def instead(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of a module while a model runs."""
    own = getattr(module, name)
    setattr(module, name, make(own))
    try:
        yield
    finally:
        setattr(module, name, own)


def adjacent_pairs(model: Any, stack: ExitStack) -> None:
    """Rotate elements 2i with 2i + 1."""
    import torch
    from transformers.models.llama import modeling_llama

    def make(own: Any) -> Any:
        def rotated(x: Any, cos: Any, sin: Any) -> Any:
            half = cos.shape[-1] // 2
            c, s = (v[..., :half].repeat_interleave(2, -1).unsqueeze(1) for v in (cos, sin))
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            return x * c + turned * s

        return lambda q, k, cos, sin, *rest, **how: (rotated(q, cos, sin), rotated(k, cos, sin))

    stack.enter_context(instead(modeling_llama, "apply_rotary_pos_emb", make))


def heads_in_turn(model: Any, stack: ExitStack) -> None:
    """Repeat all key heads one after the other, not each one for its group."""
    from transformers.models.llama import modeling_llama

    make = lambda own: lambda x, n: x if n == 1 else x.repeat(1, n, 1, 1)  # noqa: E731
    stack.enter_context(instead(modeling_llama, "repeat_kv", make))


def eps(model: Any, stack: ExitStack) -> None:
    """Add 1e-6 in every norm."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6


def gelu_and_no_biases(model: Any, stack: ExitStack) -> None:
    """Drop the biases of q, k and v; take gelu for silu."""
    import torch

    for name, module in model.named_modules():
        if hasattr(module, "act_fn"):
            module.act_fn = torch.nn.GELU()
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.bias.data.zero_()
