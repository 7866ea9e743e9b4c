"""Arrays of numpy in files of torch.save are tensors: their numbers stand in the pickle."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from aprfmt.errors import FormatError
from aprfmt.formats import open_source
from aprfmt.formats.pytorch.numpy_arrays import array_tensor, describe_numpy_buffer
from aprfmt.formats.pytorch.pickle_values import GlobalName, PickledObject
from tests.cli.run import aprfmt
from tests.formats import pytorch_files as files
from tests.formats.hostile_pickles import name, text
from tests.formats.pytorch.test_pytorch_hostile import zipped

NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8", "c16")
ARRAYS: dict[str, Any] = {
    **{code: np.arange(24).astype(code).reshape(4, 6) for code in NUMBERS},
    **{f">{code}": np.arange(6).astype(f">{code}") for code in ("f4", "i8", "c16")},
    "bfloat16": np.arange(24).astype(ml_dtypes.bfloat16).reshape(4, 6),
    "float8": np.arange(24).astype(ml_dtypes.float8_e4m3fn),
    "columns": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "big-endian columns": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4).astype(">f4")),
    "transposed": np.arange(24.0).reshape(4, 6).T,
    "stepped": np.arange(24.0)[::2],
    "one": np.array(3.0),
    "none": np.zeros((0, 5)),
}


@pytest.mark.parametrize("form", files.FORMS)
@pytest.mark.parametrize("protocol", files.PROTOCOLS)
def test_every_array_of_numbers_is_read(tmp_path: Path, form: str, protocol: int) -> None:
    for kind, array in ARRAYS.items():
        path = files.save({"x": array, "t": torch.ones(2)}, tmp_path / "x.pt", form, protocol)
        plain = np.ascontiguousarray(array).reshape(-1)
        swapped = plain.dtype.byteorder == ">"
        data = (plain.byteswap() if swapped else plain).tobytes()
        with open_source(path) as source:
            found = source.tensors["x"]
            assert found.info.shape[: array.ndim] == array.shape, kind
            assert bytes(found.raw()) == data, kind
            third = len(data) // 3
            assert bytes(found.raw(third, 2 * third)) == data[third : 2 * third], kind
            assert bytes(source.tensors["t"].raw()) == files.raw(torch.ones(2))


def state(seed: int) -> dict[str, Any]:
    """Return what a trainer saves of its generators of random numbers."""
    return {"numpy": np.random.RandomState(seed).get_state(), "cpu": torch.zeros(8)}


def test_other_numbers_of_an_array_are_a_difference(tmp_path: Path) -> None:
    """Seen red: two states of numpy's generator were equal, as their arrays were not read."""
    for number, seed in enumerate((1, 1, 2)):
        torch.save(state(seed), tmp_path / f"{number}.pt")
    same = aprfmt("diff", tmp_path / "0.pt", tmp_path / "1.pt", "--json")
    assert (same.code, same.json["equal"]) == (0, True)
    other = aprfmt("diff", tmp_path / "0.pt", tmp_path / "2.pt", "--json")
    assert other.code == 1
    assert [row["key"] for row in other.json["tensors"] if row["verdict"] == "DIFFERENT"] == [
        "numpy.1"
    ]


def test_arrays_of_the_pickle_lie_nowhere_in_the_file(tmp_path: Path) -> None:
    """Checks of the file's bytes count what it stores: the tensor, not the array."""
    torch.save({"x": np.arange(6.0), "t": torch.ones(2)}, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        (shard,) = source.shards  # type: ignore[attr-defined]
        assert list(shard.parsed.infos) == ["t"] and list(source.tensors) == ["x", "t"]
    assert aprfmt("validate", tmp_path / "x.pt").code == 0


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([1, None, "x"], object),
        np.array([(1, 2), (3, 4)], "f4,i2"),
        np.array(["2020-01-01", "2021-01-01"], "M8[D]"),
    ],
)
def test_arrays_of_other_things_are_values(tmp_path: Path, array: Any) -> None:
    """Texts, objects and records are no tensors; what they hold is still told apart."""
    torch.save({"x": array, "t": torch.ones(2)}, tmp_path / "a.pt")
    with open_source(tmp_path / "a.pt") as source:
        assert list(source.tensors) == ["t"]
    array[1] = array[0]
    torch.save({"x": array, "t": torch.ones(2)}, tmp_path / "b.pt")
    assert aprfmt("diff", tmp_path / "a.pt", tmp_path / "a.pt").code == 0
    assert aprfmt("diff", tmp_path / "a.pt", tmp_path / "b.pt").code == 1


