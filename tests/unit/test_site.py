"""Site options from a file and from the command line."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.cluster.site import Site, evaluator_site, load_site, split_site_words
from trainer.errors import InputError


def test_the_example_file_is_valid() -> None:
    site = load_site(ROOT / "slurm" / "cluster.yaml", [])
    assert (site.partition, site.gpus_per_node, site.exclusive, site.memory) == ("gpu", 8, True, "0")
    assert site.environment["NCCL_DEBUG"] == "WARN"
    evaluator = evaluator_site(site)
    assert (evaluator.time, evaluator.memory, evaluator.partition) == ("12:00:00", "64G", "gpu")


def test_times_need_no_quotes(tmp_path: Path) -> None:
    """YAML 1.1 would read 24:00:00 as the number 86,400."""
    path = tmp_path / "site.yaml"
    path.write_text("time: 24:00:00\nevaluator: {time: 1:30:00}\n")
    site = load_site(path, [])
    assert (site.time, evaluator_site(site).time) == ("24:00:00", "1:30:00")


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("partition: a\ncpus_per_task: 4\ntime: 90\n")
    assert load_site(path, ["--partition", "b", "--cpus_per_task=8"]) == Site(partition="b", cpus_per_task=8, time="90")


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("partitoin: a", "unknown option partitoin in .*site.yaml: did you mean partition?"),
        ("cpus_per_task: many", "cpus_per_task in .*site.yaml is 'many': give a whole number"),
        ("exclusive: 3", "exclusive in .* is '3': give true or false"),
        ("setup: module load cuda", "give a list of lines"),
        ("environment: [A]", "give a mapping"),
        ("time: soon", "the time limit is 'soon'"),
        ("time: 2\nsignal_seconds: 60", "tell the job to save right after its start"),
        ("environment: {'A B': 1}", "'A B' is not a name for a variable"),
        ("environment: {A: null}", "give a mapping"),
        ("sbatch: {nodes: 3}", "`wmse launch` sets nodes itself"),
        ("sbatch: {--comment: x}", "'--comment' is not an option"),
        ('partition: "a\\nb"', "remove line breaks and control characters"),
        ("partition: a\npartition: b", "is given twice"),
    ],
)
def test_invalid_options_are_refused(yaml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(yaml)
    with pytest.raises(InputError, match=message):
        load_site(path, [])


def test_only_plain_options_come_from_the_command_line() -> None:
    with pytest.raises(InputError, match="--setup cannot be given on the command line"):
        load_site(None, ["--setup", "x"])
    with pytest.raises(InputError, match="--qos has no value"):
        load_site(None, ["--qos"])
    with pytest.raises(InputError, match="unknown option evaluator"):
        evaluator_site(Site(evaluator={"evaluator": "x"}))


def test_arguments_are_split_into_site_options_and_settings() -> None:
    arguments = [
        "--seed",
        "1",
        "--partition",
        "low",
        "--time=30",
        "--data.root",
        "/set",
        "--views.crop_area",
        "[0.2,1]",
    ]
    site, settings = split_site_words(arguments)
    assert site == ["--partition", "low", "--time=30"]
    assert settings == ["--seed", "1", "--data.root", "/set", "--views.crop_area", "[0.2,1]"]
