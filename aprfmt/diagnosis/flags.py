"""Flags of config.json that a model's own tensors contradict: what each loader makes of them.

aprfmt and llama.cpp believe the tensors; transformers, the reference, believes the flag: it drops
what the flag denies and fills in what is missing. It is a bug where its logits change by that.
Measured with transformers 5: a missing bias becomes zeros; a head that differs from the embedding
is kept although the flag ties them; a denied bias is dropped; a parallel residual drops the second
norm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from aprfmt.arch.value_checks import same_value
from aprfmt.base.protocols import Value
from aprfmt.causes.hyperparameters import SHOWN_BY, hyper_causes
from aprfmt.diagnosis.found import Evidence
from aprfmt.diagnosis.levels import Levels
from aprfmt.diagnosis.mixing import make_run_pair
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.probe_ids import choose_ids
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import record_points
from aprfmt.inference.rows import RowSource, StoredRows
from aprfmt.inference.weights import Weights, free_budget
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model
from aprfmt.tensors.norms import exact_norm

_DENIED = "transformers and vLLM drop the stored tensors, llama.cpp and aprfmt use them"
_MISSING = "transformers fills them with zeros, which change nothing; llama.cpp and aprfmt add none"
# (hyperparameter, what the flag says) -> what loaders do, and whether the reference's pass changes.
_LOADERS: Mapping[tuple[str, bool], tuple[str, bool]] = {
    **{(name, False): (_DENIED, True)
       for name in ("attention_bias", "attention_out_bias", "mlp_bias")},
    **{(name, True): (_MISSING, False)
       for name in ("attention_bias", "attention_out_bias", "mlp_bias")},
    ("tied_embeddings", True): (
        "transformers 5 keeps the stored head and warns, older ones and vLLM use the embedding, "
        "llama.cpp and aprfmt the stored head", False,
    ),
    ("parallel_residual", True): (
        "transformers drops the second norm and adds attention and MLP to one stream, llama.cpp "
        "and aprfmt follow the tensors", True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Contradiction:
    """A flag of config.json (`name`, its value `stated`) and the role keys that contradict it."""

    name: str
    stated: bool
    keys: tuple[str, ...]


def contradictions(model: Model) -> Iterator[Contradiction]:
    """Yield a Contradiction for each flag of a model's config.json that its tensors contradict.

    Yields nothing for GGUF and APR, whose readers go by the tensors.
    """
    if model.config is None or model.key_style in ("gguf", "apr"):
        return  # readers of those go by the tensors
    roles = [*model.roles]
    for name, row in model.resolution.report.demanded.items():
        value = row.value
        if name not in model.hyper or same_value(value, model.hyper[name]):
            continue
        shown = SHOWN_BY.get(name, ())
        keys = tuple(key for key in roles if key.partition(".")[2] in shown or key in shown)
        yield Contradiction(name, bool(value), keys)


def add_flag_findings(a: Model, b: Model, found: Levels) -> None:
    """Add findings or evidence to `found` for contradicted flags that B has and A has not."""
    # What A contradicts in the same way is no difference.
    same = {(row.name, row.stated) for row in contradictions(a)}
    for row in contradictions(b):
        if (row.name, row.stated) in same or (row.name, row.stated) not in _LOADERS:
            continue
        # Flags that change nothing in the reference's pass are evidence only.
        loaders, changes = _LOADERS[row.name, row.stated]
        key = _config_key(b, row.name)
        says = f"{key} of B's configuration is {row.stated}, its tensors say {not row.stated}"
        says += f": {loaders}"
        if not changes:
            found.evidence.append(Evidence("config", says, (key, *row.keys[:4])))
            continue
        # Measured: the pass by the flag against the pass by the tensors.
        before, after, bound = _logit_distances(a, b, row)
        if before <= bound:
            found.evidence.append(Evidence("config", f"{says}; the logits do not show it", (key,)))
            continue
        found.stated.append(
            Finding(
                hyper_causes()[row.name],
                says,
                "config",
                "bug",
                tuple(dict.fromkeys((row.name, key, *row.keys))),
                after <= bound,
                "",
                before,
                after,
                "logits as transformers reads the flag; after: with the flag the tensors ask for",
                {row.name: {"a": not row.stated, "b": row.stated}},
                proof=unfitted_proof() if after <= bound else None,
            )
        )


def _config_key(model: Model, name: str) -> str:
    """Return the key of config.json that gives a hyperparameter."""
    read = model.resolution.report.read
    return next((key for key, given in read.items() if given == name), name)


def _logit_distances(a: Model, b: Model, row: Contradiction) -> tuple[float, float, float]:
    """Return (distance by the flag, distance by the tensors, tolerance) of B's logits from A's.

    All are relative L2.
    """
    ids = choose_ids([a.hyper, b.hyper], long=False)
    bound = make_run_pair(a, b).threshold_of("logits", ("float32", "float32")).rel_l2
    reference = compute_logits(PatchedModel.unpatched(a, ids, "float32"))
    believed = compute_logits(PatchedModel.unpatched(b, ids, "float32"))
    drop = () if row.stated else row.keys
    read = compute_logits(_model_with_flag(b, {row.name: row.stated}, drop, ids))
    scale = exact_norm(reference) or 1.0
    before, after = (exact_norm(x - reference) / scale for x in (read, believed))
    return before, after, bound


def _model_with_flag(
    model: Model, values: Mapping[str, Value], drop: tuple[str, ...], ids: tuple[int, ...]
) -> PatchedModel:
    """Return the model as a loader that follows the flag reads it: with `values`, without `drop`.

    `values` are hyperparameters to set, `drop` role keys to leave out, `ids` the tokens to run.
    """
    rows: dict[str, RowSource] = {
        key: StoredRows(tensor) for key, tensor in model.roles.items() if key not in drop
    }
    weights = Weights(rows, free_budget(), str(model.path))
    backend = BACKENDS["numpy"]("cpu", "float32")
    return PatchedModel(model.spec, model.hyper.with_values(**values), weights, backend, ids)


def compute_logits(patched: PatchedModel) -> np.ndarray:
    """Return the logits of a pass (float64, [tokens, vocabulary]) and close the model's weights."""
    try:
        return np.asarray(record_points(patched)["logits"], np.float64)
    finally:
        patched.weights.close()
