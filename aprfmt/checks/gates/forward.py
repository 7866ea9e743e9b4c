"""Gates on one forward pass: its logits, its loss, and that calls do not affect each other."""

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.encodings import find_encoding
from aprfmt.base.outcome import Check, check
from aprfmt.checks import bounds
from aprfmt.checks.gates.golden import TEXT, GoldenText
from aprfmt.checks.gates.model_under_test import ModelUnderTest
from aprfmt.checks.records import Measure, NotRun, Result
from aprfmt.inference import evaluation
from aprfmt.inference.evaluation import Sample, plan_windows
from aprfmt.inference.logits_checks import check_last_row
from aprfmt.inference.loss import MeanLoss, assess_loss, count_leading, is_in_bits, window_size
from aprfmt.inference.session import Session
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.tolerances import Tolerance, run_tolerance

Numbers = NDArray[Any]
STEPS = 6  # tokens run one by one


def check_logits(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks pass if a short text's logits are finite and not flat.

    `measures` has the spread and the peak of the last row's logits.
    """
    rows = subject.session.logits(subject.probe)
    last = rows[-1].astype(np.float64)
    std = float(last.std())
    probe = zlib.crc32(np.asarray(subject.probe, "<i8").tobytes()) & 0xFFFF
    measures = {
        "logits probe": Measure(
            float(probe), "sum over the token ids", 0, "absolute",
            "logits of other tokens are others; give the --golden file of the baseline",
        ),
        "logits std": Measure(std, "logits", 0.02, "relative", "rounding moves it far less"),
        "logits peak": Measure(
            float((last.max() - last.mean()) / std) if std else 0.0,
            "(max - mean)/std", 0.02, "relative", "rounding moves it far less",
        ),
    }  # fmt: skip
    return Result(
        checks=check_last_row(rows), measures=measures, details={"argmax": int(last.argmax())}
    )


# --- loss -------------------------------------------------------------------------------------


def check_loss(subject: ModelUnderTest) -> Result:
    """Return a Result with checks of each golden text's loss in nats, bounded on both sides.

    Without golden texts a built-in one is used. `measures` has the losses.
    """
    kind: Literal["trained", "random"]
    kind = "random" if subject.request.random_weights else "trained"
    texts = subject.golden.texts or (GoldenText("harbour", TEXT),)
    checks: list[Check] = []
    measures: dict[str, Measure] = {}
    for text in texts:
        ids = _text_ids(subject, text)
        leading = () if subject.tokenizer is None else subject.tokenizer.prefix_ids
        found, shifts = measure_loss(subject.session, ids, text.name, count_leading(ids, leading))
        allowed = text.tolerance if text.tolerance is not None else _loss_tolerance(subject)
        checks += judge_loss(text, found, shifts, kind, allowed)
        measures[f"loss {text.name}"] = Measure(
            found.nats, "nats per token", 0.01, "absolute", "rounding moves a loss far less"
        )
    return Result(checks=checks, measures=measures)


def _text_ids(subject: ModelUnderTest, text: GoldenText) -> list[int]:
    """Return the token ids of a golden text, from the tokenizer or from the golden file.

    An untrained model without either gets the probe's ids. Raises NotRun where there are none.
    """
    if subject.tokenizer is not None and text.text is not None:
        return subject.tokenizer.encode(text.text)
    if text.ids is not None:
        return list(text.ids)
    if subject.request.random_weights:
        return subject.probe
    raise NotRun("the model carries no tokenizer, and no golden file gives token ids")


def _loss_tolerance(subject: ModelUnderTest) -> float:
    """Return how many nats a golden loss may be off; more for quantized weights or half floats."""
    plain = all(find_encoding(tensor.encoding).block_size == 1 for tensor in subject.model.values())
    exact = subject.session.backend.dtype in ("float32", "float64")
    return bounds.LOSS_GIVEN if plain and exact else bounds.LOSS_QUANTIZED


def measure_loss(
    session: Session, ids: Sequence[int], where: str, prefix: int
) -> tuple[MeanLoss, list[float]]:
    """Return (the loss of a text, [mean loss against the token itself, the next, the one after]).

    If the first or the last of the three is lower than that against the next token, labels are
    shifted. All three are over the same rows. The first `prefix` tokens are put before every
    window. `where` names the text.
    """
    sample = Sample(where, ids, prefix=prefix)
    planned, _ = plan_windows([sample], window_size(int(session.hp["context_length"])))
    found = evaluation.score_windows(session, planned, () if planned else (where,), shifts=True)
    return found.loss, list(found.shifts)


def judge_loss(
    text: GoldenText,
    found: MeanLoss,
    shifts: Sequence[float],
    kind: Literal["trained", "random"],
    allowed: float,
) -> list[Check]:
    """Return the checks of one text's loss; a golden loss replaces the bound on good losses.

    `found` is the loss that was measured, `shifts` are the losses against the token itself, the
    next, and the one after. `allowed` is the distance allowed from a golden loss, in nats. `kind`
    says whether the model is trained or random.
    """
    checks = assess_loss(found, kind, text.name)
    if text.nats is not None and found.tokens:
        uniform, off = found.uniform_loss, abs(found.nats - text.nats)
        bits = off > allowed and is_in_bits(text.nats, found.nats)
        checks = [each for each in checks if each.name != "loss-plausible"]
        checks.append(
            check(
                "loss-stated-in-nats",
                text.nats <= uniform and not bits,
                f"{text.nats:.6g} is stated"
                + (f", {text.nats / found.nats:.4f} times the measured nats" if bits else ""),
                f"at most ln({found.vocab}) = {uniform:.4f}, and not 1.4427 times what is "
                "measured: that is a loss in bits",
                "state it in nats",
                text.name,
            )
        )
        checks.append(
            check(
                "loss-as-stated",
                off <= allowed,
                f"{found.nats:.6f} nats",
                f"{text.nats:.6f} nats, off by at most {allowed:g}",
                "compare the model with the one the golden file was made with",
                text.name,
            )
        )
    if kind == "trained" and found.tokens > 2:
        best = int(np.argmin(shifts))
        checks.append(
            check(
                "loss-labels-shifted",
                best == 1,
                "nats against the token itself, the next, the one after: "
                + ", ".join(f"{each:.4f}" for each in shifts),
                "lowest against the next token",
                "labels must be the inputs shifted by one",
                text.name,
            )
        )
    return checks


# --- state ------------------------------------------------------------------------------------


def check_state(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks pass if equal calls give equal bits, whatever ran before.

    The calls are made after other calls in one session, and in a fresh one. Steps through the
    key-value cache must agree with a whole pass, and another prompt must give other logits. Raises
    NotRun for too few tokens or logits that are not finite.
    """
    session, ids = subject.session, subject.probe
    if len(ids) < 4:
        raise NotRun(f"the probe has {len(ids)} tokens; give a golden text of at least 4")
    cut = len(ids) // 2
    other = ids[cut:] + ids[:1]
    row = session.prefill(ids)
    if not np.isfinite(row).all():
        raise NotRun("the logits are not finite; see the gate logits")
    first = float_bits(row[-1])
    far = rel_l2(session.prefill(other)[-1], row[-1])
    again = float_bits(session.prefill(ids)[-1])
    for token in list(ids[:STEPS]):
        session.step(token)
    after_steps = float_bits(session.prefill(ids)[-1])
    session.logits(other)
    after_whole = float_bits(session.prefill(ids)[-1])
    with subject.open_session(subject.model) as another:
        fresh = float_bits(another.prefill(ids)[-1])
    repeats = [
        ("another prompt", again), ("steps of generation", after_steps),
        ("a whole pass", after_whole), ("in a fresh session", fresh),
    ]  # fmt: skip
    checks = [
        check(
            f"same-after-{name.replace(' ', '-')}",
            bool(np.array_equal(found, first)),
            _difference_text(found, first),
            "the bits of the first call",
            "something is carried from call to call: a cache, a buffer, a setting",
        )
        for name, found in repeats
    ]
    least = _step_tolerance(session).rel_l2  # less is rounding
    checks.append(
        check(
            "input-matters",
            far > least,
            f"relL2 {far:.3g} between two prompts",
            f"more than {least:g}",
            "nothing is computed from the tokens",
        )
    )
    checks.append(_check_steps(session, ids))
    return Result(checks=checks)


def float_bits(values: Numbers) -> Numbers:
    """Return an array's bits as unsigned integers, so that NaN compares by its bits."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _difference_text(a: Numbers, b: Numbers) -> str:
    """Return how many logits of two equally shaped arrays differ, in words."""
    count = int(np.count_nonzero(a != b))
    return f"{count} of {a.size} logits differ" if count else "equal bits"


def _step_tolerance(session: Session) -> Tolerance:
    """Return the tolerance of the difference between two passes in a session's dtype."""
    dtype = session.backend.dtype
    return run_tolerance(dtype, dtype, moe=bool(session.hp["n_experts"]))


def _check_steps(session: Session, ids: Sequence[int]) -> Check:
    """Return the check that steps with the key-value cache agree with one pass over all tokens."""
    whole = session.prefill(ids)[-1]
    session.prefill(ids[:-STEPS] or ids[:1])
    for token in ids[max(len(ids) - STEPS, 1) :]:
        stepped = session.step(token)
    distance, bound = rel_l2(stepped, whole), _step_tolerance(session)
    return check(
        "steps-are-prefill",
        distance <= bound.rel_l2,
        f"relL2 {distance:.3g}",
        f"at most {bound.rel_l2:g} ({bound.reason})",
        "keys and values of earlier tokens are not what a whole pass gives",
    )
