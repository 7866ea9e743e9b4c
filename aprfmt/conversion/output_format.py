"""Find the format that a conversion writes: by option, by the output's name, or the source's."""

from pathlib import Path

from aprfmt.errors import UsageError
from aprfmt.formats import FORMATS, FormatSpec, writable_formats
from aprfmt.model import Model


class NoFormatError(UsageError):
    """Raised where neither the output's name nor an option gives its format."""


def target_format(path: Path, to: str | None) -> FormatSpec:
    """Return the format to write: `to`, else the one of the path's extension.

    Raises UsageError if they contradict, and NoFormatError where neither names a format.
    """
    if to is not None:
        to = to.lower()
        if to not in FORMATS:
            raise UsageError(
                f"--to {to}: is no format here; expected {', '.join(writable_formats())}"
            )
    suffix = path.suffix.lower()
    found = FORMATS.first(lambda spec: suffix in spec.extensions)
    if to is None and found is None:
        known = sorted(
            extension for name in writable_formats() for extension in FORMATS[name].extensions
        )
        raise NoFormatError(f"{path}: its extension names no format; expected {', '.join(known)}")
    if to is not None and found is not None and to != found:
        raise UsageError(f"{path}: the extension says {found}; expected {to}, make them agree")
    spec = FORMATS[to or found or ""]
    if not spec.writes:
        raise UsageError(
            f"{path if found else to}: files of {spec.name} are read here, not written; write one "
            f"of {', '.join(writable_formats())}"
        )
    return spec


def has_extension(path: Path) -> bool:
    """Return whether a name has an extension; the `.5B` of `Qwen2.5-0.5B` is none."""
    return len(path.suffix) > 1 and not path.suffix[1].isdecimal()


def resolve_format(model: Model, dst: Path, to: str | None) -> FormatSpec:
    """Return the format to write: `to`, else by the extension of `dst`.

    If `dst` is a folder, it is the source's format, or, where that is only read, the format whose
    key names it uses. Raises UsageError for a format that is not written, or if `to` and the
    extension contradict.
    """
    if not has_extension(dst) and (to is not None or dst.is_dir() or model.folder is not None):
        own = FORMATS[model.format]
        return target_format(Path(), to) if to else own if own.writes else FORMATS[own.keys_like]
    return target_format(dst, to)
