"""The table of exit codes, command by command: at least one input for each of its cells.

0: everything that can carry meaning was compared and agrees, or was accepted. 1: a difference is
established, which beats 2. 2: none is, and something that had to be compared could not be, or
nothing was counted. Seen red: a text of which nothing was scored failed with 1.
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checks.gates.faults import copied
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed

IDS = "1,2,3,4,5,6"
UP = "model.layers.1.mlp.up_proj.weight"
NPY = "no-point.npz"


@pytest.fixture(scope="module")
def place(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models: whole, other, not finite, unreadable, cut, with an unread file."""
    root = tmp_path_factory.mktemp("exits")
    whole = copied(demo_model, root / "d")
    (whole / "golden.json").unlink(missing_ok=True)
    for name in ("eps", "nan", "unread", "extra", "kind"):
        shutil.copytree(whole, root / name)
    config = json.loads((root / "eps/config.json").read_text())
    (root / "eps/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    rows = dict(tensors_of(root / "nan"))
    kind, shape, data = rows[UP]
    rows[UP] = (kind, shape, b"\xff" * len(data))
    write_mixed(root / "nan/model.safetensors", rows)
    (root / "unread/planted.bin").write_bytes(b"x")
    rows = dict(tensors_of(root / "extra"))
    write_mixed(root / "extra/model.safetensors", {**rows, "planted.x": rows[UP]})
    named = {**config, "model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}
    (root / "kind/config.json").write_text(json.dumps(named))
    (root / "bare").mkdir()
    write_mixed(root / "bare/arrays.safetensors", {"x": rows[UP]})
    (root / "empty").mkdir()
    (root / "junk.gguf").write_bytes(b"hello" * 100)
    (root / "text.txt").write_text("Once upon a time there was a little girl. " * 20)
    np.savez(root / NPY, foo=np.zeros(7, np.float32))
    rows_of_npz: dict[str, Any] = {
        "model.layers.0.mlp": np.zeros((6, 256), np.float32),
        "model.layers.1.mlp": np.array(["no", "numbers"]),
    }
    np.savez(root / "part.npz", **rows_of_npz)
    for line in (
        "convert d g.gguf", "quantize d q.gguf --type Q8_0",
        "set g.gguf tokenizer.ggml.scores=x -o scores.gguf",
        "set scores.gguf qwen2.rope.freq_base=5.0 -o both.gguf", "hash g.gguf --write",
        f"trace d --payload --points all --ids {IDS} -o trace.safetensors",
    ):  # fmt: skip
        assert _run(root, line).code == 0, line
    (root / "cut.gguf").write_bytes((root / "g.gguf").read_bytes()[:-100000])
    damaged = bytearray((root / "q.gguf").read_bytes())
    damaged[-5] ^= 64
    (root / "damaged.gguf").write_bytes(damaged)
    return root


NAMES = re.compile(r"(?<![\w.:/-])(?:d|eps|nan|unread|extra|kind|bare|empty|absent|made|"
                   r"[\w.-]+\.(?:gguf|apr|txt|npz|safetensors|json|jsonl))(?![\w:.])")  # fmt: skip


def _run(root: Path, line: str):  # type: ignore[no-untyped-def]
    return command(*shlex.split(NAMES.sub(lambda found: str(root / found[0]), line)))


TABLE = {
    "diff d g.gguf": 0,
    "diff unread unread": 0,
    "diff d unread --accept unread:planted*": 0,
    "diff d q.gguf --accept within": 0,
    "diff d eps": 1,
    "diff d q.gguf": 1,
    "diff d unread": 1,
    "diff g.gguf both.gguf": 1,
    "diff g.gguf scores.gguf": 2,
    "diff g.gguf cut.gguf": 2,
    "diff g.gguf junk.gguf": 2,
    "diff g.gguf absent": 2,
    "diff d nan --sample 50M": 1,
    "diff d d --sample 50M": 2,
    "diagnose d g.gguf": 0,
    "diagnose d d --budget 1K": 0,
    "diagnose q.gguf q.gguf --budget 1K": 0,
    "diagnose d@numpy d --budget 1K": 2,
    "diagnose d q.gguf": 0,
    "diagnose d unread --accept unread:planted*": 0,
    "diagnose d eps": 1,
    "diagnose d unread": 1,
    "diagnose g.gguf both.gguf": 1,
    "diagnose g.gguf scores.gguf": 2,
    "diagnose g.gguf cut.gguf": 2,
    "diagnose g.gguf absent": 2,
    "validate d": 0,
    "validate unread": 0,
    "validate extra": 2,
    "validate extra --strict": 1,
    "validate extra --accept unread:planted*": 0,
    "validate kind": 2,
    "validate kind --accept unread:tensor": 0,
    "validate bare": 0,
    "qa extra --only init-statistics": 2,
    "qa extra --only init-statistics --accept unread:planted*": 0,
    "scan extra -o rows-x.jsonl --jobs 1": 2,
    "scan kind -o rows-k.jsonl --jobs 1": 2,
    "scan bare -o rows-b.jsonl --jobs 1": 0,
    "scan extra -o rows-y.jsonl --jobs 1 --accept unread:*": 0,
    "diff extra extra": 0,
    "diagnose extra extra": 0,
    f"logits extra --ids {IDS}": 2,
    f"parity extra --between numpy numpy:cpu:float64 --ids {IDS}": 2,
    f"parity extra --between numpy numpy:cpu:float64 --ids {IDS} --accept unread:planted*": 0,
    f"trace extra --payload --points all --ids {IDS} --reference trace.safetensors": 2,
    "validate unread --strict": 1,
    "validate nan": 1,
    "validate cut.gguf": 1,
    "validate scores.gguf": 1,
    "validate g.gguf --against d": 0,
    "validate g.gguf --against eps": 1,
    "validate g.gguf --against junk.gguf": 2,
    "validate junk.gguf": 2,
    "validate empty": 2,
    "qa d --only tensor-contract": 0,
    "qa nan --only init-statistics": 1,
    "qa d --only baseline": 2,
    "qa cut.gguf --only tensor-contract": 2,
    "scan d -o rows-d.jsonl --jobs 1": 0,
    "scan empty -o rows-e.jsonl --jobs 1": 2,
    "scan absent -o rows-a.jsonl --jobs 1": 2,
    "eval d --text text.txt": 0,
    "eval q.gguf --text text.txt --against d": 0,
    "eval nan --text text.txt": 1,
    "eval d --text text.txt --against nan": 1,
    "eval d --ids 1": 2,
    "eval d --ids 1 --against nan": 2,
    "eval junk.gguf --text text.txt": 2,
    f"logits d --ids {IDS}": 0,
    f"logits d --ids {IDS} --reference trace.safetensors": 0,
    f"logits nan --ids {IDS}": 1,
    f"logits eps --ids {IDS} --reference trace.safetensors": 1,
    "logits d --ids 99999": 2,
    f"logits d --ids {IDS} --reference absent": 2,
    f"parity d --between numpy numpy:cpu:float64 --ids {IDS}": 0,
    f"parity nan --between numpy numpy:cpu:float64 --ids {IDS}": 1,
    f"parity d --between numpy d@nothing --ids {IDS}": 2,
    f"trace d --payload --points all --ids {IDS} --reference trace.safetensors": 0,
    f"trace eps --payload --points all --ids {IDS} --reference trace.safetensors": 1,
    "trace d --payload --points all --ids 1,2 --reference trace.safetensors": 2,
    f"trace nan --payload --points all --ids {IDS} --reference nan": 1,
    f"trace d --map {NPY} --ids {IDS}": 2,
    f"trace d --map part.npz --ids {IDS}": 2,
    f"trace d --map part.npz --ids {IDS} --reference trace.safetensors": 1,
    "hash g.gguf --check g.gguf.aprfmt-hash.json": 0,
    "hash q.gguf --check g.gguf.aprfmt-hash.json": 1,
    "hash cut.gguf --check g.gguf.aprfmt-hash.json": 1,
    "hash cut.gguf --check g.gguf.aprfmt-hash.json --tensor token_embd.weight": 2,
    f"hash g.gguf --check {NPY}": 2,
    "attest q.gguf --from d": 0,
    "attest damaged.gguf --from d": 1,
    "attest q.gguf --from eps": 1,
    "attest q.gguf --from junk.gguf": 2,
    "step d --after eps --optimizer sgd:lr=0.1": 2,
    "step d --after junk.gguf --optimizer sgd:lr=0.1": 2,
    "convert d made-1.apr": 0,
    "convert unread made-2.gguf --accept unread:planted*": 0,
    "convert unread made-3.gguf": 1,
    "convert cut.gguf made-4.apr": 2,
    "import d -o made-5.apr": 0,
    "import unread -o made-6.apr": 1,
    "export junk.gguf -o made-7 --to safetensors": 2,
    "quantize unread made-8.gguf --type Q8_0": 1,
    "quantize nan made-9.gguf --type Q8_0": 2,
    "split g.gguf made-a.gguf --max-shard-size 3M": 0,
    "merge cut.gguf made-b.gguf": 2,
    "set g.gguf general.name=x -o made-c.gguf": 0,
    "set g.gguf nonsense -o made-d.gguf": 2,
    "set unread config.json:x=1 -o made": 1,
    "repair cut.gguf --from g.gguf -o made-e.gguf": 0,
    "repair cut.gguf --from q.gguf -o made-f.gguf": 2,
    "inspect d": 0,
    "inspect cut.gguf": 2,
    "tensors d no-such-tensor": 2,
    "tree cut.gguf": 2,
    "cat d no-such-tensor": 2,
    "run nan --prompt x --max-tokens 2": 2,
    "tokenize d hi": 0,
    "template d --user x": 0,
    "explain no-such-thing": 2,
}


@pytest.mark.parametrize("line", TABLE)
def test_the_exit_code_of_the_table(line: str, place: Path) -> None:
    done = _run(place, line)
    assert done.code == TABLE[line], (done.out[-500:], done.err[-500:])
    if done.code == 2:
        assert done.err or "not " in done.out.lower()


def test_every_command_that_pronounces_a_verdict_has_each_cell() -> None:
    """0, 1 and 2 of all that compare or check; `step` needs a trainer's files for 0 and 1."""
    found: dict[str, set[int]] = {}
    for line, code in TABLE.items():
        found.setdefault(line.split()[0], set()).add(code)
    judging = ("diff", "diagnose", "validate", "qa", "eval", "logits", "parity", "trace", "hash",
               "attest", "convert")  # fmt: skip
    assert {name: found[name] for name in judging} == {key: {0, 1, 2} for key in judging}


NO = [
    "diff d eps", "diagnose d eps", "diff g.gguf scores.gguf", "diagnose g.gguf cut.gguf",
    "validate g.gguf --against eps", "validate nan", "qa nan --only init-statistics",
    f"logits eps --ids {IDS} --reference trace.safetensors", f"logits nan --ids {IDS}",
    f"parity nan --between numpy numpy:cpu:float64 --ids {IDS}",
    f"trace eps --payload --points all --ids {IDS} --reference trace.safetensors",
    "hash q.gguf --check g.gguf.aprfmt-hash.json", "attest damaged.gguf --from d",
    "diff d nan --sample 50M", "diff d d --sample 50M",
]  # fmt: skip


@pytest.mark.parametrize("form", ["human", "agent"])
@pytest.mark.parametrize("line", NO)
def test_an_answer_of_no_leads_on(line: str, form: str, place: Path) -> None:
    """Seen red: `validate`, `qa`, `trace`, `logits` said the next command to agents, `hash` none.

    The reference is the first side of a `diagnose`.
    """
    done = _run(place, f"{line} --format {form}")
    told = [row for row in done.out.splitlines() if row.startswith("next: ")]
    assert told and len(set(told)) == len(told), done.out
    if form == "agent":
        assert len(done.out.splitlines()) <= 12
    words = shlex.split(told[0])
    if "trace.safetensors" in line:  # what a run is held to is A
        assert words[2] == "diagnose" and words[3].endswith("trace.safetensors")
