// The live view of the cluster, from GET /cluster.

import { ApiError, getJson } from "./api.js";

const EVERY_MS = 1500;
const MOST_POINTS = 80; // two minutes

const byId = (id) => document.getElementById(id);
const number = (value) => (value === undefined || value === null ? "–" : Math.round(value).toLocaleString("en"));
const points = [];

export function followCluster(onDenied) {
  const round = async () => {
    if (!document.hidden) {
      try {
        show(await getJson("cluster"));
      } catch (error) {
        if (error instanceof ApiError && error.status === 401) {
          state("unknown", "needs a key");
          onDenied();
        } else {
          state("down", "not reached");
          cause(error.message);
        }
      }
    }
    setTimeout(round, EVERY_MS);
  };
  round();
}

function state(name, text) {
  const element = byId("state");
  if (element.textContent === text) return; // else a screen reader would hear it again and again
  element.dataset.state = name;
  element.textContent = text;
}

function cause(text) {
  byId("cause").hidden = !text;
  if (byId("cause").textContent !== text) byId("cause").textContent = text;
}

function show(cluster) {
  byId("model").textContent = cluster.model;
  document.title = `${cluster.model} · allspan`;
  state(cluster.ready ? "ready" : "down", cluster.ready ? "ready" : "not ready");
  cause(cluster.ready ? "" : cluster.cause);
  byId("running").textContent = number(cluster.running);
  byId("waiting").textContent = number(cluster.waiting);
  byId("generation").textContent = number(cluster.tokens_per_s?.generation);
  byId("prompts").textContent = number(cluster.tokens_per_s?.prompt);
  byId("uptime").textContent = duration(cluster.uptime_s);
  const { queries = 0, hits = 0 } = cluster.prefix ?? {};
  byId("hits").textContent = queries ? `${Math.round((100 * hits) / queries)} %` : "–";
  showPages(cluster.kv ?? {});
  showSpark(cluster.tokens_per_s?.generation ?? 0);
  byId("ranks").replaceChildren(...cluster.ranks.map((rank) => rankRow(rank, cluster.replicas.total > 1)));
}

function showPages({ pages_total: total = 0, pages_used: used = 0, pages_cached: cached = 0, page_size: size = 0 }) {
  byId("kv").value = total ? used / total : 0;
  byId("kv-text").textContent = total
    ? `${number(used * size)} of ${number(total * size)} tokens, ${number(cached * size)} more kept for prefixes`
    : "";
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
  const row = document.createElement("tr");
  const name = withReplica ? `${rank.replica}.${rank.rank}` : `${rank.rank}`;
  const memory = rank.rss_bytes ? `${(rank.rss_bytes / 2 ** 30).toFixed(1)} GiB` : "–";
  const heard = typeof rank.heard_s === "number" ? `${rank.heard_s.toFixed(1)} s ago` : "–";
  const cells = [name, rank.where || rank.device || rank.host, rank.state, memory, heard];
  row.title = [rank.host, `pid ${rank.pid}`, rank.kernels].join(", ");
  cells.forEach((text, i) => {
    const cell = document.createElement(i ? "td" : "th");
    if (!i) cell.scope = "row";
    cell.textContent = text;
    row.append(cell);
  });
  return row;
}

function duration(seconds) {
  if (seconds === undefined) return "–";
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
