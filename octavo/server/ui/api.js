// Talking to the server: the key, JSON, server-sent events, Prometheus text. URLs are relative to the page.

const KEY = "octavo-api-key";

export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401 && path.startsWith("v1/")) {
    await askForKey(key !== null);
    return call(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered ${response.status}.`);
  }
  return response;
}

let asking = null; // calls that are refused at the same time share one question

function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    document.getElementById("key-wrong").hidden = !wasWrong;
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    document.getElementById("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      dialog.close();
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

/** The data of each event of a stream, parsed, up to [DONE]. An error told in the stream is thrown. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment keeps the connection alive
      if (block === "data: [DONE]") return;
      const data = JSON.parse(block.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

/** Sums over label sets of every sample, by name. */
export async function metrics() {
  const sums = new Map();
  for (const line of (await (await call("metrics")).text()).split("\n")) {
    const match = /^([\w:]+)(?:\{.*\})? (\S+)/.exec(line);
    if (match) sums.set(match[1], (sums.get(match[1]) ?? 0) + Number(match[2]));
  }
  return sums;
}
