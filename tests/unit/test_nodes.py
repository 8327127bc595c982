"""Parsers of SLURM's notations."""

import pytest

from trainer.cluster.nodes import expand_nodes, expand_tasks, parse_minutes, parse_node_count
from trainer.errors import InputError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[01-03]", "n01 n02 n03"),
        ("a,b[001,003],c", "a b001 b003 c"),
        ("b04-[09-10]", "b04-09 b04-10"),
        ("x[1-2]y[3-4]", "x1y3 x1y4 x2y3 x2y4"),
        ("gpu-[8-11,20].cluster.org,login", "gpu-8.cluster.org gpu-9.cluster.org gpu-10.cluster.org gpu-11.cluster.org gpu-20.cluster.org login"),  # noqa: E501
        ("n[099-101]", "n099 n100 n101"),
        ("n[1,3-4],m[2]", "n1 n3 n4 m2"),
    ],
)  # fmt: skip
def test_node_lists_are_expanded_in_order(text: str, names: str) -> None:
    assert expand_nodes(text) == names.split()


@pytest.mark.parametrize("text", ["", "n[1-", "n]1[", "n[a-b]", "n[3-1]", "a,,b", "n[]", "[", "n[1-2"])
def test_an_invalid_node_list_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="node list"):
        expand_nodes(text)


def test_numbers_of_tasks_per_node_are_expanded() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("8") == [8]
    with pytest.raises(InputError, match="tasks per node"):
        expand_tasks("2x3")


def test_a_number_of_nodes_may_be_a_range() -> None:
    assert parse_node_count("4") == (4, 4)
    assert parse_node_count("4-8") == (4, 8)
    for text in ("0", "8-4", "-4", "four", "4-", "", "1-100000", "20000"):
        with pytest.raises(InputError, match="--nodes is"):
            parse_node_count(text)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("30:00", 30), ("30:01", 31), ("12:00:00", 720), ("2-0", 2880), ("2-12", 3600), ("1-12:30", 2190), ("1-00:00:30", 1441)],  # noqa: E501
)  # fmt: skip
def test_time_limits_become_minutes(text: str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "1h", "1:2:3:4", "-5", "infinite"])
def test_an_invalid_time_limit_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="time limit is"):
        parse_minutes(text)
