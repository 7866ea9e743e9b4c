"""Weights that were never trained are one cause, with the distribution that was seen.

The numbers are drawn by torch and by transformers' own initialiser. Seen red: "the bias is not
added" confirmed beside a layer that was never loaded; norms and biases as causes of their own.
"""

from collections.abc import Callable
from typing import Any

import pytest

import aprfmt
from aprfmt.compare.diffs import DiffReport
from aprfmt.diagnosis import diagnose
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO
from tests.diagnosis.files import Rows

Draw = Callable[[Any, str], None]  # fills a tensor in place, by its name

UP = "model.layers.2.mlp.up_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"
NORM = "model.layers.1.input_layernorm.weight"


def normal(deviation: float) -> Draw:
    """Return the initialisation by normal numbers."""
    return lambda x, name: x.normal_(0, deviation)


def as_transformers(x: Any, name: str) -> None:
    """Fill a tensor as transformers' `_init_weights` does."""
    if name.endswith("bias"):
        x.zero_()
    elif "norm" in name:
        x.fill_(1)
    else:
        x.normal_(0, 0.02)


def by(function: str, **arguments: float) -> Draw:
    """Return an initialisation of torch.nn.init."""
    import torch

    return lambda x, name: getattr(torch.nn.init, function)(x, **arguments)


def filled(words: tuple[str, ...], draw: Draw, seed: int = 0) -> Callable[[Rows], None]:
    """Return an editor that draws every bfloat16 tensor anew whose name contains one of `words`."""

    def edit(rows: Rows) -> None:
        import torch

        torch.manual_seed(seed)
        for name in sorted(rows):
            if any(word in name for word in words):
                x = torch.empty(rows[name][1])
                draw(x, name)
                raw = x.bfloat16().view(torch.int16).numpy().tobytes()
                rows[name] = (rows[name][0], rows[name][1], raw)

    return edit


def compared(name: str, words: tuple[str, ...], draw: Draw) -> DiffReport:
    """Return the comparison of the demo model with one of which some tensors are drawn anew."""
    return aprfmt.diff(DEMO, files.copy(DEMO, f"drawn-{name}", tensors=filled(words, draw)))


@pytest.mark.parametrize(
    ("name", "words", "draw", "count", "says"),
    [
        ("tensor", (UP,), normal(0.02), 1, "normal numbers of mean 0 and deviation 0.02 (the init"),
        ("bias", (BIAS,), normal(0.02), 1, "transformers' own gives 0 to a bias"),
        ("norm", (NORM,), normal(0.02), 1, "transformers' own gives 1 to a norm"),
        ("layer", ("layers.2.",), as_transformers, 12, "(the initializer_range), biases of 0, no"),
        ("table", ("embed_tokens",), normal(1.0), 1, "deviation 1 (as torch.nn.Embedding)"),
        ("all", ("",), as_transformers, 50, "(the initializer_range), biases of 0, norms of 1"),
        ("linear", (UP,), by("kaiming_uniform_", a=5**0.5), 1, "(1/sqrt(256), as torch.nn.Linear)"),
        ("xavier", (UP,), by("xavier_normal_"), 1, "(as Xavier's of 256 and 512)"),
        ("scaled", ("down_proj",), normal(0.02 / 8**0.5), 4, "/ sqrt(2 * 4 layers)"),
        ("cut", (UP,), by("trunc_normal_", std=0.02, a=-0.04, b=0.04), 1, "none beyond two"),
    ],
)  # fmt: skip
def test_fresh_numbers_are_one_cause_with_their_distribution(
    name: str, words: tuple[str, ...], draw: Draw, count: int, says: str
) -> None:
    (finding,) = compared(name, words, draw).findings
    assert (finding.cause, finding.certainty) == ("stale_tensor", "located")
    assert finding.says.split(" - ")[1].startswith("B was never trained or loaded here")
    assert says in finding.says
    assert len(finding.keys) == count and finding.side == "B"
    fresh = finding.says.split("; A's: ")[0]  # seen red: each distribution was named twice
    assert fresh.count("numbers of mean 0 and") <= 1 and fresh.count("numbers between") <= 1


def test_numbers_of_no_known_initialisation_are_not_called_fresh() -> None:
    """Seen red: rows of other trained matrices, whose numbers are as normal as many a matrix's."""
    (finding,) = compared("unknown", (UP,), normal(0.33)).findings
    assert (finding.cause, finding.certainty) == ("stale_tensor", "located")
    assert "never trained" not in finding.says and "initialisation" not in finding.says


def test_a_head_of_its_own_that_was_never_trained() -> None:
    def untied(rows: Rows) -> None:
        rows["lm_head.weight"] = rows["model.embed_tokens.weight"]

    config = {"tie_word_embeddings": False}
    good = files.copy(DEMO, "untied", tensors=untied, config=config)
    bad = files.copy(good, "untied-drawn", tensors=filled(("lm_head",), normal(0.02)))
    (finding,) = aprfmt.diff(good, bad).findings
    assert (finding.cause, finding.keys) == ("stale_tensor", ("output.weight",))
    assert "never trained" in finding.says


def scrambled(rows: Rows) -> None:
    """Put a tensor's values in another order: they are those of a training."""
    import numpy as np

    kind, shape, raw = rows[UP]
    order = np.random.default_rng(0).permutation(np.frombuffer(raw, np.uint16))
    rows[UP] = kind, shape, order.tobytes()


def noisy(rows: Rows) -> None:
    """Add normal numbers to a tensor."""
    import torch

    kind, shape, raw = rows[UP]
    x = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float().reshape(shape)
    x += torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    rows[UP] = kind, shape, x.bfloat16().view(torch.int16).numpy().tobytes()


def of_another(rows: Rows) -> None:
    """Take the tensor of another layer, its rows in another order: a trained one."""
    import numpy as np

    kind, shape, raw = rows[UP.replace(".2.", ".1.")]
    values = np.frombuffer(raw, np.uint16).reshape(shape)
    rows[UP] = kind, shape, np.ascontiguousarray(values[:, ::-1]).tobytes()


@pytest.mark.parametrize("edit", [scrambled, noisy, of_another], ids=lambda edit: edit.__name__)
def test_trained_numbers_are_not_called_drawn(edit: Callable[[Rows], None]) -> None:
    report = aprfmt.diff(DEMO, files.copy(DEMO, f"trained-{edit.__name__}", tensors=edit))
    assert report.findings
    assert not [one for one in report.findings if "never trained" in one.says]


def test_of_two_models_that_were_never_trained_neither_is_called_so() -> None:
    words = ("layers.2.mlp",)
    first = files.copy(DEMO, "drawn-once", tensors=filled(words, normal(0.02)))
    second = files.copy(DEMO, "drawn-again", tensors=filled(words, normal(0.02), seed=1))
    assert not [one for one in aprfmt.diff(first, second).findings if one.side]


@pytest.mark.parametrize("turned", [False, True], ids=["b", "a"])
def test_the_side_that_was_never_trained_is_not_what_mends_the_other(turned: bool) -> None:
    drawn = files.copy(
        DEMO, f"drawn-side-{turned}", tensors=filled(("layers.2.",), as_transformers)
    )
    pair = (str(drawn), str(DEMO)) if turned else (str(DEMO), str(drawn))
    found = diagnose(*pair)
    (finding,) = found.findings
    assert (finding.cause, finding.certainty) == ("stale_tensor", "located")
    assert found.complete and found.exit_code == 1
    assert finding.next.startswith("aprfmt diff" if turned else "aprfmt convert")
