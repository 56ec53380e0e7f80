"""What JAX compiles while something runs."""

import contextlib

import jax
import numpy as np


@contextlib.contextmanager
def compile_events():
    """A list that fills with JAX's events of tracing, lowering and compiling; known to fill when there are any."""
    events = []

    def listen(event, duration, **kwargs):
        if "compile" in event or "trace" in event or "lower" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 17)(np.float32(1))
        assert events, "JAX's compile events have other names now"
        events.clear()
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
