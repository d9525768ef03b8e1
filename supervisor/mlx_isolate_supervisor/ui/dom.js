// Builds elements without ever parsing HTML: text stays text.

/** An element. Props: `class`, `text`, `on` ({event: listener}), anything else is an attribute. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value))
        element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set text only where it differs, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set or remove an attribute only where it differs. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

export const byId = (id) => document.getElementById(id);

/** Make a <select> offer `values` besides its first option; whether the choice is another now. */
export function offer(select, values) {
  const have = [...select.options].slice(1).map((option) => option.value);
  if (have.length === values.length && have.every((value, i) => value === values[i])) return false;
  const chosen = select.value;
  select.replaceChildren(
    select.options[0],
    ...values.map((value) => h("option", { value, text: value })),
  );
  select.value = values.includes(chosen) ? chosen : "";
  return select.value !== chosen;
}
