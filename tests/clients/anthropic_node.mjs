// @anthropic-ai/sdk: whole and streamed messages, counts and errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const said = " there was a young girl named";
const client = new Anthropic({ baseURL: process.env.SERVER, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Once upon a time" }];
const ask = { model: "tiny", messages, max_tokens: 6, temperature: 0 };

const whole = await client.messages.create(ask);
assert.equal(whole.content[0].text, said);
assert.equal(whole.stop_reason, "max_tokens");

const stream = client.messages.stream(ask);
let text = "";
stream.on("text", (piece) => (text += piece));
const final = await stream.finalMessage();
assert.equal(text, said);
assert.equal(final.content[0].text, said);
assert.equal(final.usage.output_tokens, 6);

const { input_tokens } = await client.messages.countTokens({ model: "tiny", messages });
assert.equal(input_tokens, final.usage.input_tokens + final.usage.cache_read_input_tokens);

await assert.rejects(client.messages.create({ ...ask, model: "other" }), Anthropic.NotFoundError);
