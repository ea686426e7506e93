// What the page asks of its server: always the one that it came from.

import { keep, kept } from "./dom.js";

const KEY = "allspan-key";

export class ApiError extends Error {
  /** `status` is 0 when the stream broke off, -1 when the server was not reached at all. */
  constructor(status, message, { retryAfter = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.param = param;
  }
}

let current = kept(KEY, "sessionStorage") ?? kept(KEY) ?? "";
export const key = {
  get: () => current,
  isRemembered: () => Boolean(kept(KEY)),
  /** Keeps it for this tab, or for the browser. */
  set(value, isRemembered) {
    current = value;
    keep(KEY, isRemembered ? "" : value, "sessionStorage");
    keep(KEY, isRemembered ? value : "");
  },
};

const headers = (extra = {}) => (current ? { ...extra, Authorization: `Bearer ${current}` } : extra);

async function asked(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(-1, "The server was not reached.");
  }
  if (response.ok) return response;
  let refusal = {};
  try {
    refusal = (await response.json()).error ?? {};
  } catch {
    // no body of ours: a proxy's, most likely
  }
  const message = refusal.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(response.status, message, { retryAfter: response.headers.get("Retry-After"), param: refusal.param });
}

export async function getJson(path, timeoutMs = 5000) {
  const signal = AbortSignal.timeout(timeoutMs);
  return (await asked(path, { headers: headers(), signal, cache: "no-store" })).json();
}

/** The payloads of a chat completion's events, as they come. Throws ApiError, or AbortError when `signal` says so. */
export async function* streamChat(body, signal) {
  const response = await asked("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await next(reader);
    if (done) throw new ApiError(0, "The connection ended before the answer did.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment that keeps proxies awake
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      const payload = JSON.parse(data);
      if (payload.error) throw new ApiError(0, payload.error.message);
      yield payload;
    }
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the answer ended.");
  }
}
