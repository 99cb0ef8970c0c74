// The stream of events, followed for as long as the page is open. EventSource cannot send a key, so it is fetched.

const SILENCE_MS = 6000; // a snapshot comes every second
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;

export class NeedsKey extends Error {}
class Hidden extends Error {}

/** Calls `told.snapshot(mesh)`, `told.live()` and `told.lost(why)`, until the key is refused: NeedsKey. */
export async function follow(url, key, told) {
  for (let waitMs = FIRST_WAIT_MS; ; waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS)) {
    try {
      await readOnce(url, key, {
        ...told,
        live: () => { waitMs = FIRST_WAIT_MS; told.live(); },
      });
    } catch (error) {
      if (error instanceof NeedsKey) throw error;
      if (error instanceof Hidden) {
        await shown();
        continue;
      }
      told.lost(error.name === "AbortError" ? "the gateway is silent" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}

async function readOnce(url, key, told) {
  const abort = new AbortController();
  // Browsers open six connections to a server at the most: tabs that nobody looks at give theirs back.
  const onVisibility = () => document.hidden && abort.abort(new Hidden());
  document.addEventListener("visibilitychange", onVisibility);
  onVisibility();
  let silence;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => abort.abort(), SILENCE_MS);
  };
  heard();
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch(url, { headers, signal: abort.signal, cache: "no-store" });
    if (response.status === 401) throw new NeedsKey();
    if (!response.ok) throw new Error(await refusal(response));
    told.live();
    for await (const event of eventsOf(response.body, heard)) {
      const data = JSON.parse(event.data);
      if (event.name === "end") throw new Error(data.reason);
      told.snapshot(data);
    }
    throw new Error("the gateway closed the connection");
  } finally {
    document.removeEventListener("visibilitychange", onVisibility);
    clearTimeout(silence);
    abort.abort();
  }
}

function shown() {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

async function* eventsOf(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      yield parsed(text.slice(0, end));
    }
  }
}

function parsed(text) {
  const event = { name: "message", data: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("data: ")) event.data += line.slice(6);
    if (line.startsWith("event: ")) event.name = line.slice(7);
  }
  return event;
}
