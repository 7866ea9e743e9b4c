"""The child process in which an official library opens a file for `second_reader.py`.

The first line of stdin has the import path, the limits, the format and the file. The answers are
JSON lines: `library` (name and version), a row for each tensor as the library gives it, then `end`,
or `stopped` with the reason; `raised` says that this is an error of the library's own. The
libraries have no limits, so that the process has them: what needs more may end it without a word.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

WINDOW = 8 << 20  # bytes hashed at a time
Row = dict[str, Any]


def read_gguf(path: str) -> Iterator[Row]:
    """Yield {name, encoding, shape, nbytes, offset, sha256} of each tensor as `gguf` gives it.

    `encoding` is the number of the ggml type, `shape` is outermost first. For a type that the
    library does not know it is {name, encoding, lacks}.
    """
    import gguf
    import numpy as np

    # Tensors of types that the library has not are set aside, so that it reads the others.
    known = {int(kind) for kind in gguf.GGMLQuantizationType}
    lacking: list[Row] = []

    class Reader(gguf.GGUFReader):
        """The library's reader, without tensors of unknown types, which would stop it."""

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            """Build the tensors of known types; those of others are added to `lacking`."""
            there = []
            for each in fields:
                kind = int(each.parts[4][0])
                if kind in known:
                    there.append(each)
                else:
                    lacking.append({"name": each.name, "encoding": kind, "lacks": f"type {kind}"})
            super()._build_tensors(start_offs, there)

    reader = Reader(path)
    yield from lacking
    for tensor in reader.tensors:
        raw = tensor.data.reshape(-1).view(np.uint8)
        digest = hashlib.sha256()
        for start in range(0, raw.size, WINDOW):
            digest.update(raw[start : start + WINDOW].data)
        yield {
            "name": tensor.name,
            "encoding": int(tensor.tensor_type),
            "shape": [int(size) for size in reversed(tensor.shape)],
            "nbytes": int(raw.size),
            "offset": int(tensor.data_offset),
            "sha256": digest.hexdigest(),
        }


# What the library takes from numpy by these names, and numpy has not.
_NUMPY_LACKS = (
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


def add_numpy_names() -> None:
    """Add the small float types to this process's numpy, where `safetensors` looks for them."""
    import ml_dtypes  # numpy then also knows bfloat16 by its name
    import numpy as np

    for name in _NUMPY_LACKS:
        if not hasattr(np, name):
            setattr(np, name, getattr(ml_dtypes, name))


def read_safetensors(path: str) -> Iterator[Row]:
    """Yield {name, encoding, shape, nbytes, offset, sha256} of each tensor.

    `encoding` is the format's dtype. The library gives no offsets: `offset` is None. Where numpy
    cannot hold what the library makes, the row has no bytes and `lacks` says why.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        for name in file.keys():
            part = file.get_slice(name)
            row: Row = {"name": name, "encoding": part.get_dtype(), "shape": part.get_shape()}
            try:
                row |= _hash_tensor(file, name, part)
            except MemoryError:
                raise
            except Exception as error:  # of numpy or the library: which, its versions decide
                why = f"{type(error).__name__}: {error}"[:200]
                row["lacks"] = f"array of dtype {row['encoding']} ({why})"
            yield row


def _hash_tensor(file: Any, name: str, part: Any) -> Row:
    """Return {nbytes, offset, sha256} of a tensor's bytes, read some rows at a time.

    `part` is the tensor `name` of the open `file` as a slice.
    """
    import numpy as np

    shape = part.get_shape()
    digest, size = hashlib.sha256(), 0
    rows = shape[0] if len(shape) > 1 else 0
    each = max(1, WINDOW // (8 * max(1, math.prod(shape[1:]))))
    bands = (part[at : min(at + each, rows)] for at in range(0, rows, each))
    for values in bands if rows else (file.get_tensor(name),):
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        digest.update(raw.data)
        size += raw.size
    return {"nbytes": size, "offset": None, "sha256": digest.hexdigest()}


READERS = {"gguf": read_gguf, "safetensors": read_safetensors}


def answer_request(kind: str, path: str, memory: int) -> Iterator[Row]:
    """Yield {"library": name and version}, a row for each tensor, then {"end": True}.

    If the library did not read everything, the last one is {"stopped": why, "raised": bool}, where
    `raised` says that it raised an error. `memory` is the process's limit in bytes, for the
    message. `kind` is the format, which is also the library's name.
    """
    from importlib.metadata import version

    try:
        yield {"library": f"{kind} {version(kind)}"}
        yield from READERS[kind](path)
        yield {"end": True}
    except MemoryError:
        yield {"stopped": f"needs more than {memory >> 20} MiB of memory", "raised": False}
    except ImportError as error:
        yield {"stopped": f"cannot be imported: {error}", "raised": False}
    except Exception as error:
        yield {"stopped": f"{type(error).__name__}: {error}"[:300], "raised": True}


def main() -> None:
    """Read a request from stdin, and write its answers to stdout, a JSON object a line."""
    request = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = request["path"]
    from aprfmt.base.resource_limits import limit_resources

    limit_resources(request["cpu_seconds"], request["memory"])
    add_numpy_names()
    for row in answer_request(request["format"], request["file"], request["memory"]):
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
