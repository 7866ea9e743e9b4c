"""`validate --against`: keys and tokenizers that say otherwise than the source's.

Seen red: a file was held against its source by the presence of things alone, so that what changes
every answer of a model passed.
"""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.checks import validate
from aprfmt.checks.file import source_accounting, stated_facts
from aprfmt.checks.file.stated_facts import check_dtype, check_quantization
from aprfmt.checks.records import NotRun
from aprfmt.checks.source_values import check_source_values
from aprfmt.diagnosis import diagnose
from aprfmt.errors import ArchError
from aprfmt.measure.texts import TokensReport
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.faults import DEMO
from tests.field import hf


def strips(values: Any) -> None:
    """Let marks swallow the blanks behind them."""
    for token in values["added_tokens"]:
        token["rstrip"] = True


def cut(values: Any) -> None:
    """Leave the last merges out."""
    del values["model"]["merges"][-100:]


def ends(values: Any) -> None:
    """Stop at one id instead of two."""
    values["eos_token_id"] = 1533


def spoken(values: Any) -> None:
    """Name another token as the end."""
    values["eos_token"] = "<|endoftext|>"


# What was changed -> (file, edit, what the check says).
EDITS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "flags": ("tokenizer.json", hf.json_edit(strips), "added_tokens"),
    "merges": ("tokenizer.json", hf.json_edit(cut), "tokenizer_merges"),
    "stops": ("generation_config.json", hf.json_edit(ends), "generation_config"),
    "eos": ("tokenizer_config.json", hf.json_edit(spoken), "special_ids"),
    "template": (
        "chat_template.jinja", lambda text: text.replace("'<|im_end|>' + ", ""), "chat_template",
    ),
}  # fmt: skip
# Keys of config.json; `None` takes one away from the copy, so that a default stands in for it.
KEYS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "eps": ("llama", {}, {"rms_norm_eps": 1e-2}, "rms_norm_eps"),
    "theta": (
        "llama", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, "rope_theta",
    ),
    "window": ("mistral", {"sliding_window": None}, {"sliding_window": 5}, "sliding_window"),
    "activation": ("gpt2", {}, {"activation_function": "gelu"}, "activation_function"),
}  # fmt: skip


def settings(copy: Path, source: Path) -> tuple[str, str]:
    """Return (outcome, findings) of the check."""
    rows = [row for row in validate(copy, against=source).checks if row.name == "source_settings"]
    outcomes = {row.outcome for row in rows}
    assert len(outcomes) == 1
    return outcomes.pop(), "; ".join(f"{row.where}: {row.found}" for row in rows)


@pytest.mark.parametrize("kind", EDITS)
def test_another_tokenizer_fails(kind: str) -> None:
    file, edit, says = EDITS[kind]
    copy = hf.copy(DEMO, f"settings-{kind}", files={file: edit})
    assert diagnose(str(DEMO), str(copy)).kind == "bug"
    outcome, found = settings(copy, DEMO)
    assert outcome == "FAIL" and says in found
    assert aprfmt("validate", copy, "--against", DEMO).code == 1


@pytest.mark.parametrize("kind", KEYS)
def test_another_key_fails_whichever_side_states_it(kind: str) -> None:
    arch, start, change, says = KEYS[kind]
    source = hf.copy(tiny_folder(arch), f"settings-{kind}-a", config=start)
    copy = hf.copy(source, f"settings-{kind}-b", config=change)
    for pair in ((copy, source), (source, copy)):
        outcome, found = settings(*pair)
        assert outcome == "FAIL" and says in found, found


@pytest.mark.parametrize("target", ["m.gguf", "m.apr", "m"])
def test_a_conversion_says_what_its_source_says(target: str, tmp_path: Path) -> None:
    for name, source in (("demo", DEMO), ("mixtral", tiny_folder("mixtral"))):
        copy = tmp_path / name / target
        copy.parent.mkdir()
        assert aprfmt("convert", DEMO if name == "demo" else source, copy).code == 0
        done = aprfmt("validate", copy, "--against", source, "--json").json
        rows = {row["name"]: row for row in done["checks"]}
        assert rows["source_settings"]["outcome"] == "PASS", rows["source_settings"]
        assert rows["source_values"]["outcome"] == "PASS", rows["source_values"]


