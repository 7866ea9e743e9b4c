"""What relates two sides' log-probabilities: torch's log_softmax of logits of one temperature."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.measure.kept_mass import Descending, RaisedRow, find_kept_mass
from aprfmt.measure.logprob_relations import ModelFactor
from aprfmt.measure.logprob_tables import (
    LogprobMatrix,
    Logprobs,
    LogprobTable,
    compare_logprobs,
    rows_from_logits,
)
from aprfmt.measure.tolerances import Threshold

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

ROWS, TOKENS = 12, 500
FINE = Threshold(1e-4, 1e-3, "float32", "a test")
COARSE = Threshold(0.02, 0.2, "bfloat16", "a test")
IDS = tuple(range(ROWS))


def logits(seed: int = 0) -> Any:
    """Return logits [ROWS, TOKENS], float32."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 4, (ROWS, TOKENS))).float()


def listed(x: Any, top: int, *, normalised: bool = True, over: bool = False) -> Logprobs:
    """Return the `top` log-probabilities of each row; `over` those tokens alone."""
    rows: dict[int, Mapping[int, float]] = {}
    for at, row in enumerate(x):
        values, tokens = row.topk(top)
        made = torch.log_softmax(row, -1)[tokens] if normalised else values
        made = torch.log_softmax(values, -1) if over else made
        rows[at] = dict(zip(tokens.tolist(), made.tolist(), strict=True))
    return Logprobs(IDS, rows)


def whole(x: Any) -> LogprobMatrix:
    """Return all log-probabilities of each row."""
    return rows_from_logits(IDS, x.numpy(), IDS, "a run")


def both(x: Any, y: Any, bound: Threshold) -> list[LogprobTable]:
    """Return the comparison, and that of exchanged sides."""
    return [compare_logprobs(x, y, bound), compare_logprobs(y, x, bound)]


@pytest.mark.parametrize("form", ["lists", "list and run", "runs"])
@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.3, 2.0])
@pytest.mark.parametrize("bound", [FINE, COARSE], ids=["fine", "coarse"])
def test_one_temperature_is_found_at_all_positions(
    form: str, temperature: float, bound: Threshold
) -> None:
    """Seen red: "beyond tolerance", and no word of the factor that twenty numbers a row show."""
    x, y = logits() / temperature, logits()
    here = whole(x) if form == "runs" else listed(x, 20)
    reference = listed(y, 20) if form == "lists" else whole(y)
    for table, factor in zip(
        both(here, reference, bound), (1 / temperature, temperature), strict=True
    ):
        found = table.relation
        assert found is not None and table.beyond and not found.harmless
        assert (found.kind, found.positions) == ("temperature", ROWS)
        assert found.factor == pytest.approx(factor, rel=1e-3)
        assert found.temperature == pytest.approx(1 / factor, rel=2e-3)
        said = float(found.says.partition("a temperature of ")[2].split()[0])
        assert said == pytest.approx(min(temperature, 1 / temperature), rel=5e-3)
        after = "this side" if factor > 1 else "the reference"
        assert found.says.startswith(f"the logits of {after} are ")


@pytest.mark.parametrize("temperature", [0.49, 0.6, 1.6])
def test_a_temperature_of_sure_rows_is_no_factor_after_the_softmax(temperature: float) -> None:
    """Seen red: 2.00426 times, after the softmax, of rows whose first token has nearly all mass."""
    x = logits()
    x[torch.arange(ROWS), torch.arange(ROWS)] += 30
    for table in both(whole(x), whole(x / temperature), COARSE):
        found = table.relation
        assert found is not None and found.kind == "temperature", found
        assert sorted((found.factor, 1 / found.factor)) == pytest.approx(
            sorted((temperature, 1 / temperature)), rel=1e-3
        )


@pytest.mark.parametrize("noise", ["bfloat16", "float16"])
def test_a_temperature_is_seen_through_rounding(noise: str) -> None:
    x = (logits() / 0.8).to(getattr(torch, noise)).float()
    found = compare_logprobs(listed(x, 20), whole(logits()), COARSE).relation
    assert found is not None and found.temperature == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("run", [True, False])
