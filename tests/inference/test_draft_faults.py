"""What broke draft heads in the field, done to the one of fixtures/draft: each leaves it dead.

The bytes of such a head look healthy and the model itself answers as before; only the share of
accepted drafts shows it. Met in ModelOpt #733 and llm-compressor #2735 (dropped by a pattern), GSQ
#11 (0 of 3,595 drafts accepted), unsloth-zoo PR 1095 (norms at source + 2), kekzl/imp PR 1428.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aprfmt.diagnosis import diagnose
from aprfmt.inference.draft import ALIVE, DraftCounts
from aprfmt.model import open_model
from aprfmt.model.draft import is_draft_head
from tests.cli.run import ROOT, Done, aprfmt

SOUND = ROOT / "fixtures" / "draft"
TEXT = SOUND / "held-out.txt"
State = dict[str, torch.Tensor]
HEAD, EMBED = "mtp.", "model.embed_tokens.weight"


def encoding(state: State) -> None:
    """BF16 bits are read as F16."""
    for name in _of_head(state):
        state[name] = state[name].view(torch.float16)


def norms(state: State) -> None:
    """A tool adds one to norms that stand without it, and the next tool does so again."""
    for name in _of_head(state):
        if state[name].ndim == 1:
            state[name] = (state[name].float() + 1).to(torch.bfloat16)


def embedding(state: State) -> None:
    """The head has an embedding of its own, that of a tokenizer with another order."""
    order = torch.randperm(len(state[EMBED]), generator=torch.Generator().manual_seed(3))
    state["mtp.embed_tokens.weight"] = state[EMBED][order]


def halves(state: State) -> None:
    """The hidden state stands first, as in MiMo's heads."""
    state["mtp.fc.weight"] = torch.cat(state["mtp.fc.weight"].chunk(2, dim=1)[::-1], dim=1)


@dataclass(frozen=True)
class Fault:
    """One fault, and the cause that `diagnose` finds beside the sound model; "" for none.

    `shown`: it says how to see what comes of it, though the model itself answers as before.
    `rewritten`: it says how to write the folder anew from the sound one instead.
    """

    name: str
    change: Callable[[State], None]
    cause: str
    shown: bool = True
    rewritten: bool = False


FAULTS = (
    Fault("another encoding", encoding, "dtype_mislabel", rewritten=True),
    Fault("norms shifted twice", norms, "norm_offset", rewritten=True),
    Fault("wrong embedding", embedding, "extra_tensor", shown=False),
    Fault("halves exchanged", halves, ""),
)


def _of_head(state: State) -> list[str]:
    return [name for name in state if name.startswith(HEAD)]


