"""Conformance suites for what other packages add, and the very ones our own tables pass.

    from aprfmt.testing import check_arch, check_backend, check_codec, check_format

Each takes a name of its table (so a row that an entry point offers is found by it) and returns the
names of what it checked; the first thing that does not hold raises AssertionError saying what was
found and what was expected. They need no test framework.
"""

from aprfmt.testing.arch import check_arch
from aprfmt.testing.backend import check_backend
from aprfmt.testing.codec import check_codec
from aprfmt.testing.format import check_format

__all__ = ["check_arch", "check_backend", "check_codec", "check_format"]
