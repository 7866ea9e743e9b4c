"""A reported loss: torch's cross-entropy of transformers' logits, with each mistake made in torch.

Seen red: labels not shifted in `_rows`, bits for nats in the right loss, padding run through the
model, a window's tolerance as wide as the others'.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import FormatError
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.batch import (
    Batch,
    ScoredSample,
    _align_labels,
    count_turn_ends,
    read_batch,
    score_batch,
)
from aprfmt.inference.reported_loss import (
    MISTAKES,
    TOO_MANY,
    LossVerdict,
    explain_loss,
    label_losses,
)
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.cli.run import aprfmt

torch = pytest.importorskip("torch")
tiny = pytest.importorskip("tests.models")

VOCAB, TOKENS = 97, 45
LENGTHS, PROMPTS = (45, 31, 37), (9, 6, 11)  # of each sample; the prompt is not scored
END = 20  # where the first sample has a token that ends turns


@dataclass(frozen=True)
class Made:
    """A batch on disk, its tensors, and transformers' logits of it."""

    folder: Path
    path: Path
    ids: Any
    labels: Any
    mask: Any
    logits: Any
    scored: list[ScoredSample]
    batch: Batch
    model: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("reported")
    model = tiny.save_tiny("qwen2", folder)
    random = np.random.default_rng(7)
    ids = random.integers(3, VOCAB, (len(LENGTHS), TOKENS))
    mask = np.arange(TOKENS) < np.array(LENGTHS)[:, None]
    ids[~mask] = 0
    labels = np.where(mask & (np.arange(TOKENS) >= np.array(PROMPTS)[:, None]), ids, -100)
    path = folder / "batch.npz"
    np.savez(path, input_ids=ids, labels=labels, attention_mask=mask.astype(np.int8))
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits.double()
    with open_model(str(folder)) as opened:
        batch = read_batch(path, VOCAB, {int(ids[0, END])})
        with Session.open(opened, NumpyBackend("cpu", "float32")) as session:
            scored = list(score_batch(batch, session))
    yield Made(
        folder,
        path,
        torch.tensor(ids),
        torch.tensor(labels),
        torch.tensor(mask),
        logits,
        scored,
        batch,
        model,
    )


def loss(made: Made, labels: Any, ahead: int = 1, reduction: str = "mean") -> Any:
    """Return torch's cross-entropy of row t against label t + ahead; -100 is left out."""
    rows = made.logits[:, : TOKENS - ahead].reshape(-1, VOCAB)
    return torch.nn.functional.cross_entropy(
        rows, labels[:, ahead:].reshape(-1), ignore_index=-100, reduction=reduction
    )


def cut(made: Made, tokens: int) -> Any:
    return torch.where(torch.arange(TOKENS) < tokens, made.labels, -100)


def first_left_out(made: Made) -> Any:
    """Return the labels without the first of each answer."""
    return torch.where(made.labels.roll(1, 1) >= 0, made.labels, -100)


def means(made: Made, *groups: tuple[int, ...]) -> list[float]:
    """Return torch's mean loss of each group of samples."""
    rows = torch.arange(len(LENGTHS))[:, None]
    return [
        float(loss(made, torch.where(sum(rows == i for i in group) > 0, made.labels, -100)))
        for group in groups
    ]


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def divided_by(made: Made, count: Callable[[int], int]) -> float:
    """Return torch's sum of the losses over count(number of labels)."""
    labels = int((made.labels[:, 1:] >= 0).sum())
    return float(loss(made, made.labels, reduction="sum")) / count(labels)


def smoothed(made: Made, share: float) -> float:
    """Return torch's mean loss of labels that are smoothed by a share."""
    rows = made.logits[:, :-1].reshape(-1, VOCAB)
    labels = made.labels[:, 1:].reshape(-1)
    return float(torch.nn.functional.cross_entropy(rows, labels, label_smoothing=share))


def totals(made: Made) -> Any:
    """Return the logarithm of the sum of the exponentials of the logits, of each scored row."""
    return made.logits[:, :-1].logsumexp(-1)[made.labels[:, 1:] >= 0]


# What scripts do wrong, in torch.
WRONG: dict[str, Callable[[Made], float]] = {
    "bits": lambda m: float(loss(m, m.labels)) / math.log(2),
    "perplexity": lambda m: math.exp(float(loss(m, m.labels))),
    "sum": lambda m: float(loss(m, m.labels, reduction="sum")),
    "sample_sum": lambda m: float(loss(m, m.labels, reduction="sum")) / len(LENGTHS),
    "sample_means": lambda m: average(means(m, (0,), (1,), (2,))),
    "accumulated_sum": lambda m: sum(means(m, (0, 1), (2,))),
    "group_means": lambda m: average(means(m, (0, 1), (2,))),
    "one_group": lambda m: means(m, (0, 1))[0],
    "ends_masked": lambda m: float(loss(m, torch.where(m.ids == m.ids[0, END], -100, m.labels))),
    "divided_twice": lambda m: float(loss(m, m.labels)) / int((m.labels[:, 1:] >= 0).sum()),
    "accumulation": lambda m: float(loss(m, m.labels)) / 8,
    "other_count": lambda m: divided_by(m, lambda labels: labels - len(LENGTHS)),
    "padding_counted": lambda m: float(loss(m, torch.where(m.mask, m.labels, m.ids))),
    "unshifted": lambda m: float(loss(m, m.labels, 0)),
    "shifted_twice": lambda m: float(loss(m, m.labels, 2)),
    "prompt_scored": lambda m: float(loss(m, torch.where(m.mask, m.ids, -100))),
    "window": lambda m: float(loss(m, cut(m, 24))),
    "labels_left_out": lambda m: float(loss(m, first_left_out(m))),
    "loss_scale": lambda m: float(loss(m, m.labels)) * 2.0**16,
    "labels_smoothed": lambda m: smoothed(m, 0.1),
    "z_loss_added": lambda m: float(loss(m, m.labels)) + 1e-4 * float((totals(m) ** 2).mean()),
    "no_labels": lambda m: float(loss(m, cut(m, 6))),  # the mean of nothing is NaN
}


