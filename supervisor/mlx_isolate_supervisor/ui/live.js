// The page's connection: follows /events, polls /status and /history, survives restarts and sleep.

import { ask, getJson, serverEvents } from "./api.js";

const STATUS_MS = 1000;
const HIDDEN_STATUS_MS = 15000;
const HISTORY_MS = 5000;
const HISTORY_KEPT_S = 3700;
const BACKOFF_MS = [250, 500, 1000, 2000, 4000, 8000];
// The server writes a comment every 15 s; a stream that is silent for longer is dead, whatever the
// network stack believes (a laptop that slept).
const SILENT_MS = 40000;
const EVENTS_MAX = 1200;
const FLUSH_MS = 50;
// A tab that is hidden for longer lets its stream go.
const HIDDEN_STREAM_MS = 10000;

/** Emits `status`, `event`, `events` (a batch), `history` and `connection`. */
export class Live extends EventTarget {
  constructor() {
    super();
    this.status = null;
    this.statusAt = 0;
    this.events = [];
    this.history = new Map();
    this.connection = { state: "connecting", detail: "" };
    this.lastId = null;
    this.epoch = null;
    this.failures = 0;
    this.newestSample = 0;
    // The server's clock less this one, seconds: times that the server tells are on its clock.
    this.skew = 0;
    this.wake = () => {};
    this.heard = Date.now();
  }

  start() {
    this.follow();
    this.poll();
    this.pollHistory();
    setInterval(() => this.check(), 1000);
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
    window.addEventListener("online", () => this.hurry());
    // A page in the back/forward cache would hold its connection for as long as it is there.
    window.addEventListener("pagehide", () => this.suspend());
    window.addEventListener("pageshow", (event) => event.persisted && this.resume());
  }

