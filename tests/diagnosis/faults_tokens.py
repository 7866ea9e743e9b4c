"""Seeded faults of tokenizers, chat templates and generation settings; the tensors are equal.

The GGUF files are written by gguf-py. Where a fault was met in the field its thread is named.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.fault import Fault, Pair
from tests.diagnosis.token_edits import (
    DEMO,
    GGML,
    Keys,
    Texts,
    all_normal,
    cut,
    cut_template,
    folder,
    foreign,
    keys,
    late_merges,
    lose,
    other_template,
    pieces_shifted,
    put,
    respelled,
    rewritten,
    template_and_end,
    texts,
    two_gguf,
    typed,
)

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


def backwards(found: Keys) -> None:
    """Scores with the other sign: the worst pieces are joined first."""
    found[GGML + "scores"] = [-score for score in found[GGML + "scores"]]


def bytes_normal(found: Keys) -> None:
    kinds = found[GGML + "token_type"]
    found[GGML + "token_type"] = [1 if kind == 6 else kind for kind in kinds]


# --- changes of a folder's texts ----------------------------------------------------------------


def added_lost(found: Texts) -> None:
    """The converter forgot an added token."""
    rows = found["tokenizer.json"]["added_tokens"]
    rows[:] = [row for row in rows if row["content"] != "<|im_start|>"]
    found["tokenizer_config.json"]["extra_special_tokens"] = ["<|im_end|>"]


def strips(found: Texts) -> None:
    for row in found["tokenizer.json"]["added_tokens"]:
        row["rstrip"] = True


def digits_by_three(found: Texts) -> None:
    split = found["tokenizer.json"]["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"\p{N}|", r"\p{N}{1,3}|")


def joined_digits(found: Texts) -> None:
    """Give the vocabulary a merge of digits, which shows how digits are split."""
    model = found["tokenizer.json"]["model"]
    last = next(token for token, i in model["vocab"].items() if i == 1500)
    del model["vocab"][last]
    model["vocab"]["12"] = 1500
    model["merges"] = [m for m in model["merges"] if last not in ("".join(m), *m)]
    model["merges"].append(["1", "2"])


def lower_case(found: Texts) -> None:
    found["tokenizer.json"]["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}],
    }


def no_bytes_left(found: Texts) -> None:
    found["tokenizer.json"]["model"]["unk_token"] = "<|endoftext|>"
    found["tokenizer.json"]["model"]["continuing_subword_prefix"] = "##"


def end_behind(found: Texts) -> None:
    found["tokenizer_config.json"]["add_eos_token"] = True


def other_ends(found: Texts) -> None:
    found["generation_config.json"]["eos_token_id"] = 1533


def three_digits(name: str) -> Pair:
    """Two folders whose digits are split one by one and in threes."""

    def both(found: Texts) -> None:
        joined_digits(found)
        digits_by_three(found)

    return folder(f"{name}-a", joined_digits), folder(name, both)


def not_lowered(name: str) -> Pair:
    """A folder that lowers its texts, and its GGUF, which cannot say so."""
    return folder(f"{name}-a", lower_case), foreign(name)


def carried_cut(name: str) -> Pair:
    """Our own GGUF, whose lists were edited afterwards: the JSON in it is the old one."""
    source = files.converted(DEMO, "demo.gguf")

    def change(found: Keys) -> None:
        data = json.loads(found["tokenizer.huggingface.json"])
        data["model"]["merges"] = data["model"]["merges"][:300]
        found["tokenizer.huggingface.json"] = json.dumps(data)

    return source, rewritten(source, name, change)


# --- config.json: sub-keys, and flags that the tensors contradict -------------------------------


def configured(base: str, change: Any, **how: Any) -> Callable[[str], Pair]:
    """Return a maker of a tiny folder and a copy with another configuration."""
    return lambda name: (
        tiny_folder(base),
        files.copy(tiny_folder(base), f"tokens-{name}", config=change, **how),
    )


def two_heads(name: str) -> Pair:
    """Return two folders with the embedding stored as the head, one tied, the other not."""
    source = tiny_folder("llama")

    def head_overwritten(rows: files.Rows) -> None:
        rows["lm_head.weight"] = rows["model.embed_tokens.weight"]

    return (
        files.copy(source, f"tokens-{name}-a", tensors=head_overwritten),
        files.copy(
            source, f"tokens-{name}", tensors=head_overwritten, config={"tie_word_embeddings": True}
        ),
    )


def without(key: str) -> Callable[[Texts], None]:
    return lambda config: config["rope_parameters"].pop(key)


def spelled_as_before(config: Texts) -> None:
    """The spelling of transformers 4: rope_theta beside rope_scaling."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}


