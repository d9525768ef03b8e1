// Shows a model's text with code blocks, lists and emphasis; builds nodes, never parses HTML.
//
// Text is cut into blocks by its source; a block whose source did not change keeps its node, so
// that a long answer costs only its last block while it streams.

import { h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const RULE = /^\s*(?:-{3,}|\*{3,}|_{3,})\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const INLINE =
  /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|\*(?=[^\s*])([^*\n]+?)\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()]{1,1000})\)/s;

// What a model writes must never freeze the page: a longer block is shown as plain text, and so is
// all that follows this many blocks. Code is one text anyway.
const RICH_CHARACTERS_MAX = 20000;
const BLOCKS_MAX = 2000;
const DEPTH_MAX = 8;

/** Cut text into blocks {kind, source, …}; an unclosed fence is a code block that is still open. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") at += 1;
    else if (found.length === BLOCKS_MAX) {
      found.push({ kind: "plain", source: lines.slice(at).join("\n") });
      break;
    } else {
      const start = at;
      const block = take(lines, at);
      at = block.next;
      block.source = lines.slice(start, at).join("\n");
      found.push(block);
    }
  }
  return found;
}

function take(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], next: at + 1 };
  if (RULE.test(line)) return { kind: "rule", next: at + 1 };
  if (ITEM.test(line)) return takeItems(lines, at);
  if (QUOTE.test(line)) return takeWhile(lines, at, "quote", (l) => QUOTE.test(l));
  if (ROW.test(line) && /^\s*\|[\s:|-]+\|\s*$/.test(lines[at + 1] ?? ""))
    return takeWhile(lines, at, "table", (l) => ROW.test(l));
  return takeWhile(
    lines,
    at,
    "paragraph",
    (l, i) =>
      l.trim() !== "" &&
      (i === at || !(FENCE.test(l) || HEADING.test(l) || ITEM.test(l) || QUOTE.test(l))),
  );
}

function takeWhile(lines, at, kind, belongs) {
  let next = at;
  while (next < lines.length && belongs(lines[next], next)) next += 1;
  return { kind, lines: lines.slice(at, next), next };
}

function takeFence(lines, at, [, mark, language]) {
  let next = at + 1;
  const closes = (l) =>
    l.trim().length >= mark.length && l.trim() === mark[0].repeat(l.trim().length);
  while (next < lines.length && !closes(lines[next])) next += 1;
  return {
    kind: "code",
    language,
    code: lines.slice(at + 1, next).join("\n"),
    next: Math.min(next + 1, lines.length),
  };
}

function takeItems(lines, at) {
  const items = [];
  let next = at;
  for (; next < lines.length; next += 1) {
    const item = ITEM.exec(lines[next]);
    if (item)
      items.push({
        depth: Math.min(DEPTH_MAX, Math.floor(item[1].replace(/\t/g, "  ").length / 2)),
        number: item[2],
        text: item[3],
      });
    else if (/^\s+\S/.test(lines[next]) && !FENCE.test(lines[next]))
      items.at(-1).text += `\n${lines[next].trim()}`;
    else break;
  }
  return { kind: "list", items, next };
}

/** Inline text as nodes: code, strong, emphasis, http links; all else is text. */
export function inline(text) {
  const nodes = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    if (found.index) nodes.push(rest.slice(0, found.index));
    if (found[2] !== undefined) nodes.push(h("code", { text: found[2] }));
    else if (found[3] !== undefined) nodes.push(h("strong", {}, ...inline(found[3])));
    else if (found[4] !== undefined) nodes.push(h("em", {}, ...inline(found[4])));
    else
      nodes.push(
        h("a", {
          href: found[6],
          target: "_blank",
          rel: "noopener noreferrer nofollow",
          text: found[5],
        }),
      );
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

function codeBlock({ language, code }) {
  const copy = h("button", {
    type: "button",
    class: "small quiet",
    text: "Copy",
    "aria-label": "Copy code",
  });
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(code);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  return h(
    "div",
    { class: "code-block" },
    h("div", { class: "code-head" }, h("span", { text: language || "code" }), copy),
    h(
      "pre",
      { tabindex: "0", "aria-label": `${language || "code"} block` },
      h("code", { text: code }),
    ),
  );
}

function list({ items }, from = { at: 0 }) {
  const first = items[from.at];
  const place = h(
    first.number === undefined ? "ul" : "ol",
    first.number !== undefined && first.number !== "1" ? { start: first.number } : {},
  );
  while (from.at < items.length && items[from.at].depth >= first.depth) {
    const item = items[from.at];
    if (item.depth > first.depth && place.lastElementChild)
      place.lastElementChild.append(list({ items }, from));
    else {
      place.append(h("li", {}, ...inline(item.text)));
      from.at += 1;
    }
  }
  return place;
}

function table({ lines }) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .map((cell) => cell.trim());
  const [head, , ...body] = lines;
  return h(
    "div",
    { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    h(
      "table",
      { class: "plain" },
      h(
        "thead",
        {},
        h("tr", {}, ...cells(head).map((c) => h("th", { scope: "col" }, ...inline(c)))),
      ),
      h(
        "tbody",
        {},
        ...body.map((line) => h("tr", {}, ...cells(line).map((c) => h("td", {}, ...inline(c))))),
      ),
    ),
  );
}

function node(block) {
  if (block.kind !== "code" && block.source.length > RICH_CHARACTERS_MAX)
    return h("p", { text: block.source });
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      return h(
        "p",
        { class: "heading", role: "heading", "aria-level": String(Math.min(6, block.level + 3)) },
        ...inline(block.text),
      );
    case "rule":
      return h("hr");
    case "list": {
      const from = { at: 0 };
      const parts = [];
      while (from.at < block.items.length) parts.push(list(block, from));
      return parts.length === 1 ? parts[0] : h("div", {}, ...parts);
    }
    case "quote":
      return h("blockquote", {}, ...inline(block.lines.map((l) => QUOTE.exec(l)[1]).join("\n")));
    case "table":
      return table(block);
    case "plain":
      return h("p", { text: block.source });
    default:
      return h("p", {}, ...inline(block.lines.join("\n")));
  }
}

/** Bring `place` up to date with `text`. */
export function render(place, text) {
  const wanted = blocks(text);
  const have = place.shownBlocks ?? [];
  const kept = [];
  wanted.forEach((block, i) => {
    if (have[i]?.source === block.source) kept.push(have[i]);
    else {
      const fresh = { source: block.source, node: node(block) };
      if (have[i]) have[i].node.replaceWith(fresh.node);
      else place.append(fresh.node);
      kept.push(fresh);
    }
  });
  for (const extra of have.slice(wanted.length)) extra.node.remove();
  place.shownBlocks = kept;
}
