// One turn over the wire: a request from the conversation, and the answer as it comes.

import { ApiError, ask, serverEvents } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
// Tool calls of one answer; a list with holes up to a wild index would fill the memory.
const CALLS_MAX = 128;
const EMPTY = { content: "", reasoning: "", calls: [] };

/** A new assistant message, before its first token. */
export function blankAnswer(model) {
  return {
    role: "assistant",
    ...structuredClone(EMPTY),
    state: "streaming",
    error: null,
    figures: null,
    model,
  };
}

/** Whether there is text that a model could go on from. */
export function canContinue(message) {
  return message.content !== "" && message.calls.length === 0;
}

function onWire(message) {
  if (message.role !== "assistant")
    return {
      role: message.role,
      content: message.content,
      ...(message.tool_call_id ? { tool_call_id: message.tool_call_id } : {}),
    };
  const calls = message.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return {
    role: "assistant",
    content: message.content || null,
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

/** The request body for the messages so far; throws where the tools are not JSON. */
export function requestBody(messages, settings, goOn) {
  const body = { model: settings.model, stream: true, stream_options: { include_usage: true } };
  body.messages = messages
    .filter((m) => m.role !== "assistant" || m.content || m.calls.length)
    .map(onWire);
  if (settings.system.trim()) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS)
    if (String(settings[name]).trim() !== "") body[name] = Number(settings[name]);
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  if (goOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

function addCalls(message, deltas) {
  for (const delta of deltas) {
    const index = delta.index ?? 0;
    if (!Number.isInteger(index) || index < 0 || index >= CALLS_MAX) continue;
    const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = delta.id;
    if (delta.function?.name) call.name += delta.function.name;
    if (delta.function?.arguments) call.arguments += delta.function.arguments;
  }
}

/** Send, and grow `message` as the answer comes; returns when it has ended, however it did. */
export async function streamAnswer(body, message, { signal, changed, waiting }) {
  const times = { started: performance.now(), first: null, chunks: 0 };
  let finish = null;
  let usage = null;
  let timings = null;
  try {
    const response = await ask("v1/chat/completions", { method: "POST", body, signal });
    for await (const event of serverEvents(response)) {
      if (event.comment !== undefined) {
        waiting(event.comment);
        continue;
      }
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error)
        throw new ApiError(chunk.error.message ?? "The answer failed.", {
          code: chunk.error.code ?? null,
        });
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      if (grow(message, choice.delta ?? {})) {
        times.first ??= performance.now();
        times.chunks += 1;
        changed();
      }
    }
    if (finish === null)
      throw new ApiError("The answer broke off: the connection ended without a reason.", {
        code: "connection_lost",
      });
    message.state = "done";
    message.finish = finish;
  } catch (error) {
    if (error.name === "AbortError") message.state = "stopped";
    else
      Object.assign(message, {
        state: "failed",
        error: { message: describe(error), code: error.code ?? null },
      });
  }
  message.figures = figures(times, usage, timings, message.figures);
  changed();
}

function describe(error) {
  return error instanceof ApiError ? error.message : "The connection to the server was lost.";
}

function grow(message, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  message.content += delta.content ?? "";
  message.reasoning += reasoning;
  if (delta.tool_calls) addCalls(message, delta.tool_calls);
  return Boolean(delta.content || reasoning || delta.tool_calls);
}

/** Token and timing figures; the engine's own where it sent them, else what was seen here. */
function figures(times, usage, timings, before) {
  const now = performance.now();
  const tokens = (usage?.completion_tokens ?? times.chunks) + (before?.tokens ?? 0);
  const span = times.first === null ? 0 : (now - times.first) / 1000;
  return {
    tokens,
    isCounted: usage !== null,
    prompt: usage?.prompt_tokens ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n ?? null,
    perSecond:
      timings?.predicted_per_second ??
      (times.chunks > 1 && span > 0 ? (times.chunks - 1) / span : null),
    firstToken: times.first === null ? null : (times.first - times.started) / 1000,
    total: (now - times.started) / 1000,
  };
}
