"""Adapters trained with a vocabulary of another size: the merged model's config and tokenizer.

Trainers resize the embedding (tokens added, or padding cut) and save it whole with the adapter:
PEFT's save_embedding_layers and modules_to_save. The merge then has another vocabulary than the
base: its config.json says so, and its tokenizer is the adapter's.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Note
from aprfmt.errors import AprfmtError, ConversionError
from aprfmt.model import Model
from aprfmt.model.adapter_reading import Adapter
from aprfmt.model.carried_files import json_object
from aprfmt.model.hf_folder import HFFolder, read_folder
from aprfmt.tensors.view import View
from aprfmt.tokenizer.keys import TOKENIZER_JSON

_KEY = "vocab_size"
_TEXT = "text_config"  # where a model of several parts has the key
_TOKENIZER = (
    TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def vocabulary_tensors(base: Model) -> Mapping[str, int]:
    """Return {stored name: number of rows} of the tensors that have a row for each token.

    Tensors that the file stores in another layout than the architecture's table are left out. Empty
    where the model's roles are not known.
    """
    try:
        rules = {rule.role: rule.shape for rule in base.spec.tensors}
        roles = base.roles
    except AprfmtError:
        return {}
    found = {}
    for key, view in roles.items():
        if rules.get(key, ())[:1] == (_KEY,) and len(view.stored) == 1 and not view.steps:
            found[view.names[0]] = view.shape[0]
    return found


def resized_folder(
    adapter: Adapter, replacements: Mapping[str, View], base: Model
) -> tuple[HFFolder, Note] | None:
    """Return (the base's folder with the adapter's vocabulary size, a note), or None.

    None where the adapter has the base's size. `replacements` are the adapter's whole tensors.
    Raises ConversionError where not every tensor with a row for each token comes with the adapter,
    in one size, or where the base has no config.json.
    """
    # Which tensors of the adapter have another number of rows than the base's.
    held = vocabulary_tensors(base)
    rows = {name: view.shape[0] for name, view in replacements.items() if name in held}
    other = {name: count for name, count in rows.items() if count != held[name]}
    if not other:
        return None
    name, count = next(iter(other.items()))
    # Every tensor with a row per token must come in the same new size.
    lacking = [each for each in held if rows.get(each) != count]
    says = f"{name} has {count} rows, one a token; that of {base.path} has {held[name]}"
    if lacking:
        left = rows.get(lacking[0], held[lacking[0]])
        raise ConversionError(
            f"{adapter.path}: {says}, and {lacking[0]} would have {left}: give the base "
            f"{count} rows first (transformers: model.resize_token_embeddings({count}), "
            "save_pretrained, with the adapter's tokenizer), and merge into that"
        )
    folder = base.folder
    if folder is None or "config.json" not in folder.texts or base.format != "safetensors":
        raise ConversionError(
            f"{adapter.path}: {says}; a {base.format} has the vocabulary in its own keys: merge "
            "into the base's Hugging Face folder (--to safetensors), and convert that"
        )
    # The new size goes into config.json, and the adapter's tokenizer along with it.
    texts = {**folder.texts}
    config = _with_vocab_size(json.loads(texts["config.json"]), count, base)
    texts["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    own = _tokenizer_files(adapter.path.parent)
    if own:
        texts = {name: text for name, text in texts.items() if name not in _TOKENIZER} | own
    added = count - held[name]
    change = f"{added} tokens were added" if added > 0 else f"{-added} rows were cut"
    tokenizer = _tokenizer_text(adapter, folder, own, count)
    where = str(adapter.path)
    said = (
        f"the vocabulary has {count} rows, in config.json too ({held[name]} in {base.path}): "
        f"{change}; {tokenizer}"
    )
    note = Note("note", where, said, "")
    if not own:
        note = Note("warning", where, said, "vocabulary_rows")
    return replace(folder, config=config, texts=texts), note


def _with_vocab_size(config: dict[str, Any], count: int, base: Model) -> dict[str, Any]:
    """Return config.json's keys with `vocab_size` set to `count`, also in `text_config`.

    Raises ConversionError where the base has no such key.
    """
    inner = config.get(_TEXT)
    if isinstance(inner, dict) and _KEY in inner:
        config = {**config, _TEXT: {**inner, _KEY: count}}
        return {**config, _KEY: count} if _KEY in config else config
    if _KEY not in config and base.hyper[_KEY] is None:
        raise ConversionError(f"{base.path}: config.json has no {_KEY} that could be changed")
    return {**config, _KEY: count}


def _tokenizer_files(folder: Path) -> dict[str, str]:
    """Return {name: text} of the tokenizer files in an adapter's folder.

    {} without a tokenizer.json.
    """
    texts = read_folder(folder).texts if folder.is_dir() else {}
    if TOKENIZER_JSON not in texts:
        return {}
    return {name: texts[name] for name in _TOKENIZER if name in texts}


def _tokenizer_text(adapter: Adapter, base: HFFolder, own: Mapping[str, str], count: int) -> str:
    """Return a clause for the note: whether the merge gets the adapter's tokenizer or the base's.

    `own` are the adapter's tokenizer files, `count` the number of rows of its embedding. Raises
    ConversionError if the tokenizer has more ids than that.
    """
    whose, texts = ("the adapter's", own) if own else ("the base's", base.texts)
    if TOKENIZER_JSON not in texts:
        return f"neither {adapter.path.parent} nor {base.path} has a {TOKENIZER_JSON}"
    where = str((adapter.path.parent if own else base.path) / TOKENIZER_JSON)
    size = _count_token_ids(texts[TOKENIZER_JSON], where)
    if size > count:
        raise ConversionError(
            f"{adapter.path}: {where} has {size} tokens, and the table of the adapter {count} "
            "rows; get the adapter and its tokenizer of one state"
        )
    said = f"the tokenizer is {whose}, of {size} tokens"
    if not own and size < count:
        said += f" ({adapter.path.parent} has no {TOKENIZER_JSON}: put that of the training there)"
    return said


def _count_token_ids(text: str, where: str) -> int:
    """Return the number of ids that a tokenizer.json needs: the highest id plus one."""
    from aprfmt.tokenizer.hf_json import stored_vocab

    data = json_object(text, where)
    model = data.get("model")
    vocab, _ = stored_vocab(model if isinstance(model, Mapping) else {}, where)
    added = data.get("added_tokens")
    rows = added if isinstance(added, list) else []
    more = [row.get("id", 0) for row in rows if isinstance(row, Mapping)]
    return max([*vocab.values(), *(i for i in more if isinstance(i, int)), -1]) + 1
