"""Causal models of the installed transformers that do not run here, and their relatives that do.

python -m tests.arch.unknown

One line a model type: how far it is known here ("names" where its tensors have roles, "unknown"
otherwise), the lines of its own code, and the types whose code it builds on, those that run here
first. The least code over a type that runs here comes first: it is the next one to add.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from aprfmt.arch import ARCHS


class Missing(NamedTuple):
    """A model type that does not run here; `parents` are the types whose code it imports."""

    model_type: str
    level: str
    lines: int
    parents: tuple[str, ...]


def levels() -> dict[str, str]:
    """Return the level of every `model_type` that an architecture here goes by."""
    return {name: arch.level for arch in ARCHS.values() for name in arch.called.get("hf", ())}


def missing(known: Mapping[str, str] | None = None) -> Iterator[Missing]:
    """Yield the causal types of transformers that do not run here, in the order of its list.

    `known` is {model type: level}; None takes `levels()`.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = levels() if known is None else known
    models = Path(transformers.__file__).parent / "models"
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        level = known.get(model_type, "unknown")
        folder = models / model_type
        if level == "full" or not folder.is_dir():
            continue
        code = folder / f"modular_{model_type}.py"
        code = code if code.exists() else folder / f"modeling_{model_type}.py"
        text = code.read_text(encoding="utf-8") if code.exists() else ""
        parents = dict.fromkeys(re.findall(r"^from \.\.(\w+)\.modeling_", text, re.M))
        running = sorted(parents, key=lambda name: known.get(name) != "full")
        yield Missing(model_type, level, text.count("\n"), tuple(running))


def main() -> None:
    """Print them."""
    known = levels()
    rows = list(missing())
    rows.sort(key=lambda row: (not any(known.get(p) == "full" for p in row.parents), row.lines))
    for row in rows:
        parents = ", ".join(row.parents) or "none"
        print(f"{row.model_type:24} {row.level:8} {row.lines:5} lines over {parents}")


if __name__ == "__main__":
    main()
