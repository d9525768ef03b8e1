// Four small line charts over at most an hour; drawn as SVG, one line per model.

import { byId, h, setText, svg } from "./dom.js";
import { isCrash } from "./timeline.js";
import { bytes, clock, count, rate, seconds } from "./format.js";

const HEIGHT = 96;
const PAD = { left: 0, right: 0, top: 6, bottom: 4 };
const WINDOWS = [
  ["5 min", 300],
  ["15 min", 900],
  ["1 h", 3600],
];
const SERIES = 8;

const CHARTS = [
  { id: "tokens", title: "Tokens per second", field: "tokens_per_s", show: rate, least: 1 },
  { id: "ttft", title: "Time to first token", field: "ttft_s", show: seconds, dots: true },
  { id: "memory", title: "Engine memory", field: "footprint_bytes", show: bytes },
  { id: "restarts", title: "Restarts", field: "restarts", show: count, steps: true, least: 1 },
];

/** A round number at or above `value`, so that the scale does not jitter. */
function niceTop(value, least = 0) {
  const wanted = Math.max(value, least, 1e-9);
  const power = 10 ** Math.floor(Math.log10(wanted));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8, 10])
    if (step * power >= wanted * 0.999) return step * power;
  return 10 * power;
}

/** SVG path through points, broken where samples are missing. */
function linePath(points, gap, steps) {
  let path = "";
  let before = null;
  for (const point of points) {
    if (before === null || point.time - before.time > gap)
      path += `M${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
    else if (steps) path += `H${point.x.toFixed(1)}V${point.y.toFixed(1)}`;
    else path += `L${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
    before = point;
  }
  return path;
}

class Chart {
  constructor(spec, owner) {
    this.spec = spec;
    this.owner = owner;
    this.now = h("span", { class: "chart-now" });
    this.top = h("span", { class: "chart-top", "aria-hidden": "true" });
    this.from = h("span", { "aria-hidden": "true" });
    this.svg = svg("svg", { role: "img", height: HEIGHT, preserveAspectRatio: "none" });
    this.tip = h("div", { class: "chart-tip", "aria-hidden": "true" });
    this.tip.hidden = true;
    this.frame = h("div", { class: "chart-frame" }, this.svg, this.top, this.tip);
    this.element = h(
      "figure",
      { class: "chart", id: `chart-${spec.id}` },
      h("figcaption", {}, h("span", { text: spec.title }), this.now),
      this.frame,
      h(
        "div",
        { class: "chart-axis", "aria-hidden": "true" },
        this.from,
        h("span", { text: "now" }),
      ),
    );
    this.frame.addEventListener("pointermove", (event) => this.hover(event));
    this.frame.addEventListener("pointerleave", () => this.leave());
  }

  draw({ from, to, models, marks }) {
    const width = this.frame.clientWidth || 300;
    const { field, show, least, dots, steps } = this.spec;
    this.width = width;
    this.scale = { from, to };
    this.series = models.map(({ name, color, samples }) => ({
      name,
      color,
      points: samples
        .filter((s) => s.time >= from && s[field] !== null)
        .map((s) => ({ time: s.time, value: s[field] })),
    }));
    const top = niceTop(
      Math.max(0, ...this.series.flatMap((s) => s.points.map((p) => p.value))),
      least,
    );
    const x = (time) => PAD.left + ((time - from) / (to - from)) * (width - PAD.left - PAD.right);
    const y = (value) => HEIGHT - PAD.bottom - (value / top) * (HEIGHT - PAD.top - PAD.bottom);
    const parts = [0, 0.5, 1].map((share) =>
      svg("line", { class: "grid", x1: 0, x2: width, y1: y(top * share), y2: y(top * share) }),
    );
    for (const time of marks)
      if (time > from)
        parts.push(svg("line", { class: "mark", x1: x(time), x2: x(time), y1: 0, y2: HEIGHT }));
    for (const { color, points } of this.series) {
      const placed = points.map((p) => ({ time: p.time, x: x(p.time), y: y(p.value) }));
      if (placed.length)
        parts.push(
          svg("path", {
            class: `series series-${color}`,
            d: linePath(placed, dots ? 120 : 16, steps),
          }),
        );
      if (dots)
        for (const p of placed)
          parts.push(svg("circle", { class: `point point-${color}`, cx: p.x, cy: p.y, r: 1.8 }));
    }
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: -9, x2: -9 });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, this.cursor);
    setText(this.top, show(top));
    setText(this.from, `${seconds(to - from)} ago`);
    const last = this.series.filter((s) => s.points.length).map((s) => s.points.at(-1).value);
    const sum =
      this.spec.id === "ttft" ? last.at(-1) : last.reduce((total, value) => total + value, 0);
    setText(this.now, last.length ? show(sum) : "no data yet");
    const peak = Math.max(0, ...this.series.flatMap((s) => s.points.map((p) => p.value)));
    this.svg.setAttribute(
      "aria-label",
      last.length
        ? `${this.spec.title}: now ${show(sum)}, highest ${show(peak)} in the time shown`
        : `${this.spec.title}: no data yet`,
    );
  }

  hover(event) {
    if (!this.series) return;
    const box = this.frame.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const time = this.scale.from + share * (this.scale.to - this.scale.from);
    const lines = [];
    for (const { name, color, points } of this.series) {
      const near = points.reduce(
        (best, p) =>
          best === null || Math.abs(p.time - time) < Math.abs(best.time - time) ? p : best,
        null,
      );
      if (near && Math.abs(near.time - time) < 30)
        lines.push(
          h("span", { class: `key key-${color}`, text: `${name} ${this.spec.show(near.value)}` }),
        );
    }
    this.cursor.setAttribute("x1", share * this.width);
    this.cursor.setAttribute("x2", share * this.width);
    this.tip.replaceChildren(h("b", { text: clock(time) }), ...lines);
    this.tip.hidden = false;
    this.tip.classList.toggle("left", share > 0.55);
  }

  leave() {
    this.tip.hidden = true;
    this.cursor?.setAttribute("x1", -9);
    this.cursor?.setAttribute("x2", -9);
  }
}