def test_a_tokenizer_is_named_as_compared_where_both_have_one_and_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for row in product([(), ("vocabulary",)], ["", "A", "B", "AB"], [False, True]):
        named_as_compared(monkeypatch, *row)


def named_as_compared(
    monkeypatch: pytest.MonkeyPatch, checked: tuple[str, ...], carried: str, unread: bool
) -> None:
    report = TokensReport(checked=checked, not_checked=("merges: too many",), carried=carried)
    monkeypatch.setattr(source_accounting, "compare_tokens", lambda source, model: report)

    def names(source: object, model: object) -> list[str]:
        if unread:
            raise ArchError("no such architecture")
        return []

    monkeypatch.setattr(source_accounting, "_comparable_names", names)
    model: Any = SimpleNamespace(metadata={}, path=Path("m.gguf"), format="gguf")
    context: Any = SimpleNamespace(source=model, model=model, where="m.gguf")
    both = carried == "AB"
    compared = ["0 hyperparameters"] * (not unread)
    compared += ["tokenizer, chat template, stops"] * (both and bool(checked))
    left = ["hyperparameters (no such architecture)"] * unread + ["merges: too many"] * both
    more = f"; not compared: {'; '.join(left)}" if left else ""
    if not compared:
        with pytest.raises(NotRun, match=re.escape(f"nothing to compare{more}")):
            source_accounting.check_settings(context)
        return
    assert source_accounting.check_settings(context).found == (
        f"{', '.join(compared)} as in the source{more}"
    )


def beside(config: object, *encodings: str) -> Any:
    """Return the context of a check of a model with this config.json and matrices."""
    stored = [SimpleNamespace(shape=(4, 4), encoding=encoding) for encoding in encodings]
    model: Any = SimpleNamespace(config=config, folder=Path("m"), values=lambda: stored)
    return SimpleNamespace(model=model, where="m", source=None)


@pytest.mark.parametrize(
    ("check", "context", "said"),
    [
        (source_accounting.check_accounted, beside({}), "no source was given (--against SRC)"),
        (source_accounting.check_settings, beside({}), "no source was given (--against SRC)"),
        (check_source_values, beside({}), "no source was given (--against SRC)"),
        (check_dtype, beside(None, "F32"), "there is no config.json next to the weights"),
        (check_dtype, beside({}, "F32"), "config.json names no float dtype (None)"),
        (check_dtype, beside({"dtype": "int8"}, "F32"), "names no float dtype ('int8')"),
        (check_dtype, beside({"dtype": "float32"}), "the file holds no plain float matrices"),
        (check_dtype, beside({"dtype": "float32"}, "Q8_0"), "the file holds no plain float matr"),
        (check_quantization, beside(None), "there is no config.json"),
    ],
)
def test_a_check_without_its_question_does_not_run(
    check: Callable[[Any], object], context: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stated_facts, "packing_config", lambda model: model.config)
    with pytest.raises(NotRun, match=re.escape(said)):
        check(context)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("stated", ["float32", "bfloat16"])
def test_a_dtype_is_that_of_most_weights(stated: str, old: bool) -> None:
    """By either of the two keys that transformers has had for it."""
    key = "torch_dtype" if old else "dtype"
    result = check_dtype(beside({key: stated}, "F32", "F32", "BF16", "Q8_0"))
    said = [] if stated == "float32" else ["bfloat16; most float weights are F32"]
    assert (result.found, [each.found for each in result.findings]) == (stated, said)


@pytest.mark.parametrize("stated", ["float77", 3, ["float16"]])
def test_a_dtype_that_is_none_warns(stated: object) -> None:
    (found,) = check_dtype(beside({"dtype": stated}, "F32")).findings
    assert (found.level, found.expected) == ("warning", "a dtype of torch")
