"""The numbers that a command prints are those of its files, and of its JSON.

The files are read here by a few lines of our own, gguf-py and numpy: nothing under test counts for
both sides. Every kind of thing is there another number of times, so that no number is right by
being another's.
"""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from aprfmt.cli.hex import block_row
from aprfmt.codecs import codec
from tests.cli.run import Done, aprfmt
from tests.conversion.folders import float_bytes, llama_folder, tensors_of, write_mixed

_NUMBER = re.compile(r"(?<![\w.\-/])\d[\d,]*(?:\.\d+)?(?![\w/]|\.\d)")
UP = "model.layers.0.mlp.up_proj.weight"
LARGE, SMALL, KEPT = 7, 11, 5  # values beyond F16, values below its smallest, and values it has
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

Rows = dict[str, tuple[str, tuple[int, ...], bytes]]


def numbers(text: str) -> list[str]:
    """Return the numbers of a line that are no part of a name, without thousands' commas."""
    return [found.replace(",", "") for found in _NUMBER.findall(text)]


def line_of(done: Done, word: str) -> str:
    """Return the one line of stdout in which a word stands."""
    (found,) = (line for line in done.out.splitlines() if word in line)
    return found


def size_text(size: int) -> str:
    """Return bytes as people write them, in powers of 1000."""
    for unit, factor in SIZES:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def encodings(path: Path) -> Counter[str]:
    """Return how many tensors of a GGUF file have which encoding, by gguf-py."""
    return Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)


def bf16(raw: bytes) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return np.frombuffer(raw, ml_dtypes.bfloat16).astype(np.float32)