def test_a_list_normalised_over_itself_is_known(temperature: float, run: bool) -> None:
    x = listed(logits() / temperature, 8, over=True)
    for at, table in enumerate(both(x, whole(logits()) if run else listed(logits(), 20), FINE)):
        found = table.relation
        assert found is not None and table.beyond
        assert found.kind == "listed" and found.side == ("this side", "the reference")[at]
        assert found.temperature == pytest.approx(temperature, rel=1e-3)
        assert "(at most 8)" in found.says


def moved(by: Any) -> Logprobs:
    """Return lists of tokens behind the ten likeliest ones, moved by a number for each row."""
    rows = [(at, dict(list(row.items())[10:])) for at, row in listed(logits(), 30).rows.items()]
    return Logprobs(
        IDS, {at: {token: v + float(by[at]) for token, v in row.items()} for at, row in rows}
    )


@pytest.mark.parametrize("kept", ["top 50", "top 90", "half of the vocabulary"])
def test_rows_normalised_over_fewer_tokens_have_no_temperature(kept: str) -> None:
    """Seen red: "the logits of this side are 1 times those of the reference"."""
    x = logits()
    tokens = x[:, :250] if kept.startswith("half") else x.topk(int(kept[4:]), -1).values
    by = x.logsumexp(-1) - tokens.logsumexp(-1)
    for table, side in zip(
        both(moved(by), whole(x), FINE), ("this side", "the reference"), strict=True
    ):
        found = table.relation
        assert found is not None and table.beyond and not found.harmless
        assert (found.kind, found.side, found.factor) == ("fewer", side, 1.0)


# A sampler's rule -> the mask of the tokens that it keeps, of probabilities [ROWS, TOKENS].
CUTS: dict[str, Callable[[Any], Any]] = {
    "top_p 0.8": lambda p: reached(p, 0.8),
    "top_p 0.95": lambda p: reached(p, 0.95),
    "top_k 20": lambda p: p >= p.topk(20, -1).values[:, -1:],
    "top_k 3": lambda p: p >= p.topk(3, -1).values[:, -1:],
    "min_p 0.05": lambda p: p >= 0.05 * p.max(-1, keepdim=True).values,
}


def reached(p: Any, share: float) -> Any:
    """Return the mask of the fewest tokens whose probabilities reach `share`."""
    values, order = p.sort(-1, descending=True)
    return torch.zeros_like(p, dtype=torch.bool).scatter(
        -1, order, values.cumsum(-1) - values < share
    )


def drawn(x: Any, kept: Any) -> Logprobs:
    """Return what a server says of one drawn token of each row, whose others are cut off."""
    processed = torch.log_softmax(x.double().masked_fill(~kept, -torch.inf), -1)
    tokens = torch.multinomial(processed.exp(), 1, generator=torch.Generator().manual_seed(1))
    rows = {at: {int(token): float(processed[at, token])} for at, token in enumerate(tokens[:, 0])}
    return Logprobs(IDS, rows)


@pytest.mark.parametrize("rule", CUTS)
def test_the_rule_that_cut_a_distribution_is_named(rule: str) -> None:
    """One token a row; seen red: no relation, and -log of the mass in every row of the table."""
    kept = CUTS[rule](logits().double().softmax(-1))
    answer, run = drawn(logits(), kept), whole(logits())
    for table, side in zip(both(answer, run, FINE), ("this side", "the reference"), strict=True):
        found = table.relation
        assert found is not None and table.beyond and not found.harmless
        assert (found.kind, found.side, found.positions) == ("fewer", side, ROWS)
        assert f"the tokens that {rule} keeps" in found.says


def test_no_rule_of_samplers_is_named_where_none_gives_all_positions() -> None:
    """A mass that no first tokens have, a rule on half the positions, a token that is cut off."""
    x, p = logits(), logits().double().softmax(-1)
    half = CUTS["top_p 0.8"](p)
    half[1::2] = True
    made = drawn(x, half)
    assert compare_logprobs(made, whole(x), FINE).relation is None
    raised = {at: {t: v + 0.3 for t, v in row.items()} for at, row in drawn(x, p > -1).rows.items()}
    assert compare_logprobs(Logprobs(IDS, raised), whole(x), FINE).relation is None
    # The likeliest token's own mass is kept, and the answer is of a token behind it.
    last, mass = p.argmin(-1), p.max(-1).values
    low = {at: {int(t): float((p[at, t] / mass[at]).log())} for at, t in enumerate(last)}
    assert compare_logprobs(Logprobs(IDS, low), whole(x), FINE).relation is None
    same = compare_logprobs(drawn(x, p > -1), whole(x), FINE)
    assert not same.beyond and same.relation is None


