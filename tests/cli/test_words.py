"""One vocabulary: points by their own names, tokens as they read, layout steps in words.

Seen red: `ffn_silu` over a GELU, `Ġof` and `▁of` for ` of`, `Added(1)` in a report.
"""

from pathlib import Path

import pytest

from aprfmt.cli.convert_run import STEPS
from aprfmt.inference.capture import POINTS, SLOTS
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.models import save_tiny

TEXT = "The capital of France is Paris, isn't it?\nYes: 42 times."
OLD = set(SLOTS) - set(POINTS)  # names that only `apr` uses


@pytest.mark.parametrize("name", ["smollm2", "gemma", "demo_model"])
def test_pieces_put_together_are_the_text(name: str, request: pytest.FixtureRequest) -> None:
    with open_model(request.getfixturevalue(name)) as model:
        tokenizer = model.tokenizer
        ids = tokenizer.encode(TEXT, add_special=False)
        assert "".join(map(tokenizer.piece, ids)) == TEXT
        assert any(tokenizer.token(i) != tokenizer.piece(i) for i in ids)


def test_what_is_no_text_keeps_its_spelling(smollm2: Path) -> None:
    with open_model(smollm2) as model:
        tokenizer = model.tokenizer
        assert tokenizer.piece(1) == "<|im_start|>"
        part = tokenizer.encode("日", add_special=False)
        assert len(part) > 1
        for i in part:
            assert tokenizer.piece(i) == tokenizer.token(i)
        assert tokenizer.piece(10**6) == "[PAD1000000]"


def test_tokens_are_shown_as_they_read(smollm2: Path) -> None:
    done = aprfmt("tokenize", smollm2, "capital of it")
    assert '" of"' in done.out and "Ġ" not in done.out
    assert aprfmt("tokenize", smollm2, "it of", "--json").json["tokens"][1] == "Ġof"
    top = aprfmt("logits", smollm2, "--ids", "504,3575,282", "--json").json["top"]
    assert all(row["piece"] == row["token"].replace("Ġ", " ") for row in top)
    shown = aprfmt("logits", smollm2, "--ids", "504,3575,282").out
    assert "Ġ" not in shown and f'"{top[0]["piece"]}"' in shown


@pytest.mark.parametrize("name", ["gemma2", "llama", "gpt2"])
def test_points_have_their_own_names_in_tables(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert {"ffn_silu", "ffn_swigl", "qkv", "output"} <= OLD
    args = ("trace", tmp_path, "--payload", "--ids", "1,2,3")
    done = aprfmt(*args)
    shown = {line.split()[1] for line in done.out.splitlines() if line.startswith("L0 ")}
    assert {"ffn_act", "ffn_up", "q", "k", "v", "out"} <= shown and not shown & OLD
    assert {row["slot"] for row in aprfmt(*args, "--json").json["slots"]} & OLD
    alone = aprfmt(*args, "--points", "ffn_silu", "--layers", "0").out
    assert "L0     ffn_act" in alone and "ffn_silu" not in alone


def test_layout_steps_are_said_in_words(tmp_path: Path) -> None:
    for name, said in (
        ("gemma2", "norm weights +1 in GGUF: 17 tensors"),
        ("llama", "q and k rows in the rope order of GGUF: 6 tensors"),
    ):
        save_tiny(name, tmp_path / name)
        done = aprfmt("convert", tmp_path / name, tmp_path / f"{name}.gguf")
        assert f"  {said}\n" in done.out and "(" not in done.out.split(said)[1].splitlines()[0]


def test_every_layout_step_has_its_words() -> None:
    from aprfmt.arch import joining_steps, layout_steps

    made = {
        name
        for module in (layout_steps, joining_steps)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, "undo")
    }
    assert made == STEPS.keys()
