"""The scope of a trace: slots, tokens, positions, the origin of a NaN; nothing is ignored silently.

Seen red: `qkv_nobias` beside an equal `qkv`, logits of the last row under other positions, a
record of no rows, a NaN named where it was first looked for instead of where it began, options
that --load took and did not use.
"""

import io
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.cli.main import main
from aprfmt.inference.trace_file import load_trace
from tests.cli.run import aprfmt
from tests.cli.test_running import broken
from tests.models import save_tiny

IDS = ("--payload", "--ids", "1,2,3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return folder


def test_a_slot_equal_to_its_neighbour_is_not_shown_twice(tiny: Path, demo_model: Path) -> None:
    names = [
        [row["slot"] for row in aprfmt("trace", model, *IDS, "--layers", 0, "--json").json["slots"]]
        for model in (tiny, demo_model)
    ]
    assert [name for name in names[1] if name != "qkv_nobias"] == names[0]
    assert len(names[0]) == 10 and len(names[1]) == 11


def test_the_text_says_tokens_positions_dtype_and_device(tiny: Path, tmp_path: Path) -> None:
    out = aprfmt("trace", tiny, *IDS, "--points", "out,logits").out
    assert out.startswith(f"{tiny}/model.safetensors on numpy:cpu:float32, peak memory ")
    for text in (
        "3 tokens: 1, 2, 3\n",
        "rows: at 0-2, float32 on cpu\n",
        "logits: at 2, float32 on cpu\n",
        "std divides by n\n",
        "top 5 of the row at 2\n",
    ):
        assert text in out
    out = aprfmt("trace", f"{tiny}@torch:cpu:bfloat16", *IDS, "--positions", "0,2").out
    assert "rows: at 0, 2, bfloat16 on cpu\n" in out
    aprfmt("trace", tiny, *IDS, "--save-aprt", tmp_path / "aprt")
    assert aprfmt("trace", "--load", tmp_path / "aprt").code == 0


RED = re.compile("\x1b\\[(1;)?31m")  # click and rich write bold red in their own ways


def test_spikes_and_nan_are_coloured_on_a_terminal(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.cli import render
    from aprfmt.cli.trace import output

    def coloured(*args: object) -> list[str]:
        monkeypatch.setattr(render, "colours", lambda: True)
        monkeypatch.setattr("click.utils.should_strip_ansi", lambda *a: False)
        return aprfmt("trace", *args, *IDS).out.splitlines()

    monkeypatch.setattr(output, "SPIKE", 1.0)
    lines = coloured(tiny)
    spiky = [line for line in lines if line.startswith("\x1b[33mL")]
    rows = [line for line in spiky if "median" not in line]
    said = [line.split()[1].count("/") + 1 for line in spiky if "median" in line]
    assert rows and len(rows) == sum(said)  # a row for each point of each observation
    assert not any(RED.match(line) for line in lines)
    folder = broken(tiny, tmp_path / "nan", "model.layers.1.mlp.gate_proj.weight")
    bad = [line for line in coloured(folder) if RED.match(line)]
    assert "ffn_gate" in bad[0] and len(bad) == 2  # the row, and the sentence


def test_chosen_positions_are_those_of_the_logits_too(tiny: Path, tmp_path: Path) -> None:
    every, saved = tmp_path / "all.npy", tmp_path / "t.safetensors"
    aprfmt("logits", tiny, "--ids", "1,2,3,4,5", "--out", every)
    expected = np.load(every)
    for backend in ((), ("--behind", 1), ("--engine", "transformers")):
        done = aprfmt(
            "trace",
            tiny,
            "--payload",
            "--ids",
            "1,2,3,4,5",
            "--positions",
            "1,3",
            "--save",
            saved,
            "--force",
            "--json",
            *backend,
        )
        found = {row["key"]: row["positions"] for row in done.json["records"]}
        assert found["logits"] == found["L0.out"] == [1, 3]
        from safetensors.numpy import load_file

        np.testing.assert_allclose(load_file(saved)["logits"], expected[[1, 3]], atol=1e-5)
        assert done.json["logits"]["top"][0]["id"] == int(expected[3].argmax())
        refused = aprfmt("trace", tiny, *IDS, "--positions", "1,3", *backend)
        assert refused.code == 2 and "positions 3 are not in the pass" in refused.err


@pytest.mark.parametrize(
    "options",
    [
        ("--points", "logits"),
        ("--positions", "last"),
        ("--positions", "0", "--points", "out", "--layers", "2"),
        ("--points", "logits", "--behind", "1"),
        (),
    ],
)
def test_a_nan_is_named_where_it_began_whatever_was_asked_for(
    options: tuple[str, ...], tiny: Path, tmp_path: Path
) -> None:
    folder = broken(tiny, tmp_path / "nan", "model.layers.1.mlp.gate_proj.weight")
    done = aprfmt("trace", folder, *IDS, *options, "--json")
    assert (done.code, done.json["nonfinite"]) == (1, "L1.ffn_gate")
    text = aprfmt("trace", folder, *IDS, *options)
    assert text.code == 1 and "first NaN or infinity: L1.ffn_gate; " in text.out
    page = tmp_path / "page.html"
    assert aprfmt("trace", folder, *IDS, *options, "--html", page).code == 1
    assert "L1.ffn_gate" in page.read_text()


def test_a_saved_trace_is_shown_in_part(tiny: Path, demo_model: Path, tmp_path: Path) -> None:
    saved, folder = tmp_path / "t.safetensors", tmp_path / "aprt"
    aprfmt("trace", demo_model, *IDS, "--save", saved, "--save-aprt", folder)
    for path, joined in ((saved, ["L1.q", "L1.k", "L1.v"]), (folder, ["L1.qkv"])):
        shown = aprfmt("trace", "--load", path, "--points", "qkv,output", "--layers", "1", "--json")
        assert {row["key"] for row in shown.json["records"]} == {*joined, "L1.out"}
    part, options = tmp_path / "part.safetensors", ("--points", "final_norm")
    assert aprfmt("trace", "--load", saved, *options, "--save", part).code == 0
    assert [row["key"] for row in aprfmt("trace", "--load", part, "--json").json["records"]] == [
        "final_norm"
    ]


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--positions", "last"), "leave --positions out"),
        (("--prompt", "x", "--memory", "1M"), "leave --prompt, --memory out"),
        (("--device", "cpu"), "leave --device out"),
        (("--payload",), "leave --payload out"),
        (("--layers", "9"), "layers 0 to 2"),
        (("--points", "scores"), "the trace holds none of these"),
        (("--points", "nothing"), "is not known"),
    ],
)
def test_load_ignores_no_option(
    options: tuple[str, ...], fragment: str, tiny: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "t.safetensors"
    aprfmt("trace", tiny, *IDS, "--save", saved)
    done = aprfmt("trace", "--load", saved, *options)
    assert (done.code, done.err.count("\n")) == (2, 1) and fragment in done.err


def test_what_is_saved_names_its_model_and_prompt_by_hash(tiny: Path, tmp_path: Path) -> None:
    from hashlib import sha256

    def digest(path: Path) -> str:
        return sha256(path.read_bytes()).hexdigest()

    shutil.copytree(tiny, tmp_path / "copy")
    saved, gguf = tmp_path / "t.safetensors", tmp_path / "m.gguf"
    aprfmt("convert", tiny, gguf, "--no-verify")
    runs = []
    for model, ids in ((tiny, "1,2"), (tmp_path / "copy", "1,2"), (gguf, "1,3")):
        assert (
            aprfmt(
                "trace",
                model,
                "--payload",
                "--ids",
                ids,
                "--points",
                "out",
                "--save",
                saved,
                "--force",
            ).code
            == 0
        )
        with load_trace(saved) as trace:
            runs.append(trace.run)
    names = ("model.safetensors", "config.json")
    assert runs[0]["model_sha256"] == {name: digest(tiny / name) for name in names}
    assert runs[1]["model_sha256"] == runs[0]["model_sha256"]  # wherever it lies
    assert runs[2]["model_sha256"] == {"m.gguf": digest(gguf)}
    ids_bytes = np.array([1, 2], "<i8").tobytes()
    assert runs[0]["prompt_sha256"] == sha256(ids_bytes).hexdigest() == runs[1]["prompt_sha256"]
    assert runs[2]["prompt_sha256"] != runs[0]["prompt_sha256"]
    assert runs[0]["backend"]["versions"]["numpy"] == np.__version__ and runs[0]["aprfmt"]


SCOPES = ("all", "last", "0,1", "1,2")


@pytest.fixture(scope="module")
def scoped(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One pass saved with each scope of positions."""
    folder = tmp_path_factory.mktemp("scopes")
    made = {scope: folder / f"{scope.replace(',', '')}.safetensors" for scope in SCOPES}
    for scope, path in made.items():
        assert aprfmt("trace", tiny, *IDS, "--positions", scope, "--save", path).code == 0
    return made


@pytest.mark.parametrize(
    ("here", "there"),
    [("all", "all"), ("all", "last"), ("last", "all"), ("0,1", "1,2"), ("last", "0,1")],
)
def test_a_trace_of_other_rows_is_no_verdict(
    here: str, there: str, tiny: Path, scoped: dict[str, Path]
) -> None:
    for args in ((tiny, *IDS, "--positions", here), ("--load", scoped[here])):
        done = aprfmt("trace", *args, "--reference", scoped[there], "--json")
        found = done.json["reference"]
        assert done.code == (0 if here == there else 2)
        if here == there:
            assert found["other_rows"] == [] and found["compared"] == len(found["points"])
        else:
            assert "L0.q" in found["other_rows"] and len(found["other_rows"]) >= 38
            assert found["first"] is None
    shown = aprfmt("trace", "--load", scoped[here], "--reference", scoped[there]).out
    assert ("within tolerance" in shown) == (here == there)
    assert ("no verdict: " in shown and "hold other rows" in shown) == (here != there)


def test_logits_are_compared_on_the_rows_that_both_have(scoped: dict[str, Path]) -> None:
    """A pass computes the requested rows: `last` has the last token's, `1,2` has two."""
    body = aprfmt("trace", "--load", scoped["last"], "--reference", scoped["1,2"], "--json").json
    row = next(each for each in body["reference"]["points"] if each["key"] == "logits")
    assert row["why"] == "" and row["rel_l2"] < 1e-6
    with load_trace(scoped["last"]) as trace:
        assert row["values"] == trace.records["logits"].shape[1]  # one row of two


def test_a_prompt_beyond_the_context_is_warned_of(tiny: Path) -> None:
    long = ",".join("1" * 65)
    for command in (("trace", "--payload", "--points", "embd"), ("logits",)):
        done = aprfmt(command[0], tiny, *command[1:], "--ids", long)
        assert "65 tokens; the model was made for 64" in done.err
        assert not aprfmt(command[0], tiny, *command[1:], "--ids", long[2:]).err


@pytest.mark.parametrize("text", ["1,,2", ",", "1,2,", "1;2", "1 -2", ""])
def test_a_hole_in_a_list_of_ids_is_refused(text: str, tiny: Path) -> None:
    done = aprfmt("logits", tiny, "--ids", text)
    assert done.code == 2 and "is no token id; expected for example 1,2,3" in done.err


def test_ids_may_be_spaced(tiny: Path) -> None:
    body: Any = aprfmt("logits", tiny, "--ids", " 1, 2 3\n,4", "--json").json
    assert body["tokens"]["ids"] == [1, 2, 3, 4]


def test_a_second_bos_is_warned_of_before_a_run(gemma: Path) -> None:
    options = ("--points", "embd", "--payload", "--json")
    twice = aprfmt("trace", gemma, "--prompt", "<bos>hi", *options)
    assert twice.json["tokens"]["ids"][:2] == [2, 2] and "begins with <bos> twice" in twice.err
    once = aprfmt("trace", gemma, "--prompt", "hi", *options)
    assert once.json["tokens"]["ids"][0] == 2 != once.json["tokens"]["ids"][1]
    assert "twice" not in once.err


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_deterministic_fixes_the_number_of_threads(backend: str, tiny: Path) -> None:
    where = ("--backend", backend, "--ids", "1,2", "--json")
    fixed = aprfmt("logits", tiny, "--deterministic", *where).json["run"]["backend"]
    assert (fixed["deterministic"], fixed["threads"]) == (True, 1)
    named = aprfmt("logits", tiny, "--deterministic", "--threads", 2, *where).json["run"]["backend"]
    assert named["threads"] == 2
    aprfmt("logits", tiny, "--threads", 1, *where)  # as the suite has it


def test_the_reference_is_run_under_the_same_limits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.inference.session import Session

    seen: list[tuple[str, bool, Any]] = []
    original = Session.open.__func__  # type: ignore[attr-defined]

    def of(cls: Any, model: Any, backend: Any, *, memory: Any = None) -> Any:
        seen.append((backend.name, backend.deterministic, memory))
        return original(cls, model, backend, memory=memory)

    monkeypatch.setattr(Session, "open", classmethod(of))
    done = aprfmt(
        "trace",
        tiny,
        *IDS,
        "--backend",
        "torch",
        "--memory",
        "1M",
        "--deterministic",
        "--reference",
        tiny,
    )
    assert done.code == 0
    assert seen == [("torch", True, 10**6), ("numpy", True, 10**6)]


def test_generated_text_comes_piece_by_piece(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.cli.run import TextWriter

    pieces: list[str] = []
    monkeypatch.setattr(TextWriter, "_print", lambda self, text: pieces.append(text))
    done = aprfmt("run", demo_model, "--prompt", "She", "--max-tokens", 6, "--json")
    assert done.code == 0 and not pieces
    text = json.loads(done.out)["text"]
    assert aprfmt("run", demo_model, "--prompt", "She", "--max-tokens", 6).code == 0
    assert len([piece for piece in pieces if piece.strip()]) > 3
    assert "".join(pieces) == f"{text}\n"


@pytest.fixture(scope="module")
def dumps(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arrays of a run of `tiny`, as another engine dumps them."""
    folder = tmp_path_factory.mktemp("dumps")
    aprfmt("trace", tiny, *IDS, "--points", "all", "-o", folder / "run.safetensors")
    with load_trace(folder / "run.safetensors") as saved:
        for name in ("ffn_out", "out"):
            values = saved.recorded_values(f"L0.{name}")
            assert values is not None
            np.save(folder / f"{name}.npy", values)
    (folder / "run.safetensors").unlink()
    return folder


@pytest.mark.parametrize("form", ["human", "agent", "json"])
def test_a_reader_that_leaves_leaves_both_files_or_none(
    form: str, tiny: Path, dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trace --map -o | head` wrote the mapping, and then no trace beside it."""

    class Leaves(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return ended.fileno()

    asked = ("trace", tiny, "--map", dumps, "--ids", "1,2,3", "-o", tmp_path / "run.safetensors")
    monkeypatch.setattr(sys, "stdout", Leaves())
    with tempfile.TemporaryFile() as ended, pytest.raises(SystemExit):
        main([*map(str, asked), "--format", form])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.map.json", "run.safetensors"]


@pytest.mark.parametrize("more", [("--exact",), ("--reference", "gone"), ("--reference", "{tiny}")])
def test_a_refused_mapping_leaves_no_file(
    more: tuple[str, ...], tiny: Path, dumps: Path, tmp_path: Path
) -> None:
    asked = ("trace", tiny, "--map", dumps, "--ids", "1,2,3", "-o", tmp_path / "run.safetensors")
    done = aprfmt(*asked, *(word.format(tiny=tiny) for word in more))
    assert done.code == 2 and not list(tmp_path.iterdir()), done.err


def test_arrays_of_no_point_leave_the_mapping_to_correct(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "x.npy", np.ones((3, 7), np.float32))
    out = tmp_path / "run.safetensors"
    done = aprfmt("trace", tiny, "--map", tmp_path / "dump", "--ids", "1,2,3", "-o", out)
    assert done.code == 2 and f"name them in {tmp_path / 'run.map.json'}" in done.err
    assert (tmp_path / "run.map.json").is_file() and not out.exists()
