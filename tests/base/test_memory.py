"""Memory that is freed is used again, without the system clearing its pages once more.

Seen red: the call without its two settings.
"""

import platform
import subprocess
import sys

import pytest

PROBE = """
import resource
import numpy as np
from aprfmt.base.memory import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = [np.full(3 << 20, 1, np.uint8) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told so")
def test_pages_of_freed_memory_are_not_made_anew() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # 20 times 4 times 768 pages of 4 KiB otherwise
