"""How a kernel for a device that is not here runs: in Pallas' own interpreter, on any machine."""

import dataclasses
import functools
import importlib

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import IMPLEMENTATIONS

INTERPRETERS = {"mosaic_gpu": plgpu.InterpretGPUParams, "mosaic_tpu": pltpu.InterpretParams}


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


def found_races(name):
    """Whether the interpreter's race detector, which has no public answer, saw one since the last program began."""
    interpret = _module(name)
    races = interpret.get_races() if name == "mosaic_gpu" else interpret.races
    return races.races_found


def reset(name):
    """Forget a program that broke off."""
    kind = "gpu" if name == "mosaic_gpu" else "tpu"
    getattr(_module(name), f"reset_{kind}_interpret_mode_state")()


def _module(name):
    folder = "mosaic_gpu" if name == "mosaic_gpu" else "mosaic"
    return importlib.import_module(f"jax._src.pallas.{folder}.interpret.interpret_pallas_call")
