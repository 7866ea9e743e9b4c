"""What may import what, and what a start-up must not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("numpy", "torch", "cupy", "transformers", "numba", "gguf", "safetensors", "ml_dtypes")

# package -> prefixes of ours it must not import at module level or inside functions
FORBIDDEN = {
    "formats": ("aprfmt.codecs", "aprfmt.arch", "aprfmt.model", "aprfmt.conversion",
                "aprfmt.compare", "aprfmt.cli", "aprfmt.inference", "aprfmt.tokenizer"),
    "codecs": ("aprfmt.formats", "aprfmt.arch", "aprfmt.model", "aprfmt.conversion",
               "aprfmt.compare", "aprfmt.cli", "aprfmt.inference", "aprfmt.tokenizer"),
    "arch": ("aprfmt.model", "aprfmt.conversion", "aprfmt.compare", "aprfmt.cli",
             "aprfmt.inference", "aprfmt.tokenizer"),
    "conversion": ("aprfmt.cli", "aprfmt.inference", "aprfmt.compare"),
    "compare": ("aprfmt.cli", "aprfmt.inference"),
    "diagnosis": ("aprfmt.cli",),
    "qa": ("aprfmt.cli", "aprfmt.diagnosis"),
    "tokenizer": ("aprfmt.cli", "aprfmt.inference", "aprfmt.compare"),
    "validation": ("aprfmt.cli", "aprfmt.inference", "aprfmt.compare", "aprfmt.qa",
                   "aprfmt.diagnosis"),
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """Return every module a file imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    bad = []
    for path in sorted((ROOT / "aprfmt" / package).rglob("*.py")):
        for module in imported(path):
            if module.startswith(FORBIDDEN[package]):
                bad.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not bad


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level modules it loaded."""
    script = f"{code}\nimport sys; print('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    assert not modules_after("import aprfmt") & {*HEAVY, "rich", "click", "tokenizers", "jinja2"}


def test_help_imports_click_alone() -> None:
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    try: main(['--help'])\n    except SystemExit: pass"
    )
    loaded = modules_after(code)
    assert "click" in loaded
    assert not loaded & {*HEAVY, "rich", "tokenizers", "jinja2"}


@pytest.mark.parametrize("command", ["inspect", "tensors"])
def test_listing_imports_nothing_heavy(command: str, demo_model: Path) -> None:
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main([{command!r}, {str(demo_model)!r}])\n"
        "    except SystemExit as stop: assert stop.code == 0, stop.code"
    )
    assert not modules_after(code) & {*HEAVY, "rich", "tokenizers", "jinja2"}
