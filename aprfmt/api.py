"""The commands as Python functions that return records and print nothing.

`aprfmt` offers these functions and imports them when they are called. Each returns a record with
`.to_json()`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from aprfmt.base.data_frames import Row, Tabular
from aprfmt.base.outcome import Report
from aprfmt.errors import UsageError
from aprfmt.inference.device import parse_run
from aprfmt.inference.forward import check_tokens
from aprfmt.inference.running import RunRequest, make_request, open_run
from aprfmt.inference.sampling import Sampler, Sampling
from aprfmt.model import Model, manifest, open_model
from aprfmt.model.completeness import check_runnable
from aprfmt.remote.paths import parse_location

if TYPE_CHECKING:
    from aprfmt.conversion import ConversionReport
    from aprfmt.fleet.run import ScanReport
    from aprfmt.inference.evaluation import Sample
    from aprfmt.inference.loss import KlDivergence, MeanLoss
    from aprfmt.inference.parity.parity_records import Parity
    from aprfmt.model.verdict import Pronounced
    from aprfmt.recovery import Repair
    from aprfmt.tokenizer.base import Tokenizer


class RunOptions(TypedDict, total=False):
    """Where a model runs: the fields of `RunRequest` that a user chooses.

    `device` is cpu, cuda, cuda:N, cuda:all or auto. `memory` is a budget for weights, in bytes.
    """

    device: str | None
    backend: str | None
    dtype: str | None
    arch: str | None
    allow_missing: Sequence[str]
    threads: int | None
    memory: int | None
    deterministic: bool


@dataclass(frozen=True)
class Generation:
    """Generated text. `stop` is why it ended: stop_token, max_tokens or context.

    `ids` are the generated tokens without the stop token; `text` is None without a tokenizer.
    """

    model: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    stop: Literal["stop_token", "max_tokens", "context"]
    stop_token: int | None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on texts, in nats per token, and the checks of that loss.

    `other` and `divergence` are those of the model that `against` named, None without one.
    """

    model: str
    loss: "MeanLoss"
    report: Report
    pronounced: "Pronounced"
    other: "MeanLoss | None" = None
    divergence: "KlDivergence | None" = None

    @property
    def nats(self) -> float:
        """The mean loss of the scored tokens, in nats."""
        return self.loss.nats

    @property
    def perplexity(self) -> float:
        """E to the power of the loss."""
        return self.loss.perplexity

    @property
    def exit_code(self) -> int:
        """0 where every check passed, 1 where one failed, 2 where something was not checked."""
        return self.pronounced.exit

    def to_json(self) -> dict[str, Any]:
        """Return the losses, the checks and the verdict as a JSON object."""
        return {
            "model": self.model,
            "loss": asdict(self.loss),
            "against": None if self.other is None else asdict(self.other),
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "gate": self.report.to_json(),
            **self.pronounced.to_json(),
        }


@dataclass(frozen=True)
class Hashes(Tabular):
    """SHA-256 of every tensor: `raw` of the stored bytes, `decoded` of the logical values.

    `damage` names what of the file cannot be read.
    """

    model: str
    tensors: tuple[manifest.TensorRow, ...]
    damage: tuple[str, ...] = ()

    def table_rows(self) -> Sequence[Row]:
        """Return one row for each tensor, for conversion to a data frame."""
        return self.tensors

    def to_json(self) -> dict[str, Any]:
        """Return the model, its tensors' hashes and its damage as a JSON object."""
        return {"model": self.model, "tensors": list(self.tensors), "damage": list(self.damage)}


def run(
    model: Path | str,
    *,
    prompt: str | None = None,
    ids: Sequence[int] | None = None,
    chat: str | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    ignore_stop: bool = False,
    **where: Unpack[RunOptions],
) -> Generation:
    """Return the text generated with MODEL[@RUN]; the arguments are those of `aprfmt.run`."""
    from aprfmt.inference.generation import room_in_context
    from aprfmt.tokenizer.loading import metadata_stop_ids, try_load_tokenizer

    with open_run(_run_request(model, where)) as run:
        tokens = _prompt_ids(run.model, prompt, ids, chat)
        room = room_in_context(run.model, len(tokens))
        limit = min(max_tokens, room)
        tokenizer = try_load_tokenizer(run.model)
        ends = metadata_stop_ids(run.model) if tokenizer is None else tokenizer.stop_ids
        stops = frozenset() if ignore_stop else frozenset(ends)
        sampler = Sampler(Sampling(temperature, top_k, top_p, seed))
        drawn: list[int] = []

        def draw_token(logits: Any) -> int:
            """Return the token id drawn by the sampler from logits [vocab], appended to `drawn`."""
            drawn.append(sampler(logits))
            return drawn[-1]

        for _ in run.session.generate(tokens, draw_token, limit, stops):
            pass
        stopped = bool(drawn) and drawn[-1] in stops
        made = drawn[:-1] if stopped else drawn
        full: Literal["max_tokens", "context"] = "max_tokens" if room >= max_tokens else "context"
        text = None if tokenizer is None else _generated_text(tokenizer, tokens, made)
        return Generation(
            str(run.model.path),
            tuple(tokens),
            tuple(made),
            text,
            "stop_token" if stopped else full,
            drawn[-1] if stopped else None,
        )


