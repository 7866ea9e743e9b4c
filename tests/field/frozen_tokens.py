"""Tokenizers, templates and stop tokens as they came out of conversions.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import chats
from tests.field.chats import G
from tests.field.converter import Wrong, converted
from tests.field.hf import edited, json_edit
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("eos-is-end-of-text", "tokens", "demo",
          "the end of the text stops, not the end of the turn",
          "https://github.com/unslothai/unsloth/issues/468",
          converted("demo", "eos-is-end-of-text", "BF16", Wrong(
              keys=chats.key(G + "eos_token_id", 1533))),
          "special_ids"),
    fault("eos-outside", "tokens", "demo", "the id of the end of the text is no token's",
          "https://github.com/ggml-org/llama.cpp/pull/3635",
          converted("demo", "eos-outside", "BF16", Wrong(keys=chats.key(G + "eos_token_id",
               32000))),
          "special_ids"),
    fault("template-doubles-bos", "tokens", "demo",
          "the template starts with a token that is added",
          "https://github.com/ggml-org/llama.cpp/issues/7062",
          edited("demo", "template-doubles-bos", dtype="bfloat16", files={
              "chat_template.jinja": lambda text: "<|endoftext|>" + text}),
          ("chat_template", "add_bos")),
    fault("template-not-saved", "tokens", "demo", "the tuned model has no template",
          "https://github.com/hiyouga/LlamaFactory/issues/5904",
          edited("demo", "template-not-saved", dtype="bfloat16", files={
              "chat_template.jinja": lambda text: None}),
          "chat_template"),
    fault("added-tokens-missing", "tokens", "demo", "an added token is an unused row in the copy",
          "https://github.com/ggml-org/llama.cpp/issues/15842",
          converted("demo", "added-tokens-missing", "BF16", Wrong(
              keys=chats.renamed("<|im_start|>", "[PAD1534]"))),
          ("added_tokens", "tokenizer_pieces")),
    fault("one-stop-token-less", "tokens", "demo", "generation_config lists one end of the two",
          "https://github.com/vllm-project/vllm/pull/4182",
          edited("demo", "one-stop-token-less", dtype="bfloat16", files={
              "generation_config.json": json_edit(lambda read: read.update(eos_token_id=1533))}),
          ("generation_config", "special_ids")),
)  # fmt: skip
