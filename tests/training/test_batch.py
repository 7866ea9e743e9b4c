"""A step's gradients held against those of its batch: transformers made the right ones.

Seen red, each alone: the mean over rows for the batch's; the base of an adapter trained too; no
rounding measured; no numbers of the batch.
"""

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional

from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients.batch_gradients import batch_gradients
from aprfmt.inference.gradients.label_gradients import label_gradients
from aprfmt.model import open_model
from aprfmt.training.reference_gradients import compute_gradients, doubtful_loss
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.adapters.test_trained_pairs import written
from tests.cli.run import aprfmt
from tests.inference.gradient_judge import write_batch
from tests.models import IDS, save_tiny
from tests.schemas.validation import faults
from tests.training.steps import save_arrays

LAST_NORMS = ("model.norm.weight", "transformer.ln_f.weight")
_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-batch-")


@cache
def made(name: str) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Return a tiny model's folder, a batch, and transformers' float32 gradients of it."""
    folder = Path(_FOLDER.name) / name
    model: Any = save_tiny(name, folder / "model")
    ids, mask, labels = write_batch(folder / "batch.npz", True)
    out = model(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    out.loss.backward()
    grads = {key: p.grad.numpy() for key, p in model.named_parameters()}
    return folder / "model", folder / "batch.npz", grads


def explained(name: str, change: Any, folder: Path) -> StepReport:
    """Explain gradients after a change, by the batch."""
    model, batch, grads = made(name)
    save_file({key: change(key, g) for key, g in grads.items()}, folder / "grads.safetensors")
    return explain_step(model, grads=[folder / "grads.safetensors"], batch=batch)


@pytest.mark.parametrize("joined", [False, True])
def test_a_row_of_documents_that_end_with_the_padding_token(joined: bool, tmp_path: Path) -> None:
    """Seen red: "not known" of documents that see each other, as their token has two gradients."""
    end = IDS[3]
    model: Any = save_tiny("llama", tmp_path / "model", pad_token_id=end, tie_word_embeddings=True)
    documents = [*IDS[4:9], end], [*IDS[9:16], end]
    positions = torch.tensor([[i for each in documents for i in range(len(each))]])
    ids = torch.tensor([[token for each in documents for token in each]])
    labels = ids.clone()
    labels[0, len(documents[0])] = -100
    rows = {"input_ids": ids, "position_ids": positions, "labels": labels}
    seen = {"attention_mask": torch.ones_like(ids)} if joined else {}
    model(**rows, **seen, use_cache=False).loss.backward()
    save_file({k: v.numpy() for k, v in rows.items()}, tmp_path / "batch.safetensors")
    grads = {key: p.grad.numpy() for key, p in model.named_parameters()}
    save_file(grads, tmp_path / "grads.safetensors")
    report = explain_step(
        tmp_path / "model",
        grads=[tmp_path / "grads.safetensors"],
        batch=tmp_path / "batch.safetensors",
    )
    named = [(one.cause, one.certainty_text) for one in report.causes]
    assert named == ([("packed_attention", "confirmed")] if joined else []), report.notes


def nats(logits: torch.Tensor, labels: torch.Tensor, ahead: int = 1) -> torch.Tensor:
    """Return the mean loss of rows scored on the label `ahead` of them."""
    begin, stop = max(0, -ahead), logits.shape[1] - max(0, ahead)
    wanted = labels[:, begin + ahead : stop + ahead]
    return functional.cross_entropy(logits[:, begin:stop].flatten(0, 1), wanted.flatten())


def of_groups(logits: torch.Tensor, labels: torch.Tensor, groups: Any) -> list[torch.Tensor]:
    """Return the mean loss of each group of rows."""
    return [nats(logits[rows], labels[rows]) for rows in groups]


SIXES = [list(range(at, at + 6)) for at in range(0, 18, 6)]
TURNS = [list(range(at, 18, 2)) for at in range(2)]
# The loss of a trainer -> the cause and words of it.
LOSSES: dict[str, tuple[Any, str, str]] = {
    "three ahead": (lambda x, y: nats(x, y, 3), "other_labels", "shifted 3 times"),
    "four ahead": (lambda x, y: nats(x, y, 4), "other_labels", "shifted 4 times"),
    "two behind": (lambda x, y: nats(x, y, -2), "other_labels", "the other way, twice"),
    "to the left": (lambda x, y: nats(x, y.roll(-1, 1)), "other_labels", "to the left"),
    "to the right": (lambda x, y: nats(x, y.roll(1, 1)), "other_labels", "to the right"),
    "of the row before": (lambda x, y: nats(x, y.roll(1, 0)), "other_labels", "row before"),
    "of the row after": (lambda x, y: nats(x, y.roll(-1, 0)), "other_labels", "row after"),
    "the sum of ranks in turn": (
        lambda x, y: sum(of_groups(x, y, TURNS)),
        "micro_batch_means",
        "the sum of the means of 2 ranks that get samples in turn",
    ),
    "the last micro-batch": (
        lambda x, y: of_groups(x, y, SIXES)[-1],
        "samples_left_out",
        "only the last of micro-batches of 6 samples",
    ),
    "right": (nats, "", ""),
}


@cache
def of_rows(many: int) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """Return a tiny model, its folder, and a batch of rows with unscored prompts of some lengths.

    The batch is written to the folder, too.
    """
    folder = Path(_FOLDER.name) / f"rows-{many}"
    model: Any = save_tiny("llama", folder / "model")
    ids = torch.tensor(np.stack([np.roll(IDS, 7 * row)[:9] for row in range(many)]))
    labels = ids.clone()
    for row in range(many):
        labels[row, : row % 5] = -100
    batch = {"input_ids": ids, "labels": labels}
    save_file({key: x.numpy() for key, x in batch.items()}, folder / "batch.safetensors")
    return folder, model, batch


@pytest.mark.parametrize("name", LOSSES)
def test_which_labels_and_groups_a_loss_has_is_named(name: str, tmp_path: Path) -> None:
    """Seen red, each: "not known", or a factor for each parameter."""
    loss, cause, says = LOSSES[name]
    folder, model, batch = of_rows(3 if cause == "other_labels" else 18)
    model.zero_grad()
    loss(model(batch["input_ids"]).logits, batch["labels"]).backward()
    grads = {key: p.grad.numpy() for key, p in model.named_parameters()}
    save_file(grads, tmp_path / "grads.safetensors")
    report = explain_step(
        folder / "model", grads=[tmp_path / "grads.safetensors"], batch=folder / "batch.safetensors"
    )
    assert [one.cause for one in report.causes] == ([cause] if cause else []), report.causes
    assert all(says in one.says and one.certainty_text == "confirmed" for one in report.causes)


def label_nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each label [rows, tokens - 1], 0 where none is scored."""
    x, y = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(x, y, reduction="none").reshape(len(labels), -1)


