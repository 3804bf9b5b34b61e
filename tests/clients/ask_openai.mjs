// What OpenAI's SDK makes of a server's answers; in node, and in a browser, where page.html says what "openai" is.

import OpenAI from "openai";

export async function ask({ url, models, prompt, length, nobody }) {
  const client = new OpenAI({
    baseURL: `${url}/v1`,
    apiKey: "none",
    maxRetries: 0,
    dangerouslyAllowBrowser: true, // there is no key to be stolen
  });
  const messages = [{ role: "user", content: prompt }];
  const greedy = { temperature: 0, max_tokens: length };
  const streamed = { ...greedy, stream: true, stream_options: { include_usage: true } };
  const { chat, completions } = client;

  async function askModel(model) {
    const whole = await chat.completions.create({ model, messages, ...greedy });
    const text = await completions.create({ model, prompt, ...greedy });
    return {
      chat: reply(whole.choices[0].message.content, whole.usage),
      chatStream: await join(await chat.completions.create({ model, messages, ...streamed })),
      completion: reply(text.choices[0].text, text.usage),
      completionStream: await join(await completions.create({ model, prompt, ...streamed })),
    };
  }

  return {
    listed: (await client.models.list()).data.map((model) => model.id),
    answers: Object.fromEntries(await Promise.all(models.map(async (model) => [model, await askModel(model)]))),
    refused: [
      await refusal(chat.completions.create({ model: nobody, messages })),
      await refusal(chat.completions.create({ model: nobody, messages, stream: true })),
    ],
  };
}

const reply = (text, usage) => [text, usage.prompt_tokens, usage.completion_tokens];

async function join(stream) {
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    const choice = chunk.choices[0];
    text += choice?.delta?.content ?? choice?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  return reply(text, usage);
}

async function refusal(asked) {
  try {
    await asked;
    return null;
  } catch (error) {
    return [error.constructor === OpenAI.NotFoundError, error.status, error.message];
  }
}
