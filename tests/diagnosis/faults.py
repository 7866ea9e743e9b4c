"""The table of seeded faults: one thing broken in each, and the diagnosis it must get.

A fault is a damaged copy of a model's files, or the saved trace of an engine that computes
something else. It stands in a file of its cause's name (tests/causes), or here in a file of its
set. Controls are pairs with nothing wrong. `upstream` are numbers in the list of real bugs that the
project started from (the column "upstream" of docs/notes/faults.md).
"""

from tests.causes.seeded import seeded
from tests.diagnosis.controls import PAIRS
from tests.diagnosis.controls_tokens import CONTROLS_TOKENS
from tests.diagnosis.fault import Fault as Fault
from tests.diagnosis.faults_diagnosis_order import WALK
from tests.diagnosis.faults_files import FILE_FAULTS
from tests.diagnosis.faults_files import UP as UP
from tests.diagnosis.faults_files import neurons_moved as neurons_moved
from tests.diagnosis.faults_moved import MOVED_CONTROLS, MOVED_FAULTS
from tests.diagnosis.faults_packed import PACKED_CONTROLS, PACKED_FAULTS
from tests.diagnosis.faults_undecoded import UNDECODED_FAULTS
from tests.diagnosis.making import DEMO as DEMO
from tests.diagnosis.making import ROOT as ROOT
from tests.diagnosis.making import engine

FOLDERS = ("", "tensor", "tokenizer", "forward")  # of tests/causes, with faults for `diagnose`
CLEAN = engine("clean-trace", "deepseek_v2", "nothing", (), (), verdict="same", fine=True)
ENGINES: tuple[Fault, ...] = (
    *(fault for folder in FOLDERS for fault in seeded(folder, "ENGINE_FAULTS")),
    CLEAN,
)
FILES: tuple[Fault, ...] = (
    *FILE_FAULTS, *WALK, *MOVED_FAULTS, *UNDECODED_FAULTS, *PACKED_FAULTS,
    *(fault for folder in FOLDERS for fault in seeded(folder, "FILE_FAULTS")),
)  # fmt: skip
CONTROLS: tuple[Fault, ...] = (
    *PAIRS, *MOVED_CONTROLS, *PACKED_CONTROLS, *CONTROLS_TOKENS,
)  # fmt: skip
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*ENGINES, *FILES, *CONTROLS)}
