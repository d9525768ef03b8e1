// How one message of the chat looks.

import { h, setText } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { canContinue } from "./chat_stream.js";
import { render } from "./markdown.js";

/** "52 tokens · 38.2 tokens/s · first token 0.3 s · prompt 120 (96 cached) · 1.7 s". */
function figuresText(figures) {
  if (!figures) return "";
  const parts = [`${figures.isCounted ? "" : "≈ "}${count(figures.tokens)} tokens`];
  if (figures.perSecond) parts.push(`${rate(figures.perSecond)} tokens/s`);
  if (figures.firstToken !== null) parts.push(`first token ${seconds(figures.firstToken)}`);
  if (figures.prompt !== null)
    parts.push(
      `prompt ${count(figures.prompt)}${figures.cached ? ` (${count(figures.cached)} cached)` : ""}`,
    );
  parts.push(seconds(figures.total));
  return parts.join(" · ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** `actions`: {again, goOn, edit, answerCalls, isLast}. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = h("article", {
      class: `message ${message.role}`,
      "aria-label": { user: "You", assistant: "Model", tool: "Tool result" }[message.role],
    });
    if (message.role === "assistant") this.buildAnswer();
    else this.buildPlain();
  }

  buildPlain() {
    const { message, actions } = this;
    const body = h("div", { class: "text plain-text", text: message.content });
    const label =
      message.role === "tool" ? h("span", { class: "role", text: "Tool result" }) : null;
    const edit =
      message.role === "user"
        ? h("button", {
            type: "button",
            class: "small quiet",
            text: "Edit",
            "aria-label": "Edit this message",
            on: { click: () => actions.edit(message) },
          })
        : null;
    this.element.append(
      ...[label, body, edit && h("div", { class: "message-foot" }, edit)].filter(Boolean),
    );
  }

  buildAnswer() {
    this.reasoningText = h("div", { class: "text" });
    this.reasoningTitle = h("summary");
    this.reasoning = h("details", { class: "reasoning" }, this.reasoningTitle, this.reasoningText);
    this.text = h("div", { class: "text" });
    this.calls = h("div", { class: "calls" });
    this.waiting = h("p", { class: "waiting" });
    this.error = h("p", { class: "failure", role: "alert" });
    this.figures = h("span", { class: "figures" });
    this.goOn = h("button", {
      type: "button",
      class: "small primary",
      text: "Continue",
      on: { click: () => this.actions.goOn(this.message) },
    });
    this.again = h("button", {
      type: "button",
      class: "small",
      text: "Try again",
      on: { click: () => this.actions.again(this.message) },
    });
    this.copy = h("button", {
      type: "button",
      class: "small quiet",
      text: "Copy",
      "aria-label": "Copy this answer",
      on: { click: () => navigator.clipboard?.writeText(this.message.content) },
    });
    this.element.append(
      this.reasoning,
      this.text,
      this.calls,
      this.waiting,
      this.error,
      h("div", { class: "message-foot" }, this.goOn, this.again, this.copy, this.figures),
    );
    this.update();
  }

  /** Bring the view up to date; `note` is what the wait is for, `engine` {isReady, text}. */
  update(note = "", engine = { isReady: true, text: "" }) {
    const { message } = this;
    if (message.role !== "assistant") return;
    const running = message.state === "streaming";
    this.element.setAttribute("aria-busy", String(running));
    this.element.dataset.state = message.state;
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      setText(
        this.reasoningTitle,
        running && !message.content
          ? "Thinking…"
          : `Reasoning · ${count(message.reasoning.trim().split(/\s+/).length)} words`,
      );
      render(this.reasoningText, message.reasoning);
    }
    render(this.text, message.content);
    this.updateCalls();
    const isEmpty = !message.content && !message.reasoning && !message.calls.length;
    this.waiting.hidden = !(running && isEmpty);
    setText(this.waiting, note || "Waiting for the first token…");
    this.error.hidden = message.state !== "failed";
    setText(
      this.error,
      message.error
        ? `${message.error.message}${message.error.code ? ` (${message.error.code})` : ""}`
        : "",
    );
    setText(
      this.figures,
      running
        ? ""
        : [
            message.state === "stopped" ? "stopped" : "",
            message.finish === "length" ? "cut at max tokens" : "",
            figuresText(message.figures),
          ]
            .filter(Boolean)
            .join(" · "),
    );
    this.updateButtons(running, engine);
  }

  /** Only the buttons depend on the engine, once an answer has ended. */
  engineChanged(engine) {
    const { role, state } = this.message;
    if (role === "assistant" && state !== "streaming") this.updateButtons(false, engine);
  }

  updateButtons(running, engine) {
    const { message } = this;
    const ended =
      message.state === "failed" || message.state === "stopped" || message.finish === "length";
    this.goOn.hidden = running || !ended || !canContinue(message);
    this.again.hidden = running || message.calls.length > 0;
    this.copy.hidden = running || !message.content;
    this.goOn.disabled = !engine.isReady;
    setText(this.goOn, engine.isReady ? "Continue" : `Continue when ready (${engine.text})`);
  }

  updateCalls() {
    const { message } = this;
    message.calls.forEach((call, i) => {
      let view = this.calls.children[i];
      if (!view) {
        view = h(
          "div",
          { class: "call" },
          h("span", { class: "role" }),
          h("pre", { tabindex: "0", "aria-label": "Arguments" }),
        );
        this.calls.append(view);
      }
      setText(view.children[0], `Tool call: ${call.name}`);
      setText(view.children[1], pretty(call.arguments));
    });
    if (
      message.state === "done" &&
      message.calls.length &&
      !this.answers &&
      this.actions.isLast(message)
    )
      this.askResults();
    if (this.answers) this.answers.hidden = !this.actions.isLast(message);
  }

  /** A form for the results: the page runs no tools by itself. */
  askResults() {
    const inputs = this.message.calls.map((call) =>
      h("textarea", {
        rows: "2",
        "aria-label": `Result of ${call.name}`,
        placeholder: `Result of ${call.name}`,
      }),
    );
    this.answers = h(
      "form",
      {
        class: "call-answers",
        on: {
          submit: (event) => {
            event.preventDefault();
            this.actions.answerCalls(
              this.message,
              inputs.map((input) => input.value),
            );
          },
        },
      },
      ...inputs,
      h("button", { class: "small primary", text: "Send results" }),
    );
    this.calls.after(this.answers);
  }
}
