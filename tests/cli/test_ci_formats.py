"""SARIF by OASIS's own schema, JUnit by its elements, and both by the exit code of the command.

JUnit has no official schema. The elements and attributes allowed here are those that Jenkins'
junit-10.xsd and pytest's own report know. Seen red: failures written as
skipped.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.cli.ci_reports import ReportCase, append_verdict_case, junit_xml, sarif_log
from aprfmt.cli.pre_commit import run_hook
from aprfmt.model.hf_folder import INDEX, TEXT_FILES, WEIGHTS
from tests.cli.run import aprfmt

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = ROOT / "tests" / "schemas" / "official" / "sarif-schema-2.1.0.json"
ALLOWED = {
    "testsuites": set(),
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testcase": {"name", "classname", "time"},
    "failure": {"message"},
    "error": {"message"},
    "skipped": {"message"},
    "system-out": set(),
}


def sarif_faults(found: object) -> list[str]:
    """Return what the official schema has against a log."""
    jsonschema = pytest.importorskip("jsonschema", reason="NOT-RUN: jsonschema is not installed")
    checker = jsonschema.Draft4Validator(json.loads(OFFICIAL.read_text()))
    return [error.message for error in checker.iter_errors(found)]


def junit_counts(text: str) -> dict[str, int]:
    """Return the failures, errors, skips and tests that a report holds, held to what it states."""
    root = ElementTree.fromstring(text)
    (suite,) = root
    for element in root.iter():
        assert set(element.attrib) <= ALLOWED[element.tag], element.tag
    found = {
        name: len(list(suite.iter(tag)))
        for name, tag in (
            ("tests", "testcase"), ("failures", "failure"), ("errors", "error"),
            ("skipped", "skipped"),
        )
    }  # fmt: skip
    assert {name: int(suite.attrib[name]) for name in found} == found
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("models")
    assert aprfmt("convert", demo_model, folder / "good.gguf", "--quiet").code == 0
    whole = (folder / "good.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    changed = bytearray(whole)
    changed[-3000:-2000] = b"\xff" * 1000  # NaN
    (folder / "changed.gguf").write_bytes(changed)
    return folder


RUNS: list[tuple[str, Callable[[Path], list[object]], int]] = [
    ("validate", lambda at: [at / "good.gguf"], 0),
    ("validate", lambda at: [at / "changed.gguf"], 1),
    ("validate", lambda at: [at / "absent.gguf"], 2),
    ("qa", lambda at: [at / "good.gguf", "--only", "tensor-contract"], 0),
    ("qa", lambda at: [at / "cut.gguf", "--only", "tensor-contract"], 2),
    ("diff", lambda at: [at / "good.gguf", at / "good.gguf"], 0),
    ("diff", lambda at: [at / "good.gguf", at / "changed.gguf"], 1),
    ("diff", lambda at: [at / "good.gguf", at / "cut.gguf"], 2),
    ("validate", lambda at: [at / "cut.gguf"], 1),
    ("scan", lambda at: [at / "cut.gguf", "--checks", "layout", "-o", at / "c.jsonl"], 1),
    ("scan", lambda at: [at / "good.gguf", "--checks", "layout", "-o", at / "a.jsonl"], 0),
    ("scan", lambda at: [at, "--checks", "values", "--jobs", "1", "-o", at / "b.jsonl"], 1),
]


@pytest.mark.parametrize(("command", "asked", "code"), RUNS, ids=lambda v: v if v else None)
def test_both_say_what_the_exit_code_says(
    command: str, asked: Callable[[Path], list[object]], code: int, models: Path
) -> None:
    done = aprfmt(command, *asked(models), "--format", "sarif")
    assert done.code == code, done.err
    log = json.loads(done.out)
    assert not sarif_faults(log)
    (run,) = log["runs"]
    levels = [one["level"] for one in run["results"]]
    assert ("error" in levels) == (code != 0)
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert all(rules[one["ruleIndex"]] == one["ruleId"] for one in run["results"])
    done = aprfmt(command, *asked(models), "--format", "junit")
    assert done.code == code
    counts = junit_counts(done.out)
    assert counts["tests"] and bool(counts["failures"] + counts["errors"]) == (code != 0)
    assert code != 1 or counts["failures"]
    assert "bug: " not in done.out
    assert done.err.count("aprfmt: ") == (code != 0), "the log of a job says the first failure"
    assert code != 2 or counts["errors"]


def test_a_changed_tensor_is_named_by_each(models: Path) -> None:
    pair = (models / "good.gguf", models / "changed.gguf")
    apart = [
        row["name_b"]
        for row in aprfmt("diff", *pair, "--json").json["tensors"]
        if not row["verdict"].startswith("SAME")
    ]
    assert apart
    log = json.loads(aprfmt("diff", *pair, "--format", "sarif").out)
    places = [
        where["fullyQualifiedName"]
        for one in log["runs"][0]["results"]
        for where in one["locations"][0].get("logicalLocations", [])
    ]
    assert places == apart
    root = ElementTree.fromstring(aprfmt("diff", *pair, "--format", "junit").out)
    failed = [row.attrib["name"] for row in root.iter("testcase") if len(row)]
    assert failed == [*(f"tensor: {name}" for name in apart), "verdict"]


def test_format_json_is_json(models: Path) -> None:
    for file in ("good.gguf", "absent.gguf"):
        asked = aprfmt("validate", models / file, "--format", "json")
        assert asked.json == aprfmt("validate", models / file, "--json").json


LEVELS = st.sampled_from(["pass", "warning", "fail", "error", "not run"])
CASES = st.lists(
    st.builds(ReportCase, st.text(), st.text(min_size=1), LEVELS, st.text(), st.text())
)


@given(CASES, st.sampled_from([0, 1, 2]))
def test_any_text_of_a_file_can_be_written(cases: list[ReportCase], code: int) -> None:
    every = append_verdict_case(cases, code, "file")
    log = json.loads(json.dumps(sarif_log("validate", every, code)))
    assert not sarif_faults(log)
    told = sum(one.level in ("fail", "error", "warning") for one in every)
    assert len(log["runs"][0]["results"]) == told
    counts = junit_counts(junit_xml("validate", every))
    assert counts["tests"] == len(cases) + 1
    assert counts["skipped"] == sum(one.level == "not run" for one in cases)


def test_a_warning_fails_a_gate_only_where_asked(models: Path) -> None:
    """A missing tensor that is accepted is a warning of its check."""
    broken = models / "broken.gguf"
    done = aprfmt("convert", models / "good.gguf", broken, "--drop", "blk.3.attn_q.bias",
                  "--allow-missing", "blk.3.attn_q.bias", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    asked = [broken, "--only", "tensor-contract", "--allow-missing", "blk.3.attn_q.bias"]
    assert aprfmt("qa", *asked).code == 0
    assert aprfmt("qa", *asked, "--fail-on", "warning").code == 1


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_hooks_judge_every_file_of_a_commit(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, changed = ((models / f"{name}.gguf").read_bytes() for name in ("good", "changed"))
    (tmp_path / "a.gguf").write_bytes(good)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.gguf")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.gguf").write_bytes(good)
    assert run_hook(["validate", "a.gguf", "new.gguf"]) == 0
    assert run_hook(["diff", "a.gguf", "new.gguf"]) == 0
    (tmp_path / "a.gguf").write_bytes(changed)
    assert run_hook(["validate", "a.gguf", "new.gguf"]) == 1
    assert run_hook(["diff", "--base", "HEAD", "a.gguf", "new.gguf"]) == 1
    assert run_hook(["diff", "--base", "nowhere", "a.gguf"]) == 2


def test_the_hook_compares_whole_models_with_their_configuration(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seen red: a shard alone against a folder, a changed config.json, a `next:` without its A."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    shutil.copytree(demo_model, "one", ignore=shutil.ignore_patterns("__pycache__"))
    assert aprfmt("split", demo_model, "three", "--max-shard-size", "2M", "--quiet").code == 0
    Path("web").mkdir()
    Path("web/config.json").write_text("{}")  # another program's
    files = [path.as_posix() for path in Path().glob("[a-z]*/*")]
    assert run_hook(["diff", *files]) == 0  # no commit yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    assert run_hook(["validate", *files]) == run_hook(["diff", *files]) == 0
    assert not list(Path(".git/aprfmt").glob("*/*"))
    capsys.readouterr()
    config = Path("three/config.json")
    config.write_text(config.read_text().replace("1000000.0", "10000.0"))
    assert run_hook(["diff", *files]) == 1
    said = capsys.readouterr().out
    assert said.count("$ aprfmt diff") == 2 and "rope_theta" in said
    (step,) = re.findall(r"^next: aprfmt (.+)$", said, re.M)
    assert aprfmt(*shlex.split(step), "--quiet").code in (0, 1)
    shard = Path("three/model-00002-of-00003.safetensors")
    data = bytearray(shard.read_bytes())
    shard.write_bytes(data[:-100] + bytes([data[-100] ^ 64]) + data[-99:])
    assert run_hook(["diff", str(shard)]) == 1
    (step,) = re.findall(r"^next: aprfmt (.+)$", capsys.readouterr().out, re.M)
    assert aprfmt(*shlex.split(step), "--quiet").code == 0, step  # a folder, not an index
    assert aprfmt("diff", ".git/aprfmt/0/three", "three-fixed").code == 0
    shard.write_bytes(data)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "two")
    assert run_hook(["diff", "three/config.json"]) == 0  # of one shard set, and once
    assert run_hook(["diff", "--base", "HEAD~1", "three/config.json"]) == 1


def test_the_hooks_are_called_for_every_file_of_a_model() -> None:
    yaml = pytest.importorskip("yaml", reason="NOT-RUN: PyYAML is not installed")
    texts = [name for name in TEXT_FILES if not name.startswith(("LICENSE", "NOTICE", "USE_"))]
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert texts and hooks
    for hook in hooks:
        for name in (*texts, INDEX, WEIGHTS, "model-00002-of-00003.safetensors", "x.gguf", "x.apr"):
            assert re.search(hook["files"], f"models/a/{name}") and re.search(hook["files"], name)
        for name in ("package.json", "my_config.json", "a.py", "x.gguf.txt", "README.md"):
            assert not re.search(hook["files"], f"models/{name}"), name


@pytest.mark.parametrize(
    ("kind", "file"), [("github-actions", "action.yml"), ("github-workflows", "ci.yml")]
)
def test_the_action_fits_its_schema(kind: str, file: str) -> None:
    pytest.importorskip("check_jsonschema", reason="NOT-RUN: check-jsonschema is not installed")
    path = ROOT / file if kind == "github-actions" else ROOT / ".github" / "workflows" / file
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_of_the_action_runs(models: Path, tmp_path: Path) -> None:
    """Its last step, as the forge runs it, with a name that a shell would split."""
    yaml = pytest.importorskip("yaml", reason="NOT-RUN: PyYAML is not installed")
    step = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][-1]
    (tmp_path / "a b.gguf").write_bytes((models / "good.gguf").read_bytes())
    tool = tmp_path / "aprfmt"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m aprfmt "$@"\n')
    tool.chmod(0o755)
    given = {
        "COMMAND": "validate",
        "MODELS": "a b.gguf\n",
        "OPTIONS": "--strict",
        "FORMAT": "sarif",
        "OUTPUT": "r.sarif",
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    assert set(step["env"]) == set(given) - {"PATH"}
    run = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(run, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not sarif_faults(json.loads((tmp_path / "r.sarif").read_text()))


def test_the_hooks_name_what_is_here() -> None:
    yaml = pytest.importorskip("yaml", reason="NOT-RUN: PyYAML is not installed")
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in hooks] == ["aprfmt-validate", "aprfmt-diff"]
    for hook in hooks:
        assert hook["entry"] == f"python -m aprfmt.cli.pre_commit {hook['id'].split('-')[1]}"


@pytest.mark.parametrize("cases", [[], [ReportCase("shapes", "m\u00f6del.gguf", "fail", "wrong")]])
def test_a_text_states_no_encoding_of_bytes(cases: list[ReportCase]) -> None:
    """A declaration in a text names the locale's encoding: lxml refuses it, and bytes may differ.

    Bytes without one are UTF-8, as they are written.
    """
    text = junit_xml("diff", cases)
    assert text.startswith("<testsuites>")
    assert [
        row.get("classname") for row in ElementTree.fromstring(text.encode()).iter("testcase")
    ] == [case.file for case in cases]
