// The table of models: one pair of rows each, updated in place so that focus and hover stay.

import { post } from "./api.js";
import { confirmed, toast } from "./dialogs.js";
import { h, setAttribute, setText } from "./dom.js";
import { age, bytes, clock, count, parameters, plural, rate, seconds } from "./format.js";

const RATE_WINDOW_MS = 4000;
const COLUMNS = ["Model", "State", "Engine", "Restarts", "Memory", "Tokens/s", "Active", "Cache"];

export const TONES = {
  ready: "good",
  starting: "busy",
  draining: "busy",
  stopping: "busy",
  backoff: "warn",
  failed: "bad",
  stopped: "idle",
};

/** What each button does; `when` says in which states it makes sense. */
const ACTIONS = [
  {
    name: "Load",
    done: "loaded",
    path: "models/load",
    when: (m) => ["stopped", "failed"].includes(m.state),
  },
  {
    name: "Unload",
    done: "unloaded",
    path: "models/unload",
    when: (m) => m.desired === "up" || !["stopped", "failed"].includes(m.state),
    ask: (m) =>
      m.active + m.queued
        ? [
            `Unload ${m.id}?`,
            `${plural(m.active + m.queued, "request")} will be finished first; no new ones are taken.`,
          ]
        : null,
  },
  {
    name: "Reload",
    done: "reloaded",
    path: "models/reload",
    when: (m) => m.state === "ready",
    ask: (m) =>
      m.active
        ? [`Reload ${m.id}?`, "Running requests are finished, then a new engine takes over."]
        : null,
  },
  {
    name: "Reset",
    done: "failures forgotten",
    path: "models/reset",
    when: (m) => m.state === "failed" || m.state === "backoff" || m.restarts > 0,
  },
  {
    name: "Flush cache",
    done: "cache is on disk",
    path: (m) => `admin/cache/flush?model=${encodeURIComponent(m.id)}`,
    when: (m) => m.state === "ready" && m.progress?.cache.ssd_enabled,
  },
  {
    name: "Drill: kill",
    done: "engine killed",
    path: "drill/kill",
    when: (m) => m.pid !== null,
    danger: true,
    ask: (m) => [
      `Kill the engine of ${m.id}?`,
      `SIGKILL to process ${m.pid}. ${m.active ? `${plural(m.active, "running request")} will fail with engine_died. ` : ""}The supervisor stays up and starts a new engine.`,
    ],
  },
];

/** State as text, with how far a load has come. */
export function stateText(model) {
  if (model.waits_for) return `${model.state} · waiting`;
  if (model.state === "starting" && model.loading) {
    const { stage, fraction, detail } = model.loading;
    const share =
      fraction === null || fraction === undefined ? "" : ` ${Math.round(fraction * 100)} %`;
    return `starting · ${stage}${share}${detail ? ` · ${detail}` : ""}`;
  }
  if (model.state === "backoff" && model.next_try_s !== null)
    return `backoff · next try in ${seconds(Math.max(0, model.next_try_s))}`;
  if (model.state === "failed" && model.failure) {
    const retry = model.failure.retry_in_s;
    return `failed · ${model.failure.cause.replace("_", " ")}${retry === null || retry === undefined ? "" : ` · next try in ${seconds(Math.max(0, retry))}`}`;
  }
  return model.state;
}

/** Why the last engine ended, in a few words. */
function exitText(exit, now) {
  const how = exit.signal ?? `exit ${exit.code}`;
  return `engine #${exit.incarnation} ended: ${how} (${exit.cause}) ${age(exit.at, now)}`;
}

/** Tokens per second over the last seconds, from the engine's counters. */
class Rates {
  constructor() {
    this.seen = new Map();
  }

