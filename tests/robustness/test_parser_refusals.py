"""Errors of readers and rules, each provoked by the input that a user's file may hold.

A message names the place, what was found and what was expected: where one of these lines is lost, a
wrong value is used as it is, or another error comes from further on.
"""

import json
import struct
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt import schemas
from aprfmt.arch.carried_hyperparameters import read_aprfmt_key
from aprfmt.arch.deepseek_v4 import _limit_rule
from aprfmt.arch.deepseek_v32 import _index_layers_rule
from aprfmt.arch.element_moves import invert_moves
from aprfmt.arch.hyper_rules import check_scale_factor, hyper_table
from aprfmt.arch.layout_steps import Transposed, only_shape
from aprfmt.arch.name_templates import NameIndex
from aprfmt.arch.required_values import require_values
from aprfmt.arch.rope_hf import _Objects, _read_longrope, _read_proportional
from aprfmt.arch.sliding_window import require_causal
from aprfmt.arch.spec import Facts, HyperRule, Move
from aprfmt.arch.value_checks import finite_number, positive_number, sequence
from aprfmt.arch.value_checks import text as text_value
from aprfmt.base.bounded_regex import matches_start
from aprfmt.checks.gates import golden
from aprfmt.codecs import compressed_scope, gpt_oss, gptq, modelopt_scope, quant_state
from aprfmt.conversion.packed_weights import weight_dtype
from aprfmt.errors import (
    ArchError,
    CodecError,
    ConversionError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats.apr import compression, layout, parse, shards
from aprfmt.formats.cursor import Cursor
from aprfmt.formats.pytorch.pickle_values import GlobalName
from aprfmt.formats.pytorch.storages import Resolver
from aprfmt.formats.sequential import SequentialSink
from aprfmt.inference import aprt, batch, record, trace_file
from aprfmt.inference.engines import captures, dump_folders, mapping, npz, rank_dims
from aprfmt.inference.parity import bundle, calibrate
from aprfmt.inference.sampling import Sampling
from aprfmt.model import manifest
from aprfmt.model.engine_state import open_engine_state
from aprfmt.quantizing import imatrix
from aprfmt.remote import buckets, hub
from aprfmt.remote.response_body import ResponseBody
from aprfmt.remote.timed_socket import BadAnswer
from tests.robustness import unprovoked

HERE = Path("f")
SCALING = {
    "type": "llama3", "factor": 8.0, "original_context_length": 64, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
ROW = {
    "pair": ["numpy", "torch"], "weights": "decoded", "point": "q", "dtype": "float32",
    "evidence": "x", "runs": 3, "rel_l2": 1e-7, "max_over_rms": 1e-6, "largest": 1e-7,
}  # fmt: skip
SHA = "0" * 64


def carried(text: str) -> Any:
    facts = Facts("gguf", {"aprfmt.hyper.rope_scaling": text}, {})
    return read_aprfmt_key(facts, "rope_scaling", None, {})


def prompt(**keys: Any) -> Any:
    return golden.parse_golden({"greedy": [{"name": "n", "prompt": "a", **keys}]}, HERE)


def calibration(**changed: Any) -> Any:
    rows = [{**ROW, **changed}]
    return calibrate.parse_calibration({"schema": calibrate.SCHEMA, "rows": rows}, HERE)


def stage(**changed: Any) -> Any:
    row = {"sha256": SHA, "dtype": "float32", "device": "cpu", "shape": [1], **changed}
    return aprt.parse_facts({"schema": aprt.SCHEMA, "run": {}, "files": {"s": row}}, "f")


def storage(*view: Any, count: Any = 4, key: Any = "0", kind: str = "FloatStorage") -> Any:
    """Return what a persistent id of torch.save stands for, with or without a view."""
    return Resolver()(("storage", GlobalName("torch", kind), key, "cpu", count, *view))


def rotated(part: float) -> Any:
    """Return how many of a head of 8 rotate by a share of it."""
    rope: Any = SimpleNamespace(
        get=lambda key, check, usual: part if key.startswith("partial") else usual
    )
    hf: Any = SimpleNamespace(dim=lambda: 8)
    return _read_proportional(hf, rope, 64, 64)["rotated"]


def longrope(**rows: Any) -> Any:
    """Return what a longrope scaling of a context of 64, trained at 32, says."""
    rope = _Objects()
    rope.rows.append(("rope", {"short_factor": [1.0], "long_factor": [2.0], **rows}))
    return _read_longrope(SimpleNamespace(), rope, 64, 32)  # type: ignore[arg-type]


def indexed(pattern: object) -> Any:
    """Return which of three layers have an indexer by this key of config.json."""
    facts = Facts("hf", {"index_topk_pattern": pattern}, {})
    return _index_layers_rule("indexer_types").read["hf"](facts, {"n_layers": 3})


def clamps(value: object) -> Any:
    """Return the clamp of all layers by the key of a GGUF."""
    facts = Facts("gguf", {"a.swiglu_clamp_exp": value}, {}, "a")
    return _limit_rule().read["gguf"](facts, {})


def kept(name: str, value: object, usual: object) -> Any:
    """Return a hyperparameter from the key that this package writes for it."""
    facts = Facts("gguf", {f"aprfmt.hyper.{name}": json.dumps(value)}, {})
    return read_aprfmt_key(facts, name, usual, {})


def member(size: int, packed: int, **changed: Any) -> str:
    """Return the key of a member of an .npz of these sizes."""
    said = {"filename": "a.npy", "flag_bits": 0, "file_size": size, "compress_size": packed}
    return npz.NpzFile._member_key(
        SimpleNamespace(path=HERE, _members={}),  # type: ignore[arg-type]
        SimpleNamespace(**{**said, **changed}),  # type: ignore[arg-type]
    )


def published(**changed: Any) -> Any:
    return SimpleNamespace(**{"path": HERE, "folder": None, **changed})


def state(text: bytes) -> Any:
    return quant_state.shape_of("NF4", {"quant_state.bitsandbytes__nf4": text})


def legacy(*names: bytes, values: int = 1, calls: int = 1) -> Cursor:
    """Return a legacy importance matrix of these weights."""
    data = struct.pack("<i", len(names)) + b"".join(
        struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, values) + bytes(4 * values)
        for name in names
    )
    return Cursor(memoryview(data), "f")


def body(data: bytes, chunked: bool = True, **headers: str) -> ResponseBody:
    answer: Any = SimpleNamespace(fp=BytesIO(data), chunked=chunked, length=None)
    return ResponseBody(answer, {key.replace("_", "-"): value for key, value in headers.items()})


def captured(**arrays: Any) -> Any:
    return SimpleNamespace(path=HERE, shapes=dict.fromkeys(arrays), read=arrays.__getitem__)


def shaped(*shape: int) -> Any:
    return SimpleNamespace(shape=shape)


def header(text: bytes, version: int = 1) -> Any:
    return npz.read_header(BytesIO(b"\x93NUMPY" + bytes([version, 0]) + text), "f", len(text))


planned: Any = SimpleNamespace(_programs=(), _path=HERE)  # a sink
Call = Callable[[], object]
# What is asked, the class of the error, the message. A row in which all is well has no message.
REFUSED: Mapping[str, tuple[Call, type[Exception], str]] = {
    # values of a configuration
    "number text": (
        lambda: finite_number("1", "k"), ArchError, "k: is '1'; expected a finite number",
    ),
    "number bool": (
        lambda: finite_number(True, "k"), ArchError, "k: is True; expected a finite number",
    ),
    "number nan": (
        lambda: finite_number(np.nan, "k"), ArchError, "k: is nan; expected a finite number",
    ),
    "number large": (lambda: finite_number(1 << 2000, "k"), ArchError, "expected a finite number"),
    "positive": (
        lambda: positive_number(0, "k"), ArchError, "k: is 0; expected a number above zero",
    ),
    "few entries": (lambda: sequence([1, 2], "k", 3), ArchError, "k: has 2 entries; expected 3"),
    "text for list": (lambda: sequence("ab", "k", 1), ArchError, "k: is 'ab'; expected a list"),
    "scale small": (
        lambda: check_scale_factor(1e-9, "k"), ArchError, "expected a factor between 1e-9",
    ),
    "scale large": (
        lambda: check_scale_factor(1e9, "k"), ArchError, "expected a factor between 1e-9",
    ),
    "must be": (
        lambda: require_values(Facts("hf", {"k": 2}, {}), {"k": 1}), ArchError,
        "k: is 2; expected 1: no other is known",
    ),
    "bidirectional": (
        lambda: require_causal(None, Facts("hf", {"use_bidirectional_attention": True}, {}), {}),
        ArchError, "attention is bidirectional; expected a causal model",
    ),
    "carried json": (
        lambda: carried("{"), ArchError, r"aprfmt\.hyper\.rope_scaling: holds no JSON value",
    ),
    "carried kind": (
        lambda: carried('{"type": "llama3"}'), ArchError, "expected a rope scaling in normal form",
    ),
    "carried bounds": (
        lambda: carried(json.dumps({**SCALING, "high_freq_factor": 1.0})), ArchError,
        "low_freq_factor and high_freq_factor are equal",
    ),
    "several tensors": (
        lambda: only_shape(((1,), (2,)), "w"), ArchError, "w: got 2 tensors; expected one",
    ),
    "pattern counts": (
        lambda: matches_start("(a{999}){999}", "a"), CodecError, "has counts whose product is over",
    ),
    "pattern length": (lambda: matches_start("a" * 100_000, "a"), CodecError, "expected at most"),
    "recorded dtype": (
        lambda: weight_dtype("Q8_0", {"dtype": "float64"}, "w"), ConversionError,
        "w: config.json says dtype 'float64'; expected float32, float16 or bfloat16",
    ),
    "no name": (lambda: text_value(3, "k"), ArchError, "k: is 3; expected a name"),
    "one axis": (
        lambda: Transposed().shapes([(3,)], {}), ArchError,
        r"shape \[3\]; expected two axes or more",
    ),
    "taken twice": (
        lambda: invert_moves([[Move(0, 0, 2), Move(0, 1, 1)]], [2]), ArchError,
        r"take element 1 of tensor 0 \(2 elements\) twice, not once",
    ),
    "left between": (
        lambda: invert_moves([[Move(0, 0, 1), Move(0, 2, 1)]], [3]), ArchError,
        r"take element 1 of tensor 0 \(3 elements\) never, not once",
    ),
    "left at the end": (
        lambda: invert_moves([[Move(1, 0, 2)]], [0, 3]), ArchError,
        r"take element 2 of tensor 1 \(3 elements\) never, not once",
    ),
    "taken too far": (
        lambda: invert_moves([[Move(0, 0, 4)]], [3]), ArchError,
        r"take element 3 of tensor 0 \(3 elements\) never, not once",
    ),
    "template twice": (
        lambda: NameIndex("gguf", [("blk.{L}.a", 1), ("blk.{L}.b", 2), ("blk.{E}.a", 3)]),
        ArchError, r"'blk.\{E\}.a': another one matches the same names; expected distinct",
    ),
    "unknown rule": (
        lambda: hyper_table(HyperRule("odd", {}, "float", 1.0)), ArchError,
        r"rules and vocabulary differ in \['odd'\]",
    ),
    "short pattern": (
        lambda: indexed("FS"), ArchError, "is 'FS'; expected F or S for every layer",
    ),
    "other letters": (
        lambda: indexed("FSX"), ArchError, "is 'FSX'; expected F or S for every layer",
    ),
    "pattern of numbers": (
        lambda: indexed([1, 0, 1]), ArchError, "index_topk_pattern: is .*; expected a name",
    ),
    "two clamps": (
        lambda: clamps([7.0, 7.0, 8.0]), ArchError,
        r"a.swiglu_clamp_exp: is \[7.0, 7.0, 8.0\]; expected one clamp throughout",
    ),
    "no clamp": (lambda: clamps([]), ArchError, r"is \[\]; expected one clamp throughout"),
    "text for number": (
        lambda: kept("norm_eps", "1e-5", 1e-6), ArchError,
        r"norm_eps: is '1e-5'; expected a value like 1e-06",
    ),
    "number for bool": (
        lambda: kept("tied_embeddings", 1, True), ArchError, "is 1; expected a value like True",
    ),
    "bool for number": (
        lambda: kept("norm_eps", True, 1e-6), ArchError, "is True; expected a value like 1e-06",
    ),
    "null for number": (
        lambda: kept("norm_eps", None, 1e-6), ArchError, "is None; expected a value like 1e-06",
    ),
    "one list": (
        lambda: longrope(short_factor=None), ArchError,
        "longrope: needs the lists short_factor and long_factor",
    ),
    "other list": (
        lambda: longrope(long_factor=None), ArchError,
        "longrope: needs the lists short_factor and long_factor",
    ),
    "two factors": (
        lambda: longrope(short_mscale=1.5, long_mscale=2.0), ArchError,
        "longrope: long_mscale is not short_mscale; expected one factor",
    ),
    "rotated below": (lambda: rotated(-0.01), ArchError, "is -0.01; expected a number from 0 to 1"),
    "rotated above": (lambda: rotated(1.01), ArchError, "is 1.01; expected a number from 0 to 1"),
    # files of torch.save
    "storage view": (
        lambda: storage(("v", 0)), ValueError, "has a view of a storage that is a tuple",
    ),
    "storage long view": (
        lambda: storage(("v", 0, 1, 1)), ValueError, "has a view of a storage that is",
    ),
    "storage view kind": (lambda: storage([0]), ValueError, "has a view of a storage that is"),
    "storage view before": (
        lambda: storage(("v", -1, 1)), ValueError, "has a view of a storage that is",
    ),
    "storage view outside": (
        lambda: storage(("v", 1, 4)), ValueError, r"has a view 1\.\.5 of 4 elements",
    ),
    "storage key": (lambda: storage(key=1.5), ValueError, "has a storage of key .* with "),
    "storage count": (lambda: storage(count=-1), ValueError, "has a storage of key .* with "),
    "storage kind": (
        lambda: storage(kind="NoStorage"), ValueError, "has a storage of class .* is not read here",
    ),
    # models of engines
    "state of a file": (
        lambda: open_engine_state(HERE, published()), UsageError,
        "f: an engine's state is read by the names and config.json of a Hugging Face folder",
    ),
    "state without config": (
        lambda: open_engine_state(HERE, published(folder=SimpleNamespace(config=None))), UsageError,
        "f: an engine's state is read by the names and config.json of a Hugging Face folder",
    ),
    # files of prompts and tolerances
    "golden empty": (
        lambda: golden.parse_golden({}, HERE), FormatError,
        'f: holds neither "greedy" prompts nor "losses"',
    ),
    "golden form": (
        lambda: golden.parse_golden([], HERE), FormatError, "f: expected an object with",
    ),
    "golden parses": (
        lambda: prompt(parses="c"), FormatError,
        "parses is 'c'; expected python",
    ),
    "golden texts": (
        lambda: prompt(contains=[1]), FormatError,
        "contains is no list of texts",
    ),
    "golden ids": (
        lambda: prompt(output_ids=[-1]), FormatError,
        "output_ids is no list of token ids",
    ),
    "calibration schema": (
        lambda: calibrate.parse_calibration({}, HERE), FormatError, "is no file of parity",
    ),
    "calibration rows": (
        lambda: calibrate.parse_calibration({"schema": calibrate.SCHEMA}, HERE), FormatError,
        "f: rows are missing",
    ),
    "calibration row": (
        lambda: calibrate.parse_calibration({"schema": calibrate.SCHEMA, "rows": [1]}, HERE),
        FormatError, "f: row 0: is no object",
    ),
    "calibration pair": (lambda: calibration(pair=["a"]), FormatError, "pair is .*; expected two"),
    "calibration kind": (lambda: calibration(runs=True), FormatError, "row 0: runs is True"),
    "calibration zero": (
        lambda: calibration(rel_l2=0), FormatError, "rel_l2 is 0; expected a bound above 0",
    ),
    "calibration nan": (
        lambda: calibration(max_over_rms=np.nan), FormatError, "max_over_rms is nan; expected a",
    ),
    "calibration dtype": (lambda: calibration(dtype="int3"), FormatError, "dtype is 'int3'"),
    # traces and captures of other engines
    "trace schema": (
        lambda: trace_file._from_json({"schema": "x"}, None, "f"),  # type: ignore[arg-type]
        FormatError, "f: schema 'x'; expected ",
    ),
    "trace type": (
        lambda: trace_file._from_json([], None, "f"),  # type: ignore[arg-type]
        FormatError, "f: schema 'list'; expected ",
    ),
    "record": (lambda: record.record_from_json(3, "f"), FormatError, "f: is not an object"),
    "record field": (lambda: record.record_from_json({}, "f"), FormatError, "f: key is None"),
    "record key": (lambda: record.record_from_json({"key": "L0.zz"}, "f"), FormatError, "f: .*zz"),
    "facts schema": (
        lambda: aprt.parse_facts({}, "f"), FormatError, "f: schema None; expected ",
    ),
    "facts run": (
        lambda: aprt.parse_facts({"schema": aprt.SCHEMA}, "f"), FormatError,
        "f: run or files is missing",
    ),
    "facts text": (lambda: stage(device=3), FormatError, "f: s: device is 3; expected text"),
    "facts digest": (lambda: stage(sha256=""), FormatError, "expected 64 hexadecimal digits"),
    "facts dtype": (lambda: stage(dtype="int3"), FormatError, "dtype 'int3'; expected one of "),
    "facts form": (lambda: stage(form="x"), FormatError, "expected fused, stepped or null"),
    "bundle schema": (
        lambda: bundle._make_bundle({"schema": 99}, None, HERE),  # type: ignore[arg-type]
        FormatError, "schema 99; expected ",
    ),
    "two arrays": (
        lambda: batch._read_array(captured(a=1, b=2), "mask", ("a", "b")), FormatError,
        "f: holds a and b; expected one array of mask",
    ),
    "no integers": (
        lambda: batch._check_integers(HERE, "ids", np.zeros((1, 2))), FormatError,
        r"f: ids \[1, 2\] of float64; expected integers \[samples, tokens\]",
    ),
    "no values": (
        lambda: batch._check_integers(HERE, "ids", np.zeros((1, 0), int)), FormatError,
        r"f: ids \[1, 0\] of int64; expected integers",
    ),
    "cut number": (
        lambda: captures.decode_numbers(b"abc", "<f2", "f"), FormatError,
        r"f: ends inside a number; was it cut off\?",
    ),
    "no folder": (
        lambda: captures._sorted_names(Path("no/such/folder")), FormatError,
        "folder: cannot be listed: No such file",
    ),
    "npz member": (
        lambda: member(1, 1, filename="a.txt"), FormatError, "member 'a.txt' is not an array",
    ),
    "npz locked": (lambda: member(1, 1, flag_bits=1), UnsupportedError, "f: 'a' is encrypted"),
    "npz large": (
        lambda: member(npz.MAX_MEMBER + 1, npz.MAX_MEMBER), FormatError, "f: 'a' declares ",
    ),
    "npz packed": (
        lambda: member((npz.SMALL + npz.MAX_RATIO) // npz.MAX_RATIO * npz.MAX_RATIO + 1,
                       (npz.SMALL + npz.MAX_RATIO) // npz.MAX_RATIO),
        FormatError, "compress at most 1:100",
    ),
    "no dims": (lambda: rank_dims.parse_dims(" # x", "f"), FormatError, "expected dimensions such"),
    "mapping entry": (
        lambda: mapping._parse_entry(3, "f"), FormatError, "f: expected null, a key like L0.q",
    ),
    "mapping key": (lambda: mapping._parse_entry("L0.zz", "f"), FormatError, "f: .*zz"),
    "mapping layout": (
        lambda: mapping._parse_entry({"key": "L0.q", "layout": ["x"]}, "f"), FormatError,
        "f: layout: expected a list of ",
    ),
    "mapping rows": (
        lambda: mapping._parse_entry({"key": "L0.q", "rows": "x"}, "f"), FormatError,
        "f: rows: expected all, last, or a list",
    ),
    "npz cut length": (lambda: header(b"\x00"), TruncatedError, "f: ends inside its header"),
    "npz cut text": (lambda: header(b"\x40\x00{"), TruncatedError, "f: ends inside its header"),
    "npz version": (lambda: header(b"", 9), FormatError, "f: begins with .*; expected an .npy"),
    # quantization
    "state bytes": (lambda: state(b"x" * 200_000), CodecError, "has more than .* expected about"),
    "state json": (lambda: state(b"{"), CodecError, "is not JSON in UTF-8"),
    "state text": (lambda: state(b"\xff"), CodecError, "is not JSON in UTF-8"),
    "state list": (lambda: state(b"[]"), CodecError, "holds a list, expected an object"),
    "state shape": (
        lambda: state(b'{"shape": 3}'), CodecError, "says shape 3, expected a list of sizes",
    ),
    "state sizes": (
        lambda: state(b'{"shape": [-1]}'), CodecError, r"says shape \[-1\], expected sizes",
    ),
    "state blocks": (
        lambda: quant_state._check_count("NF4", {"blocksize": 0}, "blocksize"), CodecError,
        "says blocksize 0, expected a positive integer",
    ),
    "imatrix twice": (
        lambda: imatrix._read_legacy(legacy(b"w", b"w")), FormatError,
        "f: w occurs twice; expected every tensor once",
    ),
    "imatrix empty": (
        lambda: imatrix._read_legacy(legacy(b"w", values=0)), FormatError,
        "f: w: 0 values over 1 calls; expected a positive",
    ),
    "imatrix alone": (
        lambda: imatrix._mean_squares(HERE, "w.in_sum2", {}), FormatError,
        "f: w.in_sum2 without w.counts; expected both",
    ),
    # addresses, answers and lists
    "hub address": (
        lambda: hub._parse_address("hf://x"), UsageError, "hf://x: names no repository",
    ),
    "hub name": (
        lambda: hub._parse_address("hf://a/../b"), UsageError, "is no name of a repository",
    ),
    "no bucket": (lambda: buckets._parse_address("s3://"), UsageError, "expected s3://BUCKET/FILE"),
    "bucket name": (
        lambda: buckets._parse_address("gs://a b/x"), UsageError, "expected gs://BUCKET",
    ),
    "coding": (
        lambda: body(b"", transfer_encoding="gzip"), BadAnswer,
        "Transfer-Encoding is 'gzip'; expected chunked",
    ),
    "chunk size": (
        lambda: body(b"zz\r\n").read(4), BadAnswer,
        "a chunk begins with 'zz'; expected its length in hexadecimal",
    ),
    "long chunk": (
        lambda: body(b"1\r\nabc").read(4), BadAnswer, "a chunk is longer than it says",
    ),
    "manifest": (
        lambda: manifest.check_manifest({"schema": "x"}, HERE), FormatError,
        "f: is no hash manifest; expected schema",
    ),
    # containers and packed weights
    "not compressed": (
        lambda: compression.expand_file(memoryview(bytes(64)), 0, "f"), FormatError,
        "f: no compression flag is set",
    ),
    "no shards": (
        lambda: shards.parse_manifest({}, HERE), FormatError, "f: has no array 'shards'",
    ),
    "empty shards": (
        lambda: shards.parse_manifest({"shards": []}, HERE), FormatError,
        "f: lists 0 shards; expected 1 to",
    ),
    "no map": (
        lambda: shards.parse_manifest(
            {"shards": [{"filename": "a.apr", "index": 0, "size": 1, "tensors": ["x"]}]}, HERE
        ),
        FormatError, "f: has no object 'weight_map'",
    ),
    "column major": (
        lambda: parse._check_flags(
            SimpleNamespace(flags=layout.BITS["LAYOUT_COLUMN_MAJOR"]), "f"  # type: ignore[arg-type]
        ),
        UnsupportedError, "f: flag LAYOUT_COLUMN_MAJOR is set; APR v2 tensors are row-major",
    ),
    "a group of text": (
        lambda: compressed_scope.weight_groups({"config_groups": {"g": "x"}}), CodecError,
        "config says config_groups 'g' 'x', expected a group",
    ),
    "a layer of text": (
        lambda: modelopt_scope._layer_sections({"quantized_layers": {"l": 4}}), CodecError,
        "config says quantized_layers 'l' 4, expected an algorithm",
    ),
    "no layers": (
        lambda: modelopt_scope._layer_sections({}), CodecError,
        "and no quantized_layers, expected one a weight",
    ),
    "planned twice": (
        lambda: SequentialSink.plan(planned, {}, []),
        ConversionError, "f: is planned already; a sink is planned once",
    ),
    "gptq words": (
        lambda: gptq._weight_shape({".qweight": shaped(5, 4)}, {"bits": 3}),
        CodecError, r"says bits 3, part '.qweight' has shape \[5, 4\], expected",
    ),
    "gptq axes": (
        lambda: gptq._weight_shape({".qweight": shaped(8)}, {"bits": 4}),
        CodecError, r"says bits 4, part '.qweight' has shape \[8\], expected",
    ),
    "gpt-oss blocks": (
        lambda: gpt_oss._weight_shape({"_blocks": shaped(2, 3, 4, 8)}, {}),
        CodecError, r"part '_blocks' has shape \[2, 3, 4, 8\], expected \[experts, out, in/32, 16",
    ),
    "matrix of another type": (
        lambda: imatrix._read_gguf(
            SimpleNamespace(path=HERE, metadata={"general.type": "model"}, tensors={})
        ),
        FormatError, "f: general.type is 'model'; expected 'imatrix'",
    ),
    "schema": (lambda: schemas.schema("nope"), UsageError, "no schema of 'nope'; known: .*diff"),
    "seed": (lambda: Sampling(seed=-1), UsageError, "seed -1; expected a number not negative"),
    "top-p": (lambda: Sampling(top_p=0), UsageError, "top-p above 0 and at most 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str) -> None:
    call, error, says = REFUSED[what]
    with pytest.raises(error, match=says):
        call()


def test_what_fits_is_taken() -> None:
    """The same calls with the least and the largest value that is right."""
    assert finite_number(0, "k") == 0 and positive_number(1e-300, "k") == 1e-300
    assert sequence([1, 2], "k", 2) == [1, 2]
    assert check_scale_factor(2e-9, "k") == 2e-9 and check_scale_factor(9e8, "k") == 9e8
    require_values(Facts("hf", {"k": 1, "other": None}, {}), {"k": 1, "other": 2})
    for said in (False, None, "vision"):
        assert (
            require_causal(None, Facts("hf", {"use_bidirectional_attention": said}, {}), {}) == ""
        )
    assert carried(json.dumps(SCALING))[0] == SCALING
    assert only_shape(((2, 3),), "w") == (2, 3)
    assert text_value("", "k") == "" and Transposed().shapes([(3, 4)], {}) == [(4, 3)]
    assert invert_moves([[Move(0, 1, 2)], [Move(0, 0, 1)]], [3]) == [[Move(1, 0, 1), Move(0, 0, 2)]]
    assert NameIndex("gguf", [("blk.{L}.a", 1), ("blk.{L}.b", 2)]).find("blk.3.b") is not None
    assert indexed("FSF") == ((True, False, True), "index_topk_pattern")
    assert clamps([7.0, 7.0]) == (7.0, "a.swiglu_clamp_exp") == clamps(7.0)
    assert (kept("norm_eps", 1, 1e-6)[0], kept("tied_embeddings", False, True)[0]) == (1, False)
    assert longrope(short_mscale=2, long_mscale=2)["attention_factor"] == 2
    assert longrope(long_factor=[1.0], attention_factor=1.0)["type"] == "factors"
    assert weight_dtype("Q8_0", {"dtype": "float16"}, "w") == "float16"
    assert len(calibration()) == 1
    assert len(stage().files) == 1
    assert captures.decode_numbers(b"abcd", "<f2", "f").shape == (2,)
    assert state(b'{"shape": [0, 2]}') == (0, 2)
    found, names, chunks = imatrix._read_legacy(legacy(b"w", b"v"))
    assert sorted(found) == ["v", "w"] and names == () and chunks is None
    assert [rotated(part) for part in (0.0, 0.5, 1.0)] == [0, 4, 8]
    assert [(one.start, one.nbytes) for one in (storage(("v", 1, 3)), storage(None))] == [
        (4, 12), (0, 16),
    ]  # fmt: skip
    parts = npz.SMALL // npz.MAX_RATIO + 1
    for size, packed in ((parts * npz.MAX_RATIO, parts), (npz.SMALL, 1), (npz.MAX_MEMBER, 1 << 30)):
        assert member(size, packed) == "a"
    assert body(b"2\r\nab\r\n0\r\n\r\n").read(9) == b"ab"
    assert Sampling(seed=0, top_p=1).seed == 0


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([], "expected an object with axes and arrays"),
        ({"axes": {"xp": 2}}, "axes: 'xp': 2; expected such as tp: 2"),
        ({"axes": {"tp": "2"}}, "axes: 'tp': '2'; expected such as tp: 2"),
        ({"arrays": {"q*": 3}}, r"'q\*': expected dims such as 't h\[tp\]'"),
    ],
)
def test_what_ranks_say_is_understood_or_refused(said: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / dump_folders.SPEC).write_text(json.dumps(said))
    with pytest.raises(FormatError, match=says):
        dump_folders.RankSpec(tmp_path)
    (tmp_path / dump_folders.SPEC).write_text('{"axes": {"tp": 2}, "arrays": {"q*": "t h[tp]"}}')
    spec = dump_folders.RankSpec(tmp_path)
    assert spec.axes == {"tp": 2} and spec.dims("q0") == "t h[tp]" and spec.dims("k") is None


def test_a_folder_without_an_aprt_file_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no APRT file"):
        aprt.load_aprt(tmp_path)


def test_errors_that_no_test_provokes_are_listed() -> None:
    """A name that a message is about is no part of it; a message may go on in the next line."""
    source = "def f(x):\n" + "".join(
        f"    raise E({text})\n"
        for text in ('f"{x}: found a thing here"', '"words of no test at all"', "x", 'f"{x}"')
    )
    held = unprovoked.join_literals('match=r"found a"\n    r" thing"')
    assert list(unprovoked.unprovoked_errors(source, held)) == [(3, "words of no test at all")]
    assert len(list(unprovoked.unprovoked_errors(source, ""))) == 2


def test_an_array_of_no_elements_is_an_array() -> None:
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3), }"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    (shape, dtype), fortran = npz.read_header(BytesIO(data), "f", len(data))
    assert (shape, dtype, fortran) == ((0, 3), np.dtype("<f4"), False)
