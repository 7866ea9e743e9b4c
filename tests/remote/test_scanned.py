"""`aprfmt scan` of addresses: what lies elsewhere is asked what files here are asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import aprfmt as command
from tests.remote.server import RangeServer
from tests.remote.test_buckets import bucket as bucket

COMMIT = "2" * 40
CHECKS = ("--checks", "layout", "--checks", "encodings", "--no-families", "--jobs", "1")


@pytest.fixture
def served(
    server: RangeServer,
    made: Mapping[str, bytes],
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> RangeServer:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    files = {path.name: path.read_bytes() for path in demo_model.iterdir() if path.is_file()}
    server.add_repository("someone/tiny", COMMIT, files, ("model.safetensors",))
    server.add_repository("other/copy", COMMIT, files, ("model.safetensors",))
    for name in ("small.gguf", "small.apr", "small.safetensors"):
        server.files[f"/{name}"] = made[name]
    return server


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def answers(out: Path) -> list[tuple[str, str, str]]:
    return sorted((row["check"], row["outcome"], row["found"]) for row in rows(out))


def test_addresses_get_the_answers_of_their_files(
    served: RangeServer, made: Mapping[str, bytes], demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "small.gguf").write_bytes(made["small.gguf"])
    here = ("scan", demo_model, tmp_path / "small.gguf", "-o", tmp_path / "here.jsonl", *CHECKS)
    there = (
        "scan",
        "hf://someone/tiny",
        f"{served.url}/small.gguf",
        "-o",
        tmp_path / "there.jsonl",
        *CHECKS,
        "--json",
    )
    first, second = command(*here), command(*there)
    assert first.code == second.code == 0, first.err + second.err
    assert answers(tmp_path / "here.jsonl") == answers(tmp_path / "there.jsonl")
    assert second.json["requests"] == len(served.log) > second.json["remote"]["requests"]
    assert {row["model"] for row in rows(tmp_path / "there.jsonl")} == {
        "hf://someone/tiny",
        f"{served.url}/small.gguf",
    }


def test_a_list_of_addresses(served: RangeServer, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    places = "hf://someone/tiny  # the first", f"{served.url}/small.apr", f"{served.url}/none.gguf"
    listed.write_text("# models\n\n" + "\n".join(places))
    out = tmp_path / "x.jsonl"
    done = command("scan", "--list", listed, "-o", out, *CHECKS, "--json")
    assert done.code == 2
    missing = [row for row in rows(out) if row["outcome"] == "ERROR"]
    assert [row["model"] for row in missing] == [f"{served.url}/none.gguf"]
    assert "no model is there" in missing[0]["found"] or "404" in missing[0]["found"]
    assert len({row["model"] for row in rows(out)}) == 3


def test_two_addresses_of_one_content_are_one_model(served: RangeServer, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    places = ("hf://someone/tiny/model.safetensors", "hf://someone/tiny")
    done = command("scan", *places, "-o", out, *CHECKS, "--json")
    assert done.code == 0, done.err
    (opened,) = [row for row in rows(out) if row["check"] == "open"]
    assert len(opened["places"]) == 2


def test_a_second_scan_asks_nothing_that_is_known(served: RangeServer, tmp_path: Path) -> None:
    args = ("scan", "hf://someone/tiny", "-o", tmp_path / "x.jsonl", *CHECKS, "--json")
    first, before = command(*args).json, len(served.log)
    again = command(*args).json
    assert first["asked"] == again["kept"] == 3 and again["asked"] == 0
    assert len(served.log) - before <= 10  # the small texts, whose digests a hub does not publish


def test_a_budget_of_requests_begins_no_more_models(served: RangeServer, tmp_path: Path) -> None:
    places = [f"{served.url}/small.{kind}" for kind in ("gguf", "apr", "safetensors")]
    out = tmp_path / "x.jsonl"
    few = ("--jobs", "1", "--max-requests", "4")  # what other workers make is known afterwards
    done = command("scan", *places, "-o", out, *CHECKS, *few, "--json")
    assert done.code == 2 and done.json["left"] > 0
    assert len({row["model"] for row in rows(out)}) == 1
    again = command("scan", *places, "-o", out, *CHECKS, "--json")
    assert again.code == 0 and again.json["left"] == 0


def test_a_folder_of_a_bucket(bucket: Any, made: Mapping[str, bytes], tmp_path: Path) -> None:
    for name in ("small.gguf", "small.apr"):
        bucket.put_object(Bucket="models", Key=f"a/{name}", Body=made[name])
    out = tmp_path / "x.jsonl"
    done = command("scan", "s3://models/a", "-o", out, *CHECKS, "--json")
    assert done.code == 0, done.err
    places = {"s3://models/a/small.gguf", "s3://models/a/small.apr"}
    assert {row["model"] for row in rows(out)} == places


@pytest.mark.parametrize("args", [(), ("--ray", "--max-requests", "3", "x.gguf")])
def test_what_is_refused(args: tuple[str, ...], tmp_path: Path) -> None:
    done = command("scan", *args, "-o", tmp_path / "x.jsonl")
    assert done.code == 2 and done.err.count("\n") == 1
