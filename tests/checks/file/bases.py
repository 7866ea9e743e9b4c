"""Good files, made once, and small edits of them that break one thing each."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aprfmt as package
from tests.conversion.folders import tensors_of, write_mixed
from tests.formats.apr_files import AprFile, Tensor, sealed

DEMO = Path(__file__).resolve().parents[3] / "fixtures" / "demo"


def hf(folder: Path) -> Path:
    """Copy the demo model's folder."""
    shutil.copytree(DEMO, folder / "hf", ignore=shutil.ignore_patterns("__init__.py", "golden*"))
    return folder / "hf"


def _converted(name: str, **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        target = folder / name
        package.convert(DEMO, target, source_hash=False, **options)
        return target

    return make


def small_apr(folder: Path) -> Path:
    """Write a small APR without architecture: two float tensors and one of blocks."""
    blocks = (struct.pack("<e", 0.5) + bytes(range(16))) * 2
    tensors = (
        Tensor(b"a"),
        Tensor(b"b", (3,), data=struct.pack("<3f", 1, 2, 3)),
        Tensor(b"q", (64,), code=128, data=blocks),
    )
    metadata = {
        "model_type": "t",
        "license": None,
        "data_source": None,
        "data_license": None,
        "total_size": 0,
        "param_count": 71,
    }
    path = folder / "small.apr"
    path.write_bytes(AprFile(tensors=tensors, metadata=metadata).build())
    return path


def nvfp4(folder: Path) -> Path:
    """Write the demo model in NVFP4, each weight with a scale of activations beside it."""
    made = _converted("nvfp4", to="safetensors", quantize="MODELOPT-NVFP4")(folder)
    rows = tensors_of(made)
    scales = [name for name in rows if name.endswith(".weight_scale_2")]
    for name in scales:
        rows[name.replace("weight_scale_2", "input_scale")] = ("F32", (), struct.pack("<f", 0.006))
    write_mixed(made / "model.safetensors", rows)
    for name in ("config.json", "hf_quant_config.json"):
        said = (made / name).read_text()
        (made / name).write_text(said.replace("W4A16_NVFP4", "NVFP4"))
    return made


def inverted(path: Path, suffix: str) -> None:
    """Store 1/s for the float32 scales s whose names end so."""
    rows = tensors_of(path)
    for name, (kind, shape, raw) in rows.items():
        if name.endswith(suffix):
            count = len(raw) // 4
            values = (1 / value for value in struct.unpack(f"<{count}f", raw))
            rows[name] = kind, shape, struct.pack(f"<{count}f", *values)
    write_mixed(path / "model.safetensors", rows)


def pytorch(folder: Path) -> Path:
    """Return a folder whose weights torch saved."""
    import torch
    from safetensors.torch import load_file

    path = hf(folder)
    file = path / "model.safetensors"
    torch.save(load_file(file), path / "pytorch_model.bin")
    file.unlink()
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "hf": hf,
    "gguf": _converted("m.gguf"),
    "q8": _converted("q.gguf", quantize="Q8_0"),
    "apr": _converted("m.apr"),
    "nf4": _converted("nf4", to="safetensors", quantize="NF4"),
    "nvfp4": nvfp4,
    "shards": _converted("shards", to="safetensors", max_shard_size=2_000_000),
    "small": small_apr,
    "pytorch": pytorch,
}


# --- edits ----------------------------------------------------------------------------------


def weights(path: Path) -> Path:
    """Return the file that holds the weights."""
    return path / "model.safetensors" if path.is_dir() else path


def patch(path: Path, offset: int, data: bytes) -> None:
    """Write bytes over a file's own."""
    raw = bytearray(weights(path).read_bytes())
    raw[offset : offset + len(data)] = data
    weights(path).write_bytes(raw)


def swap(path: Path, old: bytes, new: bytes) -> None:
    """Replace the one occurrence of some bytes by as many others."""
    raw = weights(path).read_bytes()
    assert raw.count(old) == 1 and len(old) == len(new)
    weights(path).write_bytes(raw.replace(old, new))


def element(path: Path, name: str, index: int, data: bytes, size: int) -> None:
    """Write over one element (of `size` bytes) of a tensor."""
    with package.open(path) as model:
        offset = model[name].offset
    patch(path, offset + index * size, data)


def text(path: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of a folder."""
    value = json.loads((path / name).read_text())
    change(value)
    (path / name).write_text(json.dumps(value))


def without(path: Path, name: str) -> None:
    """Take a tensor out of a folder's weights."""
    rows = tensors_of(path)
    del rows[name]
    write_mixed(path / "model.safetensors", rows)


def added(path: Path, name: str) -> None:
    """Add a tensor to a folder's weights."""
    rows = tensors_of(path)
    rows[name] = ("F32", (2,), struct.pack("<2f", 1, 2))
    write_mixed(path / "model.safetensors", rows)


def reshaped(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Give a tensor of a folder another shape of as many elements."""
    rows = tensors_of(path)
    rows[name] = (rows[name][0], shape, rows[name][2])
    write_mixed(path / "model.safetensors", rows)


def scaled(path: Path, name: str, factor: float) -> None:
    """Multiply a BF16 tensor of a folder."""
    import numpy as np

    rows = tensors_of(path)
    dtype, shape, raw = rows[name]
    assert dtype == "BF16"
    wide = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    bits = (wide * np.float32(factor)).view(np.uint32) >> 16
    rows[name] = (dtype, shape, bits.astype("<u2").tobytes())
    write_mixed(path / "model.safetensors", rows)


def computed(path: Path, name: str, of: Callable[[Any], Any]) -> None:
    """Replace a BF16 tensor of a folder by a function of its float32 values."""
    import ml_dtypes
    import numpy as np

    rows = tensors_of(path)
    dtype, shape, raw = rows[name]
    assert dtype == "BF16"
    made = np.asarray(of(np.frombuffer(raw, ml_dtypes.bfloat16).astype(np.float32)))
    rows[name] = (dtype, shape, made.astype(ml_dtypes.bfloat16).tobytes())
    write_mixed(path / "model.safetensors", rows)


def sealed_swap(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of an APR file and make its checksums fit."""
    swap(path, old, new)
    path.write_bytes(sealed(path.read_bytes()))


def crc(data: bytes) -> bytes:
    """Return a footer for some bytes."""
    return struct.pack("<I", zlib.crc32(data))
