"""The optimizers' rules: one step of a weight in float64, also with possible mistakes.

An update is two parts: `step`, what comes of the gradient, and `decay`, what comes of the weight
itself where decay is decoupled. The weight after the step is the weight before it and both.

Sources: Kingma and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW), Chen et al. 2023 (Lion),
torch.optim's documentation of SGD (momentum, dampening, Nesterov) and of AdamW; Shazeer and Stern
2018 (Adafactor).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.codecs import decode, encode
from aprfmt.errors import UsageError

F64 = NDArray[np.float64]
Correction = Literal["both", "none", "first", "second"]
Epsilon = Literal["outside", "inside", "uncorrected"]


@dataclass(frozen=True)
class Recipe:
    """An optimizer with its settings, and the mistakes it is assumed to make.

    `step` is the number of this step from 1, None where it is not known. `clip` is the largest
    norm of all gradients and `clip_value` the largest element, None where they are not clipped.
    `decay_on` says what decays: all parameters, or matrices alone (no norm and no bias); "" where
    that is not said. `sparse`: rows of a matrix without a gradient stay as they are. `b1` and
    `b2` are the decay rates of the moments, `wd` the weight decay, `eps` the number added to the
    denominator. `sign` is -1 where the step goes up the gradient.
    """

    name: str = "adamw"
    lr: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    wd: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    step: int | None = None
    clip: float | None = None
    clip_value: float | None = None
    decay_on: Literal["", "all", "matrices"] = ""
    sparse: bool = False
    relative: float = 1.0  # of the rate: what Adafactor's norms make of it for one parameter
    # The parameter's root mean square, which Adafactor multiplies the rate by where it is
    # `size_scaled`; None of other optimizers.
    size: float | None = None
    size_scaled: bool = False
    # Departures from the rule, one field for each kind of mistake.
    correction: Correction = "both"
    corrected_b1: float | None = None  # the rate that the first moment is corrected for
    corrected_b2: float | None = None  # that of the second; None: the moment's own
    counted: int | None = None  # the step that moments are corrected for, where it is another
    epsilon: Epsilon = "outside"
    coupled: bool | None = None  # None: as the optimizer's rule has it
    decays_last: bool = False  # decoupled decay is of the weight after its step
    sign: float = 1.0
    factor: float = 1.0  # of the step
    scale: float = 1.0  # of the gradient, by clipping
    decay_factor: float = 1.0  # of the decay
    old_moments: bool = False  # the moments of before the step are used
    growing: bool = False  # the momentum multiplies the gradient, and the buffer never decays
    second_kept_in: str = ""  # the type that the second moment is rounded to, "" for a fine one
    offset: float = 0.0  # a constant that is added to the gradient, or rate times it is subtracted
    offset_of: Literal["ones", "signs"] = "ones"  # times 1, or the sign of each weight
    offset_from_weight: bool = False  # it is subtracted from the weight, as decoupled decay is

    @property
    def row(self) -> "OptimizerRow":
        """The optimizer's row in OPTIMIZERS: its rule and settings."""
        return OPTIMIZERS[self.name]

    @property
    def keeps_moments(self) -> bool:
        """Whether a step after the first needs moments that the optimizer kept."""
        return bool(self.momentum or (self.row.first and self.row.sizes))

    @property
    def adds_decay_to_gradient(self) -> bool:
        """Whether the weight decay is added to the gradient, as L2 regularization is."""
        return self.row.coupled if self.coupled is None else self.coupled

    def decays(self, vector: bool) -> bool:
        """Return whether a parameter has weight decay.

        `vector`: it is a norm, a bias or another vector, which decay_on=matrices leaves out.
        """
        return self.wd > 0 and not (vector and self.decay_on == "matrices")

    def text(self) -> str:
        """Return the recipe as --optimizer takes it, such as `lion:lr=0.0002,b1=0.9,b2=0.99`."""
        wanted = {"lr": self.lr, **{name: getattr(self, name) for name in self.row.settings}}
        if self.wd:
            wanted["wd"] = self.wd
        if self.step is not None:
            wanted["step"] = self.step
        if self.clip is not None:
            wanted["clip"] = self.clip
        if self.clip_value is not None:
            wanted["clip_value"] = self.clip_value
        if self.decay_on:
            wanted["decay_on"] = self.decay_on
        if self.sparse:
            wanted["sparse"] = True
        said = ",".join(f"{name}={_setting_text(value)}" for name, value in wanted.items())
        return f"{self.name}:{said}"


