"""Export a Hugging Face folder to ONNX with torch's logits beside it, for Polygraphy to compare.

`python -m tests.docs.to_onnx FOLDER 1417,362,258` writes net.onnx, ids.json and torch.json. Needs
onnx, onnxscript and polygraphy, which are no extra of this package. Only
docs/explanation/ten_tasks.md runs it.
"""

import sys
from pathlib import Path
from typing import Any


def main(folder: str, ids: str) -> None:
    """Export and run once in float32."""
    import numpy as np
    import torch
    from polygraphy.comparator import IterationResult, RunResults
    from polygraphy.json import save_json
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return self.model(ids, use_cache=False).logits

    given = torch.tensor([[int(each) for each in ids.split(",")]])
    torch.onnx.export(
        Logits(), (given,), "net.onnx", input_names=["ids"], output_names=["logits"], dynamo=True
    )
    with torch.no_grad():
        logits = Logits()(given).numpy()
    save_json([{"ids": given.numpy()}], "ids.json")
    results = RunResults()
    results.append(("torch", [IterationResult({"logits": np.ascontiguousarray(logits)})]))
    results.save("torch.json")


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2])
