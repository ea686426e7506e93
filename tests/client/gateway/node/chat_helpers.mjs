// The openai SDK's helpers for conversations with tools: node chat_helpers.mjs URL QUESTION
// runTools calls the function and asks again until there is an answer; stream() puts the chunks together.
import OpenAI from "openai";

const [url, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const asked = [];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters,
    parse: JSON.parse,
    function: ({ city }) => {
      asked.push(city);
      return "rain [tool result]";
    },
  },
};
const messages = [{ role: "user", content: question }];
const results = {};
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model: "tiny", messages, tools: [tool], stream });
  results[stream ? "streamed" : "whole"] = await runner.finalContent();
}
const { function: { name, description } } = tool;
const tools = [{ type: "function", function: { name, description, parameters } }];
const stream = client.chat.completions.stream({ model: "tiny", messages, tools });
const fragments = [];
stream.on("tool_calls.function.arguments.delta", (event) => fragments.push(event.arguments_delta));
const final = await stream.finalChatCompletion();
console.log(JSON.stringify({ asked, results, fragments, message: final.choices[0].message }));
