// A conversation: a tree of messages, in which each version of a message is a branch of its own, and the leaf of the
// branch that is shown. It is a plain object, so that the browser can keep it and export it as it is.

const MOST_TITLE = 60;

export function newConversation(system = "") {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", system, created: now, updated: now, nodes: {}, leaf: null, count: 0 };
}

// crypto.randomUUID needs HTTPS or loopback.
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Adds a message below `parent` (null: at the beginning) and shows it. */
export function addNode(conversation, parent, values) {
  const id = String(conversation.count++);
  const node = { id, parent, content: "", at: Date.now(), ...values };
  conversation.nodes[id] = node;
  conversation.leaf = id;
  if (node.role === "user" && !conversation.title) conversation.title = titleOf(node);
  return node;
}

function titleOf(node) {
  const line = (node.content || node.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return line.length > MOST_TITLE ? `${line.slice(0, MOST_TITLE - 1).trimEnd()}…` : line;
}

/** The messages that are shown, from the first to the leaf. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null && conversation.nodes[id]; id = conversation.nodes[id].parent) {
    found.push(conversation.nodes[id]);
  }
  return found.reverse();
}

/** The versions of a message, oldest first. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes)
    .filter((other) => other.parent === node.parent && other.role === node.role)
    .sort((a, b) => a.id - b.id);
}

/** Shows the branch of this message, as far as it was last continued. */
export function showBranch(conversation, node) {
  let last = node;
  for (;;) {
    const below = Object.values(conversation.nodes).filter((other) => other.parent === last.id);
    if (!below.length) break;
    last = below.reduce((newest, other) => (Number(other.id) > Number(newest.id) ? other : newest));
  }
  conversation.leaf = last.id;
}

/** Takes a message and all below it away; its parent is the leaf then. */
export function removeNode(conversation, node) {
  for (const below of Object.values(conversation.nodes).filter((other) => other.parent === node.id)) {
    removeNode(conversation, below);
  }
  delete conversation.nodes[node.id];
  conversation.leaf = node.parent;
}

/** The messages of a request that ends with this one. */
export function requestMessages(conversation, leaf) {
  const sent = conversation.system.trim() ? [{ role: "system", content: conversation.system.trim() }] : [];
  for (const node of path(conversation, leaf)) {
    if (node.role === "user") sent.push({ role: "user", content: withFiles(node) });
    else sent.push({ role: "assistant", content: node.content });
  }
  return sent;
}

/** A message's text with its files as fenced blocks. A fence is longer than any within the file. */
export function withFiles(node) {
  const blocks = (node.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map((found) => found[0].length));
    const fence = "`".repeat(longest + 1);
    const kind = /\.(\w{1,10})$/.exec(name)?.[1] ?? "";
    return `${name}:\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, node.content].filter(Boolean).join("\n\n");
}

/** A conversation from somebody else's file, or null where it is none. Only what is known is taken over. */
export function readConversation(value) {
  if (typeof value !== "object" || value === null || typeof value.id !== "string" || !/^[\w-]{1,64}$/.test(value.id)) return null;
  if (typeof value.nodes !== "object" || value.nodes === null) return null;
  const read = newConversation(text(value.system));
  Object.assign(read, { id: value.id, title: text(value.title).slice(0, 200) });
  for (const name of ["created", "updated"]) if (Number.isFinite(value[name])) read[name] = value[name];
  // A parent is always older than its answer, so there are no circles.
  for (const node of Object.values(value.nodes).sort((a, b) => a?.id - b?.id)) {
    if (!["user", "assistant"].includes(node?.role) || !/^\d{1,9}$/.test(node.id)) continue;
    if (node.parent !== null && !read.nodes[node.parent]) continue;
    read.nodes[node.id] = knownFields(node);
    read.count = Math.max(read.count, Number(node.id) + 1);
    read.leaf = node.id;
  }
  if (read.nodes[value.leaf]) read.leaf = value.leaf;
  return read.leaf === null ? null : read;
}

const text = (value) => (typeof value === "string" ? value : "");

function knownFields({ id, parent, role, content, at, files, thinking, thinkingMs, calls, usage, reason, timing }) {
  const node = { id, parent, role, content: text(content), at: Number.isFinite(at) ? at : 0 };
  if (Array.isArray(files)) node.files = files.map((file) => ({ name: text(file?.name), text: text(file?.text) }));
  if (thinking) node.thinking = text(thinking);
  if (Number.isFinite(thinkingMs)) node.thinkingMs = thinkingMs;
  if (Array.isArray(calls)) node.calls = calls.map((call) => ({ name: text(call?.name), arguments: text(call?.arguments) }));
  if (reason) node.reason = text(reason);
  const isCounted = typeof usage === "object" && Number.isFinite(usage?.prompt_tokens) && Number.isFinite(usage?.completion_tokens);
  if (isCounted) node.usage = { prompt_tokens: usage.prompt_tokens, completion_tokens: usage.completion_tokens };
  if (isCounted && Number.isFinite(timing?.rate)) node.timing = { rate: timing.rate, firstMs: Number(timing.firstMs) || 0 };
  return node;
}
