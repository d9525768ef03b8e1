// Light, dark, or whatever the system says.

import { byId, setText } from "./dom.js";

const NAME = "mlx-isolate.theme";
const ORDER = ["auto", "light", "dark"];

function stored() {
  const value = localStorage.getItem(NAME);
  return ORDER.includes(value) ? value : "auto";
}

function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = byId("theme-button");
  setText(button, `Theme: ${theme}`);
}

export function startTheme() {
  apply(stored());
  byId("theme-button").addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(stored()) + 1) % ORDER.length];
    localStorage.setItem(NAME, next);
    apply(next);
  });
}
