"""Whether a text is gibberish, by four signals; each gives a sentence.

A working model's text in another script than its prompt's is no defect in itself, so the share of
non-ASCII characters counts only where the prompt has few of them.
"""

from aprfmt.checks.bounds import GIBBERISH


def signals(text: str, prompt: str = "") -> list[str]:
    """Return what marks the text as gibberish, a sentence each; nothing for ordinary text."""
    found = (_foreign(text, prompt), _repeats(text), _broken(text), _same(text))
    return [sentence for sentence in found if sentence]


def _foreign(text: str, prompt: str) -> str:
    if len(text) < GIBBERISH.foreign_length or _share(prompt) > GIBBERISH.foreign_share:
        return ""
    share = _share(text)
    return f"{share:.0%} of the characters are not ASCII" if share > GIBBERISH.foreign_share else ""


def _share(text: str) -> float:
    return sum(not char.isascii() for char in text) / len(text) if text else 0.0


def _repeats(text: str) -> str:
    """Find a fragment three times in a row; runs of one byte (rules, indents) are none."""
    data = text.encode("utf-8", "surrogatepass")
    low, high = GIBBERISH.fragment
    for size in range(low, high + 1):
        run = 0  # how many bytes in a row equal the one `size` before
        for at in range(size, len(data)):
            run = run + 1 if data[at] == data[at - size] else 0
            if run >= size * (GIBBERISH.times - 1):
                fragment = data[at - size + 1 : at + 1]
                if len(set(fragment)) > 1:
                    shown = fragment.decode("utf-8", "replace")
                    return f"the fragment {shown!r} stands {GIBBERISH.times} times in a row"
    return ""


def _broken(text: str) -> str:
    whole = text.removesuffix("\ufffd")  # the last token may end inside a character
    count = whole.count("\ufffd")
    if count * GIBBERISH.broken_every > len(whole):
        return f"{count} broken characters (U+FFFD) in {len(text)}"
    return ""


def _same(text: str) -> str:
    dense = "".join(text.split())
    if len(dense) < GIBBERISH.same_length:
        return ""
    most = max(set(dense), key=dense.count)
    share = dense.count(most) / len(dense)
    return f"{share:.0%} of the text is {most!r}" if share >= GIBBERISH.same_share else ""