def values_of(
    dtype: str, shape: tuple[int, ...], raw: bytes
) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return bf16(raw) if dtype == "BF16" else np.frombuffer(raw, np.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counts")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """A llama of two layers, one matrix of which has values that other encodings lose."""
    values = np.full((64, 64), 0.5, np.float32)
    values[0, :LARGE], values[1, :SMALL], values[2, :KEPT] = 1e6, 1e-9, 0.25
    return llama_folder(root / "a", "BF16", replaced={UP: float_bytes(values, "BF16")})


@pytest.fixture(scope="module")
def plain(folder: Path, root: Path) -> Path:
    assert aprfmt("convert", folder, root / "a.gguf").code == 0
    return root / "a.gguf"


def with_rows(folder: Path, target: Path, rows: Rows) -> Path:
    """Write a copy of a folder that has these tensors."""
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    write_mixed(target / "model.safetensors", rows)
    return target


# --- convert and quantize ------------------------------------------------------------------------


def both(*command: object) -> tuple[Done, Any]:
    """Return what a writing command prints, and the JSON of the same command."""
    said = aprfmt(*command, "--force")
    asked = aprfmt(*command, "--force", "--json")
    assert said.code == asked.code == 0, said.err
    return said, asked.json


def test_a_conversion_counts_tensors_bytes_and_encodings(folder: Path, root: Path) -> None:
    target = root / "counted.gguf"
    said, found = both("convert", folder, target)
    has = encodings(target)
    total = sum(has.values())
    wrote = line_of(said, "wrote")
    assert wrote.endswith(f" {total} tensors, {size_text(target.stat().st_size)}")
    assert found["file_bytes"] == target.stat().st_size and len(found["tensors"]) == total
    assert numbers(line_of(said, "BF16 -> F32")) == [str(has["F32"])]
    permuted = sum(name.endswith(("q_proj.weight", "k_proj.weight")) for name in tensors_of(folder))
    assert numbers(line_of(said, "rope order")) == [str(permuted)]
    assert numbers(line_of(said, "verified")) == [str(has["BF16"]), str(has["F32"])]
    assert found["counts"] == {"bytes": has["BF16"], "values": has["F32"], "lossy": 0}
    assert found["verified"] == total


def test_shards_are_listed_with_their_sizes(folder: Path, root: Path) -> None:
    target = root / "parts.gguf"
    said, found = both("convert", folder, target, "--max-shard-size", "50K")
    files = [Path(path) for path in found["files"]]
    sizes = [path.stat().st_size for path in files]
    total = sum(sum(encodings(path).values()) for path in files)
    wrote = line_of(said, "wrote")
    assert len(files) > 2 and f"wrote {len(files)} files " in wrote
    assert wrote.endswith(f" {total} tensors, {size_text(sum(sizes))}")
    listed = [said.out.count(f"{p}  {size_text(n)}\n") for p, n in zip(files, sizes, strict=True)]
    assert listed == [1] * len(files)
    assert found["sizes"] == dict(zip(map(str, files), sizes, strict=True))
    assert found["file_bytes"] == sum(sizes)
    again = aprfmt("convert", folder, root / "dry.gguf", "--max-shard-size", "50K", "--dry-run")
    assert f"({sum(sizes)} bytes in {len(files)} files)" in line_of(again, "would write")


def test_what_a_plain_encoding_loses_is_counted(folder: Path, root: Path) -> None:
    target = root / "half.gguf"
    said, found = both("convert", folder, target, "--encoding", "F16", "--allow-overflow")
    lost = Counter[str]()
    with np.errstate(over="ignore"):
        for _, shape, raw in tensors_of(folder).values():
            before = bf16(raw)
            after = before.astype(np.float16 if len(shape) > 1 else np.float32)
            lost["changed"] += int((after != before).sum())
            lost["overflowed"] += int((np.isinf(after) & np.isfinite(before)).sum())
            lost["underflowed"] += int(((after == 0) & (before != 0)).sum())
    assert lost["overflowed"] == LARGE and lost["underflowed"] >= SMALL
    lossy = sum(row["how"] == "lossy" for row in found["tensors"])
    spoken = [numbers(line) for line in said.out.splitlines() if "BF16 -> F16" in line]
    assert sorted(len(row) for row in spoken) == [1, 4]  # as values, and with what is lost
    assert max(spoken, key=len) == [str(lossy), *(str(lost[name]) for name in lost)]
    assert sum(int(row[0]) for row in spoken) == encodings(target)["F16"]
    assert {name: sum(row[name] for row in found["tensors"]) for name in lost} == lost


def test_what_blocks_lose_is_counted(folder: Path, root: Path) -> None:
    """Decoded by gguf-py; q and k have other rows in GGUF, which moves no value's count."""
    target = root / "q.gguf"
    said, found = both("quantize", folder, target, "--type", "Q8_0")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    changed = under = 0
    for name, (_, shape, raw) in tensors_of(folder).items():
        before = bf16(raw)
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0):
            before = before.reshape(heads, 2, 8, *shape[1:]).swapaxes(1, 2).reshape(-1)
        tensor = stored[names.get_name(name, (".weight",)) or ""]
        after = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        (row,) = (row for row in found["tensors"] if row["name"] == tensor.name)
        assert row["changed"] == int((before != after).sum()), name
        changed += row["changed"]
        under += int(((after == 0) & (before != 0)).sum())
    has = encodings(target)
    assert numbers(line_of(said, "-> Q8_0")) == [str(has["Q8_0"]), str(changed), "0", str(under)]
    assert numbers(line_of(said, "verified")) == [str(has["F32"]), str(has["Q8_0"])]


# --- diff ----------------------------------------------------------------------------------------


def test_a_comparison_counts_each_verdict(folder: Path, root: Path) -> None:
    rows = tensors_of(folder)
    norms = [name for name in sorted(rows) if len(rows[name][1]) == 1]
    matrices = [name for name in sorted(rows) if name not in norms]
    for place, name in enumerate(norms):
        values = bf16(rows[name][2]).copy()
        if place < 3:
            values[: place + 1] += 8
        wide = place != 1  # one that differs keeps its encoding
        raw = values.tobytes() if wide else float_bytes(values, "BF16")
        rows[name] = ("F32" if wide else "BF16", rows[name][1], raw)
    for name in matrices[:4]:
        del rows[name]
    rows["one.more.weight"] = ("BF16", (4, 4), bytes(32))
    other = with_rows(folder, root / "b", rows)
    wanted = {"DIFFERENT": 3, "SAME_VALUES": len(norms) - 3, "ONLY_IN_A": 4, "ONLY_IN_B": 1,
              "SAME_BYTES": len(matrices) - 4}  # fmt: skip
    done = aprfmt("diff", folder, other, "--json")
    assert done.code == 1
    assert {word: count for word, count in done.json["counts"].items() if count} == wanted
    assert Counter(row["verdict"] for row in done.json["tensors"]) == Counter(wanted)
    said = aprfmt("diff", folder, other)
    first = said.out.splitlines()[0]
    spoken = {word: int(count) for count, word in re.findall(r"(\d+) ([A-Z_]{4,})", first)}
    total = sum(wanted.values())
    in_both = total - wanted["ONLY_IN_A"] - wanted["ONLY_IN_B"]
    assert spoken == wanted and numbers(first)[:2] == [str(in_both), str(total)]
    assert numbers(line_of(said, "same values in"))[0] == str(wanted["SAME_VALUES"])
    apart = total - wanted["SAME_VALUES"] - wanted["SAME_BYTES"]
    unexplained = apart - sum(len(cause["roles"]) for cause in done.json["causes"])
    assert f"and {unexplained - 1} more (-v)" in said.out
    shown = aprfmt("diff", folder, other, "--top", "2").out
    left = sum(wanted[word] for word in ("DIFFERENT", "ONLY_IN_A", "ONLY_IN_B")) - 2
    assert f"... {left} more (" in shown
    for row in done.json["tensors"]:
        if row["verdict"] != "DIFFERENT":
            continue
        a, b = (values_of(*tensors_of(each)[row["name_a"]]) for each in (folder, other))
        assert row["stats"]["count"] == a.size
        assert row["stats"]["changed"] == int((a != b).sum())


