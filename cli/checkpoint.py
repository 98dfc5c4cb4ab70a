"""`bnconvert checkpoint`: what a file of weights holds, and converting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bnconvert.cli.output import UsageError, exit_if_left, json_option, note, show, strict_option
from bnconvert.cli.progress import steps

if TYPE_CHECKING:
    from bnconvert.checkpoint.conversion import ConversionPlan, Settings
    from bnconvert.checkpoint.record import Checkpoint

KINDS = ("safetensors", "torch", "sharded", "folder")
_NEEDS_OUTPUT = ("to", "dtype", "cast_norm", "eps", "abn", "model", "max_shard_size", "dry_run",
                 "force", "no_verify", "no_hash", "strict")  # fmt: skip


@click.command("checkpoint")
@click.argument("src")
@click.option("-o", "--output", metavar="DST", help="Convert SRC to this file or new folder.")
@click.option(
    "--to", type=click.Choice(KINDS), help="What DST is. [default: by its suffix; none: sharded]"
)
@click.option("--ema", "weights", flag_value="ema", help="Averaged weights; an error if none.")
@click.option("--raw", "weights", flag_value="raw", help="Trained weights, not their average.")
@click.option(
    "--prefix",
    default="auto",
    metavar="P",
    help="Remove P where names begin with it; '' keeps all. [default: remove wrappers' names]",
)
@click.option("--model", metavar="MODEL", help="Give tensors the names of this model, and check.")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="Cast floating tensors.")
@click.option("--cast-norm", is_flag=True, help="Cast BatchNorm too; it is kept in fp32 else.")
@click.option(
    "--eps",
    type=click.Choice(["from-file", "from-model"]),
    help="Which eps counts where SRC and --model differ.",
)
@click.option("--abn", is_flag=True, help="Store |weight| + eps, for InPlaceABN layers.")
@click.option("--max-shard-size", type=click.IntRange(1), metavar="BYTES", help="Size of shards.")
@click.option(
    "--allow-global",
    multiple=True,
    metavar="NAME",
    help="Admit a class that SRC mentions, as an inert stand-in.",
)
@click.option("--force", is_flag=True, help="Replace an existing output file.")
@click.option("--dry-run", is_flag=True, help="Show what would be done; write nothing.")
@click.option("--no-verify", is_flag=True, help="Do not read the result back.")
@click.option("--no-hash", is_flag=True, help="Do not keep the SHA-256 of SRC in the result.")
@strict_option
@json_option
def command(src: str, weights: str | None, allow_global: tuple[str, ...], **given: Any) -> None:
    """Show what the file, folder or index SRC holds, or convert it with -o.

    Nothing in SRC is ever run. Every change to a BatchNorm layer is in the table.
    """
    from bnconvert.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(
        src, weights=weights or "auto", prefix=given["prefix"], allow_globals=allow_global
    )
    if given["output"] is None:
        _refuse_unused(given)
        show(checkpoint, given["as_json"])
        return
    plan = _plan(checkpoint, given)
    if given["dry_run"]:
        note(f"dry run: {given['output']} was not written")
    else:
        _write(plan, given)
    show(plan, given["as_json"])
    exit_if_left(plan.report, given["strict"])


def _refuse_unused(given: dict[str, Any]) -> None:
    unused = [f"--{name.replace('_', '-')}" for name in _NEEDS_OUTPUT if given[name]]
    if unused:
        raise UsageError(f"{', '.join(unused)}: needs an output; name one with -o DST")


def _plan(checkpoint: Checkpoint, given: dict[str, Any]) -> ConversionPlan:
    from bnconvert import load_model
    from bnconvert.checkpoint.conversion import check_destination, plan_conversion

    check_destination(
        checkpoint, Path(given["output"]), given["to"], given["max_shard_size"], given["force"]
    )
    model = load_model(given["model"]) if given["model"] else None
    return plan_conversion(checkpoint, _settings(given), model)


def _settings(given: dict[str, Any]) -> Settings:
    from bnconvert.checkpoint.casting import parse_dtype
    from bnconvert.checkpoint.conversion import Settings

    return Settings(parse_dtype(given["dtype"]), given["cast_norm"], given["eps"], given["abn"])


def _write(plan: ConversionPlan, given: dict[str, Any]) -> None:
    from bnconvert.checkpoint.conversion import write_plan

    total = sum(tensor.nbytes for tensor in plan.weights.tensors.values())
    done = 0
    with steps("writing") as progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        write_plan(
            plan,
            Path(given["output"]),
            to=given["to"],
            max_shard_size=given["max_shard_size"],
            overwrite=given["force"],
            verify=not given["no_verify"],
            hash_source=not given["no_hash"],
            progress=advance,
        )
