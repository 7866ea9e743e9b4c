"""An encoding in several tensors that this package does not know: its row and codec say it all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import BY_CLAIM, ENCODINGS, Encoding
from aprfmt.codecs import CODECS
from aprfmt.codecs.base import F32, Array, Bytes, Codec, Fma, part_bytes
from aprfmt.errors import CodecError
from tests.conversion.folders import llama_folder, tensors_of

CLAIM = "pair_state__plain"


class Pair(Codec):
    """Signed bytes in one tensor, one scale, the shape and the dtype in another."""

    name = "PAIR"
    parts = ("", CLAIM)
    kept = "float32"

    def with_options(self, **options: Any) -> Codec:
        """Keep the weight's dtype."""
        found = Pair()
        found.kept = options["dtype"]
        return found

    def granule(self, raw: Mapping[str, Bytes], count: int) -> int:
        """Whole weights."""
        return max(count, 1)

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Scale."""
        np.multiply(part_bytes(self.name, raw).view(np.int8), self._state(raw)["scale"], out=out)

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Scale by the largest magnitude."""
        scale = float(np.float32(np.abs(x).max() / 127))
        state = {"scale": scale, "shape": list(x.shape), "dtype": self.kept}
        return {"": np.rint(x / scale).astype(np.int8).tobytes(), CLAIM: json.dumps(state).encode()}

    def shape_of(self, raw: Mapping[str, Bytes]) -> tuple[int, ...]:
        """Return what the state says."""
        return tuple(self._state(raw)["shape"])

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32:
        """Return the scale."""
        return np.full(count, self._state(raw)["scale"], np.float32)

    def config(self, options: Mapping[str, Any], left_out: Sequence[str]) -> Mapping[str, Any]:
        """Name the method."""
        return {"quant_method": "pair"}

    def _state(self, raw: Mapping[str, Bytes]) -> Any:
        return json.loads(bytes(raw[CLAIM]))


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    row = Encoding("PAIR", 1, 1, flat=True, claim=CLAIM)
    monkeypatch.setitem(ENCODINGS, "PAIR", row)
    monkeypatch.setitem(BY_CLAIM, CLAIM, row)
    monkeypatch.setitem(CODECS._rows, "PAIR", ("", ""))
    monkeypatch.setitem(CODECS._loaded, "PAIR", Pair())
    llama_folder(tmp_path / "s", "BF16", hidden=64, layers=1)
    aprfmt.convert(tmp_path / "s", tmp_path / "q", to="safetensors", quantize="PAIR")
    return tmp_path / "q"


def test_it_is_written_in_its_parts_and_joined_again(packed: Path, tmp_path: Path) -> None:
    weight = "model.layers.0.mlp.up_proj.weight"
    stored = tensors_of(packed)
    assert json.loads(stored[f"{weight}.{CLAIM}"][2])["dtype"] == "bfloat16"
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pair"}
    with aprfmt.open(packed) as model:
        assert {t.encoding for t in model.values() if t.parts} == {"PAIR"}
        assert model[weight].shape == (64, 64)
    found = aprfmt.diff(tmp_path / "s", packed)
    verdicts = {row.verdict for row in found.tensors if row.encoding_b == "PAIR"}
    assert verdicts == {"WITHIN"}
    aprfmt.convert(packed, tmp_path / "q.apr")  # the main parts go as WEIGHT@PAIR
    with aprfmt.open(tmp_path / "q.apr") as model:
        assert model[weight].encoding == "PAIR" and model[weight].shape == (64, 64)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (("", CLAIM, "more"), "PAIR weight without .*_proj.weight.more; expected all"),
        (("", CLAIM), "has pair_state__other; expected .* or pair_state__plain"),
    ],
)
def test_what_does_not_fit_is_named(
    packed: Path, changed: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(changed) > 2:
        monkeypatch.setattr(Pair, "parts", changed)
    else:
        path = packed / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b"pair_state__plain", b"pair_state__other"))
    with pytest.raises(CodecError, match=says):
        aprfmt.open(packed)
