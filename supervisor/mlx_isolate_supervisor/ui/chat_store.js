// Conversations and chat settings, kept in this browser only.
//
// Each conversation has a key of its own, so that two tabs do not overwrite each other's; which
// one is open belongs to the tab.

const PREFIX = "mlx-isolate.chat.";
const SETTINGS = "mlx-isolate.chat-settings";
const OPEN = "mlx-isolate.chat-open";
const CONVERSATIONS_MAX = 50;

export const DEFAULTS = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  tools: "",
};

function fresh() {
  return {
    id: crypto.randomUUID?.() ?? String(Math.random()).slice(2),
    title: "New conversation",
    at: Date.now(),
    messages: [],
  };
}

function parsed(text, fallback) {
  try {
    return JSON.parse(text) ?? fallback;
  } catch {
    return fallback;
  }
}

/** What was running when its page was closed has ended without us. */
function settled(conversation) {
  for (const message of conversation.messages) {
    if (message.state !== "streaming") continue;
    message.state = "failed";
    message.error = {
      message: "The page was closed before the answer ended.",
      code: "page_closed",
    };
  }
  return conversation;
}

export class ChatStore {
  constructor() {
    this.settings = { ...DEFAULTS, ...parsed(localStorage.getItem(SETTINGS), {}) };
    const wanted = sessionStorage.getItem(OPEN);
    const kept = this.stored();
    this.current = settled(kept.find((c) => c.id === wanted) ?? kept[0] ?? fresh());
  }

  /** All conversations with the open one as this tab has it, newest first. */
  get conversations() {
    const others = this.stored().filter((c) => c.id !== this.current.id);
    return [this.current, ...others].sort((a, b) => b.at - a.at);
  }

  stored() {
    return Object.keys(localStorage)
      .filter((key) => key.startsWith(PREFIX))
      .map((key) => parsed(localStorage.getItem(key), null))
      .filter((c) => Array.isArray(c?.messages))
      .sort((a, b) => b.at - a.at);
  }

  /** Write the open conversation; where there is no room, the oldest other one goes first. */
  save() {
    if (!this.current.messages.length) {
      this.forget(this.current);
      return;
    }
    this.current.at = Date.now();
    sessionStorage.setItem(OPEN, this.current.id);
    const others = this.stored().filter((c) => c.id !== this.current.id);
    while (others.length >= CONVERSATIONS_MAX) this.forget(others.pop());
    for (;;) {
      try {
        localStorage.setItem(PREFIX + this.current.id, JSON.stringify(this.current));
        return;
      } catch {
        if (!others.length) return;
        this.forget(others.pop());
      }
    }
  }

  saveSettings() {
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
    } catch {
      // No room: the settings hold for as long as the page does.
    }
  }

  forget(conversation) {
    localStorage.removeItem(PREFIX + conversation.id);
  }

  start() {
    this.current = fresh();
  }

  choose(id) {
    this.current = settled(this.conversations.find((c) => c.id === id) ?? this.current);
    sessionStorage.setItem(OPEN, this.current.id);
  }

  remove() {
    this.forget(this.current);
    this.current = settled(this.stored()[0] ?? fresh());
    sessionStorage.setItem(OPEN, this.current.id);
  }

  add(message) {
    if (message.role === "user" && !this.current.messages.length)
      this.current.title = message.content.trim().slice(0, 60) || "New conversation";
    this.current.messages.push(message);
    this.save();
    return message;
  }
}
