"""Names of tensors that one rename maps to those readers look for.

Seen red: the prefix search left out, a relation on both sides counted as a difference, the rename
not applied to the modules that a quantization names.
"""

import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aprfmt
from aprfmt.errors import UsageError
from aprfmt.model import open_model
from aprfmt.model.renames import (
    _MOST,
    Rename,
    component_rules,
    parse_rename,
    prefix_rules_between,
    rename_modules,
    rename_names,
)
from tests.cli.run import aprfmt as command
from tests.model.relations.edits import edited, remedied, same, substituted, with_names
from tests.models import save_tiny

PREFIXES = {
    "compiled": ("^", "_orig_mod."),
    "compiled and wrapped": ("^", "_orig_mod.module."),
    "peft": ("^", "base_model.model."),
    "nested": ("^model[.]", "model.language_model.language_model.language_model."),
    "decoder": ("^model[.]", "model.decoder."),
    "repeated": ("^model[.]", "model.model."),
    "below layers": ("[.]layers[.]", ".layers.layers."),
    "of a multimodal class": ("^model[.]", "model.language_model."),
    "of a multimodal part": ("^", "language_model."),
}
COMPONENTS = {
    "attention": ("[.]self_attn[.]", ".attention."),
    "feed forward": ("[.]mlp[.]", ".feed_forward."),
    "leaf": ("[.]down_proj[.]", ".w2."),
    "two components": ("[.]mlp[.]", ".block.mlp."),
    "numbers": ("[.]layers[.]([0-9]+)[.]", None),
}


def shifted(name: str) -> str:
    head, dot, rest = name.partition(".layers.")
    number, dot2, tail = rest.partition(".")
    return f"{head}.layers.{int(number) + 1}.{tail}" if dot and dot2 else name


# Modules that wrap others, at several places of one name. Seen red: wrapper_rules left out.
WRAPPED: dict[str, Callable[[str], str]] = {
    "FSDP": lambda name: re.sub(
        r"(^|[.])(?=model[.]|self_attn[.]|mlp[.])", r"\1_fsdp_wrapped_module.", name
    ),
    "wrapper of no known name": lambda name: re.sub(
        r"(^|[.])(?=model[.]|[qv]_proj|down_proj)", r"\1inner.", name
    ),
    "PEFT's base layers": lambda name: (
        "base_model.model." + re.sub(r"(?<=[.][qv]_proj)", ".base_layer", name)
    ),
}