  of(model) {
    const now = performance.now();
    const total = model.progress?.generated_tokens ?? 0;
    let seen = this.seen.get(model.id);
    if (!seen || seen.incarnation !== model.incarnation || total < seen.points.at(-1).total) {
      seen = { incarnation: model.incarnation, points: [{ now, total }] };
      this.seen.set(model.id, seen);
    }
    seen.points.push({ now, total });
    while (seen.points.length > 2 && seen.points[1].now < now - RATE_WINDOW_MS) seen.points.shift();
    const [first] = seen.points;
    return now > first.now ? ((total - first.total) * 1000) / (now - first.now) : 0;
  }
}

class Row {
  constructor(model, onAct) {
    this.cells = Object.fromEntries(
      COLUMNS.slice(1).map((name) => [
        name,
        { main: h("span", { class: "main" }), sub: h("span", { class: "sub" }) },
      ]),
    );
    this.name = h("span", { class: "main name", text: model.id });
    this.facts = h("span", { class: "sub" });
    this.dot = h("span", { class: "dot", "aria-hidden": "true" });
    this.cells.State.main.classList.add("state");
    this.exit = h("span", { class: "exit" });
    this.buttons = ACTIONS.map((action) => ({
      action,
      element: h("button", {
        type: "button",
        class: action.danger ? "small danger" : "small",
        text: action.name,
        "aria-label": `${action.name} ${model.id}`,
        on: { click: () => onAct(action, this.model) },
      }),
    }));
    const cell = (name) => {
      const { main, sub } = this.cells[name];
      const inner = name === "State" ? [this.dot, main] : [main];
      return h(
        "td",
        {
          role: "cell",
          "data-label": name,
          class: ["State", "Engine"].includes(name) ? "" : "number",
        },
        h("span", { class: "line" }, ...inner),
        sub,
      );
    };
    this.head = h(
      "tr",
      { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, this.name, this.facts),
      ...COLUMNS.slice(1).map(cell),
    );
    this.tail = h(
      "tr",
      { class: "actions", role: "row" },
      h(
        "td",
        { colspan: String(COLUMNS.length), role: "cell" },
        h(
          "div",
          { class: "action-line" },
          this.exit,
          h(
            "div",
            { class: "buttons", role: "group", "aria-label": `Control ${model.id}` },
            ...this.buttons.map((b) => b.element),
          ),
        ),
      ),
    );
    this.element = h("tbody", { role: "rowgroup", "data-model": model.id }, this.head, this.tail);
  }

  put(name, main, sub = "") {
    setText(this.cells[name].main, main);
    setText(this.cells[name].sub, sub);
  }

  update(model, speed, pending, now) {
    this.model = model;
    const { facts, progress } = model;
    setText(
      this.facts,
      facts
        ? [
            facts.architecture,
            parameters(facts.parameters),
            facts.dtype,
            facts.blas ? `${facts.backend}, ${facts.blas}` : facts.backend,
          ]
            .filter(Boolean)
            .join(" · ")
        : model.aliases.join(", "),
    );
    setAttribute(this.element, "data-tone", TONES[model.state] ?? "idle");
    setAttribute(this.element, "data-state", model.state);
    const since = now - model.since;
    this.put("State", stateText(model), `for ${seconds(Math.max(0, Math.floor(since)))}`);
    this.put(
      "Engine",
      model.pid === null ? "no process" : `#${model.incarnation} · pid ${model.pid}`,
      model.load_s ? `loaded in ${seconds(model.load_s)}` : "",
    );
    const causes = Object.entries(model.restarts_by_cause)
      .map(([cause, number]) => `${number} ${cause}`)
      .join(", ");
    this.put("Restarts", count(model.restarts), causes);
    this.put(
      "Memory",
      model.memory_bytes === null
        ? "–"
        : bytes(model.memory_bytes) +
            (model.claimed_bytes ? ` of ${bytes(model.claimed_bytes)}` : ""),
      progress?.mlx_active_bytes ? `MLX ${bytes(progress.mlx_active_bytes)}` : "",
    );
    this.put(
      "Tokens/s",
      model.state === "ready" || model.active ? rate(speed) : "–",
      progress ? `${count(progress.generated_tokens)} in all` : "",
    );
    this.put(
      "Active",
      count(model.active),
      model.queued ? `${count(model.queued)} queued` : "0 queued",
    );
    this.putCache(progress?.cache);
    this.putExit(model, now);
    for (const { action, element } of this.buttons) {
      setAttribute(
        element,
        "disabled",
        !action.when(model) || pending.has(`${model.id} ${action.name}`),
      );
      setAttribute(element, "aria-busy", pending.has(`${model.id} ${action.name}`) ? "true" : null);
    }
  }

