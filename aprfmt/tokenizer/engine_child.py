"""The process that runs a tokenizer which may need unbounded memory; started by `isolated.py`.

The first line of stdin has the import path, the limits and tokenizer.json; every further line is a
call, as `engine_server.py` answers them.
"""

import json
import sys


def main() -> None:
    """Answer requests until stdin ends. Returns nothing."""
    first = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = first["path"]
    from aprfmt.tokenizer.engine_server import serve

    serve(first)


if __name__ == "__main__":
    main()
