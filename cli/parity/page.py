"""The HTML page of `aprfmt parity --html`: every run against the first, point by point."""

import shlex
from collections.abc import Mapping

from aprfmt.base.protocols import Value
from aprfmt.cli import html_page
from aprfmt.cli.trace.page import heat_maps


def render_page(body: Mapping[str, Value]) -> str:
    """Return the HTML page of a comparison; `body` is what `parity --json` prints."""
    tokens, encodings = body["tokens"], body["weights"]["encodings"]
    facts = {
        "model": body["model"], "architecture": body["architecture"], "format": body["format"],
        "weights": ", ".join(f"{count} {name}" for name, count in encodings.items()),
        "runs": ", ".join(run["requested"] for run in body["runs"]), "text": tokens["text"],
        "tokens": html_page.ids_text(tokens["ids"]), "calibrated with": body["calibrated"],
    }  # fmt: skip
    data = {
        "found": body,
        "heats": [_heat_maps(pair) for pair in body["pairs"]],
        "command": _reproduction_command(body),
    }
    return html_page.render_html("Parity of runs", facts, data, (*html_page.REPORT, "parity.js"))


def _reproduction_command(body: Mapping[str, Value]) -> str | None:
    """Return the command that replays the bundle, or that writes one; None if there is no bug.

    `body` is the JSON of `parity`.
    """
    if body["verdict"] != "bug":
        return None
    if body["bundle"]:
        return shlex.join(["aprfmt", "parity", "--replay", body["bundle"]["path"]])
    pair = next(pair for pair in body["pairs"] if pair["verdict"] == "bug")
    runs = [body["runs"][pair[side]]["requested"] for side in ("a", "b")]
    ids = ",".join(map(str, body["tokens"]["ids"]))
    words = ["parity", body["model"], "--ids", ids, "--between", *runs, "--bundle", "bug.npz"]
    return shlex.join(["aprfmt", *words])


def _heat_maps(pair: Mapping[str, Value]) -> dict[str, object]:
    """Return {"heats", "positions"}: two runs' distances at each point, by position and layer."""
    rows = {row["key"]: row["by_position"] for row in pair["points"] if row.get("by_position")}
    bounds = {row["key"]: (row["tolerance"], row["beyond"]) for row in pair["points"]}
    maps, positions = heat_maps(
        rows, {key: range(len(found)) for key, found in rows.items()}, bounds
    )
    return {"heats": maps, "positions": positions}
