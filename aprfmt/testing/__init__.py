"""What tests of other packages use: a model against its source, and suites for rows they add.

    from aprfmt.testing import assert_same_model
    from aprfmt.testing import check_arch, check_backend, check_codec, check_format

`assert_same_model` diagnoses two models; the diagnosis is the message of its failure. The suites
are those that the built-in rows pass. Each takes a row's name in its table (rows from entry points
included) and returns the names of the checks it made; the first check that fails raises
AssertionError saying what was found and what was expected. They need no test framework.
"""

from aprfmt.testing.arch import check_arch
from aprfmt.testing.backend import check_backend
from aprfmt.testing.codec import check_codec
from aprfmt.testing.format import check_format
from aprfmt.testing.models import assert_same_model

__all__ = ["assert_same_model", "check_arch", "check_backend", "check_codec", "check_format"]
