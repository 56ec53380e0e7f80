"""Checkpoints: which are kept, what comes back, and that a killed process leaves complete ones alone."""

import gc
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from scripts.command import Refused
from scripts.training.checkpoints import Checkpoints
from scripts.training.data import Position
from scripts.training.step import Trainer
from tests.training.micro import QUIET, assert_same_state, command, run, saved_state, saved_steps
from tests.training.packs import RECIPE, assert_same_bits, model_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def state():
    return Trainer(model_of(), RECIPE).init()


def numbered(state, step):
    return state._replace(step=np.int32(step), params=jax.tree.map(lambda one: one + step, state.params))


def test_the_last_ones_and_the_best_are_kept(tmp_path, state):
    with Checkpoints(tmp_path / "saved", keep=2) as saved:
        assert (saved.steps, saved.best) == ([], None)
        for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 2.5)):
            saved.save(numbered(state, step), Position(step, 7), *([] if loss is None else [loss]))
        saved.wait()
        assert (saved.steps, saved.best) == ([2, 4, 5], 2)
    with Checkpoints(tmp_path / "saved", keep=2) as saved:  # known from the files, too
        assert (saved.steps, saved.best, saved.loss(2)) == ([2, 4, 5], 2, 1.0)
        saved.save(numbered(state, 6), Position(6, 0), 0.5)
        saved.save(numbered(state, 7), Position(7, 0))
        saved.wait()
        assert (saved.steps, saved.best) == ([6, 7], 6)


def test_without_evaluations_the_last_is_the_best(tmp_path, state):
    with Checkpoints(tmp_path, keep=1) as saved:
        for step in (1, 2, 3):
            saved.save(numbered(state, step), Position())
        saved.wait()
        assert (saved.steps, saved.best) == ([3], 3)


def test_every_bit_comes_back(tmp_path, state):
    """Also what the state is when it is saved: the arrays are given away to the next step at once."""
    trainer = Trainer(model_of(), RECIPE)
    mine = trainer.init()
    with Checkpoints(tmp_path) as saved:
        saved.save(mine, Position(3, 2))
        jax.tree.map(lambda one: one.delete(), mine)
        saved.wait()
        found, position = saved.restore(0, state)
    assert position == Position(3, 2)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_same_bits(found, state)


def test_what_does_not_fit_or_is_damaged_is_refused(tmp_path, state):
    with Checkpoints(tmp_path / "saved") as saved:
        saved.save(state, Position())
        saved.wait()
        other = Trainer(model_of("llama_untied"), RECIPE).init()
        with pytest.raises(Refused, match=r"step 0 could not be read: .*head.weight.* is missing"):
            saved.restore(0, other)
        (tmp_path / "saved/0/state/_METADATA").unlink()
        with pytest.raises(Refused, match="step 0 could not be read"):
            saved.restore(0, state)


def save_and_wait(saved, state):
    """A save fails at once, or while training goes on: then it is told when it is waited for."""
    saved.save(state, Position())
    saved.wait()


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_fails_is_told(tmp_path, state):
    """Orbax leaves coroutines behind that nobody waited for: they are to end within this test."""
    with Checkpoints(tmp_path / "saved") as saved:
        shutil.rmtree(tmp_path / "saved")
        (tmp_path / "saved").write_text("no folder any more")
        with pytest.raises(Refused, match="could not be saved"):
            save_and_wait(saved, state)
        (tmp_path / "saved").unlink()
    del saved
    gc.collect()


def test_a_save_that_fails_in_the_background_is_told_by_its_step(tmp_path, state, monkeypatch):
    """When it is waited for, also if that is for the save of another step."""

    def fail():
        raise OSError("no space")

    with Checkpoints(tmp_path) as saved:
        saved.save(numbered(state, 3), Position())
        with monkeypatch.context() as patch:
            patch.setattr(saved._manager, "wait_until_finished", fail)
            with pytest.raises(Refused, match="step 3 could not be saved: no space"):
                saved.wait()
            with pytest.raises(Refused, match="step 3 could not be saved: no space"):
                saved.save(numbered(state, 5), Position())
        saved.wait()
        assert saved.steps == [3]


STEPS = 30
EVERY_STEP = [*QUIET, "--save-every", "1", "--keep", "3", "--steps", STEPS]


def killed(words, out, delay):
    """Whether a run was killed by SIGKILL, `delay` seconds after its first new checkpoint, and not at its end."""
    before = set(saved_steps(out)) if (out / "checkpoints").exists() else set()
    process = subprocess.Popen([sys.executable, "-m", "scripts.train", *words], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        while process.poll() is None:
            if (out / "checkpoints").exists() and set(saved_steps(out)) - before:
                time.sleep(delay)
                break
            time.sleep(0.005)
    finally:
        process.kill()
        _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode != 0


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_a_complete_step(inputs, tmp_path, kills):
    """A save runs all the time. Whatever a kill leaves, the run ends as one that nobody disturbed, bit for bit."""
    draw, steps = random.Random(kills), STEPS + 15 * kills
    words = [*EVERY_STEP, "--steps", steps]
    assert run(inputs, tmp_path / "straight", *words) == 0
    out, unfinished = tmp_path / "out", 0
    for number in range(kills):
        more = ["--resume"] if number else []
        assert killed(command(inputs, out, *words, *more), out, draw.uniform(0, 0.3)), "it came to its end: more steps"
        names = [file.name for file in (out / "checkpoints").iterdir()]
        unfinished += any("tmp" in name for name in names)
        newest = saved_state(out, max(saved_steps(out)))  # what is there can be read, all of it
        assert newest["step"] == max(saved_steps(out))
    assert run(inputs, out, *words, "--resume") == 0
    assert not any("tmp" in file.name for file in (out / "checkpoints").iterdir())
    assert_same_state(saved_state(out, steps), saved_state(tmp_path / "straight", steps))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    if kills > 10:
        assert unfinished > 0  # it was in the middle of a save
