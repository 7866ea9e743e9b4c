"""The published suites over our own tables: a new row is tested by standing there."""

from dataclasses import replace
from pathlib import Path

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.spec import HyperRule
from aprfmt.codecs import CODECS
from aprfmt.errors import BackendUnavailableError
from aprfmt.formats import FORMATS
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.device import DTYPES
from aprfmt.testing import check_arch, check_backend, check_codec, check_format
from tests.models import IDS, MAKERS, save_tiny


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name: str) -> None:
    assert "row" in check_codec(name)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    assert len(check_format(name, tmp_path)) == 6


@pytest.mark.parametrize("name", MAKERS)
def test_architectures(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    assert {"forward", "apr"} <= set(check_arch(tmp_path / "model", tmp_path, IDS))


def test_weights_that_no_operation_reads_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen3", tmp_path / "model")
    assert check_arch(tmp_path / "model", tmp_path, IDS) == check_arch(
        tmp_path / "model", tmp_path, IDS
    )  # a second time in the same folder
    spec = ARCHS["qwen3"]
    hyper = tuple(HyperRule("qk_norm", default=False) if rule.name == "qk_norm" else rule
                  for rule in spec.hyper)  # fmt: skip
    monkeypatch.setitem(ARCHS._loaded, "qwen3", replace(spec, hyper=hyper))
    with pytest.raises(AssertionError, match=r"no operation reads: .*L0\.attn_q_norm\.weight"):
        check_arch(tmp_path / "model", tmp_path, IDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_backends(name: str, dtype: str) -> None:
    try:
        BACKENDS[name]("cpu", dtype)
    except BackendUnavailableError as error:
        pytest.skip(f"NOT-RUN: {error}")
    assert "attention" in check_backend(name, "cpu", dtype)
