"""`bnconvert inspect`: the BatchNorm layers of a model and what is suspicious about them."""

from __future__ import annotations

import click

from bnconvert.cli.output import json_option, model_argument, show


@click.command("inspect")
@model_argument
@json_option
def command(model: str, checkpoint: str | None, as_json: bool) -> None:
    """List every BatchNorm layer of MODEL, with findings."""
    from bnconvert import inspect_batchnorm, load_model

    show(inspect_batchnorm(load_model(model, checkpoint)), as_json)
