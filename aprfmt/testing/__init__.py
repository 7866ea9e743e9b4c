"""Conformance suites for rows that other packages add; the built-in rows pass the same suites.

    from aprfmt.testing import check_arch, check_backend, check_codec, check_format

Each takes a row's name in its table (rows from entry points included) and returns the names of the
checks it made; the first check that fails raises AssertionError saying what was found and what was
expected. They need no test framework.
"""

from aprfmt.testing.arch import check_arch
from aprfmt.testing.backend import check_backend
from aprfmt.testing.codec import check_codec
from aprfmt.testing.format import check_format

__all__ = ["check_arch", "check_backend", "check_codec", "check_format"]
