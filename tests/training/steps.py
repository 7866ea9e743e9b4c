"""Training steps of a tiny model, made by torch's optimizers, and the same with one mistake.

`Made` is a step in files. Steps that are right come from torch.optim, which nobody here wrote;
each mistake is one change of what torch does, in numpy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.codecs import decode, encode
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.conversion.folders import float_bytes, llama_folder

Values = dict[str, NDArray[Any]]
LR, WD = 2e-4, 0.1
B1, B2, EPS = 0.9, 0.999, 1e-8
HIDDEN, VOCAB, LAYERS = 64, 40, 2
UNUSED = slice(30, 40)  # tokens of no batch: their rows have no gradient
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q1 = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters of the tiny model."""
    found: dict[str, tuple[int, ...]] = {EMBED: (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            at + f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")
        }
        for name, rows in (("q", HIDDEN), ("k", 32), ("v", 32), ("o", HIDDEN)):
            found[at + f"self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        for name in ("gate", "up", "down"):
            found[at + f"mlp.{name}_proj.weight"] = (HIDDEN, HIDDEN)
    return found | {"model.norm.weight": (HIDDEN,), HEAD: (VOCAB, HIDDEN)}


def weights() -> Values:
    """Return the weights before the step: matrices of 0.02, norms near 1; exact in bfloat16.

    Each call returns arrays of its own: what one test writes into them, no other test sees.
    """
    return {name: w.copy() for name, w in _drawn_weights().items()}


@cache
def _drawn_weights() -> Values:
    """Return the weights that every call of `weights` copies."""
    rng = np.random.default_rng(1)
    made = {}
    for name, shape in shapes().items():
        values = rng.normal(1.0, 0.1, shape) if len(shape) == 1 else rng.normal(0, 0.02, shape)
        made[name] = rounded(values.astype(np.float32))
    return made


def gradients(step: int = 1) -> Values:
    """Return the gradients of a step, float32; some are as small as epsilon.

    Each call returns arrays of its own, as `weights` does.
    """
    return {name: g.copy() for name, g in _drawn_gradients(step).items()}


@cache
def _drawn_gradients(step: int) -> Values:
    """Return the gradients of a step that every call of `gradients` copies."""
    rng = np.random.default_rng(100 + step)
    made = {}
    for name, shape in shapes().items():
        values = rng.normal(0, 1e-3, shape) * 10.0 ** -rng.uniform(0, 4, shape)
        if name == EMBED:
            values[UNUSED] = 0
        made[name] = values.astype(np.float32)
    return made


def rounded(values: NDArray[Any], encoding: str = "BF16") -> NDArray[Any]:
    """Return float32 values rounded to a stored type."""
    plain = np.ascontiguousarray(values, np.float32)
    return decode(encoding, encode(encoding, plain)[""], plain.shape)


def clip_rows(grads: Values, share: float = 0.01) -> Values:
    """Return gradients whose rows are clipped by their own norm, as timm's adaptive_clip_grad."""
    made = {}
    for name, g in grads.items():
        axes = tuple(range(1, g.ndim)) or None
        size, weight = (
            np.sqrt(np.square(x, dtype=np.float64).sum(axes, keepdims=True))
            for x in (g, weights()[name])
        )
        bound = share * np.maximum(weight, 1e-3)
        factor = np.where(size < bound, 1.0, bound / np.maximum(size, 1e-6))
        made[name] = (g * factor.astype(np.float32)).astype(np.float32)
    return made


def save(folder: Path, values: Values, encoding: str, *, tied: bool = False) -> Path:
    """Write a checkpoint of these weights; `tied`: the table of tokens is the head, too."""
    values = {name: each for name, each in values.items() if not (tied and name == HEAD)}
    raw = {name: float_bytes(each.astype(np.float32), encoding) for name, each in values.items()}
    return llama_folder(
        folder, encoding, hidden=HIDDEN, vocab=VOCAB, layers=LAYERS, tied=tied, replaced=raw
    )


def save_arrays(path: Path, values: Mapping[str, NDArray[Any]]) -> Path:
    """Write arrays as .npz."""
    np.savez(path, **values)  # type: ignore[arg-type]
    return path


@dataclass
class Made:
    """A step: the weights after it, what is given with it, and what was said of the optimizer."""

    after: Values
    optimizer: str = f"adamw:lr={LR},wd={WD},step=1"
    before: Values = field(default_factory=weights)
    grads: Values | None = None
    state: Values | None = None
    encoding: str = "F32"

    def report(self, folder: Path) -> StepReport:
        """Return what is said of it."""
        before = save(folder / "before", self.before, self.encoding)
        after = save(folder / "after", self.after, self.encoding)
        grads = () if self.grads is None else (save_arrays(folder / "grads.npz", self.grads),)
        state = None if self.state is None else save_arrays(folder / "state.npz", self.state)
        return explain_step(
            before, after=after, grads=grads, optimizer=self.optimizer, optimizer_state=state
        )


Make = Callable[[Any, list[Any]], Any]  # make(torch, [(name, parameter)]) -> optimizer


def stepped_optimizer(
    make: Make,
    steps: int = 1,
    *,
    clip: float | None = None,
    start: Values | None = None,
    dtype: str = "float32",
    scale: float = 1.0,
    grads: Callable[[int], Values] = gradients,
) -> tuple[list[Values], Any]:
    """Return the weights after each step of an optimizer of torch, and the optimizer.

    `clip` is a bound of the norm of all gradients; `grads(step)` gives those of a step, which are
    taken `scale` times.
    """
    import torch

    kind = getattr(torch, dtype)
    start = weights() if start is None else start
    held = {n: torch.nn.Parameter(torch.from_numpy(w.copy()).to(kind)) for n, w in start.items()}
    optimizer = make(torch, list(held.items()))
    found = []
    for step in range(1, steps + 1):
        for name, g in grads(step).items():
            held[name].grad = torch.from_numpy((g * scale).astype(np.float32)).to(kind)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(held.values()), clip)
        optimizer.step()
        found.append({name: p.detach().float().numpy().copy() for name, p in held.items()})
    return found, optimizer


def torch_steps(make: Make, steps: int = 1, **given: Any) -> tuple[list[Values], Values]:
    """Return the weights after each step of an optimizer of torch, and its state by name.

    `given` is what `stepped_optimizer` takes.
    """
    named: list[tuple[str, Any]] = []

    def made(torch: Any, parameters: list[Any]) -> Any:
        """Make the optimizer, and keep the names of its parameters."""
        named.extend(parameters)
        return make(torch, parameters)

    found, optimizer = stepped_optimizer(made, steps, **given)
    state: Values = {}
    for name, parameter in named:
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"{name}.{kind}"] = np.asarray(value.detach().float().numpy())
    return found, state


