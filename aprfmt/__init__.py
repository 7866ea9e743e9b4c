"""aprfmt: the toolkit for model files that are wrong (APR v2, GGUF, safetensors).

    with aprfmt.open("model.gguf") as model:
        model["blk.0.attn_q.weight"].numpy()
    aprfmt.convert("model.safetensors", "model.apr")
    aprfmt.diff("a.apr", "b.gguf").equal
    aprfmt.validate("model.apr").outcome

Importing the package imports nothing heavy; every function imports what it needs when called.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from aprfmt.base.sequences import listed
from aprfmt.base.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from aprfmt.api import Evaluation, Generation, Hashes, RunOptions
    from aprfmt.checks import Validation
    from aprfmt.checks.gates.running import QaOptions
    from aprfmt.checks.records import QaReport
    from aprfmt.compare import DiffReport
    from aprfmt.conversion import ConversionReport
    from aprfmt.conversion.options import ConvertOptions
    from aprfmt.diagnosis import Diagnosis
    from aprfmt.fleet.run import ScanReport
    from aprfmt.inference.api import TraceOptions
    from aprfmt.inference.parity.parity_records import Parity
    from aprfmt.inference.trace import Trace
    from aprfmt.model import Model
    from aprfmt.recovery import Repair
    from aprfmt.training.device_comparison import RunsReport
    from aprfmt.training.options import StepOptions
    from aprfmt.training.report import StepReport

__all__ = [
    "__version__", "convert", "diagnose", "diff", "eval", "hash", "open", "parity", "qa", "repair",
    "run", "scan", "set", "step", "trace", "validate",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names only, for completion in a shell."""
    return sorted([*__all__, "errors"])


def eval(
    model: "Path | str", *, text: "str | Sequence[str]" = (), ids: Sequence[int] | None = None,
    against: "Path | str | None" = None, max_seq_len: int | None = None,
    random_weights: bool = False, **where: "Unpack[RunOptions]",
) -> "Evaluation":  # fmt: skip
    """Return the loss of MODEL[@RUN] on texts or token ids, in nats per token.

    The result has `.nats`, `.perplexity`, `.exit_code` and `.to_json()`. `against` is another model
    whose next-token distributions are compared on the same tokens (`.divergence`). A text is cut
    into windows of `max_seq_len` tokens that share no token. With `random_weights` a loss near
    ln(vocabulary) is what is expected. `where` says where the model runs (`device`, `backend`,
    `dtype`, ...). Raises UsageError where there is nothing to score.
    """
    from aprfmt.api import evaluate

    return evaluate(
        model, text=text, ids=ids, against=against, max_seq_len=max_seq_len,
        random_weights=random_weights, **where,
    )  # fmt: skip


def hash(
    model: "Path | str", *, tensors: Sequence[str] = (), raw_only: bool = False,
    arch: str | None = None,
) -> "Hashes":  # fmt: skip
    """Return SHA-256 of every tensor: of its stored bytes, and of its logical values.

    The second is equal across formats. `tensors` are PATTERNs in any spelling. `raw_only` decodes
    nothing. A tensor that cannot be read has no hashes, and `.damage` names it. Raises FormatError
    for a file that cannot be opened.
    """
    from aprfmt.api import hash_model

    return hash_model(model, tensors=listed(tensors), raw_only=raw_only, arch=arch)


def open(
    path: "Path | str", *, arch: str | None = None, allow_missing: Sequence[str] = ()
) -> "Model":
    """Return an open model: of a file, a shard index, a Hugging Face folder or a hub cache entry.

    Or of an address: `hf://owner/name`, `https://`, `s3://` (docs/reference/addresses.md). A hub
    cache entry is named `org/name`. The result is a context manager and a mapping from the file's
    own tensor names to tensors with `.name .shape .encoding .nbytes .offset`, `.raw()` (a read-only
    view of the stored bytes) and `.numpy()` (decoded, row-major); it has `.metadata`, `.config` and
    `.tokenizer`. `allow_missing` are patterns of required tensors: the model may be run without
    them. Raises aprfmt.errors.FormatError if the file is not a valid model file, UsageError if a
    folder holds several models and does not say which one to open.
    """
    from aprfmt.model import open_model

    return open_model(path, arch=arch, allow_missing=listed(allow_missing))


def convert(
    src: "Path | str",
    dst: "Path | str",
    *,
    to: str | None = None,
    **options: "Unpack[ConvertOptions]",
) -> "ConversionReport":
    """Convert any format to any, and return a report of what was written and verified.

    The format of `dst` is `to`, or its extension's. `options` are the fields of
    aprfmt.conversion.Options: encoding, quantize, force, verify and others. Raises ConversionError
    where the target cannot hold the model as asked, OutputError where `dst` exists and `force` is
    not given.
    """
    from aprfmt.conversion import convert as run

    return run(src, dst, to=to, **options)