def preferred(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a preference loss of row 0 over row 1, as DPO has it."""
    sums = label_nats(logits, labels).sum(1)
    return -functional.logsigmoid(0.1 * (sums[1] - sums[0] + 3))


def by_advantage(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a policy gradient whose advantages are of each token."""
    found = label_nats(logits, labels)
    return (found * torch.arange(found.numel()).reshape(found.shape).sub(9).sign()).mean()


@pytest.mark.parametrize("loss", [preferred, by_advantage])
def test_an_objective_that_lowers_samples_is_no_mistake(loss: Any, tmp_path: Path) -> None:
    """Seen red: a confirmed mistake of a trainer that is right."""
    folder, model, batch = of_rows(2)
    model.zero_grad()
    loss(model(batch["input_ids"]).logits, batch["labels"]).backward()
    grads = {key: p.grad.numpy() for key, p in model.named_parameters()}
    save_file(grads, tmp_path / "grads.safetensors")
    report = explain_step(
        folder / "model", grads=[tmp_path / "grads.safetensors"], batch=folder / "batch.safetensors"
    )
    assert not report.causes and report.exit_code == 2
    assert all("not judged: the gradient is of an objective" in row.why for row in report.tensors)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2"])
def test_transformers_gradients_agree(name: str, tmp_path: Path) -> None:
    report = explained(name, lambda key, g: g, tmp_path)
    assert report.exit_code == 0, [row for row in report.tensors if row.why]
    assert report.counts["agrees"] == len(report.tensors) and not report.causes
    assert report.computed_on == "torch:cpu:float64" and report.norms.computed is not None
    assert report.norms.gradient == pytest.approx(report.norms.computed, rel=1e-4)
    assert max(row.distance or 0 for row in report.tensors) < 1e-3


def test_gradients_under_autocast_agree(tmp_path: Path) -> None:
    """float32 weights computed in bfloat16: rounding is 100 times what float32 explains."""
    folder, batch, _ = made("qwen2")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    loaded = {key: torch.tensor(value) for key, value in np.load(batch).items()}
    with torch.autocast("cpu", torch.bfloat16):
        model(**loaded).loss.backward()
    save_file(
        {key: p.grad.numpy() for key, p in model.named_parameters()}, tmp_path / "g.safetensors"
    )
    for said in ("bfloat16", None):  # None: the products' gradients show it
        report = explain_step(
            folder, grads=[tmp_path / "g.safetensors"], batch=batch, trained_in=said
        )
        assert report.exit_code == 0, [row for row in report.tensors if row.why]
    unsaid = explain_step(
        folder, grads=[tmp_path / "g.safetensors"], batch=batch, trained_in="float32"
    )
    assert unsaid.exit_code != 0 and not any(c.level == "confirmed" for c in unsaid.causes)


@pytest.mark.parametrize(
    ("factor", "says"), [(23.5, "labels / samples"), (1 / 47, "1 / labels"), (1 / 2, "samples")]
)
def test_a_factor_is_named_by_a_number_of_the_batch(
    factor: float, says: str, tmp_path: Path
) -> None:
    labels = int((np.load(made("qwen2")[1])["labels"][:, 1:] >= 0).sum())
    factor = {23.5: labels / 2, 1 / 47: 1 / labels}.get(factor, factor)
    report = explained("qwen2", lambda key, g: g * np.float32(factor), tmp_path)
    assert report.exit_code == 1
    (cause,) = report.causes
    assert cause.cause == "gradient_factor" and says in cause.says, cause.says


def test_the_gradients_of_an_adapter_are_held_against_its_batch(tmp_path: Path) -> None:
    base, batch, _ = made("qwen2")
    shape = load_file(base / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"].shape
    module = "model.layers.1.self_attn.q_proj"
    adapter = written(tmp_path / "adapter", "llama", {module: (shape[0], shape[1])})
    from aprfmt.model import open_model

    with open_model(base) as model:
        computed, numbers = compute_gradients(model, batch, adapter=adapter)
    assert numbers.counts["alpha / r"] == 2 and len(computed.keys) == 2
    found = {}
    for which in "ab":
        gradient = computed.gradient(f"L1.attn_q.weight.lora_{which}")
        found[f"base_model.model.{module}.lora_{which.upper()}.weight"] = gradient
    for factor, code in ((1.0, 0), (0.5, 1)):
        given = {name: (g * factor).astype(np.float32) for name, g in found.items()}
        save_file(given, tmp_path / "grads.safetensors")
        report = explain_step(
            base, adapter=adapter, grads=[tmp_path / "grads.safetensors"], batch=batch
        )
        assert report.exit_code == code, [(row.key, row.why) for row in report.tensors]
        assert not code or "alpha / r" in report.causes[0].says


def test_a_batch_without_gradients_says_the_step(tmp_path: Path) -> None:
    """Each element is held to the gradient computed of it. Seen red: all parameters left open."""
    folder, batch, _ = made("qwen2")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model(**{key: torch.tensor(value) for key, value in np.load(batch).items()}).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # which epsilon shows
    optimizer.step()
    model.save_pretrained(tmp_path / "after")
    stated = "adamw:lr=1e-3,wd=0.01,step=1"
    right = explain_step(folder, after=tmp_path / "after", batch=batch, optimizer=stated)
    assert right.exit_code == 0, [row for row in right.tensors if row.why]
    assert not any(one.kind == "direction" for one in right.left)
    name = "model.layers.1.mlp.up_proj.weight"
    start = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "after" / "model.safetensors")
    after[name] = start[name] * np.float32(2 - 2e-5) - after[name]
    save_file(after, tmp_path / "after" / "model.safetensors", {"format": "pt"})
    stated += ",clip=0.1"
    wrong = explain_step(folder, after=tmp_path / "after", batch=batch, optimizer=stated)
    assert [(one.cause, one.where) for one in wrong.causes] == [("step_sign", (name,))]


@pytest.mark.parametrize(
    ("change", "causes"),
    [
        (lambda g: g, []),
        (lambda g: -g, ["gradient_sign"]),
        (lambda g: g * np.float32(0.25), ["gradient_factor"]),
        (lambda g: g + np.float32(0.01 * np.linalg.norm(g) / g.size**0.5), [""]),
    ],
)
def test_gradients_are_checked_without_a_backward(
    change: Any, causes: list[str], tmp_path: Path
) -> None:
    """By differences of the loss. Seen red: noise of 1 % confirmed as a factor of 1.0005."""
    model, batch, grads = made("qwen2")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({name: change(grads[name])}, tmp_path / "g.safetensors")
    report = explain_step(model, grads=[tmp_path / "g.safetensors"], batch=batch, differences=True)
    assert [one.cause for one in report.causes] == causes
    assert report.computed_on == "numpy:cpu:float64, by differences"
    assert report.exit_code == (1 if causes else 2)  # all others have no gradient
    assert all(one.level == "located" for one in report.causes if not one.cause)


def test_runs_of_a_batch_are_compared_backward(tmp_path: Path, monkeypatch: Any) -> None:
    """The run whose backward is wrong is named, and the first point where it is."""
    from aprfmt.inference.gradients import batch_gradients as of_batch
    from aprfmt.inference.gradients import device_gradients
    from aprfmt.training.device_comparison import compare_runs, parse_gradient_run

    model, batch, _ = made("qwen2")
    runs = ("--between", "cpu", "cpu:bfloat16", "--optimizer", "sgd:lr=0.1,clip=1")
    done = aprfmt("step", model, "--batch", batch, *runs, "--json")
    body = json.loads(done.out)
    assert done.code == 0 and faults(body) == [] and body["between"]["verdict"] == "agree"
    # Clipped SGD's step is the gradient, up to one factor.
    fine, coarse = body["between"]["runs"]
    apart = [row["apart"] for row in body["between"]["gradients"] if row["parameter"]]
    assert 0 < fine["update"] < 1e-5 < coarse["update"] < 0.1
    assert fine["update"] < max(one for one, _ in apart) and coarse["update"] < max(map(max, apart))
    computed = of_batch.batch_gradients

    def wrong(*args: Any, **named: Any) -> Any:
        found = computed(*args, **named)
        if "bfloat16" in found.how:
            twice = {key: found.points[key] * 2 for key in ("L1.q", "L0.attn_norm")}
            found = replace(found, points={**found.points, **twice})
        return found

    monkeypatch.setattr(device_gradients, "batch_gradients", wrong)
    with pytest.raises(UsageError, match="leave it out"):
        compare_runs(model, batch, ("cpu", "cpu:bfloat16"), optimizer="adamw:lr=1,step=2")
    report = compare_runs(model, batch, ("cpu", "cpu:bfloat16"))
    assert report.exit_code == 1
    assert [row.first_wrong for row in report.runs] == [None, "L1.q"]
    assert parse_gradient_run("cuda:0:bfloat16") == ("cuda:0", "bfloat16")
    assert parse_gradient_run("torch:cpu:float64") == ("cpu", "float64")
    for run, says in (("tpu", "'tpu' is not known"), ("numpy", "computes no gradients")):
        with pytest.raises(UsageError, match=says):
            parse_gradient_run(run)


def test_the_command_computes_and_a_wrong_batch_is_one_line(tmp_path: Path) -> None:
    model, batch, grads = made("qwen2")
    save_file({key: -g for key, g in grads.items()}, tmp_path / "grads.safetensors")
    options = ("--grads", tmp_path / "grads.safetensors", "--dtype", "float32")
    done = aprfmt("step", model, "--batch", batch, *options)
    assert done.code == 1 and "other sign" in done.out and "torch:cpu:float32" in done.out
    ids = np.load(batch)["input_ids"] + 100000
    np.savez(tmp_path / "other.npz", input_ids=ids)
    done = aprfmt("step", model, "--batch", tmp_path / "other.npz", *options)
    assert done.code == 2 and "the embedding has" in done.err and done.err.count("\n") == 1
    with pytest.raises(FormatError, match="the embedding has"):
        explain_step(model, grads=[options[1]], batch=tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (3.2, ""),  # of ln(97) = 4.57
        (4.57, ""),
        (4.6, "of guessing: right of random weights"),
        (6.8, "of guessing: right of random weights"),
        (7.0, "above what random weights give"),
        (0.01, "too good to be true"),
        (0.0, "too good to be true"),
    ],
)
def test_a_loss_that_no_trained_model_has_is_said(loss: float, says: str) -> None:
    """Seen red: the bound of random weights taken for that of guessing."""
    found = doubtful_loss(loss, 97)
    assert bool(found) == bool(says) and says in found


