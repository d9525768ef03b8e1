// The chat: a conversation with one model at a time, which outlives that model's engine.

import { h, setText } from "./dom.js";
import { confirmed } from "./dialogs.js";
import { ChatEngine } from "./chat_engine.js";
import { ChatSettings } from "./chat_settings.js";
import { ChatStore } from "./chat_store.js";
import { blankAnswer, canContinue, requestBody, streamAnswer } from "./chat_stream.js";
import { MessageView } from "./chat_message.js";
import { count, plural } from "./format.js";

const SAVE_MS = 1000;
export class Chat {
  constructor(place, live) {
    this.place = place;
    this.live = live;
    this.store = new ChatStore();
    this.views = new Map();
    this.note = "";
    this.engine = new ChatEngine(live, this.store, () => this.engineChanged());
    this.build();
    this.showConversation();
    window.addEventListener("pagehide", () => {
      if (!this.running) return;
      this.store.save();
      this.abort.abort();
    });
    window.addEventListener("storage", () => this.listConversations());
  }

  build() {
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
      this.engine.element,
      new ChatSettings(this.store).element,
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

  engineChanged() {
    const state = this.engine.state();
    this.place.dataset.tone = state.tone;
    for (const view of this.views.values()) view.engineChanged(state);
    const running = this.running && this.views.get(this.running);
    if (running && !state.isReady)
      running.update(this.note || `Waiting: engine ${state.text}`, state);
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
          text: "Conversations stay in this browser. If the engine dies in mid-answer, what came so far is kept and can be continued. A base model, as demo is one, goes on with a text: give it the beginning of a story; a question it repeats.",
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

  /** Stop a running answer and keep what came, before another conversation takes its place. */
  leave() {
    if (!this.running) return;
    this.running.state = "stopped";
    this.store.save();
    this.abort.abort();
  }

  startNew() {
    this.leave();
    this.store.start();
    this.showConversation();
    this.input.focus();
  }

  switchTo(id) {
    this.leave();
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
    view.update("", this.engine.state());
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
    // Chat templates drop white space at an end; the model writes it again.
    const content = message.content.trimEnd();
    Object.assign(message, { content, state: "streaming", error: null, finish: null });
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
      this.views.get(message).update("", this.engine.state());
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

  /** A comment on the stream: prompt tokens so far, or what a waiting request waits for. */
  waits(message, comment) {
    const found = /^keepalive (\d+)\/(\d+)$/.exec(comment);
    this.note = found
      ? `Reading the prompt: ${count(+found[1])} of ${count(+found[2])} tokens…`
      : comment;
    this.views.get(message)?.update(this.note, this.engine.state());
  }

  /** Draw at most once a frame; a hidden page has no frames, so it draws by timer. */
  changed(message) {
    if (this.drawing) return;
    this.drawing = true;
    const draw = () => {
      this.drawing = false;
      this.views.get(message)?.update(this.note, this.engine.state());
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
    this.views.get(message)?.update("", this.engine.state());
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
