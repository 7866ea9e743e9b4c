"""`aprfmt.trace`: run a model and record values at its capture points."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from aprfmt.base.sequences import listed
from aprfmt.errors import UsageError
from aprfmt.inference.capture import select_points
from aprfmt.inference.forward import check_tokens
from aprfmt.inference.identity import trace_identity
from aprfmt.inference.running import Run, make_request, open_run
from aprfmt.inference.trace import KeptValues, Positions, Trace
from aprfmt.model import Model


class TraceOptions(TypedDict, total=False):
    """The keyword arguments of `aprfmt.trace`."""

    prompt: str | None
    ids: Sequence[int] | None
    points: Sequence[str]
    layers: Sequence[int] | None
    positions: Positions
    device: str | None
    backend: str | None
    dtype: str | None
    deterministic: bool
    threads: int | None
    memory: int | None
    allow_missing: Sequence[str]


def trace(
    model: Path | str,
    *,
    prompt: str | None = None,
    ids: Sequence[int] | None = None,
    points: Sequence[str] = ("all",),
    layers: Sequence[int] | None = None,
    positions: Positions = "all",
    device: str | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
    threads: int | None = None,
    memory: int | None = None,
    allow_missing: Sequence[str] = (),
) -> Trace:
    """Run tokens through MODEL[@RUN] and return every wanted point with its values.

    `points` are names of points, of slots (several points joined, as `qkv`) or of `apr`'s stages,
    or "all"; `layers` None is every layer. Exactly one of `prompt` and `ids` gives the tokens.
    `Trace.run` has the hashes of the model's files and of the token ids, as a saved trace has.
    `allow_missing` are patterns of required tensors that may be missing. Raises UsageError for a
    point, layer or token that the model does not have, BackendUnavailableError for a device that is
    not there.
    """
    request = make_request(
        model,
        device,
        backend,
        dtype,
        deterministic=deterministic,
        threads=threads,
        memory=memory,
        allow_missing=allow_missing,
        positions=positions,
        logits_rows="last",
        hashes=True,
    )
    if request.choice.is_engine:
        engine = request.choice.backend
        raise UsageError(f"{engine}: is a foreign engine; trace it with aprfmt trace")
    with open_run(request) as run:
        tokens = _request_tokens(run.model, prompt, ids)
        wanted = _wanted_keys(run, listed(points), layers)
        facts = {"prompt": prompt, **trace_identity(run.model, tokens)}
        asked = replace(request, ids=tuple(tokens), wanted=wanted)
        with run.trace(asked, place=KeptValues(), stop=True, facts=facts) as found:
            return found


def _request_tokens(model: Model, prompt: str | None, ids: Sequence[int] | None) -> list[int]:
    """Return the tokens of a prompt, or the given ones; UsageError unless exactly one is given."""
    if prompt is not None and ids is None:
        return list(model.tokenizer.encode(prompt))
    if ids is not None and prompt is None:
        return [int(i) for i in check_tokens(ids, int(model.hyper["vocab_size"]))]
    raise UsageError("give one of prompt and ids")


def _wanted_keys(run: Run, points: Sequence[str], layers: Sequence[int] | None) -> list[str]:
    """Return the keys of these points in these layers (None: all), in execution order.

    Raises UsageError for a point or layer that the model does not have.
    """
    chosen = set(select_points(points))
    count = int(run.model.hyper["n_layers"])
    wrong = [layer for layer in layers or () if not 0 <= layer < count]
    if wrong:
        raise UsageError(f"layer {wrong[0]}: the model has layers 0 to {count - 1}")
    return [
        key
        for key, instance in run.points.items()
        if instance.point.name in chosen
        and (layers is None or instance.layer < 0 or instance.layer in layers)
    ]