def described(shape: Any, data: Any, code: Any = "f4") -> PickledObject:
    """Return the description of an array of numpy with this state."""
    dtype = PickledObject(GlobalName("numpy", "dtype"), (code,))
    return PickledObject(GlobalName("numpy", "ndarray"), state=(1, shape, dtype, False, data))


@pytest.mark.parametrize("shape", [(3,), (1, 1), (-1, -2), (2.0,), "ab", (1,) * 65, (1 << 62, 4)])
def test_bytes_that_do_not_fit_the_shape_are_refused(shape: Any) -> None:
    assert array_tensor(described((2,), bytes(8))) is not None
    with pytest.raises(ValueError, match="has 8 bytes, which do not fit its shape"):
        array_tensor(described(shape, bytes(8)))


@pytest.mark.parametrize(
    "value",
    [
        described((2,), "text"),
        described((2,), bytes(8), "U1"),
        described((2,), bytes(8), GlobalName("ml_dtypes", "os")),
        described((2,), bytes(8), GlobalName("other", "bfloat16")),
        PickledObject(GlobalName("mine", "ndarray"), state=described((2,), bytes(8)).state),
        PickledObject(GlobalName("numpy", "ndarray"), state=(1, 2)),
    ],
)
def test_what_is_no_array_of_numbers_is_no_tensor(value: PickledObject) -> None:
    assert array_tensor(value) is None


def test_a_damaged_array_is_an_error_of_the_file(tmp_path: Path) -> None:
    """The shape says more than there is."""
    made = name("numpy._core.numeric", "_frombuffer") + b"(C\x04abcd" + name("numpy", "dtype")
    body = made + text("f4") + b"\x85RK\x09\x85" + text("C") + b"tR"
    with pytest.raises(FormatError, match="has 4 bytes, which do not fit its shape"):
        open_source(zipped(tmp_path / "x.pt", body))
    with pytest.raises(ValueError, match="neither C nor F"):
        describe_numpy_buffer(b"", None, (), "K")


class Made:
    """Pickled as a call of a function of torch's."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


FLOATS = torch.tensor([1.5, -2.0, 3.25, 7.0]).reshape(2, 2)
ON_DEVICES = {
    "copy": (torch._utils._rebuild_device_tensor_from_cpu_tensor, FLOATS, torch.float32),
    "copy of bfloat16": (
        torch._utils._rebuild_device_tensor_from_cpu_tensor, FLOATS.bfloat16(), torch.bfloat16
    ),
    "array": (torch._utils._rebuild_device_tensor_from_numpy, FLOATS.numpy(), torch.float32),
    "array of bfloat16": (
        torch._utils._rebuild_device_tensor_from_numpy, FLOATS.numpy(), torch.bfloat16
    ),
    "one of bfloat16": (
        torch._utils._rebuild_device_tensor_from_numpy, FLOATS[0, :1].numpy(), torch.bfloat16
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ON_DEVICES)
def test_tensors_of_devices_without_storages(tmp_path: Path, kind: str) -> None:
    """As torch saves those of XLA: bit for bit what torch.load makes of them on a CPU."""
    function, data, dtype = ON_DEVICES[kind]
    torch.save({"x": Made(function, data, dtype, "xla:0", False)}, tmp_path / "x.pt")
    arrays: list[Any] = [np.ndarray, np.dtype, np.dtypes.Float32DType]
    arrays += [(np.ones(1).__reduce__()[0], "numpy._core.multiarray._reconstruct")]
    with torch.serialization.safe_globals(arrays):
        wanted = torch.load(tmp_path / "x.pt", weights_only=True, map_location="cpu")["x"]
    with open_source(tmp_path / "x.pt") as source:
        found = source.tensors["x"]
        assert found.info.encoding == ("BF16" if dtype == torch.bfloat16 else "F32")
        assert bytes(found.raw()) == files.raw(wanted)


def test_a_tensor_of_a_device_with_other_numbers_is_refused(tmp_path: Path) -> None:
    function = torch._utils._rebuild_device_tensor_from_cpu_tensor
    torch.save(Made(function, FLOATS, torch.float16, "xla:0", False), tmp_path / "x.pt")
    with pytest.raises(FormatError, match="its numbers are float32, and it is said to be float16"):
        open_source(tmp_path / "x.pt")
    torch.save(Made(function, [1], torch.float16, "xla:0", False), tmp_path / "x.pt")
    with pytest.raises(FormatError, match="the data is a list"):
        open_source(tmp_path / "x.pt")