def test_the_answer_says_that_a_loss_is_worse_than_guessing(tmp_path: Path) -> None:
    report = explained("qwen2", lambda key, g: g, tmp_path)
    assert report.loss is not None
    doubt = doubtful_loss(report.loss, 97)
    assert bool(doubt) == any("of guessing" in note for note in report.notes)
    assert report.loss > np.log(97) and report.exit_code == 0


def test_gradients_of_a_loss_in_bits_are_named(tmp_path: Path) -> None:
    """Seen red: 1.44 times the right one, and no word of what that is."""
    report = explained("qwen2", lambda key, g: g / np.float32(np.log(2)), tmp_path)
    (cause,) = report.causes
    assert (cause.cause, cause.level) == ("gradient_factor", "confirmed")
    assert "1 / ln 2, a loss in bits" in cause.says and len(cause.roles) == len(report.tensors)


def test_gradients_that_were_computed_here_are_no_trainers(tmp_path: Path) -> None:
    """float32 is not float64 rounded once. Seen red: one equal gradient enough."""
    model, batch, grads = made("qwen2")
    mine, _ = compute_gradients_of(model, batch)
    copies = {name: mine[name].astype(np.float32) for name in grads}
    for given, copied in (
        (copies, True),
        (grads | {"model.norm.weight": copies["model.norm.weight"]}, False),
    ):
        save_file(given, tmp_path / "g.safetensors")
        report = explain_step(model, grads=[tmp_path / "g.safetensors"], batch=batch)
        assert report.exit_code == 0
        assert any("equal to the bit" in note for note in report.notes) == copied


