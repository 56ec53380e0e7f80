"""How a kernel for a device that is not here runs: in Pallas' own interpreter, on any machine."""

import dataclasses
import functools
import importlib
from typing import Any

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import IMPLEMENTATIONS

INTERPRETERS = {"mosaic_gpu": plgpu.InterpretGPUParams, "mosaic_tpu": pltpu.InterpretParams}
# Where an interpreter makes the state of its race detector, and of which class: one a kernel, which has no public name.
RACE_STATES = {
    "mosaic_gpu": ("mosaic_gpu.interpret.gpu_callbacks", "GPURaceDetectionState"),
    "mosaic_tpu": ("mosaic.interpret.interpret_pallas_call", "RaceDetectionState"),
}


def interpreted(name, monkeypatch, **options):
    """Where the implementation cannot run, have it interpreted, or skip the test if there is no interpreter."""
    one = IMPLEMENTATIONS[name]
    if reason := one.unavailable():
        if name not in INTERPRETERS:
            pytest.skip(reason)
        kind = INTERPRETERS[name]
        if any(field.name == "on_race" for field in dataclasses.fields(kind)):  # from JAX 0.12 on a race would raise
            options["on_race"] = "warn"
        interpret = kind(**options)
        attend, write = (functools.partial(f, interpret=interpret) for f in (one.attend, one.write))
        monkeypatch.setitem(IMPLEMENTATIONS, name, one._replace(attend=attend, write=write))


class Races:
    """What the race detector sees from now on, of every kernel that is interpreted."""

    def __init__(self, name, monkeypatch):
        place, kind = RACE_STATES[name]
        module, self.states = importlib.import_module(f"jax._src.pallas.{place}"), []
        make = getattr(module, kind)

        def record(*args: Any, **options: Any):
            self.states.append(make(*args, **options))
            return self.states[-1]

        monkeypatch.setattr(module, kind, record)

    @property
    def found(self):
        """For each kernel, in their order, whether there was one."""
        return [state.races_found for state in self.states]


def reset(name):
    """Forget a program that broke off."""
    folder, kind = ("mosaic_gpu", "gpu") if name == "mosaic_gpu" else ("mosaic", "tpu")
    module = importlib.import_module(f"jax._src.pallas.{folder}.interpret.interpret_pallas_call")
    getattr(module, f"reset_{kind}_interpret_mode_state")()
