"""OpenAI's own client against the server: everything that comes back is what `engine.generate` gives.

Tokens must be equal. Logprobs are of programs with other numbers of rows, so they may be rounded otherwise: 1e-4.
"""

import asyncio
import itertools
import json

import openai
import pytest

from batching import Request, SamplingParams
from scripts import benchmark

TEXTS = ["The sun is hot", "on the other hand", "abc", "in this one there is no end to it at all"]
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Is it hot?"}]
NEAR = 1e-4
# What OpenAI's client sends -> what the engine is asked, where that is not the same.
OPTIONS = [
    {"temperature": 0, "max_tokens": 12},
    {"max_tokens": 12, "seed": 5},
    {"max_tokens": 9, "temperature": 0.7, "top_p": 0.8, "seed": 11},
    {"max_tokens": 9, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"max_tokens": 9, "seed": 5, "logit_bias": {"77": 60, "78": 60}},
    {"max_tokens": 40, "seed": 5, "stop": ["e", "t"]},
    {"max_tokens": 40, "temperature": 0, "stop": "i"},
    {"max_tokens": 6, "seed": 2**63 - 1},
]
EXTRA = [  # vLLM's
    {"max_tokens": 9, "seed": 3, "top_k": 4, "min_p": 0.05, "repetition_penalty": 1.3},
    {"max_tokens": 30, "seed": 3, "min_tokens": 20, "stop_token_ids": [40, 41, 42, 77, 261, 262], "ignore_eos": True},
    {"max_tokens": 12, "seed": 3, "allowed_token_ids": [70, 71, 72], "bad_words": ["e"]},
]


def expected(alone, prompts, **params):
    return alone.generate(prompts, SamplingParams(**params))


