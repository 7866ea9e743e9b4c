"""Targets for files that a command takes beside a model: prompts, goldens, traces, texts."""

import atexit
import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from aprfmt.base.outcome import Check
from aprfmt.base.text_escape import escape
from aprfmt.checks import validate_model
from aprfmt.checks.gates import baseline as qa_baseline
from aprfmt.checks.gates import baseline_file
from aprfmt.checks.gates import golden as qa_golden
from aprfmt.checks.records import Answer, Measure
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats.bounded_json import dumps, loads
from aprfmt.formats.gguf.reader import open_buffer as open_gguf
from aprfmt.formats.safetensors.reader import open_buffer as open_safetensors
from aprfmt.inference import aprt
from aprfmt.inference.aprt import load_aprt
from aprfmt.inference.engines import llama_text
from aprfmt.inference.engines.llama_text import load_eval_text
from aprfmt.inference.parity.bundle import parse_bundle, run_cell
from aprfmt.inference.parity.calibrate import parse_calibration
from aprfmt.measure.tolerances import point_threshold
from aprfmt.measure.traces import compare_traces
from aprfmt.model import Model
from aprfmt.model import manifest as side_manifest
from aprfmt.model.hf_folder import HFFolder, parse_config
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.keys import HF_JSON
from aprfmt.tokenizer.loading import load_tokenizer
from tests.fuzz.containers import worth_copying
from tests.fuzz.contract import BrokenPromiseError, check_shown, same
from tests.tokenizer.test_hostile import JSON  # now: its tests may not be made inside one

PATH = Path("fuzz.json")
LIMIT = 1 << 20
PARTS = b"\n%%\n"  # between the files of `companions`
FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.json", "added_tokens.json", "config.json", "chat_template.jinja",
)  # fmt: skip
STAGES = {
    "layer-0/attn_out.bin": struct.pack("<4sII6f", b"APRT", 0, 6, 1, -2, 3, 0.5, 0, 4),
    "lm_head.bin": struct.pack("<4sII2f", b"APRT", 0xFFFFFFFF, 2, 1, 2),
}
_MEASURES = {"bpb": Measure(1.5, "bits", 0.01, "absolute", "x"),
             "odd": Measure(math.nan, "", 0.0, "relative", "")}  # fmt: skip
_GATES = [Answer("loss", "", "PASS", 0.1, measures=_MEASURES), Answer("greedy", "", "NOT_RUN", 0.0)]


def _value(data: bytes) -> Any:
    return loads(data, str(PATH), max_bytes=LIMIT)


def golden(data: bytes) -> None:
    found = qa_golden.parse_golden(_value(data), PATH)
    for prompt in found.prompts:
        if prompt.max_tokens < 1 or prompt.form not in ("chat", "direct"):
            raise BrokenPromiseError(f"{prompt!r:.500}")
        assert prompt.expects in (True, False)
    for text in found.texts:
        for number in (text.nats, text.tolerance):
            if number is not None and not math.isfinite(float(number)):
                raise BrokenPromiseError(f"{text!r:.500}")


def baseline(data: bytes) -> None:
    """Read a baseline and compare a run with it."""
    for check in qa_baseline.compare_baseline(
        baseline_file.parse_baseline(_value(data), PATH), _GATES
    ):
        _shown(check)


def _shown(check: Check) -> None:
    for text in (check.name, check.where, check.found, check.expected, check.todo):
        check_shown(escape(text))


def calibration(data: bytes) -> None:
    rows = parse_calibration(_value(data), PATH)
    for row in rows:
        found = point_threshold(
            row.point, row.pair, (row.dtype, row.dtype), row.weights, calibrated=rows
        )
        if not 0 < found.rel_l2 < math.inf or not 0 < found.max_over_rms < math.inf:
            raise BrokenPromiseError(f"{row!r:.500} gives {found}")


def manifest(data: bytes) -> None:
    """Read a manifest of hashes, compare a model with it and with the model's own record."""
    found = side_manifest.check_manifest(_value(data), PATH)
    fake = cast(Model, SimpleNamespace(format=found.get("format")))
    rows = [
        {"key": "a", "names": ["a"], "encoding": "F32", "shape": [1], "raw": ["0"], "decoded": "1"}
    ]
    files = [{"name": "m.gguf", "size": 3, "sha256": "0", "outside": "1"}]
    for tensors, have in ((rows, files), (found["tensors"], found["files"])):
        read = side_manifest.file_rows
        side_manifest.file_rows = lambda model, blocks=False, have=have: have  # type: ignore[misc]
        try:
            failures = side_manifest.compare_manifest(found, fake, tensors)
        finally:
            side_manifest.file_rows = read
        for failure in failures:
            check_shown(escape(f"{failure['key']}: {failure['what']}"))
    same(failures, [], "a manifest compared with itself")
    same(
        side_manifest.check_manifest(loads(dumps(found), "again", max_bytes=2 * LIMIT), PATH),
        found,
        "a manifest",
    )


def eval_text(data: bytes) -> None:
    """Read the text of llama-eval-callback, with the model that ran and without."""
    text = str(data, "utf-8", "replace")
    problems = []
    llama_text.MAX_VALUES = 1 << 16  # for speed; the real limit has a test among the findings
    for model in (None, _llama()):
        try:
            with load_eval_text(Path("fuzz.txt"), (1, 2), model, file=StringIO(text)) as found:
                for key, record in found.records.items():
                    values, seen = found.fetch(key), found.masks.get(key)
                    if values is None or values.shape != record.shape:
                        raise BrokenPromiseError(f"{key}: no values of {record.shape}")
                    if seen is not None and seen.shape != values.shape:
                        raise BrokenPromiseError(f"{key}: {seen.shape} for {values.shape}")
        except AprfmtError as error:
            problems.append(error)
    if problems:
        raise problems[0]


