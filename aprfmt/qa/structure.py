"""Gates that read the file and run nothing: the tensor contract, and plausible metadata."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.base.outcome import Check
from aprfmt.base.protocols import Value
from aprfmt.qa import bounds
from aprfmt.qa.records import Findings, Measure, check, listed, not_run

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.qa.subject import Subject


# --- tensors ----------------------------------------------------------------------------------


def tensor_contract(subject: "Subject") -> Findings:
    """Hold the tensors to what configuration and architecture demand: names, shapes, encodings."""
    from aprfmt.formats import checksum_notes

    model = subject.model
    spec, resolution = model.spec, model.resolution
    found = resolution.coverage
    compare = f"compare it with its source: aprfmt diff SOURCE {subject.where}"
    accepted = f"; accepted as missing {listed(found.accepted)}" if found.accepted else ""
    checks = [
        check("tensors-complete", not found.missing,
              f"{found.found}/{found.expected}; missing {listed(found.missing)}{accepted}",
              f"{found.expected}/{found.expected} for {spec.name}", compare),
        check("tensors-shaped", not found.misshapen,
              listed([f"{key} {list(is_)} for {list(want)}" for key, is_, want in found.misshapen]),
              "the shapes the hyperparameters give", compare),
        check("tensors-claimed", not resolution.unbound, listed(resolution.unbound),
              "no tensor the architecture has no role for",
              "it would be ignored: is this the right architecture (--arch)?"),
        _head(model),
        _presence(model),
        _decodable(model),
        check("file-checksum", not (notes := checksum_notes(model.source)),
              "; ".join(note.text for note in notes) or "none wrong", "no wrong checksum",
              "copy the file again from where it came"),
    ]  # fmt: skip
    whole = Measure(found.found, "tensors", 0, "absolute", "a tensor more or less is another model")
    return Findings(
        checks,
        {"tensors": whole},
        {
            "expected": found.expected,
            "found": found.found,
            "missing": list(found.missing),
            "accepted": list(found.accepted),
        },
    )


def _head(model: "Model") -> Check:
    """Say where the logits come from: a missing head is the embedding."""
    tied = bool(model.hyper["tied_embeddings"])
    name = "token_embd.weight" if tied else "output.weight"
    found = f"{model.hyper['vocab_size']} logits from {name}{' (tied)' if tied else ''}"
    return check("head-resolved", name in model.roles, found, "a head", "the head was lost")


def _against_tensors(text: str) -> bool:
    """Say whether a conflict is one of keys with tensors, which this gate reports."""
    return "the tensors say" in text


def _presence(model: "Model") -> Check:
    """Report keys that say something else than the tensors show (biases, head, vocabulary)."""
    found = [text for text in model.resolution.report.conflicts if _against_tensors(text)]
    return check("keys-fit-tensors", not found, "; ".join(found) or "they do",
                 "keys and tensors say the same",
                 "a part was lost, or config.json is another model's")  # fmt: skip


def _decodable(model: "Model") -> Check:
    from aprfmt.codecs import codec
    from aprfmt.errors import AprfmtError

    bad = []
    for tensor in model.values():
        try:
            codec(tensor.encoding)
        except AprfmtError as error:
            bad.append(f"{tensor.name} ({error})")
    return check("encodings-known", not bad, listed(bad), "every encoding has a codec",
                 "update aprfmt, or convert with the tool that wrote it")  # fmt: skip


# --- metadata ---------------------------------------------------------------------------------


def metadata(subject: "Subject") -> Findings:
    """Ask whether hyperparameters and tokenizer facts can be a working model's."""
    model = subject.model
    return Findings(
        [*_hyperparameters(model), *_conflicts(model), *_tokenizer(subject)],
        details={name: _plain(model.hyper[name]) for name in _SHOWN if name in model.hyper},
    )


_SHOWN = ("norm_eps", "rope_theta", "rope_style", "context_length", "n_heads", "n_kv_heads",
          "head_dim", "vocab_size")  # fmt: skip
# The values a forward pass cannot do without; a table's default for them is a guess in files
# that carry no config.json.
_STATED = ("norm_eps", "rope_theta", "n_heads")


def _plain(value: Value) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _hyperparameters(model: "Model") -> Iterator[Check]:
    hp = model.hyper
    rotary = model.spec.block.position == "rope"
    rows = [("norm_eps", bounds.EPS), ("context_length", bounds.CONTEXT)]
    rows += [("head_dim", bounds.HEAD_DIM)]
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
    heads, shared = int(hp["n_heads"]), int(hp["n_kv_heads"])
    yield check("heads-divide", heads % shared == 0, f"{heads} over {shared}",
                "query heads a multiple of key/value heads")  # fmt: skip
    if model.config is None:
        names = [name for name in _STATED if rotary or name != "rope_theta"]
        guessed = [name for name in names if hp.of(name).origin == "default"]
        yield check("hyperparameters-stated", not guessed, listed(guessed),
                    "nothing the forward pass needs was taken from a default",
                    "convert again from a folder with its config.json")  # fmt: skip


def _conflicts(model: "Model") -> Iterator[Check]:
    report = model.resolution.report
    said = [text for text in report.conflicts if not _against_tensors(text)]
    said += [note.text for note in model.resolution.notes]
    said += [note.text for note in model.notes if note.level == "warning"]
    yield check("no-conflicts", not said, "; ".join(said) or "none",
                "keys, config and tensors say the same",
                "one of them is another model's")  # fmt: skip


def _tokenizer(subject: "Subject") -> Iterator[Check]:
    from aprfmt.tokenizer import facts, scan_template

    model, tokenizer = subject.model, subject.tokenizer
    if tokenizer is None:
        yield not_run("tokenizer", "the model carries no tokenizer")
        return
    rows = int(model.hyper["vocab_size"])
    share = tokenizer.vocab_size / rows
    bound = bounds.VOCAB_SHARE
    yield check("vocabulary-fits", bound.holds(share),
                f"{tokenizer.vocab_size} tokens, {rows} rows in the embedding",
                f"{bound} {bound.unit}", "this is another model's tokenizer")  # fmt: skip
    special: Mapping[str, Any] = facts(model, quick=True)
    ids = {key: i for key, i in special.items() if key.endswith("_id") and isinstance(i, int)}
    ids |= {f"stop token {i}": i for i in tokenizer.stop_ids}
    outside = [f"{name} {i}" for name, i in ids.items() if not 0 <= i < rows]
    yield check("special-ids-inside", not outside, listed(outside),
                f"every special id below {rows}", "generation would never stop")  # fmt: skip
    yield check("stop-tokens", bool(tokenizer.stop_ids),
                listed([f"{i} {tokenizer.token(i)!r}" for i in sorted(tokenizer.stop_ids)]),
                "at least one", "generation would never stop: set eos_token_id")  # fmt: skip
    if tokenizer.chat_template is not None:
        found = scan_template(tokenizer.chat_template)
        yield check("template-harmless", not found, "; ".join(found) or "nothing suspicious",
                    "a template that only words a chat", "do not render it")  # fmt: skip
