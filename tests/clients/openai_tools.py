"""openai-python: tools that must be called, whole and streamed, two turns, and answers with a schema."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=os.environ["SERVER"] + "/v1", api_key="any", max_retries=0)


class Weather(BaseModel):
    """The weather of a town."""

    town: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


tool = openai.pydantic_function_tool(Weather)
messages = [{"role": "user", "content": "How is the weather?"}]
ASK = {"model": "tiny", "max_tokens": 200, "temperature": 1, "tools": [tool], "tool_choice": "required",
       "parallel_tool_calls": False}

for seed in range(5):
    whole = client.chat.completions.create(**ASK, messages=messages, seed=seed)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, whole
    call = choice.message.tool_calls[0]
    Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**ASK, messages=messages, seed=seed) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.parsed_arguments.town in ("Oslo", "Rome")
    # The client sends the call back, in a form of its own, with what the tool said.
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "blue"})}
    turns = [*messages, choice.message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(**ASK, messages=turns, seed=seed)
    Weather.model_validate_json(second.choices[0].message.tool_calls[0].function.arguments)

asked = {"model": "tiny", "messages": messages, "max_tokens": 200}
parsed = client.chat.completions.parse(**asked, response_format=Weather)
assert parsed.choices[0].message.parsed.days in range(1, 10)
with client.chat.completions.stream(**asked, response_format=Weather) as stream:
    assert stream.get_final_completion().choices[0].message.parsed.town in ("Oslo", "Rome")
