"""Writes `docs/gpu.md` from what was measured, and nothing else."""

from __future__ import annotations

from typing import Any


def render(data: dict[str, Any]) -> str:
    """Return the page.

    Args:
        data: As in `results.Results`, from a run on a GPU.
    """
    facts = data["facts"]
    lines = [
        "# Measured on a GPU",
        "",
        (
            f"Written by `python -m benchmarks.gpu` from one run on {facts['device']}, "
            f"{facts['date']}. Bandwidths count every input byte read once and every output byte "
            "written once; shares are of a device copy on the same GPU."
        ),
        "",
        *table([{"fact": name, "value": value} for name, value in facts.items()]),
        "",
        "## Checks",
        "",
        *table(
            [
                {
                    "check": check["name"],
                    "": "yes" if check["passed"] else "**no**",
                    "measured": check["detail"],
                }
                for check in data["checks"]
            ]
        ),
    ]
    for section, rows in data["rows"].items():
        lines += ["", f"## {section[0].upper()}{section[1:]}", "", *table(rows)]
    if data["skipped"]:
        lines += ["", "## Not run", "", *table(data["skipped"])]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as the lines of a Markdown table; the first one has the columns."""
    if not rows:
        return ["Nothing."]
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row[column]) for column in columns] for row in rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
