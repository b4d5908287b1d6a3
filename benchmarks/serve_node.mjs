// Runs JavaScript clients, unchanged, against a mock that answers by the rules of serve_agents.py:
//
//   python benchmarks/serve_agents.py --node /packages --python /venvs/any/bin/python --only node
//
// Arguments: the URL of the mock, and the folder with node_modules (openai, ai, @ai-sdk/openai-compatible, zod).
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, packages, only] = process.argv.slice(2);
const require = createRequire(pathToFileURL(packages + "/"));
const load = async name => import(pathToFileURL(require.resolve(name)).href);
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function openai() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none" });
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const messages = [{ role: "user", content: "How is it?" }];
  for (;;) {
    const said = (await client.chat.completions.create({ model: "mock", messages, tools })).choices[0].message;
    if (!said.tool_calls?.length) { console.log(said.content); break; }
    messages.push(said, ...said.tool_calls.map(call => ({ role: "tool", tool_call_id: call.id, content: "rain" })));
  }
  const stream = client.chat.completions.stream({ model: "mock", messages: messages.slice(0, 1), tools });
  const whole = await stream.finalChatCompletion();
  console.log(whole.choices[0].message.tool_calls.map(call => call.function.arguments).join(" "));
  const format = { type: "json_schema", name: "trip", schema: { type: "object", properties: { city: { type: "string" } } } };
  const response = await client.responses.create({ model: "mock", input: "As an object: where to?", text: { format } });
  console.log(response.output_text);
  const made = await client.embeddings.create({ model: "mock", input: ["a", "b"] });
  console.log(made.data.length, made.data[0].embedding.length);
  console.log((await client.models.list()).data.map(model => model.id).join(" "));
}

async function ai() {
  const { generateText, streamText, generateObject, tool, stepCountIs } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const { z } = await load("zod");
  const model = createOpenAICompatible({ name: "kvarts", baseURL: url + "/v1" })("mock");
  const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => "rain in " + city });
  const asked = { model, tools: { weather }, stopWhen: stepCountIs(4), prompt: "How is it?" };
  console.log((await generateText(asked)).text);
  let text = "";
  for await (const piece of streamText(asked).textStream) text += piece;
  console.log(text);
  const schema = z.object({ city: z.string(), days: z.number() });
  console.log(JSON.stringify((await generateObject({ model, schema, prompt: "As an object: where to?" })).object));
}

await { openai, ai }[only]();
