"""One table of faults: what is broken, and exactly which gates must fail for it.

A fault changes a copy of a model folder, or the code, or both. The tests run every gate under
each and compare the set of failing gates; a gate without an answer is never counted.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Patch = Callable[[pytest.MonkeyPatch], None]
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Fault:
    """`breaks` changes a folder, `patch` the code; `options` go to qa.run; `on` is the model."""

    name: str
    fails: frozenset[str]
    breaks: Callable[[Path], None] | None = None
    patch: Patch | None = None
    on: str = "demo"
    options: Mapping[str, Any] = field(default_factory=dict)


# --- changing files ---------------------------------------------------------------------------


def tensors(change: Callable[[Tensors], Tensors | None]) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        result = change(found)
        found = found if result is None else result
        save_file({k: v.contiguous() for k, v in found.items()}, folder / WEIGHTS, {"format": "pt"})

    return breaks


def config(file: str = "config.json", **values: Any) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        data = json.loads((folder / file).read_text())
        for key, value in values.items():
            target = data
            *path, last = key.split("__")
            for part in path:
                target = target[part]
            target[last] = value
        (folder / file).write_text(json.dumps(data))

    return breaks


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".safetensors", ".jinja"):
            shutil.copy(path, target / path.name)
    (target / "golden.json").unlink(missing_ok=True)
    return target


def relabelled(folder: Path) -> None:
    """BF16 bytes under the label F16, nothing else changed."""
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(b'"BF16"', b'"F16" ')
    (folder / WEIGHTS).write_bytes(raw[:8] + header + raw[8 + size :])


def no_biases(found: Tensors) -> Tensors:
    return {name: value for name, value in found.items() if not name.endswith(".bias")}


def rescaled(found: Tensors) -> None:
    """Norm weights times 1024, what reads them divided by it: the same function, bit for bit."""
    for name in list(found):
        if name.endswith("input_layernorm.weight"):
            found[name] = found[name] * 1024
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            found[name] = found[name] / 1024


def random_weights(found: Tensors) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, value in found.items():
        if value.ndim == 2:
            noise = torch.randn(value.shape, generator=generator) * 0.05
            found[name] = noise.to(value.dtype)


def layers_swapped(found: Tensors) -> Tensors:
    def other(name: str) -> str:
        swap = {".layers.1.": ".layers.2.", ".layers.2.": ".layers.1."}
        for old, new in swap.items():
            if old in name:
                return name.replace(old, new)
        return name

    return {other(name): value for name, value in found.items()}


def swapped_tokens(folder: Path) -> None:
    """The tokenizer of another model: two hundred tokens have each other's ids."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    names = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    for a, b in zip(range(256, 356), range(356, 456), strict=True):
        data["model"]["vocab"][names[a]] = b
        data["model"]["vocab"][names[b]] = a
    path.write_text(json.dumps(data))


def other_template(folder: Path) -> None:
    """Another model's template: the turns are marked in words the demo model never saw."""
    text = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    (folder / "chat_template.jinja").write_text(text)