def body(options: dict) -> dict:
    """vLLM's fields go beside those that the client knows."""
    ours = {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids"}
    extra = {name: options[name] for name in options if name in ours | {"bad_words", "regex", "return_token_ids"}}
    return {name: options[name] for name in options if name not in extra} | {"extra_body": extra}


def joined(name: str, told: list) -> list:
    """A list that came in pieces."""
    return [*itertools.chain.from_iterable(getattr(one, name) for one in told)]


def streamed(chunks) -> dict[int, dict]:
    """The choices of a stream, joined."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"text": "", "ids": [], "finish_reason": None, "stop_reason": None})
            one["text"] += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            one["ids"] += getattr(choice, "token_ids", None) or []
            assert one["finish_reason"] is None, "nothing follows the end"
            one["finish_reason"] = choice.finish_reason
            one["stop_reason"] = getattr(choice, "stop_reason", None)
    return found


@pytest.mark.parametrize("options", OPTIONS + EXTRA, ids=str)
def test_completions(client, alone, options):
    outputs = expected(alone, TEXTS, **options)
    whole = client.completions.create(model="tiny", prompt=TEXTS, **body(options | {"return_token_ids": True}))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice, output in zip(whole.choices, outputs, strict=True):
        assert (choice.text, choice.token_ids) == (output.text, output.token_ids)
        assert (choice.finish_reason, choice.stop_reason) == (output.finish_reason, output.stop_reason)
    assert whole.usage.prompt_tokens == sum(output.prompt_tokens for output in outputs)
    assert whole.usage.completion_tokens == sum(output.completion_tokens for output in outputs)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = client.completions.create(
        model="tiny", prompt=TEXTS, stream=True, **body(options | {"return_token_ids": True})
    )
    pieces = streamed(chunks)
    assert sorted(pieces) == [0, 1, 2, 3]
    for index, output in enumerate(outputs):
        assert (pieces[index]["text"], pieces[index]["ids"]) == (output.text, output.token_ids)
        assert pieces[index]["finish_reason"] == output.finish_reason
        assert pieces[index]["stop_reason"] == output.stop_reason


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chats(client, alone, options):
    output = alone.generate([Request(messages=CHAT, params=SamplingParams(**options))])[0]
    options = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in options.items()}
    whole = client.chat.completions.create(model="tiny", messages=CHAT, **options)
    assert whole.choices[0].message.content == output.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == output.finish_reason
    assert whole.usage.completion_tokens == output.completion_tokens
    chunks = [*client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **options)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert streamed(chunks)[0]["text"] == output.text


def test_forms_of_prompts(client, alone):
    ids = [[5, 9, 70], [71, 72, 73, 74]]
    outputs = expected(alone, ids, max_tokens=5, temperature=0)
    for prompt, wanted in ((ids, outputs), (ids[0], outputs[:1])):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
        assert [choice.text for choice in found.choices] == [output.text for output in wanted]
    output = expected(alone, ["abc"], temperature=0, max_tokens=16)[0]  # OpenAI's default
    assert client.completions.create(model="tiny", prompt="abc", temperature=0).choices[0].text == output.text


def test_default_lengths_fit_the_context(client):
    prompt = [70] * 90
    found = client.completions.create(model="tiny", prompt=prompt, extra_body={"ignore_eos": True})
    assert found.usage.completion_tokens == 96 - 90 + 1
    with pytest.raises(openai.BadRequestError, match="do not fit") as told:
        client.completions.create(model="tiny", prompt=prompt, max_tokens=16)
    assert told.value.code == "context_length_exceeded"
    chat = client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"ignore_eos": True})
    assert chat.usage.total_tokens == 96 + 1


def test_several_samples(client, alone):
    outputs = expected(alone, TEXTS[:2], max_tokens=7, seed=4, n=3)
    found = client.completions.create(model="tiny", prompt=TEXTS[:2], max_tokens=7, seed=4, n=3)
    assert [choice.text for choice in found.choices] == [output.text for output in outputs]
    assert found.usage.prompt_tokens == sum(output.prompt_tokens for output in outputs[::3])
    chunks = client.completions.create(model="tiny", prompt=TEXTS[:2], max_tokens=7, seed=4, n=3, stream=True)
    pieces = streamed(chunks)
    assert [pieces[index]["text"] for index in range(6)] == [output.text for output in outputs]


def test_what_is_not_drawn_is_computed_once(client, server, alone):
    outputs = expected(alone, TEXTS[:2], max_tokens=7, temperature=0)
    before = server.engine.stats.generated_tokens
    found = client.completions.create(model="tiny", prompt=TEXTS[:2], max_tokens=7, temperature=0, n=3)
    assert [choice.text for choice in found.choices] == [output.text for output in outputs for _ in range(3)]
    assert server.engine.stats.generated_tokens - before == found.usage.completion_tokens / 3
    chunks = client.completions.create(model="tiny", prompt=TEXTS[:2], max_tokens=7, temperature=0, n=3, stream=True)
    assert [one["text"] for _, one in sorted(streamed(chunks).items())] == [choice.text for choice in found.choices]
    found = client.completions.create(model="tiny", prompt="abc", max_tokens=2, n=2, best_of=2)
    assert len(found.choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(client, alone, stream):
    output = expected(alone, ["The sun"], max_tokens=8, seed=2, logprobs=3)[0]
    found = client.completions.create(
        model="tiny", prompt="The sun", max_tokens=8, seed=2, logprobs=3, stream=stream,
        extra_body={"return_tokens_as_token_ids": True},
    )  # fmt: skip
    told = [one.choices[0].logprobs for one in (found if stream else [found]) if one.choices[0].logprobs]
    assert len(told) > 1 or not stream
    assert joined("tokens", told) == [f"token_id:{token}" for token in output.token_ids]
    assert joined("token_logprobs", told) == pytest.approx([one.logprob for one in output.logprobs], abs=NEAR)
    tops = joined("top_logprobs", told)
    for top, one in zip(tops, output.logprobs, strict=True):
        pairs = zip([*one.top_ids, one.token_id], [*one.top_logprobs, one.logprob], strict=True)
        assert top == {f"token_id:{token}": pytest.approx(logprob, abs=NEAR) for token, logprob in pairs}
    offsets = joined("text_offset", told)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= len(output.text)


@pytest.mark.parametrize("prompt", ["The sun is hot", [70, 71, 300, 72]], ids=str)
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_scores_the_prompt(client, alone, prompt, max_tokens):
    """The request of lm-eval's loglikelihood."""
    output = expected(alone, [prompt], max_tokens=max_tokens, temperature=0, logprobs=1, prompt_logprobs=1)[0]
    ids = alone.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    found = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True
    )
    choice, text = found.choices[0], prompt if isinstance(prompt, str) else alone.tokenizer.decode(prompt)
    assert choice.text == text + output.text
    told = choice.logprobs
    assert len(told.tokens) == len(ids) + len(output.token_ids) == len(told.text_offset) == len(told.top_logprobs)
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    wanted = [one.logprob for one in [*output.prompt_logprobs[1:], *output.logprobs]]
    assert told.token_logprobs[1:] == pytest.approx(wanted, abs=NEAR)
    greedy = [one.logprob >= one.top_logprobs[0] for one in output.prompt_logprobs[1:]]
    found = zip(told.token_logprobs[1 : len(ids)], told.top_logprobs[1 : len(ids)], strict=True)
    assert [logprob == max(top.values()) for logprob, top in found] == greedy
    for place, offset in enumerate(told.text_offset):
        if not told.tokens[place].startswith("bytes:") and place < len(ids):
            assert choice.text[offset:].startswith(told.tokens[place])


def test_echo_without_logprobs(client, alone):
    output = expected(alone, ["abc"], max_tokens=5, temperature=0)[0]
    arguments = {"model": "tiny", "prompt": ["abc", [70, 71]], "temperature": 0, "echo": True}
    found = client.completions.create(**arguments, max_tokens=5)
    assert found.choices[0].text == "abc" + output.text
    assert found.choices[0].logprobs is None
    pieces = streamed(client.completions.create(**arguments, max_tokens=5, stream=True))
    assert [pieces[place]["text"] for place in (0, 1)] == [choice.text for choice in found.choices]
    found = client.completions.create(**arguments, max_tokens=0)
    assert [choice.text for choice in found.choices] == ["abc", alone.tokenizer.decode([70, 71])]
    assert found.usage.completion_tokens == 0


