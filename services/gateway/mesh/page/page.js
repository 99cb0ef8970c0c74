// The page: hears from the gateway, remembers, draws.

import { count, drawCards, rate, setText } from "./cards.js";
import { follow, NeedsKey } from "./follow.js";
import { Memory } from "./memory.js";
import { drawLoop, drawMoves } from "./moves.js";
import { drawInstances, drawLegend, namesIn } from "./placement.js";
import { Workers } from "./workers.js";

const KEY_NAME = "kvmesh key"; // kept for as long as this tab is open
const EVENTS_URL = new URL("v1/mesh/events", document.baseURI);

const $ = (id) => document.getElementById(id);
const memory = new Memory();
const workers = new Workers();
const drawnChanges = new Set();

async function show() {
  let key = sessionStorage.getItem(KEY_NAME) ?? "";
  for (;;) {
    try {
      await follow(EVENTS_URL, key, { snapshot, live, lost });
    } catch (error) {
      if (!(error instanceof NeedsKey)) throw error;
      sessionStorage.removeItem(KEY_NAME);
      setText($("connection"), "waiting for a key");
      key = await askForKey(key ? "This key is not known here." : "");
    }
  }
}

function askForKey(said) {
  const form = $("key-form");
  $("mesh").hidden = true;
  form.hidden = false;
  setText($("key-said"), said);
  $("key").focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      const key = $("key").value.trim();
      $("key").value = "";
      form.hidden = true;
      sessionStorage.setItem(KEY_NAME, key);
      resolve(key);
    };
  });
}

function live() {
  document.body.classList.remove("stale");
  setText($("connection"), "live");
}

function lost(why) {
  document.body.classList.add("stale");
  setText($("connection"), `not live: ${why}; trying again`);
}

function snapshot(mesh) {
  memory.hear(mesh, Date.now());
  $("mesh").hidden = false;
  setText($("models"), (mesh.models ?? []).join(", "));
  drawReasons(mesh.reasons ?? []);
  drawTotals(mesh);
  for (const column of document.querySelectorAll("#way > li")) {
    const services = [...memory.services.values()].filter((service) => service.kind === column.dataset.kind);
    services.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    drawCards(column.querySelector(".cards"), services);
  }
  drawModules(mesh);
  drawChanges();
}

function drawModules({ placement = [], migrations = [], loop = null, unix_seconds: now }) {
  const underWay = migrations.filter((move) => !move.is_over);
  workers.hear(namesIn(placement, underWay));
  $("placement").hidden = !placement.length;
  drawLegend($("legend"), workers);
  drawInstances($("instances"), placement, underWay, workers);
  drawMoves({ underWay: $("under-way"), ended: $("ended") }, migrations, now);
  $("no-moves").hidden = migrations.length > 0;
  drawLoop($("loop"), loop, now);
}

function drawReasons(reasons) {
  $("reasons").hidden = !reasons.length;
  setText($("reasons"), reasons.length ? `No request can be served now: ${reasons.join("; ")}.` : "");
}

function drawTotals({ totals, num_requests_in_flight: numRequests }) {
  const told = {
    "requests at this gateway": count(numRequests),
    "sequences running": count(totals.num_running),
    "sequences waiting": count(totals.num_waiting + totals.num_reserved),
    "prompt tokens waiting": count(totals.num_waiting_tokens),
    "tokens/s, read and written": rate(totals.tokens_per_second),
    "workers' blocks in use": `${count(totals.num_used_blocks)} of ${count(totals.num_blocks)}`,
  };
  const list = $("totals");
  Object.entries(told).forEach(([name, value], at) => {
    let entry = list.children[at];
    if (!entry) {
      entry = document.createElement("div");
      entry.append(document.createElement("dt"), document.createElement("dd"));
      list.append(entry);
    }
    setText(entry.firstElementChild, name);
    setText(entry.lastElementChild, value);
  });
}

function drawChanges() {
  const list = $("changes");
  for (const change of [...memory.changes].reverse()) {
    if (drawnChanges.has(change.id)) continue;
    drawnChanges.add(change.id);
    const line = document.createElement("li");
    const time = document.createElement("time");
    time.dateTime = new Date(change.at).toISOString();
    time.textContent = new Date(change.at).toLocaleTimeString();
    line.append(time, change.text);
    list.prepend(line);
  }
  while (list.children.length > memory.changes.length) list.lastElementChild.remove();
  $("no-changes").hidden = memory.changes.length > 0;
}

show();
