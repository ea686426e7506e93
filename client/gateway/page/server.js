// Whether the server is there and ready, asked gently, more often while it is not; and what it serves.

import { ApiError, getJson } from "./api.js";
import { byId } from "./dom.js";

const EVERY_MS = 10_000;
const WHILE_DOWN_MS = 2000;

const SHOWN = { unknown: "connecting", ready: "ready", waiting: "not ready", down: "not reached" };
const listeners = [];
let timer = null;

export const server = {
  /** unknown, ready, waiting (alive, but takes no requests) or down (does not answer). */
  state: "unknown",
  cause: "",
  model: null,
  onChange: (listener) => listeners.push(listener),
  look,
};

/** Asks now, and from then on again and again. */
export async function look() {
  clearTimeout(timer);
  timer = setTimeout(look, WHILE_DOWN_MS * 4); // should this one never end
  if (!document.hidden || server.state === "unknown") await once();
  clearTimeout(timer);
  timer = setTimeout(look, server.state === "ready" ? EVERY_MS : WHILE_DOWN_MS);
}

async function once() {
  try {
    await getJson("ready", 4000);
    set("ready", "");
  } catch (error) {
    if (error instanceof ApiError && error.status > 0) set("waiting", error.message);
    else set("down", "It is asked again every two seconds; what you write is kept.");
  }
}

function set(state, cause) {
  if (server.state === state && server.cause === cause) return;
  Object.assign(server, { state, cause });
  const shown = byId("state");
  shown.dataset.state = state;
  shown.textContent = SHOWN[state];
  for (const listener of listeners) listener(server);
}

/** Takes over what /v1/models says. Throws ApiError. */
export async function readModel() {
  const { data } = await getJson("v1/models");
  server.model = data[0];
  return data[0];
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
