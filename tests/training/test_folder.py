"""A run's folder: one process at a time trains in it, and what is missing, damaged or left over in it."""

import json
import shutil
import time

import pytest

from scripts import train
from scripts.command import Refused
from scripts.training.checkpoints import Checkpoints
from scripts.training.folder import LOCK, claimed
from scripts.training.progress import TrainDisplay
from tests.training.micro import QUIET, run, saved_steps

SAVING = [*QUIET, "--save-every", "10"]


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    """A run of two checkpoints, to be copied."""
    out = tmp_path_factory.mktemp("runs") / "trained"
    assert run(inputs, out, *SAVING) == 0
    return out


@pytest.fixture
def out(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


def wait_until(true):
    """What threads of Orbax do; that is within a second."""
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise TimeoutError


def export(out, to):
    return train.main(["export", "--run", str(out), "--out", str(to)])


def test_beside_a_live_run_there_are_exports_and_no_second_run(inputs, tmp_path, capfd, monkeypatch):
    """While step 15 is shown, with a save that is not complete; the run does not notice."""
    out, update, found = tmp_path / "out", TrainDisplay.update, []

    def look(self, line):
        update(self, line)
        if line["step"] == 15:
            wait_until((out / "checkpoints/10").exists)
            (out / "checkpoints/14.orbax-checkpoint-tmp").mkdir()
            found.append(run(inputs, out, *SAVING, "--resume"))
            found.append(run(inputs, out, *SAVING))
            found.append(export(out, tmp_path / "exported"))
            (out / "checkpoints/14.orbax-checkpoint-tmp").rmdir()

    monkeypatch.setattr(TrainDisplay, "update", look)
    assert run(inputs, out, *SAVING) == 0
    assert found == [2, 2, 0]
    assert capfd.readouterr().err.count(f"another process trains in {out}") == 2
    assert (tmp_path / "exported/model.safetensors").exists()
    assert saved_steps(out) == [10, 20]


def test_only_a_run_keeps_its_lock(tmp_path):
    with claimed(tmp_path / "new", False):
        assert (tmp_path / "new" / LOCK).exists()
        with pytest.raises(Refused, match="another process trains in"), claimed(tmp_path / "new", True):
            pass
        assert (tmp_path / "new" / LOCK).exists()
    assert not (tmp_path / "new").exists()
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(Refused, match="is not empty"), claimed(tmp_path, False):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_who_reads_changes_nothing(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, read_only=True) as saved:
        assert (saved.steps, saved.best) == ([], None)
    assert (tmp_path / "7.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path):
        wait_until(lambda: not (tmp_path / "7.orbax-checkpoint-tmp").exists())


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_what_was_killed_before_it_was_a_run(inputs, tmp_path, more):
    """While run.json was written: it is begun again, with --resume where a tokenizer is there already."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".run.json.new").write_text('{"arith')
    if more:
        shutil.copytree(inputs / "tokenizer", out / "tokenizer")
    assert run(inputs, out, *QUIET, "--steps", "1", "--length", "65", *more) == 2
    assert run(inputs, out, *QUIET, "--steps", "1", *more) == 0
    assert not (out / ".run.json.new").exists()


def test_what_was_killed_as_it_exported(inputs, out):
    """And a second model, of which a part is there, is made at the end of the next run."""
    (out / "..model.new.ab12cd").mkdir()
    (out / "..model.new.ab12cd/model.safetensors").write_text("")
    assert run(inputs, out, *SAVING, "--resume") == 0
    assert sorted(file.name for file in out.iterdir() if file.name[0] == ".") == [LOCK]


def test_an_export_makes_nothing_up(inputs, out, tmp_path, capfd):
    """Neither a tokenizer of nothing nor checkpoints."""
    shutil.rmtree(out / "checkpoints")
    assert export(out, tmp_path / "model") == 2
    assert f"{out} has no checkpoint yet" in capfd.readouterr().err
    assert not (out / "checkpoints").exists()
    shutil.rmtree(out / "tokenizer")
    assert export(out, tmp_path / "model") == run(inputs, out, *SAVING, "--resume") == 2
    assert capfd.readouterr().err.count(f"{out}/tokenizer has no tokenizer: that of the run is missing") == 2
    assert not (out / "tokenizer").exists()
    assert not (tmp_path / "model").exists()


def test_damaged_files_are_named(inputs, out, tmp_path, capfd):
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    for line in ('{"loss": 1.0}\n', "[1]\n", '{"step": "1"}\n'):
        (out / "log.jsonl").write_text("".join([*lines[:2], line, *lines[2:]]))
        assert run(inputs, out, *SAVING, "--resume") == 2
        assert f"log.jsonl line 3: must be an object with a step, not {line.strip()}" in capfd.readouterr().err
    whole = json.loads((out / "run.json").read_text())
    for change in ({"arithmetic": [1]}, {"options": None}):
        (out / "run.json").write_text(json.dumps(whole | change))
        assert run(inputs, out, *SAVING, "--resume") == export(out, tmp_path / "model") == 2
        assert capfd.readouterr().err.count(f"run.json: {next(iter(change))} must be a JSON object, not ") == 2


def test_the_best_is_of_one_evaluation(inputs, out, capfd):
    """Other batches are another text, whose loss is not to be compared; older runs say which among their options."""
    evaluating = ["--evaluate-every", "30", "--sample-every", "0", "--no-baselines", "--evaluate-batches", "2"]
    reason = "of another run, whose results would not be these: evaluate_batches was null, now 2"
    whole = json.loads((out / "run.json").read_text())
    assert run(inputs, out, *evaluating, "--resume") == 2
    assert reason in capfd.readouterr().err
    del whole["arithmetic"]["evaluate_batches"]
    (out / "run.json").write_text(json.dumps(whole))
    assert run(inputs, out, *evaluating, "--resume") == 2
    assert reason in capfd.readouterr().err
    assert run(inputs, out, *SAVING, "--resume") == 0
    whole["options"]["evaluate_batches"] = 2
    (out / "run.json").write_text(json.dumps(whole))
    assert run(inputs, out, *evaluating, "--resume") == 0
    assert run(inputs, out, *SAVING, "--resume") == 2
    assert export(out, out.parent / "model") == 0
