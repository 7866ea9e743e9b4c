"""What the tokenizers of two models say otherwise: causes that no tensor and no pass shows."""

from aprfmt.causes.row import Cause

_READ = "Replacing this part of B's tokenizer by A's makes every probe equal: ids, chats and ends."

TOKENS = (
    Cause(
        "tokenizer_model", "identity", "bug",
        "The vocabulary is read as another kind, or its model has other options (byte_fallback, "
        "unk_token).",
        "`tokenizer.ggml.model` or `model` of tokenizer.json.", _READ,
    ),
    Cause(
        "tokenizer_pieces", "identity", "bug",
        "Pieces stand at other ids: shifted, exchanged, cut, or those of another model.",
        "Pieces compared id by id; fillers such as [PAD7] do not count.", _READ,
    ),
    Cause(
        "added_tokens", "identity", "bug",
        "Tokens split off whole are missing, stand at other ids or have other flags (lstrip, "
        "rstrip, normalized, single_word, special).",
        "`added_tokens` of both tokenizer.json, with those tokenizer_config.json adds.", _READ,
    ),
    Cause(
        "token_types", "identity", "bug",
        "Tokens have another type: control tokens marked normal are read as text, byte tokens "
        "marked normal are lost.",
        "`tokenizer.ggml.token_type` by token.", _READ,
    ),
    Cause(
        "pre_tokenizer", "identity", "bug",
        "Texts are split otherwise before merging: another `tokenizer.ggml.pre`, none, another "
        "regex, digits one by one or in threes.",
        "Steps compared by effect; names that split alike are no difference.", _READ,
    ),
    Cause(
        "space_prefix", "identity", "bug",
        "A blank is put before a text on one side only (`add_space_prefix`, Prepend, Metaspace).",
        "The key or its default, against the normalizer.", _READ,
    ),
    Cause(
        "normalizer", "identity", "bug",
        "Texts are normalised otherwise before splitting: lower case, accents, NFC.",
        "`normalizer` of both tokenizer.json; what GGUF cannot say counts if a probe shows it.",
        _READ,
    ),
    Cause(
        "tokenizer_merges", "identity", "bug",
        "Merges are missing, cut to the first n, or stand in another order.",
        "The two lists; a prefix and a reordering are named as such.", _READ,
    ),
    Cause(
        "tokenizer_scores", "identity", "bug",
        "Scores of pieces differ, so that pieces are joined in another order.",
        "Scores by piece; where only their order matters, the order.", _READ,
    ),
    Cause(
        "special_ids", "identity", "bug",
        "BOS, EOS, PAD or another special id is another one: texts begin otherwise, or generation "
        "ends elsewhere or not at all.",
        "Ids by role, from the lists, tokenizer_config.json and config.json.", _READ,
    ),
    Cause(
        "add_bos", "identity", "bug",
        "BOS is put before a text on one side only; where the chat template writes it too, it "
        "stands there twice.",
        "`add_bos_token`, its default, or the post-processor.", _READ,
    ),
    Cause(
        "add_eos", "identity", "bug",
        "EOS is put behind a text on one side only.",
        "`add_eos_token`, or the post-processor.", _READ,
    ),
    Cause(
        "chat_template", "identity", "bug",
        "The chat template is another one, cut, or missing.",
        "Conversations rendered by both: with and without a system message, several turns, with "
        "and without a prompt to answer.",
        _READ,
    ),
    Cause(
        "generation_config", "identity", "bug",
        "generation_config.json states other end ids or other sampling.",
        "Values in effect: a default written out is no difference.", _READ,
    ),
    Cause(
        "carried_tokenizer", "identity", "bug",
        "A GGUF carries a tokenizer.json that says otherwise than its own lists, which other "
        "engines read.",
        "The lists against `tokenizer.huggingface.json` in the same file.", _READ,
    ),
)  # fmt: skip
