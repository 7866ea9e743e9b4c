"""A model larger than the budget: what is left is named, and the exit code says so.

Seen red: tensors that were not reached left out of the verdict, a pass that is not needed because
what was compared is equal, a check without an answer that leaves PASS.
"""

import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from aprfmt.attestation import attest
from aprfmt.base.budget import Budget, TimeOver, end_where_time_is_over
from aprfmt.checks import validate
from aprfmt.checks.gates import running
from aprfmt.compare import diff
from aprfmt.diagnosis import diagnose, forward_level
from aprfmt.diagnosis.diagnosis_order import DiagnosisRun
from aprfmt.formats.mapped_file import StoredTensor
from aprfmt.inference.device import parse_run
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.run_comparison import compare_choices
from aprfmt.model import manifest, open_model
from aprfmt.tensors import runs
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

LAST = "model.norm.weight"  # in the order of roles behind every layer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("budget") / "m", "BF16")


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    """Return a copy whose first tensor differs, by an exponent's bit: no rounding."""
    rows = dict(tensors_of(model))
    kind, shape, data = rows["model.embed_tokens.weight"]
    rows["model.embed_tokens.weight"] = (kind, shape, data[:1] + bytes([data[1] ^ 1]) + data[2:])
    made = model.with_name("other")
    made.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (made / path.name).write_bytes(path.read_bytes())
    write_mixed(made / "model.safetensors", rows)
    return made


def size_of(model: Path) -> int:
    return sum(len(data) for _, _, data in tensors_of(model).values())


def spent() -> Budget:
    """Return a budget of one second, which is over after the first look at the clock."""
    ticks = iter(range(10**6))
    return Budget(1.0, clock=lambda: float(next(ticks)))


