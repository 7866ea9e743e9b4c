"""Sets of equal tensor names in one file: their prefixes, and which set is the model's own."""

import pytest

from aprfmt.base.name_copies import copies_text, prefix_to_read, repeated_prefixes

NAMES = ("embed.weight", "layers.0.q.weight", "layers.0.norm.weight", "head.weight")


def under(*prefixes: str) -> dict[str, tuple[int, ...]]:
    """Return the same names with the same shapes below each prefix."""
    return {f"{one}{name}": (4, at + 1) for one in prefixes for at, name in enumerate(NAMES)}


@pytest.mark.parametrize(
    "prefixes, own",
    [
        (("model.", "ema."), "model."),
        (("ema.", "model."), "model."),
        (("", "ema."), ""),
        (("ema_state_dict.", "state_dict."), "state_dict."),
        (("module.", "module_ema.", "teacher."), "module."),
        (("ema.", "exp_avg."), "ema."),
        (("actor.", "ref."), "actor."),
    ],
)
def test_every_set_is_found_and_the_models_own_chosen(prefixes: tuple[str, ...], own: str) -> None:
    shapes = under(*prefixes)
    found = repeated_prefixes({**shapes, "optimizer.step": (), "step": ()})
    assert sorted(found) == sorted(prefixes) and prefix_to_read(found) == own
    said = copies_text(found, shapes, "x.pt")
    assert said.startswith("the same 4 tensor names stand ") and "aprfmt convert x.pt" in said
    assert all((f"under {one}" if one else "without a prefix") in said for one in prefixes)
    assert copies_text(found, shapes, "").endswith("save them alone")


@pytest.mark.parametrize(
    "shapes",
    [
        under("model."),
        under(""),
        {**under("encoder."), **{f"decoder.{name}": (4, 9) for name in NAMES}},
        {**under("encoder."), **under("decoder."), "decoder.cross.weight": (4, 4)},
        {"q.weight": (2,), "k.weight": (2,), "q.bias": (1,), "k.bias": (1,)},
        {f"{at}.{name}": (3,) for at in range(4) for name in NAMES},
        {**under("model."), "ema.decay": ()},
    ],
)
def test_other_names_are_no_copies(shapes: dict[str, tuple[int, ...]]) -> None:
    assert repeated_prefixes(shapes) == []
