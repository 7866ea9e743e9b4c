"""The limits of the process that renders chat templates, met for real and measured from outside."""

import json
import subprocess
import sys

import pytest

from aprfmt.tokenizer.limits import CPU_SECONDS, MEMORY, OUTPUT
from tests.conftest import ROOT

SLACK_SECONDS = 0.7  # the system counts in ticks, and Python takes its time to start
SLACK_BYTES = 64 << 20  # resident memory is less than address space; this is room for both sides

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LARGE = {
    "string": "{{ ('a' * 10 ** 9) | length }}",
    "doubling": "{% set ns = namespace(s='x' * 1000) %}{% for i in range(40) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "lists": "{% set ns = namespace(s=[0]) %}{% for i in range(40) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}",
    "tojson": "{{ (['x' * 1000000] * 400) | tojson | length }}",
}
TALKING = {
    "at once": "{{ 'a' * 5000000 }}",
    "bit by bit": "{% for i in range(99999) %}{{ 'é' * 999 }}{% endfor %}",
}


def measured(template: str) -> tuple[str, float, int]:
    """Return what render says, and CPU seconds and peak bytes of the child it started."""
    code = (
        "import json, resource, sys\n"
        "from aprfmt.errors import AprfmtError\n"
        "from aprfmt.tokenizer.template import render\n"
        "try:\n"
        "    said = 'rendered ' + str(len(render(sys.argv[1], [{'role': 'user', 'content': 'x'}],"
        " add_generation_prompt=True, variables={}, where='x')))\n"
        "except AprfmtError as error:\n"
        "    said = str(error)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([said, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, template], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    said, seconds, peak = json.loads(done.stdout)
    return said, seconds, peak


def test_processor_time() -> None:
    said, seconds, peak = measured(ENDLESS)
    assert f"used more than {CPU_SECONDS} s of CPU" in said
    assert seconds < CPU_SECONDS + SLACK_SECONDS
    assert peak < MEMORY + SLACK_BYTES


@pytest.mark.parametrize("name", LARGE)
def test_memory(name: str) -> None:
    said, seconds, peak = measured(LARGE[name])
    assert f"needs more than {MEMORY >> 20} MiB of memory" in said
    assert peak < MEMORY + SLACK_BYTES
    assert seconds < CPU_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize("name", TALKING)
def test_output(name: str) -> None:
    said, _, peak = measured(TALKING[name])
    assert f"writes more than {OUTPUT >> 20} MiB" in said
    assert peak < MEMORY + SLACK_BYTES


def test_the_limits_are_those_that_are_promised() -> None:
    assert (CPU_SECONDS, MEMORY, OUTPUT) == (5, 256 << 20, 4 << 20)
    said, seconds, peak = measured("{{ messages[0].content }}")
    assert said == "rendered 1" and 0 < seconds and 0 < peak < MEMORY
