"""The command: what it refuses before any work, fine-tuning, adapters, and models that others read."""

import functools
import json
import os
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from batching import Engine, EngineConfig, SamplingParams
from model.checkpoint import load, resolve
from model.config import ModelConfig
from model.gguf_file import GGUFFile
from model.transformer import Transformer
from scripts import train
from scripts.training.base import named_tokenizer, shrink_residuals
from scripts.training.folder import export
from scripts.training.options import Options
from scripts.training.presets import PRESETS
from tests.training.micro import QUIET, WORDS, assert_same_state, logits, residuals, run, saved_state
from tests.training.packs import DATA

# A model of `micro`, trained on its text for 60 steps and then, with adapters, on 200 pairs of a word and its letters
# in reverse for 60 steps more; the logits are those of Hugging Face transformers 5.24 and torch 2.13 in float32.
FINETUNED = DATA / "finetuned"
REVERSED = [{"prompt": f"{word} and", "completion": f" {word[::-1]}"} for word in WORDS * 12][:200]


@pytest.fixture(scope="module")
def inputs(inputs):
    (inputs / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in REVERSED))
    return inputs


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    """A run of two checkpoints."""
    out = tmp_path_factory.mktemp("runs") / "trained"
    assert run(inputs, out, *QUIET, "--save-every", "10") == 0
    return out


def tune(inputs, out, *more):
    words = ["--from", DATA / "llama_tied_gqa4", "--tokenizer", inputs / "tokenizer", "--data", inputs / "pairs.jsonl"]
    words += ["--out", out, "--rows", 4, "--length", 32, *QUIET, *more]
    return train.main([str(word) for word in words])


