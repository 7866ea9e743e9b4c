"""Finds every model under folders, hub caches, Ollama's store and addresses, each once.

A *subject* is what `open_model` takes: a folder with its shards and texts, a GGUF or APR file with
the later shards of its split, a safetensors file. Subjects of the same content are one, with all
paths and addresses (*places*) that lead to it.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aprfmt.errors import AprfmtError, UsageError
from aprfmt.model.hf_folder import (
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    TEXT_FILES,
    WEIGHTS,
    hub_cache_snapshot,
    model_candidates,
    pickled_weights,
    read_text,
)
from aprfmt.model.missing_path import missing_path_message
from aprfmt.remote.paths import RemotePath, can_list, is_remote, parse_location

ENDS = 64 << 10  # bytes of the beginning and of the end that an identity is made of
MAX_INDEX = 64 << 20  # bytes of a shard index or a manifest; larger ones are read by the reader
# A blob whose name is the digest of its bytes: of the hub (SHA-256, or git's SHA-1) and of Ollama.
_NAMED = re.compile(r"(?:sha256-)?([0-9a-f]{64}|[0-9a-f]{40})$")
_SHARD = re.compile(r"^(.*)-\d{5}-of-(\d{5})(\.(?:gguf|apr))$")
# The layer of Ollama's manifests that is a GGUF file.
OLLAMA_MODEL = "application/vnd.ollama.image.model"
HUB = re.compile(r"^models--.+")


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model to scan: its path, the identity of its content, its size, and all its places.

    `identity` is 64 hex digits over what its files are: the digest that names a blob, else size,
    time of change and the bytes at both ends. `bytes` are those of all its files.
    """

    path: str
    identity: str
    bytes: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A path or address that could not be searched, and why."""

    place: str
    why: str


def find_models(roots: Iterable[str]) -> Iterator[FleetModel | Unlisted]:
    """Yield every model under the roots, each content once, and every place that cannot be read.

    A root is a folder, a model file, `org/name` of the hub cache, or the address of a model or of a
    folder of models. Raises UsageError for any other root. Links between folders are not followed:
    nothing is met twice, and no circle is entered.
    """
    found: dict[str, FleetModel] = {}
    for root in roots:
        for lying, shown in _find_in_root(_resolve_root(root)):
            if isinstance(lying, Unlisted):
                yield lying
                continue
            try:
                subject = describe_model(lying, shown)
            except (OSError, AprfmtError) as error:
                yield Unlisted(shown, f"{getattr(error, 'strerror', None) or error}")
                continue
            known = found.get(subject.identity)
            if known is None:
                found[subject.identity] = subject
            elif shown not in known.places:
                found[subject.identity] = replace(known, places=(*known.places, shown))
    yield from found.values()


def _resolve_root(root: str) -> Path:
    """Return the path of a root: a path, an address, or a snapshot of the hub cache.

    Raises UsageError where there is no such thing.
    """
    if not root:
        raise UsageError("a path to scan is empty; is a variable of the shell not set?")
    path = parse_location(root)
    if is_remote(path) or path.exists():
        return path
    cached = hub_cache_snapshot(root)
    if cached is None:
        raise UsageError(missing_path_message(path))
    return cached


def _find_in_root(root: Path) -> Iterator[tuple[Path | Unlisted, str]]:
    """Yield (path of a model or Unlisted, the text that names it) under a root."""
    if is_remote(root):
        yield from _find_remote(root)
        return
    if not root.is_dir():
        yield root, str(root)
        return
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            names = {entry.name for entry in entries}
            if {"manifests", "blobs"} <= names:
                yield from _find_ollama(folder)
                continue
            yield from ((path, str(path)) for path in models_in_folder(folder))
        except OSError as error:
            yield Unlisted(str(folder), error.strerror or str(error)), str(folder)
            continue
        inner = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        if HUB.match(folder.name) and "snapshots" in names:
            inner = [entry for entry in inner if entry.name == "snapshots"]
        waiting += [Path(entry.path) for entry in reversed(inner)]


def _find_remote(root: Path) -> Iterator[tuple[Path | Unlisted, str]]:
    """Yield (path of a model or Unlisted, its address) for an address of a model or of a folder.

    Folders inside that folder are not entered.
    """
    shown = str(root)
    try:
        found = models_in_folder(root) if root.is_dir() else [root] if root.is_file() else []
    except (OSError, AprfmtError) as error:
        yield Unlisted(shown, str(error)), shown
        return
    if not found:
        yield Unlisted(shown, "no model is there"), shown
    yield from ((path, str(path)) for path in found)


def models_in_folder(folder: Path) -> list[Path]:
    """Return the paths of the models in one folder: the folder itself, files in it, or both.

    The folder stands for model.safetensors and the shards that its index names, or for
    pytorch_model.bin where it has no other weights. Every other weight file is a separate model.
    """
    whole = next((name for name in (INDEX, WEIGHTS) if (folder / name).is_file()), None)
    own = {WEIGHTS, INDEX} if whole == WEIGHTS else {WEIGHTS, INDEX, *shards_in_index(folder)}
    files = [path for path in model_candidates(folder) if whole is None or path.name not in own]
    if whole is None and len(files) == 1 and files[0].suffix == ".safetensors":
        return [folder] if (folder / "config.json").is_file() else files
    if whole is None and not files:
        pickled = pickled_weights(folder)
        usual = any(path.name in (PICKLED, PICKLED_INDEX) for path in pickled)
        return [folder] if usual else pickled
    return [*([folder] if whole else []), *files]


def shards_in_index(folder: Path, index: str = INDEX) -> set[str]:
    """Return the shard names in a folder's index; the empty set where it cannot be read."""
    try:
        if (folder / index).stat().st_size > MAX_INDEX:
            return set()
        table = json.loads(read_text(folder / index, MAX_INDEX)).get("weight_map", {})
        return {name for name in table.values() if isinstance(name, str) and "/" not in name}
    except (AprfmtError, OSError, ValueError, AttributeError, RecursionError):
        return set()


