"""What `--dry-run` says of a GPU, held to what torch allocates there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aprfmt.inference.device import parse_run
from aprfmt.inference.memory_estimate import estimate_run
from aprfmt.inference.running import RunRequest, open_run
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.inference.gpu.on_gpu import clear_device_memory, need
from tests.models import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("in_turn")]
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
IDS = tuple(range(3, 403))


def placed(x: Any) -> list[Any]:
    """Return the tensors that a placed weight consists of."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [one for one in vars(x).values() if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek_v3", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("encoding", ["BF16", "Q8_0"])
def test_weights_cache_and_peak_are_those_of_the_run(
    arch: str, dtype: str, encoding: str, tmp_path: Path
) -> None:
    need()
    save_tiny(arch, tmp_path / "m", "bfloat16", **SIZES)
    path = tmp_path / "m"
    if encoding != "BF16":
        path = tmp_path / "m.gguf"
        assert aprfmt("convert", tmp_path / "m", path, "--quantize", encoding).code == 0
    asked = RunRequest(ids=IDS, choice=parse_run(f"torch:cuda:{dtype}"))
    with open_model(path) as model:
        found = estimate_run(model, asked, 4).devices[0]
        before = clear_device_memory()
        with open_run(asked, model) as run:
            torch.cuda.reset_peak_memory_stats()
            run.session.extend(list(IDS))
            for _ in range(4):
                run.session.extend([IDS[-1]])
            peak = torch.cuda.max_memory_allocated() - before
            holder = run.session.weights.holder
            stores = [t.untyped_storage() for one in holder.placed_tensors() for t in placed(one)]
            held = sum({store.data_ptr(): store.nbytes() for store in stores}.values())
            cache = run.session.cache
            assert cache is not None
            print(found, held, cache.nbytes, peak)
            assert found.cache_bytes == cache.nbytes
            assert found.weights_bytes == held
            assert abs(found.peak_bytes / peak - 1) < 0.1, (found.peak_bytes, peak)