def evaluate(
    model: Path | str,
    *,
    text: str | Sequence[str] = (),
    ids: Sequence[int] | None = None,
    against: Path | str | None = None,
    max_seq_len: int | None = None,
    random_weights: bool = False,
    **where: Unpack[RunOptions],
) -> Evaluation:
    """Return the loss of MODEL[@RUN] on texts; the arguments are those of `aprfmt.eval`.

    Raises UsageError where neither `text` nor `ids` is given.
    """
    from aprfmt.checks.records import pronounce_report
    from aprfmt.inference.evaluation import Sample, plan_windows, score_windows
    from aprfmt.inference.loss import assess_loss, window_size
    from aprfmt.tokenizer.loading import refuse_other_tokens

    texts = [text] if isinstance(text, str) else list(text)
    if not texts and ids is None:
        raise UsageError("nothing to evaluate; give text or ids")
    with ExitStack() as stack:
        run = stack.enter_context(open_run(_run_request(model, where)))
        # Every text and the ids are samples; both models are scored on the same windows.
        samples = [_text_sample(run.model, f"text {at}", each) for at, each in enumerate(texts)]
        if ids is not None:
            vocab = int(run.model.hyper["vocab_size"])
            samples.append(Sample("ids", [int(i) for i in check_tokens(ids, vocab)]))
        capacity = max_seq_len or window_size(int(run.model.hyper["context_length"]), "disjoint")
        planned, skipped = plan_windows(samples, capacity)
        other = None
        if against is not None:
            there: RunOptions = {}
            other = stack.enter_context(open_run(_run_request(against, there)))
            refuse_other_tokens(run.model, other.model, chain(*(each.ids for each in samples)))
        found = score_windows(
            run.session, planned, skipped, other.session if other is not None else None
        )
        # An untrained model is expected near the loss of a uniform guess.
        kind: Literal["trained", "random"] = "random" if random_weights else "trained"
        checks = assess_loss(found.loss, kind, str(run.model.path))
        if other is not None and found.other is not None and found.loss.tokens:
            checks += assess_loss(found.other, kind, str(other.model.path))
        report = Report(str(run.model.path), tuple(checks))
        return Evaluation(
            str(run.model.path),
            found.loss,
            report,
            pronounce_report(report, run.model),
            found.other,
            found.divergence,
        )


def parity(
    model: Path | str,
    between: Sequence[str],
    *,
    prompt: str | None = None,
    ids: Sequence[int] | None = None,
    chat: str | None = None,
    base: Path | str | None = None,
    arbiter: bool = False,
    arch: str | None = None,
    allow_missing: Sequence[str] = (),
    threads: int | None = None,
    memory: int | None = None,
    deterministic: bool = False,
) -> "Parity":
    """Return the comparison of a model's runs; the arguments are those of `aprfmt.parity`."""
    from aprfmt.inference.parity.request import ParityRequest
    from aprfmt.inference.parity.run_comparison import compare_choices as compare
    from aprfmt.inference.probe_ids import choose_ids

    choices = [parse_run(each) for each in between]
    for choice in choices:
        choice.refuse_missing_gpu()
    with ExitStack() as stack:
        one = stack.enter_context(open_model(model, arch=arch, allow_missing=allow_missing))
        check_runnable(one.resolution, one.path)
        if prompt is None and ids is None and chat is None:
            tokens = list(choose_ids([one.hyper], long=True))
        else:
            tokens = _prompt_ids(one, prompt, ids, chat)
        source = None
        if base is not None:
            source = stack.enter_context(open_model(base, arch=arch, allow_missing=allow_missing))
        request = ParityRequest(
            tuple(tokens),
            text=prompt,
            arbiter=arbiter,
            threads=threads,
            memory=memory,
            deterministic=deterministic,
        )
        return compare(one, choices, request, source)