def diagnose(
    a: "Path | str",
    b: "Path | str",
    *,
    model: "Path | str | None" = None,
    ids: Sequence[int] | None = None,
    arch: str | None = None,
) -> "Diagnosis":
    """Return where two models, runs or saved traces differ, and why.

    A run is `MODEL@torch:cpu:bfloat16`. `model` is the model that saved traces were made with.
    `ids` are the token ids both sides are run on; without them aprfmt chooses some.

    The result has `.verdict`, `.cause`, `.findings`, `.sentence` and `.to_json()`. Raises
    UsageError if a path does not exist, FormatError if a file is damaged.
    """
    from aprfmt.diagnosis import diagnose as run

    return run(str(a), str(b), model=None if model is None else str(model), ids=ids, arch=arch)


def diff(
    a: "Path | str", b: "Path | str", *, tensors: Sequence[str] = (), arch: str | None = None
) -> "DiffReport":
    """Compare two models in any formats, and return a report of every tensor and field.

    `tensors` are PATTERNs in any spelling. A tensor that cannot be read is UNREADABLE in the
    report; a file that cannot be opened raises FormatError.
    """
    from aprfmt.compare import diff as run

    return run(a, b, tensors=listed(tensors), arch=arch)


def parity(
    model: "Path | str", between: Sequence[str], *, prompt: str | None = None,
    ids: Sequence[int] | None = None, chat: str | None = None, base: "Path | str | None" = None,
    arbiter: bool = False, arch: str | None = None, allow_missing: Sequence[str] = (),
    threads: int | None = None, memory: int | None = None, deterministic: bool = False,
) -> "Parity":  # fmt: skip
    """Compare runs of one model at every capture point, and return the distances and verdicts.

    The first run is the reference. `between` are runs as the command line spells them: `cpu`,
    `torch:cpu:bfloat16`, `cuda`, `transformers`, `llama.cpp`. Without prompt, ids and chat aprfmt
    chooses token ids. `base` is the model before quantization. `arbiter` runs numpy in float64 too.
    The result has `.verdict`, `.exit_code`, `.pairs` and `.to_json()`. `threads`, `memory` and
    `deterministic` are as in `RunOptions`; `allow_missing` are patterns of required tensors that
    may be missing. Raises UsageError for fewer than two runs, BackendUnavailableError for a run
    that is not possible here.
    """
    from aprfmt.api import parity as run

    return run(
        model, between, prompt=prompt, ids=ids, chat=chat, base=base, arbiter=arbiter, arch=arch,
        allow_missing=allow_missing, threads=threads, memory=memory, deterministic=deterministic,
    )  # fmt: skip


def qa(model: "Path | str", **options: "Unpack[QaOptions]") -> "QaReport":
    """Put a model through the gates, and return a report: PASS, FAIL or NOT_RUN for each.

    `options` are `only`, `skip`, `min_run` and the fields of
    aprfmt.checks.gates.model_under_test.QaRequest. The result has `.outcome`, `.exit_code`,
    `.gate(name)` and `.to_json()`. Raises UsageError for a name that is no gate.
    """
    from aprfmt.checks.gates.running import run

    return run(model, **options)


def repair(
    broken: "Path | str", source: "Path | str", output: "Path | str", *,
    manifest: "Path | str | None" = None, compare: bool = False, force: bool = False,
) -> "Repair":  # fmt: skip
    """Write `output`, which is `broken` with bad bytes taken from `source`; return what was taken.

    `source` is a good copy here or at an address, of which only the needed ranges are fetched.
    `manifest` is what `aprfmt hash --write` wrote of the good file. `compare` reads all of
    `source`. The result has `.size`, `.taken`, `.ranges`, `.unproven`, `.proof` and `.to_json()`.
    Raises UsageError where the files are not of one model, or where nothing says what is wrong.
    """
    from aprfmt.api import repair_file

    return repair_file(broken, source, output, manifest=manifest, compare=compare, force=force)


def run(
    model: "Path | str", *, prompt: str | None = None, ids: Sequence[int] | None = None,
    chat: str | None = None, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, seed: int = 0, ignore_stop: bool = False, **where: "Unpack[RunOptions]",
) -> "Generation":  # fmt: skip
    """Generate text with MODEL[@RUN] from exactly one of prompt, ids and chat (a user's message).

    Greedy at temperature 0, else drawn from the `top_k` likeliest tokens (0: all) that add up to
    `top_p`. Generation ends at a stop token of the model, after `max_tokens`, or at the end of the
    context. The result has `.text`, `.ids`, `.stop` and `.to_json()`. `where` says where the model
    runs (`device`, `backend`, `dtype`, ...). `seed` is that of the draws. With `ignore_stop`
    generation goes on after stop tokens. Raises UsageError for a prompt that fills the context.
    """
    from aprfmt.api import run as generate

    return generate(
        model, prompt=prompt, ids=ids, chat=chat, max_tokens=max_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=seed, ignore_stop=ignore_stop, **where,
    )  # fmt: skip