def nan(found: Tensors) -> None:
    found["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan


def padded(folder: Path) -> None:
    """Eight rows of padding behind the vocabulary, and generation stops at one of them."""

    def more(found: Tensors) -> None:
        table = found["model.embed_tokens.weight"]
        found["model.embed_tokens.weight"] = torch.cat([table, table[:8] * 0])

    tensors(more)(folder)
    config(vocab_size=1544)(folder)
    config("generation_config.json", eos_token_id=[1535, 1533, 1540])(folder)


def empty_rows(found: Tensors) -> None:
    """A third of the vocabulary was never filled, and no probe asks for it."""
    from aprfmt.checks.gates.model_under_test import PROBE_TOKENS

    table = found["model.embed_tokens.weight"]
    asked = {1 + i * 7919 % (len(table) - 1) for i in range(PROBE_TOKENS)}
    table[[i for i in range(len(table)) if i not in asked][:33]] = 0


def one_answer(found: Tensors) -> None:
    """Every row of the head is the same: each logit equals every other."""
    found["lm_head.weight"][:] = found["lm_head.weight"][:1]


def one_loud_logit(found: Tensors) -> None:
    """One row of the head drowns all others."""
    head = found["lm_head.weight"]
    head[:] = head[:1] * 0.02
    head[7] = head[0] * 50


# --- changing code ----------------------------------------------------------------------------


def patched(target: str, make: Callable[[Any], Any]) -> Patch:
    """Replace `module:attribute[.attribute]` by what `make` makes of it."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        from importlib import import_module

        module, _, path = target.partition(":")
        owner: Any = import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return patch


def unshifted(real: Any) -> Any:
    """Labels one place off: every token is scored against the one before the right one."""
    return lambda rows, labels: real(rows, np.roll(np.asarray(labels), 1))


def in_bits(real: Any) -> Any:
    return lambda rows, labels: real(rows, labels) / np.log(2)


def nothing_measured(real: Any) -> Any:
    return lambda rows, labels: np.zeros(len(labels))


def noisy(real: Any) -> Any:
    """A buffer that is not cleared: each call adds a little of how many came before."""

    def linear(self: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return real(self, x, w, *args, **kwargs) * np.float32(1 + 1e-7 * (self.calls % 97))

    return linear


def deaf(real: Any) -> Any:
    """The embedding of token 5, whatever the tokens are."""
    return lambda self, table, ids: real(self, table, np.full_like(np.asarray(ids), 5))


def forgetful(real: Any) -> Any:
    """A cache that is never emptied."""
    return lambda self, length: None


def flipped_byte(real: Any) -> Any:
    """A conversion that gets one bit of one tensor wrong in every layer."""

    def chunks(output: Any, options: Any, record: Any) -> Any:
        for at, chunk in enumerate(real(output, options, record)):
            data = bytearray(chunk)
            if at == 0 and output.info.name.endswith(("ffn_up.weight", "up_proj.weight")):
                data[0] ^= 1
            yield memoryview(data)

    return chunks


def other_eps(real: Any) -> Any:
    """A kernel with its own eps instead of the model's."""
    return lambda self, x, weight, **rest: real(self, x, weight, **(rest | {"eps": 1e-2}))


def one_token(real: Any) -> Any:
    return lambda self, logits: 11  # "," for ever


RUNS = {"logits", "loss", "golden-output"}


def fails(*names: str) -> frozenset[str]:
    return frozenset(names)


FAULTS: tuple[Fault, ...] = (
    # the file
    Fault("biases dropped", fails("tensor-contract"), tensors(no_biases)),
    Fault("a matrix dropped", fails("tensor-contract"),
          tensors(lambda t: {k: v for k, v in t.items() if "layers.2.mlp.up" not in k})),
    Fault("a tensor nobody reads", fails("tensor-contract"),
          tensors(lambda t: t | {"model.layers.0.self_attn.extra.weight": torch.ones(4)})),
    Fault("a matrix transposed", fails("tensor-contract"),
          tensors(lambda t: t | {k: v.T for k, v in t.items() if "layers.1.mlp.down" in k})),
    Fault("a norm cut off", fails("tensor-contract"),
          tensors(lambda t: t | {"model.norm.weight": t["model.norm.weight"][:-1]})),
    Fault("a stop token outside the vocabulary", fails("metadata"),
          config("generation_config.json", eos_token_id=[1535, 1533, 99999])),
    Fault("a stop token that is padding", fails("metadata"), padded),
    Fault("eps of another world", fails("metadata", "loss", "golden-output"),
          config(rms_norm_eps=0.5)),
    Fault("the same function on another scale", fails("init-statistics"), tensors(rescaled)),
    Fault("part of the vocabulary empty", fails("init-statistics"), tensors(empty_rows), on="tiny"),
    Fault("BF16 read as F16", fails("init-statistics", "loss", "golden-output"), relabelled),
    Fault("a NaN", fails("init-statistics", *RUNS), tensors(nan)),
    Fault("random weights", fails("loss", "golden-output"), tensors(random_weights)),
    Fault("layers in another order", fails("loss", "golden-output"), tensors(layers_swapped)),
    Fault("another rope base", fails("loss", "golden-output"),
          config(rope_parameters__rope_theta=500.0)),
    Fault("another tokenizer", fails("loss", "golden-output"), swapped_tokens),
    Fault("another chat template", fails("golden-output"), other_template),
    Fault("a head with one answer", fails("logits"), tensors(one_answer), on="tiny"),
    Fault("a head with one loud logit", fails("logits"), tensors(one_loud_logit), on="tiny"),
    # the code
    Fault("labels not shifted", fails("loss"),
          patch=patched("aprfmt.inference.evaluation:cross_entropy", unshifted)),
    Fault("a loss in bits", fails("loss"),
          patch=patched("aprfmt.inference.evaluation:cross_entropy", in_bits)),
    Fault("a loss of nothing", fails("loss"),
          patch=patched("aprfmt.inference.evaluation:cross_entropy", nothing_measured)),
    Fault("state in the backend", fails("state-isolation"),
          patch=patched("aprfmt.inference.fast.numpy_native:NativeBackend.linear", noisy)),
    Fault("input ignored", fails("state-isolation", "loss", "golden-output"),
          patch=patched("aprfmt.inference.backends.numpy_backend:NumpyBackend.embed", deaf)),
    Fault("a cache never emptied", fails("state-isolation", "golden-output"),
          patch=patched("aprfmt.inference.kv_cache:KVCache.truncate", forgetful)),
    Fault("a bit flipped in converting", fails("format-parity"),
          patch=patched("aprfmt.conversion.scheduling:output_chunks", flipped_byte)),
    Fault("a type read as another one", fails("second-reader"),
          patch=patched("aprfmt.checks.file.second_reader:find_encoding",
                        lambda real: lambda name: replace(real(name), safetensors="F31"))),
    Fault("another eps on one device", fails("device-parity"), options={"also": "torch"},
          patch=patched("aprfmt.inference.backends.torch_backend:TorchBackend.rms_norm",
                        other_eps)),
    Fault("one token for ever", fails("golden-output"),
          patch=patched("aprfmt.checks.gates.generation:_RecordingSampler.__call__", one_token)),
)  # fmt: skip
