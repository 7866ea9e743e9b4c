"""Added tokens that tokenizer.json has lost and tokenizer_config.json still names.

What the rest of a tokenizer.json makes of them is asked of the tokenizers library.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.causes.tokenizer.comparison import compare_tokens
from aprfmt.checks import validate
from aprfmt.diagnosis import diagnose
from aprfmt.model import open_model
from tests.diagnosis.faults import DEMO

END = "<|im_end|>"
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def unlist(data: dict[str, Any]) -> dict[str, Any]:
    """Move the turn's end from the added tokens to the vocabulary, and return its row."""
    row = next(row for row in data["added_tokens"] if row["content"] == END)
    data["added_tokens"].remove(row)
    data["model"]["vocab"][END] = row["id"]
    return dict(row)


def named_eos(data: dict[str, Any], config: dict[str, Any]) -> None:
    """It is named as the end alone."""
    unlist(data)
    config.update(eos_token=END, extra_special_tokens=[])


def named_extra(data: dict[str, Any], config: dict[str, Any]) -> None:
    """It is named as one of the extra special tokens alone."""
    unlist(data)
    config.update(eos_token="<|endoftext|>", extra_special_tokens=[END])


def decoded(data: dict[str, Any], config: dict[str, Any]) -> None:
    """It is named in added_tokens_decoder alone."""
    row = unlist(data)
    number = row.pop("id")
    config.update(eos_token="<|endoftext|>", extra_special_tokens=[])
    config["added_tokens_decoder"] = {str(number): row}


def copied(folder: Path, change: Change) -> Path:
    """Return a copy of the demo model with its tokenizer's files changed."""
    shutil.copytree(Path(DEMO).parent if Path(DEMO).is_file() else DEMO, folder)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    data, config = (json.loads(path.read_text()) for path in files)
    change(data, config)
    for path, value in zip(files, (data, config), strict=True):
        path.write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("change", [named_eos, named_extra, decoded])
@pytest.mark.parametrize("turned", [False, True])
def test_a_token_that_tokenizer_json_has_lost_is_said(
    change: Change, turned: bool, tmp_path: Path
) -> None:
    """Seen red: "same", since tokenizer_config.json still names it."""
    from tokenizers import Tokenizer

    broken = copied(tmp_path / "b", change)
    ids = Tokenizer.from_file(str(broken / "tokenizer.json")).encode(END).ids
    assert len(ids) > 1
    a, b = (broken, DEMO) if turned else (DEMO, broken)
    found = diagnose(str(a), str(b))
    (row,) = [row for row in found.findings if row.cause == "added_tokens"]
    assert found.exit_code == 1 and str(ids) in row.says
    assert row.says.startswith(f"{'A' if turned else 'B'}'s tokenizer.json does not list '{END}'")
    (noted,) = [one for one in validate(broken).warnings if one.check == "token_types"]
    assert "tokenizer_config.json alone" in noted.finding.found


def without_ids(data: dict[str, Any], config: dict[str, Any]) -> None:
    """The turn's tokens are in no list: who reads tokenizer_config.json too gives them new ids."""
    data["added_tokens"] = [row for row in data["added_tokens"] if "im_" not in row["content"]]


def and_another_flag(data: dict[str, Any], config: dict[str, Any]) -> None:
    """Another added token has another flag besides."""
    without_ids(data, config)
    data["added_tokens"][0]["lstrip"] = not data["added_tokens"][0]["lstrip"]


@pytest.mark.parametrize(("change", "rows"), [(without_ids, 1), (and_another_flag, 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_lost_tokens_are_one_cause_of_their_other_ids(
    change: Change, rows: int, turned: bool, tmp_path: Path
) -> None:
    """Seen red: one loss listed twice, and the flag of another token taken into it."""
    broken = copied(tmp_path / "b", change)
    pair = (broken, DEMO) if turned else (DEMO, broken)
    with open_model(pair[0]) as a, open_model(pair[1]) as b:
        found = [row for row in compare_tokens(a, b).findings if row.cause == "added_tokens"]
    assert len(found) == rows
    assert any("does not list" in row.says for row in found)
    assert any(" differ, the first " in row.says for row in found)


def kept(data: dict[str, Any], config: dict[str, Any]) -> None:
    """Both files name it."""
    config.update(eos_token=END, extra_special_tokens=[END])


def whole_all_the_same(data: dict[str, Any], config: dict[str, Any]) -> None:
    """It is a token of letters, which is found whole without being listed."""
    word = next(text for text in data["model"]["vocab"] if text.isalpha() and len(text) > 2)
    row = {"content": word, "id": data["model"]["vocab"][word]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    config["added_tokens_decoder"] = {str(row["id"]): {"content": word, **flags}}


@pytest.mark.parametrize("change", [kept, whole_all_the_same])
def test_a_token_that_stays_whole_is_no_difference(change: Change, tmp_path: Path) -> None:
    broken = copied(tmp_path / "b", change)
    with open_model(DEMO) as a, open_model(broken) as b:
        rows = compare_tokens(a, b).findings
    assert not [row for row in rows if "does not list" in row.says]
    assert not [one for one in validate(broken).warnings if one.check == "token_types"]
