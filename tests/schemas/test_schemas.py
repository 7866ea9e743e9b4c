"""Every command's --json has a schema that ships, fits, and notices a changed key.

The objects of a command are made once, in one process: `--dist loadgroup` keeps a command together.

Seen red: a schema without its `required`, one that allows other keys, an error object with the
body of a success, a command without a schema.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aprfmt.cli.commands import COMMANDS
from aprfmt.model.file_kinds import KINDS
from aprfmt.schemas import COMMON, NUMBERS, schema, schema_names, schema_number
from tests import approved
from tests.cli.run import aprfmt
from tests.schemas.validation import faults, validator

IDS = "1417,362,258,1168"


@pytest.fixture(scope="module")
def files(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("schemas")
    found = {"folder": demo_model, "out": folder, "gguf": folder / "demo.gguf"}
    assert aprfmt("convert", demo_model, found["gguf"], "--no-verify").code == 0
    found["small"] = folder / "small.gguf"
    args = ("convert", demo_model, found["small"], "--encoding", "Q4_0", "--no-verify")
    assert aprfmt(*args).code == 0
    return found


# What is run for each command: {folder}, {gguf}, {small} and {out} are filled; several where the
# object has several forms.
RUNS: Mapping[str, tuple[str, ...]] = {
    "demo": ("demo", "demo --into {out}/demo"),
    "inspect": ("inspect {folder}", "inspect {small}"),
    "tensors": ("tensors {small} blk.0 --stats",),
    "tree": ("tree {gguf}",),
    "hex": ("hex {gguf} --limit 4", "hex {small} --tensor blk.0.ffn_up.weight",
            "hex {gguf} --offset 3 --length 8"),
    "cat": ("cat {gguf} output_norm.weight", "cat {gguf} output_norm.weight -o {out}/x.npy"),
    "import": ("import {folder} -o {out}/i.apr",),
    "export": ("export {gguf} --to safetensors -o {out}/e",),
    "convert": ("convert {folder} {out}/c.gguf --dry-run", "convert {gguf} {out}/c.apr"),
    "quantize": ("quantize {folder} {out}/q.gguf --type Q8_0",),
    "set": ("set {gguf} general.name=x general.author=y --remove qwen2.context_length "
            "-o {out}/s.gguf", "set {out}/s.gguf general.name=y --in-place"),
    "split": ("split {folder} {out}/split --max-shard-size 3M",),
    "merge": ("merge {gguf} {out}/m.gguf",),
    "repair": ("repair {gguf} --from {gguf} -o {out}/r.gguf",),
    "diff": ("diff {gguf} {small}", "diff {gguf} {small} --sample 1M"),
    "parity": (
        f"parity {{gguf}} --between numpy numpy::float64 --ids {IDS} --arbiter",
        f"parity {{gguf}} --between numpy numpy::float64 --ids {IDS} --calibrate {{out}}/cal.json"
        " --repeats 2",
        f"parity {{gguf}} --between numpy transformers --ids {IDS} --dry-run",
    ),
    "diagnose": (f"diagnose {{gguf}} {{small}} --ids {IDS}",),
    "attest": ("attest {small} --from {gguf} -o {out}/attest.json",
               "attest {gguf} --from {folder} --check {out}/attest.json"),
    "step": ("step {folder} --after {gguf} --accept unread:parameter",
             "step {folder} --after {gguf} --dry-run"),
    "hash": ("hash {gguf}", "hash {gguf} --raw-only"),
    "scan": ("scan {gguf} {small} -o {out}/scan.jsonl --jobs 1",),
    "validate": ("validate {gguf}",),
    "tokenize": ("tokenize {gguf} hello",),
    "template": ("template {gguf} --user hi",),
    "trace": (
        "trace {gguf}", f"trace {{gguf}} --payload --ids {IDS} --layers 0 --save {{out}}/t.st",
        f"trace {{gguf}} --payload --ids {IDS} --layers 0 --reference {{small}}",
        f"trace {{gguf}} --ids {IDS} --dry-run",
    ),
    "logits": (f"logits {{gguf}} --ids {IDS}",),
    "run": (f"run {{gguf}} --ids {IDS} --max-tokens 2", f"run {{gguf}} --ids {IDS} --dry-run"),
    "eval": (f"eval {{gguf}} --ids {IDS}", f"eval {{small}} --ids {IDS} --against {{gguf}}"),
    "qa": ("qa {gguf} --only init-statistics --only metadata",),
    "explain": ("explain", "explain Q4_K", "explain --schema diff"),
    "doctor": ("doctor",),
}  # fmt: skip
# Places below which a file or another program says which keys there are.
OPEN: Mapping[str, tuple[str, ...]] = {
    "convert": ("sizes",), "import": ("sizes",), "export": ("sizes",), "quantize": ("sizes",),
    "set": ("sizes",), "split": ("sizes",), "merge": ("sizes",),
    "inspect": ("metadata", "metadata_names", "tokenizer", "encodings", "hyperparameters",
                "keys/read"),
    "scan": ("models/*/encodings",), "tensors": ("tensors/*/parts",),
    "template": ("messages/*",),
    "trace": ("trace", "aliases", "run/backend", "reference/run"),
    "logits": ("run/backend",), "run": ("run/backend",),
    "eval": ("run/backend", "against/run/backend"),
    "qa": ("backend", "gates/*/measures", "gates/*/details"),
    "parity": ("weights/encodings", "runs/*/backend", "arbiter/*/rel_l2", "noise/rel_l2",
               "pairs/*/compared_before"),
    "diagnose": ("facts", "findings/*/values"),
    "explain": ("topics", "json_schema"),
    "doctor": ("native/disabled",),
}  # fmt: skip

SHORT = ("metadata", "hyperparameters", "encodings", "read", "topics")  # maps of equal entries


def body_of(text: str, files: Mapping[str, Path]) -> Any:
    args = [word.format(**files) for word in text.split()]
    done = aprfmt(*args, "--json")
    assert done.code in (0, 1) or "sample" in done.json, done.err
    return done.json


def objects(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every object with its path; of a list's elements the first of each set of keys."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            yield from objects(item, (*path, key))
    elif isinstance(value, list):
        seen: set[frozenset[str]] = set()
        for at, item in enumerate(value):
            keys = frozenset(item) if isinstance(item, dict) else frozenset()
            if isinstance(item, dict) and keys not in seen:
                seen.add(keys)
                yield from objects(item, (*path, str(at)))


def trimmed(command: str, value: Any, path: tuple[str, ...] = ()) -> Any:
    """Return the body with one element of each kind in its lists: there is less to change.

    Of what is open, the first entry is kept.
    """
    if isinstance(value, dict):
        if is_open(command, path):
            value = dict(list(value.items())[:1]) if path[-1] in SHORT else value
        return {key: trimmed(command, item, (*path, key)) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    kinds: dict[frozenset[str], Any] = {}
    for item in value:
        kinds.setdefault(frozenset(item) if isinstance(item, dict) else frozenset(), item)
    return [trimmed(command, item, (*path, "0")) for item in kinds.values()]


def is_open(command: str, path: tuple[str, ...]) -> bool:
    spelled = ["*" if part.isdigit() else part for part in path]
    return any(
        spelled[: len(each)] == each
        for each in (place.split("/") for place in OPEN.get(command, ()))
    )


def at(body: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        body = body[int(part)] if isinstance(body, list) else body[part]
    return body


def test_every_command_has_a_schema_and_a_run_here() -> None:
    assert set(schema_names()) == {*COMMANDS, "aprfmt"}
    assert set(RUNS) == set(COMMANDS)


@pytest.mark.parametrize("command", schema_names())
def test_a_schema_is_sound_and_says_its_version(command: str) -> None:
    found = schema(command)
    Draft202012Validator.check_schema(found)
    assert found["$id"] == f"aprfmt.{command}.{schema_number(command)}.json"
    assert found["properties"]["schema"] == {"const": f"aprfmt.{command}/{schema_number(command)}"}
    assert found["unevaluatedProperties"] is False
    assert COMMON in found["$defs"]
    assert json.loads(aprfmt("explain", "--schema", command).out) == found


def test_an_older_schema_stays_and_is_not_what_is_printed() -> None:
    import aprfmt.schemas

    folder = Path(aprfmt.schemas.__file__).parent
    for command, newest in NUMBERS.items():
        kept = {path.name for path in folder.glob(f"aprfmt.{command}.*.json")}
        assert kept == {f"aprfmt.{command}.{one}.json" for one in range(1, newest + 1)}
        Draft202012Validator.check_schema(
            json.loads((folder / f"aprfmt.{command}.{newest - 1}.json").read_text())
        )
        assert schema(command)["$id"] == f"aprfmt.{command}.{newest}.json"


ANSWERS = Path(__file__).parent / "answers"
MACHINE = ("doctor",)  # what the machine has
OWN = re.compile(  # of the machine, the run or another page
    r".*/(?:seconds|sample|[a-z_]*version|versions|device|threads|memory|peak[a-z_]*|rate|seed|json_schema"
    r"|[a-z_]*free_bytes|[a-z_]*(?:per_second|seconds))(?:/.*)?:"
    r"|/pairs/[0-9]+/points/[0-9]+/max_at/"  # whose rounding is largest
).match
BY_COMMAND = [pytest.param(name, marks=pytest.mark.xdist_group(f"schema-{name}")) for name in RUNS]


@pytest.fixture(scope="module")
def bodies(files: Mapping[str, Path]) -> Callable[[str], list[Any]]:
    """What a command's runs print, made when it is first asked for."""
    return cache(lambda command: [body_of(text, files) for text in RUNS[command]])


