"""`python -m aprfmt` is the command line.

Python puts the working folder first in `sys.path` for `-m`. It is taken out before anything else is
imported, so that no `numpy.py` next to a model is run; that `aprfmt` itself was found there by name
cannot be undone here (docs/explanation/hostile_files.md).
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) != _ROOT:
    del sys.path[0]

from aprfmt.cli.main import main  # noqa: E402

main()
