"""Answers what one training step did, and whether it is what its optimizer makes of it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aprfmt.base.shapes import matrix_shape
from aprfmt.causes import CAUSES
from aprfmt.causes.training.case import COARSE, StepGuess
from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.optimizers import CALLED, OPTIMIZERS, Recipe, changed, parse_recipe
from aprfmt.errors import UsageError
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import NamedCause, short_keys
from aprfmt.measure.proofs import Proof, cap_proof
from aprfmt.measure.verdicts import Level
from aprfmt.model import Model, open_model
from aprfmt.model.ledger import NotCompared
from aprfmt.model.renames import Rename
from aprfmt.tensors.stats import compute_stats
from aprfmt.tensors.view import View
from aprfmt.training import ComputedGradients
from aprfmt.training.computed import BatchNumbers as BatchNumbers
from aprfmt.training.computed import compute_gradients
from aprfmt.training.judge import CLIPS, Held, Judgement, judge_gradient, judge_update, share_given
from aprfmt.training.parameters import Parameter, pair_parameters
from aprfmt.training.report import ArrayFacts, Norms, StepReport, TensorStep, UpdateFacts
from aprfmt.training.saved_arrays import (
    OptimizerState,
    SavedArrays,
    hyper_of,
    open_gradients,
    open_state,
)
from aprfmt.training.update import CHUNK, Sums, pieces, same_bytes


def explain_step(
    model: Path | str,
    *,
    after: Path | str | None = None,
    adapter: Path | str | None = None,
    grads: Sequence[Path | str] = (),
    optimizer: str | None = None,
    optimizer_state: Path | str | None = None,
    batch: Path | str | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    computed: ComputedGradients | None = None,
    facts: BatchNumbers | None = None,
    trained_in: str | None = None,
    rename: Sequence[Rename] = (),
    arch: str | None = None,
    accept: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> StepReport:
    """Return what a step did to the parameters of a model, or of an adapter of it.

    `model` is the checkpoint before the step (with `adapter`: the base below it), `after` the one
    after it. `grads` are files of the gradients of the step, `optimizer` is the recipe
    (`adamw:lr=2e-4,wd=0.1,step=1`), `optimizer_state` what the trainer saved of it after the step.
    `batch` is the step's batch: its gradients are computed by torch on `device` in `dtype`, and the
    given ones held against them. `trained_in` is the arithmetic that made those, whose rounding a
    second pass measures (`bfloat16`; None: what the gradients and the weights show). `computed` are
    gradients from elsewhere, and `facts` the numbers of their batch, for what a factor comes of.
    Raises UsageError where there is nothing to compare, or where a file is of another model.
    """
    if after is None and not grads:
        raise UsageError(
            "nothing to explain; give --after CKPT, the checkpoint after the step, or --grads FILE"
        )
    with ExitStack() as stack:
        base = stack.enter_context(open_model(Path(model), arch=arch))
        before = base if adapter is None else stack.enter_context(open_model(Path(adapter)))
        later = None
        if after is not None:
            own = arch if adapter is None else None
            later = stack.enter_context(open_model(Path(after), arch=own))
        found = pair_parameters(before, later, None if adapter is None else base)
        given = None
        if grads:
            paths = [Path(each) for each in grads]
            given = open_gradients(paths, found.rows, before, stack, rename)
        state = None
        if optimizer_state is not None:
            path = Path(optimizer_state)
            state = open_state(path, found.rows, before, stack, rename)
        if batch is not None:
            own_adapter = None if adapter is None else Path(adapter)
            computed, facts = compute_gradients(
                base,
                Path(batch),
                adapter=own_adapter,
                device=device,
                dtype=dtype,
                trained_in=trained_in or _few_bits(given, found.rows),
            )
        step = _Step(
            before,
            found.rows,
            given,
            state,
            optimizer,
            progress,
            computed,
            facts or BatchNumbers(),
            trained_in,
        )
        return replace(
            step.report(later is not None),
            model=str(model),
            after=None if after is None else str(after),
            adapter=None if adapter is None else str(adapter),
            left=(*found.left, *step.left),
            accept=tuple(accept),
        )


def _few_bits(given: SavedArrays | None, parameters: Sequence[Parameter]) -> str | None:
    """Return bfloat16 where a given gradient holds no finer numbers, as autocast leaves them."""
    for parameter in parameters:
        reader = None if given is None or parameter.vector else given.reader(parameter)
        if reader is not None and reader.noise >= UNIT["F16"]:
            return "bfloat16"
    return None


@dataclass(frozen=True)
class _Compared:
    """A given gradient held against a computed one; `why` says what stood against it."""

    facts: ArrayFacts | None = None  # of the computed one
    distance: float | None = None
    found: Judgement | None = None
    why: str = ""


@dataclass
class _Step:
    """One step that is explained."""

    model: Model
    parameters: Sequence[Parameter]
    given: SavedArrays | None
    state: OptimizerState | None
    optimizer: str | None
    progress: Callable[[int, int], None] | None
    computed: ComputedGradients | None
    facts: BatchNumbers
    trained_in: str | None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.left: list[NotCompared] = []
        self.gradients: dict[str, ArrayFacts] = {}
        self.compared: dict[str, _Compared] = {}
        # Keys of updates that a state without step counts gives as that of before the step.
        self.made_again: set[str] = set()
        self.pairs = pairs_of(self.parameters)
        self.recipe = self._recipe()
        why = "it is of no parameter of the model"
        names = () if self.given is None else self.given.unplaced
        self.left += [NotCompared("gradient", name, "unreadable", why) for name in names]

    def report(self, updates: bool) -> StepReport:
        """Return the report; `updates`: there is a checkpoint after the step."""
        norm = self._measure_gradients()
        judged: dict[str, Judgement] = {}
        rows = []
        for number, parameter in enumerate(self.parameters, 1):
            row, found = self._explained(parameter, updates, norm)
            rows.append(row)
            if found is not None:
                judged[parameter.key] = found
            parameter.drop()
            if self.progress is not None:
                self.progress(number, len(self.parameters))
        stored = {row.key: row.names for row in self.parameters}
        causes = [
            *_nonfinite(rows, stored),
            *self._frozen_factors(rows, judged, stored),
            *self._causes(rows, judged, stored, norm),
            *_unknown(rows, judged, stored),
        ]
        self._remark(rows, judged)
        return StepReport(
            "",
            None,
            None,
            None if self.recipe is None else self.recipe.text(),
            tuple(rows),
            tuple(causes),
            norms=Norms(norm, self._computed_norm()),
            loss=None if self.computed is None else self.computed.loss,
            computed_on=None if self.computed is None else self.computed.how,
            notes=tuple(self.notes),
        )

    # --- what was said ---------------------------------------------------------------------

    def _recipe(self) -> Recipe | None:
        """Return the recipe, as it was given, or as the state's groups have it."""
        if self.optimizer is not None:
            return self._counted(parse_recipe(self.optimizer))
        if self.state is None:
            return None
        settings = _settings(self.state)
        if "lr" not in settings:
            raise UsageError(
                f"{self.state.path}: holds no settings of its optimizer (no param_groups with lr); "
                "give them with --optimizer adamw:lr=..."
            )
        name = "adamw" if self.state.second.placed else "sgd"
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        self.notes.append(f"settings of the optimizer are those of its state: {name}:{text}")
        return self._counted(parse_recipe(f"{name}:{text}"))

    def _counted(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the step's number, as the state has it."""
        if self.state is None:
            return recipe
        steps = self.state.steps
        if steps is None and recipe.step is None:
            raise UsageError(
                f"{self.state.path}: does not say how many steps were made; add step=N to "
                "--optimizer"
            )
        if steps is None or recipe.step is None:
            return changed(recipe, step=recipe.step if steps is None else steps)
        if recipe.step not in (steps, steps + 1):
            raise UsageError(
                f"{self.state.path}: is of step {steps}; expected that of step {recipe.step}, or "
                f"of {recipe.step - 1} before it"
            )
        return recipe

    def _recipe_of(self, parameter: Parameter) -> Recipe:
        """Return the recipe of a parameter: that of its group, where the state says which it is.

        What was given with --optimizer is for all of them.
        """
        assert self.recipe is not None
        if self.optimizer is not None or self.state is None:
            return self.recipe
        found = self.state.group_of(parameter.names[0])
        values = {
            field: float(found[name])
            for name, field in (("lr", "lr"), ("weight_decay", "wd"))
            if isinstance(found.get(name), int | float)
        }
        if "wd" in values:
            values["decay_on"] = "all"  # type: ignore[assignment]
        return changed(self.recipe, **values)

    def _held(self, parameter: Parameter, norm: float | None) -> Held:
        """Return what the optimizer had for a parameter."""
        gradient = None if self.given is None else self.given.reader(parameter)
        others = {}
        facts = self.gradients.get(parameter.key)
        if norm is not None and facts is not None:
            others = {"norm": norm, "own_norm": facts.norm}
        if self.state is None or self.recipe is None or self.recipe.step is None:
            return Held(gradient, others=others, idle=self._idle(parameter.key))
        first, second = (kept.reader(parameter) for kept in (self.state.first, self.state.second))
        steps = self.recipe.step if self.state.steps is None else self.state.steps
        return Held(gradient, first, second, steps, self._has_state_after(), others)

    def _judge_update(self, parameter: Parameter, recipe: Recipe, held: Held) -> Judgement:
        """Return the verdict on an update; a state that counts no steps may be that of before."""
        found = judge_update(parameter, recipe, held)
        counted = self.state is None or self.state.steps is not None
        if found.verdict != "differs" or counted or held.gradient is None or not held.after:
            return found
        before = replace(held, step=held.step - 1, after=False)
        other = judge_update(parameter, recipe, before)
        if other.verdict != "agrees":
            return found
        self.made_again.add(parameter.key)
        return other

    def _idle(self, key: str) -> bool:
        """Return whether a parameter is A of a pair whose B is zero before the step.

        The gradient of A is B times something, that of B is A times something.
        """
        other = self.pairs.get(key)
        return key.endswith(".lora_a") and other is not None and is_zero(other.before)

    # --- one parameter ---------------------------------------------------------------------

    def _measure_gradients(self) -> float | None:
        """Return the norm over all given gradients; keep the facts of each, and its verdict."""
        for parameter in self.parameters:
            place = None if self.given is None else self.given.placed.get(parameter.key)
            if self.given is not None and place is not None:
                self.gradients[parameter.key] = facts_of(self.given.values(parameter, place))
            if self.computed is not None:
                self.compared[parameter.key] = self._compared(parameter, self.computed)
        if self.given is None:
            return None
        norm = float(np.sqrt(sum(row.norm**2 for row in self.gradients.values())))
        self._accept_clipping(norm)
        return norm

    def _accept_clipping(self, norm: float) -> None:
        """Take gradients for right that are the computed ones, clipped to a norm that is usual."""
        held = [one.found for one in self.compared.values() if one.found is not None]
        before = self._computed_norm()
        bounds = (
            *CLIPS,
            *(() if self.recipe is None or not self.recipe.clip else (self.recipe.clip,)),
        )
        bound = next((each for each in bounds if abs(norm - each) <= 1e-3 * each), None)
        if bound is None or before is None or norm >= before or not held:
            return
        causes = [{guess.cause for guess in one.guesses} for one in held]
        if not all("gradient_factor" in each for each in causes):
            return
        for key, one in self.compared.items():
            if one.found is not None:
                agreed = Judgement("agrees", whole=True)
                self.compared[key] = replace(one, found=agreed)
        self.notes.append(
            f"the gradients are those of after clipping to the norm {bound:g}; it was {before:.4g}"
        )

    def _explained(
        self, parameter: Parameter, updates: bool, norm: float | None
    ) -> tuple[TensorStep, Judgement | None]:
        """Return what the step did to one parameter, and the verdict on its update."""
        before = parameter.before
        paired = updates and parameter.after is not None
        facts, size = None, None
        if paired and same_bytes(parameter):
            facts = UpdateFacts(int(np.prod(before.shape)), 0, 0, 0.0, 0.0)
        elif paired:
            sums = Sums()
            for _, _, values, after in pieces(before, parameter.after):
                assert after is not None
                sums.add(values, after, before.encoding)
            facts, size = sums.facts(), sums.weight**0.5
        gradient = self.gradients.get(parameter.key)
        row = TensorStep(
            parameter.key,
            parameter.names,
            before.shape,
            before.encoding,
            size,
            gradient,
            update=facts,
        )
        one = self.compared.get(parameter.key, _Compared())
        wrong = one.found
        row = replace(row, computed=one.facts, distance=one.distance, why=one.why)
        if wrong is not None:
            row = replace(row, verdict=wrong.verdict, why=wrong.why)
        if gradient is not None and gradient.nonfinite:
            why = f"its gradient holds {gradient.nonfinite} NaN or infinite numbers"
            return replace(row, verdict="differs", why=why), None
        if not paired:
            why = row.why or "no batch says its gradient, and no checkpoint is of after the step"
            return replace(row, why=why if row.verdict == "not compared" else row.why), wrong
        if self.recipe is None:
            if row.verdict == "differs":
                return row, wrong
            why = row.why or "no --optimizer says what the step was to do"
            return replace(row, verdict="not compared", why=why), wrong
        recipe = self._recipe_of(parameter)
        found = self._judge_update(parameter, recipe, self._held(parameter, norm))
        assert row.update is not None
        update = replace(row.update, step=found.step, decay=found.decay, arrived=found.arrived)
        row = replace(row, update=update)
        if row.verdict == "differs" and found.verdict != "differs":
            return row, wrong
        if one.why and found.verdict == "agrees":  # the gradient could not be compared
            return replace(row, verdict="not compared"), found
        guesses = (*(() if wrong is None else wrong.guesses), *found.guesses)
        row = replace(row, verdict=found.verdict, why=found.why)
        return row, replace(found, guesses=guesses)

    def _compared(self, parameter: Parameter, computed: ComputedGradients) -> "_Compared":
        """Return a parameter's given gradient held against the computed one."""
        key = parameter.key
        if key not in computed.keys:
            return _Compared(why="no gradient of it was computed here")
        values = computed.gradient(key)
        found = _Compared(facts_of(values), why="no gradient of it was given")
        place = None if self.given is None else self.given.placed.get(key)
        if self.given is None or place is None:
            return found
        rows = matrix_shape(parameter.before.shape)
        given = self.given.values(parameter, place).astype(np.float64).reshape(rows)
        if not np.isfinite(given).all():
            return replace(found, why="")
        noise = self.given.reader(parameter)
        coarse = self.trained_in in ("bfloat16", "float16") or parameter.before.encoding in COARSE
        coarse = coarse or (noise is not None and noise.noise >= UNIT["F16"])
        case = GradientCase(
            key,
            given,
            values.astype(np.float64).reshape(rows),
            coarse,
            self._sizes(),
            self.facts.counts,
            self.facts.tokens,
        )
        judged = judge_gradient(case, computed.rounding(key))
        nothing = judged.verdict == "agrees" and case.distance > 1  # rounding of zero on both sides
        return _Compared(found.facts, None if nothing else case.distance, judged)

    def _computed_norm(self) -> float | None:
        """Return the norm over all computed gradients, None without any."""
        known = [one.facts.norm for one in self.compared.values() if one.facts is not None]
        return float(np.sqrt(sum(each**2 for each in known))) if known else None

    def _sizes(self) -> dict[str, int]:
        """Return the hyperparameters that cut rows into heads and experts."""
        hyper = hyper_of(self.model)
        names = ("n_heads", "n_kv_heads", "n_experts", "tied_embeddings")
        return {name: int(hyper[name]) for name in names if isinstance(hyper.get(name), int)}

    def _causes(
        self,
        rows: list[TensorStep],
        judged: Mapping[str, Judgement],
        stored: Mapping[str, Sequence[str]],
        norm: float | None,
    ) -> Iterator[NamedCause]:
        """Yield a cause for each mistake, confirmed on all elements; `rows` then say it too."""
        known = {row.key: row for row in self.parameters}
        at = {row.key: number for number, row in enumerate(rows)}
        for one, also in _statements(judged):
            given = every = 0.0
            for key in one.keys:
                guess = next(
                    each
                    for each in judged[key].guesses
                    if (each.cause, each.says) == (one.cause, one.says)
                )
                share, size = 1.0, float(np.prod(known[key].before.shape))
                if isinstance(guess, StepGuess) and not judged[key].whole:
                    held = self._held(known[key], norm)
                    share = share_given(known[key], guess, held, judged[key].signs)
                    known[key].drop()
                given, every = given + share * size, every + size
                rows[at[key]] = replace(rows[at[key]], why=one.says)
            share = given / max(1.0, every)
            # An element says one digit at least: whether it moved as the mistake would move it.
            proof = cap_proof(Proof(every, share, one.free, 1.0), CAUSES[one.cause].most)
            text = one.says + (f" (as well given by {', '.join(also)})" if also else "")
            largest = _largest(rows, one.keys)
            yield _named(one.cause, text, one.keys, stored, proof, size=largest, also=also)

    def _frozen_factors(
        self,
        rows: list[TensorStep],
        judged: Mapping[str, Judgement],
        stored: Mapping[str, Sequence[str]],
    ) -> Iterator[NamedCause]:
        """Yield factors of LoRA pairs that did not move where the others say that they should."""
        moved = {row.key: bool(row.update and row.update.moved) for row in rows if row.update}
        moved = {key: moves for key, moves in moved.items() if key in self.pairs}
        some = {end for key, moves in moved.items() if moves for end in [key[-7:]]}
        half, whole = [], []
        for key, moves in moved.items():
            other = self.pairs[key].key
            known = key in judged and judged[key].guesses
            if moves or other not in moved or known:
                continue
            if moved[other]:
                # A beside a B of zero has no gradient. Where no A moves, that may be meant so.
                if not self._idle(key) and (key.endswith(".lora_b") or ".lora_a" in some):
                    half.append(key)
            elif some:
                whole.append(key)
        beside = Proof(len(half), 1.0, len(half), 0.0)  # found on the factors that it speaks of
        for cause, keys, says, proof in (
            ("adapter_half_frozen", half, "did not move, and the other factor did", beside),
            ("adapter_frozen", whole, "neither factor moved, and those of other pairs did", None),
        ):
            if keys:
                at = {row.key: number for number, row in enumerate(rows)}
                for key in keys:
                    rows[at[key]] = replace(rows[at[key]], verdict="differs", why=says)
                yield _named(cause, says, keys, stored, proof)

    def _has_state_after(self) -> bool:
        """Return whether the state that was given is the one after the step."""
        if self.state is None or self.recipe is None or self.recipe.step is None:
            return False
        return self.state.steps in (None, self.recipe.step)

    def _remark(self, rows: Sequence[TensorStep], judged: Mapping[str, Judgement]) -> None:
        """Note what was found and is no fault; what the type hides was not compared."""
        hidden = [key for key, one in judged.items() if one.verdict == "agrees" and not one.shows]
        if hidden:
            kinds = {row.key: row.encoding for row in rows}
            kind = Counter(kinds[key] for key in hidden).most_common(1)[0][0]
            self.left += [
                NotCompared("step", key, "no counterpart", f"smaller than {kind} shows")
                for key in hidden
            ]
        signs = [key for key, one in judged.items() if one.verdict == "agrees" and one.signs]
        if signs:
            why = "no gradient was given: sizes are compared, not signs"
            self.left += [NotCompared("direction", key, "no counterpart", why) for key in signs]
        if self.given is not None and self.computed is None and self._has_state_after():
            why = "the optimizer's state after the step says what it was; --batch compares them"
            self.left += [
                NotCompared("gradient", key, "no counterpart", why)
                for key, one in judged.items()
                if one.verdict == "agrees"
                and key in self.given.placed
                and key not in self.made_again
            ]
        every = [key for key, one in judged.items() if one.decays_all]
        if every:
            self.notes.append(
                f"norms and biases decay, as all weights do: {short_keys(every)} "
                "(decay_on=matrices says that they should not)"
            )
        bounds = {one.clipped for one in judged.values() if one.clipped is not None}
        for bound in sorted(bounds):
            self.notes.append(f"the gradients given were clipped to the norm {bound:g} in the step")


def pairs_of(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """Return the other factor of each factor of a LoRA pair, by key."""
    known = {row.key: row for row in parameters}
    found = {}
    for key in known:
        for end, other in ((".lora_a", ".lora_b"), (".lora_b", ".lora_a")):
            partner = key.removesuffix(end) + other
            if key.endswith(end) and partner in known:
                found[key] = known[partner]
    return found


def is_zero(view: View) -> bool:
    """Say whether a weight is zero in every element."""
    return not any(np.any(values) for _, _, values in view.chunks(CHUNK))


def _settings(state: OptimizerState) -> dict[str, float]:
    """Return the settings of a state's groups by our names; the decay is the largest of all."""
    found: dict[str, float] = {}
    for group in state.groups:
        for name, value in group.items():
            if name == "betas" and isinstance(value, list) and len(value) == 2:
                found["b1"], found["b2"] = (float(each) for each in value)
            elif name in CALLED and isinstance(value, int | float) and value is not False:
                field = CALLED[name]
                held = found.get(field, 0.0)
                found[field] = max(held, float(value)) if field == "wd" else float(value)
    known = (
        {*OPTIMIZERS["adamw"].settings} if state.second.placed else {*OPTIMIZERS["sgd"].settings}
    )
    return {name: value for name, value in found.items() if name in {"lr", "wd", *known} and value}


def facts_of(values: "np.ndarray[tuple[int, ...], np.dtype[np.floating]]") -> ArrayFacts:
    """Return the size of an array and of its numbers."""
    found = compute_stats(values)
    return ArrayFacts(found.l2 or 0.0, found.absmax or 0.0, found.zeros, found.nan + found.inf)


# --- causes -------------------------------------------------------------------------------------


def _named(
    cause: str,
    says: str,
    keys: Sequence[str],
    stored: Mapping[str, Sequence[str]],
    proof: Proof | None,
    *,
    size: float | None = None,
    also: tuple[str, ...] = (),
) -> NamedCause:
    """Return a cause of these parameters; `size` is the largest update, relative to the weight."""
    level: Level = CAUSES[cause].level if cause else "update"
    text = f"{short_keys(keys)} - {says}"
    places = tuple(keys)
    found = Finding(
        cause, text, level, "bug", places, True, residual_before=size, also=also, proof=proof
    )
    return found.to_named_cause({key: tuple(names) for key, names in stored.items()})


def _nonfinite(
    rows: Sequence[TensorStep], stored: Mapping[str, Sequence[str]]
) -> Iterator[NamedCause]:
    """Yield the cause of NaN or infinite numbers, in weights or in gradients."""
    for what, keys in (
        ("the weight after the step", [r.key for r in rows if r.update and r.update.nonfinite]),
        ("the gradient", [r.key for r in rows if r.gradient and r.gradient.nonfinite]),
    ):
        if keys:
            yield _named("nonfinite", f"{what} holds NaN or infinite numbers", keys, stored, None)


@dataclass(frozen=True)
class _Statement:
    """One mistake and the parameters that it gives."""

    cause: str
    says: str
    free: int
    keys: tuple[str, ...]


def _statements(judged: Mapping[str, Judgement]) -> list[tuple[_Statement, tuple[str, ...]]]:
    """Return as few mistakes as give the most parameters, each with others that give the same.

    What gives more parameters comes first, then what fits no number.
    """
    left = {key: one for key, one in judged.items() if one.guesses}
    found = []
    while left:
        groups: dict[tuple[str, str], _Statement] = {}
        for key, one in left.items():
            for guess in one.guesses:
                held = groups.get((guess.cause, guess.says))
                keys = (*held.keys, key) if held else (key,)
                made = _Statement(guess.cause, guess.says, guess.free, keys)
                groups[guess.cause, guess.says] = made
        best = max(groups.values(), key=lambda row: (len(row.keys), -row.free))
        also = [
            row.cause
            for row in groups.values()
            if row.keys == best.keys and row.cause != best.cause and row.free <= best.free
        ]
        found.append((best, tuple(dict.fromkeys(also))))
        left = {key: one for key, one in left.items() if key not in best.keys}
    return found


def _unknown(
    rows: Sequence[TensorStep], judged: Mapping[str, Judgement], stored: Mapping[str, Sequence[str]]
) -> Iterator[NamedCause]:
    """Yield one entry for all updates that nothing explains."""
    keys = [
        row.key
        for row in rows
        if (one := judged.get(row.key)) is not None
        and one.verdict == "differs"
        and not one.guesses
        and not (row.update and row.update.nonfinite)
    ]
    if keys:
        says = f"what happened is not known: {judged[keys[0]].why}"
        yield _named("", says, keys, stored, None, size=_largest(rows, keys))


def _largest(rows: Sequence[TensorStep], keys: Collection[str]) -> float | None:
    """Return the largest update of some parameters, relative to the weight."""
    sizes = [
        row.update.norm / row.norm for row in rows if row.key in keys and row.update and row.norm
    ]
    return max(sizes, default=None)
