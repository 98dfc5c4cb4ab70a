"""Reading, converting and writing files of weights.

Start at `reading.load_checkpoint` and `formats.FORMATS`. Nothing in a file is ever run.
"""

from __future__ import annotations

from bnconvert.checkpoint.conversion import convert_checkpoint
from bnconvert.checkpoint.matching import match_checkpoint
from bnconvert.checkpoint.reading import load_checkpoint
from bnconvert.checkpoint.record import Checkpoint, Fact
from bnconvert.checkpoint.saving import save_checkpoint
from bnconvert.checkpoint.writing import atomic_file, atomic_folder

__all__ = [
    "Checkpoint",
    "Fact",
    "atomic_file",
    "atomic_folder",
    "convert_checkpoint",
    "load_checkpoint",
    "match_checkpoint",
    "save_checkpoint",
]
