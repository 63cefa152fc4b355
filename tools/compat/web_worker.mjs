// Runs models in onnxruntime-web: a helper process of check_runtimes.py.
//
//     node web_worker.mjs FOLDER          FOLDER holds node_modules
//
// The first line that it writes has the version. Each line that it reads is a job in JSON: the path of a `model`, and
// `inputs` by name, each with `type`, `dims` and the bytes in base64, `data`. The answer has `outputs` of the same form
// or an `error`.

import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { resolve } from "node:path";

const require = createRequire(resolve(process.argv[2], "package.json"));
const ort = require("onnxruntime-web");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";

const ARRAYS = {
  bool: Uint8Array,
  float16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
};

function tensor({ type, dims, data }) {
  const bytes = Uint8Array.from(Buffer.from(data, "base64"));
  return new ort.Tensor(type, new ARRAYS[type](bytes.buffer), dims);
}

function described({ type, dims, data }) {
  const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  return { type, dims, data: bytes.toString("base64") };
}

async function answer({ model, inputs }) {
  const options = { executionProviders: ["wasm"], logSeverityLevel: 4 };
  const session = await ort.InferenceSession.create(await readFile(model), options);
  try {
    const feeds = Object.entries(inputs).map(([name, each]) => [name, tensor(each)]);
    const results = await session.run(Object.fromEntries(feeds));
    const outputs = session.outputNames.map((name) => [name, described(results[name])]);
    return { outputs: Object.fromEntries(outputs) };
  } finally {
    await session.release();
  }
}

function write(line) {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

write({ version: ort.env.versions.web ?? ort.env.versions.common });
for await (const line of createInterface({ input: process.stdin })) {
  try {
    write(await answer(JSON.parse(line)));
  } catch (error) {
    write({ error: String(error.message ?? error) });
  }
}