def compute_gradients_of(model: Path, batch: Path) -> tuple[dict[str, np.ndarray], float]:
    """Return ({stored name: float64 gradient}, the loss) as computed here."""
    from aprfmt.inference.batch import read_batch
    from aprfmt.model import open_model

    with open_model(model) as opened:
        found = batch_gradients(opened, read_batch(batch, int(opened.hyper["vocab_size"])))
        return dict(found.parameters), found.loss


@pytest.mark.parametrize(
    ("scores", "masked", "behind", "says"),
    [
        ("padding", True, False, "the padding at the end of rows is scored"),
        ("padding", False, False, "is scored; padding attends to padding"),
        ("all", True, False, "is scored, and so are prompts and all else"),
        ("labels", True, True, "scored against the token before it"),
    ],
)
def test_labels_that_the_batch_does_not_have_are_named(
    scores: str, masked: bool, behind: bool, says: str, tmp_path: Path
) -> None:
    """Seen red: padding not run; run, and seen by itself; labels behind the rows of padding."""
    folder, _, _ = made("qwen2")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids, mask, labels = (torch.tensor(x) for x in write_batch(tmp_path / "batch.npz", True))
    scored = torch.where(mask > 0, labels, ids) if scores == "padding" else labels
    scored = ids if scores == "all" else scored
    logits = model(ids, attention_mask=mask if masked else None).logits
    logits, scored = (logits[:, 1:], scored[:, :-1]) if behind else (logits[:, :-1], scored[:, 1:])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), scored.flatten()).backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    save_file(grads, tmp_path / "grads.safetensors")
    report = explain_step(
        folder, grads=[tmp_path / "grads.safetensors"], batch=tmp_path / "batch.npz"
    )
    (cause,) = report.causes
    assert (cause.cause, cause.level) == ("other_labels", "confirmed"), cause.says
    assert says in cause.says and len(cause.roles) == len(report.tensors)


