// Lifecycle steps and request outcomes as lines of text, newest first.

import { byId, h, offer, setText } from "./dom.js";
import { clock, plural, seconds } from "./format.js";

const SHOWN_MAX = 300;
const RECENT_MAX = 8;

const ENDS = ["engine.exited", "engine.lost", "engine.circuit_opened", "engine.cannot_work"];

/** Whether an engine process ended that was wanted. */
export function isCrash(event) {
  return ENDS.includes(event.kind) && event.after !== "stopped";
}

/** What happened, in words. */
export function describe(event) {
  const kind = event.kind;
  if (kind === "request.ended") {
    const parts = [event.path, event.outcome];
    if (event.outcome === "cancelled") parts.push(`while ${event.phase}`);
    if (event.code) parts.push(event.code);
    if (event.status && event.status !== 200) parts.push(`HTTP ${event.status}`);
    parts.push(`after ${seconds(event.duration_s)}`);
    if (event.ttft_s !== null && event.ttft_s !== undefined)
      parts.push(`first token ${seconds(event.ttft_s)}`);
    if (event.events > 1) parts.push(plural(event.events, "event"));
    return parts.join(" · ");
  }
  if (kind === "engine.loading") {
    const share =
      event.fraction === null || event.fraction === undefined
        ? ""
        : ` ${Math.round(event.fraction * 100)} %`;
    return `loading ${event.stage}${share}${event.text ? ` · ${event.text}` : ""}`;
  }
  if (kind.startsWith("engine.")) {
    const parts = [event.before === event.after ? event.after : `${event.before} → ${event.after}`];
    if (ENDS.includes(kind))
      parts.push(
        event.signal ??
          (event.code === null || event.code === undefined ? "" : `exit ${event.code}`),
        event.cause ?? "",
      );
    if (event.after === "ready" && event.pid) parts.push(`pid ${event.pid}`);
    if (event.next_try_s) parts.push(`next try in ${seconds(event.next_try_s)}`);
    parts.push(event.message ?? event.reason ?? "");
    return parts.filter(Boolean).join(" · ");
  }
  if (kind === "drill.kill") return `SIGKILL to pid ${event.pid}`;
  return event.reason ?? event.text ?? "";
}

/** Colour of an event; its words say the same. */
export function toneOf(event) {
  if (event.kind === "request.ended")
    return { answered: "good", cancelled: "idle" }[event.outcome] ?? "bad";
  if (ENDS.includes(event.kind)) return isCrash(event) ? "bad" : "idle";
  if (event.kind.startsWith("drill.") || event.kind === "page.restarted") return "warn";
  return (
    {
      ready: "good",
      failed: "bad",
      backoff: "warn",
      starting: "busy",
      draining: "busy",
      stopping: "busy",
    }[event.after] ?? "idle"
  );
}

function line(event) {
  const detail = event.detail?.length
    ? h(
        "details",
        {},
        h("summary", { text: `last ${plural(event.detail.length, "line")} of output` }),
        h("pre", { tabindex: "0", text: event.detail.join("\n") }),
      )
    : null;
  return h(
    "li",
    { "data-tone": toneOf(event), "data-kind": event.kind },
    h("time", { datetime: new Date(event.time * 1000).toISOString(), text: clock(event.time) }),
    h("span", { class: "event-kind", text: event.kind }),
    h("span", {
      class: "event-model",
      text: event.model ? `${event.model}${event.incarnation ? ` #${event.incarnation}` : ""}` : "",
    }),
    h("span", { class: "event-text", text: describe(event) }, detail),
  );
}

/** Loading steps come by the dozen; of each engine only the last one stays in the list. */
function thinned(events) {
  const kept = [];
  for (const event of events) {
    const before = kept.at(-1);
    if (
      event.kind === "engine.loading" &&
      before?.kind === "engine.loading" &&
      before.model === event.model &&
      before.incarnation === event.incarnation
    )
      kept.pop();
    kept.push(event);
  }
  return kept;
}

export class Timeline {
  constructor(live) {
    this.live = live;
    this.form = byId("events-filter");
    this.form.addEventListener("input", () => this.draw());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    live.addEventListener("events", () => this.schedule());
    live.addEventListener("status", ({ detail }) => {
      const names = detail.models.map((m) => m.id);
      // The model that was looked at may have been removed.
      if (offer(this.form.elements.model, names)) this.draw();
    });
  }

  schedule() {
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.draw();
    }, 100);
  }

  draw() {
    const lifecycle = thinned(this.live.events.filter((e) => !e.kind.startsWith("request.")));
    const recent = lifecycle
      .filter((e) => e.kind !== "engine.loading")
      .slice(-RECENT_MAX)
      .reverse();
    byId("recent-events").replaceChildren(
      ...(recent.length ? recent.map(line) : [h("li", { class: "empty", text: "Nothing yet." })]),
    );
    if (byId("view-events").hidden) return;
    const { kind, model, text } = Object.fromEntries(new FormData(this.form));
    const wanted = text.toLowerCase();
    const found = thinned(this.live.events).filter(
      (e) =>
        (!kind || (kind === "engine" ? !e.kind.startsWith("request.") : e.kind.startsWith(kind))) &&
        (!model || e.model === model) &&
        (!wanted ||
          `${e.kind} ${e.model ?? ""} ${describe(e)} ${e.request_id ?? ""}`
            .toLowerCase()
            .includes(wanted)),
    );
    const shown = found.slice(-SHOWN_MAX).reverse();
    byId("timeline").replaceChildren(
      ...(shown.length
        ? shown.map(line)
        : [h("li", { class: "empty", text: "No event matches." })]),
    );
    setText(
      byId("events-count"),
      found.length > shown.length
        ? `newest ${shown.length} of ${found.length}`
        : plural(found.length, "event"),
    );
  }
}
