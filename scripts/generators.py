"""Requests that are made up from a seed: how long they are, what they share, when they come, who sends them.

Lengths, tokens, arrivals, users, priorities and predictions are drawn from streams of their own, so that the same
requests can come at other times. Times are rounded to microseconds. Nothing here needs JAX.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import tyro

from scripts.traces import Item, Report

Lengths = tuple[np.ndarray, np.ndarray]  # tokens of each prompt and of each answer
Session = list[Item]  # one request, or the turns of a conversation

MAY_BE_0 = ("seed", "start_s", "urgent", "predict_noise", "users", "zipf", "think_s", "prompt_sigma", "answer_sigma")
STREAMS = ("lengths", "tokens", "prefixes", "turns", "arrivals", "think", "users", "urgent", "predictions")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be said of any requests. Raises ValueError for a value that has no meaning."""

    out: str = "-"
    """Where the workload goes, as JSON Lines; - is stdout."""
    seed: int = 0
    """Another one gives other requests at other times."""
    scale: float = 1.0
    """Times the length of every prompt, prefix and answer; none gets shorter than 1 token."""
    max_len: int | None = None
    """Positions of a slot (EngineConfig.max_len) that a prompt, with its history, and its answer must fit in."""
    clip: tyro.conf.FlagCreatePairsOff[bool] = False
    """Shorten what does not fit, the longer of prompt and answer first, and say how many, instead of refusing."""
    urgent: float = 0.0
    """Share of the requests that have priority -1; the others have 0."""
    ttft_slo_s: float | None = None
    """Deadline of each request's first token."""
    tpot_slo_s: float | None = None
    """Deadline of each request's mean time per output token."""
    predict_noise: float | None = None
    """Sigma of ln(predicted / true length) of the answers; 0 predicts exactly. Without it nothing is predicted."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), "at least" if one.name in MAY_BE_0 else "above"
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not 0 <= value < math.inf or (value == 0 and least == "above"):
                raise ValueError(f"{one.name} must be finite and {least} 0, not {value}")
        if self.urgent > 1:
            raise ValueError(f"urgent must be at most 1, not {self.urgent}")

    def stream(self, name: str) -> np.random.Generator:
        """Random numbers for one purpose."""
        return np.random.Generator(np.random.PCG64([self.seed, STREAMS.index(name)]))

    def sessions(self, report: Report) -> list[Session]:
        """The requests; of the later turns of a session neither history nor times are known yet."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Generated(Options):
    """What can be said of requests that are made up."""

    requests: int = 64
    """How many."""
    arrivals: Literal["at-once", "poisson", "gamma", "closed"] = "at-once"
    """All at 0 s; at --rate, as a Poisson process or in bursts; or a loop for each of --users, who asks again only when
    the last answer has ended."""
    rate: float = 1.0
    """Requests a second; with multi-turn, conversations a second."""
    cv: float = 2.0
    """Coefficient of variation of the gaps between arrivals in bursts: 1 is Poisson. vLLM's burstiness is 1 / cv**2."""
    users: int = 0
    """How many ask; 0: nobody is named."""
    zipf: float = 1.0
    """The k-th user's share of the requests is in proportion to 1 / k**zipf. In closed loops all have the same."""
    think_s: float = 1.0
    """Mean of the exponential time before a user in a closed loop asks, and between the turns of a conversation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals == "closed" and self.users == 0:
            raise ValueError("closed arrivals need users")

    def lengths(self, rng: np.random.Generator) -> Lengths:
        raise NotImplementedError

    def sessions(self, report: Report) -> list[Session]:
        prompts, answers = self.lengths(self.stream("lengths"))
        seeds = self.stream("tokens").integers(2**48, size=self.requests)  # so many that no two are the same
        rows = enumerate(zip(prompts.tolist(), answers.tolist(), seeds.tolist(), strict=True))
        return [[Item(f"r{n}", answer, prompt_tokens=prompt, seed=seed)] for n, (prompt, answer, seed) in rows]


@dataclass(frozen=True, kw_only=True)
class Fixed(Generated):
    """All prompts have one length, and all answers."""

    prompt: int = 128
    """Tokens of each prompt."""
    answer: int = 128
    """Tokens of each answer."""

    def lengths(self, rng: np.random.Generator) -> Lengths:
        return np.full(self.requests, self.prompt), np.full(self.requests, self.answer)


@dataclass(frozen=True, kw_only=True)
class Uniform(Generated):
    """All lengths of a range are as likely. The defaults are those of bench.py in GeeeekExplorer/nano-vllm."""

    requests: int = 256
    """How many."""
    prompt: tuple[int, int] = (100, 1024)
    """The shortest and the longest prompt."""
    answer: tuple[int, int] = (100, 1024)
    """The shortest and the longest answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (least, most) in (("prompt", self.prompt), ("answer", self.answer)):
            if not 1 <= least <= most:
                raise ValueError(f"{name} must be two lengths of at least 1, the shorter first, not {least} {most}")

    def lengths(self, rng: np.random.Generator) -> Lengths:
        (least_prompt, most_prompt), (least_answer, most_answer) = self.prompt, self.answer
        prompts = rng.integers(least_prompt, most_prompt, size=self.requests, endpoint=True)
        return prompts, rng.integers(least_answer, most_answer, size=self.requests, endpoint=True)


