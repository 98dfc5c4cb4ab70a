"""Loss and accuracy on the validation images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from bnconvert.errors import BnconvertError
from bnconvert.finetune.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from bnconvert.finetune.data import Data
    from bnconvert.finetune.settings import Settings


@dataclass(frozen=True)
class Scores:
    """What an evaluation found.

    Attributes:
        loss: Mean cross entropy.
        top1: Part of the images whose most probable class is right.
        images: Number of images.
    """

    loss: float
    top1: float
    images: int

    def to_dict(self) -> dict[str, float]:
        """Return the scores as plain types."""
        return {"loss": self.loss, "top1": self.top1, "images": self.images}


def evaluate(model: nn.Module, data: Data, processes: Processes, settings: Settings) -> Scores:
    """Evaluate a model in eval mode on all validation images, each counted once.

    The model is called as it is, without DistributedDataParallel, so processes may have different
    numbers of batches.
    """
    from bnconvert.finetune.network import memory_format

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    layout = memory_format(settings)
    try:
        with torch.no_grad():
            sums = score(
                lambda images: model(images.to(processes.device, memory_format=layout)),
                data.validation_loader(processes, settings.batch_size),
            )
    finally:
        for module, training in modes:
            module.training = training
    return _scores(processes.sum(sums.to(processes.device)))


def score(call: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Any]]) -> Tensor:
    """Return the sums of loss, right answers and images, in float64."""
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in batches:
        outputs = call(images).float()
        labels = labels.to(outputs.device)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        right = (outputs.argmax(1) == labels).sum()
        sums += torch.stack(
            [loss.double(), right.double(), right.new_tensor(len(labels)).double()]
        ).cpu()
    return sums


def _scores(sums: Tensor) -> Scores:
    loss, right, images = sums.tolist()
    if not images:
        raise BnconvertError("data: has no validation image; give some")
    return Scores(loss / images, right / images, int(images))


def evaluate_onnx(path: str, data: Data, batch_size: int) -> Scores:
    """Evaluate an ONNX file with onnxruntime on all validation images.

    Args:
        path: The file; its one input is a batch of images.
        data: Holds the images.
        batch_size: Images per call.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def call(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    return _scores(score(call, data.validation_loader(Processes.alone(), batch_size)))
