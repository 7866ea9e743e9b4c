"""What may import what, and what a start-up must not load."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# One process parses the product: each of these tests walks all of it.
pytestmark = pytest.mark.xdist_group("imports")

HEAVY = ("numpy", "torch", "cupy", "transformers", "numba", "gguf", "safetensors", "ml_dtypes")

# package -> prefixes of ours it must not import at module level or inside functions
FORBIDDEN = {
    "remote": ("aprfmt.tensors", "aprfmt.codecs", "aprfmt.arch", "aprfmt.model",
               "aprfmt.quantizing", "aprfmt.conversion", "aprfmt.compare", "aprfmt.cli",
               "aprfmt.inference", "aprfmt.tokenizer"),
    "base": ("aprfmt.remote", "aprfmt.tensors", "aprfmt.formats", "aprfmt.codecs", "aprfmt.arch",
             "aprfmt.model",
             "aprfmt.quantizing", "aprfmt.conversion", "aprfmt.compare", "aprfmt.cli",
             "aprfmt.inference", "aprfmt.tokenizer"),
    "tensors": ("aprfmt.model", "aprfmt.quantizing", "aprfmt.conversion", "aprfmt.compare",
                "aprfmt.cli", "aprfmt.inference", "aprfmt.tokenizer"),
    "model": ("aprfmt.quantizing", "aprfmt.conversion", "aprfmt.compare", "aprfmt.cli",
              "aprfmt.inference", "aprfmt.checks", "aprfmt.diagnosis"),
    "quantizing": ("aprfmt.conversion", "aprfmt.compare", "aprfmt.cli", "aprfmt.inference"),
    "formats": ("aprfmt.codecs", "aprfmt.arch", "aprfmt.model", "aprfmt.conversion",
                "aprfmt.compare", "aprfmt.cli", "aprfmt.inference", "aprfmt.tokenizer"),
    "codecs": ("aprfmt.formats", "aprfmt.arch", "aprfmt.model", "aprfmt.conversion",
               "aprfmt.compare", "aprfmt.cli", "aprfmt.inference", "aprfmt.tokenizer"),
    "arch": ("aprfmt.model", "aprfmt.conversion", "aprfmt.compare", "aprfmt.cli",
             "aprfmt.inference", "aprfmt.tokenizer"),
    "conversion": ("aprfmt.cli", "aprfmt.inference", "aprfmt.compare"),
    "measure": ("aprfmt.cli", "aprfmt.inference", "aprfmt.causes", "aprfmt.compare",
                "aprfmt.diagnosis"),
    "causes": ("aprfmt.cli", "aprfmt.compare", "aprfmt.diagnosis", "aprfmt.checks"),
    "causes/tensor": ("aprfmt.inference", "aprfmt.causes.forward"),
    "causes/tokenizer": ("aprfmt.inference", "aprfmt.causes.forward"),
    "compare": ("aprfmt.cli", "aprfmt.inference", "aprfmt.causes.forward"),
    "inference": ("aprfmt.cli", "aprfmt.causes", "aprfmt.compare", "aprfmt.diagnosis",
                  "aprfmt.checks"),
    "diagnosis": ("aprfmt.cli",),
    "checks": ("aprfmt.cli", "aprfmt.diagnosis"),
    "checks/file": ("aprfmt.cli", "aprfmt.inference", "aprfmt.compare",
                    "aprfmt.checks.gates", "aprfmt.diagnosis"),
    "tokenizer": ("aprfmt.cli", "aprfmt.inference", "aprfmt.compare"),
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """Return every module a file imports, wherever the statement stands."""
    return {name for name in edges(path, ()) if name.startswith("aprfmt")}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    bad = []
    for path in sorted((ROOT / "aprfmt" / package).resolve().rglob("*.py")):
        for module in imported(path):
            if module.startswith(FORBIDDEN[package]):
                bad.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not bad


# --- every module, imports inside functions and "module:name" strings included ------------------

# Tables whose rows name modules: such a row does not count as an import by the table's module.
TABLES = {
    "ARCHS": "aprfmt.arch", "CODECS": "aprfmt.codecs", "FORMATS": "aprfmt.formats",
    "BACKENDS": "aprfmt.inference.backends", "ENGINES": "aprfmt.inference.engines",
    "CHECKS": "aprfmt.checks.table", "COMMANDS": "aprfmt.cli.commands",
    "SITES": "aprfmt.remote.sites",
}  # fmt: skip
# Modules that may import by name: the loader of rows, the commands' table, optional GPU libraries.
BY_NAME = {
    "aprfmt.causes", "aprfmt.base.registry", "aprfmt.cli.main", "aprfmt.inference.fast.cuda.gemm",
    "aprfmt.inference.fast.cuda.loader",
}  # fmt: skip
_BARE = (ast.Name, ast.expr_context, ast.operator, ast.cmpop)  # nothing stands below them
_ROW = re.compile(r"(aprfmt(?:\.\w+)+):\w+")


@cache
def product() -> dict[str, Path]:
    """Return every module of the package by name."""
    found = {}
    for folder, name in (
        ("aprfmt", "aprfmt"),
        ("cli", "aprfmt.cli"),
        ("inference", "aprfmt.inference"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "aprfmt" and inner[0] in ("cli", "inference"):
                continue  # the links
            parts = inner[:-1] if inner[-1] == "__init__" else inner
            found[".".join((name, *parts))] = path
    return found


def edges(path: Path, modules: Collection[str], *, table: bool = False) -> set[str]:
    """Return the modules a file imports while it runs, imports inside functions included."""
    return edges_of(parsed(path), modules, table=table)


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file; the product's are asked for by several tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def edges_of(tree: ast.AST, modules: Collection[str], *, table: bool = False) -> set[str]:
    """Return the modules that a piece of code imports while it runs.

    `from package import module` is an edge to the module where `modules` has it. Strings of the
    form "module:name" are edges too, except in the file of a `table`. What stands under
    TYPE_CHECKING never runs.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not table:
            row = _ROW.fullmatch(node.value)
            found.update([row[1]] if row else [])
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _BARE):
                visit(child)

    visit(tree)
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Return what every module imports of ours."""
    modules = product()
    return {
        name: edges(path, modules.keys(), table=name in TABLES.values()) & modules.keys() - {name}
        for name, path in modules.items()
    }


def circles(of: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return every set of modules that reach each other, by peeling off what is in none."""
    left = {name: set(others) for name, others in of.items()}
    while True:
        ends = {name for name, others in left.items() if not others & left.keys()}
        starts = left.keys() - {other for others in left.values() for other in others}
        if not ends | starts:
            return [sorted(left)] if left else []
        left = {name: others for name, others in left.items() if name not in ends | starts}


