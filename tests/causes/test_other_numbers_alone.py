"""Other numbers and kinds than a model or a recipe states, each proposal by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import experts, mlp, state_space
from aprfmt.causes.tensor import other_tensors
from aprfmt.causes.tokenizer import pre_tokenizer
from aprfmt.causes.training import frozen_parameters, momentum

# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["input", "output"])
def test_an_experts_weight_multiplies_the_other_side(own: str) -> None:
    blocks: list[Any] = []
    patched: Any = SimpleNamespace(
        spec=SimpleNamespace(block=SimpleNamespace(expert_weights=own)),
        with_block=lambda layers, **block: blocks.append((layers, block)),
    )
    other = "output" if own == "input" else "input"
    found = experts.weight_side_change(patched)
    assert (found.cause, found.where) == ("moe_routing", ("expert_weights",))
    assert found.says == f"an expert's weight multiplies its {other}; the model says its {own}"
    assert found.values == {"expert_weights": other}
    found.make(patched, frozenset({2}))
    assert blocks == [(frozenset({2}), {"expert_weights": other})]


def test_every_other_activation_is_tried() -> None:
    for own in (*mlp.KINDS, "xielu"):
        patched: Any = SimpleNamespace(hp={"activation": own})
        found = list(mlp.activation_changes(patched))
        kinds = [kind for kind in mlp.KINDS if kind != own]
        assert [one.values for one in found] == [{"activation": kind} for kind in kinds]
        assert [one.says for one in found] == [
            f"the activation is {kind}; the model says {own}" for kind in kinds
        ]


# --- state spaces ---------------------------------------------------------------------------------


def scans(
    monkeypatch: pytest.MonkeyPatch, *kinds: str, bias: bool = False, **more: Any
) -> list[tuple[str, str]]:
    monkeypatch.setattr(state_space, "mixer_kinds", lambda patched: set(kinds))
    monkeypatch.setattr(
        state_space,
        "zero_weights_change",
        lambda cause, says, keys, patched: SimpleNamespace(cause=cause, says=says),
    )
    monkeypatch.setattr(
        state_space,
        "scale_weights_change",
        lambda cause, says, keys, patched, by: SimpleNamespace(cause=cause, says=says),
    )
    hp = {"ssm_groups": 1, "ssm_step_low": 0.0, "ssm_step_high": None, "ssm_norm": False}
    weights = [f"L0.x{state_space.BIAS}"] if bias else ["L0.ssm_in.weight"]
    patched: Any = SimpleNamespace(hp=hp | more, weights=weights)
    return [(one.cause, one.says) for one in state_space.usual_scan_mistakes(patched)]


def test_mistakes_of_a_scan_are_of_what_the_mixer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*kinds: str, **more: Any) -> set[str]:
        found = [says for _, says in scans(monkeypatch, *kinds, **more)]
        assert len(found) == len(set(found))
        return set(found)

    assert said() == said("short_conv") == set()
    plain = said("mamba")
    assert plain == said("mamba2") == said("mamba", "short_conv")
    limits = {text for text in state_space.STEPS if "limited" in text}
    assert limits and not plain & limits
    for more in ({"ssm_step_low": 0.001}, {"ssm_step_high": 0.1}, {"ssm_step_high": 0.0}):
        assert said("mamba", **more) == plain | limits
    groups = {text for text in state_space.TAKEN if "group" in text}
    assert groups and not plain & groups
    assert said("mamba2", ssm_groups=2) == plain | groups and said("mamba", ssm_groups=2) == plain
    norms = {text for text in state_space.GATES if "norm" in text}
    whole = {text for text in norms if "groups" in text}
    assert said("mamba2", ssm_norm=True) == plain | norms - whole
    assert said("mamba2", ssm_norm=True, ssm_groups=2) == plain | norms | groups
    added = said("mamba", bias=True) - plain
    assert {text.split(" before")[0] for text in added} == {
        "no dt_bias is added",
        "dt_bias is added twice",
    }
    places = dict.fromkeys(cause for cause, _ in scans(monkeypatch, "mamba"))
    assert {"ssm_state", "activation", "ssm_step", "ssm_gate", "ssm_decay"} <= set(places)


def test_a_multiplier_is_left_out_or_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model that multiply; lists of factors are held to the dump's own product."""
    monkeypatch.setattr(state_space, "factor_change", lambda name, value, own: (name, value, own))
    made: list[Any] = []

    def change(cause: str, says: str, **values: Any) -> Any:
        one = SimpleNamespace(says=says, values=values, drop=frozenset())
        made.append(one)
        return one

    monkeypatch.setattr(state_space, "hyper_change", change)
    monkeypatch.setattr(
        state_space,
        "replace",
        lambda one, drop: SimpleNamespace(says=one.says, values=one.values, drop=drop),
    )
    monkeypatch.setattr(state_space, "_other_factor_lists", lambda own: [("x", (1.0,)), ("y", own)])

    def tried(
        kind: str = "falcon", *, point: str = "out", held: Any = (), near: bool = True
    ) -> Any:
        hp: dict[str, Any] = dict.fromkeys(state_space.FACTORS, 1.0) | {
            "key_scale": 4.0,
            "ffn_down_scale": 0.0,
        }
        hp |= {"ssm_out_scale": 0.5, "ssm_scales": (2.0,)}
        views = {key: SimpleNamespace(recorded=value) for key, value in held}
        case: Any = SimpleNamespace(
            patched=SimpleNamespace(
                hp=hp, spec=SimpleNamespace(block=SimpleNamespace(multipliers=kind)), n_layers=2
            ),
            found=SimpleNamespace(views=views),
            view=SimpleNamespace(point=point, tolerance=1.0),
            trial=lambda change: 0.5 if near and change.says == "x" else 2.0,
        )
        return list(state_space.try_multipliers(case))

    assert tried("none") == []
    *factors, first, second = tried()
    assert factors == [
        ("key_scale", 1.0, 4.0),
        ("key_scale", 0.25, 4.0),
        ("ssm_out_scale", 1.0, 0.5),
        ("ssm_out_scale", 2.0, 0.5),
    ]
    assert (first.says, second.says, first.drop) == ("x", "y", frozenset())
    keys = [("L0.ssm_gate", 1), ("L1.ssm_dt", None), ("L1.ssm_conv_in", 1), ("L0.other", 1)]
    *_, only = tried(held=keys)
    assert only.says == "x" and only.drop == {"L0.ssm_gate", "L1.ssm_conv_in"}
    assert len(tried(held=keys, near=False)) == 4
    assert [one.drop for one in tried(held=keys, point="ssm_dt")[4:]] == [frozenset()] * 2


