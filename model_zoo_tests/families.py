"""The smallest model of each timm family that has BatchNorm, as `make zoo` found them."""

from __future__ import annotations

import re
from pathlib import Path

SUMMARY = Path(__file__).parent.parent / "docs" / "zoo-structure.md"


def smallest_models() -> list[str]:
    """Return one timm name per family, in the order of the families."""
    rows = re.findall(r"^\| \w+ \| \d+ \| (\w+) \|", SUMMARY.read_text("utf-8"), re.MULTILINE)
    return list(rows)