  /** Seconds since the epoch by the server's clock. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  /** A browser has six connections to a server for all its tabs: hidden ones give theirs back. */
  visibilityChanged() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.suspend(), HIDDEN_STREAM_MS);
    else if (this.suspended) this.resume();
    else this.hurry();
  }

  suspend() {
    this.suspended = true;
    this.abort?.abort();
  }

  /** Follow again; what happened meanwhile comes by the last event id. */
  resume() {
    this.suspended = false;
    this.reconnect();
  }

  /** Something suggests that things changed: look now instead of at the next tick. */
  hurry() {
    this.refresh();
    if (this.connection.state !== "live") this.wake();
    else if (Date.now() - this.heard > SILENT_MS / 2) this.reconnect();
  }

  /** Drop the stream and connect again at once. */
  reconnect() {
    this.failures = 0;
    this.abort?.abort();
    this.wake();
  }

  check() {
    const now = Date.now();
    // A clock that was set back would hide a dead stream for as long.
    this.heard = Math.min(this.heard, now);
    if (this.connection.state === "live" && now - this.heard > SILENT_MS) this.reconnect();
    if (this.connection.state === "offline") this.announce("offline");
  }

  announce(state, detail = this.connection.detail) {
    this.connection = { state, detail, retryAt: this.retryAt, statusAt: this.statusAt };
    this.dispatchEvent(new CustomEvent("connection", { detail: this.connection }));
  }

  async follow() {
    for (;;) {
      this.abort = new AbortController();
      try {
        const extra = this.lastId ? { "Last-Event-ID": this.lastId } : {};
        const path = this.lastId ? "events" : "events?replay=600";
        const response = await ask(path, { signal: this.abort.signal, extra });
        this.heard = Date.now();
        this.failures = 0;
        this.announce("live", "");
        this.refresh();
        await this.read(response);
        throw new Error("The server closed the connection.");
      } catch (error) {
        if (this.suspended) {
          this.announce("paused", "");
          await this.pause();
          continue;
        }
        const needsKey = error.status === 401;
        const wait =
          BACKOFF_MS[Math.min(this.failures, BACKOFF_MS.length - 1)] * (0.8 + 0.4 * Math.random());
        this.failures += 1;
        this.retryAt = Date.now() + wait;
        this.announce(needsKey ? "locked" : "offline", error.message);
        await this.pause(needsKey ? null : wait);
      }
    }
  }

  /** Wait for `ms`, or (null) until something wakes the connection. */
  pause(ms = null) {
    return new Promise((resolve) => {
      const timer = ms === null ? null : setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async read(response) {
    let batch = [];
    let timer = null;
    const flush = () => {
      clearTimeout(timer);
      timer = null;
      if (!batch.length) return;
      const fresh = batch;
      batch = [];
      this.events = [...this.events, ...fresh].slice(-EVENTS_MAX);
      this.dispatchEvent(new CustomEvent("events", { detail: fresh }));
      if (fresh.some((event) => event.kind.startsWith("engine."))) this.refresh();
    };
    for await (const message of serverEvents(response)) {
      this.heard = Date.now();
      if (message.comment !== undefined) continue;
      const data = JSON.parse(message.data);
      if (message.event === "hello") {
        if (this.epoch && this.epoch !== data.epoch)
          batch.push(note("page.restarted", "The supervisor was started again.", this.now()));
        this.epoch = data.epoch;
      } else if (message.event === "gap") {
        batch.push(
          note(
            "page.gap",
            `${data.missed} events were missed while this page was away.`,
            this.now(),
          ),
        );
      } else {
        this.lastId = message.id ?? this.lastId;
        batch.push(data);
      }
      // Not put off by more events: a stream that never pauses is shown all the same.
      timer ??= setTimeout(flush, FLUSH_MS);
    }
    flush();
  }

  async refresh() {
    if (this.refreshing) {
      this.again = true;
      return;
    }
    this.refreshing = true;
    try {
      const status = await getJson("status");
      this.status = status;
      this.statusAt = Date.now();
      this.skew = status.supervisor.time - this.statusAt / 1000;
      this.dispatchEvent(new CustomEvent("status", { detail: status }));
    } catch (error) {
      // The event stream notices by itself; what is shown stays, marked with its age. But for a key
      // that is right no longer: the stream was opened while it was, and would go on, and with it
      // the questions. Without it one is asked, and then waited for.
      if (error.status === 401) this.abort?.abort();
    } finally {
      this.refreshing = false;
      if (this.again) {
        this.again = false;
        setTimeout(() => this.refresh(), 100);
      }
    }
  }

  async poll() {
    for (;;) {
      await new Promise((resolve) =>
        setTimeout(resolve, document.hidden ? HIDDEN_STATUS_MS : STATUS_MS),
      );
      if (this.connection.state === "live") await this.refresh();
    }
  }

  async pollHistory() {
    for (;;) {
      if (!document.hidden && this.connection.state === "live") await this.fetchHistory();
      await new Promise((resolve) => setTimeout(resolve, this.newestSample ? HISTORY_MS : 1000));
    }
  }

  async fetchHistory() {
    try {
      const { now, fields, models } = await getJson(`history?since=${this.newestSample}`);
      if (now < this.newestSample) {
        // The server's clock was set back, and it has forgotten what lies ahead of it now.
        this.newestSample = 0;
        this.history.clear();
        return;
      }
      const oldest = now - HISTORY_KEPT_S;
      for (const [model, rows] of Object.entries(models)) {
        const samples = rows.map((row) =>
          Object.fromEntries(fields.map((field, i) => [field, row[i]])),
        );
        const kept = (this.history.get(model) ?? []).filter((sample) => sample.time > oldest);
        this.history.set(model, [...kept, ...samples]);
        if (samples.length) this.newestSample = Math.max(this.newestSample, samples.at(-1).time);
      }
      this.dispatchEvent(new CustomEvent("history"));
    } catch {
      // Tried again at the next tick.
    }
  }
}

function note(kind, reason, time) {
  return { kind, reason, time, model: null, id: null };
}
