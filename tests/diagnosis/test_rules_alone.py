"""Rules of a diagnosis, each by itself: which command mends, what is equal, what comes last."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.base.protocols import TypedValue
from aprfmt.diagnosis import examine, renumbered, tokens
from aprfmt.errors import FormatError
from aprfmt.tokenizer.keys import CHAT_TEMPLATE

# --- the keys of a tokenizer that a command sets ------------------------------------------------


def arguments(written: Any, *where: str, style: str = "gguf", folder: Path | None = None) -> Any:
    b: Any = SimpleNamespace(key_style=style, metadata={"gone": 1, "kept": 2})
    a: Any = SimpleNamespace(folder=None if folder is None else SimpleNamespace(path=folder))

    def to_gguf(model: Any) -> Any:
        if isinstance(written, Exception):
            raise written
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "to_gguf", to_gguf)
        return tokens.tokenizer_set_arguments(a, b, where)


def test_a_command_holds_short_texts_and_numbers() -> None:
    """A list fits no command, and is another answer than a tokenizer that GGUF cannot express."""
    written = {
        "n": 3, "x": 0.5, "on": True, "text": "a b", "typed": TypedValue(7, "uint32"),
        "list": [1, 2], "kept": "it's", "long": "x" * 120, "longer": "x" * 121, "line": "a\nb",
    }  # fmt: skip
    for where, expected in (
        (("n", "x", "on"), ["n=3", "x=0.5", "on=true"]),
        (("text", "typed"), ["'text=a b'", "typed=7"]),
        (("gone", "n"), ["--remove gone", "n=3"]),
        (("nobody's", "n"), ["n=3"]),
        (("kept",), ["'kept=it'\"'\"'s'"]),
        (("n", "n"), ["n=3"]),
        (("long",), ["long=" + "x" * 120]),
        (("longer",), []),
        (("line",), []),
        (("n", "list"), []),
        ((), []),
    ):
        assert arguments(written, *where) == expected, where
    assert arguments(written, "n", style="hf") == []
    assert arguments(FormatError("no such tokenizer"), "n") is None


def test_a_template_is_set_of_its_own_file(tmp_path: Path) -> None:
    template = "{{ messages }}\n" * 40
    (tmp_path / "chat_template.jinja").write_text(template)
    written = {CHAT_TEMPLATE: template}
    named = f"{CHAT_TEMPLATE}=@{tmp_path}/chat_template.jinja"
    assert arguments(written, CHAT_TEMPLATE, folder=tmp_path) == [named]
    assert arguments({CHAT_TEMPLATE: template + " "}, CHAT_TEMPLATE, folder=tmp_path) == []
    assert arguments(written, CHAT_TEMPLATE) == []
    assert arguments({"other": template}, "other", folder=tmp_path) == []


# --- rows under other ids -----------------------------------------------------------------------


def test_rows_of_tokens_are_found_by_their_texts_and_the_others_where_they_stand() -> None:
    order = [2, 0, 1]

    def table(values: Any) -> Any:
        held = np.asarray(values, np.float32)
        return SimpleNamespace(shape=held.shape, rows=lambda start, stop: held[start:stop])

    def same(x: Any, y: Any) -> bool:
        a, b = (SimpleNamespace(roles={} if one is None else {"t": one}) for one in (x, y))
        left: Any = a
        right: Any = b
        return renumbered._same_rows(left, right, "t", order)

    for more in (0, 1, 2):  # rows that no token has
        rows = np.arange(2.0 * (3 + more)).reshape(-1, 2)
        moved = rows.copy()
        moved[order] = rows[:3]
        assert same(table(rows), table(moved)) and not same(table(rows), table(rows))
        for at in range(3 + more):
            wrong = moved.copy()
            wrong[at] += 1
            assert not same(table(rows), table(wrong)), at
        assert not same(table(rows), table(moved[:, :1])) and not same(table(rows), None)
    assert not same(table([[1], [2]]), table([[1], [2]])) and not same(None, table([[1]]))


# --- the last look of an examination ------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "directed", "NaN", "arithmetic"])
def test_a_small_difference_with_a_direction_is_looked_for_where_nothing_else_is(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points in fewer bits are told only where nothing is."""
    guessed = "the arithmetic" if what == "arithmetic" else ""
    flagged = what in ("NaN", "arithmetic")
    views = [SimpleNamespace(key="L0.q", one_sided_nonfinite=not guessed, layer=0)] * flagged
    found: Any = SimpleNamespace(flagged=views, views={})
    recorded: Any = SimpleNamespace(shapes={}, without=())
    directed: list[str] = []

    def look(*given: Any) -> list[Any]:
        directed.append("asked")
        return ["directed"] * (what == "directed")

    left = SimpleNamespace(flagged=[], views={})
    for name, made in (
        ("record_points", lambda patched: {}),
        ("_read_in_its_arithmetic", lambda patched, recorded: (recorded, found)),
        ("find_directed_mistake", look),
        ("recheck_answers", lambda divergences, *given: divergences),
        ("points_in_16_bits", lambda *given: {"few": "points"}),
        ("Mismatch", lambda *given: SimpleNamespace(fitting=True)),
        ("replace", lambda case, **changed: case),
        ("find_unwritten_rows", lambda case: None),
        ("find_other_capture_point", lambda case: None),
        ("_answers_of_table", lambda case, known: ()),
        ("is_wide", lambda case: False),
        ("Search", lambda *given: SimpleNamespace(tried=0, smallest_remaining_share=1.0)),
        ("_search_usual_mistakes", lambda *given: []),
        ("find_faint_mistakes", lambda *given: None),
        ("explain_by_arithmetic", lambda *given: (recorded, guessed) if guessed else None),
        ("run_shadow_pass", lambda *given: left),
    ):
        monkeypatch.setattr(examine, name, made)
    recorded.ignoring = lambda keys: recorded
    patched: Any = None
    report: Any = examine.examine(patched, recorded)
    assert directed == ["asked"] * (not flagged)
    told = {"directed": ["directed"], "NaN": views}.get(what, [])
    assert [getattr(one, "view", one) for one in report.divergences] == told
    assert (report.supposed, report.unfinished) == (guessed, False)
    assert report.short == ({"few": "points"} if what == "nothing" else {})
