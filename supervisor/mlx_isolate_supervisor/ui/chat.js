// The chat: a conversation with one model at a time, which outlives that model's engine.

import { h, offer, setAttribute, setText } from "./dom.js";
import { confirmed, toast } from "./dialogs.js";
import { post } from "./api.js";
import { DEFAULTS, ChatStore } from "./chat_store.js";
import { blankAnswer, canContinue, requestBody, streamAnswer } from "./chat_stream.js";
import { MessageView } from "./chat_message.js";
import { plural } from "./format.js";
import { stateText, TONES } from "./models.js";

const SAVE_MS = 1000;
const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];

export class Chat {
  constructor(place, live) {
    this.place = place;
    this.live = live;
    this.store = new ChatStore();
    this.views = new Map();
    this.note = "";
    this.build();
    this.showConversation();
    live.addEventListener("status", ({ detail }) => this.statusChanged(detail.models));
    live.addEventListener("connection", () => this.engineChanged());
    window.addEventListener("pagehide", () => {
      if (!this.running) return;
      this.store.save();
      this.abort.abort();
    });
    window.addEventListener("storage", () => this.listConversations());
  }

  build() {
    const { settings } = this.store;
    this.model = h(
      "select",
      { "aria-label": "Model", on: { change: () => this.set("model", this.model.value) } },
      h("option", { value: "", text: "no model" }),
    );
    this.history = h("select", {
      "aria-label": "Conversation",
      class: "grow",
      on: { change: () => this.switchTo(this.history.value) },
    });
    this.newButton = h("button", {
      type: "button",
      class: "small",
      text: "New",
      "aria-label": "New conversation",
      on: { click: () => this.startNew() },
    });
    this.deleteButton = h("button", {
      type: "button",
      class: "small quiet",
      text: "Delete",
      "aria-label": "Delete this conversation",
      on: { click: () => this.remove() },
    });
    this.dot = h("span", { class: "dot", "aria-hidden": "true" });
    this.engine = h("span", { class: "engine-text" });
    this.kill = h("button", {
      type: "button",
      class: "small danger",
      text: "Kill",
      "aria-label": "Kill the engine of this model",
      on: { click: () => this.killEngine() },
    });
    this.log = h("div", {
      class: "messages",
      role: "log",
      "aria-live": "off",
      "aria-label": "Conversation",
      tabindex: "0",
    });
    this.said = h("p", { class: "visually-hidden", role: "status" });
    this.input = h("textarea", {
      rows: "2",
      "aria-label": "Message",
      placeholder: "Message…",
      title: "Enter sends, Shift+Enter makes a new line",
      on: { keydown: (e) => this.key(e), input: () => this.grow() },
    });
    this.send = h("button", { class: "primary", text: "Send" });
    this.stop = h("button", {
      type: "button",
      class: "danger",
      text: "Stop",
      on: { click: () => this.abort?.abort() },
    });
    this.stop.hidden = true;
    const form = h(
      "form",
      { class: "composer", on: { submit: (e) => (e.preventDefault(), this.submit()) } },
      this.input,
      h("div", { class: "composer-buttons" }, this.stop, this.send),
    );
    this.place.append(
      h(
        "div",
        { class: "chat-head" },
        h("h2", { id: "chat-title", text: "Chat" }),
        this.history,
        this.newButton,
        this.deleteButton,
      ),
      h("div", { class: "chat-engine" }, this.model, this.dot, this.engine, this.kill),
      this.buildSettings(settings),
      this.log,
      this.said,
      form,
    );
    this.log.addEventListener(
      "scroll",
      () => (this.atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40),
    );
    this.atEnd = true;
  }

