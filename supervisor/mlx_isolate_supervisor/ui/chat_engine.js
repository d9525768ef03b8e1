// The chat's line about its model: which one, how its engine is, and the button that kills it.

import { post } from "./api.js";
import { confirmed, toast } from "./dialogs.js";
import { h, offer, setAttribute, setText } from "./dom.js";
import { stateText, TONES } from "./models.js";

const AWAY = {
  connecting: "connecting",
  locked: "API key needed",
  offline: "server not reachable",
  paused: "paused",
};

/** Calls `changed` whenever what `state()` says may have changed. */
export class ChatEngine {
  constructor(live, store, changed) {
    this.live = live;
    this.store = store;
    this.changed = changed;
    this.select = h(
      "select",
      { "aria-label": "Model", on: { change: () => this.choose(this.select.value) } },
      h("option", { value: "", text: "no model" }),
    );
    this.text = h("span", { class: "engine-text" });
    this.killButton = h("button", {
      type: "button",
      class: "small danger",
      text: "Kill",
      "aria-label": "Kill the engine of this model",
      on: { click: () => this.kill() },
    });
    const dot = h("span", { class: "dot", "aria-hidden": "true" });
    this.element = h("div", { class: "chat-engine" }, this.select, dot, this.text, this.killButton);
    live.addEventListener("status", ({ detail }) => this.offerModels(detail.models));
    live.addEventListener("connection", () => this.show());
  }

  choose(model) {
    this.store.settings.model = model;
    this.store.saveSettings();
    this.show();
  }

  offerModels(models) {
    const names = models.map((model) => model.id);
    offer(this.select, names);
    this.select.options[0].hidden = names.length > 0;
    const wanted = this.store.settings.model;
    if (!names.includes(wanted) && names.length) [this.store.settings.model] = names;
    this.select.value = names.length ? this.store.settings.model : "";
    this.show();
  }

  /** Whether a request has a prospect: a model that is down is loaded by the request itself. */
  state() {
    const { state } = this.live.connection;
    if (state !== "live")
      return { isReady: false, text: AWAY[state], tone: state === "offline" ? "bad" : "warn" };
    const model = this.live.status?.models.find((each) => each.id === this.store.settings.model);
    if (!model) return { isReady: false, text: "no model", tone: "idle" };
    const isReady = ["ready", "stopped"].includes(model.state);
    return { isReady, text: stateText(model), tone: TONES[model.state] ?? "idle", model };
  }

  show() {
    const { text, model } = this.state();
    setText(this.text, model?.pid ? `${text} · #${model.incarnation} · pid ${model.pid}` : text);
    setAttribute(this.killButton, "disabled", !model?.pid);
    this.changed();
  }

  async kill() {
    const { model } = this.state();
    const sure =
      model &&
      (await confirmed(
        `Kill the engine of ${model.id}?`,
        `SIGKILL to process ${model.pid}. Running answers will break off; this page and the server stay up.`,
        "Kill engine",
      ));
    if (!sure) return;
    try {
      await post("drill/kill", { model: model.id });
    } catch (error) {
      toast(error.message, "bad");
    }
  }
}
