"""What a plain request of a workload tells the policy that serves it."""

import pytest

from batching import Request, SamplingParams
from scripts import bench_runs
from scripts.command import Refused
from scripts.jobs import Job


@pytest.mark.parametrize(
    ("policy", "user", "ttft"), [("continuous", None, None), ("fair", "a", None), ("slo", None, 2)]
)
def test_a_policy_is_told_what_it_looks_at(policy, user, ttft):
    job = Job("line 1", "x", Request(prompt_ids=[1], user="a", ttft_slo_s=2, priority=3))
    told = bench_runs.for_policy(job, policy)
    assert (told.user, told.ttft_slo_s, told.priority) == (user, ttft, 0)


@pytest.mark.parametrize(
    ("fields", "params"),
    [({"prompt_ids": [1]}, {"n": 2}), ({"prompt_ids": [1]}, {"top_k": 3}), ({"prompt_ids": [1]}, {"temperature": 1.0}),
     ({"prompt": "a"}, {})],
)  # fmt: skip
def test_what_is_more_than_tokens_and_a_length(fields, params):
    params = SamplingParams(**{"temperature": 1.0 if "n" in params else 0.0, "max_tokens": 5} | params)
    with pytest.raises(Refused, match="line 3: only prompt_ids"):
        bench_runs.as_item(Job("line 3", "x", Request(**fields, params=params)))