  buildSettings(settings) {
    const area = (name, label, rows, extra = {}) =>
      h(
        "label",
        { class: "wide" },
        label,
        h("textarea", {
          rows,
          ...extra,
          name,
          on: { input: ({ target }) => this.set(name, target.value) },
        }),
      );
    this.settings = h(
      "details",
      { class: "chat-settings" },
      h("summary", { text: "System prompt, sampling, tools" }),
      area("system", "System prompt", "2"),
      h(
        "div",
        { class: "fields" },
        ...FIELDS.map(([name, label, limits]) =>
          h(
            "label",
            {},
            label,
            h("input", {
              type: "number",
              name,
              placeholder: "default",
              ...limits,
              on: { input: ({ target }) => this.set(name, target.value) },
            }),
          ),
        ),
      ),
      area("tools", "Tools (JSON array, as in the API)", "3", {
        spellcheck: "false",
        class: "mono",
      }),
      h("button", {
        type: "button",
        class: "small",
        text: "Back to defaults",
        on: { click: () => this.resetSettings() },
      }),
    );
    for (const field of this.settings.querySelectorAll("[name]"))
      field.value = settings[field.name];
    return this.settings;
  }

  set(name, value) {
    this.store.settings[name] = value;
    this.store.saveSettings();
    if (name === "model") this.engineChanged();
  }

  resetSettings() {
    this.store.settings = { ...DEFAULTS, model: this.store.settings.model };
    this.store.saveSettings();
    for (const field of this.settings.querySelectorAll("[name]")) field.value = "";
  }

  // Engine ------------------------------------------------------------------------------------

  statusChanged(models) {
    const names = models.map((model) => model.id);
    offer(this.model, names);
    this.model.options[0].hidden = names.length > 0;
    const wanted = this.store.settings.model;
    if (names.includes(wanted)) this.model.value = wanted;
    else if (names.length) {
      [this.model.value] = names;
      [this.store.settings.model] = names;
    }
    this.engineChanged();
  }

  get current() {
    return this.live.status?.models.find((model) => model.id === this.store.settings.model);
  }

  /** Whether a request has a prospect: a model that is down is loaded by the request itself. */
  engineState() {
    if (this.live.connection.state !== "live")
      return { isReady: false, text: "server not reachable", tone: "bad" };
    const model = this.current;
    if (!model) return { isReady: false, text: "no model", tone: "idle" };
    const text = stateText(model);
    return {
      isReady: ["ready", "stopped"].includes(model.state),
      text,
      tone: TONES[model.state],
      model,
    };
  }

  engineChanged() {
    const state = this.engineState();
    this.place.dataset.tone = state.tone ?? "idle";
    const { model } = state;
    setText(
      this.engine,
      model?.pid ? `${state.text} · pid ${model.pid} · #${model.incarnation}` : state.text,
    );
    setAttribute(this.kill, "disabled", !model?.pid);
    for (const view of this.views.values())
      if (view.message.state !== "streaming") view.update("", state);
    const running = this.running && this.views.get(this.running);
    if (running && !state.isReady)
      running.update(this.note || `Waiting: engine ${state.text}`, state);
  }

