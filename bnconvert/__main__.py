"""`python -m bnconvert`, the same as the `bnconvert` command."""

from __future__ import annotations

from bnconvert.cli.main import main

if __name__ == "__main__":
    main()
