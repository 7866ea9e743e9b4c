"""What `diff` reads of two files, counted: membership is free, carried JSON is parsed once.

A GGUF of ours carries tokenizer.json as one string (16 MB for Gemma), which asking `in` once
decoded for each of its added tokens.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aprfmt import codecs
from aprfmt.compare import diff_models
from aprfmt.formats import bounded_json
from aprfmt.formats.gguf import arrays
from aprfmt.formats.gguf.metadata import Metadata
from aprfmt.model import open_model
from aprfmt.tokenizer.keys import HF_JSON
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

TOKENIZER = "tokenizer."


@pytest.fixture(scope="module")
def ours(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF that this package wrote, with the verbatim tokenizer.json in it."""
    path = tmp_path_factory.mktemp("reading") / "demo.gguf"
    assert aprfmt("convert", demo_model, path, "--no-verify").code == 0
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often the value of each metadata key is taken out of a GGUF."""
    counts: Counter[str] = Counter()
    real = Metadata.__getitem__

    def getitem(self: Metadata, key: str) -> object:
        counts[key] += 1
        return real(self, key)

    monkeypatch.setattr(Metadata, "__getitem__", getitem)
    return counts


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each JSON text is parsed, by what messages about it begin with."""
    counts: Counter[str] = Counter()
    real = bounded_json.loads

    def loads(data: str, where: str, **options: object) -> object:
        counts[where] += 1
        return real(data, where, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(bounded_json, "loads", loads)
    return counts


@pytest.fixture
def elements(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often the strings of an array are decoded."""
    counts: Counter[str] = Counter()
    real = arrays.StringArray.__iter__

    def iterate(self: arrays.StringArray) -> Iterator[str]:
        counts["strings"] += 1
        return real(self)

    monkeypatch.setattr(arrays.StringArray, "__iter__", iterate)
    return counts


def test_membership_decodes_nothing(ours: Path, decoded: Counter[str]) -> None:
    from aprfmt.formats.gguf.reader import open_source

    with open_source(ours) as source:
        assert HF_JSON in source.metadata
        assert "tokenizer.absent" not in source.metadata
        assert HF_JSON not in decoded
        assert source.metadata[HF_JSON][:1] == "{"
    assert decoded[HF_JSON] == 1


def test_only_tensors_touches_no_tokenizer(
    ours: Path, decoded: Counter[str], parsed: Counter[str], elements: Counter[str]
) -> None:
    done = aprfmt("diff", ours, ours, "--only", "tensors")
    assert done.code == 0, done.err
    assert "general.architecture" in decoded
    assert not [key for key in decoded if key.startswith(TOKENIZER) or key == "aprfmt.files"]
    assert not [where for where in parsed if "tokenizer" in where]
    assert not elements


def test_patterns_alone_compare_tensors_alone(ours: Path, decoded: Counter[str]) -> None:
    assert aprfmt("diff", ours, ours, "--tensor", "blk.0").code == 0
    assert not [key for key in decoded if key.startswith(TOKENIZER)]


@pytest.mark.parametrize("section", ["hyperparameters", "tokenizer", "metadata"])
def test_a_section_compares_no_tensor(
    section: str, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("a tensor was compared")

    monkeypatch.setattr("aprfmt.measure.pair_comparison.compare_pair", fail)
    assert aprfmt("diff", ours, ours, "--only", section).code == 0


def test_tokens_are_decoded_once_and_the_tokenizer_once(
    demo_model: Path, ours: Path, decoded: Counter[str], parsed: Counter[str]
) -> None:
    """A file of ours beside the folder: what is carried is taken out and parsed once."""
    done = aprfmt("diff", demo_model, ours)
    assert done.code == 0, done.err
    assert decoded[HF_JSON] == 1
    assert parsed[f"{ours}: {HF_JSON}"] == 1
    assert set(parsed.values()) == {1}, parsed


def test_equal_metadata_arrays_are_compared_by_their_bytes(
    ours: Path, elements: Counter[str]
) -> None:
    assert aprfmt("diff", ours, ours, "--only", "metadata").code == 0
    assert not elements


@pytest.mark.parametrize("command", ["inspect", "validate", "tokenize", "template", "convert"])
def test_carried_json_is_parsed_once(
    command: str, ours: Path, parsed: Counter[str], tmp_path: Path
) -> None:
    more: dict[str, list[object]] = {
        "tokenize": ["hi"],
        "template": ["--user", "hi"],
        "convert": [tmp_path / "x.apr"],
    }
    done = aprfmt(command, ours, *more.get(command, []))
    assert done.code == 0, done.err
    of_ours = {where: count for where, count in parsed.items() if where.startswith(str(ours))}
    assert of_ours and set(of_ours.values()) == {1}, of_ours


def test_a_metadata_key_that_differs_is_still_listed(ours: Path, tmp_path: Path) -> None:
    """Arrays of other elements, or of another kind, differ; the same in a list do not."""
    other = tmp_path / "other.gguf"
    assert aprfmt("set", ours, "general.description=x", "-o", other).code == 0
    done = aprfmt("diff", ours, other, "--only", "metadata", "--json")
    assert done.code == 1  # that section alone was asked for
    assert [row["name"] for row in done.json["metadata"]] == ["general.description"]


def test_both_sides_of_a_quantized_pair_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound needs the float side's values, which the comparison has decoded already."""
    folder = llama_folder(tmp_path / "hf", "BF16", hidden=64, layers=1)
    assert aprfmt("quantize", folder, tmp_path / "q.gguf", "--type", "Q8_0").code == 0
    elements: Counter[str] = Counter()
    real = codecs.decode

    def decode(name: str, raw: Any, shape: Sequence[int], **options: Any) -> object:
        if len(shape) > 1:  # norms come back as BF16 first
            elements[name] += math.prod(shape)
        return real(name, raw, shape, **options)

    monkeypatch.setattr(codecs, "decode", decode)
    with open_model(folder) as a, open_model(tmp_path / "q.gguf") as b:
        report = diff_models(a, b, explain=False)
        assert report.counts["WITHIN"] > 6, "nothing was judged by the bound"
        matrices = [view for view in b.roles.values() if view.encoding == "Q8_0"]
        of_matrices = sum(math.prod(view.shape) for view in matrices)
    assert elements == {"Q8_0": of_matrices, "BF16": of_matrices}
