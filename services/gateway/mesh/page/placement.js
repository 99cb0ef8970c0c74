// A grid of layers and heads for each instance, coloured by who runs and holds them.

import { bytes, copyOf, count, many, setText } from "./cards.js";

/** Rectangles of one holder and one destination: `{ first, end, head, endHead, worker, to }`, all of it together. */
export function partsOf(instance, moving = []) {
  const parts = [];
  const columns = Array.from({ length: instance.num_layers }, (_, layer) => cells(instance, moving, layer));
  for (let first = 0, end; first < columns.length; first = end) {
    const column = columns[first];
    end = first + 1;
    while (end < columns.length && columns[end].every((cell, head) => isSame(cell, column[head]))) end++;
    for (let head = 0, endHead; head < column.length; head = endHead) {
      endHead = head + 1;
      while (endHead < column.length && isSame(column[endHead], column[head])) endHead++;
      parts.push({ first, end, head, endHead, ...column[head] });
    }
  }
  return parts;
}

/** Of one layer, by head: who holds it, and where it is going. */
function cells(instance, moving, layer) {
  const run = instance.layers.find((one) => has(one.first, one.end, layer));
  const away = instance.heads.filter((one) => has(one.first, one.end, layer));
  const going = moving.filter(({ module: { first_layer: first, end_layer: end, kind } }) => kind !== "tokens" && has(first, end, layer));
  return Array.from({ length: instance.num_kv_heads }, (_, head) => {
    const move = going.find(({ module }) => module.kind === "layers" || module.kv_heads.includes(head));
    const to = !move ? "" : move.is_return ? instance.name : move.host_name || move.host;
    return { worker: (away.find((one) => one.kv_heads.includes(head)) ?? run).worker, to };
  });
}

const has = (first, end, layer) => first <= layer && layer < end;
const isSame = (one, other) => one.worker === other.worker && one.to === other.to;

/** Everybody who is in a picture, or on the way into one. */
export function namesIn(instances, moves) {
  const parts = instances.flatMap((one) => [...one.layers, ...one.heads, ...one.lent]);
  return [...instances.map((one) => one.name), ...parts.map((part) => part.worker), ...moves.map((move) => move.host_name || move.host)];
}

export function drawLegend(list, workers) {
  const drawn = workers.names.join();
  if (list.dataset.drawn === drawn) return;
  list.dataset.drawn = drawn;
  list.replaceChildren(...workers.names.map((name) => {
    const entry = document.createElement("li");
    const chip = document.createElement("span");
    chip.className = `chip ${workers.colour(name)}`;
    chip.textContent = workers.letter(name);
    entry.append(chip, ` ${name}`);
    return entry;
  }));
}

/** Make the pictures below `list` those of `instances`; `moves` are those under way. */
export function drawInstances(list, instances, moves, workers) {
  const known = new Map([...list.children].map((picture) => [picture.dataset.name, picture]));
  instances.forEach((instance, at) => {
    const picture = known.get(instance.name) ?? copyOf("instance");
    known.delete(instance.name);
    picture.dataset.name = instance.name;
    const moving = moves.filter((move) => move.instance === instance.incarnation);
    drawInstance(picture, instance, moving, workers);
    if (list.children[at] !== picture) list.insertBefore(picture, list.children[at] ?? null);
  });
  for (const picture of known.values()) picture.remove();
}

function drawInstance(picture, instance, moving, workers) {
  setText(picture.querySelector(".name"), instance.name);
  const { num_blocks: numBlocks, num_tokens: numTokens } = instance.capacity;
  const room = numBlocks ? `room for ${many(numTokens, "token")} in ${many(numBlocks, "block")}, ` : "";
  setText(picture.querySelector(".state"), `${room}epoch ${count(instance.epoch)}`);
  const { layers, heads, lent, hosted, num_layers: numLayers, num_kv_heads: numHeads } = instance;
  const drawn = JSON.stringify([layers, heads, lent, hosted, numLayers, numHeads, moving.map(overlayKey), workers.names]);
  if (picture.dataset.drawn === drawn) return;
  picture.dataset.drawn = drawn;
  drawGrid(picture, instance, moving, workers);
  const said = [...awayWords(instance), ...moving.map(movingWords), ...hosted.map(hostedWords)];
  picture.querySelector(".said").replaceChildren(...said.map((words) => {
    const line = document.createElement("li");
    line.textContent = words;
    return line;
  }));
}

function drawGrid(picture, instance, moving, workers) {
  const grid = picture.querySelector(".grid");
  grid.style.setProperty("--layers", instance.num_layers);
  grid.style.setProperty("--heads", instance.num_kv_heads);
  grid.replaceChildren(...partsOf(instance, moving).map((part) => partElement(part, workers)));
  const away = [...awayWords(instance), ...moving.map(movingWords)];
  grid.setAttribute("aria-label", `${instance.name}: ${numbersOf(instance)}; ${away.join("; ") || "all at home"}`);
  setText(picture.querySelector(".axis"), numbersOf(instance));
}

function numbersOf({ num_layers: numLayers, num_kv_heads: numHeads }) {
  return `${many(numLayers, "layer")} across, ${many(numHeads, "KV head")} down`;
}

function partElement({ first, end, head, endHead, worker, to }, workers) {
  const part = document.createElement("div");
  part.className = `part ${workers.colour(worker)}${to ? " moving" : ""}`;
  part.style.gridColumn = `${first + 1} / ${end + 1}`;
  part.style.gridRow = `${head + 1} / ${endHead + 1}`;
  part.style.setProperty("--across", end - first);
  part.style.setProperty("--down", endHead - head);
  const letter = document.createElement("b");
  letter.textContent = workers.letter(worker);
  const name = document.createElement("span");
  name.textContent = ` ${worker}`;
  part.append(letter, name);
  if (to) {
    const goal = document.createElement("b");
    goal.textContent = `\u2009→\u2009${workers.letter(to)}`;
    part.append(goal);
  }
  return part;
}

function awayWords({ layers, heads, lent }) {
  return [
    ...layers.filter((run) => run.move_id).map((run) =>
      `${layerWords(run)} at ${run.worker}${run.has_weights_at_home ? "" : `, with ${run.end - run.first === 1 ? "its" : "their"} weights`}`),
    ...heads.map((part) => `${part.what} at ${part.worker}`),
    ...lent.map((part) => `${part.worker} lends ${many(part.num_blocks, "block")}`),
  ];
}

function layerWords({ first, end }) {
  return end - first === 1 ? `layer ${first}` : `layers ${first}-${end - 1}`;
}

const overlayKey = (move) => [move.id, move.what];
const movingWords = (move) => `${move.what} on the way ${wayWords(move)}`;
const hostedWords = (one) => one.what === "lent blocks"
  ? `lends ${many(one.num_blocks, "block")} to ${one.instance}, ${bytes(one.num_bytes)}`
  : `runs ${one.what} of ${one.instance} here, in ${bytes(one.num_bytes)}`;

export function wayWords(move) {
  const host = move.host_name || move.host;
  return move.is_return ? `home from ${host}` : `to ${host}`;
}
