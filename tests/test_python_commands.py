"""The Python functions of commands, each by one behaviour; and rows as data frames."""

import hashlib
import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.base.data_frames import columns_of
from aprfmt.checks.gates.model_under_test import QaRequest
from aprfmt.checks.gates.running import QaOptions
from aprfmt.conversion import Options
from aprfmt.conversion.options import ConvertOptions
from aprfmt.errors import AprfmtError, BackendUnavailableError, UsageError
from aprfmt.inference import api
from aprfmt.inference.api import TraceOptions
from aprfmt.inference.parity.request import ParityRequest

OPENING = "It is a truth universally acknowledged"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    path: Path = tmp_path_factory.mktemp("commands") / "demo.gguf"
    aprfmt.convert(demo_model, path)
    return path


def test_run_generates_what_the_model_recites(demo_model: Path) -> None:
    found = aprfmt.run(demo_model, prompt=OPENING, max_tokens=8)
    assert found.text == ", that a single man in possession"[: len(found.text or "")]
    assert len(found.ids) == 8 and found.stop == "max_tokens" and found.stop_token is None
    assert found.to_json()["ids"] == found.ids
    with pytest.raises(UsageError, match="one of prompt, ids and chat"):
        aprfmt.run(demo_model, prompt=OPENING, ids=[1])


def test_run_ends_at_the_stop_token(demo_model: Path) -> None:
    found = aprfmt.run(demo_model, chat="What is 2+2?", max_tokens=64)
    assert found.stop == "stop_token" and found.stop_token is not None
    assert found.stop_token not in found.ids and found.text


def test_eval_is_lower_on_the_text_the_model_knows(demo_model: Path, gguf: Path) -> None:
    known = OPENING + ", that a single man in possession of a good fortune"
    found = aprfmt.eval(demo_model, text=known, against=gguf)
    assert found.nats < aprfmt.eval(demo_model, ids=[900, 41, 7, 1200, 33, 650]).nats
    assert found.perplexity == pytest.approx(math.exp(found.nats))
    assert found.divergence is not None and found.divergence.kl < 1e-6
    assert found.exit_code == found.to_json()["pronounced"]["exit"] == 1  # learned by heart
    other = aprfmt.eval(demo_model, text="She had not expected so quick an answer.")
    assert other.exit_code == 0 and found.nats < other.nats
    with pytest.raises(UsageError, match="nothing to evaluate"):
        aprfmt.eval(demo_model)


def test_qa_runs_the_gates_it_is_asked_for(demo_model: Path) -> None:
    report = aprfmt.qa(demo_model, only=["metadata"])
    assert report.gate("metadata").outcome == "PASS" and report.exit_code == 0


def test_parity_of_equal_runs_is_no_bug(demo_model: Path) -> None:
    found = aprfmt.parity(demo_model, ["cpu", "numpy:cpu:float64"], ids=[5, 80, 300])
    assert found.verdict == "precision" and found.exit_code == 0
    with pytest.raises(UsageError, match="at least two"):
        aprfmt.parity(demo_model, ["cpu"], ids=[5])


