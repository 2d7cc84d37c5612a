// The chat page: keeps the conversation, streams answers, counts their tokens. Text goes into the
// page as text only, and the key stays in this page's memory.
"use strict";

const at = (id) => document.getElementById(id);
let messages = [];
let model = "";
let key = "";
let running = null; // the AbortController of the answer that streams

function headers() {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered with status ${response.status}.`;
}

async function open() {
  const response = await fetch("v1/models", { headers: headers() });
  at("access").hidden = response.status !== 401;
  if (!response.ok) {
    at("error").textContent = response.status === 401 && !key ? "" : await refusal(response);
    return;
  }
  model = (await response.json()).data[0].id;
  at("model").textContent = model;
  at("error").textContent = "";
  at("send").disabled = at("question").disabled = false;
  at("question").focus();
}

// The JSON objects of a stream of server-sent events.
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

function element(parent, tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return parent.appendChild(made);
}

// One answer on the page. Reasoning is folded as soon as the answer proper begins.
class Answer {
  constructor() {
    this.article = element(at("log"), "article", "assistant");
    this.article.ariaBusy = "true";
    this.text = element(this.article, "div", "text");
    this.message = { role: "assistant", content: "" };
    this.began = performance.now();
    this.first = null;
  }

  add(delta) {
    if (delta.reasoning_content) {
      if (!this.reasoning) {
        const details = document.createElement("details");
        details.open = true;
        element(details, "summary", "", "Thinking");
        this.reasoning = element(details, "pre", "");
        this.article.prepend(details);
        this.message.reasoning_content = "";
      }
      this.message.reasoning_content += delta.reasoning_content;
      this.reasoning.append(delta.reasoning_content);
    }
    if (delta.content) {
      if (this.reasoning && !this.message.content) this.reasoning.parentElement.open = false;
      this.message.content += delta.content;
      this.text.append(delta.content);
    }
    if (this.first === null && (delta.content || delta.reasoning_content)) {
      this.first = performance.now();
    }
  }

  end(usage, ending) {
    this.article.ariaBusy = "false";
    const parts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      const accepted = usage.completion_tokens_details.accepted_prediction_tokens;
      parts.push(`${usage.prompt_tokens} tokens in, ${cached} cached`);
      parts.push(`${usage.completion_tokens} out, ${accepted} of them accepted drafts`);
      const seconds = (performance.now() - this.first) / 1000;
      if (this.first !== null && usage.completion_tokens > 1) {
        parts.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
        parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
      }
    }
    if (ending) parts.push(ending);
    element(this.article, "p", "counts", parts.join(" · "));
  }
}

function scrolledDown() {
  const log = at("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

async function stream(answer) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      thinking: { type: at("thinking").checked ? "enabled" : "disabled" },
    }),
  });
  if (!response.ok) {
    at("access").hidden = response.status !== 401;
    throw new Error(await refusal(response));
  }
  let usage = null;
  let finish = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const follow = scrolledDown();
    for (const choice of event.choices) {
      answer.add(choice.delta);
      finish = choice.finish_reason ?? finish;
    }
    usage = event.usage ?? usage;
    if (follow) at("log").scrollTop = at("log").scrollHeight;
  }
  return [usage, finish === "length" ? "cut short: no room is left" : ""];
}

async function ask(question) {
  const before = messages.length;
  messages.push({ role: "user", content: question });
  const shown = element(at("log"), "article", "user text", question);
  const answer = new Answer();
  running = new AbortController();
  show(true, "The answer is being written.");
  at("log").scrollTop = at("log").scrollHeight;
  at("error").textContent = "";
  let said = "The answer is complete.";
  try {
    answer.end(...(await stream(answer)));
  } catch (error) {
    const stopped = error.name === "AbortError";
    said = stopped ? "Stopped." : "";
    if (!stopped) at("error").textContent = error.message;
    answer.end(null, stopped ? "stopped" : "failed");
  }
  running = null;
  if (answer.first === null) { // nothing came: as if it had not been asked
    messages.length = before;
    shown.remove();
    answer.article.remove();
    if (!at("question").value) at("question").value = question;
  } else {
    messages.push(answer.message);
  }
  show(false, said);
  at("log").lastElementChild?.scrollIntoView({ block: "end" });
}

function show(busy, said) {
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  at("new").disabled = busy;
  at("status").textContent = said;
  (busy ? at("stop") : at("question")).focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (!question || running) return;
  at("question").value = "";
  ask(question);
});
at("question").addEventListener("keydown", (event) => {
  // While characters are being composed, Enter chooses among them.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => {
  messages = [];
  at("log").replaceChildren();
  at("error").textContent = "";
  at("question").focus();
});
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  at("key").value = "";
  open();
});
open().catch((error) => { at("error").textContent = error.message; });
