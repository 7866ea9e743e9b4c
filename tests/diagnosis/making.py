"""Making a fault of what is changed: the trace of an engine, a damaged copy of a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.diagnosis import files
from tests.diagnosis.engines import COARSE, tiny_folder, trace
from tests.diagnosis.fault import Fault, Pair

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "fixtures" / "demo"


def engine(
    name: str,
    base: str,
    says: str,
    causes: str | Sequence[str],
    where: str | Sequence[str],
    *,
    fine: bool = False,
    upstream: Sequence[int] = (),
    confidence: str = "confirmed",
    verdict: str = "bug",
    **how: Any,
) -> Fault:
    """Return the fault of a trace against the model it was run on."""

    def make() -> Pair:
        folder = tiny_folder(base)
        return folder, trace(folder, f"engine-{name}", points=None if fine else COARSE, **how)

    return Fault(
        name, base, says, make, _all(causes), _all(where), verdict, confidence, tuple(upstream)
    )


def damaged(
    name: str,
    base: str,
    says: str,
    causes: str | Sequence[str],
    where: str | Sequence[str],
    *,
    dtype: str = "float32",
    upstream: Sequence[int] = (),
    verdict: str = "bug",
    confidence: str = "confirmed",
    **how: Any,
) -> Fault:
    """Return the fault of a copied folder against the original."""

    def make() -> Pair:
        source = DEMO if base == "demo" else tiny_folder(base, dtype)
        return source, files.copy(source, f"damaged-{name}", **how)

    return Fault(
        name, base, says, make, _all(causes), _all(where), verdict, confidence, tuple(upstream)
    )


def _all(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def halves_for_pairs(x: Any, heads: int) -> Any:
    """Order the rows of each head for adjacent pairs, as GGUF has them."""
    return x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