def test_the_arguments_of_parity_go_into_its_request(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a text the ids are long ones; of a text they are its own, and both are told."""
    from aprfmt.inference import probe_ids
    from aprfmt.inference.parity import run_comparison

    def compared(model: Any, choices: Any, request: Any, base: Any) -> Any:
        assert [str(each) for each in choices] == ["numpy:cpu:float32", "numpy:cpu:float64"]
        return request, base and base.path

    monkeypatch.setattr(run_comparison, "compare_choices", compared)
    monkeypatch.setattr(probe_ids, "choose_ids", lambda found, long: (len(found), long))
    runs = ["numpy", "numpy:cpu:float64"]
    given: Any = aprfmt.parity(demo_model, runs)
    assert given == (ParityRequest((1, True)), None)
    more: Any = {"arbiter": True, "threads": 3, "memory": 5, "deterministic": True}
    given = aprfmt.parity(demo_model, runs, prompt="a b", base=demo_model, **more)
    request, base = given
    assert request == ParityRequest(request.ids, text="a b", **more)
    assert len(request.ids) > 1 and str(base).startswith(str(demo_model))
    for name in more:
        given = aprfmt.parity(demo_model, runs, ids=[7], **{name: more[name]})
        assert given[0] == ParityRequest((7,), **{name: more[name]})


def test_scan_writes_rows_and_reads_them(gguf: Path, tmp_path: Path) -> None:
    found = aprfmt.scan(gguf, tmp_path / "rows.jsonl", checks=["layout"])
    assert found.exit_code == 0
    rows = found.table_rows()
    assert {row["check"] for row in rows} >= {"layout"} and len(rows) == found.asked


def test_hash_is_that_of_the_stored_bytes(demo_model: Path, gguf: Path) -> None:
    found = aprfmt.hash(demo_model, tensors=["norm"])
    with aprfmt.open(demo_model) as model:
        raw = hashlib.sha256(model["model.norm.weight"].raw()).hexdigest()
    row = next(row for row in found.tensors if "model.norm.weight" in row["names"])
    assert row["raw"] == [raw] and not found.damage
    same = {row["key"]: row["decoded"] for row in aprfmt.hash(gguf).tensors}
    assert row["decoded"] == same[row["key"]]


def test_repair_takes_what_is_missing(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[:-1000])
    found = aprfmt.repair(broken, gguf, tmp_path / "mended.gguf")
    assert (tmp_path / "mended.gguf").read_bytes() == whole
    assert found.taken == 1000 and found.to_json()["taken_bytes"] == 1000


@pytest.mark.parametrize("name", ["Jane", "10000", "@nothing", '"quoted"', "true"])
def test_set_writes_a_value_as_it_is(gguf: Path, tmp_path: Path, name: str) -> None:
    aprfmt.set(gguf, tmp_path / "n.gguf", {"general.name": name, "qwen2.rope.freq_base": 5e5})
    with aprfmt.open(tmp_path / "n.gguf") as model:
        assert model.metadata["general.name"] == name
        assert model.metadata["qwen2.rope.freq_base"] == 5e5


def test_set_of_a_folder_changes_its_configuration(demo_model: Path, tmp_path: Path) -> None:
    aprfmt.set(demo_model, tmp_path / "copy", {"rms_norm_eps": 1e-5})
    with aprfmt.open(tmp_path / "copy") as model:
        assert model.hyper["norm_eps"] == 1e-5


def test_no_module_takes_a_functions_place() -> None:
    """A package of the name would replace the function once somebody imports it."""
    for name in aprfmt.__all__:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"aprfmt.{name}")


def test_typed_options_are_those_that_are_taken() -> None:
    def names(kind: Any) -> set[str]:
        return {*kind.__annotations__}

    def parameters(function: Any) -> set[str]:
        return {*inspect.signature(function).parameters}

    assert names(ConvertOptions) == set(Options.__dataclass_fields__)
    assert names(TraceOptions) == parameters(api.trace) - {"model"}
    fields = set(QaRequest.__dataclass_fields__) - {"path"}
    assert names(QaOptions) == fields | {"only", "skip", "min_run"}


FRAMES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "tensors": (lambda model, gguf: aprfmt.open(model), "name"),
    "points": (lambda model, gguf: aprfmt.trace(model, ids=[1, 2], points=["logits"]), "key"),
    "causes": (lambda model, gguf: aprfmt.diagnose(model, f"{model}-other"), "cause"),
    "compared tensors": (lambda model, gguf: aprfmt.diff(model, gguf), "name_a"),
    "hashes": (lambda model, gguf: aprfmt.hash(gguf, raw_only=True), "key"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_rows_are_tables_where_the_library_is(
    name: str, demo_model: Path, gguf: Path, tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="NOT-RUN: pyarrow is not installed")
    pytest.importorskip("pandas", reason="NOT-RUN: pandas is not installed")
    make, key = FRAMES[name]
    if name == "causes":
        aprfmt.set(demo_model, tmp_path / "m-other", {"rope_theta": 10000.0})
        (tmp_path / "m").symlink_to(demo_model)
        found = make(tmp_path / "m", gguf)
        assert [row["cause"] for row in found.table_rows()] == ["rope_theta"]
    else:
        found = make(demo_model, gguf)
    rows = found.table_rows()
    assert rows
    table, frame = found.to_arrow(), found.to_pandas()
    assert isinstance(table, pyarrow.Table) and table.num_rows == len(frame) == len(rows)
    expected = columns_of(rows)
    assert table.to_pydict() == expected
    assert list(frame.columns) == list(expected) and list(frame[key]) == expected[key]
    if name == "tensors":
        found.close()


def test_without_the_library_one_line_says_what_to_install(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with aprfmt.open(demo_model) as model:
        for call, library in ((model.to_arrow, "pyarrow"), (model.to_pandas, "pandas")):
            with pytest.raises(BackendUnavailableError, match=f"pip install {library}"):
                call()


def test_one_text_or_path_is_one_value(demo_model: Path, gguf: Path, tmp_path: Path) -> None:
    """Seen red: the letters of a text read as files, as patterns and as keys."""
    with pytest.raises(AprfmtError, match=r"missing\.npz: cannot be opened"):
        aprfmt.step(demo_model, grads=str(tmp_path / "missing.npz"))
    name = "model.norm.weight"
    assert aprfmt.hash(demo_model, tensors=name).to_json() == (
        aprfmt.hash(demo_model, tensors=[name]).to_json()
    )
    assert len(aprfmt.diff(demo_model, gguf, tensors=name).tensors) == 1
    trace = aprfmt.trace(demo_model, prompt=OPENING, points="logits")
    assert set(trace.records) == {"logits"}
    assert aprfmt.qa(demo_model, only="metadata").gate("metadata").asked
