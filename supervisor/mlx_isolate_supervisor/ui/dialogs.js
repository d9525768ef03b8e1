// The one dialog (confirmation, API key) and the short messages at the edge of the page.

import { byId, h, setText } from "./dom.js";

const TOAST_MS = 6000;

function open({ title, text, okay, danger = false, field = false, error = "" }) {
  const dialog = byId("dialog");
  setText(byId("dialog-title"), title);
  setText(byId("dialog-text"), text);
  setText(byId("dialog-error"), error);
  const button = byId("dialog-ok");
  setText(button, okay);
  button.classList.toggle("danger", danger);
  byId("dialog-field").hidden = !field;
  const input = byId("dialog-input");
  input.value = "";
  if (dialog.open) dialog.close("cancel");
  dialog.returnValue = "cancel";
  dialog.showModal();
  (field ? input : button).focus();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => resolve(dialog.returnValue === "ok" ? input.value || true : null),
      { once: true },
    );
  });
}

/** Enter in the key field means OK, not the first button of the form. */
byId("dialog-input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("dialog").close("ok");
});

export async function confirmed(title, text, okay) {
  return (await open({ title, text, okay, danger: true })) !== null;
}

/** The key as typed, or null. */
export async function askKey(wrong) {
  const typed = await open({
    title: "API key",
    text: "This server asks for a key. It is kept in this tab until the tab is closed.",
    okay: "Use key",
    field: true,
    error: wrong ? "This key was refused." : "",
  });
  return typeof typed === "string" ? typed.trim() : null;
}

export function toast(text, tone = "info") {
  const item = h("p", { class: "toast", "data-tone": tone, text });
  byId("toasts").append(item);
  setTimeout(() => item.remove(), TOAST_MS);
}
