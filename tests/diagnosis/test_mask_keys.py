"""Keys of config.json that turn the causal mask off, and runs that were made with them.

transformers is the judge of what `is_causal` does. Seen red: `is_causal` was a key that nothing
reads, so that such a model was run with a causal mask.
"""

import shlex
from pathlib import Path

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.cli import run
from tests.diagnosis.engines import place, tiny_folder
from tests.field import hf

BOTH_WAYS = {"is_causal": False, "use_bidirectional_attention": True}
IDS = [3, 17, 4, 40, 9, 9, 28, 11, 5, 2]
ARCHS = ("llama", "qwen2", "gemma", "gpt2", "mixtral")


def folder(arch: str, **keys: bool) -> Path:
    """Return a tiny model's folder with keys added to its config.json."""
    name = "-".join(f"{key}-{value}" for key, value in keys.items())
    return hf.copy(tiny_folder(arch), f"mask-{arch}-{name}", config=keys)


def recorded(source: Path, name: str) -> Path:
    """Return a .npz of ids, layers' outputs and logits of transformers' pass over a folder."""
    import torch

    with torch.no_grad():
        made = hf.loaded(source)(torch.tensor([IDS]), output_hidden_states=True)
    arrays = {"input_ids": np.array([IDS]), "logits": made.logits.numpy()}
    for layer, values in enumerate(made.hidden_states[1:-1]):
        arrays[f"model.layers.{layer}"] = values.numpy()
    path = place(f"{name}.npz")
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arch", "key"),
    [*((arch, "is_causal") for arch in ARCHS), ("qwen2", "use_bidirectional_attention")],
)
def test_a_key_without_a_causal_mask_is_the_cause(arch: str, key: str) -> None:
    good, bad = tiny_folder(arch), folder(arch, **{key: BOTH_WAYS[key]})
    for pair, side in (((good, bad), "B"), ((bad, good), "A")):
        found = diagnose(*map(str, pair))
        assert (found.kind, found.cause, found.exit_code) == ("bug", "mask", 1), found.sentence
        assert f"{key} is not given in {'AB'[side == 'A']} and {BOTH_WAYS[key]} in {side}" in (
            found.sentence
        )
        words = shlex.split(found.next[0])
        assert words[:3] == ["aprfmt", "set", str(bad)]
        mended = bad.parent / f"mended-{arch}-{key}-{side}"
        assert run.aprfmt(*words[1:-1], mended, "--force").code == 0
        assert diagnose(str(good), str(mended)).kind == "same"
    assert run.aprfmt("diff", good, bad).code == 1
    assert run.aprfmt("validate", bad).code == 1


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_run_without_a_causal_mask_names_the_key_of_its_model(arch: str) -> None:
    good, bad = tiny_folder(arch), folder(arch, is_causal=False)
    both = recorded(bad, f"mask-run-{arch}")
    found = diagnose(str(good), str(both), model=str(bad))
    assert [one.cause for one in found.findings if one.verdict == "bug"] == ["mask", "mask"]
    assert any("is_causal is not given in A and False in B" in one.says for one in found.findings)
    alone = diagnose(str(good), str(both), model=str(good))
    assert alone.cause == "mask" and "is_causal" in alone.sentence


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_key_that_says_causal_changes_nothing(arch: str) -> None:
    good, plain = tiny_folder(arch), folder(arch, is_causal=True)
    assert diagnose(str(good), str(plain)).kind == "same"
    assert run.aprfmt("validate", plain).code == 0
    one = recorded(plain, f"causal-run-{arch}")
    assert diagnose(str(good), str(one), model=str(plain)).kind == "precision"
