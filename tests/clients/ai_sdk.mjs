// The AI SDK over its OpenAI-compatible provider: whole and streamed texts.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const said = " there was a young girl named";
const provider = createOpenAICompatible({
  name: "deltapool",
  baseURL: `${process.env.SERVER}/v1`,
  apiKey: "any",
  includeUsage: true,
});
const ask = {
  model: provider("tiny"),
  prompt: "Once upon a time",
  maxOutputTokens: 6,
  temperature: 0,
  maxRetries: 0,
};

const whole = await generateText(ask);
assert.equal(whole.text, said);
assert.equal(whole.finishReason, "length");
assert.equal(whole.usage.outputTokens, 6);

const stream = streamText(ask);
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, said);
assert.equal((await stream.usage).outputTokens, 6);

await assert.rejects(generateText({ ...ask, topP: 2 }), /top_p/);
