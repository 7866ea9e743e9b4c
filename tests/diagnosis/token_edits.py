"""Edits of what says how a model tokenizes: a folder's texts, the keys of a GGUF."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder
from tests.diagnosis.fault import Fault, Pair

DEMO = Path(__file__).resolve().parents[2] / "fixtures" / "demo"
GGML = "tokenizer.ggml."
Keys = dict[str, Any]
Texts = dict[str, Any]
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


# --- Hugging Face folders -----------------------------------------------------------------------


def folder(name: str, change: Callable[[Texts], None]) -> Path:
    """Copy the demo folder; `change` gets its texts by name, JSON parsed, None to leave one out."""
    made = place(f"tokens-{name}")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(DEMO, made)
    texts: Texts = {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()
        for path in made.iterdir()
        if path.suffix in (".json", ".jinja")
    }
    change(texts)
    for file, text in texts.items():
        if text is None:
            (made / file).unlink()
        else:
            (made / file).write_text(text if isinstance(text, str) else json.dumps(text))
    return made


def texts(change: Callable[[Texts], None]) -> Callable[[str], Pair]:
    """Return a maker of the demo folder and a changed copy."""
    return lambda name: (DEMO, folder(name, change))


# --- GGUF files ---------------------------------------------------------------------------------


def rewritten(source: Path, name: str, change: Callable[[Keys], None]) -> Path:
    """Write a GGUF again with gguf-py, its keys changed, every tensor's bytes as they are."""
    import gguf

    made = place(f"tokens-{name}.gguf")
    reader = gguf.GGUFReader(str(source))
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    keys = {k: f.contents() for k, f in fields.items()}
    types = {k: f.types for k, f in fields.items()}
    writer = gguf.GGUFWriter(str(made), keys.pop("general.architecture"))
    change(keys)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = types[key][0] if key in types else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def lists_alone(keys: Keys) -> None:
    """Leave out what only aprfmt writes: a foreign file has the lists alone."""
    for key in [key for key in keys if key.startswith("aprfmt.") or "huggingface" in key]:
        del keys[key]


def foreign(name: str, change: Callable[[Keys], None] = lambda keys: None) -> Path:
    """Return the demo model as a GGUF of another program, its keys changed."""

    def both(keys: Keys) -> None:
        lists_alone(keys)
        change(keys)

    return rewritten(files.converted(DEMO, "demo.gguf"), name, both)


def keys(change: Callable[[Keys], None]) -> Callable[[str], Pair]:
    """Return a maker of the demo folder and a foreign GGUF with changed keys."""
    return lambda name: (DEMO, foreign(name, change))


def two_gguf(
    change: Callable[[Keys], None], before: Callable[[Keys], None] = lambda keys: None
) -> Callable[[str], Pair]:
    """Return a maker of two foreign GGUF files; `before` is done to both."""

    def both(found: Keys) -> None:
        before(found)
        change(found)

    return lambda name: (foreign(f"{name}-a", before), foreign(name, both))


def put(**values: Any) -> Callable[[Keys], None]:
    """Return a change of tokenizer.ggml keys."""
    return lambda found: found.update({GGML + name: value for name, value in values.items()})


def cut(count: int) -> Callable[[Keys], None]:
    return lambda found: found.update({GGML + "merges": found[GGML + "merges"][:count]})


def lose(*names: str) -> Callable[[Keys], None]:
    def change(found: Keys) -> None:
        for name in names:
            del found[name]

    return change


def pieces_shifted(found: Keys) -> None:
    """One piece lost in the middle: all behind it stand one id too early."""
    tokens = found[GGML + "tokens"]
    found[GGML + "tokens"] = [*tokens[:700], *tokens[701:1533], tokens[700], *tokens[1533:]]


def all_normal(found: Keys) -> None:
    found[GGML + "token_type"] = [1] * len(found[GGML + "token_type"])


