// Asks every request of a file with the openai SDK and prints what came back, a JSON object by name:
// node chat.mjs FILE    (FILE: [{"name", "url", "request"}])
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const answers = {};
for (const { name, url, request } of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const came = (answers[name] = {});
  try {
    const answer = await client.chat.completions.create(request);
    if (request.stream) {
      came.chunks = [];
      for await (const chunk of answer) came.chunks.push(chunk);
    } else {
      came.answer = answer;
    }
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    const { status = null, code, param, type } = error;
    came.error = { class: error.constructor.name, status, message: error.error?.message, type, param, code };
  }
}
console.log(JSON.stringify(answers));
