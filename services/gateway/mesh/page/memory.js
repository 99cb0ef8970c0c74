// What the page remembers from one snapshot to the next: who was here, what changed, how rates went. No DOM.

const KEPT_POINTS = 60; // one a second
const POINT_MS = 900;
const GAP_MS = 5000; // nobody looked for so long, or nothing was heard: the rates begin anew
const GONE_MS = 60000; // how long a card stays of who left
const KEPT_CHANGES = 8;

export class Memory {
  constructor() {
    this.services = new Map(); // by incarnation: the service as last told, with what is kept of it
    this.changes = []; // the newest first: { id, at, text }
    this.isFirst = true;
    this.numChanges = 0;
  }

  /** Take a snapshot in; `now` in milliseconds. */
  hear(mesh, now) {
    const present = new Set(mesh.services.map((service) => service.incarnation));
    for (const told of mesh.services) this.#hearOne(told, now);
    for (const [incarnation, known] of this.services) {
      if (present.has(incarnation)) continue;
      if (known.state !== "gone") this.#leave(known, now);
      const isReplaced = mesh.services.some((s) => s.kind === known.kind && s.name === known.name);
      if (isReplaced || now - known.goneAt > GONE_MS) this.services.delete(incarnation);
    }
    this.isFirst = false;
  }

  #hearOne(told, now) {
    const known = this.services.get(told.incarnation) ?? { points: [], state: "" };
    if (known.state !== told.state && !(this.isFirst && told.state === "ready")) {
      this.#note(now, `${told.name} is ${told.state}${told.detail ? `: ${told.detail}` : ""}`);
    }
    const points = known.points;
    if (now - (points.at(-1)?.at ?? now) > GAP_MS) points.length = 0;
    if (told.load && now - (points.at(-1)?.at ?? 0) >= POINT_MS) {
      points.push({ at: now, rate: told.load.tokens_per_second, tiers: told.load.tiers ?? [] });
      if (points.length > KEPT_POINTS) points.shift();
    }
    this.services.set(told.incarnation, { ...told, points });
  }

  #leave(known, now) {
    this.#note(now, `${known.name} is gone`);
    Object.assign(known, { state: "gone", goneAt: now, goneAfter: known.state });
  }

  #note(now, text) {
    this.changes.unshift({ id: this.numChanges++, at: now, text });
    this.changes.length = Math.min(this.changes.length, KEPT_CHANGES);
  }
}

/** Of what a tier was asked for lately, the share that it had; null where it was not asked. */
export function recentHitShare(service, index) {
  const first = service.points[0]?.tiers[index];
  const last = service.points.at(-1)?.tiers[index];
  if (!first || !last || last.num_asked_blocks === first.num_asked_blocks) return null;
  return (last.num_hit_blocks - first.num_hit_blocks) / (last.num_asked_blocks - first.num_asked_blocks);
}
