"""anthropic: tools that must be called, whole and streamed, and their results sent back."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["SERVER"], api_key="any", max_retries=0)
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather of a town", "input_schema": SCHEMA}
ASK = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}
messages = [{"role": "user", "content": "How is the weather?"}]
anyhow = {"type": "any", "disable_parallel_tool_use": True}


def check(message):
    assert message.stop_reason == "tool_use", message
    block = message.content[-1]
    assert block.type == "tool_use" and block.name == "weather"
    assert block.input["town"] in ("Oslo", "Rome") and 1 <= block.input["days"] <= 9
    return block


for choice in [anyhow, {"type": "tool", "name": "weather"}]:
    first = client.messages.create(**ASK, messages=messages, tool_choice=choice)
    call = check(first)
    with client.messages.stream(**ASK, messages=messages, tool_choice=choice) as stream:
        kinds = {event.type for event in stream}
        check(stream.get_final_message())
    assert {"content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds, kinds
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Blue sky."}
    turns = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    check(client.messages.create(**ASK, messages=turns, tool_choice=choice))
    free = client.messages.create(**{**ASK, "max_tokens": 8}, messages=turns, tool_choice={"type": "none"})
    assert free.stop_reason in ("max_tokens", "end_turn") and free.content[0].type == "text"
