// The chat's settings: system prompt, sampling, tools; empty fields leave the choice to the engine.

import { h } from "./dom.js";
import { DEFAULTS } from "./chat_store.js";

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];

/** A folded form that writes what is typed into the store. */
export class ChatSettings {
  constructor(store) {
    this.store = store;
    this.element = h(
      "details",
      { class: "chat-settings" },
      h("summary", { text: "System prompt, sampling, tools" }),
      this.area("system", "System prompt", { rows: "2" }),
      h("div", { class: "fields" }, ...FIELDS.map((field) => this.number(...field))),
      this.area("tools", "Tools (JSON array, as in the API)", {
        rows: "3",
        spellcheck: "false",
        class: "mono",
      }),
      h("button", {
        type: "button",
        class: "small",
        text: "Back to defaults",
        on: { click: () => this.reset() },
      }),
    );
    for (const field of this.fields()) field.value = store.settings[field.name];
  }

  fields() {
    return this.element.querySelectorAll("[name]");
  }

  area(name, label, attributes) {
    return h(
      "label",
      { class: "wide" },
      label,
      h("textarea", { name, ...attributes, ...this.listen(name) }),
    );
  }

  number(name, label, limits) {
    const attributes = { type: "number", name, placeholder: "default", ...limits };
    return h("label", {}, label, h("input", { ...attributes, ...this.listen(name) }));
  }

  listen(name) {
    return { on: { input: ({ target }) => this.set(name, target.value) } };
  }

  set(name, value) {
    this.store.settings[name] = value;
    this.store.saveSettings();
  }

  reset() {
    this.store.settings = { ...DEFAULTS, model: this.store.settings.model };
    this.store.saveSettings();
    for (const field of this.fields()) field.value = "";
  }
}