@pytest.mark.parametrize("label", [*PREFIXES, *COMPONENTS, *WRAPPED])
def test_one_rename_is_one_cause_and_its_command_mends_it(
    label: str, demo_model: Path, tmp_path: Path
) -> None:
    if label in WRAPPED:
        name = WRAPPED[label]
    else:
        pattern, new = (PREFIXES | COMPONENTS)[label]
        name = shifted if new is None else substituted(pattern, new)
    bad = with_names(demo_model, tmp_path / "bad", name)
    changed = [key for key in open_model(demo_model) if name(key) != key]
    with open_model(bad) as model:
        (relation,) = model.relations
        assert (relation.kind, relation.count) == ("names", len(changed))
        assert not model.resolution.missing and not model.resolution.unclaimed
        assert relation.examples[0] == (name(changed[0]), changed[0])
    report = aprfmt.diff(demo_model, bad)
    assert report.counts["SAME_BYTES"] == len(report.tensors) and report.exit_code() == 1
    found = command("diagnose", demo_model, bad, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["tensor_names"]
    assert sorted(found["causes"][0]["where"]) == sorted(name(key) for key in changed)
    assert found["next"] == [relation.remedy]
    checked = command("validate", bad, "--json").json
    failed = [row["name"] for row in checked["checks"] if row["outcome"] == "FAIL"]
    assert failed == ["architecture"]
    refused = command("convert", bad, tmp_path / "copy")
    assert refused.code == 2 and relation.remedy in refused.err and not (tmp_path / "copy").exists()
    same(demo_model, remedied(relation.remedy, tmp_path / "mended"))
    assert command("convert", bad, tmp_path / "out.gguf").code == 0
    same(demo_model, tmp_path / "out.gguf")
    assert aprfmt.diff(bad, bad).exit_code() == 0


METAS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


PLAIN = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@pytest.mark.parametrize("words", [METAS, PLAIN], ids=["Meta's", "plain"])
@pytest.mark.parametrize("chosen", [(0, 1, 2), (0, 2), (1, 2)], ids=str)
def test_products_of_an_mlp_go_where_their_shapes_fit(
    words: dict[str, str], chosen: tuple[int, ...], demo_model: Path, tmp_path: Path
) -> None:
    """Names of Meta's releases. Seen red: w1 for down_proj, "transposed", confirmed."""

    def renamed(name: str) -> str:
        for old, new in [list(words.items())[at] for at in chosen]:
            name = name.replace(f".{old}.", f".{new}.")
        return name

    bad = with_names(demo_model, tmp_path / "bad", renamed)
    with open_model(bad) as model:
        (relation,) = model.relations
    assert relation.kind == "names"
    assert aprfmt.diff(demo_model, bad).counts["DIFFERENT"] == 0
    same(demo_model, remedied(relation.remedy, tmp_path / "mended"))


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3", "qwen3_moe", "starcoder2"])
def test_any_architecture_is_found_under_a_prefix(arch: str, tmp_path: Path) -> None:
    save_tiny(arch, tmp_path / "good")
    bad = with_names(tmp_path / "good", tmp_path / "bad", lambda name: f"module.net.{name}")
    with open_model(tmp_path / "good") as good, open_model(bad) as model:
        assert good.relations == ()
        assert model.resolution.roles.keys() == good.resolution.roles.keys()
        (relation,) = model.relations
    assert aprfmt.diff(tmp_path / "good", remedied(relation.remedy, tmp_path / "mended")).equal


def test_containers_are_called_by_the_names_that_their_readers_know(
    demo_model: Path, tmp_path: Path
) -> None:
    right = tmp_path / "right.gguf"
    assert command("convert", demo_model, right, "--quiet").code == 0
    wrong = tmp_path / "wrong.gguf"
    names = {name: role.names[0] for name, role in open_model(demo_model).roles.items()}
    rules = [
        part
        for key, view in open_model(right).roles.items()
        for part in ("--rename", f"{view.names[0]}={names[key]}")
    ]
    assert command("convert", right, wrong, "--arch", "none", *rules, "--quiet").code == 0
    with open_model(wrong) as model:
        assert set(model) == set(open_model(demo_model))
        (relation,) = model.relations
        assert (relation.kind, relation.count) == ("container", len(model))
    assert aprfmt.diff(demo_model, wrong).exit_code() == 1
    assert command("validate", wrong).code == 1
    same(demo_model, remedied(relation.remedy, tmp_path / "mended"))


def test_an_extension_that_lies_is_said(demo_model: Path, tmp_path: Path) -> None:
    lie = tmp_path / "model.gguf"
    lie.write_bytes((demo_model / "model.safetensors").read_bytes())
    with open_model(lie) as model:
        (relation,) = model.relations
        assert relation.kind == "extension" and relation.examples[0][1] == "model.safetensors"
    assert "the content is safetensors" in command("inspect", lie).out
    assert command("validate", lie).code == 1


@pytest.mark.parametrize(
    ("text", "name", "made"),
    [
        ("_orig_mod.=", "_orig_mod.model.x", "model.x"),
        ("=model.", "layers.0.x", "model.layers.0.x"),
        ("attention=self_attn", "model.layers.3.attention.wq", "model.layers.3.self_attn.wq"),
        ("attention=self_attn", "model.attention_norm", "model.attention_norm"),
        ("layers.{N}.=layers.{N-1}.", "layers.10.x", "layers.9.x"),
        ("blk.{N}=blk.{N+2}", "blk.1.x.weight", "blk.3.x.weight"),
        ("mlp.gate=", "a.mlp.gate.w", "a.w"),
        ("mlp.gate=", "mlp.gate.w", "w"),  # no dot is left in front,
        ("mlp.gate=", "a.mlp.gate", "a"),  # and none at the end
        ("old.=new.", "a.old.w", "a.old.w"),  # a prefix begins a name
        ("mlp=x.y", "a.mlp.w", "a.x.y.w"),
        ("a.mlp=x", "b.a.mlp.w", "b.x.w"),
        ("h.{N}=layers.{N-12}", "h.20.w", "layers.8.w"),
        ("h.{N}.e.{N}=l.{N}.x.{N-1}", "h.3.e.5.w", "l.3.x.4.w"),
        ("h.{N}=layers", "h.7.w", "layers.w"),
        ("h.{N}=layers.{N}", "h.seven.w", "h.seven.w"),
    ],
)
def test_a_rule_changes_names_as_it_says(text: str, name: str, made: str) -> None:
    assert parse_rename(text)(name) == made


@pytest.mark.parametrize("text", ["", "x", "=", "a=a", "{L}=x", "a.{N}=b.{N}.{N}"])
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected OLD=NEW"):
        parse_rename(text)


def test_rules_lose_no_tensor(demo_model: Path, tmp_path: Path) -> None:
    for rule, text in (
        ("nothing=else", "changes no name"),
        ("self_attn=mlp", ""),
        ("q_proj=k_proj", "the same name"),
    ):
        done = command("convert", demo_model, tmp_path / "x", "--arch", "none", "--rename", rule)
        assert text in done.err
        assert (done.code == 2) is bool(text)


PARTS = st.lists(st.sampled_from(["a", "b", "model", "layers", "0", "7"]), min_size=1, max_size=4)


@given(st.lists(PARTS.map(".".join), unique=True, min_size=1, max_size=8), PARTS.map(".".join))
def test_a_prefix_comes_off_as_it_went_on(names: list[str], prefix: str) -> None:
    on = rename_names(names, [Rename("", f"{prefix}.")], "x")
    off = rename_names(on, [Rename(f"{prefix}.", "")], "x")
    assert list(off) == names


def test_modules_of_a_quantization_follow_their_tensors() -> None:
    config: dict[str, Any] = {
        "model_type": "x",
        "quantization": {"bits": 4, "old.a": {"bits": 6}, "old.b": False, "mode": "affine"},
        "quantization_config": {"ignore": ["old.c", "re:.*d"], "config_groups": {"x.y": 1}},
    }
    made = rename_modules(config, [Rename("old.", "new.")])
    assert made["quantization"] == {
        "bits": 4, "new.a": {"bits": 6}, "new.b": False, "mode": "affine"
    }  # fmt: skip
    assert made["quantization_config"]["ignore"] == ["new.c", "re:.*d"]
    assert json.loads(json.dumps(config))["quantization"]["old.a"] == {"bits": 6}


def test_a_size_that_is_not_known_fits_any() -> None:
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (
        ((), ()), ((6,), None), ((), None), ((), (6,)), ((), (1,)), ((2, 3), (3, 2)), ((6,), (5,)),
    )  # fmt: skip
    for size, there in pairs:
        rules = component_rules(
            "hf",
            {"model.layers.0.attention.q.weight": size},
            {"model.layers.0.self_attn.q.weight": there},
        )
        fits = there is None or prod(size) == prod(there)
        assert rules == ([Rename("attention", "self_attn")] if fits else []), (size, there)


def test_one_relation_renames_so_many_components() -> None:
    """The ones that most names ask for; each new component once."""
    left = {f"model.layers.{at}.old_{n}.w": () for n in range(_MOST + 3) for at in range(n + 1)}
    missing = [name.replace("old_", "new_") for name in left]
    sized = {name: (10 + int(name.split("_")[1].partition(".")[0]),) for name in left}
    rules = component_rules(
        "hf", sized, {name: sized[name.replace("new_", "old_")] for name in missing}
    )
    most = range(_MOST + 2, 2, -1)
    assert rules == [Rename(f"old_{n}", f"new_{n}") for n in most] and len(rules) == _MOST


def test_a_prefix_that_one_loader_takes_off_is_said_for_the_others(tmp_path: Path) -> None:
    """A text class of Qwen3.5 with the names of the multimodal one: equal values, and a word."""
    good = tmp_path / "good"
    save_tiny("qwen3_5", good, "float32")
    bad = with_names(good, tmp_path / "bad", substituted("^model[.]", "model.language_model."))
    with open_model(good) as first, open_model(bad) as model:
        assert not first.resolution.notes and not model.relations
        (note,) = model.resolution.notes
        assert "--rename model.language_model.=model." in note.text
    assert aprfmt.diff(good, bad).equal
    assert "begin with 'model.language_model.'" in command("inspect", bad).out


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("h=", "--rename leaves nothing of the name 'h'"),
        ("h=w", "--rename makes 'h' and 'w' the same name 'w'"),
        ("x=y", "--rename 'x=y' changes no name; near names: "),
    ],
)
def test_names_that_would_be_lost_are_refused(rule: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        rename_names(["h", "w"], [parse_rename(rule)], "m.gguf")


def _state() -> dict[str, torch.Tensor]:
    """Return a few tensors with the names of a decoder."""
    parts = {"mlp.w": (6, 4), "norm.weight": (4,)}
    names = {f"layers.{at}.{part}": size for at in range(2) for part, size in parts.items()}
    drawn = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(size, generator=drawn)
        for name, size in {"embed.weight": (9, 4), **names}.items()
    }