def _setting_text(value: object) -> str:
    """Return a setting's value as text that --optimizer takes: 2e-4, true, all."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


@dataclass(frozen=True)
class Moments:
    """What the optimizer holds of a parameter, of the gradient's shape: its first and second.

    `step` is how many steps they are of; `after` says that this step's gradient is in them.
    """

    first: F64 | None
    second: F64 | None
    step: int
    after: bool = True


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer: its rule, its settings, and the names of its state in torch's files.

    `rule` takes the recipe, the gradient [elements] (None where it is not known) and the moments,
    and returns the step without decay, or None where that takes something that is not known.
    `sizes`: every element of a first step has one size, whatever the gradient is.
    """

    rule: Callable[[Recipe, F64 | None, Moments | None], F64 | None]
    settings: tuple[str, ...]
    coupled: bool = False
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    sizes: Literal["", "first step", "every step"] = ""


def _adam(recipe: Recipe, g: F64 | None, held: Moments | None) -> F64 | None:
    """Return Adam's step without decoupled decay, float64 [n]; None if the moments are unknown.

    `g` is the gradient, `held` the moments that the optimizer's state has.
    """
    moments = _adam_moments(recipe, g, held)
    if moments is None or moments.first is None or moments.second is None:
        return None
    t = moments.step if recipe.counted is None else recipe.counted
    b1 = recipe.b1 if recipe.corrected_b1 is None else recipe.corrected_b1
    b2 = recipe.b2 if recipe.corrected_b2 is None else recipe.corrected_b2
    one = 1 - b1**t if recipe.correction in ("both", "first") else 1.0
    two = 1 - b2**t if recipe.correction in ("both", "second") else 1.0
    kept = np.maximum(moments.second, 0.0)
    if recipe.second_kept_in:
        kept = round_to(kept, recipe.second_kept_in)
    first, second = moments.first / one, kept / two
    if recipe.epsilon == "inside":
        root = np.sqrt(second + recipe.eps)
    elif recipe.epsilon == "uncorrected" or recipe.sparse:  # torch's SparseAdam
        root = np.sqrt(second) + recipe.eps / math.sqrt(two)
    else:
        root = np.sqrt(second) + recipe.eps
    found: F64 = -recipe.lr * first / np.where(root == 0, 1.0, root)
    return found


def _adam_moments(recipe: Recipe, g: F64 | None, held: Moments | None) -> Moments | None:
    """Return the two moments that this step divides; None where they cannot be known.

    `g` is the gradient, `held` the stored moments: used as they are if saved after the step, else
    advanced by `g`. A recipe with `old_moments` uses those of before the step. They are unknown
    without a gradient, at a later step without a state, or where the state lacks one of them.
    """
    if held is not None and (held.after or recipe.old_moments):
        return held
    if g is None:
        return None
    if held is None:
        if recipe.step not in (None, 1):
            return None
        held = Moments(np.zeros_like(g), np.zeros_like(g), 0, False)
    if held.first is None or held.second is None:
        return None
    return Moments(
        recipe.b1 * held.first + (1 - recipe.b1) * g,
        recipe.b2 * held.second + (1 - recipe.b2) * g * g,
        held.step + 1,
    )


def _sgd(recipe: Recipe, g: F64 | None, held: Moments | None) -> F64 | None:
    """Return SGD's step, -lr times gradient or momentum buffer; None where that is not known.

    `g` is the gradient, `held` the momentum that the optimizer's state has.
    """
    if not recipe.momentum:
        return None if g is None else -recipe.lr * g
    if held is not None and held.first is not None and (held.after or recipe.old_moments):
        buffer = held.first
    elif g is None:
        return None
    elif held is not None and held.first is not None and held.step:
        kept, share = recipe.momentum, 1 - recipe.dampening
        if recipe.growing:
            kept, share = 1.0, recipe.momentum
        buffer = kept * held.first + share * g
    elif held is None and recipe.step not in (None, 1):
        return None
    else:
        buffer = g  # torch's first buffer is the gradient, whatever the dampening
    if recipe.nesterov:
        return None if g is None else -recipe.lr * (g + recipe.momentum * buffer)
    return -recipe.lr * buffer


