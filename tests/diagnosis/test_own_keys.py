"""A GGUF's own keys decide what other programs read, whatever config.json or tokenizer it carries.

Seen red: "equal" and "same" with exit 0 for a size that the tensors contradict, for a key without
which no other program opens the file, for a lost list of tokens and for another end of a turn.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from aprfmt.model.own_keys import misleading_keys
from tests.arch.tiny import IN_GGUF, Tiny, make
from tests.checks.gates.faults import copied
from tests.cli.run import aprfmt as command
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

# What is changed -> (the cause, the key that is named)
CHANGES: dict[tuple[str, ...], tuple[str, str]] = {
    ("qwen2.vocab_size=1000",): ("config_sizes", "qwen2.vocab_size"),
    ("tokenizer.ggml.eot_token_id=5",): ("special_ids", ""),
    ("tokenizer.ggml.eom_token_id=9",): ("special_ids", ""),
    ("--remove", "tokenizer.ggml.tokens"): ("carried_tokenizer", "tokenizer.ggml.tokens"),
    **{("--remove", f"qwen2.{key}"): ("config_sizes", f"qwen2.{key}")
       for key in ("embedding_length", "block_count", "context_length", "feed_forward_length",
                   "attention.head_count", "attention.layer_norm_rms_epsilon")},
}  # fmt: skip
# What readers have their own value for, which is the same.
WITHOUT_EFFECT = [
    f"qwen2.{key}" for key in ("vocab_size", "attention.key_length", "attention.value_length",
                               "rope.dimension_count")
] + ["general.name", "tokenizer.ggml.eot_token_id", "tokenizer.huggingface.json"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo as a GGUF that carries its config.json and tokenizer.json."""
    there = tmp_path_factory.mktemp("own") / "whole.gguf"
    assert command("convert", demo_model, there).code == 0
    return there


@pytest.mark.parametrize("against", ["the gguf", "the folder"])
@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
def test_a_key_that_misleads_others_counts(
    change: tuple[str, ...], against: str, whole: Path, demo_model: Path, tmp_path: Path
) -> None:
    """On either side, and the printed command mends the file."""
    a, b = whole if against == "the gguf" else demo_model, tmp_path / "b.gguf"
    assert command("set", whole, *change, "-o", b).code == 0
    assert command("diff", a, b).code == command("diff", b, a).code == 1
    done = command("diagnose", a, b, "--json")
    (cause,) = done.json["causes"]
    expected, key = CHANGES[change]
    assert (done.code, cause["cause"], cause["level"]) == (1, expected, "confirmed")
    assert not key or (key in cause["where"] and key in cause["says"])
    if cause["cause"] == "config_sizes":
        value = change[0].partition("=")[2]
        said = f"{key} says {value}, the tensors say" if value else f"{key} is not there"
        assert said in cause["says"], cause["says"]
    assert command("diff", b, b).code == command("diagnose", b, b).code == 0
    lost = change[0] == "--remove"  # without it other programs do not open the file
    ordinary = "token_id" in change[0]  # an end that is a piece of ordinary text
    assert command("validate", b).code == int(lost or ordinary)
    words = cause["remedy"]["command"].split()
    at = next(i for i, word in enumerate(words) if word.startswith("b-fixed"))
    mended = tmp_path / "mended.gguf"
    assert command(*words[1:at], mended, *words[at + 1 :]).code == 0
    assert command("diagnose", a, mended).code == command("diff", a, mended).code == 0


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_that_readers_do_without_is_no_difference(
    key: str, whole: Path, demo_model: Path, tmp_path: Path
) -> None:
    b = tmp_path / "b.gguf"
    assert command("set", whole, "--remove", key, "-o", b).code == 0
    for a in (whole, demo_model):
        assert command("diff", a, b).code == command("diagnose", a, b).code == 0


