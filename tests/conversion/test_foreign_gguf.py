"""GGUF files of other writers: to APR or a folder and back, with every stored byte equal."""

import math
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from tests.models import save_tiny


def infos(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return {name: (encoding, bytes)} as the file stores them."""
    with aprfmt.open(path) as model:
        return {
            name: (tensor.info.encoding, bytes(tensor.raw()))
            for name, tensor in model.source.tensors.items()
        }


def test_smollm2_through_apr_is_the_same_file_content(smollm2: Path, tmp_path: Path) -> None:
    report = aprfmt.convert(smollm2, tmp_path / "m.apr")
    assert report.count("bytes") == len(report.tensors) == 272
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert infos(tmp_path / "back.gguf") == infos(smollm2)
    with aprfmt.open(smollm2) as a, aprfmt.open(tmp_path / "back.gguf") as b:
        assert {k: b.metadata[k] for k in a.metadata} == dict(a.metadata)
        assert {k: b.source.types[k] for k in a.metadata} == dict(a.source.types)


@pytest.mark.parametrize("way", ["m.apr", "m-hf"])
def test_norms_that_adding_one_rounds_come_back(way: str, tmp_path: Path) -> None:
    """x - 1 + 1 loses the low bits of a small x; the file on the way keeps what is lost."""
    from tests.models import save_tiny

    save_tiny("gemma2", tmp_path / "source", "float32")
    first = tmp_path / "first.gguf"
    aprfmt.convert(tmp_path / "source", first)
    with aprfmt.open(first) as model:
        place = model["blk.0.attn_norm.weight"]
        offset, count = place.offset, place.nbytes // 4
    rng = np.random.default_rng(5)
    awkward = (rng.standard_normal(count) * 1e-5).astype("<f4")
    assert ((awkward - np.float32(1)) + np.float32(1) != awkward).any()
    data = bytearray(first.read_bytes())
    data[offset : offset + 4 * count] = awkward.tobytes()
    first.write_bytes(data)
    target = tmp_path / way
    aprfmt.convert(first, target, to="safetensors" if way == "m-hf" else None)
    aprfmt.convert(target, tmp_path / "back.gguf")
    assert infos(tmp_path / "back.gguf") == infos(first)


def test_gemma_keeps_every_byte(gemma: Path, tmp_path: Path) -> None:
    aprfmt.convert(gemma, tmp_path / "m.apr", source_hash=False, verify=False)
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back.gguf", source_hash=False, verify=False)
    report = aprfmt.diff(gemma, tmp_path / "back.gguf")
    assert report.counts["SAME_BYTES"] == len(report.tensors) == 236
    assert not report.tokenizer


def test_infinities_of_a_gguf_go_through_json(tmp_path: Path) -> None:
    """gemma3n has minus infinity where a layer cuts nothing; APR keeps foreign keys as JSON."""
    save_tiny("gemma3n", tmp_path / "m")
    aprfmt.convert(tmp_path / "m", tmp_path / "a.gguf")
    aprfmt.convert(tmp_path / "a.gguf", tmp_path / "b.apr")
    aprfmt.convert(tmp_path / "b.apr", tmp_path / "c.gguf")
    key = "gemma3n.activation_sparsity_scale"
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "c.gguf") as c:
        stored = [float(one) for one in a.metadata[key]]
        assert stored.count(-math.inf) == 2
        assert [float(one) for one in c.metadata[key]] == stored
        assert a.source.types[key] == c.source.types[key]
