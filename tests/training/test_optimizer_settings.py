"""The text of --optimizer: every optimizer with every setting, at the bounds of each."""

from typing import Any

import pytest

from aprfmt.causes.training.optimizers import CALLED, OPTIMIZERS, parse_recipe, parse_settings
from aprfmt.errors import UsageError

COMMON = {"lr", "wd", "step", "clip", "clip_value", "decay_on", "sparse"}
OWN = {
    "adamw": {"b1", "b2", "eps"}, "adam": {"b1", "b2", "eps"}, "lion": {"b1", "b2"},
    "sgd": {"momentum", "dampening", "nesterov"}, "adafactor": set(),
}  # fmt: skip
# Setting -> texts that are taken with their values, and texts that are not.
BOUNDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{
        name: ({"0": 0.0, "0.1": 0.1, "7": 7.0}, ("-0.1", "nan", "inf", "x", ""))
        for name in ("lr", "wd", "eps", "dampening")
    },
    **{
        name: ({"0": 0.0, "0.999": 0.999}, ("1", "1.5", "-0.1", "nan"))
        for name in ("b1", "b2", "momentum")
    },
    **{name: ({"0.001": 0.001, "9": 9.0}, ("0", "-1", "inf")) for name in ("clip", "clip_value")},
    "step": ({"1": 1, "12": 12}, ("0", "-1", "1.5", "1e3", "nan")),
    "decay_on": ({"all": "all", "matrices": "matrices"}, ("All", "none", "")),
    **{
        name: (
            {"1": True, "true": True, "YES": True, "0": False, "False": False, "no": False},
            ("2", "on", ""),
        )
        for name in ("nesterov", "sparse")
    },
}


@pytest.mark.parametrize("setting", BOUNDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_setting_of_each_optimizer_has_its_bounds(optimizer: str, setting: str) -> None:
    taken, refused = BOUNDS[setting]
    if setting not in COMMON | OWN[optimizer]:
        with pytest.raises(UsageError, match=f"{optimizer} has no {setting}; expected"):
            parse_settings(f"{optimizer}:{setting}={next(iter(taken))}")
        return
    for text, value in taken.items():
        found = parse_settings(f" {optimizer.upper()} : {setting} = {text} ,")
        assert found == {"name": optimizer, setting: value}
        assert type(found[setting]) is type(value)
    for text in refused:
        with pytest.raises(UsageError, match=f"{setting}={text}; expected"):
            parse_settings(f"{optimizer}:{setting}={text}")
    first = next(iter(taken))
    with pytest.raises(UsageError, match=f"{setting} is given twice"):
        parse_settings(f"{optimizer}:{setting}={first},{setting}={first}")


@pytest.mark.parametrize("name", CALLED)
def test_names_of_other_trainers_are_taken(name: str) -> None:
    field = CALLED[name]
    optimizer = next(each for each in OPTIMIZERS if field in COMMON | OWN[each])
    text, value = next(iter(BOUNDS[field][0].items()))
    assert parse_settings(f"{optimizer}:{name.upper()}={text}")[field] == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("adamz:lr=1", "no optimizer 'adamz'; known: adamw, adam, sgd, adafactor, lion"),
        ("adam:rate=1", "'rate=1'; expected NAME=VALUE of lr, b1, b2, eps"),
        ("adam:lr", "'lr'; expected NAME=VALUE"), ("adam:wd=0", "no lr; expected the rate"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_refused_with_what_is_known(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_recipe(text)
    assert says in str(caught.value) and repr(text) in str(caught.value)


def test_a_recipe_has_the_defaults_of_its_optimizer() -> None:
    lion, adam = parse_recipe("lion:lr=1e-4"), parse_recipe("adamw:lr=1e-4,b2=0.5")
    assert (lion.name, lion.b1, lion.b2) == ("lion", 0.9, 0.99)
    assert (adam.name, adam.b1, adam.b2, adam.lr) == ("adamw", 0.9, 0.5, 1e-4)
    assert parse_recipe("lion:lr=1,b2=0.5").b2 == 0.5
