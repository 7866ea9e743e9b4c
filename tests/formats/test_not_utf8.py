"""Texts that UTF-8 cannot hold: every format refuses them by name, or gives them back as they were.

Seen red: a key, a value and a tensor's name that a writer does not look at.
"""

from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.protocols import TensorInfo
from aprfmt.errors import ConversionError
from aprfmt.formats import FORMATS, open_sink, open_source, writable_formats

HALF = "\ud800"  # half of a surrogate pair
ESCAPED = "\udc80"  # how Python spells a byte that is not UTF-8
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"ab": "v", f"x{HALF}y": "v"}, "t"),
    "key of a byte": ({f"x{ESCAPED}y": "v"}, "t"),
    "only key": ({HALF: "v"}, "t"),
    "value": ({"key": f"x{HALF}y"}, "t"),
    "value of a byte": ({"key": f"x{ESCAPED}y"}, "t"),
    "list": ({"key": ["ab", f"x{HALF}y"]}, "t"),
    "tensor": ({}, f"x{HALF}y"),
    "tensor of a byte": ({}, f"x{ESCAPED}y"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", writable_formats())
def test_it_is_refused_by_name_or_comes_back(name: str, place: str, tmp_path: Path) -> None:
    metadata, tensor = PLACES[place]
    path = tmp_path / f"x{FORMATS[name].extensions[0]}"
    info = TensorInfo(tensor, (4,), "F32", 0, 16, 16)
    try:
        with open_sink(path, name) as sink:
            sink.plan(metadata, [info])
            sink.write(tensor, [memoryview(bytes(16))])
    except ConversionError as error:
        bad = tensor if place.startswith("tensor") else next(reversed(metadata))
        assert ascii(bad)[1:-1] in ascii(str(error)).replace("\\\\", "\\")
        assert "UTF-8" in str(error)
        assert not list(tmp_path.iterdir())
        return
    with open_source(path) as source:
        assert list(source.tensors) == [tensor]
        assert {key: source.metadata[key] for key in metadata} == metadata


@pytest.mark.parametrize("name", writable_formats())
def test_the_rest_of_unicode_comes_back(name: str, tmp_path: Path) -> None:
    metadata = {"\u0000\u00e9\u6f22\U0001f600": "\uffff\u202e\U0010ffff"}
    path = tmp_path / f"x{FORMATS[name].extensions[0]}"
    tensor = "\u6f22\U0001f600"
    with open_sink(path, name) as sink:
        sink.plan(metadata, [TensorInfo(tensor, (4,), "F32", 0, 16, 16)])
        sink.write(tensor, [memoryview(bytes(16))])
    with open_source(path) as source:
        assert list(source.tensors) == [tensor]
        assert {key: source.metadata[key] for key in metadata} == metadata
