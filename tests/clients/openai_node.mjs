// openai-node: whole and streamed answers, its stream helper, and errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const said = " there was a young girl named";
const client = new OpenAI({ baseURL: `${process.env.SERVER}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Once upon a time" }];
const ask = { model: "tiny", messages, max_tokens: 6, temperature: 0 };

const whole = await client.chat.completions.create(ask);
assert.equal(whole.choices[0].message.content, said);
assert.equal(whole.choices[0].finish_reason, "length");

let text = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, said);

const stream = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].message.content, said);
assert.equal(final.usage.completion_tokens, 6);

const parts = [{ type: "text", text: "Once upon" }, { type: "text", text: "a time" }];
const ofParts = await client.chat.completions.create({ ...ask, messages: [{ role: "user", content: parts }] });
assert.equal(ofParts.choices.length, 1);

await assert.rejects(client.chat.completions.create({ ...ask, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...ask, top_p: 2 }), (error) => error.param === "top_p");

// A stream that is left is cancelled, and the next request is served.
const left = await client.chat.completions.create({ ...ask, max_tokens: 6000, stream: true });
left.controller.abort();
assert.equal((await client.chat.completions.create(ask)).choices[0].message.content, said);
