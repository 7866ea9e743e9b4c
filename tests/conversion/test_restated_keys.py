"""A file's own keys count, whatever config.json and tokenizer files it embeds: a folder says them.

Seen red: the embedded files written verbatim, a value put only where no reader looks, a list of
stop tokens that loses the others, and a conversion that does not compare hyperparameters.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import aprfmt
from aprfmt.arch import find_arch
from aprfmt.arch.hyperparameters import inexpressible_names, read_hyper
from aprfmt.arch.spec import ArchSpec, Facts, HyperParam, HyperParams
from aprfmt.conversion import restated_keys
from aprfmt.conversion.accounting import account_for_source
from aprfmt.conversion.restated_keys import restated_hyperparameters
from aprfmt.errors import ConversionError

PUBLISHED = sorted((Path(__file__).parents[1] / "arch" / "published").glob("*.json"))
NUMBERS = ("norm_eps", "rope_theta", "context_length", "n_heads", "ffn_size", "sliding_window")


def read(config: dict[str, Any]) -> tuple[ArchSpec, HyperParams]:
    """Return the architecture and the hyperparameters of a config.json."""
    spec = find_arch("hf", config["model_type"], [], config)
    return spec, read_hyper(spec, Facts("hf", config, {}), "config.json", complete=False)[0]


def changes(hyper: HyperParams) -> Iterator[tuple[str, HyperParams]]:
    """Yield (name, hyperparameters) with one number that a metadata key gives another value."""
    for name in NUMBERS:
        value = hyper[name] if name in hyper else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            rows = {each: hyper.of(each) for each in hyper}
            yield name, HyperParams({**rows, name: HyperParam(value * 2, "metadata", "key")})


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_a_published_config_says_what_a_metadata_key_says(file: Path) -> None:
    config = json.loads(file.read_text())["config"]
    spec, hyper = read(config)
    assert restated_hyperparameters(spec, hyper, config) == config
    tried = []
    for name, changed in changes(hyper):
        if name in inexpressible_names(spec, changed, "hf"):
            continue  # computed from other keys there
        made = restated_hyperparameters(spec, changed, config)
        said = read(made)[1]
        assert said[name] == changed[name], (name, made)
        tried.append(name)
    assert tried


@pytest.mark.parametrize("theta", [10000.0, 5e5])
def test_nothing_else_of_a_config_changes(demo_model: Path, theta: float) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    spec, hyper = read(config)
    rows = {name: hyper.of(name) for name in hyper}
    changed = HyperParams({**rows, "rope_theta": HyperParam(theta, "metadata", "key")})
    wanted = {**config, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    made = restated_hyperparameters(spec, changed, config)
    assert made["rope_parameters"] == wanted["rope_parameters"]
    assert {**made, "rope_parameters": 0} == {**config, "rope_parameters": 0}


EDITS = {  # key of the GGUF -> its new value
    "qwen2.attention.layer_norm_rms_epsilon": 0.001,
    "qwen2.rope.freq_base": 10000.0,
    "qwen2.context_length": 256,
    "tokenizer.ggml.bos_token_id": 1534,
    "tokenizer.ggml.eos_token_id": 1534,
    "tokenizer.ggml.padding_token_id": 1535,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


@pytest.mark.parametrize("through", ["gguf", "apr"])
def test_a_folder_says_what_the_keys_of_its_file_say(
    demo_model: Path, through: str, tmp_path: Path
) -> None:
    first, edited, back = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "back"
    aprfmt.convert(demo_model, first)
    aprfmt.set(first, edited, EDITS)
    source = edited
    if through == "apr":
        source = tmp_path / "b.apr"
        aprfmt.convert(edited, source)
    aprfmt.convert(source, back, to="safetensors")
    report = aprfmt.diff(edited, back)
    assert not report.hyperparameters and not report.tokenizer
    theirs = Tokenizer.from_file(str(back / "tokenizer.json")).encode("Once upon").ids
    with aprfmt.open(edited) as model:
        assert theirs == list(model.tokenizer.encode("Once upon"))
    assert theirs[0] == theirs[-1] == 1534
    stops = json.loads((back / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [1534, 1535, 1533]


def test_a_copy_with_other_hyperparameters_is_refused(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, edited = tmp_path / "a.gguf", tmp_path / "b.gguf"
    aprfmt.convert(demo_model, first)
    aprfmt.set(first, edited, {"qwen2.rope.freq_base": 10000.0})
    monkeypatch.setattr(
        restated_keys, "restated_hyperparameters", lambda spec, hyper, config: dict(config)
    )
    with pytest.raises(ConversionError, match=r"rope_theta is 10000.0, and would be 1000000.0"):
        aprfmt.convert(edited, tmp_path / "back", to="safetensors")
    assert not (tmp_path / "back").exists()


def test_a_default_that_only_one_format_has_is_no_loss(demo_model: Path, tmp_path: Path) -> None:
    # As GLM's epsilon of compressed queries: llama.cpp has its own, transformers another.
    with aprfmt.open(demo_model) as mine, aprfmt.open(demo_model) as other:
        rows = {name: mine.hyper.of(name) for name in mine.hyper}
        assert {row.origin for row in rows.values()} >= {"config", "default"}
        for origin, lost in (("config", ["norm_eps"]), ("default", [])):
            changed = HyperParam(0.5, origin, "")  # type: ignore[arg-type]
            hyper = HyperParams({**rows, "norm_eps": changed})
            other.__dict__["resolution"] = replace(mine.resolution, hyper=hyper)
            found = account_for_source(mine, other, lambda name: "").lost
            assert [entry.name for entry in found] == lost
