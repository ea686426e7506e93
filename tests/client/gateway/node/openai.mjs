// Makes every call of a file with the openai SDK and prints what came back, a JSON object by name:
// node openai.mjs FILE    (FILE: [{"name", "url", "call", "request"}])
import { readFileSync } from "node:fs";
import OpenAI from "openai";

async function collected(items) {
  const all = [];
  for await (const item of items) all.push(item);
  return all;
}

async function made(client, url, call, request, came) {
  if (call.startsWith("POST ")) return client.post(url + call.slice(5), { body: request });
  if (call === "models.list") return { data: await collected(client.models.list()) };
  if (call === "models.retrieve") return client.models.retrieve(request.model);
  if (call === "responses.retrieve") return client.responses.retrieve(request.response_id);
  if (call === "responses.text") return { text: (await client.responses.create(request)).output_text };
  if (call === "responses.final") return { text: (await client.responses.stream(request).finalResponse()).output_text };
  const names = call.replace("input_tokens", "inputTokens").split(".");
  const method = names.pop();
  const answer = await names.reduce((place, name) => place[name], client)[method](request);
  if (!request.stream) return answer;
  came.chunks = [];
  for await (const chunk of answer) came.chunks.push(chunk);
}

const answers = {};
for (const { name, url, call, request } of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const came = (answers[name] = {});
  try {
    const answer = await made(client, url, call, request, came);
    if (answer !== undefined) came.answer = answer;
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    const { status = null, code, param, type } = error;
    came.error = { class: error.constructor.name, status, message: error.error?.message, type, param, code };
  }
}
console.log(JSON.stringify(answers));
