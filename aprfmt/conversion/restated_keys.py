"""Restate a file's own keys in the Hugging Face files that it embeds.

A GGUF or APR of ours embeds config.json and the tokenizer's files. Its own keys count for every
reader, and may have been changed since: a folder made of the file has to say what they say.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprfmt.arch.hyperparameters import read_hyper, write_hyper, written_pairs
from aprfmt.arch.rope_hf import ROPE_OBJECTS
from aprfmt.arch.spec import Facts
from aprfmt.arch.value_checks import same_value
from aprfmt.errors import ArchError
from aprfmt.model.carried_files import json_object
from aprfmt.tokenizer.build import bos_eos_post_processor
from aprfmt.tokenizer.hf_json import ROLES, id_list, post_processor_ids, special_texts
from aprfmt.tokenizer.keys import TOKENIZER_JSON, TOKENS
from aprfmt.tokenizer.pre_tokenizers import flatten_steps
from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec, HyperParams
    from aprfmt.model import Model

_ID_FILES = ("config.json", "generation_config.json")
_TEXT_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def restated_config(model: "Model", config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with each hyperparameter that the file's own keys give another value.

    It is unchanged where nothing differs, and for an unknown architecture.
    """
    try:
        return restated_hyperparameters(model.spec, model.hyper, config)
    except ArchError:
        return dict(config)


