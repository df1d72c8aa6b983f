// The chat. A conversation is a list of API messages; each has one article in the log, and is what is sent next time.

import { call, events } from "./api.js";
import { copyButton, element, Markdown } from "./markdown.js";
import { startPanel } from "./panel.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const conversation = []; // {message, article}
let running = null; // the AbortController of the answer being written

// What a model that does not chat can do; empty for one that does.
const tasks = document.body.dataset.tasks;

function show(message, ...children) {
  $("empty").hidden = true;
  const article = element("article", message.role, ...children);
  $("log").append(article);
  conversation.push({ message, article });
  return article;
}

function drop(from) {
  for (const { article } of conversation.splice(from)) article.remove();
  $("empty").hidden = conversation.length > 0;
}

function fold(title, className) {
  const summary = element("summary", "", title);
  return { summary, node: element("details", className, summary) };
}

/** One answer on the page, and the message it becomes. */
class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.text = new Markdown();
    this.note = element("footer", "", element("span", "dots", "thinking"));
    this.article = show(this.message, this.text.node, this.note);
    this.article.setAttribute("aria-busy", "true");
    this.calls = [];
    this.views = []; // where the arguments of each call are shown
    this.reason = null;
    this.usage = null;
    this.started = performance.now();
    this.first = null;
    this.frame = 0;
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning, tool_calls: pieces = [] } = choice.delta;
    if (content || reasoning || pieces.length) this.first ??= performance.now();
    if (reasoning) this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    if (content) this.message.content += content;
    for (const piece of pieces) this.addCall(piece);
    this.reason = choice.finish_reason ?? this.reason;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  addCall({ index, id, function: { name = "", arguments: text = "" } }) {
    this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    this.calls[index].function.name += name;
    this.calls[index].function.arguments += text;
    this.message.tool_calls = this.calls;
  }

  draw() {
    this.frame = 0;
    const log = $("log");
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (this.message.reasoning) {
      if (!this.thoughts) {
        this.thoughts = { ...fold("Reasoning", "reasoning"), text: element("div", "thoughts") };
        this.thoughts.node.append(this.thoughts.text);
        this.article.prepend(this.thoughts.node);
      }
      this.thoughts.text.textContent = this.message.reasoning;
    }
    this.text.set(this.message.content);
    this.calls.forEach((made, index) => {
      this.views[index] ??= this.callView(made.function.name);
      this.views[index].textContent = made.function.arguments;
    });
    if (following) log.scrollTop = log.scrollHeight;
  }

  callView(name) {
    const body = element("code");
    const { node } = fold(element("span", "", "Calls ", element("b", "", name)), "tool-call");
    node.open = true;
    node.append(element("pre", "", body));
    this.note.before(node);
    return body;
  }

  end(error) {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.article.removeAttribute("aria-busy");
    const now = performance.now();
    const facts = [];
    if (this.usage) facts.push(`${this.usage.completion_tokens} tokens`);
    if (this.usage && this.first) facts.push(`${(this.usage.completion_tokens / ((now - this.first) / 1000)).toFixed(1)} tokens/s`);
    if (this.first) facts.push(`first after ${Math.round(this.first - this.started)} ms`);
    if (error?.name === "AbortError") facts.push("stopped");
    else if (this.reason && this.reason !== "stop") facts.push(this.reason.replace("_", " "));
    this.note.replaceChildren(element("span", "", facts.join(" · ")), copyButton(() => this.message.content), regenerateButton());
    if (error) delete this.message.tool_calls; // cut off, their arguments may be no JSON
    if (error && error.name !== "AbortError") this.note.before(element("p", "error", error.message));
  }
}

function regenerateButton() {
  const button = element("button", "quiet regenerate", "Regenerate");
  button.type = "button";
  button.onclick = () => {
    if (running) return;
    drop(conversation.findLastIndex(({ message }) => message.role !== "assistant") + 1);
    generate();
  };
  return button;
}

// An answer that failed before its first word is no turn of the conversation.
const saysSomething = ({ content, tool_calls: calls }) => content !== "" || calls;

function requestBody() {
  const body = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  const system = $("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation.map(({ message }) => message).filter(saysSomething)];
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  const tools = $("tools").value.trim();
  if (tools) body.tools = JSON.parse(tools);
  return body;
}

async function generate() {
  let body;
  try {
    body = JSON.stringify(requestBody());
  } catch (error) {
    $("tools").setCustomValidity(`Tools are not JSON: ${error.message}`);
    if (!document.body.classList.contains("side")) toggleSide();
    $("tools").reportValidity();
    return;
  }
  running = new AbortController();
  document.body.classList.add("running");
  [$("send").hidden, $("stop").hidden] = [true, false];
  const answer = new Answer();
  $("log").scrollTop = $("log").scrollHeight;
  let problem = null;
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body, signal: running.signal };
    for await (const chunk of events(await call("v1/chat/completions", options))) answer.add(chunk);
  } catch (error) {
    problem = error;
  }
  answer.end(problem);
  running = null;
  document.body.classList.remove("running");
  [$("send").hidden, $("stop").hidden] = [false, true];
  askForResult();
}

/** The call that waits for its result, which the next thing written is. */
function pendingCall() {
  const last = conversation.findLastIndex(({ message }) => message.role === "assistant");
  const answered = conversation.length - last - 1;
  return conversation[last]?.message.tool_calls?.[answered];
}

function askForResult() {
  const pending = pendingCall();
  $("text").placeholder = pending ? `Result of ${pending.function.name}` : "Message";
}

function send() {
  const text = $("text").value.trim();
  if (!text || running || tasks) return;
  const pending = pendingCall();
  const message = pending ? { role: "tool", tool_call_id: pending.id, content: text } : { role: "user", content: text };
  show(message, ...(pending ? [element("b", "", pending.function.name)] : []), element("div", "verbatim", text));
  $("text").value = "";
  fit();
  askForResult();
  if (!pendingCall()) generate();
}

function fit() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight + 2, 220)}px`;
}

function toggleSide() {
  const open = document.body.classList.toggle("side");
  $("side").setAttribute("aria-expanded", String(open));
}

async function listModels() {
  const { data } = await (await call("v1/models")).json();
  for (const { id, parent, max_model_len: length } of data) {
    $("model").append(new Option(id));
    const facts = parent ? `adapter of ${parent}` : `${length.toLocaleString("en")} tokens of context`;
    $("model-list").append(element("li", "", element("b", "", id), element("span", "", facts)));
  }
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("text").oninput = fit;
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
$("stop").onclick = () => running?.abort();
$("tools").oninput = () => $("tools").setCustomValidity("");
$("clear").onclick = () => {
  running?.abort();
  drop(0);
  askForResult();
  $("text").focus();
};
$("side").onclick = toggleSide;
if (matchMedia("(min-width: 56rem)").matches) toggleSide();
else $("side").setAttribute("aria-expanded", "false");

if (tasks) {
  document.body.classList.add("no-chat");
  $("empty").textContent = `This model does not chat. Its tasks: ${tasks}.`;
  for (const control of [...$("composer").elements, $("clear")]) control.disabled = true;
}
startPanel();
listModels().catch((error) => ($("empty").textContent = error.message));
