"""The batches on which a model's statistics are recalibrated, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.finetune.data import open_data
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.settings import Settings

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader


def open_loader(
    model: nn.Module,
    data: str,
    *,
    batch_size: int,
    num_batches: int | None = None,
    data_root: str | None = None,
    img_size: int | None = None,
    skip_bad_images: bool = False,
) -> tuple[DataLoader[Any], tuple[str, ...]]:
    """Return batches of the shuffled training images, prepared as for validation.

    Args:
        model: Tells how its images are prepared.
        data: Images by class, or the name of a timm dataset.
        batch_size: Images per batch.
        num_batches: Number of batches; None takes all images.
        data_root: Where a timm dataset lies.
        img_size: Height and width; None takes the model's own.
        skip_bad_images: Leave out images that cannot be read.

    Returns:
        The batches, and the files that were left out.

    Raises:
        BnconvertError: There is no such data, or images cannot be read.
    """
    settings = Settings(
        model="",
        data=data,
        output="",
        batch_size=batch_size,
        data_root=data_root,
        img_size=img_size,
        skip_bad_images=skip_bad_images,
    )
    alone = Processes.alone()
    opened = open_data(settings, model, alone)
    loader = opened.recalibration_loader(alone, batch_size, num_batches, settings.seed)
    return loader, opened.skipped