@cache
def _llama() -> Model:
    from tests.fuzz.seeds import model

    return Model(open_gguf(model()[0], Path("fuzz.gguf")), None)


def companions(data: bytes) -> None:
    """Use the text files beside a model: tokenizer_config.json and its like, `PARTS` between."""
    from tests.tokenizer.fake import fake

    texts = {"tokenizer.json": json.dumps(JSON)}
    for name, part in zip(FILES, data.split(PARTS), strict=False):
        try:
            texts[name] = part.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{name}: not UTF-8 at byte {error.start}") from None
    texts = {name: text for name, text in texts.items() if text}
    config = parse_config(texts["config.json"].encode(), PATH) if "config.json" in texts else None
    model = cast(Any, fake("safetensors", {}))
    model.folder, model.config = HFFolder(Path("folder"), config, texts), config
    tokenizer_facts(model, quick=True)
    made = load_tokenizer(model)
    made.decode(made.encode("ab <s>"))
    tokenizer_facts(model)
    for carry in (to_gguf, to_apr, to_hf):
        carry(model)


def carried(data: bytes) -> None:
    """Use a JSON object of metadata as a GGUF and an APR file of ours carry it, and convert it."""
    from aprfmt.conversion.sidecar_files import config_text
    from aprfmt.model.carried_files import read_embedded_files
    from tests.tokenizer.fake import fake
    from tests.tokenizer.test_hostile import JSON

    values = _value(data)
    if not isinstance(values, dict):
        raise FormatError("no object")
    problems: list[AprfmtError] = []
    for form in ("gguf", "apr"):
        model = cast(Any, fake(form, {HF_JSON: json.dumps(JSON), **values}))
        steps: list[Callable[[Any], Any]] = [
            read_embedded_files,
            config_text,
            tokenizer_facts,
            load_tokenizer,
            to_gguf,
            to_apr,
            to_hf,
        ]
        for step in steps:
            try:
                step(model)
            except AprfmtError as error:
                check_shown(escape(str(error)))
                problems.append(error)
    if problems:
        raise problems[0]


def packed(data: bytes) -> None:
    """Decode weights that are several tensors; the header's `config` stands for config.json."""
    with open_safetensors(data, Path("fuzz.safetensors")) as source:
        text = source.metadata.get("config")
        config = parse_config(text.encode(), PATH) if isinstance(text, str) else {}
        model = Model(source, HFFolder(Path("folder"), config, {}))
        for tensor in model.values():
            size = math.prod(tensor.shape)
            if size > 64 * len(data):  # what is stored in so few bits does not exist
                raise BrokenPromiseError(f"{tensor.name}: {size} values of {len(data)} bytes")
            values = tensor.numpy()
            if values.shape != tensor.shape:
                raise BrokenPromiseError(f"{tensor.name}: {values.shape} for {tensor.shape}")
            same(values.tobytes(), tensor.numpy().tobytes(), tensor.name)


def validation(data: bytes) -> None:
    """Run every check of `validate` on a GGUF file, and print the result."""
    with open_gguf(data, Path("fuzz.gguf")) as source:
        report = validate_model(Model(source, None), strict=worth_copying(data))
        for check in report.checks:
            _shown(check)
        json.dumps(report.to_json())


def bundle(data: bytes) -> None:
    """Read a reproduction; run it where it is small."""
    with open_safetensors(data, Path("fuzz.safetensors")) as source:
        found = parse_bundle(source, Path("fuzz.safetensors"))
    cell = found.cell
    if sum(math.prod(shape) for shape in cell.shapes.values()) > 1 << 14:
        return
    with np.errstate(all="ignore"):
        run_cell(found, _numpy(), Path("fuzz.safetensors"))


@cache
def _numpy() -> Any:
    from aprfmt.inference.device import parse_run

    return parse_run("numpy").open()


@cache
def _stages() -> Path:
    """Return a folder of two APRT stages; it goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="aprfmt-fuzz-stages-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, raw in STAGES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def stages(data: bytes) -> None:
    """Read aprfmt-trace.json, alone and with the APRT stages, and compare the trace."""
    found = aprt.parse_facts(_value(data), str(PATH))
    again = loads(dumps(aprt.facts_to_json(found), "again"), "again", max_bytes=4 * LIMIT)
    same(aprt.parse_facts(again, str(PATH)), found, aprt.NAME)
    (_stages() / aprt.NAME).write_bytes(data)
    same(aprt.read_facts(_stages()), found, "read")
    trace = load_aprt(_stages())
    json.dumps(trace.to_json())
    for key, record in trace.records.items():
        values = trace.recorded_values(key)
        if values is None or values.shape != record.shape:
            raise BrokenPromiseError(f"{key}: no values of {record.shape}")
    for point in compare_traces(trace, trace).points:
        check_shown(escape(point.why))
        if point.beyond:
            raise BrokenPromiseError(f"{point.key} differs from itself: {point}")
    for name, raw in STAGES.items():
        if hashlib.sha256(raw).hexdigest() != found.files[name].sha256:
            raise BrokenPromiseError(f"{name}: believed as {found.files[name].sha256!r:.80}")


def npy(data: bytes) -> None:
    from aprfmt.cli.run_options import parse_npy

    with ExitStack():
        ids = parse_npy(memoryview(data), Path("ids.npy"))
    if any(type(i) is not int for i in ids):
        raise BrokenPromiseError(f"{ids!r:.200}")
