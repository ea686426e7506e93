// What the page asks of its server: always the one that it came from.

const KEY = "allspan-key";

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers(extra = {}) {
  return key.get() ? { ...extra, Authorization: `Bearer ${key.get()}` } : extra;
}

async function checked(response) {
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // no body of ours: a proxy's, most likely
  }
  throw new ApiError(response.status, message, response.headers.get("Retry-After"));
}

export async function getJson(path, timeoutMs = 5000) {
  const signal = AbortSignal.timeout(timeoutMs);
  return (await checked(await fetch(path, { headers: headers(), signal, cache: "no-store" }))).json();
}

/** The payloads of a chat completion's events, as they come. Throws ApiError, or AbortError when `signal` says so. */
export async function* streamChat(body, signal) {
  const response = await checked(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "the connection ended before the answer did");
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
