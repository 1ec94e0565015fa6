"""anthropic: whole and streamed messages, marked prefixes, counts and errors."""

import os

import anthropic

SAID = " there was a young girl named"
STORY = [{"role": "user", "content": "Once upon a time"}]
# This client has no parameter for the temperature any more.
ASK = {"model": "tiny", "messages": STORY, "max_tokens": 6, "extra_body": {"temperature": 0}}

client = anthropic.Anthropic(base_url=os.environ["SERVER"], api_key="any", max_retries=0)

whole = client.messages.create(**ASK)
assert (whole.content[0].text, whole.stop_reason) == (SAID, "max_tokens"), whole
assert whole.usage.output_tokens == 6 and whole._request_id

with client.messages.stream(**ASK) as stream:
    assert "".join(stream.text_stream) == SAID
    final = stream.get_final_message()
assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)

ended = client.messages.create(**ASK, stop_sequences=["young"])
assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "young")

count = client.messages.count_tokens(model="tiny", messages=STORY, system="Tell a story.")
asked = client.messages.create(**ASK, system="Tell a story.")
assert count.input_tokens == asked.usage.input_tokens + asked.usage.cache_read_input_tokens

rules = {"type": "text", "text": "Be kind to every dog. " * 40, "cache_control": {"type": "ephemeral"}}
first = client.messages.create(**ASK, system=[rules]).usage
second = client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "One"}]}, system=[rules]).usage
assert first.cache_creation_input_tokens > 64, first
assert second.cache_read_input_tokens > 64, second

for fields, kind in [
    ({"model": "other"}, anthropic.NotFoundError),
    ({"max_tokens": 0}, anthropic.BadRequestError),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError),
]:
    try:
        client.messages.create(**{**ASK, **fields})
    except kind as error:
        assert error.body["type"] == "error" and error.request_id, error
    else:
        raise AssertionError(f"no error for {fields}")
