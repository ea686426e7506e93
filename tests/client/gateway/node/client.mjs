// Streams one prompt: node client.mjs ADDRESS PROMPT MAX_TOKENS
// The text goes to standard output as it comes; a failure is one line on standard error and exit code 1.
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address, text, maxTokens] = process.argv.slice(2);
if (!maxTokens) {
  console.error("usage: node client.mjs ADDRESS PROMPT MAX_TOKENS");
  process.exit(2);
}
const places = ["inference.proto", "../../../../protos/inference.proto"];
const proto = places.map((place) => fileURLToPath(new URL(place, import.meta.url))).find(existsSync);
const { allspan } = grpc.loadPackageDefinition(protoLoader.loadSync(proto, { keepCase: true, longs: String, defaults: true }));
const client = new allspan.v1.Inference(address, grpc.credentials.createInsecure());

const call = client.Generate(
  { text, sampling: { max_tokens: Number(maxTokens), temperature: 0 } },
  { deadline: Date.now() + 120_000 },
);
call.on("data", (response) => process.stdout.write(response.text));
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => client.close());
