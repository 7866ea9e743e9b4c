"""Every writer of the package, in the shape of `publishing.Scenario`, for faults and kills.

A writer puts one of three versions into a folder. The expected content of each version is found by
writing it once without faults; after any fault the folder must hold exactly one version.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import TensorInfo
from aprfmt.formats import FORMATS, open_sink, writable_formats
from aprfmt.formats.temporary_files import SUFFIX
from tests.formats.publishing import BYSTANDER

VERSIONS = (1, 2, 3)
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Writer:
    """`put(root, version)` writes; `folder` names the folder that is the output, "" if none is."""

    name: str
    put: Callable[[Path, int], None]
    folder: str = ""
    prepared: Callable[[Path], None] = lambda root: None  # files that exist before and must stay
    _seen: dict[int, Files] = field(default_factory=dict)

    def target(self, root: Path) -> Path:
        """Return the folder that holds the files."""
        return root / self.folder

    def write(self, root: Path, version: int) -> None:
        """Write a version, counted on round the three, over whatever is there."""
        self.put(root, (version - 1) % len(VERSIONS) + 1)

    def prepare(self, root: Path) -> None:
        """Put version 1 and another program's file into `root`."""
        root.mkdir()
        (root / BYSTANDER).write_bytes(b"mine")
        self.prepared(root)
        self.write(root, 1)

    def expected(self, version: int) -> Files:
        """Return the content of a folder after writing a version without faults."""
        if version not in self._seen:
            root = Path(tempfile.mkdtemp(prefix="aprfmt-writer-")) / "x"
            try:
                self.prepare(root)
                self.write(root, version)
                self._seen[version] = contents(root)
            finally:
                shutil.rmtree(root.parent)
        return self._seen[version]

    def version_of(self, root: Path) -> int:
        """Return the version that lies in `root`; AssertionError for a mixture or a torn file."""
        found = contents(root)
        for version in VERSIONS:
            if found == self.expected(version):
                return version
        sizes = {name: len(data) for name, data in found.items()}
        raise AssertionError(f"{self.name}: no version of three: {sizes}")

    def litter(self, root: Path) -> list[str]:
        """Return every hidden name that a run left behind."""
        names = [path.name for path in root.rglob("*")]
        return [name for name in names if name.startswith(".") or name.endswith(SUFFIX)]

    @contextmanager
    def seamed(self) -> Iterator[None]:
        """Leave everything as it is."""
        yield


def contents(root: Path) -> Files:
    """Return every visible file below `root`."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }


def _sink(name: str, shards: bool) -> Callable[[Path, int], None]:
    """Return a writer of three tensors through a format's sink, amended as a conversion does it."""
    extension = FORMATS[name].extensions[0]

    def put(root: Path, version: int) -> None:
        infos = [TensorInfo(f"t{at}", (4, 1000), "F32", 0, 16_000, 4000) for at in range(3)]
        options: dict[str, Any] = {"max_shard_size": 30_000} if shards else {}
        with open_sink(root / f"m{extension}", name, force=True, **options) as sink:
            sink.plan({"general.name" if name == "gguf" else "name": "v?"}, infos)
            for info in infos:
                half = bytes([version]) * (info.nbytes // 2)
                sink.write(info.name, [memoryview(half), memoryview(half)])
            sink.amend("v?", f"v{version}")

    return put


def _convert(options: Mapping[str, Any]) -> Callable[[Path, int], None]:
    """Return a writer that converts a whole small model to a Hugging Face folder."""

    def put(root: Path, version: int) -> None:
        from aprfmt.conversion import convert

        convert(_model(version), root / "model-hf", to="safetensors", force=True, **options)

    return put


def _model(version: int) -> Path:
    """Return a small model that differs by version, made once a process."""
    from tests.conversion.folders import llama_folder

    if version not in _MODELS:
        folder = Path(tempfile.mkdtemp(prefix="aprfmt-model-"))
        llama_folder(
            folder, "BF16", hidden=16, layers=1, vocab=8, heads=2, kv_heads=1, seed=version
        )
        (folder / "tokenizer_config.json").write_text(f'{{"version": {version}}}')
        _MODELS[version] = folder
    return _MODELS[version]


_MODELS: dict[int, Path] = {}


def _trace(version: int) -> Any:
    import numpy as np

    from aprfmt.inference.trace import Record, Trace

    values = {
        f"L{layer}.attn_out": np.full((2, 8), version * 10 + layer, np.float32)
        for layer in range(3)
    }
    records = {
        key: Record("attn_out", layer, (2, 8), (0, 1), "float32", "fused", "cpu", None)
        for layer, key in enumerate(values)
    }
    return Trace({"ids": [1, 2]}, records, {}, values.get)


def _save_trace(root: Path, version: int) -> None:
    from aprfmt.inference.trace_file import save_trace

    save_trace(root / "t.safetensors", _trace(version), force=True)


def _save_aprt(root: Path, version: int) -> None:
    from aprfmt.inference.aprt import save_aprt

    save_aprt(root / "stages", _trace(version), force=True)


def _npy(root: Path, version: int) -> None:
    import numpy as np

    from aprfmt.formats.npy import write_npy

    write_npy(root / "x.npy", np.full(30_000, version, np.float32), True)


def _html(root: Path, version: int) -> None:
    from aprfmt.cli.html_page import write_page

    write_page(root / "page.html", f"<p>{version}</p>" * 1000, True)


def _manifest(root: Path, version: int) -> None:
    from aprfmt.model import open_model
    from aprfmt.model.manifest import write_manifest

    with open_model(root / "model.safetensors") as model:
        write_manifest(model, [{"name": f"v{version}"}] * 500, force=True)


def _model_beside(root: Path) -> None:
    shutil.copy(_model(1) / "model.safetensors", root)


WRITERS: Mapping[str, Writer] = {
    writer.name: writer
    for writer in (
        *(Writer(name, _sink(name, shards=False)) for name in writable_formats(own=True)),
        *(
            Writer(f"{name}-shards", _sink(name, shards=True))
            for name in writable_formats(own=True)
        ),
        Writer("hf", _convert({}), folder="model-hf"),
        Writer("hf-shards", _convert({"max_shard_size": 1500}), folder="model-hf"),
        Writer("trace", _save_trace),
        Writer("aprt", _save_aprt, folder="stages"),
        Writer("npy", _npy),
        Writer("html", _html),
        Writer("hash-manifest", _manifest, prepared=_model_beside),
    )
}