LIMITS: dict[str, Callable[[Path], Budget]] = {
    "bytes": lambda model: Budget(nbytes=size_of(model) // 2),
    "seconds": lambda model: spent(),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_diff_names_what_it_did_not_reach(limit: str, model: Path, other: Path) -> None:
    every = len(tensors_of(model))
    same = diff(model, model, budget=LIMITS[limit](model))
    late = [row for row in same.not_compared if row.state == "not reached"]
    assert late and len(late) + len(same.tensors) == every
    assert same.exit_code() == 2 and not same.equal
    assert f"{len(same.tensors)} of {every} tensors" in same.pronounced().says
    assert "left by the budget of" in same.pronounced().says
    assert same.next == (f"aprfmt diff {same.a} {same.b}",)
    if limit == "bytes":
        none = diff(model, model, budget=Budget(nbytes=1))  # whatever the other sections hold
        assert f"not decided, 0 of {every} tensors" in none.pronounced().says
        apart = diff(model, other, budget=LIMITS[limit](model))
        assert apart.exit_code() == 1 and "not compared" in apart.pronounced().says


def test_what_a_budget_left_is_not_accepted(model: Path) -> None:
    """Seen red: exit 0 over tensors that nobody read, as every item was accepted."""
    for limit in LIMITS:
        same = diff(model, model, budget=LIMITS[limit](model))
        for pattern in ("unread:*", "unread:tensor", "unread:tensor *"):
            found = same.pronounced([pattern])
            assert found.exit == 2 and found.word == "not decided", (limit, pattern)
            assert {row.state for row in found.not_compared} == {"not reached"}
    done = command("validate", model, "--budget", "1k", "--accept", "unread:check *")
    assert done.code == 2 and "left by the budget" in done.out


@pytest.mark.parametrize("looks", [0, 1])  # at the clock, after the last tensor
def test_a_checksum_that_a_budget_left_is_named(
    looks: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: every tensor was compared in time, the checksum was not, and the files equal."""
    a, b = tmp_path / "a.apr", tmp_path / "b.apr"
    assert command("convert", model, a).code == 0
    whole = a.read_bytes()
    b.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # the checksum itself
    every, plain = len(diff(a, b).tensors), len(diff(model, model).tensors)
    calls = iter([True] * (every + looks))
    monkeypatch.setattr(Budget, "has_time", lambda self: next(calls, False))
    found = diff(a, b, budget=Budget(1.0))
    assert found.exit_code() == 2 and len(found.tensors) == every
    assert [(row.name, row.state) for row in found.not_compared] == [
        ("checksums over all bytes", "not reached")
    ]
    assert found.next == (f"aprfmt diff {a} {b}",)
    # A format without checksums has none to leave out.
    calls = iter([True] * (plain + looks))
    assert diff(model, model, budget=Budget(1.0)).exit_code() == 0


@pytest.mark.parametrize(
    "args", ["validate {m}", "validate {m} --strict", "qa {m} --against {o} --skip init-statistics"]
)  # fmt: skip
def test_the_next_command_of_checks_that_a_budget_left_is_without_one(
    args: str, model: Path, other: Path
) -> None:
    """Seen red: the command that lists what nothing reads, and one that asks all gates."""
    asked = args.format(m=model / "model.safetensors", o=other)
    done = command(*asked.split(), "--budget", "1k")
    assert done.code == 2 and f"next: aprfmt {asked}\n" in f"{done.out}\n", done.out


def test_a_budget_that_is_large_enough_changes_nothing(model: Path) -> None:
    plain, wide = diff(model, model), diff(model, model, budget=Budget(nbytes=size_of(model)))
    assert wide.to_json() == plain.to_json() and wide.exit_code() == 0


@pytest.mark.parametrize("nbytes", [1, 1000])  # room for no tensor, for the norms alone
def test_diagnose_never_says_same_of_what_it_left(nbytes: int, model: Path, other: Path) -> None:
    found = diagnose(str(model), str(other), budget=Budget(nbytes=nbytes))
    assert (found.verdict, found.exit_code, found.proven) == ("not_comparable", 2, "")
    assert "not reached" in {row.state for row in found.pronounced.not_compared}
    assert any(row.startswith("forward pass: left by the budget") for row in found.not_checked)


def test_a_pass_that_there_is_no_room_for_is_named(model: Path, other: Path) -> None:
    found = diagnose(str(model), str(other), budget=Budget(nbytes=size_of(model)))
    assert found.exit_code == 1  # the tensor differs all the same
    assert [row.name for row in found.pronounced.not_compared if row.state == "not reached"] == [
        "forward pass"
    ]


def test_checks_gates_and_runs_that_did_not_begin_leave_the_verdict_open(model: Path) -> None:
    checked = validate(model, budget=Budget(nbytes=1))
    assert checked.exit_code == 2 and validate(model).exit_code == 0
    assert {row.kind for row in checked.pronounced.not_compared} >= {"check"}
    gates = running.run(model, only=["tensor-contract"], budget=spent())
    assert gates.exit_code == 2 and "tensor-contract" in gates.pronounced.says
    unnamed = running.run(model, budget=spent())  # seen red: gates that nobody named were PASS
    assert unnamed.exit_code == 2
    late = [row.name for row in unnamed.pronounced.not_compared if row.state == "not reached"]
    assert len(late) == len(running.gates())
    runs = [parse_run(text) for text in ("cpu", "numpy:cpu:float64")]
    with open_model(model) as opened:
        said = compare_choices(opened, runs, ParityRequest((1, 2, 3), budget=spent())).conclusion
    assert said.exit == 2 and [row.kind for row in said.not_compared][:1] == ["run"]


@pytest.mark.parametrize(
    ("args", "first", "named"),
    [
        ("parity {m} --between numpy numpy::float64 --ids 1,2 --budget 0s", "not_comparable; ",
         "run numpy:cpu:float64"),
        ("parity {m} --between numpy numpy::float64 --ids 1,2 --budget {one}", "not_comparable; ",
         "run numpy:cpu:float64"),
        ("qa {m} --only tensor-contract --only loss --budget 1k", "not decided: ", "gate loss"),
    ],
)  # fmt: skip
def test_runs_and_gates_count_the_bytes_that_a_pass_reads(
    args: str, first: str, named: str, model: Path
) -> None:
    """Seen red: a limit of bytes that no run and no gate counted, an answer without a headline."""
    limits = {"m": str(model), "one": f"{size_of(model) // 1000 + 1}k"}
    done = command(*args.format(**limits).split(), "--format", "agent")
    assert done.code == 2, done
    head = done.out.splitlines()[0]
    assert head.startswith(first) and named in head


@pytest.mark.parametrize(
    "args",
    [
        "parity {m} --between numpy numpy::float64 --ids 1,2 --budget 0s",
        "parity {m} --between numpy numpy::float64 --ids 1,2 --budget {one}",
        "attest {m} --from {m} --budget {half}",
        "diff {m} {m} --budget {half}",
        "validate {m} --budget {half}",
    ],
)
def test_what_a_budget_left_is_asked_again_by_the_next_command(args: str, model: Path) -> None:
    """The printed command has no budget and decides. Seen red: `parity` and `attest` had none."""
    size = size_of(model)
    limits = {"m": str(model), "one": f"{size // 1000 + 1}k", "half": f"{size // 2000}k"}
    done = command(*args.format(**limits).split())
    assert done.code == 2, done
    (line,) = [row for row in done.out.splitlines() if row.startswith("next: ")]
    assert "--budget" not in line
    again = command(*shlex.split(line)[2:])
    assert again.code == 0, (line, again.out, again.err)


def test_a_run_that_there_is_no_room_for_is_refused(model: Path) -> None:
    done = command("parity", model, "--between", "numpy", "numpy::float64", "--ids", "1,2",
                   "--budget", "1k")  # fmt: skip
    assert (done.code, done.out) == (2, "") and "left by the budget of 1 kB" in done.err


def test_hash_names_what_it_did_not_reach(model: Path) -> None:
    """And never says that a file is what its manifest says, of which it read a part."""
    half = f"{size_of(model) // 2000}k"
    command("hash", model / "model.safetensors", "--write", "--force")
    manifest = model / "model.safetensors.aprfmt-hash.json"
    try:
        for asked in ((), ("--check", manifest)):
            done = command("hash", model, *asked, "--budget", half, "--json")
            late = [row for row in done.json["tensors"] if "not_reached" in row]
            assert done.code == 2 and late and not any(row["raw"] for row in late)
        left = done.json["pronounced"]["not_compared"]
        assert {row["kind"] for row in left if row["state"] == "not reached"} == {"tensor", "file"}
        assert done.json["failures"] == []
        whole = command("hash", model, "--check", manifest, "--budget", "1G", "--json")
        assert whole.code == 0
    finally:
        manifest.unlink()
    assert "leave --budget out" in command("hash", model, "--write", "--budget", "1G").err


@pytest.mark.parametrize("limit", LIMITS)
def test_attest_names_what_it_did_not_reach(limit: str, model: Path, other: Path) -> None:
    found = attest(model, model, budget=LIMITS[limit](model))
    assert found.exit_code == 2 and found.counts["not reached"] and not found.statement
    assert not any(row.sha256 for row in found.tensors if row.state == "not reached")
    assert attest(model, model, budget=Budget(nbytes=size_of(model))).exit_code == 0
    assert attest(other, model, budget=Budget(nbytes=size_of(model))).exit_code == 1


def test_a_pass_that_is_ended_names_the_points_it_lacks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a reference, where what was compared agrees."""
    saved = tmp_path / "whole.safetensors"
    command("trace", model, "--payload", "--ids", "1,2,3", "--save", saved)
    asked = ("trace", model, "--payload", "--ids", "1,2,3", "--json", "--budget", "1h")
    calls = iter([True] * 20)
    monkeypatch.setattr(Budget, "has_time", lambda self: next(calls, False))
    part = command(*asked)
    late = part.json["pronounced"]["not_compared"]
    assert part.code == 2 and {row["state"] for row in late} == {"not reached"}
    assert len(part.json["records"]) == 19 and "lm_head" not in part.json["records"]
    for ticks, reference in ((20, saved), (35, model)):  # this run is ended, or the other
        calls = iter([True] * ticks)
        beside = command(*asked, "--reference", reference).json["pronounced"]
        assert beside["exit"] == 2 and "within" not in beside["word"]
        assert {row["state"] for row in beside["not_compared"]} == {"not reached"}
    monkeypatch.undo()
    spent = command(*asked[:-1], "1k")
    assert spent.code == 2 and "no point is recorded" in spent.err + spent.out
    assert command(*asked).code == 0


def test_the_option_takes_seconds_or_bytes(model: Path) -> None:
    done = command("diff", model, model, "--budget", "1k", "--budget", "1h", "--json")
    assert done.code == 2 and done.json["not_compared"][0]["state"] == "not reached"
    for text in ("2Q", "", "90x", "-3"):
        assert "--budget" in command("diff", model, model, "--budget", text).err


@pytest.mark.parametrize("command_and_options", [("validate",), ("qa", "--only", "metadata")])
@pytest.mark.parametrize(("limit", "named"), [("1k", "1 kB"), ("0.0001", "0.0001 s")])
def test_checks_and_gates_name_the_budget_that_left_them(
    limit: str, named: str, command_and_options: tuple[str, ...], demo_model: Path
) -> None:
    """Seen red: "asked for and without an answer", of which no budget was named."""
    name, *options = command_and_options
    if name == "qa" and limit == "1k":
        options = ["--only", "logits"]  # a gate that reads all of the weights
    done = command(name, demo_model, *options, "--budget", limit, "--json")
    told = done.json["pronounced"]
    rows = [row for row in told["not_compared"] if row["kind"] in ("check", "gate")]
    assert rows and done.code == 2
    assert {(row["state"], row["why"]) for row in rows} == {
        ("not reached", f"left by the budget of {named}")
    }
    assert f"(left by the budget of {named})" in told["says"]


PIECE = 1 << 12  # bytes, or elements, of a piece while pieces are counted
SIZES = (
    "aprfmt.checks.file.value_pass.WINDOW",
    "aprfmt.measure.tensors.CHUNK",
    "aprfmt.tensors.digest.BAND",
    "aprfmt.checks.gates.weights.ELEMENTS_AT_ONCE",
    "aprfmt.checks.file.template_tokens.ELEMENTS_AT_ONCE",
    "aprfmt.checks.file.architecture_checks.REREAD",
)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Make pieces small; return a list to which the size of each one that is read is added."""
    for name in SIZES:
        monkeypatch.setattr(name, PIECE)
    monkeypatch.setattr(runs.byte_windows, "__defaults__", (PIECE,))
    monkeypatch.setattr(runs.first_difference, "__defaults__", (PIECE,))
    read: list[int] = []
    whole = StoredTensor.raw

    def raw(self: StoredTensor, start: int = 0, stop: int | None = None) -> memoryview:
        found = whole(self, start, stop)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(StoredTensor, "raw", raw)
    yield read


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two models, one tensor of which has most bytes and differs in its last row."""
    folder = tmp_path_factory.mktemp("long")
    made = [llama_folder(folder / name, "BF16", vocab=1024, tied=True) for name in "ab"]
    rows = dict(tensors_of(made[1]))
    kind, shape, data = rows["model.embed_tokens.weight"]
    rows["model.embed_tokens.weight"] = (kind, shape, data[:-1] + bytes([data[-1] ^ 1]))
    write_mixed(made[1] / "model.safetensors", rows)
    return made[0], made[1]


READERS: dict[str, Callable[[Path, Path, Budget], int]] = {
    "validate": lambda a, b, budget: validate(a, budget=budget).exit_code,
    "validate against": lambda a, b, budget: validate(b, against=a, budget=budget).exit_code,
    "diff": lambda a, b, budget: diff(a, b, explain=False, budget=budget).exit_code(),
    "diff and causes": lambda a, b, budget: diff(a, b, budget=budget).exit_code(),
    "attest": lambda a, b, budget: attest(a, a, budget=budget).exit_code,
    "qa": lambda a, b, budget: running.run(a, only=["init-statistics"], budget=budget).exit_code,
    "hash": lambda a, b, budget: hashed(a, budget),
    "parity": lambda a, b, budget: run_twice(a, budget),
}

AT_ONCE = ("diff and causes", "attest", "qa", "parity")


def hashed(model: Path, budget: Budget) -> int:
    """Return 2 where `hash` has left a tensor."""
    with open_model(model) as opened:
        rows = manifest.tensor_rows(opened, budget=budget)
    return 2 if any("not_reached" in row for row in rows) else 0


def run_twice(model: Path, budget: Budget) -> int:
    """Return the exit code of `parity` of two runs, of which each reads all weights."""
    runs = [parse_run(text) for text in ("cpu", "numpy:cpu:float64")]
    with open_model(model) as opened:
        found = compare_choices(opened, runs, ParityRequest((1, 2, 3), budget=budget))
        return found.conclusion.exit


@pytest.mark.parametrize("name", READERS)
def test_a_command_ends_one_piece_behind_its_budget(
    name: str, long: tuple[Path, Path], pieces: list[int]
) -> None:
    """Seen red: the rest of a tensor, or of a file, that was being read as the time ended."""
    READERS[name](*long, Budget(1.0, clock=lambda: 0.0))
    every = len(pieces)
    # Some causes, and an encoder, take a tensor as one piece: it is small.
    assert every > 20 and (name in AT_ONCE or max(pieces) <= 4 * PIECE), max(pieces)
    for share in (0.3, 0.6, 0.9):
        pieces.clear()
        most = int(share * every)
        done = READERS[name](*long, Budget(1.0, clock=partial(_after, pieces, most)))
        assert done in (1, 2) and len(pieces) <= most + 4, (share, len(pieces), every)


def _after(pieces: list[int], most: int) -> float:
    """Return a time that is beyond a second once so many pieces are read."""
    return 2.0 * (len(pieces) >= most)


def test_a_budget_ends_the_passes_of_a_diagnosis(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a pass over 20 GB that went on for minutes behind a budget of 20 s."""
    now = [0.0]

    def late_pass(run: DiagnosisRun) -> None:
        now[0] = 2.0
        end_where_time_is_over()
        raise AssertionError("the time is over")

    monkeypatch.setattr(forward_level, "compare_passes", late_pass)
    found = diagnose(str(model), str(other), budget=Budget(1.0, clock=lambda: now[0]))
    late = [row.name for row in found.pronounced.not_compared if row.state == "not reached"]
    assert late == ["forward pass"]


def test_only_the_budget_in_force_ends_a_reader() -> None:
    over = Budget(1.0, clock=iter(range(10)).__next__)
    end_where_time_is_over()
    with over.in_force() as outer:
        with Budget().in_force() as inner:
            end_where_time_is_over()
            raise AssertionError("the time is over")
        raise AssertionError("an inner budget ends no outer one")
    assert outer.over and not inner.over
    end_where_time_is_over()
    with pytest.raises(TimeOver, match="left by the budget of 1 s"), Budget().in_force():
        raise TimeOver(over)


def over_after(looks: int) -> Budget:
    """Return a budget of one second whose time is over after so many looks at the clock."""
    ticks = iter([0.0] * looks)
    return Budget(1.0, clock=lambda: next(ticks, 9.0))


@pytest.mark.parametrize("looks", [1, 2, 3, 4, 5])
def test_a_tokenizer_that_a_budget_left_is_named_and_never_equal(
    looks: int, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: two vocabularies of 262,144 tokens compared for seconds behind the budget's end."""
    other = shutil.copytree(demo_model, tmp_path / "other")
    if looks > 2:  # texts that are equal are read once, and not compared
        (other / "tokenizer.json").write_text((demo_model / "tokenizer.json").read_text() + " ")
    found = diff(demo_model, other, only=["tokenizer"], budget=over_after(looks))
    late = [row for row in found.not_compared if row.state == "not reached"]
    assert [(row.kind, row.name) for row in late] == [("tokenizer part", "tokenizer")]
    assert found.exit_code() == 2 and "left by the budget of 1 s" in found.pronounced().says
    whole = diff(demo_model, other, only=["tokenizer"], budget=over_after(999))
    assert whole.exit_code() == 0 and not whole.not_compared


def test_an_attestation_names_the_tokenizer_that_its_budget_left(
    demo_model: Path, tmp_path: Path
) -> None:
    made = tmp_path / "q.gguf"
    assert command("quantize", demo_model, made, "Q8_0").code == 0
    found = attest(made, demo_model, budget=spent())
    late = [row.name for row in found.pronounced.not_compared if row.kind == "tokenizer part"]
    assert late == ["tokenizer"] and found.exit_code == 2