export class Charts {
  constructor(live) {
    this.live = live;
    this.window = 900;
    this.colors = new Map();
    this.charts = CHARTS.map((spec) => new Chart(spec, this));
    byId("charts").append(...this.charts.map((chart) => chart.element));
    this.choices = WINDOWS.map(([text, value]) =>
      h("button", {
        type: "button",
        text,
        "aria-pressed": String(value === this.window),
        on: { click: () => this.choose(value) },
      }),
    );
    byId("chart-window").append(...this.choices);
    live.addEventListener("history", () => this.draw());
    live.addEventListener("events", ({ detail }) => detail.some(isCrash) && this.draw());
    new ResizeObserver(() => this.draw()).observe(byId("charts"));
  }

  choose(value) {
    this.window = value;
    this.choices.forEach((button, i) =>
      button.setAttribute("aria-pressed", String(WINDOWS[i][1] === value)),
    );
    this.draw();
  }

  /** A model keeps its colour for as long as the page lives. */
  color(name) {
    if (!this.colors.has(name)) this.colors.set(name, this.colors.size % SERIES);
    return this.colors.get(name);
  }

  draw() {
    if (document.hidden || !byId("charts").clientWidth) return;
    const to = this.live.now();
    const models = [...this.live.history].map(([name, samples]) => ({
      name,
      samples,
      color: this.color(name),
    }));
    const marks = this.live.events.filter(isCrash).map((e) => e.time);
    for (const chart of this.charts) chart.draw({ from: to - this.window, to, models, marks });
    byId("legend").replaceChildren(
      ...models.map(({ name, color }) => h("li", { class: `key key-${color}`, text: name })),
      ...(marks.some((time) => time > to - this.window)
        ? [h("li", { class: "key key-mark", text: "engine ended" })]
        : []),
    );
  }
}
