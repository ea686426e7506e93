// The reference of the HTTP API, drawn by Redoc from this server's own description.

import { ApiError, getJson, key } from "../api.js";

const element = (id) => document.getElementById(id);
const ask = element("ask");
const failure = element("failure");

const OPTIONS = {
  disableSearch: true, // it would start a worker from a blob, which the page's policy refuses
  hideDownloadButtons: true,
  nativeScrollbars: true,
  theme: { typography: { fontFamily: "system-ui, sans-serif", headings: { fontFamily: "system-ui, sans-serif" } } },
};

async function show() {
  failure.hidden = true;
  try {
    const description = await getJson("openapi.json");
    ask.hidden = true;
    window.Redoc.init(description, OPTIONS, element("reference"));
  } catch (error) {
    ask.hidden = !(error instanceof ApiError && error.status === 401);
    failure.hidden = !ask.hidden;
    failure.textContent = error.message;
  }
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(element("key").value, false);
  show();
});
show();