def test_logprobs_of_chats(client, alone):
    params = SamplingParams(max_tokens=6, seed=2, logprobs=2)
    output = alone.generate([Request(messages=CHAT, params=params)])[0]
    arguments = {"model": "tiny", "messages": CHAT, "max_tokens": 6, "seed": 2, "logprobs": True, "top_logprobs": 2}
    chunks = client.chat.completions.create(**arguments, stream=True)
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    whole = client.chat.completions.create(**arguments).choices[0].logprobs.content
    for content in (whole, [*itertools.chain(*pieces)]):
        assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == output.text
        assert [one.logprob for one in content] == pytest.approx([one.logprob for one in output.logprobs], abs=NEAR)
        for one, wanted in zip(content, output.logprobs, strict=True):
            assert [top.logprob for top in one.top_logprobs] == pytest.approx(wanted.top_logprobs, abs=NEAR)
    arguments.pop("top_logprobs")
    assert client.chat.completions.create(**arguments).choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_logprobs(client, alone):
    output = expected(alone, [[70, 71, 72]], max_tokens=0, prompt_logprobs=2)[0]
    found = client.completions.create(
        model="tiny", prompt=[70, 71, 72], max_tokens=0, extra_body={"prompt_logprobs": 2}
    ).choices[0]
    assert found.prompt_logprobs[0] is None
    for told, one in zip(found.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True):
        assert set(told) == {str(token) for token in [*one.top_ids, one.token_id]}
        assert told[str(one.token_id)]["logprob"] == pytest.approx(one.logprob, abs=NEAR)
        assert told[str(one.top_ids[0])]["rank"] == 1
    found = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    )
    assert found.prompt_token_ids == alone.tokenizer.encode_chat(CHAT)
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)
    assert [len(choice.token_ids) for choice in found.choices] == [2, 2]


def test_usage_of_streams(client):
    arguments = {"model": "tiny", "max_tokens": 4, "stream": True, "extra_body": {"ignore_eos": True}}
    arguments["stream_options"] = {"include_usage": True}
    for create, more in (
        (client.completions.create, {"prompt": [[70] * 40] * 2}),
        (client.chat.completions.create, {"messages": CHAT}),
    ):
        *chunks, last = create(**arguments, **more)
        assert last.choices == []
        assert last.usage.completion_tokens == 4 * len(more.get("prompt", [0]))
        assert all(chunk.usage is None for chunk in chunks)
    arguments["stream_options"] |= {"continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(**arguments, messages=CHAT)
    assert [chunk.usage.prompt_tokens for chunk in chunks] == [last.usage.prompt_tokens] * len(chunks)
    so_far = [chunk.usage.completion_tokens for chunk in chunks]
    assert so_far == sorted(so_far)
    assert so_far[-1] == 4
    *_, last = client.completions.create(**arguments, prompt=[[70] * 40] * 2)
    assert last.usage.prompt_tokens == 80
    assert last.usage.prompt_tokens_details.cached_tokens == 78  # all but the last of each: they are in some slot


def test_our_own_client(server, folder, tmp_path):
    """A benchmark takes this server as it is: nothing that it asks for is refused, and all that it needs is told."""
    items = [{"id": str(seed), "prompt_ids": [70 + seed] * 20, "max_tokens": 9, "temperature": 0} for seed in range(5)]
    path, target = tmp_path / "in.jsonl", tmp_path / "figures.json"
    path.write_text("".join(json.dumps(item | {"ignore_eos": True}) + "\n" for item in items))
    arguments = ["--model", str(folder), "--server", server.url, "--workload", str(path), "--repeat", "2"]
    assert benchmark.main([*arguments, "--json", str(target)]) == 0
    runs = json.loads(target.read_text())["runs"]
    assert [run["figures"]["generated_tokens"] for run in runs] == [45, 45]
    assert (runs[1]["compared"], runs[1]["different"]) == (5, [])


async def a_crowd(url: str, count: int) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as one:

        async def ask(number: int) -> str:
            arguments = {"model": "tiny", "prompt": [70 + number, 71], "max_tokens": 20, "seed": number}
            if number % 2:
                return (await one.completions.create(**arguments)).choices[0].text
            chunks = await one.completions.create(**arguments, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        return await asyncio.gather(*map(ask, range(count)))


def test_64_clients_at_once(server, alone):
    found = asyncio.run(a_crowd(server.url, 64))
    requests = [
        Request(prompt_ids=[70 + seed, 71], params=SamplingParams(max_tokens=20, seed=seed)) for seed in range(64)
    ]
    assert found == [output.text for output in alone.generate(requests)]
