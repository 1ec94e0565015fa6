"""langchain-openai: invoke, batch and stream."""

import os

from langchain_openai import ChatOpenAI

SAID = " there was a young girl named"
model = ChatOpenAI(
    model="tiny",
    base_url=os.environ["SERVER"] + "/v1",
    api_key="any",
    temperature=0,
    max_completion_tokens=6,
    stream_usage=True,
)

answer = model.invoke("Once upon a time")
assert answer.content == SAID, answer
assert answer.response_metadata["finish_reason"] == "length"
assert answer.usage_metadata["output_tokens"] == 6

pieces = list(model.stream("Once upon a time"))
assert "".join(piece.content for piece in pieces) == SAID
assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 6

assert [a.content for a in model.batch(["Once upon a time"] * 4)] == [SAID] * 4
turns = [("system", "Tell a story."), ("human", "One day"), ("ai", " a dog ran."), ("human", " Then")]
assert model.invoke(turns).response_metadata["finish_reason"] in ("length", "stop")
