"""The first line of `aprfmt inspect`, which sums up what the file is."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render
from aprfmt.errors import AprfmtError
from aprfmt.model import Model, open_model
from aprfmt.model.adapter_description import astray_modules_text
from aprfmt.model.adapter_parts import peft_config
from aprfmt.model.zero_pairs import find_zero_pairs
from aprfmt.remote.paths import is_remote
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.cli.inspect.records import InspectBody, InspectSummary, RolesFound

# tokenizer.ggml.model -> what people call it
TOKENIZERS = {
    "gpt2": "BPE", "llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram", "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
}  # fmt: skip
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # config.json's dtype
_PLAIN = re.compile(r"Q\d_(?:K|[01])")  # types whose name says what most tensors are


def summarize(opened: Model, body: "InspectBody") -> "InspectSummary":
    """Return the facts of the summary line, and the whole line as `line`.

    `body` is the JSON of `inspect`.
    """
    known, kind = body["architecture"] is not None, opened.kind
    stored = sum(row["bytes"] for row in body["encodings"].values())
    found: InspectSummary = {
        "name": _model_name(opened, body),
        "kind": "model" if kind is None else kind.name,
        "says": ""
        if kind is None
        else kind.says(opened) + _zero_clause(opened) + _astray_clause(opened),
        "next": "" if kind is None else kind.todo(opened),
        "architecture": body["architecture"]
        or body.get("architecture_named")
        or str(body["metadata"].get("general.architecture", "")),
        "level": body["level"] if known else "tensors",
        "parameters": body["parameters"],
        "bits_per_weight": 8 * stored / body["parameters"] if body["parameters"] else None,
        "quantization": _quantization_name(body),
        "context_length": _context_length(body),
        "tokenizer": _tokenizer_text(body["tokenizer"]),
        "licence": _find_licence(body["metadata"]),
        "unusual": _list_oddities(opened, body),
        "line": "",
    }
    found["line"] = summary_line(found)
    return found


def _zero_clause(opened: Model) -> str:
    """Return "; " and the adapter's factor pairs that change nothing; "" for other files.

    "" for a remote adapter, too: its factors would have to be fetched.
    """
    says = "" if is_remote(opened.path) else find_zero_pairs(opened).text
    return f"; {says}" if says else ""


def _astray_clause(opened: Model) -> str:
    """Return "; " and which modules an adapter changes that its base lacks; "" for anything else.

    The base is the folder that adapter_config.json names, from here or next to the adapter. "" too
    where it is not on this machine.
    """
    if opened.kind is None or opened.kind.name != "adapter":
        return ""
    named = peft_config(opened).get("base_model_name_or_path")
    places = [Path(named), opened.path.parent / named] if isinstance(named, str) and named else []
    here = next((path for path in places if (path / "config.json").is_file()), None)
    try:
        if here is None:
            return ""
        with open_model(here) as base:
            says = astray_modules_text(opened, base)
    except AprfmtError:
        return ""  # it is asked about by whoever opens it
    return f"; {says}" if says else ""


def summary_line(found: "InspectSummary") -> str:
    """Return the summary as one sentence: name, architecture, size, what is unusual.

    For a file that is no model, it says what the file is and what to do with it. `found` are the
    facts in the sentence.
    """
    if found["says"]:
        return f"{found['name']}: is {found['says']}; {found['next']}"
    level = {"full": "runs here", "names": "names only", "tensors": "tensors only"}[found["level"]]
    bits = found["bits_per_weight"]
    parts = [
        f"{found['architecture'] or 'unknown architecture'} ({level})",
        f"{render.count_text(found['parameters'])} parameters",
        f"{found['quantization']} at {bits:.2f} bits a weight" if bits else "",
        f"context {found['context_length']}" if found["context_length"] else "",
        found["tokenizer"],
        f"licence {found['licence']}" if found["licence"] else "no licence stated",
    ]
    unusual = "; ".join(found["unusual"]) or "nothing"
    return f"{found['name']}: {', '.join(filter(None, parts))}; unusual: {unusual}"


def _model_name(opened: Model, body: "InspectBody") -> str:
    """Return the model's name by its metadata, else by its folder or file.

    `body` is the JSON of `inspect`.
    """
    for key in ("general.name", "name", "model_name"):
        value = body["metadata"].get(key)
        if isinstance(value, str) and value:
            return value
    named = opened.folder is not None and opened.path.name.startswith(("model", "pytorch_model"))
    return opened.path.resolve().parent.name if named else opened.path.stem


def _context_length(body: "InspectBody") -> int | None:
    """Return the context length in tokens, from the hyperparameters; None if not known.

    `body` is the JSON of `inspect`.
    """
    row = body.get("hyperparameters", {}).get("context_length")
    return None if row is None else row["value"]


def _quantization_name(body: "InspectBody") -> str:
    """Return llama.cpp's name of the file's type, else the encoding of most weights.

    "mostly " precedes an encoding that not more than 90 % have. "no tensors" for none. `body` is
    the JSON of `inspect`.
    """
    stated: str = body["metadata_names"].get("general.file_type", "")
    rows = body["encodings"]
    if stated or not rows:
        return stated or "no tensors"
    main = max(rows, key=lambda name: (rows[name]["parameters"], name))
    whole = rows[main]["parameters"] > 0.9 * body["parameters"]
    return main if whole else f"mostly {main}"


def _tokenizer_text(facts: dict[str, object]) -> str:
    """Return a few words on the tokenizer: its kind and number of entries."""
    if "error" in facts:
        return "a tokenizer that cannot be read"
    if not facts:
        return "no tokenizer"
    model = facts.get("model")
    kind = f"{TOKENIZERS.get(str(model), str(model))} tokenizer" if model else "tokenizer.json"
    kind += f" of {facts['entries']}" if "entries" in facts else ""
    return kind + (f" (read {facts['read']})" if "read" in facts else "")


def _find_licence(metadata: dict[str, object]) -> str:
    """Return the licence by the metadata, "" where none is given."""
    for key in ("general.license", "license"):
        value = metadata.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def _config_encoding(opened: Model) -> str:
    """Return the encoding that config.json's dtype gives to weights; "" if none is named.

    "" too where config.json says that the weights are quantized.
    """
    config = opened.folder.config if opened.folder is not None else None
    if config is None or "quantization_config" in config:
        return ""
    stated = config.get("dtype", config.get("torch_dtype"))
    return DTYPES.get(stated, "") if isinstance(stated, str) else ""


def tensors_without_role(body: "InspectBody") -> list[str]:
    """Return the tensors of no role, without those that store a role in a second layout."""
    return [name for name in body["unclaimed"] if name not in body["stored_again"]]


def missing_roles(roles: "RolesFound") -> list[str]:
    """Return the required roles whose weights are not in the file, not even packed."""
    return [key for key in roles["missing"] if key not in roles["packed"]]


_SAID = (
    "relation",
    "partial_input_scales",
    "nested_names",
    "promised_parts",
)  # notes that the line says in words


def _positive_rates(opened: Model) -> list[str]:
    """Return that the first stored decay rates (Mamba and its like) are above zero, or [].

    A converter treats all layers alike, so that those of one are read. [] for a remote file.
    """
    if is_remote(opened.path) or not any("ssm_a" in name for name in opened):
        return []
    from aprfmt.checks.file.recurrent_values import RATES, stores_rates

    try:
        first = next((view for key, view in opened.roles.items() if key.endswith(RATES)), None)
        if first is None or not stores_rates(first):
            return []
        stored = View(first.stored[0])  # as the file has them: their logarithm would be NaN
        if not (stored.numpy() > 0).any():
            return []
    except AprfmtError:
        return []  # said where it is read
    return [f"{first.stored[0].info.name} has decay rates above zero"]


def _list_oddities(opened: Model, body: "InspectBody") -> list[str]:
    """Return what to know before the file is used, a few words each: damage, doubts, warnings.

    `body` is the JSON of `inspect`.
    """
    found = []
    # Weights that cannot be read, or not as they are packed.
    if opened.damage:
        found.append("damaged")
    unread = opened.unread
    if unread is not None:
        how = f"by {unread.method!r}, not decoded here" if unread.method else "without a claim"
        found.append(f"{len(unread.weights)} weights packed {how}")
    if opened.lone_codes:
        alone = len(opened.lone_codes)
        found.append(f"{alone} weight{'s' * (alone > 1)} of codes without a scale")
    found += [
        note["text"].partition(":")[0]
        for note in body["notes"]
        if note["key"] in ("partial_input_scales", "nested_names", "promised_parts")
    ]
    # An architecture that is not known or does not fit.
    if body["architecture"] is None:
        named, error = body.get("architecture_named"), body["architecture_error"]
        where = f"{opened.path}: "
        found.append(
            f"{named} is not read: {error.removeprefix(where)}"
            if named
            else "architecture not known here"
        )
    # Names that promise another encoding than the tensors have.
    stated = body["metadata_names"].get("general.file_type", "")
    base = _PLAIN.match(stated)
    if base and body["encodings"] and base[0] not in body["encodings"]:
        found.append(f"called {stated}, but no tensor is {base[0]}")
    said_dtype = _config_encoding(opened)
    if said_dtype and said_dtype not in body["encodings"] and body["encodings"]:
        found.append(f"config.json says {said_dtype}, no tensor is {said_dtype}")
    # Tensors and keys that are missing, contradict, or have no place.
    if "roles" in body:
        roles, again = body["roles"], body["stored_again"]
        others = tensors_without_role(body)
        for names, said in ((missing_roles(roles), ""), (roles["accepted"], ", accepted")):
            if names:
                found.append(f"{len(names)} of {roles['required']} tensors missing{said}")
        for first in roles["misshapen"][:1]:
            found.append(
                f"{len(roles['misshapen'])} of {roles['found']} tensors have impossible shapes "
                f"({first['role']} is {first['shape']}, expected {first['expected']})"
            )
        for rows, one, many in (
            (body["conflicts"], "contradiction", "contradictions"),
            (again, "tensor that stores a role again", "tensors that store roles again"),
            (others, "tensor of no role", "tensors of no role"),
            (body["keys"]["unknown"], "unknown key", "unknown keys"),
        ):
            if rows:
                found.append(f"{len(rows)} {one if len(rows) == 1 else many}")
    found += _positive_rates(opened) if body.get("roles") else []
    # Files that cannot be read, or that nothing reads, and doubts about the tokenizer.
    from aprfmt.model.ledger import NO_TENSOR, file_loaded_first

    found += [
        NO_TENSOR if NO_TENSOR in one else f"{one.partition(' (')[0]} cannot be read"
        for one in body["unreadable"]
    ]
    files = [one for one in body["unread"] if one.startswith("file ")]
    loaded = file_loaded_first(opened) if files else None
    if loaded is not None:
        found += [one for one in files if one.startswith(f"file {loaded.name} (")]
        files = [one for one in files if not one.startswith(f"file {loaded.name} (")]
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        found.append(f"{files[0]}{more}, in no table of files that loaders read")
    language = body["tokenizer"].get("chat_template_language")
    if language is not None:
        found.append(f"the chat template is {language}, not jinja2")
    if "chat_template_unread" in body["tokenizer"]:
        found.append(f"the chat template {body['tokenizer']['chat_template_unread']}")
    scan = body["tokenizer"].get("chat_template_scan", "nothing suspicious")
    if scan != "nothing suspicious":
        found.append("suspicious chat template")
    if "turn_end" in body["tokenizer"]:
        found.append(str(body["tokenizer"]["turn_end"]))
    if "doubts" in body["tokenizer"]:
        found.append(str(body["tokenizer"]["doubts"]))
    # What is left: relations of the model's files, and a count of other warnings.
    found += [str(relation["says"]) for relation in body["relations"]]
    warnings = sum(
        note["level"] == "warning" and note["key"] not in _SAID for note in body["notes"]
    )
    if warnings:
        found.append(f"{warnings} warning{'s' * (warnings > 1)}")
    return found