def scan(
    roots: "Path | str | Sequence[Path | str]", out: "Path | str", *, checks: Sequence[str] = (),
    jobs: int = 1, families: bool = True,
) -> "ScanReport":  # fmt: skip
    """Check every model under some roots, write a row for every question; return a report.

    `out` is a .jsonl or .parquet file. What it holds already is not asked again. `checks` names
    single questions, `jobs` are processes, and `families` looks for models that derive from others.
    The result has `.exit_code`, `.found`, `.to_json()`, `.to_arrow()` and `.to_pandas()`.
    """
    from aprfmt.api import scan as run

    return run(roots, out, checks=listed(checks), jobs=jobs, families=families)


def set(
    model: "Path | str", output: "Path | str", values: Mapping[str, Any], *,
    remove: Sequence[str] = (), force: bool = False, verify: bool = True,
) -> "ConversionReport":  # fmt: skip
    """Write a copy of a model with other metadata and the same tensors; return a report.

    A key keeps the type it has in the file; `KEY:TYPE` gives a GGUF key another one. Of a Hugging
    Face folder the value changes where readers take it from, and `FILE:KEY` names a file. `remove`
    names keys to leave out. With `verify` the copy is compared with the model. Raises UsageError
    for a value that the key cannot have, OutputError where `output` exists and `force` is not
    given.
    """
    from aprfmt.api import set_metadata

    return set_metadata(model, output, values, remove=listed(remove), force=force, verify=verify)


@overload
def step(
    model: "Path | str", *, between: None = None, **options: "Unpack[StepOptions]"
) -> "StepReport": ...
@overload
def step(
    model: "Path | str", *, between: Sequence[str], **options: "Unpack[StepOptions]"
) -> "RunsReport": ...
def step(
    model: "Path | str", *, between: Sequence[str] | None = None, **options: "Unpack[StepOptions]"
) -> "StepReport | RunsReport":
    """Return what a training step did to the weights, and whether it is what its optimizer makes.

    `options` are those of `aprfmt step`. `model` is the checkpoint before the step and `after` the
    one after it. With `adapter` the step is that of an adapter, and `model` is its base. `grads`
    are one or several files of the step's gradients, of parameters or of capture points. They are
    compared with the gradients of `batch`, which torch computes on `device` in `dtype`. With
    `check_gradients` they are compared with differences of the batch's loss. `rename` are rules
    OLD=NEW for their names. `trained_in` is the trainer's arithmetic, if it is not that of the
    weights. `optimizer` is `adamw:lr=2e-4,wd=0.1,step=1`, and `optimizer_state` is the state that
    the trainer saved. `accept` are patterns (`unread:PATTERN`) of items that may stay uncompared.
    The result has `.exit_code`, `.tensors`, `.causes`, `.norms` and `.to_json()`.

    `between` are runs such as `cpu` and `cuda:0:bfloat16`, whose gradients of `batch` are compared.
    The result then has `.exit_code`, `.runs`, `.gradients` and `.to_json()`.

    Raises UsageError where a file is of another model, or where there is nothing to compare.
    """
    from aprfmt.training.options import answer_between, answer_step

    if between is not None:
        return answer_between(model, between, **options)
    return answer_step(model, **options)


def trace(model: "Path | str", **options: "Unpack[TraceOptions]") -> "Trace":
    """Run tokens through MODEL[@RUN] and return every wanted capture point with its values.

    `options` are the arguments of aprfmt.inference.api.trace: prompt or ids, points, layers,
    positions, device, backend, dtype, ... The result has `.records`, `.recorded_values(key)` and
    `.to_json()`.
    """
    from aprfmt.inference.api import trace as run

    return run(model, **options)


def validate(
    path: "Path | str",
    *,
    arch: str | None = None,
    strict: bool = False,
    allow_missing: Sequence[str] = (),
) -> "Validation":
    """Check every byte of a model, and return a report of all checks.

    The result has `.outcome`, `.checks` and `.findings`. `strict` makes warnings failures;
    `allow_missing` are patterns of required tensors whose absence is a warning only. Raises
    FormatError for a file that cannot be opened.
    """
    from aprfmt.checks import validate as run

    return run(path, arch=arch, strict=strict, allow_missing=listed(allow_missing))