def of_chunks(made: Made, size: int, last: bool, alone: str = "") -> list[float]:
    """Return the mean losses of chunks of torch's rows, flattened with the last column or not.

    They are of each sample or of columns if `alone` says so. Chunks without a label are NaN.
    """
    labels = torch.nn.functional.pad(made.labels[:, 1:], (0, 1), value=-100)
    stop = None if last else -1
    nats = torch.nn.functional.cross_entropy(
        made.logits.transpose(1, 2), labels.long(), reduction="none"
    ).masked_fill(labels < 0, math.nan)[:, :stop]
    rows = {"": nats.reshape(1, -1), "sample": nats, "columns": nats.T}[alone]
    return [float(x.nanmean()) for row in rows.split(1 if alone != "columns" else size)
            for x in (row.flatten().split(size) if alone != "columns" else [row])]  # fmt: skip


def there(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


# The mistake, words of it, and the loss: means of chunks of tokens joined wrongly.
CHUNKED: dict[str, tuple[str, str, Callable[[Made], float]]] = {
    "sum": ("accumulated_sum", "chunks of 8 rows of the flattened batch",
            lambda m: sum(there(of_chunks(m, 8, True)))),
    "sum, without the last column": ("accumulated_sum", "chunks of 16 rows of the flattened batch",
                                     lambda m: sum(there(of_chunks(m, 16, False)))),
    "of each sample": ("accumulated_sum", "chunks of 16 rows of each sample",
                       lambda m: sum(there(of_chunks(m, 16, True, "sample")))),
    "of columns": ("group_means", "chunks of 16 rows of the columns",
                   lambda m: average(there(of_chunks(m, 16, True, "columns")))),
    "mean, an empty one is 0": ("group_means", "of which 1 have no label and count as 0",
                                lambda m: sum(there(of_chunks(m, 5, True, "columns"))) / 9),
    "the last": ("one_group", "the last of chunks of 32 rows of the flattened batch",
                 lambda m: there(of_chunks(m, 32, True))[-1]),
}  # fmt: skip


@pytest.mark.parametrize("how", CHUNKED)
def test_chunks_of_tokens_joined_wrongly_are_named(how: str, made: Made) -> None:
    """Seen red: "unexplained"."""
    cause, words, make = CHUNKED[how]
    found = answer(made, make(made))
    assert found.distinct_mistakes == ((cause,),), found
    assert words in found.guesses[0].detail, found


@pytest.mark.parametrize("logits", [False, True])
def test_rows_scored_against_labels_of_another_place_are_named(
    logits: bool, made: Made, tmp_path: Path
) -> None:
    """Seen red: "unexplained"; with the two layouts exchanged."""
    arrays = {"ids": made.ids, "labels": made.labels, "mask": made.mask}
    if logits:
        arrays["logits"] = made.logits
    np.savez(tmp_path / "b.npz", **{key: each.numpy() for key, each in arrays.items()})
    batch = read_batch(tmp_path / "b.npz", VOCAB)
    right = made.labels[:, 1:].long()
    for words, rows, labels in (
        ("the rows are of [tokens, samples]", made.logits[:, :-1].transpose(0, 1), right),
        ("of [tokens, samples], and", made.logits[:, :-1], right.T),
        ("of the sample before", made.logits[:, :-1], right.roll(1, 0)),
        ("of the sample after", made.logits[:, :-1], right.roll(-1, 0)),
    ):
        flat = rows.reshape(-1, VOCAB), labels.reshape(-1)
        reported = float(torch.nn.functional.cross_entropy(*flat))
        with (
            open_model(str(made.folder)) as opened,
            Session.open(opened, NumpyBackend("cpu", "float32")) as session,
        ):
            held = None if logits else session
            found = explain_loss(batch, made.scored, reported, within=1e-5, session=held)
        assert found.distinct_mistakes == (("labels_elsewhere",),), found
        assert words in found.guesses[0].detail


def answer(made: Made, reported: float, **options: Any) -> LossVerdict:
    return explain_loss(made.batch, made.scored, reported, **options)


def test_the_loss_is_the_one_that_transformers_gives(made: Made) -> None:
    with torch.no_grad():
        theirs = float(made.model(made.ids, attention_mask=made.mask, labels=made.labels).loss)
    found = answer(made, theirs)
    assert found.says == "agrees" and not found.distinct_mistakes[0]
    assert found.right == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_is_named_alone(name: str, made: Made) -> None:
    reported = WRONG[name](made)
    found = answer(made, reported)
    assert found.says == "named", found
    assert found.distinct_mistakes == ((name,),)
    size = 0.0 if math.isnan(reported) else 10.0 ** math.floor(math.log10(reported))
    rounded = answer(made, float(f"{reported:.4g}"), digit=size * 0.5e-3)
    assert rounded.says != "agrees"
    assert (name,) in rounded.distinct_mistakes


ACCUMULATED: dict[str, tuple[str, Callable[[Made], float]]] = {
    "twice the loss": ("accumulated_sum", lambda m: 2 * float(loss(m, m.labels))),
    "six times": ("accumulated_sum", lambda m: 6 * float(loss(m, m.labels))),
    "each sample alone": ("accumulated_sum", lambda m: sum(means(m, (0,), (1,), (2,)))),
    "the first sample": ("one_group", lambda m: means(m, (0,))[0]),
    "the last micro-batch": ("one_group", lambda m: means(m, (2,))[0]),
    "sums averaged": ("sum", lambda m: float(loss(m, m.labels, reduction="sum")) / 2),
    "labels counted before the shift": (
        "padding_counted",
        lambda m: float(loss(m, m.ids, reduction="sum")) / m.ids.numel(),
    ),
}


@pytest.mark.parametrize("how", ACCUMULATED)
def test_micro_batches_joined_wrongly_are_named(how: str, made: Made, tmp_path: Path) -> None:
    cause, make = ACCUMULATED[how]
    batch, scored = made.batch, made.scored
    if cause == "padding_counted":  # every token is a label, the first too
        np.savez(tmp_path / "b.npz", ids=made.ids.numpy(), labels=made.ids.numpy())
        batch = read_batch(tmp_path / "b.npz", VOCAB)
        with (
            open_model(str(made.folder)) as opened,
            Session.open(opened, NumpyBackend("cpu", "float32")) as session,
        ):
            scored = list(score_batch(batch, session))
        assert batch.label_count == made.ids.numel() - len(LENGTHS)
    found = explain_loss(batch, scored, make(made))
    assert found.distinct_mistakes == ((cause,),), found
    if cause == "padding_counted":  # the labels are right: nothing is to be set to -100
        assert found.guesses[0].advice() == TOO_MANY


@pytest.mark.parametrize("samples", [4, 6, 9])
def test_ranks_and_micro_batches_of_larger_batches(samples: int, tmp_path: Path) -> None:
    """The means of torch's own split and of samples dealt in turn, over losses made up."""
    lengths = np.random.default_rng(samples).integers(3, 12, samples)
    mask = np.arange(12) < lengths[:, None]
    np.savez(tmp_path / "b.npz", ids=np.where(mask, 5, 0), mask=mask)
    batch = read_batch(tmp_path / "b.npz", VOCAB)
    nats = torch.tensor(np.random.default_rng(1).gamma(2.0, 1.0, (samples, 12)))
    nats *= 1 + torch.arange(samples)[:, None]  # so that the weights of samples count
    scored = [
        ScoredSample(each, each)
        for each in np.broadcast_to(nats.numpy()[:, None], (samples, 3, 12))
    ]
    last = torch.tensor(mask).roll(-1, 1)
    last[:, -1] = False
    for parts, ranks in (
        *((s, False) for s in (2, 3) if samples % s == 0),
        (3 if samples % 3 == 0 else 2, True),
    ):
        order = torch.arange(samples)
        groups = [order[i::parts] for i in range(parts)] if ranks else order.split(parts)
        each = [nats[group][last[group]].mean() for group in groups]
        found = explain_loss(batch, scored, float(sum(each) / len(each)))
        assert ("group_means",) in found.distinct_mistakes, (parts, ranks, found)
        found = explain_loss(batch, scored, float(sum(each)))
        assert ("accumulated_sum",) in found.distinct_mistakes, (parts, ranks, found)


EOS = 9
X = -100
# ids, labels, mask -> (ends of scored text, those that are labels, not known).
ENDS: dict[str, tuple[list[int], list[int] | None, list[int] | None, tuple[int, int, int]]] = {
    "scored": ([4, 5, 9, 6, 9, 0], [4, 5, 9, 6, 9, X], [1, 1, 1, 1, 1, 0], (2, 2, 0)),
    "masked by id": ([4, 5, 9, 6, 9, 9], [4, 5, X, 6, X, X], [1, 1, 1, 1, 1, 0], (2, 0, 0)),
    "one before": ([4, 5, 6, 7, 9, 0], [X, X, 6, 7, X, X], [1, 1, 1, 1, 1, 0], (1, 0, 0)),
    "shifted in the file": ([4, 5, 6, 7, 9, 0], [X, 6, 7, X, X, X], [1, 1, 1, 1, 1, 0], (1, 0, 0)),
    "behind the row": ([4, 5, 6, 7, 4, 3], [5, 6, 7, 4, 3, 9], None, (1, 1, 0)),
    "an answer cut off": ([4, 9, 6, 7, 8, 8], [X, X, X, 7, 8, 8], None, (0, 0, 0)),
    "the mask is made of the id": ([4, 5, 6, 7, 9, 9], [4, 5, 6, 7, X, X], [1, 1, 1, 1, 0, 0],
                                   (0, 0, 1)),
    "no mask, padded": ([4, 5, 6, 7, 9, 9], [4, 5, 6, 7, X, X], None, (0, 0, 1)),
    "no mask, one end": ([4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, X], None, (1, 0, 0)),
    "the second of two ends": ([4, 5, 9, 3, 9, 9], [4, 5, 9, 3, X, X], [1, 1, 1, 1, 1, 0],
                               (1, 1, 0)),
    "padding on the left": ([9, 9, 4, 5, 6, 9], [X, X, 4, 5, 6, X], [0, 0, 1, 1, 1, 1], (1, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_ends_of_turns_that_are_no_labels_are_counted(name: str, tmp_path: Path) -> None:
    ids, labels, mask, expected = ENDS[name]
    given = {"ids": ids, "labels": labels, "mask": mask}
    arrays: dict[str, Any] = {key: np.array(row) for key, row in given.items() if row}
    np.savez(tmp_path / "b.npz", **arrays)
    batch = read_batch(tmp_path / "b.npz", VOCAB, {EOS})
    found = [(one.places, one.scored, one.unknown) for one in count_turn_ends(batch)]
    assert found == ([expected] if any(expected) else [])


def test_the_command_says_that_no_end_is_scored(tmp_path: Path) -> None:
    aprfmt("demo", "--into", tmp_path / "m")
    ids = np.array([[1417, 362, 1535, 258, 1168, 1535, 1535], [612, 373, 1535] + [1535] * 4])
    mask = np.arange(7) < np.array([[6], [3]])
    for name, labels, outcome in (
        ("good", np.where(mask, ids, -100), "PASS"),
        ("bad", np.where(ids == 1535, -100, ids), "FAIL"),
    ):
        np.savez(tmp_path / f"{name}.npz", ids=ids, labels=labels, mask=mask)
        done = aprfmt("eval", tmp_path / "m", "--batch", tmp_path / f"{name}.npz", "--json")
        [check] = [row for row in done.json["gate"]["checks"] if row["name"] == "ends-scored"]
        assert check["outcome"] == outcome, check
        assert "1535 '<|im_end|>' ends a scored text 3 times" in check["found"]
        assert ("padding has the same id" in check["todo"]) == (outcome == "FAIL")


def test_the_table_is_tried_whole(made: Made) -> None:
    others = {"mask_ignored", "positions_continued", "labels_elsewhere"} | {
        cause for cause, _ in PACKED.values()
    }
    assert set(WRONG) | others == set(MISTAKES)


def test_padding_on_the_left_and_a_pass_without_the_mask(made: Made, tmp_path: Path) -> None:
    ids, labels, mask = (np.asarray(each).copy() for each in (made.ids, made.labels, made.mask))
    for i, length in enumerate(LENGTHS):
        for each in (ids, labels, mask):
            each[i] = np.roll(each[i], TOKENS - length)
    np.savez(tmp_path / "left.npz", ids=ids, labels=labels, mask=mask)
    batch = read_batch(tmp_path / "left.npz", VOCAB)
    with (
        open_model(str(made.folder)) as opened,
        Session.open(opened, NumpyBackend("cpu", "float32")) as session,
    ):
        scored = list(score_batch(batch, session))
    right = float(loss(made, made.labels))
    assert explain_loss(batch, scored, right).says == "agrees"
    with torch.no_grad():
        bare = float(made.model(torch.tensor(ids), labels=torch.tensor(labels)).loss)
    found = explain_loss(batch, scored, bare)
    assert found.says == "named" and found.distinct_mistakes == (("mask_ignored",),), found


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_the_share_of_smoothed_labels_is_said(share: float, made: Made, tmp_path: Path) -> None:
    found = answer(made, smoothed(made, share))
    assert found.says == "named" and found.guesses[0].mistakes == ("labels_smoothed",), found
    assert found.guesses[0].detail == f"by {share:g}"
    # The trainer's own logits have a vocabulary too; one that is padded has no mean loss.
    logits = made.logits.numpy().copy()
    arrays = {"ids": made.ids, "labels": made.labels, "mask": made.mask}
    for name, fill, says in (("whole", 0.0, "named"), ("masked", np.inf, "unexplained")):
        held = np.pad(logits, ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf)
        np.savez(tmp_path / f"{name}.npz", logits=held if fill else logits, **arrays)
        batch = read_batch(tmp_path / f"{name}.npz", VOCAB + bool(fill))
        verdict = explain_loss(batch, list(score_batch(batch, None)), smoothed(made, share))
        assert verdict.says == says, verdict


def test_a_z_loss_of_other_factors_is_named(made: Made) -> None:
    square = float((totals(made) ** 2).mean())
    for factor in (1e-3, 1e-2):
        found = answer(made, float(loss(made, made.labels)) + factor * square)
        assert (("z_loss_added",) in found.distinct_mistakes) and found.says == "named", found


def test_two_mistakes_at_once(made: Made) -> None:
    found = answer(made, float(loss(made, made.labels, 0, "sum")))
    assert ("unshifted", "sum") in found.distinct_mistakes and found.says in ("named", "ambiguous")


def test_a_mistake_that_only_comes_near_is_not_offered(made: Made) -> None:
    """Of a number made of all labels a small rest is left to few bits: that one is likely."""
    # Seen red: with every guess within REPORTED of the number.
    right = float(loss(made, made.labels))
    near = float(loss(made, cut(made, 24))) * (1 + 1e-3)
    assert answer(made, near).says == "unexplained"
    bits = answer(made, right / math.log(2) * (1 + 1e-3))
    assert bits.says == "likely" and bits.distinct_mistakes == (("bits",),)


def test_a_number_that_nothing_gives_is_not_explained(made: Made) -> None:
    right = float(loss(made, made.labels))
    named = [
        found
        for factor in np.linspace(0.55, 0.97, 29)
        if (found := answer(made, right * factor)).says == "named"
    ]
    assert not named, "a mistake was named for a number made up"


def test_labels_shifted_in_the_file_are_read_as_such(made: Made, tmp_path: Path) -> None:
    ids, labels = np.asarray(made.ids), np.asarray(made.labels)
    for shift, expected in ((1, 1), (2, 2), (-1, -1)):
        moved = np.full_like(labels, -100)
        if shift > 0:
            moved[:, :-shift] = labels[:, shift:]
        else:
            moved[:, 1:] = np.where(np.asarray(made.mask), labels, -100)[:, :-1]
        np.savez(tmp_path / "b.npz", ids=ids, labels=moved, mask=np.asarray(made.mask))
        assert read_batch(tmp_path / "b.npz", VOCAB).shift == expected


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((2, 3), int)}, "expected an array ids or input_ids"),
        ({"ids": np.zeros((2, 3))}, "expected integers"),
        ({"ids": np.full((2, 3), 97)}, "the embedding has 97 rows"),
        ({"ids": np.ones((2, 3), int), "input_ids": np.ones((2, 3), int)}, "expected one array"),
        ({"ids": np.ones((2, 3), int), "labels": np.ones((2, 4), int)}, r"ids are \[2, 3\]"),
        ({"ids": np.arange(6).reshape(2, 3), "labels": np.full((2, 3), 9)}, "neither that token"),
        ({"ids": np.ones((1, 4), int), "mask": np.array([[1, 0, 1, 1]])}, "has a hole"),
        ({"ids": np.ones((1, 4), int), "logits": np.ones((1, 4, 5))}, r"expected \[1, 4, 97\]"),
    ],
)
def test_what_is_no_batch_is_refused(arrays: dict[str, Any], says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(FormatError, match=says):
        read_batch(tmp_path / "b.npz", VOCAB)


def save_safetensors(path: Path, arrays: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)


def save_pickled(path: Path, arrays: dict[str, Any]) -> None:
    torch.save({name: torch.tensor(x) for name, x in arrays.items()}, path)


SAVED: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    ".npz": lambda path, arrays: np.savez(path, **arrays),
    ".safetensors": save_safetensors,
    ".pt": save_pickled,
    "nested.pt": lambda path, arrays: torch.save(
        {"data": {name: torch.tensor(x) for name, x in arrays.items()}, "encodings": None}, path
    ),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_batch_of_every_kind_of_file_is_the_same(kind: str, made: Made, tmp_path: Path) -> None:
    """Seen red: .safetensors and .pt, while only .npz was read."""
    own = dict(np.load(made.path))
    own["attention_mask"] = own["attention_mask"].astype(bool)
    more = {"logits": made.logits.numpy(), "router_z_loss_coef": np.array(0.5), "extra": np.ones(3)}
    path = tmp_path / f"b{kind}"
    SAVED[kind](path, own | more)
    found = read_batch(path, VOCAB)
    for name in ("ids", "label", "mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(made.batch, name))
    np.testing.assert_array_equal(found.logits, made.logits.numpy())
    assert found.router_z == 0.5 and found.router_balance is None
    assert found.unread == ("data.extra" if kind == "nested.pt" else "extra",)
    assert found.labels_given and found.mask_given and found.shift == made.batch.shift
    plain = tmp_path / f"plain{kind}"
    SAVED[kind](plain, own)
    done = aprfmt("eval", made.folder, "--batch", plain, "--json")
    assert (
        done.json["loss"]
        == aprfmt("eval", made.folder, "--batch", made.path, "--json").json["loss"]
    )


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"ids": [[1, 2], [3, 4]]}, "ids is no tensor; save it as"),
        ({"x": {"labels": [1, 2]}, "ids": torch.ones(1, 2).long()}, "labels is no tensor"),
        (
            [{"ids": torch.ones(1, 2).long()}] * 2,
            "holds 0.ids and 1.ids; expected one array of ids",
        ),
        (torch.ones(1, 2).long(), "expected an array ids or input_ids"),
        ({"ids": torch.ones(1, 2).bfloat16()}, "expected integers"),
        ({"ids": torch.ones(1, 2).long(), "router_z_loss_coef": -1.0}, "one number of at least 0"),
    ],
)
def test_what_torch_saved_that_is_no_batch_is_refused(held: Any, says: str, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "b.pt")
    with pytest.raises(FormatError, match=says):
        read_batch(tmp_path / "b.pt", VOCAB)


