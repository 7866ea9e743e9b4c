"""`trace --reference`, `parity` and `diagnose` hold the two values of a point to one bound.

Each row of the table is a pair of traces; the three commands compare it, each in its own way to
it, and say the same of every point: distance, tolerance, and whether it is beyond. Seen red with
a bound of the dtype alone in `diagnose` (engines, depth, printed decimals, TF32, one value that is
far off), with one command told of the experts and another not, and with bounds of its own given to
each of the three in turn.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.engines.opening import open_trace
from aprfmt.inference.parity import run_comparison
from aprfmt.inference.trace import KeptValues, Trace
from aprfmt.inference.trace_file import save_trace
from tests.cli.run import Done, aprfmt
from tests.models import save_tiny

IDS = "1,2,3,4,5,6"
EVERY = ("--positions", "0,1,2,3,4,5")  # logits of every row too
Said = tuple[float | None, float, bool]  # distance, tolerance, beyond
Change = Callable[[np.ndarray], np.ndarray]


def grown(far: float) -> Change:
    """Every value off by one share."""
    return lambda x: x * np.float32(1 + far)


def with_nan(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flat[3] = np.nan
    return x


@dataclass(frozen=True)
class Case:
    """A point of a pass, changed in the trace that is compared; facts of the run on both sides.

    `bounds` are what the changed point is held to, `beyond` whether that is too far.
    """

    key: str
    change: Change
    beyond: bool
    backend: Mapping[str, Any] | None = None  # of the compared trace
    dtype: str = "float32"
    weights: str = "exact"
    resolution: float = 0.0
    both: bool = False  # the change is in the reference too
    aside: bool = False  # what follows agrees, so diagnose says that it was recorded elsewhere
    placed: bool = False  # and no relation is fine enough to say what the values are
    arch: str = "llama"


CASES: Mapping[str, Case] = {
    "equal": Case("L1.ffn_out", lambda x: x, False),
    "rounding": Case("L1.ffn_out", grown(1e-6), False),
    "wrong": Case("L1.ffn_out", grown(1e-3), True, aside=True),
    "bfloat16": Case("L1.ffn_out", grown(5e-2), False, dtype="bfloat16"),
    "bfloat16-wrong": Case(
        "L1.ffn_out", grown(0.1), True, dtype="bfloat16", aside=True, placed=True
    ),
    "float64-of-transformers": Case(
        "L1.ffn_out", grown(2e-6), False, {"backend": "transformers"}, dtype="float32"
    ),
    "gelu-of-llama.cpp": Case("L1.ffn_out", grown(1e-3), False, {"backend": "llama.cpp"}),
    "half-of-llama.cpp": Case(
        "L1.ffn_out", grown(2e-2), False, {"backend": "llama.cpp"}, weights="half"
    ),
    "quantized-of-llama.cpp": Case(
        "L1.ffn_out", grown(0.1), False, {"backend": "llama.cpp"}, weights="quantized"
    ),
    "lookup-of-llama.cpp": Case(
        "embd", grown(1e-5), True, {"backend": "llama.cpp"}, weights="quantized", aside=True
    ),
    "tf32": Case("L1.ffn_out", grown(1e-3), False, {"backend": "torch", "tf32": True}),
    "one-nan": Case("L1.ffn_out", with_nan, True),
    "nan-on-both": Case("L1.ffn_out", with_nan, False, both=True),
    "zero": Case("L1.ffn_out", np.zeros_like, True, aside=True),
    "zero-on-both": Case("L1.ffn_out", np.zeros_like, False, both=True),
    "printed": Case("L1.ffn_out", grown(2e-4), False, resolution=1e-3),
    "experts": Case("L1.router", grown(0.2), False, dtype="bfloat16", arch="mixtral"),
    "experts-wrong": Case(
        "L1.router", grown(0.5), True, dtype="bfloat16", arch="mixtral", aside=True, placed=True
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {arch: tmp_path_factory.mktemp(arch) for arch in ("llama", "mixtral")}
    for arch, folder in made.items():
        save_tiny(arch, folder)
        done = aprfmt(
            "trace",
            folder,
            "--payload",
            "--ids",
            IDS,
            "--points",
            "all",
            *EVERY,
            "--save",
            folder / "plain.safetensors",
        )
        assert done.code == 0
    return made


def changed(trace: Trace, case: Case, reference: bool) -> Trace:
    """Return one side of a case."""

    def fetch(key: str) -> Any:
        values = trace.recorded_values(key)
        if key != case.key or (reference and not case.both):
            return values
        assert values is not None
        return case.change(values)

    if reference:
        return replace(trace, fetch=fetch, run={**trace.run, "weights": case.weights})
    records = {key: replace(row, dtype=case.dtype) for key, row in trace.records.items()}
    backend = {"backend": "numpy", "device": "cpu", "dtype": case.dtype} | dict(case.backend or {})
    run = {**trace.run, "weights": case.weights, "backend": backend}
    return replace(trace, run=run, records=records, fetch=fetch, resolution=case.resolution)


@contextmanager
def sides(case: Case, models: Mapping[str, Path]) -> Iterator[tuple[Trace, Trace]]:
    with open_trace(models[case.arch] / "plain.safetensors") as plain:
        yield changed(plain, case, False), changed(plain, case, True)


def body(done: Done) -> Any:
    """Return what a command printed; other tests hold it to its schema, which takes longer."""
    return json.loads(done.out)


def by_parity(done: Done) -> dict[str, Said]:
    [pair] = body(done)["pairs"]
    return by_trace(pair["points"])


def by_trace(points: list[dict[str, Any]]) -> dict[str, Said]:
    return {p["key"]: (p["rel_l2"], p["tolerance"], p["beyond"]) for p in points}


def by_diagnose(done: Done) -> dict[str, Said]:
    return {p["key"]: (p["direct"], p["tolerance"], p["apart"]) for p in body(done)["points"]}


def the_same(first: dict[str, Said], second: dict[str, Said]) -> None:
    assert list(first) and set(first) == set(second)
    for key, (far, bound, beyond) in first.items():
        other = second[key]
        assert other[1:] == (bound, beyond), (key, first[key], other)
        assert other[0] == near(far), key


def near(far: Any) -> Any:
    """A distance is the same up to how it was added up; None and Infinity are themselves."""
    return pytest.approx(far, rel=1e-9) if isinstance(far, float) else far


@pytest.mark.parametrize("name", CASES)
def test_three_commands_say_the_same_of_every_point(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model = CASES[name], models[CASES[name].arch]
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    with sides(case, models) as (mine, other):
        if not case.resolution:  # what was printed is no file of ours: as opened, below
            save_trace(here, mine)
            save_trace(there, other)
        opened = {here: mine, there: other}

        @contextmanager
        def as_changed(path: Path, *rest: Any) -> Iterator[Trace]:
            yield opened[Path(path)]

        runs = iter((other, mine))

        @contextmanager
        def as_run(*args: Any) -> Iterator[Any]:
            yield run_comparison.RunResult(next(runs), None)

        if case.resolution:
            for path in (here, there):
                save_trace(path, replace(opened[path], resolution=0.0))
            for place in ("inference.engines.opening", "diagnosis.sides"):
                monkeypatch.setattr(f"aprfmt.{place}.open_trace", as_changed)
        shown = aprfmt("trace", "--load", here, "--reference", there, "--json")
        found = aprfmt("diagnose", there, here, "--json")  # A is the reference
        monkeypatch.setattr(run_comparison, "run_once", as_run)
        ran = aprfmt("parity", model, "--between", "numpy", "torch", "--ids", IDS, "--json")
    traced = by_trace(body(shown)["reference"]["points"])
    assert traced[case.key][2] == case.beyond
    the_same(traced, by_diagnose(found))
    the_same(traced, by_parity(ran))
    expected = int(case.beyond) if not case.aside else 2 * case.placed
    assert (shown.code, found.code) == (int(case.beyond), expected)
    assert (body(found)["cause"] == "capture_point") == case.aside
    if name == "nan-on-both":
        return  # parity refuses logits and losses that are no numbers
    assert body(ran)["pairs"][0]["first"] == body(shown)["reference"]["first"]


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_distance_of_two_traces_is_a_share_of_the_first(
    factor: float, models: dict[str, Path], tmp_path: Path
) -> None:
    """A is the reference: ||b - a|| / ||a||. Seen red: the share of B's norm."""
    case = Case("L1.ffn_out", lambda values: factor * values, True)
    with sides(case, models) as (other, plain):
        save_trace(tmp_path / "a.safetensors", plain)
        save_trace(tmp_path / "b.safetensors", other)
    found = by_diagnose(
        aprfmt("diagnose", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    )
    assert found[case.key][0] == pytest.approx(abs(factor - 1), rel=1e-5)


REAL = (
    ("llama", "numpy", "torch"),
    ("llama", "numpy::float64", "transformers::float64"),
    ("llama", "numpy::float64", "torch::bfloat16"),
    ("mixtral", "numpy", "torch::bfloat16"),
)


@pytest.mark.parametrize(("arch", "reference", "run"), REAL, ids=[row[2] for row in REAL])
def test_three_commands_hold_runs_to_the_same_bounds(
    arch: str, reference: str, run: str, models: dict[str, Path]
) -> None:
    model = models[arch]
    shown = aprfmt(
        "trace",
        f"{model}@{run}",
        "--payload",
        "--ids",
        IDS,
        "--points",
        "all",
        *EVERY,
        "--reference",
        f"{model}@{reference}",
        "--json",
    )
    found = aprfmt("diagnose", f"{model}@{reference}", f"{model}@{run}", "--ids", IDS, "--json")
    ran = aprfmt("parity", model, "--between", reference, run, "--ids", IDS, "--json")
    traced = by_trace(body(shown)["reference"]["points"])
    the_same(traced, by_parity(ran))
    the_same(traced, {key: said for key, said in by_diagnose(found).items() if key in traced})


def far_off(x: np.ndarray) -> np.ndarray:
    """One value of 160,000 by half a percent: next to nothing in the norm of them all."""
    return np.where(np.arange(x.size).reshape(x.shape) == 7, x + np.float32(5e-3), x)


ALONE: Mapping[str, tuple[int, tuple[int, ...], Change, float, bool]] = {
    "deep": (128, (6, 64), grown(3e-5), 4e-5, False),  # held to twice the bound of layer 1
    "deep-wrong": (128, (6, 64), grown(5e-5), 4e-5, True),
    "shallow-wrong": (1, (6, 64), grown(3e-5), 2e-5, True),
    "one-value-of-many": (1, (6, 160_000 // 6), far_off, 2e-5, True),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_point_is_held_to_its_depth_and_to_its_largest_difference(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    layer, shape, change, bound, beyond = ALONE[name]
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    plain = np.where(np.arange(np.prod(shape)).reshape(shape) % 2, 1, -1).astype(np.float32)
    with open_trace(models["llama"] / "plain.safetensors") as trace:
        row = replace(trace.records["L1.ffn_out"], layer=layer, shape=shape)
        paths = {
            tmp_path / "here.safetensors": change(plain),
            tmp_path / "there.safetensors": plain,
        }
        for path, values in paths.items():
            kept = KeptValues()
            kept.keep(row, values)
            save_trace(path, replace(trace, records={row.key: row}, aliases={}, fetch=kept.fetch))
    shown = aprfmt("trace", "--load", here, "--reference", there, "--json")
    found = aprfmt("diagnose", there, here, "--json")
    traced = by_trace(body(shown)["reference"]["points"])
    assert traced[row.key][1] == pytest.approx(bound) and traced[row.key][2] == beyond
    the_same(traced, by_diagnose(found))
    assert (shown.code, found.code) == (int(beyond), int(beyond))
