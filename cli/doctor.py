"""`bnconvert doctor`: versions, devices, backends, and which kernels would be used and why."""

from __future__ import annotations

import click

from bnconvert.cli.output import json_option, show


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Print versions, devices, backends, NCCL, and which kernels would run and why."""
    from bnconvert.diagnosis import diagnose

    show(diagnose(), as_json)