def mlp_biases(rows: files.Rows) -> None:
    for layer in range(3):
        for part, size in (("gate", 72), ("up", 72), ("down", 48)):
            data = np.linspace(-0.5, 0.5, size, dtype="<f4")
            rows[f"model.layers.{layer}.mlp.{part}_proj.bias"] = ("F32", (size,), data.tobytes())


def denied(name: str) -> Pair:
    """Two folders with MLP biases; the second one's flag denies them."""
    source = tiny_folder("llama")
    return tuple(
        files.copy(source, f"tokens-{name}-{flag}", tensors=mlp_biases, config={"mlp_bias": flag})
        for flag in (True, False)
    )  # type: ignore[return-value]


# --- correct copies -----------------------------------------------------------------------------


def resaved(name: str) -> Pair:
    """The tokenizer as transformers writes it again."""
    from transformers import AutoTokenizer

    made = folder(name, lambda found: None)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(made)
    return DEMO, made


def vocab_classes(name: str) -> Pair:
    """Ids, flags, merges and template by gguf-py's own SpecialVocab."""
    import gguf
    from gguf.vocab import SpecialVocab

    special = SpecialVocab(DEMO, load_merges=True)
    roles = {"pad": "padding", "unk": "unknown"}

    def change(found: Keys) -> None:
        tokenizer = [key for key in found if key.startswith("tokenizer.")]
        kept = {GGML + part for part in ("model", "pre", "tokens", "token_type")}
        for key in set(tokenizer) - kept:
            del found[key]
        put(merges=list(special.merges))(found)
        for role, i in special.special_token_ids.items():
            put(**{f"{roles.get(role, role)}_token_id": i})(found)
        for role, flag in special.add_special_token.items():
            put(**{f"add_{role}_token": flag})(found)
        assert isinstance(special.chat_template, str)
        found[gguf.Keys.Tokenizer.CHAT_TEMPLATE] = special.chat_template

    return DEMO, foreign(name, change)


def same_settings(found: Texts) -> None:
    """Defaults written out, keys in another order."""
    settings = found["generation_config.json"]
    found["generation_config.json"] = {
        "temperature": 1.0,
        "top_k": 50,
        **dict(reversed(settings.items())),
    }


BASES = {"sub-key-lost": "llama", "sub-key-unread": "llama", "flag-denies": "llama",
         "flag-parallel": "stablelm", "flag-invents": "llama", "flag-ties": "llama",
         "config-spelled": "llama"}  # fmt: skip


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


def frame_stale(found: Texts) -> None:
    """The post-processor has an id from before the vocabulary was made anew."""
    text = "<|endoftext|>"
    found["tokenizer.json"]["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": text, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {text: {"id": text, "ids": [101], "tokens": [text]}},
    }


def ends_unstated(name: str) -> Pair:
    """Two folders without generation_config.json; the second's config.json has no end either."""

    def before(found: Texts) -> None:
        found["generation_config.json"] = None

    def both(found: Texts) -> None:
        before(found)
        del found["config.json"]["eos_token_id"]

    return folder(f"{name}-a", before), folder(name, both)


