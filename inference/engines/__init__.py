"""Foreign runs read at our capture points: engines that run a model, and files of such runs.

Importing this imports no engine. An engine is a row of ENGINES; third parties add rows through
the entry-point group `aprfmt.engines`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from aprfmt.base.registry import Registry
from aprfmt.errors import BackendUnavailableError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from aprfmt.inference.trace import Trace

# Called as `ENGINES[name](model, ids, choice, wanted=..., positions=..., threads=..., hashes=...)`
# with an open Model and a device.Choice; gives a context manager of a Trace.
ENGINES: "Registry[Callable[..., AbstractContextManager[Trace]]]" = Registry(
    "engines",
    {
        "transformers": (
            "aprfmt.inference.engines.transformers:run",
            "pip install torch transformers",
        ),
        "llama.cpp": "aprfmt.inference.engines.llama_cpp:run",
    },
    BackendUnavailableError,
)
