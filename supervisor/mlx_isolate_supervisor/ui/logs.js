// The log as it is written, with a filter; at most as many lines as the server keeps.

import { ask, pieces } from "./api.js";
import { byId, h, offer, setText } from "./dom.js";
import { plural } from "./format.js";

const LINES_MAX = 2000;
const BACKOFF_MS = [500, 1000, 2000, 5000];

/** Level of a line, for its colour; the line itself carries the word. */
function levelOf(text) {
  const found = /\b(CRITICAL|ERROR|WARNING|DEBUG)\b/.exec(text.slice(0, 60));
  return found ? { CRITICAL: "bad", ERROR: "bad", WARNING: "warn", DEBUG: "idle" }[found[1]] : "";
}

export class Logs {
  constructor(live) {
    this.live = live;
    this.place = byId("log");
    this.lines = h("div");
    this.place.append(this.lines);
    // Where it was scrolled to last, by the page or by hand.
    this.top = 0;
    // Lines have their height only once they are in sight, so the end moves while it is shown.
    new ResizeObserver(() => this.scroll()).observe(this.lines);
    this.form = byId("logs-filter");
    this.rest = "";
    this.waiting = [];
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.elements.model.addEventListener("change", () => this.restart());
    this.form.elements.text.addEventListener("input", () => this.filter());
    this.form.elements.wrap.addEventListener("change", ({ target }) =>
      this.place.classList.toggle("nowrap", !target.checked),
    );
    this.form.elements.follow.addEventListener("change", () => this.scroll());
    this.place.addEventListener("scroll", () => this.scrolled());
    window.addEventListener("pagehide", () => this.abort?.abort());
    live.addEventListener("status", ({ detail }) => {
      const names = detail.models.map((m) => m.id);
      // The model that was looked at may have been removed.
      if (offer(this.form.elements.model, names) && this.isOpen) this.restart();
    });
    live.addEventListener("connection", ({ detail }) => this.connectionChanged(detail.state));
  }

  /** The log goes with the page's own stream: away in a hidden tab, back when it is looked at. */
  connectionChanged(state) {
    if (state === "live" && this.isOpen) this.restart();
    if (state === "paused") this.abort?.abort();
  }

  /** Called when the view is shown or hidden; nothing is read while it is hidden. */
  show(visible) {
    this.isOpen = visible;
    if (visible) this.restart();
    else this.abort?.abort();
  }

  restart() {
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    this.follow(abort.signal);
  }

  async follow(signal) {
    for (let failures = 0; !signal.aborted; failures += 1) {
      try {
        const model = this.form.elements.model.value;
        // Not in the path, where a browser would take a name with dots for a way up.
        const only = model ? `&model=${encodeURIComponent(model)}` : "";
        const response = await ask(`logs/stream?lines=${LINES_MAX}${only}`, { signal });
        this.clear();
        failures = 0;
        for await (const piece of pieces(response)) {
          if (signal.aborted) return;
          this.take(piece);
        }
      } catch (error) {
        if (signal.aborted) return;
        setText(byId("logs-count"), `${error.message} Trying again.`);
      }
      await new Promise((resolve) =>
        setTimeout(resolve, BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)]),
      );
    }
  }

  clear() {
    this.rest = "";
    this.waiting = [];
    this.lines.replaceChildren();
    this.tell();
  }

  take(piece) {
    const lines = (this.rest + piece).split("\n");
    this.rest = lines.pop();
    this.waiting.push(...lines);
    if (this.waiting.length > LINES_MAX) this.waiting.splice(0, this.waiting.length - LINES_MAX);
    this.timer ??= setTimeout(() => this.flush(), 50);
  }

  flush() {
    this.timer = null;
    const wanted = this.form.elements.text.value.toLowerCase();
    const fresh = this.waiting.map((text) => {
      const line = h("div", { text, "data-tone": levelOf(text) || null });
      line.hidden = wanted !== "" && !text.toLowerCase().includes(wanted);
      return line;
    });
    this.waiting = [];
    this.lines.append(...fresh);
    while (this.lines.childElementCount > LINES_MAX) this.lines.firstElementChild.remove();
    this.tell();
    this.scroll();
  }

  filter() {
    const wanted = this.form.elements.text.value.toLowerCase();
    for (const line of this.lines.children)
      line.hidden = wanted !== "" && !line.textContent.toLowerCase().includes(wanted);
    this.tell();
    this.scroll();
  }

  tell() {
    const total = this.lines.childElementCount;
    const shown = this.form.elements.text.value
      ? [...this.lines.children].filter((line) => !line.hidden).length
      : total;
    setText(
      byId("logs-count"),
      shown === total ? plural(total, "line") : `${shown} of ${plural(total, "line")}`,
    );
  }

  scroll() {
    if (!this.form.elements.follow.checked) return;
    this.place.scrollTop = this.place.scrollHeight;
    this.top = this.place.scrollTop;
  }

  /** Scrolling up by hand stops following; back at the end it goes on. */
  scrolled() {
    if (!this.lines.childElementCount) return;
    const { scrollTop, scrollHeight, clientHeight } = this.place;
    const { follow } = this.form.elements;
    if (scrollHeight - scrollTop - clientHeight < 24) follow.checked = true;
    else if (scrollTop < this.top - 4) follow.checked = false;
    this.top = scrollTop;
  }
}
