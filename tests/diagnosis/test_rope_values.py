"""Module outputs of a run whose rope scaling has another number than the model's.

q, k, v and the attention's output are captured, and not what rope makes: a pass of the layer with
the other number has to give it. transformers is the judge of what the numbers do. Seen red: the
numbers left out of the usual mistakes; the reference's token ids not taken by `trace`.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt
from tests.diagnosis.engines import place, tiny_folder
from tests.field import hf
from tests.models import IDS

LONG = (tuple(IDS) * 8)[:72]  # more tokens than a command names
OUTPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn", "mlp", "")


def captured(folder: Path, name: str, ids: tuple[int, ...], *, embedded: bool = True) -> Path:
    """Return a .npz of the outputs of modules in transformers' pass over a folder."""
    import torch

    model = hf.loaded(folder)
    wanted = {"model.norm", "lm_head"} | ({"model.embed_tokens"} if embedded else set())
    for layer in range(len(model.model.layers)):
        stem = f"model.layers.{layer}"
        norms = ("input_layernorm", "post_attention_layernorm")
        wanted |= {f"{stem}.{each}" if each else stem for each in (*OUTPUTS, *norms)}
    arrays: dict[str, Any] = {}

    def keep(key: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            arrays[key] = (out[0] if isinstance(out, tuple) else out).float().numpy()

        return hook

    hooks = [
        module.register_forward_hook(keep(key))
        for key, module in model.named_modules()
        if key in wanted
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for each in hooks:
        each.remove()
    path = place(f"{name}.npz")
    np.savez(path, **arrays)
    return path


def other(base: str, name: str, **values: Any) -> Path:
    """Return a tiny model's folder with other numbers in its rope_parameters."""
    folder = tiny_folder(base)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    return hf.copy(folder, f"rope-{name}", config={"rope_parameters": rope | values})


# base, what the engine has of its rope_parameters, what is said
VALUES = (
    ("llama-llama3", {"factor": 2.0}, "factor 2; the model says"),
    ("llama-llama3", {"factor": 16.0}, "factor 16; the model says"),
    ("llama-llama3", {"original_max_position_embeddings": 8}, "original_context_length 8"),
    ("llama-yarn", {"factor": 8.0}, "factor 8; the model says"),
    ("llama-yarn", {"attention_factor": 1.0}, "factor .* on cos and sin is left out"),
    ("llama-linear", {"factor": 6.0}, "factor 6; the model says 3|divided by 6"),
)


@pytest.mark.parametrize(("base", "values", "says"), VALUES)
def test_another_number_of_a_scaling_is_named(base: str, values: dict[str, Any], says: str) -> None:
    name = f"{base}-{'-'.join(map(str, [*values, *values.values()]))}"
    wrong = captured(other(base, name, **values), f"wrong-{name}", LONG)
    found = diagnose(str(tiny_folder(base)), str(wrong))
    assert found.lead is not None and found.cause == "rope_scaling", found.sentence
    alone = "confirmed" if "attention_factor" not in values else "ambiguous"
    assert found.confidence == alone and found.complete is not False
    assert re.search(says, found.lead.says), found.lead.says


@pytest.mark.parametrize("embedded", [True, False])
def test_the_printed_trace_runs_with_the_ids_of_its_reference(embedded: bool) -> None:
    base = tiny_folder("llama-llama3")
    folder = other("llama-llama3", "still", rope_type="default")
    wrong = captured(folder, f"still-{embedded}", LONG, embedded=embedded)
    given = () if embedded else ("--ids", ",".join(map(str, LONG)))
    found = aprfmt("diagnose", base, wrong, *given)
    (command,) = [line for line in found.out.splitlines() if line.startswith("next: ")]
    words = shlex.split(command)[2:]
    assert words[0] == "trace" and ("--ids" in words) != embedded, words
    done = aprfmt(*words)
    assert done.code == 1 and "first point beyond tolerance: L0." in done.out, done.err


def test_a_reference_without_ids_asks_for_them() -> None:
    base = tiny_folder("llama-llama3")
    bare = captured(base, "without-ids", LONG, embedded=False)
    arrays = {k: v for k, v in np.load(bare).items() if k.endswith(".mlp")}
    np.savez(bare, **arrays)
    done = aprfmt("trace", base, "--payload", "--reference", bare)
    assert done.code == 2 and "holds no token ids; give them with --ids" in done.err
