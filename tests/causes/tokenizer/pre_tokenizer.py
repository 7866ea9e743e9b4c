"""Seeded faults of `aprfmt/causes/tokenizer/pre_tokenizer.py`."""

from tests.diagnosis.fault import Pair
from tests.diagnosis.token_edits import (
    GGML,
    Texts,
    folder,
    foreign,
    keys,
    lose,
    put,
    rows,
    scored,
    texts,
    two_gguf,
)


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


def undecoded(found: Texts) -> None:
    found["tokenizer.json"]["decoder"] = None


def three_digits(name: str) -> Pair:
    """Two folders whose digits are split one by one and in threes."""

    def both(found: Texts) -> None:
        joined_digits(found)
        digits_by_three(found)

    return folder(f"{name}-a", joined_digits), folder(name, both)


def not_lowered(name: str) -> Pair:
    """A folder that lowers its texts, and its GGUF, which cannot say so."""
    return folder(f"{name}-a", lower_case), foreign(name)


FILE_FAULTS = rows({
    # https://github.com/microsoft/BitNet/pull/508
    "kind-llama": ("byte-level pieces under the model llama", keys(put(model="llama")),
                   "tokenizer_model", GGML + "model"),
    # https://github.com/ggml-org/llama.cpp/issues/7476
    "pre-default": ("tokenizer.ggml.pre is default", keys(put(pre="default")), "pre_tokenizer",
                    GGML + "pre"),
    # https://github.com/ggml-org/llama.cpp/pull/6920
    "pre-missing": ("no tokenizer.ggml.pre", keys(lose(GGML + "pre")), "pre_tokenizer",
                    GGML + "pre"),
    # https://github.com/ggml-org/llama.cpp/issues/8584
    "space-prefix": ("add_space_prefix left out: true is the default",
                     two_gguf(lose(GGML + "add_space_prefix"), scored), "space_prefix",
                     GGML + "add_space_prefix"),
    "digits": ("digits in threes for one by one", three_digits, "pre_tokenizer",
               "tokenizer.json: pre_tokenizer"),
    "case": ("a Lowercase normalizer lost", not_lowered, "normalizer", GGML + "pre"),
    "model-options": ("another prefix of inner pieces", texts(no_bytes_left), "tokenizer_model",
                      "tokenizer.json: model.continuing_subword_prefix"),
    "decoder-lost": ("nothing says how ids become text", texts(undecoded), "decoder",
                     "tokenizer.json: decoder"),
    # https://github.com/ggml-org/llama.cpp/issues/23252
    "digits-by-three": ("digits split by three, which no piece shows", texts(digits_by_three),
                        "pre_tokenizer", "tokenizer.json: pre_tokenizer"),
    # https://github.com/ggml-org/llama.cpp/issues/7724
    "pre-of-another": ("tokenizer.ggml.pre of another model, which no piece shows",
                       keys(put(pre="dbrx")), "pre_tokenizer", GGML + "pre"),
}, "bug")  # fmt: skip
