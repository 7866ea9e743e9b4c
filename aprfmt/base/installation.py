"""Find how this package was installed, and so the command that adds an extra to it.

No package index has aprfmt, so a message may not say that pip finds it by its name.
"""

import json
import shlex
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit

UNKNOWN = "PATH"  # stands for the wheel or the clone where nothing says which it was


def install_command(extra: str = "") -> str:
    """Return the shell command that installs aprfmt again from where it came, with an extra.

    `extra` is a name of pyproject's optional dependencies; "" installs the base requirements. The
    source in the command is what pip recorded of the installation, else the clone that the package
    is in. If neither is known it is the word `PATH`, for the user to replace by the wheel, the
    source archive or the clone.
    """
    option, source = installed_from()
    named = f"[{extra}]" if extra else ""
    where = source.replace("aprfmt @", f"aprfmt{named} @") if " @ " in source else source + named
    return f"pip install {option}{shlex.quote(where)}"


@cache
def installed_from() -> tuple[str, str]:
    """Return (pip's option, source of the installation).

    The option is "-e " or "". The source is a path, or a requirement with an address.
    """
    try:
        recorded = distribution("aprfmt").read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    found = recorded_source(recorded) if recorded else None
    if found is not None:
        return found
    clone = Path(__file__).resolve().parents[2]
    return ("-e ", str(clone)) if (clone / "pyproject.toml").is_file() else ("", UNKNOWN)


def recorded_source(text: str) -> tuple[str, str] | None:
    """Return (pip's option, source) of a direct_url.json; None if its local path no longer exists.

    https://packaging.python.org/en/latest/specifications/direct-url-data-structure/
    """
    said = json.loads(text)
    address = urlsplit(said["url"])
    if address.scheme == "file":
        from urllib.request import url2pathname

        path = url2pathname(address.path)
        editable = said.get("dir_info", {}).get("editable", False)
        return ("-e " if editable else "", path) if Path(path).exists() else None
    version = said.get("vcs_info")
    if version is not None:
        return "", f"aprfmt @ {version['vcs']}+{said['url']}@{version['commit_id']}"
    return "", f"aprfmt @ {said['url']}"
