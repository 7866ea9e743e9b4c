"""Pairs of tokenizers, templates and configurations that differ in nothing that matters.

The GGUF files are written by gguf-py.
"""

from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.fault import Pair
from tests.diagnosis.token_edits import (
    DEMO,
    GGML,
    Keys,
    Texts,
    configured,
    folder,
    foreign,
    put,
    respelled,
    rows,
    scored,
    texts,
    two_gguf,
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


def spelled_as_before(config: Texts) -> None:
    """The spelling of transformers 4: rope_theta beside rope_scaling."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}


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
