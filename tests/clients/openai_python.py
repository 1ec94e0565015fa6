"""openai-python: plain, asynchronous and streamed answers, logprobs, several choices, models."""

import asyncio
import os

import openai

URL = os.environ["SERVER"] + "/v1"
STORY = [{"role": "user", "content": "Once upon a time"}]
SAID = " there was a young girl named"
ASK = {"model": "tiny", "messages": STORY, "max_tokens": 6, "temperature": 0}

client = openai.OpenAI(base_url=URL, api_key="any")

whole = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
choice = whole.choices[0]
assert (choice.message.content, choice.finish_reason) == (SAID, "length"), whole
assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 6
assert whole.usage.completion_tokens == 6 and whole._request_id

raw = client.chat.completions.with_raw_response.create(**ASK, extra_headers={"X-Request-Id": "mine"})
assert raw.headers["x-request-id"] == "mine"

chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
assert chunks[-1].usage.completion_tokens == 6

with client.chat.completions.stream(**ASK, stop=" named") as stream:
    events = [event.type for event in stream]
    assert stream.get_final_completion().choices[0].message.content + " named" == SAID
assert "content.delta" in events and "content.done" in events

several = client.chat.completions.create(**{**ASK, "temperature": 1}, n=3, seed=7)
assert [choice.index for choice in several.choices] == [0, 1, 2]

text = client.completions.create(model="tiny", prompt=["Once upon", "One day"], max_tokens=2, logprobs=1)
assert [choice.index for choice in text.choices] == [0, 1]
assert len(text.choices[0].logprobs.tokens) == 2
pieces = client.completions.create(model="tiny", prompt="Once", max_tokens=2, stream=True)
assert [c.choices[0].finish_reason for c in pieces][-1] == "length"

assert client.models.list().data[0].id == "tiny"
assert client.models.retrieve("tiny").max_model_len > 0


async def together():
    async with openai.AsyncOpenAI(base_url=URL, api_key="any") as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(8)))
        assert all(answer.choices[0].message.content == SAID for answer in answers)
        stream = await client.chat.completions.create(**ASK, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == SAID


asyncio.run(together())
