// Moves as they happen, those that ended last, and what the coordinator's loop decided.

import { bytes, copyOf, count, many, percent, drawMeter, setText } from "./cards.js";
import { wayWords } from "./placement.js";

const PHASES = { reserving: "reserve", copying: "copy", catching_up: "catch up", switching: "switch", releasing: "release" };
const KEPT = 8;

const two = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const three = new Intl.NumberFormat("en", { minimumSignificantDigits: 2, maximumSignificantDigits: 3 });
const seconds = (value) => `${two.format(Math.max(0, value))}\u00a0s`;
const milliseconds = (value) => `${three.format(1000 * value)}\u00a0ms`;

export function drawMoves({ underWay, ended }, moves, now) {
  keyed(underWay, moves.filter((move) => !move.is_over), "move", (card, move) => drawMove(card, move, now));
  keyed(ended, moves.filter((move) => move.is_over).slice(0, KEPT), "ended-move", drawEnded);
}

/** One child of `list` per entry, made from a template, in this order. */
function keyed(list, entries, template, draw) {
  const known = new Map([...list.children].map((element) => [element.dataset.id, element]));
  entries.forEach((entry, at) => {
    const element = known.get(entry.id) ?? copyOf(template);
    known.delete(entry.id);
    element.dataset.id = entry.id;
    draw(element, entry);
    if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
  });
  for (const element of known.values()) element.remove();
}

function titleOf(move) {
  const kind = move.kind === "migrate" || move.kind === "offload" ? ` (${move.kind})` : "";
  return `${move.what} of ${move.instance_name || move.instance} ${wayWords(move)}${kind}`;
}

function drawMove(card, move, now) {
  setText(card.querySelector(".name"), titleOf(move));
  const isBack = move.phase === "rolling_back";
  card.dataset.back = isBack;
  setText(card.querySelector(".state"), `${isBack ? "rolling back" : PHASES[move.phase] ?? move.phase}, ${seconds(now - move.started_unix_seconds)}`);
  const names = Object.keys(PHASES);
  const at = names.indexOf(move.phase);
  const list = card.querySelector(".phases");
  names.forEach((phase, index) => {
    const step = list.children[index] ?? list.appendChild(stepElement(PHASES[phase]));
    const took = move.phase_seconds[phase];
    step.dataset.at = index === at ? "now" : took === undefined ? "later" : "over";
    index === at ? step.setAttribute("aria-current", "step") : step.removeAttribute("aria-current");
    setText(step.lastElementChild, took === undefined ? (index === at ? "now" : "") : seconds(took));
  });
  setText(card.querySelector(".detail"), [shareWords(move), ...sizeWords(move), move.reason].filter(Boolean).join(" · "));
}

function stepElement(name) {
  const step = document.createElement("li");
  const title = document.createElement("span");
  title.textContent = name;
  step.append(title, document.createElement("small"));
  return step;
}

/** How much of what there is to copy has been copied; steps that write anew add to it. */
function shareWords({ num_kv_bytes: kv, num_weight_bytes: weights, num_total_bytes: total }) {
  return total ? `${percent(Math.min(1, (kv + weights) / total))} of ${bytes(total)}` : "";
}

function sizeWords(move) {
  const sizes = [["KV", move.num_kv_bytes], ["weights", move.num_weight_bytes]];
  const told = sizes.filter(([, size]) => size).map(([what, size]) => `${what} ${bytes(size)}`);
  return [told.join(", "), move.num_rounds ? many(move.num_rounds, "delta round") : ""];
}

function drawEnded(line, move) {
  const isDone = move.phase === "done";
  line.dataset.phase = move.phase;
  setText(line.querySelector(".mark"), isDone ? "✓ done" : "✕ rolled back");
  const time = line.querySelector("time");
  const at = new Date(1000 * move.ended_unix_seconds);
  time.dateTime = at.toISOString();
  setText(time, at.toLocaleTimeString());
  setText(line.querySelector(".name"), titleOf(move));
  const { num_blocks_before: before, num_blocks_after: after } = move;
  const figures = [
    `in ${seconds(move.ended_unix_seconds - move.started_unix_seconds)}`,
    move.pause_seconds ? `pause ${milliseconds(move.pause_seconds)}` : "",
    ...sizeWords(move),
    before && after ? blocksWords(before, after) : "",
    move.reason,
  ];
  setText(line.querySelector(".detail"), figures.filter(Boolean).join(" · "));
  setText(line.querySelector(".error"), move.error);
}

function blocksWords(before, after) {
  if (before === after) return `${many(after, "block")} as before`;
  const change = `${after > before ? "+" : "−"}${percent(Math.abs(after / before - 1))}`;
  return `${count(before)} → ${many(after, "block")} (${change})`;
}

/** `loop` null: there is no coordinator. */
export function drawLoop(section, loop, now) {
  const last = loop?.rounds[0];
  const mode = loop && (loop.is_automatic ? "it moves modules by itself" : "it only watches, modules move by hand");
  setText(section.querySelector(".mode"), loop ? `${loop.leader} leads; ${mode}.` : "No coordinator leads now: modules stay where they are.");
  const age = last ? Math.max(0, Math.round(now - last.unix_seconds)) : 0;
  setText(section.querySelector(".decision"), last ? last.decision : "");
  setText(section.querySelector(".round"), last
    ? `Round ${count(last.number)}, ${age ? `${count(age)} s ago` : "just now"}: between the most and the least loaded worker ${two.format(last.gap)}, ${last.is_balancing ? "balancing" : "balanced"}` : "");
  const devices = [...(last?.devices ?? [])].map((one) => ({ ...one, id: one.worker }));
  keyed(section.querySelector(".devices"), devices, "meter", drawDevice);
  const candidates = (last?.candidates ?? []).map((one, at) => ({ ...one, id: String(at) }));
  const names = new Map(devices.map((one) => [one.worker, one.name]));
  section.querySelector("details").hidden = !candidates.length;
  setText(section.querySelector("summary"), `What was considered (${count(candidates.length)})`);
  keyed(section.querySelector(".candidates"), candidates, "candidate", (line, one) => drawCandidate(line, one, names));
}

function drawDevice(element, one) {
  const parts = ["compute", "memory", "queue"].map((what) => `${what} ${percent(one[what])}`);
  drawMeter(element, one.name || one.worker, {
    label: one.name || one.worker, share: one.utilization, text: `load ${two.format(one.utilization)}: ${parts.join(", ")}`,
  });
}

function drawCandidate(line, one, names) {
  line.dataset.taken = one.verdict === "taken";
  const host = names.get(one.host) || one.host;
  setText(line.querySelector(".name"), `${names.get(one.instance) || one.instance}: ${one.what}${host ? ` to ${host}` : ""}`);
  setText(line.querySelector(".verdict"), one.verdict);
  setText(line.querySelector(".detail"),
    `benefit ${three.format(one.benefit)}, cost ${three.format(one.cost)}, takes ${seconds(one.move_seconds)}, adds ${milliseconds(one.overhead_seconds)} to a step`);
}