def test_text_is_no_batch(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("1 2 3\n")
    with pytest.raises(FormatError, match=r"text that begins '1 2 3'; expected a file of arrays"):
        read_batch(tmp_path / "b.txt", VOCAB)


def test_the_command_names_the_mistake(made: Made) -> None:
    base = ("eval", made.folder, "--batch", made.path)
    right = float(loss(made, made.labels))
    done = aprfmt(*base, "--reported", f"{right:.4f}", "--json")
    assert done.code == 0 and done.json["reported"]["verdict"] == "agrees"
    assert done.json["loss"] == pytest.approx(right, rel=1e-5)
    text = aprfmt(*base, "--reported", f"{right / math.log(2):.4f}")
    assert text.code == 1 and "the loss is in bits" in text.out
    nothing = aprfmt(*base, "--reported", "nan", "--json")
    assert nothing.code == 1
    assert nothing.json["reported"]["mistakes"] == [["no_labels"]]
    assert aprfmt(*base).code in (0, 1)


def test_an_array_that_nothing_reads_leaves_it_open(made: Made, tmp_path: Path) -> None:
    """Seen red: exit 0 beside weights of labels that the trainer multiplied the loss by."""
    path = tmp_path / "batch.npz"
    np.savez(path, loss_weights=np.ones(3), **np.load(made.path))
    right = f"{float(loss(made, made.labels)):.4f}"
    base = ("eval", made.folder, "--batch", path, "--reported", right)
    done = aprfmt(*base)
    assert done.code == 2 and "batch array loss_weights" in done.out.splitlines()[0]
    assert aprfmt(*base, "--accept", "unread:loss_weights").code == 0
    assert aprfmt(*base, "--accept", "unread:other").code == 2


def test_logits_in_the_batch_are_an_oracle_of_their_own(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "with.npz"
    arrays = dict(np.load(made.path))
    np.savez(path, **arrays, logits=made.logits.numpy())
    total = float(loss(made, made.labels, reduction="sum"))
    done = aprfmt("eval", made.folder, "--batch", path, "--reported", total, "--json")
    checks = {row["name"]: row["outcome"] for row in done.json["gate"]["checks"]}
    assert checks["logits-agree"] == "PASS" and checks["loss-reported"] == "FAIL"
    assert done.json["reported"]["mistakes"] == [["sum"]]
    np.savez(path, **arrays, logits=made.logits.numpy() * 0.5)
    half = float(
        torch.nn.functional.cross_entropy(
            made.logits[:, :-1].reshape(-1, VOCAB) * 0.5, made.labels[:, 1:].reshape(-1)
        )
    )
    done = aprfmt("eval", made.folder, "--batch", path, "--reported", half, "--json")
    checks = {row["name"]: row["outcome"] for row in done.json["gate"]["checks"]}
    assert done.code == 1
    assert checks["logits-agree"] == "FAIL" and checks["loss-reported"] == "PASS"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--reported", "1.2"), "--reported is the loss of a --batch"),
        (("--batch", "{path}", "--ids", "1,2"), "--batch is scored as it is; found --text"),
        (("--batch", "{path}", "--overlap", "3"), "found --overlap"),
        (("--batch", "{path}", "--reported", "much"), "is no number"),
        (("--batch", "{path}.gone"), "batch.npz.gone"),
    ],
)
def test_wrong_arguments_end_in_one_line(words: tuple[str, ...], says: str, made: Made) -> None:
    done = aprfmt("eval", made.folder, *(word.format(path=made.path) for word in words))
    assert done.code == 2 and says in done.err
    assert "Traceback" not in done.err