def test_no_module_reaches_itself() -> None:
    found = graph()
    assert len(found) > 400 and sum(map(len, found.values())) > 1900  # none was missed
    assert not circles(found)


# Rooms that take one thing of a room below them in the page, when it is asked for.
LATER = {("remote", "formats"), ("model", "tokenizer")}


def test_the_page_shows_the_rooms_in_the_order_of_their_imports() -> None:
    """Seen red: the row of adapters above that of compare, one row taken out."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rooms = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.M)
    known = {*rooms, "__main__"}
    found = {
        (name.split(".")[1], other.split(".")[1])
        for name, others in graph().items()
        for other in others
        if name.count(".") and other.count(".")
    }
    places = {name: at for at, name in enumerate(rooms)}
    assert {name.split(".")[1] for name in product() if "." in name} == known
    up = {pair for pair in found if places.get(pair[1], -1) > places.get(pair[0], len(rooms))}
    assert up == LATER


def at_start(path: Path, modules: Collection[str]) -> tuple[set[str], set[str]]:
    """Return what a file of ours imports as it is loaded, and what it imports in functions."""
    whole = parsed(path)
    inner = [node for node in ast.walk(whole) if isinstance(node, ast.FunctionDef)]
    body = [node for node in whole.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]

    def named(nodes: list[ast.stmt]) -> set[str]:
        found = edges_of(ast.Module(body=nodes, type_ignores=[]), modules, table=True)
        return found & set(modules)

    return named(body), named([statement for node in inner for statement in node.body])


def test_an_import_waits_only_where_waiting_saves_something() -> None:
    """What a module loads anyway is imported at its top, once, and not again in each function."""
    modules = product()
    parts = {name: at_start(path, modules) for name, path in modules.items()}
    loaded: dict[str, set[str]] = {}
    for name in parts:
        seen, ahead = set[str](), [name]
        while ahead:
            one = ahead.pop()
            if one not in seen:
                seen.add(one)
                ahead += [*parts[one][0], *([one.rpartition(".")[0]] if "." in one else [])]
        loaded[name] = seen - {name}
    bad = {name: found for name, (_, late) in parts.items() if (found := late & loaded[name])}
    assert not bad


def test_a_circle_through_a_function_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from aprfmt.b import g\n")
    (tmp_path / "b.py").write_text("ROW = 'aprfmt.a:f'\n")
    (tmp_path / "c.py").write_text("import aprfmt.a\nif TYPE_CHECKING:\n    import aprfmt.d\n")
    names = {f"aprfmt.{name}": tmp_path / f"{name}.py" for name in "abc"}
    assert circles({name: edges(path, names) for name, path in names.items()}) == [
        ["aprfmt.a", "aprfmt.b"]
    ]
    assert edges(tmp_path / "c.py", names) == {"aprfmt.a"}
    tables = {name: edges(path, names, table=name == "aprfmt.b") for name, path in names.items()}
    assert not circles(tables)


def test_modules_are_named_by_strings_in_tables_only() -> None:
    modules = product()
    assert set(TABLES.values()) <= modules.keys() and modules.keys() >= BY_NAME
    by_name = {
        name
        for name, path in modules.items()
        if re.search(r"\bimport_module\b|\b__import__\b", path.read_text())
        and name != "aprfmt.base.template_scan"  # which looks for the word in templates
    }
    assert by_name == BY_NAME


FAST = "aprfmt.inference.fast"


def test_only_the_rows_of_backends_lead_to_what_is_only_fast() -> None:
    """Seen red: a constant of fast/encoded.py imported by numpy_backend.py, and for its types."""
    modules = product()
    wing = {name for name in modules if f"{name}.".startswith(f"{FAST}.")}
    assert len(wing) > 20
    assert not {name for name, others in graph().items() if name not in wing and others & wing}
    naming = {name for name in modules.keys() - wing if FAST in modules[name].read_text()}
    assert naming == {TABLES["BACKENDS"]}
    rows = edges(modules[TABLES["BACKENDS"]], modules) & wing
    opened = ("numpy_native", "torch_native", "cupy_backend", "placement")
    assert rows == {f"{FAST}.{name}" for name in opened}


def modules_after(code: str, *, whole: bool = False) -> set[str]:
    """Run code in a fresh interpreter and return the modules it loaded, `whole` names or parts."""
    name = "m" if whole else "m.split('.')[0]"
    script = f"{code}\nimport sys; print('\\n'.join(sorted({name} for m in sys.modules)))"
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
    # Only annotations would need them; an editable install may have pathlib already.
    assert not (loaded - modules_after("pass")) & {"pathlib", "aprfmt.base.protocols"}


# What only an address needs, of ours and of others.
NETWORK = ("obstore", "huggingface_hub", "fsspec", "http", "ssl", "socket")


@pytest.mark.parametrize("command", ["--help", "inspect"])
def test_a_local_file_imports_nothing_of_the_network(command: str, demo_model: Path) -> None:
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main([{command!r}, {str(demo_model)!r}])\n"
        "    except SystemExit as stop: assert not stop.code, stop.code"
    )
    assert not modules_after(code) & set(NETWORK)


@pytest.mark.parametrize("command", ["inspect", "tensors"])
def test_listing_imports_nothing_heavy(command: str, demo_model: Path) -> None:
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main([{command!r}, {str(demo_model)!r}])\n"
        "    except SystemExit as stop: assert stop.code == 0, stop.code"
    )
    assert not modules_after(code) & {*HEAVY, "rich", "tokenizers", "jinja2"}


def test_inspect_imports_nothing_that_writes_compares_or_draws(demo_model: Path) -> None:
    """Its processor time is mostly imports. Seen red: `shown` asked of aprfmt.compare."""
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main(['inspect', {str(demo_model)!r}])\n"
        "    except SystemExit as stop: assert not stop.code, stop.code"
    )
    loaded = modules_after(code, whole=True)
    assert {"aprfmt.arch.qwen2", "aprfmt.formats.cleanup"} <= loaded
    unused = (
        "aprfmt.compare",
        "aprfmt.measure",
        "aprfmt.cli.html_page",
        "aprfmt.formats.atomic",
        "aprfmt.arch.llama",
    )
    assert not loaded & {*unused}


@pytest.mark.parametrize("command", ["hash", "convert", "diff"])
def test_a_plain_file_loads_what_reads_it_alone(
    command: str, demo_model: Path, tmp_path: Path
) -> None:
    """`diff` of equal models looks for no cause, and decodes nothing.

    Seen red: `hash` with the reader of APR at the top of its package; `diff` that asked equal
    models how one was made from the other, and with `compare_pair` in measure.tensors.
    """
    second = {"convert": [str(tmp_path / "out.safetensors")], "diff": [str(demo_model)]}
    args = [command, str(demo_model), *second.get(command, [])]
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main({args!r})\n"
        "    except SystemExit as stop: assert not stop.code, stop.code"
    )
    loaded = modules_after(code, whole=True)
    others = {"aprfmt.formats.apr.parse", "aprfmt.formats.gguf.parse", "aprfmt.checks"}
    dear = {"aprfmt.codecs.repacks", "aprfmt.codecs.writers", "aprfmt.conversion.estimate"}
    causes = {"aprfmt.causes.tensor", "aprfmt.measure.tensors", "aprfmt.tokenizer.template"}
    causes |= {"aprfmt.causes.contradicted_flags", "aprfmt.causes.packing_files"}
    if command == "diff":
        causes |= {"aprfmt.measure.numbers", "aprfmt.measure.encoding_noise"}
        causes |= {"aprfmt.model.wrong_size", "aprfmt.model.adapter_parts"}
        causes |= {"aprfmt.model.config_paths", "aprfmt.base.inner_keys"}
        causes |= {"aprfmt.formats.journal", "aprfmt.cli.shell_completion"}
        causes |= {"aprfmt.compare.repairs", "aprfmt.measure.findings", "aprfmt.measure.proofs"}
        causes |= {"aprfmt.measure.named_causes", "aprfmt.measure.item_repairs"}
        causes |= {
            "aprfmt.model.relation_search",
            "aprfmt.model.exchanged_axes",
            "aprfmt.model.convolution_kernels",
        }
        causes |= {"aprfmt.model.unsupported_packing"}
        causes |= {"aprfmt.arch.draft_head", "aprfmt.arch.carried_hyperparameters"}
        causes |= {"aprfmt.formats.foreign_formats", "aprfmt.cli.html_page"}
        causes |= {"aprfmt.causes", "aprfmt.tokenizer.engine_defaults", "aprfmt.model.towers"}
        causes |= {"aprfmt.formats.apr", "aprfmt.formats.gguf", "aprfmt.formats.shard_set"}
        causes |= {"aprfmt.arch.mlx_layout", "aprfmt.arch.layer_kinds", "aprfmt.model.renames"}
        causes |= {"aprfmt.codecs", "aprfmt.tensors.restoration", "aprfmt.model.completeness"}
        causes |= {"aprfmt.formats.unsupported_encodings", "aprfmt.base.object_repr"}
    assert not loaded & {*others, *dear, *causes, "importlib.metadata"}


def test_parity_loads_nothing_of_diagnosis(demo_model: Path) -> None:
    """Runs that agree are not replayed. Seen red: token ids chosen by diagnosis.prompt."""
    args = ["parity", str(demo_model), "--between", "numpy", "numpy::float64"]
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main({args!r})\n"
        "    except SystemExit as stop: assert not stop.code, stop.code"
    )
    loaded = modules_after(code, whole=True)
    assert "aprfmt.inference.parity.run_comparison" in loaded
    unasked = {"aprfmt.cli.trace.page", "aprfmt.inference.parity.calibrate"}
    unasked |= {"aprfmt.inference.replay.shadow", "aprfmt.inference.parity.operations"}
    unasked |= {"aprfmt.inference.engines.record_collector", "aprfmt.causes.contradicted_flags"}
    unasked |= {f"aprfmt.inference.{name}" for name in ("moe", "altup", "delta_net", "indexer")}
    unasked |= {"aprfmt.codecs.bnb4", "aprfmt.codecs.scale_checks"}
    assert not loaded & {*unasked, "aprfmt.formats.journal", "aprfmt.inference.draft"}
    assert not [name for name in loaded if name.startswith("aprfmt.diagnosis")]


def test_diagnose_of_equal_models_loads_no_dumps_and_no_causes_of_values(
    demo_model: Path, tmp_path: Path
) -> None:
    """What reads runs and tells causes is loaded by a run and by values that differ.

    Seen red: `batch_sequences` at the top of the order of a diagnosis.
    """
    copy = shutil.copytree(demo_model, tmp_path / "copy")
    args = ["diagnose", str(demo_model), str(copy)]
    code = (
        "import io, contextlib\nfrom aprfmt.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main({args!r})\n"
        "    except SystemExit as stop: assert not stop.code, stop.code"
    )
    loaded = modules_after(code, whole=True)
    assert "aprfmt.diagnosis.model_pair" in loaded
    unasked = {f"aprfmt.diagnosis.{name}" for name in ("batch_sequences", "forward", "packing")}
    unasked |= {"aprfmt.inference.engines.dumps", "aprfmt.causes.tensor.derived_weights"}
    unasked |= {f"aprfmt.diagnosis.{name}" for name in ("trace_pair", "paired_pass", "probes")}
    unasked |= {f"aprfmt.inference.{name}" for name in ("forward", "session", "trace", "weights")}
    unasked |= {"aprfmt.causes.forward", "aprfmt.causes.tokenizer", "aprfmt.tokenizer.base"}
    unasked |= {"aprfmt.tokenizer.carriers", "aprfmt.codecs.dialects", "aprfmt.inference.moe"}
    assert not loaded & unasked


def test_the_child_that_scans_templates_loads_nothing_else_of_ours() -> None:
    """`inspect` waits for it. Seen red: the scan in a module of aprfmt.tokenizer."""
    found = imported(ROOT / "aprfmt" / "tokenizer" / "render_child.py")
    loaded = modules_after("\n".join(f"import {name}" for name in found), whole=True)
    ours = {name for name in loaded if name.startswith("aprfmt")}
    assert ours == {
        "aprfmt", "aprfmt.base", "aprfmt.base.sequences", "aprfmt.base.version",
        "aprfmt.base.template_scan", "aprfmt.base.resource_limits",
    }  # fmt: skip