FAULTS_TOKENS = rows({
    # https://github.com/ggml-org/llama.cpp/pull/8597
    "eos-lost": ("no EOS is stated, and llama.cpp takes 11", keys(lose(GGML + "eos_token_id")),
                 "special_ids", GGML + "eos_token_id"),
    # https://github.com/ggml-org/llama.cpp/issues/7062
    "types-lost": ("no token types: all are normal", keys(lose(GGML + "token_type")),
                   "token_types", GGML + "token_type"),
    # https://github.com/microsoft/BitNet/pull/508
    "kind-llama": ("byte-level pieces under the model llama", keys(put(model="llama")),
                   "tokenizer_model", GGML + "model"),
    # https://github.com/MinishLab/model2vec/issues/335
    "frame-stale": ("the post-processor puts another token's id", texts(frame_stale), "frame",
                    "tokenizer.json: post_processor"),
    # https://github.com/JustVugg/colibri/issues/1478
    "ends-unstated": ("no file states where a generation ends", ends_unstated,
                      "generation_config", "generation_config.json: eos_token_id"),
    # https://github.com/unslothai/unsloth/issues/468
    "eos-id": ("EOS is endoftext for im_end", two_gguf(put(eos_token_id=1533)),
               "special_ids", GGML + "eos_token_id"),
    "eos-id-folder": ("the same against the folder", keys(put(eos_token_id=1533)), "special_ids",
                      GGML + "eos_token_id"),
    "pad-lost": ("no PAD is stated, and transformers has none",
                 two_gguf(lose(GGML + "padding_token_id")), "special_ids",
                 GGML + "padding_token_id"),
    "pad-id": ("PAD is EOS", two_gguf(put(padding_token_id=1535)), "special_ids",
               GGML + "padding_token_id"),
    # https://github.com/ggml-org/llama.cpp/issues/7476
    "pre-default": ("tokenizer.ggml.pre is default", keys(put(pre="default")), "pre_tokenizer",
                    GGML + "pre"),
    # https://github.com/ggml-org/llama.cpp/pull/6920
    "pre-missing": ("no tokenizer.ggml.pre", keys(lose(GGML + "pre")), "pre_tokenizer",
                    GGML + "pre"),
    # https://github.com/ggml-org/llama.cpp/issues/9692
    "merges-missing": ("no merges", keys(lose(GGML + "merges")), "tokenizer_merges",
                       GGML + "merges"),
    "merges-cut": ("the first 900 of 1277 merges", keys(cut(900)), "tokenizer_merges",
                   "merge 900"),
    "merges-order": ("the first ten merges last", two_gguf(late_merges), "tokenizer_merges",
                     "merge 0"),
    "pieces-shifted": ("pieces one id too early from 700 on", keys(pieces_shifted),
                       "tokenizer_pieces", "id 700"),
    # https://github.com/unslothai/unsloth/pull/5080
    "types-normal": ("control tokens marked normal", keys(all_normal), "token_types",
                     GGML + "token_type"),
    # https://github.com/abetlen/llama-cpp-python/issues/1501
    "bos-twice": ("BOS put before texts that begin with it", keys(put(add_bos_token=True)),
                  "add_bos", GGML + "add_bos_token"),
    "template-other": ("another model's chat template", keys(other_template), "chat_template",
                       "tokenizer.chat_template"),
    "template-cut": ("the template ends before the prompt to answer", keys(cut_template),
                     "chat_template", "tokenizer.chat_template"),
    "template-lost": ("no chat template", keys(lose("tokenizer.chat_template")), "chat_template",
                      "tokenizer.chat_template"),
    "template-and-eos": ("another template, and EOS is endoftext",
                         keys(template_and_end),
                         ("special_ids", "chat_template"), GGML + "eos_token_id"),
    "carried-cut": ("the JSON that a GGUF carries has 300 merges, its lists all", carried_cut,
                    "carried_tokenizer", "tokenizer.huggingface.json"),
    # https://github.com/ggml-org/llama.cpp/issues/8584
    "space-prefix": ("add_space_prefix left out: true is the default",
                     two_gguf(lose(GGML + "add_space_prefix"), scored), "space_prefix",
                     GGML + "add_space_prefix"),
    "scores-sign": ("scores with the other sign", two_gguf(backwards, scored), "tokenizer_scores",
                    GGML + "scores"),
    "bytes-normal": ("byte tokens marked normal", two_gguf(bytes_normal, scored), "token_types",
                     GGML + "token_type"),
    # https://github.com/ggml-org/llama.cpp/issues/15842
    "added-lost": ("an added token is missing", texts(added_lost), "added_tokens",
                   "token <|im_start|>"),
    "added-strips": ("added tokens strip the blanks behind them", texts(strips), "added_tokens",
                     "tokenizer.json: added_tokens"),
    "digits": ("digits in threes for one by one", three_digits, "pre_tokenizer",
               "tokenizer.json: pre_tokenizer"),
    "case": ("a Lowercase normalizer lost", not_lowered, "normalizer", GGML + "pre"),
    "model-options": ("another prefix of inner pieces", texts(no_bytes_left), "tokenizer_model",
                      "tokenizer.json: model.continuing_subword_prefix"),
    "eos-behind": ("EOS put behind texts", texts(end_behind), "add_eos",
                   "tokenizer_config.json: add_eos_token"),
    # https://github.com/oobabooga/textgen/issues/5885
    "generation-ends": ("generation_config.json names one end of two, the wrong one",
                        texts(other_ends), "generation_config",
                        "generation_config.json: eos_token_id"),
    # https://github.com/ggml-org/llama.cpp/issues/23252
    "digits-by-three": ("digits split by three, which no piece shows", texts(digits_by_three),
                        "pre_tokenizer", "tokenizer.json: pre_tokenizer"),
    # https://github.com/ggml-org/llama.cpp/issues/7724
    "pre-of-another": ("tokenizer.ggml.pre of another model, which no piece shows",
                       keys(put(pre="dbrx")), "pre_tokenizer", GGML + "pre"),
    # https://github.com/unslothai/unsloth/pull/6229
    "control-user": ("special tokens typed USER_DEFINED", keys(typed(4, "<|im_")), "token_types",
                     GGML + "token_type"),
    "sub-key-lost": ("rope_scaling lost its trained length",
                     configured("llama-llama3", without("original_max_position_embeddings")),
                     "rope_scaling", "rope_scaling.original_max_position_embeddings"),
    "sub-key-unread": ("rope_scaling lost a key that nothing can be read without",
                       configured("llama-llama3", without("low_freq_factor")), "rope_scaling",
                       "rope_parameters.low_freq_factor"),
    "flag-denies": ("mlp_bias is false beside stored biases", denied, "missing_bias", "mlp_bias"),
    "flag-parallel": ("use_parallel_residual beside a second norm",
                      configured("stablelm", {"use_parallel_residual": True}), "residual",
                      "use_parallel_residual"),
    # https://github.com/huggingface/transformers/issues/45127
    "flag-ties": ("tie_word_embeddings beside a head of its own",
                  configured("llama", {"tie_word_embeddings": True}), "tied_embedding",
                  "tie_word_embeddings"),
}, "bug")  # fmt: skip