# --- packed rows ---------------------------------------------------------------------------------

ROWS = ((13, 9, 8), (30,), (11, 12))  # the documents of each row, of 30 tokens; the last is padded
# How a script scores packed rows -> (the mistake, its losses); `apart` and `edge`: see `packed`.
PACKED: dict[str, tuple[str, tuple[str, bool]]] = {
    "joined": ("documents_joined", ("count on", False)),
    "joined, positions anew": ("documents_joined", ("restart", False)),
    "joined, edges scored": ("documents_joined", ("count on", True)),
    "edges scored": ("boundary_scored", ("apart", True)),
}


def packed_arrays() -> dict[str, Any]:
    random = np.random.default_rng(3)
    ids = random.integers(3, VOCAB, (len(ROWS), 30))
    mask = np.array([np.arange(30) < sum(row) for row in ROWS])
    document = np.array(
        [np.pad(np.repeat(range(len(row)), row), (0, 30 - sum(row))) for row in ROWS]
    )
    document[~mask] = -1
    positions = np.array(
        [np.pad(np.concatenate([*map(np.arange, row)]), (0, 30 - sum(row))) for row in ROWS]
    )
    labels = np.where(mask, ids, -100)
    begins = positions == 0
    labels[begins & mask] = -100
    lengths = [n for row in ROWS for n in row]
    return {
        "ids": ids, "mask": mask, "labels": labels, "document": document, "positions": positions,
        "ends": np.cumsum([0, *lengths]),
    }  # fmt: skip


