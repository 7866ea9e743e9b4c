"""Damaged files are read as far as possible, with one error line and exit 2, and never converted.

Seen red: every command but `inspect --partial` ended with one error line for the whole file.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.damaged import DAMAGE, KINDS, cut
from tests.cli.run import Done, aprfmt

FORMATS = tuple(DAMAGE)
HF, GG = "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"
OTHER_HF, OTHER_GG = "model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"
ROLE, WELL = "L1.attn_q.weight", "L0.attn_norm.weight"


@dataclass(frozen=True)
class Sound:
    """A whole model of one format and what its commands say of it."""

    format: str
    path: Path  # as commands are given it
    weights: Path
    tensors: Mapping[str, Any]
    hashes: Mapping[str, Any]

    @property
    def target(self) -> str:
        return GG if self.format == "gguf" else HF

    @property
    def other(self) -> str:
        return OTHER_GG if self.format == "gguf" else OTHER_HF


@pytest.fixture(scope="module")
def sound(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sound]:
    folder = tmp_path_factory.mktemp("sound")
    made = {}
    for kind in FORMATS:
        path = weights = folder / f"demo.{kind}"
        if kind == "safetensors":
            path = folder / "demo"
            shutil.copytree(demo_model, path)
            weights = path / "model.safetensors"
        else:
            assert aprfmt("convert", demo_model, path, "--no-verify").code == 0
        listed = {row["name"]: row for row in aprfmt("tensors", path, "--json").json["tensors"]}
        hashed = {row["key"]: row for row in aprfmt("hash", path, "--json").json["tensors"]}
        made[kind] = Sound(kind, path, weights, listed, hashed)
    return made


def copy(whole: Sound, folder: Path) -> tuple[Path, Path]:
    """Return a copy of a model, and its file of weights."""
    if whole.path.is_dir():
        shutil.copytree(whole.path, folder / "broken")
        return folder / "broken", folder / "broken" / whole.weights.name
    path = folder / f"broken.{whole.format}"
    shutil.copy(whole.path, path)
    return path, path


@pytest.fixture(params=[f"{kind}-{how}" for kind in FORMATS for how in KINDS])
def broken(request: Any, sound: Mapping[str, Sound], tmp_path: Path) -> tuple[Sound, Path, Path]:
    """A model one of whose tensors is damaged."""
    kind, _, how = str(request.param).partition("-")
    whole = sound[kind]
    path, weights = copy(whole, tmp_path)
    weights.write_bytes(DAMAGE[kind](weights.read_bytes(), whole.target, how, whole.other))
    return whole, path, weights


def said_once(done: Done, weights: Path) -> None:
    """Assert one line about the damage, however many tensors it costs."""
    (line,) = (line for line in done.err.splitlines() if line.startswith("aprfmt: "))
    assert line.startswith(f"aprfmt: {weights}: is damaged, "), line
    assert "bug" not in done.err and "Traceback" not in done.err


def test_what_is_damaged_is_listed_and_the_rest_is_as_it_was(
    broken: tuple[Sound, Path, Path],
) -> None:
    whole, path, weights = broken
    done = aprfmt("tensors", path, "--json")
    assert done.code == 2 and done.json["ok"] is False
    said_once(done, weights)
    (first, *_) = done.json["damage"]
    assert first["where"] == str(weights) and whole.target in first["tensors"]
    rows = {row["name"]: row for row in done.json["tensors"]}
    assert list(rows) == list(whole.tensors)
    lost = {name for name, row in rows.items() if "damage" in row}
    assert whole.target in lost and len(lost) <= 2  # of two that overlap, both are suspect
    assert lost == {name for one in done.json["damage"] for name in one["tensors"]}
    for name in rows.keys() - lost:
        assert {**rows[name], "offset": 0} == {**whole.tensors[name], "offset": 0}
    shown = aprfmt("tensors", path)
    assert shown.out.count(" damaged\n") == len(lost)


def test_every_looking_command_goes_on(broken: tuple[Sound, Path, Path]) -> None:
    whole, path, weights = broken
    for command in ("inspect", "tree", "hex", "hash"):
        done = aprfmt(command, path, "--json")
        assert done.code == 2, command
        said_once(done, weights)
        assert whole.target in done.json["damage"][0]["tensors"], command
    body = aprfmt("inspect", path, "--json").json
    assert body["tensor_count"] == len(whole.tensors)
    assert body["architecture"] == "qwen2"
    hashed = {row["key"]: row for row in aprfmt("hash", path, "--json").json["tensors"]}
    assert hashed.keys() == whole.hashes.keys()
    assert hashed[ROLE]["raw"] == [] and "damage" in hashed[ROLE]
    same = [key for key, row in hashed.items() if row == whole.hashes[key]]
    assert len(same) >= len(hashed) - 2 and WELL in same


def test_values_of_a_sound_tensor_and_of_the_damaged_one(broken: tuple[Sound, Path, Path]) -> None:
    whole, path, weights = broken
    good = aprfmt("cat", path, WELL, "--json")
    assert good.code == 2
    said_once(good, weights)
    assert good.json["values"] == aprfmt("cat", whole.path, WELL, "--json").json["values"]
    for line in (("cat", path, whole.target), ("cat", path, ROLE), ("hex", path, "--tensor", ROLE)):
        bad = aprfmt(*line)
        assert (bad.code, bad.out, len(bad.err.splitlines())) == (2, "", 1), bad.err
        assert whole.target in bad.err and "bug" not in bad.err


def test_diff_compares_the_others(broken: tuple[Sound, Path, Path]) -> None:
    whole, path, weights = broken
    done = aprfmt("diff", whole.path, path, "--json")
    assert done.code == 2
    said_once(done, weights)
    rows = {row["key"]: row for row in done.json["tensors"]}
    assert len(rows) == len(whole.hashes), "a damaged tensor left the denominator"
    assert rows[ROLE]["verdict"] == "UNREADABLE" and rows[ROLE]["cause"]
    verdicts = [row["verdict"] for row in rows.values()]
    assert verdicts.count("UNREADABLE") <= 2
    assert verdicts.count("SAME_BYTES") == len(rows) - verdicts.count("UNREADABLE")
    assert done.json["hyperparameters"] == [] and done.json["tokenizer"] == []
    assert aprfmt("diff", path, path, "--tensor", WELL).code == 2, (
        "the file is damaged all the same"
    )


def test_validate_reports(broken: tuple[Sound, Path, Path]) -> None:
    whole, path, weights = broken
    done = aprfmt("validate", path, "--json")
    assert done.code == 1 and done.err == ""
    checks = {check["name"]: check for check in done.json["checks"]}
    assert checks["layout"]["outcome"] == "FAIL" and checks["layout"]["where"] == str(weights)
    assert whole.target in checks["layout"]["found"]
    assert (
        checks["values"]["outcome"] == "NOT_RUN" and "could be decoded" in checks["values"]["found"]
    )
    assert checks["tokenizer"]["outcome"] == "PASS"
    assert checks["completeness"]["outcome"] == "PASS"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("how", ["shape", "cut"])
def test_nothing_is_made_of_a_damaged_file(
    kind: str, how: str, sound: Mapping[str, Sound], tmp_path: Path
) -> None:
    whole = sound[kind]
    path, weights = copy(whole, tmp_path)
    if how == "cut":
        cut(weights, 0.9)
    else:
        weights.write_bytes(DAMAGE[kind](weights.read_bytes(), whole.target, how, whole.other))
    out = tmp_path / "out"
    out.mkdir()
    for line in (
        ("convert", path, out / "x.apr"),
        ("convert", path, out / "x.gguf", "--arch", "none"),
        ("quantize", path, out / "x.gguf", "--type", "Q8_0"),
        ("merge", path, out / "x.apr"),
        ("set", path, "general.name=x", "-o", out / f"x.{kind}"),
        ("run", path, "--ids", "1,2", "--max-tokens", "1"),
        ("trace", path, "--payload", "--ids", "1,2"),
        ("logits", path, "--ids", "1,2"),
        ("hash", path, "--write"),
        ("qa", path),
    ):
        done = aprfmt(*line)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), (line, done.err)
        assert str(weights) in done.err
    assert list(out.iterdir()) == [] and not list(tmp_path.rglob("*hash.json"))
    # `diagnose` compares what can be read. Two tensors on the same bytes are a fault that it
    # locates; of another damage it says that the file is not whole.
    done = aprfmt("diagnose", whole.path, path, "--ids", "1,2")
    shared = (kind, how) == ("gguf", "shape")
    says = "overlapping_ranges (located)" if shared else "not comparable: a file is not whole"
    assert (done.code, done.err) == (1 if shared else 2, "") and says in done.out
    assert str(weights) in done.out and "not compared: " in done.out


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cut_file_is_one_line_with_a_count(
    kind: str, sound: Mapping[str, Sound], tmp_path: Path
) -> None:
    whole = sound[kind]
    path, weights = copy(whole, tmp_path)
    cut(weights, 0.4)
    done = aprfmt("tensors", path, "--json")
    lost = [row["name"] for row in done.json["tensors"] if "damage" in row]
    assert done.code == 2 and 5 < len(lost) < len(whole.tensors)
    (line,) = done.err.splitlines()
    assert f"is damaged, {len(lost)} tensors cannot be read: " in line
    assert f"{len(lost)} of {len(whole.tensors)} tensors are cut" in line
    (damage,) = done.json["damage"]
    assert damage["kind"] == "truncated" and sorted(damage["tensors"]) == sorted(lost)
    listed = aprfmt("tensors", path, "--partial")
    assert listed.code == 0 and len(listed.err.splitlines()) == 1
    assert listed.err.startswith(f"warning: {weights}: is damaged, {len(lost)} tensors")
    inspected = aprfmt("inspect", path, "--partial")
    assert inspected.code == 0 and "tensors are cut" in inspected.err
    assert len(inspected.err.splitlines()) == 1
    report = aprfmt("validate", path, "-v")
    assert report.code == 1 and report.err == "" and "FAIL     layout" in report.out


def test_the_shape_of_a_cut_tensor_is_known(demo_model: Path, tmp_path: Path) -> None:
    """Seen red: a second error line about a missing vocab_size, which the shape gives."""
    whole, bare = tmp_path / "whole.gguf", tmp_path / "bare.gguf"
    assert aprfmt("convert", demo_model, whole, "--no-verify").code == 0
    keys = [f"--remove={key}" for key in ("qwen2.vocab_size", "aprfmt.hf_config")]
    assert aprfmt("set", whole, *keys, "-o", bare).code == 0
    before = aprfmt("inspect", bare, "--json").json
    first = min(row["offset"] for row in aprfmt("tensors", bare, "--json").json["tensors"])
    bare.write_bytes(bare.read_bytes()[: first + 1000])  # inside token_embd.weight
    done = aprfmt("inspect", bare)
    assert done.code == 2 and "50 of 50 tensors are cut" in done.err
    assert len(done.err.splitlines()) == 1, done.err
    found = aprfmt("inspect", bare, "--json").json
    assert before["hyperparameters"] and found["hyperparameters"] == before["hyperparameters"]


def test_a_page_that_cannot_be_written_is_the_one_error(
    sound: Mapping[str, Sound], tmp_path: Path
) -> None:
    """Seen red: the damage was reported first, in a separate error line."""
    path, weights = copy(sound["gguf"], tmp_path)
    cut(weights, 0.9)
    page = tmp_path / "page.html"
    page.touch()
    done = aprfmt("diff", path, path, "--html", page)
    assert done.code == 2 and len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith(f"aprfmt: {page}: exists; ")


def test_partial_is_no_licence_for_other_damage(sound: Mapping[str, Sound], tmp_path: Path) -> None:
    path, weights = copy(sound["gguf"], tmp_path)
    weights.write_bytes(DAMAGE["gguf"](weights.read_bytes(), GG, "encoding", OTHER_GG))
    cut(weights, 0.4)
    assert aprfmt("tensors", path, "--partial").code == 2


def test_every_damaged_shard_is_said_once(sound: Mapping[str, Sound], tmp_path: Path) -> None:
    assert (
        aprfmt("split", sound["gguf"].path, tmp_path / "m.gguf", "--max-shard-size", "1M").code == 0
    )
    shards = sorted(tmp_path.glob("m-*.gguf"))
    assert len(shards) > 2
    cut(shards[0], 0.9)
    cut(shards[1], 0.8)
    done = aprfmt("tensors", shards[2], "--json")
    assert done.code == 2 and len(done.json["tensors"]) == len(sound["gguf"].tensors)
    assert [line.split(": ")[1] for line in done.err.splitlines()] == [str(s) for s in shards[:2]]
    shards[1].unlink()
    assert aprfmt("tensors", shards[0]).code == 2
    report = aprfmt("validate", shards[0], "--json")
    assert report.code == 1
    failed = [check["name"] for check in report.json["checks"] if check["outcome"] == "FAIL"]
    assert {"layout", "shards"} <= set(failed)


def test_metadata_and_a_config_that_cannot_be_read_cost_no_tensor(
    sound: Mapping[str, Sound], tmp_path: Path
) -> None:
    whole = sound["safetensors"]
    path, _ = copy(whole, tmp_path)
    (path / "config.json").write_text('{"model_type": ')
    done = aprfmt("diff", whole.path, path, "--json")
    assert done.code == 2 and done.json["counts"]["SAME_BYTES"] == len(whole.tensors)
    assert "config.json: not JSON" in done.json["damage"][0]["text"]
    assert aprfmt("validate", path).code == 1
    apr = tmp_path / "x.apr"
    data = bytearray(sound["apr"].path.read_bytes())
    assert data[64:65] == b"{"
    data[64:65] = b"<"
    apr.write_bytes(data)
    done = aprfmt("tensors", apr, "--json")
    assert done.code == 2 and len(done.json["tensors"]) == len(whole.tensors)
    assert "not JSON" in done.json["damage"][0]["text"] and done.json["damage"][0]["tensors"] == []


# --- inspect reads no tensor ------------------------------------------------------------------


def big_apr(path: Path, gigabytes: int) -> None:
    """Write an APR of one sparse tensor, with a footer that is wrong."""
    from tests.formats.apr_files import AprFile, Tensor

    count = (gigabytes << 30) // 4
    small = AprFile(tensors=(Tensor(b"w", (count,), size=4 * count, data=b""),), footer=b"")
    head = small.build()
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 64) * 64 + 4 * count + 4)


def test_inspect_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 GiB: no byte of a tensor is read, and no checksum is computed over them."""
    import zlib

    from aprfmt.formats.mapped_file import StoredTensor

    def fail(*args: object) -> memoryview:
        raise AssertionError("a tensor was read")

    summed: list[int] = []
    crc32 = zlib.crc32

    def counted(data: bytes, *more: int) -> int:
        summed.append(len(data))
        return crc32(data, *more)

    big_apr(tmp_path / "big.apr", 8)

    monkeypatch.setattr(StoredTensor, "raw", fail)
    monkeypatch.setattr(zlib, "crc32", counted)
    done = aprfmt("inspect", tmp_path / "big.apr", "--json")
    assert done.code == 0, done.err
    assert done.json["parameters"] == 1 << 31 and "checksum" not in done.json
    assert sum(summed) <= 64, "more than the header was summed"


