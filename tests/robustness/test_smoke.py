"""Every command that reads a model, over every hostile input: one line, no traceback, no litter."""

from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS
from tests.robustness.hostile import ODD, REFUSED, VALID, small_llama
from tests.robustness.jail import Done, Job, run
from tests.robustness.verdicts import assert_plain, assert_refused, assert_reported, assert_told
from tests.scope import selected

NO_MODEL = ("demo", "explain", "doctor")
# How a command is given a model; M is the model, O a name in an empty folder. Others get it alone.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "tensors": ("M", "--stats"),
    "cat": ("M", "model.norm.weight"),
    "import": ("M", "-o", "O.apr"),
    "export": ("M", "--to", "gguf", "-o", "O.gguf"),
    "convert": ("M", "O.gguf"),
    "quantize": ("M", "O.apr", "--type", "Q8_0"),
    "set": ("M", "format=x", "-o", "O.safetensors"),
    "split": ("M", "O.gguf", "--max-shard-size", "1K"),
    "merge": ("M", "O.apr"),
    "repair": ("M", "--from", "M", "-o", "O.gguf"),
    "diff": ("M", "M"),
    "diagnose": ("M", "M", "--ids", "1,2"),
    "parity": ("M", "--between", "numpy", "numpy:cpu:float64", "--ids", "1,2"),
    "tokenize": ("M", "hi"),
    "template": ("M", "--user", "hi"),
    "trace": ("M", "--payload", "--ids", "1,2"),
    "logits": ("M", "--ids", "IDS", "--out", "O.npy"),
    "run": ("M", "--ids", "1,2", "--max-tokens", "1"),
    "eval": ("M", "--ids", "IDS"),
    "scan": ("M", "-o", "O.jsonl", "--jobs", "1"),
}
pytestmark = pytest.mark.xdist_group("smoke")
READING = [name for name in COMMANDS if name not in NO_MODEL]
# Every command opens its model in one place: all refusals go through a few, some through all.
THOROUGH = ("inspect", "validate", "convert", "diff", "tokenize")
SAMPLE = ("gguf_truncated", "apr_header_crc", "polyglot_zip", "pickle", "fifo", "config_deep",
          "index_parent", "missing")  # fmt: skip
# These go on past damage that leaves something to read, `validate` reports whatever is a model.
PATIENT = ("inspect", "tensors", "tree", "cat", "hex", "hash", "diff")
LISTED = {"gguf_truncated", "gguf_overlap", "apr_header_crc", "safetensors_overlap",
          "polyglot_zip"} | {id for id in REFUSED if id.startswith("config_")}  # fmt: skip
REPORTED = LISTED | {"gguf_counts", "apr_count_forged", "safetensors_deep", "sparse_safetensors"}
REPORTED |= {id for id in REFUSED if id.startswith("index_")}
# Files without a tensor: nothing of a model was looked at, so `validate` exits 2.
EMPTY = ("apr_no_tensors", "gguf_header_only", "safetensors_empty", "padded_header")
# `repair` takes one file: it reads no folder and no index.
ELSEWHERE = {("repair", "config_deep"), ("repair", "index_parent")}
PAIRS = [
    (command, id)
    for command in READING
    for id in (*(REFUSED if command in THOROUGH else SAMPLE), *ODD)
    if (command, id) not in ELSEWHERE
]


def _arguments(command: str, model: Path, out: Path, ids: Path) -> tuple[str, ...]:
    words = {"M": str(model), "IDS": str(ids)}
    row = ARGUMENTS.get(command, ("M",))
    return command, *(
        words.get(word, f"{out}/{word}" if word[:2] == "O." else word) for word in row
    )


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Done]]:
    import numpy as np

    folder = tmp_path_factory.mktemp("smoke")
    ids = folder / "ids.npy"
    np.save(ids, np.array([1, 2, 1]))
    models = {}
    for id, maker in {**{k: v[0] for k, v in REFUSED.items()}, **ODD}.items():
        (folder / id).mkdir()
        models[id] = maker(folder / id)
    good = small_llama(folder)
    warm, jobs = [], []
    for command in READING:
        out = folder / f"warm-{command}"
        out.mkdir()
        warm.append(_arguments(command, good, out, ids))
    for command, id in sorted(selected(request, "command", "id")):
        out = folder / f"out-{command}-{id}"
        out.mkdir()
        args = _arguments(command, models[id], out, ids)
        jobs.append(Job(f"{command} {id}", (*args, "-v") if command == "validate" else args))
    return folder, run(jobs, warm)


@pytest.mark.parametrize(("command", "id"), PAIRS, ids=lambda value: str(value))
def test_command_on_file(command: str, id: str, done: tuple[Path, dict[str, Done]]) -> None:
    folder, found = done
    one = found[f"{command} {id}"]
    says = REFUSED[id][1] if id in REFUSED else ""
    if command == "scan":  # what cannot be read is a row of it, beside those of other files
        assert_plain(one)
        assert one.code in (0, 1, 2) and one.peak < 256 << 20
        return
    if command == "validate" and id in REPORTED:
        assert_reported(one, says)
    elif command in ("diff", "diagnose") and id == "polyglot_zip":  # with itself: equal bytes
        assert_plain(one)
        assert one.code == 0 and "not read here" in one.out and says in one.out
    elif command == "diagnose" and id in LISTED and one.out:  # it compares what can be read
        assert_plain(one)
        assert one.code == 2 and one.out.startswith("not comparable: a file is not whole: ")
        assert says in one.out and one.err == ""
    elif command in PATIENT and id in LISTED:
        assert_told(one, says if command != "cat" else "")  # which may not find its tensor
    elif id in REFUSED and command in ARGUMENTS | dict.fromkeys(("inspect", "tree", "validate")):
        assert_refused(one, says)
    else:
        assert_plain(one)
        assert one.code in (0, 1, 2), one.err
    out = folder / f"out-{command}-{id}"
    if one.code == 2:
        assert list(out.iterdir()) == [], "a refused conversion left something behind"
    assert one.peak < 256 << 20


def test_nothing_ran_and_nothing_was_written_elsewhere(done: tuple[Path, dict[str, Done]]) -> None:
    folder, _ = done
    assert not [path for path in folder.rglob("*") if "CANARY" in path.name]
    assert not Path("CANARY").exists()


@pytest.fixture(scope="module")
def valid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("valid")
    jobs, asked = [], selected(request, "id")
    for id, maker in VALID.items():
        if (id,) not in asked:
            continue
        (folder / id).mkdir()
        model = str(maker(folder / id))
        jobs.append(Job(f"inspect {id}", ("inspect", model)))
        jobs.append(Job(f"tensors {id}", ("tensors", model, "--limit", "3")))
        if id != "sparse_8_gib":  # eight billion bytes take their time
            jobs.append(Job(f"validate {id}", ("validate", "-v", model), heap=1 << 30))
    return run(jobs)


@pytest.mark.parametrize("id", VALID)
def test_valid_and_odd_files_are_read(id: str, valid: dict[str, Done]) -> None:
    for command in ("inspect", "tensors"):
        one = valid[f"{command} {id}"]
        assert_plain(one)
        assert one.code == 0, one.err
        assert one.peak < 128 << 20
    if id != "sparse_8_gib":
        judged = valid[f"validate {id}"]
        assert_plain(judged)
        codes = {"big_tokenizer": (0, 1), "extension_lies": (1,)} | dict.fromkeys(EMPTY, (2,))
        assert judged.code in codes.get(id, (0,)), judged.out + judged.err
        assert ("it holds no tensor" in judged.out) == (id in EMPTY)
