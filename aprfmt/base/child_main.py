"""The first file of a child process: `python -I child_main.py SYS_PATH MODULE [ARGUMENT ...]`.

SYS_PATH is a JSON list. Nothing of ours, and no other package, is imported before it is set.
"""

import json
import runpy
import sys

if __name__ == "__main__":
    path, module = sys.argv[1:3]
    sys.path[:] = json.loads(path)
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