def _edited(change: Callable[[State], None], folder: Path) -> Path:
    shutil.copytree(SOUND, folder)
    state = load_file(folder / "model.safetensors")
    change(state)
    whole = {name: value.contiguous().clone() for name, value in state.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder


def _measured(model: Path, *options: str) -> Done:
    more = ("--text", TEXT, "--max-seq-len", 256, "--json", *options)
    return aprfmt("eval", model, "--draft", *more)


@pytest.mark.parametrize("run", ["numpy", "torch"])
def test_the_trained_head_is_alive(run: str) -> None:
    done = _measured(SOUND, "--backend", run)
    found = done.json["draft"]
    assert done.code == 0 and found["acceptance"] >= 0.3 and found["drafts"] > 2000
    assert found["acceptance"] == found["accepted"] / found["drafts"] and found["least"] == ALIVE
    plain = aprfmt("eval", SOUND, "--text", TEXT, "--max-seq-len", 256, "--json").json
    assert done.json["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert done.json["loss_tokens"] == plain["loss_tokens"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_leaves_it_dead(fault: Fault, tmp_path: Path) -> None:
    folder = _edited(fault.change, tmp_path / "broken")
    done = _measured(folder)
    assert done.json["draft"]["acceptance"] < 0.05 and done.code == 1
    failed = [each for each in done.json["gate"]["checks"] if each["outcome"] == "FAIL"]
    assert [each["name"] for each in failed] == ["drafts-accepted"]
    if fault.cause:
        found = diagnose(str(SOUND), str(folder))
        assert {each.cause for each in found.findings} == {fault.cause}
        with open_model(folder) as model:
            assert all(is_draft_head(model, each.where) for each in found.findings)
        steps = {f"aprfmt eval {folder} --draft --text TEXT"} if fault.shown else {""}
        if fault.rewritten:
            steps = {f"aprfmt convert {SOUND} broken-fixed"}
        assert {each.next for each in found.findings} == steps


@pytest.mark.parametrize(
    ("pattern", "names"),
    [(HEAD, "mtp.fc.weight"), ("mtp.pre_fc", "mtp.pre_fc_norm_embedding.weight")],
)
def test_a_head_dropped_by_a_pattern_is_an_error_that_names_it(
    pattern: str, names: str, tmp_path: Path
) -> None:
    def drop(state: State) -> None:
        for name in [name for name in state if name.startswith(pattern)]:
            del state[name]

    done = aprfmt("eval", _edited(drop, tmp_path / "broken"), "--draft", "--text", TEXT)
    assert done.code == 2 and done.out == "" and names in done.err
    assert len(done.err.splitlines()) == 1


def test_what_changes_nothing_leaves_it_alive(tmp_path: Path) -> None:
    """Its own copy of the embedding, and float32 in place of bfloat16."""

    def same(state: State) -> None:
        state["mtp.embed_tokens.weight"] = state[EMBED]
        state.update({name: state[name].float() for name in _of_head(state)})

    found = _measured(_edited(same, tmp_path / "same")).json["draft"]
    assert found == _measured(SOUND).json["draft"]


def test_the_answer_comes_first() -> None:
    done = aprfmt("eval", SOUND, "--draft", "--ids", "1,2,3,4,5")
    verdict, found = done.out.splitlines()[:2]
    assert verdict.startswith("FAIL: ") and found.startswith("draft head ")
    asked = ("--text", TEXT, "--least-accepted", "0.99")
    done = aprfmt("eval", SOUND, "--draft", *asked)
    assert done.code == 1 and done.out.splitlines()[1].startswith("draft head dead: 8")
    done = aprfmt("eval", SOUND, "--draft", "--ids", "1,2", "-v")
    assert done.out.splitlines()[1].startswith("draft head not measured")
    assert "NOT_RUN drafts-accepted" in done.out
    none = aprfmt("eval", SOUND, "--draft", "--ids", "1,2", "--json").json["draft"]
    assert (none["drafts"], none["acceptance"]) == (0, "NaN")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--draft", "--against", SOUND, "--ids", "1,2,3"), "--draft measures one model"),
        (("--draft", "--batch", TEXT), "found --draft with it"),
        (("--least-accepted", "0.5", "--ids", "1,2,3"), "give --draft too"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[object, ...], says: str) -> None:
    done = aprfmt("eval", SOUND, *options)
    assert done.code == 2 and says in done.err


def test_a_choice_of_nan_is_no_agreement() -> None:
    """The likeliest of numbers that are none is the first of them on both sides."""
    mine, drafts = np.eye(4, dtype=np.float32)[[2, 0, 1]], np.eye(4, dtype=np.float32)[[0, 3]]
    assert DraftCounts().add_rows(mine, drafts) == DraftCounts(2, 1)
    broken = np.full_like(drafts, np.nan)
    assert DraftCounts(2, 1).add_rows(np.full_like(mine, np.nan), broken) == DraftCounts(4, 1)


def test_a_trace_shows_the_heads_points_and_where_a_fault_begins(tmp_path: Path) -> None:
    ids, own = ("--ids", "5,80,300,7"), ("draft_embd_norm", "draft_hidden", "draft_in")
    done = aprfmt("trace", SOUND, "--draft", "--payload", *ids, "--json")
    whole = {row["point"] for row in done.json["records"] if row["layer"] is None}
    assert done.code == 0 and whole >= {"embd", *own, "final_norm", "logits"}
    text = aprfmt("trace", SOUND, "--draft", "--payload", *ids).out
    assert all(f" {point} " in text for point in own)
    plan = aprfmt("trace", SOUND, "--draft", "--json").json["points"]
    assert {row["key"] for row in plan if not row["absent"]} >= {*own, "L0.attn_norm", "L0.out"}
    saved = tmp_path / "sound.safetensors"
    aprfmt("trace", SOUND, "--draft", "--payload", *ids, "--points", "all", "-o", saved)
    again = ("--draft", "--payload", *ids, "--points", "all", "--json")
    same = aprfmt("trace", SOUND, *again, "--backend", "torch", "--reference", saved)
    assert same.code == 0
    broken = _edited(norms, tmp_path / "broken")
    for other in (saved, SOUND):
        found = aprfmt("trace", broken, *again, "--reference", other)
        assert found.code == 1 and found.json["reference"]["first"] == "draft_embd_norm"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--draft", "--engine", "transformers", "--ids", "1,2"), "has no draft head"),
        (("--draft", "--payload", "--behind", "2", "--ids", "1,2,3"), "expected no cache"),
        (("--draft", "--load", "t.safetensors"), "leave --draft out"),
    ],
)
def test_traces_that_no_draft_head_has(options: tuple[str, ...], says: str) -> None:
    done = aprfmt("trace", SOUND, *options)
    assert done.code == 2 and says in done.err


def test_checks_know_its_tensors_and_name_those_that_are_missing(tmp_path: Path) -> None:
    body = aprfmt("inspect", SOUND, "--json").json
    assert body["unclaimed"] == [] and len(body["draft"]) == 15
    assert "draft head: 15 tensors" in aprfmt("inspect", SOUND).out
    gates = aprfmt("qa", SOUND, "--only", "tensor-contract", "--json").json["gates"]
    assert gates[0]["outcome"] == "PASS"

    def drop(state: State) -> None:
        del state["mtp.fc.weight"], state["mtp.norm.weight"]

    def said(model: Path) -> list[str]:
        body = aprfmt("validate", model, "--json").json
        return [each["found"] for each in body["findings"] if each["check"] == "unexpected"]

    assert said(SOUND) == []
    assert any(
        "lacks 2 of 17" in each and "mtp.fc.weight" in each
        for each in said(_edited(drop, tmp_path / "broken"))
    )