  async killEngine() {
    const { model } = this.engineState();
    if (
      !model ||
      !(await confirmed(
        `Kill the engine of ${model.id}?`,
        `SIGKILL to process ${model.pid}. Running answers will break off; this page and the server stay up.`,
        "Kill engine",
      ))
    )
      return;
    try {
      await post("drill/kill", { model: model.id });
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  // Conversations -----------------------------------------------------------------------------

  showConversation() {
    this.views.clear();
    this.log.replaceChildren();
    for (const message of this.store.current.messages) this.show(message);
    if (!this.store.current.messages.length)
      this.log.append(
        h("p", {
          class: "empty",
          text: "Conversations stay in this browser. If the engine dies in mid-answer, what came so far is kept and can be continued.",
        }),
      );
    this.listConversations();
    this.scroll(true);
  }

  listConversations() {
    this.history.replaceChildren(
      ...this.store.conversations.map((c) => h("option", { value: c.id, text: c.title })),
    );
    this.history.value = this.store.current.id;
  }

  startNew() {
    this.abort?.abort();
    this.store.start();
    this.showConversation();
    this.input.focus();
  }

  switchTo(id) {
    this.abort?.abort();
    this.store.choose(id);
    this.showConversation();
  }

  async remove() {
    const { messages } = this.store.current;
    if (
      messages.length &&
      !(await confirmed(
        "Delete this conversation?",
        `${plural(messages.length, "message")} will be removed from this browser.`,
        "Delete",
      ))
    )
      return;
    this.abort?.abort();
    this.store.remove();
    this.showConversation();
  }

  show(message) {
    if (!this.views.size) this.log.replaceChildren();
    const view = new MessageView(message, {
      again: (m) => this.again(m),
      goOn: (m) => this.goOn(m),
      edit: (m) => this.edit(m),
      answerCalls: (m, results) => this.answerCalls(m, results),
      isLast: (m) => this.store.current.messages.at(-1) === m,
    });
    this.views.set(message, view);
    this.log.append(view.element);
    view.update("", this.engineState());
    return view;
  }

  /** Forget `message` and all after it. */
  cut(message) {
    const { messages } = this.store.current;
    const at = messages.indexOf(message);
    for (const gone of messages.splice(at)) {
      this.views.get(gone)?.element.remove();
      this.views.delete(gone);
    }
    this.store.save();
  }

  // Turns -------------------------------------------------------------------------------------

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }

  submit() {
    const content = this.input.value;
    if (!content.trim() || this.running) return;
    this.input.value = "";
    this.grow();
    this.show(this.store.add({ role: "user", content }));
    this.listConversations();
    this.answer();
  }

  again(message) {
    if (this.running) return;
    this.cut(message);
    this.answer();
  }

  goOn(message) {
    if (this.running || !canContinue(message)) return;
    const { messages } = this.store.current;
    const next = messages[messages.indexOf(message) + 1];
    if (next) this.cut(next);
    Object.assign(message, { state: "streaming", error: null, finish: null });
    this.run(message, true);
  }

  edit(message) {
    if (this.running) return;
    this.input.value = message.content;
    this.cut(message);
    this.grow();
    this.input.focus();
  }

  answerCalls(message, results) {
    if (this.running) return;
    message.calls.forEach((call, i) =>
      this.show(this.store.add({ role: "tool", tool_call_id: call.id, content: results[i] })),
    );
    this.views.get(message).update();
    this.answer();
  }

  answer() {
    const message = this.store.add(blankAnswer(this.store.settings.model));
    this.show(message);
    this.run(message, false);
  }

  async run(message, goOn) {
    const conversation = this.store.current;
    const before = conversation.messages.slice(
      0,
      conversation.messages.indexOf(message) + (goOn ? 1 : 0),
    );
    let body;
    try {
      body = requestBody(before, this.store.settings, goOn);
    } catch {
      Object.assign(message, {
        state: "failed",
        error: { message: "The tools are not valid JSON.", code: null },
      });
      this.views.get(message).update("", this.engineState());
      return;
    }
    this.begin(message);
    await streamAnswer(body, message, {
      signal: this.abort.signal,
      changed: () => this.changed(message),
      waiting: (note) => this.waits(message, note),
    });
    this.end(message);
  }

  begin(message) {
    this.running = message;
    this.abort = new AbortController();
    this.note = "";
    this.send.hidden = true;
    this.stop.hidden = false;
    this.atEnd = true;
    this.savedAt = Date.now();
    setText(this.said, "Waiting for the answer.");
    this.engineChanged();
    this.scroll();
  }

  waits(message, note) {
    this.note = note;
    this.views.get(message)?.update(note, this.engineState());
  }

  /** Draw at most once a frame; a hidden page has no frames, so it draws by timer. */
  changed(message) {
    if (this.drawing) return;
    this.drawing = true;
    const draw = () => {
      this.drawing = false;
      this.views.get(message)?.update(this.note, this.engineState());
      this.scroll();
      if (Date.now() - this.savedAt > SAVE_MS) {
        this.savedAt = Date.now();
        this.store.save();
      }
    };
    if (document.hidden) setTimeout(draw, 200);
    else requestAnimationFrame(draw);
  }

  end(message) {
    this.running = null;
    this.send.hidden = false;
    this.stop.hidden = true;
    this.store.save();
    this.views.get(message)?.update("", this.engineState());
    setText(
      this.said,
      {
        done: "Answer complete.",
        stopped: "Answer stopped.",
        failed: `Answer failed: ${message.error?.message}`,
      }[message.state],
    );
    this.scroll();
  }

  scroll(force = false) {
    if (force || this.atEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