@pytest.mark.parametrize("against", ["the gguf", "the folder"])
def test_a_flag_of_a_head_that_is_not_there(
    against: str, whole: Path, demo_model: Path, tmp_path: Path
) -> None:
    """Untied and no head: transformers makes one of random numbers."""
    b = copied(demo_model, tmp_path / "b")
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    a = whole if against == "the gguf" else demo_model
    assert command("diff", a, b).code == command("diff", b, a).code == 1
    done = command("diagnose", a, b, "--json")
    (cause,) = done.json["causes"]
    assert (done.code, cause["cause"], cause["where"]) == (
        1, "tied_embedding", ["tie_word_embeddings"],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tiny", IN_GGUF, ids=lambda tiny: tiny.id)
def test_a_conversion_misleads_nobody(tiny: Tiny, tmp_path: Path) -> None:
    """Of every architecture that GGUF has a name for."""
    made = make(tiny).model
    made.save_pretrained(tmp_path / "m")
    there = tmp_path / "m.gguf"
    done = command("convert", tmp_path / "m", there, "--no-verify")
    if done.code == 2:
        assert done.err, "refused without a reason"
        return
    with aprfmt.open(tmp_path / "m") as model:
        assert misleading_keys(model) == {}
    with aprfmt.open(there) as model:
        assert misleading_keys(model) == {}


# rope_theta of A and of B outside the object `rope_parameters` (None: not there), and the state.
OUTSIDE: dict[str, tuple[float | None, float | None, str]] = {
    "stale": (None, 1e4, "only in B"),
    "stale beside a right one": (1e6, 1e4, "unequal"),
    "stale on both sides": (1e4, 2e4, "unequal"),
    "the same twice": (None, 1e6, ""),
    "both alike": (1e4, 1e4, ""),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_base_of_rope_stated_twice(case: str, demo_model: Path, tmp_path: Path) -> None:
    """transformers takes that of the object, older readers the other. Seen red: "equal", exit 0."""
    *values, state = OUTSIDE[case]
    sides = []
    for name, value in zip("ab", values, strict=True):
        shutil.copytree(demo_model, tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        assert config["rope_parameters"]["rope_theta"] == 1e6
        path.write_text(json.dumps(config | ({} if value is None else {"rope_theta": value})))
        sides.append(tmp_path / name)
    for name in ("diff", "diagnose"):
        done = command(name, *sides, "--json")
        rows = [row for row in done.json["not_compared"] if row["name"] == "rope_theta"]
        assert done.code == bool(state) and [row["state"] for row in rows] == [state] * bool(state)
    if state:
        (following,) = done.json["next"]
        assert command(*shlex.split(following)[1:-1], tmp_path / "mended").code == 0
        assert command("diff", sides[0], tmp_path / "mended").code == 0


@pytest.mark.parametrize("head", ["kept", "gone"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_flag_of_a_head_of_its_own_names_the_head(head: str, turned: bool) -> None:
    """One cause of the key and the tensor, whichever side says that they are tied."""
    good = tiny_folder("llama")
    tensors = files.drop("lm_head.weight") if head == "gone" else None
    bad = files.copy(
        good, f"own-head-{head}", tensors=tensors, config={"tie_word_embeddings": True}
    )
    found = diagnose(*map(str, (bad, good) if turned else (good, bad)))
    (finding,) = found.findings
    assert (found.exit_code, finding.cause) == (1, "tied_embedding")
    assert finding.where[-1] == "output.weight" and len(finding.where) == 2


def test_a_vocabulary_smaller_than_its_table_is_one_key(demo_model: Path, tmp_path: Path) -> None:
    """The tokenizer is not cut at a key that the tensors contradict: nothing of it is lost."""
    b = copied(demo_model, tmp_path / "b")
    config = json.loads((b / "config.json").read_text())
    rows = config["vocab_size"]
    (b / "config.json").write_text(json.dumps({**config, "vocab_size": rows - 36}))
    done = command("diagnose", demo_model, b, "--json")
    (cause,) = done.json["causes"]
    assert (done.code, cause["cause"], cause["where"]) == (1, "config_sizes", ["vocab_size"])
    assert not done.json["not_compared"]
    assert f"vocab_size={rows}" in cause["remedy"]["command"]
