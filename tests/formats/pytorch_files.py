"""Files that torch writes, of every kind: dtypes, forms, protocols and views."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

FORMS = ("zip", "legacy")
PROTOCOLS = (2, 3, 4, 5)
_COUNT = 24


def values(dtype: torch.dtype) -> torch.Tensor:
    """Return 24 values of a dtype, their bytes from a fixed generator."""
    size = torch.empty(0, dtype=dtype).element_size()
    rng = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (_COUNT * size,), dtype=torch.uint8, generator=rng)
    if dtype == torch.bool:
        return raw % 2 == 0
    return raw.view(dtype)


# Dtypes that have a class of storage: torch writes no others in its older form.
TYPED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip


def _quantized(channels: bool) -> torch.Tensor:
    x = torch.arange(12.0).reshape(3, 4)
    if channels:
        scales = torch.tensor([0.1, 0.2, 0.3])
        return torch.quantize_per_channel(x, scales, torch.zeros(3), 0, torch.qint8)
    return torch.quantize_per_tensor(x, 0.5, 3, torch.quint8)


def _base() -> torch.Tensor:
    return torch.arange(60.0).reshape(3, 4, 5)


def _shared() -> dict[str, torch.Tensor]:
    base = torch.arange(40.0)
    return {
        "whole": base,
        "head": base[:8],
        "tail": base[30:],
        "again": base,
        "i": base[4:8].view(2, 2),
    }


VIEWS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: {"x": _base().transpose(0, 2)},
    "permuted": lambda: {"x": _base().permute(1, 2, 0)},
    "stepped": lambda: {"x": _base()[:, ::2, 1:4]},
    "offset": lambda: {"x": _base()[1:]},
    "column": lambda: {"x": _base()[:, :, 2]},
    "expanded": lambda: {"x": torch.arange(3.0).reshape(3, 1).expand(3, 7)},
    "expanded-all": lambda: {"x": torch.tensor(2.5).expand(4, 5)},
    "diagonal": lambda: {"x": torch.arange(25.0).reshape(5, 5).diagonal()},
    "windows": lambda: {"x": torch.arange(9.0).unfold(0, 4, 1)},
    "transposed-bfloat16": lambda: {"x": values(torch.bfloat16).reshape(4, 6).t()},
    "transposed-complex128": lambda: {"x": values(torch.complex128).reshape(4, 6).t()},
    "transposed-fp8": lambda: {"x": values(torch.float8_e4m3fn).reshape(4, 6).t()},
    "channels-last": lambda: {
        "x": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    },
    "conj": lambda: {"x": values(torch.complex64).conj()},
    "neg": lambda: {"x": values(torch.complex64).conj().imag},
    "shared": _shared,
    "scalar": lambda: {"x": torch.tensor(3.0)},
    "empty": lambda: {"x": torch.zeros(0, 5), "y": torch.zeros(3, 0, 2)},
    "empty-transposed": lambda: {"x": torch.zeros(3, 0).t()},
    "parameter": lambda: {
        "x": torch.nn.Parameter(_base()),
        "y": torch.nn.Parameter(_base().transpose(0, 1)),
    },
    "buffer": lambda: {"x": torch.nn.Buffer(_base())},
    "quantized": lambda: {"x": _quantized(False)},
    "quantized-channels": lambda: {"x": _quantized(True)},
    "alone": lambda: _base(),
    "list": lambda: [_base(), {"y": _base()[0]}, (torch.ones(2),)],
    "nested": lambda: {
        "model": {"a.b": _base()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": _base()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "epoch": 3,
        "name": "é\ud800",
    },
    "ordered": lambda: OrderedDict([("z", torch.ones(2)), ("a", torch.zeros(3))]),
    "state_dict": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
    ).state_dict(),
    "defaultdict": lambda: defaultdict(list, {"x": torch.ones(2)}),
    "adam": lambda: _adam(),
    "sparse": lambda: {"x": torch.eye(4).to_sparse()},
    "sparse-csr": lambda: {"x": torch.eye(4).to_sparse_csr()},
    "attribute": lambda: {"x": _attributed()},
    "values": lambda: {
        "x": torch.ones(1),
        "s": torch.Size([2, 3]),
        "d": torch.device("cpu"),
        "t": torch.float16,
        "c": 1 + 2j,
        "n": None,
        "b": b"ab\xff",
        "set": {1, 2},
        "big": 1 << 200,
        "neg": -5,
        "f": float("inf"),
    },
}


def _attributed() -> torch.Tensor:
    found = torch.nn.Parameter(torch.arange(4.0))
    found.scale = torch.tensor([0.5])  # type: ignore[attr-defined]
    return found


def _adam() -> Any:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(value: Any, path: Path, form: str, protocol: int) -> Path:
    """Write a value in a form of torch.save's and a protocol."""
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "zip")
    return path


