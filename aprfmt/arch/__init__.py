"""Architectures as tables: looked up by name, one file per family."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from aprfmt.arch.aliases import CALLED, ROWS
from aprfmt.base.protocols import Value
from aprfmt.base.registry import Registry, some_names
from aprfmt.base.text_escape import shorten
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec

ARCHS: "Registry[ArchSpec]" = Registry(
    "arch",
    {name: f"aprfmt.arch.{row.module or name}:{name.upper()}" for name, row in ROWS.items()},
    ArchError,
)


def check_arch(name: str | None) -> None:
    """Raise ArchError, with similar names, for a name that is no architecture; None is allowed.

    A name given by a user is checked before anything is read: a file may not need its architecture,
    and a misspelt name must not be mistaken for the file's own.
    """
    if name is not None and name not in ARCHS:
        _ = ARCHS[name]


def arch_names() -> tuple[str, ...]:
    """Return the names of all architectures, those of other packages included."""
    return tuple(ARCHS)


def find_arch(
    style: str, name: str, roles: Collection[str] = (), values: Mapping[str, Value] | None = None
) -> "ArchSpec":
    """Return the architecture with a given name in a style ("hf", "gguf", "apr").

    Where several share the name (GGUF's `llama` is llama, mistral or mixtral), the stored tensor
    names in `roles` and the metadata in `values` decide. Raises ArchError for an unknown name and
    lists similar names; it never guesses one of them.
    """
    called = dict(CALLED)
    if not any(name in names.get(style, ()) for names in called.values()):
        # Other packages' tables are read only if no built-in one fits.
        called |= {arch: ARCHS[arch].called for arch in ARCHS if arch not in CALLED}
    candidates = [ARCHS[arch] for arch in called if name in called[arch].get(style, ())]
    shown = [spec for spec in candidates if spec.evidence and spec.evidence(roles, values or {})]
    chosen = shown or [spec for spec in candidates if spec.evidence is None] or candidates
    if len(chosen) == 1:
        chosen[0].block.check()
        return chosen[0]
    what = f"{style} architecture '{shorten(name, 100)}'"
    if chosen:
        raise ArchError(
            f"{what} may be {' or '.join(spec.name for spec in chosen)}, "
            "and nothing in the file decides; name it with --arch"
        )
    known = list(dict.fromkeys(n for names in called.values() for n in names.get(style, ())))
    near = get_close_matches(name, known, 3, cutoff=0.4) or known
    raise ArchError(
        f"{what} is not known; {'near' if near != known else 'known'} "
        f"names: {some_names(near)}; if it is one of {some_names(arch_names())} under another "
        "name, say so with --arch"
    )