def packed_loss(model: Any, arrays: Any, how: str, edges: bool) -> float:
    """Return transformers' loss of packed rows: each document alone, or rows as they stand."""
    losses = []
    for row, ids, positions in zip(ROWS, arrays["ids"], arrays["positions"], strict=True):
        real, at = torch.tensor(ids[: sum(row)])[None], 0
        with torch.no_grad():
            if how == "apart":
                cuts = real.split(list(row), 1)
                logits = torch.cat([model(each).logits[0] for each in cuts])
            else:
                places = torch.tensor(positions[: sum(row)])[None] if how == "restart" else None
                ones = torch.ones_like(real)
                logits = model(real, attention_mask=ones, position_ids=places).logits[0]
        each = torch.nn.functional.cross_entropy(logits[:-1], real[0, 1:], reduction="none")
        kept = torch.ones(len(each), dtype=torch.bool)
        for length in row[:-1]:
            at += length
            kept[at - 1] = edges
        losses.append(each[kept])
    return float(torch.cat(losses).mean())


MARKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "position_ids": lambda a: {"position_ids": a["positions"]},
    "cu_seqlens": lambda a: {"cu_seqlens": a["ends"]},
    "cu_seqlens with padding": lambda a: {"cu_seqlens": np.array([0, 13, 22, 30, 60, 71, 83, 90])},
    "document_ids": lambda a: {"document_ids": a["document"]},
    "seq_idx": lambda a: {"seq_idx": a["document"].astype(np.int32)},
    "seq_lengths": lambda a: {"seq_lengths": np.diff(a["ends"])},
    "transformers' own collator": lambda a: {
        "cu_seq_lens_q": a["ends"],
        "cu_seq_lens_k": a["ends"],
        "max_length_q": np.array(30),
        "max_length_k": np.array([30]),
    },
    "two of them": lambda a: {"segment_ids": a["document"] + 1, "position_ids": a["positions"]},
}


