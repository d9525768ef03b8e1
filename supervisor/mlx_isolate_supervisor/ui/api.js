// Talks to this server only: JSON, server-sent events, the API key.

const KEY = "mlx-isolate.key";
const TIMEOUT_MS = 8000;

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The key lives in this tab only. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers(extra) {
  const key = apiKey.get();
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...extra };
}

/** Ask and return the Response; paths are relative, so that a reverse proxy may add a prefix. */
export async function ask(path, { method = "GET", body, signal, extra = {} } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      cache: "no-store",
      credentials: "same-origin",
      headers: headers({
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...extra,
      }),
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError("The server cannot be reached.", { code: "unreachable" });
  }
  if (response.ok) return response;
  if (response.status === 401) window.dispatchEvent(new CustomEvent("key-needed"));
  throw await refusal(response);
}

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  let code = null;
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    code = error.code ?? null;
  } catch {
    // Not our envelope: the status says enough.
  }
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  return new ApiError(message, { status: response.status, code, retryAfter });
}

export async function getJson(path) {
  return (await ask(path, { signal: AbortSignal.timeout(TIMEOUT_MS) })).json();
}

/** A control: may take as long as the engine does. */
export async function post(path, body) {
  return (await ask(path, { method: "POST", body: body ?? {} })).json();
}

/** Decode a streamed body as text pieces. */
export async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Parse server-sent events: yields {id, event, data} and {comment}. */
export async function* serverEvents(response) {
  let buffer = "";
  for await (const piece of pieces(response)) {
    buffer += piece;
    const blocks = buffer.split(/\r?\n\r?\n/);
    buffer = blocks.pop();
    for (const block of blocks) {
      const found = parseBlock(block);
      if (found) yield found;
    }
  }
}

function parseBlock(block) {
  const found = { id: null, event: "message", data: null };
  let comment = null;
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith(":")) {
      comment = line.slice(1).trim();
      continue;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
    else if (field === "event") found.event = value;
    else if (field === "id") found.id = value;
  }
  if (found.data !== null) return found;
  return comment === null ? null : { comment };
}
