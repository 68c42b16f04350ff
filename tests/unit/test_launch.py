"""The launcher's arithmetic: what the environment asks for, and what the ranks' exit codes mean."""

from __future__ import annotations

import pytest

from flame.errors import UsageError
from flame.train.launch import LaunchPlan, exit_code_of, plan_from_environment


def test_one_process_needs_no_launcher() -> None:
    assert plan_from_environment({}) is None
    assert plan_from_environment({"NGPU": "1"}) is None
    assert plan_from_environment({"NGPU": "8", "RANK": "3"}) is None


def test_ranks_of_the_second_node() -> None:
    plan = plan_from_environment(
        {"NGPU": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    )
    assert plan == LaunchPlan(num_local_ranks=4, num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    assert plan.environment(2, 29500) == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"NGPU": "eight"}, "NGPU"),
        ({"NGPU": "0"}, "NGPU"),
        ({"NGPU": "-2"}, "NGPU"),
        ({"NGPU": "2", "NNODES": "2"}, "MASTER_ADDR"),
        ({"NGPU": "2", "NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "NODE_RANK"),
    ],
)
def test_bad_environments_are_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        plan_from_environment(environment)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([75, 0], 1),
        ([0, 2, None], 2),
        ([-9, None], 1),
        ([-9, 1], 1),
        ([75, 75, 1], 1),
    ],
)
def test_exit_codes(codes: list[int | None], expected: int) -> None:
    assert exit_code_of(codes) == expected
