"""A key that no pass depends on is no less a key: other programs load, cast and cut by it.

Seen red: "equal" and exit 0 for another class, dtype, context length, quantization claim, template
or list of tokens, since a table lists the key and nothing compared it.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.compare import diff
from aprfmt.conversion import convert
from aprfmt.model import open_model
from aprfmt.model.ledger import TEMPLATES, Ledger, list_not_compared, make_ledger
from aprfmt.tokenizer.keys import TEMPLATE_FOLDER
from tests.cli.run import aprfmt as command
from tests.diagnosis.test_remedies import written
from tests.models import save_tiny

CONFIG, TOKENS, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
GONE = object()
# (file, key) -> another value, or GONE.
CHANGES: dict[tuple[str, str], Any] = {
    (CONFIG, "architectures"): ["LlamaForCausalLM"],
    (CONFIG, "model_type"): "qwen2x",
    (CONFIG, "dtype"): "float16",
    (CONFIG, "max_position_embeddings"): 128,
    (CONFIG, "hidden_size"): GONE,
    (CONFIG, "vocab_size"): GONE,
    (CONFIG, "quantization_config"): {"quant_method": "awq", "bits": 4},
    (CONFIG, "a_key_of_nobody"): [1, {"two": 3}],
    (TOKENS, "tokenizer_class"): "LlamaTokenizer",
    (TOKENS, "chat_template"): "{{ 'not that of chat_template.jinja' }}",
    (TOKENS, "model_max_length"): 99,
    (TOKENS, "add_prefix_space"): True,
    (TOKENS, "clean_up_tokenization_spaces"): True,
    (GENERATION, "temperature"): 0.2,
    (GENERATION, "lang_to_id"): {"<|en|>": 7},
    (GENERATION, "alignment_heads"): [[0, 1]],
    (GENERATION, "early_stopping"): True,
    (GENERATION, "stop_strings"): ["</s>"],
    ("tokenizer.json", "decoder"): GONE,
}
# What one program writes in another way than another, or than it did.
INNOCENT: dict[tuple[str, str], Any] = {
    (CONFIG, "architectures"): ["Qwen2ForCausalLM"],
    (CONFIG, "use_cache"): False,
    (CONFIG, "transformers_version"): "4.1.0",
    (CONFIG, "initializer_range"): 0.5,
    (CONFIG, "layer_types"): GONE,
    (CONFIG, "dtype"): GONE,
    (TOKENS, "tokenizer_class"): "Qwen2TokenizerFast",
    (TOKENS, "backend"): "other",
    (TOKENS, "model_max_length"): GONE,
    (GENERATION, "do_sample"): GONE,
    (GENERATION, "early_stopping"): False,
    (GENERATION, "num_beam_groups"): 1,
    (GENERATION, "lang_to_id"): None,
}


def changed(model: Path, there: Path, file: str, key: str, value: Any) -> Path:
    """Return a copy of a folder with one key of a file changed or taken away."""
    shutil.copytree(model, there)
    keys = json.loads((there / file).read_text())
    if value is GONE:
        del keys[key]
    else:
        keys[key] = value
    (there / file).write_text(json.dumps(keys))
    return there


@pytest.mark.parametrize("change", CHANGES, ids=": ".join)
def test_a_key_that_others_load_by_counts(
    change: tuple[str, str], demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way round and in both commands, and the next command mends B.

    Both with it are equal, and `--accept` takes it.
    """
    b = changed(demo_model, tmp_path / "b", *change, CHANGES[change])
    for name in ("diff", "diagnose"):
        for pair in ((demo_model, b), (b, demo_model)):
            done = command(name, *pair, "--json")
            assert done.code == done.json["exit"] == 1
            said = json.dumps(
                [done.json.get(one) for one in ("not_compared", "causes", "tokenizer")]
            )
            assert change[1] in said
        assert command(name, b, b).code == 0
    if change[0] != "tokenizer.json":  # which `set` does not write
        for name in ("diff", "diagnose"):
            (following,) = command(name, demo_model, b, "--json").json["next"]
            if name == "diagnose" or not following.startswith("aprfmt diagnose"):
                mended = written(following, b, tmp_path / name, monkeypatch)
                assert command("diff", demo_model, mended).code == 0, following
    rows = diff(demo_model, b).not_compared
    if rows:
        accept = [f"unread:{row.name}" for row in rows]
        assert diff(demo_model, b).pronounced(accept).exit == 0