def by_path(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a loaded value by path; written apart from the reader's own walk."""
    if isinstance(value, torch.Tensor):
        yield from _parts(value, path)
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from by_path(held, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, held in enumerate(value):
            yield from by_path(held, f"{path}.{number}" if path else str(number))


# Layouts of a sparse tensor by rows or columns -> its parts but the values.
_PLAIN = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _parts(value: torch.Tensor, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if value.layout == torch.sparse_coo:
        yield path + ".indices", value._indices()
        yield path + ".values", value._values()
    elif value.layout in _PLAIN:
        for name in _PLAIN[value.layout]:
            yield f"{path}.{name}", getattr(value, name)()
        yield path + ".values", value.values()
    elif value.layout == torch.jagged:
        yield path + ".values", value.values()
        yield path + ".offsets", value.offsets()  # type: ignore[attr-defined]
    elif value.is_nested:
        yield path + ".buffer", value.values()
        yield path + ".sizes", value._nested_tensor_size()
        yield path + ".strides", value._nested_tensor_strides()
        yield path + ".storage_offsets", value._nested_tensor_storage_offsets()
    elif value.is_quantized:
        yield path, value.dequantize()
        if "per_channel" in str(value.qscheme()):
            yield path + ".scales", value.q_per_channel_scales()
            yield path + ".zero_points", value.q_per_channel_zero_points()
    else:
        yield path or "tensor", value
        scale = getattr(value, "scale", None)
        if isinstance(scale, torch.Tensor):
            yield path + ".scale", scale


def raw(value: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values in row-major order."""
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes())


ARRANGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda x: {"x": x},
    "shaped": lambda x: {"x": x.reshape(2, 3, 4)},
    "transposed": lambda x: {"x": x.reshape(4, 6).t()},
    "stepped": lambda x: {"x": x[1::3]},
    "inner": lambda x: {"x": x.reshape(4, 6)[1:3, 2:5]},
    "expanded": lambda x: {"x": x.reshape(1, 24).expand(3, 24)},
    "single": lambda x: {"x": x[5]},
    "empty": lambda x: {"x": x[:0], "y": x[4:4].reshape(3, 0)},
    "shared": lambda x: [x, x[3:9], {"z": x.reshape(4, 6)[:, 1]}],
    "subclass": lambda x: {"x": torch.nn.Parameter(x, requires_grad=False)},
}


def _optimizer_states() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, function that gives its state after a step) of each of torch's optimizers."""
    for name in sorted(dir(torch.optim)):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or name == "Optimizer":
            continue

        def make(kind: Any = kind, name: str = name) -> Any:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                if name == "SparseAdam":
                    model: torch.nn.Module = torch.nn.Embedding(4, 3, sparse=True)
                    given = torch.tensor([1])
                else:
                    model = torch.nn.Linear(3, 2, bias=name != "Muon")
                    given = torch.ones(1, 3)
                settings = {"momentum": 0.9} if name == "SGD" else {"lr": 0.1}
                optimizer = kind(model.parameters(), **settings)

                def closure() -> Any:
                    optimizer.zero_grad()
                    loss = (model(given) ** 2).sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            return optimizer.state_dict()

        yield f"optimizer-{name}", make


def _jagged() -> Any:
    return torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)])


def packed(dtype: torch.dtype) -> torch.Tensor:
    """Return an odd count of codes, some of which share bytes in some dtypes."""
    values = torch.arange(15.0).reshape(3, 5)
    return torch.quantize_per_channel(values, torch.ones(3), torch.zeros(3), 0, dtype)


OTHERS: dict[str, Callable[[], Any]] = {
    **dict(_optimizer_states()),
    "generator": lambda: {"rng": torch.Generator().manual_seed(3).get_state()},
    "rng": lambda: {"rng": torch.get_rng_state()},
    "sparse-csc": lambda: {"x": torch.eye(4).to_sparse_csc()},
    "sparse-bsr": lambda: {"x": torch.eye(4).to_sparse_bsr((2, 2))},
    "sparse-bsc": lambda: {"x": torch.eye(4).to_sparse_bsc((2, 2))},
    "sparse-int": lambda: {"x": torch.eye(4).int().to_sparse()},
    "sparse-uncoalesced": lambda: {
        "x": torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0]), (3,), check_invariants=True
        )
    },
    "sparse-hybrid": lambda: {"x": torch.arange(24.0).reshape(2, 3, 4).to_sparse(1)},
    "nested-tensor": lambda: {"x": _jagged()},
    "quantized-int8": lambda: {
        "x": torch.quantize_per_tensor(torch.arange(6.0), 0.25, 0, torch.qint8)
    },
    "quantized-int32": lambda: {
        "x": torch.quantize_per_tensor(torch.arange(6.0), 0.25, 0, torch.qint32)
    },
    "quantized-channels-uint8": lambda: {
        "x": torch.quantize_per_channel(
            torch.arange(12.0).reshape(3, 4), torch.ones(4), torch.ones(4).long(), 1, torch.quint8
        )
    },
    "quantized-4-bits": lambda: {"x": packed(torch.quint4x2)},
    "quantized-2-bits": lambda: {"x": packed(torch.quint2x4)},
    "jagged": lambda: {
        "x": torch.nested.nested_tensor(
            [torch.arange(6.0).reshape(2, 3), torch.ones(4, 3)], layout=torch.jagged
        )
    },
    "float4": lambda: {"x": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
    "lstm": lambda: torch.nn.LSTM(3, 4, 2).state_dict(),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8).state_dict(),
    "batch-norm": lambda: torch.nn.BatchNorm2d(3).state_dict(),
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), 5
    ).state_dict(),
    "bytes": lambda: {"x": torch.ones(1), "b": bytearray(b"ab")},
    "sizes": lambda: {"x": torch.ones(2, 3), "shape": torch.Size([2, 3])},
    "numbers-as-keys": lambda: {0: torch.ones(2), 1.5: torch.zeros(1), (1, 2): torch.ones(1)},
    "deep": lambda: {"a": [{"b": ({"c": [torch.ones(2)]},)}]},
    "long-names": lambda: {f"{'n' * 300}.{at}": torch.full((1,), float(at)) for at in range(9)},
    "many": lambda: {f"t{at}": torch.full((2,), float(at)) for at in range(300)},
    "parameter-list": lambda: torch.nn.ParameterList([torch.ones(2), torch.zeros(3)]).state_dict(),
    "grad": lambda: {"x": torch.ones(3, requires_grad=True)},
}