def test_a_label_behind_padding_that_no_token_predicts_is_left_out(tmp_path: Path) -> None:
    """Of the loss and of its divisor. Seen red: counted, and the loss below that of eval."""
    ids, mask, labels = write_batch(tmp_path / "right.npz", False)
    mask[1, :3], labels[1, :4] = 0, -100
    found = {}
    for name, first in (("without", -100), ("with", ids[1, 3])):
        labels[1, 3] = first
        path = tmp_path / f"{name}.npz"
        np.savez(path, input_ids=ids, attention_mask=mask, labels=labels)
        with open_model(made("qwen2")[0]) as model:
            found[name] = compute_gradients(model, path)
    assert found["with"][0].loss == found["without"][0].loss
    assert found["with"][1].labels == found["without"][1].labels
    assert [any("left out: 1" in x for x in found[name][1].notes) for name in found] == [
        False,
        True,
    ]


def test_routers_that_rounding_turns_are_known(tmp_path: Path) -> None:
    """In few bits some token chooses other experts. Seen red: chosen experts not recorded."""
    save_tiny("mixtral", tmp_path / "model")
    write_batch(tmp_path / "batch.npz", True)
    with open_model(tmp_path / "model") as model:
        found, _ = compute_gradients(model, tmp_path / "batch.npz", trained_in="bfloat16")
        other, _ = compute_gradients(model, tmp_path / "batch.npz", trained_in="float32")
    assert found.flips and all(key.endswith(".experts") for key in found.flips)
    assert not other.flips and not found.exact.points


