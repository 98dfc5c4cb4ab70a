"""The options of `bnconvert finetune`, which `python -m bnconvert.finetune` takes too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bnconvert.finetune.settings import NORMS, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULTS = Settings(model="", data="", output="")

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--data", {"metavar": "DIR", "required": True, "help": "Images by class (DIR/train/CLASS/*, "
     "DIR/val/CLASS/*, or DIR/CLASS/*), or a timm dataset name such as torch/cifar10."}),
    ("--output -o", {"metavar": "DIR", "required": True, "help": "Folder of the run; at its end a "
     "model folder that timm loads."}),
    ("--checkpoint", {"metavar": "FILE", "help": "Load these weights into the model first."}),
    ("--data-root", {"metavar": "DIR", "help": "Where a timm dataset lies."}),
    ("--val-fraction", {"type": float, "help": "Part of each class held out when there is no "
     "validation folder."}),
    ("--norm", {"type": click.Choice(NORMS), "help": "BatchNorm while training: statistics over "
     "all processes, over each, or frozen."}),
    ("--freeze", {"multiple": True, "metavar": "PATTERN", "help": "Freeze the BatchNorm layers "
     "whose names match, such as 'layer1.*'; may be repeated."}),
    ("--epochs", {"type": int, "help": "Passes over the data."}),
    ("--batch-size", {"type": int, "help": "Images per process and step."}),
    ("--accumulate", {"type": int, "help": "Steps whose gradients make one update."}),
    ("--opt", {"help": "timm optimizer."}),
    ("--lr", {"type": float, "help": "Learning rate."}),
    ("--momentum", {"type": float, "help": "Momentum of the optimizer."}),
    ("--weight-decay", {"type": float, "help": "Weight decay, not on biases and norms."}),
    ("--clip-grad", {"type": float, "help": "Largest norm of the gradient."}),
    ("--sched", {"help": "timm schedule of the learning rate."}),
    ("--warmup-epochs", {"type": int, "help": "Epochs in which the learning rate rises."}),
    ("--min-lr", {"type": float, "help": "Learning rate at the end."}),
    ("--smoothing", {"type": float, "help": "Label smoothing."}),
    ("--no-aug", {"is_flag": True, "help": "No random changes of training images."}),
    ("--scale", {"type": float, "nargs": 2, "help": "Least and greatest area of random crops."}),
    ("--hflip", {"type": float, "help": "Probability of a horizontal flip."}),
    ("--color-jitter", {"type": float, "help": "Strength of colour jitter."}),
    ("--aa", {"help": "AutoAugment policy, such as rand-m9-mstd0.5."}),
    ("--reprob", {"type": float, "help": "Probability of erasing a rectangle."}),
    ("--img-size", {"type": int, "help": "Height and width of the images. [default: the model's]"}),
    ("--num-classes", {"type": int, "help": "Number of outputs. [default: the data's]"}),
    ("--ema", {"is_flag": True, "help": "Average the weights over the updates; save the average."}),
    ("--ema-decay", {"type": float, "help": "Decay of the average."}),
    ("--amp", {"is_flag": True, "help": "Mixed precision; needs a GPU."}),
    ("--channels-last", {"is_flag": True, "help": "Use the channels-last memory format."}),
    ("--workers", {"type": int, "help": "Image loading processes per process. [default: by CPUs]"}),
    ("--seed", {"type": int, "help": "Seed of everything random."}),
    ("--skip-bad-images", {"is_flag": True, "help": "Leave out images that cannot be read."}),
    ("--recalibrate", {"type": int, "metavar": "BATCHES", "help": "Recalibrate the statistics on "
     "this many batches per process at the end."}),
    ("--save-every", {"type": int, "metavar": "UPDATES", "help": "Save a checkpoint this often "
     "within an epoch too."}),
    ("--export", {"metavar": "FILE", "help": "Write a verified ONNX file at the end."}),
    ("--plot", {"metavar": "FILE", "help": "Write loss and accuracy curves as .svg or .png."}),
    ("--resume", {"is_flag": True, "help": "Go on with the run in the output folder."}),
    ("--force", {"is_flag": True, "help": "Start anew in an output folder that holds a run."}),
)  # fmt: skip


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument MODEL and all options to a click command, which gets them as keywords."""
    for names, declaration in reversed(_OPTIONS):
        names_list = names.split()
        key = names_list[0].removeprefix("--").replace("-", "_")
        default = getattr(_DEFAULTS, key)
        shown = not (default is None or default is False or default == ())
        if "required" not in declaration and shown:
            declaration = {"default": default, "show_default": True, **declaration}
        command = click.option(*names_list, **declaration)(command)
    return click.argument("model")(command)


def to_arguments(settings: Settings) -> list[str]:
    """Return the command line that gives these settings."""
    arguments = [settings.model]
    for names, declaration in _OPTIONS:
        name = names.split()[0]
        value = getattr(settings, name.removeprefix("--").replace("-", "_"))
        if declaration.get("is_flag"):
            arguments += [name] if value else []
        elif declaration.get("multiple"):
            arguments += [part for item in value for part in (name, str(item))]
        elif declaration.get("nargs"):
            arguments += [name, *map(str, value)]
        elif value is not None:
            arguments += [name, str(value)]
    return arguments
