"""langchain-openai: bound tools and structured output."""

import os
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel, extra="forbid"):
    """The weather of a town."""

    town: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


model = ChatOpenAI(
    model="tiny",
    base_url=os.environ["SERVER"] + "/v1",
    api_key="any",
    max_completion_tokens=200,
    max_retries=0,
)

bound = model.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
call = bound.invoke("How is the weather?").tool_calls[0]
assert call["name"] == "Weather" and Weather(**call["args"])

pieces = None
for piece in bound.stream("How is the weather?"):
    pieces = piece if pieces is None else pieces + piece
assert Weather(**pieces.tool_calls[0]["args"])

for method in ["json_schema", "function_calling"]:
    asked = model.with_structured_output(Weather, method=method)
    assert asked.invoke("How is the weather?").town in ("Oslo", "Rome"), method
