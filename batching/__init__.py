"""Continuous batching: requests, plans, scheduler, policies, the step and the engine around them."""

from batching.engine import Engine, EngineConfig
from batching.request import Delta, Output, QueueFull, Request, SamplingParams

__all__ = ["Delta", "Engine", "EngineConfig", "Output", "QueueFull", "Request", "SamplingParams"]
