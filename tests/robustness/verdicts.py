"""What every command owes every file: one line, no control characters, no traceback."""

from tests.robustness.jail import UNSAID, Done


def assert_plain(done: Done) -> None:
    """Assert that a job ended by itself and wrote nothing a terminal would act on."""
    assert done.code >= 0, f"killed by signal {-done.code}: {done.err[-300:]}"
    assert done.code != UNSAID, done.err[-500:]
    for text in (done.out, done.err):
        odd = {c for c in text if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0}
        assert not odd, (odd, text[:300])
        assert not any(0xD800 <= ord(c) < 0xE000 for c in text)
    assert "Traceback" not in done.err
    assert "aprfmt: bug:" not in done.err, done.err[:600]


def assert_refused(done: Done, says: str = "", where: str = "") -> None:
    """Assert one line on stderr, nothing on stdout, exit 2."""
    assert_told(done, says, where)
    assert done.out == ""


def assert_reported(done: Done, says: str = "") -> None:
    """Assert a report of checks that fails and says why, no error line, exit 1."""
    assert_plain(done)
    assert done.code == 1, (done.code, done.err[:300])
    assert done.err == "", done.err[:300]
    assert "\nFAIL: " in done.out and says in done.out, (says, done.out[:600])


def assert_told(done: Done, says: str = "", where: str = "") -> None:
    """Assert one line on stderr and exit 2, no matter how much could be read."""
    assert_plain(done)
    assert done.code == 2, (done.code, done.out[:200], done.err[:300])
    lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("aprfmt: "), done.err[:600]
    assert len(lines[0]) < 2000
    assert says in lines[0], (says, lines[0])
    assert where in lines[0], (where, lines[0])
