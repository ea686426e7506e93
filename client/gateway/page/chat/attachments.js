// Text files that go with a message.

import { byId, element, iconButton } from "../dom.js";

export const MOST_BYTES = 256 * 1024;
const MOST_FILES = 16;

let files = [];

export const attached = () => files;

export function setAttached(next) {
  files = [...next];
  byId("files").hidden = !files.length;
  byId("files").replaceChildren(...files.map(fileElement));
}

function fileElement(file) {
  const leave = iconButton("close", `Remove ${file.name}`, () => {
    setAttached(files.filter((other) => other !== file));
    byId("prompt").focus();
  });
  return element("li", {}, element("span", {}, file.name), element("small", {}, sizeOf(file.text.length)), leave);
}

const sizeOf = (bytes) => (bytes < 1024 ? `${bytes} B` : `${Math.round(bytes / 1024)} KiB`);

/** Attaches what can be read as text. Returns a sentence for each file that cannot. */
async function attach(added) {
  const refused = [];
  const read = [];
  for (const file of added) {
    if (files.length + read.length >= MOST_FILES) refused.push(`${file.name}: a message takes at most ${MOST_FILES} files.`);
    else if (file.size > MOST_BYTES) {
      refused.push(`${file.name} has ${sizeOf(file.size)}; a file may have at most ${sizeOf(MOST_BYTES)}.`);
    } else {
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("binary");
        read.push({ name: file.name, text });
      } catch {
        refused.push(`${file.name} is no text in UTF-8; only text files can be attached.`);
      }
    }
  }
  setAttached([...files, ...read]);
  return refused;
}

/** The button, files dropped anywhere on the conversation, and files that are pasted. `tell` shows what was refused. */
export function listenForFiles(tell) {
  const take = async (list) => {
    const refused = await attach([...list]);
    tell(refused.join(" "));
    byId("prompt").focus();
  };
  byId("attach").addEventListener("click", () => byId("file-input").click());
  byId("file-input").addEventListener("change", async () => {
    await take(byId("file-input").files);
    byId("file-input").value = "";
  });
  byId("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  const place = byId("middle");
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  place.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    place.classList.add("dropping");
  });
  place.addEventListener("dragleave", (event) => {
    if (!place.contains(event.relatedTarget)) place.classList.remove("dropping");
  });
  place.addEventListener("drop", (event) => {
    place.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}