@pytest.mark.parametrize("name", ["gemma", "gpt2", "gemma2", "cohere", "mixtral"])
def test_what_a_label_adds_is_the_gradient_of_it_alone(name: str, tmp_path: Path) -> None:
    """By transformers, of a few labels. Seen red: the norm's offset left out; its bias left in."""
    model: Any = save_tiny(name, tmp_path / "model")
    ids, mask, labels = write_batch(tmp_path / "batch.npz", True)
    with open_model(tmp_path / "model") as opened:
        loaded = read_batch(tmp_path / "batch.npz", int(opened.hyper["vocab_size"]))
        found = label_gradients(opened, loaded, device="cpu", dtype="float64")
    assert found is not None and len(found.rows) == loaded.label_count
    weight = next(p for key, p in model.named_parameters() if key in LAST_NORMS)
    for number in (0, len(found.rows) // 2, len(found.rows) - 1):
        row, column = int(found.rows[number]), int(found.columns[number])
        assert found.tokens[number] == labels[row][column]
        given = {"attention_mask": torch.tensor(mask)}
        logits = model(torch.tensor(ids), **given).logits[row, column - 1]
        model.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[row][column]))
        loss.backward()
        own = weight.grad.double().numpy()
        apart = np.linalg.norm(found.gradients[number] - own) / np.linalg.norm(own)
        assert apart < 1e-4
    if found.head is None:
        return
    # Weights of all labels are solved from the head's gradient.
    weights = np.random.default_rng(3).uniform(0.2, 2, len(found.rows))
    logits = model(torch.tensor(ids), **given).logits[found.rows, found.columns - 1]
    each = torch.nn.functional.cross_entropy(logits, torch.tensor(found.tokens), reduction="none")
    model.zero_grad()
    loss = (each * torch.tensor(weights)).mean()
    loss.backward()
    off, solved = found.head.solve(model.get_output_embeddings().weight.grad.double().numpy())
    assert off < 1e-5 and np.allclose(solved, weights, rtol=1e-2)


