// Conversations and chat settings, kept in this browser only.

const NAME = "mlx-isolate.chat";
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

export class ChatStore {
  constructor(storage = localStorage) {
    this.storage = storage;
    this.conversations = [];
    this.settings = { ...DEFAULTS };
    this.load();
    if (!this.conversations.length) this.conversations = [fresh()];
    this.current = this.conversations.find((c) => c.id === this.currentId) ?? this.conversations[0];
  }

  load() {
    try {
      const kept = JSON.parse(this.storage.getItem(NAME) ?? "{}");
      this.conversations = Array.isArray(kept.conversations) ? kept.conversations : [];
      this.settings = { ...DEFAULTS, ...kept.settings };
      this.currentId = kept.current;
    } catch {
      this.conversations = [];
    }
    // What was running when the page was closed has ended without us.
    for (const message of this.conversations.flatMap((c) => c.messages)) {
      if (message.state === "streaming")
        Object.assign(message, {
          state: "failed",
          error: { message: "The page was closed before the answer ended.", code: "page_closed" },
        });
    }
  }

  /** Write everything; where the browser has no room, the oldest conversations go first. */
  save() {
    this.current.at = Date.now();
    this.conversations = this.conversations.slice(0, CONVERSATIONS_MAX);
    for (;;) {
      try {
        this.storage.setItem(
          NAME,
          JSON.stringify({
            conversations: this.conversations,
            settings: this.settings,
            current: this.current.id,
          }),
        );
        return;
      } catch {
        const oldest = this.conversations.at(-1);
        if (oldest === this.current) return;
        this.conversations.pop();
      }
    }
  }

  start() {
    if (!this.current.messages.length) return;
    this.current = fresh();
    this.conversations.unshift(this.current);
    this.save();
  }

  choose(id) {
    this.current = this.conversations.find((c) => c.id === id) ?? this.current;
    this.save();
  }

  remove() {
    this.conversations = this.conversations.filter((c) => c !== this.current);
    if (!this.conversations.length) this.conversations = [fresh()];
    [this.current] = this.conversations;
    this.save();
  }

  add(message) {
    if (message.role === "user" && !this.current.messages.length)
      this.current.title = message.content.trim().slice(0, 60) || "New conversation";
    this.current.messages.push(message);
    this.save();
    return message;
  }
}
