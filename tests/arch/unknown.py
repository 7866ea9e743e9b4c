"""Causal models of the installed transformers that do not run here, and their relatives that do.

python -m tests.arch.unknown

One line a model type: how far it is known here ("names" where its tensors have roles, "unknown"
otherwise), the nearest type that runs here, and how many lines of the two modeling files differ
once each type's own name is taken out (0: it runs the other's class). The nearest come first. Only
types whose code it imports, and LIKELY, are compared.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aprfmt.arch import ARCHS

LIKELY = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2")


class Missing(NamedTuple):
    """A model type that does not run here; `relative` is "" where no code of it was compared."""

    model_type: str
    level: str
    relative: str
    differs: int


def levels() -> dict[str, str]:
    """Return the level of every `model_type` that an architecture here goes by."""
    return {name: arch.level for arch in ARCHS.values() for name in arch.called.get("hf", ())}


def missing(known: Mapping[str, str] | None = None) -> Iterator[Missing]:
    """Yield the causal types of transformers that do not run here, in the order of its list.

    `known` is {model type: level}; None takes `levels()`.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = levels() if known is None else known
    owners: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if known.get(model_type) == "full":
            owners.setdefault(str(name), model_type)
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        level = known.get(model_type, "unknown")
        if level == "full":
            continue
        if str(name) in owners:
            yield Missing(model_type, level, owners[str(name)], 0)
            continue
        likely = dict.fromkeys((*_imported_types(model_type), *LIKELY))
        running = [other for other in likely if known.get(other) == "full" and _code(other)]
        rows = [(_lines_between(model_type, other), other) for other in running]
        differs, relative = min(rows, default=(0, "")) if _code(model_type) else (0, "")
        yield Missing(model_type, level, relative, differs)


def _folder(model_type: str) -> Path:
    """Return the folder of a type's code in transformers."""
    import transformers

    return Path(transformers.__file__).parent / "models" / model_type


def _imported_types(model_type: str) -> list[str]:
    """Return the types whose modeling files a type's modular file imports."""
    path = _folder(model_type) / f"modular_{model_type}.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.findall(r"^from \.\.(\w+)\.modeling_", text, re.MULTILINE)


@cache
def _code(model_type: str) -> tuple[str, ...]:
    """Return the lines of a type's modeling file with its own name taken out; () without one."""
    path = _folder(model_type) / f"modeling_{model_type}.py"
    if not path.is_file():
        return ()
    text = path.read_text(encoding="utf-8")
    own = re.search(r"^class (\w+?)(?:RMSNorm|MLP|Attention|Model|PreTrained)", text, re.MULTILINE)
    for name in filter(None, (own[1] if own else "", model_type)):
        text = text.replace(name, "X")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _lines_between(one: str, other: str) -> int:
    """Return how many lines of two modeling files are in one of them only."""
    a, b = _code(one), _code(other)
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return len(a) + len(b) - 2 * sum(block.size for block in blocks)


def main() -> None:
    """Print them, the nearest first."""
    for row in sorted(missing(), key=lambda row: (not row.relative, row.differs)):
        far = f"{row.differs} lines from {row.relative}" if row.differs else f"runs {row.relative}"
        print(f"{row.model_type:24} {row.level:8} {far if row.relative else 'of its own'}")


if __name__ == "__main__":
    main()