def _lion(recipe: Recipe, g: F64 | None, held: Moments | None) -> F64 | None:
    """Return Lion's step, -lr times the sign of an averaged gradient; None if unknown.

    `g` is the gradient, `held` the momentum that the optimizer's state has. A momentum saved
    after the step is first computed back to before it.
    """
    if g is None:
        return None
    if held is None:
        if recipe.step not in (None, 1):
            return None
        return -recipe.lr * np.sign(g)
    if held.first is None:
        return None
    before = (held.first - (1 - recipe.b2) * g) / recipe.b2 if held.after else held.first
    found: F64 = -recipe.lr * np.sign(recipe.b1 * before + (1 - recipe.b1) * g)
    return found


def _adafactor(recipe: Recipe, g: F64 | None, held: Moments | None) -> F64 | None:
    """Return Adafactor's step without decay; None without a second moment saved after the step.

    `g` is the gradient, `held` has the second moment, rebuilt from its row and column factors.
    """
    if g is None or held is None or held.second is None or not held.after:
        return None
    root = np.sqrt(np.maximum(held.second, 0.0))
    found: F64 = -recipe.lr * recipe.relative * g / np.where(root == 0, 1.0, root)
    return found


_ADAM = ("b1", "b2", "eps")
_FIRST, _SECOND = ("exp_avg", "state1", "m"), ("exp_avg_sq", "state2", "v")
OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow(_adam, _ADAM, False, _FIRST, _SECOND, "first step"),
    "adam": OptimizerRow(_adam, _ADAM, True, _FIRST, _SECOND, "first step"),
    "sgd": OptimizerRow(_sgd, ("momentum", "dampening", "nesterov"), True, ("momentum_buffer",)),
    "adafactor": OptimizerRow(_adafactor, ()),
    "lion": OptimizerRow(_lion, ("b1", "b2"), False, ("exp_avg", "state1", "m"), (), "every step"),
}
_LION = {"b1": 0.9, "b2": 0.99}
# The names of settings in optimizers of torch, and those of other trainers.
CALLED: Mapping[str, str] = {
    "lr": "lr",
    "learning_rate": "lr",
    "b1": "b1",
    "beta1": "b1",
    "b2": "b2",
    "beta2": "b2",
    "eps": "eps",
    "epsilon": "eps",
    "wd": "wd",
    "weight_decay": "wd",
    "momentum": "momentum",
    "dampening": "dampening",
    "nesterov": "nesterov",
    "step": "step",
    "clip": "clip",
    "max_grad_norm": "clip",
    "clip_value": "clip_value",
    "decay_on": "decay_on",
    "sparse": "sparse",
}


def parse_recipe(text: str) -> Recipe:
    """Return the Recipe of a text such as `adamw:lr=2e-4,wd=0.1,step=1`.

    Raises UsageError for a wrong text, and for one without the learning rate.
    """
    values = parse_settings(text)
    name = values.pop("name")
    if "lr" not in values:
        raise UsageError(
            f"--optimizer {text!r}: no lr; expected the rate of this step: {name}:lr=2e-4"
        )
    return Recipe(name=name, **(dict(_LION) if name == "lion" else {}) | values)


def parse_settings(text: str) -> dict[str, Any]:
    """Return {field of Recipe: value} of the settings in --optimizer's text, with its `name`.

    Raises UsageError for an unknown optimizer, a setting that it does not have, one given twice or
    one that is out of range.
    """
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    if name not in OPTIMIZERS:
        raise UsageError(
            f"--optimizer {text!r}: no optimizer {name!r}; known: {', '.join(OPTIMIZERS)}"
        )
    values: dict[str, Any] = {}
    common = ("lr", "wd", "step", "clip", "clip_value", "decay_on", "sparse")
    used = (*common, *OPTIMIZERS[name].settings)
    for part in filter(None, (each.strip() for each in rest.split(","))):
        key, found, value = part.partition("=")
        field = CALLED.get(key.strip().lower())
        if field is None or not found:
            known = ", ".join(dict.fromkeys(CALLED.values()))
            raise UsageError(f"--optimizer {text!r}: {part!r}; expected NAME=VALUE of {known}")
        if field not in used:
            raise UsageError(
                f"--optimizer {text!r}: {name} has no {field}; expected NAME=VALUE of "
                f"{', '.join(used)}"
            )
        if field in values:
            raise UsageError(f"--optimizer {text!r}: {field} is given twice; give it once")
        values[field] = _parse_setting(text, field, value.strip())
    return {"name": name} | values