# --- validate ------------------------------------------------------------------------------------


def said_by(found: Any, check: str) -> list[str]:
    (row,) = (row for row in found["checks"] if row["name"] == check)
    return numbers(row["found"])


def verdict_line(done: Done) -> str:
    """Return the last line, or that before a next command."""
    return [line for line in done.out.splitlines() if not line.startswith("next: ")][-1]


def verdict_counts(done: Done, *words: str) -> dict[str, int]:
    """Return the numbers of the verdict's line by the word behind each."""
    last = verdict_line(done)
    return {word: int(match[1]) for word in words if (match := re.search(rf"(\d+) {word}", last))}


def test_checks_count_what_the_demo_has(demo_model: Path) -> None:
    done, found = (
        aprfmt("validate", demo_model, "-v"),
        aprfmt("validate", demo_model, "--json").json,
    )
    tensors = tensors_of(demo_model)
    tokenizer = json.loads((demo_model / "tokenizer.json").read_text())
    template = json.loads((demo_model / "tokenizer_config.json").read_text()).get("chat_template")
    template = template or (demo_model / "chat_template.jinja").read_text()
    tokens = {*tokenizer["model"]["vocab"], *(t["content"] for t in tokenizer["added_tokens"])}
    wanted = {
        "layout": [len(tensors), 1],
        "names": [len(tensors) + 1],  # and the key `format`
        "values": [len(tensors)],
        "completeness": [len(tensors), len(tensors)],
        "shapes": [len(tensors)],
        "tokenizer": [len(tokens)],
        "vocabulary_size": [len(tokens), tensors["model.embed_tokens.weight"][1][0]],
        "merges": [len(tokenizer["model"]["merges"])],
        "chat_template": [len(template)],
        "unread": [found["ledger"]["items"]],
    }
    for check, counts in wanted.items():
        assert said_by(found, check) == list(map(str, counts)), check
        assert numbers(line_of(done, f" {check}  ").partition(check)[2]) == list(map(str, counts))
    outcomes = Counter(row["outcome"] for row in found["checks"])
    assert found["counts"] == {word: outcomes[word] for word in ("PASS", "FAIL", "NOT_RUN")}
    assert Counter(line.split()[0] for line in done.out.splitlines()[:-1] if line[0] != " ") == {
        word.replace("_", "-"): count for word, count in outcomes.items()
    }
    ledger = found["ledger"]
    assert sum(ledger["counts"].values()) == ledger["items"]
    assert sum(row["items"] for row in ledger["kinds"]) == ledger["items"]


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_what_fails_and_warns_is_counted(bad: int, folder: Path, root: Path) -> None:
    rows = tensors_of(folder)
    spoiled = sorted(name for name in rows if len(rows[name][1]) > 1)[:bad]
    for place, name in enumerate(spoiled, 1):
        values = bf16(rows[name][2]).copy()
        values[:place] = np.nan
        rows[name] = ("BF16", rows[name][1], float_bytes(values, "BF16"))
    broken = with_rows(folder, root / f"nan{bad}", rows)
    done = aprfmt("validate", broken, "-v")
    found = aprfmt("validate", broken, "--json").json
    noted = [row for row in found["findings"] if row["check"] == "values"]
    assert sorted(int(numbers(row["found"])[0]) for row in noted) == [*range(1, bad + 1)]
    outcomes = Counter(row["outcome"] for row in found["checks"])
    assert found["counts"] == {word: outcomes[word] for word in ("PASS", "FAIL", "NOT_RUN")}
    warned = sum(row["level"] == "warning" for row in found["findings"])
    assert verdict_counts(done, "passed", "failed", "not run", "warnings") == {
        "passed": outcomes["PASS"], "failed": outcomes["FAIL"], "not run": outcomes["NOT_RUN"],
        "warnings": warned,
    }  # fmt: skip


