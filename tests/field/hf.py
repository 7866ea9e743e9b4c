"""Hugging Face folders changed with safetensors, torch and transformers, as people's scripts do."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.diagnosis.engines import place, tiny_folder
from tests.diagnosis.faults import DEMO
from tests.field.row import Pair

Tensor = Any
State = dict[str, Tensor]
Config = Mapping[str, Any] | Callable[[dict[str, Any]], None]
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
)  # fmt: skip


def base(arch: str, dtype: str = "float32", **options: Any) -> Path:
    """Return a tiny model's folder as transformers saves it; "demo" is the trained one."""
    return DEMO if arch == "demo" else tiny_folder(arch, dtype, **options)


def state_of(folder: Path) -> State:
    """Return every tensor of a folder, by safetensors' own loader."""
    from safetensors.torch import load_file

    found: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def copy(
    source: Path,
    name: str,
    change: Callable[[State], State | None] | None = None,
    *,
    config: Config | None = None,
    files: Mapping[str, Callable[[str], str | None]] | None = None,
) -> Path:
    """Return a copied folder; `change` edits the tensors in place or returns others.

    `files` edit texts beside them: None leaves the file out, a file that is absent is "".
    """
    from safetensors.torch import save_file

    folder = place(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = state_of(source)
    if change is not None:
        other = change(state)
        state = state if other is None else other
    state = {key: value.contiguous().clone() for key, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((source / "config.json").read_text())
    if callable(config):
        config(values)
    elif config is not None:
        values.update(config)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    edits = dict(files or {})
    for other_file in dict.fromkeys((*CARRIED, *edits)):
        path = source / other_file
        text = path.read_text() if path.exists() else ""
        new = edits[other_file](text) if other_file in edits else text
        if new:
            (folder / other_file).write_text(new)
    return folder


def edited(
    arch: str,
    name: str,
    change: Callable[[State], State | None] | None = None,
    *,
    dtype: str = "float32",
    config: Config | None = None,
    start: Config | None = None,
    files: Mapping[str, Callable[[str], str | None]] | None = None,
    **options: Any,
) -> Callable[[], Pair]:
    """Return a maker of a tiny model's folder and its edited copy.

    `start` changes the original's own config; keyword arguments are config values of the model.
    """

    def make() -> Pair:
        source = base(arch, dtype, **options)
        if start is not None:
            source = copy(source, f"field-{name}-a", config=start)
        return source, copy(source, f"field-{name}", change, config=config, files=files)

    return make


def on(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], None]:
    """Return an editor of every tensor whose name ends so."""

    def run(state: State) -> None:
        chosen = [name for name in state if name.endswith(ending)]
        assert chosen, ending
        for name in chosen:
            state[name] = change(state[name].clone())

    return run


def without(*endings: str) -> Callable[[State], None]:
    """Return an editor that leaves tensors out."""

    def run(state: State) -> None:
        chosen = [name for name in state if name.endswith(endings)]
        assert chosen, endings
        for name in chosen:
            del state[name]

    return run


def each(*changes: Callable[[State], State | None]) -> Callable[[State], None]:
    """Return an editor that does several in turn."""

    def run(state: State) -> None:
        for change in changes:
            change(state)

    return run


def json_edit(change: Callable[[Any], None]) -> Callable[[str], str]:
    """Return an editor of a JSON text."""

    def run(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values, ensure_ascii=False)

    return run


def loaded(folder: Path, dtype: str = "float32") -> Any:
    """Return transformers' model of a folder, its attention in steps, without progress bars."""
    import torch
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    model = library.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


def saved(
    arch: str,
    name: str,
    change: Callable[[Any], Any] | None = None,
    *,
    dtype: str = "float32",
    **how: Any,
) -> Callable[[], Pair]:
    """Return a maker of a folder and of what transformers saves of the loaded model.

    `change` changes the loaded model; `how` goes to save_pretrained.
    """

    def make() -> Pair:
        import torch

        source = base(arch, dtype)
        model = loaded(source, dtype)
        if change is not None:
            with torch.no_grad():
                change(model)
        target = place(f"field-{name}")
        model.save_pretrained(target, **how)
        for other in CARRIED:
            if (source / other).exists() and not (target / other).exists():
                shutil.copy(source / other, target / other)
        return source, target

    return make