def _parse_setting(text: str, field: str, value: str) -> Any:
    """Return the value of one setting, str, bool, int or float; UsageError if it is out of range.

    `text` is all of --optimizer, for the message.
    """
    if field == "decay_on":
        if value not in ("all", "matrices"):
            raise UsageError(f"--optimizer {text!r}: decay_on={value}; expected all or matrices")
        return value
    if field in ("nesterov", "sparse"):
        said = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if value.lower() not in said:
            raise UsageError(f"--optimizer {text!r}: {field}={value}; expected 1 or 0")
        return said[value.lower()]
    try:
        number = int(value) if field == "step" else float(value)
    except ValueError:
        number = math.nan
    most = {"b1": 1.0, "b2": 1.0, "momentum": 1.0}.get(field, math.inf)
    least = 1 if field == "step" else 0
    positive = field in ("clip", "clip_value")
    above = number > 0 if positive else number >= least
    if not (above and number < most and math.isfinite(number)):
        raise UsageError(
            f"--optimizer {text!r}: {field}={value}; expected a "
            + ("whole number " if field == "step" else "finite number ")
            + ("above 0" if positive else f"of at least {least}")
            + (f" and below {most:g}" if math.isfinite(most) else "")
        )
    return number


@dataclass(frozen=True)
class Update:
    """How a recipe changes a weight: `step` by its gradient, `decay` by weight decay; float64."""

    step: F64
    decay: F64 | float

    @property
    def whole(self) -> F64:
        """The change of each weight, float64 [elements]: the optimizer's step plus its decay."""
        found: F64 = self.step + self.decay
        return found


def update_of(
    recipe: Recipe, weight: F64, gradient: F64 | None, moments: Moments | None, vector: bool
) -> Update | None:
    """Return the update that a recipe gives elements of a weight; None if an input is not known.

    `vector`: the weight is a norm, a bias or another vector. A decay that is added to the
    gradient is in `step`, and `decay` is 0.0.
    """
    decays = recipe.decays(vector)
    gradient = None if gradient is None else recipe.scale * gradient
    if gradient is not None and recipe.clip_value is not None:
        gradient = np.clip(gradient, -recipe.clip_value, recipe.clip_value)
    rate = recipe.wd * recipe.decay_factor if decays else 0.0
    coupled = recipe.adds_decay_to_gradient
    if coupled and rate:
        if gradient is None and not (moments is not None and moments.after):
            return None
        gradient = None if gradient is None else gradient + rate * weight
    if gradient is not None and recipe.offset and not recipe.offset_from_weight:
        gradient = gradient + recipe.offset * offset_units(recipe, weight)
    step = recipe.row.rule(recipe, gradient, moments)
    if step is None:
        return None
    step = recipe.sign * recipe.factor * step
    decay: F64 | float = 0.0
    if rate and not coupled:
        decay = -recipe.lr * rate * (weight + step if recipe.decays_last else weight)
    if recipe.offset and recipe.offset_from_weight:
        decay = decay - recipe.lr * recipe.offset * offset_units(recipe, weight)
    return Update(step, decay)


def offset_units(recipe: Recipe, weight: F64) -> F64:
    """Return what a recipe multiplies its `offset` by for each weight: 1, or the weight's sign."""
    return np.sign(weight) if recipe.offset_of == "signs" else np.ones_like(weight)


SETTINGS = tuple(row.name for row in fields(Recipe))


def changed(recipe: Recipe, **values: Any) -> Recipe:
    """Return a copy of a recipe with the fields in `values` replaced."""
    return replace(recipe, **values)


def round_to(values: F64, encoding: str) -> F64:
    """Return values rounded to the float type `encoding`, as float64.

    16-bit types are reached through float32.
    """
    if encoding == "F64":
        return values
    narrow = np.ascontiguousarray(values, np.float32)
    if encoding == "F32":
        return narrow.astype(np.float64)
    return decode(encoding, encode(encoding, narrow)[""], narrow.shape).astype(np.float64)


def cut_to(values: F64, encoding: str) -> F64:
    """Return values truncated to BF16 or F16, toward zero, as float64."""
    nearest = round_to(values, encoding)
    plain = np.ascontiguousarray(nearest, np.float32)
    bits = np.frombuffer(encode(encoding, plain)[""], "<u2").reshape(plain.shape)
    over = np.abs(nearest) > np.abs(values.astype(np.float32))
    raw = (bits - over.astype(np.uint16)).astype("<u2").tobytes()
    return decode(encoding, raw, plain.shape).astype(np.float64)
