"""openai-python: errors come as its own exceptions, and a busy server is asked again."""

import os
import threading
import time

import openai

client = openai.OpenAI(base_url=os.environ["SERVER"] + "/v1", api_key="any", max_retries=0)
# This server takes one request at a time.
busy = openai.OpenAI(base_url=os.environ["BUSY_SERVER"] + "/v1", api_key="any")


def ask(client=client, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    return client.chat.completions.create(**{**body, **fields})


for fields, kind, code in [
    ({"model": "other"}, openai.NotFoundError, "model_not_found"),
    ({"temperature": -1}, openai.BadRequestError, "invalid_value"),
    ({"messages": []}, openai.BadRequestError, "invalid_value"),
    ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "unsupported_parameter"),
    (
        {"messages": [{"role": "user", "content": "a dog " * 9000}]},
        openai.BadRequestError,
        "context_length_exceeded",
    ),
]:
    try:
        ask(**fields)
    except kind as error:
        assert (error.code, bool(error.request_id)) == (code, True), error
    else:
        raise AssertionError(f"no error for {fields}")


def hold(stream):
    for _ in stream:
        pass


stream = ask(busy, max_tokens=6000, stream=True, extra_body={"ignore_eos": True})
try:
    ask(busy.with_options(max_retries=0))
    raise AssertionError("the server took two requests")
except openai.InternalServerError as error:
    assert error.status_code == 503 and error.code == "queue_full", error
    assert int(error.response.headers["retry-after"]) >= 1
    assert error.response.headers["retry-after-ms"].isdigit()
# The client waits as it was told and finds a place.
threading.Timer(0.2, stream.close).start()
assert ask(busy.with_options(max_retries=10)).choices[0].finish_reason == "length"
