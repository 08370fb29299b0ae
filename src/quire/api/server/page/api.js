// Talks to the server. The key, if one is needed, stays in this tab.

const KEY = "quire-key";

export class ApiError extends Error {
  constructor(status, message, sentKey = null) {
    super(message);
    this.status = status;
    this.sentKey = sentKey;
  }

  /** The key was refused; and it is still the one that would be sent now. */
  get needsKey() {
    return this.status === 401 && this.sentKey === key();
  }
}

export function key() {
  return sessionStorage.getItem(KEY);
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value);
}

function headers(held, more = {}) {
  return held ? { ...more, Authorization: `Bearer ${held}` } : more;
}

async function failed(response, held) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not the server's own words
  }
  return new ApiError(response.status, message, held);
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
}

export async function get(path) {
  const held = key();
  const response = await reach(path, { headers: headers(held) });
  if (!response.ok) throw await failed(response, held);
  return response.json();
}

/** The messages of an event stream, as they come. */
export async function* stream(path, body, signal) {
  const held = key();
  const response = await reach(path, {
    method: "POST",
    headers: headers(held, { "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failed(response, held);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const message = JSON.parse(line.slice(6));
      if (message.error) throw new ApiError(500, message.error.message);
      yield message;
    }
  }
}
