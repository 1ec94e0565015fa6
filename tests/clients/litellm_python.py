"""litellm: its generic and its vLLM providers, streams, and the errors that it tells apart."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

URL = os.environ["SERVER"] + "/v1"
SAID = " there was a young girl named"
STORY = [{"role": "user", "content": "Once upon a time"}]
ASK = {"messages": STORY, "max_tokens": 6, "temperature": 0, "api_base": URL, "api_key": "any", "num_retries": 0}

for provider in ["openai", "hosted_vllm"]:
    model = f"{provider}/tiny"
    whole = litellm.completion(model=model, **ASK)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (SAID, "length")
    assert whole.usage.completion_tokens == 6
    stream = litellm.completion(model=model, stream=True, stream_options={"include_usage": True}, **ASK)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == SAID

long = {**ASK, "messages": [{"role": "user", "content": "a dog " * 9000}]}
for fields, kind in [
    ({**ASK, "model": "openai/other"}, litellm.NotFoundError),
    ({**long, "model": "openai/tiny"}, litellm.ContextWindowExceededError),
    ({**ASK, "model": "openai/tiny", "top_p": 2}, litellm.BadRequestError),
]:
    try:
        litellm.completion(**fields)
    except kind:
        pass
    else:
        raise AssertionError(f"no {kind.__name__}")
