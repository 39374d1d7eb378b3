// A client in another language: enqueues a chat on a running stack, streams its answer, and cancels another request.
//
//     node examples/client.mjs ADDRESS [MODEL]          ADDRESS as `sluice up` prints it: unix:// or redis://
//
// No packages; what crosses the wire is in docs/wire.md. Reading messages of more than 2 KiB, which are compressed,
// needs Node 22.15 or newer. Left out: TLS, and connecting again after the server was away.

import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import * as zlib from "node:zlib";

const NAMESPACE = process.env.SLUICE_NAMESPACE ?? "sluice";
const MAX_QUEUE = 10_000; // SLUICE_MAX_QUEUE of the stack
const RESULT_TTL_S = 3600; // SLUICE_RESULT_TTL_S
const MAX_FINISHED = 1000;

const key = (...parts) => [NAMESPACE, ...parts].join(":");

// Requests -----------------------------------------------------------------------------------------------------------

async function enqueue(server, model, messages, params, timeoutMs = 0) {
  const id = `req_${randomBytes(16).toString("hex")}`;
  const request = {
    kind: "generate_request",
    request_id: id,
    attempt: Math.floor(Date.now() / 1000),
    priority: "interactive",
    model,
    messages,
    params: { seed: randomBytes(4).readUInt32BE(), ...params },
    stamps: [{ boundary: "submitted", at_us: Date.now() * 1000 }],
  };
  const streams = [key("stream", "tokenizer", "interactive"), key("stream", "prefill", "interactive")];
  const keys = [key("req", id), ...streams, key("deadlines")];
  const args = [randomBytes(8).toString("hex"), MAX_QUEUE, pack(request), request.attempt, timeoutMs]; // 0: no timeout
  for (;;) {
    const reply = String(await server.script("admit", keys, args));
    if (reply === "accepted") return id;
    if (reply === "exists") throw new Error(`the id ${id} is taken`);
    await sleep(2000); // busy: the queue or the server's memory is full
  }
}

async function* stream(server, id, after = 0) {
  for (;;) {
    const reply = await server.call("XREAD", "COUNT", 512, "BLOCK", 1000, "STREAMS", key("res", id), `0-${after}`);
    if (reply === null && !(await server.call("EXISTS", key("req", id)))) throw new Error(`${id} is not known`);
    for (const [entryId, [, payload]] of reply?.[0][1] ?? []) {
      const entry = unpack(payload);
      yield entry;
      if (entry.kind === "terminal") return;
      after = Number(String(entryId).split("-")[1]);
    }
  }
}

async function cancel(server, id) {
  const stamp = { boundary: "finished", at_us: Date.now() * 1000, by: "client.mjs" };
  const terminal = pack({ kind: "terminal", finish_reason: "cancelled", stamps: [stamp] });
  const keys = [key("req", id), key("res", id), key("finished")];
  const args = [id, key("chunks", id, ""), terminal, RESULT_TTL_S, MAX_FINISHED];
  return String(await server.script("cancel", keys, args)); // cancelled, ended or unknown
}

// Messages: [version, flag, body] in msgpack, the body compressed where flag is 1 ---------------------------------------

const pack = (message) => encode([1, 0, encode(message)]);

function unpack(bytes) {
  const [version, flag, body] = decode(bytes);
  if (version !== 1) throw new Error(`version ${version} of messages is not known`);
  if (flag === 1 && !zlib.zstdDecompressSync) throw new Error("this Node has no zstd; 22.15 or newer has");
  return decode(flag === 1 ? zlib.zstdDecompressSync(body) : body);
}

function encode(value) {
  const sized = (tag, size, ...parts) => {
    const head = Buffer.alloc(5);
    head.writeUInt8(tag);
    head.writeUInt32BE(size, 1);
    return Buffer.concat([head, ...parts]);
  };
  const number = (tag, write) => {
    const bytes = Buffer.alloc(9);
    bytes.writeUInt8(tag);
    write(bytes);
    return bytes;
  };
  if (value === null || typeof value === "boolean") return Buffer.from([value === null ? 0xc0 : value ? 0xc3 : 0xc2]);
  if (Number.isSafeInteger(value)) return number(0xd3, (bytes) => bytes.writeBigInt64BE(BigInt(value), 1));
  if (typeof value === "number") return number(0xcb, (bytes) => bytes.writeDoubleBE(value, 1));
  if (typeof value === "string") return sized(0xdb, Buffer.byteLength(value), Buffer.from(value));
  if (Buffer.isBuffer(value)) return sized(0xc6, value.length, value);
  if (Array.isArray(value)) return sized(0xdd, value.length, ...value.map(encode));
  return sized(0xdf, Object.keys(value).length, ...Object.entries(value).flat().map(encode));
}