def late_merges(found: Keys) -> None:
    """The first ten merges stand last."""
    merges = found[GGML + "merges"]
    found[GGML + "merges"] = [*merges[10:], *merges[:10]]


def other_template(found: Keys) -> None:
    found["tokenizer.chat_template"] = LLAMA3_TEMPLATE


def template_and_end(found: Keys) -> None:
    other_template(found)
    put(eos_token_id=1533)(found)


def cut_template(found: Keys) -> None:
    found["tokenizer.chat_template"] = found["tokenizer.chat_template"].partition("{% if add")[0]


def typed(kind: int, *words: str) -> Callable[[Keys], None]:
    """Return a change of the types of tokens that contain one of some words."""

    def change(found: Keys) -> None:
        rows = zip(found[GGML + "tokens"], found[GGML + "token_type"], strict=True)
        found[GGML + "token_type"] = [
            kind if any(word in token for word in words) else old for token, old in rows
        ]

    return change


def respelled(found: Texts) -> None:
    """The other quotes, more blanks in the tags, and a comment; the same program."""
    text = found["chat_template.jinja"].replace("'", '"')
    found["chat_template.jinja"] = text.replace("{% ", "{%  ").replace(" %}", "   %}") + "{# end #}"


# --- a vocabulary that joins by scores ----------------------------------------------------------

_WORDS = ("he", "el", "ll", "hel", "hell", "hello", "wo", "or", "wor", "\u2581w", "\u2581wor",
          "\u2581h", "\u2581he", "\u2581hell", "\u2581hello", "ld", "world", "\u2581world", "th",
          "\u2581th", "the", "\u2581the", "\u2581\u2581", "is", "in", "ing")  # fmt: skip


def scored(found: Keys) -> None:
    """Replace the tokenizer by one that joins by scores, as SentencePiece writes it."""
    size = len(found[GGML + "tokens"])
    letters = [chr(c) for c in range(0x21, 0x7F)]
    whole = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = [*whole, "\u2581", *letters, *_WORDS]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(made) - len(whole)), *[5] * (size - len(made))]
    ranks = {word: i for i, word in enumerate(_WORDS)}
    for key in [key for key in found if key.startswith("tokenizer.")]:
        del found[key]
    put(
        model="llama",
        pre="default",
        tokens=made + [f"[PAD{i}]" for i in range(len(made), size)],
        scores=[-float(ranks.get(piece, 1000 + i)) for i, piece in enumerate(made)]
        + [-1e4] * (size - len(made)),
        token_type=types,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_bos_token=True,
        add_space_prefix=False,
    )(found)


# --- faults of what is changed ------------------------------------------------------------------

# The architectures of faults of a configuration; all others are of the demo.
BASES = {"sub-key-lost": "llama", "sub-key-unread": "llama", "flag-denies": "llama",
         "flag-parallel": "stablelm", "flag-invents": "llama", "flag-ties": "llama",
         "config-spelled": "llama"}  # fmt: skip


def configured(base: str, change: Any, **how: Any) -> Callable[[str], Pair]:
    """Return a maker of a tiny folder and a copy with another configuration."""
    return lambda name: (
        tiny_folder(base),
        files.copy(tiny_folder(base), f"tokens-{name}", config=change, **how),
    )


def rows(
    made: Mapping[str, tuple[Any, ...]], verdict: str, confidence: str = "confirmed"
) -> tuple[Fault, ...]:
    """Return faults of (says, maker, causes, place of the first)."""

    def fault(name: str, says: str, make: Callable[[str], Pair], causes: Any, where: str) -> Fault:
        named = (causes,) if isinstance(causes, str) else tuple(causes)
        return Fault(
            name,
            BASES.get(name, "demo"),
            says,
            lambda: make(name),
            named,
            (where,) if where else (),
            verdict,
            confidence,
        )

    return tuple(fault(name, *row) for name, row in made.items())
