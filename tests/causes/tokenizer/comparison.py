"""Seeded faults of `aprfmt/causes/tokenizer/comparison.py`."""

import json

from tests.diagnosis import files
from tests.diagnosis.fault import Pair
from tests.diagnosis.token_edits import DEMO, Keys, rewritten, rows


def carried_cut(name: str) -> Pair:
    """Our own GGUF, whose lists were edited afterwards: the JSON in it is the old one."""
    source = files.converted(DEMO, "demo.gguf")

    def change(found: Keys) -> None:
        data = json.loads(found["tokenizer.huggingface.json"])
        data["model"]["merges"] = data["model"]["merges"][:300]
        found["tokenizer.huggingface.json"] = json.dumps(data)

    return source, rewritten(source, name, change)


FILE_FAULTS = rows({
    "carried-cut": ("the JSON that a GGUF carries has 300 merges, its lists all", carried_cut,
                    "carried_tokenizer", "tokenizer.huggingface.json"),
}, "bug")  # fmt: skip