@pytest.mark.parametrize("marks", MARKS)
def test_documents_of_packed_rows_are_scored_apart(marks: str, made: Made, tmp_path: Path) -> None:
    arrays, path = packed_arrays(), tmp_path / "packed.npz"
    np.savez(
        path, ids=arrays["ids"], mask=arrays["mask"], labels=arrays["labels"],
        **MARKS[marks](arrays),
    )  # fmt: skip
    batch = read_batch(path, VOCAB)
    assert batch.document_count == sum(map(len, ROWS)) and not batch.edges and not batch.unread
    with (
        open_model(str(made.folder)) as opened,
        Session.open(opened, NumpyBackend("cpu", "float32")) as session,
    ):
        scored = list(score_batch(batch, session))
    right = explain_loss(batch, scored, packed_loss(made.model, arrays, "apart", False))
    assert right.says == "agrees", right
    for cause, (how, edges) in PACKED.values():
        found = explain_loss(batch, scored, packed_loss(made.model, arrays, how, edges))
        assert found.says in ("named", "ambiguous"), (how, edges, found)
        nearest = found.guesses[0]
        assert nearest.mistakes == (cause,), (how, edges, found)
        assert how == "apart" or how in nearest.detail, nearest
        assert ("first token" in nearest.detail) == (edges and how != "apart"), nearest


def square_mask(arrays: Any) -> Any:
    """Return which columns each row of packed rows attends to, [samples, 1, tokens, tokens]."""
    document = arrays["document"]
    same = document[:, :, None] == document[:, None]
    real = arrays["mask"][:, :, None] & arrays["mask"][:, None]
    return (np.tril(np.ones(same.shape[1:], bool)) & same & real)[:, None]


# Seen red: documents that see each other, and padding that is scored, since the array was only read
# as 0 and 1, or as the marks of documents.
WITHOUT_MASK: dict[str, Callable[[Any], dict[str, Any]]] = {
    "negative numbers": lambda a: {"seq_idx": a["document"]},
    "zeros after numbers": lambda a: {"segment_ids": a["document"] + 1},
    "positions that stay": lambda a: {"position_ids": a["positions"]},
    "positions that stay at the last": lambda a: {
        "position_ids": np.where(a["mask"], a["positions"], (a["positions"] * a["mask"])[:, -9:-8])
    },
    "a mask of numbers": lambda a: {"attention_mask": a["document"] + 1},
    "a mask of rows and columns": lambda a: {"attention_mask": square_mask(a)},
    "the same without heads": lambda a: {"mask": square_mask(a)[:, 0].astype(np.int64)},
    "the same, added to the scores": lambda a: {
        "attention_mask": np.where(square_mask(a), 0.0, np.finfo(np.float32).min)
    },
}


@pytest.mark.parametrize("marks", WITHOUT_MASK)
def test_a_batch_says_its_padding_and_documents_in_one_array(marks: str, tmp_path: Path) -> None:
    arrays, path = packed_arrays(), tmp_path / "packed.npz"
    np.savez(path, ids=arrays["ids"], mask=arrays["mask"], document_ids=arrays["document"])
    expected = read_batch(path, VOCAB)
    np.savez(path, ids=arrays["ids"], **WITHOUT_MASK[marks](arrays))
    batch = read_batch(path, VOCAB)
    assert not batch.unread and batch.document_count == sum(map(len, ROWS))
    for name in ("mask", "label", "document_starts"):
        assert np.array_equal(getattr(batch, name), getattr(expected, name)), name


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_of_documents_from_zero_are_no_padding(first: int, tmp_path: Path) -> None:
    """Rows of one document, and documents that are numbered in turn."""
    ids, path = np.arange(24).reshape(2, 12), tmp_path / "b.npz"
    for row in ([first] * 12, [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1]):
        np.savez(path, ids=ids, document_ids=np.array([[0] * 12, row]))
        assert read_batch(path, VOCAB).mask.all()
    np.savez(path, ids=ids, position_ids=np.array([[*range(12)], [*range(11), 0]]))
    assert read_batch(path, VOCAB).mask.all(), "a document of one token"


# What the sum of the losses of packed rows is divided by: (labels, documents, rows) -> a count.
DIVISORS: dict[str, Callable[[int, int, int], int]] = {
    "less one for each boundary between documents": lambda n, many, rows: n - (many - rows),
    "plus one for each boundary between documents": lambda n, many, rows: n + many - rows,
    "less one for each document": lambda n, many, rows: n - many,
    "by the documents": lambda n, many, rows: many,
    "less one for each sample": lambda n, many, rows: n - rows,
}


@pytest.mark.parametrize("says", DIVISORS)
def test_a_divisor_that_is_another_count_is_named(says: str, tmp_path: Path) -> None:
    """Losses made up: the sum of the right ones is all that the divisor is told by.

    Seen red: boundaries subtracted twice were unexplained, with the advice to look at the passes.
    """
    arrays, path = packed_arrays(), tmp_path / "b.npz"
    arrays["labels"][:, 2:5] = -100  # of counts without a prompt several are equal
    np.savez(path, ids=arrays["ids"], labels=arrays["labels"], document_ids=arrays["document"])
    batch = read_batch(path, VOCAB)
    nats = np.random.default_rng(5).gamma(2.0, 1.0, (len(ROWS), 3, 30))
    scored = [ScoredSample(each, each) for each in nats]
    losses = np.concatenate(label_losses(batch, scored))
    count = DIVISORS[says](len(losses), batch.document_count, len(ROWS))
    found = explain_loss(batch, scored, float(losses.sum() / count))
    assert found.says == "named" and found.distinct_mistakes == (("other_count",),), found
    assert says in found.guesses[0].detail and f"{count} in place of" in found.guesses[0].detail
    between = explain_loss(batch, scored, float(losses.sum() / (len(losses) - 1.5)))
    assert between.says == "unexplained", between  # no count


