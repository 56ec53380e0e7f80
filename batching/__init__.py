"""Continuous batching: requests, plans, scheduler, policies, the step and the engine around them."""

from batching.async_engine import AsyncEngine
from batching.engine import Engine, EngineConfig
from batching.request import Delta, Output, QueueFull, Request, SamplingParams

__all__ = ["AsyncEngine", "Delta", "Engine", "EngineConfig", "Output", "QueueFull", "Request", "SamplingParams"]
