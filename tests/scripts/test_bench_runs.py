"""What a plain request of a workload tells the policy that serves it."""

import pytest

from batching import Request
from scripts import bench_runs
from scripts.jobs import Job


@pytest.mark.parametrize(
    ("policy", "user", "ttft"), [("continuous", None, None), ("fair", "a", None), ("slo", None, 2)]
)
def test_a_policy_is_told_what_it_looks_at(policy, user, ttft):
    job = Job("line 1", "x", Request(prompt_ids=[1], user="a", ttft_slo_s=2, priority=3))
    told = bench_runs.for_policy(job, policy)
    assert (told.user, told.ttft_slo_s, told.priority) == (user, ttft, 0)