def _find_ollama(store: Path) -> Iterator[tuple[Path | Unlisted, str]]:
    """Yield (the GGUF blob, "ollama:" and the name) of every manifest of Ollama's store.

    In place of the blob it is an Unlisted where the manifest cannot be read or its digests are no
    SHA-256.
    """
    manifests = store / "manifests"
    for folder, _, names in os.walk(manifests):
        for name in sorted(names):
            manifest = Path(folder) / name
            shown = f"ollama:{manifest.relative_to(manifests).as_posix()}"
            try:
                layers = json.loads(read_text(manifest, MAX_INDEX))["layers"]
                digests = [
                    layer["digest"] for layer in layers if layer["mediaType"] == OLLAMA_MODEL
                ]
                blobs = [store / "blobs" / str(digest).replace(":", "-") for digest in digests]
                if any(not _NAMED.match(blob.name) for blob in blobs):
                    raise ValueError(f"digests {digests}")
            except (AprfmtError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                yield Unlisted(shown, f"no manifest that can be read: {error}"), shown
                continue
            yield from ((blob, shown) for blob in blobs)


def describe_model(path: Path, shown: str) -> FleetModel:
    """Return the model at a path with its identity and size; OSError where a file cannot be read.

    `shown` is the text that names the place.
    """
    files = model_files(path)
    sizes = [file.stat().st_size for file in files]
    parts = [f"{file.name if len(files) > 1 else ''}\0{file_identity(file)}" for file in files]
    identity = hashlib.sha256("\n".join(sorted(parts)).encode(errors="surrogatepass")).hexdigest()
    where = path if is_remote(path) else path.absolute()  # workers have another working folder
    return FleetModel(str(where), identity, sum(sizes), (shown,))


def model_files(path: Path) -> Sequence[Path]:
    """Return every file that is read when the model at a path is opened, by name."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        names = {WEIGHTS, INDEX, *shards_in_index(path), *TEXT_FILES}
        names |= (
            {file.name for file in model_candidates(path)}
            if not (path / WEIGHTS).is_file()
            else set()
        )
        if not any((path / name).is_file() for name in (INDEX, WEIGHTS)):
            names |= {PICKLED, PICKLED_INDEX, *shards_in_index(path, PICKLED_INDEX)}
    elif path.suffix == ".safetensors" and can_list(folder):
        names = {path.name, *TEXT_FILES}
    elif match := _SHARD.match(path.name):
        start, count, suffix = match.groups()
        first = 0 if suffix == ".apr" else 1
        numbers = range(first, min(int(count), 9999) + first)
        names = {path.name, *(f"{start}-{n:05d}-of-{count}{suffix}" for n in numbers)}
    else:
        names = {path.name}
    if not is_remote(folder):
        names &= set(os.listdir(folder))
    return [file for name in sorted(names) if (file := folder / name).is_file()] or [path]


def file_identity(path: Path) -> str:
    """Return a text that changes when a file's content does; OSError where it cannot be read.

    A file named by its digest has that name. Of others it is the size, the time of the last change
    in nanoseconds, and the SHA-256 of both ends: a file that was only moved is the same.
    """
    if isinstance(path, RemotePath):
        return _remote_identity(path)
    real = path.resolve()
    named = _NAMED.match(real.name)
    if named and real.parent.name == "blobs":
        return f"{named[1]} {real.stat().st_size}"
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(0, "not a regular file")
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(ENDS))
        if about.st_size > ENDS:
            file.seek(max(ENDS, about.st_size - ENDS))
            digest.update(file.read(ENDS))
    return f"{about.st_size} {about.st_mtime_ns} {digest.hexdigest()}"


def _remote_identity(path: RemotePath) -> str:
    """Return the identity of a file at an address, as text that changes with its content.

    It is the published SHA-256 and the size, else the identity that the site gives, else address,
    size and the SHA-256 of the first bytes. FileNotFoundError where there is no such file.
    """
    facts = path.site.facts(path.inner)
    if facts is None:
        raise FileNotFoundError(2, "No such file", str(path))
    if facts.sha256:
        return f"{facts.sha256} {facts.size}"
    if facts.identity:
        return facts.identity
    beginning = path.site.first(path.inner)[1]
    return f"{path} {facts.size} {hashlib.sha256(beginning).hexdigest()}"