# --- steps ----------------------------------------------------------------------------------------


def test_rows_without_a_gradient_moved_where_the_stated_rule_is_sparse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen_parameters, "changed", lambda recipe, **to: (recipe, to))
    none: Any = None
    sparse: Any = SimpleNamespace(sparse=True)
    found: Any
    (found,) = frozen_parameters.guess_dense(none, sparse)
    assert found.cause == "rows_moved" and found.recipe == (sparse, {"sparse": False})
    assert found.says.startswith("rows without a gradient moved: the optimizer is dense")
    dense: Any = SimpleNamespace(sparse=False)
    assert list(frozen_parameters.guess_dense(none, dense)) == []


def test_moments_may_be_lost_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the state before the step, of two moments, with a known gradient."""
    fitted: list[Any] = []
    monkeypatch.setattr(momentum, "changed", lambda recipe, **to: to)
    monkeypatch.setattr(momentum, "is_first_step", lambda recipe, part: "first step")
    monkeypatch.setattr(
        momentum, "replace", lambda one, **to: SimpleNamespace(**{**vars(one), **to})
    )

    def fit(recipe: Any) -> Any:
        fitted.append(recipe)
        return SimpleNamespace(right=True)

    def told(*, second: bool = True, gradient: Any = 1, state: bool = True, **more: Any) -> Any:
        facts = {"first": np.ones(3), "second": np.full(3, 2.0), "step": 7, "after": False} | more
        held = SimpleNamespace(**facts) if state else None
        case: Any = SimpleNamespace(
            moments=held, gradient=gradient, before=np.full(3, 5.0), fit=fit
        )
        recipe: Any = SimpleNamespace(row=SimpleNamespace(second=second))
        return case, list(momentum.guess_lost_moments(case, recipe))

    case, found = told()
    new, first, both_second, both, count = found
    assert [one.cause for one in found] == ["moments_lost"] * 4 + ["step_count"]
    assert new.holds(case) == "first step"
    assert first.says == "the first moment was zero, not the saved one"
    assert both.says == "both moments were zero, not the saved ones"
    assert count.recipe == {"counted": 1}
    assert count.says == "the correction is that of step 1; the moments are of step 7"
    for guess, zero in ((first, {"first"}), (both_second, {"second"}), (both, {"first", "second"})):
        seen: list[Any] = []
        monkeypatch.setattr(
            momentum,
            "replace",
            lambda one, seen=seen, **to: seen.append(to) or SimpleNamespace(fit=fit, **to),
        )
        assert guess.holds(case) is True
        assert set(seen[0]) == zero and not any(value.any() for value in seen[0].values())
    assert len(told(step=0)[1]) == 4
    assert [one.says[:15] for one in told(second=True, first=None)[1][1:]] == [
        "the second mome",
        "the correction ",
    ]
    for nothing in ({"state": False}, {"after": True}, {"gradient": None}, {"second": False}):
        assert told(**nothing)[1] == []


# --- tensors --------------------------------------------------------------------------------------


def test_codes_of_one_byte_were_never_filled_on_the_side_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one stored tensor; B's are looked at first."""
    monkeypatch.setattr(other_tensors, "constant_codes", lambda tensor: tensor.code)

    def side(name: str, *codes: int | None) -> Any:
        part = SimpleNamespace(info=SimpleNamespace(name=f"{name}.qweight"))
        stored = [SimpleNamespace(code=code, parts={"": part}) for code in codes]
        return SimpleNamespace(side=SimpleNamespace(stored=stored))

    def told(a: Any, b: Any) -> Any:
        found = other_tensors.explain_empty_codes("k", a, b)
        if found is not None:
            assert (found.cause, found.where, found.confirmed) == ("stale_tensor", ("k",), False)
        return None if found is None else found.evidence

    assert told(side("a", None), side("b", 0)) == (
        "B's codes are all bytes 0x00: it was never filled",
        "in b.qweight",
    )
    assert told(side("a", 0x88), side("b", None)) == (
        "A's codes are all bytes 0x88: it was never filled",
        "in a.qweight",
    )
    assert told(side("a", 1), side("b", 2))[0].startswith("B's codes")
    assert told(side("a", None), side("b", 1, 1)) is told(side("a", None), side("b", None)) is None


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("label", ["A", "B"])
def test_another_tensors_values_are_looked_for_unless_most_rows_are_right(
    label: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a vector every value is a row, so that equal ones say nothing."""
    right = np.random.default_rng(1).normal(size=(10, columns))
    monkeypatch.setattr(other_tensors, "KEPT_ROWS", 0.5)
    monkeypatch.setattr(other_tensors, "SHOWN", 4)
    unchanged: list[str] = []
    monkeypatch.setattr(
        other_tensors, "_exchange_changes_nothing", lambda case, label, mine, key: key in unchanged
    )
    monkeypatch.setattr(
        other_tensors,
        "_guess_renamed",
        lambda case, label, mine, key, other: None if key == "odd" else (label, mine, key, other),
    )

    def told(wrong: int, *keys: str) -> list[Any]:
        asked: list[Any] = []
        b = right.copy()
        b[:wrong] += 1

        def equal(others: str, mine: Any) -> list[str]:
            asked.append((others, mine))
            return list(keys) if others == ("a" if label == "B" else "b") else []

        context = SimpleNamespace(
            keys_with_equal_sample=equal,
            reader=lambda side, key: None if key == "lost" else f"{side} {key}",
        )
        case: Any = SimpleNamespace(
            a=SimpleNamespace(columns=columns, name="A"),
            b=SimpleNamespace(columns=columns, name="B"),
            sample_a=right,
            sample_b=b,
            key="k",
            context=context,
            slack=lambda: 1e-3,
        )
        found: list[Any] = list(other_tensors.guess_other_tensor(case))
        if asked:
            assert asked == [("a", case.b), ("b", case.a)]
        return [(one[0], one[1].name, *one[2:]) for one in found]

    there = "a" if label == "B" else "b"
    wanted = [(label, label, key, f"{there} {key}") for key in ("x", "y")]
    assert told(10, "k", "x", "lost", "odd", "y") == wanted
    assert told(5, "x", "y") == wanted  # half of the rows
    assert told(4, "x", "y") == ([] if columns > 1 else wanted)
    unchanged.append("x")
    assert told(10, "x", "y") == wanted[1:]
    many = [f"k{n}" for n in range(other_tensors.SHOWN + 1)]
    assert [one[2] for one in told(10, "k", *many)] == many[:-1]


# --- tokenizers -----------------------------------------------------------------------------------


def test_kinds_of_vocabularies_differ_and_a_gguf_is_mended_by_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only where B's pieces are those of A's kind, in a GGUF that is read by its lists."""
    monkeypatch.setattr(pre_tokenizer, "kind_of_pieces", lambda tokens, types: tokens)
    monkeypatch.setattr(pre_tokenizer, "_keys_of_kind", lambda a, b, kind: (a.name, b.name, kind))
    monkeypatch.setattr(pre_tokenizer, "_places_of_kind", lambda a, b: (a.name, b.name))

    def side(name: str, kind: str, pieces: str, *, lists: bool = True, style: str = "gguf") -> Any:
        return SimpleNamespace(
            name=name,
            vocabulary=SimpleNamespace(kind=kind, tokens=pieces, types=()),
            uses_lists=lists,
            carried=SimpleNamespace(model=SimpleNamespace(key_style=style)),
            framed_roles=None,
        )

    def told(a: Any, b: Any) -> Any:
        found = list(pre_tokenizer.kind_difference(a, b))
        return found[0] if found else None

    good = side("a", "bpe", "bpe")
    assert told(good, side("b", "bpe", "spm")) is None
    wrong = told(good, side("b", "spm", "bpe"))
    assert wrong.mend == ("a", "b", "bpe")
    assert wrong.says == "A is read as bpe, B as spm, though B's pieces are those of byte-level BPE"
    assert (wrong.cause, wrong.where) == ("tokenizer_model", ("a", "b"))
    assert (wrong.a, wrong.b) == ("bpe", "spm")
    for b in (
        side("b", "spm", "spm"),
        side("b", "spm", ""),
        side("b", "spm", "bpe", lists=False),
        side("b", "spm", "bpe", style="hf"),
        side("b", "wordpiece", "spm"),
    ):
        assert told(good, b).mend == (), b
    mine = told(side("a", "spm", "bpe"), side("b", "bpe", "bpe"))
    assert mine.mend == ()
    assert mine.says.endswith("though A's pieces are those of byte-level BPE")
    lists, file = side("a", "unigram", "", lists=False), side("b", "spm", "")
    assert told(lists, file) is told(file, lists) is None
    assert told(side("a", "unigram", ""), file) is not None
    assert told(lists, side("b", "bpe", "")) is not None