@pytest.mark.parametrize("activations", ["all", "layer"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "phimoe", "ernie4_5_moe"])
def test_load_balancing_is_that_of_transformers(
    name: str, activations: Any, tmp_path: Path
) -> None:
    """Of all tokens, those of rows without labels too.

    Seen red: rows without labels left out, shares of each layer taken for those of all layers.
    """
    model: Any = save_tiny(name, tmp_path / "model").double()
    ids, mask, labels = write_batch(tmp_path / "batch.npz", True)
    labels = np.array(labels)
    labels[-1] = -100
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    save_arrays(tmp_path / "batch.npz", arrays | {"router_aux_loss_coef": np.full(1, 0.1)})
    model.router_aux_loss_coef = 0.1
    given = {key: torch.tensor(x) for key, x in arrays.items()}
    model(**given, output_router_logits=True).loss.backward()
    with open_model(tmp_path / "model") as opened:
        batch = read_batch(tmp_path / "batch.npz", int(opened.hyper["vocab_size"]))
        computed = batch_gradients(opened, batch, activations=activations)
        found = computed.parameters
    every = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    assert computed.norm == pytest.approx(float(torch.stack(every).sum().sqrt()), rel=1e-6)
    compared = 0
    for key, p in model.named_parameters():
        if key in found and p.grad is not None:
            apart = np.linalg.norm(found[key] - p.grad.numpy()) / np.linalg.norm(p.grad.numpy())
            assert apart < 1e-5, key
            compared += 1
    assert compared > 20


def test_a_loss_of_routers_of_a_model_without_them_is_one_line(tmp_path: Path) -> None:
    model, batch, grads = made("qwen2")
    save_file(grads, tmp_path / "grads.safetensors")
    for value, says in (
        (np.float32(0.1), "has no routers, and the batch states a loss of routers"),
        (np.float32(-1), "router_aux_loss_coef is -1.0; expected one number of at least 0"),
        (np.zeros(2), "expected one number of at least 0"),
    ):
        arrays = dict(np.load(batch)) | {"router_aux_loss_coef": value}
        save_arrays(tmp_path / "batch.npz", arrays)
        with pytest.raises(AprfmtError, match=says):
            explain_step(
                model, grads=[tmp_path / "grads.safetensors"], batch=tmp_path / "batch.npz"
            )


@pytest.mark.parametrize("differences", [False, True])
def test_arrays_of_a_batch_that_nothing_reads_are_said(differences: bool, tmp_path: Path) -> None:
    """Seen red: weights of labels passed over, and the factor of a router's loss said unread."""
    model, batch, grads = made("qwen2")
    save_file(dict(grads), tmp_path / "g.safetensors")
    more = {"loss_weights": np.ones(3), "router_z_loss_coef": np.float32(0)}
    own = save_arrays(tmp_path / "batch.npz", dict(np.load(batch)) | more)
    assert read_batch(own, 10**6).unread == ("loss_weights",)
    given = [tmp_path / "g.safetensors"]
    report = explain_step(model, grads=given, batch=own, differences=differences)
    said = report.pronounced
    assert said.exit == 2 and "could not be compared: batch array loss_weights" in said.says


def test_a_batch_alone_gives_its_loss_and_gradients(tmp_path: Path) -> None:
    """Seen red: refused, as nothing to explain; "no batch says its gradient"."""
    model, batch, grads = made("qwen2")
    report = explain_step(model, batch=batch)
    assert report.exit_code == 2 and report.loss is not None
    assert report.norms.gradient is None and report.norms.computed == pytest.approx(
        sum(float(np.square(g).sum()) for g in grads.values()) ** 0.5, rel=1e-4
    )
    assert all(row.computed is not None for row in report.tensors)
    assert {row.why for row in report.tensors} == {
        "computed, and nothing to hold it against: give --grads, or --after"
    }
    done = aprfmt("step", model, "--batch", batch)
    assert done.code == 2 and f"norm of all gradients {report.norms.computed:.6g}" in done.out
