"""An adapter whose pairs change nothing is said to be one, by every command that reads it.

Seen red: validate passed it without a word, a merge was "merged into 4 weights", and `diff` said
"once or not at all" of it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.adapters import convert_adapter
from aprfmt.model import open_model
from aprfmt.model.zero_pairs import find_zero_pairs, is_zero_factor
from tests.adapters.golden import write
from tests.cli.run import aprfmt as command

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def changed(adapter: Path, wanted: Callable[[str], bool], value: float = 0.0) -> None:
    """Fill the tensors of an adapter whose names are wanted with one value."""
    held = load_file(adapter / FILE)
    assert any(map(wanted, held))
    save_file({n: np.full_like(v, value) if wanted(n) else v for n, v in held.items()},
              adapter / FILE)  # fmt: skip


def configured(adapter: Path, **keys: object) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | keys))


# name -> (case of the golden adapters, how it is made empty, what is said).
EMPTY: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "lora_B": ("plain", lambda a: changed(a, lambda n: "lora_B" in n),
               "the adapter changes nothing: every lora_B is zero"),
    "minus zero": ("plain", lambda a: changed(a, lambda n: "lora_B" in n, -0.0),
                   "the adapter changes nothing: every lora_B is zero"),
    "lora_A": ("plain", lambda a: changed(a, lambda n: "lora_A" in n),
               "the adapter changes nothing: every lora_A is zero"),
    "alpha": ("plain", lambda a: configured(a, lora_alpha=0),
              "the adapter changes nothing: every alpha is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_an_adapter_that_changes_nothing(name: str, tmp_path: Path) -> None:
    case, make, says = EMPTY[name]
    base, adapter, expected = write(tmp_path, case)
    make(adapter)
    found = command("validate", adapter, "--json").json
    rows = [(row["check"], row["found"], row["level"]) for row in found["findings"]]
    assert rows == [("values", says, "warning")] and found["exit"] == 0
    assert f"; {says}; " in command("inspect", adapter).out
    out = tmp_path / "out"
    done = command("convert", base, out, "--adapter", adapter, "--to", "safetensors", "--json")
    said = {note["key"]: note["text"] for note in done.json["notes"]}
    assert said["zero_pairs"] == says
    assert f"merged into 0 of {len(expected)} weights" in said[""]
    with open_model(base) as before, open_model(out) as after:
        assert all(bytes(before[n].raw()) == bytes(after[n].raw()) for n in before)
    done = command("diff", base, out, "--adapter", adapter)
    assert done.code == 2 and f"nothing to merge ({len(expected)} weights)" in done.out
    assert says in done.out and "once or not at all" not in done.out
    # What differs for another reason is no less a difference.
    held = load_file(out / "model.safetensors")
    first = next(iter(expected))
    held[first] = held[first] + np.float32(1)
    save_file(held, out / "model.safetensors", {"format": "pt"})
    done = command("diff", base, out, "--adapter", adapter)
    assert done.code == 1 and says in done.out


@pytest.mark.parametrize("share", ["one", "all but one"])
def test_some_pairs_change_nothing(share: str, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    names = [name for name in load_file(adapter / FILE) if "lora_B" in name]
    zero = names[:1] if share == "one" else names[1:]
    changed(adapter, lambda name: name in zero)
    with open_model(adapter) as opened:
        found = find_zero_pairs(opened)
    assert len(found.zero) == len(zero) and set(found.zero.values()) == {"lora_B is zero"}
    says = f"{len(zero)} of {len(names)} pairs change nothing: lora_B is zero ("
    assert found.text.startswith(says)
    assert says in command("validate", adapter).out and says in command("inspect", adapter).out
    out = tmp_path / "out"
    done = command("convert", base, out, "--adapter", adapter, "--to", "safetensors")
    assert f"merged into {len(names) - len(zero)} of {len(names)} weights" in done.out
    done = command("diff", base, out, "--adapter", adapter)
    assert done.code == 0 and ": once (" in done.out and "nothing to merge: " in done.out
    done = command("diff", base, base, "--adapter", adapter)
    assert done.code == 1 and "not at all" in done.out


@pytest.mark.parametrize("part", ["lora_B", "lora_magnitude_vector"])
def test_the_lengths_of_dora(part: str, tmp_path: Path) -> None:
    """Its magnitudes change rows without a product; magnitudes of zero empty the weight."""
    base, adapter, expected = write(tmp_path, "dora")
    changed(adapter, lambda name: part in name)
    count = len(expected)
    says = {
        "lora_B": f"{count} of {count} pairs change nothing but the rows' lengths",
        "lora_magnitude_vector": f"{count} of {count} pairs make their weight zero",
    }[part]
    assert says in command("validate", adapter).out
    out = tmp_path / "out"
    done = command("convert", base, out, "--adapter", adapter, "--to", "safetensors")
    assert f"merged into {count} weights" in done.out and says in done.err
    with open_model(out) as merged:
        assert all(is_zero_factor(merged[name]) == (part != "lora_B") for name in expected)


def test_whole_tensors_beside_empty_pairs_are_said(tmp_path: Path) -> None:
    _, adapter, _ = write(tmp_path, "saved")
    changed(adapter, lambda name: "lora_B" in name)
    assert "; its pairs change nothing: every lora_B is zero; " in command("inspect", adapter).out


def test_pairs_of_an_embedding(tmp_path: Path) -> None:
    _, adapter, _ = write(tmp_path, "embedding")
    changed(adapter, lambda name: "lora_embedding_A" in name)
    assert "pairs change nothing: lora_embedding_A is zero" in command("inspect", adapter).out


@pytest.mark.parametrize(("suffix", "word"), [(".gguf", "lora_b"), (".safetensors", "lora_up")])
def test_other_spellings(suffix: str, word: str, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    changed(adapter, lambda name: "lora_B" in name)
    made = tmp_path / f"made{suffix}"
    convert_adapter(adapter, made, base)
    says = f"the adapter changes nothing: every {word} is zero"
    assert says in command("inspect", made).out and says in command("validate", made).out


@pytest.mark.parametrize("case", ["plain", "rank_stabilised", "dora", "patterns", "embedding",
                                  "saved", "half"])  # fmt: skip
def test_of_a_trained_adapter_nothing_is_said(case: str, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, case)
    with open_model(adapter) as opened:
        assert find_zero_pairs(opened).text == ""
    with open_model(base) as opened:
        assert find_zero_pairs(opened).text == ""


@pytest.mark.parametrize("trained", [0, 1, 3])
@pytest.mark.parametrize("ending", [".ia3_l", ".ia3_l.default"], ids=["saved", "of a state_dict"])
def test_vectors_of_an_ia3_adapter(trained: int, ending: str, tmp_path: Path) -> None:
    """They begin at one (peft, tuners/ia3). Seen red: "unknown architecture", and nothing said."""
    base, _, _ = write(tmp_path / "base", "plain")
    adapter = tmp_path / "ia3"
    adapter.mkdir()
    names = ["layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"]
    held = {
        f"base_model.model.model.{name}{ending}": np.full((8, 1), 1.0 + 0.5 * (i < trained), "f4")
        for i, name in enumerate(names)
    }
    save_file(held, adapter / FILE)
    config = {"peft_type": "IA3", "base_model_name_or_path": "base"}
    (adapter / CONFIG).write_text(json.dumps(config))
    says = {
        0: "the adapter changes nothing: every ia3_l is one",
        1: "2 of 3 vectors change nothing: ia3_l is one (model.layers.0.mlp.down_proj, ",
        3: "",
    }[trained]
    told = command("inspect", adapter).out
    assert "is an IA3 adapter for base, 3 tensors" in told and says in told
    assert ("change nothing" in told or "changes nothing" in told) == bool(says)
    rows = command("validate", adapter, "--json").json["findings"]
    assert [row["found"].startswith(says) for row in rows if row["check"] == "values"] == (
        [True] * bool(says)
    )
    for words in (("convert", base, tmp_path / "out"), ("diff", base, base)):
        done = command(*words, "--adapter", adapter)
        assert done.code == 2 and says in done.err and "it is not merged here" in done.err


@pytest.mark.parametrize("method", ["LOHA", "OFT", "PROMPT_TUNING"])
def test_an_adapter_of_another_method_is_called_by_it(method: str, tmp_path: Path) -> None:
    """Seen red: "unknown architecture", and "has no factors of a LoRA"."""
    base, _, _ = write(tmp_path / "base", "plain")
    adapter = tmp_path / "other"
    adapter.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.hada_w1_a"
    save_file({name: np.ones((8, 4), "f4")}, adapter / FILE)
    config = {"peft_type": method, "base_model_name_or_path": "base"}
    (adapter / CONFIG).write_text(json.dumps(config))
    assert f"is an adapter of PEFT's method {method} for base" in command("inspect", adapter).out
    for words in (("convert", base, tmp_path / "out"), ("diff", base, base)):
        done = command(*words, "--adapter", adapter)
        assert done.code == 2 and f"method {method}" in done.err and "merge_and_unload" in done.err
