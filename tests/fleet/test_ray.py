"""The same rows from a Ray cluster of two nodes, also when a worker is killed or a node is lost.

Seen red: units that are not retried, a unit of a lost node given up, rows of a retried unit twice.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aprfmt.fleet.results import latest_rows, read_lines
from aprfmt.fleet.run import ScanRequest, scan
from aprfmt.fleet.tasks import ERROR
from aprfmt.fleet.workers import Limits
from tests.fleet.stores import folder, sparse
from tests.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
ray: Any = pytest.importorskip("ray", reason="NOT-RUN: no ray")
SMALL = Limits(seconds=120, memory=1 << 30)
FEW = ("layout", "encodings", "support", "values")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed in range(12):
        folder(root / f"m{seed}", seed)
    (root / "page.gguf").write_text("<!doctype html>")
    return root


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster()
    for _ in range(2):
        made.add_node(num_cpus=1, memory=2 << 30, object_store_memory=80 << 20)
    made.wait_for_nodes(PATIENCE)
    yield made
    ray.shutdown()
    made.shutdown()


def request(root: Path, out: Path, ray_at: str | None) -> ScanRequest:
    return ScanRequest((str(root),), out, FEW, 1, SMALL, ray=ray_at, families=False)


def plain(out: Path) -> list[tuple[str, str, str, str]]:
    return sorted(
        (row["model"], row["check"], row["outcome"], row["found"]) for row in latest_rows(out)
    )


def once(out: Path) -> bool:
    return set(Counter((row["identity"], row["check"]) for row, _ in read_lines(out)).values()) == {
        1
    }


def test_two_nodes_give_the_rows_of_this_machine(
    cluster: Any, models: Path, tmp_path: Path
) -> None:
    scan(request(models, tmp_path / "here.jsonl", None))
    scan(request(models, tmp_path / "there.jsonl", cluster.address))
    assert plain(tmp_path / "there.jsonl") == plain(tmp_path / "here.jsonl")
    assert once(tmp_path / "there.jsonl")
    assert sum(row[2] == ERROR for row in plain(tmp_path / "there.jsonl")) == 1


def test_no_worker_runs_a_python_file_of_the_working_folder(
    cluster: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts the folder in which a cluster is joined first in every worker's search path."""
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    mark.mkdir()
    for name in ("numpy", "aprfmt", "jinja2", "sitecustomize"):
        code = f"import os\nos.open({str(mark / name)!r}, os.O_WRONLY | os.O_CREAT)\n"
        (here / f"{name}.py").write_text(code)
    monkeypatch.chdir(here)
    report = scan(request(models, tmp_path / "r.jsonl", cluster.address))
    assert report.found["counts"]["PASS"] > 12
    assert not os.listdir(mark)


def test_a_worker_that_is_killed_and_a_node_that_is_lost_lose_nothing(
    cluster: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.jsonl"
    killed: list[int] = []
    lost = threading.Event()

    def progress(done: int, total: int) -> None:
        if done == 4:
            killed.extend(kill_a_worker())
        if done == 12 and not lost.is_set():
            lost.set()
            node = next(iter(cluster.worker_nodes))
            cluster.remove_node(node, allow_graceful=False)

    scan(request(models, out, cluster.address), progress)
    assert killed and lost.is_set() and once(out)
    rows = plain(out)
    assert len(rows) == 12 * (1 + len(FEW)) + 1
    assert [Path(row[0]).name for row in rows if row[2] == ERROR] == ["page.gguf"]


def kill_a_worker() -> list[int]:
    """Kill one Ray worker process of ours and return its number."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"ray::_unit" in words or words.startswith(b"ray::IDLE"):
                os.kill(int(entry.name), signal.SIGKILL)
                return [int(entry.name)]
    return []


def test_a_unit_that_takes_too_long_is_one_row_there_too(cluster: Any, tmp_path: Path) -> None:
    sparse(tmp_path / "endless.safetensors", 64 << 30)
    out = tmp_path / "r.jsonl"
    given = ScanRequest(
        (str(tmp_path),), out, FEW, 1, Limits(2.0, 1 << 30), ray=cluster.address, families=False
    )
    report = scan(given)
    assert report.found["counts"][ERROR] == 1 and once(out)


def test_an_address_where_no_cluster_is_is_refused(models: Path, tmp_path: Path) -> None:
    from tests.cli.run import aprfmt

    done = aprfmt("scan", models, "-o", tmp_path / "r.jsonl", "--ray", "127.0.0.1:1")
    assert done.code == 2 and "no Ray cluster answers" in done.err
