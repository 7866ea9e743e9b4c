"""Finds the lost or changed key of a configuration that cannot be read, by a good one."""

import json
import math
import shlex
from dataclasses import replace

from aprfmt.arch.other_keys import MASK_KEYS
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.arch.value_checks import same_value
from aprfmt.causes.hyperparameters import hyper_causes
from aprfmt.diagnosis.config_changes import differing_keys
from aprfmt.diagnosis.flags import compute_logits
from aprfmt.diagnosis.mixing import make_run_pair
from aprfmt.diagnosis.records import Evidence
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.inference.probe_ids import choose_ids
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model
from aprfmt.model.config_paths import GONE, Key, read_with_changes, value_at_path

_MOST = 64  # differing keys that are tried


def read_with_restored_key(
    good: Model, bad: Model, label: str
) -> tuple[Model, Finding, Evidence] | None:
    """Return (`bad` read with one key of `good`'s config.json, finding, evidence), or None.

    None where `bad` can be read, `good` cannot, or no single key makes `bad` readable. `label` is
    the side of `bad`.
    """
    error = refusal_reason(bad) or misfit_reason(bad) or absent_layers_reason(bad)
    if (
        not error
        or refusal_reason(good)
        or misfit_reason(good)
        or good.config is None
        or bad.folder is None
    ):
        return None
    if bad.folder.config is None:
        return None
    apart = differing_keys(good.config, bad.folder.config)
    tried = [one for one in apart if one[1] is not GONE or one[0][-1] in MASK_KEYS]
    for path, value in tried[:_MOST]:
        made = read_with_changes(bad, {path: value})
        cause = _cause_of_key(good, path)
        if cause and not (
            refusal_reason(made) or misfit_reason(made) or absent_layers_reason(made)
        ):
            return (
                made,
                _key_finding(good, bad, made, path, cause, label),
                Evidence("config", error),
            )
    return None


def architecture_name(model: Model) -> str | None:
    """Return the name of a model's architecture; None where it cannot be determined."""
    try:
        return model.spec.name
    except ArchError:
        return None


def refusal_reason(model: Model) -> str:
    """Return why a model's configuration cannot be read; "" if it can."""
    try:
        model.resolution  # noqa: B018
    except ArchError as error:
        return str(error)
    return ""


def misfit_reason(model: Model) -> str:
    """Return a sentence if two or more tensors do not have the configured shapes, else ""."""
    try:
        wrong = model.resolution.coverage.misshapen
    except ArchError:
        return ""
    if len(wrong) < 2:
        return ""
    key, has, wanted = wrong[0]
    return (
        f"{model.path}: {len(wrong)} tensors have other shapes than the configuration gives, such "
        f"as {key}: {list(has)} for {list(wanted)}"
    )


def absent_layers_reason(model: Model) -> str:
    """Return a sentence if the configuration counts layers that have no tensors, else "".

    Only if these are the last layers and nothing else is missing. The file alone cannot say whether
    they were lost or never there.
    """
    try:
        found = model.resolution
    except ArchError:
        return ""
    there = {layer for key in found.roles if (layer := split_key(key)[0]) is not None}
    count, lacks = int(found.hyper["n_layers"]), found.coverage
    missing = (*lacks.missing, *lacks.accepted)
    if not missing or there != {*range(len(there))} or len(there) >= count:
        return ""
    if any((split_key(key)[0] or 0) < len(there) for key in missing):
        return ""
    key = found.hyper.of("n_layers").key
    return f"{model.path}: {key} is {count}, and {len(there)} layers have tensors"


def _key_finding(
    good: Model, bad: Model, made: Model, path: Key, cause: str, label: str
) -> Finding:
    """Return the finding of one key that was lost or changed, confirmed if the logits agree.

    `made` is the faulty model `bad` read with `good`'s key at `path`, `label` its side.
    """
    # Whether the restored key makes all hyperparameters equal, and the logits.
    equal = all(
        name in made.hyper and same_value(good.hyper[name], made.hyper[name]) for name in good.hyper
    )
    away, bound = _logit_distance(good, made)
    # The finding names the key, and the other side's value.
    key = ".".join(path)
    other = "A" if label == "B" else "B"
    value, given = (value_at_path(values, path) for values in (good.config, bad.config))
    stated = "not given" if value is None else repr(value)
    own = "not given" if given is None else repr(given)
    misfit = "asks for attention that is not causal" * (path[-1] in MASK_KEYS)
    return Finding(
        cause,
        f"{label}'s configuration {misfit or 'does not fit its tensors'}: {key} is {stated} in "
        f"{other} and {own} in {label}; with {other}'s value it is read"
        + ", and says the same"
        * equal,
        "config",
        "bug",
        (key,),
        away <= bound,
        "",
        1.0,
        away,
        f"logits of {other}'s weights under {label}'s configuration; before: there are none, "
        f"counted as 1; after: with {other}'s {key}",
        {key: {other.lower(): value, label.lower(): given}},
        counted=True,
        next=_key_command(bad, key, value),
        proof=unfitted_proof() if away <= bound else None,
    )


def _key_command(bad: Model, key: str, value: object) -> str:
    """Return the `set` command that gives a folder's config.json a key, or takes it away (None)."""
    assert bad.folder is not None
    name = f"config.json:{key}"
    word = f"{name}={json.dumps(value)}"
    return set_command(
        bad.folder.path, [shlex.quote(word) if value is not None else f"--remove {name}"]
    )


def _logit_distance(good: Model, made: Model) -> tuple[float, float]:
    """Return (relative L2 between the logits under both configurations, its tolerance).

    Both passes use `good`'s weights; infinite if the sizes of `made` do not fit these.
    """
    ids = choose_ids([good.hyper, made.hyper], long=False)
    bound = make_run_pair(good, made).threshold_of("logits", ("float32", "float32")).rel_l2
    mine = PatchedModel.unpatched(good, ids, "float32")
    reference = compute_logits(mine)
    try:
        read = compute_logits(
            replace(PatchedModel.unpatched(good, ids, "float32"), spec=made.spec, hp=made.hyper)
        )
    except (AprfmtError, ValueError, IndexError):
        return math.inf, bound  # sizes that do not fit the weights
    return rel_l2(read, reference), bound


def _cause_of_key(model: Model, path: Key) -> str:
    """Return the name of the cause for a configuration key, by its path; "" if there is none."""
    if path[-1] in MASK_KEYS:
        return "mask"
    read = model.resolution.report.read
    for end in range(len(path), 0, -1):
        name = read.get(".".join(path[:end]))
        if name is not None:
            return "config_sizes" if name == "n_layers" else hyper_causes().get(name, "")
    nested = next((key for key in read if key.startswith(f"{path[0]}.") and len(path) > 1), "")
    return hyper_causes().get(read.get(nested, ""), "")