@pytest.mark.parametrize("edges", [False, True])
def test_positions_that_go_on_over_documents_kept_apart(edges: bool, tmp_path: Path) -> None:
    """Learned positions, with a mask of documents; seen red: without `continued`."""
    model, arrays = tiny.save_tiny("gpt2", tmp_path), packed_arrays()
    ids, document = torch.tensor(arrays["ids"][:1]), torch.tensor(arrays["document"][:1])
    np.savez(tmp_path / "b.npz", ids=ids.numpy(), document_ids=document.numpy())
    seen = (document[0][:, None] == document[0]) & torch.ones(30, 30).tril().bool()
    with (
        open_model(str(tmp_path)) as opened,
        Session.open(opened, NumpyBackend("cpu", "float32")) as session,
        torch.no_grad(),
    ):
        batch = read_batch(tmp_path / "b.npz", VOCAB)
        scored = list(score_batch(batch, session))
        mask = torch.where(seen, 0.0, -1e30)[None, None]
        apart = torch.arange(1, 30) if edges else torch.argwhere(document[0].diff() == 0)[:, 0] + 1
        for places, wanted in (
            (torch.arange(30), "positions_continued"),
            (torch.tensor(arrays["positions"][0]), "boundary_scored" if edges else None),
        ):
            logits = model(ids, attention_mask=mask, position_ids=places[None]).logits[0]
            theirs = torch.nn.functional.cross_entropy(logits[apart - 1], ids[0, apart])
            found = explain_loss(batch, scored, float(theirs))
            assert found.distinct_mistakes == (((wanted,),) if wanted else ((),)), found


def test_what_a_batch_holds_is_printed(made: Made, tmp_path: Path) -> None:
    """Packed rows, and arrays that are not read: each in a line, and only where there are any."""
    for packed, unread in ((False, 0), (True, 0), (True, 1), (False, 9)):
        arrays, path = packed_arrays(), tmp_path / f"{packed}-{unread}.npz"
        marks = {"document_ids": arrays["document"]} if packed else {}
        more: dict[str, Any] = {f"other{at}": np.zeros(3) for at in range(unread)}
        np.savez(path, ids=arrays["ids"], mask=arrays["mask"], **marks, **more)
        done = aprfmt("eval", made.folder, "--batch", path)
        lines = {line.strip().split("  ")[0]: line for line in done.out.splitlines()}
        documents = sum(map(len, ROWS))
        assert ("packed" in lines) == packed and ("not read" in lines) == bool(unread)
        assert f"{len(ROWS)} samples of " in lines["batch"]
        if packed:
            assert f"{documents} documents, each scored by itself" in lines["packed"]
        if unread:
            said = f"{unread} array{'s' * (unread > 1)}: other0"
            assert said in lines["not read"] and lines["not read"].endswith(", ...") == (unread > 8)


@pytest.mark.parametrize(("hide", "hidden"), [([], 0), ([0], 0), ([2, 3], 2), ([6], 0)])
@pytest.mark.parametrize("shift", [0, 1])
def test_tokens_that_no_label_scores_are_counted(
    hide: list[int], hidden: int, shift: int, tmp_path: Path
) -> None:
    """Of the second row's 7 tokens the last is padding, and nothing predicts the first."""
    ids = np.arange(1, 15).reshape(2, 7)
    mask = np.ones((2, 7), int)
    mask[1, 6] = 0
    labels = np.where(mask == 1, ids, -100)
    labels[1, hide] = -100
    if shift:
        labels = np.concatenate([labels[:, 1:], np.full((2, 1), -100)], axis=1)
    np.savez(tmp_path / "b.npz", ids=ids, labels=labels, mask=mask)
    batch = read_batch(tmp_path / "b.npz", VOCAB)
    assert (batch.hidden_count, batch.label_count) == (hidden, 11 - hidden)


SAMPLES = (13, 9, 8, 30, 11)  # tokens of each; in rows of 30 that is 13+9+8, 30, 11
WIDTH = 30


def sample_arrays(side: str) -> Any:
    """Return the same documents as samples of their own, padded at one side."""
    random = np.random.default_rng(11)
    texts = [random.integers(3, VOCAB, n) for n in SAMPLES]
    ids, mask = np.zeros((len(texts), WIDTH), int), np.zeros((len(texts), WIDTH), int)
    for i, text in enumerate(texts):
        at = slice(len(text)) if side == "right" else slice(WIDTH - len(text), None)
        ids[i, at], mask[i, at] = text, 1
    return texts, {"ids": ids, "mask": mask, "labels": np.where(mask, ids, -100)}


def joined_loss(model: Any, rows: list[list[Any]], restart: bool, edges: bool) -> float:
    """Return transformers' loss of texts that stand in rows and see each other."""
    losses = []
    for row in rows:
        real = torch.tensor(np.concatenate(row))[None]
        places = torch.tensor(np.concatenate([np.arange(len(text)) for text in row]))[None]
        with torch.no_grad():
            logits = model(
                real, attention_mask=torch.ones_like(real),
                position_ids=places if restart else None,
            ).logits[0]  # fmt: skip
        each = torch.nn.functional.cross_entropy(logits[:-1], real[0, 1:], reduction="none")
        kept = torch.ones(len(each), dtype=torch.bool)
        for at in np.cumsum([len(text) for text in row])[:-1]:
            kept[at - 1] = edges
        losses.append(each[kept])
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("row", ["one", "width"])
def test_samples_that_the_trainer_packed_wrongly(
    row: str, edges: bool, restart: bool, side: str, made: Made, tmp_path: Path
) -> None:
    """The batch has the samples apart, the reported loss is that of packed rows."""
    texts, arrays = sample_arrays(side)
    np.savez(tmp_path / "rows.npz", **arrays)
    rows = [texts] if row == "one" else [texts[:3], texts[3:4], texts[4:]]
    found = unpacked_answer(made, tmp_path, joined_loss(made.model, rows, restart, edges))
    assert found.says in ("named", "ambiguous"), found
    best = min(found.guesses, key=lambda one: abs(one.value - found.reported))
    assert best.mistakes == ("documents_joined",), found
    assert ("one row" if row == "one" else f"rows of {WIDTH}") in best.detail, best
    assert ("restart" if restart else "count on") in best.detail, best
    assert ("first token" in best.detail) == edges, best


