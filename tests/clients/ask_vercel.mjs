// What Vercel's AI SDK makes of a server's answers.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

export async function ask({ url, models, prompt, length, nobody }) {
  const lorax = createOpenAICompatible({ name: "lorax", baseURL: `${url}/v1`, includeUsage: true });
  const greedy = { prompt, temperature: 0, maxOutputTokens: length, maxRetries: 0 };

  async function askModel(name) {
    const chat = lorax.chatModel(name);
    const completion = lorax.completionModel(name);
    return {
      chat: await whole({ model: chat, ...greedy }),
      chatStream: await streamed({ model: chat, ...greedy }),
      completion: await whole({ model: completion, ...greedy }),
      completionStream: await streamed({ model: completion, ...greedy }),
    };
  }

  return {
    answers: Object.fromEntries(await Promise.all(models.map(async (model) => [model, await askModel(model)]))),
    refused: [
      await refusal(generateText({ model: lorax(nobody), ...greedy })),
      await refusal(firstError({ model: lorax(nobody), ...greedy })),
    ],
  };
}

const reply = (text, usage) => [text, usage.inputTokens, usage.outputTokens];

async function whole(asked) {
  const { text, usage } = await generateText(asked);
  return reply(text, usage);
}

async function streamed(asked) {
  const result = streamText(asked);
  let text = "";
  for await (const piece of result.textStream) text += piece;
  return reply(text, await result.usage);
}

// A stream does not throw: it hands its errors to who asked for them.
function firstError(asked) {
  return new Promise((resolve, reject) => {
    streamText({ ...asked, onError: ({ error }) => reject(error) }).consumeStream().then(resolve);
  });
}

async function refusal(asked) {
  try {
    await asked;
    return null;
  } catch (error) {
    return [APICallError.isInstance(error), error.statusCode, error.message];
  }
}
