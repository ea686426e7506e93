// Conversations in the browser's IndexedDB; in memory, where it keeps nothing for this page.

import { readConversation } from "./conversation.js";

const NAME = "allspan";
const TABLE = "conversations";
const LIST = "list"; // their ids, titles and times alone, so that the list need not read them all
const FORMAT = "allspan-conversations";

const memory = new Map();
const channel = typeof BroadcastChannel === "function" ? new BroadcastChannel("allspan") : null;
let opening = null;

function database() {
  opening ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        for (const name of [TABLE, LIST]) request.result.createObjectStore(name, { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opening;
}

/** Whether conversations outlive this tab. */
export const isLasting = async () => (await database()) !== null;

/** What `work` makes of the tables, once all of it is written. */
async function within(mode, work) {
  const db = await database();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction([TABLE, LIST], mode);
    const request = work(transaction.objectStore(TABLE), transaction.objectStore(LIST));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("the browser could not keep it"));
  });
}

export async function load(id) {
  if (!(await isLasting())) return memory.get(id) ?? null;
  return (await within("readonly", (table) => table.get(id))) ?? null;
}

export async function save(conversation) {
  if (await isLasting()) await within("readwrite", (table, list) => (list.put(entryOf(conversation)), table.put(conversation)));
  else memory.set(conversation.id, conversation);
  channel?.postMessage("changed");
}

export async function remove(id) {
  if (await isLasting()) await within("readwrite", (table, list) => (list.delete(id), table.delete(id)));
  else memory.delete(id);
  channel?.postMessage("changed");
}

async function all() {
  const found = (await isLasting()) ? await within("readonly", (table) => table.getAll()) : [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

/** The conversations that hold all words of `words`, newest first, without their messages. */
export async function find(words = "") {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length && (await isLasting())) {
    return (await within("readonly", (_, list) => list.getAll())).sort((a, b) => b.updated - a.updated);
  }
  const found = (await all()).filter((conversation) => {
    const texts = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)];
    const whole = texts.join("\n").toLowerCase();
    return wanted.every((word) => whole.includes(word));
  });
  return found.map(entryOf);
}

const entryOf = ({ id, title, updated }) => ({ id, title, updated });

/** All conversations, or those of these ids, as the value of a file. */
export async function exported(ids = null) {
  const conversations = (await all()).filter(({ id }) => !ids || ids.includes(id));
  return { format: FORMAT, version: 1, conversations };
}

/** Takes the conversations of a file's text; of one that is here already, the newer one stays. Returns their number. */
export async function take(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) {
    throw new Error("This file holds no conversations of this page.");
  }
  const read = value.conversations.map(readConversation).filter(Boolean);
  for (const conversation of read) {
    const here = await load(conversation.id);
    if (!here || here.updated < conversation.updated) await save(conversation);
  }
  return read.length;
}

/** Calls back when another tab has changed something. */
export const onChange = (callback) => channel?.addEventListener("message", callback);
