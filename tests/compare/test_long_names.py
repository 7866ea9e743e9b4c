"""Names of many characters in a short answer: shortened there, whole in commands.

Seen red: lines of thousands of characters.
"""

from typing import Any

from aprfmt.base.text_escape import LONGEST
from aprfmt.compare.short_answer import short_answer

LONG = ["x" * 300 + str(i) for i in range(5)]


def test_long_names_are_shortened_but_in_commands() -> None:
    headline = (f"different: {LONG[0]}, {LONG[1]}", "bad")
    asked: dict[str, Any] = {
        "first_said": True,
        "others": [(LONG[2], "")],
        "not_compared": [LONG[3]],
        "commands": [f"aprfmt diff {LONG[4]}"],
    }
    *said, step = [text for text, _ in short_answer(headline, (), **asked)]
    assert all(len(text) < 3 * LONGEST for text in said), said
    assert said[0].endswith("x1") and step == f"next: aprfmt diff {LONG[4]}"