def _sets(held: dict[str, torch.Tensor], *sets: str) -> dict[str, torch.Tensor]:
    """Return a state under the first prefix, and further sets of other values under the others."""
    made = {}
    for number, prefix in enumerate(sets):
        for name, value in held.items():
            made[prefix + name] = value + number * 0.1 * value.abs().mean()
    return made


# what one file holds -> (prefix that is compared, prefix of a set that is not, other tensors)
KEPT_TOGETHER: dict[str, tuple[str, str, int]] = {
    "weights and their average": ("model.", "ema.", 0),
    "the average first": ("state_dict.", "ema_state_dict.", 0),
    "the average is the model": ("ema.", "model.", 0),
    "optimizer": ("model.", "", 2),
    "draft head": ("module.", "", 1),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("label", KEPT_TOGETHER)
def test_one_of_the_sets_in_a_file_is_compared_and_said(
    label: str, turned: bool, tmp_path: Path
) -> None:
    """The nearest one; the others are not compared, and no tensor is called exchanged."""
    taken, other, more = KEPT_TOGETHER[label]
    held = _state()
    state = _sets(held, *filter(None, (taken, other)))
    if label == "the average first":
        state = dict(reversed(state.items()))
    for number in range(more * len(held)):
        state[f"{taken}mtp.{number}.w" if more == 1 else f"optimizer.state.{number}.m"] = (
            torch.full((3,), float(number))
        )
    torch.save(state, tmp_path / "together.pt")
    torch.save(held, tmp_path / "alone.pt")
    pair = (tmp_path / "alone.pt", tmp_path / "together.pt")
    report = aprfmt.diff(*(reversed(pair) if turned else pair))
    only = "ONLY_IN_A" if turned else "ONLY_IN_B"
    counts = {verdict: count for verdict, count in report.counts.items() if count}
    assert counts == {"SAME_BYTES": len(held), only: len(state) - len(held)}
    assert not report.equal and report.exit_code() == 1 and not report.findings
    ((relation, remedy, says),) = [
        (one.relation, one.relation.remedy, one.relation.says) for one in report.relations
    ]
    assert relation.count == len(held) and (f"{other} too, which are left aside" in says) is bool(
        other
    )
    if turned:
        return
    # The printed commands write the set that was compared, and the other one alone.
    with open_model(remedied(remedy, tmp_path / "mended")) as model:
        assert held.keys() <= set(model) and (not other or len(model) == len(held))
        assert all((model[name].numpy() == value.numpy()).all() for name, value in held.items())
    if other:
        alone = says.partition("to compare them alone, ")[2].replace("OTHERS", "OUT")
        with open_model(remedied(alone, tmp_path / "alone")) as model:
            assert set(model) == {other + name for name in held}


@pytest.mark.parametrize("order", [("ema.", "model."), ("model.", "ema."), ("a.", "b.")])
def test_one_set_of_a_folder_is_read_whole(
    order: tuple[str, str], demo_model: Path, tmp_path: Path
) -> None:
    """No role of one set beside those of another; an average only where nothing else is."""
    taken, other = order if order[0] != "ema." else order[::-1]

    def both(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = _sets(held, taken, other)
        return {name: made[name] for prefix in order for name in made if name.startswith(prefix)}

    bad = edited(demo_model, tmp_path / "bad", both)
    with open_model(bad) as model:
        (relation,) = model.relations
        assert {name for view in model.roles.values() for name in view.names} == {
            name for name in model if name.startswith(taken)
        }
        assert f"{other} too, which are left aside" in relation.says
    same(demo_model, remedied(relation.remedy, tmp_path / "mended"))


def test_towers_of_one_shape_are_told_by_their_values(tmp_path: Path) -> None:
    held = _state()
    torch.save(_sets(held, "text.", "vision."), tmp_path / "both.pt")
    for tower in ("text.", "vision."):
        own = {
            name.removeprefix(tower): value
            for name, value in _sets(held, "text.", "vision.").items()
            if name.startswith(tower)
        }
        torch.save(own, tmp_path / "one.pt")
        report = aprfmt.diff(tmp_path / "one.pt", tmp_path / "both.pt")
        assert [one.relation.rules for one in report.relations] == [(Rename(tower, ""),)]
        assert report.counts["SAME_BYTES"] == len(held) and not report.findings


def test_a_set_of_few_names_is_no_relation() -> None:
    """One norm that stands below another module's prefix is not the other file's norm."""
    left = {"norm.weight": "", "layers.0.w": "", "layers.1.w": "", "layers.2.w": ""}
    theirs = ["vision.norm.weight", "vision.patch.w", *(f"text.h.{at}.v" for at in range(9))]
    assert not prefix_rules_between(theirs, left, 2)
    assert not prefix_rules_between(theirs, ["norm.weight"], 2)