def decaying_groups(parameters: list[Any]) -> list[dict[str, Any]]:
    """Return two groups as Trainer makes them: matrices decay, norms do not."""
    return [
        {"params": [p for _, p in parameters if p.ndim > 1], "weight_decay": WD},
        {"params": [p for _, p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(torch: Any, parameters: list[Any], **settings: Any) -> Any:
    """Return torch's AdamW as Trainer builds it: norms do not decay."""
    given = {"lr": LR, "betas": (B1, B2), "eps": EPS} | settings
    return torch.optim.AdamW(decaying_groups(parameters), **given)


def adamw_all(torch: Any, parameters: list[Any], **settings: Any) -> Any:
    """Return torch's AdamW over all parameters, by name."""
    return torch.optim.AdamW(parameters, **{"lr": LR, "weight_decay": WD} | settings)


def adam_all(torch: Any, parameters: list[Any], **settings: Any) -> Any:
    """Return torch's Adam over all parameters, whose decay is added to the gradient."""
    return torch.optim.Adam([p for _, p in parameters], **{"lr": LR, "weight_decay": WD} | settings)


def sgd(torch: Any, parameters: list[Any], **settings: Any) -> Any:
    """Return torch's SGD at a rate of 0.5."""
    return torch.optim.SGD([p for _, p in parameters], **{"lr": 0.5} | settings)


def moments(step: int, start: int = 1) -> tuple[Values, Values]:
    """Return Adam's moments after the gradients of steps `start` to `step`, float64."""
    first = {name: np.zeros(shape) for name, shape in shapes().items()}
    second = {name: np.zeros(shape) for name, shape in shapes().items()}
    for number in range(start, step + 1):
        for name, g in gradients(number).items():
            first[name] = B1 * first[name] + (1 - B1) * g.astype(np.float64)
            second[name] = B2 * second[name] + (1 - B2) * np.square(g.astype(np.float64))
    return first, second


Rule = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]


def stepped(rule: Rule, only: tuple[str, ...] = (), before: Values | None = None) -> Values:
    """Return weights after a step: `rule(w, g)` gives the change; `only` some parameters.

    The others take the right first step of AdamW.
    """
    made = {}
    for name, w in (weights() if before is None else before).items():
        w, g = w.astype(np.float64), gradients(1)[name].astype(np.float64)
        change = rule(w, g) if not only or name in only else right(w, g)
        made[name] = (w + change).astype(np.float32)
    return made


def right(w: NDArray[Any], g: NDArray[Any], lr: float = LR, wd: float = WD) -> NDArray[Any]:
    """Return AdamW's first step."""
    found: NDArray[Any] = -lr * g / (np.abs(g) + EPS) - (lr * wd * w if w.ndim > 1 else 0)
    return found
