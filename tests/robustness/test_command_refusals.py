"""Mistakes on the command line, each answered by its one line, exit code 2 and no file."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import aprfmt
from aprfmt.errors import ArchError
from tests.cli.run import aprfmt as command

# A file with one tensor, whose name is no parameter of any model.
SAFETENSORS = (
    (72).to_bytes(8, "little")
    + b'{"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(72)
    + bytes(4)
)

# MODEL is a small model, FILE a file with the content of the row, OUT a path where nothing is.
REFUSED: Mapping[str, tuple[str, bytes, str]] = {
    "no format": ("convert MODEL OUT.xyz", b"", "OUT.xyz: its extension names no format; expected"),
    "two formats": ("convert MODEL OUT.gguf --to apr", b"", "extension says gguf; expected apr"),
    "no such format": ("convert MODEL OUT --to nope", b"", "--to nope: is no format here"),
    "no change": ("set MODEL -o OUT", b"", "nothing to change; give KEY=VALUE, or --remove KEY"),
    "another format": (
        "set MODEL rope_theta=5 -o OUT.gguf", b"", "OUT.gguf: set keeps the format safetensors",
    ),
    "removed twice": (
        "set MODEL --remove __metadata__:format --remove __metadata__:format -o OUT", b"",
        "is named twice; give one change of a key",
    ),
    "neither place": ("set MODEL a=1", b"", "give -o OUTPUT for a copy, or --in-place, one of"),
    "export to nothing": ("export MODEL", b"", "give --to gguf or --to safetensors, or -o OUT"),
    "ranks alone": ("hash MODEL --ranks 2", b"", "--ranks: needs --roles"),
    "blocks alone": ("hash MODEL --blocks", b"", "--blocks: needs --write"),
    "roles and write": ("hash MODEL --roles --write", b"", "leave --write, --check, "),
    "no manifest": ("hash MODEL --check FILE", b"{}", "FILE: is no hash manifest; expected schema"),
    "block outside": (
        "hex MODEL --tensor model.norm.weight --block 99999", b"",
        "model.norm.weight: --block 99999, the tensor has ",
    ),
    "slice outside": ("cat MODEL model.norm.weight --slice 99999", b"", "is outside axis of "),
    "slice of words": ("cat MODEL model.norm.weight --slice a", b"", "is no number or range"),
    "slice of axes": ("cat MODEL model.norm.weight --slice 1,1", b"", "does not fit shape "),
    "statistics": ("inspect MODEL --stats", b"", "inspect: --stats goes into a page; add --html"),
    "both": (
        "inspect MODEL --stats --vocabulary", b"",
        "inspect: --stats and --vocabulary goes into a page; add --html FILE",
    ),
    "reference and out": (
        "logits MODEL --ids 1,2 --reference FILE --out OUT.npy", b"{}",
        "--out writes a run's logits; leave --reference out",
    ),
    "verbose of no manifest": (
        "hash MODEL -v", b"", "-v lists what differs from a manifest; give --check MANIFEST",
    ),
    "no root": ("scan -o OUT.jsonl", b"", "nothing to scan; give a ROOT, or --list FILE"),
    "empty list": ("scan --list FILE -o OUT.jsonl", b"\n# none\n", "nothing to scan; give a ROOT"),
    "no utf-8": (
        "eval MODEL --text FILE", b"ab\xff", "FILE: byte 0xff at 2 is no UTF-8; expected a UTF-8",
    ),
    "no sample": (
        "eval MODEL --samples FILE.jsonl", b'\n{"prompt": "a"}\n',
        'FILE.jsonl: line 2: has no "text", and no "prompt" with "response"',
    ),
    "no string": (
        "eval MODEL --samples FILE.jsonl", b'{"text": 3}\n', "line 1: a value is no string",
    ),
    "what is accepted": ("qa MODEL --accept nope", b"", "'nope': expected "),
    "no tolerances": (
        "parity MODEL --thresholds FILE --between numpy torch", b"{}",
        "FILE: is no file of parity --calibrate; expected schema",
    ),
    "golden nothing": (
        "qa MODEL --golden FILE", b"{}", 'FILE: holds neither "greedy" prompts nor "losses"',
    ),
    "imatrix alone": (
        "convert MODEL OUT.gguf --imatrix FILE", b"",
        "--pure and --imatrix need a quantization: name one with --type",
    ),
    "no imatrix": (
        "quantize MODEL OUT.gguf Q4_K --imatrix FILE", b"\x01\0\0\0", "FILE: imatrix entries",
    ),
    "seed": ("run MODEL --ids 1 --seed -1", b"", "'-1' is no whole number from 0 to "),
    "budget of no run": (
        "trace MODEL --budget 10", b"", "--budget limits a run; add --payload or --engine",
    ),
    "budget of an estimate": (
        "trace MODEL --payload --dry-run --ids 1 --budget 10", b"",
        "--budget limits a run; add --payload or --engine",
    ),
    "saved in part": (
        "trace MODEL --payload --ids 1 --budget 10 --save OUT", b"",
        "a saved trace has every point asked for; leave --budget out",
    ),
    "saved in part, aprt": (
        "trace MODEL --payload --ids 1 --budget 10 --save-aprt OUT", b"",
        "a saved trace has every point asked for; leave --budget out",
    ),
    "gradients of nothing": (
        "step MODEL --grads FILE.safetensors",
        SAFETENSORS, "holds no gradient of ",
    ),
    "answer's type": (
        "logits MODEL --ids 1 --answer-dtype bfloat16", b"",
        "--answer-dtype goes with --reference, whose arithmetic it states",
    ),
    "no source": (
        "repair MODEL -o OUT", b"", "give a good copy with --from SOURCE, or --partial",
    ),
    "index and source": (
        "repair MODEL --index --from MODEL", b"", "--index reads the shards alone; leave --from",
    ),
    "no quantization": ("convert MODEL OUT.gguf --tensor a", b"", "expected PATTERN=ENCODING"),
    "no such type": ("quantize MODEL OUT.gguf --type NOPE", b"", "quantize --help lists all"),
    "--no value": ("set MODEL abc -o OUT", b"", "expected KEY=VALUE"),
    "no bucket": ("inspect s3://b/../x.gguf", b"", "names no bucket; expected s3://BUCKET/FILE"),
    "no repository": ("inspect hf://x", b"", "names no repository; expected hf://OWNER/NAME"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy, which a command that takes what it should refuse may write to."""
    return shutil.copytree(demo_model, tmp_path_factory.mktemp("refused") / "m")


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_one_line_and_writes_nothing(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, held, says = REFUSED[what]
    monkeypatch.chdir(tmp_path)
    words = [str(model) if word == "MODEL" else word for word in line.split()]
    for word in words:
        if word.startswith("FILE"):
            Path(word).write_bytes(held)
    before = sorted([*os.listdir(), *os.listdir(model)])
    done = command(*words)
    assert done.code == 2 and says in done.err, (done.code, done.err, done.out[:300])
    assert len(done.err.splitlines()) == 1 or done.err.startswith("Usage: "), done.err
    assert "bug" not in done.err and not done.out
    assert sorted([*os.listdir(), *os.listdir(model)]) == before


def test_the_only_model_of_a_folder_is_traced_and_no_other(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("trace")
    assert done.code == 2 and "name a MODEL; the current folder has no model here" in done.err
    for name in ("a.gguf", "b.gguf"):
        assert command("convert", demo_model, name, "--quiet").code == 0
        done = command("trace")
        if name == "a.gguf":
            assert done.code == 0 and "using a.gguf" in done.err
    assert done.code == 2 and "the current folder has a.gguf, b.gguf" in done.err


def test_bare_weights_say_no_architecture(demo_model: Path, tmp_path: Path) -> None:
    (weights,) = demo_model.glob("*.safetensors")
    (tmp_path / "w.safetensors").write_bytes(weights.read_bytes())
    with aprfmt.open(tmp_path / "w.safetensors") as model:
        with pytest.raises(ArchError, match=r"w.safetensors: says no architecture .* --arch"):
            _ = model.spec
        view = model["model.norm.weight"]
        for at in (view.shape[0], -view.shape[0] - 1):
            with pytest.raises(IndexError, match=f"index {at}; axis 0 has {view.shape[0]} rows"):
                view[at]
        assert view[-1] == view[view.shape[0] - 1]
