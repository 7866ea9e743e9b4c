"""Seeded faults of `aprfmt/causes/tokenizer/special_ids.py`."""

from collections.abc import Callable

from tests.diagnosis.fault import Pair
from tests.diagnosis.token_edits import (
    GGML,
    Texts,
    cut_template,
    folder,
    keys,
    lose,
    other_template,
    put,
    rows,
    template_and_end,
    texts,
    two_gguf,
)


def end_behind(found: Texts) -> None:
    found["tokenizer_config.json"]["add_eos_token"] = True


def other_ends(found: Texts) -> None:
    found["generation_config.json"]["eos_token_id"] = 1533


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


def segmented(name: str) -> Pair:
    """Two folders of a model with two token types; the second text of a pair gets 1, and 0."""

    def given(second: int) -> Callable[[Texts], None]:
        def change(found: Texts) -> None:
            found["config.json"]["type_vocab_size"] = 2
            rows = [{"Sequence": {"id": "A", "type_id": 0}}]
            pair = [*rows, {"Sequence": {"id": "B", "type_id": second}}]
            found["tokenizer.json"]["post_processor"] = {
                "type": "TemplateProcessing", "single": rows, "pair": pair, "special_tokens": {}
            }  # fmt: skip

        return change

    return folder(f"{name}-a", given(1)), folder(name, given(0))


FILE_FAULTS = rows({
    # https://github.com/ggml-org/llama.cpp/pull/8597
    "eos-lost": ("no EOS is stated, and llama.cpp takes 11", keys(lose(GGML + "eos_token_id")),
                 "special_ids", GGML + "eos_token_id"),
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
    "eos-behind": ("EOS put behind texts", texts(end_behind), "add_eos",
                   "tokenizer_config.json: add_eos_token"),
    "segments-lost": ("both texts of a pair get token type 0", segmented, "segments",
                      "tokenizer.json: post_processor"),
    # https://github.com/oobabooga/textgen/issues/5885
    "generation-ends": ("generation_config.json names one end of two, the wrong one",
                        texts(other_ends), "generation_config",
                        "generation_config.json: eos_token_id"),
}, "bug")  # fmt: skip
