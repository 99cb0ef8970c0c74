// One card per service, changed in place: nothing flickers, and who reads or selects is not interrupted.

import { recentHitShare } from "./memory.js";

const STATES = { ready: "● ready", starting: "◔ starting", draining: "◑ draining", gone: "✕ gone" };
const TIERS = { dram: "memory", disk: "disk" };
const FULL_QUEUE_TOKENS = 4096; // where a queue's bar is full, unless more was seen
const FULL_QUEUE_SEQUENCES = 8;
const STALE_SECONDS = 3;

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
export const count = (value) => whole.format(value);
export const rate = (value) => one.format(value);
export const percent = (share) => `${whole.format(100 * share)}\u00a0%`;
export const many = (value, what) => `${count(value)}\u00a0${what}${value === 1 ? "" : "s"}`;

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function copyOf(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

/** Make the cards below `list` those of `services`, in this order. */
export function drawCards(list, services) {
  const known = new Map([...list.children].map((card) => [card.dataset.incarnation, card]));
  services.forEach((service, at) => {
    const card = known.get(service.incarnation) ?? copyOf("card");
    known.delete(service.incarnation);
    card.dataset.incarnation = service.incarnation;
    drawCard(card, service);
    if (list.children[at] !== card) list.insertBefore(card, list.children[at] ?? null);
  });
  for (const card of known.values()) card.remove();
}

function drawCard(card, service) {
  card.dataset.state = service.state;
  setText(card.querySelector(".name"), service.name);
  setText(card.querySelector(".state"), STATES[service.state] ?? service.state);
  setText(card.querySelector(".detail"), detailOf(service));
  const figures = figuresOf(service, card);
  const drawn = card.querySelector(".figures");
  figures.forEach((figure, at) => {
    let element = drawn.children[at];
    if (element?.dataset.shape !== figure.shape) {
      const fresh = copyOf(figure.shape);
      fresh.dataset.shape = figure.shape;
      element ? element.replaceWith(fresh) : drawn.append(fresh);
      element = fresh;
    }
    (figure.shape === "meter" ? drawMeter : drawSparkline)(element, service.name, figure);
  });
  while (drawn.children.length > figures.length) drawn.lastElementChild.remove();
}

function detailOf(service) {
  if (service.state === "gone") {
    return service.goneAfter === "draining" ? "ended after it had drained" : "left or died; others take over";
  }
  if (service.detail) return service.detail;
  if (service.load && service.load_age_seconds > STALE_SECONDS) {
    return `nothing heard of its load for ${count(service.load_age_seconds)} s`;
  }
  return "";
}

function figuresOf(service, card) {
  if (!service.load) return [];
  if (service.kind === "kv_store") return (service.load.tiers ?? []).flatMap((_, at) => tierFigures(service, at));
  if (!service.kind.endsWith("_worker")) return [];
  const { busy_share: busy, num_running: numRunning, num_blocks: all, num_used_blocks: used } = service.load;
  return [
    { shape: "meter", label: "busy", share: busy, text: `${percent(busy)}, ${count(numRunning)} running` },
    { shape: "meter", label: "memory", share: all ? used / all : 0, text: `${count(used)} of ${many(all, "block")}` },
    queueFigure(service, card),
    ...moduleFigures(service.load),
    rateFigure(service),
  ];
}

/** What it does for other instances, and how long its own steps wait for others. */
function moduleFigures({ hosted_busy_share: hosted = 0, num_hosted_bytes: numBytes = 0, away_share: away = 0 }) {
  const figures = [];
  if (hosted || numBytes) {
    figures.push({ shape: "meter", label: "for others", share: hosted, text: `${percent(hosted)}, ${bytes(numBytes)}` });
  }
  if (away) figures.push({ shape: "meter", label: "waits for others", share: away, text: percent(away) });
  return figures;
}

function queueFigure({ kind, load, num_seats: numSeats }, card) {
  const numWaiting = load.num_waiting + load.num_reserved;
  const isPrefill = kind === "prefill_worker";
  const value = isPrefill ? load.num_waiting_tokens : numWaiting;
  const least = isPrefill ? FULL_QUEUE_TOKENS : numSeats || FULL_QUEUE_SEQUENCES;
  const full = Math.max(least, Number(card.dataset.longestQueue ?? 0), value);
  card.dataset.longestQueue = full;
  const prompts = numWaiting ? `, ${many(numWaiting, "prompt")}` : "";
  const text = isPrefill ? many(load.num_waiting_tokens, "token") + prompts : many(numWaiting, "sequence");
  return { shape: "meter", label: "queue", share: value / full, text };
}

function rateFigure({ points, load }) {
  return { shape: "sparkline", label: "tokens/s", text: rate(load.tokens_per_second), values: points.map((p) => p.rate) };
}

function tierFigures(service, at) {
  const tier = service.load.tiers[at];
  const name = TIERS[tier.tier] ?? tier.tier;
  const share = tier.num_asked_blocks ? tier.num_hit_blocks / tier.num_asked_blocks : null;
  const lately = recentHitShare(service, at);
  const paused = tier.is_paused ? ", paused" : "";
  return [
    {
      shape: "meter", label: `${name}${paused}`, share: tier.capacity_bytes ? tier.num_bytes / tier.capacity_bytes : 0,
      text: `${bytes(tier.num_bytes)} of ${bytes(tier.capacity_bytes)}, ${many(tier.num_blocks, "block")}`,
    },
    {
      shape: "meter", label: `hit rate, ${name}`, share: share ?? 0,
      text: share === null ? "not asked yet" : percent(share) + (lately === null ? "" : `, lately ${percent(lately)}`),
    },
  ];
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = value > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(value) / 10)) : 0;
  const number = value / 1024 ** at;
  return `${(at && number < 10 ? one : whole).format(number)}\u00a0${units[at]}`;
}

export function drawMeter(element, owner, { label, share, text }) {
  const held = Math.max(0, Math.min(1, share));
  setText(element.querySelector(".label"), label);
  setText(element.querySelector(".text"), text);
  const bar = element.querySelector(".bar");
  bar.setAttribute("aria-label", `${owner}: ${label}`);
  bar.setAttribute("aria-valuenow", String(Math.round(100 * held)));
  bar.setAttribute("aria-valuetext", text);
  bar.firstElementChild.style.transform = `scaleX(${held})`;
}

function drawSparkline(element, owner, { label, text, values }) {
  setText(element.querySelector(".label"), label);
  setText(element.querySelector(".text"), text);
  const highest = Math.max(1, ...values);
  const drawing = element.querySelector("svg");
  drawing.setAttribute("aria-label", `${owner}: ${label} over the last minute, ${text} now, at most ${rate(Math.max(0, ...values))}`);
  // The newest is at the right; a point a second, 60 across.
  const points = values.map((value, at) => {
    const x = 100 - ((values.length - 1 - at) * 100) / 59;
    return `${x.toFixed(1)},${(23 - (22 * value) / highest).toFixed(1)}`;
  });
  drawing.firstElementChild.setAttribute("points", points.join(" "));
}
