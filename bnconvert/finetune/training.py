"""The training loop."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bnconvert import capturing
from bnconvert.errors import BnconvertError, CheckpointError, first_line
from bnconvert.finetune.batches import Micro, Plan, mix
from bnconvert.finetune.data import Data, seed_everything
from bnconvert.finetune.evaluation import Scores, evaluate
from bnconvert.finetune.network import has_own_statistics, memory_format
from bnconvert.finetune.processes import lost_connection
from bnconvert.finetune.state import Progress, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from bnconvert.finetune.console import Console
    from bnconvert.finetune.processes import Processes
    from bnconvert.finetune.settings import Settings


class StoppedError(BnconvertError):
    """The run was asked to stop, and saved its state."""


@dataclass
class Trainer:
    """Everything that changes while a model is trained.

    Attributes:
        settings: What to do.
        model: The model itself.
        wrapped: The model as it is called in training.
        data: Images.
        plan: Which images make which batch.
        processes: This process among the others.
        folder: Where state and metrics go.
        console: Where progress is shown.
        facts: What must be the same when the run is resumed.
    """

    settings: Settings
    model: nn.Module
    wrapped: nn.Module
    data: Data
    plan: Plan
    processes: Processes
    folder: RunFolder
    console: Console
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        from timm.loss import LabelSmoothingCrossEntropy
        from timm.optim import create_optimizer_v2
        from timm.scheduler import create_scheduler_v2

        settings = self.settings
        with _named("--opt", settings.opt):
            self.optimizer: torch.optim.Optimizer = create_optimizer_v2(
                self.model,
                opt=settings.opt,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
            )
        with _named("--sched", settings.sched):
            self.schedule, _ = create_scheduler_v2(
                self.optimizer,
                sched=settings.sched,
                num_epochs=settings.epochs,
                warmup_epochs=settings.warmup_epochs,
                min_lr=settings.min_lr,
                updates_per_epoch=self.plan.updates,
                step_on_epochs=False,
            )
        smooth = settings.smoothing > 0
        self.criterion: nn.Module = (
            LabelSmoothingCrossEntropy(settings.smoothing) if smooth else nn.CrossEntropyLoss()
        )
        self.ema = _ema(self.model, settings)
        self.autocast = _autocast_dtype(settings, self.processes.device)
        self.scaler = torch.amp.GradScaler(
            self.processes.device.type, enabled=self.autocast is torch.float16
        )
        self.progress = Progress()
        self._pending: list[tuple[int, float, int, Tensor]] = []

    @property
    def result(self) -> nn.Module:
        """The model that is evaluated and saved."""
        module: nn.Module = self.model if self.ema is None else self.ema.module
        return module

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            self.progress = Progress(**state["progress"])
        except Exception as error:  # each of them raises others where the state is none of its own
            raise CheckpointError(
                f"--resume: the saved state does not fit the model ({first_line(error)}); start "
                "anew with --force"
            ) from error
        self._schedule()

    def save(self) -> None:
        """Save the state; all processes must call this."""
        self._flush()
        if not self.processes.is_first:
            return
        progress = self.progress
        self.folder.save(
            {
                "settings": self.settings.to_dict(),
                "facts": self.facts,
                "progress": {
                    "epoch": progress.epoch,
                    "update": progress.update,
                    "updates": progress.updates,
                    "epochs": progress.epochs,
                    "seconds": progress.seconds,
                },
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "ema": None if self.ema is None else self.ema.module.state_dict(),
            }
        )

    def train(self) -> None:
        """Train to the end of the last epoch.

        Raises:
            StoppedError: A signal asked for it; the state is saved.
            BnconvertError: The loss is not finite.
        """
        self._schedule()
        while self.progress.epoch < self.settings.epochs:
            self._epoch()

    def _epoch(self) -> None:
        progress, began = self.progress, time.monotonic() - self.progress.seconds
        self.wrapped.train()
        with self.console.epoch(progress.epoch, self.plan.images) as bar:
            for micros, batches in self._updates():
                self._update(micros, batches)
                progress.update += 1
                progress.seconds = time.monotonic() - began
                bar.advance(sum(len(m.keys) for m in micros) * self.processes.size)
                self._save_if_due()
        seconds = progress.seconds
        self._flush()
        if has_own_statistics(self.model):
            self.processes.broadcast_state(self.result)
        scores = evaluate(self.result, self.data, self.processes, self.settings)
        self._finish_epoch(scores, seconds)

    def _updates(self) -> Iterator[tuple[tuple[Micro, ...], Iterator[Any]]]:
        """Yield the parts of each update that is left of this epoch, with their batches."""
        updates = list(self.plan.epoch(self.progress.epoch, self.progress.update))
        keys = [micro.keys for micros in updates for micro in micros]
        batches = iter(self.data.loader(self.data.train, keys))
        for micros in updates:
            yield micros, batches

    def _update(self, micros: tuple[Micro, ...], batches: Iterator[Any]) -> None:
        total = torch.zeros((), dtype=torch.float64, device=self.processes.device)
        for place, micro in enumerate(micros):
            images, labels = next(batches)
            where = (self.progress.epoch, self.progress.update, place, self.processes.rank)
            seed_everything(mix(self.settings.seed, *where, 1))
            with self._without_sync(last=place == len(micros) - 1):
                loss = self._backward(images, labels, micro.weight)
            total += loss.detach().double()
        self._step()
        images_seen = sum(len(m.keys) for m in micros)
        lr = self.optimizer.param_groups[0]["lr"]
        self._pending.append((self.progress.update, lr, images_seen, total))
        self._schedule(1)

    def _without_sync(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    def _backward(self, images: Tensor, labels: Tensor, weight: float) -> Tensor:
        device = self.processes.device
        images = images.to(device, non_blocking=True, memory_format=memory_format(self.settings))
        labels = labels.to(device, non_blocking=True)
        with _explained(lambda error: _failed_forward(error, images)):
            with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                loss: Tensor = self.criterion(self.wrapped(images), labels) * weight
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss

    def _step(self) -> None:
        if self.settings.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad)
        with _explained(self._failed_step):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema is not None:
            done = self.progress.epoch * self.plan.updates + self.progress.update
            self.ema.update(self.model, step=done)

    def _failed_step(self, error: Exception) -> str:
        return (
            f"--opt: {self.settings.opt} does not step ({type(error).__name__}: "
            f"{first_line(error)}); give another optimizer"
        )

    def _schedule(self, ahead: int = 0) -> None:
        """Set the learning rate of the next update."""
        if self.schedule is not None:
            done = self.progress.epoch * self.plan.updates + self.progress.update + ahead
            self.schedule.step_update(done)

    def _save_if_due(self) -> None:
        every = self.settings.save_every
        if self.processes.any_stops():
            self.save()
            raise StoppedError(
                f"stopped in epoch {self.progress.epoch + 1} after update {self.progress.update}; "
                "go on with --resume"
            )
        if every is not None and self.progress.update % every == 0:
            self.save()

    def _flush(self) -> None:
        """Turn the losses on the devices into numbers of all processes."""
        if not self._pending:
            return
        epoch, size = self.progress.epoch, self.processes.size
        device = self.processes.device
        losses = torch.stack([loss for *_, loss in self._pending]) / size
        images = torch.tensor([count for _, _, count, _ in self._pending], device=device)
        sums = self.processes.sum(torch.cat([losses, images.double()])).tolist()
        count = len(self._pending)
        for place, (update, lr, _, _) in enumerate(self._pending):
            loss = sums[place]
            if not math.isfinite(loss):
                raise BnconvertError(
                    f"training: the loss of epoch {epoch + 1}, update {update + 1} is {loss}; use "
                    "a smaller --lr or --clip-grad"
                )
            self.progress.updates.append([epoch, update, lr, loss, int(sums[count + place])])
        self._pending = []

    def _finish_epoch(self, scores: Scores, seconds: float) -> None:
        progress = self.progress
        images = sum(row[4] for row in progress.updates)
        train_loss = sum(row[3] * row[4] for row in progress.updates) / images
        lr, rate = progress.updates[-1][2], images / max(seconds, 1e-9)
        epoch = progress.epoch + 1
        row = [epoch, lr, train_loss, scores.loss, scores.top1, round(rate, 1), round(seconds, 3)]
        progress.epochs.append(row)
        if self.processes.is_first:
            self.folder.add_updates(progress.updates, progress.epoch)
            self.folder.write_epochs(progress.epochs)
        self.progress = Progress(epoch, 0, [], progress.epochs)
        self.save()
        self.console.note(
            f"epoch {epoch}/{self.settings.epochs}: training loss {train_loss:.4f}, validation "
            f"loss {scores.loss:.4f}, top-1 {scores.top1:.2%}, {rate:.0f} images/s"
        )


@contextmanager
def _explained(text: Callable[[Exception], str]) -> Iterator[None]:
    """Turn what model and optimizer raise into one line; lost processes are told of elsewhere."""
    try:
        yield
    except BnconvertError:
        raise
    except torch.OutOfMemoryError as error:
        raise BnconvertError(
            f"training: the memory of the GPU does not suffice ({first_line(error)}); use a "
            "smaller --batch-size, with --accumulate"
        ) from error
    except Exception as error:
        if lost_connection(error):
            raise
        raise BnconvertError(text(error)) from error


def _failed_forward(error: Exception, images: Tensor) -> str:
    if "more than 1 value per channel" in str(error):
        return (
            "training: a BatchNorm layer gets one value per channel; use a larger --batch-size or "
            "--img-size, or --norm frozen"
        )
    return (
        f"training: the model does not run in training mode on a batch of shape "
        f"{tuple(images.shape)}{capturing.place(error)} ({type(error).__name__}: "
        f"{first_line(error)}); give another model, or other sizes"
    )


@contextmanager
def _named(option: str, value: str) -> Iterator[None]:
    """Turn what timm raises about an option into one line."""
    try:
        yield
    except Exception as error:
        raise BnconvertError(
            f"{option}: timm does not make {value!r} ({first_line(error)}); give another"
        ) from error


def _ema(model: nn.Module, settings: Settings) -> Any:
    if not settings.ema:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=settings.ema_decay, use_warmup=True)


def _autocast_dtype(settings: Settings, device: torch.device) -> torch.dtype | None:
    """Return the dtype of mixed precision: bfloat16 where the GPU has it, else float16."""
    if not settings.amp:
        return None
    if device.type != "cuda":
        raise BnconvertError("--amp: needs a GPU and there is none; leave it out")
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