function decode(bytes) {
  let at = 0;
  const take = (size) => bytes.subarray(at, (at += size));
  const unsigned = (size) => (size === 8 ? Number(take(8).readBigUInt64BE()) : take(size).readUIntBE(0, size));
  const signed = (size) => (size === 8 ? Number(take(8).readBigInt64BE()) : take(size).readIntBE(0, size));
  const text = (size) => take(size).toString("utf8");
  const list = (size) => Array.from({ length: size }, value);
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [value(), value()]));
  function value() {
    const tag = bytes[at++];
    if (tag < 0x80) return tag;
    if (tag < 0x90) return map(tag & 0x0f);
    if (tag < 0xa0) return list(tag & 0x0f);
    if (tag < 0xc0) return text(tag & 0x1f);
    if (tag === 0xc0) return null;
    if (tag <= 0xc3) return tag === 0xc3;
    if (tag <= 0xc6) return take(unsigned(1 << (tag - 0xc4)));
    if (tag === 0xca) return take(4).readFloatBE();
    if (tag === 0xcb) return take(8).readDoubleBE();
    if (tag >= 0xcc && tag <= 0xcf) return unsigned(1 << (tag - 0xcc));
    if (tag >= 0xd0 && tag <= 0xd3) return signed(1 << (tag - 0xd0));
    if (tag >= 0xd9 && tag <= 0xdb) return text(unsigned(1 << (tag - 0xd9)));
    if (tag === 0xdc || tag === 0xdd) return list(unsigned(2 << (tag - 0xdc)));
    if (tag === 0xde || tag === 0xdf) return map(unsigned(2 << (tag - 0xde)));
    if (tag >= 0xe0) return tag - 256;
    throw new Error(`msgpack type ${tag} is not used here`);
  }
  return value();
}

// The server: RESP 2 ---------------------------------------------------------------------------------------------------

class Server {
  constructor(address) {
    const { protocol, pathname, hostname, port, username, password } = new URL(address);
    this.socket = protocol === "unix:" ? connect(decodeURIComponent(pathname)) : connect(port || 6379, hostname);
    this.waiting = [];
    let received = Buffer.alloc(0);
    this.socket.on("data", (data) => {
      received = Buffer.concat([received, data]);
      for (let reply; (reply = parse(received, 0)); received = received.subarray(reply[1])) {
        const { resolve, reject } = this.waiting.shift();
        reply[0] instanceof Error ? reject(reply[0]) : resolve(reply[0]);
      }
    });
    const lost = (error) => this.waiting.splice(0).forEach(({ reject }) => reject(error));
    this.socket.on("error", lost).on("close", () => lost(new Error("the server has closed the connection")));
    if (password) this.call("AUTH", decodeURIComponent(username) || "default", decodeURIComponent(password));
  }

  call(...words) {
    const parts = words.map((word) => (Buffer.isBuffer(word) ? word : Buffer.from(String(word))));
    const framed = parts.flatMap((part) => [Buffer.from(`$${part.length}\r\n`), part, Buffer.from("\r\n")]);
    this.socket.write(Buffer.concat([Buffer.from(`*${parts.length}\r\n`), ...framed]));
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  script(name, keys, args) {
    const source = (file) => readFileSync(new URL(`../pipeline/scripts/${file}`, import.meta.url), "utf8");
    const whole = source(`${name}.lua`).replace(/^-- include: (\w+\.lua)\n/gm, (_, file) => source(file));
    return this.call("EVAL", whole, keys.length, ...keys, ...args);
  }
}

function parse(bytes, at) {
  const line = bytes.indexOf("\r\n", at);
  if (line < 0) return null; // more is to come
  const [kind, text, end] = [String.fromCharCode(bytes[at]), bytes.toString("utf8", at + 1, line), line + 2];
  if (kind === "+") return [text, end];
  if (kind === "-") return [new Error(text), end];
  if (kind === ":") return [Number(text), end];
  const size = Number(text);
  if (size < 0) return [null, end];
  if (kind === "$") return bytes.length < end + size + 2 ? null : [bytes.subarray(end, end + size), end + size + 2];
  const items = [];
  for (let next = end; ; next = items.at(-1)[1]) {
    if (items.length === size) return [items.map(([item]) => item), next];
    const item = parse(bytes, next);
    if (item === null) return null;
    items.push(item);
  }
}

const [address = process.env.SLUICE_REDIS_URL, model = "smollm2-135m-instruct"] = process.argv.slice(2);
const server = new Server(address);

const chat = [{ role: "user", content: "Why is the sky blue?" }];
const answered = await enqueue(server, model, chat, { max_tokens: 60, temperature: 0.2, top_p: 0.9 });
console.log(answered);
for await (const entry of stream(server, answered)) {
  process.stdout.write(entry.text);
  if (entry.kind === "terminal") console.log(`\n${entry.failure?.message ?? entry.finish_reason}`);
}

const unwanted = await enqueue(server, model, [{ role: "user", content: "Count to a thousand." }], { max_tokens: 800 });
const entries = stream(server, unwanted);
await entries.next(); // its first tokens
console.log(unwanted, await cancel(server, unwanted));
for await (const entry of entries) if (entry.kind === "terminal") console.log(entry.finish_reason);
server.socket.end();
