// Streams one answer: node client.mjs ADDRESS PROMPT [CA_FILE]
// npm install; inference.proto and details.proto beside this file. The API key comes from ALLSPAN_API_KEY, the deadline
// from ALLSPAN_DEADLINE_S (60).
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const [address, text, caFile] = process.argv.slice(2);
const here = (name) => fileURLToPath(new URL(name, import.meta.url));
const { allspan } = grpc.loadPackageDefinition(
  protoLoader.loadSync(here("inference.proto"), { keepCase: true, longs: String, defaults: true }),
);
const rpc = protobuf.loadSync(here("details.proto"));

function complain(error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  for (const packed of error.metadata.get("grpc-status-details-bin")) {
    for (const { type_url, value } of rpc.lookupType("google.rpc.Status").decode(packed).details) {
      const type = type_url.split("/").pop();
      if (type === "google.rpc.BadRequest") {
        for (const { field } of rpc.lookupType(type).decode(value).fieldViolations) console.error(`  field ${field}`);
      } else if (type === "google.rpc.RetryInfo") {
        console.error(`  try again in ${rpc.lookupType(type).decode(value).retryDelay.seconds} s`);
      }
    }
  }
}

const credentials = caFile ? grpc.credentials.createSsl(readFileSync(caFile)) : grpc.credentials.createInsecure();
const client = new allspan.v1.Inference(address, credentials);
const metadata = new grpc.Metadata();
const key = process.env.ALLSPAN_API_KEY;
if (key) metadata.set("authorization", `Bearer ${key}`);
const deadline = Date.now() + 1000 * Number(process.env.ALLSPAN_DEADLINE_S ?? 60);

const call = client.Generate({ text, sampling: { max_tokens: 100, temperature: 0 } }, metadata, { deadline });
call.on("data", (response) => process.stdout.write(response.text));
call.on("error", (error) => {
  complain(error);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => client.close());
