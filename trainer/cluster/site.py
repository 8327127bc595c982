"""Site options: what to request from a cluster.

A YAML file holds them (example: slurm/cluster.yaml), or the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.cluster.nodes import parse_minutes
from trainer.errors import InputError


@dataclass(frozen=True)
class Site:
    """Options of the SLURM job.

    An option with an empty value is not given to SLURM, so the default of the cluster applies."""

    partition: str = ""
    """Partition, or several as a,b."""
    account: str = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the nodes must have, such as h100."""
    time: str = "24:00:00"
    """Time limit of one start of the job: minutes, HH:MM:SS or days-HH:MM:SS. The job is requeued until the run is done."""
    signal_seconds: int = 120
    """Seconds before the time limit at which SLURM tells the run to save. The limit must be longer than twice this."""
    gpus_per_node: int = 0
    """GPUs of a node; 0: request none."""
    cpus_per_task: int = 0
    """Cores of each rank; 0: the default of the cluster, often 1, which is too few for the loader."""
    memory: str = ""
    """Memory of a node, such as 480G; 0: all memory of the node."""
    exclusive: bool = False
    """Request whole nodes."""
    nodelist: str = ""
    """Nodes that the job must get, such as n[01-04]."""
    exclude: str = ""
    """Nodes that the job may not get."""
    dependency: str = ""
    """Jobs to wait for, such as afterok:123."""
    mail_user: str = ""
    """Address for mail about the job."""
    mail_type: str = ""
    """Events that send a mail, such as END,FAIL."""
    setup: tuple[str, ...] = ()
    """Shell lines that run on the first node before the ranks start: module load, source .../activate."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of all ranks, such as NCCL_SOCKET_IFNAME."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Any other option of sbatch, by its long name without leading dashes."""
    srun: tuple[str, ...] = ()
    """More options for srun, such as --gpu-bind=none or --container-image=FILE."""
    evaluator: dict[str, str] = field(default_factory=dict)
    """Options that differ for the evaluator's job, such as time or gpus_per_node."""


SITE_KEYS = tuple(f.name for f in dataclasses.fields(Site))

# Options of sbatch that `wmse launch` sets itself.
_OWN_OPTIONS = (
    "array",
    "error",
    "job-name",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "signal",
    "time",
)


def load_site(path: Path | None, words: Sequence[str]) -> Site:
    """Load the options of a YAML file; `words` (--option value) override them.

    Raises InputError for an unknown option, naming the closest known one, and for a value of the wrong type."""
    from trainer.config.yaml_values import read_yaml

    values: dict[str, Any] = read_yaml(path) if path else {}
    # The words need no such check: `split_site_words` only takes known options.
    for key in values:
        if key not in SITE_KEYS:
            near = difflib.get_close_matches(str(key), SITE_KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(SITE_KEYS)}"
            raise InputError(f"unknown option {key} in {path}: {hint}")
    from_file = [(f"{key} in {path}", key, value) for key, value in values.items()]
    return _build(from_file + _from_words(words))


def evaluator_site(site: Site) -> Site:
    """Return the options of the evaluator's job. Raises InputError as `load_site` does."""
    unknown = [key for key in site.evaluator if key not in SITE_KEYS or key == "evaluator"]
    if unknown:
        raise InputError(f"unknown option {unknown[0]} in the site's evaluator: give options of the site, such as time")
    # Build the options anew, so that a changed option passes the same checks as one of the site.
    inherited = [("", f.name, getattr(site, f.name)) for f in dataclasses.fields(Site)]
    changed = [(f"evaluator.{key} of the site", key, value) for key, value in site.evaluator.items()]
    return _build(inherited + changed)


def split_site_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split command-line words into site options and other words. A value stays with its option."""
    site: list[str] = []
    others: list[str] = []
    target = others
    # A word without dashes is a value and follows its option.
    for word in words:
        if word.startswith("--"):
            key = word[2:].partition("=")[0]
            target = site if key in SITE_KEYS else others
        target.append(word)
    return site, others


def _from_words(words: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Read site options, --key value or --key=value, as (option as given, key, value)."""
    found = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{name} has no value: give one behind it")
            value = rest.pop(0)
        key = name.removeprefix("--")
        # Lists and mappings need YAML.
        if not isinstance(getattr(Site(), key), (str, int)):
            raise InputError(f"{name} cannot be given on the command line: write {key} into the file of --site")
        found.append((name, key, value))
    return found


def _build(values: list[tuple[str, str, Any]]) -> Site:
    """Build a Site from (where it was given, key, value). A later value replaces an earlier one."""
    typed: dict[str, Any] = {}
    for where, key, value in values:
        default = getattr(Site(), key)
        typed[key] = _convert(where, value, default)
    site = Site(**typed)
    _check_names(site)
    # The run must have time to train between its start and the signal.
    minutes = parse_minutes(site.time)
    if minutes * 60 <= 2 * site.signal_seconds:
        raise InputError(
            f"the time limit is {minutes} minutes and signal_seconds is {site.signal_seconds}: SLURM would tell the job to "
            "save right after its start; give more time or a smaller signal_seconds"
        )
    return site


def _check_names(site: Site) -> None:
    """Raise InputError for options that would break the batch script or override the checks of `wmse launch`."""
    for name in site.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise InputError(
                f"environment of the site: {name!r} is not a name for a variable, use letters, digits and _"
            )
    for name in site.sbatch:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise InputError(f"sbatch of the site: {name!r} is not an option; give a long name without leading dashes")
        if name in _OWN_OPTIONS:
            raise InputError(f"sbatch of the site: `wmse launch` sets {name} itself; remove it")
    # Every text becomes a part of one line in the batch script.
    texts = [*site.environment.values(), *site.sbatch.values()]
    for site_field in dataclasses.fields(Site):
        value = getattr(site, site_field.name)
        if isinstance(value, str):
            texts.append(value)
    for text in texts:
        if not text.isprintable():
            raise InputError(
                f"the site has {text!r}: remove line breaks and control characters, a batch script takes none"
            )


def _convert(where: str, value: Any, default: Any) -> Any:
    """Convert a value from a file or the command line to the type of `default`. where: name of the option in errors."""
    # A bool is also an int, so it is tried first. Values of a file are texts.
    if isinstance(default, bool):
        word = str(value).lower()
        if word in ("true", "false"):
            return word == "true"
        raise InputError(f"{where} is {value!r}: give true or false")
    if isinstance(default, int):
        if isinstance(value, bool) or not str(value).isdecimal():
            raise InputError(f"{where} is {value!r}: give a whole number")
        return int(value)
    if isinstance(default, str):
        if isinstance(value, str):
            return value
        raise InputError(f"{where} is {value!r}: give one word or number")
    if isinstance(default, tuple):
        if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
            return tuple(value)
        raise InputError(f"{where} is {value!r}: give a list of lines")
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    raise InputError(f"{where} is {value!r}: give a mapping such as {{NAME: value}}")
