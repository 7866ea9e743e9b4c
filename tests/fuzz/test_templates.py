"""The limits of the process that renders chat templates, met for real and seen from outside.

Each is met alone: the others are out of reach, so that no machine is too slow for the right answer.
"""

import json
import subprocess
import sys

import pytest

from aprfmt.tokenizer.limits import CPU_SECONDS, MEMORY, OUTPUT
from tests.conftest import ROOT
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("rendered_each_time")

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


def measured(template: str, cpu_seconds: int = PATIENCE) -> tuple[str, int]:
    """Return what render says, and the peak bytes of the child it started.

    `cpu_seconds` stands in place of the 5 s; the timer behind it is out of reach.
    """
    code = (
        "import json, resource, sys\n"
        "from aprfmt.errors import AprfmtError\n"
        "from aprfmt.tokenizer import template\n"
        "template.CPU_SECONDS, template.WALL_SECONDS = map(int, sys.argv[2:])\n"
        "try:\n"
        "    said = 'rendered ' + str(len(template.render(sys.argv[1],"
        " [{'role': 'user', 'content': 'x'}], add_generation_prompt=True, variables={},"
        " where='x')))\n"
        "except AprfmtError as error:\n"
        "    said = str(error)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([said, used.ru_maxrss * 1024]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, template, str(cpu_seconds), str(2 * PATIENCE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=True,
    )
    said, peak = json.loads(done.stdout)
    return said, peak


def test_processor_time() -> None:
    """A template without an end is ended, though the timer is far away."""
    said, peak = measured(ENDLESS, cpu_seconds=1)
    assert "used more than 1 s of CPU or crashed (exit -9)" in said
    assert peak < MEMORY + SLACK_BYTES


@pytest.mark.parametrize("name", LARGE)
def test_memory(name: str) -> None:
    said, peak = measured(LARGE[name])
    assert f"needs more than {MEMORY >> 20} MiB of memory" in said
    assert peak < MEMORY + SLACK_BYTES


@pytest.mark.parametrize("name", TALKING)
def test_output(name: str) -> None:
    said, peak = measured(TALKING[name])
    assert f"writes more than {OUTPUT >> 20} MiB" in said
    assert peak < MEMORY + SLACK_BYTES


def test_the_limits_are_those_that_are_promised() -> None:
    assert (CPU_SECONDS, MEMORY, OUTPUT) == (5, 256 << 20, 4 << 20)
    said, peak = measured("{{ messages[0].content }}")
    assert said == "rendered 1" and 0 < peak < MEMORY
