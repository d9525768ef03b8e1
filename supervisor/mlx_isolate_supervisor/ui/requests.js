// Running requests with a cancel button, and how the last ones ended.

import { getJson, post } from "./api.js";
import { toast } from "./dialogs.js";
import { byId, h, setText } from "./dom.js";
import { bytes, clock, count, plural, seconds } from "./format.js";
import { toneOf } from "./timeline.js";

const POLL_MS = 1000;
const ENDED_MAX = 60;
const RUNNING = [
  "Request",
  "Model",
  "Path",
  "Phase",
  "Age",
  "Waited",
  "First byte",
  "Events",
  "Sent",
  "",
];
const ENDED = [
  "Time",
  "Request",
  "Model",
  "Path",
  "Outcome",
  "Duration",
  "First byte",
  "Events",
  "Sent",
];

function table(label, columns, numbersFrom) {
  const body = h("tbody", { role: "rowgroup" });
  const head = columns.map((name, i) =>
    h(
      "th",
      { scope: "col", role: "columnheader", class: i >= numbersFrom ? "number" : "" },
      name || h("span", { class: "visually-hidden", text: "Actions" }),
    ),
  );
  return {
    body,
    element: h(
      "table",
      { class: "plain", role: "table", "aria-label": label },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...head)),
      body,
    ),
  };
}

function cells(columns, values, numbersFrom) {
  return values.map((value, i) =>
    h(
      "td",
      { role: "cell", "data-label": columns[i], class: i >= numbersFrom ? "number" : "" },
      value,
    ),
  );
}

const shortId = (id) => h("code", { title: id, text: id.length > 18 ? `…${id.slice(-16)}` : id });

export class Requests {
  constructor(live) {
    this.live = live;
    this.running = table("Running requests", RUNNING, 4);
    this.ended = table("Ended requests", ENDED, 5);
    this.none = h("p", { class: "empty", text: "No request is running." });
    this.noneEnded = h("p", { class: "empty", text: "None yet." });
    byId("requests").append(this.none, this.running.element);
    byId("ended").append(this.noneEnded, this.ended.element);
    this.rows = new Map();
    live.addEventListener("events", () => this.drawEnded());
    this.poll();
  }

  async poll() {
    for (;;) {
      if (
        !byId("view-requests").hidden &&
        !document.hidden &&
        this.live.connection.state === "live"
      )
        await this.look();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async look() {
    try {
      this.draw((await getJson("v1/requests")).requests);
    } catch {
      // Tried again at the next tick.
    }
  }

  draw(requests) {
    this.none.hidden = requests.length > 0;
    this.running.element.hidden = requests.length === 0;
    setText(byId("requests-count"), plural(requests.length, "request"));
    const rows = new Map();
    for (const r of requests) {
      // Two clients may choose the same id.
      let key = r.id;
      while (rows.has(key)) key += " ";
      const row = this.rows.get(key) ?? this.row(r);
      const texts = [
        r.model ?? "–",
        r.path,
        r.phase,
        seconds(r.age_s),
        seconds(r.queued_s),
        r.ttft_s === null ? "–" : seconds(r.ttft_s),
        count(r.events),
        bytes(r.bytes_out),
      ];
      texts.forEach((text, i) => setText(row.children[i + 1], text));
      rows.set(key, row);
    }
    for (const [id, row] of this.rows) if (!rows.has(id)) row.remove();
    for (const row of rows.values()) if (!row.parentNode) this.running.body.append(row);
    this.rows = rows;
  }

  row(request) {
    const cancel = h("button", {
      type: "button",
      class: "small danger",
      text: "Cancel",
      "aria-label": `Cancel request ${request.id}`,
      on: { click: () => this.cancel(request.id, cancel) },
    });
    return h(
      "tr",
      { role: "row", "data-request": request.id },
      ...cells(RUNNING, [shortId(request.id), "", "", "", "", "", "", "", "", cancel], 4),
    );
  }

  async cancel(id, button) {
    button.disabled = true;
    try {
      await post(`v1/requests/${encodeURIComponent(id)}/cancel`);
      toast(`Cancelled ${id}`, "good");
    } catch (error) {
      button.disabled = false;
      toast(error.message, "bad");
    }
    this.look();
  }

  drawEnded() {
    if (byId("view-requests").hidden) return;
    const ended = this.live.events
      .filter((e) => e.kind === "request.ended")
      .slice(-ENDED_MAX)
      .reverse();
    this.noneEnded.hidden = ended.length > 0;
    this.ended.element.hidden = ended.length === 0;
    this.ended.body.replaceChildren(
      ...ended.map((e) => {
        const outcome = [e.outcome, e.outcome === "cancelled" ? `(${e.phase})` : e.code]
          .filter(Boolean)
          .join(" ");
        const values = [
          clock(e.time),
          shortId(e.request_id),
          e.model ?? "–",
          e.path,
          outcome,
          seconds(e.duration_s),
          e.ttft_s === null ? "–" : seconds(e.ttft_s),
          count(e.events),
          bytes(e.bytes_out),
        ];
        return h("tr", { role: "row", "data-tone": toneOf(e) }, ...cells(ENDED, values, 5));
      }),
    );
  }
}
