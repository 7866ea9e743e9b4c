"""Foreign runs read at our capture points: engines that run a model, and files of such runs.

Importing this imports no engine. An engine is a row of ENGINES; third parties add rows through
the entry-point group `aprfmt.engines`.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from aprfmt.base.registry import Registry
from aprfmt.errors import BackendUnavailableError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from aprfmt.inference.device import DeviceChoice
    from aprfmt.inference.forward import LogitRows
    from aprfmt.inference.trace import Positions, Trace
    from aprfmt.model import Model


class EngineRun(Protocol):
    """Another project's program that runs whole passes; the keywords are a RunRequest's fields."""

    def __call__(
        self,
        model: "Model",
        ids: Sequence[int],
        choice: "DeviceChoice",
        *,
        wanted: Collection[str] | None,
        positions: "Positions",
        threads: int | None,
        hashes: bool,
        logits_rows: "LogitRows",
    ) -> "AbstractContextManager[Trace]":
        """Run `ids` where `choice` says; return a context manager that gives the trace.

        The trace's values can be fetched inside the `with`. `wanted` are the keys to record (None:
        all), `positions` and `logits_rows` the rows of them. `threads` is the number of threads
        (None: the engine's own). `hashes`: also record the SHA-256 of values.
        """
        ...


ENGINES: Registry[EngineRun] = Registry(
    "engines",
    {
        "transformers": (
            "aprfmt.inference.engines.transformers:run_transformers",
            "pip install torch transformers",
        ),
        "llama.cpp": "aprfmt.inference.engines.llama_cpp:run_llama_cpp",
    },
    BackendUnavailableError,
)
