r"""How a BPE vocabulary splits text before merging, by `pre` name: the one table.

GGUF has only a name (`tokenizer.ggml.pre`); the table gives normalizer and pre-tokenizer of the
original tokenizer.json for it. The names, and which of them split alike, are llama.cpp's
(src/llama-vocab.cpp). The regexes are those of the tokenizer.json files; llama.cpp's differ where
its regex engine lacks something (`(?i:...)`, `\p{Lu}`), and llama.cpp applies no normalizers. An
unknown name is an error, never a default.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from aprfmt.errors import ConversionError, UnsupportedError

# One step of splitting, (kind, argument): ("split", regex), ("digits", one by one?),
# ("punctuation", ""), ("bytes", "") and ("gpt2", ""), which is GPT-2's regex followed by "bytes".
SplitStep = tuple[str, str | bool]
Splitting = tuple[tuple[SplitStep, ...], bool]  # the steps, and whether whole pieces are not merged


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Normalizer, splitting steps, and other settings that llama.cpp derives from a `pre` name.

    `ignore_merges`: a piece that is a token is taken whole, not merged from its characters.
    `add_bos`: the default of `tokenizer.ggml.add_bos_token`. `style` "blank" is SentencePiece
    spelling (spaces as U+2581, bytes as `<0x41>`) with merges and no splitting.
    """

    steps: tuple[SplitStep, ...] = ()
    normalizer: Literal["", "NFC"] = ""
    ignore_merges: bool = False
    add_bos: bool = False
    style: Literal["bytes", "blank"] = "bytes"


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

# tokenizers' ByteLevel has it (src/pre_tokenizers/byte_level.rs).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}"
QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SLASHED}|{_BLANKS}"
GPT4O = rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SLASHED}|{_BLANKS}"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # DeepSeek's regex; it includes Hangul and more
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

# The ranges of cased letters in DeepSeek LLM's regex, as code points and not as characters: some
# of them change under NFC, which editors may apply.
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _character_class(ranges: str) -> str:
    """Return hexadecimal ranges such as `41-5A B5` as the inside of a character class: `A-Zµ`."""
    return "".join(
        "-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split()
    )


_DIGITS: SplitStep = ("digits", True)
_GPT2: SplitStep = ("gpt2", "")
_BYTES: SplitStep = ("bytes", "")


def _split_row(*regexes: str, **options: Any) -> PreTokenizer:
    """Return a PreTokenizer whose regexes split one after another, then bytes."""
    return PreTokenizer((*(("split", regex) for regex in regexes), _BYTES), **options)


