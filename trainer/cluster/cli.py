"""Command line of `wmse launch`: its options, and the separation of site options from run settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.cluster.site import load_site, split_site_words
from trainer.errors import InputError


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. Site options and run settings are split off later."""
    parser.add_argument(
        "--config", type=Path, action="append", metavar="FILE", help="the experiment: YAML, or the name of a recipe"
    )
    parser.add_argument(
        "--cluster", choices=("slurm", "local"), required=True, help="submit to SLURM, or run on this machine"
    )
    parser.add_argument(
        "--nodes",
        default="1",
        metavar="N",
        help="number of nodes, or a range such as 4-8 (default 1)",
    )
    parser.add_argument(
        "--ranks_per_node", type=int, default=1, metavar="R", help="ranks on each node, one per GPU (default 1)"
    )
    parser.add_argument(
        "--site", type=Path, metavar="FILE", help="YAML file with the options of the cluster; see slurm/cluster.yaml"
    )
    parser.add_argument(
        "--array", default="", metavar="KEY=V1,V2", help="start one run for each value, as seed=0,1 or config=A,B"
    )
    parser.add_argument(
        "--with_evaluator",
        action="store_true",
        help="also evaluate the checkpoints, in a separate job (local: after the training)",
    )
    parser.add_argument("--data_on_nodes", action="store_true", help="data.root exists on the compute nodes only")
    parser.add_argument("--dry_run", action="store_true", help="check, print the batch script and stop")


def run_launch(own: argparse.Namespace, rest: Sequence[str]) -> int:
    """Launch the runs. Returns the exit code.

    own: the parsed options of the command. rest: the other words, which are site options or run settings."""
    site_words, settings = split_site_words(rest)
    # Site options would have no effect here, and the user may expect one.
    if own.cluster == "local" and (own.site or site_words):
        option = site_words[0] if site_words else "--site"
        raise InputError(f"{option} is for --cluster slurm: a run on this machine needs no site options, remove it")
    if own.config is None and not own.array.startswith("config="):
        raise InputError("--config is missing: give the experiment's YAML file")
    # Import these late, so that a mistake in the options is reported at once.
    from trainer.cluster.launch import launch
    from trainer.cluster.launch_checks import Request

    request = Request(
        config=own.config or [],
        settings=settings,
        array=own.array,
        nodes=own.nodes,
        ranks_per_node=own.ranks_per_node,
        site=load_site(own.site, site_words),
        with_evaluator=own.with_evaluator,
        data_on_nodes=own.data_on_nodes,
    )
    return launch(request, own.cluster, dry_run=own.dry_run)
