"""Options: each reaches what it is about, and one that would do nothing is refused."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from model.config import ModelConfig
from model.transformer import Transformer
from scripts import train
from scripts.command import Refused
from scripts.training.base import check_honoured, named_tokenizer, new_base
from scripts.training.baselines import baselines
from scripts.training.data import held_out, read_documents
from scripts.training.loop import Intervals
from scripts.training.lora import Lora
from scripts.training.options import Options
from scripts.training.setup import evaluation_of
from scripts.training.step import Trainer
from scripts.training.tokens import tokenise
from tests.training.micro import CONFIG, QUIET, command, run
from tests.training.packs import DATA


@pytest.fixture
def loop_of(monkeypatch):
    """What a command line comes to when all is ready: the arguments of its loop."""
    caught = []

    def catch(*arguments, **named):
        caught.append((arguments, named))
        raise Refused("caught")

    def of(words):
        monkeypatch.setattr(train, "Loop", catch)
        assert train.main([str(word) for word in words]) == 2
        return caught.pop()

    return of


def program(trainer, packer):
    """Of the gradient of a batch."""
    (batch,) = packer.once(1)
    return str(jax.make_jaxpr(trainer._gradient)(trainer.init().params, trainer._base, batch))


def test_what_is_asked_for_is_what_runs(inputs, tmp_path, loop_of):
    """Unusual values all at once, on a model from nothing."""
    words = ["--seed", 7, "--remat", "--dtype", "bfloat16", "--accumulate", 3, "--rows", 2, "--length", 16]
    words += ["--evaluate-every", 4, "--evaluate-batches", 3, "--save-every", 6, "--sample-every", 9, "--keep", 5]
    (trainer, packer, evaluation, _, _, intervals), named = loop_of(command(inputs, tmp_path / "out", *words))
    assert (trainer.lora, named["accumulate"], intervals) == (None, 3, Intervals(20, 4, 6, 9))
    assert (packer.rows, packer.length, packer.seed) == (2, 16, 7)
    assert [batch.tokens.shape for batch in evaluation.batches] == [(2, 16)] * 3
    recipe = Options(tmp_path, tmp_path, config=tmp_path, steps=20).recipe()
    found = program(trainer, packer)
    other, plain = (
        program(Trainer(trainer.model(trainer.init()), recipe, compute_dtype=jnp.bfloat16, remat=remat), packer)
        for remat in (True, False)
    )
    assert found.count("remat") == other.count("remat") > plain.count("remat")
    assert found.count("bf16") == other.count("bf16") > 0
    right = Transformer(trainer.config, rngs=nnx.Rngs(7)).layers[0].attention.qkv.weight[...]
    np.testing.assert_array_equal(trainer.model(trainer.init()).layers[0].attention.qkv.weight[...], right)


def test_adapters_that_are_asked_for(inputs, tmp_path, loop_of):
    words = ["--from", DATA / "llama_tied_gqa4", "--tokenizer", inputs / "tokenizer", "--data", inputs / "text.txt"]
    words += ["--out", tmp_path / "out", "--rows", 2, "--length", 16, *QUIET]
    words += ["--lora-rank", 3, "--lora-alpha", 5, "--lora-targets", "o", "down", "--seed", 9]
    (trainer, packer, evaluation, *_), _ = loop_of(words)
    assert trainer.lora == Lora(3, 5.0, ("o", "down"), 9)
    assert (packer.seed, evaluation) == (9, None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (dict(prompts=("a cat",), sample_every=0), "--prompts are for samples"),
        (dict(evaluate_batches=2, held_out=0.0), "--evaluate-batches needs evaluations"),
        (dict(evaluate_batches=2, evaluate_every=0), "--evaluate-batches needs evaluations"),
        (dict(seed=1 << 32), r"seed must be from 0 to 2\*\*32 - 1, not 4294967296"),
    ],
)
def test_options_that_would_do_nothing(tmp_path, more, reason):
    with pytest.raises(ValueError, match=reason):
        Options(tmp_path, tmp_path, preset="tiny", **more)


def test_fields_of_a_config_that_would_do_nothing(inputs, tmp_path, capfd):
    """For a new model: one that is there already was trained as it was."""
    for field, value in (("attention_dropout", 0.3), ("resid_pdrop", 0.1), ("output_router_logits", True)):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {field: value}))
        assert run(inputs, tmp_path / "out", *QUIET, "--config", tmp_path / "config.json") == 2
        assert f"config field '{field}' is {str(value).lower()}" in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
    check_honoured(CONFIG | {"attention_dropout": 0.0, "embd_pdrop": None, "output_router_logits": False})


def test_the_deviation_of_new_weights(inputs):
    """What `initializer_range` says of all matrices, to some 1 / sqrt(2 * 2048) of it, three times that."""
    path, tokenizer = named_tokenizer(str(inputs / "tokenizer"))
    base = new_base(CONFIG | {"initializer_range": 0.03}, tokenizer, path, 0)
    matrices = [one for one in jax.tree.leaves(nnx.state(base.model)) if one.ndim == 2]
    assert len(matrices) == 9
    assert all(float(jnp.std(one)) == pytest.approx(0.03, rel=0.05) for one in matrices)
    for wrong in (0, "0.02"):
        with pytest.raises(ValueError, match="'initializer_range' must be a positive number"):
            new_base(CONFIG | {"initializer_range": wrong}, tokenizer, path, 0)
    assert ModelConfig.from_hf(base.hf_config) == base.config


def test_samples_that_could_not_be(inputs, tmp_path, capfd):
    """Before anything is written, and before any step."""
    for words, reason in (
        (["--prompts", "", "--tokenizer", inputs / "tokenizer"], "a prompt of samples has no tokens"),
        (["--length", "1"], "samples need a --length of at least 2, not 1"),
    ):
        assert run(inputs, tmp_path / "out", *words) == 2
        assert reason in capfd.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_run_is_not_part_of_its_data(inputs, tmp_path, capfd, monkeypatch):
    """Its log would be, once it is gone on with."""
    monkeypatch.setattr(train, "read_documents", lambda path: pytest.fail("it began"))
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "link").symlink_to(data)
    for out in (data / "run", tmp_path / "link/deep/run", data):
        assert run(inputs, out, *QUIET, "--data", data) == 2
        assert f"--out {out} lies in --data {data}" in capfd.readouterr().err
    assert not list(data.iterdir())


def test_too_little_memory_names_what_training_has(inputs, tmp_path, capfd, monkeypatch):
    def full(path):
        raise MemoryError

    monkeypatch.setattr(train, "read_documents", full)
    assert run(inputs, tmp_path / "out") == 2
    message = capfd.readouterr().err
    assert "not enough memory; fewer --rows, a smaller --length or --remat would take less" in message


@pytest.fixture(scope="module")
def kept(inputs):
    """What a run holds out, tokenised, and what is left; ASCII, so that bytes are characters."""
    _, tokenizer = named_tokenizer(str(inputs / "tokenizer"))
    parts = held_out(read_documents(inputs / "text.txt"), 0.2)
    return [tokenise(part, tokenizer, tokenizer.eos_ids, 300, Console(stderr=True)) for part in parts], tokenizer


def test_counting_is_done_on_what_is_evaluated(inputs, tmp_path, kept):
    (trained, text), tokenizer = kept
    asked = dict(rows=4, length=32, preset="tiny", held_out=0.2)
    evaluation, part = evaluation_of(Options(tmp_path, tmp_path, evaluate_batches=2, **asked), text, tokenizer)
    assert len(evaluation.batches) == 2
    targets = np.concatenate([batch.targets[batch.weights > 0] for batch in evaluation.batches])
    assert sorted(targets) == sorted(part.ids[part.counts])
    assert 0 < part.targets <= 256 < text.targets
    assert part.text_bytes == pytest.approx(len(tokenizer.decode(targets.tolist())), abs=1)
    assert evaluation.bytes_per_token == part.text_bytes / part.targets
    whole, all_of_it = evaluation_of(Options(tmp_path, tmp_path, **asked), text, tokenizer)
    assert (all_of_it.targets, all_of_it.text_bytes) == (text.targets, text.text_bytes)
    assert whole.bytes_per_token == text.text_bytes / text.targets

    words = ["--tokenizer", inputs / "tokenizer", "--evaluate-batches", 2, "--sample-every", 0, "--steps", 2]
    assert run(inputs, tmp_path / "out", *words, "--json", tmp_path / "figures.json") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["baselines"] == pytest.approx(baselines(trained, part, 300)._asdict())
    per_byte = figures["evaluation_loss"] * part.targets / math.log(2) / part.text_bytes
    assert figures["bits_per_byte"] == pytest.approx(per_byte)
