// The AI SDK: a tool that must be called, whole and streamed, and an object with a schema.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "deltapool",
  baseURL: `${process.env.SERVER}/v1`,
  apiKey: "any",
  supportsStructuredOutputs: true,
});
const schema = jsonSchema({
  type: "object",
  properties: {
    town: { enum: ["Oslo", "Rome"] },
    days: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["town", "days"],
  additionalProperties: false,
});
const base = { model: provider("tiny"), prompt: "How is the weather?", maxOutputTokens: 200, maxRetries: 0 };
const weather = tool({ description: "The weather of a town", inputSchema: schema });
const ask = { ...base, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } };
const check = ({ town, days }) => assert(["Oslo", "Rome"].includes(town) && days >= 1 && days <= 9);

const whole = await generateText(ask);
assert.equal(whole.finishReason, "tool-calls");
check(whole.toolCalls[0].input);

const stream = streamText(ask);
check((await stream.toolCalls)[0].input);
assert.equal(await stream.finishReason, "tool-calls");

check((await generateObject({ ...base, schema })).object);