def losses(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_logits_of_a_finetuned_model_are_those_of_hf(tmp_path):
    """And what is exported is, to the byte, the tensors that HF had when it computed them."""
    expected = np.load(FINETUNED / "hf_logits.npz")
    loaded = load(FINETUNED)
    np.testing.assert_allclose(logits(loaded.model, expected["input_ids"]), expected["logits"], rtol=0, atol=1e-4)
    names = {"eos_ids": loaded.eos_ids, "tokenizer_from": loaded.path}
    export(tmp_path / "again", loaded.hf_config, loaded.model, **names)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (FINETUNED / name).read_bytes()


def test_a_finetuned_model_in_transformers(inputs, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert tune(inputs, tmp_path / "out", "--steps", "5", "--lora-rank", "4", "--learning-rate", "1e-2") == 0
    ids = np.random.default_rng(0).integers(0, 300, (2, 32))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model", dtype=torch.float32)
    with torch.no_grad():
        theirs = other(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits(load(tmp_path / "out").model, ids), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("more", [[], ["--lora-rank", "8", "--lora-targets", "qkv", "down"]])
def test_finetuning_lowers_the_loss(inputs, tmp_path, more):
    """On 200 lines, of which completions alone count; adapters leave all other weights as they are."""
    words = ["--steps", "60", "--learning-rate", "3e-3" if more else "1e-3", "--held-out", "0"]
    assert tune(inputs, tmp_path / "out", *words, *more) == 0
    found = losses(tmp_path / "out")
    assert np.mean(found[-10:]) < 0.5 * np.mean(found[:3])
    before, after = (
        dict(nnx.to_flat_state(nnx.state(load(path).model))) for path in (DATA / "llama_tied_gqa4", tmp_path / "out")
    )
    changed = {path for path, value in before.items() if not np.array_equal(value[...], after[path][...])}
    expected = {path for path in before if not more or path[-2] in ("qkv", "down")}
    assert changed == expected


def test_adapters_go_on_to_the_bit(inputs, tmp_path):
    words = ["--lora-rank", "4", "--steps", "12", "--save-every", "6", "--keep", "5"]
    assert tune(inputs, tmp_path / "straight", *words) == 0
    shutil.copytree(tmp_path / "straight", tmp_path / "out")
    shutil.rmtree(tmp_path / "out/checkpoints/12")
    assert tune(inputs, tmp_path / "out", *words, "--resume") == 0
    one = saved_state(tmp_path / "out", 12)
    assert_same_state(one, saved_state(tmp_path / "straight", 12))
    assert all(name.split(".")[-2] in "ab" for name in one if name.startswith("params."))


def test_a_run_is_served_and_gone_on_with_by_its_folder(inputs, trained, tmp_path):
    assert resolve(str(trained)) == trained / "model"
    engine = Engine.from_pretrained(trained, EngineConfig(slots=2, max_len=32, chunk_sizes=(32,), prefix_reuse=False))
    (output,) = engine.generate(["the cat sat"], SamplingParams(temperature=0, max_tokens=8))
    assert output.finish_reason in ("length", "stop")
    words = ["--from", trained, "--data", inputs / "pairs.jsonl", "--out", tmp_path / "tuned", "--rows", 4]
    words += ["--length", 32]
    assert train.main([str(word) for word in [*words, *QUIET, "--steps", 2]]) == 0
    assert load(tmp_path / "tuned").tokenizer.encode("a cat") == load(trained).tokenizer.encode("a cat")


def test_prompts_that_are_too_long_are_told_of(inputs, tmp_path, capfd):
    pairs = [{"prompt": "the cat sat " * 40, "completion": "yes"}] * 2 + REVERSED[:9]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ["--data", tmp_path / "pairs.jsonl", "--steps", "1", "--held-out", "0"]
    assert tune(inputs, tmp_path / "out", *words) == 0
    assert "2 prompts or chats are longer than --length" in " ".join(capfd.readouterr().err.split())


def test_any_step_can_be_exported(trained, tmp_path, capfd):
    words = ["export", "--run", str(trained), "--out"]
    assert train.main([*words, str(tmp_path / "ten"), "--step", "10"]) == 0
    assert train.main([*words, str(tmp_path / "best")]) == 0
    ten, best = (load_file(tmp_path / name / "model.safetensors") for name in ("ten", "best"))
    served = load_file(trained / "model/model.safetensors")
    assert all(np.array_equal(value, served[name]) for name, value in best.items())
    embedding = ten["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding, saved_state(trained, 10)["params.embed.weight.value"])
    assert not np.array_equal(embedding, served["model.embed_tokens.weight"])
    assert train.main([*words, str(tmp_path / "ten")]) == 2
    assert train.main([*words, str(tmp_path / "none"), "--step", "11"]) == 2
    assert train.main(["export", "--run", str(tmp_path), "--out", str(tmp_path / "none")]) == 2
    message = capfd.readouterr().err
    assert "ten exists already" in message
    assert "no checkpoint of step 11; it has [10, 20]" in message
    assert "run.json" in message
    assert not (tmp_path / "none").exists()


def test_a_model_of_a_gguf_file_that_hf_cannot_express_is_kept(tmp_path):
    loaded = load(DATA / "llama_tied_gqa4")
    config = loaded.hf_config | {"rope_freq_factors": [2.0] * 4}
    model = Transformer(ModelConfig.from_hf(config, freq_factors=True), rngs=nnx.Rngs(0))
    export(tmp_path / "model", config, model, eos_ids=[2], tokenizer_from=loaded.path, replace=True)
    export(tmp_path / "model", config, model, eos_ids=[2], tokenizer_from=loaded.path, replace=True)
    assert load(tmp_path / "model").config == model.config
    assert os.listdir(tmp_path) == ["model"]


def test_the_tokenizer_of_what_was_a_gguf_file(tmp_path):
    """A folder that was exported from one has it as a file of that kind."""
    path = resolve("smollm2-135m-instruct")
    (tmp_path / "tokenizer.gguf").write_bytes(GGUFFile(path).metadata())
    (_, found), (_, right) = named_tokenizer(str(tmp_path)), named_tokenizer(str(path))
    assert found.encode("Why is the sky blue?") == right.encode("Why is the sky blue?")


def test_another_run_is_not_gone_on_with(inputs, trained, capfd):
    def refused(*more):
        assert run(inputs, trained, *QUIET, "--save-every", "10", *more) == 2
        return capfd.readouterr().err

    assert "is not empty: --resume" in refused()
    for words, reason in (
        (["--learning-rate", "0.5"], "learning_rate was 0.001, now 0.5"),
        (["--rows", "8"], "rows was 4, now 8"),
        (["--steps", "30"], "steps was 20, now 30"),
        (["--seed", "4"], "seed was 0, now 4"),
        (["--held-out", "0.5"], "training_data was"),
        (["--dtype", "bfloat16"], 'dtype was "float32", now "bfloat16"'),
        (["--accumulate", "2"], "accumulate was 1, now 2"),
    ):
        message = refused("--resume", *words)
        assert reason in message
        assert "of another run" in message
    assert run(inputs, trained, *QUIET, "--save-every", "10", "--resume", "--keep", "7") == 0  # changes no number


def test_what_cannot_be_written_or_resumed_is_an_error_before_any_work(inputs, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(train, "read_documents", lambda path: pytest.fail("it began"))
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    for out, reason, more in (
        (tmp_path / "file" / "out", "file", []),
        (tmp_path / "file", "file", []),
        ("/proc/out", "/proc/out", []),
        (tmp_path / "other", "is not empty", []),
        (tmp_path / "other", "holds no run", ["--resume"]),
    ):
        assert run(inputs, out, *more) == 2, out
        assert reason in capfd.readouterr().err
    assert run(inputs, tmp_path / "out", "--json", tmp_path / "file" / "x.json") == 2


BAD_OPTIONS = {
    ("--preset", "tiny"): "exactly one of --preset, --config, --from",
    ("--lora-alpha", "3"): "need --lora-rank",
    ("--lora-rank", "4"): "already: --from",
    ("--held-out", "1"): "held_out must be at least 0 and below 1, not 1",
    ("--accumulate", "0"): "accumulate must be at least 1, not 0",
    ("--rows", "0"): "rows must be at least 1, not 0",
    ("--seed", "-1"): "seed must be from 0",
    ("--steps", "0"): "steps must be at least 1, not 0",
    ("--learning-rate", "nan"): "learning_rate must be positive",
    ("--warmup-steps", "20"): "warmup_steps must be from 0 to steps - 1",
}


@pytest.mark.parametrize("words", BAD_OPTIONS, ids=" ".join)
def test_options_that_cannot_be_are_refused(tmp_path, capsys, words):
    with pytest.raises((SystemExit, ValueError)) as error:
        run(tmp_path, tmp_path / "out", *words)
    assert BAD_OPTIONS[words] in " ".join((capsys.readouterr().err + str(error.value)).replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--length", "65"], "length 65 exceeds the model's 64 positions"),
        (["--held-out", "0.9999"], "leaves none to train on"),
        (["--tokenizer", "{inputs}"], "has no tokenizer"),
        (["--data", "{inputs}/config.json"], "must end in one of"),
        (["--evaluate-every", "-1"], "evaluate_every must be at least 0"),
        (["--sample-every", "5", "--prompts", "a cat " * 40], "a prompt of samples has"),
    ],
)
def test_what_does_not_go_together_is_refused(inputs, tmp_path, capfd, words, reason):
    words = [word.format(inputs=inputs) for word in words]
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "out", tmp_path / "empty"):
        assert run(inputs, out, *words) == 2
        assert reason in capfd.readouterr().err
    assert [file.name for file in tmp_path.rglob("*")] == ["empty"]  # to be tried again


def test_presets_are_models_of_their_size():
    for name, least, most in (("tiny", 2.5e6, 3.5e6), ("small", 20e6, 30e6)):
        config = ModelConfig.from_hf(PRESETS[name].hf_config)
        shapes = nnx.eval_shape(functools.partial(lambda config: Transformer(config, rngs=nnx.Rngs(0)), config))
        assert least < sum(one.size for one in jax.tree.leaves(nnx.state(shapes))) < most
        assert PRESETS[name].length <= config.max_positions


@pytest.mark.parametrize("name", ["llama_tied_gqa4", "mixtral_moe", "gemma2"])
def test_what_new_layers_add_is_as_large_as_the_embedding(name):
    """By a walk through the layers; outputs that are normalised have the size that the norm gives them."""
    loaded = load(DATA / name)
    model = Transformer(loaded.config, rngs=nnx.Rngs(0))
    before = model.layers[0].attention.o.weight[...]
    shrink_residuals(model)
    changed = not np.array_equal(before, model.layers[0].attention.o.weight[...])
    assert changed == (name != "gemma2")
    if not changed:
        return
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, 32)
    embedded, hidden = np.asarray(model.embed.weight[...])[ids], residuals(model, ids)
    assert 0.2 < (hidden - embedded).std() / embedded.std() < 1.5  # what attention averages, and gates halve, is less


def test_a_short_run_has_a_short_warmup(tmp_path):
    def warmup(**more):
        return Options(tmp_path, tmp_path, preset="tiny", **more).recipe().warmup_steps

    assert warmup() == PRESETS["tiny"].recipe.warmup_steps
    assert (warmup(steps=100), warmup(steps=1), warmup(steps=100, warmup_steps=50)) == (9, 0, 50)


@pytest.mark.slow
def test_smollm2_learns_two_hundred_lines(tmp_path):
    """The real model, a few steps with adapters and without."""
    chats = [(f"Reverse {number}.", str(number)[::-1]) for number in range(1000, 1200)]
    lines = [{"messages": [dict(role="user", content=q), dict(role="assistant", content=a)]} for q, a in chats]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, more in (
        ("all", ["--learning-rate", "1e-4"]),
        ("adapters", ["--lora-rank", "8", "--learning-rate", "1e-3"]),
    ):
        words = ["--from", "smollm2-135m-instruct", "--data", tmp_path / "lines.jsonl", "--out", tmp_path / name]
        words += ["--steps", 12, "--rows", 4, "--length", 128, *QUIET, "--held-out", 0, *more]
        assert train.main([str(word) for word in words]) == 0
        found = losses(tmp_path / name)
        assert np.mean(found[-3:]) < 0.7 * found[0]
        shutil.rmtree(tmp_path / name)
