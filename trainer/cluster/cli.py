"""`wmse launch` on the command line: its options, and how site options are separated from run settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.cluster.site import load_site, split_site_words
from trainer.errors import InputError


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options; site options and run settings are split off later."""
    parser.add_argument(
        "--config", type=Path, action="append", metavar="FILE", help="the experiment: YAML, or the name of a recipe"
    )
    parser.add_argument("--cluster", choices=("slurm", "local"), required=True, help="local: this machine")
    parser.add_argument("--nodes", default="1", metavar="N", help="nodes, or a range such as 4-8 (default 1)")
    parser.add_argument("--ranks_per_node", type=int, default=1, metavar="R", help="ranks, one per GPU (default 1)")
    parser.add_argument(
        "--site", type=Path, metavar="FILE", help="options of the cluster, YAML; see slurm/cluster.yaml"
    )
    parser.add_argument(
        "--array", default="", metavar="KEY=V1,V2", help="a run for each value, as seed=0,1 or config=A,B"
    )
    parser.add_argument(
        "--with_evaluator",
        action="store_true",
        help="also measure the checkpoints, by a job of its own (local: after the training)",
    )
    parser.add_argument("--data_on_nodes", action="store_true", help="data.root exists on the compute nodes only")
    parser.add_argument("--dry_run", action="store_true", help="check, print the batch script and stop")


def run_launch(own: argparse.Namespace, rest: Sequence[str]) -> int:
    """Launch what was asked for; rest: words that are options of the site or settings. Returns the exit code."""
    site_words, settings = split_site_words(rest)
    if own.cluster == "local" and (own.site or site_words):
        raise InputError(
            f"{(site_words or ['--site'])[0]} is for --cluster slurm: a local run takes this machine as it is"
        )
    if own.config is None and not own.array.startswith("config="):
        raise InputError("--config is missing: give the experiment's YAML file")
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