CONTROLS_TOKENS = rows({
    "tokens-foreign": ("the folder as a foreign GGUF", lambda name: (DEMO, foreign(name)), (), ""),
    "tokens-vocab-classes": ("ids, merges and template by gguf-py's SpecialVocab", vocab_classes,
                             (), ""),
    "tokens-resaved": ("the tokenizer saved again by transformers", resaved, (), ""),
    "tokens-pre-alike": ("tokenizer.ggml.pre is another name of the same rule",
                         two_gguf(put(pre="stablelm2")), (), ""),
    "tokens-ours": ("our GGUF with and without the JSON it carries",
                    lambda name: (files.converted(DEMO, "demo.gguf"), foreign(name)), (), ""),
    "tokens-settings": ("defaults written out in generation_config.json", texts(same_settings), (),
                        ""),
    "tokens-scored": ("scores times two", two_gguf(
        lambda found: put(scores=[2 * score for score in found[GGML + "scores"]])(found), scored),
        (), ""),
    "template-respelled": ("the chat template in other quotes and blanks", texts(respelled), (),
                           ""),
    "tokens-apr": ("APR against a foreign GGUF",
                   lambda name: (files.converted(DEMO, "demo.apr"), foreign(name)), (), ""),
    "flag-invents": ("attention_bias and mlp_bias without biases: zeros",
                     configured("llama", {"attention_bias": True, "mlp_bias": True}), (), ""),
    "flag-ties-copy": ("tie_word_embeddings beside a head that is a copy of the embedding",
                       two_heads, (), ""),
    "config-spelled": ("rope_scaling in the spelling of transformers 4",
                       configured("llama-llama3", spelled_as_before), (), ""),
}, "same")  # fmt: skip