def scan(
    roots: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    checks: Sequence[str] = (),
    jobs: int = 1,
    families: bool = True,
) -> "ScanReport":
    """Check every model under some roots, write the rows to `out`; return a report.

    The arguments are those of `aprfmt.scan`.
    """
    from aprfmt.fleet.run import ScanRequest
    from aprfmt.fleet.run import scan as run_scan

    every = [roots] if isinstance(roots, str | Path) else list(roots)
    return run_scan(ScanRequest(tuple(map(str, every)), Path(out), checks, jobs, families=families))


def hash_model(
    model: Path | str,
    *,
    tensors: Sequence[str] = (),
    raw_only: bool = False,
    arch: str | None = None,
) -> Hashes:
    """Return SHA-256 of every tensor; the arguments are those of `aprfmt.hash`."""
    from aprfmt.remote.stream_hash import checked_by_published_digests

    with open_model(model, arch=arch, damaged=True) as found:
        with checked_by_published_digests(() if tensors else found.source.files):
            rows = manifest.tensor_rows(found, tensors, raw_only=raw_only)
        return Hashes(str(found.path), tuple(rows), tuple(each.text for each in found.damage))


def repair_file(
    broken: Path | str,
    source: Path | str,
    output: Path | str,
    *,
    manifest: Path | str | None = None,
    compare: bool = False,
    force: bool = False,
) -> "Repair":
    """Write a damaged file completed from a good copy, and return what was taken from the copy.

    The arguments are those of `aprfmt.repair`.
    """
    from aprfmt.recovery import repair

    here, there = parse_location(broken), parse_location(source)
    if there.is_dir():
        there = there / here.name
    known = None if manifest is None else parse_location(manifest)
    return repair(here, there, Path(output), manifest=known, compare=compare, force=force)


def set_metadata(
    model: Path | str,
    output: Path | str,
    values: Mapping[str, Any],
    *,
    remove: Sequence[str] = (),
    force: bool = False,
    verify: bool = True,
) -> "ConversionReport":
    """Write a copy of a model with other metadata, and return the conversion's report.

    The arguments are those of `aprfmt.set`.
    """
    from aprfmt.conversion import convert
    from aprfmt.conversion.edit_request import parse_edits

    with open_model(model) as source:
        changes = [(key, json.dumps(value)) for key, value in values.items()]
        asked = parse_edits(source, changes, remove, Path(output))
    return convert(
        model,
        output,
        metadata=asked.values,
        remove=asked.remove,
        texts=asked.texts,
        force=force,
        verify=verify,
        complete=False,
    )


def _run_request(model: Path | str, where: RunOptions) -> RunRequest:
    """Return the run request of MODEL[@RUN]; UsageError for an engine such as llama.cpp.

    `where` has the options of the run.
    """
    rest = {key: value for key, value in where.items() if key not in ("device", "backend", "dtype")}
    request = make_request(
        model, where.get("device"), where.get("backend"), where.get("dtype"), **rest
    )
    if request.choice.is_engine:
        raise UsageError(f"{request.choice.backend}: is another engine; name a backend of ours")
    request.choice.refuse_missing_gpu()
    return request


def _prompt_ids(
    model: Model, prompt: str | None, ids: Sequence[int] | None, chat: str | None
) -> list[int]:
    """Return the token ids of the one of prompt, ids and chat that is given.

    Raises UsageError unless it is exactly one.
    """
    if sum(each is not None for each in (prompt, ids, chat)) != 1:
        raise UsageError("give one of prompt, ids and chat")
    if prompt is not None:
        found = list(model.tokenizer.encode(prompt))
    elif chat is not None:
        found = list(model.tokenizer.chat([{"role": "user", "content": chat}])[1])
    else:
        found = list(ids or ())
    return [int(i) for i in check_tokens(found, int(model.hyper["vocab_size"]))]


def _generated_text(tokenizer: "Tokenizer", prompt: Sequence[int], made: Sequence[int]) -> str:
    """Return the text of generated ids as it reads after the prompt, without special tokens.

    `made` are the generated ids.
    """
    before = str(tokenizer.decode(prompt, skip_special=True))
    whole = str(tokenizer.decode([*prompt, *made], skip_special=True))
    if whole.startswith(before):
        return whole[len(before) :]
    return str(tokenizer.decode(made, skip_special=True))


def _text_sample(model: Model, name: str, text: str) -> "Sample":
    """Return a text as a sample to score; every window begins with the model's leading tokens.

    `name` is the name of the sample.
    """
    from aprfmt.inference.evaluation import Sample
    from aprfmt.inference.loss import count_leading

    tokenizer = model.tokenizer
    ids = list(tokenizer.encode(text))
    return Sample(name, ids, prefix=count_leading(ids, tokenizer.prefix_ids))
