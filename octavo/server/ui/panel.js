// The engine at a glance: /metrics once a second while the page is looked at, /health for its state.

import { call, metrics } from "./api.js";

const PERIOD_MS = 1000;
const HISTORY = 60;
const $ = (id) => document.getElementById(id);
const rates = [];
let before = null;

const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const time = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`);

export function startPanel() {
  const tick = async () => {
    if (!document.hidden) await Promise.all([showState(), showMetrics()]);
    setTimeout(tick, PERIOD_MS);
  };
  tick();
}

async function showState() {
  let [state, reason] = ["ready", ""];
  try {
    await call("health");
  } catch (error) {
    [state, reason] = error instanceof TypeError ? ["unreachable", ""] : ["not ready", error.message];
  }
  if ($("state").textContent === state) return; // a status that does not change is not announced again
  $("state").textContent = state;
  $("state").title = reason;
  $("state").dataset.state = state;
}

async function showMetrics() {
  const values = await metrics().catch(() => null);
  if (values === null) return;
  const now = { at: performance.now(), values };
  const value = (name) => values.get(`vllm:${name}`) ?? 0;
  const since = (name) => value(name) - (before?.values.get(`vllm:${name}`) ?? value(name));
  $("no-stats").hidden = values.has("vllm:num_requests_running");
  if (!$("no-stats").hidden) return;

  $("m-running").textContent = count(value("num_requests_running"));
  $("m-waiting").textContent = count(value("num_requests_waiting"));
  $("m-kv").textContent = percent(value("kv_cache_usage_perc"));
  $("kv-meter").value = value("kv_cache_usage_perc");
  share("prefix", value("prefix_cache_hits_total"), value("prefix_cache_queries_total"));
  $("drafts").hidden = !values.has("vllm:spec_decode_num_draft_tokens_total");
  share("drafts", value("spec_decode_num_accepted_tokens_total"), value("spec_decode_num_draft_tokens_total"));
  for (const [id, name] of [["ttft", "time_to_first_token"], ["itl", "inter_token_latency"]]) {
    // Of the last second; when nothing came, of the last second in which something did, at first of all time.
    const field = (part) => (before ? since : value)(`${name}_seconds_${part}`);
    if (field("count") > 0) $(`m-${id}`).textContent = time(field("sum") / field("count"));
  }
  if (before) {
    const seconds = (now.at - before.at) / 1000;
    $("m-prompt").textContent = count(Math.max(0, since("prompt_tokens_total")) / seconds);
    spark(Math.max(0, since("generation_tokens_total")) / seconds);
  }
  before = now;
}

function share(id, part, whole) {
  if (whole > 0) $(`m-${id}`).textContent = percent(part / whole);
}

function spark(rate) {
  $("m-generated").textContent = count(rate);
  rates.push(rate);
  if (rates.length > HISTORY) rates.shift();
  const top = Math.max(1, ...rates);
  const step = 100 / (HISTORY - 1);
  const left = 100 - (rates.length - 1) * step;
  const points = rates.map((y, i) => `${(left + i * step).toFixed(2)},${(31 - (29 * y) / top).toFixed(2)}`).join(" ");
  $("spark-line").setAttribute("points", points);
  $("spark-area").setAttribute("points", `${left.toFixed(2)},32 ${points} 100,32`);
}
