// What Vercel's AI SDK makes of forms and functions: by chats, and by responses.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const schema = z.strictObject({ count: z.int().min(0).max(99) });

export async function ask({ url, model, prompt }) {
  const settings = { name: "lorax", baseURL: `${url}/v1`, apiKey: "none" };
  const chats = createOpenAICompatible({ ...settings, supportsStructuredOutputs: true });
  const openai = createOpenAI(settings);
  const providers = { compatible: chats(model), chat: openai.chat(model), responses: openai.responses(model) };
  const asked = Object.entries(providers).map(async ([name, each]) => [name, await askProvider(each, prompt)]);
  return Object.fromEntries(await Promise.all(asked));
}

async function askProvider(model, prompt) {
  const question = { model, prompt, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
  const [objects, calls, agent] = await Promise.all([askObjects(question), askCalls(question), runAgent(question)]);
  return { objects, calls, agent };
}

async function askObjects(question) {
  const output = Output.object({ schema });
  const streamed = streamText({ ...question, output });
  const parts = [];
  for await (const part of streamed.partialOutputStream) parts.push(part);
  const objects = streamObject({ ...question, schema });
  for await (const _ of objects.partialObjectStream);
  return [
    (await generateText({ ...question, output })).output,
    await streamed.output,
    parts.at(-1),
    (await generateObject({ ...question, schema })).object,
    await objects.object,
  ];
}

async function askCalls(question) {
  const tell = tool({ description: "Tell it", inputSchema: schema });
  const found = [];
  for (const toolChoice of ["required", { type: "tool", toolName: "tell" }]) {
    const asked = { ...question, tools: { tell }, toolChoice };
    found.push(await generateText(asked), await settled(streamText(asked)));
  }
  return found.map(({ toolCalls, finishReason }) => [
    finishReason,
    ...toolCalls.map(({ toolName, input }) => [toolName, input]),
  ]);
}

async function settled(result) {
  await result.consumeStream();
  return { toolCalls: await result.toolCalls, finishReason: await result.finishReason };
}

/** A call, its result, and an answer to that. */
async function runAgent(question) {
  const tell = tool({ description: "Tell it", inputSchema: schema, execute: ({ count }) => `${count} kites` });
  const { steps } = await generateText({
    ...question,
    tools: { tell },
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  return steps.map(({ toolResults, text }) => [toolResults.map(({ input, output }) => [input.count, output]), text]);
}