def test_files_of_a_set_are_counted(folder: Path, root: Path) -> None:
    target = root / "split" / "m.gguf"
    target.parent.mkdir()
    assert aprfmt("convert", folder, target, "--max-shard-size", "30K").code == 0
    files = sorted(target.parent.glob("*.gguf"))
    found = aprfmt("validate", files[0], "--json").json
    assert said_by(found, "layout") == [str(len(tensors_of(folder))), str(len(files))]
    assert said_by(found, "shards") == [str(len(files))]


# --- hash, scan, inspect, tensors ----------------------------------------------------------------


def test_hashes_are_as_many_as_tensors_and_a_check_counts_the_wrong(
    folder: Path, root: Path
) -> None:
    copy = root / "hashed"
    shutil.copytree(folder, copy)
    rows = tensors_of(copy)
    done = aprfmt("hash", copy, "--write")
    listed = [line.split() for line in done.out.splitlines()[:-1]]
    raw = Counter(hashlib.sha256(row[2]).hexdigest()[:16] for row in rows.values())
    assert Counter(line[1] for line in listed) == raw
    manifest = next(copy.glob("*.aprfmt-hash.json"))
    for name in sorted(rows)[:3]:
        rows[name] = (*rows[name][:2], bytes(len(rows[name][2])))
    write_mixed(copy / "model.safetensors", rows)
    checked = aprfmt("hash", copy, "--check", manifest, "-v")
    assert checked.code == 1
    failures = aprfmt("hash", copy, "--check", manifest, "--json").json["failures"]
    lines = checked.out.splitlines()
    assert sum(line.startswith("FAIL ") for line in lines[:-1]) == len(failures)
    wrong = {row["key"] for row in failures if row["key"] != "file"}
    assert len(wrong) >= 3