@pytest.mark.parametrize("off", [0.0, 1e-3, -1e-3])
@pytest.mark.parametrize("at", [2, 5])
def test_one_position_of_another_mass_refutes_a_rule(off: float, at: int) -> None:
    """Among many positions the mean distance would hide it; seen red: without a look at each."""
    every = [Descending.of(row) for row in torch.log_softmax(logits().double(), -1).numpy()]
    raised = [-math.log(one.sums[19]) + off * (i == at) for i, one in enumerate(every)]
    lowest = [math.log(one.probabilities[19]) for one in every]
    rows = [RaisedRow(*row) for row in zip(raised, [1e-6] * ROWS, lowest, every, strict=True)]
    found = [(one.name, one.number) for one in find_kept_mass(rows)]
    assert found == ([] if off else [("top_k", 20)])


def test_a_factor_and_a_cut_that_both_fit_loosely_are_told_by_the_nearer() -> None:
    """Of a flat distribution all numbers are alike; seen red: "scaled", a factor of 1.03."""
    x = logits() / 20
    kept = CUTS["top_p 0.8"](x.double().softmax(-1))
    found = compare_logprobs(drawn(x, kept), whole(x), COARSE).relation
    assert found is not None and "the tokens that top_p 0.8 " in found.says  # or a top_k too
    own = drawn(x, kept | True)
    divided = {at: {t: v / 0.9 for t, v in row.items()} for at, row in own.rows.items()}
    found = compare_logprobs(Logprobs(IDS, divided), whole(x), COARSE).relation
    assert found is not None and found.kind == "scaled"


def test_numbers_of_both_signs_are_no_relation() -> None:
    for table in both(moved(np.resize([0.3, -0.2], ROWS)), whole(logits()), FINE):
        assert table.beyond and table.relation is None


def test_listed_logits_are_the_same_probabilities() -> None:
    """No softmax was taken of them: that is no fault."""
    x = listed(logits() + 9.0, 20, normalised=False)
    for at, table in enumerate(both(x, whole(logits()), FINE)):
        assert table.relation is not None and table.relation.kind == "offset"
        assert table.relation.side == ("this side", "the reference")[at]
        assert not table.beyond and table.first is None


def test_listed_logits_of_some_positions_excuse_no_other() -> None:
    """Seen red: one position of a single token, far off, beside eleven that are harmless."""
    x = listed(logits() + 9.0, 20, normalised=False)
    rows = dict(x.rows)
    token = next(iter(rows[3]))
    rows[3] = {token: -30.0}
    assert compare_logprobs(Logprobs(IDS, rows), whole(logits()), FINE).beyond


def test_logits_of_a_run_need_no_relation() -> None:
    table = compare_logprobs(whole(logits() - 3.5), whole(logits()), FINE)
    assert not table.beyond and table.relation is None


OTHERS = {
    "other weights": lambda x: x + 0.3 * logits(1),
    "a cap": lambda x: 6 * torch.tanh(x / 6),
    "rows of others": lambda x: x[[0, 2, 1, *range(3, ROWS)]],
    "a factor a row": lambda x: x * torch.linspace(0.7, 1.3, ROWS)[:, None],
    "tokens moved": lambda x: x.roll(1, 1),
    "a temperature in the even rows": lambda x: torch.where(
        torch.arange(ROWS)[:, None] % 2 == 0, x / 0.7, x + 0.2 * logits(2)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("form", ["list", "run"])
def test_what_is_no_relation_of_all_positions_has_none(name: str, form: str) -> None:
    x = OTHERS[name](logits())
    for table in both(listed(x, 20) if form == "list" else whole(x), whole(logits()), FINE):
        assert table.beyond and table.relation is None


def test_few_positions_show_none() -> None:
    some = Logprobs(IDS, {at: row for at, row in listed(logits() / 0.6, 20).rows.items() if at < 3})
    assert compare_logprobs(some, whole(logits()), FINE).relation is None
    two = listed(logits() / 0.6, 2)
    assert compare_logprobs(two, listed(logits(), 2), FINE).relation is None
    fewer = Logprobs(IDS, {at: row for at, row in two.rows.items() if at < 7})
    assert compare_logprobs(fewer, whole(logits()), FINE).relation is None


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.3, 2.0])
@pytest.mark.parametrize("bound", [FINE, COARSE], ids=["fine", "coarse"])
def test_one_token_a_position_and_whole_rows_show_a_temperature(
    bound: Threshold, temperature: float, top: int
) -> None:
    """Of drawn tokens. Seen red: "beyond tolerance" alone."""
    here = drawn(logits() / temperature, torch.ones(ROWS, TOKENS, dtype=torch.bool))
    here = here if top == 1 else listed(logits() / temperature, 2)
    for table, factor in zip(
        both(here, whole(logits()), bound), (1 / temperature, temperature), strict=True
    ):
        found = table.relation
        assert found is not None and table.beyond and not found.harmless
        assert (found.kind, found.positions) == ("temperature", ROWS)
        assert found.factor == pytest.approx(factor, rel=1e-3)
        assert found.temperature == pytest.approx(1 / factor, rel=2e-3)
        after = "this side" if factor > 1 else "the reference"
        assert found.says.startswith(f"the logits of {after} are ")


