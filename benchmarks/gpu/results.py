"""What was measured so far, kept on disk after every step so that a stopped run loses nothing."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class Results:
    """Facts, checks and rows of numbers, by section.

    Attributes:
        path: The JSON file.
        data: What is in it.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.data: dict[str, Any] = {"facts": {}, "checks": [], "rows": {}, "skipped": []}
        self._deadline = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the run is to end."""
        return self._deadline - time.monotonic()

    def fact(self, name: str, value: Any) -> None:
        """Keep a property of the machine or a single number."""
        self.data["facts"][name] = value
        self._note(f"{name}: {value}")

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Keep whether something is as it must be."""
        self.data["checks"].append({"name": name, "passed": passed, "detail": detail})
        self._note(f"{'ok' if passed else 'FAILED'}: {name} {detail}".rstrip())

    def row(self, section: str, **values: Any) -> None:
        """Keep one line of a table."""
        self.data["rows"].setdefault(section, []).append(values)
        self._note(f"{section}: {values}")

    def skip(self, name: str, reason: str) -> None:
        """Keep why something was not run."""
        self.data["skipped"].append({"name": name, "reason": reason})
        self._note(f"skipped: {name} ({reason})")

    @property
    def failed(self) -> list[str]:
        """The names of the checks that did not pass."""
        return [check["name"] for check in self.data["checks"] if not check["passed"]]

    def _note(self, line: str) -> None:
        print(line, flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")
        scratch.replace(self.path)