def unpacked_answer(made: Made, folder: Path, reported: float) -> LossVerdict:
    """Return the verdict on a loss of the samples, to what float32 sums are off by."""
    with (
        open_model(str(made.folder)) as opened,
        Session.open(opened, NumpyBackend("cpu", "float32")) as session,
    ):
        batch = read_batch(folder / "rows.npz", VOCAB)
        scored = list(score_batch(batch, session))
        return explain_loss(batch, scored, reported, within=1e-5, session=session)


def test_samples_apart_and_numbers_made_up_are_not_packed(made: Made, tmp_path: Path) -> None:
    texts, arrays = sample_arrays("right")
    np.savez(tmp_path / "rows.npz", **arrays)
    right = joined_loss(made.model, [[text] for text in texts], False, False)
    assert unpacked_answer(made, tmp_path, right).says == "agrees"
    for factor in (0.913, 0.9571, 0.9907, 1.00733, 1.0733):
        assert unpacked_answer(made, tmp_path, right * factor).says == "unexplained"


def test_labels_at_the_edges_of_documents_are_named(made: Made, tmp_path: Path) -> None:
    arrays, path = packed_arrays(), tmp_path / "packed.npz"
    labels = np.where(arrays["mask"], arrays["ids"], -100)
    marks = {"position_ids": arrays["positions"], "token_weights": np.ones(3), "z": np.ones(2)}
    np.savez(path, ids=arrays["ids"], mask=arrays["mask"], labels=labels, **marks)
    reported = packed_loss(made.model, arrays, "apart", True)
    done = aprfmt("eval", made.folder, "--batch", path, "--reported", reported, "--json")
    checks = {row["name"]: row for row in done.json["gate"]["checks"]}
    assert done.code == 1 and checks["documents-apart"]["outcome"] == "FAIL"
    assert "labels of 3 first tokens" in checks["documents-apart"]["found"]
    assert done.json["reported"]["mistakes"][0] == ["boundary_scored"]
    assert done.json["batch"]["documents"] == 6
    assert done.json["batch"]["unread"] == ["token_weights", "z"]
    shown = aprfmt("eval", made.folder, "--batch", path).out
    assert "6 documents" in shown and "2 arrays: token_weights, z" in shown
    np.savez(path, ids=arrays["ids"], mask=arrays["mask"], position_ids=arrays["positions"])
    assert not read_batch(path, VOCAB).edges, "without labels nothing was asked for"


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ({"position_ids": np.zeros((3, 29), int)}, r"ids are \[3, 30\]"),
        ({"document_ids": np.zeros((3, 30))}, "expected integers"),
        ({"cu_seqlens": np.array([0, 13, 9, 90])}, "rising from 0 to all 90 tokens"),
        ({"cu_seqlens": np.array([0, 13, 84])}, "or its 83 without padding"),
        ({"cu_seqlens": np.array([0.0, 90.0])}, "rising from 0"),
        ({"position_ids": None, "max_length_q": np.array(5)}, "max_length_q is 5, but a document"),
        ({"max_seqlen": np.array([29])}, "has 30 tokens"),
        ({"seq_idx": np.zeros((3, 30), int), "position_ids": None},
         "seq_idx.*other documents: token 13 of sample 0|position_ids and seq_idx mark other"),
    ],
)  # fmt: skip
def test_marks_of_documents_that_do_not_fit_are_refused(
    marks: dict[str, Any], says: str, tmp_path: Path
) -> None:
    arrays = packed_arrays()
    given = {k: arrays["positions"] if v is None else v for k, v in marks.items()}
    np.savez(tmp_path / "b.npz", ids=arrays["ids"], mask=arrays["mask"], **given)
    with pytest.raises(FormatError, match=says):
        read_batch(tmp_path / "b.npz", VOCAB)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda square: square | np.eye(30, k=1, dtype=bool), "row 0 of sample 0 of the mask"),
        (lambda square: square & ~np.eye(30, k=-2, dtype=bool), "row 3 of sample 0 of the mask"),
        (lambda square: square.sum(-1)[:, 0] - 2, "mask holds -2"),
    ],
)
def test_a_mask_of_other_tokens_than_documents_is_refused(
    change: Any, says: str, tmp_path: Path
) -> None:
    arrays = packed_arrays()
    np.savez(tmp_path / "b.npz", ids=arrays["ids"], mask=change(square_mask(arrays)))
    with pytest.raises(FormatError, match=says):
        read_batch(tmp_path / "b.npz", VOCAB)


@pytest.mark.parametrize("shift", [-1, 0, 1, 2])
def test_no_row_predicts_the_first_token(shift: int) -> None:
    """A label of the first token, which nothing predicts, is none."""
    ids = np.arange(12, dtype=np.int64).reshape(2, 6)
    mask = np.ones((2, 6), bool)
    labels = np.full((2, 6), -100, np.int64)
    for at in range(6):
        if 0 <= at + shift < 6:
            labels[:, at] = ids[:, at + shift]
    longer, label = _align_labels(ids, labels, mask, shift)
    assert longer.shape == label.shape == (2, 7)
    assert label[:, 0].any() == (shift == 0)
    expected = np.zeros((2, 7), bool)
    for at in range(6):
        if 0 <= at + shift < 6 and (at + shift or not shift):
            expected[:, at + shift] = True
    assert np.array_equal(label, expected)


@pytest.mark.parametrize(
    ("cause", "labels", "value"),
    [
        ("sample_sum", (8, 8, 9, 7), lambda losses: losses.sum() / 4),  # 8 times the mean
        ("sample_sum", (6, 5, 6, 7), lambda losses: losses.sum() / 4),  # 6 times
        ("sum", (1, 3, 2, 2), lambda losses: losses.sum()),  # 8 times
        ("accumulated_sum", (5, 7, 6, 3), lambda losses: 8 * losses.mean()),
    ],
)
def test_more_means_than_samples_go_behind_a_count_of_the_batch(
    cause: str, labels: tuple[int, ...], value: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Seen red: with factors of any size among the first guesses, and with none left."""
    mask = np.arange(12) < np.array(labels)[:, None] + 1
    np.savez(tmp_path / "b.npz", ids=np.where(mask, 5, 0), mask=mask)
    batch = read_batch(tmp_path / "b.npz", VOCAB)
    nats = np.random.default_rng(3).gamma(2.0, 1.0, (len(labels), 12))
    scored = [ScoredSample(each, each) for each in np.broadcast_to(nats[:, None], (4, 3, 12))]
    right = torch.tensor(nats[:, :-1][mask[:, 1:]])
    found = explain_loss(batch, scored, float(value(right)))
    assert found.says == "named" and found.distinct_mistakes == ((cause,),), found
