// The live view of the cluster, from GET /cluster.

import { ApiError, getJson } from "./api.js";
import { byId, element } from "./dom.js";

const EVERY_MS = 1500;
const MOST_POINTS = 80; // two minutes

const number = (value) => (value === undefined || value === null ? "–" : Math.round(value).toLocaleString("en"));
const points = [];

/** Asks while the view is open. */
export function followCluster(onDenied) {
  let isAsking = false;
  const round = async () => {
    if (isAsking || document.hidden || byId("cluster").hidden) return;
    isAsking = true;
    try {
      show(await getJson("cluster"));
    } catch (error) {
      cause(error.message);
      if (error instanceof ApiError && error.status === 401) onDenied();
    }
    isAsking = false;
  };
  setInterval(round, EVERY_MS);
  new MutationObserver(round).observe(byId("cluster"), { attributeFilter: ["hidden"] });
}

function cause(text) {
  byId("cause").hidden = !text;
  if (byId("cause").textContent !== text) byId("cause").textContent = text;
}

function show(cluster) {
  cause(cluster.ready ? "" : cluster.cause);
  byId("running").textContent = number(cluster.running);
  byId("waiting").textContent = number(cluster.waiting);
  byId("generation").textContent = number(cluster.tokens_per_s?.generation);
  byId("prompts").textContent = number(cluster.tokens_per_s?.prompt);
  byId("uptime").textContent = duration(cluster.uptime_s);
  const { queries = 0, hits = 0 } = cluster.prefix ?? {};
  byId("hits").textContent = queries ? `${Math.round((100 * hits) / queries)} %` : "–";
  showExperts(cluster.experts ?? []);
  showPages(cluster.kv ?? {});
  showSpark(cluster.tokens_per_s?.generation ?? 0);
  byId("ranks").replaceChildren(...cluster.ranks.map((rank) => rankRow(rank, cluster.replicas.total > 1)));
}

// The layer in which the work is spread worst decides: in each, all ranks wait for the busiest.
function showExperts(layers) {
  byId("experts-figure").hidden = !layers.length;
  byId("experts").textContent = `${Math.max(1, ...layers.map((layer) => layer.imbalance)).toFixed(2)} × mean`;
}

// Pages of different cache groups hold different layers' tokens, so they are not added up: the fullest group says how
// full the cache is, the one with the least place how much still fits.
function showPages({ usage = 0, free_tokens: free }) {
  byId("kv").value = usage;
  byId("kv-text").textContent = free === undefined ? "" : `${Math.round(100 * usage)} % of the pages; ${number(free)} more tokens fit`;
}

function showSpark(rate) {
  points.push(rate);
  if (points.length > MOST_POINTS) points.shift();
  const most = Math.max(1, ...points);
  const x = (i) => (120 * (i + MOST_POINTS - points.length)) / (MOST_POINTS - 1);
  const line = points.map((value, i) => `${x(i).toFixed(1)},${(30 - (28 * value) / most).toFixed(1)}`).join(" ");
  byId("spark").querySelector("polyline").setAttribute("points", line);
}

function rankRow(rank, withReplica) {
  const name = withReplica ? `${rank.replica}.${rank.rank}` : `${rank.rank}`;
  const memory = rank.rss_bytes ? `${(rank.rss_bytes / 2 ** 30).toFixed(1)} GiB` : "–";
  const heard = typeof rank.heard_s === "number" ? `${rank.heard_s.toFixed(1)} s ago` : "–";
  const cells = [rank.where || rank.device || rank.host, rank.state, memory, heard];
  const title = [rank.host, `pid ${rank.pid}`, rank.kernels].filter(Boolean).join(", ");
  return element("tr", { title }, element("th", { scope: "row" }, name), ...cells.map((text) => element("td", {}, text)));
}

function duration(seconds) {
  if (seconds === undefined) return "–";
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
