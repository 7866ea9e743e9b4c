"""Gates that read the file and run nothing: the tensor contract, and plausible metadata."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from aprfmt.base.outcome import Check, check, not_run
from aprfmt.base.protocols import Value
from aprfmt.checks import bounds
from aprfmt.checks.check_runner import repeat_result
from aprfmt.checks.file.architecture_checks import Disagreement, find_disagreements
from aprfmt.checks.gates.model_under_test import ModelUnderTest
from aprfmt.checks.records import Measure, NotRun, Result, list_names
from aprfmt.checks.table import SECOND_READER
from aprfmt.codecs import codec
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.tokenizer.turn_ends import find_unstopped_turn

# --- tensors ----------------------------------------------------------------------------------


def check_tensor_contract(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks pass if all configured tensors exist, fit and can be decoded."""
    model, found = subject.model, subject.resolution.coverage
    checks = [
        *repeat_result(subject, "completeness", "tensors-complete", strict=subject.request.strict),
        *repeat_result(subject, "shapes", "tensors-shaped"),
        *repeat_result(subject, "unexpected", "tensors-claimed"),
        *repeat_result(subject, "architecture", "names-fit"),
        _check_head(model),
        _check_keys_fit(subject),
        _check_decodable(model),
        *repeat_result(subject, "checksum", "file-checksum"),
        *repeat_result(subject, "imports", "imports-of-values"),
    ]
    whole = Measure(found.found, "tensors", 0, "absolute", "a tensor more or less is another model")
    return Result(
        checks=checks,
        measures={"tensors": whole},
        details={
            "expected": found.expected,
            "found": found.found,
            "missing": list(found.missing),
            "accepted": list(found.accepted),
        },
    )


def check_official_library(subject: ModelUnderTest) -> Result:
    """Return a Result with the check that the official library reads tensors as aprfmt does.

    Raises NotRun for a format without such a library.
    """
    checks = list(
        repeat_result(subject, "second_reader", "library-agrees", strict=subject.request.strict)
    )
    if not checks:
        raise NotRun(f"there is no official library of the format {subject.model.format} to ask")
    reading = subject.shared.get(SECOND_READER)
    return Result(checks=checks, details={} if reading is None else asdict(reading))


def _check_head(model: Model) -> Check:
    """Return the check that the model has a head: its own, or the tied embedding."""
    tied = bool(model.hyper["tied_embeddings"])
    name = "token_embd.weight" if tied else "output.weight"
    found = f"{model.hyper['vocab_size']} logits from {name}{' (tied)' if tied else ''}"
    return check("head-resolved", name in model.roles, found, "a head", "the head was lost")


def _check_keys_fit(subject: ModelUnderTest) -> Check:
    """Return the check that keys agree with the tensors about biases, head and vocabulary."""
    found = [one.text for one in _disagreements(subject) if one.name]
    return check(
        "keys-fit-tensors",
        not found,
        "; ".join(found) or "they do",
        "keys and tensors say the same",
        "a part was lost, or config.json is another model's",
    )


def _disagreements(subject: ModelUnderTest) -> list[Disagreement]:
    """Return each conflict between keys, configuration and tensors."""
    return find_disagreements(subject.model, subject.where)


def _check_decodable(model: Model) -> Check:
    """Return the check that every tensor's encoding has a codec."""
    bad = []
    for tensor in model.values():
        if all(stored.decode is not None for stored in tensor.stored):
            continue  # packed: its dialect has decoded it, or it would be no weight
        try:
            codec(tensor.encoding)
        except AprfmtError as error:
            bad.append(f"{tensor.name} ({error})")
    return check(
        "encodings-known",
        not bad,
        list_names(bad),
        "every encoding has a codec",
        "update aprfmt, or convert with the tool that wrote it",
    )


# --- metadata ---------------------------------------------------------------------------------