def test_verify_checks_the_files_own_checksum(sound: Mapping[str, Sound], tmp_path: Path) -> None:
    whole = sound["apr"]
    done = aprfmt("inspect", whole.path, "--verify", "--json")
    assert (done.code, done.json["checksum"]) == (0, "PASS")
    path, _ = copy(whole, tmp_path)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    assert aprfmt("inspect", path).code == 0
    done = aprfmt("inspect", path, "--verify", "--json")
    assert (done.code, done.json["checksum"]) == (1, "FAIL")
    assert "the footer's checksum is not that of the bytes" in done.err
    done = aprfmt("inspect", sound["gguf"].path, "--verify", "--json")
    assert (done.code, done.json["checksum"]) == (2, "NOT_RUN")
    assert "nothing was verified" in done.err


def test_a_hash_that_cannot_be_compared_fails(sound: Mapping[str, Sound], tmp_path: Path) -> None:
    whole = sound["gguf"]
    path, weights = copy(whole, tmp_path)
    assert aprfmt("hash", path, "--write").code == 0
    (manifest,) = tmp_path.glob("*.aprfmt-hash.json")
    weights.write_bytes(DAMAGE["gguf"](weights.read_bytes(), GG, "encoding", OTHER_GG))
    done = aprfmt("hash", path, "--check", manifest, "--json")
    assert done.code == 1  # the file is another one, whatever of it cannot be read
    what = {row["key"]: row["what"] for row in done.json["failures"]}
    assert what[ROLE].startswith("cannot be read: ") and path.name in what
    assert json.loads(manifest.read_text())["tensors"]
