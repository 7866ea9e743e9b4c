"""Which record of the product each object of the JSON schemas is: the rows of `generate`."""

from collections.abc import Mapping
from typing import Literal

from aprfmt.base.outcome import Outcome
from aprfmt.cli.eval.output import KlFacts
from aprfmt.cli.run_options import RunLocation
from aprfmt.measure.findings import Finding, PairCause
from aprfmt.measure.verdicts import Certainty
from tests.schemas.generate import Record

_PARITY = "inference.parity.parity_records"
RECORDS: tuple[Record, ...] = (
    Record("attest", "properties/tensors/items", "attestation.rederive:TensorAttestation"),
    Record("common", "$defs/check", "base.outcome:Check"),
    Record(
        "common",
        "$defs/report",
        "base.outcome:Report",
        {"outcome": Outcome, "counts": Mapping[str, int]},
    ),
    Record("common", "$defs/not_compared", "model.ledger:NotCompared"),
    Record("common", "$defs/pronounced", "model.verdict:Pronounced"),
    Record("common", "$defs/note", "base.protocols:Note"),
    Record("common", "$defs/stats", "tensors.stats:Stats", {"std_divisor": Literal["n"]}),
    Record("common", "$defs/run", "cli.run_options:RunLocation"),
    Record("common", "$defs/top", "cli.run_options:TopToken"),
    Record("common", "$defs/difference", "measure.records:FieldDiff"),
    Record("common", "$defs/account/properties/entries/items", "conversion.accounting:SourceItem"),
    Record(
        "common", "$defs/conversion/properties/tensors/items", "conversion.report:TensorOutcome"
    ),
    Record("common", "$defs/damage/items", "base.protocols:Damage"),
    Record("common", "$defs/nonfinite/anyOf/0", "measure.nonfinite:NonFinite"),
    Record("common", "$defs/device_memory", "inference.memory_estimate:DeviceMemory"),
    Record("common", "$defs/dry_run/properties/runs/items", "inference.memory_estimate:Estimate"),
    Record("diagnose", "properties/evidence/items", "diagnosis.records:Evidence"),
    Record("diagnose", "properties/causes/items", "measure.named_causes:NamedCause"),
    Record(
        "diagnose",
        "properties/findings/items",
        "measure.findings:Finding",
        {
            "confidence": Literal["confirmed", "ambiguous", "unconfirmed"],
            "certainty": Certainty,
            "means": str,
            "reached": Certainty | None,
            "share": float | None,
        },
        ("proof", "evidence", "leaves_side_open"),
    ),
    Record("diagnose", "properties/points/items", "diagnosis.records:PointRow"),
    Record(
        "diff", "properties/sample/properties/differing/items", "measure.sampling:DifferingRange"
    ),
    Record("diff", "properties/sample/properties/unlike/items", "measure.sampling:Unsampled"),
    Record("diff", "properties/sample/properties/unsampled/items", "measure.sampling:Unsampled"),
    Record("diff", "properties/causes/items", "measure.named_causes:NamedCause"),
    Record(
        "diff",
        "properties/findings/items",
        "measure.findings:Finding",
        {"text": str, "certainty": Certainty, "share": float | None},
        without=tuple(
            name
            for name in Finding.__dataclass_fields__
            if name not in ("cause", "keys", "confirmed", "detail")
        ),
    ),
    Record(
        "diff",
        "properties/tensors/items",
        "measure.records:TensorDiff",
        {"explanation": PairCause | None},
    ),
    Record("diff", "properties/generation/items", "measure.texts:KeyDiff"),
    Record("diff", "properties/beside", "measure.texts:SideVerdicts"),
    Record(
        "diff",
        "properties/adapter",
        "adapters.merge_answers:AdapterAnswer",
        {"merged": bool},
        ("same", "left"),
    ),
    Record("doctor", "properties/devices", "cli.doctor:Devices"),
    Record("doctor", "properties/packages/items", "cli.doctor:Package"),
    Record("doctor", "properties/llama_cpp", "cli.doctor:LlamaCpp"),
    Record(
        "eval",
        "properties/against",
        "cli.eval.output:LossFacts",
        {"divergence": KlFacts | None, "run": RunLocation},
    ),
    Record("eval", "properties/bos", "cli.eval.windows:LeadingTokens"),
    Record("eval", "properties/draft", "cli.eval.output:DraftAcceptance"),
    Record("eval", "properties/batch", "cli.eval.batch:BatchFacts"),
    Record("eval", "properties/reported", "cli.eval.batch:ReportedLoss"),
    Record(
        "eval", "properties/reported/properties/guesses/items", "inference.reported_loss:LossGuess"
    ),
    Record("hex", "properties/fields/items", "cli.hex:FieldRow"),
    Record("hex", "properties/blocks/items", "cli.hex:BlockRow"),
    Record(
        "inspect", "properties/encodings/additionalProperties", "cli.inspect.records:EncodingCount"
    ),
    Record(
        "inspect", "properties/hyperparameters/additionalProperties", "cli.inspect.records:HyperRow"
    ),
    Record("inspect", "properties/keys", "cli.inspect.records:KeysRead"),
    Record("inspect", "properties/roles", "cli.inspect.records:RolesFound"),
    Record("inspect", "properties/summary", "cli.inspect.records:InspectSummary"),
    Record("parity", "properties/runs/items", f"{_PARITY}:RunFacts"),
    Record("parity", "properties/pairs/items/properties/points/items", "measure.traces:PointDiff"),
    Record(
        "parity",
        "properties/pairs/items/properties/logits/anyOf/0",
        f"{_PARITY}:LogitsDiff",
        {"ce_difference": float | None},
    ),
    Record("parity", "properties/pairs/items/properties/experts/items", f"{_PARITY}:ExpertFlip"),
    Record(
        "parity", "properties/pairs/items/properties/losses", f"{_PARITY}:Losses", {"unit": str}
    ),
    Record("parity", "properties/noise/anyOf/0", f"{_PARITY}:RunDistance"),
    Record("parity", "properties/arbiter/items", f"{_PARITY}:RunDistance"),
    Record(
        "parity",
        "properties/calibration/properties/rows/items",
        "measure.tolerances:CalibratedBound",
    ),
    Record("parity", "$defs/operation", f"{_PARITY}:Operation"),
    Record("qa", "properties/gates/items", "checks.records:Answer", without=("findings",)),
    Record("repair", "properties/ranges/items", "recovery.byte_ranges:Range"),
    Record("run", "properties/sampling", "inference.sampling:Sampling"),
    Record("run", "properties/speed/properties/steps", "inference.generation:StepTimes"),
    Record(
        "scan", "properties/damage/items/properties/findings/items", "checks.records:CheckFinding"
    ),
    Record("set", "properties/changes/items", "conversion.edits:KeyChange"),
    Record("step", "properties/causes/items", "measure.named_causes:NamedCause"),
    Record(
        "step",
        "properties/between/properties/runs/items",
        "training.device_comparison:RunGradients",
    ),
    Record(
        "step",
        "properties/between/properties/gradients/items",
        "training.device_comparison:GradientDistances",
    ),
    Record("step", "properties/dry_run", "training.memory:StepMemory"),
    Record("step", "properties/norms", "training.report:Norms"),
    Record("step", "properties/points/items", "training.report:PointStep"),
    Record("step", "properties/tensors/items", "training.report:TensorStep"),
    Record("tensors", "properties/tensors/items", "cli.tensors:TensorRow"),
    Record(
        "template",
        "properties/conversations/items",
        "tokenizer.template_engines:EngineRendering",
        {"says": str},
    ),
    Record(
        "trace",
        "properties/records/items",
        "inference.record:Record",
        {"key": str, "layer": int | None, "count": int},
    ),
    Record(
        "trace",
        "properties/reference",
        "measure.traces:TraceDiff",
        {"against": str, "compared": int},
        ("left", "accept"),
    ),
    Record("trace", "properties/slots/items", "cli.trace.output:SlotRow"),
    Record("tree", "$defs/node", "cli.tree:TreeNode"),
    Record(
        "validate", "properties/second_reader/anyOf/0", "checks.file.second_reader:SecondReading"
    ),
    Record(
        "validate",
        "properties/second_reader/anyOf/0/properties/disagreements/items",
        "checks.file.second_reader:Disagreement",
    ),
    Record(
        "validate",
        "properties/second_reader/anyOf/0/properties/not_read/items",
        "checks.file.second_reader:NotRead",
    ),
    Record("validate", "properties/findings/items", "checks.records:CheckFinding", {"check": str}),
)
