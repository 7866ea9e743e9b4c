"""What engines use where a tokenizer key is absent: special ids, BOS and EOS, token types.

An absent key is no open question: the engine has a value, and acts on it. Of llama.cpp:
src/llama-vocab.cpp, commit 00ad355e009e83abf98f96a6ded7193b95763681.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aprfmt.tokenizer.keys import BYTE, CONTROL, NORMAL, USER_DEFINED


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """The defaults of one `tokenizer.ggml.model`: ids by role, and whether BOS and EOS are added.

    `framed` are the roles that are put before and after a text, unless their flag is false. At that
    commit llama.cpp's own passes heed no such flag; llama-tokenize and other programs do.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    framed: tuple[str, str] | None = None


# By the value of tokenizer.ggml.model.
DEFAULTS: Mapping[str, EngineDefaults] = {
    "gpt2": EngineDefaults({"bos": 11, "eos": 11}),
    "llama": EngineDefaults({"bos": 1, "eos": 2, "unk": 0}, add_bos=True),
    "bert": EngineDefaults(
        {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}, framed=("bos", "sep")
    ),
    "t5": EngineDefaults({"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "rwkv": EngineDefaults(),
    "plamo2": EngineDefaults({"bos": 1, "eos": 2, "unk": 0, "pad": 3}),
    "gemma4": EngineDefaults(),
}
_NO_BOS = ("glm4", "chatglm-bpe")  # values of tokenizer.ggml.pre without a default for BOS
# Values of tokenizer.ggml.pre under which byte-level BPE reads pieces that spell blanks as U+2581.
BLANK_PRE = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")

# Texts of tokens that are taken for control tokens, whatever type they have: ends of a turn, of
# which llama.cpp says "its type will be overridden", and the marks of fill-in-the-middle.
TAKEN_FOR_CONTROL: frozenset[str] = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>"),
        *("<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
        *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>"),
        *("<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)


def default_ids(model: str, pre: str, size: int) -> dict[str, int]:
    """Return {role: id} that llama.cpp uses for absent keys.

    `model` and `pre` are the values of tokenizer.ggml.model and .pre, `size` the number of tokens:
    a default beyond them is left out.
    """
    row = DEFAULTS.get(model, EngineDefaults())
    return {
        role: i
        for role, i in row.ids.items()
        if i < size and not (role == "bos" and pre in _NO_BOS)
    }


def default_types(tokens: Sequence[str]) -> list[int]:
    """Return the token types llama.cpp uses for a file without types: normal, or control."""
    return [CONTROL if token in TAKEN_FOR_CONTROL else NORMAL for token in tokens]


def overridden_types(
    tokens: Sequence[str], types: Sequence[int], wanted: Callable[[str], bool]
) -> list[int]:
    """Return the types as llama.cpp overrides them: tokens of known texts become control tokens.

    `wanted(token)` says which of these are overridden.
    """
    return [
        CONTROL
        if kind not in (CONTROL, USER_DEFINED, BYTE)
        and token in TAKEN_FOR_CONTROL
        and wanted(token)
        else kind
        for token, kind in zip(tokens, types, strict=True)
    ]


# Kinds of vocabulary in words, and the value of tokenizer.ggml.model that names each.
KIND_NAMES: Mapping[str, str] = {
    "bpe": "byte-level BPE", "spm": "SentencePiece", "wordpiece": "WordPiece"
}  # fmt: skip
GGUF_MODELS: Mapping[str, str] = {"bpe": "gpt2", "spm": "llama", "wordpiece": "bert"}
SPELLED_KINDS = ("bpe", "spm")  # a vocabulary said to be of these is judged by its pieces


def kind_of_pieces(tokens: Sequence[str], types: Sequence[int]) -> str:
    """Return "bpe", "spm" or "wordpiece" by how tokens spell blanks; "" where that does not show.

    Byte-level BPE spells a blank as U+0120, SentencePiece as U+2581. As either letter may also
    occur in an ordinary piece, one of them has to be (nearly) absent and the other common. A
    WordPiece vocabulary of llama.cpp begins words with U+2581, too, but has no piece of it alone
    and no bytes, and knows [UNK] or [CLS].
    """
    byte_level = blank = plain = 0
    for token, kind in zip(tokens, types, strict=False):
        if kind == NORMAL:
            plain += 1
            byte_level += token.startswith("\u0120")
            blank += token.startswith("\u2581")
    enough = max(4, plain // 100)
    if byte_level >= enough and not blank:
        return "bpe"
    if blank < enough or 50 * byte_level > blank:
        return ""
    words = (
        "\u2581" not in tokens and BYTE not in types and ("[UNK]" in tokens or "[CLS]" in tokens)
    )
    return "wordpiece" if words else "spm"


# ids -> values of model_type in config.json whose class in transformers (5.23) has these as
# eos_token_id where the key is absent. Other classes have none, and then nothing ends a generation.
_CLASS_EOS: Mapping[tuple[int, ...], str] = {
    (0,): "stablelm rwkv mamba falcon_mamba",
    (1,): (
        "gemma gemma2 gemma3_text gemma3 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite "
        "glm_moe_dsa t5 mt5 umt5 gemma3n_text gemma3n "
        "gemma4_text gemma4 gemma4_unified_text gemma4_unified"
    ),
    (2,): (
        "llama mistral mixtral phi granite deepseek_v2 seed_oss exaone4 ernie4_5 "
        "hunyuan_v1_dense hunyuan_v1_moe ernie4_5_moe granitemoe gpt_neox bloom opt "
        "llama4_text llama4 phimoe apertus persimmon xglm biogpt mamba2 jamba bamba "
        "granitemoehybrid falcon_h1 lfm2 lfm2_moe nemotron_h ministral ministral3 mistral3 "
        "internlm3 minimax roberta camembert mpnet xlm-roberta jina_embeddings_v3"
    ),
    (3,): "nemotron",
    (11,): "falcon",
    (53,): "exaone_moe",
    (32000,): "phi3",
    (50256,): "whisper gpt2 starcoder2 gpt_bigcode gptj gpt_neo codegen",
    (50282,): "modernbert",
    (50279,): "olmo2 olmo3 olmoe olmo",
    (100257,): "olmo_hybrid",
    (124900,): "lfm3",
    (128001,): "smollm3 arcee bitnet eurobert",
    (150024,): "jais2",
    (151329, 151336, 151338): "glm glm4",
    (151645,): "qwen2_vl_text qwen2_vl qwen2_5_vl_text qwen2_5_vl",
    (163586,): "kimi_linear",
    (200020,): "minimax_m2 minimax_m3_vl_text minimax_m3_vl",
    (255001,): "cohere cohere2",
}
CLASS_EOS: Mapping[object, frozenset[int]] = {
    name: frozenset(ids) for ids, names in _CLASS_EOS.items() for name in names.split()
}