UNLIKE = {
    "a temperature a row": lambda x: x * torch.linspace(0.7, 1.3, ROWS)[:, None],
    "other weights": lambda x: x + 0.3 * logits(1),
    "a temperature in the even rows": lambda x: torch.where(
        torch.arange(ROWS)[:, None] % 2 == 0, x / 0.7, x
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_drawn_tokens_of_no_one_temperature_have_none(name: str) -> None:
    """Seen red: judged on the rows of the fit alone, the even rows of the last one agree."""
    here = drawn(UNLIKE[name](logits()), torch.ones(ROWS, TOKENS, dtype=torch.bool))
    for table in both(here, whole(logits()), FINE):
        assert table.beyond and table.relation is None


@pytest.mark.parametrize("places", [1, -1, 2, -3])
@pytest.mark.parametrize("form", ["drawn", "list", "run"])
def test_rows_of_other_positions_are_named(form: str, places: int) -> None:
    """Seen red: "beyond tolerance" alone, and no word of the shift."""
    every = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    late = whole(logits().roll(places, 0))
    here = {"drawn": drawn(logits(), every), "list": listed(logits(), 20), "run": whole(logits())}
    for at, table in enumerate(both(here[form], late, FINE)):
        found = table.relation
        assert found is not None and found.kind == "shifted" and not found.harmless
        assert table.beyond and found.positions == ROWS - abs(places)
        way = "late" if (places > 0) == (at == 0) else "early"
        count = f"{abs(places)} position{'s' * (abs(places) > 1)}"
        assert f"the rows of the reference stand {count} too {way} against" in found.says


OWN = ModelFactor(0.125, "logits_scaling", run=True)


@pytest.mark.parametrize("form", ["drawn", "list", "run"])
@pytest.mark.parametrize(
    ("times", "says"),
    [
        (8.0, "the reference lacks the model's own factor of the logits, 0.125 (logits_scaling)"),
        (0.125, "the reference applies the model's own factor of the logits, 0.125 "
         "(logits_scaling), twice"),
        (64.0, "the reference divides by the model's own factor of the logits, 0.125"),
    ],
)  # fmt: skip
def test_a_factor_that_is_the_models_own_is_called_so(times: float, says: str, form: str) -> None:
    """Seen red: a temperature of 0.125, "or one of the two lacks a factor (logit_scale)"."""
    x = logits() / 6
    every = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    made: dict[str, Logprobs | LogprobMatrix] = {
        "drawn": drawn(x * times, every),
        "list": listed(x * times, 20),
        "run": whole(x * times),
    }
    table = compare_logprobs(whole(x), made[form], COARSE, None, OWN)
    found = table.relation
    assert found is not None and found.kind == "temperature" and table.beyond
    assert found.says.startswith(says) and found.factor == 1 / times
    told = f"a temperature of {min(times, 1 / times):.6g} would give the same"
    assert told in found.says


@pytest.mark.parametrize("times", [7.8, 1.5, 8.3])
def test_another_factor_than_the_models_is_a_temperature(times: float) -> None:
    """Seen red: 7.8 is 8 within the tolerance of all rows; it leaves more than the fitted one."""
    table = compare_logprobs(
        whole(logits() / 6), listed(logits() / 6 * times, 20), COARSE, None, OWN
    )
    assert table.relation is not None and "own factor" not in table.relation.says


def test_of_two_files_either_may_lack_the_models_factor() -> None:
    own = replace(OWN, run=False)
    for table, side in zip(
        (compare_logprobs(listed(logits() / 8, 20), listed(logits(), 20), FINE, None, own),
         compare_logprobs(listed(logits(), 20), listed(logits() / 8, 20), FINE, None, own)),
        ("the reference", "this side"), strict=True,
    ):  # fmt: skip
        assert table.relation is not None
        assert table.relation.says.startswith(f"{side} lacks the model's own factor")


def divided(x: Logprobs, by: float) -> Logprobs:
    """Return lists whose log-probabilities are divided by one number."""
    return Logprobs(
        IDS, {at: {token: v / by for token, v in row.items()} for at, row in x.rows.items()}
    )


@pytest.mark.parametrize("by", [0.6, 0.7, 1.3])
@pytest.mark.parametrize("top", [1, 2, 20])
@pytest.mark.parametrize("run", [True, False])
def test_a_factor_after_the_softmax_is_no_temperature(by: float, top: int, run: bool) -> None:
    """Of one token a position, too. Seen red: "beyond tolerance" alone, or a temperature."""
    here, reference = divided(listed(logits(), top), by), listed(logits(), top)
    for at, table in enumerate(both(here, whole(logits()) if run else reference, FINE)):
        found = table.relation
        assert found is not None and table.beyond and not found.harmless
        assert (found.kind, found.positions) == ("scaled", ROWS)
        assert found.factor == pytest.approx((by, 1 / by)[at == 0], rel=1e-4)
        assert f"divided by {min(by, round(1 / by, 4)):g} after the softmax" in found.says


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_a_temperature_of_one_token_a_position_is_no_factor(temperature: float) -> None:
    """Nor is a factor of each position its own one factor, nor noise."""
    x = listed(logits(), 1)
    for other in (
        listed(logits() / temperature, 1),
        Logprobs(IDS, {at: {t: v * (1 + 0.1 * at) for t, v in row.items()}
                       for at, row in x.rows.items()}),
        listed(logits() + 0.3 * logits(1), 1),
    ):  # fmt: skip
        for table in both(other, whole(logits()), FINE):
            assert table.relation is None or table.relation.kind != "scaled"


BASE = {"e": 1.0, "2": float(np.log(2)), "10": float(np.log(10))}


@pytest.mark.parametrize("base", ["2", "10"])
@pytest.mark.parametrize("top", [1, 20])
@pytest.mark.parametrize("run", [True, False])
def test_logarithms_to_another_base_are_named(base: str, top: int, run: bool) -> None:
    """Seen red: "as if they were divided by 0.6931 after the softmax"."""
    here = divided(listed(logits(), top), BASE[base])
    natural = whole(logits()) if run else listed(logits(), top)
    for at, table in enumerate(both(here, natural, FINE)):
        found = table.relation
        assert found is not None and table.beyond and not found.harmless
        assert (found.kind, found.positions) == ("base", ROWS)
        named, other = ("the reference", "this side")[:: (1, -1)[at == 0]]
        assert found.side == named and found.factor == (BASE[base], 1 / BASE[base])[at == 0]
        assert f"{named} holds logarithms to base {base} and {other} to base e" in found.says


def test_two_bases_that_are_not_e_are_both_named() -> None:
    here, reference = (divided(listed(logits(), 20), BASE[base]) for base in ("2", "10"))
    for table in both(here, reference, FINE):
        assert table.relation is not None and table.relation.kind == "base"
        assert "base 2" in table.relation.says and "base 10" in table.relation.says


@pytest.mark.parametrize("by", [0.69, 0.7, 0.6935, 2.3, 2.5])
def test_a_factor_near_that_of_a_base_is_no_base(by: float) -> None:
    for table in both(divided(listed(logits(), 20), by), whole(logits()), FINE):
        assert table.relation is not None and table.relation.kind == "scaled"


@pytest.mark.parametrize("base", ["2", "10"])
def test_one_position_to_another_base_is_no_base_of_all(base: str) -> None:
    x = listed(logits(), 20)
    some = {at: {t: v / BASE[base] for t, v in row.items()} if at else row
            for at, row in x.rows.items()}  # fmt: skip
    for table in both(Logprobs(IDS, some), whole(logits()), FINE):
        assert table.relation is None or table.relation.kind != "base"
