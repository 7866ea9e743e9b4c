"""Options that belong together, or exclude each other, are refused in one line; nothing is done.

Seen red: each of the checks taken away.
"""

from pathlib import Path
from typing import Any

import pytest

from aprfmt.cli import pre_commit
from aprfmt.cli.options import check_new
from aprfmt.errors import OutputError, UsageError
from tests.cli.run import aprfmt

# Command line -> what is said. MODEL is a folder that opens, FILE its weights, OUT a new path.
REFUSED = {
    "hash FILE --ranks 2": "--ranks: needs --roles; alone it has no effect",
    "hash FILE --blocks": "--blocks: needs --write; alone it has no effect",
    "hash FILE --write --tensor x": "--write is of the whole model; leave --tensor out",
    "hash FILE --roles --write": "--roles writes a manifest of its own; leave --write, --check",
    "hash FILE --roles --tensor x": "--roles writes a manifest of its own",
    "repair FILE -o OUT": "give a good copy with --from SOURCE, or --partial",
    "repair FILE -o OUT --partial --from FILE": "give a good copy with --from SOURCE, or --part",
    "repair MODEL --index --from FILE": "--index reads the shards alone; leave --from and the",
    "repair MODEL --index --by-index": "--index makes the index fit the shards",
    "repair MODEL --by-index --from FILE": "--by-index reads the shards alone; leave --from",
    "repair MODEL --index --partial": "--index reads the shards alone",
    "repair MODEL --index --compare": "--index reads the shards alone",
    "repair FILE --partial": "name the file to write with -o OUTPUT",
    "repair MODEL --partial -o OUT": "is a folder; give the file of it that is cut or damaged",
    "repair OUT --partial -o OUT": "no such file",
    "logits MODEL --ids 1,2 --answer-dtype bfloat16": "--answer-dtype goes with --reference",
    "logits MODEL --ids 1,2 --load FILE": "--load goes with --reference",
    "diff MODEL MODEL --format sarif --sample 1M": "--format sarif and junit list tensors: not w",
    "diff MODEL MODEL --format junit --adapter MODEL": "--format sarif and junit list tensors",
    "diff MODEL MODEL --sample 1M --html OUT": "--sample compares bytes: it goes with --tensor",
    "diff MODEL MODEL --sample 1M --only metadata": "--sample compares bytes",
    "trace MODEL --budget 10": "--budget limits a run; add --payload or --engine",
    "trace MODEL --payload --dry-run --budget 10 --ids 1": "--budget limits a run",
    "trace MODEL --payload --budget 10 --ids 1 --save OUT": "leave --budget out",
    "trace MODEL --mapping FILE": "--mapping goes with --map DIR",
    "trace MODEL --payload --ids 1 --same-dtype float32": "--same-dtype goes with --reference",
    "trace MODEL --payload --ids 1 --exact": "--exact is of a comparison",
    "logits MODEL --ids 1 --exact": "--exact goes with --reference",
    "trace MODEL --map MODEL --payload": "--map reads dumped arrays; leave --load, --payload",
    "convert MODEL OUT.gguf --tensor x": "'x': expected PATTERN=ENCODING",
    "convert MODEL OUT.gguf --tensor =F32": "'=F32': expected PATTERN=ENCODING",
    "convert MODEL OUT.gguf --tensor x=": "'x=': expected PATTERN=ENCODING",
    "set MODEL": "",
    "set FILE key -o OUT": "'key': expected KEY=VALUE",
    "set FILE =1 -o OUT": "'=1': expected KEY=VALUE",
    "set FILE a=1": "give -o OUTPUT for a copy, or --in-place, one of them",
    "set FILE a=1 --in-place -o OUT": "give -o OUTPUT for a copy, or --in-place, one of them",
}


@pytest.mark.parametrize("line", REFUSED)
def test_options_that_do_not_fit_are_refused_in_one_line(
    line: str, demo_model: Path, tmp_path: Path
) -> None:
    places = {
        "MODEL": str(demo_model), "FILE": str(demo_model / "model.safetensors"),
        "OUT": str(tmp_path / "out"), "OUT.gguf": str(tmp_path / "out.gguf"),
    }  # fmt: skip
    done = aprfmt(*(places.get(word, word) for word in line.split()))
    assert done.code == 2 and (not done.out or "--format" in line), done
    said = " ".join(done.err.split())
    assert REFUSED[line] in said and "Traceback" not in said, said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_there_is_kept_without_force(force: bool, tmp_path: Path) -> None:
    there, new, nowhere = tmp_path / "a", tmp_path / "b", tmp_path / "c" / "d"
    there.touch()
    check_new(force, None, new)
    with pytest.raises(OutputError, match=r"there is no folder .*c; make it first"):
        check_new(force, None, nowhere)
    if force:
        return check_new(force, new, there)
    with pytest.raises(OutputError, match="a: exists; use --force to replace it"):
        check_new(force, new, there)
    return None


@pytest.mark.parametrize("argv", [[], ["inspect"], ["--base", "validate"], ["m.gguf", "diff"]])
def test_a_hook_of_another_name_is_refused(argv: list[Any]) -> None:
    with pytest.raises(UsageError, match="found"):
        pre_commit.run_hook(argv)
