"""The loop: straight on and with a stop between, what the log says, what ends it, evaluations and samples."""

import json
import math
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from model.checkpoint import load
from scripts.train import main
from scripts.training.checkpoints import Checkpoints
from scripts.training.data import Packer, held_out, read_documents
from scripts.training.loop import Intervals, stop_asked, training_flops
from scripts.training.lora import TARGETS, Lora
from scripts.training.progress import TrainDisplay
from scripts.training.samples import Sampler, prompts_of
from scripts.training.tokens import tokenise
from tests.training.micro import QUIET, assert_same_state, command, logits, run, saved_state, saved_steps
from tests.training.packs import model_of
from tests.training.test_data import corpus

OFTEN = ["--evaluate-every", "5", "--sample-every", "10", "--save-every", "1", "--keep", "20", "--accumulate", "2"]
TIMES = {"seconds", "tokens_per_s", "mfu"}


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert run(inputs, out, *OFTEN, "--json", out.parent / "figures.json") == 0
    return out


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def without_times(lines):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def stopping(monkeypatch, step, number):
    """A signal while that step is shown."""
    update = TrainDisplay.update

    def stop(self, line):
        update(self, line)
        if line["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(TrainDisplay, "update", stop)


def test_ten_steps_and_ten_are_twenty(inputs, straight, tmp_path, monkeypatch):
    """Stopped by a signal, gone on with in a new trainer: every bit of parameters and optimiser, and the log."""
    with monkeypatch.context() as patch:
        stopping(patch, 10, signal.SIGTERM)
        assert run(inputs, tmp_path / "out", *OFTEN) == 130
    assert saved_steps(tmp_path / "out")[-1] == 10
    assert run(inputs, tmp_path / "out", *OFTEN, "--resume") == 0
    assert_same_state(saved_state(tmp_path / "out", 20), saved_state(straight, 20))
    assert without_times(log(tmp_path / "out")) == without_times(log(straight))
    one, other = (load(out).model for out in (tmp_path / "out", straight))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


def test_the_state_changes(straight):
    """What the test above compares is not the same anyway."""
    one, other = (saved_state(straight, step) for step in (19, 20))
    differ = [name for name, value in one.items() if not np.array_equal(value, other[name])]
    assert set(differ) == set(one)


def test_work_that_was_lost_is_not_in_the_log_twice(inputs, straight, tmp_path):
    """As after a kill between the log's line and the checkpoint: the steps after it are done again."""
    out = shutil.copytree(straight, tmp_path / "out")
    for step in (18, 19, 20):
        shutil.rmtree(out / "checkpoints" / str(step))
    with (out / "log.jsonl").open("a") as file:
        file.write('{"step": 21, "los')  # and a line that was not finished
    assert run(inputs, out, *OFTEN, "--resume") == 0
    assert without_times(log(out)) == without_times(log(straight))
    assert_same_state(saved_state(out, 20), saved_state(straight, 20))


def test_a_finished_run_has_nothing_left_to_do(inputs, straight):
    before = (straight / "log.jsonl").read_bytes()
    assert run(inputs, straight, *OFTEN, "--resume") == 0
    assert (straight / "log.jsonl").read_bytes() == before


def test_log_and_figures(straight):
    lines = log(straight)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    for line in steps:
        assert line["tokens_per_s"] == pytest.approx(line["computed_tokens"] / line["seconds"])
        assert (
            0.8 * 256 < line["tokens"] == line["computed_tokens"] <= 256
        )  # two batches of 4 rows of 32, little padding
        assert line["mfu"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"]
    evaluations = [line for line in lines if "evaluation_loss" in line]
    assert [line["step"] for line in evaluations] == [5, 10, 15, 20]
    figures = json.loads((straight.parent / "figures.json").read_text())
    best = min(evaluations, key=lambda line: line["evaluation_loss"])
    assert figures["evaluation_loss"] == best["evaluation_loss"]
    assert figures["model_step"] == figures["best_step"] == best["step"]
    assert figures["tokens"] == sum(line["tokens"] for line in steps)
    assert figures["baselines"]["trigram"] < figures["baselines"]["unigram"] < math.log(300)
    assert (straight / "curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def evaluated(inputs, straight):
    """What was held out, tokenised by what is served."""
    loaded = load(straight)
    _, documents = held_out(read_documents(inputs / "text.txt"), 0.2)
    return documents, tokenise(documents, loaded.tokenizer, loaded.eos_ids, 300, Console(stderr=True))


def test_the_evaluation_is_that_of_the_model_that_is_served(straight, evaluated):
    """Piece by piece, by the definition of attention over slots, in float64 from the logits on."""
    (documents, made), nats = evaluated, []
    packer = Packer(made, 4, 32)
    ends = list(zip(packer.starts.tolist(), packer.sizes.tolist(), strict=True))
    rows = np.zeros((len(ends), 32), np.int32)
    for row, (start, size) in zip(rows, ends, strict=True):
        row[:size] = made.ids[start : start + size]
    for found, (start, size) in zip(logits(load(straight).model, rows).astype(np.float64), ends, strict=True):
        chosen = np.take_along_axis(found[:size], made.ids[start + 1 : start + size + 1, None], -1)[:, 0]
        nats += (np.log(np.exp(found[:size]).sum(-1)) - chosen).tolist()
    line = [line for line in log(straight) if "evaluation_loss" in line][-1]  # it was the best, too
    assert len(nats) == line["tokens"] == made.targets
    assert np.mean(nats) == pytest.approx(line["evaluation_loss"], rel=1e-5)  # float32, in another order
    per_byte = np.sum(nats) / math.log(2) / sum(len(one.content.encode()) for one in documents)
    assert line["bits_per_byte"] == pytest.approx(per_byte, rel=2e-3)  # the first token has bytes, and no score


def test_samples_are_those_of_the_weights(straight, evaluated):
    """Of a run's second samples, whose programs were compiled for the first: an engine of its own says the same."""
    loaded, (_, made) = load(straight), evaluated
    sampler = Sampler(prompts_of(made, 32), loaded.tokenizer, loaded.eos_ids, 32)
    first, second = (line["samples"] for line in log(straight) if "samples" in line)
    assert sampler.sample(loaded.model) == second != first
    assert [one["prompt"] for one in first] == [loaded.tokenizer.decode(ids) for ids in prompts_of(made, 32)]
    with pytest.raises(ValueError, match="a prompt of samples has 30 tokens; 16 fit"):
        Sampler([[1] * 30], loaded.tokenizer, loaded.eos_ids, 32)


def test_prompts_are_what_does_not_count():
    made = corpus([40, 6, 8], counts=[1] * 40 + [0, 0, 0, 1, 1, 1] + [1] * 8)
    assert prompts_of(made, 32) == [list(range(16)), [40, 41, 42]]


def test_samples_are_saved_with_their_step(inputs, tmp_path, monkeypatch):
    """They are in the log before the checkpoint is begun: a kill in between loses both, and both are made up."""
    save, found = Checkpoints.save, []

    def look(self, state, *more):
        found.append((int(state.step), [line["step"] for line in log(tmp_path / "out") if "samples" in line]))
        save(self, state, *more)

    monkeypatch.setattr(Checkpoints, "save", look)
    assert run(inputs, tmp_path / "out", "--evaluate-every", "10", "--sample-every", "10", "--no-baselines") == 0
    assert found == [(10, [10]), (20, [10, 20])]


@pytest.mark.parametrize("share", ["0", "0.05"])
def test_checkpoints_without_evaluations(inputs, tmp_path, capfd, share):
    """Nothing is held out, or a line whose prompt fills a row: said once, and saved when it would be evaluated."""
    lines = [{"text": "the cat sat on a mat"} for _ in range(20)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (kept,) = held_out(read_documents(path), 0.05)[1]
    lines[int(kept.where.split()[-1]) - 1] = {"prompt": "the cat " * 40, "completion": "sat"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--data", path, "--tokenizer", inputs / "tokenizer", "--held-out", share, "--keep", "9"]
    assert run(inputs, tmp_path / "out", *words, "--evaluate-every", "5", "--sample-every", "0") == 0
    assert saved_steps(tmp_path / "out") == [5, 10, 15, 20]
    assert capfd.readouterr().err.count("there is nothing to evaluate") == 1


def test_nan_stops_the_run(inputs, tmp_path, capfd):
    """A learning rate that no weights survive: said with step, place and documents; nothing is saved of it."""
    out = tmp_path / "out"
    words = [*QUIET, "--save-every", "1", "--learning-rate", "1e38", "--clip", "1e38", "--warmup-steps", "0"]
    assert run(inputs, out, *words) == 1
    (bad,) = [line for line in log(out) if "not_finite" in line]
    message = capfd.readouterr().err
    assert f"step {bad['step']}: loss" in message
    assert f"piece {bad['position']['index']} of epoch {bad['position']['epoch']}" in message
    assert 0 < len(bad["documents"]) <= 4
    assert all(name in message for name in bad["documents"])
    assert saved_steps(out)[-1] == bad["step"] - 1
    for name, value in saved_state(out, bad["step"] - 1).items():
        assert np.isfinite(value).all(), name
    assert not (out / "model").exists()


def test_a_second_signal_is_not_held_back():
    def twice():
        with stop_asked() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert asked()
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            twice()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_intervals():
    intervals = Intervals(steps=25, evaluate=10, save=0, sample=7)
    assert [step for step in range(1, 26) if intervals.due("evaluate", step)] == [10, 20, 25]
    assert not any(intervals.due("save", step) for step in range(1, 26))
    with pytest.raises(ValueError, match="sample_every must be at least 0, not -1"):
        Intervals(5, 1, 1, -1)


def test_operations_of_a_step_by_hand():
    """Twice a weight and token, four times a key and query head's dimension, and three times that with gradients."""
    model = model_of()
    packer = Packer(corpus([17] * 8), 8, 16)
    (batch,) = packer.once()
    config = model.config
    matrices = [one.size for one in jax.tree.leaves(nnx.state(model)) if one.ndim == 2]  # tied: the embedding is used
    keys = 8 * sum(range(1, 17)) * 4 * config.num_heads * config.head_dim * len(config.layers)
    assert training_flops(config, batch) == 3 * (2 * 128 * sum(matrices) + keys)
    assert training_flops(config, batch._replace(segments=np.full((8, 16), 16, np.int32))) == 0


@pytest.mark.parametrize("targets", [TARGETS, ("qkv",), ("gate_up",), ("o", "down")])
def test_what_is_frozen_has_no_gradient_to_be_counted(targets):
    """By the weights' names: a product less where there is no adapter; the head, here the embedding, has none."""
    model, lora = model_of(), Lora(2, 4.0, targets)
    (batch,) = Packer(corpus([17] * 8), 8, 16).once()
    config = model.config
    full, matrices = training_flops(config, batch), dict(nnx.to_flat_state(nnx.state(model)))
    frozen = [one.size for path, one in matrices.items() if one.ndim == 2 and path[-2] not in targets]
    assert training_flops(config, batch, lora) == pytest.approx(full - 2 * 128 * sum(frozen))


def test_a_run_in_bfloat16_keeps_float32(inputs, tmp_path):
    out = tmp_path / "out"
    assert run(inputs, out, *QUIET, "--dtype", "bfloat16", "--remat", "--steps", "3") == 0
    state = saved_state(out, 3)
    assert {str(value.dtype) for value in state.values()} == {"float32", "int32"}
    assert load(out).model.embed.weight.dtype == np.float32


def test_two_devices_are_asked_for_rows_they_can_share(inputs, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices() * 3)
    assert main(command(inputs, tmp_path / "out", *QUIET)) == 2
    assert "rows 4 must be a multiple of the 3 devices" in capfd.readouterr().err
