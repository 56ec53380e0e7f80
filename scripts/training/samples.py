"""What the model says for a few prompts while it is trained, through the engine that serves."""

from collections.abc import Sequence
from typing import Any

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.step import split_model
from model.tokenizer import Tokenizer
from model.transformer import Transformer
from scripts.training.tokens import Corpus

PROMPTS, PROMPT_TOKENS, TOKENS = 2, 16, 48


class Sampler:
    """The programs are compiled for the first model; those after it bring their weights alone.

    The same weights give the same samples. Raises ValueError for a prompt that is too long or has no tokens.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, eos_ids: frozenset[int], room: int):
        """`room`: the most tokens, of a prompt and of what follows it."""
        if room < 2:
            raise ValueError(f"samples need a --length of at least 2, not {room}: or --sample-every 0")
        self._tokenizer, self._eos_ids, self._room = tokenizer, eos_ids, room
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=min(TOKENS, room // 2))
        self._requests = [Request(prompt_ids=list(ids), params=params) for ids in prompts]
        for ids in prompts:
            if not ids:
                raise ValueError("a prompt of samples has no tokens")
            if len(ids) + (params.max_tokens or 0) > room:
                raise ValueError(f"a prompt of samples has {len(ids)} tokens; {room - (params.max_tokens or 0)} fit")
        self._engine: Engine | None = None

    def sample(self, model: Transformer) -> list[dict[str, Any]]:
        """Prompts and what follows them, as text. `model` is float32."""
        if not self._requests:
            return []
        if self._engine is None:
            config = EngineConfig(slots=len(self._requests), max_len=self._room, chunk_sizes=(32,), prefix_reuse=False)
            self._engine = Engine(model, config, tokenizer=self._tokenizer, eos_ids=self._eos_ids)
        self._engine.runner.weights = split_model(model)[1]
        outputs = self._engine.generate(self._requests)
        pairs = zip(self._requests, outputs, strict=True)
        return [{"prompt": self._tokenizer.decode(one.prompt_ids or []), "text": out.text} for one, out in pairs]


def prompts_of(corpus: Corpus, room: int) -> list[list[int]]:
    """The beginnings of its first documents: what does not count there, else a few tokens."""
    prompts = []
    for start, end in zip(corpus.starts[:PROMPTS].tolist(), corpus.starts[1:].tolist(), strict=False):
        counted = corpus.counts[start + 1 : end]
        size = 1 + int(counted.argmax()) if counted.any() and not counted[0] else PROMPT_TOKENS
        prompts.append(corpus.ids[start : min(end, start + min(size, room - room // 2))].tolist())
    return [prompt for prompt in prompts if prompt]
