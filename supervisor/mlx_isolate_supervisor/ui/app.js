// Puts the page together: views, connection, key.

import { apiKey } from "./api.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { askKey } from "./dialogs.js";
import { byId, setText } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { Live } from "./live.js";
import { Logs } from "./logs.js";
import { Models } from "./models.js";
import { Requests } from "./requests.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

const VIEWS = ["overview", "requests", "events", "logs", "chat"];
const wide = matchMedia("(min-width: 1240px)");

const live = new Live();
startTheme();
new Models(byId("models"), live);
const charts = new Charts(live);
const timeline = new Timeline(live);
const requests = new Requests(live);
const logs = new Logs(live);
const chat = new Chat(byId("view-chat"), live);

/** Show the view that the address names; on wide screens the chat is always beside it. */
function route() {
  const named = location.hash.slice(1);
  let view = VIEWS.includes(named) ? named : "overview";
  if (view === "chat" && wide.matches) view = "overview";
  for (const name of VIEWS)
    byId(`view-${name}`).hidden = name !== view && !(name === "chat" && wide.matches);
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  logs.show(view === "logs");
  charts.draw();
  timeline.draw();
  requests.drawEnded();
}

function showConnection({ state, detail, retryAt, statusAt }) {
  const chip = byId("connection");
  const wait = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  const old = statusAt
    ? ` · shown: ${seconds(Math.round((Date.now() - statusAt) / 1000))} old`
    : "";
  const text =
    { live: "live", connecting: "connecting", locked: "API key needed", paused: "paused" }[state] ??
    `reconnecting${wait ? ` in ${wait} s` : ""}${old}`;
  setText(chip, text);
  chip.dataset.tone =
    { live: "good", connecting: "busy", locked: "warn", paused: "idle" }[state] ?? "bad";
  chip.title = detail;
  document.body.classList.toggle("stale", state === "offline" || state === "locked");
}

function showSupervisor({ supervisor }) {
  const parts = [
    `supervisor ${supervisor.version}`,
    `pid ${supervisor.pid}`,
    `up ${seconds(Math.floor(supervisor.uptime_s))}`,
    bytes(supervisor.memory_bytes),
  ];
  if (supervisor.memory_budget_bytes)
    parts.push(
      `engines: ${bytes(supervisor.memory_claimed_bytes)} of ${bytes(supervisor.memory_budget_bytes)} reserved`,
    );
  setText(byId("supervisor-line"), parts.join(" · "));
}

let asking = false;
async function askForKey() {
  if (asking) return;
  asking = true;
  const typed = await askKey(apiKey.get() !== "");
  asking = false;
  byId("key-button").hidden = false;
  if (typed === null) return;
  apiKey.set(typed);
  live.reconnect();
}

window.addEventListener("hashchange", route);
wide.addEventListener("change", route);
window.addEventListener("key-needed", askForKey);
byId("key-button").addEventListener("click", askForKey);
live.addEventListener("connection", ({ detail }) => showConnection(detail));
live.addEventListener("status", ({ detail }) => showSupervisor(detail));
byId("key-button").hidden = !apiKey.get();
route();
live.start();

// For the page's own tests, and for whoever looks at it from the console.
window.mlxIsolate = { live, chat };
