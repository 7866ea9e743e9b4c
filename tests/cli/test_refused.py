"""What people type by habit or mistake, and the one line that each gets: a table of command lines.

A row is a command line in a folder with `m.gguf`, `hf/` (a Hugging Face folder) and files of other
programs; `says` stands in the line. None of them writes anything, or ends in a bug report.
"""

import bz2
import gzip
import io
import lzma
import os
import shutil
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from aprfmt.cli.commands import COMMANDS
from aprfmt.formats.foreign_formats import EXTENSIONS
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    llama_folder(folder / "hf", "BF16")
    assert aprfmt("convert", folder / "hf", folder / "m.gguf").code == 0
    whole = (folder / "m.gguf").read_bytes()
    for name, packed in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        (folder / f"m.gguf.{name}").write_bytes(packed(whole[:3000]))
    (folder / "m.onnx").write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.1.0")
    (folder / "m.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(20))
    (folder / "model.bin").write_bytes(b"\x1c\0\0\0TFL3" + bytes(20))
    (folder / "m.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(30))
    (folder / "m.keras").write_bytes(b"PK\x03\x04" + bytes(30))
    (folder / "m.tar").write_bytes(bytes(257) + b"ustar\x0000" + bytes(300))
    folders = {"m.mlpackage": "Manifest.json", "tf": "saved_model.pb", "graph": "model.onnx",
               "bare": "config.json", "none": "README"}  # fmt: skip
    for name, inside in folders.items():
        (folder / name).mkdir()
        (folder / name / inside).write_text("{}")
    (folder / "t.txt").write_text("hello there\n")
    (folder / "notes.json").write_text("[1, 2]")
    (folder / "dead.gguf").symlink_to("gone.gguf")
    (folder / "loop.gguf").symlink_to("loop.gguf")
    shutil.copy(folder / "m.gguf", folder / "-dash.gguf")
    save_file({"input_ids": np.ones((1, 4), np.int64)}, folder / "batch.safetensors")
    run = ("--payload", "--points", "all", "--ids", "1", "-o", folder / "run.safetensors")
    assert aprfmt("trace", folder / "hf", *run).code == 0
    (folder / "dumps").mkdir()
    with safe_open(folder / "run.safetensors", "np") as saved:
        np.save(folder / "dumps" / "ffn_out.npy", saved.get_tensor("L0.ffn_out"))
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.setenv("HF_HOME", str(made / "no_cache"))
    return made


PATHLESS = ("doctor", "explain", "demo")  # commands whose first word is no path
ELSEWHERE = "which is not read here; take the model's safetensors or GGUF"
LINES: tuple[tuple[str, str], ...] = (
    ("inspect m.gguf.gz", "m.gguf.gz: is compressed (gzip); unpack it first: gzip -dk m.gguf.gz"),
    ("validate m.gguf.bz2", "unpack it first: bzip2 -dk m.gguf.bz2"),
    ("convert m.gguf.xz o.apr", "unpack it first: xz -dk m.gguf.xz"),
    ("inspect m.onnx", f"m.onnx: is an ONNX model, {ELSEWHERE}"),
    ("convert m.onnx o.gguf", f"m.onnx: is an ONNX model, {ELSEWHERE}"),
    ("m.tflite", f"m.tflite: is a TensorFlow Lite model, {ELSEWHERE}"),
    ("inspect model.bin", "model.bin: is a TensorFlow Lite model"),
    ("diff m.gguf m.h5", f"m.h5: is an HDF5 file (Keras?), {ELSEWHERE}"),
    ("tensors m.keras", f"m.keras: is a Keras archive, {ELSEWHERE}"),
    ("hash m.tar", "m.tar: is a tar archive; unpack it, and name the model inside"),
    ("inspect m.mlpackage", f"m.mlpackage: is a Core ML package, {ELSEWHERE}"),
    ("inspect tf", "tf: holds saved_model.pb, a TensorFlow graph or SavedModel"),
    ("run graph --prompt x", "graph: holds model.onnx, an ONNX model"),
    ("inspect bare", "bare: holds config.json and no weights; expected model.safetensors"),
    ("inspect none", "none: holds no model; expected model.safetensors"),
    ("inspect owner/name", "in the local hub cache; on the Hugging Face hub: hf://owner/name"),
    ("owner/name", "on the Hugging Face hub: hf://owner/name"),
    ("scan owner/name", "on the Hugging Face hub: hf://owner/name"),
    ("logits Owner/Name-7B --ids 1", "on the Hugging Face hub: hf://Owner/Name-7B"),
    ("inspect nope/m.gguf", "nope/m.gguf: no such file or folder: there is no folder nope"),
    ("inspect hf/modle.safetensors", "near names: hf/model.safetensors"),
    ("inspect n.gguf", "n.gguf: no such file or folder; near names: m.gguf"),
    ("n.gguf", "n.gguf: no such file or folder; near names: m.gguf"),
    ("M.GGUF", "near names: m.gguf"),
    ("diff m.gguf ./n.gguf", "near names: m.gguf"),
    ("scan n.gguf", "near names: m.gguf"),
    (
        "inspect zzzzzzzzzz",
        "zzzzzzzzzz: no such file or folder; models there: -dash.gguf, m.gguf, hf\n",
    ),
    ("step hf --after zzzzzzzzzz", "models there: -dash.gguf, m.gguf, hf\n"),  # no batch
    ("inspect hf/zzzzzzzzzz", "models there: hf/model.safetensors\n"),
    ("trace --payload --ids 1", "trace: name a MODEL; the current folder has -dash.gguf, m.gguf\n"),
    (
        "trace hf --payload --ids 1 --reference run.safetensors --same-dtype zzzzzzzzzz",
        "zzzzzzzzzz: no such file or folder; models there: ",
    ),
    (
        "trace --load run.safetensors --reference run.safetensors --same-dtype zzzzzzzzzz",
        "--same-dtype zzzzzzzzzz: no such file or folder; models there: ",
    ),
    (
        "trace --load run.safetensors --reference run.safetensors --same-dtype m.gguf",
        "--same-dtype m.gguf: is no saved trace",
    ),
    (
        "trace --load run.safetensors --reference zzzzzzzzzz --same-dtype run.safetensors",
        "--reference zzzzzzzzzz: no such file or folder",
    ),
    ("trace hf --map dumps --ids 1 -o t.safetensors --reference zzzzzzzzzz", "--reference zzzz"),
    ("trace hf --map dumps --ids 1 -o t.safetensors --exact", "no two requests of the dump have"),
    (
        "logits hf --ids 1 --reference notes.json",
        "notes.json: is JSON that begins '[1, 2]', and has no log-probabilities; expected the "
        "answer of a server (vLLM, SGLang, OpenAI-compatible), .json or .jsonl with one of the "
        "keys prompt_logprobs, input_token_logprobs,",
    ),
    ("logits hf --ids 1 --reference m.gguf", "m.gguf: has no log-probabilities; expected the"),
    ("logits hf --ids 1 --reference run.safetensors --load t.txt", "t.txt: is text that begins"),
    ("parity hf --between cpu trch", "run 'trch': backend 'trch' is not known; near names: torch;"),
    ("parity hf --between trch cpu", "run 'trch': backend 'trch' is not known"),
    ("parity --between cpu trch hf", "run 'trch': backend 'trch' is not known"),
    ("parity zzzzzzzzzz --between cpu tensorflow", "'tensorflow' is not known; expected BACKEND"),
    ("parity zzzzzzzzzz --between cpu torch", "zzzzzzzzzz: no such file or folder"),
    ("parity hf m.gguf --between cpu torch", "found the models hf, m.gguf"),
    ("scan hf -o rows.txt", "rows.txt: rows are written as JSON lines (.jsonl) or as .parquet;"),
    ("scan hf -o rows", "give -o rows.jsonl\n"),
    ("scan hf -o m.gguf", "give -o m.jsonl\n"),
    ("inspect dead.gguf", "dead.gguf: is a link to gone.gguf, which is not there"),
    ("inspect loop.gguf", "loop.gguf: is a link to loop.gguf, which leads back to it"),
    ("convert - o.gguf", "-: a model is read from a file, not from standard input"),
    (
        "inspect -dash.gguf",
        "-dash.gguf: begins as an option does; the file of that name is ./-dash",
    ),
    ("diff m.gguf m.gguf --budget soon", "'soon' is no limit; expected for example 90s or 2G"),
    ("inspect m.gguf --arch Qwen2", "arch 'Qwen2' is not known; known: qwen2,"),
    ("inspect m.gguf --arch Qwen2ForCausalLM", "is not known; known: qwen2"),
    ("hash m.gguf --check t.txt", "t.txt: not JSON at byte 0: Expecting value; expected what `apr"),
    ("inspect huggingface.co/a/b", "an address begins with https:// or hf://"),
    ("split hf parts.gguf --max-shard-size 2", "'2' is 2 bytes; give the unit: 2G, 2M"),
    ("split hf parts.gguf --max-shard-size 2B", "'2B' is 2 bytes; expected for example 500M or 2G"),
    ("convert hf o.gguf --max-shard-size 500", "'500' is 500 bytes; give the unit: 500G, 500M"),
    ("logits m.gguf --ids 1 --memory 8", "'8' is 8 bytes; give the unit: 8G, 8M"),
    (
        "cat m.gguf output_norm.weight --slice 9999:",
        "selects nothing of axis 0, which has entries 0",
    ),
    ("cat m.gguf output_norm.weight --slice 5:5", "'5:5' selects nothing of axis 0"),
    ("cat m.gguf token_embd.weight --slice 0,-9999:-999", "selects nothing of axis 1"),
    ("convert m.gguf out-hf", "(a Hugging Face folder: --to safetensors)"),
    (
        "convert m.gguf none",
        "none: gguf is one file; give it the extension .gguf (--to safetensors",
    ),
    ("quantize hf Q4_K_M", "Q4_K_M: is a type, and DST is missing"),
    (
        "quantize hf Q4_K_M o.gguf",
        "Q4_K_M: is a type, which stands after SRC and DST: hf o.gguf Q4_K_M",
    ),
    ("quantize q8_0 hf o.gguf", "q8_0: is a type, which stands after SRC and DST: hf o.gguf q8_0"),
    ("quantize hf o.gguf", "give the type: --type Q4_K_M, or Q4_K_M after DST"),
    ("quantize hf o.gguf Q4_K_M --type Q8_0", "give one of them"),
    ("quantize hf o.gguf Q4_K_X", "--type Q4_K_X: is not known; near names: "),
    ("inspect t.txt", "t.txt: is text that begins 'hello there'; expected a model file"),
    ("validate notes.json", "notes.json: is JSON that begins '"),
    ("diff m.gguf t.txt", "t.txt: is text that begins"),
    (
        "quantize hf o.gguf Q4_K_M --imatrix t.txt",
        "text that begins 'hello there'; expected an imp",
    ),
    ("tensors m.gguf --limit abc", "'--limit': 'abc' is no whole number"),
    ("run m.gguf --ids 1 --temperature hot", "'--temperature': 'hot' is no number"),
    (
        "convert hf o.gguf --to onnx",
        "--to onnx: is no format here; expected apr, gguf, safetensors",
    ),
    ("convert hf out --to onnx", "--to onnx: is no format here"),
    (
        "logits m.gguf@numpy:float63 --ids 1",
        "'float63' is no device (expected cpu, cuda, cuda:N, cuda:all",
    ),
    ("logits m.gguf@cpu:fp61 --ids 1", "'fp61' is no device"),
    ("convert hf o.gguf --max-shard-size 1e400", "'1e400' is no size"),
    ("convert hf o.gguf --max-shard-size 9e99G", "'9e99G' is no size"),
    ("convert hf o.gguf --max-shard-size nan", "'nan' is no size"),
    ("logits m.gguf --ids 1 --memory inf", "'inf' is no size"),
    ("convert hf o.gguf --jobs 99999999999999999999", "is no whole number from 1 to 4096"),
    ("run m.gguf --ids 1 --threads 99999999999999999999", "is no whole number from 1 to 4096"),
    ("inspect m\0.gguf", "holds a null byte"),
    ("run m\0.gguf --ids 1", "holds a null byte"),
    ("convert hf \ud800.gguf", "is half of one (a surrogate)"),
    ("help sett", "no command 'sett'; near names: set"),
    ("zzz", "no command 'zzz'; aprfmt --help lists them"),
)


@pytest.mark.parametrize(("line", "says"), LINES)
def test_a_mistake_gets_its_one_line(line: str, says: str, here: Path) -> None:
    before = sorted(os.listdir(here))
    done = aprfmt(*line.split())
    assert done.code == 2 and not done.out
    assert says in done.err and done.err.count("\n") == 1, done.err
    assert "bug:" not in done.err and sorted(os.listdir(here)) == before


def test_every_command_of_the_table_is_one() -> None:
    first = {line.split()[0] for line, _ in LINES} & set(COMMANDS)
    assert {"inspect", "convert", "quantize", "diff", "scan", "logits"} <= first


@pytest.mark.parametrize("suffix", EXTENSIONS)
def test_every_other_programs_file_is_called_what_it_is(suffix: str, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with ZipFile(archive, "w") as made:
        made.writestr("notes.txt", "of another program")
    for content in (b"\x07\x01\x02 nothing known " * 8, archive.getvalue()):
        path = tmp_path / f"model{suffix.upper()}"
        path.write_bytes(content)
        done = aprfmt("inspect", path)
        assert done.code == 2 and f"{path}: is {EXTENSIONS[suffix]}" in done.err


@pytest.mark.parametrize("suffix", EXTENSIONS)
def test_a_name_alone_refuses_nothing(suffix: str, here: Path, tmp_path: Path) -> None:
    shutil.copy(here / "m.gguf", tmp_path / f"m{suffix}")
    assert aprfmt("inspect", tmp_path / f"m{suffix}").code == 0


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in PATHLESS])
def test_an_empty_path_is_no_folder(name: str, here: Path) -> None:
    """A variable of the shell that is not set; click's own answer is the folder one stands in."""
    before = sorted(os.listdir(here))
    rest = {"hex": ["x"], "cat": ["x"], "diff": ["m.gguf"], "diagnose": ["m.gguf"]}
    done = aprfmt(name, "", *rest.get(name, []))
    assert done.code == 2 and done.err.count("\n") == 1
    assert "is empty" in done.err or "Missing" in done.err or "give " in done.err, done.err
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize(
    "line",
    ["convert m.gguf", "merge m.gguf", "import m.gguf -o", "validate m.gguf --against",
     "cat m.gguf output_norm.weight -o", "diff m.gguf", "export m.gguf --to gguf -o",
     "logits m.gguf --ids 1 --out", "set m.gguf general.name=x -o", "demo --into"],
)  # fmt: skip
def test_an_empty_output_is_refused(line: str, here: Path) -> None:
    before = sorted(os.listdir(here))
    done = aprfmt(*line.split(), "")
    assert done.code == 2 and "is empty; is a variable of the shell not set?" in done.err
    assert sorted(os.listdir(here)) == before


def test_help_and_version_are_words_too() -> None:
    assert aprfmt("version").out == aprfmt("--version").out != ""
    assert aprfmt("help").out == aprfmt("--help").out != "" and aprfmt("help").code == 0
    for name in COMMANDS:
        assert aprfmt("help", name).out == aprfmt(name, "--help").out != ""


@pytest.mark.parametrize("kind", ["Q8_0", "q8_0", "7"])
def test_quantize_takes_the_type_where_llama_quantize_does(
    kind: str, here: Path, tmp_path: Path
) -> None:
    for number, args in enumerate((["--type", "Q8_0"], [kind])):
        assert aprfmt("quantize", here / "hf", tmp_path / f"{number}.gguf", *args).code == 0
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()