@pytest.mark.parametrize(
    "key", ["decoder_start_token_id", "image_token_id", "sep_token_id", "audio_token_index"]
)
def test_an_id_that_models_read_counts_where_both_state_it(
    key: str, demo_model: Path, tmp_path: Path
) -> None:
    a, b = (changed(demo_model, tmp_path / str(i), CONFIG, key, i) for i in (5, 6))
    for name in ("diff", "diagnose"):
        done = command(name, a, b, "--json")
        assert done.code == 1 and key in json.dumps(done.json["not_compared"])


# Architecture -> classes under which all of its tensors are loaded, and compute the same.
SAME_BLOCKS = {"llama": ("mistral", "Mistral"), "mistral": ("llama", "Llama")}


@pytest.mark.parametrize("arch", SAME_BLOCKS)
def test_a_class_that_computes_the_same_from_the_same_names_is_no_difference(
    arch: str, tmp_path: Path
) -> None:
    """Seen red: "not exercised", with a `set` that named a class whose tensors are not there."""
    good = tmp_path / "good"
    unbounded: dict[str, Any] = {"sliding_window": None} if arch == "mistral" else {}
    save_tiny(arch, good, **unbounded)
    kind, prefix = SAME_BLOCKS[arch]
    b = changed(good, tmp_path / "b", CONFIG, "model_type", kind)
    half = changed(b, tmp_path / "half", CONFIG, "sliding_window", None)
    whole = changed(half, tmp_path / "whole", CONFIG, "architectures", [f"{prefix}ForCausalLM"])
    for pair in ((good, whole), (whole, good)):
        assert command("diagnose", *pair).code == 0
    assert command("diagnose", good, half).code == 1  # its two keys name two classes


@pytest.mark.parametrize("change", INNOCENT, ids=": ".join)
def test_a_key_without_a_meaning_does_not(
    change: tuple[str, str], demo_model: Path, tmp_path: Path
) -> None:
    b = changed(demo_model, tmp_path / "b", *change, INNOCENT[change])
    for name in ("diff", "diagnose"):
        assert command(name, demo_model, b).code == command(name, b, demo_model).code == 0


# A key of a container, which aprfmt reads elsewhere -> another value, or GONE.
KEYS: dict[str, dict[str, Any]] = {
    "gguf": {"tokenizer.chat_template": GONE, "qwen2.context_length": 77},
    "apr": {
        "architecture": "llama", "hf_model_type": "llama", "hidden_size": GONE,
        "chat_template": "{{ messages }}", "tokenizer.vocabulary": GONE,
        "tokenizer.merges": GONE, "tokenizer.eos_token_id": GONE,
        "max_position_embeddings": 77,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "key"), [(name, key) for name, rows in KEYS.items() for key in rows]
)
def test_the_keys_of_a_container_are_what_others_read(
    format: str, key: str, demo_model: Path, tmp_path: Path
) -> None:
    a, b = tmp_path / f"a.{format}", tmp_path / f"b.{format}"
    assert command("convert", demo_model, a).code == 0
    value = KEYS[format][key]
    change = ("--remove", key) if value is GONE else (f"{key}={value}",)
    assert command("set", a, *change, "-o", b).code in (0, 1)
    for name in ("diff", "diagnose"):
        assert command(name, a, b).code == command(name, b, a).code == 1
        assert command(name, b, b).code == 0


