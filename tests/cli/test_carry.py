"""`--no-carry` leaves the verbatim tokenizer out, the ids stay; every type is in the help.

Seen red: the flag without an effect on APR, a type that `quantize` takes and its help leaves out.
"""

from pathlib import Path

import pytest

from aprfmt.cli import convert_run
from aprfmt.formats import open_source
from aprfmt.quantizing.mixture import SCHEMES
from aprfmt.tokenizer.keys import HF_JSON
from tests.cli.run import aprfmt

TEXT = "Once upon a time, in 1813: don't!"


@pytest.mark.parametrize("suffix", ["gguf", "apr"])
def test_the_verbatim_tokenizer_is_left_out_and_ids_stay(
    suffix: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_run, "WORTH_SAYING", 1)
    size = (demo_model / "tokenizer.json").stat().st_size
    whole, bare = tmp_path / f"whole.{suffix}", tmp_path / f"bare.{suffix}"
    done = aprfmt("convert", demo_model, whole)
    assert "are tokenizer.json verbatim, which --no-carry leaves out" in done.out
    report = aprfmt("convert", demo_model, whole, "--force", "--json").json
    assert report["carried_bytes"] == size
    done = aprfmt("convert", demo_model, bare, "--no-carry")
    assert done.code == 0 and "--no-carry" not in done.out
    with open_source(whole) as one, open_source(bare) as other:
        assert HF_JSON in one.metadata and HF_JSON not in other.metadata
    assert whole.stat().st_size - bare.stat().st_size > 0.9 * size
    expected = aprfmt("tokenize", demo_model, TEXT, "--json").json["ids"]
    assert aprfmt("tokenize", bare, TEXT, "--json").json["ids"] == expected


def test_every_type_that_has_an_encoder_is_in_the_help(demo_model: Path, tmp_path: Path) -> None:
    words = aprfmt("quantize", "--help").out.replace(",", " ").split()
    assert set(SCHEMES) <= set(words[words.index("Types:") :])
