"""Tokenizers, templates and stop tokens as they came out of conversions."""

from tests.field import chats
from tests.field.chats import G
from tests.field.converter import Wrong, converted
from tests.field.hf import edited, json_edit
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("merges-cut", "tokens", "demo", "the second half of the merges is missing",
          "https://github.com/ggml-org/llama.cpp/issues/9309",
          converted("demo", "merges-cut", "BF16", Wrong(keys=chats.merges_cut(0.5))),
          "tokenizer_merges"),
    fault("merges-not-read", "tokens", "demo", "pairs of strings were not understood: no merges",
          "https://github.com/ggml-org/llama.cpp/pull/9696",
          converted("demo", "merges-not-read", "BF16", Wrong(keys=chats.merges_cut(0.0))),
          "tokenizer_merges"),
    fault("pre-is-default", "tokens", "demo", "the pre-tokenizer is written as default",
          "https://github.com/microsoft/BitNet/pull/508",
          converted("demo", "pre-is-default", "BF16", Wrong(keys=chats.key(G + "pre", "default"))),
          "pre_tokenizer"),
    fault("pre-of-another-model", "tokens", "demo", "another model's pre-tokenizer was recognised",
          "https://github.com/ggml-org/llama.cpp/issues/7724",
          converted("demo", "pre-of-another-model", "Q8_0", Wrong(
              keys=chats.key(G + "pre", "llama-bpe"))),
          "pre_tokenizer"),
    fault("control-typed-normal", "tokens", "demo", "the turn's tokens are typed NORMAL",
          "https://github.com/unslothai/unsloth/issues/5070",
          converted("demo", "control-typed-normal", "BF16", Wrong(keys=chats.typed("<|im_", 1))),
          ("token_types", "added_tokens")),
    fault("control-typed-user", "tokens", "demo", "special tokens are typed USER_DEFINED",
          "https://github.com/unslothai/unsloth/pull/6229",
          converted("demo", "control-typed-user", "Q8_0", Wrong(keys=chats.typed("<|im_", 4))),
          ("token_types", "added_tokens")),
    fault("bos-added-anyway", "tokens", "demo", "add_bos_token is true, the config says no",
          "https://github.com/ggml-org/llama.cpp/issues/3966",
          converted("demo", "bos-added-anyway", "BF16", Wrong(
              keys=chats.key(G + "add_bos_token", True))),
          "add_bos"),
    fault("template-of-another", "tokens", "demo", "a template whose tokens the vocabulary lacks",
          "https://github.com/hiyouga/LlamaFactory/issues/5834",
          converted("demo", "template-of-another", "BF16", Wrong(
              keys=chats.key("tokenizer.chat_template", chats.LLAMA3))),
          "chat_template"),
    fault("template-without-newline", "tokens", "demo", "a newline of every turn is gone",
          "https://github.com/ggml-org/llama.cpp/issues/7062",
          converted("demo", "template-without-newline", "Q8_0", Wrong(keys=chats.template(
              lambda text: text.replace("'<|im_end|>' + '\\n'", "'<|im_end|>'")))),
          "chat_template"),
    fault("added-not-special", "tokens", "demo", "the turn's tokens are not registered as added",
          "https://github.com/huggingface/transformers/pull/49008",
          edited("demo", "added-not-special", dtype="bfloat16", files={"tokenizer.json": json_edit(
              lambda read: read.update(added_tokens=[row for row in read["added_tokens"]
                                                     if "im_" not in row["content"]]))}),
          "added_tokens"),
    fault("digits-split-otherwise", "tokens", "demo",
          "the regular expression splits digits by three",
          "https://github.com/ggml-org/llama.cpp/issues/23252",
          edited("demo", "digits-split-otherwise", dtype="bfloat16", files={
              "tokenizer.json": lambda text: text.replace("\\\\p{N}|", "\\\\p{N}{1,3}|")}),
          "pre_tokenizer"),
)  # fmt: skip