@dataclass(frozen=True, kw_only=True)
class Lognormal(Generated):
    """Many short ones and a few long ones: the logarithms of the lengths are normally distributed."""

    prompt: int = 128
    """Median of the prompts."""
    prompt_sigma: float = 1.0
    """Standard deviation of their logarithms."""
    answer: int = 128
    """Median of the answers."""
    answer_sigma: float = 0.7
    """Standard deviation of their logarithms."""
    least: int = 4
    """What is shorter gets this length."""
    most: int = 2048
    """What is longer gets this length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise ValueError(f"least {self.least} exceeds most {self.most}")

    def lengths(self, rng: np.random.Generator) -> Lengths:
        prompts, answers = rng.normal(size=(2, self.requests))
        prompts = np.rint(self.prompt * np.exp(self.prompt_sigma * prompts))
        answers = np.rint(self.answer * np.exp(self.answer_sigma * answers))
        return tuple(np.clip(drawn, self.least, self.most).astype(int) for drawn in (prompts, answers))


@dataclass(frozen=True, kw_only=True)
class ShareGPT(Lognormal):
    """Like ShareGPT: the mean lengths are those in the paper on vLLM (SOSP 2023, figure 11), 161 and 338 tokens.

    The figure shows long tails up to some 2000 tokens; that they are lognormal, and how wide, is an assumption.
    """

    prompt: int = 80
    prompt_sigma: float = 1.2
    answer: int = 212
    answer_sigma: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LongDocument(Lognormal):
    """Long prompts, short answers: like the summaries of arXiv papers in Sarathi-Serve (OSDI 2024, table 2).

    Its medians are 7059 and 208 tokens, its 90th percentiles 12985 and 371; sigma = ln(p90 / p50) / 1.2816.
    """

    prompt: int = 7059
    prompt_sigma: float = 0.476
    answer: int = 208
    answer_sigma: float = 0.452
    most: int = 16384


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Lognormal):
    """Every prompt begins with one of a few system prompts; the lengths of prompts are those of what follows it."""

    prefixes: int = 4
    """How many system prompts there are, all as likely."""
    prefix: int = 512
    """Tokens of each of them."""

    def sessions(self, report: Report) -> list[Session]:
        rng = self.stream("prefixes")
        seeds = rng.integers(2**48, size=self.prefixes)[rng.integers(self.prefixes, size=self.requests)].tolist()
        alone = [session[0] for session in super().sessions(report)]
        lengths = [self.prefix + item.length for item in alone]
        return [
            [replace(item, prompt_tokens=length, prefix_tokens=self.prefix, prefix_seed=seed)]
            for item, length, seed in zip(alone, lengths, seeds, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class MultiTurn(Lognormal):
    """Conversations: a turn's prompt is the whole conversation so far and a message, of the lengths of prompts."""

    turns: float = 4.0
    """Mean number of turns, geometrically distributed; the last conversation may be cut short."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns < 1:
            raise ValueError(f"turns must be at least 1, not {self.turns}")

    def sessions(self, report: Report) -> list[Session]:
        messages = itertools.chain.from_iterable(super().sessions(report))
        turns = self.stream("turns").geometric(1 / self.turns, size=self.requests).tolist()
        return [session for count in turns if (session := list(itertools.islice(messages, count)))]


def starts(count: int, options: Generated) -> np.ndarray:
    """When so many sessions arrive, in seconds; 0 for all that do not arrive in an open loop."""
    rng, shape = options.stream("arrivals"), 1 / options.cv**2
    if options.arrivals == "poisson":
        return np.cumsum(rng.exponential(1 / options.rate, size=count))
    if options.arrivals == "gamma":
        return np.cumsum(rng.gamma(shape, 1 / (shape * options.rate), size=count))
    return np.zeros(count)


def owners(count: int, options: Generated) -> list[str | None]:
    """Whose each of so many sessions is."""
    if options.users == 0:
        return [None] * count
    if options.arrivals == "closed":
        return [f"user-{session % options.users}" for session in range(count)]
    shares = 1 / np.arange(1, options.users + 1) ** options.zipf
    drawn = options.stream("users").choice(options.users, size=count, p=shares / shares.sum())
    return [f"user-{user}" for user in drawn.tolist()]


def scheduled(sessions: Sequence[Session], options: Generated) -> Iterator[Session]:
    """The sessions with their times and users, each turn after the one that it continues."""
    think, last = options.stream("think"), {}  # `last`: of each user in a closed loop, the request that came last
    when, whose = starts(len(sessions), options).tolist(), owners(len(sessions), options)
    for session, start, user in zip(sessions, when, whose, strict=True):
        turns = []
        for item in session:
            after = turns[-1].id if turns else last.get(user)
            waits = turns or options.arrivals == "closed"
            arrival_s = round(think.exponential(options.think_s) if waits else start, 6)
            turns.append(replace(item, arrival_s=arrival_s, after=after, continues=bool(turns), user=user))
        if options.arrivals == "closed":
            last[user] = turns[-1].id
        yield turns


def labelled(items: Sequence[Item], options: Options) -> list[Item]:
    """The requests with the priorities, deadlines and predictions that the options ask for."""
    urgent = options.stream("urgent").random(len(items)) < options.urgent
    noise = options.stream("predictions").normal(size=len(items)) * (options.predict_noise or 0)
    guesses = [max(1, round(item.max_tokens * math.exp(one))) for item, one in zip(items, noise, strict=True)]
    return [
        replace(
            item,
            priority=-int(hurry),
            ttft_slo_s=options.ttft_slo_s,
            tpot_slo_s=options.tpot_slo_s,
            predicted_tokens=None if options.predict_noise is None else guess,
        )
        for item, hurry, guess in zip(items, urgent, guesses, strict=True)
    ]
