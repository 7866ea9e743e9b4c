"""A tensor by its stored name and by its role: one type, whatever stands between them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aprfmt.arch.layout_steps import Added
from aprfmt.base.protocols import TensorInfo
from aprfmt.codecs import encode
from aprfmt.errors import CodecError
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.model import Model, open_model
from aprfmt.tensors import companions
from aprfmt.tensors.view import View
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

QUERY = "L0.attn_q.weight"  # whose rows a GGUF has in another order


@pytest.fixture(scope="module", params=["F32", "BF16", "Q8_0"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, Model]]:
    """A folder and the GGUF made of it, with other layout steps, in one encoding."""
    root = tmp_path_factory.mktemp("views")
    folder = llama_folder(root / "hf", "F32", hidden=64, layers=2)
    if request.param != "F32":
        to = ["--encoding", request.param, "--allow-overflow"]
        assert aprfmt("convert", folder, root / "x.apr", *to).code == 0
        folder = root / "x.apr"
    assert aprfmt("convert", folder, root / "x.gguf").code == 0
    with open_model(folder) as a, open_model(root / "x.gguf") as b:
        yield a, b


def test_a_role_is_the_same_tensor_in_every_format(models: tuple[Model, Model]) -> None:
    a, b = models
    assert b.roles[QUERY].steps and not a.roles[QUERY].steps
    for key, view in a.roles.items():
        other = b.roles[key]
        np.testing.assert_array_equal(view.numpy(), other.numpy(), strict=True)
        assert (view.name, other.name) == (key, key) and view.shape == other.shape
        for at in (slice(3, 9), 5, -1, slice(20, 2, -3)):
            np.testing.assert_array_equal(other[at], other.numpy()[at], strict=True)
            np.testing.assert_array_equal(view[at], other[at], strict=True)
        if view.encoding == other.encoding:
            assert bytes(view.raw()) == bytes(other.raw())


def test_rows_and_chunks_are_those_of_the_whole(models: tuple[Model, Model]) -> None:
    for model in models:
        views = (*model.roles.values(), *model.values())
        assert len(views) == len(model.roles) + len(model) > 20
        for view in views:
            values = view.numpy().reshape(-1, view.shape[-1])
            middle = len(values) // 2
            np.testing.assert_array_equal(view.rows(middle, len(values)), values[middle:])
            joined = np.concatenate([rows for *_, rows in view.chunks(7 * view.shape[-1])])
            np.testing.assert_array_equal(joined, values, strict=True)


def test_a_stored_tensor_is_a_view_without_steps(models: tuple[Model, Model]) -> None:
    _, model = models
    plain = model["blk.0.attn_q.weight"]
    role = model.roles[QUERY]
    assert (plain.role, plain.steps, plain.roles) == (None, (), ())
    assert type(plain) is type(role) and plain.names == role.names
    assert bytes(plain.raw()) != bytes(role.raw())
    assert sorted(plain.numpy().tolist()) == sorted(role.numpy().tolist())
    assert model.find(QUERY) is role and model.find("no such") is None
    assert model.roles_of["blk.0.attn_q.weight"] == (QUERY,)


def test_padded_rows_are_cut_one_by_one() -> None:
    """APR pads the rows of K-quants: a row is decoded without its neighbours all the same."""
    rng = np.random.default_rng(0)
    stored = encode("Q4_K", rng.standard_normal((5, 512)).astype(np.float32))[""]
    view = View(MemoryTensor(TensorInfo("t", (5, 300), "Q4_K", 0, len(stored), 288), stored))
    values = view.numpy()
    assert values.shape == (5, 300) and view.row_bytes is None
    np.testing.assert_array_equal(view.rows(1, 4), values[1:4])
    np.testing.assert_array_equal(view[2], values[2])


def test_what_a_step_changed_has_no_bytes(tmp_path: Path) -> None:
    """A norm with one added is told by its values; asking for bytes says so."""
    stored = MemoryTensor(TensorInfo("norm", (4,), "F32", 0, 16, 16), np.ones(4, "<f4").tobytes())

    class Binding:
        steps = (Added(1.0),)

    class Group:
        roles = ("L0.attn_norm.weight",)
        binding = Binding()

    view = View(stored, role="L0.attn_norm.weight", group=Group(), hp={})  # type: ignore[arg-type]
    assert view.runs is None and view.numpy().tolist() == [0.0] * 4
    with pytest.raises(CodecError, match="norm gives no single byte string"):
        view.raw()


CODES = 3 * 64


@pytest.mark.parametrize("at", [None, 0, 1, 63, 64, 127, 128, CODES - 1])
@pytest.mark.parametrize("fill", [0, 0x88, 255])
def test_codes_of_one_byte_are_told_from_those_with_one_other(
    fill: int, at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever byte it is: the first, the last, and those at the ends of the pieces read."""
    monkeypatch.setattr(companions, "_WINDOW", 64)
    codes = bytearray([fill]) * CODES
    if at is not None:
        codes[at] ^= 1
    parts = {
        "": MemoryTensor(TensorInfo("w", (CODES,), "U8", 0, CODES, None), codes),
        ".scale": MemoryTensor(TensorInfo("w.scale", (1,), "F32", 0, 4, None), bytes(4)),
    }
    joined = companions.JoinedTensor(TensorInfo("w", (8, 48), "NF4", 0, CODES, None), parts)
    assert companions.constant_codes(joined) == (fill if at is None else None)
    assert companions.constant_codes(parts[""]) is None


@pytest.mark.parametrize("codes", [b"\7", b"\7\7", b"\7\6", b"\7\7\7"])
def test_one_byte_alone_is_no_filling(codes: bytes) -> None:
    size = len(codes)
    parts = {
        "": MemoryTensor(TensorInfo("w", (size,), "U8", 0, size, None), codes),
        ".scale": MemoryTensor(TensorInfo("w.scale", (1,), "F32", 0, 4, None), bytes(4)),
    }
    joined = companions.JoinedTensor(TensorInfo("w", (size, 2), "NF4", 0, size, None), parts)
    constant = size > 1 and len(set(codes)) == 1
    assert companions.constant_codes(joined) == (7 if constant else None)
