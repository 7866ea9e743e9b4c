"""Every command: its help, its JSON, its exit codes, run as a user would type it."""

import re
from pathlib import Path
from typing import get_args

import click
import pytest

from aprfmt.attestation import WORDS
from aprfmt.attestation.rederive import STATES
from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.explain import find_topics
from aprfmt.cli.main import group
from aprfmt.cli.trace.output import COLUMNS
from aprfmt.diagnosis.records import KINDS, DivergenceKind
from aprfmt.errors import UsageError
from aprfmt.measure.records import TENSOR_VERDICTS
from aprfmt.measure.verdicts import CERTAINTIES, Verdict
from tests.cli.run import aprfmt, process
from tests.conversion.folders import llama_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "source", "BF16")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str) -> None:
    done = aprfmt(name, "--help")
    assert done.code == 0
    assert "Usage: aprfmt" in done.out


def test_help_lists_every_command() -> None:
    done = aprfmt("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert f"  {name} " in done.out


def test_version_names_the_kernels() -> None:
    done = aprfmt("--version")
    assert done.code == 0
    assert "kernels" in done.out


def test_version_names_every_extra_that_is_installed() -> None:
    from aprfmt.cli.doctor import EXTRAS, PACKAGES, installed_version

    line = aprfmt("--version").out
    assert {name for name, _, _ in PACKAGES} >= set(EXTRAS)
    for name in EXTRAS:
        assert (f"{name} {installed_version(name)}" in line) == (
            installed_version(name) is not None
        )


@pytest.mark.parametrize("name", ["exit-codes", "PASS", "not-run"])
def test_explain_knows_outcomes_and_whole_sections(name: str) -> None:
    from aprfmt.base.exit_codes import EXIT_CODES

    found = aprfmt("explain", name, "--json").json["found"]
    wanted = [str(code) for code in EXIT_CODES] if name == "exit-codes" else [name.upper()]
    assert [row["name"] for row in found] == wanted


ANSWER_WORDS = [
    *get_args(Verdict),
    *get_args(DivergenceKind),
    *KINDS.values(),
    *CERTAINTIES,
    *STATES,
    *TENSOR_VERDICTS,
    WORDS.yes,
    WORDS.no,
    *COLUMNS,
    "KL",
    "ulp",
    "apart",
    "residual",
    "relL2",
    "max/rms",
    "max abs",
    "cosine",
    "nats",
    "argmax",
    "perplexity",
    "complete",
    "first seen at",
    "tolerance",
]


def test_explain_knows_the_words_that_answers_print() -> None:
    unknown = []
    for word in ANSWER_WORDS:
        try:
            find_topics(word)
        except UsageError:
            unknown.append(word)
    assert not unknown


@pytest.mark.parametrize(
    "args",
    [
        ["logits", "nope", "--ids", "1", "--out"],
        ["trace", "nope", "--payload", "--ids", "1", "--html"],
        ["trace", "nope", "--payload", "--ids", "1", "--save"],
        ["qa", "nope", "--save-baseline"],
        ["diagnose", "nope", "no", "--html"],
        ["parity", "nope", "--between", "numpy", "numpy:float64", "--html"],
    ],
)
def test_an_output_that_cannot_be_written_is_said_before_the_work(
    args: list[str], tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text("mine")
    for path, says in ((old, "old: exists; use --force"), (tmp_path / "a" / "b", "no folder")):
        done = aprfmt(*args, path)
        assert done.code == 2 and says in done.err and not done.out
    assert old.read_text() == "mine"
    assert "nope: no such file" in aprfmt(*args, old, "--force").err


def test_a_first_guess_is_answered_with_the_option_it_needs(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert aprfmt("demo", "--into", model).code == 0
    file = tmp_path / "model.gguf"
    assert aprfmt("convert", model, file).code == 0
    before = file.read_bytes()
    done = aprfmt("set", file, "general.name=Jane", "-o", file)
    assert done.code == 2 and "use --in-place" in done.err and file.read_bytes() == before
    done = aprfmt("run", file, "What is 2+2?")
    assert done.code == 2 and "after --prompt" in done.err
    done = aprfmt("eval", file, "--ids", "1,2,3")
    assert re.match(r"(PASS|FAIL): \d+ passed", done.out)


def test_an_option_of_other_commands_is_answered_with_these() -> None:
    """Every option of every command, given to a command that has it not."""
    context = click.Context(group, info_name="aprfmt")
    having: dict[str, list[str]] = {}
    for word in sorted(COMMANDS):
        command = group.get_command(context, word)
        assert command is not None
        for name in {name for each in command.params for name in each.opts if name[:2] == "--"}:
            having.setdefault(name, []).append(word)
    assert len(having) > 100
    for name, words in having.items():
        for other in [word for word in sorted(COMMANDS) if word not in words][:1]:
            done = aprfmt(other, name)
            assert done.code == 2 and done.err.count("\n") == 1
            shown = ", ".join(f"aprfmt {word}" for word in words[:4])
            more = f" and {len(words) - 4} more" if len(words) > 4 else ""
            has = "has" if len(words) == 1 else "have"
            assert f"No such option '{name}'; {shown}{more} {has} it" in done.err


@pytest.mark.parametrize("wished", ["GPTQ", "AWQ", "Q4_2"])
def test_what_is_not_written_is_said_by_name(source: Path, tmp_path: Path, wished: str) -> None:
    done = aprfmt("convert", source, tmp_path / "a.apr", "--encoding", wished)
    assert done.code == 2 and f"{wished} is not written here" in done.err
    assert "Q8_0 or NF4" in done.err


@pytest.mark.parametrize(
    ("wished", "says"), [("Q4_K_M", "quantize --type Q4_K_M"), ("Q9_0", "near names: Q")]
)
def test_what_is_no_encoding_is_said_by_name(
    source: Path, tmp_path: Path, wished: str, says: str
) -> None:
    done = aprfmt("convert", source, tmp_path / "a.apr", "--tensor", f"token_embd={wished}")
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [("Q4_K_M", "general.file_type 15"), ("NF4-double", "NF4"),
     ("GPTQ", "written by `quantize --type` GPTQ-g32"),
     ("Q4_2", "ggml id 4"), ("Q4_K", "A block is d:f2 dmin:f2 scales:12u1 qs:128u1")],
)  # fmt: skip
def test_types_and_encodings_are_explained(name: str, says: str) -> None:
    done = aprfmt("explain", name)
    assert done.code == 0 and says in done.out and "None" not in done.out


@pytest.mark.parametrize(
    ("args", "where"),
    [(["explain", "zzz"], ""), (["trace", "nowhere.gguf"], "nowhere.gguf"),
     (["inspct"], ""), (["parity", "x.gguf"], None)],
)  # fmt: skip
def test_where_is_a_place_or_nothing(args: list[str], where: str | None) -> None:
    error = aprfmt(*args, "--json").json["error"]
    assert error["where"] != error["message"]
    assert where is None or error["where"] == where


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["inspct"], "near names: inspect"),
        (["inspect"], "Missing argument"),
        (["inspect", "nowhere.gguf"], "no such file"),
        (["tensors", "nowhere.gguf", "--limit", "0"], "--limit"),
        (["explain", "dtype_mislable"], "near: dtype_mislabel"),
        (["convert", "a", "b", "--tensor", "x"], "PATTERN=ENCODING"),
        (["split", "a.gguf", "b.gguf", "--max-shard-size", "big"], "no size"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(args: list[str], fragment: str) -> None:
    done = aprfmt(*args)
    assert done.code == 2
    assert fragment in done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


def test_json_of_a_failure_is_one_object(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x09\0\0\0")
    done = aprfmt("inspect", bad, "--json")
    assert done.code == 2
    assert done.json["ok"] is False
    assert done.json["exit"] == 2
    assert done.json["error"]["kind"] in ("format", "unsupported", "truncated")
    assert str(bad) in done.json["error"]["message"]


@pytest.mark.parametrize("args", [["tensors"], ["inspect"], ["tree"], ["hash"], ["hex"]])
def test_reading_commands_give_one_json_object(args: list[str], source: Path) -> None:
    done = aprfmt(*args, source, "--json")
    assert done.code == 0
    assert done.json["schema"] == f"aprfmt.{args[0]}/1"
    assert done.json["ok"] is True


def test_the_three_commands_of_the_card(source: Path, tmp_path: Path) -> None:
    done = process("import", source / "model.safetensors", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "model.apr").is_file()
    done = process("export", "model.apr", "--to", "gguf", cwd=tmp_path)
    assert done.code == 0
    done = process("diff", "model.apr", "model.gguf", "--tensor", "blk.1.ffn_gate", cwd=tmp_path)
    assert done.code == 0
    assert "1 tensors: 1 SAME_BYTES" in done.out


def test_no_match_is_exit_2_with_near_names(source: Path) -> None:
    done = aprfmt("diff", source, source, "--tensor", "blk.0.ffn_gat")
    assert done.code == 2
    assert "near names: blk.0.ffn_gate.weight" in done.err


def test_diff_exit_codes_carry_the_verdict(source: Path, tmp_path: Path) -> None:
    other = llama_folder(tmp_path / "other", "BF16", seed=1)
    assert aprfmt("diff", source, source).code == 0
    done = aprfmt("diff", source, other, "--top", 2)
    assert done.code == 1
    assert done.out.count("DIFFERENT  ") == 2
    done = aprfmt("diff", source, other, "--json")
    assert done.code == done.json["exit"] == 1
    assert len(done.json["tensors"]) == done.json["counts"]["DIFFERENT"]


def test_cat_slices_and_writes_npy(source: Path, tmp_path: Path) -> None:
    import numpy as np

    done = aprfmt("cat", source, "blk.0.ffn_up", "--slice", "1:3,-2:", "--json")
    assert done.code == 0
    assert done.json["shape"] == [2, 2]
    target = tmp_path / "x.npy"
    assert aprfmt("cat", source, "L0.ffn_up.weight", "-o", target).code == 0
    values = np.load(target)
    assert values.shape == (64, 64)
    assert values[1, -2] == done.json["values"][0]
    assert aprfmt("cat", source, "L0.ffn_up.weight", "-o", target).code == 2
    assert aprfmt("cat", source, "L0.ffn_up.weight", "--slice", "99").code == 2


def test_set_changes_one_key_and_no_tensor(source: Path, tmp_path: Path) -> None:
    import aprfmt as package

    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert aprfmt("convert", source, first).code == 0
    done = aprfmt("set", first, "general.name=a = b", "llama.context_length=64", "-o", second)
    assert done.code == 0
    with package.open(first) as a, package.open(second) as b:
        assert b.metadata["general.name"] == "a = b"
        assert b.metadata["llama.context_length"] == 64
        assert b.source.types == a.source.types
        changed = [k for k in a.metadata if package_plain(a, k) != package_plain(b, k)]
        assert changed == ["general.name", "llama.context_length"] or set(changed) == {
            "general.name",
            "llama.context_length",
        }
        assert {k: bytes(t.raw()) for k, t in a.items()} == {
            k: bytes(t.raw()) for k, t in b.items()
        }
    done = aprfmt("set", first, "llama.context_length=many", "-o", tmp_path / "c.gguf")
    assert done.code == 2
    assert "'many' is not of type uint32" in done.err


def package_plain(model: object, key: str) -> object:
    from aprfmt.compare import hashable_value

    return hashable_value(model.metadata[key])  # type: ignore[attr-defined]


def test_hash_manifest_finds_a_flipped_bit(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    aprfmt("convert", source, target)
    assert aprfmt("hash", target, "--write").code == 0
    manifest = tmp_path / "m.gguf.aprfmt-hash.json"
    assert aprfmt("hash", target, "--check", manifest).code == 0
    data = bytearray(target.read_bytes())
    data[-40] ^= 1
    target.write_bytes(data)
    done = aprfmt("hash", target, "--check", manifest, "--json")
    assert done.code == 1
    assert len(done.json["failures"]) == 1


def test_decoded_hashes_are_equal_across_formats(source: Path, tmp_path: Path) -> None:
    hashes = []
    for name in ("m.apr", "m.gguf", "hf"):
        aprfmt(
            "convert", source, tmp_path / name, *(["--to", "safetensors"] if name == "hf" else [])
        )
        rows = aprfmt("hash", tmp_path / name, "--json").json["tensors"]
        hashes.append({row["key"]: row["decoded"] for row in rows})
    assert hashes[0] == hashes[1] == hashes[2]


def test_hex_shows_the_files_own_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("m.apr", "m.gguf", "hf"):
        target = tmp_path / name
        aprfmt("convert", source, target, *(["--to", "safetensors"] if name == "hf" else []))
        file = target / "model.safetensors" if target.is_dir() else target
        raw = file.read_bytes()
        fields = aprfmt("hex", target, "--json", "--limit", "1000").json["fields"]
        assert len(fields) > 10
        for row in fields:
            shown = bytes.fromhex(row["bytes"])
            assert raw[row["offset"] : row["offset"] + len(shown)] == shown


def test_hex_of_a_quantized_block_decodes_it(source: Path, tmp_path: Path) -> None:
    aprfmt("convert", source, tmp_path / "q.gguf", "--encoding", "Q8_0")
    done = aprfmt("hex", tmp_path / "q.gguf", "--tensor", "blk.0.ffn_up.weight", "--json")
    block = done.json["blocks"][0]
    assert len(bytes.fromhex(block["bytes"])) == 34
    assert len(block["values"]) == 32
    assert block["fields"][0]["name"] == "d"


def test_demo_runs_and_says_every_command(tmp_path: Path, demo_model: Path) -> None:
    done = process("demo", "--out", tmp_path / "d")
    assert done.code == 0, done.err
    for step in ("import", "export", "diff", "tensors", "inspect"):
        assert f"$ aprfmt {step}" in done.out
    assert (tmp_path / "d" / "demo.gguf").is_file()
    assert process("demo", "--out", tmp_path / "d").code == 2


def test_nothing_from_a_file_reaches_the_terminal_raw(tmp_path: Path) -> None:
    from tests.conversion.folders import write_safetensors

    name = "evil\x1b[31m\x07\u202e.weight"
    write_safetensors(tmp_path / "x.safetensors", {name: (2,)}, {name: bytes(8)}, "F32")
    for command in ("tensors", "tree", "inspect", "hex", "hash"):
        done = aprfmt(command, tmp_path / "x.safetensors")
        assert done.code == 0, (command, done.err)
        assert not any((ord(c) < 32 and c != "\n") or c == "\u202e" for c in done.out + done.err)
