"""A short golden file of the demo model, its losses by transformers, and one thread."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.threads import one_thread as one_thread


@pytest.fixture(scope="session")
def golden(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts and a text of 48 tokens; the loss is transformers' own."""
    import torch
    import transformers

    whole = json.loads((demo_model / "golden.json").read_text())
    by_name = {row["name"]: row for row in whole["greedy"]}
    direct = by_name["opening"] | {"output_ids": by_name["opening"]["output_ids"][:12]}
    del direct["output_text"]
    text = next(row for row in whole["losses"] if row["name"] == "held_out_text")
    ids = text["ids"][:48]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.no_grad():
        loss = float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(demo_model)
    path = tmp_path_factory.mktemp("golden") / "golden.json"
    rows = {
        "format": 1,
        "greedy": [direct, by_name["chat_capital"]],
        "losses": [
            {"name": "held_out", "text": tokenizer.decode(ids), "ids": ids, "nats_per_token": loss}
        ],
    }
    path.write_text(json.dumps(rows))
    return path
