"""What was run, what was compared as numbers only, and what no probe reached."""

from dataclasses import dataclass, field


@dataclass
class CoverageText:
    """Sentences for the report; those of `not_reached` end with how to reach it, where one can."""

    run: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, list[str]]:
        """Return plain data."""
        return {
            "run": list(dict.fromkeys(self.run)),
            "compared_not_run": list(dict.fromkeys(self.compared)),
            "not_reached": list(dict.fromkeys(self.not_reached)),
        }