  putCache(cache) {
    if (!cache) return this.put("Cache", "–");
    const looked = cache.hits + cache.misses;
    const hits = looked ? ` · ${Math.round((100 * cache.hits) / looked)} % hits` : "";
    const disk = cache.ssd_enabled
      ? `disk ${bytes(cache.ssd_bytes)} of ${bytes(cache.ssd_bytes_max)}`
      : "disk off";
    return this.put(
      "Cache",
      `RAM ${bytes(cache.ram_bytes)}${cache.ram_bytes_max ? ` of ${bytes(cache.ram_bytes_max)}` : ""}`,
      disk + hits,
    );
  }

  putExit(model, now) {
    const text = model.waits_for
      ? `It waits ${model.waits_for}.`
      : model.failure
      ? model.failure.message
      : model.progress?.cache.ssd_trouble
      ? `The cache folder ${model.progress.cache.ssd_trouble}.`
      : model.last_exit
        ? exitText(model.last_exit, now)
        : "";
    setText(this.exit, text);
    const tail = model.last_exit?.stderr_tail ?? [];
    setAttribute(
      this.exit,
      "title",
      model.last_exit
        ? [`${clock(model.last_exit.at)} ${model.last_exit.reason}`, ...tail.slice(-12)].join("\n")
        : null,
    );
  }
}

export class Models {
  constructor(place, live) {
    this.live = live;
    this.rows = new Map();
    this.rates = new Rates();
    this.pending = new Set();
    this.empty = h("p", { class: "empty", text: "No status yet." });
    this.table = h(
      "table",
      { class: "models", role: "table", "aria-labelledby": "models-title" },
      h(
        "thead",
        { role: "rowgroup" },
        h(
          "tr",
          { role: "row" },
          ...COLUMNS.map((name, i) =>
            h("th", {
              scope: "col",
              role: "columnheader",
              class: i < 3 ? "" : "number",
              text: name,
            }),
          ),
        ),
      ),
    );
    this.table.hidden = true;
    place.append(this.empty, this.table);
    live.addEventListener("status", ({ detail }) => this.update(detail.models));
  }

  update(models) {
    const names = new Set(models.map((model) => model.id));
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
    for (const model of models) {
      let row = this.rows.get(model.id);
      if (!row) {
        row = new Row(model, (action, current) => this.act(action, current));
        this.rows.set(model.id, row);
        this.table.append(row.element);
      }
      row.update(model, this.rates.of(model), this.pending, this.live.now());
    }
    this.table.hidden = models.length === 0;
    this.empty.hidden = models.length > 0;
    setText(this.empty, "This server serves no models.");
  }

  async act(action, model) {
    const question = action.ask?.(model);
    if (question && !(await confirmed(question[0], question[1], action.name))) return;
    const name = `${model.id} ${action.name}`;
    this.pending.add(name);
    this.update(this.live.status.models);
    try {
      const path = typeof action.path === "function" ? action.path(model) : action.path;
      await post(path, { model: model.id });
      toast(`${model.id}: ${action.done}`, "good");
    } catch (error) {
      toast(`${action.name} ${model.id}: ${error.message}`, "bad");
    } finally {
      this.pending.delete(name);
      this.live.refresh();
    }
  }
}