def test_a_scan_counts_models_answers_and_copies(folder: Path, plain: Path, root: Path) -> None:
    there = root / "many"
    there.mkdir()
    shutil.copytree(folder, there / "a")
    shutil.copytree(folder, there / "again")
    os.utime(there / "again" / "model.safetensors", (1, 1))  # else it would be the same, moved
    shutil.copy(plain, there / "a.gguf")
    (there / "cut.gguf").write_bytes(plain.read_bytes()[:-100])  # the last tensor is cut
    done = aprfmt("scan", there, "-o", root / "rows.jsonl")
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    outcomes = Counter(row["outcome"] for row in rows if row["check"] != "similar")
    first = done.out.splitlines()[0]
    assert numbers(first)[0] == "4", first
    found = aprfmt("scan", there, "-o", root / "other.jsonl", "--json").json
    assert found["counts"] == {word: outcomes[word] for word in found["counts"]}
    assert re.findall(r"(\d+) (?:answers? )?(passed|failed|not run|errors)", first) == [
        (str(outcomes[key]), word)
        for word, key in (("passed", "PASS"), ("failed", "FAIL"), ("not run", "NOT_RUN"),
                          ("errors", "ERROR"))
    ]  # fmt: skip
    stored = Counter[tuple[str, bytes]]()
    for each in (there / "a", there / "again"):
        stored.update((dtype, raw) for dtype, _, raw in tensors_of(each).values())
    in_file = [(t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(plain).tensors]
    stored.update([*in_file, *in_file[:-1]])
    twice = {key: count for key, count in stored.items() if count > 1}
    spare = sum(len(raw) * (count - 1) for (_, raw), count in twice.items())
    assert numbers(line_of(done, "stored more than once")) == [str(len(twice)), str(spare)]
    assert numbers(line_of(done, "asked now"))[:2] == [str(len(rows)), "0"]
    assert numbers(line_of(done, "damage:")) == [str(len(found["damage"]))]
    known = aprfmt("scan", there, "-o", root / "rows.jsonl")
    assert numbers(line_of(known, "asked now"))[:2] == ["0", str(len(rows))]


def test_inspect_counts_by_encoding(plain: Path) -> None:
    done, found = aprfmt("inspect", plain), aprfmt("inspect", plain, "--json").json
    rows: dict[str, list[int]] = {}
    for tensor in gguf.GGUFReader(plain).tensors:
        row = rows.setdefault(tensor.tensor_type.name, [0, 0, 0])
        row[:] = [row[0] + 1, row[1] + int(tensor.n_elements), row[2] + int(tensor.n_bytes)]
    assert {name: list(row.values()) for name, row in found["encodings"].items()} == rows
    for name, (tensors, parameters, size) in rows.items():
        line = next(line for line in done.out.splitlines() if line.startswith(f"{name} "))
        assert line.split()[1:] == [str(tensors), f"{parameters:,}", *size_text(size).split()]
    total = sum(row[0] for row in rows.values())
    assert line_of(done, "  size ").endswith(f"{size_text(plain.stat().st_size)}, {total} tensors")
    parameters = sum(row[1] for row in rows.values())
    assert found["parameters"] == parameters and found["tensor_count"] == total
    weights = sum(row[2] for row in rows.values()) * 8 / parameters
    assert f"{parameters / 1000:.1f} k parameters" in done.out.splitlines()[0]
    assert f" {weights:.2f} bits a weight" in done.out.splitlines()[0]


@pytest.mark.parametrize("limit", [1, 4, 20, 21, 22])
def test_a_limited_list_says_how_many_are_left(limit: int, folder: Path) -> None:
    total = len(tensors_of(folder))
    lines = aprfmt("tensors", folder, "--limit", limit).out.splitlines()
    left = [int(numbers(line)[0]) for line in lines if line.startswith("... ")]
    assert len(lines) - 1 - len(left) + sum(left) == total
    assert sum(left) == max(0, total - limit)


# --- qa ------------------------------------------------------------------------------------------


def qa_lines(done: Done) -> tuple[Counter[str], Mapping[str, Sequence[str]]]:
    """Return how many gates end how, and the numbers of each gate's line."""
    rows = [line.split(maxsplit=2) for line in done.out.splitlines()[1:] if line[0] != " "]
    rows = [row for row in rows if row[0] in ("PASS", "FAIL", "WARN", "NOT-RUN")]
    return Counter(row[0] for row in rows), {row[1]: numbers(row[2]) for row in rows}


def test_gates_are_counted_and_so_are_checks_in_them(plain: Path) -> None:
    done = aprfmt("qa", plain, "-v")
    found = aprfmt("qa", plain, "--json").json
    words, said = qa_lines(done)
    outcomes = Counter(gate["outcome"].replace("_", "-") for gate in found["gates"])
    assert words == outcomes and outcomes["FAIL"]
    assert re.findall(r"(\d+) (PASS|FAIL|NOT-RUN)", verdict_line(done)) == [
        (str(outcomes[word]), word) for word in ("PASS", "FAIL", "NOT-RUN")
    ]
    for gate in found["gates"]:
        if gate["outcome"] == "FAIL":
            bad = sum(check["outcome"] == "FAIL" for check in gate["checks"])
            assert said[gate["name"]][-2:] == [str(bad), str(len(gate["checks"]))]


@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_fields_of_a_block_are_its_bytes_and_its_first_eight_numbers(encoding: str) -> None:
    """Fields lie one behind the other, and a field's numbers are those numpy reads there."""
    layout = codec(encoding).layout
    assert layout is not None and layout.names and layout.fields
    raw = np.random.default_rng(3).integers(0, 60, layout.itemsize, dtype=np.uint8).tobytes()
    row = block_row(encoding, raw, 2, 100)
    assert "".join(field["bytes"] for field in row["fields"]) == raw.hex() == row["bytes"]
    assert [field["name"] for field in row["fields"]] == list(layout.names)
    assert (row["block"], row["offset"]) == (2, 100)
    for field in row["fields"]:
        kind = layout.fields[field["name"]][0].base
        numbers = np.frombuffer(bytes.fromhex(field["bytes"]), kind)
        assert field["value"] == numbers[:8].tolist()
    assert max(len(field["bytes"]) for field in row["fields"]) > 16  # one has more than are shown
    theirs = gguf.quants.dequantize(
        np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType[encoding]
    )
    assert row["values"] == theirs.reshape(-1).tolist()
