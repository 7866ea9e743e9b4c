"""The main program of a worker process of a scan: answers tasks until its input ends.

Tasks come pickled on standard input. Answers go to standard output, each pickled and after the
number of its bytes, and after those of a task how many requests it made; what libraries print goes
to standard error.
"""

import os
import pickle
import signal
import struct
import sys
from contextlib import suppress
from typing import IO

from aprfmt.fleet.answer_lines import AnswerLine, encode_answer
from aprfmt.fleet.tasks import Asker
from aprfmt.remote.traffic import TRAFFIC

HEAD = struct.Struct("<I")  # bytes of the message that follows


def main(memory: int) -> None:
    """Answer pickled tasks from stdin until it ends, each answer a message on the original stdout.

    After the answers of a task comes the number of its network requests. `memory` is how many bytes
    the process may use. Other output is sent to stderr.
    """
    with suppress(ValueError, OSError):  # the parent ends us when it is interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_memory(memory)
    asker = Asker()
    with suppress(EOFError, BrokenPipeError):
        while True:
            task, before = pickle.load(sys.stdin.buffer), TRAFFIC.requests
            for row in asker.answers(task):
                _write_message(pipe, encode_answer(row))
            _write_message(pipe, TRAFFIC.requests - before)


def _write_message(pipe: IO[bytes], message: AnswerLine | int) -> None:
    """Write a pickled message to the pipe, after its length in bytes."""
    data = pickle.dumps(message)
    pipe.write(HEAD.pack(len(data)) + data)
    pipe.flush()


def _limit_memory(size: int) -> None:
    """Limit the process's own memory to `size` bytes; mapped files do not count.

    Windows has no such limit.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


if __name__ == "__main__":
    if "--allow-http" in sys.argv[2:]:
        from aprfmt.remote.address_policy import POLICY

        POLICY.plain_http = True
    main(int(sys.argv[1]))
