"""The table of fuzz targets: a parser, its seeds, and how derived fields are made true again."""

from collections.abc import Mapping
from importlib import import_module

from tests.fuzz import containers, parsers, seeds, side_seeds, sidefiles
from tests.fuzz.contract import Target

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("gguf", containers.gguf, seeds.gguf),
        Target(
            "safetensors", containers.safetensors, seeds.safetensors, containers.mend_safetensors
        ),
        Target("apr", containers.apr, seeds.apr, containers.mend_apr),
        Target("pytorch", containers.pytorch, seeds.pytorch),
        Target("index", containers.index, seeds.index),
        Target("config", parsers.config, seeds.config),
        Target("tokenizer", parsers.tokenizer, seeds.tokenizer),
        Target("vocabulary", parsers.vocabulary, seeds.vocabulary, aside=True),
        Target("imatrix", parsers.imatrix, seeds.imatrix),
        Target("trace", parsers.trace, seeds.trace, containers.mend_safetensors),
        Target("npz", parsers.npz, seeds.npz, parsers.mend_npz),
        Target("aprt", parsers.aprt, seeds.aprt, aside=True),
        Target("model", parsers.model, seeds.model, aside=True),
        Target("journal", parsers.journal, seeds.journal, aside=True),
        Target("patch", parsers.patch, seeds.patch, aside=True),
        Target("resume", parsers.resume, seeds.resume, aside=True),
        Target("packed", sidefiles.packed, side_seeds.packed, containers.mend_safetensors),
        Target("eval_text", sidefiles.eval_text, side_seeds.eval_text, aside=True),
        Target("bundle", sidefiles.bundle, side_seeds.bundle, containers.mend_safetensors),
        Target("validation", sidefiles.validation, side_seeds.validation, aside=True),
        Target("companions", sidefiles.companions, side_seeds.companions, aside=True),
        Target("carried", sidefiles.carried, side_seeds.carried, aside=True),
        Target("manifest", sidefiles.manifest, side_seeds.manifest, aside=True),
        Target("golden", sidefiles.golden, side_seeds.golden, aside=True),
        Target("baseline", sidefiles.baseline, side_seeds.baseline, aside=True),
        Target("calibration", sidefiles.calibration, side_seeds.calibration, aside=True),
        Target("stages", sidefiles.stages, side_seeds.stages, aside=True),
        Target("npy", sidefiles.npy, side_seeds.npy, aside=True),
    )
}


def find(name: str) -> Target:
    """Return a target by name, or by `module:attribute`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        return TARGETS[name]
    found: Target = getattr(import_module(module), attribute)
    return found
