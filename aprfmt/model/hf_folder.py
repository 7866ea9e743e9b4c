"""Reads a Hugging Face folder: finds the weights, config.json, and the tokenizer's files.

Only plain JSON and text are read here, each through the bounded loader; nothing is executed and
nothing outside the folder is opened.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Value
from aprfmt.base.sequences import join_first
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.formats.mapped_file import Buffer, open_bytes
from aprfmt.formats.unfinished_writes import known_journal_names
from aprfmt.remote.paths import hub_cache, is_remote

# Files that travel with the weights, besides config.json and tokenizer.json; all are text.
COMPANION_FILES: tuple[str, ...] = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "hf_quant_config.json",  # ModelOpt's statement of how the weights are quantized
    "quantize_config.json",  # AutoGPTQ's
    "quant_config.json",  # AutoAWQ's
    "preprocessor_config.json",
    "image_preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
TEXT_FILES: tuple[str, ...] = ("config.json", "tokenizer.json", *COMPANION_FILES)
POOLING = "1_Pooling/config.json"
PIPELINE = "model_index.json"  # of diffusers: class and library of every part
# Parts of a pipeline that have weights, by diffusers' names; others are schedulers and tokenizers.
_WEIGHTED = frozenset(
    "unet transformer transformer_2 vae text_encoder text_encoder_2 text_encoder_3 image_encoder "
    "prior decoder controlnet safety_checker vocoder".split()
)
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MLX_ADAPTER = "adapters.safetensors"  # checkpoints next to it have a number before this name
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = "pytorch_model.bin"
WEIGHT_FILES = (INDEX, WEIGHTS, PICKLED_INDEX, PICKLED)  # who names one may name its folder
# Files of trainers in the same container that are no model.
_TRAINERS = re.compile(r"(?:training_args|optimizer|scheduler|scaler|rng_state.*)\.(?:bin|pth?)")
MAX_CONFIG = 16 << 20  # the largest real config.json has some hundred kB
MAX_TEXT = 64 << 20  # the largest real tokenizer.json is about 35 MB


class FolderTexts(Mapping[str, str]):
    """{file name: text} of a folder's known text files; each is read when it is accessed."""

    def __init__(self, folder: Path) -> None:
        """List the known text files that exist in the folder."""
        self._folder = folder
        self._names = tuple(name for name in TEXT_FILES if (folder / name).is_file())

    def __getitem__(self, name: str) -> str:
        """Return the text of a file in the folder; KeyError for a name it does not list."""
        if name not in self._names:
            raise KeyError(name)
        return read_text(self._folder / name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


@dataclass(frozen=True)
class HFFolder:
    """The text files of a model's folder: `config` (parsed config.json or None), and `texts`."""

    path: Path
    config: Mapping[str, Value] | None
    texts: Mapping[str, str]


def pooling_file(folder: HFFolder | None) -> dict[str, Value]:
    """Return {file name: object} of a sentence-transformers folder's pooling config; {} if none."""
    target = None if folder is None else folder.path / POOLING
    if target is None or not target.is_file():
        return {}
    return {POOLING: parse_config(read_text(target, MAX_CONFIG).encode(), target)}


def is_written_name(name: str) -> bool:
    """Return whether aprfmt writes files of this name: --force may replace only those."""
    return (
        name in TEXT_FILES
        or name in (INDEX, WEIGHTS)
        or (name.startswith("model-") and name.endswith(".safetensors"))
    )


def read_folder(path: Path) -> HFFolder:
    """Return the parsed config.json of a folder and its text files.

    Raises FormatError if config.json exists and is not a valid JSON object, and where an
    interrupted run left some files of the folder old and some new.
    """
    config: Mapping[str, Value] | None = None
    target = path / "config.json"
    if known_journal_names(path):
        from aprfmt.formats.shard_set import refuse_mixed

        refuse_mixed(target, [path / name for name in (*TEXT_FILES, WEIGHTS, INDEX)])
    if target.is_file():
        with closing(open_bytes(target)) as file:
            config = parse_config(file.view[: MAX_CONFIG + 1], target)
    return HFFolder(path, config, FolderTexts(path))


def parse_config(buffer: Buffer, path: Path) -> Mapping[str, Value]:
    """Return the JSON object in the bytes of a config.json. Raises FormatError.

    `path` begins the messages.
    """
    from aprfmt.formats.bounded_json import loads

    config: Any = loads(buffer, str(path), max_bytes=MAX_CONFIG)
    if not isinstance(config, dict):
        raise FormatError(
            f"{path}: holds a JSON {type(config).__name__}; expected an object of config keys"
        )
    return config


def read_text(path: Path, limit: int = MAX_TEXT) -> str:
    """Return the content of a small text file; FormatError if it is too large or not UTF-8."""
    with closing(open_bytes(path)) as file:
        try:
            if file.size > limit:
                raise FormatError(f"{path}: {file.size} bytes; expected at most {limit}")
            return str(file.view[:], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8 at byte {error.start}; it is damaged") from None


def find_weights(folder: Path) -> Path:
    """Return the path of the one model in a folder: a shard index or a file.

    Order: the shard index, model.safetensors, a single .safetensors, .apr or .gguf (the first shard
    of a split), MLX's adapters.safetensors, then files of torch.save. Raises UsageError with the
    candidates where the choice is not clear, and UnsupportedError for a trainer's shards that have
    to be joined first.
    """
    # The usual names first, then a single model file.
    for name in (INDEX, WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    found = model_candidates(folder)
    if len(found) == 1:
        return found[0]
    last = folder / MLX_ADAPTER
    others = [path for path in found if path != last]
    if last in found and all(path.name.endswith(f"_{MLX_ADAPTER}") for path in others):
        return last  # next to checkpoints of its training, which mlx-lm does not load
    # No model file: other kinds of folders, files of torch.save, or why it is none.
    if not found:
        if (folder / PIPELINE).is_file():
            raise UsageError(_pipeline_text(folder))
        snapshot = snapshot_of_cache(folder)
        if snapshot is not None:
            return find_weights(snapshot)
        pickled = pickled_weights(folder)
        if len(pickled) == 1:
            return pickled[0]

        from aprfmt.formats.foreign_formats import foreign_folder, refuse_trainer_shards

        refuse_trainer_shards(folder, weights=True)
        if pickled:
            names = ", ".join(path.name for path in pickled[:12])
            raise UsageError(f"{folder}: holds several files of torch.save ({names}); name one")
        what = foreign_folder(folder)
        if what:
            raise UsageError(f"{folder}: {what}")
        captured = captured_files(folder)
        if captured:
            raise UsageError(
                f"{folder}: holds no model, but captures of a run ({_some_names(captured)}); "
                f"compare them with the model that ran: aprfmt diagnose MODEL {captured[0]}"
            )
        if (folder / "config.json").is_file():
            raise UsageError(
                f"{folder}: holds config.json and no weights; expected {WEIGHTS}, or {INDEX} and "
                "its shards: was all of it downloaded?"
            )
        inside = _folders_of_models(folder)
        if inside:
            named = join_first(inside, 4)
            raise UsageError(f"{folder}: holds no model, but its folders do; name one: {named}")
        raise UsageError(
            f"{folder}: holds no model; expected {WEIGHTS}, {INDEX}, or an .apr or .gguf file"
        )
    names = ", ".join(path.name for path in found)
    ranks = rank_files(found)
    if ranks:
        raise UsageError(
            f"{folder}: holds files of {len(ranks)} ranks ({_some_names(ranks)}), each with a part "
            f"of the tensors; compare them with the model that they were cut from: "
            f"aprfmt diff MODEL {folder}"
        )
    raise UsageError(f"{folder}: holds several models ({names}); name one of them")


SINGLE_FILES = {INDEX: WEIGHTS, PICKLED_INDEX: PICKLED}


def rival_weights(path: Path, members: Collection[Path]) -> Path | None:
    """Return the single weight file next to a shard index that does not name it, else None.

    `path` is the index or the single file by which the model is opened, `members` are the model's
    files. If the single file is opened, the index is returned instead. transformers'
    from_pretrained takes the single file where both are there (measured with 5.23); vLLM reads the
    files that the index names.
    """
    names = {member.name for member in members}
    for index, single in SINGLE_FILES.items():
        if path.name == index and single not in names:
            rival = path.with_name(single)
        elif path.name == single and single in names:
            rival = path.with_name(index)
        else:
            continue
        if _is_there(rival) and not (rival.name == index and _is_named(rival, single)):
            return rival
    return None


def _is_there(path: Path) -> bool:
    """Return whether there is a file at a path; of an address, whether its site lists it."""
    if is_remote(path):
        return any(one.name == path.name for one in path.parent.iterdir())
    return path.is_file()


def _is_named(index: Path, name: str) -> bool:
    """Return whether a shard index names a file; also True for an index that cannot be read."""
    from aprfmt.formats.shard_index import parse_index

    try:
        with closing(open_bytes(index)) as file:
            return name in parse_index(file.view[:], index)[0].values()
    except (AprfmtError, OSError):
        return True


def rank_files(paths: Iterable[Path]) -> list[Path]:
    """Return the paths whose names state a rank, as `model-TP-001.safetensors` does.

    [] for fewer than two: one model alone may have such a name.
    """
    from aprfmt.base.dump_names import parse_dump_path

    found = [path for path in paths if parse_dump_path(path.stem).ranks]
    return found if len(found) > 1 else []


def holds_rank_files(folder: Path) -> bool:
    """Return whether a folder's weights are files of ranks, each with a share of every tensor."""
    if not folder.is_dir() or any((folder / name).is_file() for name in WEIGHT_FILES):
        return False
    return bool(rank_files(model_candidates(folder)))


def captured_files(folder: Path) -> list[Path]:
    """Return the .npz files of a folder that has no weights next to them, sorted; else [].

    `weights.npz` is no capture: MLX stored models so.
    """
    if not folder.is_dir() or (folder / INDEX).is_file() or (folder / PICKLED_INDEX).is_file():
        return []
    found = sorted(
        path for path in folder.glob("*.npz") if path.is_file() and path.stem != "weights"
    )
    return found if found and not model_candidates(folder) and not pickled_weights(folder) else []


def _some_names(paths: Sequence[Path]) -> str:
    """Return the names of up to four files, and how many more there are."""
    more = f", ... {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(path.name for path in paths[:4]) + more


def _pipeline_text(folder: Path) -> str:
    """Return the message that a folder is a diffusers pipeline, with its subfolders of models."""
    index = parse_config(read_text(folder / PIPELINE, MAX_CONFIG).encode(), folder / PIPELINE)
    name = index.get("_class_name", "")
    named = [key for key, value in index.items() if isinstance(value, list)]
    every = sorted(path.name for path in folder.iterdir() if path.is_dir())
    parts = [name for name in every if model_candidates(folder / name)]
    lacking = [key for key in named if key in every and key not in parts and key in _WEIGHTED]
    lacking += [key for key in named if key not in every and key in _WEIGHTED]
    shown = ", ".join(str(folder / part) for part in parts) or "none of them is here"
    return (
        f"{folder}: is a pipeline ({name or PIPELINE}), not one model; its parts are models, name "
        f"one of them: {shown}" + (f"; without weights: {', '.join(lacking)}" if lacking else "")
    )


def _folders_of_models(folder: Path) -> list[Path]:
    """Return the subfolders that hold weights, sorted; hidden ones are left out.

    Such are a trainer's checkpoints, and the parts of a sentence-transformers model.
    """
    return sorted(
        one
        for one in folder.iterdir()
        if one.is_dir()
        and not one.name.startswith(".")
        and (model_candidates(one) or any((one / name).is_file() for name in WEIGHT_FILES))
    )


def model_candidates(folder: Path) -> list[Path]:
    """Return a folder's .apr, .gguf and .safetensors files; of a split only the first shard."""
    shard = re.compile(r"-(\d{5})-of-\d{5}\.(?:gguf|apr|safetensors)$")
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".apr", ".gguf", ".safetensors") or path.name.startswith("."):
            continue
        match = shard.search(path.name)
        first = "00000" if path.suffix == ".apr" else "00001"
        if path.is_file() and (match is None or match.group(1) == first):
            found.append(path)
    return found


def pickled_weights(folder: Path) -> list[Path]:
    """Return the files of torch.save in a folder: those of the usual names, else by extension.

    An index or the single usual file is returned alone. Optimizer states and the like are left out,
    and files that only have such an extension.
    """
    for name in (PICKLED_INDEX, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
        and not path.name.startswith(".")
        and not _TRAINERS.fullmatch(path.name)
        and path.is_file()
        and _is_pickled(path)
    ]


def _is_pickled(path: Path) -> bool:
    """Return whether a file begins as one that torch.save wrote."""
    from aprfmt.formats.pytorch.layout import recognise

    with closing(open_bytes(path)) as file:
        return recognise(bytes(file.view[:4096]), file.size)


def hub_cache_snapshot(name: str) -> Path | None:
    """Return the snapshot folder of `org/name` in the local hub cache; None without one.

    None too for a name that is not `org/name`.
    """
    if name.count("/") != 1 or name.startswith((".", "/")):
        return None
    return newest_snapshot(hub_cache() / ("models--" + name.replace("/", "--")), name)


def snapshot_of_cache(folder: Path) -> Path | None:
    """Return the snapshot folder in a hub cache's folder; None for any other folder.

    `folder` may be a repository of the cache, or a cache with only one. Raises UsageError with the
    names where a cache holds several.
    """
    if is_remote(folder):
        return None
    if (folder / "snapshots").is_dir():
        return newest_snapshot(folder)
    if folder.name == "snapshots":
        return newest_snapshot(folder.parent)
    hub = folder / "hub" if (folder / "hub").is_dir() else folder
    models = sorted(path for path in hub.glob("models--*") if newest_snapshot(path) is not None)
    if len(models) > 1:
        names = [path.name.removeprefix("models--").replace("--", "/") for path in models]
        raise UsageError(
            f"{folder}: is a hub cache of {len(names)} models; name one of them: "
            f"{join_first(names, 6)}"
        )
    return newest_snapshot(models[0]) if models else None


def newest_snapshot(repository: Path, repository_name: str = "") -> Path | None:
    """Return the snapshot folder that refs/main names, else the newest; None if there is none.

    If `repository_name`, the repository's name, is given, the user is told which commit is used.
    """
    found = _cached_snapshot(repository)
    if repository_name and found is not None:
        from aprfmt.remote.traffic import TRAFFIC

        TRAFFIC.tell(f"{repository_name}: read from the local hub cache, commit {found.name}")
    return found


def _cached_snapshot(repository: Path) -> Path | None:
    """Return the snapshot folder that refs/main names, else the newest; None if there is none."""
    snapshots = repository / "snapshots"
    if not snapshots.is_dir():
        return None
    main = repository / "refs" / "main"
    if main.is_file() and main.stat().st_size < 100:
        named = snapshots / main.read_text(errors="replace").strip()
        if named.parent == snapshots and named.is_dir():
            return named
    found = sorted((p for p in snapshots.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    return found[-1] if found else None
