"""Which capture points `aprfmt trace` shows, chosen by name and layer."""

import re
from collections.abc import Mapping
from dataclasses import replace

from aprfmt.cli import run_options
from aprfmt.errors import UsageError
from aprfmt.inference import capture
from aprfmt.inference.trace import Trace
from aprfmt.model import open_model
from aprfmt.model.completeness import check_runnable
from aprfmt.model.draft import draft_head


def parse_layers(text: str | None, count: int) -> set[int]:
    """Return the layer numbers of `0,3-5`, all `count` layers for None.

    Raises UsageError for layers that the model does not have.
    """
    if text is None:
        return set(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            raise UsageError(f"--layers {text!r}: {part!r} is no layer; expected for example 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise UsageError(f"--layers {text!r}: the model has layers 0 to {count - 1}")
        chosen |= set(range(first, last + 1))
    return chosen


def select_records(trace: Trace, points: str | None, layers: str | None) -> Trace:
    """Return the trace with only the records of these points and layers; UsageError for none.

    None selects all.
    """
    if points is None and layers is None:
        return trace
    named = {key: record.point for key, record in trace.records.items()}
    keys = named if points is None else capture.select_keys(points.split(","), named)
    layered = parse_layers(
        layers, 1 + max((record.layer for record in trace.records.values()), default=0)
    )
    records = {
        key: trace.records[key]
        for key in keys
        if trace.records[key].layer in layered | {capture.WHOLE}
    }
    if not records:
        raise UsageError("--points, --layers: the trace holds none of these")
    aliases = {key: target for key, target in trace.aliases.items() if target in records}
    return replace(trace, records=records, aliases=aliases)


def keys_to_record(
    known: Mapping[str, capture.PointInstance], points: str | None, layers: str | None, aprt: bool
) -> list[str]:
    """Return the keys of the capture points to record, in execution order.

    `known` is {key: point} of the model. Without `points` they are those of apr's slots, of the
    model's ends, and of a draft head. `aprt` adds the points of the APRT format's stages. `layers`
    is a list such as `0,3-5`, None for all.
    """
    named = {key: item.point.name for key, item in known.items()}
    asked: set[str] = set()
    if points is not None:
        names: set[str] = set()
        asked.update(capture.select_keys(points.split(","), named))
    else:
        names = {name for parts in capture.SLOTS.values() for name in parts}
        names |= {"embd", "final_norm", "pooled", "logits"}
        names |= {
            item.point.name
            for item in known.values()
            if item.point.name.startswith("draft_") and not item.absent
        }
    if aprt:
        names |= {name for parts in capture.STAGES.values() for name in parts}
    count = 1 + max((item.layer for item in known.values()), default=0)
    chosen = parse_layers(layers, count)
    return [
        key
        for key, item in known.items()
        if (key in asked or item.point.name in names)
        and (item.layer == capture.WHOLE or item.layer in chosen)
    ]


def plan_points(
    text: str,
    points: str | None,
    layers: str | None,
    where: run_options.WhereOptions,
    draft: bool = False,
) -> dict[str, object]:
    """Return the JSON of a model's capture points, without running it.

    There are no statistics in it. `draft` takes the model's draft head. `points` and `layers`
    select by name and number, None for all. `text` is MODEL[@RUN], `where` has the options of the
    run.
    """
    path = where.request(text).model  # a run that is not known is refused here too
    with open_model(path, arch=where.arch, allow_missing=where.allow_missing) as opened:
        check_runnable(opened.resolution, opened.path)
        head = draft_head(opened) if draft else opened
        known = capture.point_instances(head.spec.block, head.hyper, head.roles)
        keys = set(keys_to_record(known, points or "all", layers, False))
        rows = [
            {
                "key": key,
                "point": item.point.name,
                "layer": None if item.layer < 0 else item.layer,
                "alias_of": item.alias_of or None,
                "absent": item.absent,
                "shape": item.point.shape,
                "says": item.point.sentence,
                "llama_cpp": ", ".join(map(str, item.point.llama_cpp)),
                "apr": item.point.apr,
                "hf": ", ".join(map(str, item.point.hf)),
            }
            for key, item in known.items()
            if key in keys
        ]
        return {
            "model": str(opened.path),
            "architecture": opened.spec.name,
            "stats_source": "metadata-only",
            "points": rows,
        }