@pytest.mark.parametrize("format", ["gguf", "apr"])
def test_no_container_is_loaded_by_its_sources_dtype(
    format: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: exit 1 for one that says bfloat16 of its source, against float32 that says so."""
    made, cast = tmp_path / f"made.{format}", tmp_path / "cast"
    assert command("convert", demo_model, made, "--encoding", "F32").code == 0
    wishes = ("--to", "safetensors", "--encoding", "F32")
    assert command("convert", demo_model, cast, *wishes).code == 0
    right = changed(cast, tmp_path / "right", CONFIG, "dtype", "float32")
    for name in ("diff", "diagnose"):
        assert command(name, made, right).code == command(name, right, made).code == 0
    done = command("diff", right, cast)  # whose weights are float32, cast to bfloat16
    assert done.code == 1 and "dtype" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_save_in_another_dtype_says_its_own(dtype: str, demo_model: Path, tmp_path: Path) -> None:
    """transformers writes both, the weights and the key."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: no transformers")
    kind = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=kind)
    b = shutil.copytree(demo_model, tmp_path / "b")
    (b / "model.safetensors").unlink()
    model.save_pretrained(b)
    assert json.loads((b / CONFIG).read_text())["dtype"] == dtype
    accept = ("--accept", "within") if dtype == "float16" else ()
    done = command("diff", demo_model, b, *accept)
    assert done.code == 0, done.out


def test_the_command_that_mends_a_key_is_known_after_the_files_are_closed(
    demo_model: Path, tmp_path: Path
) -> None:
    """A text of a GGUF is read from the open file. Seen red: "aprfmt: bug:", or no command."""
    whole, a, b = (tmp_path / f"{name}.gguf" for name in "wab")
    assert command("convert", demo_model, whole, "--no-carry").code == 0
    gone = ("--remove", "aprfmt.hf_config")
    assert command("set", whole, *gone, "-o", a).code == 0
    assert command("set", whole, "general.architecture=somebody", *gone, "-o", b).code == 0
    done = command("diff", a, b, "--json")
    assert done.code == 1, done.err
    (mends,) = done.json["next"]
    assert mends.startswith("aprfmt set ") and "qwen2" in mends