def restated_hyperparameters(
    spec: "ArchSpec", hyper: "HyperParams", config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return config.json with the value of each hyperparameter that a metadata key gives.

    Only what differs is changed: the key that has it, else all of rope's keys or all keys.
    """
    own = [name for name in hyper if hyper.of(name).origin == "metadata"]
    stale = _differing_names(spec, hyper, config, own)
    if not stale:
        return dict(config)
    pairs = {
        key: value
        for rule in spec.hyper
        if rule.name in stale
        for key, value in written_pairs(rule, hyper[rule.name], "hf", hyper)
    }
    whole = write_hyper(spec, hyper, "hf")
    plain = {key: value for key, value in config.items() if key not in ROPE_OBJECTS}
    for made in (
        _replace_values(config, pairs, spec.section),
        _replace_values(plain, whole, spec.section),
    ):
        if not _differing_names(spec, hyper, made, own):
            return made
    return whole


def _differing_names(
    spec: "ArchSpec", hyper: "HyperParams", config: Mapping[str, Any], names: Sequence[str]
) -> Sequence[str]:
    """Return those of the hyperparameters `names` that a config.json gives another value."""
    try:
        stated, _ = read_hyper(spec, Facts("hf", config, {}), "config.json", complete=False)
    except ArchError:
        return names
    return [name for name in names if name in stated and not same_value(stated[name], hyper[name])]


def _replace_values(
    config: Mapping[str, Any], pairs: Mapping[str, Any], section: str
) -> dict[str, Any]:
    """Return a config.json with new values, each in every object that has its key.

    A key that no object has is added to the object `section` if there is one, else to the
    outermost.
    """
    made: dict[str, Any] = json.loads(json.dumps(config))
    inner = made.get(section)
    outer = [made, inner] if isinstance(inner, dict) else [made]
    places = [
        *outer,
        *(each[key] for each in outer for key in ROPE_OBJECTS if isinstance(each.get(key), dict)),
    ]
    for key, value in pairs.items():
        found = [place for place in places if key in place] or [outer[-1]]
        for place in found:
            before = place.get(key)
            merged = isinstance(before, dict) and isinstance(value, Mapping)
            place[key] = {**before, **value} if merged else value
    return made


def restate_special_tokens(model: "Model", texts: dict[str, str]) -> None:
    """Change {file name: text} of a folder so that special tokens are those of the file's own keys.

    Only what the embedded files state otherwise is changed. Nothing is, without a tokenizer.json.
    """
    carried = model.carried
    if model.folder is not None or not carried.origin:
        return
    files = {
        name: json_object(texts[name], f"{model.path}: {name}")
        for name in (*_ID_FILES, *_TEXT_FILES)
        if name in texts
    }
    files.setdefault("tokenizer_config.json", {})
    before = {name: json.dumps(content) for name, content in files.items()}
    for role, i in carried.token_ids().items():
        if role in ROLES and _stated_id(model, role, i) != i:
            _restate_role(model, files, role, i)
    flags = _changed_flags(model)
    files["tokenizer_config.json"].update({f"add_{role}_token": on for role, on in flags.items()})
    if flags:
        data = dict(carried.parse_tokenizer_json() or {})
        data["post_processor"] = _post_processor(model, data, flags)
        texts[TOKENIZER_JSON] = json.dumps(data, ensure_ascii=False) + "\n"
    for name, content in files.items():
        if json.dumps(content) != before[name]:
            texts[name] = json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _changed_flags(model: "Model") -> dict[str, bool]:
    """Return {"bos": flag, "eos": flag} of the file's keys if the post-processor does otherwise.

    A flag says whether the token is added to a text. {} where both flags agree with the
    post-processor, and where that also adds other tokens.
    """
    carried = model.carried
    frame, ids = post_processor_ids(carried.tokenizer_json_keys()), carried.token_ids()
    wanted: dict[str, bool] = {}
    differs = False
    for at, role in enumerate(("bos", "eos")):
        flag, i = carried.flag_value(f"add_{role}_token"), ids.get(role)
        stated = i in frame[at]  # as the writers of GGUF and APR take it
        if set(frame[at]) - {i, _stated_id(model, role, -1)}:
            return {}
        wanted[role] = stated if flag is None else flag
        differs |= wanted[role] != stated
    return wanted if differs else {}


def _post_processor(
    model: "Model", data: Mapping[str, Any], flags: Mapping[str, bool]
) -> Mapping[str, Any] | None:
    """Return a tokenizer.json's post_processor that adds bos and eos as `flags` say, by role.

    Its steps that add no token stay. None if no step is left.
    """
    read = read_tokenizer_parts(model, carried_json=True)
    assert read is not None
    made = bos_eos_post_processor(
        replace(read.vocabulary, add_bos=flags["bos"], add_eos=flags["eos"])
    )
    steps = flatten_steps(data.get("post_processor"), "processors")
    rest = [step for step in steps if not {"single", "cls", "sep"} & set(step)]
    every = [*rest, *([] if made is None else [made])]
    if len(every) > 1:
        return {"type": "Sequence", "processors": every}
    return every[0] if every else None


def _stated_id(model: "Model", role: str, key_id: int) -> int | None:
    """Return the id that the embedded files give a special token; None where none gives one.

    `key_id` is the id in the file's own keys. It is returned where the embedded files name no token
    but their post-processor adds this one.
    """
    carried = model.carried
    text = special_texts(carried).get(role)
    if text is not None:
        return key_id if _token_text(model, key_id) == text else _vocabulary(model).get(text)
    config = model.config or {}
    for source in (config, config.get("text_config")):
        found = id_list(source.get(f"{role}_token_id") if isinstance(source, Mapping) else None)
        if found:
            return found[0]
    frames = post_processor_ids(carried.tokenizer_json_keys())
    return key_id if any(key_id in frame for frame in frames) else None


def _restate_role(model: "Model", files: Mapping[str, dict[str, Any]], role: str, i: int) -> None:
    """Give a special token the id `i`, and its text, wherever {file name: object} states it."""
    texts = {at: text for text, at in _vocabulary(model).items()}
    for name in _TEXT_FILES:
        if i in texts and (
            name == "tokenizer_config.json" or f"{role}_token" in files.get(name, {})
        ):
            files[name][f"{role}_token"] = texts[i]
    for place in _id_objects(files):
        stated = place.get(f"{role}_token_id")
        if isinstance(stated, list):
            stops = model.tokenizer.stop_ids
            place[f"{role}_token_id"] = [i, *(each for each in stated if each in stops - {i})]
        elif stated is not None:
            place[f"{role}_token_id"] = i


def _id_objects(files: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the objects of {file name: object} in which transformers looks for token ids."""
    for name in _ID_FILES:
        content = files.get(name, {})
        inner = content.get("text_config")
        yield content
        if isinstance(inner, dict):
            yield inner


def _token_text(model: "Model", i: int) -> str | None:
    """Return the text of a token in the file's own list; None where the list ends before it."""
    tokens: Any = model.carried.metadata_value(TOKENS)
    return tokens[i] if 0 <= i < (model.carried.list_length(TOKENS) or 0) else None


def _vocabulary(model: "Model") -> Mapping[str, int]:
    """Return {token: id} of the embedded tokenizer.json, its added tokens included."""
    read = read_tokenizer_parts(model, carried_json=True)
    assert read is not None
    return {token: i for i, token in enumerate(read.vocabulary.tokens)}