@pytest.mark.parametrize("command", BY_COMMAND)
def test_output_fits(command: str, bodies: Callable[[str], list[Any]]) -> None:
    for found in bodies(command):
        assert faults(found) == []
        body = trimmed(command, found)
        assert faults(body) == []
        for key in body:
            other = {f"{name}_" if name == key else name: value for name, value in body.items()}
            assert not validator(command).is_valid(other), f"{key} is not missed"


@pytest.mark.parametrize("command", [name for name in BY_COMMAND if name.values[0] not in MACHINE])
def test_the_whole_output_is_as_approved(
    command: str, bodies: Callable[[str], list[Any]], files: Mapping[str, Path]
) -> None:
    said = []
    for text, body in zip(RUNS[command], bodies(command), strict=True):
        said += [f"$ aprfmt {text}", *(line for line in approved.leaves(body) if not OWN(line)), ""]
    paths = {str(path): f"{{{name}}}" for name, path in files.items()}
    approved.check(ANSWERS / f"{command}.txt", "\n".join(said), paths)


@pytest.mark.slow  # every key below the first level, one at a time
@pytest.mark.parametrize("command", BY_COMMAND)
def test_every_changed_key_is_noticed(command: str, bodies: Callable[[str], list[Any]]) -> None:
    changed = 0
    for found in bodies(command):
        body = trimmed(command, found)
        for path, part in objects(body):
            if is_open(command, path):
                continue
            for key in part:
                other = copy.deepcopy(body)
                place = at(other, path)
                place[key + "_"] = place.pop(key)
                where = f"{'/'.join(path)}: {key}"
                assert not validator(command).is_valid(other), f"{where} is not missed"
                changed += 1
    assert changed > 4


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(ok=False),
        lambda body: body.update(exit=1),
        lambda body: body.update(command="diff"),
        lambda body: body.update(schema="aprfmt.tokenize/2"),
        lambda body: body.update(ids=["1"]),
        lambda body: body.update(count="1"),
        lambda body: body.update(tokens=None),
        lambda body: body.update(extra=1),
    ],
)
def test_a_changed_value_is_noticed(
    change: Callable[[Any], None], files: Mapping[str, Path]
) -> None:
    from tests.schemas.validation import validator

    body = body_of("tokenize {gguf} hello", files)
    assert validator("tokenize").is_valid(body)
    change(body)
    assert not validator("tokenize").is_valid(body)


@pytest.mark.parametrize("command", [*COMMANDS, "nothing"])
def test_errors_fit_too(command: str) -> None:
    done = aprfmt(command, "--no-such-option", "--json")
    body = done.json
    assert done.code == 2 and set(body) == {"schema", "command", "ok", "exit", "error"}
    assert body["command"] == (command if command in COMMANDS else "aprfmt")
    assert faults(body) == []
    for key in body["error"]:
        other = copy.deepcopy(body)
        other["error"].pop(key)
        assert faults(other), f"error without {key}"
    for other in ({**body, "exit": 1}, {**body, "ok": True}, {**body, "extra": 1}):
        assert faults(other)


def test_inspect_has_every_kind_of_file() -> None:
    """Seen red: the layout of Mistral's own releases, which no kind of the schema was."""
    held: Any = schema("inspect")
    allowed = held["properties"]["summary"]["properties"]["kind"]["enum"]
    assert allowed == ["model", *(kind.name for kind in KINDS)]
