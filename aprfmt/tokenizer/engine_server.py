"""Answers calls of a tokenizer engine, one JSON line each, in a process with limits."""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from aprfmt.base.resource_limits import limit_resources
from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.hf_engine import HfEngine


def limit_cpu(seconds: int) -> None:
    """Limit the process to this many more seconds of CPU time, if the system can."""
    try:
        import resource

        bound = int(time.process_time()) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (bound, resource.RLIM_INFINITY))
    except (ImportError, ValueError, OSError):
        return  # the parent's timer still applies


def answer_call(engine: Any, call: str, arguments: list[Any]) -> tuple[str, Any]:
    """Return (status, value) of calling the engine's method, or reading its attribute, `call`.

    `arguments` are the method's. The status is "ok" with the result, "error" with a message, or
    "memory" with "".
    """
    try:
        value = getattr(engine, call)
        made = value(*arguments) if callable(value) else value
        return "ok", sorted(made) if isinstance(made, frozenset) else made
    except AprfmtError as error:
        return "error", str(error)
    except MemoryError:
        return "memory", ""


def serve(first: Mapping[str, Any]) -> None:
    """Build the engine of the first request within its limits; answer calls until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    limits = first["limits"]
    limit_resources(limits["cpu_seconds"], limits["memory"], total=False)
    limit_cpu(limits["cpu_seconds"])
    engine: Any = None
    found: tuple[str, Any] = ("ok", None)
    try:
        engine = HfEngine.from_text(first["text"], first["where"])
    except AprfmtError as error:
        found = ("error", str(error))
    except MemoryError:
        found = ("memory", "")
    while True:
        raw = json.dumps(found).encode()
        if len(raw) > limits["output"]:
            raw = b'["output", ""]'
        sys.stdout.buffer.write(raw + b"\n")
        sys.stdout.buffer.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        call, arguments = json.loads(line)
        limit_cpu(limits["cpu_seconds"])
        found = answer_call(engine, call, arguments)