def test_keys_of_an_unknown_architecture_are_known_by_their_own_names(tmp_path: Path) -> None:
    """A key below another is what that one is; one that no table lists is unread."""
    save_file({"t": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    config = {
        "model_type": "nobodys",
        "initializer_range": 0.5,
        "label2id": {"a": 1, "b": {"c": 2}},
        "task_specific_params": {"x": {"max_length": 3}},
        "mine": 1,
        "mine2": {"use_cache": True},
        "empty": {},
        "is_causal": True,
    }
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with open_model(tmp_path) as model:
        found = {item.name: item for item in make_ledger(model).items if item.kind == "config key"}
    assert {name: item.reading for name, item in found.items()} == {
        "model_type": "setting",
        "initializer_range": "without effect",
        "label2id.a": "setting",
        "label2id.b.c": "setting",
        "task_specific_params.x.max_length": "text",
        "mine": "unread",
        "mine2.use_cache": "unread",
        "empty": "without effect",
        "is_causal": "without effect",
    }
    assert {name for name, item in found.items() if item.as_stored} == {
        "model_type",
        "label2id.a",
        "label2id.b.c",
    }
    assert [name for name, item in found.items() if item.needed] == ["model_type"]
    assert all(item.of for item in found.values() if item.reading != "unread")


@pytest.mark.parametrize("key", ["num_attention_heads", "rms_norm_eps"])
def test_what_a_refused_configuration_lost_is_not_taken_with_its_name(
    key: str, demo_model: Path, tmp_path: Path
) -> None:
    """No table says what the unknown architecture takes for a key that is not there."""
    named = changed(demo_model, tmp_path / "named", CONFIG, "model_type", "nobody")
    keys = json.loads((named / CONFIG).read_text()) | {"architectures": ["NobodyModel"]}
    (named / CONFIG).write_text(json.dumps(keys))
    b = changed(named, tmp_path / "b", CONFIG, key, GONE)
    taken = ("--accept", "unread:model_type", "--accept", "unread:architectures")
    assert command("diff", demo_model, named, *taken).code == 0
    for pair in ((demo_model, b), (b, demo_model)):
        done = command("diff", *pair, *taken, "--json")
        rows = done.json["pronounced"]["not_compared"]
        lost = [row["name"] for row in rows if row["state"] != "equal"]
        assert (done.code, lost) == (1, [key]), done.json["says"]


@pytest.mark.parametrize("left", ["{}", None])
def test_a_folder_without_a_file_lacks_its_keys(
    left: str | None, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: exit 1 for one lost key, 0 for all of them. A file that embeds none has none."""
    a, b = (Path(shutil.copytree(demo_model, tmp_path / side)) for side in "ab")
    for side in (a, b):
        (side / TOKENS).unlink()
    if left is not None:
        (b / TOKENS).write_text(left)
    assert command("diff", demo_model, b).code == command("diff", b, demo_model).code == 1
    done = command("diagnose", demo_model, b, "--json")
    (following,) = done.json["next"]
    assert done.code == 1
    mended = written(following, b, tmp_path / "mended", monkeypatch)
    assert command("diff", demo_model, mended).code == 0, following
    assert command("diff", a, b).code == command("diff", b, a).code == 0
    assert command("convert", a, tmp_path / "a.apr").code == 0
    assert command("diff", demo_model, tmp_path / "a.apr").code == 0


def test_a_template_is_the_same_wherever_it_stands(demo_model: Path, tmp_path: Path) -> None:
    """In either file, or in both, with a last line break or without."""
    name = "chat_template.jinja"
    text = (demo_model / name).read_text()
    both = changed(demo_model, tmp_path / "both", TOKENS, "chat_template", text.rstrip("\n"))
    moved = Path(shutil.copytree(both, tmp_path / "moved"))
    (moved / name).unlink()
    for one in (both, moved):
        assert command("diff", demo_model, one).code == 0
    (both / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    for pair in ((demo_model, both), (both, demo_model)):  # which older processors take
        assert command("diff", *pair).code == 1


def test_templates_are_compared_by_name(demo_model: Path, tmp_path: Path) -> None:
    """In a list, in files, in keys; and a conversion takes all along.

    Seen red: "equal" where one side alone had another for tools, and copies without it.
    """
    text = (demo_model / "chat_template.jinja").read_text()
    listed = [{"name": "default", "template": text}, {"name": "tool-use", "template": "{{ x }}"}]
    a = changed(demo_model, tmp_path / "a", TOKENS, "chat_template", listed)
    (a / "chat_template.jinja").unlink()
    sides = [a]
    for name, other in (("b", "{{ x }}\n"), ("c", "{{ y }}")):
        sides.append(Path(shutil.copytree(demo_model, tmp_path / name)))
        (sides[-1] / TEMPLATE_FOLDER).mkdir()
        (sides[-1] / TEMPLATE_FOLDER / "tool-use.jinja").write_text(other)
    for source in sides[:2]:
        for ends in (".gguf", ".apr", ""):
            copy = tmp_path / f"of-{source.name}{ends}"
            convert(source, copy, to=None if ends else "safetensors")
            sides.append(copy)
    convert(tmp_path / "of-b.gguf", tmp_path / "back", to="safetensors")
    named = {each: templates_of(each) for each in (*sides, tmp_path / "back", demo_model)}
    c, none = named.pop(tmp_path / "c"), named.pop(demo_model)
    first = named.pop(a)
    assert all(list_not_compared(first, each) == () for each in named.values())
    for ledger, state in ((c, "unequal"), (none, "only in A")):
        rows = list_not_compared(first, ledger)
        assert [(row.name, row.state) for row in rows] == [("chat templates: tool_use", state)]


def templates_of(path: Path) -> Ledger:
    with open_model(path) as model:
        found = make_ledger(model)
    items = tuple(item for item in found.items if item.home == TEMPLATES)
    return replace(found, items=items)