def check_metadata(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks pass if hyperparameters and tokenizer are plausible."""
    model = subject.model
    return Result(
        checks=[
            *_check_hyperparameters(model),
            _check_conflicts(subject),
            *_check_tokenizer(subject),
        ],
        details={name: _to_list(model.hyper[name]) for name in _SHOWN if name in model.hyper},
    )


_SHOWN = ("norm_eps", "rope_theta", "rope_style", "context_length", "n_heads", "n_kv_heads",
          "head_dim", "vocab_size")  # fmt: skip
# The values a forward pass cannot do without; a table's default for them is a guess in files
# that carry no config.json.
_STATED = ("norm_eps", "rope_theta", "n_heads")


def _to_list(value: Value) -> Any:
    """Return a hyperparameter's value, a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value


def _check_hyperparameters(model: Model) -> Iterator[Check]:
    """Yield checks that hyperparameters are in usual ranges and query heads divide evenly.

    Without a config.json a further check fails if one that the pass needs was taken from a default.
    """
    hp = model.hyper
    rotary = model.spec.block.position == "rope"
    rows = [("norm_eps", bounds.EPS), ("context_length", bounds.CONTEXT)]
    heads = int(hp["n_heads"])
    rows += [("head_dim", bounds.HEAD_DIM)] if heads else []  # mamba has no attention
    rows += [("rope_theta", bounds.THETA)] if rotary else []
    for name, bound in rows:
        value = hp[name]
        origin = hp.of(name)
        yield check(
            name.replace("_", "-"),
            isinstance(value, (int, float)) and bound.holds(value),
            f"{value!r} ({origin.origin} {origin.key})".replace(" )", ")"),
            f"{bound} {bound.unit}: {bound.reason}",
            "compare with the source's config.json",
        )
    counts = dict.fromkeys((int(hp["n_kv_heads"]), int(hp["global_kv_heads"] or hp["n_kv_heads"])))
    if heads:
        uneven = [shared for shared in counts if shared < 1 or heads % shared]
        over = " and ".join(map(str, uneven or counts))
        yield check(
            "heads-divide",
            not uneven,
            f"{heads} over {over}",
            "query heads a multiple of key/value heads",
        )
    if model.config is None:
        names = [name for name in _STATED if rotary or name != "rope_theta"]
        guessed = [name for name in names if hp.of(name).origin == "default"]
        yield check(
            "hyperparameters-stated",
            not guessed,
            list_names(guessed),
            "nothing the forward pass needs was taken from a default",
            "convert again from a folder with its config.json",
        )


def _check_conflicts(subject: ModelUnderTest) -> Check:
    """Return the Check that keys and configuration agree, and that opening gave no warning."""
    said = [one.text for one in _disagreements(subject) if not one.name]
    said += [note.text for note in subject.model.notes if note.level == "warning"]
    return check(
        "no-conflicts",
        not said,
        "; ".join(said) or "none",
        "keys, config and tensors say the same",
        "one of them is another model's",
    )


def _check_tokenizer(subject: ModelUnderTest) -> Iterator[Check]:
    """Yield checks that the vocabulary fits, special ids exist, and there is a stop token."""
    tokenizer = subject.tokenizer
    if tokenizer is None:
        yield not_run("tokenizer", "the model carries no tokenizer")
        return
    strict = subject.request.strict
    yield from repeat_result(subject, "vocabulary_size", "vocabulary-fits", strict=strict)
    yield from repeat_result(subject, "special_ids", "special-ids-inside", strict=strict)
    yield check(
        "stop-tokens",
        bool(tokenizer.stop_ids),
        list_names([f"{i} {tokenizer.token(i)!r}" for i in sorted(tokenizer.stop_ids)]),
        "at least one",
        "generation would never stop: set eos_token_id",
    )
    if tokenizer.chat_template is not None:
        yield from repeat_result(subject, "chat_template", "template-harmless")
        yield from _unstopped_turn(subject.model)


def _unstopped_turn(model: Model) -> Iterator[Check]:
    """Yield a NOT_RUN check if the chat template ends turns with a token that stops no generation.

    It is no failure: base models come with a chat template too, and their eos is another token.
    Nothing is yielded where another check fails for it.
    """
    try:
        found = find_unstopped_turn(model.carried)
    except AprfmtError:
        return  # the other checks say it
    if found is not None and not found.contradicted:
        why = f"{found.says}: a chat may not end; {found.remedy}, if it was trained on chats"
        yield not_run("turn-end", why)