_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_ONE_DIGIT = PreTokenizer((_DIGITS, _GPT2))
_LLAMA_BPE = _split_row(LLAMA3, ignore_merges=True, add_bos=True)
_CL100K = _split_row(LLAMA3)
_QWEN2 = _split_row(QWEN2, normalizer="NFC")
_QWEN2_RAW = _split_row(QWEN2)
_GPT4O = _split_row(GPT4O)
_DEEPSEEK3 = _split_row(r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3_WORDS)
_BAILING = _split_row(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_AYA = _split_row(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)

# Order matters for `pre_name_of`: of the names that split alike, the first is the one written.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _PLAIN_GPT2,
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA_BPE,
    "dbrx": _CL100K,
    "smollm": _ONE_DIGIT,
    "command-r": PreTokenizer((_DIGITS, _GPT2), normalizer="NFC"),
    "olmo": PreTokenizer((_GPT2,), normalizer="NFC"),
    "tekken": _split_row(TEKKEN, ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "qwen35": _split_row(QWEN35, normalizer="NFC"),
    "deepseek-llm": PreTokenizer((
        ("split", r"[\r\n]"), ("split", rf"\s?[{_character_class(_CASED_LETTERS)}]+"),
        ("split", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        ("split", r"\s+$"), ("split", _CJK), _DIGITS, _BYTES,
    )),
    "deepseek-coder": PreTokenizer((
        ("split", r"[\r\n]"), ("split", r"\s?\p{L}+"), ("split", r"\s?\p{P}+"), ("split", _CJK),
        _DIGITS, _BYTES,
    )),
    "deepseek-v3": _DEEPSEEK3,
    "falcon": PreTokenizer((
        ("punctuation", ""), _GPT2, ("digits", False), ("split", "[0-9][0-9][0-9]"),
    )),
    "bloom": _split_row(_BLOOM),
    "viking": PreTokenizer((("split", _BLOOM), _DIGITS, _BYTES)),
    "superbpe": _split_row(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "bailingmoe": _BAILING,
    "seed-coder": _split_row(
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
    ),
    "exaone-moe": _split_row(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "jais-2": _split_row(
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4"))
        + r"|\s{1,2}(?!\S)|\s{1}"
    ),
    "minicpm5": _split_row(
        r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_BLANKS}", ignore_merges=True
    ),
    "laguna": _split_row(r"[^\n]+|[\n]+", QWEN2),
    "ufakzeka": _split_row(rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}"),
    "tiny_aya": _AYA,
    "gemma4": PreTokenizer(style="blank"),
    # llama.cpp's rule for the name `default`; no tokenizer.json splits this way.
    "default": _split_row(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+", "[0-9][0-9][0-9]",
    ),
    "stablelm2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "f2llmv2": _QWEN2,
    "megrez": _QWEN2_RAW, "kormo": _QWEN2_RAW, "hunyuan": _QWEN2_RAW, "solar-open": _QWEN2_RAW,
    "grok-2": _QWEN2_RAW,
    "llama3": _LLAMA_BPE, "llama-v3": _LLAMA_BPE, "falcon3": _LLAMA_BPE, "falcon-h1": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE, "midm-2.0": _LLAMA_BPE, "lfm2": _LLAMA_BPE, "jina-v5-nano": _LLAMA_BPE,
    "smaug-bpe": _CL100K, "chatglm-bpe": _CL100K, "glm4": _CL100K,
    "starcoder": _ONE_DIGIT, "refact": _ONE_DIGIT, "codeshell": _ONE_DIGIT, "exaone": _ONE_DIGIT,
    "minerva-7b": _ONE_DIGIT, "mellum2": _ONE_DIGIT,
    "phi-2": _PLAIN_GPT2, "jais": _PLAIN_GPT2, "trillion": _PLAIN_GPT2, "exaone4": _PLAIN_GPT2,
    "granite-docling": _PLAIN_GPT2, "gigachat": _PLAIN_GPT2, "a.x-4.0": _PLAIN_GPT2,
    "mellum": _PLAIN_GPT2, "modern-bert": PreTokenizer((_GPT2,), normalizer="NFC"),
    "mpt": PreTokenizer((_GPT2,), normalizer="NFC"),
    "llama4": _GPT4O, "kanana2": _GPT4O, "talkie": _GPT4O, "minimax-m2": _GPT4O,
    "hunyuan-dense": _DEEPSEEK3, "joyai-llm": _DEEPSEEK3, "hy_v4": _DEEPSEEK3,
    "bailingmoe2": _BAILING, "llada-moe": _BAILING, "cohere2moe": _AYA,
    "poro-chat": _split_row(_BLOOM), "gpt3-finnish": _split_row(_BLOOM),
    "sarvam-moe": PreTokenizer(style="blank"),
}  # fmt: skip

# Architectures whose byte-level checkpoints all split the same way; for APR files without a name.
BY_ARCHITECTURE: Mapping[str, str] = {
    "qwen2": "qwen2", "qwen2_moe": "qwen2", "qwen3": "qwen2", "qwen3_moe": "qwen2",
    "gpt2": "gpt-2", "phi": "phi-2", "phi2": "phi-2", "starcoder2": "starcoder", "falcon": "falcon",
}  # fmt: skip


def find_pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """Return the row of a `pre` name; UnsupportedError for a name that is not in the table."""
    row = PRE_TOKENIZERS.get(name)
    if row is None:
        near = get_close_matches(name, PRE_TOKENIZERS, 3) or list(PRE_TOKENIZERS)[:8]
        raise UnsupportedError(
            f"{where}: pre-tokenizer {name!r} is not known, and guessing would give other token "
            f"ids; known: {', '.join(near)} ({len(PRE_TOKENIZERS)} names); use the original "
            "tokenizer.json"
        )
    return row


def _byte_level_step(use_regex: bool) -> dict[str, Any]:
    """Return the ByteLevel step of a tokenizer.json; `use_regex`: it splits by GPT-2's regex."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _step_as_json(step: SplitStep) -> dict[str, Any]:
    """Return a splitting step as tokenizer.json writes it."""
    kind, argument = step
    if kind == "split":
        pattern = {"Regex": argument}
        return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    if kind == "digits":
        return {"type": "Digits", "individual_digits": argument}
    if kind == "punctuation":
        return {"type": "Punctuation", "behavior": "Contiguous"}
    return _byte_level_step(kind == "gpt2")


def pre_tokenizer_json(row: PreTokenizer) -> dict[str, Any] | None:
    """Return the `pre_tokenizer` object of a tokenizer.json; None for a row without steps."""
    steps = [_step_as_json(step) for step in row.steps]
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def normalizer_json(row: PreTokenizer) -> dict[str, Any] | None:
    """Return the `normalizer` of a tokenizer.json; None for a row without one."""
    return {"type": row.normalizer} if row.normalizer else None


def flatten_steps(node: Any, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of `node`, a tokenizer.json component, with nested sequences flattened.

    `inner` is the key of a sequence's members. The JSON reader bounds the nesting depth.
    """
    stack, found = [node], []
    while stack:
        item = stack.pop()
        if not isinstance(item, Mapping):
            continue
        members = item.get(inner)
        if item.get("type") == "Sequence" and isinstance(members, Sequence):
            stack.extend(reversed(list(members)))
        else:
            found.append(item)
    return found


def _plain_regex(regex: str) -> str:
    r"""Return a regex with raw line breaks replaced by the escapes `\r` and `\n`."""
    return regex.replace("\r", r"\r").replace("\n", r"\n")


def _comparable_steps(steps: Iterable[SplitStep]) -> tuple[SplitStep, ...]:
    """Return steps in the one form in which equal splittings are equal.

    Line breaks in regexes are escaped, and GPT-2's splitting is its two steps: the regex, then
    bytes (as ByteLevel with `use_regex` does both, and Split before ByteLevel without it).
    """
    found: list[SplitStep] = []
    for kind, argument in steps:
        if kind == "gpt2":
            found += [("split", GPT2), _BYTES]
        else:
            plain = _plain_regex(argument) if isinstance(argument, str) else argument
            found.append((kind, plain))
    return tuple(found)


def _step_of_node(node: Mapping[str, Any]) -> SplitStep:
    """Return a splitting step as (kind, argument) of the table; ("unknown", type) for others.

    `node` is the step in tokenizer.json.
    """
    kind = node.get("type")
    if kind == "Split":
        pattern = node.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        # Removed + invert keeps only the matches: Isolated, if the regex matches everything.
        whole = (node.get("behavior"), bool(node.get("invert")))
        if isinstance(regex, str) and whole in (
            ("Isolated", False),
            ("Isolated", True),
            ("Removed", True),
        ):
            return ("split", regex)
    if kind == "Digits":
        return ("digits", bool(node.get("individual_digits")))
    if kind == "Punctuation" and node.get("behavior") == "Contiguous":
        return ("punctuation", "")
    if kind == "ByteLevel" and not node.get("add_prefix_space"):
        return _GPT2 if node.get("use_regex", True) else _BYTES
    return ("unknown", str(kind))


def _normalizer_steps(node: Any) -> tuple[str, ...]:
    """Return the types of a normalizer's steps, in order."""
    return tuple(str(step.get("type")) for step in flatten_steps(node, "normalizers"))


def pre_name_of(tokenizer: Mapping[str, Any], where: str) -> str:
    """Return the `pre` name of a byte-level BPE tokenizer.json.

    A row fits if its steps and `ignore_merges` equal the file's; rows with the file's normalizer
    are preferred. llama.cpp applies no normalizer, so NFC counts as none, and any other normalizer
    fits no name. Raises ConversionError with the steps that were found.
    """
    steps, ignores = tokenizer_splitting(tokenizer)
    normalizer = _normalizer_steps(tokenizer.get("normalizer"))
    fits = [
        (name, row)
        for name, row in PRE_TOKENIZERS.items()
        if row.style == "bytes"
        and row.ignore_merges == ignores
        and _comparable_steps(row.steps) == steps
    ]

    fits.sort(key=lambda item: "+".join(normalizer) != item[1].normalizer)  # stable
    if fits and normalizer in ((), ("NFC",)):
        return fits[0][0]
    shown = "; ".join(f"{kind} {x}".rstrip() for kind, x in steps) or "no pre-tokenizer"
    raise ConversionError(
        f"{where}: no pre-tokenizer name of GGUF fits: normalizer "
        f"{'+'.join(normalizer) or 'none'}, steps {_shorten_text(shown)}"
        f"{', ignore_merges' if ignores else ''}; GGUF readers would split the text otherwise"
    )


def _shorten_text(text: str) -> str:
    """Return a text on one line, cut at 300 characters."""
    return re.sub(r"\s+", " ", text[:300]) + ("…" if len(text) > 300 else "")


def tokenizer_splitting(tokenizer: Mapping[str, Any]) -> Splitting:
    """Return (comparable splitting steps, `ignore_merges`) of a parsed tokenizer.json."""
    nodes = flatten_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    model = tokenizer.get("model")
    ignores = isinstance(model, Mapping) and bool(model.get("ignore_merges"))
    return _comparable_steps(map(_step_of_node, nodes)), ignores


def row_splitting(name: str) -> Splitting | None:
    """Return (comparable steps, `ignore_merges`) of a `pre` name; None for an unknown name."""
    row = PRE_TOKENIZERS.get(name)
    return None if row is None else (_comparable_steps(row.steps), row.ignore_merges)


def are_steps_known(steps: Sequence[SplitStep]) -> bool:
    """Return whether every step is one that the table can express."""
    return all(kind != "unknown" for kind, _ in steps)
