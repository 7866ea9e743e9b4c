"""`aprfmt.trace`: run a model and keep what passes its capture points."""

from collections.abc import Sequence
from pathlib import Path

from aprfmt.errors import UsageError
from aprfmt.inference.capture import select_points
from aprfmt.inference.device import choose, parse_run, split_run
from aprfmt.inference.forward import check_tokens
from aprfmt.inference.identity import identity
from aprfmt.inference.session import Session
from aprfmt.inference.trace import Kept, Positions, Trace
from aprfmt.model import open_model


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

    `points` are names of points, slots or stages, or "all"; `layers` None is every layer. Exactly
    one of `prompt` and `ids` gives the tokens. `Trace.run` has the hashes of the model's files and
    of the token ids that a saved trace has. `allow_missing` are patterns of required tensors that
    may be missing. Raises UsageError for a point, layer or token that is
    none, BackendUnavailableError for a device that is not there.
    """
    text, named = split_run(str(model))
    if named is not None and (device or backend or dtype):
        raise UsageError(f"@{named} names the run already; leave device, backend and dtype out")
    choice = choose(device, backend, dtype) if named is None else parse_run(named)
    if choice.is_engine:
        raise UsageError(f"{choice.backend}: is a foreign engine; trace it with aprfmt trace")
    arithmetic = choice.open(deterministic=deterministic, threads=threads)
    with (
        open_model(text, allow_missing=allow_missing) as opened,
        Session.of(opened, arithmetic, memory=memory) as session,
    ):
        if prompt is not None and ids is None:
            tokens = list(opened.tokenizer.encode(prompt))
        elif ids is not None and prompt is None:
            tokens = [int(i) for i in check_tokens(ids, int(opened.hyper["vocab_size"]))]
        else:
            raise UsageError("give one of prompt and ids")
        chosen = set(select_points(points))
        count = int(opened.hyper["n_layers"])
        wrong = [layer for layer in layers or () if not 0 <= layer < count]
        if wrong:
            raise UsageError(f"layer {wrong[0]}: the model has layers 0 to {count - 1}")
        wanted = [
            key
            for key, instance in session.points.items()
            if instance.point.name in chosen
            and (layers is None or instance.layer < 0 or instance.layer in layers)
        ]
        kept = Kept()
        return session.trace(
            tokens, wanted, positions=positions, keep=kept.keep, fetch=kept.fetch, hashes=True,
            run={"prompt": prompt, "model": str(opened.path), **identity(opened, tokens)},
        )  # fmt: skip
